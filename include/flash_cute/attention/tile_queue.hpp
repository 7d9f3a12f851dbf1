// How the thread blocks of a persistent kernel come to their tiles: shared out beforehand where the host
// knows them all, else claimed one by one. Tiles are what the loading thread goes through, and each thread
// that computes.
#pragma once

#include "flash_cute/attention/ragged.hpp"
#include "flash_cute/core/pipeline.hpp"

namespace flash_cute {

// In shared memory: the places of a block's tiles, from the thread that claims them to those that compute.
struct TileQueue {
  TmaRing<2> ring;
  int places[2];
};

// The loading thread's: a block starts with the tile of its own index, and claims another one from what is
// left for the whole grid when it begins to load one. So blocks with long tiles get fewer of them (sharing
// tiles out to and fro took up to 1.5 times as long where their number hardly differs from that of blocks).
struct ClaimedTiles {
  RaggedOrder const& order;
  TileQueue& queue;
  int place = blockIdx.x;
  RingPosition<2> at{};

  CUTE_DEVICE RaggedTile tile() const { return order(place); }
  CUTE_DEVICE void advance() { place = int(gridDim.x) + atomicAdd(&order.header->claimed, 1); }
  // Some time after advance(), so that nobody waits for it.
  CUTE_DEVICE void announce() {
    auto& announced = queue.ring.acquire(at);
    queue.places[at.slot] = place;
    announced.arrive();
    at.advance();
  }
  CUTE_DEVICE bool through() const { return place >= order.tiles(); }
};

// The computing threads'.
struct AnnouncedTiles {
  RaggedOrder const& order;
  TileQueue& queue;
  int place = blockIdx.x;
  RingPosition<2> at{};

  CUTE_DEVICE RaggedTile tile() const { return order(place); }
  CUTE_DEVICE void advance() {
    queue.ring.wait(at);
    place = queue.places[at.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) queue.ring.release(at);
    at.advance();
  }
  CUTE_DEVICE bool through() const { return place >= order.tiles(); }
};

CUTE_DEVICE TileStream tiles_to_load(TileOrder const& order, TileQueue&) {
  return {order, int(blockIdx.x), int(gridDim.x)};
}
CUTE_DEVICE ClaimedTiles tiles_to_load(RaggedOrder const& order, TileQueue& queue) { return {order, queue}; }

CUTE_DEVICE TileStream tiles_to_compute(TileOrder const& order, TileQueue&) {
  return {order, int(blockIdx.x), int(gridDim.x)};
}
CUTE_DEVICE AnnouncedTiles tiles_to_compute(RaggedOrder const& order, TileQueue& queue) {
  return {order, queue};
}

}  // namespace flash_cute
