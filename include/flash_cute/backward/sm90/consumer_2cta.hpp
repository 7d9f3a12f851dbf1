// The two consumer warpgroups of the Hopper family's backward for head dims 192 and 256, where registers do
// not hold both dK and dV of 64 keys: one computes P and dV, the other dS and dK, and each its columns of dQ.
// A cluster of two thread blocks shares the keys of a tile.
#pragma once

#include "flash_cute/backward/sm90/dq_accumulate.hpp"
#include "flash_cute/backward/sm90/ds_store.hpp"
#include "flash_cute/backward/sm90/register_slices.hpp"
#include "flash_cute/backward/sm90/warpgroup.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"

namespace flash_cute {

// P passes through shared memory from a thread of the first warpgroup to the thread of the second one that
// has the same coordinates, 16 bytes at a time, so that neither direction has bank conflicts. At head dim 256
// P takes the memory of the first warpgroup's part of dQ; each of them is written only when the other has
// been read.
template <class Traits>
struct PExchange {
  uint4* chunks;  // this thread's

  CUTE_DEVICE explicit PExchange(BackwardConsumerWarpgroup<Traits> const& own)
      : chunks((Traits::kPSharesDq ? reinterpret_cast<uint4*>(own.shared.dq) : own.shared.p) +
               own.thread / 32 * (Traits::kPChunks / 4) + own.thread % 32) {}

  template <class Probabilities>
  CUTE_DEVICE void put(Probabilities const& p) const {
    auto const own = recast<uint4 const>(p);
    CUTE_UNROLL
    for (int i = 0; i < size(own); ++i) chunks[i * 32] = own(i);
  }
  template <class Probabilities>
  CUTE_DEVICE void get(Probabilities& p) const {
    auto own = recast<uint4>(p);
    CUTE_UNROLL
    for (int i = 0; i < size(own); ++i) own(i) = chunks[i * 32];
  }
};

// The first warpgroup. The accumulator of S has keys as rows; P is an operand of dV += P dO from registers.
template <class Traits>
struct BackwardDvConsumer2Cta {
  using Element = typename Traits::Element;
  using TileS = typename Traits::TileS;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr bool kHasTable = Traits::kMasking == Masking::table;
  BackwardConsumerWarpgroup<Traits> const& own;
  PipelineState<1> at_keys{}, at_p{};
  PipelineState<Traits::kStages> at{};
  PipelineState<Traits::kStagesDO> at_dout{};
  DqAccumulator<Traits, 0> dq_accum = own.template dq_accumulator<0>();

  CUTE_DEVICE void compute(KvTile const& tile) {
    auto& shared = own.shared;
    auto steps = steps_of<Traits>(own.params, tile);
    auto const full_blocks = own.full(tile);
    auto const of_tile = own.of_tile(tile);
    float const scale_log2 = own.scale_log2();
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{});         // (N, D)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});         // (M, D, STAGE)
    Tensor sdOt = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutDOt{});  // (D, M, STAGE)
    typename Traits::MmaScores mma_s;
    typename Traits::MmaDv mma_k;
    Tensor tSrK = mma_s.get_slice(0).partition_fragment_A(sK);     // (MMA, MMA_N, MMA_D)
    Tensor tSrQ = mma_s.get_slice(0).partition_fragment_B(sQ);     // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tKrdO = mma_k.get_slice(0).partition_fragment_B(sdOt);  // (MMA, MMA_D, MMA_M, STAGE)
    Tensor cS = mma_s.get_slice(own.thread).partition_C(make_identity_tensor(TileS{}));
    Tensor acc_dv = partition_fragment_C(mma_k, typename Traits::TileV{});  // (MMA, MMA_N, MMA_D)
    clear(acc_dv);

    RegisterSlices<Traits, Traits::kHeadDim> k_slices;
    auto at_before = at;  // dQ comes one step late, when dS is there
    // (6) dQ = dS K of the step before
    auto add_dq = [&](auto&& beside) {
      dq_accum.add(at_before, beside, [&] {
        if constexpr (Traits::kPSharesDq) shared.ring_p.acquire(at_p);  // P has been read
      });
    };
    auto step = [&]<bool kFirst>(std::bool_constant<kFirst>) __attribute__((always_inline)) {
      // (1) S = K Q^T
      Tensor acc_s = partition_fragment_C(mma_s, TileS{});  // (MMA, MMA_N, MMA_M)
      shared.ring_q.wait(at);
      issue_product(GMMA::ScaleOut::Zero, mma_s, k_slices.of(hide_address(tSrK)), tSrQ(_, _, _, at.stage),
                    acc_s);
      auto scores = own.score_step(of_tile, steps.head, first_own_key<Traits>(tile), steps.block, cS);
      auto mask = own.block_mask(tile, first_own_key<Traits>(tile), steps.block, cS);
      bool const finds_early = kHasTable && !steps.is_full(full_blocks);
      if (finds_early) mask.find(steps.head);
      wait_products<0>(acc_s);
      scores.change(acc_s);
      scores.level(acc_s);
      if (kHasTable ? finds_early : !steps.is_full(full_blocks)) mask.apply(acc_s);
      // (3) P = exp2(S c - LSE)
      float const first_lse = own.first_lse(cS, at.stage);
      own.compute_p(acc_s, cS, at.stage, first_lse, scores.scale_log2(scale_log2));
      __syncwarp();  // all lanes have read the LSE
      own.release_queries(shared.ring_q, at);
      if constexpr (Traits::kPSharesDq) dq_accum.wait_read();  // from where P is written now
      auto&& acc_p = scores.of_dv(acc_s);
      auto& full = shared.ring_p.acquire(at_p);
      PExchange<Traits>(own).put(acc_s);
      own.arrive(full);
      at_p.advance();
      // (4) dV += P dO
      Tensor rP = rounded<Element>(acc_p);
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
        add_dq(finish_dv);
      }
      at_before = at;
      at.advance();
      at_dout.advance();
      steps.advance();
    };
    own.wait_stored();
    own.release(shared.ring_v, at_keys);  // dV of the tile before has been stored through V's memory
    shared.ring_k.wait(at_keys);
    k_slices.load(sK, own.thread);
    step(std::true_type{});
    shared.ring_peer_k.wait(at_keys);
    while (__any_sync(0xffffffffu, steps.left > 0)) step(std::false_type{});
    // When the last P has been read, V has been, too, and dV can be stored through its memory.
    shared.ring_p.acquire(at_p);
    if (own.params.dv.data) own.template store<KvGradient::dv, /*kAllFit=*/true>(tile, acc_dv);
    add_dq([] {});
    own.release(shared.ring_k, at_keys);
    at_keys.advance();
  }
};

// The second warpgroup. The accumulator of dP has keys as rows; dS is an operand of dK += dS Q from
// registers, and of dQ = dS K through shared memory.
template <class Traits>
struct BackwardDkConsumer2Cta {
  using Element = typename Traits::Element;
  using TileS = typename Traits::TileS;
  static constexpr int kBlockM = Traits::kBlockM;
  BackwardConsumerWarpgroup<Traits> const& own;
  PipelineState<1> at_keys{}, at_p{};
  PipelineState<Traits::kStages> at{};
  PipelineState<Traits::kStagesDO> at_dout{};
  DqAccumulator<Traits, 1> dq_accum = own.template dq_accumulator<1>();

  CUTE_DEVICE void compute(KvTile const& tile) {
    auto& shared = own.shared;
    auto steps = steps_of<Traits>(own.params, tile);
    auto const of_tile = own.of_tile(tile);
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutV{});       // (N, D)
    Tensor sdO = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutDO{});  // (M, D, STAGE)
    Tensor sQt = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQt{});     // (D, M, STAGE)
    typename Traits::MmaScores mma_s;
    typename Traits::MmaDk mma_k;
    Tensor tSrV = mma_s.get_slice(0).partition_fragment_A(sV);    // (MMA, MMA_N, MMA_D)
    Tensor tSrdO = mma_s.get_slice(0).partition_fragment_B(sdO);  // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tKrQ = mma_k.get_slice(0).partition_fragment_B(sQt);   // (MMA, MMA_D, MMA_M, STAGE)
    Tensor cS = mma_s.get_slice(own.thread).partition_C(make_identity_tensor(TileS{}));
    auto const store_ds = make_ds_store<Traits>(shared.ds, own.thread);
    Tensor acc_dk = partition_fragment_C(mma_k, typename Traits::TileK{});  // (MMA, MMA_N, MMA_D)
    clear(acc_dk);

    RegisterSlices<Traits, Traits::kHeadDimV> v_slices;
    auto at_before = at;  // dQ comes one step late, as in the first warpgroup
    // (6) dQ = dS K of the step before
    auto add_dq = [&](auto&& beside) { dq_accum.add(at_before, beside, [] {}); };
    auto step = [&]<bool kFirst>(std::bool_constant<kFirst>) __attribute__((always_inline)) {
      // (2) dP = V dO^T
      Tensor acc_ds = partition_fragment_C(mma_s, TileS{});  // dP, then dS
      shared.ring_dout.wait(at_dout);
      issue_product(GMMA::ScaleOut::Zero, mma_s, v_slices.of(hide_address(tSrV)),
                    hide_address(tSrdO(_, _, _, at_dout.stage)), acc_ds);
      auto const scores = own.score_step(of_tile, steps.head, first_own_key<Traits>(tile), steps.block, cS);
      shared.ring_q.wait(at);
      shared.ring_p.wait(at_p);
      Tensor p = make_fragment_like(acc_ds);
      PExchange<Traits>(own).get(p);
      wait_products<0>(acc_ds);
      __syncwarp();
      own.release(shared.ring_p, at_p);
      at_p.advance();
      own.release_queries(shared.ring_dout, at_dout);
      at_dout.advance();
      // (5) dS = P (dP - delta)
      scores.drop(acc_ds);
      own.compute_ds(acc_ds, p, cS, at.stage);
      Tensor rdS = convert<Element>(acc_ds);
      // (7) dK += dS Q
      issue_product(GMMA::ScaleOut::One, mma_k, operand_a_view(rdS), tKrQ(_, _, _, at.stage), acc_dk);
      auto& full = shared.ring_ds.acquire(at);
      store_ds(rdS, Traits::kCluster * at.stage);
      cutlass::arch::fence_view_async_shared();
      own.arrive(full);
      auto finish_dk = [&] {
        wait_products<kFirst ? 0 : Traits::kCluster>(acc_dk);
        own.release_queries(shared.ring_q, at);
      };
      if constexpr (kFirst) {
        finish_dk();
      } else {
        add_dq(finish_dk);
      }
      at_before = at;
      at.advance();
      steps.advance();
    };
    own.wait_stored();
    own.release(shared.ring_peer_k, at_keys);  // dK of the tile before has been stored through its memory
    shared.ring_k.wait(at_keys);
    shared.ring_v.wait(at_keys);
    v_slices.load(sV, own.thread);
    step(std::true_type{});
    shared.ring_peer_k.wait(at_keys);
    while (__any_sync(0xffffffffu, steps.left > 0)) step(std::false_type{});
    add_dq([] {});
    own.release(shared.ring_k, at_keys);
    at_keys.advance();
    if (own.params.dk.data) own.template store<KvGradient::dk>(tile, acc_dk);
  }
};

}  // namespace flash_cute
