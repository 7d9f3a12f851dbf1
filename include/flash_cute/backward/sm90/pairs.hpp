// The warps of the Hopper family's backward that find out which pairs of a step are seen and kept, as far
// ahead of the consumers as there are stages.
#pragma once

#include "flash_cute/backward/sm90/traits.hpp"

namespace flash_cute {

template <class Traits>
struct BackwardPairsSm90 {
  static constexpr int kLanes = 32, kQueries = Traits::kBlockM;
  using Mask = BackwardMask<Traits::kMasking>;
  using Words = typename Traits::PairTiles::Words;
  static constexpr int kKeys = Words::kKeysOfWarp, kGroups = Traits::kBlockN / kKeys / Traits::kPairWarps;
  static_assert(Traits::kBlockN == kGroups * kKeys * Traits::kPairWarps && kQueries == 2 * kLanes);
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  int warp;  // of these: it has kGroups times kKeys of the tile's keys
  PipelineState<2> at_tiles{};
  PipelineState<Traits::PairTiles::kWordStages> at{};

  CUTE_DEVICE void run() {
    while (true) {
      shared.ring_tiles.wait(at_tiles);
      KvTile const tile = shared.tiles[at_tiles.stage];
      __syncwarp();
      if (threadIdx.x % kLanes == 0) shared.ring_tiles.release(at_tiles);
      at_tiles.advance();
      if (tile.n_begin == kNoTile) return;
      if constexpr (Traits::kGeneral) {
        if (params.scores.dropout.drops()) {
          find<true>(tile);
          continue;
        }
      }
      find<false>(tile);
    }
  }

 private:
  // What a mask says of a lane's two queries of a step.
  struct Loaded {
    KeyRange first[2];          // range
    uint32_t bits[2][kGroups];  // of the warp's keys
  };

  template <bool kDrops>
  CUTE_DEVICE void find(KvTile const& tile) {
    int const lane = threadIdx.x % kLanes, own_key = warp * kGroups * kKeys,
              first_key = tile.n_begin + own_key;
    ScorePlace const place = Mask::template of_tile<Traits>(params, tile).place;
    auto mask_of = [&](auto const& steps) { return Mask::template mask<Traits>(params, tile, steps.head); };
    auto load = [&](auto const& steps, Loaded& loaded) {
      TableMask const mask = mask_of(steps);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const query = steps.block * kQueries + i * kLanes + lane;
        loaded.first[i] = mask.range(query, 0);
        CUTE_UNROLL
        for (int group = 0; group < kGroups; ++group)
          loaded.bits[i][group] = mask.bits ? mask.bits_of(query)[first_key / 32 + group] : ~0u;
      }
    };
    auto steps = steps_of<Traits>(params, tile);
    Loaded loaded;
    load(steps, loaded);
    while (steps.left > 0) {
      auto const step = steps;
      bool const is_partial = !step.is_full(FullInTable{});
      uint32_t seen[2][kGroups];
      if (is_partial) find_seen(mask_of(step), step.block * kQueries + lane, first_key, loaded, seen);
      steps.advance();
      if (steps.left > 0) load(steps, loaded);
      if (!is_partial && !kDrops) continue;
      auto& full = shared.pairs.ring_words.acquire(at);
      auto& words = shared.pairs.words[at.stage];
      if (is_partial) store_seen(words.seen, own_key, seen);
      if constexpr (kDrops) {
        DropoutWords const generator(params.scores.dropout, place.sequence, params.shape.heads_q, step.head);
        constexpr int kAtOnce = smaller(2, kGroups);
#pragma unroll 1
        for (int group = 0; group < kGroups; group += kAtOnce) {
          uint32_t kept[2 * kAtOnce]{};
          generator.words_at(place.query_begin + step.block * kQueries + Words::query_of(lane), 0,
                             place.key_begin + first_key + group * kKeys + Words::key_of(lane, 0),
                             Words::key_of(lane, 1) - Words::key_of(lane, 0), kept);
          CUTE_UNROLL
          for (int i = 0; i < kAtOnce; ++i)
            words.kept.store_of_keys(own_key + (group + i) * kKeys, {kept[2 * i], kept[2 * i + 1]});
        }
      }
      __syncwarp();
      if (lane == 0) full.arrive();
      at.advance();
    }
  }

  // seen: a bit for each of the warp's keys, of queries 32 apart.
  CUTE_DEVICE static void find_seen(TableMask const& mask, int query, int first_key, Loaded const& loaded,
                                    uint32_t (&seen)[2][kGroups]) {
    auto for_each = [&](auto visit) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int group = 0; group < kGroups; ++group) visit(i, group, seen[i][group]);
      }
    };
    auto between = [&](KeyRange range, int group) {
      int const first = first_key + group * kKeys;
      auto below = [](int limit) { return ~__funnelshift_lc(0u, ~0u, larger(0, limit)); };
      return below(range.end - first) & ~below(range.begin - first);
    };
    for_each([&](int i, int group, uint32_t& bits) { bits = between(loaded.first[i], group); });
#pragma unroll 1
    for (int range = 1; range < mask.count; ++range) {
      KeyRange const of_queries[2] = {mask.range(query, range), mask.range(query + kLanes, range)};
      for_each([&](int i, int group, uint32_t& bits) { bits |= between(of_queries[i], group); });
    }
    for_each([&](int i, int group, uint32_t& bits) { bits &= loaded.bits[i][group]; });
  }

  // Bits of queries become words of 4 queries x 8 keys through shared memory.
  CUTE_DEVICE void store_seen(Words& words, int own_key, uint32_t const (&seen)[2][kGroups]) {
    int const lane = threadIdx.x % kLanes;
    auto* const bytes = shared.pairs.bytes + own_key / 8;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int octet = 0; octet < kGroups * kKeys / 8; ++octet)
        bytes[octet][i * kLanes + lane] = uint8_t(seen[i][octet / 4] >> octet % 4 * 8);
    }
    __syncwarp();
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      uint32_t of_lane[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const octet = (group * kKeys + Words::key_of(lane, i)) / 8;
        of_lane[i] = *reinterpret_cast<uint32_t const*>(&bytes[octet][Words::query_of(lane)]);
      }
      words.store_of_keys(own_key + group * kKeys, of_lane);
    }
  }
};

}  // namespace flash_cute
