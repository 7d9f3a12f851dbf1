// The one place where the arguments of the forward are checked and their defaults filled in.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "flash_cute/params.hpp"

namespace flash_cute {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

// The arguments of a call beside its tensors, as they came; nullopt means "the default".
struct ForwardOptions {
  bool causal;
  std::optional<double> softmax_scale;
  std::optional<int64_t> window_left, window_right;
  std::optional<std::string> family;
};

struct ForwardArguments {
  Tensor q, k, v;  // (batch, heads, seqlen, head_dim)
  ForwardOptions options;
};

// What is checked of a tensor; one that is only traced has it, too.
struct Operand {
  char const* name;
  IntHeaderOnlyArrayRef sizes;
  ScalarType type;
  Device device;
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
ForwardProblem validate(Operand const& q, Operand const& k, Operand const& v, ForwardOptions const& options);
ForwardProblem validate(ForwardArguments const& arguments);

char const* name_of(Family family);
char const* name_of(ElementType element);
std::string name_of(Device const& device);

}  // namespace flash_cute
