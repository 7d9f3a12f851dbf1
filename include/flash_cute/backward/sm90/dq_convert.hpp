// Rows of dQ, made of sums as soon as they are complete: a thread fetches them, and the warpgroups that
// compute convert them at the ends of their tiles, where they would wait otherwise.
#pragma once

#include "flash_cute/backward/sm90/warpgroup.hpp"
#include "flash_cute/core/sm90/bulk_copy.hpp"

namespace flash_cute {

// The thread that fetches. A tile is finished when each warpgroup's additions have arrived, and the sums of a
// pair (see DqConvertOrder) are complete when all its tiles are. It takes a block of queries when there is
// room for one, whoever added to it.
template <class Traits, class Mask>
struct DqConvertLoader {
  static constexpr int kBlockM = Traits::kBlockM, kFloats = Traits::kFloats;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  BackwardMaps const& maps;
  Mask const& mask;

  CUTE_DEVICE void run() {
    BackwardWorkspace const& workspace = params.workspace;
    ProblemShape const& shape = params.shape;
    BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
    DqConvertOrder<Mask> const rows{params, mask, queries};
    int waited_for = -1;  // this pair
    // Calls fetch(where its rows are, its sums) for a block, once it is complete.
    auto visit = [&](int index, auto&& fetch) {
      typename DqConvertOrder<Mask>::Block const block = rows(index);
      if (!block.exists) return;
      QuerySequence const& s = block.sequence;
      if (block.pair != waited_for) {
        int const tiles = kv_blocks<Family::sm90>(params, mask, s.index, Traits::kTileN);
        wait_for(workspace.dq.tiles_finished + block.pair, tiles * Traits::kConsumers);
        fence_async_global();
        waited_for = block.pair;
      }
      auto const coord_dq =
          TmaCoord::of(params.lengths.given, entry_of(params, s), maps.entry_rows.dq, s.begin, s.used);
      int64_t const place = int64_t(block.head) * queries.count() + block.place;
      fetch({false, block.head, coord_dq.shift + block.begin, coord_dq.plane, coord_dq.bound},
            workspace.dq.accum + place * Traits::kBlockFloats);
    };
    PipelineState<1> at{};
    auto load = [&](DqConvertBlock const& block, float const* sums) {
      for (auto& ring : shared.ring_sums) ring.acquire(at);
      shared.finished = block;
      for (int part = 0; part < Traits::kConsumers; ++part) {
        auto& arrived = shared.ring_sums[part].full[0];
        auto load_floats = [&](int to, int from, int floats) {
          bulk_load(shared.sums + to, sums + from, floats * sizeof(float), arrived);
        };
        int const begin = part * kFloats;
        if (!block.through && Traits::kLastComesLater && part == Traits::kConsumers - 1) {
          constexpr int kSooner = kFloats - Traits::kWarpFloats;
          load_floats(begin, begin, kSooner);
          auto next = at;
          next.advance();
          shared.ring_sums[0].acquire(next);  // the first warp's have left
          load_floats(0, begin + kSooner, Traits::kWarpFloats);
        } else if (!block.through) {
          load_floats(begin, begin, Traits::floats_of(part));
        }
        arrived.arrive();
      }
      at.advance();
    };
    int index;
    while ((index = atomicAdd(workspace.dq.blocks_taken, 1)) < rows.count()) visit(index, load);
    load({.through = true}, nullptr);
  }

 private:
  CUTE_DEVICE static void wait_for(int const* count, int wanted) {
    while (load_acquire(count) < wanted) __nanosleep(1000);
  }
};

// The computing side, by each warp alone: its rows and columns of a warpgroup's part leave through the memory
// in which their sums came.
template <class Traits>
struct DqConverter {
  static constexpr int kColumns = Traits::kColumnsQ;
  // The phase of what comes next, whether something leaves, and whether nothing more will come. One register:
  // three spill.
  enum { kPhase = 1, kLeaving = 2, kNoMore = 4 };
  BackwardConsumerWarpgroup<Traits> const& own;
  int state = own.params.workspace.dq.tiles_finished ? 0 : kNoMore;

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
    DqConvertBlock const& queries = own.shared.finished;
    state |= queries.through ? kNoMore : kLeaving;
    if (!(state & kNoMore)) convert(queries);
  }

  CUTE_DEVICE void convert(DqConvertBlock const& queries) {
    int const thread = read_thread_index();  // anew: no address is kept in registers for the loop over steps
    int const lane = thread % 32, warp = thread / 32 - 4;
    constexpr int kWarps = 4 * Traits::kConsumers;
    // Not by a condition, beside which ptxas spills hundreds of bytes.
    int const back = Traits::kLastComesLater ? (warp + 1) / kWarps * (kWarps - 1) * Traits::kWarpPart : 0;
    float* const sums = own.shared.sums + warp / 4 * Traits::kFloats + warp % 4 * Traits::kWarpPart - back;
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
