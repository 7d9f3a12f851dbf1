// The kernel before the forward of many sequences of unequal lengths: one block lists them, longest first.
#pragma once

#include <cuda_runtime.h>

#include <cub/block/block_scan.cuh>

#include "flash_cute/core/dependent_launch.hpp"
#include "flash_cute/core/launch_kernel.hpp"
#include "flash_cute/scheduler/split_list.hpp"
#include "flash_cute/scheduler/varlen_list.hpp"

namespace flash_cute {

constexpr unsigned kCountable = 1u << 31;  // M blocks of a class; offsets that overlap make more

// By one block, in two rounds over the sequences: counts the M blocks of each class of lengths, then writes
// the records of each sequence after those of longer ones.
template <int kThreads, class Order>
__device__ void list_sequences(ForwardParams const& params, WindowMask const& limits, Order const& order) {
  __shared__ unsigned next[kLengthClasses];
  static_assert(kLengthClasses <= kThreads);
  bool const is_class = threadIdx.x < kLengthClasses;
  if (is_class) next[threadIdx.x] = 0;
  __syncthreads();

  int const batch = params.shape.batch, capacity = order.capacity;
  bool unwritten = false, uncountable = false;
  constexpr bool kCuts = std::is_same_v<Order, SplitOrder>;
  int blocks_per_split = 0;
  if constexpr (kCuts) {
    __shared__ SplitWork of_warps[kThreads / 32];
    SplitWork work{};
#pragma unroll 1
    for (int b = threadIdx.x; b < batch; b += kThreads) {
      work = work + order.work(Order::sequence_of(params, limits, b));
    }
    blocks_per_split = order.blocks_per_split(add_work<kThreads>(work, of_warps));
  }
#pragma unroll 1
  for (bool lists = false;; lists = true) {
#pragma unroll 1
    for (int b = threadIdx.x; b < batch; b += kThreads) {
      auto listed = ListedSequence<Order>::of(params, limits, order, b);
      if constexpr (kCuts) listed.cut(order, blocks_per_split);
      unwritten |= listed.unwritten;
      unsigned const m_blocks = listed.m_blocks;
      if (m_blocks == 0) continue;
      unsigned const first = atomicAdd(&next[listed.length_class], m_blocks);
      uncountable |= first + m_blocks > kCountable;
      if (!lists) continue;
      auto const record = order.record(b, listed.sequence, int(first), blocks_per_split);
#pragma unroll 1
      for (unsigned i = first; i < first + m_blocks && i < unsigned(capacity); ++i)
        order.prepared()[i] = record;
    }
    if (lists) return;

    uncountable = __syncthreads_or(uncountable);
    unwritten = __syncthreads_or(unwritten);
    using Sum = cub::BlockScan<int64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Sum::TempStorage storage;
    int64_t begin, total;
    int const cut_blocks = smaller<int64_t>(next[0], capacity);
    Sum(storage).ExclusiveSum(is_class ? int64_t(next[threadIdx.x]) : 0, begin, total);
    if (is_class) next[threadIdx.x] = unsigned(smaller<int64_t>(begin, capacity));
    int const m_blocks = uncountable ? 0 : int(smaller<int64_t>(total, capacity));
    if (threadIdx.x == 0) {
      *order.header = {.m_blocks = m_blocks,
                       .tile_counter = 0,
                       .unwritten = unwritten,
                       .cut_blocks = uncountable ? 0 : cut_blocks};
    }
    if (uncountable) return;
    __syncthreads();
  }
}

// kStartsEarly: as of the kernel after it. Each family so has a kernel of its own, from its own PTX.
template <int kThreads, bool kStartsEarly, class Order>
__global__ void __launch_bounds__(kThreads)
    varlen_prepare_kernel(__grid_constant__ ForwardParams const params,
                          __grid_constant__ WindowMask const limits, __grid_constant__ Order const order) {
  if constexpr (kStartsEarly) {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();  // the kernel after this one waits by itself
#endif
    wait_for_grid_before();
  }
  list_sequences<kThreads>(params, limits, order);
}

template <bool kStartsEarly, class Order>
void launch_varlen_prepare(ForwardParams const& params, WindowMask const& limits, Order const& order,
                           cudaStream_t stream) {
  auto launch = [&]<int kThreads>(std::integral_constant<int, kThreads>) {
    launch_kernel<varlen_prepare_kernel<kThreads, kStartsEarly, Order>, kStartsEarly>(
        params.device, 1, kThreads, 0, stream, params, limits, order);
  };
  // A small block starts and synchronises faster (4.0 us instead of 5.6 for 32 sequences).
  constexpr int kFew = kLengthClasses, kMany = 1024;
  if (params.shape.batch <= kMany) {
    launch(std::integral_constant<int, kFew>{});
  } else {
    launch(std::integral_constant<int, kMany>{});
  }
}

}  // namespace flash_cute
