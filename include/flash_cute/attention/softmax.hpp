// Online softmax in base 2 over the rows that one thread owns; a row is spread over the four lanes of a quad.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/layout.hpp"

namespace flash_cute {

struct MaxOp {
  CUTE_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOp {
  CUTE_DEVICE float operator()(float a, float b) const { return a + b; }
};

// 2^x as one MUFU instruction; exp2f would add two more to treat results below 2^-126, which vanish here anyway.
CUTE_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class Op>
CUTE_DEVICE float reduce_quad(float value, Op op) {
  value = op(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return op(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

template <int kRows>
struct OnlineSoftmax {
  float scale_log2;
  float row_max[kRows];  // of the raw scores
  float row_sum[kRows];  // this lane's share, until finish() adds up the quad

  CUTE_DEVICE explicit OnlineSoftmax(float scale_log2_) : scale_log2(scale_log2_) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      row_max[row] = -INFINITY;
      row_sum[row] = 0.f;
    }
  }

  // Raw scores become probabilities relative to the new row maxima. Returns what brings earlier results to them.
  template <class Scores>
  CUTE_DEVICE cute::array<float, kRows> update(Scores& acc_s) {
    auto scores = row_col_view(acc_s);
    cute::array<float, kRows> correction;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float highest = row_max[row];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) highest = fmaxf(highest, scores(row, col));
      highest = reduce_quad(highest, MaxOp{});
      // A row that has seen no key yet keeps -inf as its maximum and 0 as its reference: -inf - -inf is NaN.
      float const reference = highest == -INFINITY ? 0.f : highest * scale_log2;
      correction[row] = fast_exp2(row_max[row] * scale_log2 - reference);
      row_max[row] = highest;
      float sum = 0.f;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) = fast_exp2(scores(row, col) * scale_log2 - reference);
        sum += scores(row, col);
      }
      row_sum[row] = row_sum[row] * correction[row] + sum;
    }
    return correction;
  }

  template <class Output>
  CUTE_DEVICE static void rescale(Output& acc_o, cute::array<float, kRows> const& factor) {
    auto output = row_col_view(acc_o);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(output); ++col) output(row, col) *= factor[row];
    }
  }

  // Divides acc_o by the row sums and leaves the natural-log LSE of the scaled scores in row_max.
  template <class Output>
  CUTE_DEVICE void finish(Output& acc_o) {
    cute::array<float, kRows> inverse;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const sum = reduce_quad(row_sum[row], SumOp{});
      inverse[row] = sum == 0.f ? 0.f : 1.f / sum;
      row_max[row] = sum == 0.f ? -INFINITY : (row_max[row] * scale_log2 + log2f(sum)) * float(M_LN2);
    }
    rescale(acc_o, inverse);
  }

  CUTE_DEVICE float lse(int row) const { return row_max[row]; }
};

}  // namespace flash_cute
