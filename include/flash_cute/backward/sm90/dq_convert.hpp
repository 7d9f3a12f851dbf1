// Conversion of complete dQ accumulators to rows of dQ within the main kernel: a thread of the producer
// warpgroup fetches them to shared memory, and the consumers convert them at the ends of their tiles, where
// they would wait otherwise.
#pragma once

#include "flash_cute/backward/sm90/warpgroup.hpp"
#include "flash_cute/core/sm90/bulk_copy.hpp"

namespace flash_cute {

// The thread that fetches. The accumulators of a (sequence, KV head) pair are complete when every warpgroup
// has made all its additions for every tile of the pair. M blocks are taken dynamically by all thread blocks,
// in the order of DqConvertOrder; a thread block takes one when its shared memory for it is free.
template <class Traits>
struct DqConvertLoader {
  static constexpr int kBlockM = Traits::kBlockM, kFloats = Traits::kDqWarpgroupFloats;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  BackwardMaps const& maps;
  WindowMask const& mask;

  CUTE_DEVICE void run() {
    BackwardWorkspace const& workspace = params.workspace;
    ProblemShape const& shape = params.shape;
    BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
    DqConvertOrder const order{params, mask, queries};
    int complete_pair = -1;
    // Waits until an M block's accumulator is complete and calls fetch(the coordinates of its rows, it).
    auto visit = [&](int index, auto&& fetch) {
      typename DqConvertOrder::Block const block = order(index);
      if (!block.exists) return;
      QuerySequence const& s = block.sequence;
      if (block.pair != complete_pair) {
        int const tiles = kv_blocks<Family::sm90>(params, mask, s.index, Traits::kTileN);
        wait_for(workspace.dq.tiles_finished + block.pair, tiles * Traits::kConsumers);
        fence_async_global();
        complete_pair = block.pair;
      }
      auto const coord_dq =
          TmaCoord::of(params.lengths.given, entry_of(params, s), maps.entry_rows.dq, s.begin, s.used);
      int64_t const block_index = int64_t(block.head) * queries.count() + block.block_of_head;
      fetch({false, block.head, coord_dq.shift + block.begin, coord_dq.plane, coord_dq.bound},
            workspace.dq.accum + block_index * Traits::kDqBlockFloats);
    };
    PipelineState<1> at{};
    auto load = [&](DqConvertBlock const& block, float const* dq_accum) {
      for (auto& ring : shared.ring_dq_accum) ring.acquire(at);
      shared.convert_block = block;
      for (int part = 0; part < Traits::kConsumers; ++part) {
        auto& arrived = shared.ring_dq_accum[part].full[0];
        auto load_floats = [&](int to, int from, int floats) {
          bulk_load(shared.dq_accum + to, dq_accum + from, floats * sizeof(float), arrived);
        };
        int const begin = part * kFloats;
        if (!block.is_end && Traits::kLastWarpLoadsLater && part == Traits::kConsumers - 1) {
          constexpr int kFirstWarps = kFloats - Traits::kDqWarpFloats;
          load_floats(begin, begin, kFirstWarps);
          auto next = at;
          next.advance();
          shared.ring_dq_accum[0].acquire(next);  // until the first warp's rows have been stored
          load_floats(0, begin + kFirstWarps, Traits::kDqWarpFloats);
        } else if (!block.is_end) {
          load_floats(begin, begin, Traits::floats_of(part));
        }
        arrived.arrive();
      }
      at.advance();
    };
    int index;
    while ((index = atomicAdd(workspace.dq.blocks_taken, 1)) < order.count()) visit(index, load);
    load({.is_end = true}, nullptr);
  }

 private:
  CUTE_DEVICE static void wait_for(int const* count, int wanted) {
    while (load_acquire(count) < wanted) __nanosleep(1000);
  }
};

// The consumer's side, which each warp does by itself: it reads its part of an accumulator from shared
// memory, and stores its rows and columns of dQ by TMA through the same memory.
template <class Traits>
struct DqConverter {
  static constexpr int kColumns = Traits::kDqMmaColumns;
  // Flags in one register, as three registers spill: the phase of the next block to arrive, whether a store
  // of rows is in flight, and whether the last block has been converted.
  enum { kPhase = 1, kStoring = 2, kEnd = 4 };
  BackwardConsumerWarpgroup<Traits> const& own;
  int state = Traits::kConvertsDq && own.params.workspace.dq.tiles_finished ? 0 : kEnd;

  // Converts a block if one has arrived.
  CUTE_DEVICE void start_ready() {
    if (!(state & kEnd) && __any_sync(0xffffffffu, ring().full[0].test_wait(state & kPhase))) start();
  }
  // Waits for the store that is in flight, and with it for all other TMA stores of this thread, and releases
  // the memory.
  CUTE_DEVICE void finish() {
    if (!(state & kStoring)) return;
    if (read_lane_index() == 0) {
      cute::tma_store_wait<0>();
      ring().empty[0].arrive();
    }
    state ^= kStoring | kPhase;
  }
  // Converts all blocks that are left.
  CUTE_DEVICE void finish_all() {
    finish();
    while (!(state & kEnd)) {
      start();
      finish();
    }
  }

 private:
  CUTE_DEVICE auto& ring() const { return own.shared.ring_dq_accum[own.warpgroup]; }

  CUTE_DEVICE void start() {
    ring().full[0].wait(state & kPhase);
    DqConvertBlock const& queries = own.shared.convert_block;
    state |= queries.is_end ? kEnd : kStoring;
    if (!(state & kEnd)) convert(queries);
  }

  CUTE_DEVICE void convert(DqConvertBlock const& queries) {
    // The index is read here, so that no address is kept in registers through the main loop.
    int const thread = read_thread_index();
    int const lane = thread % 32, warp = thread / 32 - 4;
    constexpr int kWarps = 4 * Traits::kConsumers;
    // Arithmetic, as with a condition ptxas spills hundreds of bytes.
    int const back =
        Traits::kLastWarpLoadsLater ? (warp + 1) / kWarps * (kWarps - 1) * Traits::kDqHalfFloats : 0;
    float* const dq_accum =
        own.shared.dq_accum + warp / 4 * Traits::kDqWarpgroupFloats + warp % 4 * Traits::kDqHalfFloats - back;
    Tensor dq = partition_fragment_C(typename Traits::MmaDq{}, typename Traits::TileDq{});
    static_assert(32 * decltype(size(dq))::value == Traits::kDqWarpFloats);
    CUTE_UNROLL
    for (int i = 0; i < size(dq) / 4; ++i) {
      float4 const four = reinterpret_cast<float4 const*>(dq_accum)[Traits::float4_offset(i) + lane];
      dq(4 * i) = four.x;
      dq(4 * i + 1) = four.y;
      dq(4 * i + 2) = four.z;
      dq(4 * i + 3) = four.w;
    }
    __syncwarp();
    auto* const rows = reinterpret_cast<typename Traits::Element*>(dq_accum);
    own.template stage<typename Traits::LayoutWarpDq>(rows, lane, own.params.softmax_scale, dq, 0);
    if (lane == 0) {
      constexpr bool kByRows = Traits::kDqRowBlocks > 1;
      store_panels<kColumns, Traits::kPanel, Traits::kWarpRows>(
          own.maps.dq, rows, kByRows ? 0 : warp / 4 * kColumns, queries.head,
          queries.row + (kByRows ? warp : warp % 4) * Traits::kWarpRows, queries.plane, queries.bound);
    }
  }
};

}  // namespace flash_cute
