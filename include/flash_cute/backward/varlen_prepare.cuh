// Preparation of varlen batches on the device: sanitised offsets, and the number of each sequence's first N
// block.
#pragma once

#include <cuda_runtime.h>

#include <cub/block/block_scan.cuh>

#include "flash_cute/backward/tile_scheduler.hpp"

namespace flash_cute {

template <int kThreads>
using BlockScan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// Copies offsets of packed rows, clamped to [0, total] and to a running maximum, with one thread block. Valid
// offsets stay as they are; with invalid ones sequences are in order and do not overlap all the same.
template <int kThreads>
__device__ void order_offsets(int const* offsets, int count, int total, int* ordered) {
  __shared__ typename BlockScan<kThreads>::TempStorage storage;
  auto maximum = [](int a, int b) { return larger(a, b); };
  int most = 0;   // the running maximum
#pragma unroll 1  // without this ptxas keeps a stack frame (head dim 64, sm_80)
  for (int first = 0; first < count; first += kThreads) {
    int const i = first + int(threadIdx.x);
    int offset = i < count ? larger(most, smaller(offsets[i], total)) : most, most_of_all = 0;
    __syncthreads();
    BlockScan<kThreads>(storage).InclusiveScan(offset, offset, maximum, most_of_all);
    if (i < count) ordered[i] = offset;
    most = most_of_all;
  }
}

// The part of BackwardParams that sequence_for reads.
struct OrderedSequences {
  ProblemShape shape;

  LengthParams lengths;
};

// Numbers N blocks, those of one sequence after those of the sequence before it, and finds out whether all
// sequences have the expected number. The first thread block of the grid does it. Offsets of packed sequences
// are sanitised first, so that the main kernel's waits end, whatever the offsets hold.
template <Family family, int kThreads>
__device__ void varlen_prepare(BackwardParams const& params, WindowMask const& mask) {
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
  constexpr int kAtOnce = 4;  // sequences of a thread, so that loads of their lengths overlap
  int blocks = 0;             // of the sequences so far
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
      if (b + i <= batch) workspace.varlen.kv_block_offsets[b + i] = blocks + before[i];
    }
    blocks += of_all;
  }
  is_uniform = __syncthreads_and(is_uniform);
  if (threadIdx.x == 0) *workspace.varlen.is_uniform = is_uniform;
}

}  // namespace flash_cute
