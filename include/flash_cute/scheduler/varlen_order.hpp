// Tiles of sequences of unequal lengths: the device lists the sequences, longest first, so that the host need
// not know a length. A kernel of its own does (scheduler/varlen_prepare.cuh), or, where they are few, each
// block of a persistent kernel for itself (scheduler/varlen_list.hpp).
#pragma once

#include <cstdint>

#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

constexpr int kFewSequences = 80;  // at most: more do not fit beside the tiles of head dim 256

// The sequence that a place of the list belongs to. A sequence has as many neighbouring places as it has
// blocks of queries; they are alike.
struct alignas(16) SequenceRecord {
  int batch, first_block;
  int q_begin, seqlen_q;
  int k_begin, seqlen_k;  // its first key that some query reaches
  int m_blocks;           // of queries
  int section_heads;      // see VarlenOrder
};

struct alignas(16) VarlenListHeader {
  int places;
  int claimed;    // see VarlenOrder
  int unwritten;  // are there rows of out that no tile writes? (see forward/zero_fill.hpp)
};

// Rows from one batch entry to the next; 0 where packed.
struct VarlenEntries {
  int q, k, v, out;

  static VarlenEntries of(ForwardParams const& params) {
    auto rows = [](TensorView const& view) {
      return view.batch_stride == 0 ? 0 : int(view.batch_stride / view.row_stride);
    };
    return {rows(params.q), rows(params.k), rows(params.v), rows(params.out)};
  }
};

// A tile, and what there is to know of its sequence: see SequenceRecord.
struct alignas(16) VarlenTile {
  int m_begin, head, head_kv, batch;
  int q_begin, seqlen_q, k_begin, seqlen_k;
};

// Places that a list has room for: each sequence's last tile may be short.
inline int64_t m_block_capacity(ForwardParams const& params, PackedRows const& rows) {
  ProblemShape const& shape = params.shape;
  int const queries = rows.tile_queries();
  return params.lengths.cu_seqlens_q ? int64_t(shape.seqlen_q) / queries + shape.batch
                                     : int64_t(ceil_div(shape.seqlen_q, queries)) * shape.batch;
}

// Sequence by sequence, as TileOrder goes through the entries of a batch: tiles that share K and V run side
// by side, so that L2 serves many multiprocessors by one read (tiles of several sequences in turns lose a
// third at head dim 128, causal). Heads of K and V form sections of about `wanted_tiles`, in which the
// longest tiles come first: in sections of one head the short ones are spent too early to even out the end,
// and so they are where the last section is left with few heads.
struct VarlenOrder {
  static constexpr bool kVarlen = true;
  VarlenListHeader* header;  // of the prepared list, or null
  int* claimed;              // tiles, by the blocks of a persistent kernel; null where each has one at most
  int capacity;              // places that there may be
  PackedRows rows;
  int heads_kv, heads_per_kv, wanted_tiles;
  Divisor tile_queries;
  Divisor packs, packs_of_all;  // of one head of K and V, and of all
  bool descending;              // is a sequence's last block of queries its longest?
  VarlenEntries entries;

  // is_prepared: is there a kernel before that makes the list?
  static VarlenOrder make(ForwardParams const& params, PackedRows const& rows, int wanted_tiles,
                          bool is_prepared) {
    int const heads_kv = params.shape.heads_kv, heads_per_kv = params.shape.heads_q / heads_kv;
    void* const workspace = params.lengths.workspace;
    auto* const header = is_prepared ? static_cast<VarlenListHeader*>(workspace) : nullptr;
    return {.header = header,
            .claimed = is_prepared ? &header->claimed : static_cast<int*>(workspace),
            .capacity = int(m_block_capacity(params, rows)),
            .rows = rows,
            .heads_kv = heads_kv,
            .heads_per_kv = heads_per_kv,
            .wanted_tiles = wanted_tiles,
            .tile_queries = Divisor(rows.tile_queries()),
            .packs = Divisor(rows.packs(heads_per_kv)),
            .packs_of_all = Divisor(rows.packs(heads_per_kv) * heads_kv),
            .descending = params.mask.left >= params.mask.right,
            .entries = VarlenEntries::of(params)};
  }

  FLASH_CUTE_HOST_DEVICE bool is_prepared() const { return header != nullptr; }
  FLASH_CUTE_HOST_DEVICE SequenceRecord* prepared() const {
    return reinterpret_cast<SequenceRecord*>(header + 1);
  }

  // Of a sequence.
  FLASH_CUTE_HOST_DEVICE int m_blocks(Sequence const& s) const {
    return s.used > 0 ? 1 + tile_queries.quotient(s.used - 1) : 0;
  }

  // What the list has of sequence b, whose places begin at first_block.
  FLASH_CUTE_HOST_DEVICE SequenceRecord record(int b, Sequence const& s, int first_block) const {
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
  FLASH_CUTE_HOST_DEVICE int tiles() const { return header->places * int(packs_of_all.value); }
  FLASH_CUTE_HOST_DEVICE bool unwritten() const { return header->unwritten; }
  FLASH_CUTE_HOST_DEVICE VarlenTile operator()(int index) const {
    return tile(prepared()[packs_of_all.quotient(index)], index);
  }

  // Of any: found is the record of its sequence.
  FLASH_CUTE_HOST_DEVICE VarlenTile tile(SequenceRecord const& found, int index) const {
    int const of_sequence = index - found.first_block * int(packs_of_all.value);

    auto divided = [](int n, int by) { return int(unsigned(n) / unsigned(by)); };  // signed takes longer
    int const tiles_of_head = found.m_blocks * int(packs.value), heads = found.section_heads;
    int const first_head = divided(of_sequence, heads * tiles_of_head) * heads;
    int const of_section = of_sequence - first_head * tiles_of_head;
    int const width = smaller(heads, heads_kv - first_head) * int(packs.value);
    int const rank = divided(of_section, width), pack = of_section - rank * width;
    int const head_kv = first_head + packs.quotient(pack), packed = int(rows.packed.value);
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

// What kernels ask of a tile, whatever the batch.

FLASH_CUTE_HOST_DEVICE WindowMask const& mask_of(ForwardParams const& params, TileCoord const&) {
  return params.mask;
}
FLASH_CUTE_HOST_DEVICE WindowMask mask_of(ForwardParams const& params, VarlenTile const& tile) {
  return {tile.seqlen_q, tile.seqlen_k, params.mask.left, params.mask.right};
}

// The batch entry, and the first query and key of the sequence among its rows.
FLASH_CUTE_HOST_DEVICE int entry_of(TileCoord const& tile) { return tile.batch; }
FLASH_CUTE_HOST_DEVICE int entry_of(VarlenTile const& tile) { return tile.batch; }
FLASH_CUTE_HOST_DEVICE int first_query_of(TileCoord const&) { return 0; }
FLASH_CUTE_HOST_DEVICE int first_query_of(VarlenTile const& tile) { return tile.q_begin; }
FLASH_CUTE_HOST_DEVICE int first_key_of(TileCoord const&) { return 0; }
FLASH_CUTE_HOST_DEVICE int first_key_of(VarlenTile const& tile) { return tile.k_begin; }

// Where the LSE of its head and its sequence's first query is.
FLASH_CUTE_HOST_DEVICE int64_t lse_offset(ForwardParams const& params, TileCoord const& tile) {
  return (int64_t(tile.batch) * params.shape.heads_q + tile.head) * params.shape.seqlen_q;
}
FLASH_CUTE_HOST_DEVICE int64_t lse_offset(ForwardParams const& params, VarlenTile const& tile) {
  return tile.batch * params.lse_batch_stride + int64_t(tile.head) * params.shape.seqlen_q + tile.q_begin;
}

// How a tensor map names the rows of a sequence: (row, entry of the batch) where they are alike.
struct DenseCoord {
  int entry;
};

// Else so that what lies past its end is clipped: rows are counted such that the end is the bound of their
// dimension, kBound; a second dimension of the same stride shifts them to where they are; and at kBound of a
// third one they are kBound rows before that, as kBound times its stride is that many bytes less than 2^64
// (an idea of Triton's varlen descriptors).
struct VarlenCoord {
  static constexpr int kBound = 1 << 30;
  static constexpr int64_t kWrap = int64_t(1) << 35;  // bytes; times kBound a multiple of 2^64
  int shift, plane;
};
enum class TmaOperand { q, k, v, out };

template <TmaOperand>
FLASH_CUTE_HOST_DEVICE DenseCoord tma_coord(TileOrder const&, TileCoord const& tile) {
  return {tile.batch};
}
template <TmaOperand operand>
FLASH_CUTE_HOST_DEVICE VarlenCoord tma_coord(VarlenOrder const& order, VarlenTile const& tile) {
  VarlenEntries const& entries = order.entries;
  constexpr bool kKeys = operand == TmaOperand::k || operand == TmaOperand::v;
  int const length = kKeys ? tile.seqlen_k : tile.seqlen_q;
  int const entry = operand == TmaOperand::q   ? entries.q
                    : operand == TmaOperand::k ? entries.k
                    : operand == TmaOperand::v ? entries.v
                                               : entries.out;
  return {VarlenCoord::kBound - length, tile.batch * entry + (kKeys ? tile.k_begin : tile.q_begin) + length};
}

}  // namespace flash_cute
