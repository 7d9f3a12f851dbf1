// The Hopper family's forward kernel: persistent blocks in which one warp loads and two or three warpgroups
// compute.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "flash_cute/forward/consumer_sm90.hpp"
#include "flash_cute/forward/epilogue.hpp"
#include "flash_cute/forward/producer_sm90.hpp"

namespace flash_cute {

// The tiles of one block: to and fro over the longest-first order, which evens out what the blocks get.
template <class Visitor>
CUTE_DEVICE void for_each_tile(TileOrder const& order, Visitor visitor) {
  int const tiles = order.tiles(), blocks = gridDim.x, block = blockIdx.x;
  for (int round = 0; round * blocks < tiles; ++round) {
    int const index = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
    if (index < tiles) visitor(order(index));
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel_sm90(__grid_constant__ ForwardParams const params, __grid_constant__ TileOrder const order,
                        __grid_constant__ ForwardMaps const maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    shared.ring_q.init(kConsumerWarps);
    shared.ring_k.init(kConsumerWarps);
    shared.ring_v.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (cutlass::canonical_warp_idx_sync() == 0 && elect_one_sync()) {
      ForwardProducerSm90<Traits> producer{shared, params, maps};
      for_each_tile(order, [&](TileCoord const& tile) { producer.load(tile); });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    int const thread = threadIdx.x - 128;
    ForwardConsumerSm90<Traits> consumer{shared, params, warpgroup - 1, thread};
    WarpgroupTurns<Traits::kConsumers>{warpgroup - 1}.begin();
    using TileO = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>;
    typename Traits::MmaPV const mma;
    Tensor cO = mma.get_slice(thread).partition_C(make_identity_tensor(TileO{}));

    for_each_tile(order, [&](TileCoord const& tile) {
      Tensor acc_o = partition_fragment_C(mma, TileO{});  // (MMA, MMA_M, MMA_D)
      clear(acc_o);
      OnlineSoftmax<2 * decltype(size<1>(acc_o))::value> softmax(params.softmax.scale_log2);
      consumer.run(tile, softmax, acc_o);
      softmax.finish(acc_o);
      int const m_begin = tile.m_block * Traits::kBlockM;
      store_lse(params, tile, m_begin, softmax, cO);
      store_output<typename Traits::Element>(params, tile, m_begin, acc_o, cO);
    });
  }
}

}  // namespace flash_cute
