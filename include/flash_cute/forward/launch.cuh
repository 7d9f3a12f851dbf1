// Launches the kernels of a forward, in an order that both families share. A family has before this, in
// <family>/launch.cuh, FamilyForward<family>.
#pragma once

#include "flash_cute/attention/mask/prepare_table.cuh"
#include "flash_cute/forward/fold_splits.cuh"
#include "flash_cute/forward/launch.hpp"
#include "flash_cute/scheduler/varlen_prepare.cuh"

namespace flash_cute {

// Of a family: the traits of a kernel, its shared memory, how it is launched, and whether kernels start
// before those before them have ended (by programmatic dependent launch).
template <Family family>
struct FamilyForward;

// The source of a kernel's tiles. memory: the workspace.
template <ForwardKernel kernel>
SourceOf<kernel> source_of(ForwardPlan const& plan, ForwardParams const& params, WindowMask const& mask,
                           void* memory) {
  auto window_source = [&]() -> WindowSourceOf<kernel> {
    if constexpr (kernel.keys == Keys::split) {
      return {{plan.split_order(params, mask, memory), mask, PagedCoords::of(params)},
              plan.partial(params, memory),
              params.shape,
              params.lengths,
              plan.totals(memory)};
    } else if constexpr (kernel.seqlens == Seqlens::varlen) {
      return {
          VarlenOrder::make(params, plan.rows, plan.section_tiles, plan.list(memory), mask.is_longest_last()),
          mask, VarlenCoords::of(params)};
    } else {
      return {plan.order, mask, {}};
    }
  };
  if constexpr (kernel.masking == Masking::table) {
    return {window_source(), plan.mask_table(params, memory)};
  } else {
    return window_source();
  }
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, WindowMask const& mask,
                                  ForwardPlan const& plan, void* workspace, cudaStream_t stream) {
  using Of = FamilyForward<Instance::family>;
  constexpr bool kStartsEarly = Of::kStartsEarly;
  visit_kernel<ForwardListOf<Instance>>(plan.kernel, [&]<ForwardKernel kernel>() {
    using Traits = typename Of::template Traits<Instance, kernel>;
    auto const source = source_of<kernel>(plan, params, mask, workspace);
    if constexpr (kernel.seqlens == Seqlens::varlen) {
      if (plan.prepared_by_kernel) launch_varlen_prepare<kStartsEarly>(params, mask, source.order, stream);
    }
    if constexpr (kernel.masking == Masking::table) {
      launch_mask_table<kStartsEarly, SequenceOf<WindowSourceOf<kernel>>>(params, mask, source.table, stream);
    }
    Of::template launch<Traits>(params, source, plan, workspace, stream);
    if constexpr (kernel.keys == Keys::split) {
      if (plan.split.slots > 0) {
        using Element = typename Traits::Element;
        using Source = SourceOf<kernel>;
        auto* const combine = params.batch_invariant
                                  ? launch_fold<Element, Traits::kHeadDimV, kStartsEarly, Source>
                                  : launch_combine<Element, Traits::kHeadDimV, kStartsEarly, Source>;
        combine(params, source, source.partial, plan.split.slots, stream);
      }
    }
  });
}

template <class Instance>
KernelAttributes ForwardLaunch<Instance>::attributes(ForwardPlan const& plan) {
  using Of = FamilyForward<Instance::family>;
  return visit_kernel<ForwardListOf<Instance>>(plan.kernel, [&]<ForwardKernel kernel>() {
    using Traits = typename Of::template Traits<Instance, kernel>;
    return read_attributes(Of::template kernel<Traits>(), Traits::kThreads,
                           Of::template smem_bytes<Traits>(plan));
  });
}

template <class Instance>
std::vector<CompiledTile> ForwardLaunch<Instance>::tiles() {
  std::vector<CompiledTile> list;
  visit_kernels<ForwardListOf<Instance>>([&]<ForwardKernel kernel>() {
    using Traits = typename FamilyForward<Instance::family>::template Traits<Instance, kernel>;
    for (CompiledTile const& other : list) {
      if (other.tile == kernel.tile) return;
    }
    list.push_back({kernel.tile, sizeof(typename Traits::SharedStorage)});
  });
  return list;
}

}  // namespace flash_cute
