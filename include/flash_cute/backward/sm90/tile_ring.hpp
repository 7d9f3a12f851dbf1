// The ring of tiles: the producer publishes each tile in shared memory, and the other roles walk over them.
// Also which keys and which KV head of a tile a thread block works on.
#pragma once

#include "flash_cute/backward/sm90/traits.hpp"
#include "flash_cute/core/sm90/cluster.hpp"

namespace flash_cute {

// The first key of this thread block, which in a cluster has one half of the tile's keys.
template <class Traits>
CUTE_DEVICE int first_own_key(KvTile const& tile) {
  return tile.n_begin + (Traits::kInCluster ? read_cluster_rank() * Traits::kBlockN : 0);
}

// The head of K and V. Elsewhere head_kv counts the splits of a KV head's query heads as heads of their own.
template <class Traits>
CUTE_DEVICE int head_of_keys(BackwardParams const& params, KvTile const& tile) {
  return Traits::kPartsOfGroups ? tile.head_kv / params.gqa_parts : tile.head_kv;
}

// Calls visit(tile) for each tile that the producer publishes, in one thread.
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
