// The Hopper family's forward kernel: persistent blocks in which one warp loads and two or three warpgroups
// compute. The loading warp's neighbours, which would idle, claim tiles where these are not shared out, and
// clear the rows that no tile writes where sequences differ in length.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "flash_cute/forward/sm90/consumer.hpp"
#include "flash_cute/forward/sm90/producer.hpp"
#include "flash_cute/forward/zero_fill.hpp"

namespace flash_cute {

template <class Traits, class Order>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel_sm90(__grid_constant__ ForwardParams const params, __grid_constant__ Order const order,
                        __grid_constant__ ForwardMaps const maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    for (auto& ring_q : shared.ring_q) ring_q.init(kConsumerWarps / Traits::kConsumers);
    shared.ring_k.init(kConsumerWarps);
    shared.ring_v.init(kConsumerWarps);
    if constexpr (kIsClaimed<Order>) shared.queue.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  cudaGridDependencySynchronize();  // launched early: nothing above touches global memory

  // In this order: where loading and clearing share what they know of the list, head dim 256 spills.
  if constexpr (Order::kVarlen) {
    shared.queue.list.make(params, order);
    if (warpgroup > 0 && blockIdx.x >= shared.queue.list.tiles(order)) return;
  }
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const warp = cutlass::canonical_warp_idx_sync();
    if constexpr (Order::kVarlen) {
      constexpr int kZeroFillWarps = 2;  // the warps 1 and 2
      if (warp > 0 && warp <= kZeroFillWarps) {
        if (shared.queue.list.unwritten) {
          zero_fill_unwritten(params, blockIdx.x * kZeroFillWarps + warp - 1, gridDim.x * kZeroFillWarps);
        }
        return;
      }
      if (blockIdx.x >= shared.queue.list.tiles(order)) return;
    }
    if constexpr (kIsClaimed<Order>) {
      constexpr int kClaiming = 3;
      if (warp == kClaiming && elect_one_sync()) claim_tiles(params, order, shared.queue);
    }
    if (warp == 0 && elect_one_sync()) {
      unsigned const lane = 1u << threadIdx.x % 32;
      ForwardProducerSm90<Traits>{shared, params, maps}.run(tiles_of(params, order, shared.queue, lane));
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    ForwardConsumerSm90<Traits>{shared, params, maps, warpgroup - 1, int(threadIdx.x) % 128}.run(
        tiles_of(params, order, shared.queue, ~0u));
  }
}

}  // namespace flash_cute
