// The host's face of a forward kernel: what torch, JAX and a C++ test call. Implemented by
// launch_<family>.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "flash_cute/attention/tiles.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

struct CompiledTile {
  ForwardTile tile;
  int smem_bytes;
};

// What a call launches, for explain.
struct LaunchPlan {
  ForwardTile tile;
  int packed_heads;  // query heads that share a tile
  int grid = 0, threads, smem_bytes;
  int registers = 0, local_bytes = 0;  // per thread
  int64_t workspace_bytes = 0;         // LengthParams::workspace
};

// CUDA's errors are thrown (core/check.hpp). Specialised per Instance in a translation unit of its own, which
// setup.py generates.
template <class Instance>
struct ForwardLaunch {
  static void run(ForwardParams const& params, cudaStream_t stream);
  static int64_t workspace_bytes(ForwardParams const& params);  // of LengthParams::workspace
  static LaunchPlan plan(ForwardParams const& params);
  static std::vector<CompiledTile> tiles();
};

}  // namespace flash_cute
