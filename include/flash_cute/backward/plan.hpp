// What a call of the backward runs: decided here, before anything is launched. The launch executes it,
// explain prints it. Knows no CUDA.
#pragma once

#include "flash_cute/attention/block_places.hpp"
#include "flash_cute/attention/scheduler.hpp"
#include "flash_cute/backward/tiles.hpp"

namespace flash_cute {

struct BackwardPlan {
  BackwardTile tile;
  QueryTile query_tile;
  bool runs_keys;     // the kernel for dK and dV
  bool runs_queries;  // the kernel for dQ alone
  bool sums_dq;       // dQ comes from the first: adds to sums that a kernel after it converts
  bool in_turns;      // and each of them in one order
  // Of a head, in the first two kernels' tiles and in the last one's.
  int key_blocks, query_blocks, query_tiles;
  int tiles;           // of the first kernel
  int blocks;          // of its grid
  TileOrder order;     // of its blocks of keys, on Hopper, where sequences are alike
  int64_t rows;        // of the workspace, over all heads
  int dq_columns;      // of the sums of dQ, 0 if there are none
  int heads, slots;    // see SumSlots
  int64_t sum_blocks;  // blocks of queries that have sums
  int64_t counters;
  int64_t workspace_bytes;

  // Where each part of a workspace begins.
  static constexpr int kCounters = 4;  // tiles claimed, the queue's, what check_turns writes
  BackwardWorkspace parts(void* workspace) const {
    auto* const floats = static_cast<float*>(workspace);
    float* const end = floats + 2 * rows;
    int* const ints = reinterpret_cast<int*>(end + sum_blocks * tile.block_m * dq_columns);
    int* const additions = ints + kCounters;  // behind what check_turns writes
    int* const finished = additions + (in_turns ? sum_blocks : 0);
    int* const added = finished + slots;
    return {.lse = floats,
            .delta = floats + rows,
            .dq = sums_dq ? end : nullptr,
            .sum_blocks = sum_blocks,
            .additions = in_turns ? additions : nullptr,
            .in_turns = in_turns,
            .slots = {slots, finished, added, added + heads, ints + 1, ints + 2},
            .claimed = counters > 0 ? ints : nullptr};
  }
};

inline BackwardTile tile_for(BackwardTiles const& tiles, int bucket, BackwardParams const& params) {
  ProblemShape const& shape = params.shape;
  int const batch = params.lengths.cu_seqlens_q ? larger(1, shape.batch) : 1;
  int index = 0;
  auto fits = [&](BackwardTile const& tile) {
    return tile.smem_bytes(bucket) <= params.device.smem_bytes && tile.pays_from <= shape.seqlen_q / batch;
  };
  while (index + 1 < tiles.count() && !fits(tiles.keys[index])) ++index;
  return tiles.keys[index];
}

// The blocks of keys in the order of the forward's blocks of queries: the mask seen from the keys.
inline TileOrder key_order(BackwardParams const& params, int block_n) {
  ProblemShape const& shape = params.shape;
  ProblemShape const of_keys{shape.batch,    shape.heads_kv, shape.heads_kv,
                             shape.seqlen_k, shape.seqlen_q, shape.head_dim};
  return TileOrder::make(of_keys, params.mask.transposed(), PackedRows(block_n, 1), params.device.l2_bytes,
                         2 * params.device.multiprocessors);
}

inline BackwardPlan plan_backward(Family family, int bucket, BackwardParams const& params, bool needs_dq,
                                  bool needs_dkv, bool deterministic) {
  BackwardPlan plan{};
  bool const one_kernel = family == Family::sm90;
  BackwardTiles const tiles = backward_tiles(family, bucket);
  plan.tile = tile_for(tiles, bucket, params);
  plan.query_tile = tiles.queries;
  ProblemShape const& shape = params.shape;
  plan.runs_keys = needs_dkv || one_kernel;
  plan.sums_dq = needs_dq && (one_kernel || (needs_dkv && !deterministic));
  plan.in_turns = plan.sums_dq && deterministic;
  plan.runs_queries = needs_dq && !plan.sums_dq;
  BlockPlaces const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, plan.tile.block_n};
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, plan.tile.block_m};
  BlockPlaces const alone{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, plan.query_tile.block_m};
  plan.key_blocks = keys.count();
  plan.query_tiles = plan.runs_queries ? alone.count() : 0;
  plan.query_blocks = queries.count();
  plan.rows = int64_t(shape.heads_q) * queries.count() * plan.tile.block_m;
  plan.tiles = plan.blocks = plan.key_blocks * shape.heads_kv;
  if (one_kernel) plan.blocks = smaller(plan.tiles, params.device.multiprocessors);
  if (one_kernel && !params.lengths.given && plan.tiles > 0)
    plan.order = key_order(params, plan.tile.block_n);
  plan.dq_columns = plan.sums_dq ? sum_columns(family, bucket) : 0;
  int64_t const blocks = int64_t(shape.heads_q) * plan.query_blocks;
  if (plan.sums_dq) plan.sum_blocks = blocks;
  if (one_kernel && plan.sums_dq && !params.lengths.given && plan.tiles > 0) {
    // Tiles of a section of heads are under way together, and those of the section before may still be; and
    // there is a slot for each tile under way, where heads have few.
    int const tiles = 2 * params.device.multiprocessors;
    int const wanted = larger(2 * int(plan.order.section.value), ceil_div(tiles, plan.order.m_blocks));
    plan.heads = shape.batch * shape.heads_kv;
    plan.slots = smaller(plan.heads, wanted);
    plan.sum_blocks =
        int64_t(plan.slots) * (shape.heads_q / shape.heads_kv) * (plan.query_blocks / shape.batch);
  }
  if (one_kernel) {
    plan.counters = BackwardPlan::kCounters + (plan.in_turns ? plan.sum_blocks : 0) +
                    (plan.slots > 0 ? plan.slots + 2 * plan.heads : 0);
  }
  plan.workspace_bytes =
      (2 * plan.rows + plan.sum_blocks * plan.tile.block_m * plan.dq_columns) * int64_t(sizeof(float)) +
      plan.counters * int64_t(sizeof(int));
  return plan;
}

}  // namespace flash_cute
