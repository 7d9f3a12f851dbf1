// Types of the Ampere family's forward: tile shapes, tensor-core operations, shared-memory layouts, copies.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/attention/tiles.hpp"
#include "flash_cute/core/element.hpp"

namespace flash_cute {

using namespace cute;

template <class Instance_, ForwardTile tile>
struct ForwardTraitsSm80 {
  using Instance = Instance_;
  using Element = typename ElementOf<Instance::element>::type;

  static constexpr ForwardTile kTile = tile;
  static_assert(kTile.warps > 0, "this head dim has no row in attention/tiles.hpp");
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kHeadDim = Instance::head_dim;
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kSlack = 0;  // see OnlineSoftmax

  // Every warp owns whole rows, so that the softmax never leaves a warp.
  using MmaAtom = MMA_Atom<std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                              SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>>;
  using TiledMma =
      TiledMMA<MmaAtom, Layout<Shape<Int<kTile.warps>, _1, _1>>, Tile<Int<16 * kTile.warps>, _16, _16>>;

  // Rows are cut into panels of 128 (or 64) bytes whose 16-byte chunks are permuted against bank conflicts.
  static constexpr int kPanel = kHeadDim % 64 == 0 ? 64 : 32;
  using LayoutAtom = decltype(composition(Swizzle<kPanel == 64 ? 3 : 2, 3, 3>{},
                                          Layout<Shape<_8, Int<kPanel>>, Stride<Int<kPanel>, _1>>{}));
  using LayoutQ = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using LayoutKV = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  using LayoutVt =
      decltype(composition(LayoutKV{}, Layout<Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>,
                                              Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDim>>>{}));

  struct SharedStorage {
    alignas(128) Element q[cosize_v<LayoutQ>];
    alignas(128) Element k[cosize_v<LayoutKV>];
    alignas(128) Element v[cosize_v<LayoutKV>];
  };

  // Global to shared memory in chunks of 16 bytes, neighbouring threads along a row.
  static constexpr int kChunk = 16 / sizeof(Element);
  static constexpr int kChunksPerPanel = kPanel / kChunk;
  using ThreadLayout =
      Layout<Shape<Int<kThreads / kChunksPerPanel>, Int<kChunksPerPanel>>, Stride<Int<kChunksPerPanel>, _1>>;
  static_assert(kBlockM % size<0>(ThreadLayout{}) == 0 && kBlockN % size<0>(ThreadLayout{}) == 0,
                "every thread loads the same number of rows");
  using ValueLayout = Layout<Shape<_1, Int<kChunk>>>;
  using LoadAtom = Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>;
  using TiledLoad = decltype(make_tiled_copy(LoadAtom{}, ThreadLayout{}, ValueLayout{}));

  // Shared memory -> registers.
  using FragmentAtom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
  using FragmentAtomTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
};

}  // namespace flash_cute
