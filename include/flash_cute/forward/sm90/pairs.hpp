// The warps of the Hopper family's forward that find out which pairs of a block are seen and kept, as far
// ahead of the consumers as there are stages.
#pragma once

#include "flash_cute/forward/sm90/traits.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

template <class Traits>
struct ForwardPairsSm90 {
  static constexpr int kWarps = Traits::kPairWarps, kThreads = 32 * kWarps, kBlockN = Traits::kBlockN,
                       kRows = Traits::kBlockM / kThreads;  // of a thread
  static_assert(kRows * kThreads == Traits::kBlockM);
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  int thread;  // of these warps
  PipelineState<Traits::PairTiles::kWordStages> at{};

  template <class Tiles>
  CUTE_DEVICE void run(Tiles tiles) {
    if constexpr (Traits::kGeneral) {
      if (params.scores.dropout.drops()) {
        run<true>(tiles);
        return;
      }
    }
    run<false>(tiles);
  }

 private:
  template <bool kDrops, class Tiles>
  CUTE_DEVICE void run(Tiles tiles) {
    auto tile = tiles.first();
    for (int remaining = tiles.count();;) {
      auto const upcoming = tiles.next();
      find<kDrops>(tiles.source, tile);
      if (tiles.done(remaining)) return;
      tile = tiles.get(upcoming);
    }
  }

  template <bool kDrops, class Source, class Tile>
  CUTE_DEVICE void find(Source const& source, Tile const& tile) {
    auto& pairs = shared.pairs;
    PackGqa const& rows = source.rows();
    ScorePlace const place = source.place(tile);
    TableMask const mask = source.mask(tile);
    auto query_of_row = [&](int row) {
      return tile.m_begin + row / kWarpgroupRows * rows.queries + rows.query(row % kWarpgroupRows);
    };
    [[maybe_unused]] auto const generator = [&] {
      if constexpr (kDrops) {
        return DropoutWords(params.scores.dropout, place.sequence, params.shape.heads_q, place.head);
      } else {
        return false;
      }
    }();
    SeenKeys<kBlockN> seen[kRows];
    auto blocks = kv_blocks_of<kBlockN>(source, tile);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      seen[i].begin(mask, query_of_row(i * kThreads + thread));
      seen[i].load(mask, blocks.block * kBlockN);
    }
    do {
      int const n_begin = blocks.block * kBlockN;
      bool const is_partial = !blocks.is_full(FullInTable{});
      uint32_t bits[kRows][kBlockN / 32];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        if (is_partial) seen[i].find(mask, n_begin, bits[i]);
        if (blocks.remaining() > 0) seen[i].load(mask, blocks.next() * kBlockN);
      }
      if (!is_partial && !kDrops) continue;
      auto& full = pairs.ring_words.acquire(at);
      auto& words = pairs.words[at.stage];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        if (is_partial) words.seen.store_query(i * kThreads + thread, bits[i]);
      }
      if constexpr (kDrops) {
        words.kept.draw_of_queries(generator, place.query_begin + tile.m_begin, place.key_begin + n_begin,
                                   thread / 32, kWarps);
      }
      __syncwarp();
      if (thread % 32 == 0) full.arrive();
      at.advance();
    } while (blocks.advance());
  }
};

}  // namespace flash_cute
