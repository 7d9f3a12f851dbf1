// What a kernel launch needs, as plain host structs composed by concern. No torch, no CUDA.
#pragma once

#include <cstdint>

#include "flash_cute/core/platform.hpp"

namespace flash_cute {

enum class Pass { forward, backward };
enum class Family { sm80, sm90 };
// split: splits of the keys side by side, and caches in pages; ranges: key ranges of each query.
enum class Variant { plain, split, ranges };
enum class Masking { window, table };  // by a window alone, or by a table of blocks, too
constexpr Masking masking_of(Variant variant) {
  return variant == Variant::ranges ? Masking::table : Masking::window;
}
// What kernels compute with. tf32: float32 in memory, whose products are computed in TF32 (precision="high").
// Attention has kernels for those that instances.def lists.
enum class ElementType { fp16, bf16, fp32, tf32 };

constexpr int element_bytes(ElementType element) {
  return element == ElementType::fp32 || element == ElementType::tf32 ? 4 : 2;
}

// The head dim of q and k, and that of v and out.
struct HeadDims {
  int qk, v;

  constexpr bool operator==(HeadDims const&) const = default;
  constexpr bool holds(HeadDims const& other) const { return other.qk <= qk && other.v <= v; }
};
constexpr HeadDims both(int head_dim) { return {head_dim, head_dim}; }

// What one pass compiles its kernels for. Its head dims are a bucket: it serves all that they hold.
template <Family family_, ElementType element_, int head_dim_, Variant variant_ = Variant::plain,
          int head_dim_v_ = head_dim_>
struct Instance {
  static constexpr Family family = family_;
  static constexpr ElementType element = element_;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_v_;
  static constexpr HeadDims head_dims = {head_dim, head_dim_v};
  static constexpr Variant variant = variant_;
};

struct ProblemShape {
  int batch, heads_q, heads_kv, seqlen_q, seqlen_k;
  int head_dim, head_dim_v;  // of q and k; of v and out

  constexpr HeadDims head_dims() const { return {head_dim, head_dim_v}; }
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
// Rows of a packed tensor belong to the sequence whose offsets enclose them, and its batch stride is 0;
// of a padded one, entry b has those of sequence b.
struct LengthParams {
  int const *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  // (batch + 1,) offsets of packed rows
  int const *seqused_q = nullptr, *seqused_k = nullptr;        // (batch,) how many rows count, from the first
  int const* leftpad_k = nullptr;                              // (batch,) how many of these keys do not count
  bool given = false;                                          // else the batch is uniform, as the shape says
};

// Keys and values in a cache, whose rows are read where they lie. In pages, k and v of ForwardParams are
// (pages, heads, page_size, head_dim).
struct CacheParams {
  bool given = false;
  int const* table = nullptr;  // (batch, table_width) numbers of pages; null where keys are not in pages
  int64_t table_stride = 0;    // from one sequence to the next
  int table_width = 0, pages = 0, page_size = 0;
};

// The keys [begin, end).
struct alignas(8) KeyRange {
  int begin, end;
};

// For each query a few ranges of keys: it sees their union, of what the window leaves. Keys are counted from
// the first row of the sequence.
struct RangeParams {
  int const* given = nullptr;  // (batch or 1, seqlen_q, count, 2), packed (seqlen_q, count, 2)
  int64_t entry_stride = 0;    // from one entry of the batch to the next
  int count = 0;               // of a query; 0 where there are none

  Masking masking() const { return count > 0 ? Masking::table : Masking::window; }
};

// For each query head the logit of a key that every query sees and that has no value.
struct SinkParams {
  void const* logits = nullptr;  // (heads_q,), float32 or of the operands' element; null: none
  bool are_fp32 = true;

  template <class Element>
  FLASH_CUTE_HOST_DEVICE float logit(int head) const {
    return are_fp32 ? static_cast<float const*>(logits)[head]
                    : float(static_cast<Element const*>(logits)[head]);
  }
};

struct ForwardParams {
  ProblemShape shape;  // seqlen_q, seqlen_k: of packed tensors all rows
  int element_bytes;   // of q, k, v and out
  TensorView q, k, v, out;
  float* lse;                // (batch, heads_q, seqlen_q), contiguous; packed: (heads_q, seqlen_q)
  int64_t lse_batch_stride;  // 0 where packed
  SoftmaxParams softmax;
  DeviceInfo device;
  LengthParams lengths;
  CacheParams cache;
  RangeParams ranges;
  bool batch_invariant;  // do a query's results not depend on what is computed beside it?
  SinkParams sinks;

  Masking masking() const { return ranges.masking(); }
};

}  // namespace flash_cute
