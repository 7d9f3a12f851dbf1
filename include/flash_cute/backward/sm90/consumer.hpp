// The Hopper family's backward maths, by one warpgroup: dK and dV of its 64 keys of every tile, and its half
// of the tile's part of dQ.
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
  using TileKV = typename Traits::TileKV;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr bool kLseDeltaMma = Traits::kLseDeltaMma;
  BackwardConsumerWarpgroup<Traits> const& own;
  PipelineState<1> at_keys{};
  PipelineState<Traits::kStages> at{};
  DqAccumulator<Traits> sums = own.dq_accumulator();
  DqConverter<Traits> rows{own};

  // S = K Q^T and dP = V dO^T have keys as rows. P and dS are operands of dV += P dO and dK += dS Q from
  // registers; dS goes through shared memory to dQ = dS K, whose rows are queries. That product comes one
  // step late: dS of the other warpgroup is there by then, so the two drift apart, and one has exponentials
  // while the other has products.
  CUTE_DEVICE void compute(KvTile const& tile) {
    auto& shared = own.shared;
    QBlockIterator steps = own.steps_of(tile);
    BlockRange const unmasked = own.unmasked(tile);
    float const scale_log2 = own.scale_log2();

    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKV{});        // (N, D)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutKV{});        // (N, D)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});         // (M, D, STAGE)
    Tensor sdO = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutDO{});    // (M, D, STAGE)
    Tensor sQt = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQt{});       // (D, M, STAGE)
    Tensor sdOt = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutDOt{});  // (D, M, STAGE)
    typename Traits::MmaScores mma_s;
    typename Traits::MmaKeys mma_k;
    auto const slice_s = mma_s.get_slice(own.warpgroup * 128);
    auto const slice_k = mma_k.get_slice(own.warpgroup * 128);
    Tensor tSrK = slice_s.partition_fragment_A(sK);     // (MMA, MMA_N, MMA_D)
    Tensor tSrV = slice_s.partition_fragment_A(sV);     // (MMA, MMA_N, MMA_D)
    Tensor tSrQ = slice_s.partition_fragment_B(sQ);     // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tSrdO = slice_s.partition_fragment_B(sdO);   // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tKrQ = slice_k.partition_fragment_B(sQt);    // (MMA, MMA_D, MMA_M, STAGE)
    Tensor tKrdO = slice_k.partition_fragment_B(sdOt);  // (MMA, MMA_D, MMA_M, STAGE)
    Tensor cS = mma_s.get_slice(own.key_thread()).partition_C(make_identity_tensor(TileS{}));
    auto const store_ds = make_ds_store<Traits>(shared.ds, own.key_thread());
    Tensor acc_dk = partition_fragment_C(mma_k, TileKV{});  // (MMA, MMA_N, MMA_D)
    Tensor acc_dv = partition_fragment_C(mma_k, TileKV{});  // likewise
    clear(acc_dk);
    clear(acc_dv);

    RegisterSlices<Traits> held_k, held_v;
    float first_lse = 0;
    auto wait_q = [&] {
      shared.ring_q.wait(at);
      // Sooner than the others, which wait behind S.
      if constexpr (!kLseDeltaMma) first_lse = own.first_of(cS, shared.of_queries.lse + at.stage * kBlockM);
    };
    auto const issue_scores = [&] {
      if constexpr (kLseDeltaMma) {
        return Traits::Terms::issuer(shared.of_queries, own.warpgroup);
      } else {
        return [](auto, int, auto& mma, auto const& a, auto const& b, auto& acc) {
          issue_product(GMMA::ScaleOut::Zero, mma, a, b, acc);
        };
      }
    }();
    // Only in a tile's first step: else the two may have exponentials at the same time up to its end, and the
    // tensor cores nothing. Neither comes twice before the other has: dQ takes dS of both. H200: up to +1%
    // (128, 16k full), +1 to +2% (64, from 1k on).
    NamedBarrier const turn_of_second{BarrierId::turn, 1};
    auto let_second_begin = [&] {
      if (own.warpgroup == 0) turn_of_second.arrive(2 * 128);
    };
    auto step = [&]<bool kFirst>(std::bool_constant<kFirst>) {
      Tensor acc_s = partition_fragment_C(mma_s, TileS{});  // (MMA, MMA_N, MMA_M)
      issue_scores(Lse{}, at.stage, mma_s, held_k.of(hide_address(tSrK)), tSrQ(_, _, _, at.stage), acc_s);
      Tensor acc_ds = partition_fragment_C(mma_s, TileS{});  // dP, then dS
      shared.ring_dout.wait(at);
      issue_scores(Delta{}, at.stage, mma_s, held_v.of(hide_address(tSrV)), tSrdO(_, _, _, at.stage), acc_ds);
      if constexpr (kFirst) {
        if (own.warpgroup == 1) turn_of_second.sync(2 * 128);
      }
      wait_products<1>(acc_s);
      if (!unmasked.contains(steps.block)) {
        apply_mask<KeyBits>(TransposedMask{tile.sequence.mask.transposed()}, PlainRows{}, tile.n_begin,
                            steps.block * kBlockM, cS, acc_s);
      }
      own.compute_p(acc_s, cS, at.stage, first_lse, scale_log2);
      auto issue_dv = [&] {
        Tensor rP = convert<Element>(acc_s);
        issue_product(GMMA::ScaleOut::One, mma_k, operand_a_view(rP), tKrdO(_, _, _, at.stage), acc_dv);
        if constexpr (kFirst) let_second_begin();
      };
      // dV beside dS takes registers, which there are where no thread has numbers of queries.
      if constexpr (kLseDeltaMma) issue_dv();
      wait_products<(kLseDeltaMma ? 1 : 0)>(acc_ds);
      own.compute_ds(acc_ds, acc_s, cS, at.stage);
      Tensor rdS = convert<Element>(acc_ds);
      if constexpr (!kLseDeltaMma) issue_dv();
      auto& full = shared.ring_ds.acquire(at);
      store_ds(rdS, at.stage);
      auto finish = [&](auto&& finish_dq) {
        issue_product(GMMA::ScaleOut::One, mma_k, operand_a_view(rdS), tKrQ(_, _, _, at.stage), acc_dk);
        cutlass::arch::fence_view_async_shared();
        own.announce(full);
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
        auto const before = at.before();  // the step whose dQ comes now
        Tensor acc_dq = sums.issue(before);
        finish([&] {
          wait_products<1>(acc_dq);
          sums.release(before);
          sums.put(acc_dq, before);
        });
      }
    };
    shared.ring_v.wait(at_keys);
    held_v.load(sV, own.key_thread());
    shared.ring_k.wait(at_keys);
    held_k.load(sK, own.key_thread());
    wait_q();
    step(std::true_type{});
    own.wait_stored();
    rows.finish();
    while (__any_sync(0xffffffffu, steps.left > 0)) step(std::false_type{});
    auto const before = at.before();
    Tensor acc_dq = sums.issue(before);
    own.release(shared.ring_v, at_keys);
    wait_products<0>(acc_dq);
    sums.release(before);
    own.release(shared.ring_k, at_keys);
    sums.put(acc_dq, before);
    at_keys.advance();
    rows.start_ready();  // while sums are added
    if (!own.params.dk.data) return;
    sums.wait_read();
    rows.finish();
    own.store(KvGradient::dv, tile, acc_dv);
    own.store(KvGradient::dk, tile, acc_dk);
    rows.start_ready();  // while dK leaves
  }
};

}  // namespace flash_cute
