// Turns CUDA's errors into exceptions with one sentence.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flash_cute {

[[noreturn]] inline void fail(char const* doing, std::string const& why) {
  throw std::runtime_error(std::string("flash_cute: ") + doing + " failed: " + why);
}

inline void check(cudaError_t status, char const* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which is reported here and must not be found by the next call
  fail(doing, cudaGetErrorString(status));
}

}  // namespace flash_cute
