// A call of attention once it is known to make sense, for every face, and how errors are raised. No torch.
#pragma once

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// Every error of the library is one sentence. Its face makes an exception of Python's or JAX's of it, and
// puts the function that was called in place of this, by which it knows that the error is the library's.
inline constexpr char kErrorPrefix[] = "flash_cute: ";

template <class... Parts>
[[noreturn]] void refuse(Parts const&... parts) {
  std::ostringstream message;
  message << kErrorPrefix;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

template <class... Parts>
void require(bool condition, Parts const&... parts) {
  if (!condition) refuse(parts...);
}

// Throws for a tensor on a GPU where there are no kernels.
[[noreturn]] inline void refuse_gpu(char const* name) {
  refuse(name,
         " is on a GPU, but this flash_cute was built without CUDA; install it again where torch has CUDA "
         "and without FLASH_CUTE_CPU_ONLY");
}

struct AttentionProblem {
  ProblemShape shape;  // packed: seqlen_q and seqlen_k are the totals of all sequences
  ElementType element;
  float softmax_scale;
  std::optional<int64_t> window_left, window_right;  // nullopt: unlimited; causal is right = 0
  std::optional<Family> family;                      // nullopt: the device decides
  bool packed;                                       // the sequences lie one behind the other
  bool varlen;                                       // tensors of lengths were given, packed or not
  bool cached = false;                               // k and v are a cache, which is never copied
  int pages = 0, page_size = 0;                      // of a cache in pages
  bool is_fp8 = false;                               // a cache of codes of 8 bits
  bool batch_invariant = false;
  int ranges = 0;  // of keys that each query sees, cut by the rest of the mask; 0: it sees all of them
  // Without memory: what a plan asks of them.
  PairMaskParams pair_mask = {};
  ScoreParams scores = {};

  // Is there anything beside the scale, a window, lengths and sinks?
  bool is_general() const { return masking_of(ranges_params(), pair_mask, scores) == Masking::table; }
  RangeParams ranges_params() const { return {.count = ranges}; }

  // That of sequences which are all as long as the shape says.
  WindowMask mask() const {
    int64_t const unlimited = int64_t(shape.seqlen_q) + shape.seqlen_k;
    return WindowMask::make(shape.seqlen_q, shape.seqlen_k, window_left.value_or(unlimited),
                            window_right.value_or(unlimited));
  }
};

// Can tiles of a bias begin at multiples of eight keys, as TMA asks? Counted from the first key that counts,
// or from the first one that a window leaves, they may begin anywhere.
inline bool has_bias_tiles(AttentionProblem const& problem, bool has_used, bool has_leftpad) {
  if (has_leftpad) return false;
  return !problem.window_left || (!has_used && problem.mask().first_reachable_key() == 0);
}

inline char const* name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }
inline char const* name_of(Variant variant) {
  return variant == Variant::plain ? "plain" : variant == Variant::split ? "split" : "general";
}
inline char const* name_of(Family family) { return family == Family::sm80 ? "sm80" : "sm90"; }
inline char const* name_of(ElementType element) {
  switch (element) {
    case ElementType::fp16: return "fp16";
    case ElementType::bf16: return "bf16";
    case ElementType::tf32: return "tf32";
    default: return "fp32";
  }
}

constexpr int64_t kMaxMaskHeads = 65535;  // a grid's second dimension

// Sums of sequence lengths and window limits, and tile counts, stay within int.
constexpr int64_t kMaxLength = int64_t(1) << 28;

constexpr int kRowAlignment = 16;  // bytes; every row of an operand starts at a multiple of it

// head_dim with the columns of 0 that make rows a multiple of it.
inline int padded_head_dim(int64_t head_dim, int element_bytes) {
  int64_t const elements = kRowAlignment / element_bytes;
  return int(ceil_div(head_dim, elements) * elements);
}

}  // namespace flash_cute
