// The way of a warpgroup's dS to shared memory in the Hopper family's backward, from where dQ is made of it.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/backward/sm90/traits.hpp"

namespace flash_cute {

// What stores a thread's dS, as store(gradients, stage): 16 bytes at a time, in rows of 128 bytes whose
// places are swizzled by the row's number alone. So all of its places follow from the first one's address.
// CuTe works them out anew in each step, from 64-bit addresses: 28 of 528 instructions (H100, head dim 128:
// 16k 1.7 and 1.3% slower, full and causal, 1k and 2k 0.6%). But at head dim 64 that is 4 and 3% faster at
// 16k, and 1% at 1k and 2k, though products, waits and barriers come in the same order; why is not known.
template <class Traits>
CUTE_DEVICE auto make_ds_store(typename Traits::Element* stages, int thread) {
  using Element = typename Traits::Element;
  auto const copy_ds = make_tiled_copy_C(typename Traits::StoreAtom{}, typename Traits::MmaScores{});
  auto const thread_ds = copy_ds.get_slice(thread);
  Tensor tdSsdS = thread_ds.partition_D(make_tensor(make_smem_ptr(stages), typename Traits::LayoutDSt{}));
  if constexpr (Traits::kHeadDim == 64) {
    return [=](auto const& gradients, int stage) {
      copy(copy_ds, thread_ds.retile_S(gradients), tdSsdS(_, _, _, stage));
    };
  } else {
    uint32_t first = cast_smem_ptr_to_uint(raw_pointer_cast(&tdSsdS(0)));
    asm volatile("" : "+r"(first));  // else it is worked out anew in each step
    return [first](auto const& gradients, int stage) {
      constexpr int kPiece = 16 / sizeof(Element), kRow = 128 / sizeof(Element), kPeriod = 8 * kRow;
      static_assert(Traits::kDsStageElements % kPeriod == 0);
      auto const words = recast<uint32_t const>(gradients);
      for_each(make_int_sequence<decltype(size(words))::value / 4>{}, [&]<int i>(Int<i>) {
        constexpr int kOffset = decltype(tdSsdS.layout()){}(i * kPiece), kInRow = kOffset % kPeriod;
        // Lanes have neighbouring pieces: the lowest bit of a piece's place is the lane's.
        static_assert(kInRow < kRow && kInRow % (2 * kPiece) == 0);
        constexpr int kBytes = sizeof(Element);
        uint32_t const row = first + (stage * Traits::kDsStageElements + kOffset - kInRow) * kBytes;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         row ^ uint32_t(kInRow * kBytes)),
                     "r"(words(4 * i)), "r"(words(4 * i + 1)), "r"(words(4 * i + 2)), "r"(words(4 * i + 3))
                     : "memory");
      });
    };
  }
}

}  // namespace flash_cute
