// The pairs of queries and keys of an accumulator of scores, whichever of the two its rows are.
#pragma once

#include "flash_cute/core/accumulator.hpp"

namespace flash_cute {

using namespace cute;

// The axis of an accumulator of scores that counts queries.
enum class QueryAxis { rows, columns };

// (queries, keys) that this thread owns.
template <QueryAxis axis, class Accumulator>
CUTE_DEVICE auto query_key_view(Accumulator&& acc) {
  auto const view = row_col_view(acc);
  if constexpr (axis == QueryAxis::rows) {
    return view;
  } else {
    return make_tensor(view.data(), make_layout(get<1>(view.layout()), get<0>(view.layout())));
  }
}

// Of a coordinate (row, column) of an accumulator.
template <QueryAxis axis, class Coord>
CUTE_DEVICE constexpr auto query_of(Coord const& coord) {
  return get<int(axis)>(coord);
}
template <QueryAxis axis, class Coord>
CUTE_DEVICE constexpr auto key_of(Coord const& coord) {
  return get<1 - int(axis)>(coord);
}

}  // namespace flash_cute
