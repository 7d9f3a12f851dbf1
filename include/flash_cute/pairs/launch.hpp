// The host's face of what stores a value of each pair. sm80/launch.cuh and sm90/launch.cuh implement it.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/pairs/plan.hpp"

namespace flash_cute {

// CUDA's errors are thrown (core/check.hpp). setup.py generates a translation unit that instantiates it for
// each element type of a family.
template <Family family, ElementType element>
struct PairLaunch {
  static PairPlan plan(PairParams const& params);
  // workspace: of plan.workspace.bytes.
  static void run(PairParams const& params, WindowMask const& mask, PairPlan const& plan, void* workspace,
                  cudaStream_t stream);
};

}  // namespace flash_cute
