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
using RaggedTraitsSm80 =
    ForwardTraitsSm80<Instance, forward_tiles(Instance::family, Instance::head_dim).ragged()>;

template <class Instance>
RaggedOrder ragged_order_sm80(ForwardParams const& params) {
  return ragged_order(params, PackedRows(RaggedTraitsSm80<Instance>::kBlockM, 1));
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, cudaStream_t stream) {
  auto launch = [&]<class Traits, class Order>(Traits, Order const& order, int tiles) {
    launch_kernel<forward_kernel_sm80<Traits, Order>>(params.device, tiles, Traits::kThreads,
                                                      sizeof(typename Traits::SharedStorage), stream, params,
                                                      order);
  };
  if (params.lengths.given) {
    RaggedOrder const order = ragged_order_sm80<Instance>(params);
    launch_prepare</*kStartsEarly=*/false>(params, order, stream);
    launch(RaggedTraitsSm80<Instance>{}, order, most_tiles(params, order));
  } else {
    TileOrder const order = order_sm80<Instance>(params);
    launch(TraitsSm80<Instance>{}, order, order.tiles());
  }
}

template <class Instance>
int64_t ForwardLaunch<Instance>::workspace_bytes(ForwardParams const& params) {
  return params.lengths.given ? list_bytes(params, ragged_order_sm80<Instance>(params)) : 0;
}

template <class Instance>
LaunchPlan ForwardLaunch<Instance>::plan(ForwardParams const& params) {
  auto describe = [&]<class Traits, class Order>(Traits, Order const&, int tiles) {
    LaunchPlan plan{.tile = Traits::kTile,
                    .packed_heads = 1,
                    .grid = tiles,
                    .threads = Traits::kThreads,
                    .smem_bytes = sizeof(typename Traits::SharedStorage),
                    .workspace_bytes = workspace_bytes(params)};
    read_attributes(forward_kernel_sm80<Traits, Order>, plan);
    return plan;
  };
  if (params.lengths.given) {
    RaggedOrder const order = ragged_order_sm80<Instance>(params);
    return describe(RaggedTraitsSm80<Instance>{}, order, most_tiles(params, order));
  }
  TileOrder const order = order_sm80<Instance>(params);
  return describe(TraitsSm80<Instance>{}, order, order.tiles());
}

template <class Instance>
std::vector<CompiledTile> ForwardLaunch<Instance>::tiles() {
  using Traits = TraitsSm80<Instance>;
  using Ragged = RaggedTraitsSm80<Instance>;
  std::vector<CompiledTile> list{{Traits::kTile, sizeof(typename Traits::SharedStorage)}};
  if (Ragged::kBlockN != Traits::kBlockN)
    list.push_back({Ragged::kTile, sizeof(typename Ragged::SharedStorage)});
  return list;
}

}  // namespace flash_cute
