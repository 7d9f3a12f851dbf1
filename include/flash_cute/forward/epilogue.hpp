// How a tile's rows end, in both families; the LSE leaves straight from the
// registers of the compute warps.
#pragma once

#include "flash_cute/attention/scores/lowest.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

// The sinks, in base 2, of the rows that this thread owns.
template <class Element, class Pack, class Coords>
struct RowSinks {
  static constexpr bool kExist = true;
  SinkParams const& params;
  int first_head;
  Pack const& rows;
  Coords const& coords;  // (row, column) of an accumulator

  CUTE_DEVICE float operator()(int i) const {
    int const row = get<0>(coords(i, 0));
    return params.logit<Element>(first_head + (rows.uses(row) ? rows.head(row) : 0)) * float(M_LOG2E);
  }
};

// Do sums get something beside keys before O is complete? Sinks do, of tiles that have all keys, and on
// Hopper before a warpgroup waits for its turn: after the products, where few keys are seen, they would delay
// those of the other warpgroups, by 8% in all (head dim 64, a window of 128 keys, H200). Those of splits
// count in normalize_rows.
template <class Traits>
CUTE_DEVICE bool finalizes_early(ForwardParams const& params) {
  return Traits::kKernel.keys == Keys::whole && params.sinks.logits;
}

// Closes the softmax of the rows that this thread owns.
template <class Traits, class Softmax, class Tile, class Pack, class Coords>
CUTE_DEVICE void finalize_rows(ForwardParams const& params, Softmax& softmax, Tile const& tile,
                               Pack const& rows, Coords const& accumulator_coords) {
  if (finalizes_early<Traits>(params)) {
    auto const coords = row_col_view(accumulator_coords);
    softmax.finalize(
        RowSinks<typename Traits::Element, Pack, decltype(coords)>{params.sinks, tile.head, rows, coords});
  } else {
    softmax.finalize();
  }
}

// Divides O by the sums of a split of the keys. Other splits may have some for rows that see none here.
template <class Softmax, class Output>
CUTE_DEVICE void normalize_split(Softmax& softmax, Output& acc_o) {
  softmax.normalize(acc_o, [&](int row) { return softmax.lse(row) == -INFINITY; });
}

// Is a row fully masked? Where a bias may hide pairs, a sum of 0 says so.
template <class Traits, class Mask>
CUTE_DEVICE bool is_fully_masked(ForwardParams const& params, Mask const& mask, int query, bool has_no_sum) {
  if constexpr (Traits::kKernel.scores == Scores::general) {
    if (params.scores.bias.given) return has_no_sum;
  }
  return mask.is_fully_masked(query);
}

// Divides O by the sums of the rows that this thread owns. m_begin: their first query.
template <class Traits, class Softmax, class Mask, class Pack, class Coords, class Output>
CUTE_DEVICE void divide_rows(ForwardParams const& params, Softmax& softmax, Mask const& mask, int m_begin,
                             Pack const& rows, Coords const& accumulator_coords, Output& acc_o) {
  if constexpr (Traits::kKernel.scores == Scores::general && Traits::kKernel.keys == Keys::whole) {
    // The LSE of rows that saw a bias's lowest numbers alone, whose weights are 1 each.
    float const lowest = params.scores.lowest_score * softmax.scale_log2 * float(M_LN2);
    CUTE_UNROLL
    for (int i = 0; i < decltype(size<0>(row_col_view(accumulator_coords)))::value; ++i) {
      bool const is_low = params.scores.bias.given && isfinite(softmax.row_max[i]) &&
                          softmax.row_max[i] <= 0.999999f * lowest;
      if (is_low) softmax.row_max[i] = LowestRows::lse_of(1.f / softmax.row_sum[i]);
      softmax.row_sum[i] *= params.scores.dropout.inverse_keep;
    }
  }
  auto const coords = row_col_view(accumulator_coords);
  softmax.normalize(acc_o, [&](int row) {
    bool const has_no_sum = softmax.row_sum[row] == 0.f || softmax.row_sum[row] == INFINITY;
    return is_fully_masked<Traits>(params, mask, m_begin + rows.query(get<0>(coords(row, 0))), has_no_sum);
  });
}

// The same of O that is relative to the LSE of the softmax, with sinks, as the kernels that combine splits
// count them. sums: of the weights of splits.
template <class Traits, class Softmax, class Mask, class Tile, class Pack, class Coords, class Sums,
          class Output>
CUTE_DEVICE void divide_total(ForwardParams const& params, Softmax& softmax, Mask const& mask,
                              Tile const& tile, Pack const& rows, Coords const& accumulator_coords,
                              Sums const& sums, Output& acc_o) {
  auto const coords = row_col_view(accumulator_coords);
  auto output = row_col_view(acc_o);
  CUTE_UNROLL
  for (int i = 0; i < size<0>(coords); ++i) {
    int const row = get<0>(coords(i, 0));
    float const lse = softmax.lse(i);
    bool const has_sink = (Sums::kAreOfSinks || params.sinks.logits) && rows.uses(row);
    float const sink =
        has_sink ? params.sinks.logit<typename Traits::Element>(tile.head + rows.head(row)) : -INFINITY;
    float const highest = fmaxf(lse, sink), reference = highest == -INFINITY ? 0.f : highest;
    float const weight = expf(lse - reference), sum = sums.weighted(i, weight) + expf(sink - reference);
    bool const is_empty = sum == 0.f;
    bool const is_hidden =
        is_empty && is_fully_masked<Traits>(params, mask, tile.m_begin + rows.query(row), is_empty);
    float const factor = is_hidden ? 0.f : 1.f / sum;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); ++col) output(i, col) = output(i, col) * weight * factor;
    softmax.row_max[i] = reference + logf(sum);
  }
}

// The sums where a tile has one split, and sinks.
struct OneSplit {
  static constexpr bool kAreOfSinks = true;
  CUTE_DEVICE static float weighted(int, float weight) { return weight; }
};

// Divides O by the sums of the rows that this thread owns. A query's bits are the same in splits and whole.
template <class Traits, class Softmax, class Mask, class Tile, class Pack, class Coords, class Output>
CUTE_DEVICE void normalize_rows(ForwardParams const& params, Softmax& softmax, Mask const& mask,
                                Tile const& tile, Pack const& rows, Coords const& accumulator_coords,
                                Output& acc_o) {
  if (Traits::kKernel.keys == Keys::split && params.sinks.logits) {
    normalize_split(softmax, acc_o);
    divide_total<Traits>(params, softmax, mask, tile, rows, accumulator_coords, OneSplit{}, acc_o);
  } else {
    divide_rows<Traits>(params, softmax, mask, tile.m_begin, rows, accumulator_coords, acc_o);
  }
}

// Writes the LSE of the rows whose first column this thread owns. tile.m_begin: the first query of the rows;
// coords: (row, column) of an accumulator.
template <class Source, class Tile, class Pack, class Softmax, class Coords>
CUTE_DEVICE void store_lse(ForwardParams const& params, Source const& source, Tile const& tile, int seqlen_q,
                           Pack const& rows, Softmax const& softmax, Coords const& accumulator_coords) {
  ProblemShape const& shape = params.shape;
  float* const lse = params.lse + source.lse_offset(params, tile) + tile.m_begin;
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

// Writes the result of a split of the keys, which normalize_split has ended, to the workspace. tile.m_begin:
// the first query of the rows; first_row: the first of them among the tile's; coords: (row, column) of acc_o.
template <class Tile, class Pack, class Softmax, class Coords, class Output>
CUTE_DEVICE void store_partial(PartialResults const& partial, Tile const& tile, int first_row,
                               Pack const& rows, Softmax const& softmax, Coords const& accumulator_coords,
                               Output const& acc_o) {
  auto const coords = row_col_view(accumulator_coords);
  auto const output = row_col_view(acc_o);
  CUTE_UNROLL
  for (int i = 0; i < size<0>(output); ++i) {
    int const row = get<0>(coords(i, 0)), of_slot = first_row + row;
    if (!rows.uses(row) || tile.m_begin + rows.query(row) >= tile.seqlen_q) continue;
    float* const out = partial.out_row(tile.slot, of_slot);
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); col += 2) {
      int const column = get<1>(coords(i, col));
      if (column < partial.head_dim_v) {
        *reinterpret_cast<float2*>(out + column) = make_float2(output(i, col), output(i, col + 1));
      }
    }
    if (get<1>(coords(i, 0)) == 0) partial.lse_of(tile.slot, of_slot) = softmax.lse(i);
  }
}

}  // namespace flash_cute
