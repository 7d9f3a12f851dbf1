// The producer of the Hopper family's backward, one thread: it gets tiles from the dynamic scheduler,
// publishes them to the other roles, and loads K and V of each tile and Q and dO of each step by TMA.
#pragma once

#include "flash_cute/backward/gqa_reduce.hpp"
#include "flash_cute/backward/mask.hpp"
#include "flash_cute/backward/sm90/dq_convert.hpp"
#include "flash_cute/backward/sm90/tensor_maps.hpp"
#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/core/sm90/tma.hpp"

namespace flash_cute {

template <class Traits>
struct BackwardProducerSm90 {
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kTileN = Traits::kTileN;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  KvTileScheduler const& order;
  BackwardMaps const& maps;
  PipelineState<1> at_keys{};
  PipelineState<Traits::kStages> at{};
  PipelineState<Traits::kStagesDO> at_dout{};
  PipelineState<Traits::PairTiles::kBiasStages> at_bias{};
  PipelineState<2> at_tiles{};
  PipelineState<1> at_index{};

  CUTE_DEVICE void run() {
    // Tiles are taken in the launch order. So ordered additions to dQ, which wait for those of earlier tiles,
    // wait for tiles that are running. The next tile is taken when this one is loaded, as an earlier taken
    // tile would wait here while another thread block could begin it (3% of 16k causal).
    for (int index = next_index(); index < order.count(params); index = next_index()) {
      KvTile const tile = order(params, index);
      if (!has_rows(tile.n_begin, tile.sequence.mask.seqlen_k)) continue;
      publish(tile);
      load(tile);
    }
    publish({.n_begin = kNoTile});
  }

 private:
  // In a cluster the thread block of rank 0 takes a tile and sends its index to the peer.
  CUTE_DEVICE int next_index() {
    if constexpr (!Traits::kInCluster) return atomicAdd(params.workspace.tile_counter, 1);
    auto& arrived = shared.ring_tile_index.full[0];
    int index;
    if (read_cluster_rank() == 0) {
      index = atomicAdd(params.workspace.tile_counter, 1);
      shared.ring_tile_index.acquire(at_index);
      send_to_peer(shared.tile_index, index, arrived);
    } else {
      arrived.arrive_and_expect_tx(sizeof(int));
      arrived.wait(at_index.phase);
      index = *static_cast<int volatile*>(&shared.tile_index);
      // The condition always holds; it orders the arrival after the read.
      if (index >= 0) arrive_at_peer(shared.ring_tile_index.empty[0]);
    }
    at_index.advance();
    return index;
  }

  CUTE_DEVICE void publish(KvTile const& tile) {
    auto& full = shared.ring_tiles.acquire(at_tiles);
    shared.tiles[at_tiles.stage] = tile;
    if constexpr (Traits::kPartsOfGroups) {
      shared.sum_indices[at_tiles.stage] = GqaSums<Traits>::sum_index(params, tile);
    }
    full.arrive();
    at_tiles.advance();
  }

  CUTE_DEVICE void load(KvTile const& tile) {
    auto steps = steps_of<Traits>(params, tile);
    if (steps.left == 0) return;
    constexpr Int<Traits::kHeadDim> kWidth{};
    constexpr Int<Traits::kHeadDimV> kWidthV{};
    bool const varlen = params.lengths.given;
    auto const& rows = maps.entry_rows;
    auto load_rows = [&]<int kRows, int kColumns>(Int<kRows>, Int<kColumns>, CUtensorMap const& map,
                                                  auto& arrived, auto* target, int head, int row,
                                                  TmaCoord const& coord) {
      load_panels<kColumns, Traits::kPanel, kRows>(map, arrived, target, kRows, 0, head, coord.shift + row,
                                                   coord.plane, coord.bound);
    };
    int const first_key = first_own_key<Traits>(tile);
    auto load_keys = [&](auto columns, CUtensorMap const& map, auto& arrived, auto* target, int entry_rows) {
      load_rows(Int<kBlockN>{}, columns, map, arrived, target, head_of_keys<Traits>(params, tile), first_key,
                TmaCoord::of_keys(varlen, tile, entry_rows));
    };
    TmaCoord const coord_q = TmaCoord::of_queries(varlen, tile, rows.q);
    TmaCoord coord_dout = TmaCoord::of_queries(varlen, tile, rows.dout);
    if (!params.dout.data) coord_dout.shift = RaggedCoord::kBound;  // past the end, so zeros arrive
    auto load_queries = [&]<int kColumns>(Int<kColumns> columns, CUtensorMap const& map, auto& arrived,
                                          auto* target, TmaCoord const& coord) {
      int const row = steps.block * kBlockM;
      if constexpr (Traits::kInCluster) {
        load_panels_of_both<kColumns, Traits::kPanel, kBlockM>(map, arrived, target, steps.head,
                                                               coord.shift + row, coord.plane, coord.bound);
      } else {
        load_rows(Int<kBlockM>{}, columns, map, arrived, target, steps.head, row, coord);
      }
    };
    auto load_lse_delta = [&](auto& arrived, uint4* target) {
      TmaCoord const coord = TmaCoord::of_queries(varlen, tile, rows.terms);
      arrived.expect_transaction(kBlockM * kTermBytes);
      cute::SM90_TMA_LOAD::copy(&maps.terms, reinterpret_cast<uint64_t*>(&arrived),
                                static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), target, 0,
                                steps.head, coord.shift + steps.block * kBlockM, coord.plane, coord.bound);
    };
    auto load_floats = [&](auto& arrived, float const* of_rows, float* target) {
      constexpr int kBytes = kBlockM * sizeof(float);
      int64_t const block_index = tile.block_index(steps.head, steps.block);
      arrived.expect_transaction(kBytes);
      cute::SM90_BULK_COPY_G2S::copy(of_rows + block_index * kBlockM, reinterpret_cast<uint64_t*>(&arrived),
                                     target, kBytes);
    };

    ScorePlace const place = BackwardMask<Traits::kMasking>::template of_tile<Traits>(params, tile).place;
    int const bias_entry =
        Traits::kBiasStages > 0 ? place.sequence / params.scores.bias.sequences_of_entry : 0;
    auto load_bias = [&] {
      if constexpr (Traits::kBiasStages > 0) {
        BiasParams const& bias = params.scores.bias;
        if (!bias.is_tiled) return;
        auto& pairs = shared.pairs;
        load_panels<kBlockN, 64, kBlockM>(maps.bias, pairs.ring_bias.acquire(at_bias),
                                          pairs.bias + at_bias.stage * Traits::PairTiles::kStageElements,
                                          kBlockM, place.key_begin + first_key,
                                          bias.head_stride == 0 ? 0 : steps.head,
                                          place.query_begin + steps.block * kBlockM, bias_entry);
        at_bias.advance();
      }
    };

    // The first step's Q and dO are loaded before V and K, as the tile before releases V and K last, in this
    // order. In a cluster dV is stored through V's memory, and V is released when the consumers have begun
    // the next tile: one phase later than K.
    for (bool first = true; steps.left > 0; steps.advance(), first = false) {
      auto& arrived = shared.ring_q.acquire(at);
      if constexpr (Traits::kLseDeltaMma) {
        load_lse_delta(arrived, shared.lse_delta.terms[at.stage]);
      } else {
        load_floats(arrived, params.workspace.lse_delta.lse, shared.lse_delta.lse + at.stage * kBlockM);
        load_floats(arrived, params.workspace.lse_delta.neg_delta,
                    shared.lse_delta.neg_delta + at.stage * kBlockM);
      }
      load_bias();
      load_queries(kWidth, maps.q, arrived, shared.q + at.stage * Traits::kStageElementsQ, coord_q);
      at.advance();
      load_queries(kWidthV, maps.dout, shared.ring_dout.acquire(at_dout),
                   shared.dout + at_dout.stage * Traits::kStageElementsDO, coord_dout);
      at_dout.advance();
      if (!first) continue;
      if constexpr (Traits::kInCluster) {
        load_keys(kWidth, maps.k, shared.ring_k.acquire(at_keys), shared.k, rows.k);
        load_keys(kWidthV, maps.v, shared.ring_v.acquire(PipelineState<1>{.phase = at_keys.phase ^ 1}),
                  shared.v, rows.v);
      } else {
        load_keys(kWidthV, maps.v, shared.ring_v.acquire(at_keys), shared.v, rows.v);
        load_keys(kWidth, maps.k, shared.ring_k.acquire(at_keys), shared.k, rows.k);
      }
    }
    at_keys.advance();
  }
};

}  // namespace flash_cute
