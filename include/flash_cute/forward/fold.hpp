// How splits of a fixed length are added up: one after the other, from the last to the first, as a tile
// visits them. A tile that has several does it by itself, the others leave it to fold_kernel
// (fold_splits.cuh), to the same bits.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

// What a row's total and the result of one more split are multiplied by, so that both are relative to the
// higher LSE of the two.
struct FoldWeights {
  float total, split;
};

// highest: the LSE that the total is relative to, -inf before the first split. A split in which a row sees
// nothing, whose LSE is -inf and whose O is 0, changes no bit: x + 0 * -0 is x, for a zero of either sign,
// too. So a total begins with -0.
CUTE_DEVICE FoldWeights fold_weights(float highest, float raised, float lse) {
  float const reference = raised == -INFINITY ? 0.f : raised;
  return {expf(highest - reference), lse == -INFINITY ? -0.f : expf(lse - reference)};
}
constexpr float kNoTotal = -0.f;

CUTE_DEVICE float fold(float total, float value, FoldWeights const& weights) {
  return __fmaf_rn(total, weights.total, __fmul_rn(value, weights.split));
}
// Of weights, which begin with 0.
CUTE_DEVICE float fold_sum(float sum, FoldWeights const& weights) {
  return __fmaf_rn(sum, weights.total, weights.split);
}

// A row at its end, with a sink or -inf: out is O * weight / sum. Tiles do the same in divide_total. Whatever
// a compiler fuses here, the bits are the same: expf ends with a product by a power of two.
struct FoldedRow {
  float weight, sum, lse;

  CUTE_DEVICE FoldedRow(float highest, float sum_, float sink) {
    float const raised = fmaxf(highest, sink), reference = raised == -INFINITY ? 0.f : raised;
    weight = expf(highest - reference);
    sum = __fmul_rn(sum_, weight) + expf(sink - reference);
    lse = reference + logf(sum);
  }
};

}  // namespace flash_cute
