// The forward on the CPU, by PyTorch's own CPU flash attention: here in the inputs' 16-bit type, where that
// is as exact as promised. Else flash_cute/_cpu/forward.py, which calls this, computes in float32.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "forward.hpp"
#include "json.hpp"

namespace flash_cute {
namespace {

// PyTorch's kernel for 16-bit types has a cheaper exp(), which leaves up to 6e-5 in the LSE. The tolerance
// has room for that where plain PyTorch in the same type has scores to round: scores of this size (root mean
// square of the scaled ones), not all of them exact in that type. A sample decides.
constexpr double kLargeScores = 0.3;

template <class Element>
bool are_scores_rounded(Tensor const& q, Tensor const& k, double softmax_scale) {
  constexpr int64_t kHeads = 16, kRows = 4;  // that are sampled
  using Rows = std::array<std::array<float, kMaxHeadDim>, kRows>;
  int64_t const head_dim = q.size(3);  // asking a tensor is a call, too slow for inner loops
  auto read = [head_dim](Tensor const& x, int64_t batch, int64_t head, Rows& rows) {
    auto const* const data = static_cast<Element const*>(x.const_data_ptr());
    int64_t const count = smaller(kRows, x.size(2));
    for (int64_t i = 0; i < count; ++i) {
      int64_t const row = (2 * i + 1) * x.size(2) / (2 * count);
      auto const* const source = data + batch * x.stride(0) + head * x.stride(1) + row * x.stride(2);
      for (int64_t d = 0; d < head_dim; ++d) rows[i][d] = source[d];
    }
    return count;
  };
  int64_t const heads = q.size(0) * q.size(1), group = q.size(1) / k.size(1);
  int64_t const sampled = smaller(kHeads, heads);
  Rows rows_q, rows_k;
  double squares = 0;
  int64_t scores = 0;
  bool exact = true;
  for (int64_t i = 0; i < sampled; ++i) {
    int64_t const index = i * heads / sampled, batch = index / q.size(1), head = index % q.size(1);
    int64_t const count_q = read(q, batch, head, rows_q), count_k = read(k, batch, head / group, rows_k);
    for (int64_t row = 0; row < count_q; ++row) {
      for (int64_t key = 0; key < count_k; ++key) {
        float score = 0;
        for (int64_t d = 0; d < head_dim; ++d) score += rows_q[row][d] * rows_k[key][d];
        exact = exact && float(Element(score)) == score;
        squares += double(score) * score;
        ++scores;
      }
    }
  }
  return !exact && softmax_scale * std::sqrt(squares / double(scores)) >= kLargeScores;
}

// Copies an LSE and tells whether all of it can be trusted: PyTorch's kernel gives 0 to rows whose scores are
// all -inf, or NaN.
bool copy_lse(Tensor const& source, Tensor& target) {
  auto const* const from = static_cast<float const*>(source.const_data_ptr());
  auto* to = static_cast<float*>(target.mutable_data_ptr());
  int64_t const step = source.stride(2), rows = source.size(2);
  bool trusted = true;
  for (int64_t batch = 0; batch < source.size(0); ++batch) {
    for (int64_t head = 0; head < source.size(1); ++head) {
      auto const* const first = from + batch * source.stride(0) + head * source.stride(1);
      for (int64_t row = 0; row < rows; ++row) {
        float const value = first[row * step], size = std::fabs(value);
        trusted = trusted && size > 0 && size < std::numeric_limits<float>::infinity();
        *to++ = value;
      }
    }
  }
  return trusted;
}

// The result in q's own type; empty where that is not possible, or not exact enough.
std::vector<Tensor> forward_in_own_type(AttentionArguments const& arguments,
                                        AttentionProblem const& problem) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  if (element_bytes(problem.element) == sizeof(float)) return {};
  if (problem.varlen || problem.is_general()) return {};
  if (problem.shape.head_dim != problem.shape.head_dim_v) return {};
  if (arguments.q.numel() == 0 || arguments.k.numel() == 0) return {};
  WindowMask const mask = problem.mask();
  bool const full_to_the_left = mask.left >= mask.seqlen_k - 1;
  bool const full = full_to_the_left && mask.right >= mask.seqlen_q - 1;
  // PyTorch's causal mask is aligned top left, which is ours in a square.
  bool const causal = full_to_the_left && mask.right == 0 && mask.shift() == 0;
  if (!(full || causal)) return {};
  // PyTorch's kernel wants rows without gaps, in out too, which it makes like q: of overlapping ones where
  // another dimension goes by steps of 1 as well it would have gaps.
  auto without_gaps = [](Tensor const& x) {
    bool is_plain = x.stride(3) == 1;
    for (int64_t dim = 0; dim < 3; ++dim) is_plain = is_plain && (x.size(dim) == 1 || x.stride(dim) != 1);
    return is_plain ? x : torch::stable::contiguous(x);
  };
  Tensor const q = without_gaps(arguments.q), k = without_gaps(arguments.k), v = without_gaps(arguments.v);
  double const scale = problem.softmax_scale;
  bool const rounded = problem.element == ElementType::bf16
                           ? are_scores_rounded<torch::headeronly::BFloat16>(q, k, scale)
                           : are_scores_rounded<torch::headeronly::Half>(q, k, scale);
  if (!rounded) return {};

  std::array stack{from(q),
                   from(k),
                   from(v),
                   from(0.0),
                   from(!full),
                   from(std::optional<Tensor>()),
                   from(std::optional<double>(scale))};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_scaled_dot_product_flash_attention_for_cpu", "",
                                               stack.data(), TORCH_ABI_VERSION));
  Tensor const out = to<Tensor>(stack[0]), strided_lse = to<Tensor>(stack[1]);
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  if (!copy_lse(strided_lse, lse)) return {};
  Tensor like_q = torch::stable::empty_like(arguments.q);
  if (std::ranges::equal(out.strides(), like_q.strides())) return {out, lse};
  torch::stable::copy_(like_q, out);
  return {like_q, lse};
}

}  // namespace

std::vector<Tensor> forward_cpu(AttentionArguments const& arguments) {
  AttentionProblem const problem = validate(arguments);
  try {
    return forward_in_own_type(arguments, problem);
  } catch (std::runtime_error const&) {  // of torch, whose operators refuse nothing else that is valid
    refuse("out of memory: out, which takes ", arguments.q.numel() * element_bytes(problem.element),
           " bytes, lse or copies could not be allocated on the CPU");
  }
}

std::string plan_cpu(AttentionArguments const& arguments) {
  JsonObject plan;
  plan.add("family", "cpu").add("copies", std::vector<std::string>{});
  return add_problem(plan, validate(arguments)).text();
}

}  // namespace flash_cute
