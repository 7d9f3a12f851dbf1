#include "validate.hpp"

#include <cmath>
#include <iterator>

namespace flash_cute {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kMaxHeadDim = 256;
// Sums of sequence lengths and window limits, and tile counts, stay within int.
constexpr int64_t kMaxLength = int64_t(1) << 28;

struct NamedTensor {
  char const* name;
  Tensor const& tensor;
};

// Writes a tensor's shape, and costs nothing until an error is written.
struct ShapeOf {
  Tensor const& tensor;

  friend std::ostream& operator<<(std::ostream& text, ShapeOf const& shape) {
    char const* separator = "(";
    for (int64_t const size : shape.tensor.sizes()) {
      text << separator << size;
      separator = ", ";
    }
    return text << ')';
  }
};

ElementType element_type(NamedTensor const& q) {
  ScalarType const type = q.tensor.scalar_type();
  require(type == ScalarType::Half || type == ScalarType::BFloat16, "q has a dtype that is not supported; ",
          "torch.float16 and torch.bfloat16 are");
  return type == ScalarType::Half ? ElementType::fp16 : ElementType::bf16;
}

std::optional<Family> family_named(std::optional<std::string> const& name) {
  if (!name) return std::nullopt;
  for (Family const family : {Family::sm80, Family::sm90}) {
    if (*name == name_of(family)) return family;
  }
  require(false, "family is '", *name, "'; 'sm80', 'sm90' or None is accepted");
  return std::nullopt;
}

void require_limit(char const* name, std::optional<int64_t> limit) {
  require(!limit || *limit >= 0, name, " is ", limit.value_or(0),
          "; a number of keys >= 0, or None for no limit, is accepted");
}

}  // namespace

char const* name_of(Family family) { return family == Family::sm80 ? "sm80" : "sm90"; }
char const* name_of(ElementType element) { return element == ElementType::fp16 ? "fp16" : "bf16"; }

ForwardProblem validate(ForwardArguments const& arguments) {
  NamedTensor const q{"q", arguments.q}, k{"k", arguments.k}, v{"v", arguments.v};
  for (auto const& [name, tensor] : {q, k, v}) {
    require(tensor.dim() == 4, name, " has ", tensor.dim(),
            " dimensions; 4, (batch, heads, seqlen, head_dim), are accepted");
  }
  ElementType const element = element_type(q);
  for (auto const& [name, tensor] : {k, v}) {
    require(tensor.scalar_type() == q.tensor.scalar_type(), name,
            " has another dtype than q; all three must be alike");
    require(tensor.device() == q.tensor.device(), name,
            " is on another device than q; all three must be on one");
  }

  auto const sizes_q = q.tensor.sizes(), sizes_k = k.tensor.sizes(), sizes_v = v.tensor.sizes();
  for (int dim = 0; dim < 4; ++dim) {
    require(sizes_v[dim] == sizes_k[dim], "v has shape ", ShapeOf{v.tensor}, " and k ", ShapeOf{k.tensor},
            "; they must be the same");
  }
  int64_t const head_dim = sizes_q[3];
  require(sizes_k[0] == sizes_q[0], "k has batch ", sizes_k[0], " and q ", sizes_q[0],
          "; they must be the same");
  require(sizes_k[3] == head_dim, "k has head_dim ", sizes_k[3], " and q ", head_dim,
          "; they must be the same");
  require(head_dim >= 1 && head_dim <= kMaxHeadDim, "head_dim is ", head_dim, "; 1 to ", kMaxHeadDim,
          " are accepted");
  require(sizes_q[1] == sizes_k[1] || (sizes_k[1] > 0 && sizes_q[1] % sizes_k[1] == 0), "q has ", sizes_q[1],
          " heads and k ", sizes_k[1], "; the heads of q must be a multiple of those of k");
  for (auto const& [name, tensor] : {q, k}) {
    require(tensor.sizes()[2] <= kMaxLength, name, " has seqlen ", tensor.sizes()[2], "; at most ",
            kMaxLength, " is accepted");
  }
  require(sizes_q[0] * sizes_q[1] <= kMaxLength, "q has ", sizes_q[0] * sizes_q[1],
          " (batch, head) pairs; at most ", kMaxLength, " are accepted");

  double const scale = arguments.softmax_scale.value_or(1.0 / std::sqrt(double(head_dim)));
  require(std::isfinite(float(scale)) && float(scale) > 0.f, "softmax_scale is ", scale,
          "; a finite number > 0 is accepted");
  require_limit("window's left limit", arguments.window_left);
  require_limit("window's right limit", arguments.window_right);

  return {
      .shape = {int(sizes_q[0]), int(sizes_q[1]), int(sizes_k[1]), int(sizes_q[2]), int(sizes_k[2]),
                int(head_dim)},
      .element = element,
      .softmax_scale = float(scale),
      .window_left = arguments.window_left,
      .window_right = arguments.causal ? std::optional<int64_t>(0) : arguments.window_right,
      .family = family_named(arguments.family),
  };
}

}  // namespace flash_cute
