// The way of a warpgroup's dS to shared memory in the Hopper family's backward, from where dQ is made of it.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/backward/traits_sm90.hpp"

namespace flash_cute {

// A thread stores 16 bytes at a time, in rows of 128 bytes whose places are swizzled by the row's number
// alone: so all of its places follow from the first one's address. Worked out by CuTe, from 64-bit addresses
// and in each step, they cost 35 of 530 instructions between dS and dQ (H100, head dim 128: 16k +1.8 and
// +1.4%, full and causal, 1k and 2k +0.6%).
template <class Traits>
struct GradientSlots {
  using Element = typename Traits::Element;
  static constexpr int kPiece = 16 / sizeof(Element), kRow = 128 / sizeof(Element), kPeriod = 8 * kRow;
  uint32_t first;  // of the thread, in the first slot

  CUTE_DEVICE GradientSlots(Element* slots, int thread)
      : first(cast_smem_ptr_to_uint(raw_pointer_cast(&places(slots, thread)(0)))) {
    asm volatile("" : "+r"(first));  // else it is worked out anew in each step
  }

  template <class Gradients>
  CUTE_DEVICE void store(Gradients const& gradients, int slot) const {
    auto const words = recast<uint32_t const>(gradients);
    constexpr int kPieces = decltype(size(words))::value / 4;
    using Layout = decltype(places(nullptr, 0).layout());
    for_each(make_int_sequence<kPieces>{}, [&]<int i>(Int<i>) {
      constexpr int kOffset = Layout{}(i * kPiece), kInRow = kOffset % kPeriod, kBytes = sizeof(Element);
      static_assert(kInRow < kRow && kInRow % kPiece == 0);
      uint32_t const row = first + (slot * Traits::kSlotDS + kOffset - kInRow) * kBytes;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       row ^ uint32_t(kInRow * kBytes)),
                   "r"(words(4 * i)), "r"(words(4 * i + 1)), "r"(words(4 * i + 2)), "r"(words(4 * i + 3))
                   : "memory");
    });
  }

 private:
  CUTE_HOST_DEVICE static constexpr auto places(Element* slots, int thread) {
    auto const copy = make_tiled_copy_C(typename Traits::StoreAtom{}, typename Traits::MmaScores{});
    return copy.get_slice(thread).partition_D(
        make_tensor(make_smem_ptr(slots), typename Traits::LayoutDSt{}));
  }
};

}  // namespace flash_cute
