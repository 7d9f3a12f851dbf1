// dQ = dS K of a step, and its accumulation in global memory: a consumer warpgroup computes its part and
// stages it in shared memory, and a thread of the producer warpgroup adds it to the accumulator by a bulk
// reduction.
#pragma once

#include "flash_cute/backward/mask.hpp"
#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/core/sm90/bulk_copy.hpp"
#include "flash_cute/core/sm90/cluster.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"

namespace flash_cute {

// Where a warpgroup stages its part of dQ that it computed from this stage of dS.
template <class Traits>
CUTE_DEVICE float* dq_smem(typename Traits::SharedStorage& shared, int warpgroup, int stage_ds) {
  if (Traits::kInCluster && warpgroup == 1) {
    return reinterpret_cast<float*>(shared.ds + Traits::kCluster * stage_ds * Traits::kDsStageElements);
  }
  return shared.dq + warpgroup * Traits::kDqWarpgroupFloats;
}

// The consumer's side. The accumulator in the workspace and the staged part lie in the order of registers
// (float4_offset), so that shared memory has no bank conflicts in either direction. warpgroup_ is used in a
// cluster only, where the columns of a warpgroup's part depend on it.
template <class Traits, int warpgroup_ = 0>
struct DqAccumulator {
  using AtDS = PipelineState<Traits::kStages>;
  typename Traits::SharedStorage& shared;
  bool enabled;
  int warpgroup, thread;
  PipelineState<1> at{};

  // Waits for dS of all keys and puts (6) dQ = dS K in flight; in a cluster these are two products, of the
  // thread block's own dS and of its peer's.
  CUTE_DEVICE auto issue(AtDS const& at_ds) const {
    Tensor sdS = make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutDS{});  // (M, N, STAGE)
    if constexpr (Traits::kInCluster) {
      constexpr int kColumns = Traits::columns_of(warpgroup_), kFirst = warpgroup_ * Traits::columns_of(0);
      typename Traits::template MmaDqColumns<kColumns> mma;
      auto const slice = mma.get_slice(0);
      auto columns_from = [&](auto* keys, int column) {  // (MMA, MMA_D, MMA_N)
        return slice.partition_fragment_B(make_tensor(make_smem_ptr(keys + column * Traits::kBlockN),
                                                      typename Traits::template LayoutColumns<kColumns>{}));
      };
      Tensor tQrdS = slice.partition_fragment_A(sdS);  // (MMA, MMA_M, MMA_N, STAGE)
      Tensor acc_dq = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<kColumns>>{});
      int const own_columns = read_cluster_rank() * Traits::kCtaDqColumns;
      shared.ring_ds.wait(at_ds);
      issue_product(GMMA::ScaleOut::Zero, mma, tQrdS(_, _, _, Traits::kCluster * at_ds.stage),
                    columns_from(shared.k, own_columns + kFirst), acc_dq);
      shared.peer_ds[at_ds.stage].wait(at_ds.phase);
      issue_product(GMMA::ScaleOut::One, mma, tQrdS(_, _, _, Traits::kCluster * at_ds.stage + 1),
                    columns_from(shared.peer_k, kFirst), acc_dq);
      return acc_dq;
    } else {
      typename Traits::MmaDq mma;
      auto const slice = mma.get_slice(warpgroup * kWarpgroupThreads);
      Tensor tQrdS = slice.partition_fragment_A(sdS);  // (MMA, MMA_M, MMA_N, STAGE)
      Tensor tQrK = slice.partition_fragment_B(
          make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKt{}));  // (MMA, MMA_D, MMA_N)
      Tensor acc_dq = partition_fragment_C(mma, typename Traits::TileDq{});
      shared.ring_ds.wait(at_ds);
      issue_product(GMMA::ScaleOut::Zero, mma, tQrdS(_, _, _, at_ds.stage), tQrK, acc_dq);
      return acc_dq;
    }
  }

  // Releases dS, which this warp's product has read.
  CUTE_DEVICE void release(AtDS const& at_ds) const {
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Traits::kInCluster) {
      shared.ds_read[at_ds.stage].arrive();
    } else {
      shared.ring_ds.release(at_ds);
    }
  }

  // Stages a part of dQ for DqAccumulateWriter, which has the fence between these stores and its reads by
  // TMA. A fence here would wait for stores that are queued after products.
  template <class Accumulator>
  CUTE_DEVICE void put(Accumulator const& acc_dq, AtDS const& at_ds) {
    constexpr int kPartFloats =
        Traits::kInCluster ? Traits::floats_of(warpgroup_) / 4 : Traits::kDqHalfFloats;
    static_assert(32 * decltype(size(acc_dq))::value == kPartFloats * Traits::kDqHalves);
    if constexpr (!Traits::kInCluster) {
      if (!enabled) return;
    } else if (warpgroup == 1) {
      shared.ds_read[at_ds.stage].wait(at_ds.phase);
    }
    int const lane = thread % 32;
    // Both expressions give the same address, but ptxas generates code that is 2% faster from the first one
    // at head dim 64 and from the second one at 128.
    float* const rows = Traits::kHeadDim == 64
                            ? shared.dq + (4 * warpgroup + thread / 32) * kPartFloats
                            : dq_smem<Traits>(shared, warpgroup, at_ds.stage) + thread / 32 * kPartFloats;
    auto* const staged = reinterpret_cast<float4*>(rows) + lane;
    auto& full = shared.ring_dq[warpgroup].acquire(at);
    CUTE_UNROLL
    for (int i = 0; i < size(acc_dq) / 4; ++i) {
      staged[Traits::float4_offset(i)] =
          make_float4(acc_dq(4 * i), acc_dq(4 * i + 1), acc_dq(4 * i + 2), acc_dq(4 * i + 3));
    }
    __syncwarp();
    if (lane == 0) full.arrive();
    at.advance();
  }

  // Computes and stages a part of dQ. beside() runs while the product is in flight, and await_room() waits
  // until the memory to stage it in is free.
  template <class Beside, class AwaitRoom>
  CUTE_DEVICE void add(AtDS const& at_ds, Beside&& beside, AwaitRoom&& await_room) {
    Tensor acc_dq = issue(at_ds);
    beside();
    wait_products<0>(acc_dq);
    release(at_ds);
    await_room();
    put(acc_dq, at_ds);
  }

  // Waits until what was staged has been read, so that the memory may be used for something else.
  CUTE_DEVICE void wait_read() const { shared.ring_dq[warpgroup].acquire(at); }
};

// The thread of the producer warpgroup that adds a consumer warpgroup's parts of dQ to the accumulator,
// walking over tiles and steps as the consumers do.
//
// The first addition to an accumulator is a store, so no kernel has to zero it. `additions` holds the state
// of each part of an M block's accumulator. In ordered (deterministic) mode it counts additions: KV tiles add
// to an M block in the launch order, so the first one is known, and a wait is for tiles that are running.
// Otherwise the first thread that changes kUntouched to kBegun stores, and it does so when its data is ready,
// so that the others wait only for that store.
template <class Traits>
struct DqAccumulateWriter {
  static constexpr int kBlockM = Traits::kBlockM, kTileN = Traits::kTileN;
  static constexpr int kParts = Traits::kConsumers * Traits::kCluster;  // of an M block's accumulator
  enum { kUntouched, kBegun, kStored };                                 // states in unordered mode
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  int warpgroup;
  PipelineState<1> at{};
  PipelineState<Traits::kStages> at_ds{};

  CUTE_DEVICE void run() {
    for_each_tile(shared, [&](KvTile const& tile) {
      if (params.workspace.dq.accum || Traits::kInCluster) add(tile);  // a cluster releases memory here, too
    });
  }

 private:
  CUTE_DEVICE void add(KvTile const& tile) {
    auto steps = steps_of<Traits>(params, tile);
    int const rank = Traits::kInCluster ? read_cluster_rank() : 0;
    int const own = warpgroup * Traits::kCluster + rank;
    int *const additions = params.workspace.dq.adds, *const finished = params.workspace.dq.tiles_finished;
    // Where this kernel converts dQ, it does so about 20 us later, so the accumulator should stay in L2 (1%
    // at head dim 128; 256 0 to 1%).
    auto const hint =
        finished || Traits::kInCluster ? TMA::CacheHintSm90::EVICT_LAST : TMA::CacheHintSm90::EVICT_NORMAL;
    bool const ordered = additions && params.workspace.dq.ordered;
    auto load_state = [&](auto const& step) {
      return load_acquire(additions + tile.block_index(step.head, step.block) * kParts + own);
    };
    int state = additions && steps.left > 0 ? load_state(steps) : kStored;
    while (steps.left > 0) {
      int64_t const block_index = tile.block_index(steps.head, steps.block),
                    part = block_index * kParts + own;
      int const wanted = ordered ? blocks_before(tile, steps.block) : kStored;
      if (!ordered && state != kStored) {
        shared.ring_dq[warpgroup].wait(at);
        state = claim_acquire(additions + part);
      }
      bool const first = (ordered ? wanted : state) == kUntouched;
      while (!first && state < wanted) {
        __nanosleep(20);
        state = load_acquire(additions + part);
      }
      if (additions) fence_async_global();
      steps.advance();
      shared.ring_dq[warpgroup].wait(at);
      cutlass::arch::fence_view_async_shared();
      float const* const source = dq_smem<Traits>(shared, warpgroup, at_ds.stage);
      if (params.workspace.dq.accum) {
        float* const dq_accum = params.workspace.dq.accum + block_index * Traits::kDqBlockFloats +
                                Traits::dq_offset(warpgroup, rank);
        int const bytes = Traits::floats_of(warpgroup) * sizeof(float);
        if (first) {
          bulk_store(dq_accum, source, bytes, hint);
        } else {
          bulk_add(dq_accum, source, bytes, hint);
        }
      }
      cute::tma_store_arrive();
      // Load the next state while the addition is in flight, as it takes as long.
      if (additions && steps.left > 0) state = load_state(steps);
      cute::tma_store_wait<0>();
      shared.ring_dq[warpgroup].release(at);
      if (Traits::kInCluster && warpgroup == 1) {
        shared.ring_ds.release(at_ds);
        arrive_at_peer(shared.ring_ds.empty[at_ds.stage]);
      }
      at.advance();
      at_ds.advance();
      if (ordered || first) signal(additions + part);
    }
    // Only once a tile, as a release waits for all memory operations that the multiprocessor has in flight.
    if (finished) signal(finished + tile.pair);
  }

  // How many N blocks that M block `block` sees come before this tile in the launch order.
  CUTE_DEVICE static int blocks_before(KvTile const& tile, int block) {
    BlockRange const keys = tile.sequence.mask.visited(block * kBlockM, kBlockM, kTileN);
    int const own = tile.n_begin / kTileN;
    return tile.descending ? keys.end - 1 - own : own - keys.begin;
  }

  // Increments a counter when this thread's bulk operations are complete and visible.
  CUTE_DEVICE static void signal(int* counter) {
    wait_bulk_complete();
    fence_async_global();
    add_release(counter);
  }
};

}  // namespace flash_cute
