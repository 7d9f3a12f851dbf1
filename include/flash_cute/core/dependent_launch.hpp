// Kernels that may be launched before the one before them in the stream is through (programmatic dependent
// launch), for which they wait by themselves.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "flash_cute/core/check.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// In a kernel. Code that is made of PTX for Ampere can't wait, and nothing before this may touch global
// memory.
__device__ inline void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Does the code wait that this device runs of a kernel? Not so on Hopper if only PTX for Ampere was compiled.
template <auto kernel>
bool waits_for_grid_before(DeviceInfo const& device) {
  enum : char { kUnknown, kWaits, kDoesNot };
  static std::atomic<char> known[DeviceInfo::kMaxDevices];
  std::atomic<char>& answer = known[device.index];
  if (answer.load(std::memory_order_relaxed) == kUnknown) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "reading the kernel's attributes");
    answer.store(attributes.ptxVersion >= 90 ? kWaits : kDoesNot, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == kWaits;
}

}  // namespace flash_cute
