// The store of a warpgroup's dS to shared memory, where it is an operand of dQ = dS K.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/backward/sm90/traits.hpp"

namespace flash_cute {

// Returns store(ds, stage), which stores a thread's dS by stmatrix, 16 bytes at a time. The swizzle of a row
// of 128 bytes depends on the row's number only, so all addresses follow from the first one. CuTe's copy
// computes them anew in each step from 64-bit addresses, which takes 28 of 528 instructions (H100, head dim
// 128: 16k 1.7 and 1.3% slower, full and causal, 1k and 2k 0.6%). At head dim 64 CuTe's copy is 4 and 3%
// faster at 16k, and 1% at 1k and 2k, though products, waits and barriers come in the same order; the reason
// is not known.
template <class Traits>
CUTE_DEVICE auto make_ds_store(typename Traits::Element* stages, int thread) {
  using Element = typename Traits::Element;
  auto const copy_ds = make_tiled_copy_C(typename Traits::StoreAtom{}, typename Traits::MmaScores{});
  auto const thread_ds = copy_ds.get_slice(thread);
  Tensor tdSsdS = thread_ds.partition_D(make_tensor(make_smem_ptr(stages), typename Traits::LayoutDSt{}));
  if constexpr (Traits::kHeadDim == 64) {
    return [=](auto const& ds, int stage) { copy(copy_ds, thread_ds.retile_S(ds), tdSsdS(_, _, _, stage)); };
  } else {
    uint32_t first = cast_smem_ptr_to_uint(raw_pointer_cast(&tdSsdS(0)));
    asm volatile("" : "+r"(first));  // otherwise the compiler computes it anew in each step
    return [first](auto const& ds, int stage) {
      constexpr int kPiece = 16 / sizeof(Element), kRow = 128 / sizeof(Element), kPeriod = 8 * kRow;
      static_assert(Traits::kDsStageElements % kPeriod == 0);
      auto const words = recast<uint32_t const>(ds);
      for_each(make_int_sequence<decltype(size(words))::value / 4>{}, [&]<int i>(Int<i>) {
        constexpr int kOffset = decltype(tdSsdS.layout()){}(i * kPiece), kInRow = kOffset % kPeriod;
        // Lanes have neighbouring pieces: the lowest bit of a piece's index depends on the lane only.
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
