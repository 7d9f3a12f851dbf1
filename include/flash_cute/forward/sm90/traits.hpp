// Types of the Hopper family's forward: tile shapes, warpgroup products, shared-memory layouts.
#pragma once

#include <cuda.h>

#include <cute/tensor.hpp>

#include "flash_cute/attention/scores/pair_words.hpp"
#include "flash_cute/core/element.hpp"
#include "flash_cute/core/named_barrier.hpp"
#include "flash_cute/core/sm90/pipeline.hpp"
#include "flash_cute/forward/tile_source.hpp"
#include "flash_cute/scheduler/dynamic_scheduler.hpp"
#include "flash_cute/scheduler/split_list.hpp"

namespace flash_cute {

using namespace cute;

// The tensor maps of the operands.
struct ForwardMaps {
  CUtensorMap q, k, v, out, bias;
  bool has_boxes;  // where rows are loaded: has k and v, whose boxes have kBoxRows rows
};

// What a block of keys has beside K and V where pairs are hidden or scores are general: tiles of a bias, one
// for each consumer, and which pairs are seen and kept.
template <class Element, int kConsumers, int kBlockN, int kBiasStages_>
struct PairTilesSm90 {
  static constexpr int kBiasStages = kBiasStages_, kWordStages = 3;
  using LayoutBias = decltype(tile_to_shape(
      GMMA::Layout_K_SW128_Atom<Element>{},
      Shape<Int<kWarpgroupRows>, Int<kBlockN>, Int<larger(1, kBiasStages* kConsumers)>>{}));
  using Words = PairWords<kConsumers * kWarpgroupRows, kBlockN>;
  template <class Coords, bool kHasBits>
  using Visible = typename Words::Owned;
  static constexpr int kTileElements = kWarpgroupRows * kBlockN;
  alignas(1024) Element bias[kBiasStages * kConsumers * kTileElements];
  struct {
    Words seen, kept;
  } words[kWordStages];
  TmaRing<larger(1, kBiasStages)> ring_bias[kConsumers];
  TmaRing<kWordStages> ring_words;

  // The tile of a stage among all.
  CUTE_DEVICE static int tile(int stage, int consumer) { return stage * kConsumers + consumer; }
};
struct NoPairTiles {
  template <class Coords, bool kHasBits>
  using Visible = VisiblePairs<Coords, kHasBits>;
  static constexpr int kBiasStages = 0, kWordStages = 1;
};

// Of shared memory's 227 KB; a list of sequences takes the others, and where pairs may be hidden words of
// them.
constexpr int kMostOperandBytes = 224 << 10, kBytesOfPairs = 12 << 10;  // but for tiles of a bias

template <class Instance_, ForwardKernel kernel>
struct ForwardTraitsSm90 {
  using Instance = Instance_;
  using Source = SourceOf<kernel>;
  using Scheduler = std::conditional_t<kernel.tiles == Tiles::taken, DynamicScheduler, StaticScheduler>;
  static constexpr ForwardKernel kKernel = kernel;
  using Element = typename ElementOf<Instance::element>::type;

  static constexpr ForwardTile kTile = kernel.tile;
  static_assert(kTile.warps > 0 && kTile.warps % 4 == 0, "this head dim has no row in forward/tiles.hpp");
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kStagesQ = kTile.stages_q;
  // With a second stage for Q, a tile's first scores are computed while O of the tile before leaves.
  static constexpr bool kRunsAhead = kStagesQ > 1;
  static constexpr int kHeadDim = Instance::head_dim, kHeadDimV = Instance::head_dim_v;
  static constexpr int kRescaleThreshold = 8;  // see OnlineSoftmax

  // One producer warpgroup, two where rows are loaded for one consumer, consumers that own 64 rows each, and
  // where pairs may be hidden one that finds out about them, or two warps of the producer's: of four
  // warpgroups a thread has 128 registers at first, which products of 256 columns do not compile for.
  // setmaxnreg gives the consumers registers of the others.
  static constexpr int kConsumers = kTile.warps / 4;
  static_assert(kBlockM == kWarpgroupRows * kConsumers && kConsumers <= kMaxWarpgroups);
  static constexpr bool kGeneral = kernel.scores == Scores::general,
                        kHasPairTiles = kernel.scores != Scores::product && kernel.keys == Keys::whole;
  static constexpr bool kHasPairWarpgroup = kHasPairTiles && kHeadDimV < 256;
  static constexpr int kPairWarps = kHasPairWarpgroup ? 4 : 2;
  static constexpr bool kLoadsRows = kernel.loads == Loads::rows;  // by all producer warpgroups
  static constexpr bool kFoldsSplits = kernel.folds_splits(Family::sm90);
  static constexpr int kProducers = kLoadsRows && kConsumers == 1 && kTile.blocks_per_sm == 1 ? 2 : 1;
  static constexpr int kWarpgroups = kProducers + kConsumers + kHasPairWarpgroup,
                       kThreads = kWarpgroups * kWarpgroupThreads;
  // Where many queries read them, blocks that are seen whole may come by TMA: reading bounds few queries
  // only.
  static constexpr bool kMayLoadBoxes = kLoadsRows && kConsumers > 1;
  static constexpr int kBoxRows = 64;
  static constexpr int kPairRegisters = kHasPairTiles ? 72 : 0;
  static constexpr int kProducerRegisters = kConsumers == 3   ? 32
                                            : kProducers == 2 ? 128
                                            : kConsumers == 1 ? 88
                                            : kLoadsRows      ? (kHeadDimV < 256 ? 104 : 88)
                                            : kHasPairTiles && !kHasPairWarpgroup ? kPairRegisters
                                                                                  : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3     ? 160
                                            : kProducers == 2   ? 240
                                            : kConsumers == 1   ? 168
                                            : kLoadsRows        ? (kHeadDimV < 256 ? 200 : 208)
                                            : kHasPairWarpgroup ? 208
                                            : kHasPairTiles     ? 216
                                                                : 240;
  static constexpr int kLaunchRegisters =
      65536 / kThreads / kTile.blocks_per_sm / 8 * 8;  // each thread's at first
  static constexpr bool kMovesRegisters = kLaunchRegisters < kConsumerRegisters;
  static_assert(kProducers * kProducerRegisters + kHasPairWarpgroup * kPairRegisters +
                        kConsumers * kConsumerRegisters <=
                    kWarpgroups * kLaunchRegisters,
                "setmaxnreg would wait for registers that no warpgroup gives back");

  using ConsumerLayout = Layout<Shape<Int<kConsumers>, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kBlockM>, Int<kBlockN>, Int<kHeadDim>>>(),
      ConsumerLayout{}));
  static_assert(size<1>(typename MmaQK::AtomShape_MNK{}) == kBlockN,
                "CuTe makes do with narrow products where it has none of this many keys");
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kBlockM>, Int<kHeadDimV>, Int<kBlockN>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      ConsumerLayout{}));

  // Tiles lie in panels of 128 (or 64) bytes a row, which TMA swizzles and WGMMA reads; V's rows are its k
  // dimension.
  static constexpr int kPanel = kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 ? 64 : 32;
  template <class Wide, class Narrow>
  using PanelAtom = std::conditional_t<kPanel == 64, Wide, Narrow>;
  using AtomQK = PanelAtom<GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
  using AtomVt = PanelAtom<GMMA::Layout_MN_SW128_Atom<Element>, GMMA::Layout_MN_SW64_Atom<Element>>;
  using LayoutQ = decltype(tile_to_shape(AtomQK{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStagesQ>>{}));
  using LayoutK = decltype(tile_to_shape(AtomQK{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  using LayoutVt = decltype(tile_to_shape(AtomVt{}, Shape<Int<kHeadDimV>, Int<kBlockN>, Int<kStages>>{},
                                          Step<_2, _1, _3>{}));

  static constexpr int kStageElementsQ = kBlockM * kHeadDim, kStageElementsK = kBlockN * kHeadDim,
                       kStageElementsV = kBlockN * kHeadDimV;

  static constexpr bool kTakesBiasTiles = kernel.takes_bias_tiles(Family::sm90, Instance::head_dims);
  static constexpr int kBiasStages = !kTakesBiasTiles ? 0 : kHeadDim <= 64 ? 2 : 1;

  // O leaves through shared memory: at once where there is room for it, else panel by panel, two of them
  // where that is possible.
  static constexpr int kColumnsO = kRunsAhead ? kHeadDimV : kPanel;
  static constexpr int kElements = kStagesQ * kStageElementsQ + kStages * (kStageElementsK + kStageElementsV);
  static constexpr bool kTwoPanelsFit = int(sizeof(Element)) * (kElements + 2 * kBlockM * kPanel) <=
                                        kMostOperandBytes - kHasPairTiles * kBytesOfPairs -
                                            kBiasStages * kBlockM * kBlockN * int(sizeof(Element)) -
                                            kLoadsRows * kBlockN * kHeadDim;
  static constexpr int kStagesO = kRunsAhead || !kTwoPanelsFit ? 1 : 2;
  static constexpr int kPartsO = kHeadDimV / kColumnsO;
  using LayoutO = decltype(tile_to_shape(AtomQK{}, Shape<Int<kBlockM>, Int<kColumnsO>, Int<kStagesO>>{}));
  using MmaO = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kBlockM>, Int<kColumnsO>, _16>, GMMA::Major::K,
                           GMMA::Major::MN>(),
      ConsumerLayout{}));
  using StoreAtom = Copy_Atom<SM90_U32x4_STSM_N, Element>;

  // Where rows are loaded they may be of codes of 8 bits, which lie behind SharedStorage until they are
  // widened: a block in a slot, or half of one where there is no room. See CodeRing for how many there may
  // be.
  static constexpr int kBlockBytes = (228 << 10) / kTile.blocks_per_sm - (1 << 10), kListBytes = 3 << 10;
  static constexpr int kFreeBytes =
      kBlockBytes - kListBytes - int(sizeof(Element)) * (kElements + kStagesO * kBlockM * kColumnsO);
  static constexpr int kCodeParts = kFreeBytes < 2 * kBlockN * kHeadDim ? 2 : 1,
                       kMostCodeSlots = 3 * kCodeParts;
  static constexpr int kCodeBytes = kBlockN * kHeadDim / kCodeParts;
  static constexpr int kCodeSlots = kLoadsRows ? smaller(kMostCodeSlots, kFreeBytes / kCodeBytes) : 0;
  static_assert(!kLoadsRows || kCodeSlots >= 2);

  using PairTiles = std::conditional_t<kHasPairTiles,
                                       PairTilesSm90<Element, kConsumers, kBlockN, kBiasStages>, NoPairTiles>;

  struct SharedStorage {
    alignas(1024) Element q[cosize_v<LayoutQ>];
    alignas(1024) Element k[cosize_v<LayoutK>];
    alignas(1024) Element v[cosize_v<LayoutVt>];
    alignas(1024) Element o[cosize_v<LayoutO>];
    TmaRing<kStagesQ> ring_q[kConsumers];  // each warpgroup releases its own rows
    TmaRing<kStages> ring_k, ring_v;
    std::conditional_t<kernel.keys == Keys::split, SplitList<kThreads, kFoldsSplits>, VarlenList<VarlenOrder>>
        varlen_list;
    TileQueue tile_queue;
    std::conditional_t<kLoadsRows, SplitTile[2], char> code_tiles;  // whose codes are on their way
    [[no_unique_address]] PairTiles pairs;
  };
  static_assert(sizeof(SharedStorage) + kCodeSlots * kCodeBytes <= kBlockBytes);
};

}  // namespace flash_cute
