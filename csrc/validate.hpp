// The one place where the arguments of the forward are checked and their defaults filled in.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "flash_cute/params.hpp"

namespace flash_cute {

using torch::stable::Tensor;

// The call as it came; nullopt means "the default".
struct ForwardArguments {
  Tensor q, k, v;  // (batch, heads, seqlen, head_dim)
  bool causal;
  std::optional<double> softmax_scale;
  std::optional<int64_t> window_left, window_right;
  std::optional<std::string> family;
};

// The call once it is known to make sense.
struct ForwardProblem {
  ProblemShape shape;
  ElementType element;
  float softmax_scale;
  std::optional<int64_t> window_left, window_right;  // nullopt: unlimited; causal is right = 0
  std::optional<Family> family;                      // nullopt: the device decides

  WindowMask mask() const {
    int64_t const unlimited = int64_t(shape.seqlen_q) + shape.seqlen_k;
    return WindowMask::make(shape.seqlen_q, shape.seqlen_k, window_left.value_or(unlimited),
                            window_right.value_or(unlimited));
  }
};

// Every error of the library is one sentence; torch turns it into a Python exception.
template <class... Parts>
void require(bool condition, Parts const&... parts) {
  if (condition) return;
  std::ostringstream message;
  message << "flash_cute.forward: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Throws if the call makes no sense: the sentence names the argument, what it was, and what is accepted.
ForwardProblem validate(ForwardArguments const& arguments);

char const* name_of(Family family);
char const* name_of(ElementType element);

}  // namespace flash_cute
