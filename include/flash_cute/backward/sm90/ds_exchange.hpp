// What the two thread blocks of a cluster need from each other for dQ, by one thread of each.
#pragma once

#include "flash_cute/backward/sm90/tensor_maps.hpp"
#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"
#include "flash_cute/core/sm90/cluster.hpp"
#include "flash_cute/core/sm90/tma.hpp"

namespace flash_cute {

// Loads the own columns of the other block's K once a tile, sends each step's dS to the other block, and
// tells it when its dS has come.
template <class Traits>
struct DsExchange {
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  BackwardMaps const& maps;
  PipelineState<1> at_begun{.phase = 1};  // dK leaves through this memory, until the next tile has begun
  PipelineState<Traits::kStages> at{};

  CUTE_DEVICE void run() {
    for_each_tile(shared, [&](KvTile const& tile) {
      int const heads = params.shape.heads_q / params.shape.heads_kv;
      int left = QBlockIterator(tile, heads, Traits::kBlockM, Traits::kTileN).left;
      if (left > 0) load_keys(tile);
      for (; left > 0; --left) exchange();
    });
  }

 private:
  CUTE_DEVICE void load_keys(KvTile const& tile) {
    int const rank = read_cluster_rank(), first_key = tile.n_begin + (rank ^ 1) * Traits::kBlockN;
    TmaCoord const place = TmaCoord::of_keys(params.lengths.given, tile, maps.entry_rows.k);
    load_panels<Traits::kOwnColumns, Traits::kPanel, Traits::kBlockN>(
        maps.k, shared.ring_peer_k.acquire(at_begun), shared.peer_k, Traits::kBlockN,
        rank * Traits::kOwnColumns, head_of_keys<Traits>(params, tile), place.shift + first_key, place.plane,
        place.bound);
    at_begun.advance();
  }

  CUTE_DEVICE void exchange() {
    constexpr int kBytes = Traits::kDsStageElements * sizeof(typename Traits::Element);
    auto* const own_ds = shared.ds + Traits::kCluster * at.stage * Traits::kDsStageElements;
    auto& arrived = shared.peer_ds[at.stage];
    shared.ring_ds.wait(at);
    // Both blocks are through with what was there before, or this one's dS would not be here.
    arrived.arrive_and_expect_tx(kBytes);
    send_to_peer(own_ds + Traits::kDsStageElements, own_ds, kBytes, arrived);
    arrived.wait(at.phase);
    arrive_at_peer(shared.ds_read[at.stage]);
    at.advance();
  }
};

}  // namespace flash_cute
