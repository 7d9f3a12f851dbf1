// What a call of the backward runs: decided here, before anything is launched. The launch executes it,
// explain prints it. Knows no CUDA.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/backward/tiles.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

constexpr int kZeroBytes = 16;  // written at a time, see BackwardWorkspace

struct BackwardPlan {
  BackwardTile tile;
  QueryTile query_tile;
  bool runs_keys;      // the kernel for dK and dV
  bool runs_queries;   // the kernel for dQ alone
  bool sums_dq;        // dQ comes from the first: adds to sums that a kernel after it converts
  bool ordered;        // in one order, and on Hopper parts of a group add to theirs of dK and dV so, too
  bool zero_fills_dq;  // which are 0 before, else the first one is stored
  bool clears_all;     // of them at once; else a kernel that looks at queries clears those of each block
  bool converts_dq;    // and converts them itself, head by head
  // Of a head, in the first two kernels' tiles and in the last one's.
  int kv_blocks, q_blocks, q_tiles;
  int tiles;                    // of the first kernel
  int blocks;                   // of its grid
  int preprocess_blocks;        // of the kernel before it that looks at queries, if there is one
  int gqa_splits;               // of the query heads that share K and V: each has tiles of its own
  TileOrder order;              // of its blocks of keys, where sequences have equally many
  QueryStart query_start;       // whatever is asked for
  int64_t rows;                 // of the workspace, over all heads
  int dq_columns;               // of the sums of dQ, 0 if there are none
  int64_t counters, additions;  // integers of the workspace, and which of them count additions
  int64_t key_numbers;          // more integers, which nobody clears, behind these: see varlen_prepare
  int64_t pairs;                // of a sequence and a head of K and V, or of a part of a group
  int64_t gqa_floats;           // of the workspace: sums of what parts of groups find of dK and dV
  int splits_of_sum;            // that add to one of these, 1 if they are to be added in one order
  bool lse_delta_in_dq;         // do LSE and delta lie where rows of dQ will, which are written last?
  int64_t workspace_bytes;

  int lse_delta_floats() const { return tile.lse_delta_mma ? kTermBytes / int(sizeof(float)) : 2; }  // floats

  // As kernels see it: each part of a group has a head of K and V.
  void split_groups(BackwardParams& params) const {
    params.gqa_splits = gqa_splits;
    params.shape.heads_kv *= gqa_splits;
  }

  // Blocks of dK and of dV that are joined of such parts: by how many thread blocks.
  int gqa_reduce_blocks() const { return gqa_floats > 0 ? 2 * tile.cluster * (tiles / gqa_splits) : 0; }

  // Where each part of a workspace begins.
  BackwardWorkspace parts(void* workspace, BackwardParams const& params) const {
    auto* const begin = static_cast<float*>(workspace);
    float *const floats = lse_delta_in_dq ? static_cast<float*>(params.dq.data) : begin,
                 *const sums = lse_delta_in_dq ? begin : begin + lse_delta_floats() * rows,
                 *const gqa_sums = sums + rows * dq_columns;
    int* const ints = reinterpret_cast<int*>(gqa_sums + gqa_floats);
    int *const of_rows = ints + 1 + additions, *const numbers = key_numbers > 0 ? ints + counters : nullptr;
    bool const orders_offsets = numbers && params.lengths.cu_seqlens_q;
    int const offsets = params.shape.batch + 1;
    float* const zeros = clears_all ? sums : gqa_sums;
    return {.lse = tile.lse_delta_mma ? nullptr : floats,
            .delta = tile.lse_delta_mma ? nullptr : floats + rows,
            .terms = terms(begin, params),
            .log2_terms_of_row = log2_terms_of_row(params.shape.head_dim * params.element_bytes),
            .dq = sums_dq ? sums : nullptr,
            .gqa_sums = gqa_floats > 0 ? gqa_sums : nullptr,
            .floats_of_dk = gqa_floats / 2,
            .splits_of_sum = splits_of_sum,
            .additions = additions > 0 ? ints + 1 : nullptr,
            .ordered = ordered,
            .is_uniform = numbers,
            .kv_block_offsets = numbers ? numbers + 1 : nullptr,
            .offsets_q = orders_offsets ? numbers + 1 + offsets : nullptr,
            .offsets_k = orders_offsets ? numbers + 1 + 2 * offsets : nullptr,
            .key_block = tile.block_n,
            .expected_kv_blocks = order.m_blocks,
            .claimed = counters > 0 ? ints : nullptr,
            .taken = converts_dq ? of_rows : nullptr,
            .finished = converts_dq ? of_rows + 1 : nullptr,
            .zeros = zeros,
            .zero_chunks =
                (reinterpret_cast<float*>(ints + counters) - zeros) * int64_t(sizeof(float)) / kZeroBytes};
  }

 private:
  TensorView terms(void* begin, BackwardParams const& params) const {
    if (!tile.lse_delta_mma) return {};
    if (lse_delta_in_dq) return params.dq;
    int const elements = kTermBytes / params.element_bytes;
    int64_t const of_row = int64_t(params.shape.heads_q) * elements;
    return {begin, params.lengths.cu_seqlens_q ? 0 : params.shape.seqlen_q * of_row, elements, of_row};
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

// Are there gradients that no tile writes on Hopper? A kernel before does.
inline bool has_unwritten(BackwardParams const& params) {
  return params.lengths.given || params.mask.fully_masked_rows() > 0;
}

// The mask of a sequence of the mean length.
inline WindowMask mean_mask(BackwardParams const& params) {
  int const sequences = params.lengths.cu_seqlens_q ? larger(1, params.shape.batch) : 1;
  WindowMask mask = WindowMask::make(params.shape.seqlen_q / sequences, params.shape.seqlen_k / sequences,
                                     params.mask.left, params.mask.right);
  mask.seqlen_k -= mask.first_reachable_key();  // as in each sequence
  return mask;
}

// Keys that a query sees, one in the middle and at most; of the transposed mask, queries that see a key.
struct KeysSeen {
  int mean, most;

  static KeysSeen by(WindowMask const& mask) {
    auto keys_of = [&](int query) { return mask.end_key(query) - mask.first_key(query); };
    int const mean = keys_of(mask.seqlen_q / 2);
    int const of_ends = larger(keys_of(0), keys_of(larger(0, mask.seqlen_q - 1)));
    return {mean, larger(mean, of_ends)};
  }
};

inline KeysSeen keys_of_queries(BackwardParams const& params) { return KeysSeen::by(mean_mask(params)); }
inline KeysSeen queries_of_keys(BackwardParams const& params) {
  return KeysSeen::by(mean_mask(params).transposed());
}

// Is the key that is seen by most queries seen by a third more than one in the middle?
inline bool are_seen_unevenly(BackwardParams const& params) {
  auto const [mean, most] = queries_of_keys(params);
  return 3 * int64_t(most) > 4 * int64_t(mean);
}

// for_any: the same whatever the lengths are.
inline BackwardTile tile_for(BackwardTiles const& tiles, int bucket, BackwardParams const& params,
                             bool for_any) {
  int index = 0;
  auto fits = [&](BackwardTile const& tile) {
    return tile.smem_bytes(bucket, params.element_bytes) + kTileBytes <= params.device.smem_bytes &&
           (for_any || tile.pays_from <= queries_of_keys(params).mean);
  };
  while (index + 1 < tiles.count() && !fits(tiles.keys[index])) ++index;
  return tiles.keys[index];
}

// The blocks of keys in the order of the forward's blocks of queries: the mask seen from the keys. Behind a
// window heads go one by one only where the same kernel has room to make rows of dQ (window of 1024, d128:
// +6% at 16k, +12% at 4k; else -1%).
inline TileOrder key_order(BackwardParams const& params, BackwardTile const& tile, int wanted_tiles,
                           bool one_by_one) {
  ProblemShape const& shape = params.shape;
  WindowMask const mask = mean_mask(params);
  ProblemShape const of_keys{shape.batch,   shape.heads_kv, shape.heads_kv,
                             mask.seqlen_k, mask.seqlen_q,  shape.head_dim};
  return TileOrder::make(of_keys, mask.transposed(), PackedRows(tile.block_n, 1),
                         params.device.l2_bytes / params.element_bytes, wanted_tiles, one_by_one);
}

// Into how many equal parts a group of query heads is split. Each part has tiles of its own, and adds its dK
// and dV to sums of which a kernel behind makes rows; that costs some eight steps a tile. As few as come
// within 2% of the shortest time by a model of the schedule (H200; 8 query heads, causal, 1k to 16k: +5 to
// +16% over one part): where each key is seen by as many queries, whole rounds of tiles; else the work of
// all, and a quarter of the longest tile at the end. But no fewer than keep sums accurate: tensor cores seem
// to cut off what they add, and each row of queries makes dK and dV smaller by 1e-9 of them (H200; 2^22 rows:
// by eight times half a unit of fp16). In deterministic mode each part has sums of its own, so the number
// depends on the group and its lengths alone: then an entry of a dense or padded batch has the same bits in
// any. There each keeps so many steps that others of its kind would not help by 4%, and all sums, those of dQ
// among them, take at most twice what one part's would.
inline int gqa_splits(BackwardParams const& params, BackwardTile const& tile, int kv_blocks, int at_a_time,
                      bool deterministic) {
  ProblemShape const& shape = params.shape;
  auto const [mean, most] = queries_of_keys(params);
  bool const uneven = params.lengths.given || are_seen_unevenly(params);
  int const group = shape.heads_q / larger(1, shape.heads_kv);
  int64_t const tiles = int64_t(kv_blocks) * shape.heads_kv;
  auto steps = [&](int queries) { return int64_t(group) * ceil_div(queries, tile.block_m); };
  constexpr int kStepsToBegin = 8, kStepsAlone = 256;
  constexpr int64_t kRowsOfSum = 1 << 18, kMostTiles = 1 << 30;
  auto time = [&](int parts) {
    double const longest = double(steps(most)) / parts + kStepsToBegin;
    if (!uneven) return double(ceil_div(tiles * parts, int64_t(at_a_time))) * longest;
    double const of_all = tiles * (double(steps(mean)) + parts * kStepsToBegin) / at_a_time;
    return larger(longest, of_all + longest / 4);
  };
  int64_t const for_twice_the_memory = 2 + group * int64_t(shape.seqlen_q) / larger(1, 2 * shape.seqlen_k);
  int64_t const most_parts = deterministic ? smaller(steps(mean) / kStepsAlone, for_twice_the_memory) : group;
  int parts = 1;
  if (tiles == 0) return parts;
  for (int next = 2; next <= smaller<int64_t>(group, most_parts) && tiles * next <= kMostTiles; ++next) {
    if (group % next != 0) continue;
    bool const is_accurate = steps(most) * tile.block_m <= kRowsOfSum * parts;
    if (deterministic || !is_accurate || time(next) < 0.98 * time(parts)) parts = next;
  }
  return parts;
}

inline BackwardPlan plan_backward(Family family, int bucket, BackwardParams params, bool needs_dq,
                                  bool needs_dkv, bool deterministic) {
  BackwardPlan plan{};
  bool const one_kernel = family == Family::sm90;
  BackwardTiles const tiles = backward_tiles(family, bucket);
  // On Hopper in turns an entry's bits would depend on the others else.
  plan.tile = tile_for(tiles, bucket, params, one_kernel && deterministic && params.lengths.given);
  plan.query_tile = tiles.queries;
  ProblemShape const& shape = params.shape;
  plan.runs_keys = needs_dkv || one_kernel;
  plan.sums_dq = needs_dq && (one_kernel || (needs_dkv && !deterministic));
  plan.runs_queries = needs_dq && !plan.sums_dq;
  BatchBlocks const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, plan.tile.block_n};
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, plan.tile.block_m};
  BatchBlocks const alone{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, plan.query_tile.block_m};
  plan.kv_blocks = keys.count();
  plan.q_tiles = plan.runs_queries ? alone.count() : 0;
  plan.q_blocks = queries.count();
  // Storing first wins 0 to 12%, but loses 6% where the blocks of keys that share a block of queries don't
  // run all at once (head dim 256, causal, 16k), and 1 to 5% where tiles have several heads, which they come
  // to at different times, and the sums of one are large (2 to 24% more where they are not; H200).
  int const at_a_time = params.device.multiprocessors * plan.tile.blocks_per_sm / plan.tile.cluster;
  bool const one_by_one = one_kernel && plan.tile.has_room_for_sums();  // heads
  plan.gqa_splits = gqa_splits(params, plan.tile, plan.kv_blocks, at_a_time, deterministic);
  plan.splits_of_sum = deterministic ? 1 : plan.gqa_splits;
  plan.split_groups(params);
  KeysSeen const keys_seen = keys_of_queries(params);
  int64_t const of_sequence = ceil_div(plan.kv_blocks, larger(1, shape.batch)),
                of_queries = (int64_t(keys_seen.most) + plan.tile.block_m) / plan.tile.block_n + 2;
  bool const at_once = (one_by_one ? smaller(of_sequence, of_queries) : of_sequence) <= at_a_time;
  constexpr int kLargeSums = 1 << 20;  // floats
  bool const small = int64_t(queries_of_keys(params).most) * bucket < kLargeSums;
  bool const stores_first = one_kernel && at_once && (small || shape.heads_q == shape.heads_kv);
  plan.zero_fills_dq = plan.sums_dq && !deterministic && !stores_first;
  plan.clears_all = plan.zero_fills_dq && one_kernel;
  if (one_kernel) {
    plan.query_start = deterministic ? QueryStart::last : stores_first ? QueryStart::own : QueryStart::first;
  }
  plan.rows = int64_t(shape.heads_q) * queries.count() * plan.tile.block_m;
  plan.tiles = plan.blocks = plan.kv_blocks * shape.heads_kv;
  if (needs_dkv && plan.gqa_splits > 1) {
    plan.gqa_floats = 2 * int64_t(plan.tiles / plan.splits_of_sum) * plan.tile.block_n * bucket;
  }
  plan.ordered = deterministic && plan.sums_dq;
  if (one_kernel) plan.blocks = smaller(plan.tiles, at_a_time) * plan.tile.cluster;
  // One for each block of queries of a head; more where these are few and there is more to clear.
  constexpr int64_t kFloatsToClear = 4096;  // by a block
  plan.preprocess_blocks = int(larger<int64_t>(
      int64_t(plan.q_blocks) * shape.heads_q, smaller<int64_t>(at_a_time, plan.gqa_floats / kFloatsToClear)));
  // Of unequal lengths the mean one's, which serves where they turn out to be alike. Not so on Hopper in
  // turns: an entry's bits would depend on the others.
  bool const lengths_differ = params.lengths.given && (one_kernel || params.lengths.cu_seqlens_k);
  bool const has_keys = plan.tiles > 0 && shape.batch > 0 && mean_mask(params).seqlen_k > 0;
  if (has_keys && !(one_kernel && deterministic && lengths_differ)) {
    // A head's blocks of keys read the same Q and dO and add to the same sums, so they go one behind the
    // other, and head by head. On Hopper, over sections of one round of thread blocks: 512 +3 to +5%, causal
    // +1 to +3% up to 4k, else 0 (H200). Not so in turns, for which they would wait: there in sections of two
    // rounds; and in sections of one where a tile has several heads (causal, 1k to 4k: +1 to +6%; on Ampere,
    // where heads share K and V, -2 to +36%), or all are alike at head dims 192 and 256 (256: 1% up to 1k).
    bool const uneven = are_seen_unevenly(params);
    bool const by_pair = one_kernel
                             ? !deterministic && shape.heads_q == shape.heads_kv && (one_by_one || uneven)
                             : shape.heads_q == params.heads_of_keys();
    int const rounds = one_kernel && deterministic ? 2 : 1;
    plan.order = key_order(params, plan.tile, by_pair ? 1 : rounds * at_a_time, one_by_one);
    // Tiles that differ in length would leave thread blocks idle at the end: the heads of the last two rounds
    // go side by side, longest first (4k causal: +2 to +4%; Ampere +1 to +5%).
    if (by_pair && uneven && plan.order.section.value == 1) {
      plan.order.widen_last(ceil_div(2 * at_a_time, plan.order.m_blocks));
    }
    if (!one_kernel && !lengths_differ) plan.blocks = plan.order.tiles();  // no padding that nobody sees
  }
  plan.dq_columns = plan.sums_dq ? bucket : 0;
  if (one_kernel) {
    bool const is_counted = plan.sums_dq && !plan.zero_fills_dq;
    // A tile's end is the time for two blocks of queries. Where there are more, a kernel behind is faster.
    plan.converts_dq =
        plan.sums_dq && plan.tile.has_room_for_sums() && plan.q_blocks <= 2 * int64_t(plan.kv_blocks);
    plan.additions = is_counted ? sum_parts(plan.tile) * plan.rows / plan.tile.block_m : 0;
    plan.pairs = int64_t(shape.batch) * shape.heads_kv;
    int64_t const counted = 1 + plan.additions + int(plan.converts_dq) * (1 + plan.pairs);
    plan.counters = ceil_div(counted, int64_t(kZeroBytes / sizeof(int))) * (kZeroBytes / sizeof(int));
  }
  if (lengths_differ && plan.runs_keys) {
    plan.key_numbers = 1 + (params.lengths.cu_seqlens_q ? 3 : 1) * (shape.batch + 1);
  }
  int64_t const entries = params.lengths.cu_seqlens_q ? 1 : shape.batch;
  int64_t const dq_bytes = entries * shape.heads_q * shape.seqlen_q * shape.head_dim * params.element_bytes,
                stats = plan.lse_delta_floats() * plan.rows;
  // Terms lie in rows, of which the shortest has kTermBytes; else all lie side by side, where a kernel behind
  // writes rows, and none before.
  bool const behind = !plan.converts_dq && !(one_kernel && has_unwritten(params));
  bool const fits = behind && stats * int64_t(sizeof(float)) <= dq_bytes;
  plan.lse_delta_in_dq = plan.sums_dq && (plan.tile.lse_delta_mma || fits);
  int64_t const integers = plan.counters + plan.key_numbers;
  plan.workspace_bytes =
      ((plan.lse_delta_in_dq ? 0 : stats) + plan.rows * plan.dq_columns + plan.gqa_floats) *
          int64_t(sizeof(float)) +
      integers * int64_t(sizeof(int));
  return plan;
}

}  // namespace flash_cute
