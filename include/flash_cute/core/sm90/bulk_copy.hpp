// Bulk copies between float sums in global memory and shared memory, and the counters by which thread blocks
// order their additions.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>

namespace flash_cute {

// Adds so many bytes of floats to global memory. One thread calls it; like a store by TMA, the copy has to be
// committed and waited for.
CUTE_DEVICE void bulk_add(float* target, float const* source, int bytes, cute::TMA::CacheHintSm90 hint) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(
          target),
      "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes), "l"(uint64_t(hint))
      : "memory");
}

// Stores them instead, where global memory holds no sum yet.
CUTE_DEVICE void bulk_store(float* target, float const* source, int bytes, cute::TMA::CacheHintSm90 hint) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(target),
               "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes), "l"(uint64_t(hint))
               : "memory");
}

// Loads a sum that is not needed in L2 afterwards. The barrier expects the bytes, but the calling thread does
// not arrive at it.
CUTE_DEVICE void bulk_load(float* target, float const* source, int bytes,
                           cutlass::arch::ClusterTransactionBarrier& arrived) {
  arrived.expect_transaction(bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(cute::cast_smem_ptr_to_uint(target)),
      "l"(source), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(&arrived)),
      "l"(uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST))
      : "memory");
}

// Waits until all bulk copies that this thread has committed are complete in global memory.
CUTE_DEVICE void wait_bulk_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders accesses to global memory by TMA and by other instructions.
CUTE_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

CUTE_DEVICE int load_acquire(int const* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Turns a 0 into a 1 and returns the previous value.
CUTE_DEVICE int claim_acquire(int* at) {
  int found;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(found) : "l"(at) : "memory");
  return found;
}

CUTE_DEVICE void add_release(int* to, int value = 1) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

}  // namespace flash_cute
