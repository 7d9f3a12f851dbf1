// The GPU that a call runs on.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels.hpp"
#include "validate.hpp"

namespace flash_cute {

cudaStream_t current_stream(int index);

// The family that serves the problem, in this build; throws where there is none, or not the one asked for.
Family family_for(AttentionProblem const& problem, Gpu const& gpu);

}  // namespace flash_cute
