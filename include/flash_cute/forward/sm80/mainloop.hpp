// The Ampere family's forward maths: O = softmax(Q K^T) V over the blocks of keys that one tile of queries
// visits.
#pragma once

#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/online_softmax.hpp"
#include "flash_cute/attention/scores/general.hpp"
#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/core/sm80/gemm.hpp"
#include "flash_cute/forward/sm80/loads.hpp"

namespace flash_cute {

// A tile in shared memory carries its mask and the blocks of keys that all of its queries see, where these
// are not in the kernel's parameters.
template <class Tile, class Mask>
struct MaskedTile : Tile {
  Mask mask;
  decltype(std::declval<Mask>().full(0, 0, 0)) full_blocks;
};

// The rows of a tile. Only where rows are loaded by their addresses do several heads share one.
template <class Source>
  requires(!std::is_base_of_v<SplitSource, Source>)
CUTE_DEVICE OneHead rows_of(Source const&) {
  return {};
}
CUTE_DEVICE PackGqa const& rows_of(SplitSource const& source) { return source.rows(); }
template <class Traits>
CUTE_DEVICE int queries_of(OneHead const&) {
  return Traits::kBlockM;
}
template <class Traits>
CUTE_DEVICE int queries_of(PackGqa const& rows) {
  return rows.tile_queries();
}

// The tile of a thread block as it lies in shared memory.
template <class Traits>
CUTE_DEVICE TileCoord cta_tile(UniformSource const& source, int index) {
  return source.tile(index);
}
template <class Traits, class Source>
CUTE_DEVICE auto cta_tile(Source const& source, int index) {
  typename Source::Tile const tile = source.tile(index);
  auto const mask = source.mask(tile);
  return MaskedTile<typename Source::Tile, std::remove_const_t<decltype(mask)>>{
      tile, mask, mask.full(tile.m_begin, queries_of<Traits>(rows_of(source)), Traits::kBlockN)};
}

CUTE_DEVICE WindowMask const& mask_of(UniformSource const& source, TileCoord const& tile) {
  return source.mask(tile);
}
template <class Source, class Tile, class Mask>
CUTE_DEVICE Mask const& mask_of(Source const&, MaskedTile<Tile, Mask> const& tile) {
  return tile.mask;
}

template <class Traits>
CUTE_DEVICE auto full_blocks_of(UniformSource const& source, TileCoord const& tile) {
  return source.mask(tile).full(tile.m_begin, Traits::kBlockM, Traits::kBlockN);
}
template <class Traits, class Source, class Tile, class Mask>
CUTE_DEVICE auto const& full_blocks_of(Source const&, MaskedTile<Tile, Mask> const& tile) {
  return tile.full_blocks;
}

// What the walk over the blocks of keys that a tile visits is made of.
template <class Traits, class Source, class Tile, class Mask>
CUTE_DEVICE auto visited_of(Source const& source, Tile const& tile, Mask const& mask) {
  if constexpr (std::is_same_v<typename Source::Walk, KvBlocks>) {
    return visited_blocks<Traits::kBlockN>(mask, queries_of<Traits>(rows_of(source)), tile);
  } else {
    return source.walk(tile);
  }
}

// Products become scores, where the kernel knows of any others.
template <class Traits, class Source, class Tile, class Coords, class Values>
CUTE_DEVICE void change_scores(ForwardParams const& params, Source const& source, Tile const& tile, int block,
                               Coords const& cS, Values& acc_s) {
  if constexpr (Traits::kKernel.scores == Scores::general) {
    if (!params.scores.change()) return;
    ScorePlace const place = source.place(tile);
    AlibiSlopes<QueryAxis::rows, Coords> slopes;
    slopes.begin(params.scores, place, rows_of(source), tile.m_begin, cS);
    constexpr BiasLoads kLoads = Traits::kKernel.keys == Keys::split ? BiasLoads::none : BiasLoads::threads;
    GeneralScores<typename Traits::Element, kLoads>::template change<QueryAxis::rows>(
        params.scores, place, rows_of(source), tile.m_begin, block * Traits::kBlockN, cS, slopes, acc_s);
  }
}
// Probabilities of pairs that dropout drops become 0.
template <class Traits, class Source, class Tile, class Coords, class Values>
CUTE_DEVICE void drop(ForwardParams const& params, Source const& source, Tile const& tile, int block,
                      Coords const& cS, Values& acc_s) {
  if constexpr (Traits::kKernel.scores == Scores::general && Traits::kKernel.keys == Keys::whole) {
    TileDropout<QueryAxis::rows, Coords>(params.scores, source.place(tile), params.shape.heads_q,
                                         tile.m_begin, block * Traits::kBlockN, cS)
        .clear(acc_s);
  }
}

template <class Traits>
struct ForwardMainloopSm80 {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kStages = Traits::kStages;
  static_assert(kStages == 1 || kStages == 2);

  // Goes through the visited blocks from the last to the first. With two stages, block n - 1 loads while
  // block n is computed, and one barrier a block suffices; with one stage, K(n - 1) loads under P(n) V(n),
  // V(n - 1) under Q K(n - 1)^T. V of the first block may arrive after its scores are computed.
  template <class Source, class Tile, class Softmax, class Output>
  CUTE_DEVICE static void run(ForwardParams const& params, Source const& source, Tile const& tile,
                              SharedStorage& shared, int thread, Softmax& softmax, Output& acc_o) {
    auto const& mask = mask_of(source, tile);
    using Mask = std::remove_cvref_t<decltype(mask)>;
    auto const visited = visited_of<Traits>(source, tile, mask);
    using Walk = typename Source::Walk;
    decltype(auto) full_blocks = full_blocks_of<Traits>(source, tile);
    if (visited.empty()) return;

    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});    // (M, D)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{});    // (N, D, STAGE)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutV{});    // (N, D, STAGE)
    Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutVt{});  // (D, N, STAGE)

    // Global memory to shared memory.
    LoadsSm80<Traits, Tile, Mask> loads{params, source, tile, mask, thread};
    // Stages of neighbours in the walk differ, where blocks lie between them, too. remaining: blocks after
    // this one.
    auto stage_of = [](int block, int remaining) {
      return (Walk::kNeighbours ? block : remaining) % kStages;
    };
    auto load_k = [&](int block, int remaining) {
      loads.load_k(block, sK(_, _, stage_of(block, remaining)));
    };
    auto load_v = [&](int block, int remaining) {
      loads.load_v(block, sV(_, _, stage_of(block, remaining)));
    };

    // Shared memory to registers.
    typename Traits::TiledMma const mma;
    auto const thread_mma = mma.get_slice(thread);
    Tensor tSrQ = thread_mma.partition_fragment_A(sQ);                        // (MMA, MMA_M, MMA_K)
    Tensor tSrK = thread_mma.partition_fragment_B(sK(_, _, 0));               // (MMA, MMA_N, MMA_K)
    Tensor tOrV = thread_mma.partition_fragment_B(plain_like(sVt(_, _, 0)));  // (MMA, MMA_D, MMA_N)
    auto const copy_q = make_tiled_copy_A(typename Traits::TensorCore::FragmentAtom{}, mma);
    auto const copy_k = make_tiled_copy_B(typename Traits::TensorCore::FragmentAtom{}, mma);
    auto const copy_v = make_tiled_copy_B(typename Traits::TensorCore::FragmentAtomTransposed{}, mma);
    Tensor tSrQ_copy = copy_q.get_slice(thread).retile_D(tSrQ);
    Tensor tSrK_copy = copy_k.get_slice(thread).retile_D(tSrK);
    Tensor tOrV_copy = copy_v.get_slice(thread).retile_D(tOrV);
    Tensor cS =
        thread_mma.partition_C(make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{}));

    int const first_block = Walk(visited).block, first_remaining = Walk(visited).remaining();
    loads.start(first_block);
    loads.load_q(sQ);
    load_k(first_block, first_remaining);
    cp_async_fence();
    load_v(first_block, first_remaining);
    cp_async_fence();
    wait_for_loads<1>();

    for (Walk blocks(visited); !blocks.done(); blocks.advance()) {
      int const stage = stage_of(blocks.block, blocks.remaining());
      bool const first = blocks.is_first(), more = blocks.remaining() > 0;
      if constexpr (kStages == 2) {
        if (more) {
          load_k(blocks.next(), blocks.remaining() - 1);
          load_v(blocks.next(), blocks.remaining() - 1);
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
      change_scores<Traits>(params, source, tile, blocks.block, cS, acc_s);
      if (!blocks.is_full(full_blocks)) {
        apply_mask<ComparedKeys>(mask, rows_of(source), tile.m_begin, blocks.block * Traits::kBlockN, cS,
                                 acc_s);
      }
      softmax.update(acc_s).apply(acc_o);
      drop<Traits>(params, source, tile, blocks.block, cS, acc_s);
      Tensor rP = convert<Element>(acc_s);
      Tensor tOrP = operand_a_view(rP);  // (MMA, MMA_M, MMA_N)

      if constexpr (kStages == 1) {
        wait_for_loads<0>();
        if (more) load_k(blocks.next(), blocks.remaining() - 1);
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
        if (more) load_v(blocks.next(), blocks.remaining() - 1);
        cp_async_fence();
      }
    }
  }

 private:
  // All but the newest kPending groups of loads have arrived, for every thread of the block.
  template <int kPending>
  CUTE_DEVICE static void wait_for_loads() {
    cp_async_wait<kPending>();
    __syncthreads();
  }
};

}  // namespace flash_cute
