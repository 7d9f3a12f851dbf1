// The dot product of 16 bytes of two rows, from which delta = rowsum(dO O) is added up.
#pragma once

#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

namespace flash_cute {

template <class Element>
__device__ float2 two_floats(unsigned const& two) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return __half22float2(reinterpret_cast<__half2 const&>(two));
  } else {
    return __bfloat1622float2(reinterpret_cast<__nv_bfloat162 const&>(two));
  }
}

template <class Element>
__device__ float dot_of_chunk(uint4 const& a, uint4 const& b) {
  unsigned const *x = &a.x, *y = &b.x;
  float sum = 0;
  if constexpr (std::is_same_v<Element, float>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += __uint_as_float(x[i]) * __uint_as_float(y[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const two_x = two_floats<Element>(x[i]), two_y = two_floats<Element>(y[i]);
      sum += two_x.x * two_y.x;
      sum += two_x.y * two_y.y;
    }
  }
  return sum;
}

}  // namespace flash_cute
