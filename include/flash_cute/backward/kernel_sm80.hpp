// The Ampere family's backward kernel: one thread block per block of keys and head of K and V.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_of_block.hpp"
#include "flash_cute/backward/mainloop_sm80.hpp"

namespace flash_cute {

template <class Traits, DqSums dq_sums>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    backward_kernel_sm80(__grid_constant__ BackwardParams const params) {
  using Element = typename Traits::Element;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const thread = threadIdx.x;
  ProblemShape const& shape = params.shape;
  auto const of_block = tile_of_block<Traits::kTileInSharedMemory>([&]() -> KeyTile {
    BlockPlaces const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, Traits::kBlockN};
    BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, Traits::kBlockM};
    auto const [head_kv, place] = keys.of_block(blockIdx.x);
    int const batch = keys.sequence(place);
    return {.sequence = sequence(params, batch),
            .batch = params.lengths.cu_seqlens_q ? 0 : batch,
            .head_kv = head_kv,
            .n_begin = (place - keys.first(batch)) * Traits::kBlockN,
            .first_place = queries.first(batch),
            .places = queries.count()};
  });
  KeyTile const& tile = of_block.get();
  if (!has_rows(tile.n_begin, tile.sequence.mask.seqlen_k)) return;

  using TileKV = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  typename Traits::MmaKeys const mma;
  Tensor acc_dk = partition_fragment_C(mma, TileKV{});  // (MMA, MMA_N, MMA_D)
  Tensor acc_dv = partition_fragment_C(mma, TileKV{});  // likewise
  clear(acc_dk);
  clear(acc_dv);
  BackwardMainloopSm80<Traits, dq_sums>::run(params, tile, shared, thread, acc_dk, acc_dv);

  Tensor coords = mma.get_slice(thread).partition_C(make_identity_tensor(TileKV{}));
  CUTE_UNROLL
  for (int i = 0; i < size(acc_dk); ++i) acc_dk(i) *= params.softmax_scale;
  auto store = [&](TensorView const& view, auto const& acc) {
    Tensor target = local_tensor<Element>(view, tile.batch, tile.head_kv,
                                          int64_t(tile.sequence.k_begin) + tile.n_begin, TileKV{});
    store_rows(target.data().get(), view.row_stride, tile.sequence.mask.seqlen_k - tile.n_begin,
               shape.head_dim, acc, coords);
  };
  store(params.dk, acc_dk);
  store(params.dv, acc_dv);
}

}  // namespace flash_cute
