// The library of kernels, libflash_cute.so, which knows no torch: what each face asks it for.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "flash_cute/backward/launch.hpp"
#include "flash_cute/forward/launch.hpp"
#include "flash_cute/softmax/launch.hpp"

#define FLASH_CUTE_API __attribute__((visibility("default")))

namespace flash_cute {

struct Gpu {
  DeviceInfo info;
  int compute_capability;  // 90 for 9.0
};

// Asked of the runtime once; throws where it can't tell.
FLASH_CUTE_API Gpu const& gpu_at(int index);

// The family that a GPU of Ampere or newer runs if nobody insists on one.
FLASH_CUTE_API Family default_family(Gpu const& gpu, ElementType element, int head_dim);

// The compiled kernel that serves a head dim; `run` is null where there is none. head_dim: the largest that
// it serves.
struct ForwardKernel {
  Family family;
  int head_dim;
  decltype(&ForwardLaunch<void>::run) run;
  decltype(&ForwardLaunch<void>::attributes) attributes;
};
struct BackwardKernel {
  Family family;
  int head_dim;
  decltype(&BackwardLaunch<void>::run) run;
  decltype(&BackwardLaunch<void>::attributes) attributes;
};
FLASH_CUTE_API ForwardKernel forward_kernel(Family family, ElementType element, int head_dim);
FLASH_CUTE_API BackwardKernel backward_kernel(Family family, ElementType element, int head_dim);

struct SoftmaxKernels {
  decltype(&RowSoftmaxLaunch<RowElement::fp32>::plan) plan;
  decltype(&RowSoftmaxLaunch<RowElement::fp32>::forward) forward, backward;
};
FLASH_CUTE_API SoftmaxKernels softmax_kernels(RowElement element);

// Every kernel of the forward, once for each tile that the launch chooses from.
struct CompiledKernel {
  Family family;
  ElementType element;
  int head_dim;
  CompiledTile tile;
};
FLASH_CUTE_API std::vector<CompiledKernel> compiled_forwards();

}  // namespace flash_cute
