// The forward on the CPU: checked here, computed by PyTorch's own operators (flash_cute/cpu.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>

#include "forward.hpp"
#include "plan.hpp"

namespace flash_cute {
ForwardResult forward_cpu(ForwardArguments const& arguments) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  ForwardProblem const problem = validate(arguments);
  Lengths const& lengths = arguments.lengths;
  std::array stack{from(arguments.q),
                   from(arguments.k),
                   from(arguments.v),
                   from(double(problem.softmax_scale)),
                   from(problem.window_left.value_or(-1)),
                   from(problem.window_right.value_or(-1)),
                   from(lengths.offsets_q()),
                   from(lengths.offsets_k()),
                   from(lengths.seqused_q),
                   from(lengths.seqused_k),
                   from(lengths.leftpad_k)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("flash_cute::_forward_cpu", "", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

std::string plan_cpu(ForwardArguments const& arguments) {
  JsonObject plan;
  plan.add("family", "cpu").add("copies", std::vector<std::string>{});
  return add_problem(plan, validate(arguments)).text();
}

}  // namespace flash_cute
