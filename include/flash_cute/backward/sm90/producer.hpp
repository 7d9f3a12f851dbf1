// The Hopper family's loading thread of the backward: K and V once a tile, Q and dO block by block, as far
// ahead as there are free slots.
#pragma once

#include "flash_cute/backward/gqa_reduce.hpp"
#include "flash_cute/backward/sm90/dq_convert.hpp"
#include "flash_cute/backward/sm90/tensor_maps.hpp"
#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"
#include "flash_cute/core/sm90/tma.hpp"

namespace flash_cute {

template <class Traits>
struct BackwardProducerSm90 {
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kTileN = Traits::kTileN;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  KeyOrder const& order;
  BackwardMaps const& maps;
  RingPosition<1> at_keys{};
  RingPosition<Traits::kStages> at{};
  RingPosition<Traits::kStagesDO> at_dout{};
  RingPosition<2> at_tiles{};
  RingPosition<1> at_index{};

  CUTE_DEVICE void run() {
    // Claimed in the launch order, so that whoever waits for sums that come before waits for tiles under way;
    // and once the one before is loaded, as others could begin what waits here (3% of 16k causal).
    for (int index = claim(); index < order.count(params); index = claim()) {
      KeyTile const tile = order(params, index);
      if (!has_rows(tile.n_begin, tile.sequence.mask.seqlen_k)) continue;
      announce(tile);
      load(tile);
    }
    announce({.n_begin = kThrough});
  }

 private:
  // In a cluster the first block claims for both.
  CUTE_DEVICE int claim() {
    if constexpr (!Traits::kInCluster) return atomicAdd(params.workspace.claimed, 1);
    auto& arrived = shared.ring_index.full[0];
    int index;
    if (read_cluster_rank() == 0) {
      index = atomicAdd(params.workspace.claimed, 1);
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

  CUTE_DEVICE void announce(KeyTile const& tile) {
    auto& announced = shared.ring_tiles.acquire(at_tiles);
    shared.tiles[at_tiles.slot] = tile;
    if constexpr (Traits::kSplitsGroups) {
      shared.part_slots[at_tiles.slot] = KeyParts<Traits>::slot_of(params, tile);
    }
    announced.arrive();
    at_tiles.advance();
  }

  CUTE_DEVICE void load(KeyTile const& tile) {
    int const heads = params.shape.heads_q / params.shape.heads_kv;
    QuerySteps steps(tile, heads, kBlockM, kTileN);
    if (steps.left == 0) return;
    bool const ragged = params.lengths.given;
    auto const& rows = maps.entry_rows;
    auto load_rows = [&]<int kRows>(Int<kRows>, CUtensorMap const& map, auto& arrived, auto* target, int head,
                                    int row, MapPlace const& place) {
      load_panels<Traits::kHeadDim, Traits::kPanel, kRows>(map, arrived, target, kRows, 0, head,
                                                           place.shift + row, place.plane, place.bound);
    };
    int const first_key = first_own_key<Traits>(tile);
    auto load_keys = [&](CUtensorMap const& map, auto& arrived, auto* target, int entry_rows) {
      load_rows(Int<kBlockN>{}, map, arrived, target, head_of_keys<Traits>(params, tile), first_key,
                MapPlace::of_keys(ragged, tile, entry_rows));
    };
    // Q comes with what its rows have of their own.
    MapPlace const place_q = MapPlace::of_queries(ragged, tile, rows.q);
    MapPlace place_dout = MapPlace::of_queries(ragged, tile, rows.dout);
    if (!params.dout.data) place_dout.shift = RaggedPlace::kBound;  // past the end: it arrives as zeros
    auto load_queries = [&](CUtensorMap const& map, auto& arrived, auto* slot, MapPlace const& place) {
      int const row = steps.block * kBlockM;
      if constexpr (Traits::kInCluster) {
        load_panels_of_both<Traits::kHeadDim, Traits::kPanel, kBlockM>(
            map, arrived, slot, steps.head, place.shift + row, place.plane, place.bound);
      } else {
        load_rows(Int<kBlockM>{}, map, arrived, slot, steps.head, row, place);
      }
    };
    auto load_terms = [&](auto& arrived, uint4* slot) {
      MapPlace const place = MapPlace::of_queries(ragged, tile, rows.terms);
      arrived.expect_transaction(kBlockM * kTermBytes);
      cute::SM90_TMA_LOAD::copy(&maps.terms, reinterpret_cast<uint64_t*>(&arrived),
                                static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), slot, 0,
                                steps.head, place.shift + steps.block * kBlockM, place.plane, place.bound);
    };
    auto load_floats = [&](auto& arrived, float const* of_rows, float* slot) {
      constexpr int kBytes = kBlockM * sizeof(float);
      int64_t const block = tile.place(steps.head, steps.block);
      arrived.expect_transaction(kBytes);
      cute::SM90_BULK_COPY_G2S::copy(of_rows + block * kBlockM, reinterpret_cast<uint64_t*>(&arrived), slot,
                                     kBytes);
    };

    // Q and dO of the first step before V and K, whose memory the tile before leaves last, in this order; in
    // a cluster dV leaves through V's, which is given back when this tile has begun: a round later.
    for (bool first = true; steps.left > 0; steps.advance(), first = false) {
      auto& arrived = shared.ring_q.acquire(at);
      if constexpr (Traits::kAddsTerms) {
        load_terms(arrived, shared.of_queries.terms[at.slot]);
      } else {
        load_floats(arrived, params.workspace.lse, shared.of_queries.lse + at.slot * kBlockM);
        load_floats(arrived, params.workspace.delta, shared.of_queries.delta + at.slot * kBlockM);
      }
      load_queries(maps.q, arrived, shared.q + at.slot * Traits::kSlotElements, place_q);
      at.advance();
      load_queries(maps.dout, shared.ring_dout.acquire(at_dout),
                   shared.dout + at_dout.slot * Traits::kSlotElements, place_dout);
      at_dout.advance();
      if (!first) continue;
      if constexpr (Traits::kInCluster) {
        load_keys(maps.k, shared.ring_k.acquire(at_keys), shared.k, rows.k);
        load_keys(maps.v, shared.ring_v.acquire(RingPosition<1>{.phase = at_keys.phase ^ 1}), shared.v,
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
