#include "overlap.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <span>

namespace flash_cute {
namespace {

// Equal steps through memory, from none of them to the most.
struct Steps {
  int64_t size, most;
};

// Those of two tensors of up to five dimensions, and of their elements' bytes.
struct StepList {
  static constexpr size_t kMost = 12;

  std::array<Steps, kMost> items;
  size_t count = 0;

  void add(int64_t size, int64_t most) {
    if (size > 0 && most > 0) items[count++] = {size, most};
  }
  // The largest first.
  void sort() { std::ranges::sort(items.begin(), items.begin() + count, std::greater{}, &Steps::size); }
  std::span<Steps const> from(size_t first) const { return {items.data() + first, count - first}; }
};

int64_t reach_of(std::span<Steps const> list) {
  int64_t reach = 0;
  for (auto const& [size, most] : list) reach += size * most;
  return reach;
}

// Where the elements of a tensor lie. Strides are never negative.
struct Memory {
  uintptr_t begin;
  IntHeaderOnlyArrayRef sizes, strides;
  int64_t element_bytes;

  bool is_empty() const { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }
  bool repeats() const {
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      if (sizes[dim] > 1 && strides[dim] == 0) return true;
    }
    return false;
  }
  int64_t bytes() const {  // to the end of the last element
    int64_t elements = 1;
    for (size_t dim = 0; dim < sizes.size(); ++dim) elements += (sizes[dim] - 1) * strides[dim];
    return elements * element_bytes;
  }
  bool meets(Memory const& other) const {
    return !is_empty() && !other.is_empty() && begin < other.begin + other.bytes() &&
           other.begin < begin + bytes();
  }
  // To all elements, and to each byte of them, in units of so many bytes.
  void add_steps(StepList& list, int64_t unit) const {
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      list.add(strides[dim] * element_bytes / unit, sizes[dim] - 1);
    }
    list.add(1, element_bytes / unit - 1);
  }
};

// Do some of the steps, of a sorted list, lead to a place? The search through the numbers of each is short
// where all smaller steps together reach little further than one, as those of a sliced tensor do.
class Search {
 public:
  explicit Search(StepList const& list) : list_(list) {
    for (size_t i = list.count; i-- > 0;) {
      auto const& [size, most] = list.items[i];
      below_[i] = {below_[i + 1].reach + size * most, std::gcd(below_[i + 1].divisor, size)};
    }
  }

  // By steps from the first on. True, too, where the search is given up.
  bool leads_to(int64_t place, size_t first = 0) {
    auto const& [reach, divisor] = below_[first];
    if (place < 0 || place > reach || (divisor > 0 && place % divisor != 0)) return false;
    if (place == 0) return true;
    auto const& [size, most] = list_.items[first];
    int64_t const beyond = larger<int64_t>(0, place - below_[first + 1].reach);
    for (int64_t count = std::min(most, place / size); count >= ceil_div(beyond, size); --count) {
      if (--tries_ < 0 || leads_to(place - count * size, first + 1)) return true;
    }
    return false;
  }

 private:
  struct Below {
    int64_t reach = 0, divisor = 0;  // of these steps and all smaller ones
  };
  StepList const& list_;
  std::array<Below, StepList::kMost + 1> below_{};
  int tries_ = 1 << 15;
};

// Are two elements of a tensor in one place? Then one lies some steps of a size from the other, none of a
// larger one, and smaller ones lead back.
bool overlaps_itself(Memory const& memory) {
  if (memory.is_empty()) return false;
  if (memory.repeats()) return true;
  StepList list;
  memory.add_steps(list, memory.element_bytes);
  list.sort();
  for (size_t i = 0; i < list.count; ++i) {
    auto const& [size, most] = list.items[i];
    auto const smaller_ones = list.from(i + 1);
    int64_t const reach = reach_of(smaller_ones);
    if (size > reach) continue;
    StepList both;  // one step is taken
    both.add(size, most - 1);
    for (Steps const& steps : smaller_ones) both.add(steps.size, 2 * steps.most);
    both.sort();
    if (Search(both).leads_to(reach - size)) return true;
  }
  return false;
}

// Are elements of both in one place? Then steps of a lead there from the first byte of a, and those of b lead
// on to the last one of b.
bool overlap(Memory const& a, Memory const& b) {
  int64_t const distance = int64_t(b.begin - a.begin);
  bool const aligned = a.element_bytes == b.element_bytes && distance % a.element_bytes == 0;
  int64_t const unit = aligned ? a.element_bytes : 1;
  StepList of_both, list;
  a.add_steps(of_both, unit);
  b.add_steps(of_both, unit);
  of_both.sort();
  for (auto const& [size, most] : of_both.from(0)) {  // slots of one buffer have the same steps
    if (list.count > 0 && list.items[list.count - 1].size == size) {
      list.items[list.count - 1].most += most;
    } else {
      list.add(size, most);
    }
  }
  return Search(list).leads_to((distance + b.bytes() - unit) / unit);
}

}  // namespace

void require_memory_of_its_own(NamedTensor const& written, std::initializer_list<NamedTensor> others) {
  auto memory_of = [](NamedTensor const& named, void const* data) -> Memory {
    Operand const& operand = *named.operand;
    return {reinterpret_cast<uintptr_t>(data), operand.sizes, named.tensor->strides(),
            element_bytes(operand.type)};
  };
  // One that is copied on write has memory of its own from here on.
  Memory const memory = memory_of(written, written.tensor->mutable_data_ptr());
  require(!overlaps_itself(memory), written.operand->name,
          " is written, so its elements must not overlap, got shape ", ShapeOf{memory.sizes},
          " with strides ", ShapeOf{memory.strides});
  for (NamedTensor const& other : others) {
    if (!other.operand) continue;
    Memory const others = memory_of(other, other.tensor->const_data_ptr());
    require(!memory.meets(others) || !overlap(memory, others), written.operand->name,
            " is written, so it must not share memory with ", other.operand->name);
  }
}

}  // namespace flash_cute
