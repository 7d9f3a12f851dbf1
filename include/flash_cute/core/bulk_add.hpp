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

// All that this thread has committed has arrived in global memory.
CUTE_DEVICE void wait_bulk_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Between accesses to global memory by TMA and others.
CUTE_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

CUTE_DEVICE int load_acquire(int const* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

CUTE_DEVICE void store_release(int* to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

CUTE_DEVICE void add_release(int* to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(to) : "memory");
}

// Returns what was there before.
CUTE_DEVICE int add_acquire_release(int* to) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(to) : "memory");
  return before;
}

}  // namespace flash_cute
