// The Hopper family's loading thread of the backward: K and V once a tile, Q and dO block by block, as far
// ahead as there are free stages.
#pragma once

#include "flash_cute/backward/gqa_reduce.hpp"
#include "flash_cute/backward/sm90/dq_convert.hpp"
#include "flash_cute/backward/sm90/tensor_maps.hpp"
#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"
#include "flash_cute/core/sm90/tma.hpp"

namespace flash_cute {

template <class Traits, class Mask>
struct BackwardProducerSm90 {
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kTileN = Traits::kTileN;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  KvTileScheduler<Mask> const& order;
  BackwardMaps const& maps;
  PipelineState<1> at_keys{};
  PipelineState<Traits::kStages> at{};
  PipelineState<Traits::kStagesDO> at_dout{};
  PipelineState<2> at_tiles{};
  PipelineState<1> at_index{};

  CUTE_DEVICE void run() {
    // Claimed in the launch order, so that whoever waits for sums that come before waits for tiles under way;
    // and once the one before is loaded, as others could begin what waits here (3% of 16k causal).
    for (int index = claim(); index < order.count(params); index = claim()) {
      KvTile const tile = order(params, index);
      if (!has_rows(tile.n_begin, tile.sequence.mask.seqlen_k)) continue;
      announce(tile);
      load(tile);
    }
    announce({.n_begin = kNoTile});
  }

 private:
  // In a cluster the first block claims for both.
  CUTE_DEVICE int claim() {
    if constexpr (!Traits::kInCluster) return atomicAdd(params.workspace.tile_counter, 1);
    auto& arrived = shared.ring_index.full[0];
    int index;
    if (read_cluster_rank() == 0) {
      index = atomicAdd(params.workspace.tile_counter, 1);
      shared.ring_index.acquire(at_index);
      send_to_peer(shared.index, index, arrived);
    } else {
      arrived.arrive_and_expect_tx(sizeof(int));
      arrived.wait(at_index.phase);
      index = *static_cast<int volatile*>(&shared.index);
      if (index >= 0) arrive_at_peer(shared.ring_index.empty[0]);  // always: once it has been read
    }
    at_index.advance();
    return index;
  }

  CUTE_DEVICE void announce(KvTile const& tile) {
    auto& announced = shared.ring_tiles.acquire(at_tiles);
    shared.tiles[at_tiles.stage] = tile;
    if constexpr (Traits::kSplitsGroups) {
      shared.sum_indices[at_tiles.stage] = GqaSums<Traits>::sum_index(params, tile);
    }
    announced.arrive();
    at_tiles.advance();
  }

  CUTE_DEVICE void load(KvTile const& tile) {
    int const heads = params.shape.heads_q / params.shape.heads_kv;
    QBlockIterator steps(tile, heads, kBlockM, kTileN);
    if (steps.left == 0) return;
    bool const varlen = params.lengths.given;
    auto const& rows = maps.entry_rows;
    auto load_rows = [&]<int kRows>(Int<kRows>, CUtensorMap const& map, auto& arrived, auto* target, int head,
                                    int row, TmaCoord const& place) {
      load_panels<Traits::kHeadDim, Traits::kPanel, kRows>(map, arrived, target, kRows, 0, head,
                                                           place.shift + row, place.plane, place.bound);
    };
    int const first_key = first_own_key<Traits>(tile);
    auto load_keys = [&](CUtensorMap const& map, auto& arrived, auto* target, int entry_rows) {
      load_rows(Int<kBlockN>{}, map, arrived, target, head_of_keys<Traits>(params, tile), first_key,
                TmaCoord::of_keys(varlen, tile, entry_rows));
    };
    // Q comes with what its rows have of their own.
    TmaCoord const coord_q = TmaCoord::of_queries(varlen, tile, rows.q);
    TmaCoord coord_dout = TmaCoord::of_queries(varlen, tile, rows.dout);
    if (!params.dout.data) coord_dout.shift = VarlenCoord::kBound;  // past the end: it arrives as zeros
    auto load_queries = [&](CUtensorMap const& map, auto& arrived, auto* target, TmaCoord const& place) {
      int const row = steps.block * kBlockM;
      if constexpr (Traits::kInCluster) {
        load_panels_of_both<Traits::kHeadDim, Traits::kPanel, kBlockM>(
            map, arrived, target, steps.head, place.shift + row, place.plane, place.bound);
      } else {
        load_rows(Int<kBlockM>{}, map, arrived, target, steps.head, row, place);
      }
    };
    auto load_terms = [&](auto& arrived, uint4* target) {
      TmaCoord const place = TmaCoord::of_queries(varlen, tile, rows.terms);
      arrived.expect_transaction(kBlockM * kTermBytes);
      cute::SM90_TMA_LOAD::copy(&maps.terms, reinterpret_cast<uint64_t*>(&arrived),
                                static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), target, 0,
                                steps.head, place.shift + steps.block * kBlockM, place.plane, place.bound);
    };
    auto load_floats = [&](auto& arrived, float const* of_rows, float* target) {
      constexpr int kBytes = kBlockM * sizeof(float);
      int64_t const block = tile.place(steps.head, steps.block);
      arrived.expect_transaction(kBytes);
      cute::SM90_BULK_COPY_G2S::copy(of_rows + block * kBlockM, reinterpret_cast<uint64_t*>(&arrived), target,
                                     kBytes);
    };

    // Q and dO of the first step before V and K, whose memory the tile before leaves last, in this order; in
    // a cluster dV leaves through V's, which is given back when this tile has begun: a round later.
    for (bool first = true; steps.left > 0; steps.advance(), first = false) {
      auto& arrived = shared.ring_q.acquire(at);
      if constexpr (Traits::kLseDeltaMma) {
        load_terms(arrived, shared.of_queries.terms[at.stage]);
      } else {
        load_floats(arrived, params.workspace.lse_delta.lse, shared.of_queries.lse + at.stage * kBlockM);
        load_floats(arrived, params.workspace.lse_delta.delta, shared.of_queries.delta + at.stage * kBlockM);
      }
      load_queries(maps.q, arrived, shared.q + at.stage * Traits::kStageElements, coord_q);
      at.advance();
      load_queries(maps.dout, shared.ring_dout.acquire(at_dout),
                   shared.dout + at_dout.stage * Traits::kStageElements, coord_dout);
      at_dout.advance();
      if (!first) continue;
      if constexpr (Traits::kInCluster) {
        load_keys(maps.k, shared.ring_k.acquire(at_keys), shared.k, rows.k);
        load_keys(maps.v, shared.ring_v.acquire(PipelineState<1>{.phase = at_keys.phase ^ 1}), shared.v,
                  rows.v);
      } else {
        load_keys(maps.v, shared.ring_v.acquire(at_keys), shared.v, rows.v);
        load_keys(maps.k, shared.ring_k.acquire(at_keys), shared.k, rows.k);
      }
    }
    at_keys.advance();
  }
};

}  // namespace flash_cute
