// The one place where the arguments of both passes are checked and their defaults filled in.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "operand.hpp"

namespace flash_cute {

// The arguments of a call beside its tensors, as they came; nullopt means "the default".
struct AttentionOptions {
  bool causal;
  std::optional<double> softmax_scale;
  std::optional<int64_t> window_left, window_right;
  std::optional<std::string> family;
  bool batch_invariant = false;
  bool tf32 = false;  // for float32: products of TF32, not exact ones
  double softcap = 0, dropout_p = 0;
  double bias_scale = 1;  // multiplies the bias
};

// Where each sequence lies and how much of it counts, in int32 on q's device; what is not given holds for
// all. A sequence's rows are offsets[b] .. offsets[b + 1] - 1 of a packed tensor, all of entry b of a padded
// one.
struct Lengths {
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k;  // (batch + 1,) offsets; packed with the first
  std::optional<Tensor> seqused_q, seqused_k;        // (batch,) how many rows count, from the first
  std::optional<Tensor> leftpad_k;                   // (batch,) how many of those keys do not, at the begin
  std::optional<Tensor> block_table = {};            // (batch, max_pages) pages of a cache
};

struct AttentionArguments {
  // (batch, heads, seqlen, head_dim); packed: (total, heads, head_dim), or a cache of k and v beside packed
  // queries. In pages, k and v are (pages, heads, page_size, head_dim). v may have a head_dim of its own.
  Tensor q, k, v;
  AttentionOptions options;
  Lengths lengths = {};
  // int32 (batch or 1, 1, seqlen_q, R, 2), packed (total_q, R, 2): the keys that each query sees
  std::optional<Tensor> ranges = {};
  std::optional<Tensor> out = {};    // that a forward writes into
  std::optional<Tensor> sinks = {};  // (heads_q,), float32 or q's type
  // bool (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k), or uint8 with 8 keys a byte, key j in bit j %
  // 8; beside seqused_k or block_table fewer columns are those of the last keys of each sequence
  std::optional<Tensor> mask = {};
  // q's type, (g, heads_q or 1, seqlen_q or 1, seqlen_k or 1), entry n / (batch / g) of it for sequence n
  std::optional<Tensor> bias = {};
  std::optional<Tensor> alibi_slopes = {};  // float32 (heads_q,) or (batch, heads_q)
  std::optional<Tensor> dropout_seed = {};  // int64 (2,)
  // float32 (), (heads_kv,) or (batch, heads_kv): what the numbers of a cache of 8 bits are multiplied by
  std::optional<Tensor> k_scale = {}, v_scale = {};

  bool packed() const { return lengths.cu_seqlens_q.has_value(); }
};

constexpr int64_t kMaxHeadDim = 256;

// Those of Lengths, in its order.
using LengthOperands = std::array<std::optional<Operand>, 6>;
inline constexpr char const* kLengthNames[] = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q",
                                               "seqused_k",    "leftpad_k",    "block_table"};

// What changes scores and weights: mask, bias, alibi_slopes, dropout_seed.
using ScoreOperands = std::array<std::optional<Operand>, 4>;
inline constexpr char const* kScoreNames[] = {"mask", "bias", "alibi_slopes", "dropout_seed"};

// Those of a cache of 8 bits.
using ScaleOperands = std::array<std::optional<Operand>, 2>;
inline constexpr char const* kScaleNames[] = {"k_scale", "v_scale"};

// Throws if the call makes no sense: the sentence names the argument, what it was, and what is accepted.
// Values of lengths are not looked at: they are on the device.
AttentionProblem validate(Operand const& q, Operand const& k, Operand const& v,
                          AttentionOptions const& options, LengthOperands const& lengths,
                          std::optional<Operand> const& ranges = {}, ScoreOperands const& scores = {},
                          ScaleOperands const& scales = {});
AttentionProblem validate(AttentionArguments const& arguments);

// Those that a backward has besides: out and lse of its forward, and their gradients, of which one may be
// missing.
using BackwardOperands = std::array<std::optional<Operand>, 4>;
inline constexpr char const* kBackwardNames[] = {"out", "lse", "dout", "dlse"};

// The shape of out: q's, with the head_dim of v.
class SizesOfOut {
 public:
  SizesOfOut(Operand const& q, Operand const& v);
  IntHeaderOnlyArrayRef get() const { return {sizes_.data(), count_}; }

 private:
  std::array<int64_t, 4> sizes_{};
  size_t count_;
};

// Throws if a forward's result can't be written into `out`.
void validate_out(Operand const& q, Operand const& v, Operand const& out);

// Throws if there is not a sink for each head of q.
void validate_sinks(Operand const& q, Operand const& sinks);

// Throws if scales are not what a cache of 8 bits, of such a shape, may have; names: of tensors in errors.
void validate_scale(Operand const& scale, Operand const& k_cache, int64_t batch, int64_t heads_kv);

// Throws if a backward has too many keys for its tiles, where a forward counts none of them, or no keys that
// it reads.
void validate_keys_of_backward(AttentionProblem const& problem);

// Throws if these do not belong to q and v, packed or not.
void validate_results(Operand const& q, Operand const& v, bool packed, BackwardOperands const& operands);
// Likewise, and if there is neither dout nor dlse.
void validate_backward(Operand const& q, Operand const& v, bool packed, BackwardOperands const& operands);

}  // namespace flash_cute
