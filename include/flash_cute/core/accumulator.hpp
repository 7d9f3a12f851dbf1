// Views of matrix-multiply accumulators.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

// Views an accumulator ((2, 2, N8), MMA_M, MMA_N) as the (rows, columns) that this thread owns. Accumulators
// of mma.sync have no N8 mode.
template <class Accumulator>
CUTE_HOST_DEVICE constexpr auto row_col_view(Accumulator&& acc) {
  auto const layout = acc.layout();
  auto const rows = make_layout(get<0, 1>(layout), get<1>(layout));
  if constexpr (decltype(rank<0>(layout))::value == 2) {
    return make_tensor(acc.data(), make_layout(rows, make_layout(get<0, 0>(layout), get<2>(layout))));
  } else {
    return make_tensor(acc.data(),
                       make_layout(rows, make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout))));
  }
}

// Views the accumulator of S as the A operand of P V: two groups of eight columns make the sixteen of a k
// step. The shape changes for mma.sync from ((2, 2), MMA_M, MMA_N) to ((2, 2, 2), MMA_M, MMA_N / 2), and for
// WGMMA from ((2, 2, N8), M, N) to ((2, 2, 2), M, (N8 / 2, N)).
template <class Accumulator>
CUTE_HOST_DEVICE constexpr auto operand_a_view(Accumulator&& acc) {
  auto const layout = acc.layout();
  if constexpr (decltype(rank<0>(layout))::value == 2) {
    auto const halves = logical_divide(get<2>(layout), Int<2>{});
    return make_tensor(acc.data(),
                       make_layout(make_layout(get<0, 0>(layout), get<0, 1>(layout), get<0>(halves)),
                                   get<1>(layout), get<1>(halves)));
  } else {
    auto const halves = logical_divide(get<0, 2>(layout), Int<2>{});
    return make_tensor(acc.data(),
                       make_layout(make_layout(get<0, 0>(layout), get<0, 1>(layout), get<0>(halves)),
                                   get<1>(layout), make_layout(get<1>(halves), get<2>(layout))));
  }
}

// Rounds two floats to 16-bit elements and packs them into one word.
template <class Element>
CUTE_DEVICE uint32_t pack(float low, float high) {
  cutlass::Array<Element, 2> const pair =
      cutlass::NumericArrayConverter<Element, float, 2>{}(cutlass::Array<float, 2>{low, high});
  return reinterpret_cast<uint32_t const&>(pair);
}

template <class Element, class Source, class Target>
CUTE_DEVICE void convert_into(Source const& source, Target& target) {
  auto words = recast<uint32_t>(target);
  CUTE_UNROLL
  for (int i = 0; i < size(words); ++i) words(i) = pack<Element>(source(2 * i), source(2 * i + 1));
}

// Returns a register tensor with the same layout, rounded to a 16-bit element type.
template <class Element, class Source>
CUTE_DEVICE auto convert(Source const& source) {
  Tensor target = make_tensor<Element>(source.layout());
  convert_into<Element>(source, target);
  return target;
}

// The same of a tensor that may be rounded already.
template <class Element, class Source>
CUTE_DEVICE auto rounded(Source const& source) {
  if constexpr (std::is_same_v<typename Source::value_type, Element>) {
    return source;
  } else {
    return convert<Element>(source);
  }
}

// Transposes words among the four lanes of a quad: word j of lane t becomes word t of lane j. It takes one
// exchange per bit of the index.
CUTE_DEVICE void transpose_quad(uint32_t (&words)[4], int lane) {
  CUTE_UNROLL
  for (int bit = 1; bit < 4; bit *= 2) {
    bool const upper = lane & bit;
    CUTE_UNROLL
    for (int low = 0; low < 4; ++low) {
      if (low & bit) continue;
      uint32_t const received = __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[low + bit], bit);
      words[low] = upper ? received : words[low];
      words[low + bit] = upper ? words[low + bit] : received;
    }
  }
}

}  // namespace flash_cute
