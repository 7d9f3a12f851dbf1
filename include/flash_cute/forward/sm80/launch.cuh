// Launches the Ampere family's forward.
#pragma once

#include "flash_cute/forward/launch.hpp"
#include "flash_cute/forward/sm80/kernel.hpp"
#include "flash_cute/scheduler/varlen_prepare.cuh"

namespace flash_cute {

template <class Instance>
using TraitsOf = ForwardTraitsSm80<Instance, forward_tiles(Instance::family, Instance::head_dim).main>;

// Calls visitor(traits, type of the problem) for the kernel that a plan names.
template <class Instance, class Visitor>
auto visit_kernel_sm80(ForwardPlan const& plan, Visitor&& visitor) {
  TraitsOf<Instance> const traits;
  return plan.varlen ? visitor(traits, std::type_identity<VarlenProblem<WindowMask>>{})
                     : visitor(traits, std::type_identity<UniformProblem<WindowMask>>{});
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, WindowMask const& mask,
                                  ForwardPlan const& plan, cudaStream_t stream) {
  visit_kernel_sm80<Instance>(plan, [&]<class Traits, class Problem>(Traits, std::type_identity<Problem>) {
    Problem const problem = plan.problem<Problem>(params, mask);
    if constexpr (Problem::kVarlen) {
      launch_varlen_prepare</*kStartsEarly=*/false>(params, mask, problem.order, stream);
    }
    launch_kernel<forward_kernel_sm80<Traits, Problem>>(params.device, plan.blocks, Traits::kThreads,
                                                        sizeof(typename Traits::SharedStorage), stream,
                                                        params, problem);
  });
}

template <class Instance>
KernelAttributes ForwardLaunch<Instance>::attributes(ForwardPlan const& plan) {
  return visit_kernel_sm80<Instance>(
      plan, []<class Traits, class Problem>(Traits, std::type_identity<Problem>) {
        return read_attributes(forward_kernel_sm80<Traits, Problem>, Traits::kThreads,
                               sizeof(typename Traits::SharedStorage));
      });
}

template <class Instance>
std::vector<CompiledTile> ForwardLaunch<Instance>::tiles() {
  using Traits = TraitsOf<Instance>;
  return {{Traits::kTile, sizeof(typename Traits::SharedStorage)}};
}

}  // namespace flash_cute
