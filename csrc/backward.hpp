// The backward on each kind of device, behind one set of arguments.
#pragma once

#include <tuple>

#include "validate.hpp"

namespace flash_cute {

struct BackwardArguments {
  AttentionArguments attention;      // those of the forward
  Tensor out, lse;                   // what it returned; undefined where only a plan is asked for
  std::optional<Tensor> dout, dlse;  // null: that result had no gradient; at least one of them is there
  bool needs_dq, needs_dkv;          // a gradient that is not needed comes back empty
  bool deterministic;                // the same bits each time
  bool needs_dv;                     // beside the gradient of a bias that has a number for each pair
};

// dq, dk, dv, dsinks as torch.empty_like of q, k, v, sinks; of those not needed, or not there, (0,).
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

BackwardResult backward_cuda(BackwardArguments const& arguments);

// The gradient of the bias, contiguous, in its shape and type: of each number the sum over all pairs that it
// is added to. And dv, contiguous, or (0,): a product of PyTorch's with the weights, which are stored for it.
// needs_dq, needs_dkv and deterministic say nothing of them.
std::tuple<Tensor, Tensor> bias_gradient_cuda(BackwardArguments const& arguments);

// softmax(scores) of all pairs, before dropout, (batch, heads_q, seqlen_q, seqlen_k), of q's type and
// contiguous; 0 where a pair is hidden. Of the arguments it reads q, k, lse and what says which scores.
Tensor weights_cuda(BackwardArguments const& arguments);

// JSON: what backward would run with these arguments. Nothing is launched.
std::string backward_plan_cuda(BackwardArguments const& arguments);
std::string backward_plan_cpu(BackwardArguments const& arguments);

// As validate of the forward's arguments, and then of the others.
AttentionProblem validate(BackwardArguments const& arguments);
// Throws without a bias, too, or if dv is asked for beside one that several pairs share.
AttentionProblem validate_bias_gradient(BackwardArguments const& arguments);
// Of lse alone beside the forward's.
AttentionProblem validate_weights(BackwardArguments const& arguments);

}  // namespace flash_cute
