// The Ampere family's forward maths: O = softmax(Q K^T) V over the blocks of keys that one tile of queries
// visits.
#pragma once

#include "flash_cute/attention/online_softmax.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/core/sm80/copy_async.hpp"
#include "flash_cute/core/sm80/gemm.hpp"
#include "flash_cute/core/special_registers.hpp"
#include "flash_cute/forward/sm80/traits.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

// One that is listed carries its mask, and the blocks of keys that all of its queries see.
struct MaskedVarlenTile : VarlenTile {
  WindowMask mask;
  BlockRange unmasked;
};
CUTE_DEVICE WindowMask const& mask_of(ForwardParams const&, MaskedVarlenTile const& tile) {
  return tile.mask;
}

template <class Traits, class Tile>
CUTE_DEVICE BlockRange unmasked_blocks(ForwardParams const& params, Tile const& tile) {
  return mask_of(params, tile).unmasked(tile.m_begin, Traits::kBlockM, Traits::kBlockN);
}
template <class Traits>
CUTE_DEVICE BlockRange const& unmasked_blocks(ForwardParams const&, MaskedVarlenTile const& tile) {
  return tile.unmasked;
}

template <class Traits>
struct ForwardMainloopSm80 {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using TileShapeQ = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>;
  using TileShapeKV = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kRowsOfWarp = Traits::kBlockM / Traits::kTile.warps;
  static_assert(kStages == 1 || kStages == 2);

  // Walks the visited blocks from the last to the first. With two stages, block n - 1 is on its way while
  // block n is computed, and one barrier a block suffices; with one stage, K(n - 1) loads behind P(n) V(n),
  // V(n - 1) behind Q K(n - 1)^T. V of the first block may arrive after its scores are computed.
  template <class Tile, class Softmax, class Output>
  CUTE_DEVICE static void run(ForwardParams const& params, Tile const& tile, SharedStorage& shared,
                              int thread, Softmax& softmax, Output& acc_o) {
    ProblemShape const& shape = params.shape;
    WindowMask const& mask = mask_of(params, tile);
    BlockRange const visited = mask.visited(tile.m_begin, Traits::kBlockM, Traits::kBlockN);
    decltype(auto) unmasked = unmasked_blocks<Traits>(params, tile);
    if (visited.empty()) return;

    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});    // (M, D)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKV{});   // (N, D, STAGE)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutKV{});   // (N, D, STAGE)
    Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutVt{});  // (D, N, STAGE)

    // Global memory to shared memory.
    typename Traits::LoadAtom const load_atom;
    auto load_tile = [&](auto tile_shape, TensorView const& view, int head, int first, int begin, int rows,
                         auto&& target) {
      auto const loader = typename Traits::TiledLoad{}.get_slice(reread(thread, kRowsOfWarp > 16));
      Tensor source = local_tensor<Element>(view, entry_of(tile), head, first + begin, tile_shape);
      copy_async(load_atom, loader.partition_S(source), loader.partition_D(target),
                 loader.partition_S(make_identity_tensor(tile_shape)),
                 TileBounds{rows - begin, shape.head_dim});
    };
    auto load_kv = [&](TensorView const& view, int block, auto&& target) {
      load_tile(TileShapeKV{}, view, tile.head_kv, first_key_of(tile), block * Traits::kBlockN, mask.seqlen_k,
                target);
    };
    auto load_k = [&](int block) { load_kv(params.k, block, sK(_, _, block % kStages)); };
    auto load_v = [&](int block) { load_kv(params.v, block, sV(_, _, block % kStages)); };

    // Shared memory to registers.
    typename Traits::TiledMma const mma;
    auto const thread_mma = mma.get_slice(thread);
    Tensor tSrQ = thread_mma.partition_fragment_A(sQ);                        // (MMA, MMA_M, MMA_K)
    Tensor tSrK = thread_mma.partition_fragment_B(sK(_, _, 0));               // (MMA, MMA_N, MMA_K)
    Tensor tOrV = thread_mma.partition_fragment_B(plain_like(sVt(_, _, 0)));  // (MMA, MMA_D, MMA_N)
    auto const copy_q = make_tiled_copy_A(typename Traits::FragmentAtom{}, mma);
    auto const copy_k = make_tiled_copy_B(typename Traits::FragmentAtom{}, mma);
    auto const copy_v = make_tiled_copy_B(typename Traits::FragmentAtomTransposed{}, mma);
    Tensor tSrQ_copy = copy_q.get_slice(thread).retile_D(tSrQ);
    Tensor tSrK_copy = copy_k.get_slice(thread).retile_D(tSrK);
    Tensor tOrV_copy = copy_v.get_slice(thread).retile_D(tOrV);
    Tensor cS =
        thread_mma.partition_C(make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{}));

    load_tile(TileShapeQ{}, params.q, tile.head, first_query_of(tile), tile.m_begin, mask.seqlen_q, sQ);
    load_k(visited.end - 1);
    cp_async_fence();
    load_v(visited.end - 1);
    cp_async_fence();
    wait_for_loads<1>();

    for (int block = visited.end - 1; block >= visited.begin; --block) {
      int const stage = block % kStages;
      bool const first = block == visited.end - 1, more = block > visited.begin;
      if constexpr (kStages == 2) {
        if (more) {
          load_k(block - 1);
          load_v(block - 1);
        }
        cp_async_fence();
      }

      Tensor acc_s = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{});
      clear(acc_s);
      int const reader = reread(thread, Traits::kTile.blocks_per_sm > 1);
      Tensor tSsQ = copy_q.get_slice(reader).partition_S(sQ);
      Tensor tSsK = copy_k.get_slice(reader).partition_S(sK);
      gemm_from_shared(
          mma, acc_s, tSrQ, tSrK, [&](int k) { copy(copy_q, tSsQ(_, _, k), tSrQ_copy(_, _, k)); },
          [&](int n, int k) { copy(copy_k, tSsK(_, n, k, stage), tSrK_copy(_, n, k)); });
      if (!unmasked.contains(block)) {
        apply_mask<ComparedKeys>(mask, PlainRows{}, tile.m_begin, block * Traits::kBlockN, cS, acc_s);
      }
      softmax.update(acc_s).apply(acc_o);
      Tensor rP = convert<Element>(acc_s);
      Tensor tOrP = operand_a_view(rP);  // (MMA, MMA_M, MMA_N)

      if constexpr (kStages == 1) {
        wait_for_loads<0>();
        if (more) load_k(block - 1);
        cp_async_fence();
      } else if (first) {
        wait_for_loads<1>();
      }
      Tensor tOsV = copy_v.get_slice(reader).partition_S(sVt);
      gemm_from_shared(
          mma, acc_o, tOrP, tOrV, [](int) {},
          [&](int n, int k) { copy(copy_v, tOsV(_, n, k, stage), tOrV_copy(_, n, k)); });
      wait_for_loads<0>();
      if constexpr (kStages == 1) {
        if (more) load_v(block - 1);
        cp_async_fence();
      }
    }
  }

 private:
  // The thread's index, read anew where registers are short (32 rows a warp, several blocks an SM): what
  // follows from it need not stay in registers in between.
  CUTE_DEVICE static int reread(int thread, bool registers_are_short) {
    if (registers_are_short) thread = read_thread_index();
    return thread;
  }

  // All but the newest kPending groups of loads have arrived, for every thread of the block.
  template <int kPending>
  CUTE_DEVICE static void wait_for_loads() {
    cp_async_wait<kPending>();
    __syncthreads();
  }
};

}  // namespace flash_cute
