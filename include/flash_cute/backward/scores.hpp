// P = exp2(S c - LSE) and dS = P (dP - delta), element by element, for all kernels of the backward. S is the
// product of Q and K, c = softmax_scale log2(e), the LSE is in base 2, and delta = rowsum(dO O) - dLSE. The
// workspace holds its negative, neg_delta = dLSE - rowsum(dO O), which is added to dP.
#pragma once

#include "flash_cute/attention/scores/pairs.hpp"
#include "flash_cute/core/math.hpp"

namespace flash_cute {

using namespace cute;

// A function of i that reads the LSE or delta of this thread's i-th query from `values`, which has those of
// an M block. coords: the coordinates of the accumulator.
template <QueryAxis axis, class Coords>
CUTE_DEVICE auto of_query(float const* values, Coords const& coords) {
  auto const queries = query_key_view<axis>(coords);
  return [=](int query) { return values[get<int(axis)>(queries(query, 0))]; };
}

// S becomes P. lse(i) is the LSE of this thread's i-th query.
template <QueryAxis axis, class Scores, class Lse>
CUTE_DEVICE void compute_p(Scores& acc_s, float scale_log2, Lse&& lse) {
  auto scores = query_key_view<axis>(acc_s);
  CUTE_UNROLL
  for (int query = 0; query < size<0>(scores); ++query) {
    float const lse_of_query = lse(query);
    CUTE_UNROLL
    for (int key = 0; key < size<1>(scores); ++key) {
      scores(query, key) = fast_exp2(fmaf(scores(query, key), scale_log2, -lse_of_query));
    }
  }
}

// S becomes P where the product of Q and K has subtracted the LSE (see LseDeltaMma).
template <class Scores>
CUTE_DEVICE void compute_p(Scores& acc_s, float scale_log2) {
  CUTE_UNROLL
  for (int i = 0; i < size(acc_s); ++i) acc_s(i) = fast_exp2(acc_s(i) * scale_log2);
}

// dP becomes dS. neg_delta(i) is that of this thread's i-th query.
template <QueryAxis axis, class Gradients, class Probabilities, class Delta>
CUTE_DEVICE void compute_ds(Gradients& acc_ds, Probabilities const& acc_p, Delta&& neg_delta) {
  auto ds = query_key_view<axis>(acc_ds);
  auto const p = query_key_view<axis>(acc_p);
  CUTE_UNROLL
  for (int query = 0; query < size<0>(ds); ++query) {
    float const delta_of_query = neg_delta(query);
    CUTE_UNROLL
    for (int key = 0; key < size<1>(ds); ++key) {
      ds(query, key) = p(query, key) * (ds(query, key) + delta_of_query);
    }
  }
}

// Fills the accumulator of dP with neg_delta, so that the product of dO and V ends as dP - delta.
template <QueryAxis axis, class Gradients, class Delta>
CUTE_DEVICE void fill_with_delta(Gradients& acc_ds, Delta&& neg_delta) {
  auto ds = query_key_view<axis>(acc_ds);
  CUTE_UNROLL
  for (int query = 0; query < size<0>(ds); ++query) {
    float const delta_of_query = neg_delta(query);
    CUTE_UNROLL
    for (int key = 0; key < size<1>(ds); ++key) ds(query, key) = delta_of_query;
  }
}

// dS where the accumulator already has dP - delta.
template <class Gradients, class Probabilities>
CUTE_DEVICE void compute_ds(Gradients& acc_ds, Probabilities const& acc_p) {
  CUTE_UNROLL
  for (int i = 0; i < size(acc_ds); ++i) acc_ds(i) *= acc_p(i);
}

}  // namespace flash_cute
