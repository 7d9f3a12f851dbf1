// The tile shape of every compiled kernel, each row with the measurement that chose it (H100, bf16).
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

struct ForwardTile {
  int block_m, block_n;   // rows (queries, or several heads of each) and keys of a tile
  int stages;             // depth of the K/V pipeline in shared memory
  int warps;              // compute warps, stacked along the queries
  int stages_q = 1;       // 2: the next tile's Q may come while this one's is in use
  int blocks_per_sm = 1;  // thread blocks that registers must leave room for

  constexpr bool operator==(ForwardTile const&) const = default;
};

// A kernel's tile, and a smaller one (or none) for problems in which the first covers many pairs that are
// hidden or past the end (short or masked sequences, few queries) or leaves multiprocessors without a tile
// (one long sequence on few heads).
struct ForwardTiles {
  ForwardTile main, small = {};
  // The small tile is taken where it leaves less than this part of the main tile's work.
  double enough = 0;          // of uniform batches
  double enough_unequal = 0;  // of batches of unequal lengths
  // Where keys are cut into splits, for few queries and for many. Both have the same block of keys: a query's
  // bits are the same in either. Those of sm80 were not tuned (docs/decoding.md).
  ForwardTile decode = {}, prefill_split = {};
  ForwardTile general = {};  // where scores are not the product's, if not main
  // Of up to 16 rows over a cache of codes of 8 bits: warps share out the keys of a block, not its rows.
  ForwardTile codes = {};

  // Where the mask is a table. At head dim 128 blocks of 64 keys, beside 192 rows, lose 15% where sequences
  // are short.
  constexpr ForwardTile for_table(Scores scores) const {
    if (scores == Scores::product) return small.block_n > main.block_n ? small : main;
    return general.warps > 0 ? general : main;
  }
};

// Of float32, for products of either precision.
constexpr ForwardTiles forward_tiles_fp32(Family family, int head_dim) {
  if (family == Family::sm80) {
    switch (head_dim) {
      case 64: return {{.block_m = 128, .block_n = 32, .stages = 1, .warps = 4, .blocks_per_sm = 2}};
      case 128: return {{.block_m = 64, .block_n = 32, .stages = 1, .warps = 4, .blocks_per_sm = 3}};
      case 256: return {{.block_m = 64, .block_n = 16, .stages = 1, .warps = 4, .blocks_per_sm = 2}};
    }
  }
  return {};
}

// Where V has a width of its own. Of 192 and 128 (H200, mean of 512 to 16k): 192 x 64 loses 3% (causal 7%),
// 128 x 64 with two stages of Q 5% (6%).
constexpr ForwardTiles forward_tiles_of_pair(Family family, HeadDims head_dims) {
  if (family == Family::sm90 && head_dims == HeadDims{192, 128}) {
    return {{.block_m = 128, .block_n = 128, .stages = 2, .warps = 8}};
  }
  return {};
}

// A combination without a row has zero warps, which the kernel's traits refuse to compile. The tiles of the
// sm80 family stay within the 99 KB of shared memory that a block has on GPUs of 8.6 and 8.9. Measurements:
// docs/forward_sm80.md and docs/forward_sm90.md.
constexpr ForwardTiles forward_tiles(Family family, HeadDims head_dims, int element_bytes = 2) {
  int const head_dim = head_dims.qk;
  if (head_dims.v != head_dim) return forward_tiles_of_pair(family, head_dims);
  if (element_bytes == 4) return forward_tiles_fp32(family, head_dim);
  if (family == Family::sm80) {
    switch (head_dim) {
      // Two blocks an SM. 64 keys and three blocks win 2% at 512 causal and lose 3 to 9% else; two stages
      // lose 1 to 2% up to 2k and win 1 to 2% where sequences differ in length, but leave 8.6 room for one
      // block.
      case 64:
        return {.main = {.block_m = 128, .block_n = 128, .stages = 1, .warps = 4, .blocks_per_sm = 2},
                .decode = {.block_m = 64, .block_n = 128, .stages = 2, .warps = 4, .blocks_per_sm = 2},
                .prefill_split = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8}};
      // 96 keys with one stage lose 5-7% at 512 and win 4-8% from 2k on. 32 keys, or 64 rows, lose 6-14%.
      case 96: return {{.block_m = 128, .block_n = 64, .stages = 2, .warps = 4}};
      // 32 rows a warp: K and V are read from shared memory half as often as with 16, which loses 20%. 32 or
      // 48 keys lose 5-8% to 64.
      case 128:
        return {.main = {.block_m = 128, .block_n = 64, .stages = 2, .warps = 4},
                .decode = {.block_m = 64, .block_n = 64, .stages = 2, .warps = 4, .blocks_per_sm = 2},
                .prefill_split = {.block_m = 128, .block_n = 64, .stages = 2, .warps = 8}};
      // 48 keys lose 7-9%, 32 with two stages 13-18%. 80 lose 4% at 512 causal and win 4-8% from 2k on, but
      // leave an A100 room for one block only.
      case 192: return {{.block_m = 64, .block_n = 64, .stages = 1, .warps = 4}};
      // 48 keys lose 3-6%.
      case 256:
        return {.main = {.block_m = 64, .block_n = 64, .stages = 1, .warps = 4},
                .decode = {.block_m = 64, .block_n = 64, .stages = 1, .warps = 4},
                .prefill_split = {.block_m = 64, .block_n = 64, .stages = 1, .warps = 4}};
    }
  }
  if (family == Family::sm90) {
    switch (head_dim) {
      // 128 x 128 loses up to 19% on the same pairs, but wins 22% at 512 causal and 23% at 1024 causal.
      case 64:
        return {.main = {.block_m = 192, .block_n = 128, .stages = 2, .warps = 12, .stages_q = 2},
                .small = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2},
                .enough = 0.87,
                .enough_unequal = 0.935,
                .decode = {.block_m = 64, .block_n = 128, .stages = 2, .warps = 4, .blocks_per_sm = 2},
                .prefill_split = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2},
                .general = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2},
                .codes = {.block_m = 16, .block_n = 256, .stages = 3, .warps = 8}};
      // 128 x 128 loses 7-9% from 2k on, but wins 12-18% at 512. 192 x 112 spills.
      case 96:
        return {.main = {.block_m = 192, .block_n = 96, .stages = 2, .warps = 12, .stages_q = 2},
                .small = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2},
                .enough = 0.91,
                .enough_unequal = 0.955,
                .decode = {.block_m = 64, .block_n = 128, .stages = 3, .warps = 4, .stages_q = 2},
                .prefill_split = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2},
                .codes = {.block_m = 16, .block_n = 256, .stages = 2, .warps = 8}};
      // 128 x 128 loses 3-4% unmasked from 2k on (0.97 of the work), but wins 1-22% causal (up to 0.96)
      // and 9% at 512. 192 x 80 wins 1% at 16k and loses 1-3% at 2k and 4k to 192 x 64.
      case 128:
        return {.main = {.block_m = 192, .block_n = 64, .stages = 2, .warps = 12, .stages_q = 2},
                .small = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2},
                .enough = 0.965,
                .enough_unequal = 0.985,
                .decode = {.block_m = 64, .block_n = 128, .stages = 2, .warps = 4, .stages_q = 2},
                .prefill_split = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8},
                .general = {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8},
                .codes = {.block_m = 16, .block_n = 256, .stages = 2, .warps = 8}};
      // 96 keys lose 11% at 512 causal and win 2% at 512 and 2k; 80 lose 1-5%.
      case 192:
        return {.main = {.block_m = 128, .block_n = 64, .stages = 2, .warps = 8},
                .decode = {.block_m = 64, .block_n = 64, .stages = 3, .warps = 4},
                .prefill_split = {.block_m = 128, .block_n = 64, .stages = 2, .warps = 8},
                .codes = {.block_m = 16, .block_n = 128, .stages = 3, .warps = 8}};
      // 48 keys lose 6-9%; no more than 64 fit beside the stages of O.
      case 256:
        return {.main = {.block_m = 128, .block_n = 64, .stages = 2, .warps = 8},
                .decode = {.block_m = 64, .block_n = 64, .stages = 2, .warps = 4},
                .prefill_split = {.block_m = 128, .block_n = 64, .stages = 2, .warps = 8},
                .codes = {.block_m = 16, .block_n = 96, .stages = 3, .warps = 6}};
    }
  }
  return {};
}

}  // namespace flash_cute
