// What the two thread blocks of a cluster do in each other's shared memory.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/util.hpp>

namespace flash_cute {

// 0 or 1; read anew where it is asked for, so that no register keeps it through a loop.
CUTE_DEVICE int read_cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where the other block has what this one has here.
CUTE_DEVICE uint32_t at_peer(void const* here) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(cute::cast_smem_ptr_to_uint(here)), "r"(read_cluster_rank() ^ 1));
  return there;
}

CUTE_DEVICE void arrive_at_peer(cutlass::arch::ClusterBarrier& barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(at_peer(&barrier))
               : "memory");
}

// By one thread: bytes from here to a place of the other block's, which its barrier `arrived` counts. They
// have been read when the other block has been told that they have arrived, no sooner.
CUTE_DEVICE void send_to_peer(void* place, void const* source, int bytes,
                              cutlass::arch::ClusterTransactionBarrier& arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          at_peer(place)),
      "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes), "r"(at_peer(&arrived))
      : "memory");
}

CUTE_DEVICE void send_to_peer(int& place, int value, cutlass::arch::ClusterTransactionBarrier& arrived) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at_peer(&place)),
      "r"(value), "r"(at_peer(&arrived))
      : "memory");
}

// By all threads of both blocks that are left.
CUTE_DEVICE void sync_cluster() {
  __syncwarp();
  cute::cluster_arrive();
  cute::cluster_wait();
}

}  // namespace flash_cute
