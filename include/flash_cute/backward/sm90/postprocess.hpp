// The postprocess kernel of the Hopper family's backward: it scales the dQ accumulator and writes rows of dQ,
// where the main kernel does not convert them itself.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/sm90/traits.hpp"

namespace flash_cute {

// One thread block for each M block of a head, with as many threads as compute dQ in the main kernel.
template <class Traits>
__global__ void __launch_bounds__(Traits::kConsumers* kWarpgroupThreads)
    backward_postprocess_sm90(__grid_constant__ BackwardParams const params,
                              __grid_constant__ WindowMask const mask) {
  using TileDq = typename Traits::TileDq;
  cudaGridDependencySynchronize();
  ProblemShape const& shape = params.shape;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, Traits::kBlockM};
  int const index = gridDim.x - 1 - blockIdx.x;  // what was added to last is still in L2
  auto const [head, of_head] =
      queries.of_block(index, shape.heads_q, params.dq.head_stride < params.dq.row_stride);
  int const b = queries.sequence(of_head), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Sequence const s = sequence_for<Family::sm90>(params, mask, b);
  int const m_begin = (of_head - queries.first(b)) * Traits::kBlockM;
  if (!has_rows(m_begin, s.used)) return;

  int64_t const block_index = int64_t(head) * queries.count() + of_head;
  int const* const additions = params.workspace.dq.adds;
  bool const added =
      !additions || additions[(block_index * Traits::kConsumers + warp / 4) * Traits::kCluster] != 0;
  auto* const rows =
      local_tensor<typename Traits::Element>(params.dq, b, head, int64_t(s.queries.begin) + m_begin, TileDq{})
          .data()
          .get();
  // Writes the columns of an MMA from first_column on: this thread has `fours` float4 of the accumulator,
  // from first_float of the M block on.
  auto write = [&](auto const& mma, auto tile, int first_column, int first_float, int fours) {
    Tensor dq = partition_fragment_C(mma, tile);  // (MMA, MMA_M, MMA_D)
    Tensor coords =
        mma.get_slice(threadIdx.x % decltype(size(mma))::value).partition_C(make_identity_tensor(tile));
    auto const* const dq_accum = reinterpret_cast<float4 const*>(
        params.workspace.dq.accum + block_index * Traits::kDqBlockFloats + first_float);
    CUTE_UNROLL
    for (int i = 0; i < size(dq) / 4; ++i) {
      float4 const four = added && i < fours ? dq_accum[Traits::float4_offset(i) + lane] : float4{};
      dq(4 * i) = params.softmax_scale * four.x;
      dq(4 * i + 1) = params.softmax_scale * four.y;
      dq(4 * i + 2) = params.softmax_scale * four.z;
      dq(4 * i + 3) = params.softmax_scale * four.w;
    }
    store_rows(rows + first_column, params.dq.row_stride, s.used - m_begin, shape.head_dim - first_column, dq,
               coords);
  };
  if constexpr (!Traits::kInCluster) {
    int const fours = Traits::floats_of(warp / 4) / (4 * kWarpgroupThreads);
    write(typename Traits::MmaDq{}, TileDq{}, 0,
          Traits::dq_offset(warp / 4, 0) + warp % 4 * Traits::kDqHalfFloats, fours);
  } else {
    auto write_part = [&]<int kWarpgroup>(Int<kWarpgroup>) {
      constexpr int kColumns = Traits::columns_of(kWarpgroup), kFloats = Traits::floats_of(kWarpgroup);
      for (int rank = 0; rank < Traits::kCluster; ++rank) {
        write(typename Traits::template MmaDqColumns<kColumns>{},
              Shape<Int<Traits::kBlockM>, Int<kColumns>>{},
              rank * Traits::kCtaDqColumns + kWarpgroup * Traits::columns_of(0),
              Traits::dq_offset(kWarpgroup, rank) + warp % 4 * (kFloats / 4),
              kFloats / (4 * kWarpgroupThreads));
      }
    };
    warp < 4 ? write_part(_0{}) : write_part(_1{});
  }
}

}  // namespace flash_cute
