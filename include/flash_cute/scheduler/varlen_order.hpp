// The order of the tiles of a batch of unequal lengths. The device lists the sequences, longest first, so
// that the host need not know a length: a kernel of its own does (scheduler/varlen_prepare.cuh), or, where
// they are few, each block of a persistent kernel does for itself (scheduler/varlen_list.hpp).
#pragma once

#include <cstdint>

#include "flash_cute/attention/pack_gqa.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/attention/tile.hpp"

namespace flash_cute {

// The sequence of an M block of the list. The list has one record for each M block; those of a sequence are
// neighbours and equal.
struct alignas(16) SequenceRecord {
  int batch;
  int first_block;        // the index of the sequence's first M block in the list
  int q_begin, seqlen_q;  // as of VarlenTile
  int k_begin, seqlen_k;
  int m_blocks;
  int section_heads;  // heads of K and V of a section, see VarlenOrder
};

// What precedes the records in memory.
struct alignas(16) VarlenListHeader {
  int m_blocks;      // of all sequences
  int tile_counter;  // of the dynamic scheduler
  int unwritten;     // are there rows of out that no tile writes? (forward/zero_fill.hpp)
  int cut_blocks;    // M blocks of cut sequences, which come first (SplitOrder)
};

// M blocks that a list has room for: the last one of each sequence may be short.
inline int64_t m_block_capacity(ForwardParams const& params, PackGqa const& rows) {
  ProblemShape const& shape = params.shape;
  int const queries = rows.tile_queries();
  return params.lengths.cu_seqlens_q ? int64_t(shape.seqlen_q) / queries + shape.batch
                                     : int64_t(ceil_div(shape.seqlen_q, queries)) * shape.batch;
}

// Sequences come one after the other, as TileOrder goes through the entries of a batch: tiles that share K
// and V run side by side, so that L2 serves many multiprocessors by one read (interleaved tiles of several
// sequences lose a third at head dim 128, causal). Heads of K and V form sections of about `wanted_tiles`, in
// which the longest tiles come first: in sections of one head the short ones are spent too early to even out
// the end, and so they are where the last section is left with few heads.
struct VarlenOrder {
  using Record = SequenceRecord;
  static constexpr int kFewSequences = 80;  // at most: more do not fit beside the tiles of head dim 256
  VarlenListHeader* header;                 // of the prepared list, or null
  int capacity;                             // M blocks that the list has room for
  PackGqa rows;                             // of every tile
  int batch, heads_kv, heads_per_kv;
  int wanted_tiles;      // of a section
  Divisor tile_queries;  // queries of a tile
  Divisor packs;         // of the query heads of one head of K and V
  Divisor packs_of_all;  // of all query heads
  bool descending;       // is the last M block of a sequence its longest?

  // header: of the list that a kernel before this one makes, or null.
  static VarlenOrder make(ForwardParams const& params, PackGqa const& rows, int wanted_tiles,
                          VarlenListHeader* header, bool descending) {
    int const heads_kv = params.shape.heads_kv, heads_per_kv = params.shape.heads_q / heads_kv;
    return {.header = header,
            .capacity = int(m_block_capacity(params, rows)),
            .rows = rows,
            .batch = params.shape.batch,
            .heads_kv = heads_kv,
            .heads_per_kv = heads_per_kv,
            .wanted_tiles = wanted_tiles,
            .tile_queries = Divisor(rows.tile_queries()),
            .packs = Divisor(rows.packs(heads_per_kv)),
            .packs_of_all = Divisor(rows.packs(heads_per_kv) * heads_kv),
            .descending = descending};
  }

  FLASH_CUTE_HOST_DEVICE static Sequence sequence_of(ForwardParams const& params, WindowMask const& limits,
                                                     int b) {
    return sequence(params.shape, params.lengths, limits, b);
  }

  FLASH_CUTE_HOST_DEVICE bool is_prepared() const { return header != nullptr; }
  FLASH_CUTE_HOST_DEVICE SequenceRecord* prepared() const {
    return reinterpret_cast<SequenceRecord*>(header + 1);
  }

  FLASH_CUTE_HOST_DEVICE int m_blocks(Sequence const& s) const {
    return s.used > 0 ? 1 + tile_queries.quotient(s.used - 1) : 0;
  }

  // The record of sequence b, whose first M block has this index in the list.
  FLASH_CUTE_HOST_DEVICE SequenceRecord record(int b, Sequence const& s, int first_block, int = 0) const {
    int const of_sequence = m_blocks(s);
    int const tiles_of_head = larger(1, of_sequence * int(packs.value));
    int const section = larger(1, (wanted_tiles + tiles_of_head / 2) / tiles_of_head);
    int const sections = larger(1, heads_kv / section);
    return {.batch = b,
            .first_block = first_block,
            .q_begin = s.queries.begin,
            .seqlen_q = s.used,
            .k_begin = s.k_begin,
            .seqlen_k = s.mask.seqlen_k,
            .m_blocks = of_sequence,
            .section_heads = ceil_div(heads_kv, sections)};
  }

  // Of a prepared list.
  FLASH_CUTE_HOST_DEVICE int tiles() const { return header->m_blocks * int(packs_of_all.value); }
  FLASH_CUTE_HOST_DEVICE bool unwritten() const { return header->unwritten; }
  FLASH_CUTE_HOST_DEVICE VarlenTile operator()(int index) const {
    return tile(prepared()[packs_of_all.quotient(index)], index);
  }

  // Of any list: `found` is the record of the tile's sequence.
  FLASH_CUTE_HOST_DEVICE VarlenTile tile(SequenceRecord const& found, int index) const {
    int const of_sequence = index - found.first_block * int(packs_of_all.value);

    auto divided = [](int n, int by) { return int(unsigned(n) / unsigned(by)); };  // signed takes longer
    int const tiles_of_head = found.m_blocks * int(packs.value), heads = found.section_heads;
    int const first_head = divided(of_sequence, heads * tiles_of_head) * heads;
    int const of_section = of_sequence - first_head * tiles_of_head;
    int const width = smaller(heads, heads_kv - first_head) * int(packs.value);
    int const rank = divided(of_section, width), pack = of_section - rank * width;
    int const head_kv = first_head + packs.quotient(pack), packed = int(rows.heads.value);
    return {.m_begin = (descending ? found.m_blocks - 1 - rank : rank) * rows.tile_queries(),
            .head = head_kv * heads_per_kv + smaller(packs.remainder(pack) * packed, heads_per_kv - packed),
            .head_kv = head_kv,
            .batch = found.batch,
            .q_begin = found.q_begin,
            .seqlen_q = found.seqlen_q,
            .k_begin = found.k_begin,
            .seqlen_k = found.seqlen_k};
  }
};

}  // namespace flash_cute
