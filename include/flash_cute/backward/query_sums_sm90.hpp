// A warpgroup's half of a tile's part of dQ, and its way to the sums in global memory: through shared memory,
// from which a thread of its own adds it in bulk.
#pragma once

#include "flash_cute/backward/key_order.hpp"
#include "flash_cute/backward/traits_sm90.hpp"
#include "flash_cute/core/bulk_add.hpp"
#include "flash_cute/core/warpgroup.hpp"

namespace flash_cute {

CUTE_DEVICE int read_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The computing side. Sums of a block of queries lie warp by warp in the order of registers, four neighbours
// of each lane side by side, so that shared memory has no bank conflicts in either direction.
template <class Traits>
struct QuerySums {
  static constexpr int kWarpFloats = Traits::kWarpFloats;
  typename Traits::SharedStorage& shared;
  bool wanted;
  int warpgroup, thread;
  RingPosition<1> at{};

  // dS of all keys is there: puts a round of dQ = dS K in flight.
  CUTE_DEVICE auto issue(RingPosition<Traits::kStages> const& at_ds, int round = 0) const {
    Tensor sdS = make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutDS{});  // (M, N, STAGE)
    Tensor sKt = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKt{});   // (D, N)
    typename Traits::MmaQueries mma;
    auto const slice = mma.get_slice(warpgroup * 128);
    Tensor tQrdS = slice.partition_fragment_A(sdS);  // (MMA, MMA_M, MMA_N, STAGE)
    Tensor tQrK = slice.partition_fragment_B(sKt);   // (MMA, MMA_D, MMA_N)
    Tensor acc_dq = partition_fragment_C(mma, typename Traits::RoundQ{});
    static_assert(decltype(size<1>(tQrK))::value == Traits::kRoundsQ);
    Tensor tQrK_round =
        make_tensor(tQrK(_, round, _).data(),
                    make_layout(get<0>(tQrK.layout()), Layout<_1, _0>{}, get<2>(tQrK.layout())));
    shared.ring_ds.wait(at_ds);
    issue_product(GMMA::ScaleOut::Zero, mma, tQrdS(_, _, _, at_ds.slot), tQrK_round, acc_dq);
    return acc_dq;
  }

  // Hands a round of dQ over. The writer orders it before its reads by TMA: a fence here would wait for
  // stores that wait behind products.
  template <class Accumulator>
  CUTE_DEVICE void put(Accumulator const& acc_dq) {
    static_assert(32 * decltype(size(acc_dq))::value == kWarpFloats);
    if (!wanted) return;
    int const index = read_thread_index() - 128, lane = index % 32;
    auto* const staged = reinterpret_cast<float4*>(shared.dq + index / 32 * kWarpFloats) + lane;
    auto& full = shared.ring_dq[warpgroup].acquire(at);
    CUTE_UNROLL
    for (int i = 0; i < size(acc_dq) / 4; ++i) {
      staged[i * 32] = make_float4(acc_dq(4 * i), acc_dq(4 * i + 1), acc_dq(4 * i + 2), acc_dq(4 * i + 3));
    }
    __syncwarp();
    if (lane == 0) full.arrive();
    at.advance();
  }

  // What was handed over has been read: the memory may serve another purpose.
  CUTE_DEVICE void await_read() const { shared.ring_dq[warpgroup].acquire(at); }
};

// The adding thread of a warpgroup. It walks the tiles and their steps like those whose sums it takes.
template <class Traits>
struct QuerySumsWriter {
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN,
                       kFloats = 4 * Traits::kWarpFloats;  // of a round
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  int warpgroup;
  RingPosition<1> at{};

  CUTE_DEVICE void run() {
    RingPosition<2> at_tiles{};
    while (true) {
      shared.ring_tiles.wait(at_tiles);
      KeyTile const& tile = shared.tiles[at_tiles.slot];
      if (tile.n_begin == kThrough) return;
      if (params.workspace.dq) add(tile);
      shared.ring_tiles.release(at_tiles);
      at_tiles.advance();
    }
  }

 private:
  CUTE_DEVICE void add(KeyTile const& tile) {
    BackwardWorkspace const& workspace = params.workspace;
    float* const staged = shared.dq + warpgroup * kFloats;
    SumPlaces const places(params, tile, kBlockM);
    if (workspace.slots.count > 0) await_slot(places);
    QuerySteps steps(tile, params.shape.heads_q / params.shape.heads_kv, kBlockM, kBlockN);
    for (; steps.left > 0; steps.advance()) {
      int64_t const place = places.of(steps.head, steps.block);
      float* const sums =
          workspace.dq + (place * Traits::kConsumers + warpgroup) * (Traits::kRoundsQ * kFloats);
      if (workspace.in_turns) await_turn(tile, place, steps.block);
      for (int round = 0; round < Traits::kRoundsQ; ++round) {
        shared.ring_dq[warpgroup].wait(at);
        cutlass::arch::fence_view_async_shared();
        bulk_add(sums + round * kFloats, staged, kFloats * sizeof(float));
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();
        shared.ring_dq[warpgroup].release(at);
        at.advance();
      }
      if (workspace.in_turns) {
        await_added();
        add_release(workspace.additions + place);
      }
    }
    if (workspace.slots.count > 0) count(tile, places);
  }

  // The head that had this slot before has left it.
  CUTE_DEVICE void await_slot(SumPlaces const& places) const {
    int const left = places.uses_before * places.blocks_of_use;
    while (load_acquire(params.workspace.slots.finished + places.slot) < left) __nanosleep(20);
    fence_async_global();
  }

  // All additions of this thread have arrived.
  CUTE_DEVICE static void await_added() {
    wait_bulk_complete();
    fence_async_global();
  }

  // With the last tile's, a head's sums are complete. Once a tile, as a release waits for whatever this SM has
  // under way: once a step cost a fifth of the speed (H200, 512 tokens).
  CUTE_DEVICE void count(KeyTile const& tile, SumPlaces const& places) const {
    await_added();
    SumSlots const& slots = params.workspace.slots;
    int const additions = ceil_div(tile.sequence.mask.seqlen_k, kBlockN) * Traits::kConsumers;
    if (add_acquire_release(slots.added + places.entry) + 1 < additions) return;
    store_release(slots.queue + atomicAdd(slots.pushed, 1), places.entry);
  }

  // Where every sum has one order, blocks of keys add to a block of queries as they come in the launch order:
  // whoever waits, waits for thread blocks that have been launched.
  CUTE_DEVICE void await_turn(KeyTile const& tile, int64_t place, int block) const {
    if (params.lengths.cu_seqlens_k && params.workspace.additions[-1] == 0) return;  // see check_turns
    BlockRange const keys = tile.sequence.mask.visited(block * kBlockM, kBlockM, kBlockN);
    int const own = tile.n_begin / kBlockN;
    int const before = tile.descending ? keys.end - 1 - own : own - keys.begin;
    while (load_acquire(params.workspace.additions + place) < before * Traits::kConsumers) __nanosleep(20);
    fence_async_global();
  }
};

}  // namespace flash_cute
