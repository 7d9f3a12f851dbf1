// The main kernel of the Ampere family's backward: one thread block for each N block and KV head.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/backward/gqa_reduce.hpp"
#include "flash_cute/backward/sm80/mainloop.hpp"
#include "flash_cute/backward/sm80/mainloop_fp32.hpp"
#include "flash_cute/backward/sm80/two_role_mainloop.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"
#include "flash_cute/scheduler/tile_of_block.hpp"

namespace flash_cute {

// Tells ptxas that a value is the same in all threads of a warp, so that it can keep it in a uniform
// register. Whole warps call this. Of a tile it covers the fields that the main loop uses.
CUTE_DEVICE int uniform(int value) { return __reduce_max_sync(0xffffffffu, value); }
CUTE_DEVICE KvTile uniform(KvTile tile) {
  for (int* value : {&tile.sequence.queries.begin, &tile.sequence.mask.seqlen_q, &tile.sequence.mask.seqlen_k,
                     &tile.batch, &tile.head_kv, &tile.n_begin, &tile.first_block, &tile.q_blocks_of_head}) {
    *value = uniform(*value);
  }
  return tile;
}

template <class Traits, DqSums dq_sums>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    backward_kernel_sm80(__grid_constant__ BackwardParams const params,
                         __grid_constant__ KvTileSchedulerSm80 const order) {
  using Element = typename Traits::Element;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const thread = threadIdx.x;
  auto const of_block = tile_of_block<Traits::kTileInSharedMemory>([&]() -> typename Traits::Tile {
    return order(params, Traits::kBlockM, Traits::kBlockN, read_block_index());
  });
  auto of_loop = [&]() -> decltype(auto) {
    if constexpr (Traits::kSparesRegisters) {
      return uniform(of_block.get());
    } else {
      return of_block.get();
    }
  };
  typename Traits::Tile const& tile = of_loop();
  if (!has_rows(tile.n_begin, tile.sequence.mask.seqlen_k)) return;

  using TileKV = typename Traits::TileKV;
  typename Traits::MmaDkv const mma;
  // The thread's index among those that share its accumulator. Where the work is split, the first half has dV
  // and the second dK.
  auto own = [](int thread_of_block) {
    return Traits::kTwoRoles ? thread_of_block % Traits::kKeyThreads : thread_of_block;
  };
  auto store = [&](typename Traits::Tile const& tile, KvGradient which, TensorView const& view, auto& acc,
                   auto const& coords) {
    if (params.workspace.gqa.sums) {
      using Sums = GqaSums<Traits>;
      return Sums::add(Sums::of(params, which, Sums::sum_index(params, tile), 0, own(read_thread_index())),
                       acc);
    }
    scale_gradient<Traits>(params, which, acc);
    Tensor target = local_tensor<Element>(view, tile.batch, tile.head_kv,
                                          int64_t(tile.sequence.k_begin) + tile.n_begin, TileKV{});
    store_rows(target.data().get(), view.row_stride, tile.sequence.mask.seqlen_k - tile.n_begin,
               width_of(which, params.shape), acc, coords);
  };
  auto coords = [&] { return mma.get_slice(own(thread)).partition_C(make_identity_tensor(TileKV{})); };
  if constexpr (Traits::kTwoRoles) {
    Tensor acc = partition_fragment_C(mma, TileKV{});  // (MMA, MMA_N, MMA_D)
    clear(acc);
    BackwardTwoRoleMainloopSm80<Traits, dq_sums>::run(params, tile, shared, thread, acc);
    bool const has_dv = thread < Traits::kKeyThreads;
    store(tile, has_dv ? KvGradient::dv : KvGradient::dk, has_dv ? params.dv : params.dk, acc, coords());
  } else {
    Tensor acc_dk = partition_fragment_C(mma, TileKV{});  // (MMA, MMA_N, MMA_D)
    Tensor acc_dv = partition_fragment_C(mma, TileKV{});  // likewise
    clear(acc_dk);
    clear(acc_dv);
    BackwardMainloopSm80<Traits, dq_sums>::run(params, tile, shared, thread, acc_dk, acc_dv);
    Tensor const coords_dkv = coords();
    typename Traits::Tile const& tile_again = of_block.get();  // takes no registers during the main loop
    store(tile_again, KvGradient::dk, params.dk, acc_dk, coords_dkv);
    store(tile_again, KvGradient::dv, params.dv, acc_dv, coords_dkv);
  }
}

}  // namespace flash_cute
