// The host's face of a forward kernel: what torch, JAX and a C++ test call. Implemented by
// launch_<family>.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_cute/params.hpp"

namespace flash_cute {

struct KernelReport {
  int threads, registers, local_bytes, smem_bytes;
};

// Specialised per Instance in a translation unit of its own, which setup.py generates.
template <class Instance>
struct ForwardLaunch {
  static int grid(ForwardParams const& params);
  static cudaError_t run(ForwardParams const& params, cudaStream_t stream);
  static cudaError_t report(KernelReport& report);
  static int smem_bytes();
};

}  // namespace flash_cute
