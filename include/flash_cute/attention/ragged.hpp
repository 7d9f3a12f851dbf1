// Tiles of sequences of unequal lengths: a list that a kernel of its own (attention/prepare.cuh) makes on the
// device, longest tiles first, so that the host need not know a length.
#pragma once

#include <cstdint>

#include "flash_cute/attention/scheduler.hpp"
#include "flash_cute/attention/sequence.hpp"

namespace flash_cute {

// A tile of queries of all heads.
struct alignas(16) TileRecord {
  int m_begin, batch;
  int q_begin, seqlen_q;  // of its sequence
  int k_begin, seqlen_k;  // its first key that some query reaches
  int unused[2];
};

struct alignas(16) TileListHeader {
  int records;
  Divisor records_of_section;  // records times the packs of a head of K and V
};

// Rows from one batch entry to the next; 0 where packed.
struct RaggedEntries {
  int q, k, v, out;
};

struct RaggedOrder;

// A tile. What is asked for once is read from its record then, and takes no registers in between.
struct RaggedTile {
  int m_begin, head, head_kv;
  int seqlen_q, seqlen_k;
  int place;  // of the record
  RaggedOrder const* order;

  FLASH_CUTE_HOST_DEVICE TileRecord const& record() const;
};

struct RaggedOrder {
  static constexpr bool kMayBeEmpty = true;
  TileListHeader const* header;
  PackedRows rows;
  int heads_per_kv;
  Divisor packs;  // of a head of K and V
  int heads_kv;
  RaggedEntries entries;

  FLASH_CUTE_HOST_DEVICE TileRecord const& record(int place) const {
    return reinterpret_cast<TileRecord const*>(header + 1)[place];
  }
  FLASH_CUTE_HOST_DEVICE int tiles() const { return header->records * heads_kv * int(packs.value); }

  // The list is gone through once for each head of K and V.
  FLASH_CUTE_HOST_DEVICE RaggedTile operator()(int index) const {
    Divisor const section = header->records_of_section;
    index = larger(0, smaller(index, tiles() - 1));  // a stream asks for one more than there is
    int const head_kv = section.quotient(index);
    int const rest = index - head_kv * int(section.value);
    int const place = packs.quotient(rest), pack = rest - place * int(packs.value);
    int const packed = int(rows.packed.value);
    TileRecord const& found = record(place);
    return {.m_begin = found.m_begin,
            .head = head_kv * heads_per_kv + smaller(pack * packed, heads_per_kv - packed),
            .head_kv = head_kv,
            .seqlen_q = found.seqlen_q,
            .seqlen_k = found.seqlen_k,
            .place = place,
            .order = this};
  }
};

FLASH_CUTE_HOST_DEVICE TileRecord const& RaggedTile::record() const { return order->record(place); }

// Records that a list has room for: each sequence's last tile may be short.
inline int64_t tile_capacity(ForwardParams const& params, PackedRows const& rows) {
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
  TileRecord const& record = tile.record();
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
  TileRecord const& record = tile.record();
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
