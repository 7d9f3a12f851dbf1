// The named barriers of a thread block: every one that a kernel of ours uses, by its number in hardware.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

constexpr int kWarpgroupThreads = 128;
constexpr int kMaxWarpgroups = 3;  // that compute

// The first of a row of barriers, one for each computing warpgroup. 0 is __syncthreads'; there are 16.
enum class BarrierId : int {
  turn = 1,                           // WarpSchedulerBarrier; in Hopper's backward, to begin a tile
  warpgroup = turn + kMaxWarpgroups,  // sync_warpgroup
  // The Ampere family's split backward: P is there, dS is there, loads have arrived; and one for each half.
  p = warpgroup + kMaxWarpgroups,
  ds,
  loaded,
  half,
  end = half + 2,
};
static_assert(int(BarrierId::end) <= 16);

// No clobber of memory, which would keep other instructions from moving across: those that must not move
// (stores to shared memory, fences, TMA) are volatile, too.
struct NamedBarrier {
  BarrierId first;
  int index;

  // Waits until `threads` threads have come, those that only arrive among them.
  CUTE_DEVICE void sync(int threads) const {
    asm volatile("bar.sync %0, %1;" ::"r"(int(first) + index), "r"(threads));
  }
  CUTE_DEVICE void arrive(int threads) const {
    asm volatile("bar.arrive %0, %1;" ::"r"(int(first) + index), "r"(threads));
  }
};

}  // namespace flash_cute
