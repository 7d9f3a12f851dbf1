// How the thread blocks of a persistent kernel come to their tiles: shared out beforehand where the host
// knows them all (TileStream), else claimed one by one. In both cases a thread goes through them by first(),
// and next(), through() and get() for each: next() is asked when a tile begins, and gives what get() makes
// the upcoming tile of, once through(left) has said that there is one; left is count() at first.
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

struct Unannounced {};  // a tile that nobody knows yet

// What both sides share.
struct QueuedTiles {
  RaggedOrder const& order;
  TileQueue& queue;
  RaggedTile tile = order(blockIdx.x);  // a block's first one is that of its own index
  RingPosition<2> at{};

  CUTE_DEVICE static int count() { return 0; }
  CUTE_DEVICE RaggedTile const& first() const { return tile; }
  CUTE_DEVICE static Unannounced next() { return {}; }
  CUTE_DEVICE RaggedTile const& get(Unannounced) const { return tile; }
};

// The loading thread's: it claims a tile from what is left for the whole grid when it has nearly loaded the
// one before, so blocks with long tiles get fewer of them: claimed when the one before begins, 8k causal
// takes 8% longer in a model of the schedule. Two claimed at once lose up to 7%, claims 8 blocks before the
// end up to 1% (both measured).
struct ClaimedTiles : QueuedTiles {
  static constexpr int kAhead = 4;  // blocks of keys before the end
  int place = 0;

  CUTE_DEVICE void claim() { place = int(gridDim.x) + atomicAdd(&order.header->claimed, 1); }
  CUTE_DEVICE void announce() {
    bool const is_tile = place < order.tiles();
    if (is_tile) tile = order(place);
    if (!is_tile) tile.m_begin = kThrough;
    auto& announced = queue.ring.acquire(at);
    queue.tiles[at.slot] = tile;
    announced.arrive();
    at.advance();
  }
  CUTE_DEVICE bool through(int) const { return tile.m_begin == kThrough; }
};

// The computing threads'.
struct AnnouncedTiles : QueuedTiles {
  CUTE_DEVICE bool through(int) {
    queue.ring.wait(at);
    tile = queue.tiles[at.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) queue.ring.release(at);
    at.advance();
    return tile.m_begin == kThrough;
  }
};

CUTE_DEVICE TileStream tiles_to_load(TileOrder const& order, TileQueue&) {
  return {order, int(blockIdx.x), int(gridDim.x)};
}
CUTE_DEVICE ClaimedTiles tiles_to_load(RaggedOrder const& order, TileQueue& queue) {
  return {{order, queue}};
}

CUTE_DEVICE TileStream tiles_to_compute(TileOrder const& order, TileQueue&) {
  return {order, int(blockIdx.x), int(gridDim.x)};
}
CUTE_DEVICE AnnouncedTiles tiles_to_compute(RaggedOrder const& order, TileQueue& queue) {
  return {{order, queue}};
}

}  // namespace flash_cute
