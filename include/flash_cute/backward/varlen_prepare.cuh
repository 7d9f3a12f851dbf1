// Numbers the blocks of keys of sequences that differ in length.
#pragma once

#include <cuda_runtime.h>

#include <cub/block/block_scan.cuh>

#include "flash_cute/backward/tile_scheduler.hpp"

namespace flash_cute {

template <int kThreads>
using BlockScan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// By a thread block: offsets of packed rows become the largest so far, from 0 to the total. Those that make
// sense stay as they are; of others sequences have an order and do not overlap all the same.
template <int kThreads>
__device__ void order_offsets(int const* offsets, int count, int total, int* ordered) {
  __shared__ typename BlockScan<kThreads>::TempStorage storage;
  auto maximum = [](int a, int b) { return larger(a, b); };
  int most = 0;   // so far
#pragma unroll 1  // else ptxas keeps a stack frame (head dim 64, sm_80)
  for (int first = 0; first < count; first += kThreads) {
    int const i = first + int(threadIdx.x);
    int offset = i < count ? larger(most, smaller(offsets[i], total)) : most, most_of_all = 0;
    __syncthreads();
    BlockScan<kThreads>(storage).InclusiveScan(offset, offset, maximum, most_of_all);
    if (i < count) ordered[i] = offset;
    most = most_of_all;
  }
}

// What of a call sequence_for asks.
struct OrderedSequences {
  ProblemShape shape;

  LengthParams lengths;
};

// By the first thread block: the places of blocks of keys, those of one sequence behind those of the other,
// and whether all sequences have as many as expected. Of packed ones the offsets are put in order first: so
// additions have an order, and a sequence's have an end, whatever the offsets hold.
template <Family family, int kThreads, class Mask>
__device__ void varlen_prepare(BackwardParams const& params, Mask const& mask) {
  BackwardWorkspace const& workspace = params.workspace;
  if (!workspace.varlen.kv_block_offsets || blockIdx.x > 0) return;
  int const batch = params.shape.batch;
  OrderedSequences sequences{params.shape, params.lengths};
  if (workspace.varlen.offsets_q) {
    order_offsets<kThreads>(params.lengths.cu_seqlens_q, batch + 1, params.shape.seqlen_q,
                            workspace.varlen.offsets_q);
    order_offsets<kThreads>(params.lengths.cu_seqlens_k, batch + 1, params.shape.seqlen_k,
                            workspace.varlen.offsets_k);
    __syncthreads();
    sequences.lengths.cu_seqlens_q = workspace.varlen.offsets_q;
    sequences.lengths.cu_seqlens_k = workspace.varlen.offsets_k;
  }

  __shared__ typename BlockScan<kThreads>::TempStorage storage;
  constexpr int kAtOnce = 4;  // of a thread, as what is known of a sequence takes a while to come
  int places = 0;
  bool is_uniform = true;
  for (int first = 0; first <= batch; first += kThreads * kAtOnce) {
    int const b = first + threadIdx.x * kAtOnce;
    int before[kAtOnce] = {}, of_all = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (b + i < batch) before[i] = kv_blocks<family>(sequences, mask, b + i, workspace.varlen.block_n);
      is_uniform &= b + i >= batch || before[i] == workspace.varlen.expected_kv_blocks;
    }
    __syncthreads();
    BlockScan<kThreads>(storage).ExclusiveSum(before, before, of_all);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (b + i <= batch) workspace.varlen.kv_block_offsets[b + i] = places + before[i];
    }
    places += of_all;
  }
  is_uniform = __syncthreads_and(is_uniform);
  if (threadIdx.x == 0) *workspace.varlen.is_uniform = is_uniform;
}

}  // namespace flash_cute
