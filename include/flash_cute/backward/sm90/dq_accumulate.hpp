// A warpgroup's part of a tile's dQ, and its way to the sums in global memory: through shared memory, from
// which a thread of its own adds it in bulk.
#pragma once

#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"
#include "flash_cute/core/sm90/bulk_copy.hpp"
#include "flash_cute/core/sm90/cluster.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"

namespace flash_cute {

// Where a warpgroup hands over its part of dQ, made of this stage of dS.
template <class Traits>
CUTE_DEVICE float* dq_smem(typename Traits::SharedStorage& shared, int warpgroup, int stage_ds) {
  if (Traits::kInCluster && warpgroup == 1) {
    return reinterpret_cast<float*>(shared.ds + Traits::kCluster * stage_ds * Traits::kDsStageElements);
  }
  return shared.dq + warpgroup * Traits::kFloats;
}

// The computing side. Sums of a block of queries lie warp by warp in the order of registers, four neighbours
// of each lane side by side, so that shared memory has no bank conflicts in either direction.
// warpgroup_: in a cluster, where the two have their own columns.
template <class Traits, int warpgroup_ = 0>
struct DqAccumulator {
  using AtDS = PipelineState<Traits::kStages>;
  typename Traits::SharedStorage& shared;
  bool wanted;
  int warpgroup, thread;
  PipelineState<1> at{};

  // dS of all keys is there: puts dQ = dS K in flight, in a cluster as two products.
  CUTE_DEVICE auto issue(AtDS const& at_ds) const {
    Tensor sdS = make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutDS{});  // (M, N, STAGE)
    if constexpr (Traits::kInCluster) {
      constexpr int kColumns = Traits::columns_of(warpgroup_), kFirst = warpgroup_ * Traits::columns_of(0);
      typename Traits::template MmaSums<kColumns> mma;
      auto const slice = mma.get_slice(0);
      auto columns_from = [&](auto* keys, int column) {  // (MMA, MMA_D, MMA_N)
        return slice.partition_fragment_B(make_tensor(make_smem_ptr(keys + column * Traits::kBlockN),
                                                      typename Traits::template LayoutColumns<kColumns>{}));
      };
      Tensor tQrdS = slice.partition_fragment_A(sdS);  // (MMA, MMA_M, MMA_N, STAGE)
      Tensor acc_dq = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<kColumns>>{});
      int const own_columns = read_cluster_rank() * Traits::kOwnColumns;
      shared.ring_ds.wait(at_ds);
      issue_product(GMMA::ScaleOut::Zero, mma, tQrdS(_, _, _, Traits::kCluster * at_ds.stage),
                    columns_from(shared.k, own_columns + kFirst), acc_dq);
      shared.peer_ds[at_ds.stage].wait(at_ds.phase);
      issue_product(GMMA::ScaleOut::One, mma, tQrdS(_, _, _, Traits::kCluster * at_ds.stage + 1),
                    columns_from(shared.peer_k, kFirst), acc_dq);
      return acc_dq;
    } else {
      typename Traits::MmaQueries mma;
      auto const slice = mma.get_slice(warpgroup * 128);
      Tensor tQrdS = slice.partition_fragment_A(sdS);  // (MMA, MMA_M, MMA_N, STAGE)
      Tensor tQrK = slice.partition_fragment_B(
          make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKt{}));  // (MMA, MMA_D, MMA_N)
      Tensor acc_dq = partition_fragment_C(mma, typename Traits::TileQ{});
      shared.ring_ds.wait(at_ds);
      issue_product(GMMA::ScaleOut::Zero, mma, tQrdS(_, _, _, at_ds.stage), tQrK, acc_dq);
      return acc_dq;
    }
  }

  // This warp's part has been computed, and dS read for it.
  CUTE_DEVICE void release(AtDS const& at_ds) const {
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Traits::kInCluster) {
      shared.ds_read[at_ds.stage].arrive();
    } else {
      shared.ring_ds.release(at_ds);
    }
  }

  // Hands a part of dQ over. The writer orders it before its reads by TMA: a fence here would wait for
  // stores that wait behind products.
  template <class Accumulator>
  CUTE_DEVICE void put(Accumulator const& acc_dq, AtDS const& at_ds) {
    constexpr int kWarpPart = Traits::kInCluster ? Traits::floats_of(warpgroup_) / 4 : Traits::kWarpPart;
    static_assert(32 * decltype(size(acc_dq))::value == kWarpPart * Traits::kHalves);
    if constexpr (!Traits::kInCluster) {
      if (!wanted) return;
    } else if (warpgroup == 1) {
      shared.ds_read[at_ds.stage].wait(at_ds.phase);
    }
    int const lane = thread % 32;
    // Both ways are the same place, but ptxas makes 2% more of the one at head dim 64, of the other at 128.
    float* const rows = Traits::kHeadDim == 64
                            ? shared.dq + (4 * warpgroup + thread / 32) * kWarpPart
                            : dq_smem<Traits>(shared, warpgroup, at_ds.stage) + thread / 32 * kWarpPart;
    auto* const staged = reinterpret_cast<float4*>(rows) + lane;
    auto& full = shared.ring_dq[warpgroup].acquire(at);
    CUTE_UNROLL
    for (int i = 0; i < size(acc_dq) / 4; ++i) {
      staged[Traits::place_of_four(i)] =
          make_float4(acc_dq(4 * i), acc_dq(4 * i + 1), acc_dq(4 * i + 2), acc_dq(4 * i + 3));
    }
    __syncwarp();
    if (lane == 0) full.arrive();
    at.advance();
  }

  // A part of dQ from its product on, beside which something else is done, and a wait for where it goes.
  template <class Beside, class AwaitRoom>
  CUTE_DEVICE void add(AtDS const& at_ds, Beside&& beside, AwaitRoom&& await_room) {
    Tensor acc_dq = issue(at_ds);
    beside();
    wait_products<0>(acc_dq);
    release(at_ds);
    await_room();
    put(acc_dq, at_ds);
  }

  // What was handed over has been read: the memory may serve another purpose.
  CUTE_DEVICE void wait_read() const { shared.ring_dq[warpgroup].acquire(at); }
};

// The adding thread of a warpgroup. It walks the tiles and their steps like those whose sums it takes.
//
// Whoever comes first to sums stores his, so nobody has to clear them. In turns that is known, and
// `additions` counts: blocks of keys add to a block of queries as they come in the launch order, so whoever
// waits, waits for thread blocks that have been launched. Else the first one is who makes kUntouched kBegun,
// with his sums at hand: so the others wait for nothing but a store.
template <class Traits>
struct DqAccumulateWriter {
  static constexpr int kBlockM = Traits::kBlockM, kTileN = Traits::kTileN,
                       kParts = Traits::kConsumers * Traits::kCluster;
  enum { kUntouched, kBegun, kStored };  // of `additions` without turns
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  int warpgroup;
  PipelineState<1> at{};
  PipelineState<Traits::kStages> at_ds{};

  CUTE_DEVICE void run() {
    for_each_tile(shared, [&](KvTile const& tile) {
      if (params.workspace.dq.accum || Traits::kInCluster) add(tile);  // where memory is given back, too
    });
  }

 private:
  CUTE_DEVICE void add(KvTile const& tile) {
    QBlockIterator steps(tile, params.shape.heads_q / params.shape.heads_kv, kBlockM, kTileN);
    int const rank = Traits::kInCluster ? read_cluster_rank() : 0;
    int const own = warpgroup * Traits::kCluster + rank;
    int *const additions = params.workspace.dq.adds, *const finished = params.workspace.dq.tiles_finished;
    // 20 us until rows are made of them, where this kernel makes them (1% at head dim 128; 256 0 to 1%).
    auto const hint =
        finished || Traits::kInCluster ? TMA::CacheHintSm90::EVICT_LAST : TMA::CacheHintSm90::EVICT_NORMAL;
    bool const ordered = additions && params.workspace.dq.ordered;
    auto look = [&](QBlockIterator const& step) {
      return load_acquire(additions + tile.place(step.head, step.block) * kParts + own);
    };
    int seen = additions && steps.left > 0 ? look(steps) : kStored;
    while (steps.left > 0) {
      int64_t const place = tile.place(steps.head, steps.block), part = place * kParts + own;
      int const wanted = ordered ? blocks_before(tile, steps.block) : kStored;
      if (!ordered && seen != kStored) {
        shared.ring_dq[warpgroup].wait(at);
        seen = claim_acquire(additions + part);
      }
      bool const first = (ordered ? wanted : seen) == kUntouched;
      while (!first && seen < wanted) {
        __nanosleep(20);
        seen = load_acquire(additions + part);
      }
      if (additions) fence_async_global();
      steps.advance();
      shared.ring_dq[warpgroup].wait(at);
      cutlass::arch::fence_view_async_shared();
      float const* const source = dq_smem<Traits>(shared, warpgroup, at_ds.stage);
      if (params.workspace.dq.accum) {
        float* const sums =
            params.workspace.dq.accum + place * Traits::kBlockFloats + Traits::place_of_part(warpgroup, rank);
        int const bytes = Traits::floats_of(warpgroup) * sizeof(float);
        if (first) {
          bulk_store(sums, source, bytes, hint);
        } else {
          bulk_add(sums, source, bytes, hint);
        }
      }
      cute::tma_store_arrive();
      // While it is on its way, as it takes as long.
      if (additions && steps.left > 0) seen = look(steps);
      cute::tma_store_wait<0>();
      shared.ring_dq[warpgroup].release(at);
      if (Traits::kInCluster && warpgroup == 1) {
        shared.ring_ds.release(at_ds);
        arrive_at_peer(shared.ring_ds.empty[at_ds.stage]);
      }
      at.advance();
      at_ds.advance();
      if (ordered || first) pass(additions + part);
    }
    // Once a tile, as a release waits for whatever this multiprocessor has under way.
    if (finished) pass(finished + tile.pair);
  }

  // Of those that see a block of queries, the blocks of keys that come before this one in the launch order.
  CUTE_DEVICE static int blocks_before(KvTile const& tile, int block) {
    BlockRange const keys = tile.sequence.mask.visited(block * kBlockM, kBlockM, kTileN);
    int const own = tile.n_begin / kTileN;
    return tile.descending ? keys.end - 1 - own : own - keys.begin;
  }

  CUTE_DEVICE static void pass(int* additions) {
    wait_bulk_complete();
    fence_async_global();
    add_release(additions);
  }
};

}  // namespace flash_cute
