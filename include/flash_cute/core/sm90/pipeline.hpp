// Hand-over of shared-memory stages between the loading warp and the warps that compute. A pipeline owns its
// barriers.
#pragma once

#include <cutlass/arch/barrier.h>

namespace flash_cute {

// Which stage of a ring a side is at, and which round of the ring this is.
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

// kStages stages, filled by TMA (or by `producers` arrivals) and freed by `consumers` arrivals.
template <int kStages>
struct TmaRing {
  using Position = PipelineState<kStages>;
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  // By one thread, before a barrier of the whole block.
  CUTE_DEVICE void init(int consumers, int producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(producers);
      empty[stage].init(consumers);
    }
  }

  // The producer's side: waits until the stage is free (which it is in the first round).
  CUTE_DEVICE auto& acquire(Position const& at) {
    empty[at.stage].wait(at.phase ^ 1);
    return full[at.stage];
  }

  // The consumers' side.
  CUTE_DEVICE void wait(Position const& at) { full[at.stage].wait(at.phase); }
  CUTE_DEVICE void release(Position const& at) { empty[at.stage].arrive(); }
};

}  // namespace flash_cute
