// Tensor maps of the Hopper family's backward, and the coordinates of a sequence's rows in them.
#pragma once

#include <cuda.h>

#include "flash_cute/attention/keys/varlen.hpp"
#include "flash_cute/backward/kv_tile.hpp"

namespace flash_cute {

// Each map has five dimensions: columns, heads, rows, and two that TmaCoord explains. entry_rows is the
// number of rows from one batch entry to the next, 0 where sequences are packed.
struct BackwardMaps {
  CUtensorMap q, k, v, out, dout, dq, dk, dv;
  CUtensorMap terms{};  // LSE and delta as BF16 terms, see LseDeltaMma
  struct {
    int q, k, v, out, dout, dq, dk, dv, terms;
  } entry_rows;
  CUtensorMap bias{};
};

// The coordinates of a sequence: `shift` is added to a row of the sequence, `plane` and `bound` are the last
// two coordinates. They are (0, entry, 0) for uniform batches, and for varlen what RaggedCoord explains.
struct TmaCoord {
  int shift, plane, bound;

  FLASH_CUTE_HOST_DEVICE static TmaCoord of(bool varlen, int entry, int entry_rows, int first_row,
                                            int length) {
    if (!varlen) return {0, entry, 0};
    return {RaggedCoord::kBound - length, entry * entry_rows + first_row + length, RaggedCoord::kBound};
  }
  FLASH_CUTE_HOST_DEVICE static TmaCoord of_keys(bool varlen, KvTile const& tile, int entry_rows) {
    Sequence const& s = tile.sequence;
    return of(varlen, tile.batch, entry_rows, s.k_begin, s.mask.seqlen_k);
  }
  FLASH_CUTE_HOST_DEVICE static TmaCoord of_queries(bool varlen, KvTile const& tile, int entry_rows) {
    Sequence const& s = tile.sequence;
    return of(varlen, tile.batch, entry_rows, s.queries.begin, s.mask.seqlen_q);
  }
};

}  // namespace flash_cute
