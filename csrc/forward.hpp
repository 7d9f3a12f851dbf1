// The forward on each kind of device, behind one set of arguments.
#pragma once

#include <tuple>

#include "validate.hpp"

namespace flash_cute {

using ForwardResult = std::tuple<Tensor, Tensor>;  // out like q, lse (batch, heads_q, seqlen_q) float32

ForwardResult forward_cuda(ForwardArguments const& arguments);
ForwardResult forward_cpu(ForwardArguments const& arguments);

// JSON: what forward would run with these arguments. Nothing is launched.
std::string plan_cuda(ForwardArguments const& arguments);
std::string plan_cpu(ForwardArguments const& arguments);

// JSON: every kernel in this build.
std::string compiled_kernels();

}  // namespace flash_cute
