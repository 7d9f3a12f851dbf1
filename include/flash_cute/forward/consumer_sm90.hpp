// The Hopper family's forward maths, by one warpgroup on its 64 rows of a tile.
#pragma once

#include "flash_cute/attention/scheduler.hpp"
#include "flash_cute/attention/softmax.hpp"
#include "flash_cute/core/warpgroup.hpp"
#include "flash_cute/forward/tile_views.hpp"
#include "flash_cute/forward/traits_sm90.hpp"

namespace flash_cute {

template <class Traits>
struct ForwardConsumerSm90 {
  using Element = typename Traits::Element;
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  int warpgroup;  // among the consumers
  int thread;     // among the consumers
  RingPosition<1> at_q{};
  RingPosition<Traits::kStages> at_k{}, at_v{};

  // Blocks go from the last to the first. The scores of the next block are computed while this block's
  // softmax waits to be multiplied with V: S(n - 1) = Q K^T and O += P(n) V are in flight together, and the
  // softmax of S(n - 1) starts when its scores are there. Between warpgroups, turns keep one in its products
  // while another is in softmax.
  template <class Softmax, class Output>
  CUTE_DEVICE void run(TileCoord const& tile, Softmax& softmax, Output& acc_o) {
    WindowMask const& mask = params.mask;
    int const m_begin = tile.m_block * Traits::kBlockM;
    BlockRange const visited = mask.visited(m_begin, Traits::kBlockM, Traits::kBlockN);
    BlockRange const unmasked = mask.unmasked(m_begin, Traits::kBlockM, Traits::kBlockN);
    if (visited.empty()) return;

    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});    // (M, D)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{});    // (N, D, STAGE)
    Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutVt{});  // (D, N, STAGE)
    typename Traits::MmaQK mma_qk;
    typename Traits::MmaPV mma_pv;
    Tensor tSrQ = mma_qk.get_slice(warpgroup * 128).partition_fragment_A(sQ);   // (MMA, MMA_M, MMA_K)
    Tensor tSrK = mma_qk.get_slice(warpgroup * 128).partition_fragment_B(sK);   // (MMA, MMA_N, MMA_K, STAGE)
    Tensor tOrV = mma_pv.get_slice(warpgroup * 128).partition_fragment_B(sVt);  // (MMA, MMA_D, MMA_N, STAGE)
    using TileS = Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>;
    Tensor cS = mma_qk.get_slice(thread).partition_C(make_identity_tensor(TileS{}));

    auto probabilities = [&](auto& acc_s, int block) {
      if (!unmasked.contains(block)) hide_invisible(mask, m_begin, block * Traits::kBlockN, cS, acc_s);
      return softmax.update(acc_s);
    };
    WarpgroupTurns<Traits::kConsumers> const turns{warpgroup};

    int block = visited.end - 1;
    shared.ring_q.wait(at_q);
    shared.ring_k.wait(at_k);
    Tensor acc_first = partition_fragment_C(mma_qk, TileS{});  // (MMA, MMA_M, MMA_N)
    turns.wait();
    issue_product<GMMA::ScaleOut::Zero>(mma_qk, tSrQ, tSrK(_, _, _, at_k.slot), acc_first);
    turns.pass();
    wait_products<0>(acc_first);
    release(shared.ring_k, at_k);
    probabilities(acc_first, block);
    Tensor rP = convert<Element>(acc_first);
    Tensor tOrP = operand_a_view(rP);  // (MMA, MMA_M, MMA_N)

    for (--block; block >= visited.begin; --block) {
      Tensor acc_s = partition_fragment_C(mma_qk, TileS{});
      shared.ring_k.wait(at_k);
      turns.wait();
      issue_product<GMMA::ScaleOut::Zero>(mma_qk, tSrQ, tSrK(_, _, _, at_k.slot), acc_s);
      shared.ring_v.wait(at_v);
      issue_product<GMMA::ScaleOut::One>(mma_pv, tOrP, tOrV(_, _, _, at_v.slot), acc_o);
      turns.pass();
      wait_products<1>(acc_s);
      release(shared.ring_k, at_k);
      auto const correction = probabilities(acc_s, block);
      wait_products<0>(acc_o);
      release(shared.ring_v, at_v);
      correction.apply(acc_o);
      convert_into<Element>(acc_s, rP);
    }
    release(shared.ring_q, at_q);

    shared.ring_v.wait(at_v);
    issue_product<GMMA::ScaleOut::One>(mma_pv, tOrP, tOrV(_, _, _, at_v.slot), acc_o);
    wait_products<0>(acc_o);
    release(shared.ring_v, at_v);
  }

 private:
  // One arrival a warp: its own products have read the slot.
  template <class Ring, class Position>
  CUTE_DEVICE static void release(Ring& ring, Position& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
    at.advance();
  }
};

}  // namespace flash_cute
