// The Hopper family's backward maths where registers do not hold dK and dV of 64 keys: one warpgroup has P
// and dV, another dS and dK, and each its columns of the block's part of dQ.
#pragma once

#include "flash_cute/backward/sm90/dq_accumulate.hpp"
#include "flash_cute/backward/sm90/ds_store.hpp"
#include "flash_cute/backward/sm90/register_slices.hpp"
#include "flash_cute/backward/sm90/warpgroup.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"

namespace flash_cute {

// P passes from thread to thread, as both own the same places of a tile: 16 bytes at a time, so that neither
// way has bank conflicts. At head dim 256 it lies where the first warpgroup's part of dQ does, neither of
// which comes before the other has been read as a whole.
template <class Traits>
struct PExchange {
  uint4* places;  // of this thread

  CUTE_DEVICE explicit PExchange(BackwardConsumerWarpgroup<Traits> const& own)
      : places((Traits::kSharesP ? reinterpret_cast<uint4*>(own.shared.dq) : own.shared.p) +
               own.thread / 32 * (Traits::kPiecesP / 4) + own.thread % 32) {}

  template <class Weights>
  CUTE_DEVICE void put(Weights const& weights) const {
    auto const own = recast<uint4 const>(weights);
    CUTE_UNROLL
    for (int i = 0; i < size(own); ++i) places[i * 32] = own(i);
  }
  template <class Weights>
  CUTE_DEVICE void get(Weights& weights) const {
    auto own = recast<uint4>(weights);
    CUTE_UNROLL
    for (int i = 0; i < size(own); ++i) own(i) = places[i * 32];
  }
};

// S = K Q^T has keys as rows; P is an operand of dV += P dO from registers.
template <class Traits>
struct BackwardDvConsumer2Cta {
  using Element = typename Traits::Element;
  using TileS = typename Traits::TileS;
  static constexpr int kBlockM = Traits::kBlockM;
  BackwardConsumerWarpgroup<Traits> const& own;
  PipelineState<1> at_keys{}, at_p{};
  PipelineState<Traits::kStages> at{};
  PipelineState<Traits::kStagesDO> at_dout{};
  DqAccumulator<Traits, 0> sums = own.template dq_accumulator<0>();

  CUTE_DEVICE void compute(KvTile const& tile) {
    auto& shared = own.shared;
    QBlockIterator steps = own.steps_of(tile);
    BlockRange const unmasked = own.unmasked(tile);
    float const scale_log2 = own.scale_log2();
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKV{});        // (N, D)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});         // (M, D, STAGE)
    Tensor sdOt = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutDOt{});  // (D, M, STAGE)
    typename Traits::MmaScores mma_s;
    typename Traits::MmaKeys mma_k;
    Tensor tSrK = mma_s.get_slice(0).partition_fragment_A(sK);     // (MMA, MMA_N, MMA_D)
    Tensor tSrQ = mma_s.get_slice(0).partition_fragment_B(sQ);     // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tKrdO = mma_k.get_slice(0).partition_fragment_B(sdOt);  // (MMA, MMA_D, MMA_M, STAGE)
    Tensor cS = mma_s.get_slice(own.thread).partition_C(make_identity_tensor(TileS{}));
    Tensor acc_dv = partition_fragment_C(mma_k, typename Traits::TileKV{});  // (MMA, MMA_N, MMA_D)
    clear(acc_dv);

    RegisterSlices<Traits> held;
    auto at_before = at;  // the step before, whose dQ comes one step late: dS is there by then
    auto add_sums = [&](auto&& beside) {
      sums.add(at_before, beside, [&] {
        if constexpr (Traits::kSharesP) shared.ring_p.acquire(at_p);  // P has been taken
      });
    };
    auto step = [&]<bool kFirst>(std::bool_constant<kFirst>) {
      Tensor acc_s = partition_fragment_C(mma_s, TileS{});  // (MMA, MMA_N, MMA_M)
      shared.ring_q.wait(at);
      issue_product(GMMA::ScaleOut::Zero, mma_s, held.of(hide_address(tSrK)), tSrQ(_, _, _, at.stage), acc_s);
      wait_products<0>(acc_s);
      if (!unmasked.contains(steps.block)) {
        apply_mask<KeyBits>(TransposedMask{tile.sequence.mask.transposed()}, PlainRows{},
                            first_own_key<Traits>(tile), steps.block * kBlockM, cS, acc_s);
      }
      float const first_lse = own.first_of(cS, shared.of_queries.lse + at.stage * kBlockM);
      own.compute_p(acc_s, cS, at.stage, first_lse, scale_log2);
      __syncwarp();  // all lanes have read the LSE
      own.release_queries(shared.ring_q, at);
      if constexpr (Traits::kSharesP) sums.wait_read();  // where P comes now
      auto& full = shared.ring_p.acquire(at_p);
      PExchange<Traits>(own).put(acc_s);
      own.announce(full);
      at_p.advance();
      Tensor rP = convert<Element>(acc_s);
      shared.ring_dout.wait(at_dout);
      issue_product(GMMA::ScaleOut::One, mma_k, operand_a_view(rP),
                    hide_address(tKrdO(_, _, _, at_dout.stage)), acc_dv);
      auto finish_dv = [&] {
        wait_products<kFirst ? 0 : Traits::kCluster>(acc_dv);
        own.release_queries(shared.ring_dout, at_dout);
      };
      if constexpr (kFirst) {
        finish_dv();
      } else {
        add_sums(finish_dv);
      }
      at_before = at;
      at.advance();
      at_dout.advance();
      steps.advance();
    };
    own.wait_stored();
    own.release(shared.ring_v, at_keys);  // which dV has left
    shared.ring_k.wait(at_keys);
    held.load(sK, own.thread);
    step(std::true_type{});
    shared.ring_peer_k.wait(at_keys);
    while (__any_sync(0xffffffffu, steps.left > 0)) step(std::false_type{});
    shared.ring_p.acquire(at_p);  // who took the last P has read V, through which dV leaves
    if (own.params.dv.data) own.template store</*kAllFit=*/true>(KvGradient::dv, tile, acc_dv);
    add_sums([] {});
    own.release(shared.ring_k, at_keys);
    at_keys.advance();
  }
};

// dP = V dO^T, likewise; dS is an operand of dK += dS Q from registers, and of dQ = dS K through shared
// memory.
template <class Traits>
struct BackwardDkConsumer2Cta {
  using Element = typename Traits::Element;
  using TileS = typename Traits::TileS;
  static constexpr int kBlockM = Traits::kBlockM;
  BackwardConsumerWarpgroup<Traits> const& own;
  PipelineState<1> at_keys{}, at_p{};
  PipelineState<Traits::kStages> at{};
  PipelineState<Traits::kStagesDO> at_dout{};
  DqAccumulator<Traits, 1> sums = own.template dq_accumulator<1>();

  CUTE_DEVICE void compute(KvTile const& tile) {
    auto& shared = own.shared;
    QBlockIterator steps = own.steps_of(tile);
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutKV{});      // (N, D)
    Tensor sdO = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutDO{});  // (M, D, STAGE)
    Tensor sQt = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQt{});     // (D, M, STAGE)
    typename Traits::MmaScores mma_s;
    typename Traits::MmaKeys mma_k;
    Tensor tSrV = mma_s.get_slice(0).partition_fragment_A(sV);    // (MMA, MMA_N, MMA_D)
    Tensor tSrdO = mma_s.get_slice(0).partition_fragment_B(sdO);  // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tKrQ = mma_k.get_slice(0).partition_fragment_B(sQt);   // (MMA, MMA_D, MMA_M, STAGE)
    Tensor cS = mma_s.get_slice(own.thread).partition_C(make_identity_tensor(TileS{}));
    auto const store_ds = make_ds_store<Traits>(shared.ds, own.thread);
    Tensor acc_dk = partition_fragment_C(mma_k, typename Traits::TileKV{});  // (MMA, MMA_N, MMA_D)
    clear(acc_dk);

    RegisterSlices<Traits> held;
    auto at_before = at;  // as for the other warpgroup
    auto add_sums = [&](auto&& beside) { sums.add(at_before, beside, [] {}); };
    auto step = [&]<bool kFirst>(std::bool_constant<kFirst>) {
      Tensor acc_ds = partition_fragment_C(mma_s, TileS{});  // dP, then dS
      shared.ring_dout.wait(at_dout);
      issue_product(GMMA::ScaleOut::Zero, mma_s, held.of(hide_address(tSrV)),
                    hide_address(tSrdO(_, _, _, at_dout.stage)), acc_ds);
      shared.ring_q.wait(at);
      shared.ring_p.wait(at_p);
      Tensor weights = make_fragment_like(acc_ds);
      PExchange<Traits>(own).get(weights);
      wait_products<0>(acc_ds);
      __syncwarp();
      own.release(shared.ring_p, at_p);
      at_p.advance();
      own.release_queries(shared.ring_dout, at_dout);
      at_dout.advance();
      own.compute_ds(acc_ds, weights, cS, at.stage);
      Tensor rdS = convert<Element>(acc_ds);
      issue_product(GMMA::ScaleOut::One, mma_k, operand_a_view(rdS), tKrQ(_, _, _, at.stage), acc_dk);
      auto& full = shared.ring_ds.acquire(at);
      store_ds(rdS, Traits::kCluster * at.stage);
      cutlass::arch::fence_view_async_shared();
      own.announce(full);
      auto finish_dk = [&] {
        wait_products<kFirst ? 0 : Traits::kCluster>(acc_dk);
        own.release_queries(shared.ring_q, at);
      };
      if constexpr (kFirst) {
        finish_dk();
      } else {
        add_sums(finish_dk);
      }
      at_before = at;
      at.advance();
      steps.advance();
    };
    own.wait_stored();
    own.release(shared.ring_peer_k, at_keys);  // which dK has left
    shared.ring_k.wait(at_keys);
    shared.ring_v.wait(at_keys);
    held.load(sV, own.thread);
    step(std::true_type{});
    shared.ring_peer_k.wait(at_keys);
    while (__any_sync(0xffffffffu, steps.left > 0)) step(std::false_type{});
    add_sums([] {});
    own.release(shared.ring_k, at_keys);
    at_keys.advance();
    if (own.params.dk.data) own.store(KvGradient::dk, tile, acc_dk);
  }
};

}  // namespace flash_cute
