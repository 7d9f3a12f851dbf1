// Sums in global memory that shared memory is added to in bulk, and turns among thread blocks that add.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>

namespace flash_cute {

// By one thread: adds so many bytes of floats. Like a store by TMA it has to be committed and waited for.
CUTE_DEVICE void bulk_add(float* target, float const* source, int bytes, cute::TMA::CacheHintSm90 hint) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(
          target),
      "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes), "l"(uint64_t(hint))
      : "memory");
}

// The same to memory that holds nothing yet.
CUTE_DEVICE void bulk_store(float* target, float const* source, int bytes, cute::TMA::CacheHintSm90 hint) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(target),
               "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes), "l"(uint64_t(hint))
               : "memory");
}

// The way back, for the last time. The barrier expects it; nobody has arrived there.
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

// All that this thread has committed has arrived in global memory.
CUTE_DEVICE void wait_bulk_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Between accesses to global memory by TMA and others.
CUTE_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

CUTE_DEVICE int load_acquire(int const* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Makes a 0 a 1; what was there before.
CUTE_DEVICE int claim_acquire(int* at) {
  int found;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(found) : "l"(at) : "memory");
  return found;
}

CUTE_DEVICE void add_release(int* to, int value = 1) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

}  // namespace flash_cute
