// Rows of dQ, made of sums as soon as they are complete: a thread fetches them, and the warpgroups that
// compute convert them at the ends of their tiles, where they would wait otherwise.
#pragma once

#include "flash_cute/backward/warpgroup_sm90.hpp"
#include "flash_cute/core/bulk_add.hpp"

namespace flash_cute {

// A tile is finished when each warpgroup's additions have arrived, and the sums of a pair (see RowsOrder) are
// complete when all its tiles are. If offsets are out of order a tile may be nobody's, and then all tiles of
// the launch count as those of one pair, also those without keys.
CUTE_DEVICE void count_as_finished(BackwardParams const& params, int warpgroups) {
  if (params.workspace.finished && !offsets_in_order(params)) {
    add_release(params.workspace.finished, warpgroups);
  }
}

// The thread that fetches. It takes a block of queries when there is room for one, whoever added to it; once
// this thread block has computed all of its tiles, some at a time.
template <class Traits>
struct QueryRowsFetcher {
  static constexpr int kBlockM = Traits::kBlockM, kFloats = Traits::kFloats;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  KeyOrder const& order;
  BackwardMaps const& maps;

  CUTE_DEVICE void run() {
    BackwardWorkspace const& workspace = params.workspace;
    ProblemShape const& shape = params.shape;
    bool const in_order = offsets_in_order(params);
    BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
    RowsOrder const rows{params, queries, in_order};
    // All sums are clear then: tiles, which wait for it too, may have no keys.
    if (!in_order && workspace.stats_known) wait_for(workspace.stats_known, rows.count());
    int waited_for = -1;  // this pair
    // Calls fetch(where its rows are, its sums) for a block, once it is complete.
    auto visit = [&](int index, auto&& fetch) {
      RowsOrder::Block const block = rows(index);
      if (!block.exists) return;
      SequenceOfQueries const& s = block.sequence;
      int const pair = in_order ? block.pair : 0;
      if (pair != waited_for) {
        int const tiles = in_order ? key_blocks<Family::sm90>(params, s.index, Traits::kTileN) : order.tiles;
        wait_for(workspace.finished + pair, tiles * Traits::kConsumers);
        fence_async_global();
        waited_for = pair;
      }
      auto const place_dq =
          MapPlace::of(params.lengths.given, entry_of(params, s), maps.entry_rows.dq, s.begin, s.used);
      int64_t const place = int64_t(block.head) * queries.count() + block.place;
      fetch({false, block.head, place_dq.shift + block.begin, place_dq.plane, place_dq.bound},
            workspace.dq + place * Traits::kBlockFloats);
    };
    // last_comes_later: the last warp's come to where those of the first were, once these have left.
    auto load = [&](auto& ring, FinishedQueries& said, auto const& at, float* memory,
                    FinishedQueries const& block, float const* sums, bool last_comes_later = false) {
      for (auto& of_warpgroup : ring) of_warpgroup.acquire(at);
      said = block;
      for (int part = 0; part < Traits::kConsumers; ++part) {
        auto& arrived = ring[part].full[at.slot];
        auto load_floats = [&](int to, int from, int floats) {
          bulk_load(memory + to, sums + from, floats * sizeof(float), arrived);
        };
        int const begin = part * kFloats;
        bool const is_split = last_comes_later && part == Traits::kConsumers - 1;
        if (!block.through && is_split) {
          constexpr int kSooner = kFloats - Traits::kWarpFloats;
          load_floats(begin, begin, kSooner);
          auto next = at;
          next.advance();
          ring[0].acquire(next);
          load_floats(0, begin + kSooner, Traits::kWarpFloats);
        } else if (!block.through) {
          load_floats(begin, begin, Traits::floats_of(part));
        }
        arrived.arrive();
      }
    };

    RingPosition<1> at{};
    int index;
    while (!shared.tiles_done.test_wait(0)) {
      index = atomicAdd(workspace.taken, 1);
      if (index >= rows.count()) break;
      visit(index, [&](FinishedQueries const& block, float const* sums) {
        load(shared.ring_sums, shared.finished, at, shared.sums, block, sums, Traits::kLastComesLater);
        at.advance();
      });
    }
    load(shared.ring_sums, shared.finished, at, shared.sums, {.through = true}, nullptr);
    shared.tiles_done.wait(0);
    RingPosition<Traits::kRestStages> at_rest{};
    auto load_rest = [&](FinishedQueries const& block, float const* sums) {
      load(shared.ring_rest, shared.rest[at_rest.slot], at_rest, shared.rest_memory(at_rest.slot), block,
           sums);
      at_rest.advance();
    };
    // Fewer when few are left, so that all thread blocks end at about the same time.
    int at_once = 1;
    while ((index = atomicAdd(workspace.taken, at_once)) < rows.count()) {
      int const end = smaller(index + at_once, rows.count());
      for (int i = index; i < end; ++i) visit(i, load_rest);
      at_once = smaller(Traits::kRestStages, 1 + (rows.count() - end) / (4 * int(gridDim.x)));
    }
    load_rest({.through = true}, nullptr);
  }

 private:
  CUTE_DEVICE static void wait_for(int const* count, int wanted) {
    while (load_acquire(count) < wanted) __nanosleep(1000);
  }
};

// The computing side, by each warp alone: its rows and columns of a warpgroup's part leave through the memory
// in which their sums came.
template <class Traits>
struct QueryRowsConverter {
  static constexpr int kColumns = Traits::kColumnsQ;
  // The phase of what comes next, whether something leaves, and whether nothing more will come. One register:
  // three spill.
  enum { kPhase = 1, kLeaving = 2, kNoMore = 4 };
  BackwardWarpgroup<Traits> const& own;
  int state = own.params.workspace.finished ? 0 : kNoMore;

  // Begins with what has come, if something has.
  CUTE_DEVICE void start_ready() {
    if (!(state & kNoMore) && __any_sync(0xffffffffu, ring().full[0].test_wait(state & kPhase))) start();
  }
  // Lets what has been begun leave shared memory, which other stores by TMA are waited for with.
  CUTE_DEVICE void finish() {
    if (!(state & kLeaving)) return;
    if (read_lane_index() == 0) {
      cute::tma_store_wait<0>();
      ring().empty[0].arrive();
    }
    state ^= kLeaving | kPhase;
  }
  CUTE_DEVICE void finish_all() {
    auto& shared = own.shared;
    if (!own.params.workspace.finished) return;
    finish();
    int const lane = read_lane_index();
    __syncwarp();
    if (lane == 0) shared.tiles_done.arrive();
    while (!(state & kNoMore)) {
      start();
      finish();
    }
    auto& rest = shared.ring_rest[own.warpgroup];
    RingPosition<Traits::kRestStages> at{}, before{};
    while (true) {
      rest.wait(at);
      FinishedQueries const& queries = shared.rest[at.slot];
      if (queries.through) break;
      convert<false>(queries, shared.rest_memory(at.slot));
      if (lane == 0) {
        cute::tma_store_wait<1>();
        if (before.slot != at.slot) rest.release(before);
      }
      before = at;
      at.advance();
    }
    if (lane == 0) cute::tma_store_wait<0>();
  }

 private:
  CUTE_DEVICE auto& ring() const { return own.shared.ring_sums[own.warpgroup]; }

  CUTE_DEVICE void start() {
    ring().full[0].wait(state & kPhase);
    FinishedQueries const& queries = own.shared.finished;
    state |= queries.through ? kNoMore : kLeaving;
    if (!(state & kNoMore)) convert<Traits::kLastComesLater>(queries, own.shared.sums);
  }

  // memory: of all sums of the block. kLastAtFirst: those of the last warp are where those of the first were.
  template <bool kLastAtFirst>
  CUTE_DEVICE void convert(FinishedQueries const& queries, float* memory) {
    int thread;  // read anew, so that no address is kept in registers for the loop over steps
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int const lane = thread % 32, warp = thread / 32 - 4;
    constexpr int kWarps = 4 * Traits::kConsumers;
    // Not by a condition, beside which ptxas spills hundreds of bytes.
    int const back = kLastAtFirst ? (warp + 1) / kWarps * (kWarps - 1) * Traits::kWarpPart : 0;
    float* const sums = memory + warp / 4 * Traits::kFloats + warp % 4 * Traits::kWarpPart - back;
    Tensor dq = partition_fragment_C(typename Traits::MmaQueries{}, typename Traits::TileQ{});
    static_assert(32 * decltype(size(dq))::value == Traits::kWarpFloats);
    CUTE_UNROLL
    for (int i = 0; i < size(dq) / 4; ++i) {
      float4 const four = reinterpret_cast<float4 const*>(sums)[Traits::place_of_four(i) + lane];
      dq(4 * i) = four.x;
      dq(4 * i + 1) = four.y;
      dq(4 * i + 2) = four.z;
      dq(4 * i + 3) = four.w;
    }
    __syncwarp();
    auto* const rows = reinterpret_cast<typename Traits::Element*>(sums);
    own.template stage<typename Traits::LayoutWarpQ>(rows, lane, own.params.softmax_scale, dq, 0);
    if (lane == 0) {
      constexpr bool kByRows = Traits::kRowsQ > 1;
      store_panels<kColumns, Traits::kPanel, Traits::kWarpRows>(
          own.maps.dq, rows, kByRows ? 0 : warp / 4 * kColumns, queries.head,
          queries.row + (kByRows ? warp : warp % 4) * Traits::kWarpRows, queries.plane, queries.bound);
    }
  }
};

}  // namespace flash_cute
