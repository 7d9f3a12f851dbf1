// The host's face of softmax: what torch and JAX call. Implemented by launch.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_cute/softmax/plan.hpp"

namespace flash_cute {

// CUDA's errors are thrown (core/check.hpp). Specialised per element type in a translation unit of its own,
// which setup.py generates.
template <ElementType element>
struct RowSoftmaxLaunch {
  static RowSoftmaxPlan plan(RowSoftmaxParams const& params, bool backward);
  static void forward(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan, cudaStream_t stream);
  static void backward(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan, cudaStream_t stream);
};

}  // namespace flash_cute
