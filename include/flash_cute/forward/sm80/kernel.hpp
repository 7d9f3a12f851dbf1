// The Ampere family's forward kernel: one thread block per tile of queries.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/forward/epilogue.hpp"
#include "flash_cute/forward/sm80/mainloop.hpp"
#include "flash_cute/forward/zero_fill.hpp"
#include "flash_cute/scheduler/tile_of_block.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

template <class Traits>
CUTE_DEVICE TileCoord find_tile(ForwardParams const&, TileOrder const& order) {
  return order(read_block_index());
}
template <class Traits>
CUTE_DEVICE MaskedVarlenTile find_tile(ForwardParams const& params, VarlenOrder const& order) {
  VarlenTile const tile = order(blockIdx.x);
  return {tile, mask_of(params, tile), unmasked_blocks<Traits>(params, tile)};
}

template <class Traits, class Order>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    forward_kernel_sm80(__grid_constant__ ForwardParams const params, __grid_constant__ Order const order) {
  if constexpr (Order::kVarlen) {
    int const tiles = order.tiles(), block = read_block_index();
    if (order.unwritten()) {  // a tile's share is cleared beside the products of others
      constexpr int kWarps = Traits::kThreads / 32;
      int const clearing = larger(tiles, smaller(int(gridDim.x), params.device.multiprocessors));
      if (block < clearing) {
        zero_fill_unwritten(params, block * kWarps + int(threadIdx.x) / 32, clearing * kWarps);
      }
    }
    if (block >= tiles) return;
  }
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const thread = threadIdx.x;

  Tensor acc_o =
      partition_fragment_C(typename Traits::TiledMma{},
                           Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  clear(acc_o);
  OnlineSoftmax<2 * decltype(size<1>(acc_o))::value, Traits::kSlack> softmax(params.softmax.scale_log2);

  constexpr bool kInSharedMemory = Order::kVarlen || Traits::kTileInSharedMemory;
  auto const of_block = tile_of_block<kInSharedMemory>([&] { return find_tile<Traits>(params, order); });
  ForwardMainloopSm80<Traits>::run(params, of_block.get(), shared, thread, softmax, acc_o);

  auto const& tile = of_block.get();
  Tensor cO = typename Traits::TiledMma{}.get_slice(thread).partition_C(
      make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{}));
  finish_rows(softmax, params, tile, PlainRows{}, cO, acc_o);
  store_lse(params, tile, PlainRows{}, softmax, cO);
  Tensor out = local_tensor<typename Traits::Element>(params.out, entry_of(tile), tile.head,
                                                      int64_t(first_query_of(tile)) + tile.m_begin,
                                                      Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});
  store_rows(out.data().get(), params.out.row_stride, mask_of(params, tile).seqlen_q - tile.m_begin,
             params.shape.head_dim, acc_o, cO);
}

}  // namespace flash_cute
