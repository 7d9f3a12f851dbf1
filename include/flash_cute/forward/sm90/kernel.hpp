// The Hopper family's forward kernel: persistent blocks in which one warp loads and two or three warpgroups
// compute. Of the producer warpgroup's other warps, one takes tiles from the counter of the dynamic
// scheduler, and two zero fill the rows that no tile writes where sequences differ in length. Where scores
// are general, one warpgroup more finds out about pairs, or at head dim 256 these two warps.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "flash_cute/forward/sm90/consumer.hpp"
#include "flash_cute/forward/sm90/pairs.hpp"
#include "flash_cute/forward/sm90/producer.hpp"
#include "flash_cute/forward/sm90/row_producer.hpp"
#include "flash_cute/forward/zero_fill.hpp"

namespace flash_cute {

// The warps of a producer warpgroup in which one loads.
enum class ProducerWarp { load, zero_fill_0, zero_fill_1, schedule };

template <class Traits>
using ProducerSm90 =
    std::conditional_t<Traits::kLoadsRows, ForwardRowProducerSm90<Traits>, ForwardProducerSm90<Traits>>;

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    forward_kernel_sm90(__grid_constant__ ForwardParams const params,
                        __grid_constant__ typename Traits::Source const source,
                        __grid_constant__ typename Traits::Scheduler const scheduler,
                        __grid_constant__ ForwardMaps const maps) {
  using Source = typename Traits::Source;
  using Producer = ProducerSm90<Traits>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    for (auto& ring_q : shared.ring_q) ring_q.init(kConsumerWarps / Traits::kConsumers);
    shared.ring_k.init(kConsumerWarps, Producer::kArrivals);
    shared.ring_v.init(kConsumerWarps, Producer::kArrivals);
    int readers = kConsumerWarps + Producer::kWarps;
    if constexpr (Traits::kHasPairTiles) {
      readers += Traits::kPairWarps;
      for (auto& ring : shared.pairs.ring_bias) ring.init(kConsumerWarps / Traits::kConsumers);
      shared.pairs.ring_words.init(kConsumerWarps, Traits::kPairWarps);
    }
    if constexpr (Traits::Scheduler::kDynamic) shared.tile_queue.init(readers);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  cudaGridDependencySynchronize();  // launched early: nothing above touches global memory
  if constexpr (Traits::kKernel.keys == Keys::split)
    cudaTriggerProgrammaticLaunchCompletion();  // combine_kernel waits by itself

  // In this order: where loading and zero filling share what they know of the list, head dim 256 spills.
  if constexpr (Source::kVarlen) {
    if constexpr (Traits::kKernel.keys == Keys::split) {
      shared.varlen_list.make(source, scheduler.tile_counter);
    } else {
      shared.varlen_list.template make<Traits::kThreads>(params, source.limits, source.order,
                                                         scheduler.tile_counter);
    }
    if (warpgroup >= Traits::kProducers && blockIdx.x >= source.tiles(shared.varlen_list)) return;
  }
  auto tiles = [&](unsigned lanes) {
    return tiles_of(source, scheduler, shared.varlen_list, shared.tile_queue, lanes);
  };
  if (warpgroup < Traits::kProducers) {
    if constexpr (Traits::kMovesRegisters) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    }
    if constexpr (Traits::kLoadsRows) {
      auto take = [&](auto& at) { take_tile(source, scheduler, shared.varlen_list, shared.tile_queue, at); };
      if (blockIdx.x < source.tiles(shared.varlen_list)) {
        Producer{shared, params, maps}.run(tiles(~0u), take);
      }
      if (shared.varlen_list.unwritten) {
        constexpr int kWarps = Producer::kWarps;
        zero_fill_unwritten<typename Traits::Element>(params, blockIdx.x * kWarps + threadIdx.x / 32,
                                                      gridDim.x * kWarps);
      }
      return;
    }
    auto const warp = ProducerWarp(cutlass::canonical_warp_idx_sync());
    if constexpr (Source::kVarlen) {
      if (warp == ProducerWarp::zero_fill_0 || warp == ProducerWarp::zero_fill_1) {
        if (shared.varlen_list.unwritten) {
          constexpr int kWarps = 2;
          int const own = int(warp) - int(ProducerWarp::zero_fill_0);
          zero_fill_unwritten<typename Traits::Element>(params, blockIdx.x * kWarps + own,
                                                        gridDim.x * kWarps);
        }
        if constexpr (Traits::kHasPairTiles && !Traits::kHasPairWarpgroup) {
          int const thread = threadIdx.x - 32 * int(ProducerWarp::zero_fill_0);
          if (blockIdx.x < source.tiles(shared.varlen_list))
            ForwardPairsSm90<Traits>{shared, params, thread}.run(tiles(~0u));
        }
        return;
      }
      if (blockIdx.x >= source.tiles(shared.varlen_list)) return;
    }
    if constexpr (Traits::Scheduler::kDynamic) {
      if (warp == ProducerWarp::schedule && elect_one_sync()) {
        schedule_tiles(source, scheduler, shared.varlen_list, shared.tile_queue);
      }
    }
    if (warp == ProducerWarp::load && elect_one_sync()) {
      ForwardProducerSm90<Traits>{shared, params, maps}.run(tiles(1u << threadIdx.x % 32));
    }
    return;
  }
  if constexpr (Traits::kHasPairWarpgroup) {
    if (warpgroup > Traits::kConsumers) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kPairRegisters>();
      ForwardPairsSm90<Traits>{shared, params, int(threadIdx.x) % kWarpgroupThreads}.run(tiles(~0u));
      return;
    }
  }
  {
    if constexpr (Traits::kMovesRegisters) {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    }
    ForwardConsumerSm90<Traits>{shared, params, maps, warpgroup - Traits::kProducers,
                                int(threadIdx.x) % kWarpgroupThreads}
        .run(tiles(~0u));
  }
}

}  // namespace flash_cute
