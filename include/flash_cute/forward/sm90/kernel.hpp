// The Hopper family's forward kernel: persistent blocks in which one warp loads and two or three warpgroups
// compute. Of the producer warpgroup's other warps, one takes tiles from the counter of the dynamic
// scheduler, and two zero fill the rows that no tile writes where sequences differ in length.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "flash_cute/forward/sm90/consumer.hpp"
#include "flash_cute/forward/sm90/producer.hpp"
#include "flash_cute/forward/zero_fill.hpp"

namespace flash_cute {

// The warps of the producer warpgroup.
enum class ProducerWarp { load, zero_fill_0, zero_fill_1, schedule };

template <class Traits, class Problem, class Scheduler>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel_sm90(__grid_constant__ ForwardParams const params, __grid_constant__ Problem const problem,
                        __grid_constant__ Scheduler const scheduler,
                        __grid_constant__ ForwardMaps const maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    for (auto& ring_q : shared.ring_q) ring_q.init(kConsumerWarps / Traits::kConsumers);
    shared.ring_k.init(kConsumerWarps);
    shared.ring_v.init(kConsumerWarps);
    if constexpr (Scheduler::kDynamic) shared.tile_queue.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  cudaGridDependencySynchronize();  // launched early: nothing above touches global memory

  // In this order: where loading and zero filling share what they know of the list, head dim 256 spills.
  if constexpr (Problem::kVarlen) {
    shared.varlen_list.make(params, problem.limits, problem.order, scheduler.tile_counter);
    if (warpgroup > 0 && blockIdx.x >= problem.tiles(shared.varlen_list)) return;
  }
  auto tiles = [&](unsigned lanes) {
    return tiles_of(problem, scheduler, shared.varlen_list, shared.tile_queue, lanes);
  };
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    auto const warp = ProducerWarp(cutlass::canonical_warp_idx_sync());
    if constexpr (Problem::kVarlen) {
      if (warp == ProducerWarp::zero_fill_0 || warp == ProducerWarp::zero_fill_1) {
        if (shared.varlen_list.unwritten) {
          constexpr int kWarps = 2;
          int const own = int(warp) - int(ProducerWarp::zero_fill_0);
          zero_fill_unwritten(params, blockIdx.x * kWarps + own, gridDim.x * kWarps);
        }
        return;
      }
      if (blockIdx.x >= problem.tiles(shared.varlen_list)) return;
    }
    if constexpr (Scheduler::kDynamic) {
      if (warp == ProducerWarp::schedule && elect_one_sync()) {
        schedule_tiles(problem, scheduler, shared.varlen_list, shared.tile_queue);
      }
    }
    if (warp == ProducerWarp::load && elect_one_sync()) {
      ForwardProducerSm90<Traits>{shared, params, maps}.run(tiles(1u << threadIdx.x % 32));
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    ForwardConsumerSm90<Traits>{shared, params, maps, warpgroup - 1, int(threadIdx.x) % kWarpgroupThreads}
        .run(tiles(~0u));
  }
}

}  // namespace flash_cute
