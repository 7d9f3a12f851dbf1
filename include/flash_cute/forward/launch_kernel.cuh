// Launching a kernel with as much shared memory as it asks for, and reading what the compiler made of it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "flash_cute/forward/launch.hpp"

namespace flash_cute {

// kStartsEarly: the kernel itself waits for the one before it in the stream, so its blocks may be launched
// while that one's memory operations settle.
template <auto kernel, bool kStartsEarly = false, class... Args>
cudaError_t launch_kernel(DeviceInfo const& device, int blocks, int threads, int smem_bytes,
                          cudaStream_t stream, Args const&... args) {
  static std::atomic<bool> may_have_smem[DeviceInfo::kMaxDevices];  // asking anew would cost every call 1 us
  if (!may_have_smem[device.index].load(std::memory_order_relaxed)) {
    cudaError_t const status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (status != cudaSuccess) return status;
    may_have_smem[device.index].store(true, std::memory_order_relaxed);
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = kStartsEarly;
  cudaLaunchKernelEx(&config, kernel, args...);
  return cudaGetLastError();
}

// Adds to the plan what the compiler made of the kernel.
template <class... Params>
cudaError_t read_attributes(void (*kernel)(Params...), LaunchPlan& plan) {
  cudaFuncAttributes attributes{};
  cudaError_t const status = cudaFuncGetAttributes(&attributes, kernel);
  plan.registers = attributes.numRegs;
  plan.local_bytes = int(attributes.localSizeBytes);
  return status;
}

}  // namespace flash_cute
