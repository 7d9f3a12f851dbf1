// The postprocess kernel of the Ampere family's backward: it scales the dQ accumulator and writes rows of dQ.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/fully_masked.hpp"
#include "flash_cute/backward/sm80/traits.hpp"
#include "flash_cute/backward/zero_fill.cuh"

namespace flash_cute {

// One thread block for each M block of a head. The first zero_fill_blocks of them first zero gradients of
// rows that no other kernel writes.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    backward_postprocess_sm80(__grid_constant__ BackwardParams const params,
                              __grid_constant__ WindowMask const mask, int zero_fill_blocks) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  using TileQ = Shape<Int<kBlockM>, Int<Traits::kHeadDim>>;
  ProblemShape const& shape = params.shape;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  auto const [head, of_head] =
      queries.of_block(blockIdx.x, shape.heads_q, params.dq.head_stride < params.dq.row_stride);
  int const b = queries.sequence(of_head), thread = threadIdx.x;
  Sequence const s = sequence(params.shape, params.lengths, mask, b);
  if (int(blockIdx.x) < zero_fill_blocks) {
    zero_fill_unwritten<Family::sm80, sizeof(Element)>(params, mask, blockIdx.x, zero_fill_blocks);
  }
  int const m_begin = (of_head - queries.first(b)) * kBlockM;
  if (!has_rows(m_begin, s.used)) return;

  typename Traits::MmaDq const mma;
  Tensor dq = partition_fragment_C(mma, TileQ{});  // (MMA, MMA_M, MMA_D)
  constexpr int kFloats = kBlockM * Traits::kHeadDim;
  float const* const dq_accum =
      params.workspace.dq.accum + (int64_t(head) * queries.count() + of_head) * kFloats + thread;
  CUTE_UNROLL
  for (int i = 0; i < size(dq); ++i) dq(i) = params.softmax_scale * dq_accum[i * Traits::kThreads];
  Tensor coords = mma.get_slice(thread).partition_C(make_identity_tensor(TileQ{}));
  zero_fully_masked_rows(dq, coords, s.mask.fully_masked_rows() - m_begin);
  Tensor target = local_tensor<Element>(params.dq, b, head, int64_t(s.queries.begin) + m_begin, TileQ{});
  if constexpr (std::is_same_v<Element, float>) {
    store_rows(target.data().get(), params.dq.row_stride, s.used - m_begin, shape.head_dim, dq, coords);
  } else {
    // Rows go through shared memory, so that neighbouring threads write along a row. Chunks of 16 bytes are
    // permuted there against bank conflicts.
    constexpr int kChunk = 16 / sizeof(Element), kChunks = Traits::kHeadDim / kChunk;
    constexpr int kPermuted = kChunks % 8 == 0 ? 8 : 4;
    __shared__ __align__(16) Element memory[kBlockM * Traits::kHeadDim];
    auto smem_at = [](int row, int column) {
      return memory + row * Traits::kHeadDim + (column ^ row % kPermuted * kChunk);
    };
    auto const values = row_col_view(dq);
    auto const row_col_coords = row_col_view(coords);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(values); ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(values); j += 2) {
        *reinterpret_cast<uint32_t*>(smem_at(get<0>(row_col_coords(i, j)), get<1>(row_col_coords(i, j)))) =
            pack<Element>(values(i, j), values(i, j + 1));
      }
    }
    __syncthreads();
#pragma unroll 8
    for (int i = thread; i < kBlockM * kChunks; i += Traits::kThreads) {
      int const row = i / kChunks, column = i % kChunks * kChunk;
      if (row >= s.used - m_begin || column >= shape.head_dim) continue;
      *reinterpret_cast<uint4*>(target.data().get() + row * params.dq.row_stride + column) =
          *reinterpret_cast<uint4 const*>(smem_at(row, column));
    }
  }
}

}  // namespace flash_cute
