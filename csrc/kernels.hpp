// The library of kernels, libflash_cute.so, which knows no torch: what each face asks it for.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <vector>

#include "flash_cute/append/launch.hpp"
#include "flash_cute/backward/launch.hpp"
#include "flash_cute/forward/launch.hpp"
#include "flash_cute/pairs/launch.hpp"
#include "flash_cute/softmax/launch.hpp"

#define FLASH_CUTE_API __attribute__((visibility("default")))

namespace flash_cute {

struct Gpu {
  DeviceInfo info;
  int compute_capability;  // 90 for 9.0
};

// Asked of the runtime once; throws where it can't tell.
FLASH_CUTE_API Gpu const& gpu_at(int index);

// Where the kernels of an instance are launched that serves a call's head dims; `run` is null where there is
// none. bucket: the largest head dims that it serves.
struct ForwardEntry {
  Family family;
  HeadDims bucket;
  decltype(&ForwardLaunch<void>::run) run;
  decltype(&ForwardLaunch<void>::attributes) attributes;
};
struct BackwardEntry {
  Family family;
  HeadDims bucket;
  decltype(&BackwardLaunch<void>::run) run;
  decltype(&BackwardLaunch<void>::attributes) attributes;
};
FLASH_CUTE_API ForwardEntry forward_kernel(Family family, ElementType element, HeadDims head_dims,
                                           Variant variant = Variant::plain);
FLASH_CUTE_API BackwardEntry backward_kernel(Family family, ElementType element, HeadDims head_dims,
                                             Variant variant = Variant::plain);

struct SoftmaxKernels {
  decltype(&RowSoftmaxLaunch<ElementType::fp32>::plan) plan;
  decltype(&RowSoftmaxLaunch<ElementType::fp32>::forward) forward, backward;
};
FLASH_CUTE_API SoftmaxKernels softmax_kernels(ElementType element);

FLASH_CUTE_API decltype(&AppendLaunch<ElementType::fp32>::run) append_kv_launch(ElementType element);

// Of values of pairs; `run` is null where there is none.
struct PairEntry {
  Family family;
  decltype(&PairLaunch<Family::sm80, ElementType::fp32>::plan) plan;
  decltype(&PairLaunch<Family::sm80, ElementType::fp32>::run) run;
};
FLASH_CUTE_API PairEntry pair_kernel(Family family, ElementType element);

// Every instance of this build. A forward is listed once for each tile that its launch chooses from, a
// backward once and without a tile.
struct CompiledKernel {
  Pass pass;
  Family family;
  ElementType element;
  HeadDims head_dims;
  Variant variant;
  std::optional<CompiledTile> tile;
};
FLASH_CUTE_API std::vector<CompiledKernel> compiled_instances();

}  // namespace flash_cute
