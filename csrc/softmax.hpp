// Softmax over the last dimension, on each kind of device, behind one set of arguments.
#pragma once

#include <tuple>

#include "flash_cute/softmax/params.hpp"
#include "validate.hpp"

namespace flash_cute {

// What is beside the tensor itself; see ColumnMask.
struct SoftmaxOptions {
  double scale;
  bool causal;
  std::optional<Tensor> seqused_k, leftpad_k;
};

// probabilities: of x's shape and dtype, contiguous; lse: float32, without the last dimension.
using SoftmaxResult = std::tuple<Tensor, Tensor>;

SoftmaxResult softmax_cuda(Tensor const& x, SoftmaxOptions const& options);
// The gradient of x, contiguous; null: that result had no gradient. kept: x, or probabilities (keeps_scores).
Tensor softmax_backward_cuda(std::optional<Tensor> const& dprobabilities, std::optional<Tensor> const& dlse,
                             Tensor const& kept, SoftmaxOptions const& options);

// Throws if the call makes no sense, as validate of attention does. Values of lengths are not looked at.
void validate_softmax(Operand const& x, double scale, bool causal, std::optional<Operand> const& seqused_k,
                      std::optional<Operand> const& leftpad_k);

// Throws if these gradients do not belong to what was kept.
void validate_softmax_backward(Operand const& kept, std::optional<Operand> const& dprobabilities,
                               std::optional<Operand> const& dlse);

// x as (batch, heads, rows, columns): rows and columns are its last dimensions, and batch is its first where
// lengths are given.
ScoreShape score_shape(IntHeaderOnlyArrayRef sizes, bool has_lengths);

}  // namespace flash_cute
