// A pipeline hands stages of shared memory over between producers and consumers, and owns the barriers for
// it.
#pragma once

#include <cutlass/arch/barrier.h>

namespace flash_cute {

// The stage of a ring that a producer or a consumer is at, and the parity of its round through the ring.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  CUTE_DEVICE PipelineState before() const {
    bool const wraps = stage == 0;
    return {wraps ? kStages - 1 : stage - 1, phase ^ uint32_t(wraps)};
  }
};

// Several arrivals at once.
CUTE_DEVICE void arrive(cutlass::arch::ClusterBarrier const& barrier, int count) {
  uint32_t const address = cute::cast_smem_ptr_to_uint(&barrier);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(count) : "memory");
}

// A ring of stages that TMA, or `producers` arrivals, fill and `consumers` arrivals free.
template <int kStages>
struct TmaRing {
  using Position = PipelineState<kStages>;
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  // One thread calls this, before a barrier of the whole thread block.
  CUTE_DEVICE void init(int consumers, int producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(producers);
      empty[stage].init(consumers);
    }
  }

  // The producer waits until the stage is free, as it is in the first round, and gets the barrier to fill.
  CUTE_DEVICE auto& acquire(Position const& at) {
    empty[at.stage].wait(at.phase ^ 1);
    return full[at.stage];
  }

  // A consumer waits until the stage is full, and releases it after its last read.
  CUTE_DEVICE void wait(Position const& at) { full[at.stage].wait(at.phase); }
  CUTE_DEVICE void release(Position const& at) { empty[at.stage].arrive(); }
};

}  // namespace flash_cute
