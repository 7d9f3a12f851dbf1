// Launches the kernels before and after those that compute values of pairs. A family's are its own: a kernel
// that two translation units compile for different GPUs would be found in either.
#pragma once

#include "flash_cute/attention/mask/prepare_table.cuh"
#include "flash_cute/backward/sm80/preprocess.hpp"
#include "flash_cute/core/launch_kernel.hpp"
#include "flash_cute/pairs/block.hpp"
#include "flash_cute/pairs/launch.hpp"

namespace flash_cute {

// The mask as a table, and LSE and delta of each query. params: placed.
template <Family family, ElementType element>
void prepare_pairs(PairParams const& params, WindowMask const& mask, PairPlan const& plan,
                   cudaStream_t stream) {
  using Any = Instance<family, element, 256, Variant::general>;  // of all head dims
  BackwardParams const& call = params.call;
  constexpr int kRowThreads = 256;
  auto const table = MaskTable::make(call, call.workspace.mask_table, PairTile::kBlockM, plan.tile.block_n,
                                     /*transposes=*/false);
  launch_mask_table</*kStartsEarly=*/family == Family::sm90>(call, mask, table, stream);
  launch_kernel<backward_preprocess_sm80<Any, PairTile::kBlockM, kRowThreads>>(
      call.device, plan.q_blocks * call.shape.heads_q, kRowThreads, 0, stream, call, mask);
}

template <Family family, ElementType element>
void finish_pairs(PairParams const& params, PairPlan const& plan, cudaStream_t stream) {
  if (plan.parts == 1) return;
  using Element = typename ElementOf<element>::type;
  DeviceInfo const& device = params.call.device;
  launch_kernel<sum_pair_parts<family, Element>>(device, 2 * device.multiprocessors, 256, 0, stream, params,
                                                 plan.parts);
}

}  // namespace flash_cute
