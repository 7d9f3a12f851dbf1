// Launches what stores a value of each pair on the Ampere family.
#pragma once

#include "flash_cute/pairs/prepare.cuh"
#include "flash_cute/pairs/sm80/kernel.hpp"

namespace flash_cute {

template <Family family, ElementType element>
PairPlan PairLaunch<family, element>::plan(PairParams const& params) {
  using Storage = typename PairTraitsSm80<element>::SharedStorage;
  constexpr int kMostStages = 3;
  return PairPlan::make(family, params, kMostStages, offsetof(Storage, slices));
}

template <Family family, ElementType element>
void PairLaunch<family, element>::run(PairParams const& given, WindowMask const& mask, PairPlan const& plan,
                                      void* workspace, cudaStream_t stream) {
  using Traits = PairTraitsSm80<element>;
  PairParams const params = plan.placed(given, workspace);
  prepare_pairs<family, element>(params, mask, plan, stream);
  int const bytes_of_sums = Traits::kBlockM * Traits::kSumsStride * int(sizeof(float)),
            bytes = int(offsetof(typename Traits::SharedStorage, slices)) +
                    larger(plan.tile.stages * plan.tile.stage_bytes(), bytes_of_sums);
  launch_kernel<pair_values_kernel_sm80<Traits>>(params.call.device, plan.blocks, Traits::kThreads, bytes,
                                                 stream, params, mask, plan);
  finish_pairs<family, element>(params, plan, stream);
}

}  // namespace flash_cute
