// The Hopper family's backward maths, by one warpgroup: dK and dV of its 64 keys of every tile, and its half of
// the tile's part of dQ.
#pragma once

#include "flash_cute/attention/softmax.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/key_order.hpp"
#include "flash_cute/backward/maps_sm90.hpp"
#include "flash_cute/backward/query_sums_sm90.hpp"
#include "flash_cute/backward/traits_sm90.hpp"
#include "flash_cute/core/tma.hpp"
#include "flash_cute/core/warpgroup.hpp"

namespace flash_cute {

template <class Traits>
struct BackwardConsumerSm90 {
  using Element = typename Traits::Element;
  using TileS = typename Traits::TileS;
  using TileKV = typename Traits::TileKV;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  BackwardMaps const& maps;
  int warpgroup;  // among the consumers
  int thread;     // of the warpgroup
  RingPosition<1> at_keys{};
  RingPosition<Traits::kStages> at{};
  RingPosition<2> at_tiles{};

  CUTE_DEVICE void run() {
    while (true) {
      shared.ring_tiles.wait(at_tiles);
      KeyTile const& tile = shared.tiles[at_tiles.slot];
      if (tile.n_begin == kThrough) break;
      compute(tile);
      __syncwarp();
      release(shared.ring_tiles, at_tiles);
      at_tiles.advance();
    }
    if (thread % 32 == 0) cute::tma_store_wait<0>();  // the last sums have been read
  }

 private:
  // S = K Q^T and dP = V dO^T have keys as rows. P and dS are operands of dV += P dO and dK += dS Q from
  // registers; dS goes through shared memory to dQ = dS K, whose rows are queries. dP starts from dLSE - D.
  // The next step's S is issued behind this one's products.
  CUTE_DEVICE void compute(KeyTile const& tile) {
    WindowMask const& mask = tile.sequence.mask;
    QuerySteps steps(tile, params.shape.heads_q / params.shape.heads_kv, kBlockM, kBlockN);
    int const own_begin = tile.n_begin + 64 * warpgroup;
    BlockRange const unmasked = own_begin + 64 <= mask.seqlen_k
                                    ? mask.unmasked_rows(own_begin, 64, kBlockM)
                                    : BlockRange{0, 0};
    float const scale_log2 = params.softmax_scale * float(M_LOG2E);

    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKV{});        // (N, D)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutKV{});        // (N, D)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});         // (M, D, STAGE)
    Tensor sdO = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutQ{});     // (M, D, STAGE)
    Tensor sQt = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQt{});       // (D, M, STAGE)
    Tensor sdOt = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutQt{});   // (D, M, STAGE)
    Tensor sdS = make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutDSt{});     // (N, M, STAGE)
    typename Traits::MmaScores mma_s;
    typename Traits::MmaKeys mma_k;
    auto const slice_s = mma_s.get_slice(warpgroup * 128);
    auto const slice_k = mma_k.get_slice(warpgroup * 128);
    Tensor tSrK = slice_s.partition_fragment_A(sK);     // (MMA, MMA_N, MMA_D)
    Tensor tSrV = slice_s.partition_fragment_A(sV);     // (MMA, MMA_N, MMA_D)
    Tensor tSrQ = slice_s.partition_fragment_B(sQ);     // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tSrdO = slice_s.partition_fragment_B(sdO);   // (MMA, MMA_M, MMA_D, STAGE)
    Tensor tKrQ = slice_k.partition_fragment_B(sQt);    // (MMA, MMA_D, MMA_M, STAGE)
    Tensor tKrdO = slice_k.partition_fragment_B(sdOt);  // (MMA, MMA_D, MMA_M, STAGE)
    Tensor cS = mma_s.get_slice(warpgroup * 128 + thread).partition_C(make_identity_tensor(TileS{}));
    auto const copy_ds = make_tiled_copy_C(typename Traits::StoreAtom{}, mma_s);
    auto const thread_ds = copy_ds.get_slice(warpgroup * 128 + thread);
    Tensor tdSsdS = thread_ds.partition_D(sdS);
    Tensor acc_dk = partition_fragment_C(mma_k, TileKV{});  // (MMA, MMA_N, MMA_D)
    Tensor acc_dv = partition_fragment_C(mma_k, TileKV{});  // likewise
    clear(acc_dk);
    clear(acc_dv);

    QuerySums<Traits> sums(shared, params, tile, warpgroup, thread);
    Tensor acc_s = partition_fragment_C(mma_s, TileS{});  // (MMA, MMA_N, MMA_M)
    auto issue_scores = [&] {
      shared.ring_q.wait(at);
      issue_product(GMMA::ScaleOut::Zero, mma_s, tSrK, tSrQ(_, _, _, at.slot), acc_s);
    };
    shared.ring_k.wait(at_keys);
    issue_scores();
    shared.ring_v.wait(at_keys);
    while (true) {
      Tensor acc_ds = partition_fragment_C(mma_s, TileS{});  // dP, then dS
      shared.ring_dout.wait(at);
      issue_product(GMMA::ScaleOut::Zero, mma_s, tSrV, tSrdO(_, _, _, at.slot), acc_ds);
      wait_products<1>(acc_s);
      if (!unmasked.contains(steps.block)) {
        hide_invisible<KeyBits>(MaskOfKeys{mask.transposed()}, PlainRows{}, tile.n_begin, steps.block * kBlockM, cS, acc_s);
      }
      weigh(acc_s, cS, shared.lse + at.slot * kBlockM, scale_log2);
      Tensor rP = make_tensor<Element>(acc_s.layout());
      auto issue_dv = [&] {
        convert_into<Element>(acc_s, rP);
        issue_product(GMMA::ScaleOut::One, mma_k, operand_a_view(rP), tKrdO(_, _, _, at.slot), acc_dv);
      };
      if constexpr (Traits::kEarlyDV) issue_dv();
      wait_products<Traits::kEarlyDV>(acc_ds);
      differentiate(acc_ds, acc_s, cS, shared.delta + at.slot * kBlockM);
      Tensor rdS = convert<Element>(acc_ds);
      if constexpr (!Traits::kEarlyDV) issue_dv();
      issue_product(GMMA::ScaleOut::One, mma_k, operand_a_view(rdS), tKrQ(_, _, _, at.slot), acc_dk);
      auto& full = shared.ring_ds.acquire(at);
      copy(copy_ds, thread_ds.retile_S(rdS), tdSsdS(_, _, _, at.slot));
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (thread % 32 == 0) full.arrive();

      Tensor acc_dq = sums.issue(at);
      wait_products<2>(acc_dv);
      release(shared.ring_dout, at);
      wait_products<1>(acc_dk);
      release(shared.ring_q, at);
      wait_products<0>(acc_dq);
      release(shared.ring_ds, at);
      at.advance();
      int const head = steps.head, block = steps.block;
      steps.advance();
      sums.add(acc_dq, head, block);
      if (__all_sync(0xffffffffu, steps.left == 0)) break;
      issue_scores();
    }
    release(shared.ring_k, at_keys);
    release(shared.ring_v, at_keys);
    at_keys.advance();
    if (!params.dk.data) return;  // nobody asked for them
    store(maps.dv, maps.entry_rows.dv, tile, 1.f, acc_dv);
    store(maps.dk, maps.entry_rows.dk, tile, params.softmax_scale, acc_dk);
  }

  // One arrival a warp: its own products have read the slot.
  template <class Ring, class Position>
  CUTE_DEVICE static void release(Ring& ring, Position const& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
  }

  // Scores become weights: 2^(score * scale - LSE of its query), whose column it is.
  template <class Scores, class Coords>
  CUTE_DEVICE static void weigh(Scores& acc_s, Coords const& cS, float const* lse_of_queries, float scale) {
    auto scores = row_col_view(acc_s);
    auto const coords = row_col_view(cS);
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      float const lse = lse_of_queries[get<1>(coords(0, col))];
      CUTE_UNROLL
      for (int row = 0; row < size<0>(scores); ++row) {
        scores(row, col) = fast_exp2(fmaf(scores(row, col), scale, -lse));
      }
    }
  }

  // dS = P (dP + dLSE - D), the last two those of its query, whose column it is.
  template <class Scores, class Coords>
  CUTE_DEVICE static void differentiate(Scores& acc_ds, Scores const& acc_p, Coords const& cS,
                                        float const* delta_of_queries) {
    auto gradients = row_col_view(acc_ds);
    auto const weights = row_col_view(acc_p);
    auto const coords = row_col_view(cS);
    CUTE_UNROLL
    for (int col = 0; col < size<1>(gradients); ++col) {
      float const delta = delta_of_queries[get<1>(coords(0, col))];
      CUTE_UNROLL
      for (int row = 0; row < size<0>(gradients); ++row) {
        gradients(row, col) = weights(row, col) * (gradients(row, col) + delta);
      }
    }
  }

  // By each warp alone: its 16 rows leave through the memory of its sums of dQ.
  template <class Accumulator>
  CUTE_DEVICE void store(CUtensorMap const& map, int entry_rows, KeyTile const& tile, float scale,
                         Accumulator const& acc) const {
    int const warp = warpgroup * 4 + thread / 32, lane = thread % 32;
    auto* const rows = reinterpret_cast<Element*>(shared.dq + warp * Traits::kWarpFloats);
    Tensor sRows = make_tensor(make_smem_ptr(rows), typename Traits::LayoutWarp{});  // (16, D)
    if (lane == 0) cute::tma_store_wait<0>();  // what was there has left
    __syncwarp();
    auto const values = row_col_view(acc);
    auto word = [&](int row, int col) {
      return pack<Element>(scale * values(row, col), scale * values(row, col + 1));
    };
    CUTE_UNROLL
    for (int col = 0; col < size<1>(values); col += 4) {  // that this lane owns, of 16
      auto& target = sRows(lane % 16, 4 * col + lane / 16 * 8);
      SM90_U32x4_STSM_N::copy(word(0, col), word(1, col), word(0, col + 2), word(1, col + 2),
                              reinterpret_cast<uint128_t&>(target));
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane != 0) return;
    MapPlace const place = MapPlace::of_keys(params.lengths.given, tile, entry_rows);
    store_panels<Traits::kHeadDim, Traits::kPanel, Traits::kWarpRows>(
        map, rows, 0, tile.head_kv, place.shift + tile.n_begin + warp * Traits::kWarpRows, place.plane,
        place.bound);
  }
};

}  // namespace flash_cute
