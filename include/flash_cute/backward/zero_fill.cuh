// Gradients of rows that no other kernel writes are 0: in batches of unequal lengths queries that do not
// count, keys that do not or that no query can reach, and what lies before and behind packed sequences; on
// Hopper queries that see nothing.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/backward/varlen_prepare.cuh"
#include "flash_cute/backward/zero_fill_workspace.hpp"
#include "flash_cute/core/dependent_launch.hpp"

namespace flash_cute {

// By one thread block; these rows of an entry, of all heads.
__device__ inline void zero_fill_gradient(TensorView const& view, int heads, int head_dim, int entry,
                                          Rows const& rows) {
  if (!view.data) return;    // nobody asked for it
  constexpr int kChunk = 8;  // elements of 16 bytes
  int const chunks = head_dim / kChunk;
  int64_t const count = int64_t(larger(0, rows.end - rows.begin)) * heads * chunks;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    int64_t const row = i / chunks / heads + rows.begin, head = i / chunks % heads;
    auto* const data = static_cast<uint16_t*>(view.data) + entry * view.batch_stride +
                       head * view.head_stride + row * view.row_stride;
    reinterpret_cast<uint4*>(data)[i % chunks] = {};
  }
}

// Calls clear(entry, rows) for part `part` of `parts` of what surrounds the rows that are written:
// written(sequence) of those that places.owned(sequence) has.
template <class Written, class Clear>
__device__ void zero_fill_around(BatchBlocks const& places, int part, int parts, Written&& written,
                                 Clear&& clear) {
  int const shares = larger(1, parts / larger(1, places.batch));
  auto clear_share = [&](int entry, Rows const& rows, int share, int of) {
    int const size = ceil_div(larger(0, rows.end - rows.begin), of), begin = rows.begin + share * size;
    clear(entry, Rows{begin, smaller(rows.end, begin + size)});
  };
  for (int64_t i = part; i < int64_t(places.batch) * shares; i += parts) {
    int const b = int(i / shares), share = int(i % shares), entry = places.offsets ? 0 : b;
    Rows const owned = places.owned(b), inner = written(b);
    clear_share(entry, {owned.begin, inner.begin}, share, shares);
    clear_share(entry, {inner.end, owned.end}, share, shares);
  }
  if (!places.offsets) return;
  clear_share(0, {0, smaller(places.offsets[0], places.rows)}, part, parts);
  clear_share(0, {larger(0, places.offsets[places.batch]), places.rows}, part, parts);
}

// Part `part` of `parts`, each by a thread block.
template <Family family, class Mask>
__device__ void zero_fill_unwritten(BackwardParams const& params, Mask const& mask, int part, int parts) {
  ProblemShape const& shape = params.shape;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, 1};
  BatchBlocks const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, 1};
  zero_fill_around(
      queries, part, parts,
      [&](int b) {
        Sequence const s = sequence_for<family>(params, mask, b);
        return Rows{s.queries.begin, s.queries.begin + s.used};
      },
      [&](int entry, Rows const& rows) {
        zero_fill_gradient(params.dq, shape.heads_q, shape.head_dim, entry, rows);
      });
  zero_fill_around(
      keys, part, parts,
      [&](int b) {
        Sequence const s = sequence_for<family>(params, mask, b);
        return Rows{s.k_begin, s.k_begin + s.mask.seqlen_k};
      },
      [&](int entry, Rows const& rows) {
        zero_fill_gradient(params.dk, params.heads_of_keys(), shape.head_dim, entry, rows);
        zero_fill_gradient(params.dv, params.heads_of_keys(), shape.head_dim, entry, rows);
      });
}

template <Family family, int kThreads, class Mask>
__global__ void __launch_bounds__(kThreads)
    backward_zero_fill(__grid_constant__ BackwardParams const params, __grid_constant__ Mask const mask) {
  wait_for_grid_before();
  if constexpr (family == Family::sm90) {  // else backward_preprocess_sm80 does
    varlen_prepare<family, kThreads>(params, mask);
  }
  zero_fill_unwritten<family>(params, mask, blockIdx.x, gridDim.x);
}

}  // namespace flash_cute
