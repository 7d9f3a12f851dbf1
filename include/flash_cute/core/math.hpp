// Arithmetic on single numbers.
#pragma once

#include <cuda_runtime.h>

namespace flash_cute {

struct SumOp {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Computes 2^x as one MUFU instruction. exp2f would add two more to treat results below 2^-126, which vanish
// in sums anyway.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash_cute
