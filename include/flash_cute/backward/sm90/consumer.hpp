// A consumer warpgroup of the Hopper family's backward for head dims 64, 96 and 128: dK and dV of its 64 keys
// of each tile, and its half of the tile's part of dQ.
#pragma once

#include "flash_cute/backward/sm90/dq_accumulate.hpp"
#include "flash_cute/backward/sm90/dq_convert.hpp"
#include "flash_cute/backward/sm90/ds_store.hpp"
#include "flash_cute/backward/sm90/register_slices.hpp"
#include "flash_cute/backward/sm90/warpgroup.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"

namespace flash_cute {

template <class Traits>
struct BackwardConsumerSm90 {
  using Element = typename Traits::Element;
  using TileS = typename Traits::TileS;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr bool kLseDeltaMma = Traits::kLseDeltaMma, kGeneral = Traits::kGeneral,
                        kHasPairTiles = Traits::kHasPairTiles, kHasTable = Traits::kMasking == Masking::table;
  BackwardConsumerWarpgroup<Traits> const& own;
  PipelineState<1> at_keys{};
  PipelineState<Traits::kStages> at{};
  PipelineState<larger(1, Traits::PairTiles::kBiasStages)> at_bias{};
  PipelineState<Traits::PairTiles::kWordStages> at_words{};
  DqAccumulator<Traits> dq_accum = own.dq_accumulator();
  DqConverter<Traits> dq_converter{own};

  // The accumulators of S and dP have keys as rows. P and dS are operands of dV and dK from registers; dS
  // goes through shared memory to dQ = dS K, whose rows are queries. The product for dQ comes one step late,
  // when dS of the other warpgroup has been stored. So the warpgroups can drift apart, and one computes
  // exponentials while the other has products in flight.
  CUTE_DEVICE void compute(KvTile const& tile) {
    auto& shared = own.shared;
    auto steps = steps_of<Traits>(own.params, tile);
    auto const full_blocks = own.full(tile);
    auto const of_tile = own.of_tile(tile);
    float const scale_log2 = own.scale_log2();

    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{});         // (N, D)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutV{});         // (N, D)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});         // (M, D, STAGE)
    Tensor sdO = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutDO{});    // (M, D, STAGE)
    Tensor sQt = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQt{});       // (D, M, STAGE)
    Tensor sdOt = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutDOt{});  // (D, M, STAGE)
    typename Traits::MmaScores mma_s;
    typename Traits::MmaDk mma_dk;
    typename Traits::MmaDv mma_dv;
    auto const slice_s = mma_s.get_slice(own.warpgroup * kWarpgroupThreads);
    auto const slice_dk = mma_dk.get_slice(own.warpgroup * kWarpgroupThreads);
    auto const slice_dv = mma_dv.get_slice(own.warpgroup * kWarpgroupThreads);
    Tensor tSrK = slice_s.partition_fragment_A(sK);      // (MMA, MMA_N, MMA_D)
    Tensor tSrV = slice_s.partition_fragment_A(sV);      // (MMA, MMA_N, MMA_D)
    Tensor tSrQ = slice_s.partition_fragment_B(sQ);      // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tSrdO = slice_s.partition_fragment_B(sdO);    // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tKrQ = slice_dk.partition_fragment_B(sQt);    // (MMA, MMA_D, MMA_M, STAGE)
    Tensor tKrdO = slice_dv.partition_fragment_B(sdOt);  // (MMA, MMA_D, MMA_M, STAGE)
    Tensor cS = mma_s.get_slice(own.key_thread()).partition_C(make_identity_tensor(TileS{}));
    auto const store_ds = make_ds_store<Traits>(shared.ds, own.key_thread());
    Tensor acc_dk = partition_fragment_C(mma_dk, typename Traits::TileK{});  // (MMA, MMA_N, MMA_D)
    Tensor acc_dv = partition_fragment_C(mma_dv, typename Traits::TileV{});  // likewise
    clear(acc_dk);
    clear(acc_dv);

    RegisterSlices<Traits, Traits::kHeadDim> k_slices;
    RegisterSlices<Traits, Traits::kHeadDimV> v_slices;
    float first_lse = 0;
    auto wait_q = [&] {
      shared.ring_q.wait(at);
      // The first LSE is loaded before S is issued, as the loads of the others wait after S.
      if constexpr (!kLseDeltaMma) first_lse = own.first_lse(cS, at.stage);
    };
    auto const issue_scores = score_issuer();
    // In a tile's first step the second warpgroup begins its exponentials when the first one has issued dV.
    // Otherwise both may compute exponentials at the same time throughout the tile, and the tensor cores
    // idle. Later steps stay in this order, as dQ of a step needs dS of both. H200: up to +1% (128, 16k
    // full), +1 to +2% (64, from 1k on).
    NamedBarrier const first_exponentials{BarrierId::warp_scheduler, 1};
    auto release_second_warpgroup = [&] {
      if (own.warpgroup == 0) first_exponentials.arrive(2 * kWarpgroupThreads);
    };
    auto step = [&]<bool kFirst>(std::bool_constant<kFirst>) __attribute__((always_inline)) {
      // (1) S = K Q^T
      Tensor acc_s = partition_fragment_C(mma_s, TileS{});  // (MMA, MMA_N, MMA_M)
      issue_scores(Lse{}, at.stage, mma_s, k_slices.of(hide_address(tSrK)), tSrQ(_, _, _, at.stage), acc_s);
      // (2) dP = V dO^T
      Tensor acc_ds = partition_fragment_C(mma_s, TileS{});  // dP, then dS
      auto issue_dp = [&] {
        shared.ring_dout.wait(at);
        issue_scores(Delta{}, at.stage, mma_s, v_slices.of(hide_address(tSrV)), tSrdO(_, _, _, at.stage),
                     acc_ds);
      };
      // Where scores are changed, at head dim 128 its registers are not free before P is there.
      constexpr bool kDpBesideP = !kGeneral || Traits::kHeadDim <= 64, kDvBesideDs = kLseDeltaMma || kGeneral;
      if constexpr (kDpBesideP) issue_dp();
      if constexpr (kFirst) {
        if (own.warpgroup == 1) first_exponentials.sync(2 * kWarpgroupThreads);
      }
      bool const is_partial = !steps.is_full(full_blocks);
      auto mask = [&] {
        if constexpr (kHasPairTiles) {
          return own.find_pairs(at_words, is_partial, kGeneral && own.params.scores.dropout.drops());
        } else {
          return own.block_mask(tile, tile.n_begin, steps.block, cS);
        }
      }();
      auto scores = [&] {
        if constexpr (kHasPairTiles) {
          return own.score_step(of_tile, steps.head, tile.n_begin, steps.block, cS, mask.dropout);
        } else {
          return own.score_step(of_tile, steps.head, tile.n_begin, steps.block, cS);
        }
      }();
      if constexpr (kHasTable && !kHasPairTiles) {
        if (is_partial) mask.find(steps.head);
      }
      wait_products<kDpBesideP>(acc_s);
      scores.change(acc_s);
      if constexpr (kHasPairTiles && kGeneral) {
        if (own.params.scores.bias.is_tiled) own.add_bias_tile(at_bias, acc_s);
      }
      scores.level(acc_s);
      if (is_partial) mask.apply(acc_s);
      // (3) P = exp2(S c - LSE)
      own.compute_p(acc_s, cS, at.stage, first_lse, scores.scale_log2(scale_log2));
      // (4) dV += P dO
      auto&& acc_p = scores.of_dv(acc_s);
      auto issue_dv = [&] {
        Tensor rP = rounded<Element>(acc_p);
        issue_product(GMMA::ScaleOut::One, mma_dv, operand_a_view(rP), tKrdO(_, _, _, at.stage), acc_dv);
        if constexpr (kFirst) release_second_warpgroup();
      };
      // dV in flight beside dS takes registers, which are free where no thread holds LSE and delta.
      if constexpr (kDvBesideDs) issue_dv();
      if constexpr (!kDpBesideP) issue_dp();
      wait_products<kDpBesideP && kDvBesideDs>(acc_ds);
      // (5) dS = P (dP - delta)
      scores.drop(acc_ds);
      own.compute_ds(acc_ds, acc_s, cS, at.stage);
      Tensor rdS = convert<Element>(acc_ds);
      if constexpr (!kDvBesideDs) issue_dv();
      auto& full = shared.ring_ds.acquire(at);
      store_ds(rdS, at.stage);
      // (7) dK += dS Q
      auto finish = [&](auto&& finish_dq) {
        issue_product(GMMA::ScaleOut::One, mma_dk, operand_a_view(rdS), tKrQ(_, _, _, at.stage), acc_dk);
        cutlass::arch::fence_view_async_shared();
        own.arrive(full);
        auto const now = at;
        at.advance();
        steps.advance();
        wait_products<kFirst ? 1 : 2>(acc_dv);
        own.release(shared.ring_dout, now);
        finish_dq();
        wait_products<0>(acc_dk);
        own.release(shared.ring_q, now);
        if (steps.left > 0) wait_q();
      };
      if constexpr (kFirst) {
        finish([] {});
      } else {
        // (6) dQ = dS K of the step before
        auto const before = at.before();
        Tensor acc_dq = dq_accum.issue(before);
        finish([&] {
          wait_products<1>(acc_dq);
          dq_accum.release(before);
          dq_accum.put(acc_dq, before);
        });
      }
    };
    shared.ring_v.wait(at_keys);
    v_slices.load(sV, own.key_thread());
    shared.ring_k.wait(at_keys);
    k_slices.load(sK, own.key_thread());
    wait_q();
    step(std::true_type{});
    own.wait_stored();
    dq_converter.finish();
    while (__any_sync(0xffffffffu, steps.left > 0)) step(std::false_type{});
    finish_tile(tile, acc_dk, acc_dv);
  }

 private:
  // (6) dQ = dS K of the last step; then dK and dV are stored.
  template <class Accumulator>
  CUTE_DEVICE void finish_tile(KvTile const& tile, Accumulator const& acc_dk, Accumulator const& acc_dv) {
    auto& shared = own.shared;
    auto const before = at.before();
    Tensor acc_dq = dq_accum.issue(before);
    own.release(shared.ring_v, at_keys);
    wait_products<0>(acc_dq);
    dq_accum.release(before);
    own.release(shared.ring_k, at_keys);
    dq_accum.put(acc_dq, before);
    at_keys.advance();
    dq_converter.start_ready();  // while dQ is added
    if (!own.params.dk.data) return;
    dq_accum.wait_read();
    dq_converter.finish();
    own.template store<KvGradient::dv>(tile, acc_dv);
    own.template store<KvGradient::dk>(tile, acc_dk);
    dq_converter.start_ready();  // while dK is stored
  }

  // Returns issue(Lse{} or Delta{}, stage, mma, a, b, acc), which puts acc = A B^T in flight, with the term
  // of each column's query where it comes by a product.
  CUTE_DEVICE auto score_issuer() const {
    if constexpr (kLseDeltaMma) {
      return Traits::LseDeltaProduct::issuer(own.shared.lse_delta, own.warpgroup);
    } else {
      return [](auto, int, auto& mma, auto const& a, auto const& b, auto& acc) {
        issue_product(GMMA::ScaleOut::Zero, mma, a, b, acc);
      };
    }
  }
};

}  // namespace flash_cute
