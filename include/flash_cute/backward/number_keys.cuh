// Numbers the blocks of keys of sequences that differ in length, and lists the sequences of blocks of
// queries.
#pragma once

#include <cuda_runtime.h>

#include <cub/block/block_scan.cuh>

#include "flash_cute/backward/key_order.hpp"

namespace flash_cute {

// By a thread block: do no offsets go backwards?
template <int kThreads>
__device__ bool find_order(BackwardParams const& params) {
  int const* const cu_seqlens_q = params.lengths.cu_seqlens_q;
  int const* const cu_seqlens_k = params.lengths.cu_seqlens_k;
  bool in_order = true;
  for (int b = threadIdx.x; cu_seqlens_k && b < params.shape.batch; b += kThreads) {
    in_order &= cu_seqlens_k[b] <= cu_seqlens_k[b + 1] && cu_seqlens_q[b] <= cu_seqlens_q[b + 1];
  }
  return __syncthreads_and(in_order);
}

// By the first thread block: the places of blocks of keys, those of one sequence behind those of the other.
// Additions have an order, and a sequence's have an end, only if offsets are in order: else sequences may
// have more blocks than there are places, and are numbered as BlockPlaces does; then a block of keys of a
// sequence may be nobody's, and must not be waited for. And whether all sequences have as many as expected.
template <Family family, int kThreads>
__device__ void number_keys(BackwardParams const& params) {
  BackwardWorkspace const& workspace = params.workspace;
  if (!workspace.key_places || blockIdx.x > 0) return;
  int const batch = params.shape.batch;
  bool const in_order = find_order<kThreads>(params);
  if (threadIdx.x == 0) *workspace.in_order = in_order;

  BlockPlaces const by_offsets{params.lengths.cu_seqlens_k, params.shape.seqlen_k, batch,
                               workspace.key_block};
  using Sum = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Sum::TempStorage storage;
  constexpr int kAtOnce = 4;  // of a thread, as what is known of a sequence takes a while to come
  int places = 0;
  bool alike = in_order;
  for (int first = 0; first <= batch; first += kThreads * kAtOnce) {
    int const b = first + threadIdx.x * kAtOnce;
    int before[kAtOnce] = {}, of_all = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (in_order && b + i < batch) before[i] = key_blocks<family>(params, b + i, workspace.key_block);
      alike &= b + i >= batch || before[i] == workspace.expected_key_blocks;
    }
    __syncthreads();
    Sum(storage).ExclusiveSum(before, before, of_all);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!in_order) before[i] = b + i < batch ? by_offsets.first(b + i) : by_offsets.count();
      if (b + i <= batch) workspace.key_places[b + i] = places + before[i];
    }
    places += of_all;
  }
  alike = __syncthreads_and(alike);
  if (threadIdx.x == 0) *workspace.alike = alike;
}

// Part `part` of `parts`, each by a thread block. Else the warps of backward_kernel_sm90 that work on one
// block after the other would wait for each search (2% of 512, full).
__device__ inline void list_sequences_of_queries(BackwardParams const& params, int part, int parts) {
  BackwardWorkspace const& workspace = params.workspace;
  if (!workspace.sequences_of_queries) return;
  BlockPlaces const queries{params.lengths.cu_seqlens_q, params.shape.seqlen_q, params.shape.batch,
                            workspace.query_block};
  for (int i = part * int(blockDim.x) + int(threadIdx.x); i < queries.count(); i += parts * int(blockDim.x)) {
    workspace.sequences_of_queries[i] = sequence_at(params, queries, i);
  }
}

}  // namespace flash_cute
