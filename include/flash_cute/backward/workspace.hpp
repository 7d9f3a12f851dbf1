// What the backward keeps in global memory between its kernels: how the workspace is cut into regions, and
// what kernels see of it.
#pragma once

#include "flash_cute/core/workspace.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

constexpr int kTermBytes = 16;  // of a query's terms of LSE and delta, see LseDeltaMma

enum class WorkspaceRegion {
  lse,
  neg_delta,
  terms,
  dq,                 // accumulators of dQ
  gqa,                // sums of dK and dV of split groups
  tile_counter,       // of the Hopper family's kernel
  dq_adds,            // what has become of each accumulator
  dq_blocks_taken,    // blocks of queries whose conversion has begun
  dq_tiles_finished,  // tiles that have added all of their dQ
  is_uniform,
  kv_block_offsets,
  offsets_q,
  offsets_k,
  mask_table,
};
constexpr char const* kWorkspaceRegionNames[] = {"lse",
                                                 "delta",
                                                 "terms",
                                                 "dq",
                                                 "gqa",
                                                 "tile_counter",
                                                 "dq_adds",
                                                 "dq_blocks_taken",
                                                 "dq_tiles_finished",
                                                 "is_uniform",
                                                 "kv_block_offsets",
                                                 "offsets_q",
                                                 "offsets_k",
                                                 "ranges"};
constexpr int kWorkspaceRegions = sizeof(kWorkspaceRegionNames) / sizeof(char const*);

using BackwardLayout = WorkspaceLayout<WorkspaceRegion, kWorkspaceRegions>;

// LSE and delta of each query. Both may lie where rows of dQ are written last.
struct LseDeltaWorkspace {
  // (heads_q, blocks, block_m), in base 2; +inf for fully masked rows. A sequence begins with a block of its
  // own (BatchBlocks).
  float* lse = nullptr;
  float* neg_delta = nullptr;  // likewise: dLSE - rowsum(dO O)
  // Instead of both, kTermBytes of each query. Of a block of queries the first 1 << log2_terms_of_row lie
  // side by side in its first row, the next ones in its second.
  TensorView terms;
  int log2_terms_of_row = 0;
};

// How dQ is accumulated.
struct DqWorkspace {
  // (heads_q, blocks, block_m * head dim of the kernel), in the order of the accumulator's registers; null:
  // the kernel for dK and dV does not make dQ.
  float* accum = nullptr;
  // On Hopper, of each warpgroup's part of a block what has become of it (DqAccumulateWriter); null:
  // accumulators are zero filled.
  int* adds = nullptr;
  bool ordered = false;  // do tiles add in one order?
  // Where the kernel converts accumulators itself: how many blocks of queries are taken, and of each pair of
  // a sequence and a head of K and V how often a warpgroup has added all of a tile (DqConvertOrder). Else
  // null.
  int *blocks_taken = nullptr, *tiles_finished = nullptr;
};

// Sums of dK and dV of query heads that share K and V, where several tiles have parts of the group. Else
// null.
struct GqaWorkspace {
  // (2, heads_kv / parts_of_sum, blocks of keys, block_n * head dim of the kernel), in the order of the
  // accumulator's registers.
  float* sums = nullptr;
  int64_t floats_of_dk = 0;
  int parts_of_sum = 1;  // parts that add to one sum
};

// What varlen_prepare finds out about sequences that differ in length. Null where it follows from the shape.
struct VarlenWorkspace {
  int* is_uniform = nullptr;  // have all sequences as many blocks of keys as expected?
  int* kv_block_offsets =
      nullptr;  // (batch + 1,) the number of each sequence's first block of keys, and the total
  int *offsets_q = nullptr, *offsets_k = nullptr;  // of packed sequences: in order, and within the totals
  int block_n = 0;                                 // keys of a block
  int expected_kv_blocks = 0;
};

struct BackwardWorkspace {
  LseDeltaWorkspace lse_delta;
  DqWorkspace dq;
  GqaWorkspace gqa;
  VarlenWorkspace varlen;
  void* mask_table = nullptr;   // of MaskTable
  int* tile_counter = nullptr;  // tiles that thread blocks of the Hopper family's kernel have taken
  struct {
    void* begin = nullptr;
    int64_t chunks = 0;  // of kZeroFillBytes
  } zero_fill;           // what the kernel before zero fills
};

}  // namespace flash_cute
