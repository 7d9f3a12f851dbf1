// The main loop of the Ampere family's backward for head dims 192 and 256, where two halves of a thread block
// split the work on a KV tile: one computes S, P and dV, the other dP, dS and dK, by the same code on other
// operands. So a warp has a larger part of a product and reads less shared memory for each operation.
#pragma once

#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/backward/mask.hpp"
#include "flash_cute/backward/scores.hpp"
#include "flash_cute/backward/sm80/operands.hpp"
#include "flash_cute/backward/sm80/traits.hpp"
#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/core/named_barrier.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

// What a half of the thread block computes of the scores.
enum class Half { p, ds };

template <class Traits, DqSums dq_sums>
struct BackwardTwoRoleMainloopSm80 {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kThreads, kHalf = Traits::kKeyThreads;
  static_assert(Traits::kStages == 2 && dq_sums != DqSums::at_run_time);
  using TileS = typename Traits::TileS;

  // acc: dV in the half that has P, dK in the half that has dS, (MMA, MMA_N, MMA_D).
  template <class Gradient>
  CUTE_DEVICE static void run(BackwardParams const& params, TwoRoleKvTile const& tile, SharedStorage& shared,
                              int thread, Gradient& acc) {
    WindowMask const& mask = tile.sequence.mask;
    BlockRange const visited = mask.visited_rows(tile.n_begin, kBlockN, kBlockM);
    BlockRange const full_blocks =
        BackwardMask<Masking::window>::full_blocks(tile, tile.n_begin, kBlockN, kBlockM);
    if (visited.empty()) return;

    // The shuffle tells ptxas that the value is uniform in a warp, so that addresses that depend on it take
    // fewer registers.
    Half const half = Half(__shfl_sync(0xffffffffu, thread / kHalf, 0));
    bool const has_p = half == Half::p;
    int const own = thread % kHalf;
    // S = A B^T with A, B = K, Q or dP with A, B = V, dO; X = P or dS; and dV or dK += X Bt^T.
    Element* const scored_keys = has_p ? shared.k : shared.v;
    Element* const scored_queries = has_p ? shared.q : shared.dout;
    Element* const summed_queries = has_p ? shared.dout : shared.q;
    Element* const own_scores = has_p ? shared.p : shared.ds;
    float const* const lse_or_delta = has_p ? shared.lse : shared.neg_delta;
    Tensor sA = make_tensor(make_smem_ptr(scored_keys), typename Traits::LayoutKV{})(_, _, 0);  // (N, D)
    Tensor sB = make_tensor(make_smem_ptr(scored_queries), typename Traits::LayoutQ{});       // (M, D, STAGE)
    Tensor sBt = make_tensor(make_smem_ptr(summed_queries), typename Traits::LayoutQt{});     // (D, M, STAGE)
    Tensor sX = make_tensor(make_smem_ptr(own_scores), typename Traits::LayoutS{})(_, _, 0);  // (N, M)
    auto* const p_exchange = reinterpret_cast<float4*>(shared.p_exchange) + own;

    // The half that has dS issues all loads of a step. So the halves need the same unit at different times
    // (loads shared by both: 4 to 5% less).
    KvTileLoader<Traits> const loader{params, tile, shared, own};

    typename Traits::MmaScores const mma_scores;
    typename Traits::MmaDkv const mma;
    typename Traits::MmaDq const mma_dq;
    auto const copy_a = make_tiled_copy_A(typename Traits::TensorCore::FragmentAtom{}, mma_scores);
    auto const copy_b = make_tiled_copy_B(typename Traits::TensorCore::FragmentAtom{}, mma_scores);
    auto const copy_x = make_tiled_copy_A(typename Traits::TensorCore::FragmentAtom{}, mma);
    auto const copy_bt = make_tiled_copy_B(typename Traits::TensorCore::FragmentAtomTransposed{}, mma);
    Tensor cS = mma_scores.get_slice(own).partition_C(make_identity_tensor(TileS{}));

    int const heads = params.shape.heads_q / params.shape.heads_kv, end_head = (tile.head_kv + 1) * heads;
    int head = tile.head_kv * heads, block = visited.begin, stage = 0;
    loader.load_keys(has_p ? params.k : params.v, has_p ? params.shape.head_dim : params.shape.head_dim_v,
                     scored_keys);
    if (!has_p) loader.load_queries(head, block, stage);
    cp_async_wait<0>();
    __syncthreads();

    // The last part of a step's dQ is added to the accumulator beside the next step's S and dP, one addition
    // at a time, as all of them at once queue up (head dim 256 6%, 192 nothing). Beside the first S and dP
    // the additions are of 0.
    Tensor acc_dq = partition_fragment_C(mma_dq, typename Traits::TileDq{});  // (MMA, MMA_M, MMA_D)
    clear(acc_dq);
    constexpr int kDqElements = decltype(size(acc_dq))::value;
    auto dq_accum_of_step = [&]() -> float* {
      if constexpr (dq_sums == DqSums::none) return nullptr;
      return params.workspace.dq.accum + tile.block_index(head, block) * (kBlockM * kHeadDim) + thread;
    };
    float* dq_accum = dq_accum_of_step();
    auto add = [&](int i) {
      if constexpr (dq_sums == DqSums::all) atomicAdd(dq_accum + i * kThreads, acc_dq(i));
    };

    for (; head < end_head; stage ^= 1) {
      bool const is_last = block + 1 == visited.end;
      int const next_head = head + is_last, next_block = is_last ? visited.begin : block + 1;
      // (1) S = K Q^T, (2) dP = V dO^T, less delta
      Tensor scores = partition_fragment_C(mma_scores, TileS{});  // S or dP, (MMA, MMA_N, MMA_M)
      auto const of_columns = of_query<QueryAxis::columns>(lse_or_delta + stage * kBlockM, cS);
      if (has_p) {
        clear(scores);
      } else {
        fill_with_delta<QueryAxis::columns>(scores, of_columns);
      }
      multiply_shared(own, mma_scores, copy_a, sA, copy_b, sB(_, _, stage), scores,
                      [&](int i, int pieces) { issue_share(i, pieces, kDqElements, add); });
      if (has_p) {
        if (!full_blocks.contains(block)) mask_scores(tile, block, cS, scores);
        // (3) P = exp2(S c - LSE)
        compute_p<QueryAxis::columns>(scores, params.softmax_scale * float(M_LOG2E), of_columns);
        put_p(p_exchange, scores);
        arrive_at(BarrierId::p, kThreads);
      } else {
        wait_at(BarrierId::p, kThreads);
        if (next_head < end_head) loader.load_queries(next_head, next_block, stage ^ 1);
        multiply_by_p(p_exchange, scores);
      }
      copy(AutoVectorizingCopyWithAssumedAlignment<32>{}, convert<Element>(scores),
           mma_scores.get_slice(own).partition_C(sX));
      if (!has_p) arrive_at(BarrierId::ds, kThreads);
      wait_at(BarrierId::half, kHalf, int(half));
      // (4) dV += P dO, (7) dK += dS Q
      multiply_shared(own, mma, copy_x, sX, copy_bt, sBt(_, _, stage), acc);
      if (has_p) {
        wait_at(BarrierId::ds, kThreads);
      } else {
        cp_async_wait<0>();
        arrive_at(BarrierId::loaded, kThreads);
      }
      // (6) dQ = dS K, by all warps
      if constexpr (dq_sums == DqSums::all) {
        dq_accum = dq_accum_of_step();
        CUTE_UNROLL
        for (int part = 0; part < Traits::kDqParts; ++part) {
          if (part > 0) {
            CUTE_UNROLL
            for (int i = 0; i < kDqElements; ++i) add(i);
            dq_accum += kDqElements * kThreads;
          }
          clear(acc_dq);
          multiply_dq(thread, shared, part, acc_dq);
        }
      }
      if (has_p) {
        wait_at(BarrierId::loaded, kThreads);
      } else {
        wait_at(BarrierId::half, kHalf, int(half));
      }
      head = next_head;
      block = next_block;
    }
    CUTE_UNROLL
    for (int i = 0; i < kDqElements; ++i) add(i);
  }

 private:
  template <class Coords, class Scores>
  CUTE_DEVICE static void mask_scores(TwoRoleKvTile const& tile, int block, Coords const& cS,
                                      Scores& scores) {
    TransposedMask const from_block{tile.sequence.mask.transposed().from_key(block * kBlockM)};
    apply_mask<OffsetKeys>(from_block, OneHead{}, tile.n_begin, 0, cS, scores);
  }

  // P passes through shared memory, in float32 and 16 bytes at a time, to the thread of the other half that
  // has the same coordinates.
  template <class Scores>
  CUTE_DEVICE static void put_p(float4* p_exchange, Scores const& p) {
    CUTE_UNROLL
    for (int i = 0; i < size(p) / 4; ++i) {
      p_exchange[i * kHalf] = {p(4 * i), p(4 * i + 1), p(4 * i + 2), p(4 * i + 3)};
    }
  }

  // (5) dS = P (dP - delta), with P from the other half.
  template <class Scores>
  CUTE_DEVICE static void multiply_by_p(float4 const* p_exchange, Scores& scores) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores) / 4; ++i) {
      float4 const p = p_exchange[i * kHalf];
      Tensor ds = make_tensor(&scores(4 * i), Shape<_4>{});
      compute_ds(ds, make_tensor(&p.x, Shape<_4>{}));
    }
  }

  // One part of columns of (6) dQ = dS K, by all warps.
  template <class Accumulator>
  CUTE_DEVICE static void multiply_dq(int thread, SharedStorage& shared, int part, Accumulator& acc_dq) {
    Tensor sdSt = make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutSt{})(_, _, 0);  // (M, N)
    Tensor sKt = columns_of_keys<Traits>(shared.k);  // (D, N, PART)
    typename Traits::MmaDq const mma;
    typename Traits::TensorCore::FragmentAtomTransposed const atom;
    multiply_shared(thread, mma, make_tiled_copy_A(atom, mma), sdSt, make_tiled_copy_B(atom, mma),
                    sKt(_, _, part), acc_dq);
  }

  // Waits until `threads` threads have arrived or wait, this one included; what they wrote to shared memory
  // before is visible then.
  CUTE_DEVICE static void wait_at(BarrierId barrier, int threads, int index = 0) {
    asm volatile("bar.sync %0, %1;" ::"r"(int(barrier) + index), "r"(threads) : "memory");
  }
  CUTE_DEVICE static void arrive_at(BarrierId barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(int(barrier)), "r"(threads) : "memory");
  }
};

}  // namespace flash_cute
