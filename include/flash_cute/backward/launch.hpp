// The host's face of the backward's kernels: what torch, JAX and a C++ test call. Implemented by
// <family>/launch.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_cute/backward/plan.hpp"
#include "flash_cute/core/launch_kernel.hpp"

namespace flash_cute {

// CUDA's errors are thrown (core/check.hpp). Specialised per Instance in the translation units that
// setup.py generates.
template <class Instance>
struct BackwardLaunch {
  // plan: of the same params and mask (plan_backward), but for pointers and strides.
  static void run(BackwardParams const& params, WindowMask const& mask, BackwardPlan const& plan,
                  cudaStream_t stream);
  // Of the kernel that takes longest.
  static KernelAttributes attributes(BackwardPlan const& plan);
};

}  // namespace flash_cute
