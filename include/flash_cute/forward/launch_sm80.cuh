// Launches the Ampere family's forward.
#pragma once

#include "flash_cute/forward/kernel_sm80.hpp"
#include "flash_cute/forward/launch.hpp"
#include "flash_cute/forward/launch_kernel.cuh"

namespace flash_cute {

template <class Instance>
using TraitsSm80 = ForwardTraitsSm80<Instance, forward_tiles(Instance::family, Instance::head_dim).main>;

template <class Instance>
TileOrder order_sm80(ForwardParams const& params) {
  using Traits = TraitsSm80<Instance>;
  return forward_order<Traits>(params, PackedRows(Traits::kBlockM, 1));
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, cudaStream_t stream) {
  using Traits = TraitsSm80<Instance>;
  TileOrder const order = order_sm80<Instance>(params);
  launch_kernel<forward_kernel_sm80<Traits>>(params.device, order.tiles(), Traits::kThreads,
                                             sizeof(typename Traits::SharedStorage), stream, params, order);
}

template <class Instance>
LaunchPlan ForwardLaunch<Instance>::plan(ForwardParams const& params) {
  using Traits = TraitsSm80<Instance>;
  LaunchPlan plan{.tile = Traits::kTile,
                  .packed_heads = 1,
                  .grid = order_sm80<Instance>(params).tiles(),
                  .threads = Traits::kThreads,
                  .smem_bytes = sizeof(typename Traits::SharedStorage)};
  read_attributes(forward_kernel_sm80<Traits>, plan);
  return plan;
}

template <class Instance>
std::vector<CompiledTile> ForwardLaunch<Instance>::tiles() {
  using Traits = TraitsSm80<Instance>;
  return {{Traits::kTile, sizeof(typename Traits::SharedStorage)}};
}

}  // namespace flash_cute
