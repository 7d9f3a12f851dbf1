// Launches the Ampere family's forward.
#pragma once

#include "flash_cute/forward/kernel_sm80.hpp"
#include "flash_cute/forward/launch.hpp"
#include "flash_cute/forward/launch_kernel.cuh"
#include "flash_cute/forward/launch_ragged.cuh"

namespace flash_cute {

template <class Instance>
using TraitsSm80 = ForwardTraitsSm80<Instance, forward_tiles(Instance::family, Instance::head_dim).main>;

template <class Instance>
TileOrder order_sm80(ForwardParams const& params) {
  using Traits = TraitsSm80<Instance>;
  return forward_order<Traits>(params, PackedRows(Traits::kBlockM, 1));
}

template <class Instance>
RaggedOrder ragged_order_sm80(ForwardParams const& params) {
  return ragged_order(params, PackedRows(TraitsSm80<Instance>::kBlockM, 1));
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, cudaStream_t stream) {
  using Traits = TraitsSm80<Instance>;
  auto launch = [&]<class Order>(Order const& order, int tiles) {
    launch_kernel<forward_kernel_sm80<Traits, Order>>(params.device, tiles, Traits::kThreads,
                                                      sizeof(typename Traits::SharedStorage), stream, params,
                                                      order);
  };
  if (params.lengths.given) {
    RaggedOrder const order = ragged_order_sm80<Instance>(params);
    launch_prepare</*kStartsEarly=*/false>(params, order, stream);
    launch(order, most_tiles(params, order));
  } else {
    TileOrder const order = order_sm80<Instance>(params);
    launch(order, order.tiles());
  }
}

template <class Instance>
int64_t ForwardLaunch<Instance>::workspace_bytes(ForwardParams const& params) {
  return params.lengths.given ? list_bytes(params, ragged_order_sm80<Instance>(params)) : 0;
}

template <class Instance>
LaunchPlan ForwardLaunch<Instance>::plan(ForwardParams const& params) {
  using Traits = TraitsSm80<Instance>;
  LaunchPlan plan{.tile = Traits::kTile,
                  .packed_heads = 1,
                  .threads = Traits::kThreads,
                  .smem_bytes = sizeof(typename Traits::SharedStorage),
                  .workspace_bytes = workspace_bytes(params)};
  if (params.lengths.given) {
    RaggedOrder const order = ragged_order_sm80<Instance>(params);
    plan.grid = most_tiles(params, order);
    read_attributes(forward_kernel_sm80<Traits, RaggedOrder>, plan);
  } else {
    plan.grid = order_sm80<Instance>(params).tiles();
    read_attributes(forward_kernel_sm80<Traits, TileOrder>, plan);
  }
  return plan;
}

template <class Instance>
std::vector<CompiledTile> ForwardLaunch<Instance>::tiles() {
  using Traits = TraitsSm80<Instance>;
  return {{Traits::kTile, sizeof(typename Traits::SharedStorage)}};
}

}  // namespace flash_cute
