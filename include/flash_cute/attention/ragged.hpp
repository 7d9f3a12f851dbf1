// Tiles of sequences of unequal lengths: a list that a kernel of its own (attention/prepare.cuh) makes on the
// device, longest sequences first, so that the host need not know a length.
#pragma once

#include <cstdint>

#include "flash_cute/attention/scheduler.hpp"
#include "flash_cute/attention/sequence.hpp"

namespace flash_cute {

// The sequence that a place of the list belongs to. A sequence has as many neighbouring places as it has
// blocks of queries; they are alike.
struct alignas(16) SequenceRecord {
  int batch, first_place;
  int q_begin, seqlen_q;
  int k_begin, seqlen_k;  // its first key that some query reaches
  int unused[2];
};

struct alignas(16) TileListHeader {
  int places;
  int claimed;  // tiles, by the blocks of a persistent kernel
};

// Rows from one batch entry to the next; 0 where packed.
struct RaggedEntries {
  int q, k, v, out;

  static RaggedEntries of(ForwardParams const& params) {
    auto rows = [](TensorView const& view) {
      return view.batch_stride == 0 ? 0 : int(view.batch_stride / view.row_stride);
    };
    return {rows(params.q), rows(params.k), rows(params.v), rows(params.out)};
  }
};

struct RaggedOrder;

// A tile. What is asked for once is read from its record then, and takes no registers in between.
struct RaggedTile {
  int m_begin, head, head_kv;
  int seqlen_q, seqlen_k;
  int place;  // one of its sequence's
  RaggedOrder const* order;

  FLASH_CUTE_HOST_DEVICE SequenceRecord const& record() const;
};

// Sequence by sequence, and of each one head of K and V after the other, as in TileOrder: tiles that share K
// and V run side by side, so that L2 serves many multiprocessors by one read (tiles of several sequences in
// turns lose a third at head dim 128, causal).
struct RaggedOrder {
  static constexpr bool kListed = true;
  TileListHeader* header;
  PackedRows rows;
  int heads_per_kv;
  Divisor packs, packs_of_all;  // of one head of K and V, and of all
  bool descending;              // is a sequence's last block of queries its longest?
  RaggedEntries entries;

  static RaggedOrder make(ForwardParams const& params, PackedRows const& rows) {
    int const heads_per_kv = params.shape.heads_q / params.shape.heads_kv, packs = rows.packs(heads_per_kv);
    return {.header = static_cast<TileListHeader*>(params.lengths.workspace),
            .rows = rows,
            .heads_per_kv = heads_per_kv,
            .packs = Divisor(packs),
            .packs_of_all = Divisor(packs * params.shape.heads_kv),
            .descending = params.mask.left >= params.mask.right,
            .entries = RaggedEntries::of(params)};
  }

  FLASH_CUTE_HOST_DEVICE SequenceRecord const& record(int place) const {
    return reinterpret_cast<SequenceRecord const*>(header + 1)[place];
  }
  FLASH_CUTE_HOST_DEVICE int tiles() const { return header->places * int(packs_of_all.value); }

  FLASH_CUTE_HOST_DEVICE RaggedTile operator()(int index) const {
    index = larger(0, smaller(index, tiles() - 1));  // the place after the last is asked for, too
    int const place = packs_of_all.quotient(index);
    SequenceRecord const& found = record(place);
    int const m_blocks = ceil_div(found.seqlen_q, rows.tile_queries());
    int const of_sequence = index - found.first_place * int(packs_of_all.value);
    int const section = m_blocks * int(packs.value), head_kv = of_sequence / section;
    int const of_section = of_sequence - head_kv * section;
    int const rank = packs.quotient(of_section), pack = of_section - rank * int(packs.value);
    int const packed = int(rows.packed.value);
    return {.m_begin = (descending ? m_blocks - 1 - rank : rank) * rows.tile_queries(),
            .head = head_kv * heads_per_kv + smaller(pack * packed, heads_per_kv - packed),
            .head_kv = head_kv,
            .seqlen_q = found.seqlen_q,
            .seqlen_k = found.seqlen_k,
            .place = place,
            .order = this};
  }
};

FLASH_CUTE_HOST_DEVICE SequenceRecord const& RaggedTile::record() const { return order->record(place); }

// Places that a list has room for: each sequence's last tile may be short.
inline int64_t place_capacity(ForwardParams const& params, PackedRows const& rows) {
  ProblemShape const& shape = params.shape;
  int const queries = rows.tile_queries();
  return params.lengths.cu_seqlens_q ? int64_t(shape.seqlen_q) / queries + shape.batch
                                     : int64_t(ceil_div(shape.seqlen_q, queries)) * shape.batch;
}

// What kernels ask of a tile, whatever the batch.

FLASH_CUTE_HOST_DEVICE WindowMask const& mask_of(ForwardParams const& params, TileCoord const&) {
  return params.mask;
}
FLASH_CUTE_HOST_DEVICE WindowMask mask_of(ForwardParams const& params, RaggedTile const& tile) {
  return {tile.seqlen_q, tile.seqlen_k, params.mask.left, params.mask.right};
}

// The batch entry, and the first query and key of the sequence among its rows.
FLASH_CUTE_HOST_DEVICE int entry_of(TileCoord const& tile) { return tile.batch; }
FLASH_CUTE_HOST_DEVICE int entry_of(RaggedTile const& tile) { return tile.record().batch; }
FLASH_CUTE_HOST_DEVICE int first_query_of(TileCoord const&) { return 0; }
FLASH_CUTE_HOST_DEVICE int first_query_of(RaggedTile const& tile) { return tile.record().q_begin; }
FLASH_CUTE_HOST_DEVICE int first_key_of(TileCoord const&) { return 0; }
FLASH_CUTE_HOST_DEVICE int first_key_of(RaggedTile const& tile) { return tile.record().k_begin; }

// Where the LSE of its head and its sequence's first query is.
FLASH_CUTE_HOST_DEVICE int64_t lse_offset(ForwardParams const& params, TileCoord const& tile) {
  return (int64_t(tile.batch) * params.shape.heads_q + tile.head) * params.shape.seqlen_q;
}
FLASH_CUTE_HOST_DEVICE int64_t lse_offset(ForwardParams const& params, RaggedTile const& tile) {
  SequenceRecord const& record = tile.record();
  return record.batch * params.lse_batch_stride + int64_t(tile.head) * params.shape.seqlen_q + record.q_begin;
}

// How a tensor map names the rows of a sequence: (row, entry of the batch) where they are alike.
struct DensePlace {
  int entry;
};

// Else so that what lies past its end is clipped: rows are counted such that the end is the bound of their
// dimension, kBound; a second dimension of the same stride shifts them to where they are; and at kBound of a
// third one they are kBound rows before that, as kBound times its stride is that many bytes less than 2^64
// (an idea of Triton's ragged descriptors).
struct RaggedPlace {
  static constexpr int kBound = 1 << 30;
  static constexpr int64_t kWrap = int64_t(1) << 35;  // bytes; times kBound a multiple of 2^64
  int shift, plane;
};
enum class OperandName { q, k, v, out };

template <OperandName>
FLASH_CUTE_HOST_DEVICE DensePlace place_of(TileCoord const& tile) {
  return {tile.batch};
}
template <OperandName operand>
FLASH_CUTE_HOST_DEVICE RaggedPlace place_of(RaggedTile const& tile) {
  RaggedEntries const& entries = tile.order->entries;
  SequenceRecord const& record = tile.record();
  constexpr bool kKeys = operand == OperandName::k || operand == OperandName::v;
  int const length = kKeys ? tile.seqlen_k : tile.seqlen_q;
  int const entry = operand == OperandName::q   ? entries.q
                    : operand == OperandName::k ? entries.k
                    : operand == OperandName::v ? entries.v
                                                : entries.out;
  return {RaggedPlace::kBound - length,
          record.batch * entry + (kKeys ? record.k_begin : record.q_begin) + length};
}

}  // namespace flash_cute
