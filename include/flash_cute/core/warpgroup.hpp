// Asynchronous products of a warpgroup, and turns among warpgroups.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

// Puts acc = A B^T (Zero) or acc += A B^T (One) in flight; acc and A's registers are off limits until it is
// waited for.
template <class Mma, class A, class B, class Acc>
CUTE_DEVICE void issue_product(GMMA::ScaleOut scale, Mma& mma, A const& a, B const& b, Acc& acc) {
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = scale;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    gemm(mma, a(_, _, k), b(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Waits until at most kInFlight later products are unfinished; acc is usable again.
template <int kInFlight, class Acc>
CUTE_DEVICE void wait_products(Acc& acc) {
  warpgroup_wait<kInFlight>();
  warpgroup_fence_operand(acc);
}

// A barrier of each warpgroup's own; those of the turns come before it.
template <int kWarpgroups>
CUTE_DEVICE void sync_warpgroup(int warpgroup) {
  cutlass::arch::NamedBarrier::sync(128, uint32_t(kWarpgroups + warpgroup));
}

// Warpgroups issue their products one after the other, so that the tensor cores serve one while others do
// softmax.
template <int kWarpgroups>
struct WarpgroupTurns {
  int warpgroup;

  // The last one in the round hands the first turn out.
  CUTE_DEVICE void begin() const {
    if (warpgroup == kWarpgroups - 1) pass();
  }
  CUTE_DEVICE void wait() const { cutlass::arch::NamedBarrier::sync(2 * 128, barrier(warpgroup)); }
  CUTE_DEVICE void pass() const {
    cutlass::arch::NamedBarrier::arrive(2 * 128, barrier(warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1));
  }

 private:
  CUTE_DEVICE static uint32_t barrier(int turn) { return uint32_t(turn); }
};

}  // namespace flash_cute
