// The Hopper family's loading warp: Q once a tile, K and V block by block, as far ahead as there are free
// stages.
#pragma once

#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/forward/sm90/traits.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

template <int kHeadDim, int kPanel, int kRows>
CUTE_DEVICE void load_at(CUtensorMap const& map, cutlass::arch::ClusterTransactionBarrier& arrived,
                         auto* target, int rows, int head, int row, DenseCoord const& place) {
  load_panels<kHeadDim, kPanel, kRows>(map, arrived, target, rows, 0, head, row, place.entry);
}
template <int kHeadDim, int kPanel, int kRows>
CUTE_DEVICE void load_at(CUtensorMap const& map, cutlass::arch::ClusterTransactionBarrier& arrived,
                         auto* target, int rows, int head, int row, VarlenCoord const& place) {
  load_panels<kHeadDim, kPanel, kRows>(map, arrived, target, rows, 0, head, place.shift + row, place.plane,
                                       VarlenCoord::kBound);
}

template <class Traits>
struct ForwardProducerSm90 {
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  ForwardMaps const& maps;
  PipelineState<Traits::kStagesQ> at_q{};
  PipelineState<Traits::kStages> at_k{}, at_v{};

  template <class Tiles>
  CUTE_DEVICE void run(Tiles tiles) {
    auto tile = tiles.first();
    for (int left = tiles.count();;) {
      auto const upcoming = load(tile, tiles);
      if (tiles.through(left)) return;
      tile = tiles.get(upcoming);
    }
  }

 private:
  template <class Tile, class Tiles>
  CUTE_DEVICE auto load(Tile const& tile, Tiles& tiles) {
    PackedRows const& rows = tiles.order.rows;
    BlockRange const visited =
        visited_blocks<Traits>(mask_of(params, tile), tile.m_begin, rows.tile_queries());
    auto const coord_q = tma_coord<TmaOperand::q>(tiles.order, tile);

    auto load_kv = [&](CUtensorMap const& map, auto const& place, auto& ring, auto& at, auto* stages,
                       int block) {
      load_at<Traits::kHeadDim, Traits::kPanel, Traits::kBlockN>(
          map, ring.acquire(at), stages + at.stage * Traits::kStageElements, Traits::kBlockN, tile.head_kv,
          block * Traits::kBlockN, place);
      at.advance();
    };
    auto load_k = [&](int block) {
      load_kv(maps.k, tma_coord<TmaOperand::k>(tiles.order, tile), shared.ring_k, at_k, shared.k, block);
    };
    auto load_v = [&](int block) {
      load_kv(maps.v, tma_coord<TmaOperand::v>(tiles.order, tile), shared.ring_v, at_v, shared.v, block);
    };

    // In the order in which the consumers ask: they compute scores one block ahead of P V.
    load_k(visited.end - 1);
    auto* const stage_q = shared.q + at_q.stage * Traits::kStageElementsQ;
    CUTE_UNROLL
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      load_at<Traits::kHeadDim, Traits::kPanel, Traits::kBlockM>(
          maps.q, shared.ring_q[consumer].acquire(at_q), stage_q + consumer * kWarpgroupRows * Traits::kPanel,
          rows.used(), tile.head, tile.m_begin + consumer * rows.queries, coord_q);
    }
    at_q.advance();
    auto const upcoming = tiles.next();
    int const claimed_at = smaller(visited.begin + kClaimedAhead, visited.end - 1);
    for (int block = visited.end - 1; block >= visited.begin; --block) {
      if (block > visited.begin) load_k(block - 1);
      if (block == claimed_at) tiles.claim();
      load_v(block);
    }
    return upcoming;
  }
};

}  // namespace flash_cute
