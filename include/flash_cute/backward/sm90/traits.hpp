// Types of the Hopper family's backward: products, shared-memory layouts, who has how many registers.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/backward/sm90/lse_delta_mma.hpp"
#include "flash_cute/backward/tiles.hpp"
#include "flash_cute/core/element.hpp"
#include "flash_cute/core/sm90/pipeline.hpp"

namespace flash_cute {

using namespace cute;

// Where a block of queries whose sums are complete has its rows of dQ: see TmaCoord. Or there is no more.
struct DqConvertBlock {
  bool through;
  int head, row, plane, bound;
};

// splits_groups: may a tile have a part of the query heads that share its keys (see GqaSums)? A kernel of
// its own, as the other one's loop loses 1 to 2% beside what that needs (head dims 64 and 128, H200).
template <class Instance_, BackwardTile tile, bool splits_groups = false>
struct BackwardTraitsSm90 {
  static constexpr bool kSplitsGroups = splits_groups;
  using Instance = Instance_;
  using Element = typename ElementOf<Instance::element>::type;

  static constexpr BackwardTile kTile = tile;
  static_assert(kTile.warps() > 0 && kTile.warps() % 4 == 0,
                "this head dim has no row in backward/tiles.hpp");
  // Keys of a tile, and of a thread block, which has all of them or, in a cluster, half.
  static constexpr int kCluster = kTile.cluster, kTileN = kTile.block_n, kBlockN = kTileN / kCluster;
  static constexpr bool kInCluster = kCluster > 1;
  static constexpr int kBlockM = kTile.block_m, kStages = kTile.stages;
  static constexpr int kStagesDO = kTile.stages_dout > 0 ? kTile.stages_dout : kStages;
  static constexpr int kHeadDim = Instance::head_dim;

  // A warpgroup that loads, and two that compute. setmaxnreg shares the registers out.
  static constexpr int kConsumers = kTile.warps() / 4;
  static_assert(kConsumers * kCluster == sum_parts(kTile) && (kBlockM == 64 || kBlockM == 128));
  // Each has its own keys; or, in a cluster, both the same, one S, P and dV, the other dP, dS and dK.
  static_assert(kInCluster == (kTile.warps_across > 1));
  static constexpr int kKeyGroups = kInCluster ? 1 : kConsumers;
  static_assert(kBlockN == 64 * kKeyGroups);
  static constexpr int kThreads = (1 + kConsumers) * 128, kKeyThreads = kKeyGroups * 128;
  // The loop of head dim 64 wants 240 (232: 3% slower at 16k). With 40 threads that load or add spill at 192,
  // and at 256 where groups are split.
  static constexpr int kAllRegisters = (1 + kConsumers) * (65536 / kThreads / 8 * 8);
  static constexpr int kProducerRegisters = kHeadDim == 64                                     ? 24
                                            : kHeadDim == 192 || (kInCluster && kSplitsGroups) ? 56
                                                                                               : 40;
  static constexpr int kConsumerRegisters = (kAllRegisters - kProducerRegisters) / kConsumers;
  static_assert(kConsumerRegisters % 8 == 0);

  // S and dP have keys as rows, so P and dS are left operands of dV and dK as they lie in registers.
  using KeyLayout = Layout<Shape<Int<kKeyGroups>, _1, _1>>;
  using TileS = Shape<Int<kBlockN>, Int<kBlockM>>;
  using TileKV = Shape<Int<kBlockN>, Int<kHeadDim>>;
  using MmaScores = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kBlockN>, Int<kBlockM>, Int<kHeadDim>>>(),
      KeyLayout{}));
  using MmaKeys = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kBlockM>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      KeyLayout{}));
  static_assert(size<1>(typename MmaScores::AtomShape_MNK{}) == kBlockM &&
                    size<1>(typename MmaKeys::AtomShape_MNK{}) == kHeadDim,
                "CuTe makes do with narrow products where it has none of this width");
  // Of a tile's part of dQ each thread block of a cluster has half of the columns, made of all of the tile's
  // keys; of what a block has, each warpgroup computes 64 queries, or half of the columns (of 96 64 and 32).
  // They come in panels of 32 or 64, so at head dim 96 more are computed than there are.
  static constexpr int kSumColumns = ceil_div(kHeadDim, 64) * 64, kOwnColumns = kSumColumns / kCluster;
  static constexpr int kRowsQ = kBlockM / 64;
  static constexpr int columns_of(int warpgroup) {
    int const even = kOwnColumns * kRowsQ / kConsumers;
    if (!kInCluster || even % 32 == 0) return even;
    return warpgroup == 0 ? 64 : kOwnColumns - 64;  // of 96
  }
  static constexpr int kColumnsQ = columns_of(0);
  using TileQ = Shape<Int<kBlockM>, Int<kSumColumns>>;
  template <int columns, class Warpgroups = Layout<Shape<_1, _1, _1>>>
  using MmaSums = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<columns>, Int<kBlockN>>, GMMA::Major::MN,
                           GMMA::Major::MN>(),
      Warpgroups{}));
  using MmaQueries = MmaSums<kColumnsQ, Layout<Shape<Int<kRowsQ>, Int<kConsumers / kRowsQ>, _1>>>;
  static_assert(size<1>(typename MmaQueries::AtomShape_MNK{}) == kColumnsQ);

  // Tiles lie in panels of 128 (or 64) bytes a row, which TMA swizzles. Each is read both ways: its rows are
  // rows of an operand of S and dP, and its columns those of one of dV, dK and dQ.
  static constexpr int kPanel = kHeadDim == 64 || kHeadDim % 128 == 0 ? 64 : 32;
  template <class Wide, class Narrow>
  using PanelAtom = std::conditional_t<kPanel == 64, Wide, Narrow>;
  using RowAtom = PanelAtom<GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
  using ColumnAtom = PanelAtom<GMMA::Layout_MN_SW128_Atom<Element>, GMMA::Layout_MN_SW64_Atom<Element>>;
  using LayoutKV = decltype(tile_to_shape(RowAtom{}, TileKV{}));
  // With room for columns that are summed up although nobody loads them.
  using LayoutKt =
      decltype(tile_to_shape(ColumnAtom{}, Shape<Int<kSumColumns>, Int<kBlockN>>{}, Step<_2, _1>{}));
  // Columns of K side by side, a panel after the other: in a cluster those of a warpgroup's part of dQ.
  template <int columns>
  using LayoutColumns =
      decltype(tile_to_shape(ColumnAtom{}, Shape<Int<columns>, Int<kBlockN>>{}, Step<_2, _1>{}));
  using LayoutQ = decltype(tile_to_shape(RowAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStages>>{}));
  using LayoutQt = decltype(tile_to_shape(ColumnAtom{}, Shape<Int<kHeadDim>, Int<kBlockM>, Int<kStages>>{},
                                          Step<_2, _1, _3>{}));
  using LayoutDO = decltype(tile_to_shape(RowAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStagesDO>>{}));
  using LayoutDOt = decltype(tile_to_shape(ColumnAtom{}, Shape<Int<kHeadDim>, Int<kBlockM>, Int<kStagesDO>>{},
                                           Step<_2, _1, _3>{}));
  // Of dS, stages in a cluster by turns of this block's and of the other's.
  static constexpr int kDsStages = kStages * kCluster, kDsStageElements = kBlockM * kBlockN;
  using LayoutDS = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                          Shape<Int<kBlockM>, Int<kBlockN>, Int<kDsStages>>{}));
  using LayoutDSt =
      decltype(composition(LayoutDS{}, Layout<Shape<Int<kBlockN>, Int<kBlockM>, Int<kDsStages>>,
                                              Stride<Int<kBlockM>, _1, Int<kDsStageElements>>>{}));
  using StoreAtom = Copy_Atom<SM90_U32x4_STSM_N, Element>;
  // Sums of dQ leave warp by warp, and so do dK and dV, 16 rows each, through memory as large (see
  // output_smem).
  static constexpr int kWarpFloats = kBlockM * kOwnColumns / (4 * kConsumers), kWarpRows = 16;
  static constexpr int kFloats = 4 * kWarpFloats;  // of a warpgroup; of sums in a cluster floats_of
  // Of a block of queries in the workspace: at head dim 96 the last warpgroup's part is half as long, and in
  // a cluster each has its columns of both blocks one behind the other.
  static constexpr int kBlockFloats = kBlockM * kHeadDim, kLeftOver = kBlockM * kSumColumns - kBlockFloats;
  static constexpr int floats_of(int warpgroup) {
    if (kInCluster) return kBlockM * columns_of(warpgroup);
    return warpgroup == kConsumers - 1 ? kFloats - kLeftOver : kFloats;
  }
  FLASH_CUTE_HOST_DEVICE static constexpr int place_of_part(int warpgroup, int rank) {
    if (!kInCluster) return warpgroup * kFloats;
    return warpgroup * kCluster * floats_of(0) + rank * floats_of(warpgroup);
  }
  // Sums lie in the order of registers: a warp's fours of neighbours one after the other, those of a lane 32
  // apart. At head dim 96 what is summed up of all warps comes first.
  static constexpr int kHalves = kLeftOver > 0 ? 2 : 1, kWarpPart = kWarpFloats / kHalves;
  static_assert(kLeftOver == 0 || (kHalves * kLeftOver == kFloats && kRowsQ == 1));
  static constexpr int place_of_four(int i) {
    constexpr int kFours = kWarpPart / 4 / 32;
    return kHalves == 1 ? i * 32 : i / kFours * kWarpPart + i % kFours * 32;
  }
  static constexpr int kStoreColumns = kHeadDim / kCluster;
  using LayoutWarp = decltype(tile_to_shape(RowAtom{}, Shape<Int<kWarpRows>, Int<kStoreColumns>>{}));
  using LayoutWarpQ = decltype(tile_to_shape(RowAtom{}, Shape<Int<kWarpRows>, Int<kColumnsQ>>{}));
  static_assert(kWarpFloats * sizeof(float) >= cosize_v<LayoutWarp> * sizeof(Element) &&
                kWarpFloats * sizeof(float) % 1024 == 0);
  static constexpr int kPiecesP = kInCluster ? kBlockN * kBlockM / 4 : 0;  // of four floats
  static constexpr int kStageElements = kBlockM * kHeadDim;                // of Q and dO
  // In a cluster memory is short. The second warpgroup's part of dQ lies where the dS did that it is made of.
  // At 256 P lies where the other one's part will, which comes once P has been taken (192: 2 to 3% slower).
  static constexpr bool kSharesP = kHeadDim == 256;
  static constexpr int kPSlots = kSharesP ? 0 : kPiecesP;
  static constexpr int kDqFloats = kInCluster ? floats_of(0) : kConsumers * kFloats;
  static constexpr int kPeerKElements = kInCluster ? kBlockN * kOwnColumns : 0;
  static_assert(!kInCluster ||
                (kPiecesP * sizeof(uint4) <= kDqFloats * sizeof(float) &&
                 kCluster * kDsStageElements * sizeof(Element) >= floats_of(1) * sizeof(float)));

  static constexpr bool kConvertsDq = kTile.has_room_for_sums();  // of dQ, else a kernel behind does
  // Of a block of queries. At head dim 64 there is no room for those of the last warp, which come to where
  // those of the first were.
  static constexpr int kSums = kBlockM * kSumColumns;
  static constexpr bool kLseDeltaMma = kTile.lse_delta_mma, kLastComesLater = kLseDeltaMma && kHeadDim == 64;
  static constexpr int kSumFloats = kConvertsDq ? kSums - (kLastComesLater ? kWarpFloats : 0) : 0;

  using Terms = LseDeltaMma<kBlockN, kBlockM, kStages, KeyLayout>;
  struct Stats {
    alignas(128) float lse[kStages * kBlockM];
    alignas(128) float delta[kStages * kBlockM];
  };

  struct SharedStorage {
    alignas(1024) Element k[cosize_v<LayoutKt>];
    alignas(1024) Element v[cosize_v<LayoutKV>];
    alignas(1024) Element q[cosize_v<LayoutQ>];
    alignas(1024) Element dout[cosize_v<LayoutDO>];
    alignas(1024) Element ds[cosize_v<LayoutDS>];
    alignas(1024) Element peer_k[kPeerKElements];
    alignas(1024) float dq[kDqFloats];
    alignas(128) uint4 p[kPSlots];
    std::conditional_t<kLseDeltaMma, typename Terms::Storage, Stats> of_queries;
    TmaRing<1> ring_k, ring_v, ring_p;
    TmaRing<kStages> ring_q, ring_ds;
    TmaRing<kStagesDO> ring_dout;
    TmaRing<1> ring_dq[kConsumers], ring_sums[kConsumers];
    TmaRing<2> ring_tiles;
    KvTile tiles[2];
    int sum_indices[2];  // of tiles that have a part of a group: see GqaSums
    DqConvertBlock finished;
    // Of a cluster, in which dS and the index of a tile come from the other block.
    TmaRing<1> ring_peer_k, ring_index;
    cutlass::arch::ClusterTransactionBarrier peer_ds[kStages];
    cutlass::arch::ClusterBarrier ds_read[kStages];  // by both warpgroups, and by the other block
    int index;
    // Last, as compute-sanitizer takes terms and ones for twice as many bytes and more (see LseDeltaMma).
    alignas(kConvertsDq ? 1024 : 128) float sums[kSumFloats];
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace flash_cute
