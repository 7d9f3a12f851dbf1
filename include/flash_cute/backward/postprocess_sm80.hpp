// The kernel after the Ampere family's backward: sums of dQ become rows of dQ.
#pragma once

#include "flash_cute/attention/block_places.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/blind_rows.hpp"
#include "flash_cute/backward/traits_sm80.hpp"

namespace flash_cute {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    backward_postprocess_sm80(__grid_constant__ BackwardParams const params) {
  using TileQ = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>;
  ProblemShape const& shape = params.shape;
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, Traits::kBlockM};
  auto const [head, of_head] =
      queries.of_block(blockIdx.x, shape.heads_q, params.dq.head_stride < params.dq.row_stride);
  int const b = queries.sequence(of_head), thread = threadIdx.x;
  Sequence const s = sequence(params, b);
  int const m_begin = (of_head - queries.first(b)) * Traits::kBlockM;
  if (!has_rows(m_begin, s.used)) return;

  typename Traits::MmaQueries const mma;
  Tensor dq = partition_fragment_C(mma, TileQ{});  // (MMA, MMA_M, MMA_D)
  constexpr int kFloats = Traits::kBlockM * Traits::kHeadDim;
  float const* const sums =
      params.workspace.dq + (int64_t(head) * queries.count() + of_head) * kFloats + thread;
  CUTE_UNROLL
  for (int i = 0; i < size(dq); ++i) dq(i) = params.softmax_scale * sums[i * Traits::kThreads];
  Tensor coords = mma.get_slice(thread).partition_C(make_identity_tensor(TileQ{}));
  clear_first_rows(dq, coords, s.mask.first_seeing_row() - m_begin);
  Tensor target = local_tensor<typename Traits::Element>(params.dq, params.lengths.cu_seqlens_q ? 0 : b, head,
                                                         int64_t(s.queries.begin) + m_begin, TileQ{});
  store_rows(target.data().get(), params.dq.row_stride, s.used - m_begin, shape.head_dim, dq, coords);
}

}  // namespace flash_cute
