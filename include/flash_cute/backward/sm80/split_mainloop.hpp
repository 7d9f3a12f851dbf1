// The Ampere family's backward maths where two halves of a thread block split the work of a block of keys:
// one has S, P and dV, the other dP, dS and dK, each by the same code on other operands. So a warp's part of
// a product is larger, and reads less of shared memory for each operation.
#pragma once

#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/backward/sm80/operands.hpp"
#include "flash_cute/backward/sm80/traits.hpp"
#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/core/named_barrier.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

enum class Half { weights, gradients };

template <class Traits, DqSums dq_sums>
struct BackwardSplitMainloopSm80 {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kThreads, kHalf = Traits::kKeyThreads;
  static_assert(Traits::kStages == 2 && dq_sums != DqSums::asked);
  using TileS = Shape<Int<kBlockN>, Int<kBlockM>>;

  // acc: dV of the first half, dK of the second, (MMA, MMA_N, MMA_D).
  template <class Gradient>
  CUTE_DEVICE static void run(BackwardParams const& params, SplitKvTile const& tile, SharedStorage& shared,
                              int thread, Gradient& acc) {
    WindowMask const& mask = tile.sequence.mask;
    BlockRange const visited = mask.visited_rows(tile.n_begin, kBlockN, kBlockM);
    BlockRange const unmasked = tile.n_begin + kBlockN <= mask.seqlen_k
                                    ? mask.unmasked_rows(tile.n_begin, kBlockN, kBlockM)
                                    : BlockRange{0, 0};
    if (visited.empty()) return;

    // Known to be the same in a warp, so that addresses that depend on it take fewer registers.
    Half const half = Half(__shfl_sync(0xffffffffu, thread / kHalf, 0));
    bool const has_weights = half == Half::weights;
    int const own = thread % kHalf;
    Element* const scored_keys = has_weights ? shared.k : shared.v;
    Element* const scored_queries = has_weights ? shared.q : shared.dout;
    Element* const summed_queries = has_weights ? shared.dout : shared.q;
    Element* const own_scores = has_weights ? shared.p : shared.ds;
    float const* const own_stats = has_weights ? shared.lse : shared.delta;
    Tensor sA = make_tensor(make_smem_ptr(scored_keys), typename Traits::LayoutKV{})(_, _, 0);  // (N, D)
    Tensor sB = make_tensor(make_smem_ptr(scored_queries), typename Traits::LayoutQ{});       // (M, D, STAGE)
    Tensor sBt = make_tensor(make_smem_ptr(summed_queries), typename Traits::LayoutQt{});     // (D, M, STAGE)
    Tensor sX = make_tensor(make_smem_ptr(own_scores), typename Traits::LayoutS{})(_, _, 0);  // (N, M)
    Tensor sdSt = make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutSt{})(_, _, 0);  // (M, N)
    Tensor sKt = columns_of_keys<Traits>(shared.k);  // (D, N, PART)
    auto* const weights = reinterpret_cast<float4*>(shared.weights) + own;

    // Of a step the second half loads everything, which keeps the two from wanting the same of the machine at
    // the same time (shared by both: 4 to 5% less).
    KvTileLoader<Traits> const loader{params, tile, shared, own};

    // Shared memory to registers.
    typename Traits::MmaScores const mma_scores;
    typename Traits::MmaKeys const mma;
    typename Traits::MmaQueries const mma_dq;
    typename Traits::FragmentAtom const atom;
    typename Traits::FragmentAtomTransposed const transposed_atom;
    auto const copy_a = make_tiled_copy_A(atom, mma_scores);
    auto const copy_b = make_tiled_copy_B(atom, mma_scores);
    auto const copy_x = make_tiled_copy_A(atom, mma);
    auto const copy_bt = make_tiled_copy_B(transposed_atom, mma);
    auto const copy_dst = make_tiled_copy_A(transposed_atom, mma_dq);
    auto const copy_kt = make_tiled_copy_B(transposed_atom, mma_dq);
    Tensor cS = mma_scores.get_slice(own).partition_C(make_identity_tensor(TileS{}));

    int const heads = params.shape.heads_q / params.shape.heads_kv, end_head = (tile.head_kv + 1) * heads;
    int head = tile.head_kv * heads, block = visited.begin, stage = 0;
    loader.load_keys(has_weights ? params.k : params.v, scored_keys);
    if (!has_weights) loader.load_queries(head, block, stage);
    cp_async_wait<0>();
    __syncthreads();

    // The last part of dQ is added beside the next step's S and dP, one addition at a time (head dim 256 6%,
    // 192 nothing: all at once they queue up); beside the first ones 0 is added.
    Tensor acc_dq = partition_fragment_C(mma_dq, typename Traits::TileDq{});  // (MMA, MMA_M, MMA_D)
    clear(acc_dq);
    constexpr int kSums = decltype(size(acc_dq))::value;
    auto sums_of_step = [&]() -> float* {
      if constexpr (dq_sums == DqSums::none) return nullptr;
      return params.workspace.dq + tile.place(head, block) * (kBlockM * kHeadDim) + thread;
    };
    float* sums = sums_of_step();
    auto add = [&](int i) {
      if constexpr (dq_sums == DqSums::all) atomicAdd(sums + i * kThreads, acc_dq(i));
    };

    for (; head < end_head; stage ^= 1) {
      bool const is_last = block + 1 == visited.end;
      int const next_head = head + is_last, next_block = is_last ? visited.begin : block + 1;
      Tensor scores = partition_fragment_C(mma_scores, TileS{});  // S or dP, (MMA, MMA_N, MMA_M)
      if (has_weights) {
        clear(scores);
      } else {
        fill_columns(scores, cS, own_stats + stage * kBlockM);
      }
      multiply_shared(own, mma_scores, copy_a, sA, copy_b, sB(_, _, stage), scores,
                      [&](int i, int pieces) { issue_share(i, pieces, kSums, add); });
      if (has_weights) {
        if (!unmasked.contains(block)) {
          TransposedMask const from_block{mask.transposed().from_key(block * kBlockM)};
          apply_mask<PlacedKeys>(from_block, PlainRows{}, tile.n_begin, 0, cS, scores);
        }
        compute_p(scores, cS, own_stats + stage * kBlockM, params.softmax_scale * float(M_LOG2E));
        CUTE_UNROLL
        for (int i = 0; i < size(scores) / 4; ++i) {
          weights[i * kHalf] = {scores(4 * i), scores(4 * i + 1), scores(4 * i + 2), scores(4 * i + 3)};
        }
        arrive_at(BarrierId::weights, kThreads);
      } else {
        wait_at(BarrierId::weights, kThreads);
        if (next_head < end_head) loader.load_queries(next_head, next_block, stage ^ 1);
        CUTE_UNROLL
        for (int i = 0; i < size(scores) / 4; ++i) {
          float4 const p = weights[i * kHalf];
          scores(4 * i) *= p.x;
          scores(4 * i + 1) *= p.y;
          scores(4 * i + 2) *= p.z;
          scores(4 * i + 3) *= p.w;
        }
      }
      copy(AutoVectorizingCopyWithAssumedAlignment<32>{}, convert<Element>(scores),
           mma_scores.get_slice(own).partition_C(sX));
      if (!has_weights) arrive_at(BarrierId::gradients, kThreads);
      wait_at(BarrierId::half, kHalf, int(half));

      multiply_shared(own, mma, copy_x, sX, copy_bt, sBt(_, _, stage), acc);
      if (has_weights) {
        wait_at(BarrierId::gradients, kThreads);
      } else {
        cp_async_wait<0>();
        arrive_at(BarrierId::loaded, kThreads);
      }
      if constexpr (dq_sums == DqSums::all) {
        sums = sums_of_step();
        CUTE_UNROLL
        for (int part = 0; part < Traits::kDqParts; ++part) {
          if (part > 0) {
            CUTE_UNROLL
            for (int i = 0; i < kSums; ++i) add(i);
            sums += kSums * kThreads;
          }
          clear(acc_dq);
          multiply_shared(thread, mma_dq, copy_dst, sdSt, copy_kt, sKt(_, _, part), acc_dq);
        }
      }
      if (has_weights) {
        wait_at(BarrierId::loaded, kThreads);
      } else {
        wait_at(BarrierId::half, kHalf, int(half));
      }
      head = next_head;
      block = next_block;
    }
    CUTE_UNROLL
    for (int i = 0; i < kSums; ++i) add(i);
  }

 private:
  // Waits until `threads` threads have come, those that only arrive among them; what they wrote to shared
  // memory before is there.
  CUTE_DEVICE static void wait_at(BarrierId barrier, int threads, int index = 0) {
    asm volatile("bar.sync %0, %1;" ::"r"(int(barrier) + index), "r"(threads) : "memory");
  }
  CUTE_DEVICE static void arrive_at(BarrierId barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(int(barrier)), "r"(threads) : "memory");
  }
};

}  // namespace flash_cute
