// Access of the two thread blocks of a cluster to each other's shared memory.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/util.hpp>

#include "flash_cute/core/special_registers.hpp"

namespace flash_cute {

// Returns the address at which the peer, the other thread block, has what this one has here.
CUTE_DEVICE uint32_t at_peer(void const* here) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(cute::cast_smem_ptr_to_uint(here)), "r"(read_cluster_rank() ^ 1));
  return there;
}

// Arrives at the peer's barrier and orders no memory access, which suffices after reads that were waited for.
// A release to the cluster is a MEMBAR.GPU, which waits for all that the multiprocessor has under way (head
// dim 256: 2 to 5%, deterministic 9 to 11%).
CUTE_DEVICE void arrive_at_peer(cutlass::arch::ClusterBarrier& barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(at_peer(&barrier))
               : "memory");
}

// Does what load_panels does for both thread blocks; one thread of each block calls it. Each block loads half
// of the columns and multicasts them to both.
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

// Copies bytes to the peer's shared memory, at its address of `target`, where its barrier `arrived` counts
// them. One thread calls it. The source has been read once the peer's barrier has completed, no sooner.
CUTE_DEVICE void send_to_peer(void* target, void const* source, int bytes,
                              cutlass::arch::ClusterTransactionBarrier& arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          at_peer(target)),
      "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes), "r"(at_peer(&arrived))
      : "memory");
}

// Stores one integer there likewise.
CUTE_DEVICE void send_to_peer(int& target, int value, cutlass::arch::ClusterTransactionBarrier& arrived) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at_peer(&target)),
      "r"(value), "r"(at_peer(&arrived))
      : "memory");
}

// Synchronises the threads of both blocks that have not exited.
CUTE_DEVICE void sync_cluster() {
  __syncwarp();
  cute::cluster_arrive();
  cute::cluster_wait();
}

}  // namespace flash_cute
