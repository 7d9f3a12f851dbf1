// What a call of the backward runs: decided here, before anything is launched. The launch executes it,
// explain prints it. This header knows no CUDA.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/mask/mask_table.hpp"
#include "flash_cute/backward/gqa_parts.hpp"
#include "flash_cute/backward/kernel.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/backward/tiles.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

// How dQ is made.
enum class DqMethod {
  none,             // it is not asked for
  accumulated,      // by the kernel for dK and dV: its tiles add to accumulators, of which rows are made
  separate_kernel,  // by a kernel of its own
};

// What the accumulators of dQ hold before tiles add to them.
enum class DqBegin {
  first_tile_stores,
  zeros_by_block,  // the preprocess zero fills those of each of its blocks
  zeros_at_once,   // they belong to the zero-filled region of the workspace
};

struct DqPlan {
  DqMethod method;
  DqBegin begin;
  bool ordered;       // do tiles add in one order, so that sums are deterministic?
  bool is_converted;  // does the kernel for dK and dV convert accumulators to rows? Else a kernel after it
                      // does.
  int columns;        // of the accumulators; 0 where there are none

  bool is_accumulated() const { return method == DqMethod::accumulated; }
};

// How query heads that share K and V are shared out among tiles.
struct GqaPlan {
  int parts;         // parts of a group, each with tiles of its own
  int parts_of_sum;  // parts that add to one sum of dK and dV; 1 where a kernel adds them in one order
  int64_t floats;    // of all sums; 0 where tiles write dK and dV themselves
};

struct BackwardPlan {
  BackwardKernel kernel;
  QueryTile query_tile;
  bool runs_kv;  // does the kernel for dK and dV run?
  DqPlan dq;
  GqaPlan gqa;
  int kv_blocks, q_blocks;  // of a head, in tiles of the kernel for dK and dV
  int q_tiles;              // of a head, in tiles of the kernel for dQ alone
  int tiles;                // of the kernel for dK and dV
  int blocks;               // thread blocks of its grid
  int preprocess_blocks;    // thread blocks of the preprocess, but for those that zero fill rows
  TileOrder order;          // of blocks of keys, where sequences have equally many
  QueryStart query_start;   // the block of queries that a tile begins with
  int64_t rows;             // queries of all heads, in whole blocks
  bool lse_delta_in_dq;     // do LSE and delta lie where rows of dQ are written last?
  BackwardLayout workspace;

  // On Hopper a query's LSE and delta take two floats, or the bytes of its terms.
  int lse_delta_floats() const { return kernel.tile.lse_delta_mma ? kTermBytes / int(sizeof(float)) : 2; }

  // The params as kernels see them: each part of a group has a head of K and V.
  void part_groups(BackwardParams& params) const {
    params.gqa_parts = gqa.parts;
    params.shape.heads_kv *= gqa.parts;
  }

  // Thread blocks of the kernel that reduces sums of split groups.
  int gqa_reduce_blocks() const { return gqa.floats > 0 ? 2 * kernel.tile.cluster * (tiles / gqa.parts) : 0; }

  // The workspace as kernels see it.
  BackwardWorkspace parts(void* memory, BackwardParams const& params) const {
    auto floats = [&](WorkspaceRegion name) { return workspace.find<float>(memory, name); };
    auto ints = [&](WorkspaceRegion name) { return workspace.find<int>(memory, name); };
    auto* const in_dq = static_cast<float*>(lse_delta_in_dq ? params.dq.data : nullptr);
    bool const has_floats = !kernel.tile.lse_delta_mma;
    return {
        .lse_delta = {.lse = has_floats && in_dq ? in_dq : floats(WorkspaceRegion::lse),
                      .neg_delta = has_floats && in_dq ? in_dq + rows : floats(WorkspaceRegion::neg_delta),
                      .terms = terms(memory, params),
                      .log2_terms_of_row = log2_terms_of_row(params.shape.head_dim * params.element_bytes)},
        .dq = {.accum = floats(WorkspaceRegion::dq),
               .adds = ints(WorkspaceRegion::dq_adds),
               .ordered = dq.ordered,
               .blocks_taken = ints(WorkspaceRegion::dq_blocks_taken),
               .tiles_finished = ints(WorkspaceRegion::dq_tiles_finished)},
        .gqa = {.sums = floats(WorkspaceRegion::gqa),
                .floats_of_dk = gqa.floats / 2,
                .parts_of_sum = gqa.parts_of_sum},
        .varlen = {.is_uniform = ints(WorkspaceRegion::is_uniform),
                   .kv_block_offsets = ints(WorkspaceRegion::kv_block_offsets),
                   .offsets_q = ints(WorkspaceRegion::offsets_q),
                   .offsets_k = ints(WorkspaceRegion::offsets_k),
                   .block_n = kernel.tile.block_n,
                   .expected_kv_blocks = order.m_blocks},
        .mask_table = workspace.find<void>(memory, WorkspaceRegion::mask_table),
        .tile_counter = ints(WorkspaceRegion::tile_counter),
        .zero_fill = {.begin = static_cast<char*>(memory) + workspace.zero_begin,
                      .chunks = workspace.zero_bytes / kZeroFillBytes}};
  }

 private:
  TensorView terms(void* memory, BackwardParams const& params) const {
    if (!kernel.tile.lse_delta_mma) return {};
    if (lse_delta_in_dq) return params.dq;
    int const elements = kTermBytes / params.element_bytes;
    int64_t const of_row = int64_t(params.shape.heads_q) * elements;
    return {workspace.find<char>(memory, WorkspaceRegion::terms),
            params.lengths.cu_seqlens_q ? 0 : params.shape.seqlen_q * of_row, elements, of_row};
  }
  // A line of the L2 cache at most. One a row costs 3 to 8% up to 2k (head dim 128, H100).
  int log2_terms_of_row(int row_bytes) const {
    constexpr int kLineBytes = 128;
    int const bytes = lse_delta_in_dq ? smaller(row_bytes, kLineBytes) : kTermBytes;
    int log2 = 0;
    while (kTermBytes << (log2 + 1) <= bytes) ++log2;
    return log2;
  }
};

// Are there gradients that no tile writes on Hopper? A kernel before the first tile zero fills them.
inline bool has_unwritten(BackwardParams const& params, WindowMask const& mask) {
  return params.lengths.given || mask.fully_masked_rows() > 0;
}

// for_any: the same whatever the lengths are.
inline BackwardTile tile_for(BackwardTiles const& tiles, HeadDims bucket, BackwardParams const& params,
                             WindowMask const& mask, bool for_any) {
  int index = 0;
  auto fits = [&](BackwardTile const& tile) {
    return tile.smem_bytes(bucket.qk, params.element_bytes) + kTileBytes <= params.device.smem_bytes &&
           (for_any || tile.pays_from <= queries_of_keys(params, mask).mean);
  };
  while (index + 1 < tiles.count() && !fits(tiles.keys[index])) ++index;
  return tiles.keys[index];
}

// The blocks of keys in the order of the forward's blocks of queries: the mask seen from the keys. With a
// window heads go one by one only where the same kernel has room to make rows of dQ (window of 1024, d128:
// +6% at 16k, +12% at 4k; else -1%).
inline TileOrder kv_order(BackwardParams const& params, WindowMask const& mask, BackwardTile const& tile,
                          int wanted_tiles, bool one_by_one) {
  ProblemShape const& shape = params.shape;
  WindowMask const mean = mean_mask(params, mask);
  ProblemShape of_keys = shape;
  of_keys.heads_q = shape.heads_kv;
  of_keys.seqlen_q = mean.seqlen_k;
  of_keys.seqlen_k = mean.seqlen_q;
  return TileOrder::make(of_keys, mean.transposed(), PackGqa(tile.block_n, 1),
                         params.device.l2_bytes / params.element_bytes, wanted_tiles, one_by_one);
}

namespace plan {

// What the parts of a plan ask of a call.
struct BackwardCallFacts {
  Family family;
  HeadDims bucket;  // those of the kernel that serves the problem
  bool needs_dq, needs_dkv, deterministic;

  // On Hopper one kernel makes dQ, dK and dV, whatever is asked for, so that each gradient has the same bits.
  bool one_kernel() const { return traits_of(family).one_backward_kernel; }
};

// Storing first wins 0 to 12%, but loses 6% where the blocks of keys that share a block of queries do not run
// all at once (head dim 256, causal, 16k), and 1 to 5% where tiles have several heads, which they come to at
// different times, and the sums of one are large (2 to 24% more where they are not; H200).
inline bool stores_first(BackwardCallFacts const& facts, BackwardParams const& params, WindowMask const& mask,
                         BackwardPlan const& plan, int at_a_time) {
  ProblemShape const& shape = params.shape;
  int const keys_seen = keys_of_queries(params, mask).most;
  int64_t const of_sequence = ceil_div(plan.kv_blocks, larger(1, shape.batch)),
                of_queries = (int64_t(keys_seen) + plan.kernel.tile.block_m) / plan.kernel.tile.block_n + 2;
  bool const one_by_one = plan.kernel.tile.has_room_for_sums();
  bool const at_once = (one_by_one ? smaller(of_sequence, of_queries) : of_sequence) <= at_a_time;
  constexpr int kLargeSums = 1 << 20;  // floats
  bool const small = int64_t(queries_of_keys(params, mask).most) * facts.bucket.qk < kLargeSums;
  // Blocks of queries that nothing is added to must be 0.
  if (params.masking() == Masking::table) return false;
  return facts.one_kernel() && at_once && (small || shape.heads_q == shape.heads_kv);
}

// The order of blocks of keys of sequences that have equally many. Of unequal lengths it is that of the mean
// length, which serves where they turn out to be equal; not so on Hopper in a deterministic call, where an
// entry's bits would depend on the others. A head's blocks of keys read the same Q and dO and add to the same
// sums, so they come one after the other, and head by head: on Hopper, over sections of one round of thread
// blocks, 512 +3 to +5%, causal +1 to +3% up to 4k, else 0 (H200). Not so where tiles add in one order, for
// which they would wait: there sections have two rounds; and one round where a tile has several heads
// (causal, 1k to 4k: +1 to +6%; on Ampere, where heads share K and V, -2 to +36%), or all tiles have equal
// lengths at head dims 192 and 256 (256: 1% up to 1k).
inline TileOrder backward_order(BackwardCallFacts const& facts, BackwardParams const& params,
                                WindowMask const& mask, BackwardTile const& tile, int at_a_time) {
  ProblemShape const& shape = params.shape;
  bool const one_kernel = facts.one_kernel(), one_by_one = one_kernel && tile.has_room_for_sums();
  bool const uneven = are_seen_unevenly(params, mask);
  bool const by_pair = one_kernel
                           ? !facts.deterministic && shape.heads_q == shape.heads_kv && (one_by_one || uneven)
                           : shape.heads_q == params.heads_of_keys();
  int const rounds = one_kernel && facts.deterministic ? 2 : 1;
  TileOrder order = kv_order(params, mask, tile, by_pair ? 1 : rounds * at_a_time, one_by_one);
  // Tiles that differ in length would leave thread blocks idle at the end: the heads of the last two rounds
  // go side by side, longest first (4k causal: +2 to +4%; Ampere +1 to +5%).
  if (by_pair && uneven && order.section.value == 1)
    order.widen_last(ceil_div(2 * at_a_time, order.m_blocks));
  // Which keys many queries see only the device knows. Often these are the first ones, of causal text, of a
  // prefix, and beside a window.
  if (params.masking() == Masking::table && mask.is_even()) {
    order.descending = false;
    order.widen_last(ceil_div(order.sequences, 2));
  }
  return order;
}

// Terms lie in rows, of which the shortest has kTermBytes; LSE and delta as floats lie side by side, where a
// kernel after writes rows, and none before it does.
inline bool lse_delta_in_dq(BackwardCallFacts const& facts, BackwardParams const& params,
                            WindowMask const& mask, BackwardPlan const& plan) {
  ProblemShape const& shape = params.shape;
  int64_t const entries = params.lengths.cu_seqlens_q ? 1 : shape.batch;
  int64_t const dq_bytes = entries * shape.heads_q * shape.seqlen_q * shape.head_dim * params.element_bytes;
  bool const after = !plan.dq.is_converted && !(facts.one_kernel() && has_unwritten(params, mask));
  bool const fits = after && plan.lse_delta_floats() * plan.rows * int64_t(sizeof(float)) <= dq_bytes;
  return plan.dq.is_accumulated() && (plan.kernel.tile.lse_delta_mma || fits);
}

inline BackwardLayout backward_workspace(BackwardCallFacts const& facts, BackwardParams const& params,
                                         BackwardPlan const& plan, bool has_numbers) {
  using enum WorkspaceRegion;
  int const batch = params.shape.batch;
  BackwardLayout layout;
  if (!plan.lse_delta_in_dq && plan.kernel.tile.lse_delta_mma)
    layout.add<float>(terms, plan.lse_delta_floats() * plan.rows);
  if (!plan.lse_delta_in_dq && !plan.kernel.tile.lse_delta_mma) {
    layout.add<float>(lse, plan.rows);
    layout.add<float>(neg_delta, plan.rows);
  }
  if (plan.dq.begin == DqBegin::zeros_at_once) layout.begin_zero_fill();
  layout.add<float>(dq, plan.rows * plan.dq.columns, kZeroFillBytes);
  if (plan.dq.begin != DqBegin::zeros_at_once) layout.begin_zero_fill();
  layout.add<float>(gqa, plan.gqa.floats);
  if (facts.one_kernel()) {
    layout.add<int>(tile_counter, 1);
    if (plan.dq.is_accumulated() && plan.dq.begin == DqBegin::first_tile_stores) {
      layout.add<int>(dq_adds, sum_parts(plan.kernel.tile) * plan.rows / plan.kernel.tile.block_m);
    }
    if (plan.dq.is_converted) {
      layout.add<int>(dq_blocks_taken, 1);
      layout.add<int>(dq_tiles_finished, int64_t(batch) * params.shape.heads_kv);
    }
  }
  layout.end_zero_fill();
  if (has_numbers) {
    layout.add<int>(is_uniform, 1);
    layout.add<int>(kv_block_offsets, batch + 1);
    if (params.lengths.cu_seqlens_q) {
      layout.add<int>(offsets_q, batch + 1);
      layout.add<int>(offsets_k, batch + 1);
    }
  }
  // The kernel for dQ alone has a table of its own after the others are done.
  if (params.masking() == Masking::table) {
    auto table = [&](auto const& of, bool transposes) {
      return MaskTable::bytes(params, of.block_m, of.block_n, transposes);
    };
    bool const has_two = plan.dq.method == DqMethod::separate_kernel;
    layout.add<char>(mask_table,
                     larger(table(plan.kernel.tile, true), has_two ? table(plan.query_tile, false) : 0),
                     kRegionAlignment);
  }
  return layout;
}

}  // namespace plan

// bucket: the head dims of the kernel that serves the problem.
inline BackwardPlan plan_backward(Family family, HeadDims bucket, BackwardParams params,
                                  WindowMask const& mask, bool needs_dq, bool needs_dkv, bool deterministic) {
  plan::BackwardCallFacts const facts{family, bucket, needs_dq, needs_dkv, deterministic};
  bool const one_kernel = facts.one_kernel(), varlen = params.lengths.given;
  BackwardPlan plan{};
  Scores const scores = backward_scores(family, bucket, params.masking(), params.asked_scores());
  BackwardTiles const tiles = backward_tiles(family, bucket, params.masking(), scores, params.element_bytes);
  // On Hopper an entry's bits would else depend on the others' lengths in a deterministic call.
  plan.kernel.tile = tile_for(tiles, bucket, params, mask, one_kernel && deterministic && varlen);
  plan.query_tile = tiles.queries;
  ProblemShape const& shape = params.shape;
  auto blocks = [&](int const* offsets, int rows, int block) {
    return BatchBlocks{offsets, rows, shape.batch, block}.count();
  };
  plan.runs_kv = needs_dkv || one_kernel;
  plan.dq.method = !needs_dq                                     ? DqMethod::none
                   : one_kernel || (needs_dkv && !deterministic) ? DqMethod::accumulated
                                                                 : DqMethod::separate_kernel;
  plan.kv_blocks = blocks(params.lengths.cu_seqlens_k, shape.seqlen_k, plan.kernel.tile.block_n);
  plan.q_blocks = blocks(params.lengths.cu_seqlens_q, shape.seqlen_q, plan.kernel.tile.block_m);
  if (plan.dq.method == DqMethod::separate_kernel) {
    plan.q_tiles = blocks(params.lengths.cu_seqlens_q, shape.seqlen_q, plan.query_tile.block_m);
  }

  int const at_a_time =
      larger(1, params.device.multiprocessors * plan.kernel.tile.blocks_per_sm / plan.kernel.tile.cluster);
  plan.gqa.parts = choose_gqa_parts(params, mask, plan.kernel.tile, plan.kv_blocks, at_a_time, deterministic);
  plan.gqa.parts_of_sum = deterministic ? 1 : plan.gqa.parts;
  plan.kernel = backward_kernel(family, plan.kernel.tile, params.masking(), scores, plan.dq.is_accumulated(),
                                plan.gqa.parts > 1);
  plan.part_groups(params);
  plan.tiles = plan.blocks = plan.kv_blocks * shape.heads_kv;
  if (one_kernel) plan.blocks = smaller(plan.tiles, at_a_time) * plan.kernel.tile.cluster;
  if (needs_dkv && plan.gqa.parts > 1) {
    plan.gqa.floats = 2 * int64_t(plan.tiles / plan.gqa.parts_of_sum) * plan.kernel.tile.block_n *
                      larger(bucket.qk, bucket.v);
  }

  bool const first_stores = plan::stores_first(facts, params, mask, plan, at_a_time);
  plan.rows = int64_t(shape.heads_q) * plan.q_blocks * plan.kernel.tile.block_m;
  plan.dq.ordered = deterministic && plan.dq.is_accumulated();
  plan.dq.columns = plan.dq.is_accumulated() ? bucket.qk : 0;
  if (plan.dq.is_accumulated() && !deterministic && !first_stores) {
    plan.dq.begin = one_kernel ? DqBegin::zeros_at_once : DqBegin::zeros_by_block;
  }
  // The end of a tile is the time for two blocks of queries. Where there are more, a kernel after is faster.
  plan.dq.is_converted = one_kernel && plan.dq.is_accumulated() && plan.kernel.tile.has_room_for_sums() &&
                         plan.q_blocks <= 2 * int64_t(plan.kv_blocks);
  if (one_kernel) {
    plan.query_start = deterministic ? QueryStart::last : first_stores ? QueryStart::own : QueryStart::first;
  }
  // One for each block of queries of a head; more where these are few and there is more to zero fill.
  constexpr int64_t kFloatsToZeroFill = 4096;  // by a block
  plan.preprocess_blocks =
      int(larger<int64_t>(int64_t(plan.q_blocks) * shape.heads_q,
                          smaller<int64_t>(at_a_time, plan.gqa.floats / kFloatsToZeroFill)));

  bool const lengths_differ = varlen && (one_kernel || params.lengths.cu_seqlens_k);
  bool const has_keys = plan.tiles > 0 && shape.batch > 0 && mean_mask(params, mask).seqlen_k > 0;
  if (has_keys && !(one_kernel && deterministic && lengths_differ)) {
    plan.order = plan::backward_order(facts, params, mask, plan.kernel.tile, at_a_time);
    if (!one_kernel && !lengths_differ) plan.blocks = plan.order.tiles();  // no blocks past the end
  }
  plan.lse_delta_in_dq = plan::lse_delta_in_dq(facts, params, mask, plan);
  plan.workspace = plan::backward_workspace(facts, params, plan, lengths_differ && plan.runs_kv);
  return plan;
}

}  // namespace flash_cute
