// The gradients of sinks: of each head the sum over all queries of exp(sink - LSE) (dLSE - rowsum(dO O)). The
// preprocess kernels, which have both factors, write the share of each block of queries, and a kernel after
// all others adds these up, always in one order.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/backward/params.hpp"
#include "flash_cute/core/dependent_launch.hpp"
#include "flash_cute/core/launch_kernel.hpp"

namespace flash_cute {

// The sum of all threads' values, in thread 0. sums: shared memory for one of each warp.
template <int kThreads>
__device__ float sum_of_block(float value, float* sums) {
  constexpr int kWarps = kThreads / 32;
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) value += sums[warp];
  }
  return value;
}

// What a thread of a preprocess kernel adds to the gradient of its block's head.
template <class Element>
struct SinkShare {
  SinkGradients const& sinks;
  int head;
  float sum = 0.f;

  // neg_delta: dLSE - rowsum(dO O) of a query; of one that sees no key dLSE alone, as its O is 0.
  __device__ void add(float lse, float neg_delta) {
    if (!sinks.shares) return;
    float const logit = sinks.of.logit<Element>(head), weight = expf(logit - lse);
    if (logit != -INFINITY && weight != 0.f) sum += weight * neg_delta;
  }
  template <int kThreads>
  __device__ void store(int64_t block, float* sums) const {
    if (!sinks.shares) return;
    float const total = sum_of_block<kThreads>(sum, sums);
    if (threadIdx.x == 0) sinks.shares[block] = total;
  }
};

// One thread block for each head.
template <class Element, int kThreads, bool kStartsEarly>
__global__ void __launch_bounds__(kThreads)
    backward_sum_sinks(__grid_constant__ SinkGradients const sinks, int blocks) {
  if constexpr (kStartsEarly) wait_for_grid_before();
  float const* const shares = sinks.shares + int64_t(blockIdx.x) * blocks;
  float sum = 0.f;
  for (int block = threadIdx.x; block < blocks; block += kThreads) sum += shares[block];
  __shared__ float sums[kThreads / 32];
  sum = sum_of_block<kThreads>(sum, sums);
  if (threadIdx.x > 0) return;
  if (sinks.of.are_fp32) {
    static_cast<float*>(sinks.gradients)[blockIdx.x] = sum;
  } else {
    static_cast<Element*>(sinks.gradients)[blockIdx.x] = Element(sum);
  }
}

template <class Element, bool kStartsEarly>
void launch_sum_sinks(BackwardParams const& params, int q_blocks, cudaStream_t stream) {
  constexpr int kThreads = 128;
  if (!params.sinks.shares) return;
  launch_kernel<backward_sum_sinks<Element, kThreads, kStartsEarly>, kStartsEarly>(
      params.device, params.shape.heads_q, kThreads, 0, stream, params.sinks, q_blocks);
}

}  // namespace flash_cute
