// Traits of the Ampere family's backward: MMAs, shared-memory layouts and copies of a tile shape.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/backward/kernel.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/core/element.hpp"
#include "flash_cute/core/sm80/tensor_core.hpp"

namespace flash_cute {

using namespace cute;

template <class Instance_, BackwardTile tile>
struct BackwardTraitsSm80 {
  using Instance = Instance_;
  using Element = typename ElementOf<Instance::element>::type;

  static constexpr BackwardTile kTile = tile;
  static_assert(kTile.warps() > 0, "this head dim has no row in backward/tiles.hpp");
  static constexpr bool kExact = Instance::element == ElementType::fp32;  // see ForwardTraitsSm80
  static constexpr Masking kMasking = masking_of(Instance::variant);
  static constexpr bool kGeneral = kMasking == Masking::table;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kHeadDim = Instance::head_dim, kHeadDimV = Instance::head_dim_v;
  static_assert(kHeadDim == kHeadDimV, "these kernels have one layout for K and V");
  static constexpr int kThreads = kTile.warps() * 32;
  // kKeyThreads share an accumulator of dK or dV (see GqaSums): all threads, or where the work is split one
  // half of them has dV and the other dK. A KV tile belongs to one thread block.
  static constexpr bool kTwoRoles = kTile.has_two_roles();
  static constexpr int kTileN = kBlockN, kCluster = 1, kKeyThreads = kThreads / (kTwoRoles ? 2 : 1);
  using TileKV = Shape<Int<kBlockN>, Int<kHeadDim>>;
  using TileK = TileKV;
  using TileV = TileKV;
  using TileS = Shape<Int<kBlockN>, Int<kBlockM>>;  // of S^T
  using Tile = std::conditional_t<kTwoRoles, TwoRoleKvTile, KvTile>;

  // The accumulators of S and dP have keys as rows. A warp that has all columns of its rows takes P and dS as
  // operands from registers; where warps share rows, P and dS go through shared memory.
  using TensorCore = TensorCoreSm80<Element, kHeadDim>;
  static constexpr bool kSharesScores = kTile.warps_across > 1;
  using MmaScores = typename TensorCore::template TiledMma<kTile.warps_keys, kTile.warps_across>;
  static constexpr int kWarpsKeys = kTwoRoles ? kTile.role_warps_keys : kTile.warps_keys;
  using MmaDkv = typename TensorCore::template TiledMma<kWarpsKeys, kKeyThreads / 32 / kWarpsKeys>;
  using MmaDk = MmaDkv;
  using MmaDv = MmaDkv;
  static constexpr int kWarpsDq = kTile.warps_queries;
  static_assert(kTile.warps() % kWarpsDq == 0);
  using MmaDq = typename TensorCore::template TiledMma<kWarpsDq, kTile.warps() / kWarpsDq>;
  // dQ is computed in kDqParts parts of whole panels of columns, as more than 32 accumulator floats of a
  // thread would leave no registers to load operands ahead.
  static constexpr bool kDqFits = kBlockM * kHeadDim <= 32 * kThreads;
  static constexpr int kDqParts = kDqFits || kHeadDim % 64 != 0 ? 1 : kHeadDim % 128 == 0 ? 2 : kHeadDim / 64;
  using TileDq = Shape<Int<kBlockM>, Int<kHeadDim / kDqParts>>;

  template <class Layout, int rows, int columns, int stages>
  using Transposed =
      decltype(composition(Layout{}, make_layout(Shape<Int<columns>, Int<rows>, Int<stages>>{},
                                                 Stride<Int<rows>, _1, Int<rows * columns>>{})));
  using LayoutAtom = typename TensorCore::LayoutAtom;
  using LayoutKV = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, _1>{}));
  using LayoutKVt = Transposed<LayoutKV, kBlockN, kHeadDim, 1>;
  using LayoutQ = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStages>>{}));
  using LayoutQt = Transposed<LayoutQ, kBlockM, kHeadDim, kStages>;
  using ScoreAtom = typename TensorCoreSm80<Element, kBlockM>::LayoutAtom;
  using LayoutS = decltype(tile_to_shape(ScoreAtom{}, Shape<Int<kBlockN>, Int<kBlockM>, _1>{}));
  using LayoutSt = Transposed<LayoutS, kBlockN, kBlockM, 1>;

  struct SharedStorage {
    alignas(128) Element k[cosize_v<LayoutKV>];
    alignas(128) Element v[cosize_v<LayoutKV>];
    alignas(128) Element q[cosize_v<LayoutQ>];
    alignas(128) Element dout[cosize_v<LayoutQ>];
    alignas(128) Element ds[cosize_v<LayoutS>];
    alignas(128) Element p[kSharesScores ? cosize_v<LayoutS> : 0];
    alignas(128) float p_exchange[kTwoRoles ? kBlockN * kBlockM : 0];  // P in float32 (put_p)
    alignas(128) float lse[kStages * kBlockM];
    alignas(128) float neg_delta[kStages * kBlockM];
  };
  static_assert(sizeof(SharedStorage) == kTile.smem_bytes(kHeadDim, sizeof(Element)));
  // Two thread blocks of head dim 128 leave no shared memory for the tile.
  static constexpr bool kTileInSharedMemory = kHeadDim != 128;
  static_assert(sizeof(Tile) <= kTileBytes);
  // The main loop needs more registers than there are, and avoids spills by several forms that save registers
  // and are switched on together (docs/backward_sm80.md).
  static constexpr bool kSparesRegisters = kHeadDim == 128 || (kHeadDim == 64 && kSharesScores);

  using LoadAtom = typename TensorCore::LoadAtom;
  using TiledLoad = typename TensorCore::template TiledLoad<kKeyThreads>;
  static_assert(kBlockM % size<0>(typename TensorCore::template LoadThreads<kKeyThreads>{}) == 0 &&
                    kBlockN % size<0>(typename TensorCore::template LoadThreads<kKeyThreads>{}) == 0,
                "every thread loads the same number of rows");
};

}  // namespace flash_cute
