// Reduces the values of all threads of a row to sums: over lanes of a warp, warps of a thread block, thread
// blocks.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "flash_cute/core/math.hpp"
#include "flash_cute/softmax/chunk.hpp"

namespace flash_cute {

struct MaxOrNan {
  __device__ float operator()(float a, float b) const { return max_or_nan(a, b); }
};

// Combines values {highest score, sum of exp(scale * (score - highest))}. Of no score, or of scores that are
// all -inf, the value is {-inf, 0}.
struct LogSumOp {
  using Value = float2;
  static __device__ Value identity() { return {-INFINITY, 0.f}; }

  float scale_log2;

  // Computes exp(scale * (score - highest)). The difference comes first: where the product of a score with
  // the scale is rounded by more than 128, the highest score would get a weight of zero or infinity.
  __device__ float weight(float score, float highest) const {
    return fast_exp2((score - highest) * scale_log2);
  }
  // Returns the factor that turns weights relative to one highest score into those relative to another.
  __device__ float change(float from, float to) const { return from == -INFINITY ? 0.f : weight(from, to); }
  // Returns the LSE; the sum of the weights must not be 0.
  __device__ float lse(Value const& total, float scale) const { return fmaf(total.x, scale, logf(total.y)); }
  __device__ Value operator()(Value const& a, Value const& b) const {
    float const max = max_or_nan(a.x, b.x);
    return {max, a.y * change(a.x, max) + b.y * change(b.x, max)};
  }
};

// Combines values that have a second sum: of the same weights, each multiplied by its gradient.
struct LogSumDotOp {
  using Value = float4;  // {highest score, sum, second sum, 0}
  static __device__ Value identity() { return {-INFINITY, 0.f, 0.f, 0.f}; }

  LogSumOp sum;

  __device__ Value operator()(Value const& a, Value const& b) const {
    float const max = max_or_nan(a.x, b.x), of_a = sum.change(a.x, max), of_b = sum.change(b.x, max);
    return {max, a.y * of_a + b.y * of_b, a.z * of_a + b.z * of_b, 0.f};
  }
};

// Adds the sums of the backward that reads probabilities and needs no highest score.
struct DotOp {
  using Value = float2;  // {sum, 0}
  static __device__ Value identity() { return {0.f, 0.f}; }

  __device__ Value operator()(Value const& a, Value const& b) const { return {a.x + b.x, 0.f}; }
};

// Reduces over neighbouring lanes of a warp, each of which gets the result.
template <int kLanes, class Value, class Op>
__device__ Value reduce_lanes(Value value, Op const& op) {
  constexpr int kFloats = sizeof(Value) / sizeof(float);
#pragma unroll
  for (int distance = smaller(kLanes, kWarp) / 2; distance > 0; distance /= 2) {
    Value other;
#pragma unroll
    for (int i = 0; i < kFloats; ++i) {
      reinterpret_cast<float*>(&other)[i] =
          __shfl_xor_sync(0xffffffffu, reinterpret_cast<float const*>(&value)[i], distance);
    }
    value = op(value, other);
  }
  return value;
}

// These find the highest score first, so that each weight is changed once and not at each step.
template <int kLanes>
__device__ float2 reduce_lanes(float2 value, LogSumOp const& op) {
  float const max = reduce_lanes<kLanes>(value.x, MaxOrNan{});
  return {max, reduce_lanes<kLanes>(value.y * op.change(value.x, max), SumOp{})};
}
template <int kLanes>
__device__ float4 reduce_lanes(float4 value, LogSumDotOp const& op) {
  float const max = reduce_lanes<kLanes>(value.x, MaxOrNan{}), factor = op.sum.change(value.x, max);
  return {max, reduce_lanes<kLanes>(value.y * factor, SumOp{}),
          reduce_lanes<kLanes>(value.z * factor, SumOp{}), 0.f};
}

// The shares by which thread blocks exchange their parts of a row's value. Each block writes its own share
// and waits for those of the others; all of them run at the same time. The words of a share never equal
// kNothing, a NaN of all ones that no operation gives.
template <class Value>
struct Shares {
  using Word = unsigned long long;
  static constexpr int kWords = sizeof(Value) / sizeof(Word);
  static constexpr Word kNothing = ~Word(0);

  Word* words;  // of this row, kWords for each part

  __device__ Shares(void* workspace, int64_t offset)
      : words(static_cast<Word*>(workspace) + offset * kWords) {}

  __device__ void tell(int part, Value const& share) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(words + part * kWords + i),
                   "l"(reinterpret_cast<Word const*>(&share)[i])
                   : "memory");
    }
  }
  __device__ Value wait_for(int part) const {
    alignas(Value) Word found[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      do {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                     : "=l"(found[i])
                     : "l"(words + part * kWords + i)
                     : "memory");
      } while (found[i] == kNothing);
    }
    return reinterpret_cast<Value const&>(found);
  }
};

// Reduces the values of warps to the value of the row. The lanes of a row have the same value before. A
// kernel may call it several times.
template <class Traits, class Op>
class RowReduction {
 public:
  using Value = typename Op::Value;
  using Storage = Value[2][ceil_div(Traits::kThreads, kWarp)];

  __device__ explicit RowReduction(Storage& storage) : storage_(storage) {}

  __device__ Value operator()(Value value, Op const& op, Shares<Value> const& shares) {
    value = of_block(value, op);
    if constexpr (Traits::kShared) {
      if (threadIdx.x == 0) shares.tell(blockIdx.y, value);
      value = Op::identity();
      for (unsigned other = threadIdx.x; other < gridDim.y; other += blockDim.x) {
        value = op(value, shares.wait_for(other));
      }
      value = of_block(reduce_lanes<kWarp>(value, op), op);
    }
    return value;
  }

 private:
  __device__ Value of_block(Value value, Op const& op) {
    // A warp may be one reduction ahead of another, which still reads the values of the previous one.
    Value* const of_warps = storage_[turn_ ^= 1];
    int const warps = blockDim.x / kWarp;
    if (Traits::kOfBlock && warps > 1) {
      int const lane = threadIdx.x % kWarp;
      if (lane == 0) of_warps[threadIdx.x / kWarp] = value;
      __syncthreads();
      value = reduce_lanes<kWarp>(lane < warps ? of_warps[lane] : Op::identity(), op);
    }
    return value;
  }

  Storage& storage_;
  int turn_ = 0;
};

}  // namespace flash_cute
