// Where TMA finds the operands of the Hopper family's backward, and where it leaves dK and dV.
#pragma once

#include <cuda.h>

#include "flash_cute/attention/keys/varlen.hpp"
#include "flash_cute/backward/kv_tile.hpp"

namespace flash_cute {

// Each has five dimensions: columns, heads and rows, and two that say which rows (TmaCoord). Rows from one
// batch entry to the next are 0 where packed.
struct BackwardMaps {
  CUtensorMap q, k, v, out, dout, dq, dk, dv;
  CUtensorMap terms{};  // see BackwardWorkspace
  struct {
    int q, k, v, out, dout, dq, dk, dv, terms;
  } entry_rows;
};

// What is added to a row, and the coordinates behind it: (0, entry, 0) where sequences are alike, else as
// VarlenCoord has it.
struct TmaCoord {
  int shift, plane, bound;

  FLASH_CUTE_HOST_DEVICE static TmaCoord of(bool varlen, int entry, int entry_rows, int first_row,
                                            int length) {
    if (!varlen) return {0, entry, 0};
    return {VarlenCoord::kBound - length, entry * entry_rows + first_row + length, VarlenCoord::kBound};
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
