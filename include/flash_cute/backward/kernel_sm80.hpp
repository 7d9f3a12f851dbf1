// The Ampere family's backward kernel: one thread block per block of keys and head of K and V.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_of_block.hpp"
#include "flash_cute/backward/key_parts.hpp"
#include "flash_cute/backward/mainloop_sm80.hpp"

namespace flash_cute {

// The tile of a thread block. Where sequences are not alike it goes head by head; else as `order` has it, but
// that the blocks of keys of so many pairs of a sequence and a head, the last ones, go side by side.
template <int kBlockM, int kBlockN>
CUTE_DEVICE KeyTile find_tile(BackwardParams const& params, TileOrder const& order, int last_pairs) {
  ProblemShape const& shape = params.shape;
  BlockPlaces const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, kBlockN};
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  int const index = read_block_index();
  TileCoord found;
  if (params.lengths.given) {
    auto const [head_kv, place] = keys.of_block(index);
    int const b = keys.sequence(place);
    found = {.m_begin = (place - keys.first(b)) * kBlockN, .head_kv = head_kv, .batch = b};
  } else if (int const behind = index - (order.sequences - last_pairs) * order.m_blocks; behind < 0) {
    found = order(index);
  } else {
    int const rank = behind / last_pairs, block = order.descending ? order.m_blocks - 1 - rank : rank;
    int const pair = order.sequences - last_pairs + behind - rank * last_pairs, b = pair / shape.heads_kv;
    found = {.m_begin = block * kBlockN, .head_kv = pair - b * shape.heads_kv, .batch = b};
  }
  return {.sequence = sequence(params, found.batch),
          .pair = found.batch * shape.heads_kv + found.head_kv,
          .batch = params.lengths.cu_seqlens_q ? 0 : found.batch,
          .head_kv = found.head_kv,
          .n_begin = found.m_begin,
          .first_place = queries.first(found.batch),
          .places = queries.count()};
}

template <class Traits, DqSums dq_sums>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    backward_kernel_sm80(__grid_constant__ BackwardParams const params,
                         __grid_constant__ TileOrder const order, int const last_pairs) {
  using Element = typename Traits::Element;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const thread = threadIdx.x;
  auto const of_block = tile_of_block<Traits::kTileInSharedMemory>(
      [&] { return find_tile<Traits::kBlockM, Traits::kBlockN>(params, order, last_pairs); });
  KeyTile const& tile = of_block.get();
  if (!has_rows(tile.n_begin, tile.sequence.mask.seqlen_k)) return;

  using TileKV = typename Traits::TileKV;
  typename Traits::MmaKeys const mma;
  Tensor acc_dk = partition_fragment_C(mma, TileKV{});  // (MMA, MMA_N, MMA_D)
  Tensor acc_dv = partition_fragment_C(mma, TileKV{});  // likewise
  clear(acc_dk);
  clear(acc_dv);
  BackwardMainloopSm80<Traits, dq_sums>::run(params, tile, shared, thread, acc_dk, acc_dv);

  Tensor coords = mma.get_slice(thread).partition_C(make_identity_tensor(TileKV{}));
  auto store = [&](KeyGradient which, TensorView const& view, auto& acc) {
    if (params.workspace.dkv) {
      using Parts = KeyParts<Traits>;
      return Parts::store(Parts::of(params, which, Parts::slot_of(params, tile), 0, read_thread_index()),
                          acc);
    }
    scale_gradient(params, which, acc);
    Tensor target = local_tensor<Element>(view, tile.batch, tile.head_kv,
                                          int64_t(tile.sequence.k_begin) + tile.n_begin, TileKV{});
    store_rows(target.data().get(), view.row_stride, tile.sequence.mask.seqlen_k - tile.n_begin,
               params.shape.head_dim, acc, coords);
  };
  store(KeyGradient::dk, params.dk, acc_dk);
  store(KeyGradient::dv, params.dv, acc_dv);
}

}  // namespace flash_cute
