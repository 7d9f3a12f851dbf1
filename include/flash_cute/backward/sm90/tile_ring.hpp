// A thread block's tiles: how its roles come to them, and which of their keys are its own.
#pragma once

#include "flash_cute/backward/sm90/traits.hpp"
#include "flash_cute/core/sm90/cluster.hpp"

namespace flash_cute {

// The first key of this thread block, which in a cluster has one half of a tile's.
template <class Traits>
CUTE_DEVICE int first_own_key(KvTile const& tile) {
  return tile.n_begin + (Traits::kInCluster ? read_cluster_rank() * Traits::kBlockN : 0);
}

// Of K and V. What counts as one elsewhere may be a part of its query heads.
template <class Traits>
CUTE_DEVICE int head_of_keys(BackwardParams const& params, KvTile const& tile) {
  return Traits::kSplitsGroups ? tile.head_kv / params.gqa_splits : tile.head_kv;
}

// By one thread: the tiles that the loading thread announces, one after the other.
template <class SharedStorage, class Visit>
CUTE_DEVICE void for_each_tile(SharedStorage& shared, Visit&& visit) {
  PipelineState<2> at{};
  while (true) {
    shared.ring_tiles.wait(at);
    KvTile const& tile = shared.tiles[at.stage];
    if (tile.n_begin == kNoTile) return;
    visit(tile);
    shared.ring_tiles.release(at);
    at.advance();
  }
}

}  // namespace flash_cute
