// The GPU that a call runs on.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_cute/params.hpp"
#include "validate.hpp"

namespace flash_cute {

struct Gpu {
  DeviceInfo info;
  int compute_capability;  // 90 for 9.0
};

// Asked of the runtime once; throws where it can't tell.
Gpu const& gpu_at(int index);

cudaStream_t current_stream(int index);

// The family that serves the problem, in this build; throws where there is none, or not the one asked for.
Family family_for(AttentionProblem const& problem, Gpu const& gpu);

}  // namespace flash_cute
