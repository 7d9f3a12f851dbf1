// The forward on each kind of device, behind one set of arguments.
#pragma once

#include <tuple>
#include <vector>

#include "validate.hpp"

namespace flash_cute {

// out like q, or the tensor that was given for it; lse float32 (batch, heads_q, seqlen_q); packed: (heads_q,
// total_q).
using ForwardResult = std::tuple<Tensor, Tensor>;

ForwardResult forward_cuda(AttentionArguments const& arguments);

// out and lse where the CPU can compute them in q's own type, exactly enough; else nothing.
std::vector<Tensor> forward_cpu(AttentionArguments const& arguments);

// JSON: what forward would run with these arguments. Nothing is launched.
std::string plan_cuda(AttentionArguments const& arguments);
std::string plan_cpu(AttentionArguments const& arguments);

// JSON: every instance of this build, those of the forward with their tiles.
std::string compiled_kernels();

}  // namespace flash_cute
