// Launches the Ampere family's forward.
#pragma once

#include "flash_cute/core/launch.cuh"
#include "flash_cute/forward/kernel_sm80.hpp"
#include "flash_cute/forward/launch.hpp"

namespace flash_cute {

template <class Instance>
int ForwardLaunch<Instance>::grid(ForwardParams const& params) {
  return forward_order<ForwardTraitsSm80<Instance>>(params).tiles();
}

template <class Instance>
int ForwardLaunch<Instance>::smem_bytes() {
  return sizeof(typename ForwardTraitsSm80<Instance>::SharedStorage);
}

template <class Instance>
cudaError_t ForwardLaunch<Instance>::run(ForwardParams const& params, cudaStream_t stream) {
  using Traits = ForwardTraitsSm80<Instance>;
  TileOrder const order = forward_order<Traits>(params);
  return launch_kernel(forward_kernel_sm80<Traits>, order.tiles(), Traits::kThreads, smem_bytes(), stream,
                       params, order);
}

template <class Instance>
cudaError_t ForwardLaunch<Instance>::report(KernelReport& report) {
  using Traits = ForwardTraitsSm80<Instance>;
  return report_kernel(forward_kernel_sm80<Traits>, Traits::kThreads, smem_bytes(), report);
}

}  // namespace flash_cute
