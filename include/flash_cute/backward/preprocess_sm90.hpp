// The kernel before the Hopper family's backward, for queries whose LSE and delta that one does not find
// itself; it clears what has to be 0, too, and numbers blocks of keys of unequal lengths.
#pragma once

#include "flash_cute/backward/clear.cuh"
#include "flash_cute/backward/query_stats_sm90.hpp"
#include "flash_cute/backward/zeros.hpp"

namespace flash_cute {

template <class Traits>
struct PreprocessStorage {
  alignas(1024) typename Traits::Element rows[2 * Traits::kSlotElements];
  cutlass::arch::ClusterTransactionBarrier come;
};

// The share of a thread block that clears sums of dQ. Out of order, a block of queries may have no tile that
// stores first, and still rows are made of its sums.
template <int kThreads>
__device__ void clear_sums_out_of_order(BackwardParams const& params, int64_t floats, int part, int parts) {
  BackwardWorkspace const& workspace = params.workspace;
  if (!workspace.finished || !workspace.additions || find_order<kThreads>(params)) return;
  auto* const sums = reinterpret_cast<uint4*>(workspace.dq);
  for (int64_t i = int64_t(part) * kThreads + threadIdx.x; i < floats / 4; i += int64_t(parts) * kThreads) {
    sums[i] = {};
  }
}

// A thread block for each block of queries of a head, and a thread for each of its rows; if kClears, before
// them clearing_blocks others that do what backward_clear does elsewhere: one launch less (512: 0.5 to 2%).
template <class Traits, bool kClears>
__global__ void __launch_bounds__(Traits::kBlockM)
    backward_preprocess_sm90(__grid_constant__ BackwardParams const params,
                             __grid_constant__ BackwardMaps const maps, int clearing_blocks) {
  constexpr int kBlockM = Traits::kBlockM;
  cudaGridDependencySynchronize();  // launched early
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<PreprocessStorage<Traits>*>(memory);
  QueryStatsRows<Traits> const rows{params, maps, shared.rows, shared.come};
  ProblemShape const& shape = params.shape;
  BackwardWorkspace const& workspace = params.workspace;
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  int const index = int(blockIdx.x) - (kClears ? clearing_blocks : 0);
  if constexpr (kClears) {
    if (index < 0) {
      number_keys<Family::sm90, kBlockM>(params);
      int64_t const floats = int64_t(shape.heads_q) * queries.count() * Traits::kBlockFloats;
      clear_sums_out_of_order<kBlockM>(params, floats, blockIdx.x, clearing_blocks);
      list_sequences_of_queries(params, blockIdx.x, clearing_blocks);
      clear_unwritten<Family::sm90>(params, blockIdx.x, clearing_blocks);
      return clear_zeros(workspace);
    }
  }
  if (index >= shape.heads_q * queries.count()) return clear_zeros(workspace);
  auto const [head, of_head] = [&]() -> BlockPlaces::PlaceOfHead {
    if (workspace.pairs_before > 0) {  // only these are wanted
      RowsOrder::Block const block = RowsOrder{params, queries, true}(index);
      return {block.head, block.place};
    }
    return queries.of_block(index, shape.heads_q, params.out.head_stride < params.out.row_stride);
  }();
  SequenceOfQueries const s = sequence_at(params, queries, of_head);
  int const begin = (of_head - s.first_place) * kBlockM;
  int64_t const place = int64_t(head) * queries.count() + of_head;
  bool const exists = has_rows(begin, s.used), has_dout = params.dout.data;
  if (threadIdx.x == 0) {
    shared.come.init(rows.kArrivals);
    cutlass::arch::fence_barrier_init();
    // Evicted first where all of O and dO come here (H100, head dim 256: 512 0.5% less time, 1k and 2k 0.3%;
    // 64 0 to 0.3% more).
    using Hint = cute::TMA::CacheHintSm90;
    constexpr Hint kHint = Traits::kMakesRows ? Hint::EVICT_NORMAL : Hint::EVICT_FIRST;
    if (exists && has_dout) rows.template load<kHint>(s, head, begin);
  }
  __syncthreads();

  clear_zeros(workspace);
  if (!exists) return;

  QueryStatsBlock<Traits> const found(params, s, head, begin, place * kBlockM);
  int const row = threadIdx.x;
  float const lse = found.lse(row), of_lse = found.gradient_of_lse(row);
  if (has_dout) shared.come.wait(0);
  found.store_lse(row, lse);
  found.store_delta(row, of_lse - (has_dout ? rows.template multiply<8>(row) : 0.f));
}

}  // namespace flash_cute
