// The Hopper family's forward maths, by one warpgroup on its 64 rows of every tile.
#pragma once

#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/online_softmax.hpp"
#include "flash_cute/attention/scores/general.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"
#include "flash_cute/forward/epilogue.hpp"
#include "flash_cute/forward/sm90/epilogue.hpp"
#include "flash_cute/forward/sm90/split_total.hpp"
#include "flash_cute/forward/sm90/traits.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

template <class Traits>
struct ForwardConsumerSm90 {
  using Element = typename Traits::Element;
  static constexpr bool kSplitKeys = Traits::kKernel.keys == Keys::split;
  using TileS = Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>;
  using TileO = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDimV>>;
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  ForwardMaps const& maps;
  int warpgroup;  // among the consumers
  int thread;     // of the warpgroup
  static constexpr bool kRunsAhead = Traits::kRunsAhead, kGeneral = Traits::kGeneral,
                        kHasTable = Traits::kKernel.masking == Masking::table,
                        kHasPairTiles = Traits::kHasPairTiles, kLoadsBits = kGeneral && !kHasPairTiles,
                        kMayDrop = kGeneral && !kSplitKeys;
  PipelineState<Traits::kStagesQ> at_q{};
  PipelineState<Traits::kStages> at_k{}, at_v{};
  PipelineState<larger(1, Traits::PairTiles::kBiasStages)> at_bias{};
  PipelineState<Traits::PairTiles::kWordStages> at_words{};

  // Blocks of keys go from the last to the first. S(n - 1) = Q K^T and O += P(n) V are in flight together,
  // and the softmax of S(n - 1) starts when its scores have arrived. Where the next tile's Q has arrived
  // already, its first scores follow this tile's last product, and are computed while O leaves. The warp
  // scheduler barrier keeps one warpgroup in its products while another one is in its softmax. A tile that
  // adds up splits ends each of them as it ends itself, so that the loop over blocks is that of other tiles.
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
    OnlineSoftmax<2 * decltype(size<1>(acc_o))::value, Traits::kRescaleThreshold> softmax(
        params.softmax.scale_log2);
    WarpSchedulerBarrier<Traits::kConsumers> const products{warpgroup};
    auto const& source = tiles.source;
    PackGqa const& rows = source.rows();
    ForwardEpilogueSm90<Traits> const epilogue{shared, maps, warpgroup, thread};
    auto& ring_q = shared.ring_q[warpgroup];
    products.begin();

    auto issue_scores = [&](auto& acc_s) {
      issue_product(GMMA::ScaleOut::Zero, mma_qk, hide_address(tSrQ(_, _, _, at_q.stage)),
                    tSrK(_, _, _, at_k.stage), acc_s);
    };
    auto wait_keys = [&](auto& ring, auto const& at) {
      ring.wait(at);
      if (Traits::kLoadsRows) cutlass::arch::fence_view_async_shared();  // no TMA has written them
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
    bool const is_early = finalizes_early<Traits>(params);
    auto finalize = [&](auto const& tile) {
      softmax.finalize();
      if constexpr (kSplitKeys) softmax.scale_output(params.cache.v_scale.of(tile.batch, tile.head_kv));
    };
    [[maybe_unused]] auto total = total_of<decltype(softmax), decltype(size(acc_o))::value>(source);
    auto store_tile = [&](auto tile) {
      if (!is_early && !Traits::kFoldsSplits) finalize(tile);
      tile.m_begin = first_query(tile);
      auto const& mask = source.mask(tile);
      if constexpr (kSplitKeys) {
        if (tile.slot != SplitTile::kUnsplit) {
          normalize_split(softmax, acc_o);
          if (warpgroup == 0 && thread == 0 && source.partial.tiles) source.partial.tiles[tile.slot] = tile;
          store_partial(source.partial, tile, warpgroup * (source.partial.rows / rows.groups), rows, softmax,
                        cO, acc_o);
          return;
        }
      }
      if constexpr (Traits::kFoldsSplits) {
        divide_rows<Traits>(params, softmax, mask, tile.m_begin, rows, cS, acc_o);
      } else {
        normalize_rows<Traits>(params, softmax, mask, tile, rows, cS, acc_o);
      }
      if (rows.heads.value == 1) {  // addresses of packed rows, O's too, cost 3% at seqlen 512
        store_lse(params, source, tile, mask.seqlen_q, OneHead{}, softmax, cS);
      } else {
        store_lse(params, source, tile, mask.seqlen_q, rows, softmax, cS);
      }
      epilogue.store(acc_o, source, tile);
    };
    // What store_tile does in other kernels, and the last of several splits. With it store_tile would become
    // a function of its own at head dim 256, and products would run one after the other.
    auto end_splits = [&](auto tile) __attribute__((always_inline)) {
      if constexpr (Traits::kFoldsSplits) {
        finalize(tile);
        if (tile.slot != SplitTile::kUnsplit || (!total.exists && !params.sinks.logits)) return;
        tile.m_begin = first_query(tile);
        normalize_split(softmax, acc_o);
        auto const sums = total.add_last(softmax, acc_o);
        divide_total<Traits>(params, softmax, source.mask(tile), tile, rows, cS, sums, acc_o);
        CUTE_UNROLL
        for (float& sum : softmax.row_sum) sum = 1.f;  // what is left to be multiplied
      }
    };

    auto tile = tiles.first();
    products.wait();
    issue_first_scores();
    products.pass();
    wait_products<0>(acc_first);
    for (int remaining = tiles.count();;) {
      auto const& mask = source.mask(tile);
      auto blocks = kv_blocks_of<Traits::kBlockN>(source, tile);
      auto const full_blocks = mask.full(first_query(tile), rows.queries, Traits::kBlockN);
      auto const upcoming = tiles.next();
      [[maybe_unused]] float k_scale = 1.f;
      if constexpr (kSplitKeys) {
        if (tile.seqlen_k > 0) k_scale = params.cache.k_scale.of(tile.batch, tile.head_kv);
        bool const is_of_scores = kGeneral && params.scores.change();
        float const scale = params.softmax.scale_log2 * (is_of_scores ? 1.f : k_scale);
        softmax.scale_log2 = scale < FLT_MIN ? FLT_MIN : scale;  // times -inf it must not be NaN
      }
      // What a table says of a block's pairs is loaded a block ahead, and found beside the product.
      typename Traits::PairTiles::template Visible<decltype(cS), kGeneral> visible;
      [[maybe_unused]] decltype(visible) kept;  // by dropout
      bool is_partial = false;
      auto load_visible = [&](int block) {
        if constexpr (kLoadsBits) visible.load(mask, rows, first_query(tile), block * Traits::kBlockN, cS);
      };
      auto find_visible = [&] {
        if constexpr (kHasTable) {
          is_partial = !blocks.is_full(full_blocks);
          if constexpr (kHasPairTiles) {
            find_words(is_partial, drops(), visible, kept);
          } else {
            if (is_partial) visible.find(mask, rows, first_query(tile), blocks.block * Traits::kBlockN, cS);
            if constexpr (kLoadsBits) {
              if (blocks.remaining() > 0 && mask.bits) load_visible(blocks.next());
            }
          }
        }
      };
      if constexpr (kLoadsBits) {
        visible.begin_tile(mask, rows, first_query(tile), cS);
        load_visible(blocks.block);
      }
      AlibiSlopes<QueryAxis::rows, decltype(cS)> slopes;
      if constexpr (kGeneral) slopes.begin(params.scores, source.place(tile), rows, first_query(tile), cS);
      auto probabilities = [&](auto& acc_s) {
        release(shared.ring_k, at_k);
        if constexpr (kGeneral)
          change_scores(source, tile, first_query(tile), blocks.block, cS, slopes, k_scale, acc_s);
        auto apply_table = [&](auto& acc) {
          if (is_partial) hide(visible, acc);
        };
        if constexpr (kHasTable) {
          apply_table(acc_s);
        } else if (!blocks.is_full(full_blocks)) {
          apply_mask<KeyBits>(mask, rows, first_query(tile), blocks.block * Traits::kBlockN, cS, acc_s);
        }
        auto const correction = softmax.update(acc_s);
        if constexpr (kGeneral) finish_bias_tile(softmax, apply_table, acc_s);
        return correction;
      };
      auto round = [&](auto const& acc_p) {
        convert_into<Element>(acc_p, rP);
        if constexpr (kMayDrop) {
          if (drops()) kept.clear_others(rP);
        }
      };

      if constexpr (Traits::kFoldsSplits) total.exists = false;
      while (true) {  // over splits, of a tile that adds them up; else once
        reset(softmax);
        clear(acc_o);
        find_visible();
        probabilities(acc_first);
        round(acc_first);
        int const first_block = first_block_of_split(source, blocks.block);
        while (blocks.advance() && (!Traits::kFoldsSplits || blocks.block >= first_block)) {
          Tensor acc_s = partition_fragment_C(mma_qk, TileS{});
          wait_keys(shared.ring_k, at_k);
          products.wait();
          issue_scores(acc_s);
          issue_output();
          products.pass();
          find_visible();
          wait_products<1>(acc_s);
          auto const correction = probabilities(acc_s);
          wait_products<0>(acc_o);
          release(shared.ring_v, at_v);
          round(acc_s);  // before the branch: beside the exponentials
          correction.apply(acc_o);
        }
        if (!Traits::kFoldsSplits || blocks.done()) break;
        if constexpr (Traits::kFoldsSplits) {
          products.wait();
          issue_output();
          if constexpr (kRunsAhead) issue_first_scores();
          products.pass();
          wait_products<kRunsAhead>(acc_o);
          release(shared.ring_v, at_v);
          finalize(tile);
          total.add(softmax, acc_o);
          if constexpr (!kRunsAhead) {
            wait_keys(shared.ring_k, at_k);
            products.wait();
            issue_scores(acc_first);
            products.pass();
          }
          wait_products<0>(acc_first);
        }
      }

      release(ring_q, at_q);
      if (is_early) finalize_rows<Traits>(params, softmax, tile, rows, cS);

      if (tiles.done(remaining)) {  // no product follows
        issue_output();
        wait_products<0>(acc_o);
        end_splits(tile);
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
      end_splits(tile);
      store_tile(tile);
      tile = tiles.get(upcoming);
      if constexpr (!kRunsAhead) {
        ring_q.wait(at_q);  // before the barrier, after which it would delay the other warpgroup
        products.wait();
        issue_first_scores();
        products.pass();
      }
      wait_products<0>(acc_first);
    }
  }

 private:
  template <class Softmax, int kOutputs, class Source>
  CUTE_DEVICE static auto total_of(Source const& source) {
    if constexpr (Traits::kFoldsSplits) {
      return SplitTotal<Softmax, kOutputs / 4, Traits::kProducers * kWarpgroupThreads,
                        Traits::kConsumers * kWarpgroupThreads>{source.totals};
    } else {
      return nullptr;
    }
  }
  // Of a tile that adds up splits: the first block of keys of the split that a block lies in.
  template <class Source>
  CUTE_DEVICE static int first_block_of_split(Source const& source, int block) {
    if constexpr (Traits::kFoldsSplits) {
      constexpr int kBlocks = kFixedKeys / Traits::kBlockN;
      if (source.order.lengths.folds) return block / kBlocks * kBlocks;
    }
    return 0;
  }
  CUTE_DEVICE bool drops() const { return kMayDrop && params.scores.dropout.drops(); }
  template <class Softmax>
  CUTE_DEVICE void reset(Softmax& softmax) const {
    if constexpr (Traits::PairTiles::kBiasStages > 0) {
      if (params.scores.bias.is_tiled) {
        softmax.reset(params.scores.lowest_score * softmax.scale_log2);
        return;
      }
    }
    softmax.reset();
  }
  template <class Source, class Coords, class Slopes, class Scores>
  CUTE_DEVICE void change_scores(Source const& source, typename Source::Tile const& tile, int m_begin,
                                 int block, Coords const& cS, Slopes const& slopes, float k_scale,
                                 Scores& acc_s) {
    if (!params.scores.change()) return;
    if constexpr (kSplitKeys) {
      if (params.cache.is_fp8) {
        CUTE_UNROLL
        for (int i = 0; i < size(acc_s); ++i) acc_s(i) *= k_scale;
      }
    }
    constexpr BiasLoads kLoads = kSplitKeys                           ? BiasLoads::none
                                 : Traits::PairTiles::kBiasStages > 0 ? BiasLoads::tiles
                                                                      : BiasLoads::threads;
    GeneralScores<Element, kLoads>::template change<QueryAxis::rows>(
        params.scores, source.place(tile), source.rows(), m_begin, block * Traits::kBlockN, cS, slopes,
        acc_s);
    if constexpr (Traits::PairTiles::kBiasStages > 0) {
      if (params.scores.bias.is_tiled) add_bias_tile(acc_s);
    }
  }
  // Adds a tile of a bias that lies in shared memory.
  template <class Scores>
  CUTE_DEVICE void add_bias_tile(Scores& acc_s) {
    auto& ring = shared.pairs.ring_bias[warpgroup];
    ring.wait(at_bias);
    GeneralScores<Element>::template add_bias_tile<QueryAxis::rows>(params.scores, bias_tile(at_bias.stage),
                                                                    thread / 32 * 16, acc_s);
  }
  template <class Softmax, class ApplyMask, class Probabilities>
  CUTE_DEVICE void finish_bias_tile(Softmax& softmax, ApplyMask const& apply_mask, Probabilities& acc_p) {
    if constexpr (Traits::PairTiles::kBiasStages > 0) {
      if (!params.scores.bias.is_tiled) return;
      GeneralScores<Element>::weigh_lowest(params.scores, softmax, bias_tile(at_bias.stage), thread / 32 * 16,
                                           apply_mask, acc_p);
      __syncwarp();
      release(shared.pairs.ring_bias[warpgroup], at_bias);
    }
  }
  // (M, N) of this warpgroup.
  CUTE_DEVICE auto bias_tile(int stage) const {
    using Pairs = typename Traits::PairTiles;
    Tensor sBias = make_tensor(make_smem_ptr(shared.pairs.bias), typename Pairs::LayoutBias{});
    return sBias(_, _, Pairs::tile(stage, warpgroup));
  }

  template <class Visible, class Scores>
  CUTE_DEVICE void hide(Visible const& visible, Scores& acc_s) const {
    if constexpr (kHasPairTiles) {
      visible.set_others(acc_s, -INFINITY * params.scores.dropout.inverse_keep);
    } else {
      visible.apply(acc_s);
    }
  }
  // What other warps have found out about a block's pairs, if there is anything to be found.
  template <class Words>
  CUTE_DEVICE void find_words(bool is_partial, bool drops, Words& seen, Words& kept) {
    if (!is_partial && !drops) return;
    int const tile_thread = warpgroup * kWarpgroupThreads + thread;
    shared.pairs.ring_words.wait(at_words);
    auto const& words = shared.pairs.words[at_words.stage];
    if (is_partial) seen.load(words.seen, tile_thread);
    if (drops) kept.load(words.kept, tile_thread);
    __syncwarp();
    release(shared.pairs.ring_words, at_words);
  }

  // One arrival a warp, whose products have read the stage.
  template <class Ring, class Position>
  CUTE_DEVICE static void release(Ring& ring, Position& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
    at.advance();
  }
};

}  // namespace flash_cute
