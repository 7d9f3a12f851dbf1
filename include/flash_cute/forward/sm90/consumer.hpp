// The Hopper family's forward maths, by one warpgroup on its 64 rows of every tile.
#pragma once

#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/online_softmax.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"
#include "flash_cute/forward/epilogue.hpp"
#include "flash_cute/forward/problem.hpp"
#include "flash_cute/forward/sm90/epilogue.hpp"
#include "flash_cute/forward/sm90/traits.hpp"

namespace flash_cute {

template <class Traits>
struct ForwardConsumerSm90 {
  using Element = typename Traits::Element;
  using TileS = Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>;
  using TileO = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>;
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  ForwardMaps const& maps;
  int warpgroup;  // among the consumers
  int thread;     // of the warpgroup
  static constexpr bool kRunsAhead = Traits::kRunsAhead;
  PipelineState<Traits::kStagesQ> at_q{};
  PipelineState<Traits::kStages> at_k{}, at_v{};

  // Blocks of keys go from the last to the first. S(n - 1) = Q K^T and O += P(n) V are in flight together,
  // and the softmax of S(n - 1) starts when its scores have arrived. Where the next tile's Q has arrived
  // already, its first scores follow this tile's last product, and are computed while O leaves. The warp
  // scheduler barrier keeps one warpgroup in its products while another one is in its softmax.
  template <class Tiles>
  CUTE_DEVICE void run(Tiles tiles) {
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});    // (M, D, STAGE)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{});    // (N, D, STAGE)
    Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutVt{});  // (D, N, STAGE)
    typename Traits::MmaQK mma_qk;
    typename Traits::MmaPV mma_pv;
    Tensor tSrQ = mma_qk.get_slice(warpgroup * kWarpgroupThreads)
                      .partition_fragment_A(sQ);  // (MMA, MMA_M, MMA_K, STAGE)
    Tensor tSrK = mma_qk.get_slice(warpgroup * kWarpgroupThreads)
                      .partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, STAGE)
    Tensor tOrV = mma_pv.get_slice(warpgroup * kWarpgroupThreads)
                      .partition_fragment_B(sVt);  // (MMA, MMA_D, MMA_N, STAGE)
    Tensor cS = mma_qk.get_slice(thread).partition_C(make_identity_tensor(TileS{}));
    Tensor cO = mma_pv.get_slice(thread).partition_C(make_identity_tensor(TileO{}));
    Tensor acc_first = partition_fragment_C(mma_qk, TileS{});  // (MMA, MMA_M, MMA_N)
    Tensor acc_o = partition_fragment_C(mma_pv, TileO{});      // (MMA, MMA_M, MMA_D)
    Tensor rP = make_tensor<Element>(partition_shape_C(mma_qk, TileS{}));
    Tensor tOrP = operand_a_view(rP);  // (MMA, MMA_M, MMA_N)
    OnlineSoftmax<2 * decltype(size<1>(acc_o))::value, Traits::kSlack> softmax(params.softmax.scale_log2);
    WarpSchedulerBarrier<Traits::kConsumers> const products{warpgroup};
    auto const& problem = tiles.problem;
    constexpr bool kSplits = std::remove_cvref_t<decltype(problem)>::kSplits;
    PackedRows const& rows = problem.rows();
    ForwardEpilogueSm90<Traits> const epilogue{shared, maps, warpgroup, thread};
    auto& ring_q = shared.ring_q[warpgroup];
    products.begin();

    auto issue_scores = [&](auto& acc_s) {
      issue_product(GMMA::ScaleOut::Zero, mma_qk, hide_address(tSrQ(_, _, _, at_q.stage)),
                    tSrK(_, _, _, at_k.stage), acc_s);
    };
    auto wait_keys = [&](auto& ring, auto const& at) {
      ring.wait(at);
      if constexpr (kSplits) cutlass::arch::fence_view_async_shared();  // no TMA has written them
    };
    auto issue_output = [&] {
      wait_keys(shared.ring_v, at_v);
      issue_product(GMMA::ScaleOut::One, mma_pv, tOrP, tOrV(_, _, _, at_v.stage), acc_o);
    };
    auto issue_first_scores = [&] {
      ring_q.wait(at_q);
      wait_keys(shared.ring_k, at_k);
      issue_scores(acc_first);
    };
    auto first_query = [&](auto const& tile) { return tile.m_begin + warpgroup * rows.queries; };
    bool const closes_early = !kSplits && params.sinks.logits;
    auto store_tile = [&](auto tile) {
      if (!closes_early) softmax.close();
      tile.m_begin = first_query(tile);
      auto const& mask = problem.mask(tile);
      if constexpr (kSplits) {
        if (tile.slot != PartTile::kWhole) {
          finish_part(softmax, acc_o);
          if (warpgroup == 0 && thread == 0 && problem.partial.tiles) problem.partial.tiles[tile.slot] = tile;
          store_partial(problem.partial, tile, warpgroup * (problem.partial.rows / rows.groups), rows,
                        softmax, cO, acc_o);
          return;
        }
      }
      if (kSplits && params.sinks.logits) {
        finish_rows_with_sinks<Element>(params.sinks, softmax, mask, tile, rows, cS, acc_o);
      } else {
        finish_rows(softmax, mask, tile.m_begin, rows, cS, acc_o);
      }
      if (rows.packed.value == 1) {  // addresses of packed rows, O's too, cost 3% at seqlen 512
        store_lse(params, problem, tile, mask.seqlen_q, PlainRows{}, softmax, cS);
      } else {
        store_lse(params, problem, tile, mask.seqlen_q, rows, softmax, cS);
      }
      epilogue.store(acc_o, problem, tile);
    };

    auto tile = tiles.first();
    products.wait();
    issue_first_scores();
    products.pass();
    wait_products<0>(acc_first);
    for (int left = tiles.count();;) {
      auto const& mask = problem.mask(tile);
      auto blocks = kv_blocks_of<Traits::kBlockN>(problem, tile);
      auto const unmasked = mask.unmasked(first_query(tile), rows.queries, Traits::kBlockN);
      auto const upcoming = tiles.next();
      auto probabilities = [&](auto& acc_s) {
        release(shared.ring_k, at_k);
        if (!blocks.is_full(unmasked)) {
          apply_mask<KeyBits>(mask, rows, first_query(tile), blocks.block * Traits::kBlockN, cS, acc_s);
        }
        return softmax.update(acc_s);
      };

      softmax.reset();
      clear(acc_o);
      probabilities(acc_first);
      convert_into<Element>(acc_first, rP);
      while (blocks.advance()) {
        Tensor acc_s = partition_fragment_C(mma_qk, TileS{});
        wait_keys(shared.ring_k, at_k);
        products.wait();
        issue_scores(acc_s);
        issue_output();
        products.pass();
        wait_products<1>(acc_s);
        auto const correction = probabilities(acc_s);
        wait_products<0>(acc_o);
        release(shared.ring_v, at_v);
        convert_into<Element>(acc_s, rP);  // before the branch: beside the exponentials
        correction.apply(acc_o);
      }

      release(ring_q, at_q);
      // Sinks count before the warpgroup waits for its turn. Behind the products, where few keys are seen,
      // they would delay those of the other warpgroups: by 8% in all (head dim 64, a window of 128 keys,
      // H200).
      if (closes_early) close_rows<Element>(params.sinks, softmax, tile, rows, cS);

      if (tiles.done(left)) {  // no product follows
        issue_output();
        wait_products<0>(acc_o);
        store_tile(tile);
        epilogue.finish();
        return;
      }
      products.wait();
      issue_output();
      if constexpr (kRunsAhead) issue_first_scores();
      products.pass();
      wait_products<kRunsAhead>(acc_o);
      release(shared.ring_v, at_v);
      store_tile(tile);
      tile = tiles.get(upcoming);
      if constexpr (!kRunsAhead) {
        ring_q.wait(at_q);  // before the barrier, behind which it would delay the other warpgroup
        products.wait();
        issue_first_scores();
        products.pass();
      }
      wait_products<0>(acc_first);
    }
  }

 private:
  // One arrival a warp, whose products have read the stage.
  template <class Ring, class Position>
  CUTE_DEVICE static void release(Ring& ring, Position& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
    at.advance();
  }
};

}  // namespace flash_cute
