// What both passes of the Ampere family compute and copy with: mma.sync, ldmatrix, cp.async, and the layout
// of operands in shared memory that suits these instructions.
#pragma once

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

template <class Element, int columns>
struct TensorCoreSm80 {
  using MmaAtom = MMA_Atom<std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                              SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>>;
  // warps_m x warps_n warps work side by side, and each takes sixteen rows and columns at a time.
  template <int warps_m, int warps_n>
  using TiledMma = TiledMMA<MmaAtom, Layout<Shape<Int<warps_m>, Int<warps_n>, _1>>,
                            Tile<Int<16 * warps_m>, Int<16 * warps_n>, _16>>;

  // Rows are cut into panels of 128 or 64 bytes, whose 16-byte chunks are permuted against bank conflicts.
  static constexpr int kPanel = columns % 64 == 0 ? 64 : 32;
  using LayoutAtom = decltype(composition(Swizzle<kPanel == 64 ? 3 : 2, 3, 3>{},
                                          Layout<Shape<_8, Int<kPanel>>, Stride<Int<kPanel>, _1>>{}));

  // Copies from global to shared memory move chunks of 16 bytes, with neighbouring threads along a row.
  static constexpr int kChunk = 16 / sizeof(Element), kChunksPerPanel = kPanel / kChunk;
  template <int threads>
  using LoadThreads =
      Layout<Shape<Int<threads / kChunksPerPanel>, Int<kChunksPerPanel>>, Stride<Int<kChunksPerPanel>, _1>>;
  using LoadAtom = Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>;
  template <int threads>
  using TiledLoad =
      decltype(make_tiled_copy(LoadAtom{}, LoadThreads<threads>{}, Layout<Shape<_1, Int<kChunk>>>{}));

  // Copies from shared memory to registers.
  using FragmentAtom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
  using FragmentAtomTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
};

// float32, by TF32: core/sm80/tf32.hpp has the copies from shared memory to registers.
template <int columns>
struct TensorCoreSm80<float, columns> {
  using MmaAtom = MMA_Atom<SM80_16x8x8_F32TF32TF32F32_TN>;
  template <int warps_m, int warps_n>
  using TiledMma = TiledMMA<MmaAtom, Layout<Shape<Int<warps_m>, Int<warps_n>, _1>>,
                            Tile<Int<16 * warps_m>, Int<8 * warps_n>, _8>>;

  // Panels of 128 bytes, whose chunks of 16 are permuted as above.
  static constexpr int kPanel = 32;
  using LayoutAtom =
      decltype(composition(Swizzle<3, 2, 3>{}, Layout<Shape<_8, Int<kPanel>>, Stride<Int<kPanel>, _1>>{}));
  static constexpr int kChunk = 4, kChunksPerPanel = kPanel / kChunk;
  template <int threads>
  using LoadThreads =
      Layout<Shape<Int<threads / kChunksPerPanel>, Int<kChunksPerPanel>>, Stride<Int<kChunksPerPanel>, _1>>;
  using LoadAtom = Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, float>;
  template <int threads>
  using TiledLoad =
      decltype(make_tiled_copy(LoadAtom{}, LoadThreads<threads>{}, Layout<Shape<_1, Int<kChunk>>>{}));
};

}  // namespace flash_cute
