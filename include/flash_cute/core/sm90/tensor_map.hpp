// Calls the driver's encoder of tensor maps, on any host thread.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "flash_cute/core/check.hpp"

namespace flash_cute {

// Returns a function of the driver, found through the runtime so that nothing links against the driver.
template <class Function>
Function* driver_function(char const* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found), name);
  if (!function) fail(name, "the driver does not have it");
  return reinterpret_cast<Function*>(function);
}

// Encodes a tensor map by calling encode(the driver's encoder). The driver requires a context, which a host
// thread does not have before its first call of the runtime that needs one.
template <class Encode>
void encode_tensor_map(int device, Encode&& encode) {
  static auto* const encoder =
      driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  CUresult result = encode(encoder);
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    check(cudaSetDevice(device), "binding the device's context");
    result = encode(encoder);
  }
  if (result == CUDA_SUCCESS) return;
  char const* why = "unknown error";
  driver_function<decltype(cuGetErrorString)>("cuGetErrorString", 6000)(result, &why);
  fail("encoding a tensor map", why);
}

}  // namespace flash_cute
