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

// How tensor maps name rows of a sequence so that what lies past its end is clipped: rows are counted such
// that its end is the bound of their dimension, and a second dimension of the same stride shifts them to
// where they are. The map starts `bound` rows before the tensor.
struct RaggedPlaces {
  int bound_q, bound_k;                      // rows of the longest sequence that there can be
  int entry_q, entry_k, entry_v, entry_out;  // rows from one batch entry to the next; 0: packed
};

// A tile, with what its sequence has of its own.
struct RaggedTile : TileCoord {
  int q_begin, k_begin;
  WindowMask mask;
  RaggedPlaces const* places;
};

struct RaggedOrder {
  static constexpr bool kMayBeEmpty = true;
  TileListHeader const* header;
  PackedRows rows;
  int heads_per_kv;
  Divisor packs;  // of a head of K and V
  int heads_kv, left, right;
  RaggedPlaces places;
  // Read from the header.
  int records = 0;
  Divisor records_of_section = {};

  // With what the list's kernel found out.
  FLASH_CUTE_HOST_DEVICE RaggedOrder ready() const {
    RaggedOrder order = *this;
    order.records = header->records;
    order.records_of_section = header->records_of_section;
    return order;
  }

  FLASH_CUTE_HOST_DEVICE int tiles() const { return records * heads_kv * int(packs.value); }

  // The list is gone through once for each head of K and V.
  FLASH_CUTE_HOST_DEVICE RaggedTile operator()(int index) const {
    index = larger(0, smaller(index, tiles() - 1));  // a stream asks for one more than there is
    int const head_kv = records_of_section.quotient(index);
    int const rest = index - head_kv * int(records_of_section.value);
    int const place = packs.quotient(rest), pack = rest - place * int(packs.value);
    TileRecord const record = reinterpret_cast<TileRecord const*>(header + 1)[place];
    int const packed = int(rows.packed.value);
    RaggedTile tile;
    tile.m_begin = record.m_begin;
    tile.head = head_kv * heads_per_kv + smaller(pack * packed, heads_per_kv - packed);
    tile.head_kv = head_kv;
    tile.batch = record.batch;
    tile.q_begin = record.q_begin;
    tile.k_begin = record.k_begin;
    tile.mask = {record.seqlen_q, record.seqlen_k, left, right};
    tile.places = &places;
    return tile;
  }
};

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
FLASH_CUTE_HOST_DEVICE WindowMask const& mask_of(ForwardParams const&, RaggedTile const& tile) {
  return tile.mask;
}

// The first query and key of its sequence among the rows of the batch entry.
FLASH_CUTE_HOST_DEVICE int first_query_of(TileCoord const&) { return 0; }
FLASH_CUTE_HOST_DEVICE int first_query_of(RaggedTile const& tile) { return tile.q_begin; }
FLASH_CUTE_HOST_DEVICE int first_key_of(TileCoord const&) { return 0; }
FLASH_CUTE_HOST_DEVICE int first_key_of(RaggedTile const& tile) { return tile.k_begin; }

// Where the LSE of its head and its sequence's first query is.
FLASH_CUTE_HOST_DEVICE int64_t lse_offset(ForwardParams const& params, TileCoord const& tile) {
  return (int64_t(tile.batch) * params.shape.heads_q + tile.head) * params.shape.seqlen_q;
}
FLASH_CUTE_HOST_DEVICE int64_t lse_offset(ForwardParams const& params, RaggedTile const& tile) {
  return tile.batch * params.lse_batch_stride + int64_t(tile.head) * params.shape.seqlen_q + tile.q_begin;
}

// What to add to a row of its sequence, and the last coordinate, for tensor maps.
struct MapPlace {
  int shift, plane;
};
enum class OperandName { q, k, v, out };

template <OperandName>
FLASH_CUTE_HOST_DEVICE MapPlace place_of(TileCoord const& tile) {
  return {0, tile.batch};
}
template <OperandName operand>
FLASH_CUTE_HOST_DEVICE MapPlace place_of(RaggedTile const& tile) {
  RaggedPlaces const& places = *tile.places;
  constexpr bool kKeys = operand == OperandName::k || operand == OperandName::v;
  int const length = kKeys ? tile.mask.seqlen_k : tile.mask.seqlen_q;
  int const entry = operand == OperandName::q   ? places.entry_q
                    : operand == OperandName::k ? places.entry_k
                    : operand == OperandName::v ? places.entry_v
                                                : places.entry_out;
  return {(kKeys ? places.bound_k : places.bound_q) - length,
          tile.batch * entry + (kKeys ? tile.k_begin : tile.q_begin) + length};
}

}  // namespace flash_cute
