// Which tile serves a call whose keys are not cut, and how many heads share its rows: by a model of the work
// that tiles leave for the multiprocessors.
#pragma once

#include <limits>
#include <stdexcept>

#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/core/family.hpp"
#include "flash_cute/forward/tiles.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

struct ChosenTile {
  ForwardTile tile;
  PackGqa rows;
};

namespace plan {

inline PackGqa rows_of(Family family, ForwardTile const& tile, int packed) {
  int const most = traits_of(family).group_rows,
            of_group = most > 0 ? smaller(most, tile.block_m) : tile.block_m;
  return PackGqa(of_group, tile.block_m / of_group, packed);
}

constexpr int kMaxTiles = std::numeric_limits<int>::max() / 2;  // the rest is for numbers past the end

[[noreturn]] inline void throw_too_many_tiles() {
  throw std::runtime_error("flash_cute: there may be more than 2**30 tiles of queries");
}

inline int64_t count_tiles(ProblemShape const& shape, PackGqa const& rows) {
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
// the atomic operation matters more than the last long tile. With a narrow window the few short tiles of a
// section's heads come last in it and even out what full rounds of long ones leave.
inline bool is_dynamic(UniformBatch const& batch, PackGqa const& rows) {
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
inline TileOrder dynamic_order(UniformBatch const& batch, PackGqa const& rows) {
  ProblemShape const& shape = batch.shape;
  DeviceInfo const& device = batch.device;
  bool const few = 4 * count_tiles(shape, rows) < 13 * int64_t(device.multiprocessors);
  int const m_blocks = ceil_div(shape.seqlen_q, rows.tile_queries());
  int const of_head = m_blocks * rows.packs(shape.heads_q / shape.heads_kv);
  TileOrder order = TileOrder::make(shape, batch.mask, rows, device.l2_bytes / batch.element_bytes,
                                    (few ? 1 : 2) * of_head);
  int const last = ((few ? 2 : 3) * device.multiprocessors + m_blocks / 2) / m_blocks;
  int64_t const kv_bytes =
      int64_t(batch.element_bytes) * shape.seqlen_k * (shape.head_dim + shape.head_dim_v);
  order.widen_last(int(smaller<int64_t>(last, larger<int64_t>(1, 2 * device.l2_bytes / 3 / kv_bytes))));
  return order;
}

// What a multiprocessor has to do with these tiles: the pairs of queries and keys that a tile covers, visible
// or not, times the rounds of tiles. Tiles that are taken one by one need no whole rounds, but time for the
// longest.
inline double work(UniformBatch const& batch, ForwardTile const& tile, PackGqa const& rows) {
  constexpr int kSamples = 16;  // tiles that are looked at
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

// Of a tile of keys that are not cut.
inline PackGqa whole_rows_of(Family family, ForwardTile const& tile, ProblemShape const& shape) {
  return rows_of(family, tile, traits_of(family).packs_heads ? packed_heads(family, shape, tile) : 1);
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
// end half empty, and half a block of keys after what their queries see.
inline double work_of_unequal(ForwardParams const& params, WindowMask const& mask, ForwardTile const& tile,
                              PackGqa const& rows) {
  constexpr int kSamples = 8;  // tiles that are looked at
  UniformBatch const typical = of_equal_lengths(params, mask, 2);
  int const queries = rows.tile_queries(), last = typical.shape.seqlen_q - queries;
  double keys = 0;
  for (int i = 0; i < kSamples; ++i) {
    int const begin = int(int64_t(larger(0, last)) * i / (kSamples - 1));
    BlockRange const visited = typical.mask.visited(begin, queries, 1);
    keys += visited.end - visited.begin + tile.block_n / 2.;
  }
  int const packs = rows.packs(params.shape.heads_q / params.shape.heads_kv);
  double const tiles = packs * (double(typical.shape.seqlen_q) / queries + 0.5);
  return tiles * tile.block_m * keys / kSamples / typical.shape.seqlen_q;
}

inline ChosenTile choose_tile(Family family, ForwardTiles const& tiles, ForwardParams const& params,
                              WindowMask const& mask) {
  bool const varlen = params.lengths.given;
  UniformBatch const mean = varlen ? of_equal_lengths(params, mask, 1)
                                   : UniformBatch{params.shape, mask, params.device, params.element_bytes};
  auto chosen = [&](ForwardTile const& tile) {
    return ChosenTile{tile, whole_rows_of(family, tile, mean.shape)};
  };
  if (params.masking() == Masking::table) {
    ForwardTile const tile = tiles.for_table(scores_of(family, Masking::table, params.asked_scores()));
    return params.has_one_head_a_tile() ? ChosenTile{tile, rows_of(family, tile, 1)} : chosen(tile);
  }
  bool const differ = varlen && lengths_differ(params);
  auto work_with = [&](ForwardTile const& tile) {
    PackGqa const rows = whole_rows_of(family, tile, mean.shape);
    return differ ? work_of_unequal(params, mask, tile, rows) : work(mean, tile, rows);
  };
  double const enough = differ ? tiles.enough_unequal : tiles.enough;
  bool const take_small = tiles.small.warps > 0 && work_with(tiles.small) < enough * work_with(tiles.main);
  return chosen(take_small ? tiles.small : tiles.main);
}

}  // namespace plan
}  // namespace flash_cute
