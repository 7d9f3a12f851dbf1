// Launches a kernel with as much shared memory as it asks for, and reads what the compiler made of it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "flash_cute/core/check.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// With kStartsEarly the kernel itself waits for the previous one in the stream (see dependent_launch.hpp), so
// its thread blocks may be launched while that one's memory operations settle. most_smem_bytes: where calls
// of a kernel differ, of any of them.
template <auto kernel, bool kStartsEarly = false, int most_smem_bytes = 0, class... Args>
void launch_kernel(DeviceInfo const& device, dim3 blocks, int threads, int smem_bytes, cudaStream_t stream,
                   Args const&... args) {
  static std::atomic<bool> may_have_smem[DeviceInfo::kMaxDevices];  // asking anew would cost every call 1 us
  if (!may_have_smem[device.index].load(std::memory_order_relaxed)) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               larger(smem_bytes, most_smem_bytes)),
          "asking for the kernel's shared memory");
    may_have_smem[device.index].store(true, std::memory_order_relaxed);
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = kStartsEarly;
  check(cudaLaunchKernelEx(&config, kernel, args...), "launching the kernel");
}

// What the compiler made of a kernel, and the shared memory that it is launched with.
struct KernelAttributes {
  int threads, smem_bytes;     // per block
  int registers, local_bytes;  // per thread
};

template <class... Params>
KernelAttributes read_attributes(void (*kernel)(Params...), int threads, int dynamic_smem_bytes) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "reading the kernel's attributes");
  int const smem_bytes = int(attributes.sharedSizeBytes) + dynamic_smem_bytes;
  return {threads, smem_bytes, attributes.numRegs, int(attributes.localSizeBytes)};
}

}  // namespace flash_cute
