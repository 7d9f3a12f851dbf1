// The tile shape of every compiled kernel of the backward, each row with the measurement that chose it, if
// another was measured (H200, bf16).
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

// A block of keys stays, blocks of queries pass by.
struct BackwardTile {
  int block_m, block_n;   // queries of a step, keys of a thread block, or of all that share a tile
  int stages;             // of Q and dO in shared memory
  int warps_keys;         // warps side by side along the keys
  int warps_across;       // and along the queries of S, or the columns of dK and dV; in a cluster, where
                          // warpgroups split the work, two
  int warps_queries = 0;  // on Ampere, of the same warps: along the queries of dQ, others along its columns
  int blocks_per_sm = 1;  // thread blocks that registers must leave room for
  int pays_from = 0;      // queries that see a key
  int stages_dout = 0;    // of dO, where fewer than of Q
  bool knows_dq = false;  // two kernels, with and without sums of dQ, instead of one that asks
  int cluster = 1;        // thread blocks that share a tile: its keys, and its part of dQ by columns
  bool lse_delta_mma = false;  // on Hopper: do queries add LSE and delta by a product (see LseDeltaMma)?
  int register_slices = 0;     // on Hopper: of K and of V, 16 columns each, in registers (see RegisterSlices)
  // On Ampere, where two halves of a block's warps split the work (see backward/sm80/split_mainloop.hpp):
  // those of a half along the keys of dV or dK, others along the columns. Both above are then a half's, for S
  // or dP.
  int split_warps_keys = 0;

  constexpr bool splits_work() const { return split_warps_keys > 0; }
  constexpr int warps() const { return warps_keys * warps_across * (splits_work() ? 2 : 1); }
  // On Hopper: is there shared memory for complete sums of dQ, to make rows of them?
  constexpr bool has_room_for_sums() const { return warps_across == 1; }
  constexpr bool operator==(BackwardTile const&) const = default;

  // Of the Ampere family's, exactly: K and V; Q, dO and two floats of each query, or four; dS, P where warps
  // share it, and as floats where they split the work. On Hopper every tile fits, whatever this says.
  constexpr int smem_bytes(int head_dim, int element_bytes) const {
    int const scores = (warps_across > 1 ? 2 : 1) * block_m * block_n;
    int const floats = (lse_delta_mma ? 4 : 2) * stages * block_m + (splits_work() ? block_m * block_n : 0);
    return element_bytes * (2 * block_n * head_dim + 2 * stages * block_m * head_dim + scores) +
           floats * int(sizeof(float));
  }
};

constexpr int kTileBytes = 128;  // of shared memory, at most, where a block keeps what it knows of its tile

// A block of queries stays, blocks of keys pass by: for dQ alone.
struct QueryTile {
  int block_m, block_n, stages, warps;
  int blocks_per_sm = 1;
};

// Of the tiles of keys the first that fits is taken: into the shared memory of the GPU, whose blocks have 227
// KB on Hopper, 163 on 8.0, and the 99 of 8.6 and 8.9 that the last one fits into; and to the problem, if it
// says from how many queries on it pays.
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

// In which the sums of a block of queries are added on Hopper: by each of two warpgroups, and in a cluster by
// each of its blocks.
constexpr int sum_parts(BackwardTile const& tile) { return 2 * tile.cluster; }

// Of the Ampere family's large head dims.
constexpr BackwardTile kSplitTile{.block_m = 64,
                                  .block_n = 64,
                                  .stages = 2,
                                  .warps_keys = 2,
                                  .warps_across = 2,
                                  .warps_queries = 2,
                                  .knows_dq = true,
                                  .split_warps_keys = 1};

constexpr BackwardTiles backward_tiles(Family family, int head_dim) {
  if (family == Family::sm80) {
    switch (head_dim) {
      // 64 x 64, two blocks an SM, loses 5% where 1k queries and more see a key, wins 2 to 8% where 512 or
      // fewer do, and loses 1% at 512, full. 64 x 128 with eight warps along the keys: 0.90 to 0.99 of
      // FlashAttention-2, these 1.02 to 1.12.
      case 64:
        return {.keys = {{128, 128, 2, 4, 2, 4, 1, 1024, 0, true}, {64, 64, 2, 4, 1, 2, 2, 0, 0, true}},
                .queries = {128, 64, 2, 8}};
      // Two blocks an SM. Four warps along the keys: up to 7% less; 64 x 128: 1% more at 16k, 7% less at 512
      // causal.
      case 96: return {.keys = {{64, 64, 2, 2, 2, 2, 2}}, .queries = {128, 64, 2, 8}};
      // Two blocks an SM. 64 x 128 with eight warps: 1 to 6% less; all of them along the keys: 6 to 10%. Two
      // kernels with and without sums of dQ: 2% less; at head dims 64 and 256 3% more.
      case 128:
        return {.keys = {{64, 64, 2, 2, 2, 2, 2}, {64, 64, 1, 2, 2, 2}}, .queries = {64, 64, 2, 4, 2}};
      // All warps at every product: 19% less, in another run. Of these, four along the keys: another 2 to 8%.
      case 192:
        return {.keys = {kSplitTile, {64, 64, 2, 2, 4, 2}, {32, 32, 1, 2, 2, 2}}, .queries = {64, 64, 1, 4}};
      // All warps at every product: 7 to 20% less. Of these, one stage loses 6 to 10%, four warps along the
      // keys 12 to 15%; 32 x 64 20%.
      case 256:
        return {.keys = {kSplitTile, {64, 64, 1, 2, 4, 2}, {32, 32, 1, 2, 2, 2}}, .queries = {64, 32, 1, 4}};
    }
  }
  if (family == Family::sm90) {
    switch (head_dim) {
      // 64 queries, three stages: 20% less. Terms (H200): 512 +1 and +2% (full, causal), 1k +3 and +1%, 2k +8
      // and +4%, 16k +11%.
      case 64: {
        BackwardTile const tile = {
            .block_m = 128, .block_n = 128, .stages = 2, .warps_keys = 8, .warps_across = 1};
        BackwardTile with_terms = tile;
        with_terms.lse_delta_mma = true;
        with_terms.pays_from = 1024;
        return {.keys = {with_terms, tile}};
      }
      // No other was measured (80 queries might fit: docs/experiments/backward_sm90.md), at 96 none. Without
      // terms both spill, and lose 10 and 37% (H200, with held slices off). Held slices: 96 +2.7%, 128 +0.4%.
      case 96:
      case 128:
        return {.keys = {{.block_m = 64,
                          .block_n = 128,
                          .stages = 2,
                          .warps_keys = 8,
                          .warps_across = 1,
                          .lse_delta_mma = true,
                          .register_slices = head_dim == 96 ? 2 : 0}}};
      // 64 keys, by one thread block: 14 to 32% less (H100). Held slices: none 3% less, four 0.5 to 2% less;
      // all twelve serialise products.
      case 192:
        return {.keys = {{.block_m = 64,
                          .block_n = 128,
                          .stages = 2,
                          .warps_keys = 4,
                          .warps_across = 2,
                          .cluster = 2,
                          .register_slices = 8}}};
      // 64 keys, by one thread block: 8 to 20% less, as additions to dQ bound it. Held slices: 0.
      case 256:
        return {.keys = {{.block_m = 64,
                          .block_n = 128,
                          .stages = 2,
                          .warps_keys = 4,
                          .warps_across = 2,
                          .stages_dout = 1,
                          .cluster = 2}}};
    }
  }
  return {};
}

}  // namespace flash_cute
