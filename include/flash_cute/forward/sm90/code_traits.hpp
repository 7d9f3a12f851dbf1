// Types of the Hopper family's forward of few rows over a cache of codes of 8 bits.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/element.hpp"
#include "flash_cute/core/sm90/pipeline.hpp"
#include "flash_cute/forward/tile_source.hpp"
#include "flash_cute/scheduler/dynamic_scheduler.hpp"
#include "flash_cute/scheduler/split_list.hpp"

namespace flash_cute {

using namespace cute;

// Where codes of a warp's keys lie in shared memory: in panels of up to 128 codes a row, whose chunks of 16
// are permuted. Both products then read without conflicts of banks, but where panels are narrow: K four
// chunks of two neighbouring rows at once, V two chunks of every other row.
template <int kColumns, int kKeys>
struct CodeLayout {
  static constexpr int kChunk = 16;
  static constexpr int kPanel = kColumns % 128 == 0 ? 128 : kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kChunks = kPanel / kChunk, kPanels = kColumns / kPanel;
  static constexpr int kBytes = kKeys * kColumns;

  CUTE_DEVICE static int offset(int panel, int row, int chunk) {
    int const permuted = kPanel == 128  ? chunk ^ ((row & 6) ^ (row & 1) << 2)
                         : kPanel == 64 ? chunk ^ (row >> 1 & 3)
                                        : chunk;
    return (panel * kKeys + row) * kPanel + permuted * kChunk;
  }
};

// In shared memory: a tile, and its rows of Q.
template <int kSteps, int kRows>
struct CodeTile {
  SplitTile tile;
  float of_row[kRows];  // what scores of a row stand for
  uint4 q[kSteps][32];  // A of each k step, as lanes own it
};

template <class Instance_, ForwardKernel kernel>
struct CodeTraitsSm90 {
  using Instance = Instance_;
  using Source = SourceOf<kernel>;
  using Scheduler = DynamicScheduler;
  using Element = typename ElementOf<Instance::element>::type;
  static constexpr ForwardKernel kKernel = kernel;
  static constexpr ForwardTile kTile = kernel.tile;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kHeadDim = Instance::head_dim, kHeadDimV = Instance::head_dim_v;
  static constexpr int kRescaleThreshold = 8;  // see OnlineSoftmax
  static constexpr bool kGeneral = kernel.scores == Scores::general;

  // Warps that compute, each with its own keys of every block, and one that takes tiles. A list needs 256
  // threads.
  static constexpr int kWarps = kTile.warps, kKeys = kBlockN / kWarps;
  static constexpr int kThreads = larger(256, 32 * (kWarps + 1));
  static_assert(kBlockM == 16 && kKeys % 16 == 0 && kKeys <= 32);
  using LayoutK = CodeLayout<kHeadDim, kKeys>;
  using LayoutV = CodeLayout<kHeadDimV, kKeys>;

  // Codes that a lane has at once, of a row of a panel.
  static constexpr int kOwnK = smaller(16, LayoutK::kPanel / 4), kOwnV = LayoutV::kPanel / 8;
  static constexpr int kSteps = kHeadDim / 16, kStepsAtOnce = kOwnK / 4;  // of S = Q K^T
  static constexpr int kRowsAtOnce = kHeadDimV <= 128 ? 4 : 2;            // of O, that warps add up
  static constexpr int kResults = kHeadDimV <= 64 ? 2 : 1;                // of them

  struct SharedStorage {
    alignas(128) unsigned char k[kWarps][kStages][LayoutK::kBytes];
    alignas(128) unsigned char v[kWarps][kStages][LayoutV::kBytes];
    struct {
      alignas(16) float out[kWarps][kRowsAtOnce][kHeadDimV];
      float2 softmax[kWarps][kRowsAtOnce];  // references and sums
    } results[kResults];
    CodeTile<kSteps, kBlockM> tiles[2];
    TmaRing<2> ring_tiles;
    cutlass::arch::ClusterBarrier requested;
    SplitList<kThreads, false> list;
  };
  static_assert(sizeof(SharedStorage) <= 227 << 10);
};

}  // namespace flash_cute
