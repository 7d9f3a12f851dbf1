// Launches the Ampere family's forward.
#pragma once

#include "flash_cute/forward/launch.cuh"
#include "flash_cute/forward/sm80/kernel.hpp"

namespace flash_cute {

template <>
struct FamilyForward<Family::sm80> {
  static constexpr bool kStartsEarly = false;
  template <class Instance, ForwardKernel kernel>
  using Traits = ForwardTraitsSm80<Instance, kernel>;

  template <class Traits>
  static auto* kernel() {
    return forward_kernel_sm80<Traits>;
  }
  template <class Traits>
  static constexpr int smem_bytes(ForwardPlan const&) {
    return sizeof(typename Traits::SharedStorage);
  }
  template <class Traits>
  static void launch(ForwardParams const& params, typename Traits::Source const& source,
                     ForwardPlan const& plan, void*, cudaStream_t stream) {
    launch_kernel<forward_kernel_sm80<Traits>>(params.device, plan.blocks, Traits::kThreads,
                                               smem_bytes<Traits>(plan), stream, params, source);
  }
};

}  // namespace flash_cute
