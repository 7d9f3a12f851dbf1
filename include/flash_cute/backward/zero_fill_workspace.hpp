// What a kernel before the backward's makes 0.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/backward/params.hpp"

namespace flash_cute {

// By all threads of a grid, each its share.
__device__ inline void zero_fill_workspace(BackwardWorkspace const& workspace) {
  auto* const zeros = static_cast<uint4*>(workspace.zero_fill.begin);
  int64_t const threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < workspace.zero_fill.chunks;
       i += threads) {
    zeros[i] = {};
  }
}

}  // namespace flash_cute
