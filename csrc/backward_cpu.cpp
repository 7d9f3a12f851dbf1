// The backward on the CPU, in float32, by PyTorch's own CPU flash attention (flash_cute/cpu.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>

#include "backward.hpp"
#include "plan.hpp"

namespace flash_cute {

BackwardResult backward_cpu(BackwardArguments const& arguments) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AttentionProblem const problem = validate(arguments);
  auto const& [q, k, v, options, lengths] = arguments.attention;
  std::array stack{from(arguments.dout),
                   from(arguments.dlse),
                   from(q),
                   from(k),
                   from(v),
                   from(arguments.out),
                   from(arguments.lse),
                   from(double(problem.softmax_scale)),
                   from(problem.window_left.value_or(-1)),
                   from(problem.window_right.value_or(-1)),
                   from(lengths.offsets_q()),
                   from(lengths.offsets_k()),
                   from(lengths.seqused_q),
                   from(lengths.seqused_k),
                   from(lengths.leftpad_k)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("flash_cute::_backward_cpu", "", stack.data(), TORCH_ABI_VERSION));
  auto gradient = [](StableIValue value, bool needed) {
    Tensor const computed = to<Tensor>(value);
    return needed ? computed : torch::stable::new_empty(computed, {0});
  };
  return {gradient(stack[0], arguments.needs_dq), gradient(stack[1], arguments.needs_dkv),
          gradient(stack[2], arguments.needs_dkv)};
}

std::string backward_plan_cpu(BackwardArguments const& arguments) {
  JsonObject plan;
  plan.add("family", "cpu").add("copies", std::vector<std::string>{}).add("workspace_bytes", 0);
  return add_backward_problem(plan, validate(arguments.attention)).text();
}

}  // namespace flash_cute
