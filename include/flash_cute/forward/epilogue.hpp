// How a tile's rows end, in both families; the LSE leaves straight from the registers of the compute warps.
#pragma once

#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/accumulator.hpp"

namespace flash_cute {

// Ends the softmax of the rows that this thread owns, and divides O by their sums. m_begin: their first
// query.
template <class Softmax, class Mask, class Rows, class Coords, class Output>
CUTE_DEVICE void finish_rows(Softmax& softmax, Mask const& mask, int m_begin, Rows const& rows,
                             Coords const& accumulator_coords, Output& acc_o) {
  auto const coords = row_col_view(accumulator_coords);
  softmax.finish(acc_o,
                 [&](int row) { return mask.is_fully_masked(m_begin + rows.query(get<0>(coords(row, 0)))); });
}

// Writes the LSE of the rows whose first column this thread owns. tile.m_begin: the first query of the rows;
// coords: (row, column) of an accumulator.
template <class Problem, class Tile, class Rows, class Softmax, class Coords>
CUTE_DEVICE void store_lse(ForwardParams const& params, Problem const& problem, Tile const& tile,
                           int seqlen_q, Rows const& rows, Softmax const& softmax,
                           Coords const& accumulator_coords) {
  ProblemShape const& shape = params.shape;
  float* const lse = params.lse + problem.lse_offset(params, tile) + tile.m_begin;
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
