// What a call of the backward runs: decided here, before anything is launched. The launch executes it,
// explain prints it. Knows no CUDA.
#pragma once

#include "flash_cute/attention/block_places.hpp"
#include "flash_cute/backward/tiles.hpp"

namespace flash_cute {

struct BackwardPlan {
  BackwardTile tile;
  QueryTile query_tile;
  bool runs_keys;     // the kernel for dK and dV
  bool runs_queries;  // the kernel for dQ alone
  bool sums_dq;       // dQ comes from the first: adds to sums that a kernel after it converts
  // Of a head, in the first two kernels' tiles and in the last one's.
  int key_blocks, query_blocks, query_tiles;
  int64_t rows;  // of the workspace, over all heads
  int64_t workspace_bytes;

  // Where each part of a workspace begins.
  BackwardWorkspace parts(void* workspace) const {
    auto* const floats = static_cast<float*>(workspace);
    return {floats, floats + rows, sums_dq ? floats + 2 * rows : nullptr};
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

// bucket: the head dim of the kernel that serves the problem.
inline BackwardPlan plan_backward(Family family, int bucket, BackwardParams const& params, bool needs_dq,
                                  bool needs_dkv, bool deterministic) {
  BackwardPlan plan{};
  BackwardTiles const tiles = backward_tiles(family, bucket);
  plan.tile = tile_for(tiles, bucket, params);
  plan.query_tile = tiles.queries;
  ProblemShape const& shape = params.shape;
  plan.runs_keys = needs_dkv;
  plan.sums_dq = needs_dq && needs_dkv && !deterministic;
  plan.runs_queries = needs_dq && !plan.sums_dq;
  BlockPlaces const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, plan.tile.block_n};
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, plan.tile.block_m};
  BlockPlaces const alone{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, plan.query_tile.block_m};
  plan.key_blocks = keys.count();
  plan.query_tiles = alone.count();
  plan.query_blocks = queries.count();
  plan.rows = int64_t(shape.heads_q) * queries.count() * plan.tile.block_m;
  plan.workspace_bytes = plan.rows * int64_t(sizeof(float)) * (2 + (plan.sums_dq ? bucket : 0));
  return plan;
}

}  // namespace flash_cute
