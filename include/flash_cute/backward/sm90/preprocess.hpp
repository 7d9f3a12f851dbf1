// The kernel before the Hopper family's backward: LSE and delta of each query. It clears what has to be 0,
// too, and numbers blocks of keys of unequal lengths.
#pragma once

#include "flash_cute/backward/sm90/delta.hpp"
#include "flash_cute/backward/zero_fill.cuh"

namespace flash_cute {

template <class Traits>
struct PreprocessStorage {
  alignas(1024) typename Traits::Element rows[2 * Traits::kStageElements];
  cutlass::arch::ClusterTransactionBarrier come;
};

// A thread block for each block of queries of a head, and a thread for each of its rows; if kZeroFills,
// before them zero_fill_blocks others that do what backward_zero_fill does elsewhere: one launch less (512:
// 0.5 to 2%).
template <class Traits, bool kZeroFills>
__global__ void __launch_bounds__(Traits::kBlockM)
    backward_preprocess_sm90(__grid_constant__ BackwardParams const params,
                             __grid_constant__ BackwardMaps const maps, int zero_fill_blocks) {
  constexpr int kBlockM = Traits::kBlockM;
  cudaGridDependencySynchronize();  // launched early
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<PreprocessStorage<Traits>*>(memory);
  DeltaOperands<Traits> const rows{params, maps, shared.rows, shared.come};
  ProblemShape const& shape = params.shape;
  BackwardWorkspace const& workspace = params.workspace;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  int const index = int(blockIdx.x) - (kZeroFills ? zero_fill_blocks : 0);
  if constexpr (kZeroFills) {
    if (index < 0) {
      varlen_prepare<Family::sm90, kBlockM>(params);
      zero_fill_unwritten<Family::sm90>(params, blockIdx.x, zero_fill_blocks);
      return zero_fill_workspace(workspace);
    }
  }
  if (index >= shape.heads_q * queries.count()) return zero_fill_workspace(workspace);
  auto const [head, of_head] =
      queries.of_block(index, shape.heads_q, params.out.head_stride < params.out.row_stride);
  QuerySequence const s = sequence_at(params, queries, of_head);
  int const begin = (of_head - s.first_block) * kBlockM;
  int64_t const place = int64_t(head) * queries.count() + of_head;
  bool const exists = has_rows(begin, s.used), has_dout = params.dout.data;
  if (threadIdx.x == 0) {
    shared.come.init(rows.kArrivals);
    cutlass::arch::fence_barrier_init();
    if (exists && has_dout) rows.load(s, head, begin);
  }
  __syncthreads();

  zero_fill_workspace(workspace);
  if (!exists) return;

  LseDeltaBlock<Traits> const found(params, s, head, begin, place * kBlockM);
  int const row = threadIdx.x;
  float const lse = found.lse(row), of_lse = found.gradient_of_lse(row);
  if (has_dout) shared.come.wait(0);
  found.store_lse(row, lse);
  found.store_delta(row, of_lse - (has_dout ? rows.multiply(row) : 0.f));
}

}  // namespace flash_cute
