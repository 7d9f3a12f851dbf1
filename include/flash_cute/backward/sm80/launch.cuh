// Launches the kernels of the Ampere family's backward.
#pragma once

#include "flash_cute/attention/mask/prepare_table.cuh"
#include "flash_cute/backward/launch.hpp"
#include "flash_cute/backward/sm80/dq_kernel.hpp"
#include "flash_cute/backward/sm80/kernel.hpp"
#include "flash_cute/backward/sm80/postprocess.hpp"
#include "flash_cute/backward/sm80/preprocess.hpp"

namespace flash_cute {

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
  constexpr bool kHasTable = masking_of(Instance::variant) == Masking::table;
  auto prepare_table = [&](int block_m, int block_n, bool transposes) {
    auto table = MaskTable::make(params, params.workspace.mask_table, block_m, block_n, transposes);
    if (!transposes) ++table.has_lowest_rows;  // what the preprocess has found out stays
    launch_transposed_mask_table</*kStartsEarly=*/false>(params, mask, table, stream);
  };
  visit_kernel<BackwardListOf<Instance>>(plan.kernel, [&]<BackwardKernel kernel>() {
    using Traits = BackwardTraitsSm80<Instance, kernel.tile>;
    if constexpr (kHasTable) prepare_table(Traits::kBlockM, Traits::kBlockN, true);
    launch_kernel<backward_preprocess_sm80<Instance, Traits::kBlockM, kRowThreads>>(
        device, plan.preprocess_blocks, kRowThreads, 0, stream, params, mask);
    if (plan.runs_kv) {
      KvTileSchedulerSm80 const order{plan.order, mask};
      launch_kernel<backward_kernel_sm80<Traits, kernel.dq_sums>>(device, plan.blocks, Traits::kThreads,
                                                                  sizeof(typename Traits::SharedStorage),
                                                                  stream, ordered, order);
    }
    if (plan.gqa_reduce_blocks() > 0) {
      launch_kernel<backward_gqa_reduce<Traits>>(device, plan.gqa_reduce_blocks(), Traits::kKeyThreads, 0,
                                                 stream, ordered, mask);
    }
    if (plan.dq.is_accumulated()) {
      launch_kernel<backward_postprocess_sm80<Traits>>(device, queries, Traits::kThreads, 0, stream, ordered,
                                                       mask, postprocess_zero_fills ? zero_fill_blocks : 0);
    }
  });
  if (plan.dq.method == DqMethod::separate_kernel) {
    if constexpr (kHasTable) prepare_table(DqTraits::kBlockM, DqTraits::kBlockN, false);
    launch_kernel<backward_dq_kernel_sm80<DqTraits>>(
        device, plan.q_tiles * params.shape.heads_q, DqTraits::kThreads,
        sizeof(typename DqTraits::SharedStorage), stream, ordered, mask, plan.kernel.tile.block_m);
  }
  if (params.lengths.given && !postprocess_zero_fills) {
    launch_kernel<backward_zero_fill<Family::sm80, kRowThreads, sizeof(typename DqTraits::Element)>>(
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
  if (!plan.runs_kv) return read(DqTraits{}, backward_dq_kernel_sm80<DqTraits>);
  return visit_kernel<BackwardListOf<Instance>>(plan.kernel, [&]<BackwardKernel kernel>() {
    using Traits = BackwardTraitsSm80<Instance, kernel.tile>;
    return read(Traits{}, backward_kernel_sm80<Traits, kernel.dq_sums>);
  });
}

}  // namespace flash_cute
