// The host's face of append_kv. launch.cuh implements it.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_cute/append/params.hpp"

namespace flash_cute {

// CUDA's errors are thrown (core/check.hpp). setup.py generates a translation unit that instantiates it for
// each element type.
template <ElementType element>
struct AppendLaunch {
  // params: of at least one token and one head.
  static void run(AppendParams const& params, cudaStream_t stream);
};

}  // namespace flash_cute
