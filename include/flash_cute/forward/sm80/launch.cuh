// Launches the Ampere family's forward.
#pragma once

#include "flash_cute/attention/mask/prepare_ranges.cuh"
#include "flash_cute/forward/combine.cuh"
#include "flash_cute/forward/launch.hpp"
#include "flash_cute/forward/sm80/kernel.hpp"
#include "flash_cute/scheduler/varlen_prepare.cuh"

namespace flash_cute {

// Calls visitor(traits, type of the problem) for the kernel that a plan names.
template <class Instance, class Visitor>
auto visit_kernel_sm80(ForwardPlan const& plan, Visitor&& visitor) {
  constexpr ForwardTiles kTiles =
      forward_tiles(Instance::family, Instance::head_dim, element_bytes(Instance::element));
  if constexpr (Instance::variant == Variant::split) {
    using Split = std::type_identity<SplitProblem<WindowMask>>;
    if (plan.tile == kTiles.few) return visitor(ForwardTraitsSm80<Instance, kTiles.few>{}, Split{});
    return visitor(ForwardTraitsSm80<Instance, kTiles.many>{}, Split{});
  } else if constexpr (Instance::variant == Variant::ranges) {
    using SplitRanges = std::type_identity<SplitRangesProblem<WindowMask>>;
    if constexpr (kTiles.few.warps > 0) {
      if (plan.splits()) {
        if (plan.tile == kTiles.few) return visitor(ForwardTraitsSm80<Instance, kTiles.few>{}, SplitRanges{});
        return visitor(ForwardTraitsSm80<Instance, kTiles.many>{}, SplitRanges{});
      }
    }
    return visitor(ForwardTraitsSm80<Instance, kTiles.main>{},
                   std::type_identity<RangesProblem<WindowMask>>{});
  } else {
    ForwardTraitsSm80<Instance, kTiles.main> const traits;
    return plan.varlen ? visitor(traits, std::type_identity<VarlenProblem<WindowMask>>{})
                       : visitor(traits, std::type_identity<UniformProblem<WindowMask>>{});
  }
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, WindowMask const& mask,
                                  ForwardPlan const& plan, cudaStream_t stream) {
  constexpr bool kStartsEarly = false;
  visit_kernel_sm80<Instance>(plan, [&]<class Traits, class Problem>(Traits, std::type_identity<Problem>) {
    Problem const problem = plan.problem<Problem>(params, mask);
    if constexpr (Problem::kVarlen) {
      if (plan.prepares) launch_varlen_prepare<kStartsEarly>(params, mask, problem.order, stream);
    }
    if constexpr (Problem::kRanges) {
      launch_prepare_ranges<kStartsEarly, typename Problem::SequenceOf>(params, mask, problem.table, stream);
    }
    launch_kernel<forward_kernel_sm80<Traits, Problem>>(params.device, plan.blocks, Traits::kThreads,
                                                        sizeof(typename Traits::SharedStorage), stream,
                                                        params, problem);
    if constexpr (Problem::kSplits) {
      if (plan.split.slots > 0) {
        launch_combine<typename Traits::Element, Traits::kHeadDim, kStartsEarly>(
            params, problem, problem.partial, plan.split.slots, stream);
      }
    }
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
  std::vector<CompiledTile> list;
  auto add = [&]<ForwardTile tile>() {
    list.push_back({tile, sizeof(typename ForwardTraitsSm80<Instance, tile>::SharedStorage)});
  };
  constexpr ForwardTiles kTiles =
      forward_tiles(Instance::family, Instance::head_dim, element_bytes(Instance::element));
  if constexpr (Instance::variant == Variant::split) {
    add.template operator()<kTiles.few>();
    if (kTiles.many != kTiles.few) add.template operator()<kTiles.many>();
  } else {
    add.template operator()<kTiles.main>();
  }
  if constexpr (Instance::variant == Variant::ranges && kTiles.few.warps > 0) {
    if (kTiles.few != kTiles.main) add.template operator()<kTiles.few>();
    if (kTiles.many != kTiles.few) add.template operator()<kTiles.many>();
  }
  return list;
}

}  // namespace flash_cute
