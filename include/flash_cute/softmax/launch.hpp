// The host's face of softmax, which torch and JAX call. launch.cuh implements it.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_cute/softmax/plan.hpp"

namespace flash_cute {

// CUDA's errors are thrown (core/check.hpp). setup.py generates a translation unit that instantiates it for
// each element type.
template <ElementType element>
struct RowSoftmaxLaunch {
  static RowSoftmaxPlan plan(RowSoftmaxParams const& params, bool backward);
  static void forward(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan, cudaStream_t stream);
  static void backward(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan, cudaStream_t stream);
};

}  // namespace flash_cute
