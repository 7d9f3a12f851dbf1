// What a call of the forward runs: decided here, before anything is launched, from shapes, the mask and facts
// of the device. The launch executes it, explain prints it. This header knows no CUDA.
#pragma once

#include <limits>
#include <stdexcept>

#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/forward/problem.hpp"
#include "flash_cute/forward/tiles.hpp"

namespace flash_cute {

constexpr int kWarpgroupRows = 64;  // of a WGMMA

// How keys are cut into parts; see SplitOrder.
struct SplitPlan {
  PartLengths lengths = {};    // no rounds: keys are not cut
  bool is_uniform = false;     // are all sequences as long as the shape says?
  bool keeps_tiles = false;    // do slots have their tiles?
  int rows = 0;                // of a slot
  int slots = 0;               // 0 where no sequence is cut
  int64_t partial_offset = 0;  // of the partial results in the workspace
};

struct ForwardPlan {
  ForwardTile tile;
  PackedRows rows;              // of a tile
  int blocks;                   // thread blocks of the grid
  bool varlen = false;          // do sequences differ in length? Then the device makes a list of them,
  bool prepares = false;        // by a kernel of its own where this is true,
  int section_tiles = 0;        // whose sections have about so many tiles, see VarlenOrder
  bool dynamic = false;         // are tiles of a uniform batch taken one by one, not shared out beforehand?
  TileOrder order = {};         // of a uniform batch
  int64_t workspace_bytes = 0;  // of LengthParams::workspace: the list that a kernel makes, the tile counter,
                                // partial results
  SplitPlan split = {};
  bool has_ranges = false;

  bool splits() const { return split.lengths.rounds > 0; }
  Variant variant() const {
    return has_ranges ? Variant::ranges : splits() ? Variant::split : Variant::plain;
  }
  RangeTable range_table(ForwardParams const& params) const {
    return RangeTable::make(params, rows.tile_queries(), tile.block_n, /*transposes=*/false);
  }
  // Of RangeParams::workspace.
  int64_t ranges_bytes(ForwardParams const& params) const {
    if (!has_ranges) return 0;
    return RangeTable::bytes(params, rows.tile_queries(), tile.block_n, /*transposes=*/false);
  }

  // Of params with operands and the workspace.
  template <class Problem>
  Problem problem(ForwardParams const& params, typename Problem::Mask const& mask) const {
    if constexpr (Problem::kRanges) {
      return {problem<typename Problem::WithoutRanges>(params, mask), range_table(params)};
    } else if constexpr (Problem::kSplits) {
      auto* const partial = static_cast<char*>(params.lengths.workspace) + split.partial_offset;
      return {{split_order(params, mask), mask, PagedRows::of(params)},
              PartialResults::in(partial, split.slots, split.rows, params.shape.head_dim, split.keeps_tiles),
              params.shape,
              params.lengths};
    } else if constexpr (Problem::kVarlen) {
      return {VarlenOrder::make(params, rows, section_tiles, prepares, mask.is_longest_last()), mask,
              VarlenRows::of(params)};
    } else {
      return {order, mask, {}};
    }
  }
  SplitOrder split_order(ForwardParams const& params, WindowMask const& mask) const {
    return SplitOrder::make(params, mask, rows, split.lengths, prepares, split.is_uniform);
  }
  int* tile_counter(ForwardParams const& params) const {
    void* const workspace = params.lengths.workspace;
    bool const has_header = prepares || (splits() && !split.is_uniform);
    return has_header ? &static_cast<VarlenListHeader*>(workspace)->tile_counter
                      : static_cast<int*>(workspace);
  }
};

namespace plan {

constexpr int kMaxTiles = std::numeric_limits<int>::max() / 2;  // the rest is for numbers past the end

[[noreturn]] inline void throw_too_many_tiles() {
  throw std::runtime_error("flash_cute: there may be more than 2**30 tiles of queries");
}

inline PackedRows rows_sm90(ForwardTile const& tile, int packed) {
  return PackedRows(kWarpgroupRows, tile.block_m / kWarpgroupRows, packed);
}
inline PackedRows rows_of(Family family, ForwardTile const& tile, int packed) {
  return family == Family::sm80 ? PackedRows(tile.block_m, 1, packed) : rows_sm90(tile, packed);
}

inline int64_t count_tiles(ProblemShape const& shape, PackedRows const& rows) {
  int64_t const packs = rows.packs(shape.heads_q / shape.heads_kv);
  return ceil_div(shape.seqlen_q, rows.tile_queries()) * packs * shape.heads_kv * shape.batch;
}

// A uniform batch, or what stands for a batch of unequal lengths.
struct UniformBatch {
  ProblemShape shape;
  WindowMask mask;
  DeviceInfo device;
  int element_bytes;
};

// Tiles of unequal length are taken one by one, as multiprocessors become free, unless they are so short that
// the atomic operation matters more than the last long tile. Behind a narrow window the few short tiles of a
// section's heads come last in it and even out what full rounds of long ones leave.
inline bool is_dynamic(UniformBatch const& batch, PackedRows const& rows) {
  constexpr int kLong = 1024;  // keys
  int const queries = rows.tile_queries(), m_blocks = ceil_div(batch.shape.seqlen_q, queries);
  auto length = [&](int m_block) {
    BlockRange const visited = batch.mask.visited(m_block * queries, queries, 1);
    return visited.end - visited.begin;
  };
  int const first = length(0), last = length(m_blocks - 1);
  int const longest = larger(length(m_blocks / 2), larger(first, last));
  bool const narrow = 4 * int64_t(longest) < batch.shape.seqlen_k;
  return first != last && longest >= kLong && !narrow &&
         count_tiles(batch.shape, rows) > batch.device.multiprocessors;
}

// The order of tiles that are taken one by one, by a model of the schedule
// (docs/experiments/forward_sm90.md): sections of two heads, the last one of three rounds of tiles, so that
// enough short ones come at the end; up to 3.25 rounds in all, sections of one head and the last of two
// rounds, whose tiles then pair up, long with short. In a last section that does not stay in L2, tiles would
// wait for their keys.
inline TileOrder dynamic_order(UniformBatch const& batch, PackedRows const& rows) {
  ProblemShape const& shape = batch.shape;
  DeviceInfo const& device = batch.device;
  bool const few = 4 * count_tiles(shape, rows) < 13 * int64_t(device.multiprocessors);
  int const m_blocks = ceil_div(shape.seqlen_q, rows.tile_queries());
  int const of_head = m_blocks * rows.packs(shape.heads_q / shape.heads_kv);
  TileOrder order = TileOrder::make(shape, batch.mask, rows, device.l2_bytes / batch.element_bytes,
                                    (few ? 1 : 2) * of_head);
  int const last = ((few ? 2 : 3) * device.multiprocessors + m_blocks / 2) / m_blocks;
  int64_t const kv_bytes = 2 * int64_t(batch.element_bytes) * shape.seqlen_k * shape.head_dim;
  order.widen_last(int(smaller<int64_t>(last, larger<int64_t>(1, 2 * device.l2_bytes / 3 / kv_bytes))));
  return order;
}

// What a multiprocessor has to do with these tiles: the pairs of queries and keys that a tile covers, visible
// or not, times the rounds of tiles. Tiles that are taken one by one need no whole rounds, but time for the
// longest.
inline double work(UniformBatch const& batch, ForwardTile const& tile, int packed) {
  constexpr int kSamples = 16;  // tiles that are looked at
  PackedRows const rows = rows_sm90(tile, packed);
  int const queries = rows.tile_queries(), m_blocks = ceil_div(batch.shape.seqlen_q, queries);
  int const step = ceil_div(2 * m_blocks, kSamples);
  double blocks = 0, longest = 0;
  int samples = 0;
  for (int from_end = 0; from_end < m_blocks; from_end += step) {
    for (int m_block : {from_end, m_blocks - 1 - from_end}) {  // their mean is the mean of all
      BlockRange const visited = batch.mask.visited(m_block * queries, queries, tile.block_n);
      double const length = larger(1, visited.end - visited.begin);  // see kv_blocks_of
      blocks += length;
      longest = larger(longest, length);
      ++samples;
    }
  }
  int64_t const tiles = count_tiles(batch.shape, rows), multiprocessors = batch.device.multiprocessors;
  double const mean = blocks / samples, pairs = tile.block_m * tile.block_n;
  if (is_dynamic(batch, rows)) return larger(longest, mean * tiles / multiprocessors) * pairs;
  return ceil_div(tiles, multiprocessors) * mean * pairs;
}

// Packing pays with fewer queries than a tile has rows: it leaves fewer tiles, and K and V are read less
// often. A group of more heads than a warpgroup has rows is packed in equal parts.
inline int packed_heads(Family family, ProblemShape const& shape, ForwardTile const& tile) {
  int const group = shape.heads_q / shape.heads_kv, packs = ceil_div(group, kWarpgroupRows);
  int const packed = ceil_div(group, packs);
  if (shape.seqlen_q >= tile.block_m) return 1;
  return packs * ceil_div(shape.seqlen_q, rows_of(family, tile, packed).tile_queries()) < group ? packed : 1;
}

// Of a tile of keys that are not cut. On sm80 no heads are packed.
inline PackedRows whole_rows_of(Family family, ForwardTile const& tile, ProblemShape const& shape) {
  return rows_of(family, tile, family == Family::sm80 ? 1 : packed_heads(family, shape, tile));
}

// One block an SM goes through many tiles, loading ahead. The tiles take whole rounds of all blocks, so no
// block more than these need is started.
inline int persistent_blocks(TileOrder const& order, int multiprocessors) {
  return ceil_div(order.tiles(), ceil_div(order.tiles(), multiprocessors));
}

// What stands for a batch of unequal lengths, of which the host knows the mean: as many sequences of so many
// means each.
inline UniformBatch of_equal_lengths(ForwardParams const& params, WindowMask const& mask, int means) {
  UniformBatch equal{params.shape, mask, params.device, params.element_bytes};
  auto length = [&](int rows, int const* offsets) {
    int const mean = ceil_div(rows, larger(1, params.shape.batch));
    return larger(1, offsets ? int(smaller<int64_t>(rows, int64_t(means) * mean)) : rows);
  };
  equal.shape.seqlen_q = length(params.shape.seqlen_q, params.lengths.cu_seqlens_q);
  equal.shape.seqlen_k = length(params.shape.seqlen_k, params.lengths.cu_seqlens_k);
  equal.mask = WindowMask::make(equal.shape.seqlen_q, equal.shape.seqlen_k, mask.left, mask.right);
  return equal;
}

// Lengths surely differ if the batch does not divide the rows.
inline bool lengths_differ(ForwardParams const& params) {
  return params.lengths.cu_seqlens_q && params.shape.seqlen_q % larger(1, params.shape.batch) != 0;
}

// The work of such a batch for each query, in pairs that tiles cover. Most pairs are in sequences that are
// longer than the mean: exponentially distributed lengths, weighted by themselves, have twice the mean. Tiles
// end half empty, and half a block of keys behind what their queries see.
inline double work_of_unequal(ForwardParams const& params, WindowMask const& mask, ForwardTile const& tile,
                              int packed) {
  constexpr int kSamples = 8;  // tiles that are looked at
  UniformBatch const typical = of_equal_lengths(params, mask, 2);
  int const queries = rows_sm90(tile, packed).tile_queries(), last = typical.shape.seqlen_q - queries;
  double keys = 0;
  for (int i = 0; i < kSamples; ++i) {
    int const begin = int(int64_t(larger(0, last)) * i / (kSamples - 1));
    BlockRange const visited = typical.mask.visited(begin, queries, 1);
    keys += visited.end - visited.begin + tile.block_n / 2.;
  }
  int const packs = rows_sm90(tile, packed).packs(params.shape.heads_q / params.shape.heads_kv);
  double const tiles = packs * (double(typical.shape.seqlen_q) / queries + 0.5);
  return tiles * tile.block_m * keys / kSamples / typical.shape.seqlen_q;
}

// The tile that serves the problem, without a grid.
inline ForwardPlan with_tile(Family family, ForwardTiles const& tiles, ForwardParams const& params,
                             WindowMask const& mask) {
  bool const varlen = params.lengths.given;
  if (params.ranges.count > 0) {
    ProblemShape const mean = of_equal_lengths(params, mask, 1).shape;
    return {.tile = tiles.ranges(),
            .rows = whole_rows_of(family, tiles.ranges(), mean),
            .blocks = 0,
            .varlen = true,
            .has_ranges = true};
  }
  if (family == Family::sm80) return {tiles.main, whole_rows_of(family, tiles.main, params.shape), 0, varlen};
  UniformBatch const mean = varlen ? of_equal_lengths(params, mask, 1)
                                   : UniformBatch{params.shape, mask, params.device, params.element_bytes};
  bool const differ = varlen && lengths_differ(params);
  auto packed = [&](ForwardTile const& tile) { return packed_heads(family, mean.shape, tile); };
  auto work_with = [&](ForwardTile const& tile) {
    return differ ? work_of_unequal(params, mask, tile, packed(tile)) : work(mean, tile, packed(tile));
  };
  double const enough = differ ? tiles.enough_unequal : tiles.enough;
  bool const take_small = tiles.small.warps > 0 && work_with(tiles.small) < enough * work_with(tiles.main);
  ForwardTile const tile = take_small ? tiles.small : tiles.main;
  return {tile, whole_rows_of(family, tile, mean.shape), 0, varlen};
}

// Of the heads that share keys, those that a tile of few queries has.
inline int heads_of_few(ProblemShape const& shape) {
  int const group = shape.heads_q / shape.heads_kv;
  return ceil_div(group, ceil_div(group, kWarpgroupRows));
}
inline bool are_few(ProblemShape const& shape) {
  return shape.seqlen_q <= kWarpgroupRows / heads_of_few(shape);
}

// The tile for a call whose keys are cut into parts: all heads that share keys are packed where the queries
// of the mean sequence leave room.
inline ForwardPlan split_with_tile(Family family, ForwardTiles const& tiles, ProblemShape const& shape) {
  bool const few = are_few(shape);
  ForwardTile const& tile = few ? tiles.few : tiles.many;
  int const packed = few ? heads_of_few(shape) : packed_heads(family, shape, tile);
  return {tile, rows_of(family, tile, packed), 0, true};
}

// Are keys cut into parts? They are where few queries read many keys, which takes as long as memory does, and
// where tiles of queries leave half of the multiprocessors without one. (H200, d128, one head of 8192 causal:
// 64 tiles -22%; 128 tiles would take 41% longer.)
inline bool splits(Family family, ForwardTiles const& tiles, ForwardParams const& params,
                   WindowMask const& mask) {
  if (tiles.few.warps == 0) return false;
  if (params.cache.given || params.batch_invariant) return true;
  ProblemShape const mean = of_equal_lengths(params, mask, 1).shape;
  constexpr int kSome = 256, kLong = 2048;  // keys
  if (are_few(mean) && mean.seqlen_k >= kSome && mean.seqlen_k / 4 >= mean.seqlen_q) return true;
  PackedRows const rows = split_with_tile(family, tiles, mean).rows;
  return mean.seqlen_k >= kLong && 2 * count_tiles(mean, rows) <= params.device.multiprocessors;
}

inline ForwardPlan plan_split(Family family, ForwardTiles const& tiles, ForwardParams const& params,
                              WindowMask const& mask) {
  bool const persistent = family == Family::sm90;
  constexpr int kLeastKeys = 256, kFixedKeys = 1024;
  ForwardPlan result = split_with_tile(family, tiles, of_equal_lengths(params, mask, 1).shape);
  result.has_ranges = params.ranges.count > 0;
  ForwardTile const& tile = result.tile;
  PackedRows const& rows = result.rows;
  SplitPlan& split = result.split;
  int const blocks = params.device.multiprocessors * tile.blocks_per_sm;
  split.is_uniform = !params.lengths.given;
  int64_t const rows_of_head = int64_t(rows.packed.value) * params.shape.seqlen_q;
  split.rows = rows.groups * int(smaller<int64_t>(rows.used(), rows_of_head));
  split.lengths = {.block_n = tile.block_n,
                   .blocks = blocks,
                   .rounds = split.is_uniform ? 16 : 2,
                   .least_blocks = kLeastKeys / tile.block_n,
                   .fixed_blocks = params.batch_invariant ? kFixedKeys / tile.block_n : 0,
                   .rows = split.rows};

  int64_t const packs_of_all =
      params.shape.heads_kv * rows.packs(params.shape.heads_q / params.shape.heads_kv);
  if (SplitOrder::list_capacity(params, rows, split.lengths) * packs_of_all > kMaxTiles)
    throw_too_many_tiles();
  SplitOrder const order = result.split_order(params, mask);
  int const items = order.capacity * int(packs_of_all);
  bool const is_whole = split.is_uniform && order.alike.parts == 1;
  split.slots = is_whole                                     ? 0
                : split.is_uniform || params.batch_invariant ? items
                                                             : 2 * split.lengths.wanted_items();
  result.blocks = persistent ? smaller(items, blocks) : items;
  result.prepares = !split.is_uniform && (!persistent || params.shape.batch > SplitOrder::kFewSequences);
  split.keeps_tiles = !split.is_uniform && !result.prepares;
  result.workspace_bytes =
      result.prepares     ? sizeof(VarlenListHeader) + order.capacity * int64_t(sizeof(SplitRecord))
      : split.keeps_tiles ? sizeof(VarlenListHeader)
      : persistent && (items > blocks || split.slots > 0) ? sizeof(int)  // the tile counter
                                                          : 0;
  constexpr int64_t kAlignment = 256;
  split.partial_offset = ceil_div(result.workspace_bytes, kAlignment) * kAlignment;
  result.workspace_bytes =
      split.partial_offset +
      PartialResults::bytes(split.slots, split.rows, params.shape.head_dim, split.keeps_tiles);
  return result;
}

}  // namespace plan

// bucket, split_bucket: the head dims of the kernels that serve the problem, with all keys of a tile and with
// parts of them; 0 where there is none.
inline ForwardPlan plan_forward(Family family, int bucket, int split_bucket, ForwardParams const& params,
                                WindowMask const& mask) {
  bool const persistent = family == Family::sm90;
  int const multiprocessors = params.device.multiprocessors;
  ForwardTiles const split_tiles = forward_tiles(family, split_bucket, params.element_bytes);
  if (plan::splits(family, split_tiles, params, mask)) {
    return plan::plan_split(family, split_tiles, params, mask);
  }
  ForwardPlan result =
      plan::with_tile(family, forward_tiles(family, bucket, params.element_bytes), params, mask);
  plan::UniformBatch const batch{params.shape, mask, params.device, params.element_bytes};
  // Tiles that share K and V come in sections (see TileOrder, VarlenOrder): of two rounds of blocks; on sm90,
  // where tiles have equal lengths or a static scheduler, of one head of K and V.
  if (result.varlen) {
    int64_t const m_blocks = m_block_capacity(params, result.rows);
    int64_t const tiles =
        m_blocks * params.shape.heads_kv * result.rows.packs(params.shape.heads_q / params.shape.heads_kv);
    if (tiles > plan::kMaxTiles) plan::throw_too_many_tiles();
    result.section_tiles = persistent && mask.is_even() ? 0 : 2 * multiprocessors;
    result.blocks = persistent ? smaller(int(tiles), multiprocessors) : int(tiles);
    result.prepares = !persistent || params.shape.batch > VarlenOrder::kFewSequences;
    result.workspace_bytes = result.prepares
                                 ? sizeof(VarlenListHeader) + m_blocks * int64_t(sizeof(SequenceRecord))
                             : tiles > result.blocks ? sizeof(int)
                                                     : 0;
  } else if (persistent && plan::is_dynamic(batch, result.rows)) {
    result.dynamic = true;
    result.order = plan::dynamic_order(batch, result.rows);
    result.blocks = multiprocessors;
    result.workspace_bytes = sizeof(int);
  } else {
    result.order =
        TileOrder::make(params.shape, mask, result.rows, params.device.l2_bytes / params.element_bytes,
                        persistent ? 0 : 2 * multiprocessors);
    result.blocks =
        persistent ? plan::persistent_blocks(result.order, multiprocessors) : result.order.tiles();
  }
  return result;
}

}  // namespace flash_cute
