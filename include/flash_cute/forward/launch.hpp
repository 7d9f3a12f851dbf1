// The host's face of a forward kernel: what torch, JAX and a C++ test call. Implemented by
// <family>/launch.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "flash_cute/core/launch_kernel.hpp"
#include "flash_cute/forward/plan.hpp"

namespace flash_cute {

struct CompiledTile {
  ForwardTile tile;
  int smem_bytes;
};

// CUDA's errors are thrown (core/check.hpp). Specialised per Instance in the translation units that
// setup.py generates.
template <class Instance>
struct ForwardLaunch {
  // plan: of the same params and mask (plan_forward), but for pointers and strides. workspace: of
  // plan.workspace.bytes.
  static void run(ForwardParams const& params, WindowMask const& mask, ForwardPlan const& plan,
                  void* workspace, cudaStream_t stream);
  static KernelAttributes attributes(ForwardPlan const& plan);
  static std::vector<CompiledTile> tiles();
};

}  // namespace flash_cute
