// What the handlers of XLA's foreign function interface share, by which XLA calls the kernels
// (flash_cute/jax/kernels.py registers them). Shapes and options were checked there; sizes are again, as vmap
// makes them larger. A CUDA graph may have any of the calls: all that they do is launch.
#pragma once

#include <cuda_runtime_api.h>
#include <xla/ffi/api/ffi.h>

#include <string>

#include "../planned_call.hpp"
#include "flash_cute/core/check.hpp"

namespace flash_cute {

namespace ffi = xla::ffi;
using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<Buffer>;

inline int at_most(int64_t most, int64_t size, char const* what) {
  require(size <= most, "with what vmap adds there are ", size, " ", what, "; at most ", most,
          " are accepted");
  return int(size);
}

inline ElementType element_of(Buffer const& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F16: return ElementType::fp16;
    case ffi::DataType::BF16: return ElementType::bf16;
    default: return ElementType::fp32;
  }
}

inline int const* lengths(Buffer const& buffer) {  // empty: they were not given
  return buffer.element_count() > 0 ? static_cast<int const*>(buffer.untyped_data()) : nullptr;
}

inline Gpu const& current_gpu(int device) {
  check(cudaSetDevice(device), "choosing the device");
  return gpu_at(device);
}

// Calls function() and turns what it throws into an error of XLA's, under its name in JAX.
template <class Function>
ffi::Error guarded(char const* name, Function&& function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (std::exception const& error) {
    std::string const message = error.what();
    bool const ours = message.starts_with(kErrorPrefix);
    return ffi::Error::Internal(ours ? name + (": " + message.substr(sizeof(kErrorPrefix) - 1)) : message);
  }
}

// The workspace is a result that is not read: XLA knows of its memory, also while a CUDA graph has the call.
inline void* workspace_of(Result& buffer, int64_t bytes) {
  require(int64_t(buffer->size_bytes()) >= bytes, "the workspace has ", buffer->size_bytes(), " bytes, but ",
          bytes, " are needed; it was made for another GPU or another build");
  return buffer->untyped_data();
}

}  // namespace flash_cute
