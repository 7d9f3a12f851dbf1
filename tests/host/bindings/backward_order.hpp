// The backward's orders: of its blocks of keys with the steps of each, and of the rows of dQ.
#pragma once

#include <memory>
#include <stdexcept>

#include "bindings/backward_plan.hpp"
#include "flash_cute/backward/params.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"

namespace flash_cute::host {

// What a kernel finds out about sequences that differ in length: see varlen_prepare.
struct KeyNumbers {
  int is_uniform = 1;
  std::vector<int> kv_block_offsets, offsets_q, offsets_k;
};

// Null where the plan has no room for them.
inline std::unique_ptr<KeyNumbers> varlen_prepare(BackwardParams& params, PlannedBackward const& plan) {
  if (plan.workspace.regions[int(WorkspaceRegion::is_uniform)].bytes == 0) return nullptr;
  auto numbers = std::make_unique<KeyNumbers>();
  auto& [is_uniform, kv_block_offsets, offsets_q, offsets_k] = *numbers;
  int const batch = params.shape.batch, block_n = plan.kernel.tile.block_n;
  auto order_offsets = [&](int const* offsets, int total, std::vector<int>& ordered) {
    for (int b = 0, most = 0; offsets && b <= batch; ++b) {
      ordered.push_back(most = larger(most, smaller(offsets[b], total)));
    }
    return offsets ? ordered.data() : nullptr;
  };
  VarlenWorkspace& varlen = params.workspace.varlen;
  varlen.offsets_q = order_offsets(params.lengths.cu_seqlens_q, params.shape.seqlen_q, offsets_q);
  varlen.offsets_k = order_offsets(params.lengths.cu_seqlens_k, params.shape.seqlen_k, offsets_k);
  params = params.with_ordered_offsets();
  auto const blocks = plan.family == Family::sm80 ? kv_blocks<Family::sm80, BackwardParams>
                                                  : kv_blocks<Family::sm90, BackwardParams>;
  kv_block_offsets.resize(batch + 1);
  for (int b = 0; b < batch; ++b) {
    int const of_sequence = blocks(params, plan.batch.mask, b, block_n);
    kv_block_offsets[b + 1] = kv_block_offsets[b] + of_sequence;
    is_uniform &= of_sequence == plan.order.m_blocks;
  }
  varlen.is_uniform = &is_uniform;
  varlen.kv_block_offsets = kv_block_offsets.data();
  return numbers;
}

// Of each block of keys in the launch order: batch entry, head of K and V and first key of those that count,
// and on Hopper the (head, block) of queries that its steps are for. In the Ampere family the entry is the
// number of the sequence, and keys are counted from its first one.
inline auto key_tiles(PlannedBackward const& plan) {
  BackwardParams params = plan.params;
  plan.part_groups(params);
  auto const numbers = varlen_prepare(params, plan);
  int const block_m = plan.kernel.tile.block_m, block_n = plan.kernel.tile.block_n;
  std::vector<std::pair<std::tuple<int, int, int>, std::vector<std::pair<int, int>>>> tiles;
  auto has_keys = [](KvTile const& tile) { return has_rows(tile.n_begin, tile.sequence.mask.seqlen_k); };
  if (plan.family == Family::sm80) {
    KvTileSchedulerSm80 const order{plan.order, plan.batch.mask};
    for (int index = 0; index < plan.blocks; ++index) {
      KvTile const tile = order(params, block_m, block_n, index);
      if (has_keys(tile))
        tiles.push_back({{tile.pair / params.shape.heads_kv, tile.head_kv, tile.n_begin}, {}});
    }
    return tiles;
  }
  KvTileScheduler const order{plan.order, plan.tiles, block_m, block_n, plan.query_start, plan.batch.mask};
  for (int index = 0; index < order.count(params); ++index) {
    KvTile const tile = order(params, index);
    if (!has_keys(tile)) {
      if (params.lengths.given) throw std::runtime_error("a tile without keys");
      continue;
    }
    std::vector<std::pair<int, int>> steps;
    int const heads = params.shape.heads_q / params.shape.heads_kv;
    for (QBlockIterator at(tile, heads, block_m, block_n); at.left > 0; at.advance()) {
      steps.emplace_back(at.head, at.block);
    }
    tiles.push_back({{tile.batch, tile.head_kv, tile.sequence.k_begin + tile.n_begin}, steps});
  }
  return tiles;
}

// For each index of the order in which dQ is converted: the M block's pair, sequence, head, number in the
// head, whether it has rows, and its first row in the sequence.
inline auto rows_order(VarlenBatch const& batch, int block_m) {
  BackwardParams const params = backward_params(batch);
  ProblemShape const& shape = params.shape;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, block_m};
  DqConvertOrder const order{params, batch.mask, queries};
  std::vector<std::tuple<int, int, int, int, bool, int>> blocks;
  for (int index = 0; index < order.count(); ++index) {
    DqConvertOrder::Block const block = order(index);
    blocks.emplace_back(block.pair, block.sequence.index, block.head, block.block_of_head, block.exists,
                        block.begin);
  }
  return blocks;
}

inline void bind_backward_order(py::module_& module) {
  module.def("key_tiles", &key_tiles);
  module.def("rows_order", &rows_order);
}

}  // namespace flash_cute::host
