// What explain tells of the backward on the CPU, which flash_cute/_cpu/backward.py computes.
#include "backward.hpp"
#include "json.hpp"

namespace flash_cute {

std::string backward_plan_cpu(BackwardArguments const& arguments) {
  AttentionProblem const problem = validate(arguments.attention);
  validate_keys_of_backward(problem);
  JsonObject plan;
  plan.add("family", "cpu").add("copies", std::vector<std::string>{}).add("workspace_bytes", 0);
  if (arguments.attention.bias)
    plan.add_raw("bias_gradient", JsonObject().add("family", "cpu").add("workspace_bytes", 0).text());
  return add_problem(plan, problem).text();
}

}  // namespace flash_cute
