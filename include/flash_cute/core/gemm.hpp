// Matrix products on mma.sync with operands that arrive from shared memory.
#pragma once

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

// acc += A B^T, one 16 x 16 piece of B at a time: load_a(k) and load_b(n, k) bring the operands into
// registers just before their use. ptxas moves the loads ahead as far as registers allow; double buffering
// whole steps spilled.
template <class Mma, class Acc, class FragmentA, class FragmentB, class LoadA, class LoadB>
CUTE_DEVICE void gemm_from_shared(Mma const& mma, Acc& acc, FragmentA const& rA, FragmentB const& rB,
                                  LoadA load_a, LoadB load_b) {
  CUTE_UNROLL
  for (int k = 0; k < size<2>(rA); ++k) {
    load_a(k);
    CUTE_UNROLL
    for (int n = 0; n < size<1>(rB); ++n) {
      if (n % 2 == 0) load_b(n / 2, k);
      CUTE_UNROLL
      for (int m = 0; m < size<1>(rA); ++m) gemm(mma, rA(_, m, k), rB(_, n, k), acc(_, m, n));
    }
  }
}

}  // namespace flash_cute
