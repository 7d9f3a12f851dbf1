// How the thread blocks of a persistent kernel come to their tiles: shared out beforehand where the host
// knows them all, else claimed one by one. Tiles are what the loading thread goes through, and each thread
// that computes.
#pragma once

#include "flash_cute/attention/ragged.hpp"
#include "flash_cute/core/pipeline.hpp"

namespace flash_cute {

// In shared memory: a block's next tiles, from the thread that claims them to those that compute.
struct TileQueue {
  TmaRing<2> ring;
  RaggedTile tiles[2];
};

constexpr int kThrough = -1;  // the m_begin of what comes after a block's last tile

// The loading thread's: a block starts with the tile of its own index, and claims another one from what is
// left for the whole grid when it has nearly loaded one. So blocks with long tiles get fewer of them (sharing
// tiles out to and fro took up to 1.5 times as long where their number hardly differs from that of blocks).
struct ClaimedTiles {
  RaggedOrder const& order;
  TileQueue& queue;
  int place = blockIdx.x;
  RaggedTile current = order(place);
  RingPosition<2> at{};

  CUTE_DEVICE RaggedTile const& tile() const { return current; }
  CUTE_DEVICE void advance() { place = int(gridDim.x) + atomicAdd(&order.header->claimed, 1); }
  // What advance() has found, when the loads that can't wait are on their way.
  CUTE_DEVICE void announce() {
    bool const is_tile = place < order.tiles();
    if (is_tile) current = order(place);
    if (!is_tile) current.m_begin = kThrough;
    auto& announced = queue.ring.acquire(at);
    queue.tiles[at.slot] = current;
    announced.arrive();
    at.advance();
  }
  CUTE_DEVICE bool through() const { return current.m_begin == kThrough; }
};

// The computing threads'.
struct AnnouncedTiles {
  RaggedOrder const& order;
  TileQueue& queue;
  RaggedTile current = order(blockIdx.x);
  RingPosition<2> at{};

  CUTE_DEVICE RaggedTile const& tile() const { return current; }
  CUTE_DEVICE void advance() {
    queue.ring.wait(at);
    current = queue.tiles[at.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) queue.ring.release(at);
    at.advance();
  }
  CUTE_DEVICE bool through() const { return current.m_begin == kThrough; }
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
