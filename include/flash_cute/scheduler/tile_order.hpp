// Which tile of queries comes at which place of the launch order.
#pragma once

#include <cstdint>

#include "flash_cute/core/divisor.hpp"
#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// The first query and the first query head of a tile, and where its keys are.
struct TileCoord {
  int m_begin, head, head_kv, batch;
};

// How the rows of a tile lie: in groups, on Hopper one for each warpgroup; in a group `packed` neighbouring
// query heads of one query, then those of the next. Heads that share K and V are packed where one head's
// queries would leave most rows of a tile empty, in as many packs as their number needs. The last pack ends
// with the last of them: it may have heads in common with the one before, and both write the same.
struct PackedRows {
  Divisor packed;
  int queries = 0, groups = 0;  // queries of a group, groups of a tile

  PackedRows() = default;
  PackedRows(int group_rows, int groups_, int packed_ = 1)
      : packed(packed_), queries(group_rows / packed_), groups(groups_) {}

  // Of a row of a group, counted from the group's first.
  FLASH_CUTE_HOST_DEVICE int query(int row) const { return packed.quotient(row); }
  FLASH_CUTE_HOST_DEVICE int head(int row) const { return packed.remainder(row); }
  FLASH_CUTE_HOST_DEVICE bool uses(int row) const { return row < used(); }

  FLASH_CUTE_HOST_DEVICE int used() const { return int(packed.value) * queries; }
  FLASH_CUTE_HOST_DEVICE int tile_queries() const { return groups * queries; }
  FLASH_CUTE_HOST_DEVICE int packs(int heads) const { return ceil_div(heads, int(packed.value)); }
};

// One query head a tile.
struct PlainRows {
  FLASH_CUTE_HOST_DEVICE int query(int row) const { return row; }
  FLASH_CUTE_HOST_DEVICE int head(int) const { return 0; }
  FLASH_CUTE_HOST_DEVICE bool uses(int) const { return true; }
};

// Walks the (batch, head) pairs in sections; inside a section the longest tiles come first, so that the last
// wave of a masked problem is made of short ones. A section is small enough for its K and V to stay in L2,
// and no larger than asked for: tiles that read K and V anew should mix with tiles that find them in L2
// (H100, d128, 16k tokens: sections of 25 MB take turns in being bound by memory and by arithmetic, and lose
// 20% at seqlen 512 to sections of one head). Behind a window, tiles see few of their head's keys: there all
// the heads that L2 holds go through their tiles side by side, unless the heads are wanted one after the
// other (window of 1024, d128: +1% at 16k, +6% at 4k).
struct TileOrder {
  static constexpr bool kVarlen = false;
  int m_blocks, sequences;  // sequences = batch * heads, of which packed ones count once
  PackedRows rows;          // of every tile
  int shared_heads;         // that the last pack of a head of K and V has in common with the one before
  bool descending;          // is the last block of queries the longest?
  bool side_by_side;        // do the heads of a section go through their tiles together, behind a window?
  Divisor section, last_section;  // (batch, head) pairs of each
  int before_last;                // pairs before the last section
  Divisor section_tiles;          // tiles of a section
  Divisor heads, packs;           // sequences, of a batch entry and of one head of K and V

  static TileOrder make(ProblemShape const& shape, WindowMask const& mask, PackedRows const& rows,
                        int64_t l2_elements, int wanted_tiles, bool one_by_one = false) {
    int const queries = rows.tile_queries();
    int const m_blocks = ceil_div(shape.seqlen_q, queries);
    auto length = [&](int m_block) {
      BlockRange const keys = mask.visited(m_block * queries, queries, 1);
      return keys.end - keys.begin;
    };
    int const longest = larger(length(m_blocks / 2), larger(length(0), length(m_blocks - 1)));
    int64_t const kv_elements = 2 * int64_t(longest) * shape.head_dim;
    int64_t const in_l2 = l2_elements / 2 / larger<int64_t>(1, kv_elements);
    int const heads_per_kv = shape.heads_q / shape.heads_kv;
    int64_t const packs = rows.packs(heads_per_kv);
    bool const side_by_side = !one_by_one && 5 * int64_t(longest) < 3 * int64_t(shape.seqlen_k);
    int64_t const wanted = side_by_side ? in_l2 : wanted_tiles / (m_blocks * packs);
    int64_t const kv_heads = larger<int64_t>(1, smaller(in_l2, wanted));
    int64_t const sequences = int64_t(shape.batch) * shape.heads_kv * packs;
    int const section = int(smaller(sequences, kv_heads * packs));
    int const rest = int(sequences % section);
    return {.m_blocks = m_blocks,
            .sequences = int(sequences),
            .rows = rows,
            .shared_heads = int(packs) * int(rows.packed.value) - heads_per_kv,
            .descending = length(m_blocks - 1) >= length(0),
            .side_by_side = side_by_side,
            .section = Divisor(section),
            .last_section = Divisor(rest == 0 ? section : rest),
            .before_last = int(sequences) - (rest == 0 ? section : rest),
            .section_tiles = Divisor(section * m_blocks),
            .heads = Divisor(int(shape.heads_kv * packs)),
            .packs = Divisor(int(packs))};
  }

  // The last section gets at least so many pairs, whatever L2 holds: tiles that differ in length then end at
  // about the same time, where sections are small.
  void widen_last(int wanted) {
    int const before = larger(0, sequences - wanted) / int(section.value) * int(section.value);
    before_last = smaller(before_last, before);
    last_section = Divisor(sequences - before_last);
  }

  FLASH_CUTE_HOST_DEVICE int tiles() const { return m_blocks * sequences; }

  FLASH_CUTE_HOST_DEVICE TileCoord operator()(int index) const {
    int const first = smaller(section_tiles.quotient(index) * int(section.value), before_last);
    Divisor const width = first < before_last ? section : last_section;
    int const place = index - first * m_blocks;
    int const rank = width.quotient(place);
    int const sequence = first + width.remainder(place);
    int const batch = heads.quotient(sequence), pack = sequence - batch * int(heads.value);
    int const in_common = packs.quotient(pack + 1) * shared_heads;  // of all the last packs so far
    int const m_block = descending ? m_blocks - 1 - rank : rank;
    return {m_block * rows.tile_queries(), pack * int(rows.packed.value) - in_common, packs.quotient(pack),
            batch};
  }
};

// The place in a launch order that one of `blocks` thread blocks comes to in a round: to and fro, which evens
// out what the blocks get.
FLASH_CUTE_HOST_DEVICE int shared_out(int block, int blocks, int round) {
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// The tiles of one of `blocks` thread blocks.
struct TileStream {
  TileOrder const& order;
  int block, blocks;
  int round = 0;

  FLASH_CUTE_HOST_DEVICE int count() const {
    int const rounds = order.tiles() / blocks;
    return rounds + (place(rounds) < order.tiles());
  }
  FLASH_CUTE_HOST_DEVICE TileCoord first() const { return order(block); }
  FLASH_CUTE_HOST_DEVICE TileCoord next() { return order(place(++round)); }  // after the last one any
  FLASH_CUTE_HOST_DEVICE bool through(int& left) const { return --left == 0; }
  FLASH_CUTE_HOST_DEVICE TileCoord const& get(TileCoord const& upcoming) const { return upcoming; }

  FLASH_CUTE_HOST_DEVICE void claim() const {}  // see QueuedTiles

 private:
  FLASH_CUTE_HOST_DEVICE int place(int in_round) const { return shared_out(block, blocks, in_round); }
};

}  // namespace flash_cute
