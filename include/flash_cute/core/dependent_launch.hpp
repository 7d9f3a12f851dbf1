// Programmatic dependent launch: a kernel is launched before the previous one in the stream has finished, and
// waits for it by itself.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "flash_cute/core/check.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// A kernel calls this before it touches global memory. Code that is made from PTX for Ampere has no
// instruction to wait with.
__device__ inline void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Tells whether the code that this device runs of a kernel waits. It does not on Hopper if only PTX for
// Ampere was compiled.
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
