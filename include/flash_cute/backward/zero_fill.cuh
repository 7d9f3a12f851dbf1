// Zeros that the backward needs: gradients of rows that no other kernel writes, and counters in the
// workspace. Rows without another writer are, in varlen batches, queries and keys that are not used, keys
// that no query can reach, and rows before and after packed sequences; on Hopper also fully masked queries.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/backward/varlen_prepare.cuh"
#include "flash_cute/core/dependent_launch.hpp"

namespace flash_cute {

// Zeroes the part of the workspace that must be 0 before the main kernel. All threads of the grid share it.
__device__ inline void zero_fill_workspace(BackwardWorkspace const& workspace) {
  auto* const zeros = static_cast<uint4*>(workspace.zero_fill.begin);
  int64_t const threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < workspace.zero_fill.chunks;
       i += threads) {
    zeros[i] = {};
  }
}

// Zeroes rows of a batch entry for all heads, with one thread block.
template <int kElementBytes>
__device__ void zero_fill_gradient(TensorView const& view, int heads, int head_dim, int entry,
                                   RowRange const& rows) {
  if (!view.data) return;  // this gradient was not asked for
  constexpr int kChunk = 16 / kElementBytes;
  int const chunks = head_dim / kChunk;
  int64_t const count = int64_t(larger(0, rows.end - rows.begin)) * heads * chunks;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    int64_t const row = i / chunks / heads + rows.begin, head = i / chunks % heads;
    int64_t const offset = entry * view.batch_stride + head * view.head_stride + row * view.row_stride;
    reinterpret_cast<uint4*>(static_cast<char*>(view.data) + offset * kElementBytes)[i % chunks] = {};
  }
}

// Calls clear(entry, rows) for this thread block's part, `part` of `parts`, of the rows of all sequences that
// are not in written(sequence), and of the rows before and after packed sequences.
template <class Written, class Clear>
__device__ void zero_fill_around(BatchBlocks const& sequences, int part, int parts, Written&& written,
                                 Clear&& clear) {
  int const shares = larger(1, parts / larger(1, sequences.batch));
  auto clear_share = [&](int entry, RowRange const& rows, int share, int of) {
    int const size = ceil_div(larger(0, rows.end - rows.begin), of), begin = rows.begin + share * size;
    clear(entry, RowRange{begin, smaller(rows.end, begin + size)});
  };
  for (int64_t i = part; i < int64_t(sequences.batch) * shares; i += parts) {
    int const b = int(i / shares), share = int(i % shares), entry = sequences.offsets ? 0 : b;
    RowRange const owned = sequences.owned(b), inner = written(b);
    clear_share(entry, {owned.begin, inner.begin}, share, shares);
    clear_share(entry, {inner.end, owned.end}, share, shares);
  }
  if (!sequences.offsets) return;
  clear_share(0, {0, smaller(sequences.offsets[0], sequences.rows)}, part, parts);
  clear_share(0, {larger(0, sequences.offsets[sequences.batch]), sequences.rows}, part, parts);
}

// Zeroes part `part` of `parts` of all gradients' rows that no other kernel writes, with one thread block.
template <Family family, int kElementBytes = 2>
__device__ void zero_fill_unwritten(BackwardParams const& params, WindowMask const& mask, int part,
                                    int parts) {
  ProblemShape const& shape = params.shape;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, 1};
  BatchBlocks const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, 1};
  zero_fill_around(
      queries, part, parts,
      [&](int b) {
        Sequence const s = sequence_for<family>(params, mask, b);
        return RowRange{s.queries.begin, s.queries.begin + s.used};
      },
      [&](int entry, RowRange const& rows) {
        zero_fill_gradient<kElementBytes>(params.dq, shape.heads_q, shape.head_dim, entry, rows);
      });
  zero_fill_around(
      keys, part, parts,
      [&](int b) {
        Sequence const s = sequence_for<family>(params, mask, b);
        return RowRange{s.k_begin, s.k_begin + s.mask.seqlen_k};
      },
      [&](int entry, RowRange const& rows) {
        zero_fill_gradient<kElementBytes>(params.dk, params.heads_of_keys(), shape.head_dim, entry, rows);
        zero_fill_gradient<kElementBytes>(params.dv, params.heads_of_keys(), shape.head_dim_v, entry, rows);
      });
}

template <Family family, int kThreads, int kElementBytes = 2>
__global__ void __launch_bounds__(kThreads) backward_zero_fill(__grid_constant__ BackwardParams const params,
                                                               __grid_constant__ WindowMask const mask) {
  wait_for_grid_before();
  if constexpr (family == Family::sm90) {  // for sm80 backward_preprocess_sm80 does it
    varlen_prepare<family, kThreads>(params, mask);
  }
  zero_fill_unwritten<family, kElementBytes>(params, mask, blockIdx.x, gridDim.x);
}

}  // namespace flash_cute
