// The exchange of dS between the two thread blocks of a cluster, so that each can compute its columns of dQ
// from all keys of the tile. One thread of each block does it.
#pragma once

#include "flash_cute/backward/mask.hpp"
#include "flash_cute/backward/sm90/tensor_maps.hpp"
#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/core/sm90/cluster.hpp"
#include "flash_cute/core/sm90/tma.hpp"

namespace flash_cute {

// Once a tile it loads this block's dQ columns of the peer's K; in each step it sends dS to the peer and
// tells the peer when the peer's dS has arrived.
template <class Traits>
struct DsExchange {
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  BackwardMaps const& maps;
  PipelineState<1> at_begun{.phase = 1};  // dK is stored through this memory until the next tile begins
  PipelineState<Traits::kStages> at{};

  CUTE_DEVICE void run() {
    for_each_tile(shared, [&](KvTile const& tile) {
      int left = steps_of<Traits>(params, tile).left;
      if (left > 0) load_keys(tile);
      for (; left > 0; --left) exchange();
    });
  }

 private:
  CUTE_DEVICE void load_keys(KvTile const& tile) {
    int const rank = read_cluster_rank(), first_key = tile.n_begin + (rank ^ 1) * Traits::kBlockN;
    TmaCoord const coord = TmaCoord::of_keys(params.lengths.given, tile, maps.entry_rows.k);
    load_panels<Traits::kCtaDqColumns, Traits::kPanel, Traits::kBlockN>(
        maps.k, shared.ring_peer_k.acquire(at_begun), shared.peer_k, Traits::kBlockN,
        rank * Traits::kCtaDqColumns, head_of_keys<Traits>(params, tile), coord.shift + first_key,
        coord.plane, coord.bound);
    at_begun.advance();
  }

  CUTE_DEVICE void exchange() {
    constexpr int kBytes = Traits::kDsStageElements * sizeof(typename Traits::Element);
    auto* const own_ds = shared.ds + Traits::kCluster * at.stage * Traits::kDsStageElements;
    auto& arrived = shared.peer_ds[at.stage];
    shared.ring_ds.wait(at);
    // The stage for the peer's dS is free in both blocks: this block's dS is written only when it is.
    arrived.arrive_and_expect_tx(kBytes);
    send_to_peer(own_ds + Traits::kDsStageElements, own_ds, kBytes, arrived);
    arrived.wait(at.phase);
    arrive_at_peer(shared.ds_read[at.stage]);
    at.advance();
  }
};

}  // namespace flash_cute
