// The named barriers of a thread block: every one that a kernel of this library uses, by its hardware number.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

constexpr int kWarpgroupThreads = 128;
constexpr int kMaxWarpgroups = 3;  // consumer warpgroups of a thread block

// Each value is the first of a run of barriers; warp_scheduler and warpgroup have one for each consumer
// warpgroup. The hardware has 16 barriers, and __syncthreads uses barrier 0.
enum class BarrierId : int {
  warp_scheduler = 1,  // WarpSchedulerBarrier; the Hopper backward begins a tile with it
  warpgroup = warp_scheduler + kMaxWarpgroups,  // sync_warpgroup
  // The Ampere family's split backward: P is there, dS is there, loads have arrived; and one for each half.
  p = warpgroup + kMaxWarpgroups,
  ds,
  loaded,
  half,
  producers = half + 2,  // of the Hopper family's forward that load rows
  end,
};
static_assert(int(BarrierId::end) <= 16);

// The instructions do not clobber memory, as that would keep all others from moving across. Those that must
// not move (stores to shared memory, fences, TMA) are volatile, too.
struct NamedBarrier {
  BarrierId first;
  int index;

  // Waits until `threads` threads have arrived; threads that only arrive count among them.
  CUTE_DEVICE void sync(int threads) const {
    asm volatile("bar.sync %0, %1;" ::"r"(int(first) + index), "r"(threads));
  }
  CUTE_DEVICE void arrive(int threads) const {
    asm volatile("bar.arrive %0, %1;" ::"r"(int(first) + index), "r"(threads));
  }
};

}  // namespace flash_cute
