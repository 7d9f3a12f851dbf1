// The kernel before one of sequences of unequal lengths: it lists the sequences, longest first, and clears
// rows that no tile writes.
#pragma once

#include <cuda_runtime.h>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "flash_cute/attention/ragged.hpp"
#include "flash_cute/core/launch_kernel.hpp"

namespace flash_cute {

constexpr int kLengthClasses = 256;
constexpr int64_t kUncountable = int64_t(1) << 32;  // blocks of queries, of offsets that overlap

// Of kernels that are launched early, which only GPUs from Hopper on do: from here on the kernel behind this
// one may be, too, and wait in its turn.
__device__ inline void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// Lengths within an eighth of a power of two fall into one class; 0 is that of the longest.
__device__ inline int length_class(int keys) {
  int const octave = 31 - __clz(larger(keys, 1));
  int const eighth = octave < 3 ? 0 : (keys >> (octave - 3)) & 7;
  return kLengthClasses - 1 - (octave * 8 + eighth);
}

// By one block: counts the blocks of queries of each class of sequences, then gives each sequence its places
// behind those that are longer.
template <int kThreads>
__device__ void list_sequences(ForwardParams const& params, RaggedOrder const& order, int capacity) {
  __shared__ unsigned next[kLengthClasses];
  for (int i = threadIdx.x; i < kLengthClasses; i += kThreads) next[i] = 0;
  __syncthreads();

  int const queries = order.rows.tile_queries();
  auto for_each_sequence = [&](auto&& visit) {
    for (int b = threadIdx.x; b < params.shape.batch; b += kThreads) {
      Sequence const s = sequence(params, b);
      int const m_blocks = ceil_div(s.used, queries);
      auto keys = [&](int m_block) {
        BlockRange const visited = s.mask.visited(m_block * queries, queries, 1);
        return visited.end - visited.begin;
      };
      int const longest = larger(keys(m_blocks / 2), larger(keys(0), keys(m_blocks - 1)));
      if (m_blocks > 0) visit(b, s, m_blocks, length_class(longest));
    }
  };
  if (int64_t(params.shape.batch) * capacity >= kUncountable) {  // else no offsets can make as many
    int64_t blocks = 0;
    for_each_sequence([&](int, Sequence const&, int m_blocks, int) { blocks += m_blocks; });
    using Total = cub::BlockReduce<int64_t, kThreads>;
    __shared__ typename Total::TempStorage total_storage;
    int64_t const total = Total(total_storage).Sum(blocks);  // thread 0 has it
    if (__syncthreads_or(threadIdx.x == 0 && total >= kUncountable)) {
      if (threadIdx.x == 0) *order.header = {.places = 0, .claimed = 0};
      return;
    }
  }

  for_each_sequence(
      [&](int, Sequence const&, int m_blocks, int length) { atomicAdd(&next[length], unsigned(m_blocks)); });
  __syncthreads();

  static_assert(kLengthClasses <= kThreads);
  using Sum = cub::BlockScan<int64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Sum::TempStorage storage;
  bool const is_class = threadIdx.x < kLengthClasses;
  int64_t begin, total;  // offsets that overlap may ask for more places than there are
  Sum(storage).ExclusiveSum(is_class ? int64_t(next[threadIdx.x]) : 0, begin, total);
  if (is_class) next[threadIdx.x] = int(smaller<int64_t>(begin, capacity));
  if (threadIdx.x == 0) *order.header = {.places = int(smaller<int64_t>(total, capacity)), .claimed = 0};
  __syncthreads();

  auto* const records = reinterpret_cast<SequenceRecord*>(order.header + 1);
  for_each_sequence([&](int b, Sequence const& s, int m_blocks, int length) {
    unsigned const first = atomicAdd(&next[length], unsigned(m_blocks));
    SequenceRecord const record = order.record(b, s, int(first));
    for (unsigned i = 0; i < unsigned(m_blocks) && first + i < unsigned(capacity); ++i) {
      records[first + i] = record;
    }
  });
}

// Part `part` of `parts` of the rows [first, last) of an entry becomes 0 and -inf.
__device__ inline void clear_rows(ForwardParams const& params, int entry, int first, int last, int part,
                                  int parts) {
  int64_t const count = larger(0, last - first);
  int const begin = first + int(count * part / parts), end = first + int(count * (part + 1) / parts);
  constexpr int kChunk = 8;  // elements of 16 bytes
  ProblemShape const& shape = params.shape;
  int const chunks = shape.head_dim / kChunk;
  int64_t const rows = int64_t(end - begin) * shape.heads_q;
  for (int64_t i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
    int64_t const row = i / chunks / shape.heads_q + begin, head = i / chunks % shape.heads_q;
    int64_t const offset =
        entry * params.out.batch_stride + head * params.out.head_stride + row * params.out.row_stride;
    reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.out.data) + offset)[i % chunks] = {};
  }
  for (int64_t i = threadIdx.x; i < rows; i += blockDim.x) {
    int64_t const row = i / shape.heads_q + begin, head = i % shape.heads_q;
    params.lse[entry * params.lse_batch_stride + head * shape.seqlen_q + row] = -INFINITY;
  }
}

// Block 0 lists; the others clear what lies between the sequences.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(__grid_constant__ ForwardParams const params, __grid_constant__ RaggedOrder const order,
                   int const capacity) {
  wait_for_grid_before();
  if (blockIdx.x == 0) {
    list_sequences<kThreads>(params, order, capacity);
    return;
  }
  int const batch = params.shape.batch, rows = params.shape.seqlen_q;
  int const block = blockIdx.x - 1, blocks = gridDim.x - 1;
  int const* const offsets = params.lengths.cu_seqlens_q;
  int const parts = larger(1, blocks / batch);  // of a sequence
  for (int64_t i = block; i < int64_t(batch) * parts; i += blocks) {
    int const b = int(i / parts);
    Sequence const s = sequence(params, b);
    clear_rows(params, offsets ? 0 : b, s.queries.begin + s.used, s.queries.end, int(i % parts), parts);
  }
  if (!offsets) return;
  clear_rows(params, 0, 0, smaller(offsets[0], rows), block, blocks);
  clear_rows(params, 0, larger(0, offsets[batch]), rows, block, blocks);
}

// kStartsEarly: as of the kernel after it.
template <bool kStartsEarly>
void launch_prepare(ForwardParams const& params, RaggedOrder const& order, cudaStream_t stream) {
  int const clearing = params.device.multiprocessors;  // blocks
  auto launch = [&]<int kThreads>(std::integral_constant<int, kThreads>) {
    launch_kernel<prepare_kernel<kThreads>, kStartsEarly>(params.device, 1 + clearing, kThreads, 0, stream,
                                                          params, order,
                                                          int(place_capacity(params, order.rows)));
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
