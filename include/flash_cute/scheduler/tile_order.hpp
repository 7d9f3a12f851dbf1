// The order of the tiles of a uniform batch: turns the number of a tile into the tile.
#pragma once

#include <cstdint>

#include "flash_cute/attention/pack_gqa.hpp"
#include "flash_cute/attention/tile.hpp"
#include "flash_cute/core/divisor.hpp"
#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// The (batch, head) pairs come in sections. Inside a section the longest tiles come first, so that the last
// wave of a masked problem is made of short ones. A section is small enough for its K and V to stay in L2,
// and no larger than asked for: tiles that read K and V from memory should mix with tiles that find them in
// L2 (H100, d128, 16k tokens: sections of 25 MB alternate between being bound by memory and by arithmetic,
// and lose 20% at seqlen 512 to sections of one head). With a window a tile sees few of its head's keys:
// there all the heads that L2 holds go through their tiles side by side, unless the heads are wanted one
// after the other (window of 1024, d128: +1% at 16k, +6% at 4k).
struct TileOrder {
  int m_blocks, sequences;        // sequences = batch * heads, of which packed ones count once
  PackGqa rows;                   // of every tile
  int shared_heads;               // that the last pack of a head of K and V has in common with the one before
  bool descending;                // is the last block of queries the longest?
  bool side_by_side;              // do the heads of a section go through their tiles together, with a window?
  Divisor section, last_section;  // (batch, head) pairs of each
  int before_last;                // pairs before the last section
  Divisor section_tiles;          // tiles of a section
  Divisor heads, packs;           // sequences, of a batch entry and of one head of K and V

  static TileOrder make(ProblemShape const& shape, WindowMask const& mask, PackGqa const& rows,
                        int64_t l2_elements, int wanted_tiles, bool one_by_one = false) {
    int const queries = rows.tile_queries();
    int const m_blocks = ceil_div(shape.seqlen_q, queries);
    auto length = [&](int m_block) {
      auto const keys = mask.visited(m_block * queries, queries, 1);
      return keys.end - keys.begin;
    };
    int const longest = larger(length(m_blocks / 2), larger(length(0), length(m_blocks - 1)));
    int64_t const kv_elements = int64_t(longest) * (shape.head_dim + shape.head_dim_v);
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
            .shared_heads = int(packs) * int(rows.heads.value) - heads_per_kv,
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
    int const of_section = index - first * m_blocks;
    int const rank = width.quotient(of_section);
    int const sequence = first + width.remainder(of_section);
    int const batch = heads.quotient(sequence), pack = sequence - batch * int(heads.value);
    int const in_common = packs.quotient(pack + 1) * shared_heads;  // of all the last packs so far
    int const m_block = descending ? m_blocks - 1 - rank : rank;
    return {m_block * rows.tile_queries(), pack * int(rows.heads.value) - in_common, packs.quotient(pack),
            batch};
  }
};

}  // namespace flash_cute
