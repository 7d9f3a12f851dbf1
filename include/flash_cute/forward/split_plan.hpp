// Whether keys are cut into splits, by which tile, and into how many.
#pragma once

#include "flash_cute/forward/choose_tile.hpp"
#include "flash_cute/forward/kernel.hpp"
#include "flash_cute/scheduler/split_order.hpp"

namespace flash_cute {

// See SplitOrder.
struct SplitPlan {
  SplitLengths lengths = {};
  bool is_uniform = false;    // are all sequences as long as the shape says?
  bool stores_tiles = false;  // do slots have their tiles?
  int rows = 0;               // of a slot
  int slots = 0;              // 0 where no sequence is cut
};

namespace plan {

// Of the heads that share keys, those that a tile of few queries has, which has so many rows.
inline int heads_of_few(ProblemShape const& shape, int rows = kWarpgroupRows) {
  int const group = shape.heads_q / shape.heads_kv;
  return ceil_div(group, ceil_div(group, rows));
}
inline bool are_few(ProblemShape const& shape, int rows = kWarpgroupRows) {
  return shape.seqlen_q <= rows / heads_of_few(shape, rows);
}

// The tile for a call whose keys are cut into splits: all heads that share keys are packed where the queries
// of the mean sequence leave room. The tile of codes has other bits than those of more rows.
inline ChosenTile choose_split_tile(Family family, ForwardTiles const& tiles, ForwardParams const& params,
                                    ProblemShape const& shape) {
  bool const has_code_tile = params.cache.is_fp8 && !params.batch_invariant && tiles.codes.warps > 0;
  bool const few = are_few(shape), fewest = has_code_tile && are_few(shape, tiles.codes.block_m);
  ForwardTile const& tile = fewest ? tiles.codes : few ? tiles.decode : tiles.prefill_split;
  int const packed = params.has_one_head_a_tile() ? 1
                     : few                        ? heads_of_few(shape, smaller(kWarpgroupRows, tile.block_m))
                                                  : packed_heads(family, shape, tile);
  return {tile, rows_of(family, tile, packed)};
}

// Are keys cut into splits? They are where few queries read many keys, which takes as long as memory does,
// and where tiles of queries leave half of the multiprocessors without one. (H200, d128, one head of 8192
// causal: 64 tiles -22%; 128 tiles would take 41% longer.) In a cache they may be of any lengths, which the
// host knows of one sequence alone.
inline bool splits(Family family, ForwardTiles const& tiles, ForwardParams const& params,
                   WindowMask const& mask) {
  if (tiles.decode.warps == 0 || params.scores.dropout.drops() || params.scores.bias.given) return false;
  CacheParams const& cache = params.cache;
  bool const is_one =
      params.shape.batch == 1 && !cache.table && !cache.is_fp8 && params.masking() == Masking::window;
  if ((cache.given && !is_one) || params.batch_invariant) return true;
  ProblemShape const mean = of_equal_lengths(params, mask, 1).shape;
  constexpr int kSome = 256, kLong = 2048;  // keys
  if (are_few(mean) && mean.seqlen_k >= kSome && mean.seqlen_k / 4 >= mean.seqlen_q) return true;
  PackGqa const rows = choose_split_tile(family, tiles, params, mean).rows;
  return mean.seqlen_k >= kLong && 2 * count_tiles(mean, rows) <= params.device.multiprocessors;
}

inline SplitLengths split_lengths(Family family, ForwardKernel const& kernel, ForwardParams const& params,
                                  int rows) {
  constexpr int kLeastKeys = 256;
  ForwardTile const& tile = kernel.tile;
  return {.block_n = tile.block_n,
          .blocks = params.device.multiprocessors * tile.blocks_per_sm,
          .rounds = params.lengths.given ? 2 : 16,
          .least_blocks = kLeastKeys / tile.block_n,
          .fixed_blocks = params.batch_invariant ? kFixedKeys / tile.block_n : 0,
          .rows = rows,
          .folds = params.batch_invariant && kernel.folds_splits(family)};
}

}  // namespace plan
}  // namespace flash_cute
