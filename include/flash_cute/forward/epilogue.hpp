// How a tile's rows end, in both families; the LSE leaves straight from the registers of the compute warps.
#pragma once

#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

// Ends the softmax of the rows that this thread owns, and divides O by their sums.
template <class Softmax, class Tile, class Rows, class Coords, class Output>
CUTE_DEVICE void finish_rows(Softmax& softmax, ForwardParams const& params, Tile const& tile,
                             Rows const& rows, Coords const& accumulator_coords, Output& acc_o) {
  WindowMask const& mask = mask_of(params, tile);
  auto const coords = row_col_view(accumulator_coords);
  softmax.finish(acc_o, [&](int row) {
    return mask.is_fully_masked(tile.m_begin + rows.query(get<0>(coords(row, 0))));
  });
}

// Writes the LSE of the rows whose first column this thread owns. coords: (row, column) of an accumulator.
template <class Tile, class Rows, class Softmax, class Coords>
CUTE_DEVICE void store_lse(ForwardParams const& params, Tile const& tile, Rows const& rows,
                           Softmax const& softmax, Coords const& accumulator_coords) {
  ProblemShape const& shape = params.shape;
  float* const lse = params.lse + lse_offset(params, tile) + tile.m_begin;
  int const seqlen_q = mask_of(params, tile).seqlen_q;
  auto const coords = row_col_view(accumulator_coords);
  CUTE_UNROLL
  for (int i = 0; i < size<0>(coords); ++i) {
    int const row = get<0>(coords(i, 0));
    bool const is_query = rows.uses(row) && tile.m_begin + rows.query(row) < seqlen_q;
    if (get<1>(coords(i, 0)) == 0 && is_query) {
      lse[int64_t(rows.head(row)) * shape.seqlen_q + rows.query(row)] = softmax.lse(i);
    }
  }
}

}  // namespace flash_cute
