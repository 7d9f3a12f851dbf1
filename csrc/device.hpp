// The stream that a call of torch runs on.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_cute {

cudaStream_t current_stream(int index);

}  // namespace flash_cute
