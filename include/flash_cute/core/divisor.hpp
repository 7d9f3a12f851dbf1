// Division by a number that is known before the launch.
#pragma once

#include <cstdint>

#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// Computes n / value for 0 <= n < 2^31 by a multiplication and a shift, which cost a tenth of a division in a
// kernel (Granlund and Montgomery 1994).
struct Divisor {
  uint32_t value = 1, multiplier = 1, shift = 0;

  Divisor() = default;
  FLASH_CUTE_HOST_DEVICE explicit Divisor(int value_) : value(value_) {
    while ((uint64_t(1) << shift) < value) ++shift;
    multiplier = uint32_t((uint64_t(1) << 32) * ((uint64_t(1) << shift) - value) / value + 1);
  }

  FLASH_CUTE_HOST_DEVICE int quotient(int n) const {
    uint32_t const high = uint32_t(uint64_t(uint32_t(n)) * multiplier >> 32);
    return int((high + uint32_t(n)) >> shift);
  }
  FLASH_CUTE_HOST_DEVICE int remainder(int n) const { return n - quotient(n) * int(value); }
};

}  // namespace flash_cute
