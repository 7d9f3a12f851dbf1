// Special registers are read anew at every call, so that a value need not stay in a register between its
// uses, as that of threadIdx.x does.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

CUTE_DEVICE int read_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
CUTE_DEVICE int read_block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
CUTE_DEVICE int read_grid_size() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}
CUTE_DEVICE int read_lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
CUTE_DEVICE int read_cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

}  // namespace flash_cute
