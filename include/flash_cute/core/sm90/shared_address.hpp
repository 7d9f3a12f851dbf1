// Shared memory by addresses of 32 bits that stay in registers. Where the compiler knows the object, it finds
// out its address anew wherever it is used, which takes 50 cycles.
#pragma once

#include <cute/arch/util.hpp>

#include <cstdint>

namespace flash_cute {

CUTE_DEVICE uint32_t shared_address(void const* object) {
  uint32_t address = cute::cast_smem_ptr_to_uint(object);
  asm volatile("" : "+r"(address));
  return address;
}

// Of 16 bytes each. Where nothing is read, zeros arrive.
CUTE_DEVICE void copy_chunk(uint32_t target, void const* source, bool is_read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(is_read ? 16 : 0)
               : "memory");
}
CUTE_DEVICE uint4 load_chunk(uint32_t source) {
  uint4 chunk;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(source)
               : "memory");
  return chunk;
}
CUTE_DEVICE void store_chunk(uint32_t target, uint4 const& chunk) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(chunk.x), "r"(chunk.y),
               "r"(chunk.z), "r"(chunk.w)
               : "memory");
}

}  // namespace flash_cute
