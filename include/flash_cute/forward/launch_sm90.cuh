// Launches the Hopper family's forward.
#pragma once

#include "flash_cute/core/launch.cuh"
#include "flash_cute/forward/kernel_sm90.hpp"
#include "flash_cute/forward/launch.hpp"

namespace flash_cute {

// One block an SM goes through many tiles, loading ahead. Long tiles of unequal length are better handed out
// one by one, as SMs become free: there the start of a block matters less than who is left with the last long
// tile.
template <class Instance>
int ForwardLaunch<Instance>::grid(ForwardParams const& params) {
  using Traits = ForwardTraitsSm90<Instance>;
  constexpr int kLongTile = 64;  // blocks of keys
  TileOrder const order = forward_order<Traits>(params);
  auto blocks = [&](int m_block) {
    BlockRange const visited =
        params.mask.visited(m_block * Traits::kBlockM, Traits::kBlockM, Traits::kBlockN);
    return visited.end - visited.begin;
  };
  int const first = blocks(0), last = blocks(order.m_blocks - 1);
  bool const one_by_one = first != last && larger(first, last) >= kLongTile;
  return one_by_one ? order.tiles() : smaller(params.device.multiprocessors, order.tiles());
}

template <class Instance>
int ForwardLaunch<Instance>::smem_bytes() {
  return sizeof(typename ForwardTraitsSm90<Instance>::SharedStorage);
}

template <class Instance>
cudaError_t ForwardLaunch<Instance>::run(ForwardParams const& params, cudaStream_t stream) {
  using Traits = ForwardTraitsSm90<Instance>;
  ProblemShape const& shape = params.shape;
  ForwardMaps maps;
  auto encode = [&](CUtensorMap& map, TensorView const& view, int seqlen, int heads, int rows) {
    return make_tensor_map<typename Traits::Element>(map, view, shape.head_dim, seqlen, heads, shape.batch,
                                                     Traits::kPanel, rows);
  };
  cudaError_t status = encode(maps.q, params.q, shape.seqlen_q, shape.heads_q, Traits::kBlockM);
  if (status == cudaSuccess)
    status = encode(maps.k, params.k, shape.seqlen_k, shape.heads_kv, Traits::kBlockN);
  if (status == cudaSuccess)
    status = encode(maps.v, params.v, shape.seqlen_k, shape.heads_kv, Traits::kBlockN);
  if (status != cudaSuccess) return status;
  return launch_kernel(forward_kernel_sm90<Traits>, grid(params), Traits::kThreads, smem_bytes(), stream,
                       params, forward_order<Traits>(params), maps);
}

template <class Instance>
cudaError_t ForwardLaunch<Instance>::report(KernelReport& report) {
  using Traits = ForwardTraitsSm90<Instance>;
  return report_kernel(forward_kernel_sm90<Traits>, Traits::kThreads, smem_bytes(), report);
}

}  // namespace flash_cute
