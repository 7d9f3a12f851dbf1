// Fully masked queries, which are the first of their sequence: their rows of dQ are 0.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/accumulator.hpp"

namespace flash_cute {

using namespace cute;

// Sets the first `count` rows of an accumulator to 0, whatever they hold: dS = 0 times a key that is not
// finite has made them NaN.
template <class Accumulator, class Coords>
CUTE_DEVICE void zero_fully_masked_rows(Accumulator& acc, Coords const& accumulator_coords, int count) {
  auto values = row_col_view(acc);
  auto const coords = row_col_view(accumulator_coords);
  CUTE_UNROLL
  for (int i = 0; i < size<0>(values); ++i) {
    if (get<0>(coords(i, 0)) >= count) continue;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(values); ++j) values(i, j) = 0.f;
  }
}

}  // namespace flash_cute
