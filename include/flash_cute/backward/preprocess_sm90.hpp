// The kernel before the Hopper family's backward, where that one does not find LSE and delta of queries
// itself; it clears what has to be 0, too.
#pragma once

#include "flash_cute/backward/query_stats_sm90.hpp"
#include "flash_cute/backward/zeros.hpp"

namespace flash_cute {

template <class Traits>
struct PreprocessStorage {
  alignas(1024) typename Traits::Element rows[2 * Traits::kSlotElements];
  cutlass::arch::ClusterTransactionBarrier come;
};

// A thread block for each block of queries of a head, and a thread for each of its rows.
template <class Traits>
__global__ void __launch_bounds__(Traits::kBlockM)
    backward_preprocess_sm90(__grid_constant__ BackwardParams const params,
                             __grid_constant__ BackwardMaps const maps) {
  constexpr int kBlockM = Traits::kBlockM, kFloats = Traits::kBlockFloats;
  cudaGridDependencySynchronize();  // launched early
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<PreprocessStorage<Traits>*>(memory);
  QueryStatsRows<Traits> const rows{params, maps, shared.rows, shared.come};
  ProblemShape const& shape = params.shape;
  BackwardWorkspace const& workspace = params.workspace;
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  if (int(blockIdx.x) >= shape.heads_q * queries.count()) return clear_zeros(workspace);
  auto const [head, of_head] =
      queries.of_block(blockIdx.x, shape.heads_q, params.out.head_stride < params.out.row_stride);
  int const b = queries.sequence(of_head), entry = params.lengths.cu_seqlens_q ? 0 : b;
  Sequence const s = sequence_for<Family::sm90>(params, b);
  int const begin = (of_head - queries.first(b)) * kBlockM;
  int64_t const place = int64_t(head) * queries.count() + of_head;
  bool const exists = has_rows(begin, s.used), has_dout = params.dout.data;
  if (threadIdx.x == 0) {
    shared.come.init(rows.kArrivals);
    cutlass::arch::fence_barrier_init();
    if (exists && has_dout) rows.load(s, entry, head, begin);
  }
  __syncthreads();

  clear_zeros(workspace);
  // Out of order, a block of queries may have no tile that stores first, and still rows are made of its sums.
  if (workspace.finished && workspace.additions && !offsets_in_order(params)) {
    auto* const sums = reinterpret_cast<uint4*>(workspace.dq + place * kFloats);
    for (int i = threadIdx.x; i < kFloats / 4; i += kBlockM) sums[i] = {};
  }
  if (!exists) return;

  int const row = begin + threadIdx.x;
  bool const counts = row < s.used;
  int64_t const at = entry * params.lse_batch_stride + int64_t(head) * shape.seqlen_q + s.queries.begin + row;
  float const lse = counts ? params.lse[at] : INFINITY,
              of_lse = counts && params.dlse ? params.dlse[at] : 0.f;
  if (has_dout) shared.come.wait(0);
  workspace.lse[place * kBlockM + threadIdx.x] = lse_in_base_2(lse);
  workspace.delta[place * kBlockM + threadIdx.x] =
      of_lse - (has_dout ? rows.template multiply<8>(threadIdx.x) : 0.f);
}

}  // namespace flash_cute
