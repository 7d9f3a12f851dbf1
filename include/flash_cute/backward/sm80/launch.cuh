// Launches the kernels of the Ampere family's backward.
#pragma once

#include <type_traits>

#include "flash_cute/attention/mask/prepare_ranges.cuh"
#include "flash_cute/backward/launch.hpp"
#include "flash_cute/backward/sm80/dq_kernel.hpp"
#include "flash_cute/backward/sm80/kernel.hpp"
#include "flash_cute/backward/sm80/postprocess.hpp"
#include "flash_cute/backward/sm80/preprocess.hpp"

namespace flash_cute {

// Calls visitor(traits, DqSums constant) for the main kernel that a plan names.
template <class Instance, int index = 0, class Visitor>
auto visit_backward_sm80(BackwardPlan const& plan, Visitor&& visitor) {
  constexpr BackwardTiles kTiles = backward_tiles(Instance::family, Instance::head_dim, Instance::variant,
                                                  element_bytes(Instance::element));
  if constexpr (index + 1 < kTiles.count()) {
    if (plan.tile != kTiles.keys[index]) return visit_backward_sm80<Instance, index + 1>(plan, visitor);
  }
  auto visit = [&]<DqSums sums>(std::integral_constant<DqSums, sums> constant) {
    return visitor(BackwardTraitsSm80<Instance, kTiles.keys[index]>{}, constant);
  };
  if constexpr (!kTiles.keys[index].knows_dq) {
    return visit(std::integral_constant<DqSums, DqSums::asked>{});
  } else {
    return plan.dq.is_accumulated() ? visit(std::integral_constant<DqSums, DqSums::all>{})
                                    : visit(std::integral_constant<DqSums, DqSums::none>{});
  }
}

template <class Instance>
void BackwardLaunch<Instance>::run(BackwardParams const& params, WindowMask const& mask,
                                   BackwardPlan const& plan, cudaStream_t stream) {
  using DqTraits = BackwardDqTraitsSm80<Instance>;
  DeviceInfo const& device = params.device;
  int const queries = plan.q_blocks * params.shape.heads_q;
  constexpr int kRowThreads = 256;
  // Gradients of rows that no kernel writes are zeroed last, as LSE and delta may lie in dQ before: by the
  // first thread blocks of postprocess if it has enough of them, else by a kernel of its own.
  int const zero_fill_blocks = 2 * device.multiprocessors;
  BackwardParams const ordered = params.with_ordered_offsets();
  bool const postprocess_zero_fills =
      params.lengths.given && plan.dq.is_accumulated() && queries >= zero_fill_blocks;
  constexpr bool kRanges = Instance::variant == Variant::ranges;
  auto prepare_ranges = [&](int block_m, int block_n, bool transposes) {
    launch_prepare_transposed_ranges</*kStartsEarly=*/false>(
        params, mask, RangeTable::make(params, block_m, block_n, transposes), stream);
  };
  visit_backward_sm80<Instance>(plan, [&]<class Traits>(Traits, auto dq_sums) {
    if constexpr (kRanges) prepare_ranges(Traits::kBlockM, Traits::kBlockN, true);
    launch_kernel<backward_preprocess_sm80<Instance, Traits::kBlockM, kRowThreads, WindowMask>>(
        device, plan.preprocess_blocks, kRowThreads, 0, stream, params, mask);
    if (plan.runs_kv) {
      KvTileSchedulerSm80<WindowMask> const order{plan.order, mask};
      launch_kernel<backward_kernel_sm80<Traits, dq_sums(), WindowMask>>(
          device, plan.blocks, Traits::kThreads, sizeof(typename Traits::SharedStorage), stream, ordered,
          order);
    }
    if (plan.gqa_reduce_blocks() > 0) {
      launch_kernel<backward_gqa_reduce<Traits, WindowMask>>(device, plan.gqa_reduce_blocks(),
                                                             Traits::kKeyThreads, 0, stream, ordered, mask);
    }
    if (plan.dq.is_accumulated()) {
      launch_kernel<backward_postprocess_sm80<Traits, WindowMask>>(
          device, queries, Traits::kThreads, 0, stream, ordered, mask,
          postprocess_zero_fills ? zero_fill_blocks : 0);
    }
  });
  if (plan.dq.method == DqMethod::alone) {
    if constexpr (kRanges) prepare_ranges(DqTraits::kBlockM, DqTraits::kBlockN, false);
    launch_kernel<backward_dq_kernel_sm80<DqTraits, WindowMask>>(
        device, plan.q_tiles * params.shape.heads_q, DqTraits::kThreads,
        sizeof(typename DqTraits::SharedStorage), stream, ordered, mask, plan.tile.block_m);
  }
  if (params.lengths.given && !postprocess_zero_fills) {
    launch_kernel<
        backward_zero_fill<Family::sm80, kRowThreads, WindowMask, sizeof(typename DqTraits::Element)>>(
        device, zero_fill_blocks, kRowThreads, 0, stream, ordered, mask);
  }
  launch_sum_sinks<typename DqTraits::Element, false>(params, plan.q_blocks, stream);
}

template <class Instance>
KernelAttributes BackwardLaunch<Instance>::attributes(BackwardPlan const& plan) {
  auto read = []<class Traits>(Traits, auto* kernel) {
    return read_attributes(kernel, Traits::kThreads, sizeof(typename Traits::SharedStorage));
  };
  using DqTraits = BackwardDqTraitsSm80<Instance>;
  if (!plan.runs_kv) return read(DqTraits{}, backward_dq_kernel_sm80<DqTraits, WindowMask>);
  return visit_backward_sm80<Instance>(plan, [&]<class Traits>(Traits traits, auto dq_sums) {
    return read(traits, backward_kernel_sm80<Traits, dq_sums(), WindowMask>);
  });
}

}  // namespace flash_cute
