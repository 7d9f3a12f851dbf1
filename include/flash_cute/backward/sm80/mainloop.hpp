// The main loop of the Ampere family's backward: dK and dV of one KV tile, and the tile's part of dQ, over
// the M blocks that see the tile.
#pragma once

#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/general_step.hpp"
#include "flash_cute/backward/gqa_reduce.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/backward/mask.hpp"
#include "flash_cute/backward/scores.hpp"
#include "flash_cute/backward/sm80/operands.hpp"
#include "flash_cute/backward/sm80/traits.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"
#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

// Applies the mask to S^T of an M block. With kSparesRegisters coordinates and limits are computed here, not
// before the main loop.
template <class Traits, class Mma, class Coords, class Scores>
CUTE_DEVICE void mask_scores(int n_begin, TransposedMask const& transposed_mask, int block, Mma const& mma,
                             Coords const& cS, Scores& acc_s) {
  int const m_begin = block * Traits::kBlockM;
  if constexpr (Traits::kSparesRegisters) {
    TransposedMask const from_block{transposed_mask.transposed.from_key(m_begin)};
    auto const own_mma = mma.get_slice(read_thread_index());
    apply_mask<ComparedKeys>(from_block, OneHead{}, n_begin, 0,
                             own_mma.partition_C(make_identity_tensor(typename Traits::TileS{})), acc_s);
  } else {
    apply_mask<ComparedKeys>(transposed_mask, OneHead{}, n_begin, m_begin, cS, acc_s);
  }
}
// The same of a block of queries of a head, whichever the mask is.
template <class Traits, class Mma, class Coords, class Scores>
CUTE_DEVICE void mask_scores(BackwardParams const&, KvTile const& tile, WindowOfKeys const& seen, int,
                             int block, Mma const& mma, Coords const& cS, Scores& acc_s) {
  mask_scores<Traits>(tile.n_begin, seen.mask, block, mma, cS, acc_s);
}
template <class Traits, class Mma, class Coords, class Scores>
CUTE_DEVICE void mask_scores(BackwardParams const& params, KvTile const& tile, TableOfKeys const&, int head,
                             int block, Mma const& mma, Coords const&, Scores& acc_s) {
  using Mask = BackwardMask<Masking::table>;
  Tensor cS = mma.get_slice(read_thread_index()).partition_C(make_identity_tensor(typename Traits::TileS{}));
  Mask::Visible<Traits, decltype(cS)> visible;
  Mask::template find<Traits>(params, tile, head, tile.n_begin, block * Traits::kBlockM, cS, visible);
  visible.apply(acc_s);
}

template <class Traits, DqSums dq_sums>
struct BackwardMainloopSm80 {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kStages = Traits::kStages;
  static constexpr bool kGeneral = Traits::kGeneral;
  using TileS = typename Traits::TileS;

  // The accumulators of S and dP have keys as rows, so P and dS are left operands of dV += P dO and dK += dS
  // Q as they lie in registers. dS goes through shared memory to dQ = dS K, whose rows are queries. A step
  // has two barriers: the first says that Q and dO have arrived and that the step before is over, the second
  // that dS is in shared memory. acc_dk, acc_dv: (MMA, MMA_N, MMA_D).
  template <class Gradient>
  CUTE_DEVICE static void run(BackwardParams const& params, KvTile const& tile, SharedStorage& shared,
                              int thread, Gradient& acc_dk, Gradient& acc_dv) {
    if constexpr (Traits::kSparesRegisters) {  // with this, addresses take fewer registers
      __builtin_assume(0 <= thread && thread < Traits::kThreads);
    }
    auto const seen = BackwardMask<Traits::kMasking>::template queries_that_see<Traits>(params, tile);
    if (seen.empty()) return;
    int const heads = params.shape.heads_q / params.shape.heads_kv, steps = heads * seen.count();
    bool const accumulates_dq =
        dq_sums == DqSums::at_run_time ? params.workspace.dq.accum != nullptr : dq_sums == DqSums::all;

    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKV{})(_, _, 0);   // (N, D)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutKV{})(_, _, 0);   // (N, D)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});             // (M, D, STAGE)
    Tensor sQt = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQt{});           // (D, M, STAGE)
    Tensor sdO = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutQ{});         // (M, D, STAGE)
    Tensor sdOt = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutQt{});       // (D, M, STAGE)
    Tensor sP = make_tensor(make_smem_ptr(shared.p), typename Traits::LayoutS{})(_, _, 0);    // (N, M)
    Tensor sdS = make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutS{})(_, _, 0);  // (N, M)

    KvTileLoader<Traits> const loader{params, tile, shared, thread};

    // Copies from shared memory to registers.
    typename Traits::MmaDkv const mma;
    auto const thread_mma = mma.get_slice(thread);
    typename Traits::TensorCore::FragmentAtom const atom;
    typename Traits::TensorCore::FragmentAtomTransposed const transposed_atom;
    auto const copy_a = make_tiled_copy_A(atom, mma);
    auto const copy_b = make_tiled_copy_B(atom, mma);
    auto const copy_bt = make_tiled_copy_B(transposed_atom, mma);
    Tensor cS = thread_mma.partition_C(make_identity_tensor(TileS{}));

    // acc += X B^T with X = P or dS, from registers where this warp has all columns of its rows, else from
    // sX.
    auto product_of_scores = [&](auto const& rX, auto const& sX, auto const& sB, auto& acc) {
      if constexpr (Traits::kSharesScores) {
        multiply_shared(thread, mma, copy_a, sX, copy_bt, sB, acc);
      } else {
        multiply_by_shared(thread, mma, operand_a_view(rX), [](int) {}, copy_bt, sB, acc);
      }
    };
    auto store_scores = [&](auto const& rX, auto&& sX) {
      copy(AutoVectorizingCopyWithAssumedAlignment<32>{}, rX, thread_mma.partition_C(sX));
    };

    loader.load_keys(params.k, params.shape.head_dim, shared.k);
    loader.load_keys(params.v, params.shape.head_dim_v, shared.v);
    // The head and M block of this step, and of the next one to load.
    int head = tile.head_kv * heads, block = seen.first(), stage = 0;
    int const end_head = head + heads;
    int next_head = head, next_block = block;
    auto load_next = [&](int next_stage) {
      if (next_head < end_head) loader.load_queries(next_head, next_block, next_stage);
      cp_async_fence();
      next_block = seen.after(next_block);
      if (next_block == seen.end()) {
        next_block = seen.first();
        ++next_head;
      }
    };
    load_next(0);
    for (int left = steps; left > 0; --left, stage ^= kStages - 1) {
      cp_async_wait<0>();
      __syncthreads();
      if constexpr (kStages == 2) load_next(stage ^ 1);

      // (1) S = K Q^T
      Tensor acc_s = partition_fragment_C(mma, TileS{});  // (MMA, MMA_N, MMA_M)
      clear(acc_s);
      multiply_shared(thread, mma, copy_a, sK, copy_b, sQ(_, _, stage), acc_s);
      ScorePlace const place = BackwardMask<Traits::kMasking>::template place<Traits>(params, tile, head);
      auto step = score_step<Traits, QueryAxis::columns>(params, place, block * kBlockM, tile.n_begin, cS);
      step.change(acc_s);
      step.level(acc_s);
      if (!seen.full_blocks.contains(block)) {
        mask_scores<Traits>(params, tile, seen, head, block, mma, cS, acc_s);
      }
      // (3) P = exp2(S c - LSE)
      compute_p<QueryAxis::columns>(acc_s, step.scale_log2(params.softmax_scale * float(M_LOG2E)),
                                    of_query<QueryAxis::columns>(shared.lse + stage * kBlockM, cS));
      Tensor rP = rounded<Element>(step.of_dv(acc_s));
      if constexpr (Traits::kSharesScores) store_scores(rP, sP);

      // (2) dP = V dO^T, less delta
      Tensor acc_ds = partition_fragment_C(mma, TileS{});  // (MMA, MMA_N, MMA_M)
      auto const neg_delta = of_query<QueryAxis::columns>(shared.neg_delta + stage * kBlockM, cS);
      if constexpr (kGeneral) {
        clear(acc_ds);
      } else {
        fill_with_delta<QueryAxis::columns>(acc_ds, neg_delta);
      }
      multiply_shared(thread, mma, copy_a, sV, copy_b, sdO(_, _, stage), acc_ds);
      // (5) dS = P (dP - delta)
      if constexpr (kGeneral) {
        step.drop(acc_ds);
        compute_ds<QueryAxis::columns>(acc_ds, acc_s, neg_delta);
      } else {
        compute_ds(acc_ds, acc_s);
      }
      Tensor rdS = convert<Element>(acc_ds);
      if constexpr (Traits::kSharesScores) {
        store_scores(rdS, sdS);
        __syncthreads();
      }
      // (4) dV += P dO
      product_of_scores(rP, sP, sdOt(_, _, stage), acc_dv);
      if (accumulates_dq && !Traits::kSharesScores) store_scores(rdS, sdS);
      // (7) dK += dS Q
      product_of_scores(rdS, sdS, sQt(_, _, stage), acc_dk);
      if (kStages == 1 || (accumulates_dq && !Traits::kSharesScores)) __syncthreads();
      if constexpr (kStages == 1) load_next(0);
      // (6) dQ = dS K
      if (accumulates_dq) {
        accumulate_dq(
            params.workspace.dq.accum + tile.block_index(head, block) * (kBlockM * kHeadDim) + thread, shared,
            thread);
      }
      block = seen.after(block);
      if (block == seen.end()) {
        block = seen.first();
        ++head;
      }
    }
  }

 private:
  // dQ = dS K of a step, added to the accumulator in the workspace.
  CUTE_DEVICE static void accumulate_dq(float* dq_accum, SharedStorage& shared, int thread) {
    Tensor sdSt = make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutSt{})(_, _, 0);  // (M, N)
    Tensor sKt = columns_of_keys<Traits>(shared.k);  // (D, N, PART)
    typename Traits::MmaDq const mma;
    typename Traits::TensorCore::FragmentAtomTransposed const atom;
    auto const copy_dst = make_tiled_copy_A(atom, mma);
    auto const copy_kt = make_tiled_copy_B(atom, mma);
    CUTE_UNROLL
    for (int part = 0; part < Traits::kDqParts; ++part) {
      Tensor acc_dq = partition_fragment_C(mma, typename Traits::TileDq{});  // (MMA, MMA_M, MMA_D)
      clear(acc_dq);
      multiply_shared(thread, mma, copy_dst, sdSt, copy_kt, sKt(_, _, part), acc_dq);
      CUTE_UNROLL
      for (int i = 0; i < size(acc_dq); ++i) atomicAdd(dq_accum + i * Traits::kThreads, acc_dq(i));
      dq_accum += size(acc_dq) * Traits::kThreads;
    }
  }
};

}  // namespace flash_cute
