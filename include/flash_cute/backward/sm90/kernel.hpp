// The Hopper family's backward kernel: in a thread block one warp loads, two warpgroups compute, a warp for
// each of them adds its part of dQ to the sums, and one fetches complete sums, of which they make rows; or,
// in a cluster of two, which share a tile's keys, exchanges dS with the other block.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "flash_cute/backward/sm90/consumer.hpp"
#include "flash_cute/backward/sm90/consumer_2cta.hpp"
#include "flash_cute/backward/sm90/dq_convert.hpp"
#include "flash_cute/backward/sm90/ds_exchange.hpp"
#include "flash_cute/backward/sm90/producer.hpp"

namespace flash_cute {

template <class Traits, class Mask>
__global__ void __cluster_dims__(Traits::kCluster, 1, 1) __launch_bounds__(Traits::kThreads, 1)
    backward_kernel_sm90(__grid_constant__ BackwardParams const params,
                         __grid_constant__ KvTileScheduler<Mask> const order,
                         __grid_constant__ BackwardMaps const maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const warpgroup = cutlass::canonical_warp_group_idx();

  if constexpr (Traits::kLseDeltaMma) {
    if (threadIdx.x < 16) Traits::Terms::set_ones(shared.of_queries, threadIdx.x);
  }
  if (threadIdx.x == 0) {
    // In a cluster both have the same keys, so kWarpsDS are those of one.
    constexpr int kWarps = 4 * Traits::kConsumers, kWarpsDS = 4 * Traits::kKeyGroups;
    shared.ring_k.init(kWarps);
    shared.ring_v.init(kWarpsDS);
    shared.ring_q.init(kWarps * Traits::kCluster);
    shared.ring_dout.init(kWarps * Traits::kCluster);
    // In a cluster, where dQ takes the memory of dS, those who add it give it back, of both blocks.
    shared.ring_ds.init(Traits::kInCluster ? Traits::kCluster : kWarps, kWarpsDS);
    shared.ring_p.init(kWarpsDS, kWarpsDS);
    shared.ring_tiles.init(kWarps + Traits::kConsumers + Traits::kInCluster);
    shared.ring_peer_k.init(kWarpsDS);
    shared.ring_index.init(1);
    for (auto& read : shared.ds_read) read.init(kWarps + 1);
    for (auto& arrived : shared.peer_ds) arrived.init(1);
    for (auto& ring : shared.ring_dq) ring.init(1, 4);
    for (auto& ring : shared.ring_sums) ring.init(4);
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Traits::kInCluster) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  cudaGridDependencySynchronize();  // launched early: nothing above touches global memory

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const warp = cutlass::canonical_warp_idx_sync();
    if (elect_one_sync()) {
      if (warp == 0) {
        BackwardProducerSm90<Traits, Mask>{shared, params, order, maps}.run();
      } else if (warp <= Traits::kConsumers) {
        DqAccumulateWriter<Traits>{shared, params, warp - 1}.run();
      } else if constexpr (Traits::kInCluster) {
        DsExchange<Traits>{shared, params, maps}.run();
      } else if (params.workspace.dq.tiles_finished) {
        DqConvertLoader<Traits, Mask>{shared, params, maps, order.mask}.run();
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    BackwardConsumerWarpgroup<Traits> const own{shared, params, maps, warpgroup - 1, int(threadIdx.x) % 128};
    if constexpr (!Traits::kInCluster) {
      own.run(BackwardConsumerSm90<Traits>{own});
    } else if (warpgroup == 1) {
      own.run(BackwardDvConsumer2Cta<Traits>{own});
    } else {
      own.run(BackwardDkConsumer2Cta<Traits>{own});
    }
  }
  if constexpr (Traits::kInCluster) sync_cluster();  // nobody sends to a block that has ended
}

}  // namespace flash_cute
