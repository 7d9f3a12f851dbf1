// Where the rows of a tile lie in a batch of unequal lengths, packed or padded.
#pragma once

#include <cstdint>

#include "flash_cute/attention/keys/dense.hpp"
#include "flash_cute/attention/tile.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// How a tensor map names the rows of a sequence such that TMA clips what lies past its end: rows are counted
// such that the end is the bound of their dimension, kBound; a second dimension of the same stride, the
// plane, shifts them to where they are; and at kBound of a third dimension they are kBound rows before that,
// as kBound times its stride is that many bytes less than 2^64 (an idea of Triton's ragged descriptors).
struct RaggedCoord {
  static constexpr int kBound = 1 << 30;
  static constexpr int64_t kWrap = int64_t(1) << 35;  // bytes; kBound times as many are a multiple of 2^64
  int shift;                                          // is added to a row
  int plane;

  // Of a sequence that begins at this row of all entries' rows.
  FLASH_CUTE_HOST_DEVICE static RaggedCoord of(int first_row, int length) {
    return {kBound - length, first_row + length};
  }
};

struct VarlenCoords {
  struct {
    int q, k, v, out;
  } entry_rows;  // from one entry of the batch to the next; 0 where packed

  static VarlenCoords of(ForwardParams const& params) {
    return {{entry_rows_of(params.q), entry_rows_of(params.k), entry_rows_of(params.v),
             entry_rows_of(params.out)}};
  }
  static int entry_rows_of(TensorView const& view) {
    return view.batch_stride == 0 ? 0 : int(view.batch_stride / view.row_stride);
  }

  // As of DenseCoords.
  FLASH_CUTE_HOST_DEVICE RowCoord query(VarlenTile const& tile, int row) const {
    return {tile.batch, tile.q_begin + row};
  }
  FLASH_CUTE_HOST_DEVICE RowCoord key(VarlenTile const& tile, int row) const {
    return {tile.batch, tile.k_begin + row};
  }
  template <TmaOperand operand, class Visit>
  FLASH_CUTE_HOST_DEVICE void visit_coords(VarlenTile const& tile, int row, Visit&& visit) const {
    RaggedCoord const found = coord<operand>(tile);
    visit(found.shift + row, found.plane, RaggedCoord::kBound);
  }

  template <TmaOperand operand>
  FLASH_CUTE_HOST_DEVICE RaggedCoord coord(VarlenTile const& tile) const {
    constexpr bool kKeys = operand == TmaOperand::k || operand == TmaOperand::v;
    int const rows = operand == TmaOperand::q   ? entry_rows.q
                     : operand == TmaOperand::k ? entry_rows.k
                     : operand == TmaOperand::v ? entry_rows.v
                                                : entry_rows.out;
    return RaggedCoord::of(tile.batch * rows + (kKeys ? tile.k_begin : tile.q_begin),
                           kKeys ? tile.seqlen_k : tile.seqlen_q);
  }
};

}  // namespace flash_cute
