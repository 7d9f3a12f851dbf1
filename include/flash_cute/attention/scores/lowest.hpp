// Queries that see scores of a bias's lowest number alone weigh all these keys alike. A float has no room for
// the logarithm of how many there are beside a number so low: their LSE has that number itself as its last
// bits.
#pragma once

#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

struct LowestRows {
  static constexpr uint32_t kFirst = 0xff000000u;  // -2^127, and an LSE of no other row
  static constexpr uint32_t kMost = 0x7fffffu;

  __device__ static float lse_of(float keys) {
    uint32_t const count = uint32_t(rintf(keys));
    return __uint_as_float(kFirst | (count < kMost ? count : kMost));
  }
  __device__ static bool has(float lse) { return (__float_as_uint(lse) & ~kMost) == kFirst; }
  __device__ static float log2_keys(float lse) { return log2f(float(__float_as_uint(lse) & kMost)); }
};

}  // namespace flash_cute
