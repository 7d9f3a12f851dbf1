// The kernel before one of sequences of unequal lengths: it lists the tiles, and clears rows that no tile
// writes.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/attention/ragged.hpp"

namespace flash_cute {

constexpr int kPrepareThreads = 1024;
constexpr int kLengthClasses = 256;

// Of kernels that were launched early, which only GPUs from Hopper on do.
__device__ inline void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Lengths within an eighth of a power of two fall into one class; 0 is that of the longest.
__device__ inline int length_class(int keys) {
  int const octave = 31 - __clz(larger(keys, 1));
  int const eighth = octave < 3 ? 0 : (keys >> (octave - 3)) & 7;
  return kLengthClasses - 1 - (octave * 8 + eighth);
}

// By one block: counts the tiles of each class, then puts each tile where its class begins.
__device__ inline void list_tiles(ForwardParams const& params, RaggedOrder const& order, int capacity) {
  __shared__ int next[kLengthClasses];
  for (int i = threadIdx.x; i < kLengthClasses; i += blockDim.x) next[i] = 0;
  __syncthreads();

  int const queries = order.rows.tile_queries();
  auto for_each_tile = [&](auto&& visit) {
    for (int b = threadIdx.x; b < params.shape.batch; b += blockDim.x) {
      Sequence const s = sequence(params, b);
      for (int m_begin = 0; m_begin < s.used; m_begin += queries) {
        BlockRange const keys = s.mask.visited(m_begin, queries, 1);
        visit(b, s, m_begin, length_class(keys.end - keys.begin));
      }
    }
  };
  for_each_tile([&](int, Sequence const&, int, int length) { atomicAdd(&next[length], 1); });
  __syncthreads();

  if (threadIdx.x == 0) {
    int total = 0;  // offsets that overlap may list more tiles than there is room for
    for (int& begin : next) {
      int const count = smaller(unsigned(begin), unsigned(capacity - total));
      begin = total;
      total += count;
    }
    auto& header = *const_cast<TileListHeader*>(order.header);
    header.records = total;
    header.records_of_section = Divisor(larger(1, header.records * int(order.packs.value)));
  }
  __syncthreads();

  auto* const records = reinterpret_cast<TileRecord*>(const_cast<TileListHeader*>(order.header) + 1);
  for_each_tile([&](int b, Sequence const& s, int m_begin, int length) {
    int const place = atomicAdd(&next[length], 1);
    if (unsigned(place) >= unsigned(capacity)) return;
    records[place] = {m_begin, b, s.queries.begin, s.used, s.k_begin, s.mask.seqlen_k, {}};
  });
}

// Rows [begin, end) of an entry become 0 and -inf.
__device__ inline void clear_rows(ForwardParams const& params, int entry, int begin, int end) {
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
    list_tiles(params, order, capacity);
    return;
  }
  int const* const offsets = params.lengths.cu_seqlens_q;
  int const batch = params.shape.batch, rows = params.shape.seqlen_q;
  for (int b = blockIdx.x - 1; b <= batch; b += gridDim.x - 1) {
    if (b < batch) {
      Sequence const s = sequence(params, b);
      clear_rows(params, offsets ? 0 : b, s.queries.begin + s.used, s.queries.end);
    } else if (offsets) {
      clear_rows(params, 0, 0, smaller(larger(offsets[0], 0), rows));
      clear_rows(params, 0, larger(0, smaller(offsets[batch], rows)), rows);
    }
  }
}

}  // namespace flash_cute
