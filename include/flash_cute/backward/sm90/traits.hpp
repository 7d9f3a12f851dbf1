// Traits of the Hopper family's backward: MMAs, shared-memory layouts, and the registers of each warpgroup.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/attention/scores/pair_words.hpp"
#include "flash_cute/backward/kernel.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/backward/sm90/lse_delta_mma.hpp"
#include "flash_cute/core/element.hpp"
#include "flash_cute/core/named_barrier.hpp"
#include "flash_cute/core/sm90/pipeline.hpp"

namespace flash_cute {

using namespace cute;

// The coordinates of rows of dQ (see TmaCoord) whose accumulator has been fetched to shared memory, or the
// end of all such blocks.
struct DqConvertBlock {
  bool is_end;
  int head, row, plane, bound;
};

// What a step has beside Q and dO where pairs are hidden or scores are general: a tile of a bias, and which
// pairs are seen and kept.
template <class Element, int kBlockM, int kBlockN, int kBiasStages_>
struct BackwardPairTilesSm90 {
  static constexpr int kBiasStages = kBiasStages_, kWordStages = 2;
  using LayoutBias = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                            Shape<Int<kBlockN>, Int<kBlockM>, Int<larger(1, kBiasStages)>>{},
                                            Step<_2, _1, _3>{}));
  using Words = PairWords<kBlockN, kBlockM>;  // rows are keys
  static constexpr int kStageElements = kBlockM * kBlockN;
  alignas(1024) Element bias[kBiasStages * kStageElements];
  struct {
    Words seen, kept;
  } words[kWordStages];
  alignas(4) uint8_t bytes[kBlockN / 8][kBlockM];
  TmaRing<larger(1, kBiasStages)> ring_bias;
  TmaRing<kWordStages> ring_words;
};
struct NoBackwardPairTiles {
  static constexpr int kBiasStages = 0, kWordStages = 1;
};

template <class Instance_, BackwardKernel kernel>
struct BackwardTraitsSm90 {
  static constexpr bool kPartsOfGroups = kernel.heads == TileHeads::part;
  using Instance = Instance_;
  static constexpr Masking kMasking = kernel.masking;
  static constexpr bool kGeneral = kernel.scores == Scores::general,
                        kHasPairTiles = kernel.tile.has_pair_tiles;
  using Element = typename ElementOf<Instance::element>::type;

  static constexpr BackwardTile kTile = kernel.tile;
  static_assert(kTile.warps() > 0 && kTile.warps() % 4 == 0,
                "this head dim has no row in backward/tiles.hpp");
  // kTileN keys of a tile, of which a thread block has kBlockN: all, or half in a cluster.
  static constexpr int kCluster = kTile.cluster, kTileN = kTile.block_n, kBlockN = kTileN / kCluster;
  static constexpr bool kInCluster = kCluster > 1;
  static constexpr int kBlockM = kTile.block_m, kStages = kTile.stages;
  static constexpr int kStagesDO = kTile.stages_dout > 0 ? kTile.stages_dout : kStages;
  static constexpr int kHeadDim = Instance::head_dim, kHeadDimV = Instance::head_dim_v;

  // One producer warpgroup, two consumer warpgroups and where pairs may be hidden one that finds out about
  // them, or a warp of the producer's where consumers have no register to spare: setmaxnreg distributes
  // them.
  static constexpr int kConsumers = kTile.warps() / 4;
  static_assert(kConsumers * kCluster == sum_parts(kTile) && (kBlockM == 64 || kBlockM == 128));
  // Each consumer warpgroup has its own 64 keys. In a cluster both have the same 64: one computes S, P and
  // dV, the other dP, dS and dK. kKeyThreads share an accumulator of dK or dV.
  static_assert(kInCluster == (kTile.warps_across > 1));
  static constexpr int kKeyGroups = kInCluster ? 1 : kConsumers;
  static_assert(kBlockN == 64 * kKeyGroups);
  static constexpr bool kHasPairWarpgroup = kHasPairTiles && kHeadDim == 64;
  static constexpr int kPairWarps = kHasPairWarpgroup ? 4 : 1;
  static constexpr int kWarpgroups = 1 + kConsumers + kHasPairWarpgroup,
                       kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kKeyThreads = kKeyGroups * kWarpgroupThreads;
  // The main loop of head dim 64 needs 240 registers (232: 3% slower at 16k). Producer warps with 40 spill at
  // 192, and at 256 where groups are split.
  static constexpr int kAllRegisters = kWarpgroups * (65536 / kThreads / 8 * 8);
  static constexpr int kProducerRegisters = kHeadDim == 64 && kMasking == Masking::window       ? 24
                                            : kHeadDim == 192 || (kInCluster && kPartsOfGroups) ? 56
                                                                                                : 40;
  static constexpr int kPairRegisters = kHasPairWarpgroup ? 56 : 0;
  static constexpr int kConsumerRegisters =
      (kAllRegisters - kProducerRegisters - kPairRegisters) / kConsumers;
  static_assert(kConsumerRegisters % 8 == 0);

  // The accumulators of S and dP have keys as rows, so P and dS are left operands of dV and dK as they lie in
  // registers.
  using KeyLayout = Layout<Shape<Int<kKeyGroups>, _1, _1>>;
  using TileS = Shape<Int<kBlockN>, Int<kBlockM>>;
  using TileK = Shape<Int<kBlockN>, Int<kHeadDim>>;
  using TileV = Shape<Int<kBlockN>, Int<kHeadDimV>>;
  using MmaScores = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kBlockN>, Int<kBlockM>, Int<kHeadDim>>>(),
      KeyLayout{}));
  template <int columns>
  using MmaKeys = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kBlockN>, Int<columns>, Int<kBlockM>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      KeyLayout{}));
  using MmaDk = MmaKeys<kHeadDim>;
  using MmaDv = MmaKeys<kHeadDimV>;
  static_assert(size<1>(typename MmaScores::AtomShape_MNK{}) == kBlockM &&
                    size<1>(typename MmaDk::AtomShape_MNK{}) == kHeadDim &&
                    size<1>(typename MmaDv::AtomShape_MNK{}) == kHeadDimV,
                "CuTe falls back to narrower MMAs where it has none of this width");
  // dQ of a step is (kBlockM, kDqColumns). Each thread block of a cluster computes kCtaDqColumns of the
  // columns, from all of the tile's keys. Each warpgroup computes 64 rows or half of the thread block's
  // columns (64 and 32 of 96). Columns come in panels of 32 or 64, so head dim 96 computes 128.
  static constexpr int kDqColumns = ceil_div(kHeadDim, 64) * 64, kCtaDqColumns = kDqColumns / kCluster;
  static constexpr int kDqRowBlocks = kBlockM / 64;
  static constexpr int columns_of(int warpgroup) {
    int const even = kCtaDqColumns * kDqRowBlocks / kConsumers;
    if (!kInCluster || even % 32 == 0) return even;
    return warpgroup == 0 ? 64 : kCtaDqColumns - 64;  // 32 of 96
  }
  static constexpr int kDqMmaColumns = columns_of(0);
  using TileDq = Shape<Int<kBlockM>, Int<kDqColumns>>;
  template <int columns, class Warpgroups = Layout<Shape<_1, _1, _1>>>
  using MmaDqColumns = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<columns>, Int<kBlockN>>, GMMA::Major::MN,
                           GMMA::Major::MN>(),
      Warpgroups{}));
  using MmaDq =
      MmaDqColumns<kDqMmaColumns, Layout<Shape<Int<kDqRowBlocks>, Int<kConsumers / kDqRowBlocks>, _1>>>;
  static_assert(size<1>(typename MmaDq::AtomShape_MNK{}) == kDqMmaColumns);

  // Tiles lie in panels of 128 (or 64) bytes a row, which TMA swizzles. Each tile is read both ways: as a
  // K-major operand of S or dP and as an MN-major operand of dV, dK or dQ.
  static constexpr int kPanel = kHeadDim == 64 || kHeadDim % 128 == 0 ? 64 : 32;
  template <class Wide, class Narrow>
  using PanelAtom = std::conditional_t<kPanel == 64, Wide, Narrow>;
  using RowAtom = PanelAtom<GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
  using ColumnAtom = PanelAtom<GMMA::Layout_MN_SW128_Atom<Element>, GMMA::Layout_MN_SW64_Atom<Element>>;
  using LayoutK = decltype(tile_to_shape(RowAtom{}, TileK{}));
  using LayoutV = decltype(tile_to_shape(RowAtom{}, TileV{}));
  // Has room for the columns beyond the head dim that dQ reads and no load writes.
  using LayoutKt =
      decltype(tile_to_shape(ColumnAtom{}, Shape<Int<kDqColumns>, Int<kBlockN>>{}, Step<_2, _1>{}));
  // The columns of K for a warpgroup's part of dQ in a cluster, one panel after the other.
  template <int columns>
  using LayoutColumns =
      decltype(tile_to_shape(ColumnAtom{}, Shape<Int<columns>, Int<kBlockN>>{}, Step<_2, _1>{}));
  using LayoutQ = decltype(tile_to_shape(RowAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStages>>{}));
  using LayoutQt = decltype(tile_to_shape(ColumnAtom{}, Shape<Int<kHeadDim>, Int<kBlockM>, Int<kStages>>{},
                                          Step<_2, _1, _3>{}));
  using LayoutDO = decltype(tile_to_shape(RowAtom{}, Shape<Int<kBlockM>, Int<kHeadDimV>, Int<kStagesDO>>{}));
  using LayoutDOt = decltype(tile_to_shape(
      ColumnAtom{}, Shape<Int<kHeadDimV>, Int<kBlockM>, Int<kStagesDO>>{}, Step<_2, _1, _3>{}));
  // In a cluster, stages of dS alternate between this thread block's dS and its peer's.
  static constexpr int kDsStages = kStages * kCluster, kDsStageElements = kBlockM * kBlockN;
  using LayoutDS = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                          Shape<Int<kBlockM>, Int<kBlockN>, Int<kDsStages>>{}));
  using LayoutDSt =
      decltype(composition(LayoutDS{}, Layout<Shape<Int<kBlockN>, Int<kBlockM>, Int<kDsStages>>,
                                              Stride<Int<kBlockM>, _1, Int<kDsStageElements>>>{}));
  using StoreAtom = Copy_Atom<SM90_U32x4_STSM_N, Element>;
  // Each warp stages its part of dQ in shared memory by itself, and later its 16 rows of dK and dV in the
  // same number of bytes (see output_smem).
  static constexpr int kDqWarpFloats = kBlockM * kCtaDqColumns / (4 * kConsumers), kWarpRows = 16;
  static constexpr int kDqWarpgroupFloats = 4 * kDqWarpFloats;  // of a warpgroup where it is not in a cluster
  // The dQ accumulator of an M block in the workspace has one part for each warpgroup. At head dim 96 the
  // last warpgroup's part is half as long, as the other half would be columns beyond the head dim; in a
  // cluster a warpgroup's part has the columns of rank 0, then those of rank 1.
  static constexpr int kDqBlockFloats = kBlockM * kHeadDim,
                       kDqExcessFloats = kBlockM * kDqColumns - kDqBlockFloats;
  // How many floats of an M block a warpgroup of one thread block adds to, and where they begin.
  static constexpr int floats_of(int warpgroup) {
    if (kInCluster) return kBlockM * columns_of(warpgroup);
    return warpgroup == kConsumers - 1 ? kDqWarpgroupFloats - kDqExcessFloats : kDqWarpgroupFloats;
  }
  FLASH_CUTE_HOST_DEVICE static constexpr int dq_offset(int warpgroup, int rank) {
    if (!kInCluster) return warpgroup * kDqWarpgroupFloats;
    return warpgroup * kCluster * floats_of(0) + rank * floats_of(warpgroup);
  }
  // A warp's part of dQ lies in the order of its accumulator, in pieces of four floats: the i-th piece of all
  // lanes side by side. float4_offset(i) is where the i-th pieces begin, in float4. At head dim 96 the first
  // halves of all warps come before the second halves, which are beyond the head dim in the last warpgroup.
  static constexpr int kDqHalves = kDqExcessFloats > 0 ? 2 : 1, kDqHalfFloats = kDqWarpFloats / kDqHalves;
  static_assert(kDqExcessFloats == 0 ||
                (kDqHalves * kDqExcessFloats == kDqWarpgroupFloats && kDqRowBlocks == 1));
  static constexpr int float4_offset(int i) {
    constexpr int kFours = kDqHalfFloats / 4 / 32;
    return kDqHalves == 1 ? i * 32 : i / kFours * kDqHalfFloats + i % kFours * 32;
  }
  // dK or dV leave so many columns at a time.
  static constexpr int kStoreColumnsK = kHeadDim / kCluster, kStoreColumnsV = kHeadDimV / kCluster;
  template <int columns>
  using LayoutWarpRows = decltype(tile_to_shape(RowAtom{}, Shape<Int<kWarpRows>, Int<columns>>{}));
  static constexpr int kStoreColumns = larger(kStoreColumnsK, kStoreColumnsV);
  static constexpr bool kConvertsDq = kTile.has_room_for_sums();  // else the postprocess kernel converts dQ
  using LayoutWarpDq = decltype(tile_to_shape(
      RowAtom{}, Shape<Int<kWarpRows>, Int<(kConvertsDq ? kDqMmaColumns : kPanel)>>{}));
  static_assert(kDqWarpFloats * sizeof(float) >= kWarpRows * kStoreColumns * sizeof(Element) &&
                kDqWarpFloats * sizeof(float) % 1024 == 0);
  static constexpr int kPChunks = kInCluster ? kBlockN * kBlockM / 4 : 0;  // P in float32, 16 bytes each
  static constexpr int kStageElementsQ = kBlockM * kHeadDim, kStageElementsDO = kBlockM * kHeadDimV;
  // In a cluster shared memory is short. The second warpgroup's part of dQ takes the memory of the dS that it
  // was computed from. At head dim 256 P takes the memory of the first warpgroup's part of dQ, which is
  // written when P has been read (the same at 192: 2 to 3% slower).
  static constexpr bool kPSharesDq = kHeadDim == 256;
  static constexpr int kPSmemChunks = kPSharesDq ? 0 : kPChunks;
  static constexpr int kDqSmemFloats = kInCluster ? floats_of(0) : kConsumers * kDqWarpgroupFloats;
  static constexpr int kPeerKElements = kInCluster ? kBlockN * kCtaDqColumns : 0;
  static_assert(!kInCluster ||
                (kPChunks * sizeof(uint4) <= kDqSmemFloats * sizeof(float) &&
                 kCluster * kDsStageElements * sizeof(Element) >= floats_of(1) * sizeof(float)));

  // The fetched dQ accumulator of an M block. At head dim 64 there is no room for the last warp's part, which
  // is loaded to where the first warp's part was.
  static constexpr bool kLseDeltaMma = kTile.lse_delta_mma,
                        kLastWarpLoadsLater = kLseDeltaMma && kHeadDim == 64;
  static constexpr int kDqAccumSmemFloats =
      kConvertsDq ? kBlockM * kDqColumns - (kLastWarpLoadsLater ? kDqWarpFloats : 0) : 0;

  using LseDeltaProduct = LseDeltaMma<kBlockN, kBlockM, kStages, KeyLayout>;
  // LSE and delta of each stage, where no MMA adds them.
  struct LseDeltaRows {
    alignas(128) float lse[kStages * kBlockM];
    alignas(128) float neg_delta[kStages * kBlockM];
  };

  static constexpr int kBiasStages = !kHasPairTiles || !kGeneral ? 0 : kHeadDim <= 64 ? 2 : 1;
  using PairTiles =
      std::conditional_t<kHasPairTiles, BackwardPairTilesSm90<Element, kBlockM, kBlockN, kBiasStages>,
                         NoBackwardPairTiles>;

  struct SharedStorage {
    alignas(1024) Element k[cosize_v<LayoutKt>];
    alignas(1024) Element v[cosize_v<LayoutV>];
    alignas(1024) Element q[cosize_v<LayoutQ>];
    alignas(1024) Element dout[cosize_v<LayoutDO>];
    alignas(1024) Element ds[cosize_v<LayoutDS>];
    alignas(1024) Element peer_k[kPeerKElements];
    alignas(1024) float dq[kDqSmemFloats];
    alignas(128) uint4 p[kPSmemChunks];
    std::conditional_t<kLseDeltaMma, typename LseDeltaProduct::Storage, LseDeltaRows> lse_delta;
    TmaRing<1> ring_k, ring_v, ring_p;
    TmaRing<kStages> ring_q, ring_ds;
    TmaRing<kStagesDO> ring_dout;
    TmaRing<1> ring_dq[kConsumers], ring_dq_accum[kConsumers];
    TmaRing<2> ring_tiles;
    KvTile tiles[2];
    int sum_indices[2];  // of tiles with GQA splits: see GqaSums
    DqConvertBlock convert_block;
    // For a cluster, in which dS and the index of the next tile come from the peer.
    TmaRing<1> ring_peer_k, ring_tile_index;
    cutlass::arch::ClusterTransactionBarrier peer_ds[kStages];
    cutlass::arch::ClusterBarrier ds_read[kStages];  // both warpgroups and the peer have read dS
    int tile_index;
    // This is the last member because compute-sanitizer takes accesses to the operands of LseDeltaMma for
    // larger than they are and would report the end of shared memory.
    alignas(kConvertsDq ? 1024 : 128) float dq_accum[kDqAccumSmemFloats];
    [[no_unique_address]] PairTiles pairs;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace flash_cute
