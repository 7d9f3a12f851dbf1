// A list of kernels that are values, known at compile time, and the search in it at run time.
#pragma once

#include <array>
#include <stdexcept>
#include <utility>

namespace flash_cute {

template <class Kernel, int kMost>
struct KernelList {
  std::array<Kernel, kMost> kernels{};
  int count = 0;

  constexpr Kernel const* begin() const { return kernels.data(); }
  constexpr Kernel const* end() const { return begin() + count; }

  // Unless it has no tile, or the list has it already.
  constexpr void add(Kernel const& kernel) {
    for (Kernel const& other : *this) {
      if (other == kernel) return;
    }
    if (kernel.tile.block_m > 0) kernels[count++] = kernel;
  }
};

// Calls visitor.operator()<kernel>() for this one of the list, which has it, or for all. List::kKernels is a
// KernelList.
template <class List, int kIndex = 0, class Kernel, class Visitor>
auto visit_kernel(Kernel const& wanted, Visitor&& visitor) {
  if constexpr (kIndex + 1 < List::kKernels.count) {
    if (wanted != List::kKernels.kernels[kIndex]) return visit_kernel<List, kIndex + 1>(wanted, visitor);
  } else if (wanted != List::kKernels.kernels[kIndex]) {
    throw std::logic_error("flash_cute: the plan names a kernel that its instance does not compile");
  }
  return visitor.template operator()<List::kKernels.kernels[kIndex]>();
}
template <class List, class Visitor>
void visit_kernels(Visitor&& visitor) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    (visitor.template operator()<List::kKernels.kernels[kIndices]>(), ...);
  }(std::make_integer_sequence<int, List::kKernels.count>{});
}

}  // namespace flash_cute
