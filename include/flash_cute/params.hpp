// What a kernel launch needs, as plain host structs composed by concern. No torch, no CUDA.
#pragma once

#include <cmath>
#include <cstdint>

#include "flash_cute/core/platform.hpp"

namespace flash_cute {

enum class Pass { forward, backward };
enum class Family { sm80, sm90 };
// split: splits of the keys side by side, and caches in pages; general: whatever hides pairs or changes their
// scores beside a window.
enum class Variant { plain, split, general };
enum class Masking { window, table };  // by a window alone, or by a table of blocks, too
constexpr Masking masking_of(Variant variant) {
  return variant == Variant::general ? Masking::table : Masking::window;
}
// Products of Q and K, scaled; the same with any pairs hidden; or what ScoreParams say, too.
enum class Scores { product, hidden, general };
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

// What a number of a cache of 8 bits is multiplied by, for each sequence and head of K and V. Strides are 0
// where one entry stands for all.
struct CacheScale {
  float const* data = nullptr;  // null: 1
  int64_t entry_stride = 0, head_stride = 0;

  FLASH_CUTE_HOST_DEVICE float of(int entry, int head_kv) const {
    return data ? data[entry * entry_stride + head_kv * head_stride] : 1.f;
  }
};

// Keys and values in a cache, whose rows are read where they lie. In pages, k and v of ForwardParams are
// (pages, heads, page_size, head_dim).
struct CacheParams {
  bool given = false;
  int const* table = nullptr;  // (batch, table_width) numbers of pages; null where keys are not in pages
  int64_t table_stride = 0;    // from one sequence to the next
  int table_width = 0, pages = 0, page_size = 0;
  bool is_fp8 = false;  // numbers of k and v are codes of e4m3, times their scales
  CacheScale k_scale = {}, v_scale = {};
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
};

// For each pair of a query and a key, does the query see the key? Strides count bytes and are 0 where one
// entry stands for all.
struct PairMaskParams {
  uint8_t const* data = nullptr;
  bool given = false, is_packed = false;  // packed: key j is bit j % 8 of byte j / 8; else a byte each
  int entries = 1, heads = 1, rows = 1;   // that differ: 1, or all of the batch, of q's heads, of its rows
  int columns = 0;                        // keys, the last ones of a sequence where it has more
  int64_t entry_stride = 0, head_stride = 0, row_stride = 0, byte_stride = 0;
};

// What is added to the score of a pair, of the operands' element. Strides count elements and are 0 where one
// entry stands for all.
struct BiasParams {
  void const* data = nullptr;
  bool given = false;
  bool is_tiled = false;       // does TMA load tiles? Else threads load what they need, of any strides
  int sequences_of_entry = 1;  // sequence n reads entry n / sequences_of_entry
  int rows = 0, columns = 0;   // that there are, at least one
  int64_t entry_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
};

// Of 4096 pairs so many are kept, by a generator that counts places (attention/scores/dropout.hpp).
struct DropoutParams {
  static constexpr int kAll = 4096;
  int64_t const* seed = nullptr;  // (2,)
  int keep = kAll;
  float inverse_keep = 1;  // kAll / keep

  constexpr bool drops() const { return keep < kAll; }
};

// x = softcap tanh(scale S / softcap) + bias_scale bias - slope |distance|, of S = Q K^T, and dropout of the
// weights.
// Kernels compute with scores that stand for `unit` each, so that S is one.
struct ScoreParams {
  float scale = 1;    // softmax_scale
  float softcap = 0;  // 0: none
  bool has_slopes = false;
  float const* slopes = nullptr;  // (batch or 1, heads_q)
  int slopes_stride = 0;          // from one sequence's to the next's
  float bias_scale = 1;
  BiasParams bias;
  DropoutParams dropout;
  // Of the backward: rows whose LSE names how many keys have a bias of its lowest number
  // (attention/scores/lowest.hpp).
  struct {
    int const* exist = nullptr;
    float const* lse = nullptr;
    int64_t lse_batch_stride = 0;
    int seqlen_q = 0;
  } lowest = {};
  // Of these, as derive() sets them.
  float unit = 1, inverse_unit = 1;
  float of_tanh = 0;  // scale / softcap
  float of_bias = 1;  // bias_scale / unit
  float lowest_score = 0;

  ScoreParams derive() const {
    ScoreParams derived = *this;
    derived.unit = softcap > 0 ? softcap : scale;
    derived.inverse_unit = 1 / derived.unit;
    derived.of_tanh = softcap > 0 ? scale / softcap : 0;
    derived.of_bias = bias_scale / derived.unit;
    // Lower ones, but -inf, become this one: a power of two, so that in base 2 it is exact, and what rounding
    // leaves of a higher one beside itself is a number that exp2 can take.
    derived.lowest_score = -std::exp2(std::floor(30 - std::log2(derived.unit)));
    derived.dropout.inverse_keep = float(DropoutParams::kAll) / float(dropout.keep);
    return derived;
  }
  FLASH_CUTE_HOST_DEVICE bool change() const { return softcap > 0 || has_slopes || bias.given; }
  bool any() const { return change() || dropout.drops(); }
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

inline Scores scores_of(PairMaskParams const& pair_mask, ScoreParams const& scores) {
  return scores.any() ? Scores::general : pair_mask.given ? Scores::hidden : Scores::product;
}
inline Masking masking_of(RangeParams const& ranges, PairMaskParams const& pair_mask,
                          ScoreParams const& scores) {
  bool const are_products = scores_of(pair_mask, scores) == Scores::product;
  return ranges.count == 0 && are_products ? Masking::window : Masking::table;
}

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
  PairMaskParams pair_mask;
  ScoreParams scores;

  Masking masking() const { return masking_of(ranges, pair_mask, scores); }
  Scores asked_scores() const { return scores_of(pair_mask, scores); }
  // Words of dropout and tiles of a bias are those of a head, and so are the blocks that a mask of pairs
  // leaves.
  bool has_one_head_a_tile() const {
    return scores.dropout.drops() || scores.bias.given || pair_mask.heads > 1;
  }
};

}  // namespace flash_cute
