// What a kernel launch needs, as plain host structs composed by concern. No torch, no CUDA.
#pragma once

#include <cstdint>

#include "flash_cute/attention/mask/window.hpp"

namespace flash_cute {

enum class Pass { forward, backward };
enum class Family { sm80, sm90 };
enum class Variant { plain };
enum class ElementType { fp16, bf16, fp32 };  // attention has kernels for those that instances.def lists
constexpr int kTermBytes = 16;                // of a query: see BackwardWorkspace::terms

constexpr int element_bytes(ElementType element) { return element == ElementType::fp32 ? 4 : 2; }

// What one pass compiles its kernels for. head_dim is a bucket: it serves every head dim up to its size.
template <Family family_, ElementType element_, int head_dim_, Variant variant_ = Variant::plain>
struct Instance {
  static constexpr Family family = family_;
  static constexpr ElementType element = element_;
  static constexpr int head_dim = head_dim_;
  static constexpr Variant variant = variant_;
};

struct ProblemShape {
  int batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim;
};

// A (batch, head, row, column) view with unit column stride; strides count elements.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

struct SoftmaxParams {
  float scale_log2;  // what multiplies the scores, > 0, times log2(e): the kernels work in base 2
};

struct DeviceInfo {
  static constexpr int kMaxDevices = 128;
  int index;  // below kMaxDevices
  int multiprocessors;
  int smem_bytes;  // that a thread block may have
  int64_t l2_bytes;
};

// What is known of a batch of sequences of unequal lengths on the device only; null where it was not given.
// Rows of a packed tensor belong to the sequence whose offsets enclose them, and its batch stride is 0; of a
// padded one, entry b has those of sequence b.
struct LengthParams {
  int const *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  // (batch + 1,) offsets of packed rows
  int const *seqused_q = nullptr, *seqused_k = nullptr;        // (batch,) how many rows count, from the first
  int const* leftpad_k = nullptr;                              // (batch,) how many of these keys do not count
  void* workspace = nullptr;  // ForwardPlan::workspace_bytes, for the list of tiles
  bool given = false;         // else all sequences are alike, as the shape says
};

struct ForwardParams {
  ProblemShape shape;  // seqlen_q, seqlen_k: of packed tensors all rows
  TensorView q, k, v, out;
  float* lse;                // (batch, heads_q, seqlen_q), contiguous; packed: (heads_q, seqlen_q)
  int64_t lse_batch_stride;  // 0 where packed
  SoftmaxParams softmax;
  WindowMask mask;    // of sequences that are all alike; else its limits hold for each
  int element_bytes;  // of q, k, v and out
  DeviceInfo device;
  LengthParams lengths;
};

// What a block of queries asks of its sequence: see sequence_at.
struct QuerySequence {
  int index, first_block, begin, used;
};

// What the backward keeps between its kernels. Sequences begin at whole blocks of queries (see BatchBlocks).
struct BackwardWorkspace {
  // (heads_q, blocks, block_m), in base 2; +inf for rows that see nothing. It and delta may lie where rows of
  // dQ will.
  float* lse = nullptr;
  float* delta = nullptr;  // likewise: dLSE - rowsum(dO O)
  // Instead of both, kTermBytes of each query (see backward/sm90/lse_delta_mma.hpp): in rows of dQ, if that
  // is asked for, until they are written. Of a block of queries the first 1 << log2_terms_of_row lie side by
  // side in its first row, the next in its second.
  TensorView terms;
  int log2_terms_of_row = 0;
  // Sums of dQ, (heads_q, blocks, block_m * head dim of the kernel), as registers lie; null: dQ is not summed
  // up by the kernel for dK and dV.
  float* dq = nullptr;
  // Where parts of a group of query heads have tiles of their own: sums of what these find of dK and dV,
  // (2, heads_kv / splits_of_sum, blocks of keys, block_n * head dim of the kernel), as registers lie. Else
  // null.
  float* gqa_sums = nullptr;
  int64_t floats_of_dk = 0;
  int splits_of_sum = 1;
  // On Hopper, of each warpgroup's part of a block of queries what has become of its sums: see
  // DqAccumulateWriter. Null: they are 0 at first.
  int* additions = nullptr;
  bool ordered = false;  // is dQ added to in one order?
  // Of sequences that differ in length, see varlen_prepare: have all as many blocks of keys as expected? The
  // place of each one's first block of so many keys, and how many places there are; null where places follow
  // from the shape. Of packed ones the offsets, in order and within the totals, that later kernels read.
  int *is_uniform = nullptr, *kv_block_offsets = nullptr, *offsets_q = nullptr, *offsets_k = nullptr;
  int key_block = 0, expected_kv_blocks = 0;
  int* claimed = nullptr;  // tiles that thread blocks of the Hopper family's kernel have taken so far
  // Where that kernel makes rows of dQ itself: how many blocks of queries are taken, and of each pair of a
  // sequence and a head of K and V how often a warpgroup has added all of a tile (see DqConvertOrder). Else
  // null.
  int *taken = nullptr, *finished = nullptr;
  // What is 0 before the first tile, if no kernel sees to it that looks at queries: so many times 16 bytes.
  void* zeros = nullptr;
  int64_t zero_chunks = 0;
};

struct BackwardParams {
  ProblemShape shape;
  int gqa_splits = 1;                         // shape.heads_kv is as many times the heads that K and V have
  int element_bytes;                          // of all operands but lse and dlse
  TensorView q, k, v, out, dout, dq, dk, dv;  // dout.data null: no gradient of out
  float const *lse, *dlse;                    // as ForwardParams::lse; dlse null: no gradient of lse
  int64_t lse_batch_stride;
  float softmax_scale;
  WindowMask mask;
  DeviceInfo device;
  LengthParams lengths;
  BackwardWorkspace workspace;

  FLASH_CUTE_HOST_DEVICE int heads_of_keys() const { return shape.heads_kv / gqa_splits; }

  // As the kernels behind the one that numbers keys see it.
  BackwardParams with_ordered_offsets() const {
    BackwardParams params = *this;
    if (workspace.offsets_q) params.lengths.cu_seqlens_q = workspace.offsets_q;
    if (workspace.offsets_k) params.lengths.cu_seqlens_k = workspace.offsets_k;
    return params;
  }
};

}  // namespace flash_cute
