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

// The thread that fetches. It takes a block of queries when there is room for one, whoever added to it.
template <class Traits>
struct QueryRowsFetcher {
  static constexpr int kBlockM = Traits::kBlockM, kFloats = Traits::kFloats;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  KeyOrder const& order;
  BackwardMaps const& maps;
  RingPosition<1> at{};

  CUTE_DEVICE void run() {
    BackwardWorkspace const& workspace = params.workspace;
    ProblemShape const& shape = params.shape;
    bool const in_order = offsets_in_order(params);
    BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
    RowsOrder const rows{queries, shape.heads_q, shape.heads_kv, in_order, workspace.sequences_of_queries};
    // All sums are clear then: tiles, which wait for it too, may have no keys.
    if (!in_order && workspace.stats_known) wait_for(workspace.stats_known, rows.count());
    auto take = [&] { return atomicAdd(workspace.taken, 1); };
    for (int index = take(); index < rows.count(); index = take()) {
      RowsOrder::Block const block = rows(index);
      Sequence const s = sequence_for<Family::sm90>(params, block.sequence);
      int const begin = (block.place - queries.first(block.sequence)) * kBlockM;
      if (!has_rows(begin, s.used)) continue;
      int const tiles = in_order ? ceil_div(s.mask.seqlen_k, Traits::kTileN) : order.tiles;
      wait_for(workspace.finished + (in_order ? block.pair : 0), tiles * Traits::kConsumers);
      fence_async_global();
      int const entry = params.lengths.cu_seqlens_q ? 0 : block.sequence;
      auto const place_dq =
          MapPlace::of(params.lengths.given, entry, maps.entry_rows.dq, s.queries.begin, s.used);
      announce({false, block.head, place_dq.shift + begin, place_dq.plane, place_dq.bound});
      int64_t const place = int64_t(block.head) * queries.count() + block.place;
      for (int part = 0; part < Traits::kConsumers; ++part) {
        bulk_load(shared.sums + part * kFloats, workspace.dq + place * Traits::kBlockFloats + part * kFloats,
                  Traits::floats_of(part) * sizeof(float), shared.ring_sums[part].full[0]);
      }
    }
    announce({.through = true});
    for (auto& ring : shared.ring_sums) ring.full[0].arrive();
  }

 private:
  CUTE_DEVICE static void wait_for(int const* count, int wanted) {
    while (load_acquire(count) < wanted) __nanosleep(1000);
  }
  CUTE_DEVICE void announce(FinishedQueries const& queries) {
    for (auto& ring : shared.ring_sums) ring.acquire(at);
    shared.finished = queries;
    at.advance();
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
    finish();
    while (!(state & kNoMore)) {
      start();
      finish();
    }
  }

 private:
  CUTE_DEVICE auto& ring() const { return own.shared.ring_sums[own.warpgroup]; }

  CUTE_DEVICE void start() {
    ring().full[0].wait(state & kPhase);
    FinishedQueries const& queries = own.shared.finished;
    state |= queries.through ? kNoMore : kLeaving;
    if (state & kNoMore) return;
    int thread;  // read anew, so that no address is kept in registers for the loop over steps
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int const lane = thread % 32, warp = thread / 32 - 4;
    float* const sums = own.shared.sums + warp / 4 * Traits::kFloats + warp % 4 * Traits::kWarpPart;
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
