// The launcher and the encoder of tensor maps on a CUDA runtime and driver made here, for
// tests/host/test_launcher.py: each function returns what the test has told it to, and is noted.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

// nvcc converts a kernel to the pointer that the runtime takes; here it is a function like any other.
template <class... Args>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Args...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), attribute, value);
}
template <class... Args>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Args...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<void const*>(kernel));
}

#include "flash_cute/core/dependent_launch.hpp"
#include "flash_cute/core/launch_kernel.hpp"
#include "flash_cute/core/sm90/tensor_map.hpp"

namespace {

std::map<std::string, int> failing;  // function -> the status of its next call
std::vector<std::string> calls;
cudaError_t last_error = cudaSuccess;
bool has_context = true;
int ptx_version = 0;  // of the code of any kernel

cudaError_t called(char const* function) {
  calls.emplace_back(function);
  auto const found = failing.find(function);
  if (found == failing.end()) return cudaSuccess;
  last_error = cudaError_t(found->second);
  failing.erase(found);
  return last_error;
}

CUresult encode(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*, cuuint64_t const*,
                cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  calls.emplace_back("cuTensorMapEncodeTiled");
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  auto const found = failing.find("cuTensorMapEncodeTiled");
  return found == failing.end() ? CUDA_SUCCESS : CUresult(found->second);
}

CUresult error_string(CUresult result, char const** text) {
  *text = result == CUDA_ERROR_INVALID_VALUE ? "the driver's own words" : "other words";
  return CUDA_SUCCESS;
}

void kernel(int) {}

}  // namespace

cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) { return called("attribute"); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const*) {
  attributes->ptxVersion = ptx_version;
  return called("attributes");
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const*, void const*, void**) { return called("launch"); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
char const* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorInvalidValue ? "invalid value" : "another error";
}
cudaError_t cudaSetDevice(int) {
  has_context = true;
  return called("set device");
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  bool const encoder = std::string(name) == "cuTensorMapEncodeTiled";
  *function = encoder ? reinterpret_cast<void*>(&encode) : reinterpret_cast<void*>(&error_string);
  return cudaSuccess;
}

PYBIND11_MODULE(flash_cute_launcher, module) {
  module.def("reset", [](std::map<std::string, int> const& next, bool context) {
    failing = next;
    calls.clear();
    last_error = cudaSuccess;
    has_context = context;
  });
  module.def("calls", [] { return calls; });
  module.def("last_error", [] { return int(last_error); });
  module.def("launch", [](int device) {
    flash_cute::launch_kernel<kernel>({.index = device, .multiprocessors = 1, .l2_bytes = 1}, 1, 32, 1024,
                                      nullptr, 7);
  });
  module.def("waits", [](int device, int ptx) {
    ptx_version = ptx;
    return flash_cute::waits_for_grid_before<kernel>(
        {.index = device, .multiprocessors = 1, .smem_bytes = 1, .l2_bytes = 1});
  });
  module.def("read_attributes", [] { flash_cute::read_attributes(kernel, 32, 1024); });
  module.def("encode", [] {
    CUtensorMap map;
    flash_cute::encode_tensor_map(0, [&](auto* encoder) {
      return encoder(&map, {}, 0, nullptr, nullptr, nullptr, nullptr, nullptr, {}, {}, {}, {});
    });
  });
}
