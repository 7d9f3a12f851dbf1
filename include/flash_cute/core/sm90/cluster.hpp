// What the two thread blocks of a cluster do in each other's shared memory.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/util.hpp>

#include "flash_cute/core/special_registers.hpp"

namespace flash_cute {

// Where the other block has what this one has here.
CUTE_DEVICE uint32_t at_peer(void const* here) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(cute::cast_smem_ptr_to_uint(here)), "r"(read_cluster_rank() ^ 1));
  return there;
}

// Orders nothing: for who has read what he waited for, and written nothing. A release to the cluster is a
// MEMBAR.GPU, which waits for all that the multiprocessor has under way (head dim 256: 2 to 5%, in turns 9 to
// 11%).
CUTE_DEVICE void arrive_at_peer(cutlass::arch::ClusterBarrier& barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(at_peer(&barrier))
               : "memory");
}

// By one thread of each block: load_panels for both, of which each loads half of the columns for the other,
// too.
template <int kColumns, int kPanel, int kRows, class Element, class... Coordinates>
CUTE_DEVICE void load_panels_of_both(CUtensorMap const& map,
                                     cutlass::arch::ClusterTransactionBarrier& arrived, Element* target,
                                     int head, Coordinates... coordinates) {
  arrived.arrive_and_expect_tx(kRows * kColumns * sizeof(Element));
  int const begin = read_cluster_rank() * (kColumns / 2);
  CUTE_UNROLL
  for (int column = begin; column < begin + kColumns / 2; column += kPanel) {
    constexpr uint16_t kBoth = 3;
    cute::SM90_TMA_LOAD_MULTICAST::copy(&map, reinterpret_cast<uint64_t*>(&arrived), kBoth,
                                        static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                        target + column * kRows, column, head, coordinates...);
  }
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
