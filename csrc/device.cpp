#ifdef FLASH_CUTE_WITH_CUDA

#include "device.hpp"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <mutex>

#include "flash_cute/core/check.hpp"
#include "flash_cute/core/dispatch.hpp"

// Weak, so that the same library loads under a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

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
        {index, attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
         attribute(cudaDevAttrL2CacheSize)},
        10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor)};
  });
  return devices[index];
}

cudaStream_t current_stream(int index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  return static_cast<cudaStream_t>(stream);
}

Family family_for(AttentionProblem const& problem, Gpu const& gpu) {
  constexpr int kAmpere = 80, kHopper = 90;
  auto compiled = [&](Family family) {
    return visit_instance(family, problem.element, problem.shape.head_dim, [](auto) {});
  };
  int const capability = gpu.compute_capability;
  require(capability >= kAmpere, "the GPU has compute capability ", capability / 10, ".", capability % 10,
          "; 8.0 (Ampere) and newer are supported");
  if (!problem.family) return capability == kHopper && compiled(Family::sm90) ? Family::sm90 : Family::sm80;
  require(*problem.family != Family::sm90 || capability == kHopper,
          "family is 'sm90', which needs compute capability ", "9.0 (Hopper), but the GPU has ",
          capability / 10, ".", capability % 10);
  return *problem.family;
}

}  // namespace flash_cute

#endif
