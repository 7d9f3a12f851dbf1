// Online softmax in base 2 over the rows that one thread owns; a row is spread over the four lanes of a quad.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/core/math.hpp"

namespace flash_cute {

struct MaxOp {
  CUTE_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class Op>
CUTE_DEVICE float reduce_quad(float value, Op op) {
  value = op(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return op(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Each row times its factor.
template <class Output, class Factors>
CUTE_DEVICE void scale_rows(Output& acc_o, Factors const& factor) {
  auto output = row_col_view(acc_o);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(output); ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); ++col) output(row, col) *= factor[row];
  }
}

// Results computed so far, times factor, are relative to the reference of later ones.
template <int kRows>
struct Correction {
  bool needed;  // by any row of the warp
  cute::array<float, kRows> factor;

  template <class Output>
  CUTE_DEVICE void apply(Output& acc_o) const {
    if (needed) scale_rows(acc_o, factor);
  }
};

struct NoSinks {
  static constexpr bool kExist = false;
};

// Probabilities are relative to a reference, which follows the row maximum when it is more than
// kRescaleThreshold powers of two below it. With 0 the largest one is 1, which rounding does not change, and
// O is rescaled for every block. With 8 they stay below 256, sums and products in float do not care, and O is
// seldom rescaled.
template <int kRows, int kRescaleThreshold>
struct OnlineSoftmax {
  float scale_log2;
  float row_max[kRows];  // scaled scores in base 2; the lowest float before the first visible key
  float row_sum[kRows];  // this lane's share, until finalize() adds up the quad

  CUTE_DEVICE explicit OnlineSoftmax(float scale_log2_) : scale_log2(scale_log2_) { reset(); }

  // lowest: the reference of rows whose scores, in base 2, are lower.
  CUTE_DEVICE void reset(float lowest = -FLT_MAX) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      row_max[row] = lowest;
      row_sum[row] = 0.f;
    }
  }

  // Raw scores become probabilities. Returns what brings earlier results to the same reference.
  template <class Scores>
  CUTE_DEVICE Correction<kRows> update(Scores& acc_s) {
    auto scores = row_col_view(acc_s);
    Correction<kRows> const correction = raise_row_max(scores);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) = fast_exp2(scores(row, col) * scale_log2 - row_max[row]);
        row_sum[row] += scores(row, col);
      }
    }
    return correction;
  }

  // When no key is left: the natural-log LSE of the scaled scores takes the place of the reference, what O is
  // to be multiplied by that of the sum.
  template <class Sinks = NoSinks>
  CUTE_DEVICE void finalize(Sinks const& sinks = {}) {
    float factor[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      row_sum[row] = reduce_quad(row_sum[row], SumOp{});
      factor[row] = 1.f;
    }
    if constexpr (Sinks::kExist) add_sinks(sinks, factor);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      // With slack the error of out is larger too; logf would cost 1 to 2% at seqlen 512.
      float const log_sum = kRescaleThreshold == 0 ? logf(row_sum[row]) : __logf(row_sum[row]);
      row_max[row] = fmaf(row_max[row], float(M_LN2), log_sum);
      row_sum[row] = __fdividef(factor[row], row_sum[row]);
    }
  }

  // Then what O is multiplied by has one more factor, but of rows that see nothing, which an infinity tells.
  CUTE_DEVICE void scale_output(float factor) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      if (row_sum[row] != INFINITY) row_sum[row] *= factor;
    }
  }

  // Then divides O by the row sums. Fully masked rows become zeros even where a hidden V was not finite; they
  // are rare, and a select for every element would cost 1 to 2%. Rows that see scores of -inf alone have a
  // sum of 0, too: they become NaN, without a sink.
  template <class Output, class IsFullyMasked>
  CUTE_DEVICE void normalize(Output& acc_o, IsFullyMasked const& is_fully_masked) {
    bool is_empty = false;  // any row, but for its sink
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) is_empty |= row_sum[row] == 0.f || row_sum[row] == INFINITY;
    if (__any_sync(0xffffffffu, is_empty)) {
      auto output = row_col_view(acc_o);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        if (!is_fully_masked(row)) continue;
        row_sum[row] = 1.f;
        CUTE_UNROLL
        for (int col = 0; col < size<1>(output); ++col) output(row, col) = 0.f;
      }
    }
    scale_rows(acc_o, row_sum);
  }

  CUTE_DEVICE float lse(int row) const { return row_max[row]; }

 private:
  // Sums become those with a key of this logit, in base 2, and no value. factor: what brings O to the same
  // reference.
  template <class Sinks>
  CUTE_DEVICE void add_sinks(Sinks const& sinks, float (&factor)[kRows]) {
    float logit[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) logit[row] = sinks(row);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const highest = fmaxf(row_max[row], logit[row]);
      factor[row] = fast_exp2(row_max[row] - highest);
      row_sum[row] = row_sum[row] * factor[row] + fast_exp2(logit[row] - highest);
      row_max[row] = highest;
    }
  }

  template <class Scores>
  CUTE_DEVICE Correction<kRows> raise_row_max(Scores const& scores) {
    Correction<kRows> correction{kRescaleThreshold == 0};
    float highest[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) highest[row] = highest_score(scores, row);
    if constexpr (kRescaleThreshold > 0) {  // this lane's own scores tell whether a row exceeds it
      bool exceeded = false;
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) exceeded |= exceeds(row, highest[row] * scale_log2);
      correction.needed = __any_sync(0xffffffffu, exceeded);
    }
    if (correction.needed) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float const scaled = reduce_quad(highest[row], MaxOp{}) * scale_log2;
        float const raised = exceeds(row, scaled) ? scaled : row_max[row];
        correction.factor[row] = fast_exp2(row_max[row] - raised);
        row_max[row] = raised;
        row_sum[row] *= correction.factor[row];
      }
    }
    return correction;
  }

  CUTE_DEVICE bool exceeds(int row, float scaled) const { return scaled > row_max[row] + kRescaleThreshold; }

  // Two chains of maxima, as each one waits for the one before.
  template <class Scores>
  CUTE_DEVICE static float highest_score(Scores const& scores, int row) {
    float even = scores(row, 0), odd = scores(row, 1);
    CUTE_UNROLL
    for (int col = 2; col < size<1>(scores); col += 2) {
      even = fmaxf(even, scores(row, col));
      odd = fmaxf(odd, scores(row, col + 1));
    }
    return fmaxf(even, odd);
  }
};

}  // namespace flash_cute
