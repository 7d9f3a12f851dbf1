// The Ampere family's forward kernel: one thread block per tile of queries.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/forward/epilogue.hpp"
#include "flash_cute/forward/sm80/mainloop.hpp"
#include "flash_cute/forward/sm80/mainloop_fp32.hpp"
#include "flash_cute/forward/zero_fill.hpp"
#include "flash_cute/scheduler/tile_of_block.hpp"

namespace flash_cute {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    forward_kernel_sm80(__grid_constant__ ForwardParams const params,
                        __grid_constant__ typename Traits::Source const source) {
  using Source = typename Traits::Source;
  constexpr bool kSplitKeys = Traits::kKernel.keys == Keys::split;
  if constexpr (Source::kVarlen) {
    int const tiles = source.order.tiles(), block = read_block_index();
    if (source.order.unwritten()) {  // each block zero fills its share beside the products of others
      constexpr int kWarps = Traits::kThreads / 32;
      int const clearing = larger(tiles, smaller(int(gridDim.x), params.device.multiprocessors));
      if (block < clearing) {
        zero_fill_unwritten<typename Traits::Element>(params, block * kWarps + int(threadIdx.x) / 32,
                                                      clearing * kWarps);
      }
    }
    if (block >= tiles) return;
  }
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const thread = threadIdx.x;

  Tensor acc_o =
      partition_fragment_C(typename Traits::TiledMma{},
                           Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDimV>>{});  // (MMA, MMA_M, MMA_D)
  clear(acc_o);
  OnlineSoftmax<2 * decltype(size<1>(acc_o))::value, Traits::kRescaleThreshold> softmax(
      params.softmax.scale_log2);

  constexpr bool kInSharedMemory = Source::kVarlen || Traits::kTileInSharedMemory;
  auto const of_block = tile_of_block<kInSharedMemory>(
      [&] { return cta_tile<Traits>(source, Source::kVarlen ? int(blockIdx.x) : read_block_index()); });
  auto coords_of = [](int thread) {
    return typename Traits::TiledMma{}.get_slice(thread).partition_C(
        make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDimV>>{}));
  };
  ForwardMainloopSm80<Traits>::run(params, source, of_block.get(), shared, thread, softmax, acc_o);

  auto const& tile = of_block.get();
  Tensor cO = coords_of(thread);
  auto const& mask = mask_of(source, tile);
  auto const& rows = rows_of(source);
  finalize_rows<Traits>(params, softmax, tile, rows, cO);
  if constexpr (kSplitKeys) {
    if (tile.slot != SplitTile::kUnsplit) {
      normalize_split(softmax, acc_o);
      store_partial(source.partial, tile, 0, rows, softmax, cO, acc_o);
      return;
    }
  }
  normalize_rows<Traits>(params, softmax, mask, tile, rows, cO, acc_o);
  store_lse(params, source, tile, mask.seqlen_q, rows, softmax, cO);
  RowCoord const first = source.operands.query(tile, tile.m_begin);
  Tensor out = local_tensor<typename Traits::Element>(params.out, first.entry, tile.head, first.row,
                                                      Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDimV>>{});
  store_rows(out.data().get(), params.out.row_stride, params.out.head_stride, rows,
             mask.seqlen_q - tile.m_begin, params.shape.head_dim_v, acc_o, cO);
}

}  // namespace flash_cute
