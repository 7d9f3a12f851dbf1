// The main kernel of the Hopper family's backward. A thread block has a producer warpgroup, whose warps have
// one role each, and two consumer warpgroups; at head dims 192 and 256 a cluster of two thread blocks shares
// a tile. Where scores are general, up to head dim 128, one warpgroup more finds out about pairs, or the warp
// that has no accumulators to fetch.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "flash_cute/backward/sm90/consumer.hpp"
#include "flash_cute/backward/sm90/consumer_2cta.hpp"
#include "flash_cute/backward/sm90/dq_convert.hpp"
#include "flash_cute/backward/sm90/ds_exchange.hpp"
#include "flash_cute/backward/sm90/pairs.hpp"
#include "flash_cute/backward/sm90/producer.hpp"

namespace flash_cute {

// The roles of the producer warpgroup's warps, of which one thread each is active: load tiles, add a consumer
// warpgroup's part of dQ to the accumulator in the workspace, and fetch complete accumulators for the
// consumers to convert or, in a cluster, exchange dS with the peer. Where neither is there, all threads of
// the last one may find out about pairs.
enum class ProducerWarp {
  load,
  dq_accumulate_0,
  dq_accumulate_1,
  dq_convert,
  ds_exchange = dq_convert,
  pairs = dq_convert,
};

template <class Traits>
__global__ void __cluster_dims__(Traits::kCluster, 1, 1) __launch_bounds__(Traits::kThreads, 1)
    backward_kernel_sm90(__grid_constant__ BackwardParams const params,
                         __grid_constant__ KvTileScheduler const order,
                         __grid_constant__ BackwardMaps const maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const warpgroup = cutlass::canonical_warp_group_idx();

  if constexpr (Traits::kLseDeltaMma) {
    if (threadIdx.x < 16) Traits::LseDeltaProduct::set_ones(shared.lse_delta, threadIdx.x);
  }
  if (threadIdx.x == 0) {
    // Warps of all consumers, and of those that compute dS: in a cluster only one warpgroup does.
    constexpr int kWarps = 4 * Traits::kConsumers, kWarpsDS = 4 * Traits::kKeyGroups;
    shared.ring_k.init(kWarps);
    shared.ring_v.init(kWarpsDS);
    shared.ring_q.init(kWarps * Traits::kCluster);
    shared.ring_dout.init(kWarps * Traits::kCluster);
    // In a cluster, where the second warpgroup's part of dQ takes the memory of dS, the threads of both
    // thread blocks that add it to the workspace release the stage.
    shared.ring_ds.init(Traits::kInCluster ? Traits::kCluster : kWarps, kWarpsDS);
    shared.ring_p.init(kWarpsDS, kWarpsDS);
    int readers = kWarps + Traits::kConsumers + Traits::kInCluster;
    if constexpr (Traits::kHasPairTiles) {
      readers += Traits::kPairWarps;
      shared.pairs.ring_bias.init(kWarps);
      shared.pairs.ring_words.init(kWarps, Traits::kPairWarps);
    }
    shared.ring_tiles.init(readers);
    shared.ring_peer_k.init(kWarpsDS);
    shared.ring_tile_index.init(1);
    for (auto& read : shared.ds_read) read.init(kWarps + 1);
    for (auto& arrived : shared.peer_ds) arrived.init(1);
    for (auto& ring : shared.ring_dq) ring.init(1, 4);
    for (auto& ring : shared.ring_dq_accum) ring.init(4);
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Traits::kInCluster) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  cudaGridDependencySynchronize();  // nothing above reads what earlier kernels write

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    auto const role = ProducerWarp(cutlass::canonical_warp_idx_sync());
    if constexpr (Traits::kHasPairTiles && !Traits::kHasPairWarpgroup) {
      if (role == ProducerWarp::pairs) {
        BackwardPairsSm90<Traits>{shared, params, 0}.run();
        return;
      }
    }
    if (elect_one_sync()) {
      if (role == ProducerWarp::load) {
        BackwardProducerSm90<Traits>{shared, params, order, maps}.run();
      } else if (role <= ProducerWarp::dq_accumulate_1) {
        DqAccumulateWriter<Traits>{shared, params, int(role) - int(ProducerWarp::dq_accumulate_0)}.run();
      } else if constexpr (Traits::kInCluster) {
        DsExchange<Traits>{shared, params, maps}.run();
      } else if constexpr (Traits::kConvertsDq) {
        if (params.workspace.dq.tiles_finished)
          DqConvertLoader<Traits>{shared, params, maps, order.mask}.run();
      }
    }
  } else if (warpgroup > Traits::kConsumers) {
    if constexpr (Traits::kHasPairWarpgroup) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kPairRegisters>();
      BackwardPairsSm90<Traits>{shared, params, int(threadIdx.x) % kWarpgroupThreads / 32}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    BackwardConsumerWarpgroup<Traits> const own{shared, params, maps, warpgroup - 1,
                                                int(threadIdx.x) % kWarpgroupThreads};
    if constexpr (!Traits::kInCluster) {
      own.run(BackwardConsumerSm90<Traits>{own});
    } else if (warpgroup == 1) {
      own.run(BackwardDvConsumer2Cta<Traits>{own});
    } else {
      own.run(BackwardDkConsumer2Cta<Traits>{own});
    }
  }
  if constexpr (Traits::kInCluster) sync_cluster();  // the peer may still access this block's shared memory
}

}  // namespace flash_cute
