#include "device.hpp"

#ifdef FLASH_CUTE_WITH_CUDA

#include <cuda_runtime_api.h>

#include <mutex>

#include "flash_cute/core/check.hpp"
#include "validate.hpp"

namespace flash_cute {

Gpu const& gpu_at(int index) {
  constexpr int kMaxDevices = DeviceInfo::kMaxDevices;
  static Gpu devices[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  require(index < kMaxDevices, "device index ", index, " is not supported; it must be below ", kMaxDevices);
  std::call_once(read[index], [&] {
    auto attribute = [&](cudaDeviceAttr name) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, name, index), "reading the device's properties");
      return value;
    };
    devices[index] = {
        {index, attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrL2CacheSize)},
        10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor)};
  });
  return devices[index];
}

}  // namespace flash_cute

#endif
