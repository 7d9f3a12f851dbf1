// The named barriers of a thread block: every one that a kernel of ours uses, by its number in hardware.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

constexpr int kMaxWarpgroups = 3;  // that compute

// The first of a row of barriers, one for each computing warpgroup. 0 is __syncthreads'; there are 16.
enum class BarrierId : int {
  turn = 1,                           // WarpgroupTurns
  warpgroup = turn + kMaxWarpgroups,  // sync_warpgroup
  end = warpgroup + kMaxWarpgroups,
};
static_assert(int(BarrierId::end) <= 16);

struct NamedBarrier {
  BarrierId first;
  int index;

  // Waits until `threads` threads have come, those that only arrive among them.
  CUTE_DEVICE void sync(int threads) const {
    asm volatile("bar.sync %0, %1;" ::"r"(int(first) + index), "r"(threads) : "memory");
  }
  CUTE_DEVICE void arrive(int threads) const {
    asm volatile("bar.arrive %0, %1;" ::"r"(int(first) + index), "r"(threads) : "memory");
  }
};

}  // namespace flash_cute
