// Launches what stores a value of each pair on the Hopper family.
#pragma once

#include "flash_cute/attention/keys/tensor_maps.hpp"
#include "flash_cute/pairs/prepare.cuh"
#include "flash_cute/pairs/sm90/kernel.hpp"

namespace flash_cute {

template <Family family, ElementType element>
PairPlan PairLaunch<family, element>::plan(PairParams const& params) {
  return PairPlan::make(family, params, PairTraitsSm90<element>::kStages, 0);
}

template <Family family, ElementType element>
void PairLaunch<family, element>::run(PairParams const& given, WindowMask const& mask, PairPlan const& plan,
                                      void* workspace, cudaStream_t stream) {
  using Traits = PairTraitsSm90<element>;
  PairParams const params = plan.placed(given, workspace);
  BackwardParams const& call = params.call;
  auto const [batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v] = call.shape;
  auto map = [&](TensorView const& view, int columns, int heads, int rows) {
    return uniform_map<typename Traits::Element, 4>(call.device.index, view, {columns, heads, rows, batch},
                                                    {Traits::kColumns, 1, 128});
  };
  PairMaps maps{.q = map(call.q, head_dim, heads_q, seqlen_q),
                .k = map(call.k, head_dim, heads_kv, seqlen_k),
                .v = {},
                .dout = {}};
  if (params.has_dp()) {
    maps.v = map(call.v, head_dim_v, heads_kv, seqlen_k);
    maps.dout = map(call.dout, head_dim_v, heads_q, seqlen_q);
  }
  prepare_pairs<family, element>(params, mask, plan, stream);
  launch_kernel<pair_values_kernel_sm90<Traits>>(call.device, plan.blocks, Traits::kThreads,
                                                 sizeof(typename Traits::SharedStorage), stream, params, mask,
                                                 plan, maps);
  finish_pairs<family, element>(params, plan, stream);
}

}  // namespace flash_cute
