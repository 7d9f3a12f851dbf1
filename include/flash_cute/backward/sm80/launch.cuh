// Launches the Ampere family's backward.
#pragma once

#include <type_traits>

#include "flash_cute/backward/launch.hpp"
#include "flash_cute/backward/sm80/dq_kernel.hpp"
#include "flash_cute/backward/sm80/kernel.hpp"
#include "flash_cute/backward/sm80/postprocess.hpp"
#include "flash_cute/backward/sm80/preprocess.hpp"

namespace flash_cute {

// Calls visitor(traits, its sums of dQ) for the kernel of blocks of keys that a plan names.
template <class Instance, int index = 0, class Visitor>
auto visit_backward_sm80(BackwardPlan const& plan, Visitor&& visitor) {
  constexpr BackwardTiles kTiles = backward_tiles(Instance::family, Instance::head_dim);
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
  using Query = QueryTraitsSm80<Instance>;
  DeviceInfo const& device = params.device;
  int const queries = plan.q_blocks * params.shape.heads_q;
  constexpr int kRowThreads = 256;
  // What no kernel writes is cleared last, as LSE and delta may have lain in dQ: by the first blocks of the
  // kernel for rows of dQ, if it has enough.
  int const enough = 2 * device.multiprocessors;
  BackwardParams const ordered = params.with_ordered_offsets();
  bool const clears_beside = params.lengths.given && plan.dq.is_accumulated() && queries >= enough;
  visit_backward_sm80<Instance>(plan, [&]<class Traits>(Traits, auto dq_sums) {
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
          device, queries, Traits::kThreads, 0, stream, ordered, mask, clears_beside ? enough : 0);
    }
  });
  if (plan.dq.method == DqMethod::alone) {
    launch_kernel<backward_dq_kernel_sm80<Query, WindowMask>>(
        device, plan.q_tiles * params.shape.heads_q, Query::kThreads, sizeof(typename Query::SharedStorage),
        stream, ordered, mask, plan.tile.block_m);
  }
  if (params.lengths.given && !clears_beside) {
    launch_kernel<backward_zero_fill<Family::sm80, kRowThreads, WindowMask>>(device, enough, kRowThreads, 0,
                                                                             stream, ordered, mask);
  }
}

template <class Instance>
KernelAttributes BackwardLaunch<Instance>::attributes(BackwardPlan const& plan) {
  auto read = []<class Traits>(Traits, auto* kernel) {
    return read_attributes(kernel, Traits::kThreads, sizeof(typename Traits::SharedStorage));
  };
  using Query = QueryTraitsSm80<Instance>;
  if (!plan.runs_kv) return read(Query{}, backward_dq_kernel_sm80<Query, WindowMask>);
  return visit_backward_sm80<Instance>(plan, [&]<class Traits>(Traits traits, auto dq_sums) {
    return read(traits, backward_kernel_sm80<Traits, dq_sums(), WindowMask>);
  });
}

}  // namespace flash_cute
