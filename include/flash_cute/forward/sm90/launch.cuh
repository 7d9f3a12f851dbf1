// Launches the Hopper family's forward.
#pragma once

#include "flash_cute/attention/mask/prepare_ranges.cuh"
#include "flash_cute/forward/combine.cuh"
#include "flash_cute/forward/launch.hpp"
#include "flash_cute/forward/sm90/kernel.hpp"
#include "flash_cute/scheduler/varlen_prepare.cuh"

namespace flash_cute {

template <class Traits>
TmaBox query_box(PackedRows const& rows) {
  return {Traits::kPanel, int(rows.packed.value), rows.queries};
}

// See VarlenCoord.
template <class Element>
CUtensorMap varlen_map(ForwardParams const& params, TensorView const& view, int rows, int entry_rows,
                       int heads, TmaBox box) {
  ProblemShape const& shape = params.shape;
  uint64_t const planes = uint64_t(shape.batch - 1) * entry_rows + rows + 1;
  int64_t const back = VarlenCoord::kWrap / int64_t(sizeof(Element)) - view.row_stride;
  return make_tensor_map<Element, 5>(
      params.device.index, view.data,
      {uint64_t(shape.head_dim), uint64_t(heads), VarlenCoord::kBound, planes, VarlenCoord::kBound + 1},
      {view.head_stride, view.row_stride, view.row_stride, back}, box);
}

// The maps of q, k, v and out, by encode(view, rows, rows from entry to entry, heads, box).
template <class Traits, class Encode>
ForwardMaps encode_maps(ForwardParams const& params, PackedRows const& rows, VarlenRows const& operands,
                        Encode&& encode) {
  ProblemShape const& shape = params.shape;
  TmaBox const box_q = query_box<Traits>(rows), box_kv{Traits::kPanel, 1, Traits::kBlockN};
  auto const& entry_rows = operands.entry_rows;
  return {.q = encode(params.q, shape.seqlen_q, entry_rows.q, shape.heads_q, box_q),
          .k = encode(params.k, shape.seqlen_k, entry_rows.k, shape.heads_kv, box_kv),
          .v = encode(params.v, shape.seqlen_k, entry_rows.v, shape.heads_kv, box_kv),
          .out = encode(params.out, shape.seqlen_q, entry_rows.out, shape.heads_q, box_q)};
}

template <class Traits, class Mask>
ForwardMaps maps_of(ForwardParams const& params, UniformProblem<Mask> const& problem) {
  ProblemShape const& shape = params.shape;
  return encode_maps<Traits>(
      params, problem.rows(), {}, [&](TensorView const& view, int rows, int, int heads, TmaBox box) {
        return make_tensor_map<typename Traits::Element, 4>(
            params.device.index, view.data,
            {uint64_t(shape.head_dim), uint64_t(heads), uint64_t(rows), uint64_t(shape.batch)},
            {view.head_stride, view.row_stride, view.batch_stride}, box);
      });
}

template <class Traits, class Mask>
ForwardMaps maps_of(ForwardParams const& params, VarlenProblem<Mask> const& problem) {
  return encode_maps<Traits>(params, problem.rows(), problem.operands,
                             [&](TensorView const& view, int rows, int entry_rows, int heads, TmaBox box) {
                               return varlen_map<typename Traits::Element>(params, view, rows, entry_rows,
                                                                           heads, box);
                             });
}

// Keys are loaded without a map.
template <class Traits, class Mask>
ForwardMaps maps_of(ForwardParams const& params, SplitProblem<Mask> const& problem) {
  auto map = [&](TensorView const& view, int entry_rows) {
    return varlen_map<typename Traits::Element>(params, view, params.shape.seqlen_q, entry_rows,
                                                params.shape.heads_q, query_box<Traits>(problem.rows()));
  };
  auto const& entry_rows = problem.operands.entry_rows;
  return {.q = map(params.q, entry_rows.q), .k = {}, .v = {}, .out = map(params.out, entry_rows.out)};
}

// Calls visitor(traits, type of the problem, type of the scheduler) for the kernel that a plan names.
template <class Instance, class Visitor>
auto visit_kernel_sm90(ForwardPlan const& plan, Visitor&& visitor) {
  constexpr ForwardTiles kTiles = forward_tiles(Instance::family, Instance::head_dim);
  using Uniform = std::type_identity<UniformProblem<WindowMask>>;
  using Varlen = std::type_identity<VarlenProblem<WindowMask>>;
  using Split = std::type_identity<SplitProblem<WindowMask>>;
  using Static = std::type_identity<StaticScheduler>;
  using Dynamic = std::type_identity<DynamicScheduler>;
  if constexpr (Instance::variant == Variant::split) {
    if (plan.tile == kTiles.few)
      return visitor(ForwardTraitsSm90<Instance, kTiles.few>{}, Split{}, Dynamic{});
    return visitor(ForwardTraitsSm90<Instance, kTiles.many>{}, Split{}, Dynamic{});
  } else if constexpr (Instance::variant == Variant::ranges) {
    using Ranges = std::type_identity<RangesProblem<WindowMask>>;
    using SplitRanges = std::type_identity<SplitRangesProblem<WindowMask>>;
    if (!plan.splits()) return visitor(ForwardTraitsSm90<Instance, kTiles.ranges()>{}, Ranges{}, Dynamic{});
    if (plan.tile == kTiles.few)
      return visitor(ForwardTraitsSm90<Instance, kTiles.few, true>{}, SplitRanges{}, Dynamic{});
    return visitor(ForwardTraitsSm90<Instance, kTiles.many, true>{}, SplitRanges{}, Dynamic{});
  } else {
    auto with = [&](auto traits) {
      return plan.varlen    ? visitor(traits, Varlen{}, Dynamic{})
             : plan.dynamic ? visitor(traits, Uniform{}, Dynamic{})
                            : visitor(traits, Uniform{}, Static{});
    };
    if constexpr (kTiles.small.warps > 0) {
      if (plan.tile == kTiles.small) return with(ForwardTraitsSm90<Instance, kTiles.small>{});
    }
    return with(ForwardTraitsSm90<Instance, kTiles.main>{});
  }
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, WindowMask const& mask,
                                  ForwardPlan const& plan, cudaStream_t stream) {
  constexpr bool kStartsEarly = true;
  visit_kernel_sm90<Instance>(plan, [&]<class Traits, class Problem, class Scheduler>(
                                        Traits, std::type_identity<Problem>, std::type_identity<Scheduler>) {
    Problem const problem = plan.problem<Problem>(params, mask);
    if constexpr (Problem::kVarlen) {
      if (plan.prepares) launch_varlen_prepare<kStartsEarly>(params, mask, problem.order, stream);
    }
    if constexpr (Problem::kRanges) {
      launch_prepare_ranges<kStartsEarly, typename Problem::SequenceOf>(params, mask, problem.table, stream);
    }
    Scheduler scheduler;
    if constexpr (Scheduler::kDynamic) scheduler = {plan.tile_counter(params)};
    launch_kernel<forward_kernel_sm90<Traits, Problem, Scheduler>, kStartsEarly>(
        params.device, plan.blocks, Traits::kThreads, sizeof(typename Traits::SharedStorage), stream, params,
        problem, scheduler, maps_of<Traits>(params, problem));
    if constexpr (Problem::kSplits) {
      if (plan.split.slots > 0) {
        launch_combine<typename Traits::Element, Traits::kHeadDim, kStartsEarly>(
            params, problem, problem.partial, plan.split.slots, stream);
      }
    }
  });
}

template <class Instance>
KernelAttributes ForwardLaunch<Instance>::attributes(ForwardPlan const& plan) {
  return visit_kernel_sm90<Instance>(
      plan, []<class Traits, class Problem, class Scheduler>(Traits, std::type_identity<Problem>,
                                                             std::type_identity<Scheduler>) {
        return read_attributes(forward_kernel_sm90<Traits, Problem, Scheduler>, Traits::kThreads,
                               sizeof(typename Traits::SharedStorage));
      });
}

template <class Instance>
std::vector<CompiledTile> ForwardLaunch<Instance>::tiles() {
  std::vector<CompiledTile> list;
  auto add = [&]<ForwardTile tile, bool kSplits = Instance::variant == Variant::split>() {
    if constexpr (tile.warps > 0) {
      list.push_back({tile, sizeof(typename ForwardTraitsSm90<Instance, tile, kSplits>::SharedStorage)});
    }
  };
  constexpr ForwardTiles kTiles = forward_tiles(Instance::family, Instance::head_dim);
  if constexpr (Instance::variant == Variant::split) {
    add.template operator()<kTiles.few>();
    add.template operator()<kTiles.many>();
  } else if constexpr (Instance::variant == Variant::ranges) {
    add.template operator()<kTiles.ranges()>();
    add.template operator()<kTiles.few, true>();
    if (kTiles.many != kTiles.ranges()) add.template operator()<kTiles.many, true>();
  } else {
    add.template operator()<kTiles.main>();
    add.template operator()<kTiles.small>();
  }
  return list;
}

}  // namespace flash_cute
