// What the Hopper family's computing warpgroups of the backward have in common: the walk over tiles, P and dS
// element by element, and how dK and dV leave.
#pragma once

#include "flash_cute/attention/online_softmax.hpp"
#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/gqa_reduce.hpp"
#include "flash_cute/backward/sm90/dq_accumulate.hpp"
#include "flash_cute/backward/sm90/tensor_maps.hpp"
#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"
#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/core/special_registers.hpp"

namespace flash_cute {

template <class Traits>
struct BackwardConsumerWarpgroup {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  BackwardMaps const& maps;
  int warpgroup;  // among the consumers
  int thread;     // of the warpgroup

  // The thread's number among those that share the keys of a tile, and its warp's.
  CUTE_DEVICE int key_thread() const { return (Traits::kInCluster ? 0 : 128 * warpgroup) + thread; }
  CUTE_DEVICE int key_warp() const { return key_thread() / 32; }
  CUTE_DEVICE float scale_log2() const {
    float const scale = params.softmax_scale;
    return (Traits::kLseDeltaMma ? scale_of_scores(scale) : scale) * float(M_LOG2E);
  }

  template <int warpgroup_ = 0>
  CUTE_DEVICE DqAccumulator<Traits, warpgroup_> dq_accumulator() const {
    return {shared, params.workspace.dq.accum != nullptr, warpgroup, thread};
  }

  template <class Consumer>
  CUTE_DEVICE void run(Consumer consumer) const {
    PipelineState<2> at{};
    while (true) {
      shared.ring_tiles.wait(at);
      KvTile const& tile = shared.tiles[at.stage];
      if (tile.n_begin == kNoTile) break;
      consumer.compute(tile);
      __syncwarp();  // all lanes have read the tile
      release(shared.ring_tiles, at);
      at.advance();
    }
    wait_stored();
    if constexpr (Traits::kConvertsDq) consumer.rows.finish_all();
  }

  // dK and dV have been read where sums of dQ come next. Asked for when the next tile has begun.
  CUTE_DEVICE void wait_stored() const {
    if (thread % 32 == 0) cute::tma_store_wait<0>();
    if constexpr (Traits::kHalves > 1) {
      sync_warpgroup(warpgroup);  // a warp's sums come where other warps' rows were
    } else {
      __syncwarp();
    }
  }

  CUTE_DEVICE QBlockIterator steps_of(KvTile const& tile) const {
    return QBlockIterator(tile, params.shape.heads_q / params.shape.heads_kv, kBlockM, Traits::kTileN);
  }

  // Blocks of queries that see all of this warpgroup's keys.
  CUTE_DEVICE BlockRange unmasked(KvTile const& tile) const {
    WindowMask const& mask = tile.sequence.mask;
    int const begin = first_own_key<Traits>(tile) + key_warp() / 4 * 64;
    return begin + 64 <= mask.seqlen_k ? mask.unmasked_rows(begin, 64, kBlockM) : BlockRange{0, 0};
  }

  // One arrival a warp: its own products have read the stage, or its lanes filled it.
  template <class Ring, class Position>
  CUTE_DEVICE static void release(Ring& ring, Position const& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
  }
  // Of Q or dO, which in a cluster come for both blocks at once (head dim 256, from 1k on: up to 2%).
  template <class Ring, class Position>
  CUTE_DEVICE static void release_queries(Ring& ring, Position const& at) {
    release(ring, at);
    if constexpr (Traits::kInCluster) {
      if (threadIdx.x % 32 == 0) arrive_at_peer(ring.empty[at.stage]);
    }
  }
  CUTE_DEVICE static void announce(auto& full) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) full.arrive();
  }

  template <class Coords>
  CUTE_DEVICE static float first_of(Coords const& cS, float const* of_queries) {
    return of_queries[get<1>(cS(0))];
  }

  // Scores become weights: 2^(score * scale - LSE of its query), whose column it is.
  // first_lse: of the first column, see first_of.
  template <class Scores, class Coords>
  CUTE_DEVICE void compute_p(Scores& acc_s, Coords const& cS, int stage, float first_lse, float scale) const {
    if constexpr (Traits::kLseDeltaMma) {
      CUTE_UNROLL
      for (int i = 0; i < size(acc_s); ++i) acc_s(i) = fast_exp2(acc_s(i) * scale);
    } else {
      float const* const lse_of_queries = shared.of_queries.lse + stage * kBlockM;
      auto scores = row_col_view(acc_s);
      auto const coords = row_col_view(cS);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        float const lse = col == 0 ? first_lse : lse_of_queries[get<1>(coords(0, col))];
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
          scores(row, col) = fast_exp2(fmaf(scores(row, col), scale, -lse));
        }
      }
    }
  }

  // dS = P (dP + dLSE - D), the last two those of its query, whose column it is.
  template <class Gradients, class Weights, class Coords>
  CUTE_DEVICE void compute_ds(Gradients& acc_ds, Weights const& acc_p, Coords const& cS, int stage) const {
    if constexpr (Traits::kLseDeltaMma) {
      CUTE_UNROLL
      for (int i = 0; i < size(acc_ds); ++i) acc_ds(i) *= acc_p(i);
    } else {
      float const* const delta_of_queries = shared.of_queries.delta + stage * kBlockM;
      auto gradients = row_col_view(acc_ds);
      auto const weights = row_col_view(acc_p);
      auto const coords = row_col_view(cS);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(gradients); ++col) {
        float const delta = delta_of_queries[get<1>(coords(0, col))];
        CUTE_UNROLL
        for (int row = 0; row < size<0>(gradients); ++row) {
          gradients(row, col) = weights(row, col) * (gradients(row, col) + delta);
        }
      }
    }
  }

  // A warp's 16 rows of an accumulator, from a column on, as TMA stores them.
  template <class LayoutRows, class Accumulator>
  CUTE_DEVICE static void stage(Element* rows, int lane, float scale, Accumulator const& acc, int first) {
    Tensor sRows = make_tensor(make_smem_ptr(rows), LayoutRows{});
    auto const values = row_col_view(acc);
    auto word = [&](int row, int col) {
      return pack<Element>(scale * values(row, col), scale * values(row, col + 1));
    };
    constexpr int kOwned = decltype(size<1>(sRows))::value / 4;  // of its columns, by a lane
    CUTE_UNROLL
    for (int i = 0; i < kOwned; i += 4) {  // 16 columns
      auto& target = sRows(lane % 16, 4 * i + lane / 16 * 8);
      int const col = first / 4 + i;
      SM90_U32x4_STSM_N::copy(word(0, col), word(1, col), word(0, col + 2), word(1, col + 2),
                              reinterpret_cast<uint128_t&>(target));
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
  }

  // Where this warp's rows of dK or dV leave through: where it hands over dQ, or in a cluster where the
  // operands were that nobody needs any more.
  CUTE_DEVICE float* output_smem() const {
    if constexpr (!Traits::kInCluster) {
      return shared.dq + (warpgroup * 4 + thread / 32) * Traits::kWarpFloats;
    } else {
      return reinterpret_cast<float*>(warpgroup == 0 ? shared.v : shared.peer_k) +
             thread / 32 * Traits::kWarpFloats;
    }
  }

  // By each warp alone: its 16 rows leave, as many columns at a time as fit, or all at once.
  template <bool kAllFit = false, class Accumulator>
  CUTE_DEVICE void store(KvGradient which, KvTile const& tile, Accumulator const& acc) const {
    if constexpr (Traits::kSplitsGroups) {
      // Always; but where this is known to be so, the loop of head dim 128 has more spills.
      if (Traits::kInCluster || params.workspace.gqa.sums) {
        using Parts = GqaSums<Traits>;
        int const index = shared.sum_indices[&tile - shared.tiles];
        int const rank = Traits::kInCluster ? read_cluster_rank() : 0;
        Parts::add(Parts::of(params, which, index, rank, key_thread()), acc);
        return;
      }
    }
    bool const is_dk = which == KvGradient::dk;
    CUtensorMap const& map = is_dk ? maps.dk : maps.dv;
    int const entry_rows = is_dk ? maps.entry_rows.dk : maps.entry_rows.dv;
    float const scale = is_dk ? params.softmax_scale : 1.f;
    // Read anew, so that no address is kept in registers for the whole loop before.
    int const lane = read_lane_index();
    float* const memory = output_smem();
    TmaCoord const place = TmaCoord::of_keys(params.lengths.given, tile, entry_rows);
    constexpr int kColumns = Traits::kStoreColumns, kParts = Traits::kHeadDim / kColumns;
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      auto* const rows = reinterpret_cast<Element*>(memory + (kAllFit ? part * Traits::kFloats : 0));
      if (!kAllFit && lane == 0) cute::tma_store_wait<0>();  // what was there has left
      __syncwarp();
      stage<typename Traits::LayoutWarp>(rows, lane, scale, acc, part * kColumns);
      if (lane == 0) {
        store_panels<kColumns, Traits::kPanel, Traits::kWarpRows>(
            map, rows, part * kColumns, tile.head_kv,
            place.shift + first_own_key<Traits>(tile) + key_warp() * Traits::kWarpRows, place.plane,
            place.bound);
      }
    }
  }
};

}  // namespace flash_cute
