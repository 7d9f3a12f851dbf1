// Codes of 8 bits, e4m3 without infinities, as numbers of 16 bits, which have room for all of them.
#pragma once

#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>
#include <cute/config.hpp>

#include <cstdint>

namespace flash_cute {

// Two codes.
template <class Element>
CUTE_DEVICE uint32_t widen_pair(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  if constexpr (sizeof(Element) == 2 && !std::is_same_v<Element, cutlass::half_t>) {
    // Of a float with so few bits bfloat16 is the upper half, NaN among them.
    float2 const floats = __half22float2(reinterpret_cast<__half2 const&>(halves));
    return __byte_perm(__float_as_uint(floats.x), __float_as_uint(floats.y), 0x7632);
  }
  return halves;
}

// Sixteen of them, as two chunks of eight.
template <class Element>
CUTE_DEVICE void widen(uint4 const& codes, uint4 (&chunks)[2]) {
  uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t const first = words[2 * i], second = words[2 * i + 1];
    chunks[i] = {widen_pair<Element>(uint16_t(first)), widen_pair<Element>(uint16_t(first >> 16)),
                 widen_pair<Element>(uint16_t(second)), widen_pair<Element>(uint16_t(second >> 16))};
  }
}

}  // namespace flash_cute
