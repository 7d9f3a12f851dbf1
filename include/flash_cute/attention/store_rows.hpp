// How rows of a result leave straight from the registers of the warps that computed them.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/attention/pack_gqa.hpp"
#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

using namespace cute;

// Writes the rows of `queries` queries and the first `columns` columns of an accumulator, of mma.sync or of
// WGMMA, in chunks of 16 bytes, without shared memory and its barriers. The four lanes of a quad own two
// neighbouring columns each of every eight; after a transpose among them each lane owns eight neighbouring
// columns. target: where the accumulator's first row goes; coords: (row, column) of the accumulator.
template <class Element, class Pack, class Accumulator, class Coords>
CUTE_DEVICE void store_rows(Element* target, int64_t row_stride, int64_t head_stride, Pack const& rows,
                            int queries, int columns, Accumulator const& acc,
                            Coords const& accumulator_coords) {
  constexpr int kWords = 4, kColumns = 2 * kWords;  // that a lane owns of 32 columns
  auto const values = row_col_view(acc);
  auto const coords = row_col_view(accumulator_coords);
  constexpr int kPieces =
      decltype(size<1>(values))::value / 2;  // of eight columns, the last ones no full four
  int const lane = threadIdx.x % kWords;
  int const step = get<1>(coords(0, 2)) - get<1>(coords(0, 0));  // from one group of eight to the next
  CUTE_UNROLL
  for (int i = 0; i < size<0>(values); ++i) {
    int const row = get<0>(coords(i, 0));
    CUTE_UNROLL
    for (int group = 0; group < ceil_div(kPieces, kWords); ++group) {
      uint32_t words[kWords];
      CUTE_UNROLL
      for (int word = 0; word < kWords; ++word) {
        int const piece = group * kWords + word;
        words[word] = piece < kPieces ? pack<Element>(values(i, 2 * piece), values(i, 2 * piece + 1)) : 0;
      }
      transpose_quad(words, lane);
      int const column = get<1>(coords(i, group * kColumns)) - 2 * lane + lane * step;
      bool const owns = group * kWords + lane < kPieces;
      if (rows.query(row) < queries && column < columns && owns && rows.uses(row)) {
        *reinterpret_cast<uint4*>(target + rows.query(row) * row_stride + rows.head(row) * head_stride +
                                  column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}
// Of float32, whose quads write 32 bytes of a row at once as they are.
template <class Pack, class Accumulator, class Coords>
CUTE_DEVICE void store_rows(float* target, int64_t row_stride, int64_t head_stride, Pack const& rows,
                            int queries, int columns, Accumulator const& acc,
                            Coords const& accumulator_coords) {
  auto const values = row_col_view(acc);
  auto const coords = row_col_view(accumulator_coords);
  CUTE_UNROLL
  for (int i = 0; i < size<0>(values); ++i) {
    int const row = get<0>(coords(i, 0));
    float* const of_row = target + rows.query(row) * row_stride + rows.head(row) * head_stride;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(values); j += 2) {
      int const column = get<1>(coords(i, j));
      if (rows.query(row) < queries && column < columns && rows.uses(row)) {
        *reinterpret_cast<float2*>(of_row + column) = make_float2(values(i, j), values(i, j + 1));
      }
    }
  }
}
// Of one head.
template <class Element, class Accumulator, class Coords>
CUTE_DEVICE void store_rows(Element* target, int64_t row_stride, int rows, int columns,
                            Accumulator const& acc, Coords const& coords) {
  store_rows(target, row_stride, 0, OneHead{}, rows, columns, acc, coords);
}

}  // namespace flash_cute
