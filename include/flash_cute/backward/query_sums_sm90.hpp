// A warpgroup's half of a tile's part of dQ, and how it comes to the sums in global memory: by bulk
// reductions, each warp's own.
#pragma once

#include "flash_cute/backward/warpgroup_sm90.hpp"
#include "flash_cute/core/bulk_add.hpp"
#include "flash_cute/core/warpgroup.hpp"

namespace flash_cute {

// Sums of a block of queries lie warp by warp in the order of registers, four neighbours of each lane side by
// side, so that shared memory has no bank conflicts in either direction.
template <class Traits>
struct QuerySums {
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN,
                       kBlockFloats = kBlockM * Traits::kSumColumns;
  static constexpr int kWarps = 4 * Traits::kConsumers, kWarpFloats = Traits::kWarpFloats;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  KeyTile const& tile;
  int warpgroup, warp, lane;

  CUTE_DEVICE QuerySums(BackwardWarpgroup<Traits> const& own, KeyTile const& tile_)
      : shared(own.shared),
        params(own.params),
        tile(tile_),
        warpgroup(own.warpgroup),
        warp(own.warpgroup * 4 + own.thread / 32),
        lane(own.thread % 32) {}

  // dS of all keys is there: puts a round of dQ = dS K in flight.
  CUTE_DEVICE auto issue(RingPosition<Traits::kStages> const& at, int round = 0) const {
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
    shared.ring_ds.wait(at);
    issue_product(GMMA::ScaleOut::Zero, mma, tQrdS(_, _, _, at.slot), tQrK_round, acc_dq);
    return acc_dq;
  }

  template <class Accumulator>
  CUTE_DEVICE void add(Accumulator const& acc_dq, int head, int block, int round = 0) const {
    if (!params.workspace.dq) return;
    static_assert(32 * decltype(size(acc_dq))::value == kWarpFloats);
    float* const staged = shared.dq + warp * kWarpFloats;
    if (lane == 0) cute::tma_store_wait<0>();  // what was there has been read
    __syncwarp();
    CUTE_UNROLL
    for (int i = 0; i < size(acc_dq) / 4; ++i) {
      reinterpret_cast<float4*>(staged)[i * 32 + lane] =
          make_float4(acc_dq(4 * i), acc_dq(4 * i + 1), acc_dq(4 * i + 2), acc_dq(4 * i + 3));
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane != 0) return;
    int64_t const place = int64_t(head) * tile.places + tile.first_place + block;
    int* const turn = params.workspace.turns ? params.workspace.turns + place : nullptr;
    if (turn && round == 0) await_turn(turn, block);
    int const part = warp * Traits::kRoundsQ + round;
    bulk_add(params.workspace.dq + place * kBlockFloats + part * kWarpFloats, staged,
             kWarpFloats * sizeof(float));
    cute::tma_store_arrive();
    if (turn && round == Traits::kRoundsQ - 1) pass_turn(turn);
  }

 private:
  // Where every sum has one order, blocks of keys add to a block of queries as they come in the launch order:
  // whoever waits, waits for thread blocks that have been launched.
  CUTE_DEVICE void await_turn(int const* turn, int block) const {
    if (params.lengths.cu_seqlens_k && params.workspace.turns[-1] == 0) return;  // see check_turns
    BlockRange const keys = tile.sequence.mask.visited(block * kBlockM, kBlockM, kBlockN);
    int const own = tile.n_begin / kBlockN;
    int const before = tile.descending ? keys.end - 1 - own : own - keys.begin;
    while (load_acquire(turn) < before * kWarps) __nanosleep(20);
    fence_async_global();
  }
  CUTE_DEVICE static void pass_turn(int* turn) {
    wait_bulk_complete();
    fence_async_global();
    add_release(turn);
  }
};

}  // namespace flash_cute
