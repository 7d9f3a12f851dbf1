// The one macro that lets device-independent code compile with a plain C++ compiler (host tests, csrc), and
// integer arithmetic for both sides.
#pragma once

#ifdef __CUDACC__
#define FLASH_CUTE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_CUTE_HOST_DEVICE inline
#endif

namespace flash_cute {

template <class Integer>
FLASH_CUTE_HOST_DEVICE constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

template <class T>
FLASH_CUTE_HOST_DEVICE constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}

template <class T>
FLASH_CUTE_HOST_DEVICE constexpr T larger(T a, T b) {
  return a > b ? a : b;
}

}  // namespace flash_cute
