// The tile shape of every compiled kernel of the backward, each row with the measurement that chose it, if
// another was measured (H200, bf16).
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

// A thread block keeps a block of keys, and blocks of queries pass by it.
struct BackwardTile {
  // The queries of a step.
  int block_m;
  // The keys of a thread block, or of all thread blocks that share a tile.
  int block_n;
  // The stages of Q and dO in shared memory.
  int stages;
  // The warps side by side along the keys of S, dK and dV.
  int warps_keys;
  // The warps side by side along the queries of S and the columns of dK and dV; in a cluster, where
  // warpgroups split the work, two.
  int warps_across;
  // On Ampere, so many of the same warps lie along the queries of dQ, the others along its columns.
  int warps_queries = 0;
  // Registers must leave room for so many thread blocks.
  int blocks_per_sm = 1;
  // The tile is chosen if a key is seen by at least so many queries.
  int pays_from = 0;
  // The stages of dO, where these are fewer than those of Q.
  int stages_dout = 0;
  // There are two kernels, with and without accumulators of dQ, instead of one that asks.
  bool dq_at_compile_time = false;
  // The thread blocks that share a tile: its keys, and by columns its part of dQ.
  int cluster = 1;
  // On Hopper, LSE and delta are added to S and dP by a product (see LseDeltaMma).
  bool lse_delta_mma = false;
  // On Hopper, so many slices of K and of V, 16 columns each, stay in registers (see RegisterSlices).
  int register_slices = 0;
  // On Ampere, where two halves of a thread block's warps split the work (see
  // backward/sm80/two_role_mainloop.hpp): so many warps of a half lie along the keys of dV or dK, the others
  // along the columns. warps_keys and warps_across are then those of a half, for S or dP.
  int role_warps_keys = 0;
  // On Hopper, shared memory has what a step asks where scores are general: a tile of a bias, and words of
  // the pairs that are seen and kept.
  bool has_pair_tiles = false;

  constexpr bool has_two_roles() const { return role_warps_keys > 0; }
  constexpr int warps() const { return warps_keys * warps_across * (has_two_roles() ? 2 : 1); }
  // On Hopper, shared memory has room for complete accumulators of dQ, so that the main kernel can convert
  // them.
  constexpr bool has_room_for_sums() const { return warps_across == 1 && !has_pair_tiles; }
  constexpr bool operator==(BackwardTile const&) const = default;

  // Of the Ampere family's, exactly: K and V; Q, dO and two floats of each query, or four; dS, P where warps
  // share it, and as floats where they split the work. On Hopper every tile fits, whatever this says.
  constexpr int smem_bytes(int head_dim, int element_bytes) const {
    int const scores = (warps_across > 1 ? 2 : 1) * block_m * block_n;
    int const floats = (lse_delta_mma ? 4 : 2) * stages * block_m + (has_two_roles() ? block_m * block_n : 0);
    return element_bytes * (2 * block_n * head_dim + 2 * stages * block_m * head_dim + scores) +
           floats * int(sizeof(float));
  }
};

constexpr int kTileBytes = 128;  // of shared memory, at most, where a block keeps what it knows of its tile

// For dQ alone: a thread block keeps a block of queries, and blocks of keys pass by it.
struct QueryTile {
  int block_m, block_n, stages, warps;
  int blocks_per_sm = 1;
};

// The first tile that fits is taken: into the shared memory of a thread block, which has 227 KB on Hopper,
// 163 KB on 8.0 and 99 KB on 8.6 and 8.9, where the last tile still fits; and to the problem, if pays_from is
// given.
struct BackwardTiles {
  static constexpr int kMost = 3;
  BackwardTile keys[kMost];
  QueryTile queries = {};

  constexpr int count() const {
    int count = 0;
    while (count < kMost && keys[count].warps() > 0) ++count;
    return count;
  }
};

// Those in which all warps work on every product: no others are compiled where the mask is a table.
constexpr BackwardTiles without_split_work(BackwardTiles const& tiles) {
  BackwardTiles kept{.keys = {}, .queries = tiles.queries};
  int count = 0;
  for (BackwardTile const& tile : tiles.keys) {
    if (!tile.has_two_roles()) kept.keys[count++] = tile;
  }
  return kept;
}

// On Hopper dQ of an M block is added in so many parts: by each of two warpgroups, in a cluster of each of
// its thread blocks.
constexpr int sum_parts(BackwardTile const& tile) { return 2 * tile.cluster; }

// The Ampere family's, for large head dims: one whose halves split the work, and one for 99 KB of shared
// memory.
constexpr BackwardTile kSmallTile{
    .block_m = 32, .block_n = 32, .stages = 1, .warps_keys = 2, .warps_across = 2, .warps_queries = 2};
constexpr BackwardTile kSplitTile{.block_m = 64,
                                  .block_n = 64,
                                  .stages = 2,
                                  .warps_keys = 2,
                                  .warps_across = 2,
                                  .warps_queries = 2,
                                  .dq_at_compile_time = true,
                                  .role_warps_keys = 1};

constexpr BackwardTiles backward_tiles_sm80(int head_dim) {
  switch (head_dim) {
    // 64 x 64, two blocks an SM, loses 5% where 1k queries and more see a key, wins 2 to 8% where 512 or
    // fewer do, and loses 1% at 512, full. 64 x 128 with eight warps along the keys: 0.90 to 0.99 of
    // FlashAttention-2, these 1.02 to 1.12.
    case 64:
      return {.keys = {{.block_m = 128,
                        .block_n = 128,
                        .stages = 2,
                        .warps_keys = 4,
                        .warps_across = 2,
                        .warps_queries = 4,
                        .pays_from = 1024,
                        .dq_at_compile_time = true},
                       {.block_m = 64,
                        .block_n = 64,
                        .stages = 2,
                        .warps_keys = 4,
                        .warps_across = 1,
                        .warps_queries = 2,
                        .blocks_per_sm = 2,
                        .dq_at_compile_time = true}},
              .queries = {.block_m = 128, .block_n = 64, .stages = 2, .warps = 8}};
    // Two blocks an SM. Four warps along the keys: up to 7% less; 64 x 128: 1% more at 16k, 7% less at 512
    // causal.
    case 96:
      return {.keys = {{.block_m = 64,
                        .block_n = 64,
                        .stages = 2,
                        .warps_keys = 2,
                        .warps_across = 2,
                        .warps_queries = 2,
                        .blocks_per_sm = 2}},
              .queries = {.block_m = 128, .block_n = 64, .stages = 2, .warps = 8}};
    // Two blocks an SM. 64 x 128 with eight warps: 1 to 6% less; all of them along the keys: 6 to 10%. Two
    // kernels with and without sums of dQ: 2% less; at head dims 64 and 256 3% more.
    case 128:
      return {.keys = {{.block_m = 64,
                        .block_n = 64,
                        .stages = 2,
                        .warps_keys = 2,
                        .warps_across = 2,
                        .warps_queries = 2,
                        .blocks_per_sm = 2},
                       {.block_m = 64,
                        .block_n = 64,
                        .stages = 1,
                        .warps_keys = 2,
                        .warps_across = 2,
                        .warps_queries = 2}},
              .queries = {.block_m = 64, .block_n = 64, .stages = 2, .warps = 4, .blocks_per_sm = 2}};
    // All warps at every product: 19% less, in another run. Of these, four along the keys: another 2 to 8%.
    case 192:
      return {.keys = {kSplitTile,
                       {.block_m = 64,
                        .block_n = 64,
                        .stages = 2,
                        .warps_keys = 2,
                        .warps_across = 4,
                        .warps_queries = 2},
                       kSmallTile},
              .queries = {.block_m = 64, .block_n = 64, .stages = 1, .warps = 4}};
    // All warps at every product: 7 to 20% less. Of these, one stage loses 6 to 10%, four warps along the
    // keys 12 to 15%; 32 x 64 20%.
    case 256:
      return {.keys = {kSplitTile,
                       {.block_m = 64,
                        .block_n = 64,
                        .stages = 1,
                        .warps_keys = 2,
                        .warps_across = 4,
                        .warps_queries = 2},
                       kSmallTile},
              .queries = {.block_m = 64, .block_n = 32, .stages = 1, .warps = 4}};
  }
  return {};
}

constexpr BackwardTiles backward_tiles_sm90(int head_dim) {
  switch (head_dim) {
    // 64 queries, three stages: 20% less. Terms (H200): 512 +1 and +2% (full, causal), 1k +3 and +1%, 2k +8
    // and +4%, 16k +11%.
    case 64: {
      // Not const: GCC gives a kernel's value that was copied from a const object another name than the one
      // that nvcc registers, and no call finds such a kernel (.ci/run looks for these names).
      BackwardTile tile = {.block_m = 128, .block_n = 128, .stages = 2, .warps_keys = 8, .warps_across = 1};
      BackwardTile with_terms = tile;
      with_terms.lse_delta_mma = true;
      with_terms.pays_from = 1024;
      return {.keys = {with_terms, tile}};
    }
    // No other was measured (80 queries might fit: docs/experiments/backward_sm90.md), at 96 none. Without
    // terms both spill, and lose 10 and 37% (H200, without register slices). Register slices: 96 +2.7%, 128
    // +0.4%.
    case 96:
    case 128:
      return {.keys = {{.block_m = 64,
                        .block_n = 128,
                        .stages = 2,
                        .warps_keys = 8,
                        .warps_across = 1,
                        .lse_delta_mma = true,
                        .register_slices = head_dim == 96 ? 2 : 0}}};
    // 64 keys, by one thread block: 14 to 32% less (H100). Register slices: none 3% less, four 0.5 to 2%
    // less; all twelve serialise products.
    case 192:
      return {.keys = {{.block_m = 64,
                        .block_n = 128,
                        .stages = 2,
                        .warps_keys = 4,
                        .warps_across = 2,
                        .cluster = 2,
                        .register_slices = 8}}};
    // 64 keys, by one thread block: 8 to 20% less, as additions to dQ bound it. Register slices: 0.
    case 256:
      return {.keys = {{.block_m = 64,
                        .block_n = 128,
                        .stages = 2,
                        .warps_keys = 4,
                        .warps_across = 2,
                        .stages_dout = 1,
                        .cluster = 2}}};
  }
  return {};
}

// Of float32, for products of either precision. In the last tile of 256, which needs 163 KB of shared memory,
// warps share scores.
constexpr BackwardTiles backward_tiles_fp32(int head_dim) {
  switch (head_dim) {
    case 64:
      return {.keys = {{.block_m = 64,
                        .block_n = 64,
                        .stages = 1,
                        .warps_keys = 4,
                        .warps_across = 1,
                        .warps_queries = 2,
                        .blocks_per_sm = 2,
                        .dq_at_compile_time = true}},
              .queries = {.block_m = 64, .block_n = 64, .stages = 1, .warps = 4, .blocks_per_sm = 2}};
    case 128:
      return {.keys = {{.block_m = 32,
                        .block_n = 64,
                        .stages = 1,
                        .warps_keys = 4,
                        .warps_across = 1,
                        .warps_queries = 2,
                        .blocks_per_sm = 2,
                        .dq_at_compile_time = true},
                       {.block_m = 32,
                        .block_n = 32,
                        .stages = 1,
                        .warps_keys = 2,
                        .warps_across = 2,
                        .warps_queries = 2,
                        .blocks_per_sm = 2,
                        .dq_at_compile_time = true}},
              .queries = {.block_m = 64, .block_n = 32, .stages = 1, .warps = 4, .blocks_per_sm = 2}};
    case 256:
      return {.keys = {{.block_m = 32,
                        .block_n = 32,
                        .stages = 1,
                        .warps_keys = 2,
                        .warps_across = 4,
                        .warps_queries = 2,
                        .dq_at_compile_time = true}},
              .queries = {.block_m = 32, .block_n = 16, .stages = 1, .warps = 2, .blocks_per_sm = 2}};
  }
  return {};
}

// Where pairs are hidden; where scores may be others than the product of Q and K, too, each thread adds their
// LSE and delta, and at head dim 64 with 128 queries they spill.
constexpr BackwardTiles backward_tiles_of_pairs(int head_dim, Scores scores) {
  BackwardTiles tiles = backward_tiles_sm90(head_dim);
  BackwardTile& tile = tiles.keys[0];
  if (scores == Scores::general) tile.lse_delta_mma = false;
  tile.pays_from = 0;
  tile.has_pair_tiles = tile.cluster == 1;
  if (head_dim == 64) tile.block_m = 64;
  tiles.keys[1] = {};
  return tiles;
}

constexpr BackwardTiles backward_tiles(Family family, HeadDims head_dims, Masking masking = Masking::window,
                                       Scores scores = Scores::product, int element_bytes = 2) {
  int const head_dim = head_dims.qk;
  if (head_dims.v != head_dim) {  // the tile that dK and Q of this head dim have
    return family == Family::sm90 && head_dims == HeadDims{192, 128} ? backward_tiles_sm90(head_dim)
                                                                     : BackwardTiles{};
  }
  if (element_bytes == 4) return family == Family::sm80 ? backward_tiles_fp32(head_dim) : BackwardTiles{};
  if (family == Family::sm90) {
    return scores == Scores::product ? backward_tiles_sm90(head_dim)
                                     : backward_tiles_of_pairs(head_dim, scores);
  }
  BackwardTiles const tiles = backward_tiles_sm80(head_dim);
  return masking == Masking::table ? without_split_work(tiles) : tiles;
}

}  // namespace flash_cute
