// Hand-over of shared-memory slots between the loading warp and the warps that compute. A pipeline owns its
// barriers.
#pragma once

#include <cutlass/arch/barrier.h>

namespace flash_cute {

// Which slot of a ring a side is at, and which round of the ring this is.
template <int kStages>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;

  CUTE_DEVICE void advance() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
  CUTE_DEVICE RingPosition before() const {
    bool const wraps = slot == 0;
    return {wraps ? kStages - 1 : slot - 1, phase ^ uint32_t(wraps)};
  }
};

// kStages slots, filled by TMA (or by `producers` arrivals) and freed by `consumers` arrivals.
template <int kStages>
struct TmaRing {
  using Position = RingPosition<kStages>;
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  // By one thread, before a barrier of the whole block.
  CUTE_DEVICE void init(int consumers, int producers = 1) {
    for (int slot = 0; slot < kStages; ++slot) {
      full[slot].init(producers);
      empty[slot].init(consumers);
    }
  }

  // The producer's side: waits until the slot is free (which it is in the first round).
  CUTE_DEVICE auto& acquire(Position const& at) {
    empty[at.slot].wait(at.phase ^ 1);
    return full[at.slot];
  }

  // The consumers' side.
  CUTE_DEVICE void wait(Position const& at) { full[at.slot].wait(at.phase); }
  CUTE_DEVICE void release(Position const& at) { empty[at.slot].arrive(); }
};

}  // namespace flash_cute
