// Blocks of queries of heads whose sums of dQ are complete become rows of dQ, by a warp beside those that load
// and add.
#pragma once

#include "flash_cute/backward/key_order.hpp"
#include "flash_cute/backward/traits_sm90.hpp"
#include "flash_cute/core/bulk_add.hpp"
#include "flash_cute/core/layout.hpp"

namespace flash_cute {

// By a whole warp, one lane of which copies. It takes blocks from the queue, whoever added to them, until all
// have been taken. Sums come by bulk copies, and zeros go where a head will have the slot next.
template <class Traits>
struct QueryFinisher {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM, kFloats = Traits::kFinishFloats;  // that come at a time
  static constexpr int kParts = kBlockM * Traits::kSumColumns / kFloats;
  static_assert(kParts % 2 == 0);
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  int lane;
  RingPosition<2> at{};

  CUTE_DEVICE void run() {
    for (int i = lane; i < Traits::kZeros; i += 32) shared.zeros[i] = 0.f;
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    FinishedQueries& block = shared.finished;
    while (true) {
      if (lane == 0 && take(block)) {
        fetch(block, 0);
        fetch(block, 1);
      }
      __syncwarp();
      if (block.rows == 0) return;
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        shared.sums_arrived[at.slot].wait(at.phase);
        if (lane == 0 && block.used_again) clear(block.sums + part * kFloats);
        convert(block, part);
        __syncwarp();
        if (lane == 0 && part + 2 < kParts) fetch(block, part + 2);
        at.advance();
      }
      if (lane == 0 && block.used_again) leave(block);
      __syncwarp();
    }
  }

 private:
  // The next block of queries of a complete head; behind the last one none. All sequences are alike.
  CUTE_DEVICE bool take(FinishedQueries& block) const {
    SumSlots const& slots = params.workspace.slots;
    ProblemShape const& shape = params.shape;
    Sequence const s = sequence_for<Family::sm90>(params, 0);
    int const blocks = ceil_div(s.used, kBlockM), heads = shape.heads_q / shape.heads_kv;
    block.rows = 0;
    if (blocks == 0) return false;
    int const ticket = atomicAdd(slots.taken, 1), index = ticket / (heads * blocks);
    if (index >= shape.heads_kv * shape.batch) return false;
    int entry;
    while ((entry = load_acquire(slots.queue + index)) < 0) __nanosleep(200);
    fence_async_global();

    int const b = entry / shape.heads_kv, head_kv = entry - b * shape.heads_kv;
    int const of_entry = ticket - index * heads * blocks, of_group = of_entry / blocks;
    int const head = head_kv * heads + of_group, m_block = of_entry - of_group * blocks;
    SumPlaces const places(params, {s, b, head_kv, 0, b * blocks, shape.batch * blocks}, kBlockM);
    int64_t const place = places.of(head, m_block);
    block.sums = params.workspace.dq + place * (kParts * kFloats);
    block.additions = params.workspace.in_turns ? params.workspace.additions + place : nullptr;
    block.left = slots.finished + places.slot;
    block.used_again = places.used_again;
    block.rows = s.used - m_block * kBlockM;
    block.target = static_cast<Element*>(params.dq.data) + b * params.dq.batch_stride +
                   head * params.dq.head_stride +
                   int64_t(s.queries.begin + m_block * kBlockM) * params.dq.row_stride;
    return true;
  }

  CUTE_DEVICE void fetch(FinishedQueries const& block, int part) {
    constexpr int kBytes = kFloats * sizeof(float);
    auto& arrived = shared.sums_arrived[part % 2];
    arrived.arrive_and_expect_tx(kBytes);
    cute::SM90_BULK_COPY_G2S::copy(block.sums + part * kFloats, reinterpret_cast<uint64_t*>(&arrived),
                                   shared.sums + part % 2 * kFloats, kBytes);
  }

  CUTE_DEVICE void clear(float* sums) const {
    CUTE_UNROLL
    for (int i = 0; i < kFloats; i += Traits::kZeros) {
      cute::SM90_BULK_COPY_S2G::copy(shared.zeros, sums + i, Traits::kZeros * int(sizeof(float)));
    }
  }

  // The slot may have its next use once the zeros are there.
  CUTE_DEVICE static void leave(FinishedQueries const& block) {
    if (block.additions) *block.additions = 0;
    cute::tma_store_arrive();
    wait_bulk_complete();
    fence_async_global();
    add_release(block.left);
  }

  // Sums lie as registers of those that computed them. Neighbouring lanes exchange columns, so that each
  // writes four of a row.
  CUTE_DEVICE void convert(FinishedQueries const& block, int part) const {
    constexpr int kFours = kFloats / 128, kFoursOfWarp = Traits::kWarpFloats / 128;  // of a lane
    static_assert(kFours % 2 == 0 && kFoursOfWarp % 2 == 0);
    float const scale = params.softmax_scale;
    bool const odd = lane & 1;
    auto const* const fours = reinterpret_cast<float4 const*>(shared.sums + part % 2 * kFloats) + lane;
#pragma unroll 1
    for (int i = 0; i < kFours; i += 2) {
      int const of_block = part * kFours + i, of_warp = of_block % kFoursOfWarp;
      int const warp = of_block / kFoursOfWarp, round = warp / 4 % Traits::kRoundsQ;
      int const warpgroup = warp / 4 / Traits::kRoundsQ;
      int const row = (Traits::kRowsQ > 1 ? 64 * warpgroup : 0) + warp % 4 * 16 + lane / 4;
      int const column = Traits::kSumColumns / Traits::kRoundsQ * round +
                         (Traits::kRowsQ > 1 ? 0 : Traits::kColumnsQ * warpgroup) + (of_warp + int(odd)) * 8 +
                         (lane & 2) * 2;
      auto word = [&](float low, float high) { return pack<Element>(scale * low, scale * high); };
      float4 const a = fours[i * 32], b = fours[(i + 1) * 32];
      auto store = [&](int at_row, uint32_t of_a, uint32_t of_b) {
        uint32_t const received = __shfl_xor_sync(0xffffffffu, odd ? of_a : of_b, 1);
        if (at_row < block.rows && column < params.shape.head_dim) {
          auto* const target = static_cast<Element*>(block.target) + at_row * params.dq.row_stride + column;
          *reinterpret_cast<uint2*>(target) = odd ? make_uint2(received, of_b) : make_uint2(of_a, received);
        }
      };
      store(row, word(a.x, a.y), word(b.x, b.y));
      store(row + 8, word(a.z, a.w), word(b.z, b.w));
    }
  }
};

}  // namespace flash_cute
