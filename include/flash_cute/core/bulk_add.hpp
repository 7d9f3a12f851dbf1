// Sums in global memory that shared memory is added to in bulk, and turns among thread blocks that add.
#pragma once

#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace flash_cute {

// By one thread: adds so many bytes of floats. Like a store by TMA it has to be committed and waited for.
CUTE_DEVICE void bulk_add(float* target, float const* source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
               "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes)
               : "memory");
}

// The same to memory that holds nothing yet.
CUTE_DEVICE void bulk_store(float* target, float const* source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes)
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

CUTE_DEVICE void add_release(int* to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(to) : "memory");
}

}  // namespace flash_cute
