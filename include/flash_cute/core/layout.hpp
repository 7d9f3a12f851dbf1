// Views of matrix-multiply accumulators.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

// ((2, 2, N8), MMA_M, MMA_N) -> (rows, columns) that this thread owns; mma.sync's accumulators have no N8 mode.
template <class Accumulator>
CUTE_HOST_DEVICE constexpr auto row_col_view(Accumulator&& acc) {
  auto const layout = acc.layout();
  auto const rows = make_layout(get<0, 1>(layout), get<1>(layout));
  if constexpr (decltype(rank<0>(layout))::value == 2) {
    return make_tensor(acc.data(), make_layout(rows, make_layout(get<0, 0>(layout), get<2>(layout))));
  } else {
    return make_tensor(acc.data(), make_layout(rows, make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout))));
  }
}

// ((2, 2), MMA_M, MMA_N) of S's accumulator -> ((2, 2, 2), MMA_M, MMA_N / 2), the A operand of m16n8k16.
template <class Accumulator>
CUTE_HOST_DEVICE constexpr auto operand_a_view(Accumulator&& acc) {
  auto const halves = logical_divide(acc.layout(), Shape<X, X, _2>{});  // ((2, 2), MMA_M, (2, MMA_N / 2))
  return make_tensor(acc.data(), make_layout(make_layout(get<0>(halves), get<2, 0>(halves)), get<1>(halves),
                                             get<2, 1>(halves)));
}

// A register tensor with the same layout in another element type, two elements per conversion.
template <class To, class Engine, class Layout>
CUTE_DEVICE auto convert(Tensor<Engine, Layout> const& source) {
  using From = typename Engine::value_type;
  Tensor result = make_tensor<To>(source.layout());
  auto const from = recast<cutlass::Array<From, 2> const>(source);
  auto to = recast<cutlass::Array<To, 2>>(result);
  CUTE_UNROLL
  for (int i = 0; i < size(to); ++i) to(i) = cutlass::NumericArrayConverter<To, From, 2>{}(from(i));
  return result;
}

}  // namespace flash_cute
