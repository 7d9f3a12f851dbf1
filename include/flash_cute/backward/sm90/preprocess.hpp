// The preprocess kernel of the Hopper family's backward: the LSE in base 2 and delta of each query, zeros in
// the workspace, and for packed sequences what backward_zero_fill does.
#pragma once

#include "flash_cute/backward/sink_gradients.hpp"
#include "flash_cute/backward/sm90/delta.hpp"
#include "flash_cute/backward/zero_fill.cuh"

namespace flash_cute {

template <class Traits>
struct PreprocessStorage {
  alignas(1024) typename Traits::Element rows[2 * Traits::kStageElementsDO];
  cutlass::arch::ClusterTransactionBarrier full;
  float sums[Traits::kBlockM / 32];
};

// One thread block for each M block of a head, and a thread for each of its rows. With kZeroFills the first
// zero_fill_blocks thread blocks do the work of backward_zero_fill, which saves a launch (512: 0.5 to 2%).
template <class Traits, bool kZeroFills>
__global__ void __launch_bounds__(Traits::kBlockM)
    backward_preprocess_sm90(__grid_constant__ BackwardParams const params,
                             __grid_constant__ WindowMask const mask,
                             __grid_constant__ BackwardMaps const maps, int zero_fill_blocks) {
  constexpr int kBlockM = Traits::kBlockM;
  cudaGridDependencySynchronize();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<PreprocessStorage<Traits>*>(memory);
  DeltaOperands<Traits> const operands{params, maps, shared.rows, shared.full};
  ProblemShape const& shape = params.shape;
  BackwardWorkspace const& workspace = params.workspace;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  int const index = int(blockIdx.x) - (kZeroFills ? zero_fill_blocks : 0);
  if constexpr (kZeroFills) {
    if (index < 0) {
      varlen_prepare<Family::sm90, kBlockM>(params, mask);
      zero_fill_unwritten<Family::sm90>(params, mask, blockIdx.x, zero_fill_blocks);
      return zero_fill_workspace(workspace);
    }
  }
  if (index >= shape.heads_q * queries.count()) return zero_fill_workspace(workspace);
  auto const [head, of_head] =
      queries.of_block(index, shape.heads_q, params.out.head_stride < params.out.row_stride);
  QuerySequence const s = sequence_at(params, mask, queries, of_head);
  int const begin = (of_head - s.first_block) * kBlockM;
  int64_t const block_index = int64_t(head) * queries.count() + of_head;
  bool const exists = has_rows(begin, s.used), has_dout = params.dout.data;
  if (threadIdx.x == 0) {
    shared.full.init(operands.kArrivals);
    cutlass::arch::fence_barrier_init();
    if (exists && has_dout) operands.load(s, head, begin);
  }
  __syncthreads();

  zero_fill_workspace(workspace);
  SinkShare<typename Traits::Element> of_sink{params.sinks, head};
  // Queries that see no key are cut off the sequence: its first block has them.
  if (params.sinks.shares && of_head == s.first_block) {
    Sequence const whole = sequence(params.shape, params.lengths, mask, s.index);
    int64_t const first = (params.lengths.cu_seqlens_q ? 0 : s.index * params.lse_batch_stride) +
                          int64_t(head) * shape.seqlen_q + whole.queries.begin;
    int const blind = smaller(whole.used, whole.mask.fully_masked_rows());
    for (int row = threadIdx.x; row < blind; row += kBlockM) {
      of_sink.add(params.lse[first + row], params.dlse ? params.dlse[first + row] : 0.f);
    }
  }
  if (!exists) return of_sink.template store<kBlockM>(block_index, shared.sums);

  LseDeltaBlock<Traits> const stats(params, s, head, begin, block_index * kBlockM);
  int const row = threadIdx.x;
  float const lse = stats.lse(row), dlse = stats.dlse(row);
  if (has_dout) shared.full.wait(0);
  stats.store_lse(row, lse);
  float const neg_delta = dlse - (has_dout ? operands.dot(row) : 0.f);
  stats.store_delta(row, neg_delta);
  if (params.sinks.shares) of_sink.add(stats.given_lse(row), lse == INFINITY ? dlse : neg_delta);
  of_sink.template store<kBlockM>(block_index, shared.sums);
}

}  // namespace flash_cute
