#include "../kernels.hpp"

#include <mutex>

#include "../problem.hpp"
#include "flash_cute/core/check.hpp"
#include "flash_cute/core/dispatch.hpp"

namespace flash_cute {

Gpu const& gpu_at(int index) {
  constexpr int kMaxDevices = DeviceInfo::kMaxDevices;
  static Gpu devices[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  require(index < kMaxDevices, "device index ", index, " is not supported; it must be below ", kMaxDevices);
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

ForwardEntry forward_kernel(Family family, ElementType element, HeadDims head_dims, Variant variant) {
  ForwardEntry kernel{};
  visit_instance<Pass::forward>(family, element, variant, head_dims, [&]<class Instance>(Instance) {
    kernel = {family, Instance::head_dims, ForwardLaunch<Instance>::run, ForwardLaunch<Instance>::attributes};
  });
  return kernel;
}

BackwardEntry backward_kernel(Family family, ElementType element, HeadDims head_dims, Variant variant) {
  BackwardEntry kernel{};
  visit_instance<Pass::backward>(family, element, variant, head_dims, [&]<class Instance>(Instance) {
    kernel = {family, Instance::head_dims, BackwardLaunch<Instance>::run,
              BackwardLaunch<Instance>::attributes};
  });
  return kernel;
}

SoftmaxKernels softmax_kernels(ElementType element) {
  auto of = []<class Launch>(Launch) {
    return SoftmaxKernels{Launch::plan, Launch::forward, Launch::backward};
  };
  switch (element) {
    case ElementType::fp16: return of(RowSoftmaxLaunch<ElementType::fp16>{});
    case ElementType::bf16: return of(RowSoftmaxLaunch<ElementType::bf16>{});
    default: return of(RowSoftmaxLaunch<ElementType::fp32>{});
  }
}

PairEntry pair_kernel(Family family, ElementType element) {
  PairEntry kernel{};
  visit_pair_instances([&]<Family of, ElementType type>(PairInstance<of, type>) {
    if (of == family && type == element)
      kernel = {family, PairLaunch<of, type>::plan, PairLaunch<of, type>::run};
  });
  return kernel;
}

decltype(&AppendLaunch<ElementType::fp32>::run) append_kv_launch(ElementType element) {
  switch (element) {
    case ElementType::fp16: return AppendLaunch<ElementType::fp16>::run;
    case ElementType::bf16: return AppendLaunch<ElementType::bf16>::run;
    default: return AppendLaunch<ElementType::fp32>::run;
  }
}

std::vector<CompiledKernel> compiled_instances() {
  std::vector<CompiledKernel> list;
  auto add = [&]<class Instance>(Pass pass, Instance, std::optional<CompiledTile> const& tile) {
    list.push_back({pass, Instance::family, Instance::element, Instance::head_dims, Instance::variant, tile});
  };
  visit_instances<Pass::forward>([&]<class Instance>(Instance instance) {
    for (CompiledTile const& tile : ForwardLaunch<Instance>::tiles()) add(Pass::forward, instance, tile);
    return false;
  });
  visit_instances<Pass::backward>([&](auto instance) {
    add(Pass::backward, instance, std::nullopt);
    return false;
  });
  return list;
}

}  // namespace flash_cute
