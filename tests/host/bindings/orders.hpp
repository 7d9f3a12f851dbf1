// The forward's orders of tiles: of a uniform batch, of a list of sequences, and of splits of the keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>

#include "bindings/sequences.hpp"
#include "flash_cute/forward/tile_source.hpp"
#include "flash_cute/scheduler/split_order.hpp"
#include "flash_cute/scheduler/static_scheduler.hpp"
#include "flash_cute/scheduler/tile_order.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute::host {

template <class Tile>
auto coord_of(Tile const& tile) {
  return std::tuple(tile.m_begin, tile.head, tile.head_kv, tile.batch);
}

// (query, head) of a row of a group, counted from the tile's first; none where the row is unused.
template <class Order>
std::optional<std::pair<int, int>> row_of(Order const& order, int group, int row) {
  if (!order.rows.uses(row)) return std::nullopt;
  return std::pair(group * order.rows.queries + order.rows.query(row), order.rows.head(row));
}

// The tiles of a block.
inline std::vector<std::tuple<int, int, int>> stream_of(TileOrder const& order, int block, int blocks) {
  std::vector<std::tuple<int, int, int>> list;
  UniformSource const source{order, {}, {}};
  StaticTiles<UniformSource> tiles{source, block, blocks};
  int left = tiles.count();
  if (left == 0) return list;
  for (TileCoord tile = tiles.first();;) {
    list.emplace_back(tile.m_begin, tile.head, tile.batch);
    TileCoord const upcoming = tiles.next();
    if (tiles.done(left)) return list;
    tile = tiles.get(upcoming);
  }
}

// A list of sequences as scheduler/varlen_prepare.cuh writes it, and the source of its tiles.
struct VarlenTiles {
  VarlenBatch const& batch;
  std::vector<std::byte> list;
  VarlenSource source;

  // entries: rows from one entry of q, k, v and out to the next. listed: the sequences, in their order.
  VarlenTiles(VarlenBatch const& batch_, int block_m, int groups, int packed, int section_tiles,
              std::array<int, 4> entries, std::vector<int> const& listed)
      : batch(batch_),
        source{VarlenOrder::make(batch_.params, PackGqa(block_m / groups, groups, packed), section_tiles,
                                 nullptr, batch_.mask.is_longest_last()),
               batch_.mask,
               {{entries[0], entries[1], entries[2], entries[3]}}} {
    VarlenOrder& order = source.order;
    std::vector<SequenceRecord> records;
    for (int const b : listed) {
      Sequence const found = sequence(batch.params.shape, batch.params.lengths, batch.mask, b);
      SequenceRecord const record = order.record(b, found, int(records.size()));
      records.insert(records.end(), record.m_blocks, record);
    }
    list.resize(sizeof(VarlenListHeader) + records.size() * sizeof(SequenceRecord));
    order.header = new (list.data()) VarlenListHeader{.m_blocks = int(records.size()), .tile_counter = 0};
    std::ranges::copy(records, reinterpret_cast<SequenceRecord*>(order.header + 1));
  }
  VarlenTiles(VarlenTiles const&) = delete;

  template <TmaOperand operand>
  std::pair<int, int> coord(int index) const {
    RaggedCoord const found = source.operands.coord<operand>(source.tile(index));
    return {found.shift, found.plane};
  }
};

// Every tile of every split, cut sequences first, as a list has them: (entry, head, m_begin, first key,
// keys, blocks of keys of the split, slot, split, splits); the order's capacity, and the slots that splits of
// a fixed length may take at most, else -1. lengths: as of SplitLengths. is_uniform: do all sequences have
// the lengths of the shape, so that nothing is listed?
inline auto split_tiles(VarlenBatch const& batch, int block_m, int groups, int packed,
                        std::array<int, 7> const& lengths, bool is_uniform) {
  ForwardParams const& params = batch.params;
  auto const [block_n, blocks, rounds, least_blocks, fixed_blocks, rows_of_slot, folds] = lengths;
  SplitLengths const made{block_n, blocks, rounds, least_blocks, fixed_blocks, rows_of_slot, folds > 0};
  PackGqa const rows(block_m / groups, groups, packed);
  SplitOrder const order = SplitOrder::make(params, batch.mask, rows, made, nullptr, false, is_uniform);
  int const most_slots = fixed_blocks > 0 ? int(SplitOrder::slot_capacity(params, rows, made)) : -1;
  std::vector<std::tuple<int, int, int, int, int, std::pair<int, int>, int, int, int>> tiles;
  auto add = [&](SplitTile const& tile) {
    tiles.emplace_back(tile.batch, tile.head, tile.m_begin, tile.k_first, tile.seqlen_k,
                       std::pair(tile.block_begin, tile.block_end), tile.slot, tile.split, tile.splits);
  };
  if (is_uniform) {
    for (int index = 0; index < order.tiles(); ++index) add(order(index));
    return std::tuple(tiles, order.capacity, most_slots);
  }
  std::vector<std::pair<int, SplitSequence>> sequences;
  SplitWork work{};
  for (int b = 0; b < params.shape.batch; ++b) {
    sequences.emplace_back(b, SplitOrder::sequence_of(params, batch.mask, b));
    work = work + order.work(sequences.back().second);
  }
  int const blocks_per_split = order.blocks_per_split(work), packs = order.packs_of_all.value;
  std::ranges::stable_partition(sequences, [&](auto const& s) {
    return s.second.used > 0 && order.splits(s.second, blocks_per_split) > 1;
  });
  int first_block = 0;
  for (auto const& [b, sequence] : sequences) {
    if (sequence.used == 0) continue;
    SplitRecord const record = order.record(b, sequence, first_block, blocks_per_split);
    int const m_blocks = record.m_blocks * record.splits;
    for (int index = first_block * packs; index < (first_block + m_blocks) * packs; ++index)
      add(order.tile(record, index));
    first_block += m_blocks;
  }
  return std::tuple(tiles, order.capacity, most_slots);
}

inline void bind_orders(py::module_& module) {
  module.attr("MAP_BOUND") = RaggedCoord::kBound;
  module.attr("MAP_WRAP") = RaggedCoord::kWrap;

  py::class_<TileOrder>(module, "TileOrder")
      .def(py::init([](Sizes const& sizes, WindowMask const& mask, int block_m, int groups, int packed,
                       int64_t l2_bytes, int wanted_tiles) {
        PackGqa const rows(block_m / groups, groups, packed);
        return TileOrder::make(shape_of(sizes), mask, rows, l2_bytes / kBytes, wanted_tiles);
      }))
      .def("tiles", &TileOrder::tiles)
      .def_property_readonly("section", [](TileOrder const& order) { return order.section.value; })
      .def("__call__", [](TileOrder const& order, int index) { return coord_of(order(index)); })
      .def("row", &row_of<TileOrder>)
      .def("stream", &stream_of);

  using Tiles = VarlenTiles const&;
  py::class_<VarlenTiles>(module, "VarlenTiles")
      .def(py::init<VarlenBatch const&, int, int, int, int, std::array<int, 4>, std::vector<int>>(),
           py::keep_alive<1, 2>())
      .def("tiles", [](Tiles tiles) { return tiles.source.order.tiles(); })
      .def("__call__", [](Tiles tiles, int index) { return coord_of(tiles.source.tile(index)); })
      .def("mask", [](Tiles tiles, int index) { return tiles.source.mask(tiles.source.tile(index)); })
      .def("begins",  // the first query and key of its sequence
           [](Tiles tiles, int index) {
             VarlenTile const tile = tiles.source.tile(index);
             VarlenCoords const& operands = tiles.source.operands;
             return std::pair(operands.query(tile, 0).row, operands.key(tile, 0).row);
           })
      .def("lse_offset",
           [](Tiles tiles, int index) {
             return tiles.source.lse_offset(tiles.batch.params, tiles.source.tile(index));
           })
      .def("coord_q", &VarlenTiles::coord<TmaOperand::q>)
      .def("coord_k", &VarlenTiles::coord<TmaOperand::k>)
      .def("coord_v", &VarlenTiles::coord<TmaOperand::v>)
      .def("coord_out", &VarlenTiles::coord<TmaOperand::out>)
      .def("row", [](Tiles tiles, int group, int row) { return row_of(tiles.source.order, group, row); });

  module.def("split_tiles", &split_tiles);
}

}  // namespace flash_cute::host
