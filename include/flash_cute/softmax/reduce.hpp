// Sums over a row from all its threads: lanes of a warp, warps of a thread block, thread blocks.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "flash_cute/softmax/chunk.hpp"

namespace flash_cute {

constexpr int kWarp = 32;

struct MaxOrNan {
  __device__ float operator()(float a, float b) const { return max_or_nan(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// {highest score, sum of exp(scale * (score - highest))}; {-inf, 0} of no score, or of scores of -inf.
struct LogSumOp {
  static __device__ float2 identity() { return {-INFINITY, 0.f}; }

  float scale_log2;

  __device__ float weight(float max, float of_all) const {
    return max == -INFINITY ? 0.f : exp2_approx((max - of_all) * scale_log2);
  }
  __device__ float2 operator()(float2 a, float2 b) const {
    float const max = max_or_nan(a.x, b.x);
    return {max, a.y * weight(a.x, max) + b.y * weight(b.x, max)};
  }
};

struct SumOfFirst {
  static __device__ float2 identity() { return {0.f, 0.f}; }

  __device__ float2 operator()(float2 a, float2 b) const { return {a.x + b.x, 0.f}; }
};

// Over neighbouring lanes of a warp; each gets the result.
template <int kLanes, class Value, class Op>
__device__ Value reduce_lanes(Value value, Op const& op) {
#pragma unroll
  for (int distance = smaller(kLanes, kWarp) / 2; distance > 0; distance /= 2) {
    Value other;
    if constexpr (sizeof(Value) == sizeof(float)) {
      other = __shfl_xor_sync(0xffffffffu, value, distance);
    } else {
      other = {__shfl_xor_sync(0xffffffffu, value.x, distance),
               __shfl_xor_sync(0xffffffffu, value.y, distance)};
    }
    value = op(value, other);
  }
  return value;
}

// What thread blocks tell each other about a row: each writes its own share, one word that is never `nothing`
// (NaN of all ones, which no operation gives), and waits for the others'. All of them run at the same time.
struct Shares {
  static constexpr unsigned long long kNothing = ~0ull;

  unsigned long long* words;  // one for each part, of this row

  __device__ Shares(void* workspace, int64_t offset)
      : words(static_cast<unsigned long long*>(workspace) + offset) {}

  __device__ void tell(int part, float2 share) const {
    unsigned long long const word =
        (static_cast<unsigned long long>(__float_as_uint(share.y)) << 32) | __float_as_uint(share.x);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(words + part), "l"(word) : "memory");
  }
  __device__ float2 wait_for(int part) const {
    unsigned long long word;
    do {
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(words + part) : "memory");
    } while (word == kNothing);
    return {__uint_as_float(unsigned(word)), __uint_as_float(unsigned(word >> 32))};
  }
};

// From each warp's value (the same in all lanes, or in a row's where a warp has several) to the row's,
// several times in a kernel.
template <int kLanes, bool kShared>
class RowReduction {
 public:
  static constexpr int kWarps = kLanes / kWarp;
  using Storage = float2[2][kWarps + 1];

  __device__ explicit RowReduction(Storage& storage) : storage_(storage) {}

  template <class Op>
  __device__ float2 operator()(float2 value, Op const& op, int part, int parts, Shares const& shares) {
    if constexpr (kWarps > 1) {
      // A warp may be one reduction ahead of another, which still reads the one before.
      float2* const of_warps = storage_[turn_ ^= 1];
      int const lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kWarps;
      if (lane == 0) of_warps[warp] = value;
      __syncthreads();
      value = reduce_lanes<kWarp>(lane < kWarps ? of_warps[lane] : Op::identity(), op);
      if (kShared && parts > 1) {
        if (warp == 0) {
          if (lane == 0) shares.tell(part, value);
          value = Op::identity();
          for (int other = lane; other < parts; other += kWarp) value = op(value, shares.wait_for(other));
          value = reduce_lanes<kWarp>(value, op);
          if (lane == 0) of_warps[kWarps] = value;
        }
        __syncthreads();
        value = of_warps[kWarps];
      }
    }
    return value;
  }

 private:
  Storage& storage_;
  int turn_ = 0;
};

}  // namespace flash_cute
