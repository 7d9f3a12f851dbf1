// Launches the Hopper family's forward.
#pragma once

#include "flash_cute/forward/launch.hpp"
#include "flash_cute/forward/sm90/kernel.hpp"
#include "flash_cute/scheduler/varlen_prepare.cuh"

namespace flash_cute {

// The maps of q, k, v and out, by encode(view, rows, rows from entry to entry, heads, box).
template <class Traits, class Encode>
ForwardMaps encode_maps(ForwardParams const& params, PackedRows const& rows, VarlenEntries const& entries,
                        Encode&& encode) {
  ProblemShape const& shape = params.shape;
  TmaBox const box_q{Traits::kPanel, int(rows.packed.value), rows.queries},
      box_kv{Traits::kPanel, 1, Traits::kBlockN};
  return {.q = encode(params.q, shape.seqlen_q, entries.q, shape.heads_q, box_q),
          .k = encode(params.k, shape.seqlen_k, entries.k, shape.heads_kv, box_kv),
          .v = encode(params.v, shape.seqlen_k, entries.v, shape.heads_kv, box_kv),
          .out = encode(params.out, shape.seqlen_q, entries.out, shape.heads_q, box_q)};
}

template <class Traits>
ForwardMaps maps_of(ForwardParams const& params, TileOrder const& order) {
  ProblemShape const& shape = params.shape;
  return encode_maps<Traits>(
      params, order.rows, {}, [&](TensorView const& view, int rows, int, int heads, TmaBox box) {
        return make_tensor_map<typename Traits::Element, 4>(
            params.device.index, view.data,
            {uint64_t(shape.head_dim), uint64_t(heads), uint64_t(rows), uint64_t(shape.batch)},
            {view.head_stride, view.row_stride, view.batch_stride}, box);
      });
}

// See VarlenCoord.
template <class Traits>
ForwardMaps maps_of(ForwardParams const& params, VarlenOrder const& order) {
  using Element = typename Traits::Element;
  ProblemShape const& shape = params.shape;
  return encode_maps<Traits>(
      params, order.rows, order.entries,
      [&](TensorView const& view, int rows, int entry, int heads, TmaBox box) {
        uint64_t const planes = uint64_t(shape.batch - 1) * entry + rows + 1;
        int64_t const back = VarlenCoord::kWrap / int64_t(sizeof(Element)) - view.row_stride;
        return make_tensor_map<Element, 5>(
            params.device.index, view.data,
            {uint64_t(shape.head_dim), uint64_t(heads), VarlenCoord::kBound, planes, VarlenCoord::kBound + 1},
            {view.head_stride, view.row_stride, view.row_stride, back}, box);
      });
}

// Calls visitor(traits, type of the order) for the kernel that a plan names.
template <class Instance, class Visitor>
auto visit_kernel_sm90(ForwardPlan const& plan, Visitor&& visitor) {
  constexpr ForwardTiles kTiles = forward_tiles(Instance::family, Instance::head_dim);
  auto with = [&](auto traits) {
    return plan.varlen   ? visitor(traits, std::type_identity<VarlenOrder>{})
           : plan.claims ? visitor(traits, std::type_identity<ClaimedOrder>{})
                         : visitor(traits, std::type_identity<TileOrder>{});
  };
  if constexpr (kTiles.small.warps > 0) {
    if (plan.tile == kTiles.small) return with(ForwardTraitsSm90<Instance, kTiles.small>{});
  }
  return with(ForwardTraitsSm90<Instance, kTiles.main>{});
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, ForwardPlan const& plan, cudaStream_t stream) {
  constexpr bool kStartsEarly = true;
  visit_kernel_sm90<Instance>(plan, [&]<class Traits, class Order>(Traits, std::type_identity<Order>) {
    auto launch = [&](Order const& order) {
      launch_kernel<forward_kernel_sm90<Traits, Order>, kStartsEarly>(
          params.device, plan.blocks, Traits::kThreads, sizeof(typename Traits::SharedStorage), stream,
          params, order, maps_of<Traits>(params, order));
    };
    if constexpr (Order::kVarlen) {
      Order const order = Order::make(params, plan.rows, plan.section_tiles, plan.prepares);
      if (plan.prepares) launch_varlen_prepare<kStartsEarly>(params, order, stream);
      launch(order);
    } else if constexpr (kIsClaimed<Order>) {
      launch({plan.order, static_cast<int*>(params.lengths.workspace)});
    } else {
      launch(plan.order);
    }
  });
}

template <class Instance>
KernelAttributes ForwardLaunch<Instance>::attributes(ForwardPlan const& plan) {
  return visit_kernel_sm90<Instance>(plan, []<class Traits, class Order>(Traits, std::type_identity<Order>) {
    return read_attributes(forward_kernel_sm90<Traits, Order>, Traits::kThreads,
                           sizeof(typename Traits::SharedStorage));
  });
}

template <class Instance>
std::vector<CompiledTile> ForwardLaunch<Instance>::tiles() {
  std::vector<CompiledTile> list;
  auto add = [&]<ForwardTile tile>() {
    if constexpr (tile.warps > 0) {
      list.push_back({tile, sizeof(typename ForwardTraitsSm90<Instance, tile>::SharedStorage)});
    }
  };
  constexpr ForwardTiles kTiles = forward_tiles(Instance::family, Instance::head_dim);
  add.template operator()<kTiles.main>();
  add.template operator()<kTiles.small>();
  return list;
}

}  // namespace flash_cute
