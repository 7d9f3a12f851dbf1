// How the thread blocks of a persistent kernel come to their tiles: shared out beforehand where the host
// knows them all (TileStream), else claimed one by one, unless lengths turn out to be as the host expected.
// In both cases a thread goes through them by first(), and next(), through() and get() for each: next() is
// asked when a tile begins, and gives what get() makes the upcoming tile of, once through(left) has said that
// there is one; left is count() at first.
#pragma once

#include "flash_cute/attention/sequence_list.hpp"
#include "flash_cute/core/pipeline.hpp"

namespace flash_cute {

// In shared memory: a block's next tiles, from the thread that claims them to those that load and compute.
struct TileQueue {
  SequenceList list;
  cutlass::arch::ClusterBarrier wanted;
  TmaRing<2> ring;
  RaggedTile tiles[2];
  bool volatile computes;  // until the block's last tile is known
  int volatile round;      // of tiles that are shared out; the thread that counts has no register left

  // As TmaRing::init; the loading thread is one more that reads.
  CUTE_DEVICE void init(int consumers) {
    wanted.init(1);
    ring.init(consumers + 1);
    computes = true;
  }
};

struct Unannounced {};  // a tile that nobody knows yet

// By one thread, of a warp that has nothing else to do: claims a tile from what is left for the whole grid
// whenever the loading thread wants one. That is when it has nearly loaded the one before, so blocks with
// long tiles get fewer of them: claimed when the one before begins, 8k causal takes 8% longer in a model of
// the schedule. Two claimed at once lose up to 7%, claims 8 blocks before the end up to 1% (both measured).
// Tiles that are shared out it names as far ahead as there is room.
constexpr int kClaimedAhead = 4;  // blocks of keys before the end
template <int kHeadDim>
CUTE_DEVICE void claim_tiles(ForwardParams const& params, RaggedOrder const& order, TileQueue& queue) {
  RingPosition<2> at{};
  queue.round = 0;
  while (true) {
    queue.round = queue.round + 1;
    bool const shares = ExpectedLengths::pay(kHeadDim) && queue.list.alike;
    if (!shares) queue.wanted.wait(at.slot);  // which is the parity of the round
    int const index = shares          ? shared_out(blockIdx.x, order.expected.blocks, queue.round)
                      : order.claimed ? int(gridDim.x) + atomicAdd(order.claimed, 1)
                                      : kThrough;
    bool const is_tile = unsigned(index) < unsigned(queue.list.tiles(order));
    auto& announced = queue.ring.acquire(at);
    if (is_tile) queue.tiles[at.slot] = queue.list.tile(params, order, index);
    if (!is_tile) queue.tiles[at.slot].m_begin = kThrough;
    announced.arrive();
    at.advance();
    if (!is_tile) break;
  }
  queue.computes = false;
}

struct QueuedTiles {
  RaggedOrder const& order;
  TileQueue& queue;
  unsigned lanes;  // of this warp, that go through them together
  RaggedTile tile;
  RingPosition<2> at{};

  // A block's first one is that of its own index.
  CUTE_DEVICE RaggedTile const& first() const { return tile; }
  CUTE_DEVICE static int count() { return 0; }
  CUTE_DEVICE static Unannounced next() { return {}; }
  CUTE_DEVICE bool through(int) {
    queue.ring.wait(at);
    tile = queue.tiles[at.slot];
    __syncwarp(lanes);
    if (threadIdx.x % 32 == __ffs(lanes) - 1) queue.ring.release(at);
    at.advance();
    return tile.m_begin == kThrough;
  }
  CUTE_DEVICE RaggedTile const& get(Unannounced) const { return tile; }
  CUTE_DEVICE void claim() {
    if (!queue.list.alike) queue.wanted.arrive();
  }
};

CUTE_DEVICE TileStream tiles_of(ForwardParams const&, TileOrder const& order, TileQueue&, unsigned) {
  return {order, int(blockIdx.x), int(gridDim.x)};
}
CUTE_DEVICE QueuedTiles tiles_of(ForwardParams const&, RaggedOrder const& order, TileQueue& queue,
                                 unsigned lanes) {
  return {order, queue, lanes, queue.list.first_tile(order)};
}

}  // namespace flash_cute
