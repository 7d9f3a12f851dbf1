// Codes of 8 bits, e4m3 without infinities, as numbers of 16 bits, which have room for all of them.
#pragma once

#include <cuda_bf16.h>
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

template <class Element>
CUTE_DEVICE uint32_t multiply_pair(uint32_t x, uint32_t y) {
  using Pair = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, __half2, __nv_bfloat162>;
  Pair const product = __hmul2(reinterpret_cast<Pair const&>(x), reinterpret_cast<Pair const&>(y));
  return reinterpret_cast<uint32_t const&>(product);
}

CUTE_DEVICE bool have_nan(uint4 const& codes) {
  constexpr uint32_t kEach = 0x01010101;
  uint32_t found = 0;  // seven bits of ones pass on to the sign
  for (uint32_t const word : {codes.x, codes.y, codes.z, codes.w}) found |= (word + kEach) ^ word;
  return found & 0x80 * kEach;
}

// Sixteen of them, as two chunks of eight.
template <class Element>
CUTE_DEVICE void widen_any(uint4 const& codes, uint4 (&chunks)[2]) {
  uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t const first = words[2 * i], second = words[2 * i + 1];
    chunks[i] = {widen_pair<Element>(uint16_t(first)), widen_pair<Element>(uint16_t(first >> 16)),
                 widen_pair<Element>(uint16_t(second)), widen_pair<Element>(uint16_t(second >> 16))};
  }
}

// The same where none of them is NaN: a code's seven bits are those of a 16-bit number, but for the
// exponent's offset, and a multiplication adds that, also to subnormals.
template <class Element>
CUTE_DEVICE void widen_numbers(uint4 const& codes, uint4 (&chunks)[2]) {
  constexpr bool kIsHalf = std::is_same_v<Element, cutlass::half_t>;
  constexpr int kShift = kIsHalf ? 1 : 4;  // to the exponent's place, from the upper byte
  constexpr uint32_t kFactor = kIsHalf ? 0x5c005c00 : 0x7b807b80;  // 2^8, 2^120
  constexpr uint32_t kEach = 0x01010101;
  uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t pairs[8];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t const low = (words[i] << (8 - kShift)) & (kEach * (0xff << (8 - kShift) & 0xff));
    uint32_t const high = ((words[i] >> kShift) & (kEach * (0x7f >> kShift))) | (words[i] & 0x80 * kEach);
    pairs[2 * i] = multiply_pair<Element>(__byte_perm(low, high, 0x5140), kFactor);
    pairs[2 * i + 1] = multiply_pair<Element>(__byte_perm(low, high, 0x7362), kFactor);
  }
  chunks[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  chunks[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
}

}  // namespace flash_cute
