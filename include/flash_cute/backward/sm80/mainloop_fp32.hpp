// The main loop of the Ampere family's backward of float32.
#pragma once

#include "flash_cute/backward/sm80/mainloop.hpp"
#include "flash_cute/core/sm80/tf32_products.hpp"

namespace flash_cute {

// As of 16-bit types with one stage of Q and dO; see there. P and dS that go through shared memory lie there
// as store_scores leaves them.
template <class Traits, DqSums dq_sums>
  requires std::is_same_v<typename Traits::Element, float>
struct BackwardMainloopSm80<Traits, dq_sums> {
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr bool kExact = Traits::kExact, kSharesScores = Traits::kSharesScores;
  static constexpr bool kAddsDq = dq_sums == DqSums::all, kGeneral = Traits::kGeneral;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kWarpsKeys = Traits::kTile.warps_keys, kWarpsAcross = Traits::kTile.warps_across;
  using TileS = typename Traits::TileS;
  static_assert(Traits::kStages == 1 && Traits::kDqParts == 1 && dq_sums != DqSums::at_run_time);

  template <class Gradient>
  CUTE_DEVICE static void run(BackwardParams const& params, KvTile const& tile, SharedStorage& shared,
                              int thread, Gradient& acc_dk, Gradient& acc_dv) {
    auto const seen = BackwardMask<Traits::kMasking>::template queries_that_see<Traits>(params, tile);
    if (seen.empty()) return;
    int const heads = params.shape.heads_q / params.shape.heads_kv, end_head = (tile.head_kv + 1) * heads;
    typename Traits::MmaDkv const mma;
    Tensor cS = mma.get_slice(thread).partition_C(make_identity_tensor(TileS{}));
    KvTileLoader<Traits> const loader{params, tile, shared, thread};

    int head = tile.head_kv * heads, block = seen.first();
    loader.load_keys(params.k, params.shape.head_dim, shared.k);
    loader.load_keys(params.v, params.shape.head_dim_v, shared.v);
    loader.load_queries(head, block, 0);
    cp_async_fence();
    while (head < end_head) {
      cp_async_wait<0>();
      __syncthreads();
      int const reader = read_thread_index();  // so that no address stays in a register between products
      WarpTiles const keys = warp_rows<kWarpsKeys>(reader);
      WarpTiles const across = warp_columns<kWarpsKeys, kWarpsAcross>(reader);
      Tf32Tile<kBlockM> const queries{shared.q}, douts{shared.dout};
      Tf32Tile<kBlockN> const p{shared.p}, ds{shared.ds};

      // (1) S = K Q^T
      Tensor acc_s = partition_fragment_C(mma, TileS{});  // (MMA, MMA_N, MMA_M)
      multiply_rows<kExact, kHeadDim, false>(Tf32Tile<kBlockN>{shared.k}, keys, queries, across, acc_s);
      ScorePlace const place = BackwardMask<Traits::kMasking>::template place<Traits>(params, tile, head);
      auto step = score_step<Traits, QueryAxis::columns>(params, place, block * kBlockM, tile.n_begin, cS);
      step.change(acc_s);
      step.level(acc_s);
      if (!seen.full_blocks.contains(block)) {
        mask_scores<Traits>(params, tile, seen, head, block, mma, cS, acc_s);
      }
      // (3) P = exp2(S c - LSE)
      compute_p<QueryAxis::columns>(acc_s, step.scale_log2(params.softmax_scale * float(M_LOG2E)),
                                    of_query<QueryAxis::columns>(shared.lse, cS));
      auto&& acc_p = step.of_dv(acc_s);
      if constexpr (kSharesScores) p.store_scores(acc_p, keys, across);
      // (2) dP = V dO^T, less delta
      Tensor acc_ds = partition_fragment_C(mma, TileS{});  // (MMA, MMA_N, MMA_M)
      auto const neg_delta = of_query<QueryAxis::columns>(shared.neg_delta, cS);
      if constexpr (kGeneral) {
        clear(acc_ds);
      } else {
        fill_with_delta<QueryAxis::columns>(acc_ds, neg_delta);
      }
      multiply_rows<kExact, kHeadDim, true>(Tf32Tile<kBlockN>{shared.v}, keys, douts, across, acc_ds);
      // (5) dS = P (dP - delta)
      if constexpr (kGeneral) {
        step.drop(acc_ds);
        compute_ds<QueryAxis::columns>(acc_ds, acc_s, neg_delta);
      } else {
        compute_ds(acc_ds, acc_s);
      }
      if constexpr (kSharesScores || kAddsDq) ds.store_scores(acc_ds, keys, across);
      if constexpr (kSharesScores) __syncthreads();

      // (4) dV += P dO, (7) dK += dS Q
      multiply_scores(acc_p, p, keys, douts, across, acc_dv);
      multiply_scores(acc_ds, ds, keys, queries, across, acc_dk);
      __syncthreads();
      int const dq_head = head, dq_block = block;
      block = seen.after(block);
      if (block == seen.end()) {
        block = seen.first();
        ++head;
      }
      if (head < end_head) loader.load_queries(head, block, 0);
      cp_async_fence();
      // (6) dQ = dS K
      if constexpr (kAddsDq) {
        accumulate_dq(params.workspace.dq.accum + tile.block_index(dq_head, dq_block) * (kBlockM * kHeadDim),
                      shared, thread);
      }
    }
  }

 private:
  // acc += X B with X = P or dS, from registers where this warp has all columns of its rows.
  template <class Scores, class Gradient>
  CUTE_DEVICE static void multiply_scores(Scores const& scores, Tf32Tile<kBlockN> const& shared_scores,
                                          WarpTiles const& keys, Tf32Tile<kBlockM> const& queries,
                                          WarpTiles const& across, Gradient& acc) {
    auto add = [](float& x, int, int, float sum, bool) { x += sum; };
    if constexpr (kSharesScores) {
      multiply_by_rows<kExact, kBlockM>(
          [&]<int kCount>(Tf32Operand<kExact, kCount>& a, int step) {
            constexpr int kRowTiles = decltype(size<1>(acc))::value, kSteps = kCount / 4 / kRowTiles;
            CUTE_UNROLL
            for (int m = 0; m < kRowTiles; ++m) {
              shared_scores.template load_rows<kExact, kRowTiles, kSteps>(a, m, keys(m), step);
            }
          },
          queries, across, acc, add);
    } else {
      multiply_by_rows<kExact, kBlockM>(scores_in_registers<kExact>(scores), queries, across, acc, add);
    }
  }

  // dQ = dS K of a step, added to the accumulator in the workspace.
  CUTE_DEVICE static void accumulate_dq(float* dq_accum, SharedStorage& shared, int thread) {
    constexpr int kWarpsDq = Traits::kWarpsDq;
    Tf32Tile<kBlockN> const ds{shared.ds}, keys{shared.k};
    Tensor acc_dq =
        partition_fragment_C(typename Traits::MmaDq{}, typename Traits::TileDq{});  // (MMA, MMA_M, MMA_D)
    WarpTiles const rows = warp_rows<kWarpsDq>(thread);
    multiply_by_rows<kExact, kBlockN>(
        [&]<int kCount>(Tf32Operand<kExact, kCount>& a, int step) {
          constexpr int kRowTiles = decltype(size<1>(acc_dq))::value, kSteps = kCount / 4 / kRowTiles;
          CUTE_UNROLL
          for (int m = 0; m < kRowTiles; ++m) {
            ds.template load_scores_transposed<kExact, kSteps>(a, m, step * 8, rows(m));
          }
        },
        keys, warp_columns<kWarpsDq, Traits::kThreads / 32 / kWarpsDq>(thread), acc_dq,
        [](float& x, int, int, float sum, bool is_first) { x = is_first ? sum : x + sum; });
    CUTE_UNROLL
    for (int i = 0; i < size(acc_dq); ++i) atomicAdd(dq_accum + thread + i * Traits::kThreads, acc_dq(i));
  }
};

}  // namespace flash_cute
