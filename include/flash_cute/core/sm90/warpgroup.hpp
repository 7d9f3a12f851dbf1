// Asynchronous products (WGMMA) of a warpgroup, and the order in which warpgroups issue them.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/named_barrier.hpp"

namespace flash_cute {

using namespace cute;

// Hides from the compiler that an operand's address in shared memory is the same in each step of a loop. It
// would else keep a descriptor of each slice in registers that products cannot read, and copy it from there
// between one slice and the next (backward, H100, head dim 128: 16k +5.8 and +4.7%, full and causal).
template <class Operand>
CUTE_DEVICE auto hide_address(Operand const& operand) {
  auto first = operand.data();
  asm volatile("" : "+r"(first.desc_.reg32_[0]));
  return make_tensor(first, operand.layout());
}

// Issues a product, one slice of 16 columns after the other.
template <class Mma, class A, class B, class Acc>
CUTE_DEVICE void multiply_slices(GMMA::ScaleOut scale, Mma& mma, A const& a, B const& b, Acc& acc) {
  mma.accumulate_ = scale;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    gemm(mma, a(_, _, k), b(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
}

// A left operand whose first slices are in registers, in the layout of MmaHeld. These registers must not be
// touched while products are in flight.
template <class MmaHeld, class Held, class Others>
struct LeftOperand {
  Held const& held;
  Others others;
};
template <class MmaHeld, class Held, class Others, class Mma, class B, class Acc>
CUTE_DEVICE void multiply_slices(GMMA::ScaleOut scale, Mma& mma, LeftOperand<MmaHeld, Held, Others> const& a,
                                 B const& b, Acc& acc) {
  MmaHeld mma_held;
  multiply_slices(scale, mma_held, a.held, b, acc);
  mma.accumulate_ = GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = size<2>(a.held); k < size<2>(a.others); ++k) gemm(mma, a.others(_, _, k), b(_, _, k), acc);
}

// Issues acc = A B^T (Zero) or acc += A B^T (One). acc and A's registers must not be touched until the
// product has been waited for.
template <class Mma, class A, class B, class Acc>
CUTE_DEVICE void issue_product(GMMA::ScaleOut scale, Mma& mma, A const& a, B const& b, Acc& acc) {
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  multiply_slices(scale, mma, a, b, acc);
  warpgroup_commit_batch();
}

// Waits until at most kInFlight later products are unfinished, so that acc may be used again.
template <int kInFlight, class Acc>
CUTE_DEVICE void wait_products(Acc& acc) {
  warpgroup_wait<kInFlight>();
  warpgroup_fence_operand(acc);
}

// Synchronises a warpgroup at a barrier of its own.
CUTE_DEVICE void sync_warpgroup(int warpgroup) {
  NamedBarrier{BarrierId::warpgroup, warpgroup}.sync(kWarpgroupThreads);
}

// Orders the warpgroups: they issue their products one after the other, so that the tensor cores serve one
// while the others compute softmax.
template <int kWarpgroups>
struct WarpSchedulerBarrier {
  int warpgroup;

  // The last warpgroup of the round lets the first one begin.
  CUTE_DEVICE void begin() const {
    if (warpgroup == kWarpgroups - 1) pass();
  }
  CUTE_DEVICE void wait() const {
    if constexpr (kWarpgroups == 1) return;
    NamedBarrier{BarrierId::warp_scheduler, warpgroup}.sync(2 * kWarpgroupThreads);
  }
  CUTE_DEVICE void pass() const {
    if constexpr (kWarpgroups == 1) return;
    NamedBarrier{BarrierId::warp_scheduler, warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1}.arrive(
        2 * kWarpgroupThreads);
  }
};

}  // namespace flash_cute
