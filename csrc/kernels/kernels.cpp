#include "../kernels.hpp"

#include <mutex>
#include <string>

#include "flash_cute/core/check.hpp"
#include "flash_cute/core/dispatch.hpp"

namespace flash_cute {

Gpu const& gpu_at(int index) {
  constexpr int kMaxDevices = DeviceInfo::kMaxDevices;
  static Gpu devices[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  if (index >= kMaxDevices) {
    throw std::runtime_error("flash_cute.forward: device index " + std::to_string(index) +
                             " is not supported; it must be below " + std::to_string(kMaxDevices));
  }
  std::call_once(read[index], [&] {
    auto attribute = [&](cudaDeviceAttr name) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, name, index), "reading the device's properties");
      return value;
    };
    devices[index] = {
        {index, attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
         attribute(cudaDevAttrL2CacheSize)},
        10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor)};
  });
  return devices[index];
}

Family default_family(Gpu const& gpu, ElementType element, int head_dim) {
  constexpr int kHopper = 90;
  bool const has_sm90 = visit_instance(Family::sm90, element, head_dim, [](auto) {});
  return gpu.compute_capability == kHopper && has_sm90 ? Family::sm90 : Family::sm80;
}

ForwardKernel forward_kernel(Family family, ElementType element, int head_dim) {
  ForwardKernel kernel{};
  visit_instance(family, element, head_dim, [&]<class Instance>(Instance) {
    kernel = {family, Instance::head_dim, ForwardLaunch<Instance>::run, ForwardLaunch<Instance>::attributes};
  });
  return kernel;
}

BackwardKernel backward_kernel(Family family, ElementType element, int head_dim) {
  BackwardKernel kernel{};
  visit_instance(family, element, head_dim, [&]<class Instance>(Instance) {
    kernel = {family, Instance::head_dim, BackwardLaunch<Instance>::run,
              BackwardLaunch<Instance>::attributes};
  });
  return kernel;
}

SoftmaxKernels softmax_kernels(RowElement element) {
  auto of = []<class Launch>(Launch) {
    return SoftmaxKernels{Launch::plan, Launch::forward, Launch::backward};
  };
  switch (element) {
    case RowElement::fp16: return of(RowSoftmaxLaunch<RowElement::fp16>{});
    case RowElement::bf16: return of(RowSoftmaxLaunch<RowElement::bf16>{});
    default: return of(RowSoftmaxLaunch<RowElement::fp32>{});
  }
}

std::vector<CompiledKernel> compiled_forwards() {
  std::vector<CompiledKernel> list;
  visit_instances([&]<class Kernel>(Kernel) {
    for (CompiledTile const& tile : ForwardLaunch<Kernel>::tiles()) {
      list.push_back({Kernel::family, Kernel::element, Kernel::head_dim, tile});
    }
    return false;
  });
  return list;
}

}  // namespace flash_cute
