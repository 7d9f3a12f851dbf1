// Matrix products on mma.sync with operands that arrive from shared memory.
#pragma once

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

// The default of what a product interleaves with itself: a callable that is called for each piece of the
// product with the piece's index and the number of pieces.
struct IssueNothing {
  CUTE_DEVICE void operator()(int, int) const {}
};

// Makes those of `count` calls that fall to piece i of `pieces`.
template <class Call>
CUTE_DEVICE void issue_share(int i, int pieces, int count, Call call) {
  CUTE_UNROLL
  for (int j = i * count / pieces; j < (i + 1) * count / pieces; ++j) call(j);
}

// Computes acc += A B^T, one 16 x 16 piece of B at a time; load_a(k) and load_b(n, k) bring the operands into
// registers just before their use. ptxas moves the loads ahead as far as registers allow; double buffering of
// whole steps spilled.
template <class Mma, class Acc, class FragmentA, class FragmentB, class LoadA, class LoadB,
          class Beside = IssueNothing>
CUTE_DEVICE void gemm_from_shared(Mma const& mma, Acc& acc, FragmentA const& rA, FragmentB const& rB,
                                  LoadA load_a, LoadB load_b, Beside beside = {}) {
  constexpr int kPieces = ceil_div(decltype(size<1>(rB))::value, 2), kSteps = decltype(size<2>(rA))::value;
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    load_a(k);
    CUTE_UNROLL
    for (int n = 0; n < size<1>(rB); ++n) {
      if (n % 2 == 0) {
        load_b(n / 2, k);
        beside(k * kPieces + n / 2, kSteps * kPieces);
      }
      CUTE_UNROLL
      for (int m = 0; m < size<1>(rA); ++m) gemm(mma, rA(_, m, k), rB(_, n, k), acc(_, m, n));
    }
  }
}

}  // namespace flash_cute
