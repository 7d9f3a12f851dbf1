// Types of the Ampere family's forward: tile shapes, tensor-core operations, shared-memory layouts, copies.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/element.hpp"
#include "flash_cute/core/sm80/tensor_core.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

using namespace cute;

template <class Instance_, ForwardKernel kernel>
struct ForwardTraitsSm80 {
  using Instance = Instance_;
  using Source = SourceOf<kernel>;
  static constexpr ForwardKernel kKernel = kernel;
  using Element = typename ElementOf<Instance::element>::type;

  static constexpr ForwardTile kTile = kernel.tile;
  static_assert(kTile.warps > 0, "this head dim has no row in forward/tiles.hpp");
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kHeadDim = Instance::head_dim, kHeadDimV = Instance::head_dim_v;
  static constexpr int kThreads = kTile.warps * 32, kRowsOfWarp = kBlockM / kTile.warps;
  static constexpr int kRescaleThreshold = 0;  // see OnlineSoftmax
  // Of uniform batches. 64 would spill; 96 wins 2 to 5%, larger head dims lose up to 3%.
  static constexpr bool kTileInSharedMemory = kHeadDim < 128;

  // Of float32: are products as exact as in float32, or those of TF32?
  static constexpr bool kExact = Instance::element == ElementType::fp32;

  // Every warp owns whole rows, so that the softmax never leaves a warp.
  using TensorCore = TensorCoreSm80<Element, kHeadDim>;
  using TiledMma = typename TensorCore::template TiledMma<kTile.warps, 1>;

  using LayoutAtom = typename TensorCore::LayoutAtom;
  using LayoutQ = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using LayoutK = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  using LayoutV = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDimV>, Int<kStages>>{}));
  using LayoutVt =
      decltype(composition(LayoutV{}, Layout<Shape<Int<kHeadDimV>, Int<kBlockN>, Int<kStages>>,
                                             Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDimV>>>{}));

  struct SharedStorage {
    alignas(128) Element q[cosize_v<LayoutQ>];
    alignas(128) Element k[cosize_v<LayoutK>];
    alignas(128) Element v[cosize_v<LayoutV>];
  };

  using LoadThreads = typename TensorCore::template LoadThreads<kThreads>;
  static_assert(kBlockM % size<0>(LoadThreads{}) == 0 && kBlockN % size<0>(LoadThreads{}) == 0,
                "every thread loads the same number of rows");
  using LoadAtom = typename TensorCore::LoadAtom;
  using TiledLoad = typename TensorCore::template TiledLoad<kThreads>;
};

}  // namespace flash_cute
