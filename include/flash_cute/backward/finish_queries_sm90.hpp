// Sums of dQ become rows of dQ: by a kernel after the main one, or by warpgroups of the main one.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/key_order.hpp"
#include "flash_cute/backward/traits_sm90.hpp"
#include "flash_cute/core/bulk_add.hpp"
#include "flash_cute/core/warpgroup.hpp"

namespace flash_cute {

// Those of kParts of the warpgroups that compute dQ, one of whose threads calls this; thread: among all of
// them, in the first part.
template <class Traits, int kParts>
CUTE_DEVICE void finish_queries(BackwardParams const& params, Sequence const& s, int batch, int head,
                                int m_block, float* sums, bool clears, int thread) {
  using TileQ = typename Traits::TileQ;
  constexpr int kFloats = Traits::kBlockM * Traits::kSumColumns / Traits::kConsumers;  // of a part
  constexpr int kFours = Traits::kWarpFloats / 4 / 32;                                 // of a lane, in a round
  constexpr int kRounds = Traits::kRoundsQ;
  int const part = thread / 128, warp = thread / 32 % 4, lane = thread % 32, m_begin = m_block * Traits::kBlockM;
  auto* const fours = reinterpret_cast<float4*>(sums + part * kFloats) + warp * kFours * 32 + lane;
  auto place = [&](int part, int round, int i) {
    return fours + part * (kFloats / 4) + (round * 4 * kFours + i) * 32;
  };
  float4 found[kParts][kRounds][kFours];
  auto for_each = [&](auto&& visit) {
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part)
      CUTE_UNROLL
    for (int round = 0; round < kRounds; ++round)
      CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) visit(found[part][round][i], place(part, round, i));
  };
  for_each([](float4& value, float4* at) { value = __ldcg(at); });  // others have written since
  if (clears) for_each([](float4&, float4* at) { *at = {}; });

  typename Traits::MmaQueries const mma;
  auto* const target = local_tensor<typename Traits::Element>(params.dq, params.lengths.cu_seqlens_q ? 0 : batch,
                                                              head, int64_t(s.queries.begin) + m_begin, TileQ{})
                           .data()
                           .get();
  CUTE_UNROLL
  for (int part = 0; part < kParts; ++part) {
    Tensor dq = partition_fragment_C(mma, TileQ{});  // (MMA, MMA_M, MMA_D)
    static_assert(decltype(size(dq))::value == kRounds * kFours * 4);
    Tensor coords = mma.get_slice(thread + 128 * part).partition_C(make_identity_tensor(TileQ{}));
    CUTE_UNROLL
    for (int i = 0; i < size(dq) / 4; ++i) {
      float4 const four = found[part][i / kFours][i % kFours];
      dq(4 * i) = params.softmax_scale * four.x;
      dq(4 * i + 1) = params.softmax_scale * four.y;
      dq(4 * i + 2) = params.softmax_scale * four.z;
      dq(4 * i + 3) = params.softmax_scale * four.w;
    }
    store_rows(target, params.dq.row_stride, s.used - m_begin, params.shape.head_dim, dq, coords);
  }
}

// With as many threads as compute dQ.
template <class Traits>
__global__ void __launch_bounds__(Traits::kConsumers * 128)
    backward_postprocess_sm90(__grid_constant__ BackwardParams const params) {
  cudaGridDependencySynchronize();  // launched early
  ProblemShape const& shape = params.shape;
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, Traits::kBlockM};
  auto const [head, of_head] = queries.of_block(blockIdx.x);
  int const b = queries.sequence(of_head), m_block = of_head - queries.first(b);
  Sequence const s = sequence_for<Family::sm90>(params, b);
  if (!has_rows(m_block * Traits::kBlockM, s.used)) return;
  float* const sums = params.workspace.dq + int64_t(blockIdx.x) * (Traits::kBlockM * Traits::kSumColumns);
  finish_queries<Traits, 1>(params, s, b, head, m_block, sums, false, threadIdx.x);
}

// By a warpgroup, which takes a block of queries at a time of heads that are complete, whoever added to them,
// until all have been taken. All sequences are alike.
template <class Traits>
struct QueryFinisher {
  static constexpr int kBlockM = Traits::kBlockM;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  int warpgroup, thread;

  CUTE_DEVICE void run() const {
    SumSlots const& slots = params.workspace.slots;
    ProblemShape const& shape = params.shape;
    Sequence const s = sequence_for<Family::sm90>(params, 0);
    int const heads = shape.heads_q / shape.heads_kv, blocks = ceil_div(s.used, kBlockM);
    int const of_entry = heads * blocks, all = shape.batch * shape.heads_kv * of_entry;
    int next = thread == 0 ? atomicAdd(slots.taken, 1) : 0;
    for (int turn = 0;; turn ^= 1) {
      int2& told = shared.finished[warpgroup][turn];  // which block, and of which head
      if (thread == 0) {
        int entry = -1;
        if (next < all) {
          while ((entry = load_acquire(slots.queue + next / of_entry)) < 0) __nanosleep(100);
        }
        told = {next % larger(1, of_entry), entry};
        next = atomicAdd(slots.taken, 1);  // arrives meanwhile
        __threadfence_block();
      }
      sync_warpgroup(warpgroup);
      fence_async_global();
      auto const [block, entry] = told;
      if (entry < 0) return;
      int const b = entry / shape.heads_kv, head_kv = entry - b * shape.heads_kv, of_group = block / blocks;
      int const head = head_kv * heads + of_group, m_block = block - of_group * blocks;
      SumPlaces const places(params, {s, b, head_kv, 0, 0, 0}, kBlockM);
      int64_t const place = places.of(head, m_block);
      float* const sums = params.workspace.dq + place * (kBlockM * Traits::kSumColumns);
      finish_queries<Traits, Traits::kConsumers>(params, s, b, head, m_block, sums, places.used_again, thread);
      if (!places.used_again) continue;
      if (thread == 0 && params.workspace.turns) params.workspace.turns[place] = 0;
      fence_async_global();
      sync_warpgroup(warpgroup);
      if (thread == 0) add_release(slots.finished + places.slot);
    }
  }
};

}  // namespace flash_cute
