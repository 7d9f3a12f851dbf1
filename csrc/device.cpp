#ifdef FLASH_CUTE_WITH_CUDA

#include "device.hpp"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// Weak, so that the same library loads under a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace flash_cute {

cudaStream_t current_stream(int index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  return static_cast<cudaStream_t>(stream);
}

Family family_for(AttentionProblem const& problem, Gpu const& gpu) {
  constexpr int kAmpere = 80, kHopper = 90;
  int const capability = gpu.compute_capability;
  require(capability >= kAmpere, "the GPU has compute capability ", capability / 10, ".", capability % 10,
          "; 8.0 (Ampere) and newer are supported");
  if (!problem.family) return default_family(gpu, problem.element, problem.shape.head_dim);
  require(*problem.family != Family::sm90 || capability == kHopper,
          "family is 'sm90', which needs compute capability ", "9.0 (Hopper), but the GPU has ",
          capability / 10, ".", capability % 10);
  return *problem.family;
}

}  // namespace flash_cute

#endif
