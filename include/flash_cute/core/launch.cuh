// Launching a kernel with as much shared memory as it asks for, and reading what the compiler made of it.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/forward/launch.hpp"

namespace flash_cute {

template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), int blocks, int threads, int smem_bytes,
                          cudaStream_t stream, Args const&... args) {
  cudaError_t const status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  kernel<<<blocks, threads, smem_bytes, stream>>>(args...);
  return cudaGetLastError();
}

template <class... Params>
cudaError_t report_kernel(void (*kernel)(Params...), int threads, int smem_bytes, KernelReport& report) {
  cudaFuncAttributes attributes;
  cudaError_t const status = cudaFuncGetAttributes(&attributes, kernel);
  report = {threads, attributes.numRegs, int(attributes.localSizeBytes), smem_bytes};
  return status;
}

}  // namespace flash_cute
