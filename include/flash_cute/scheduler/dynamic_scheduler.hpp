// How the thread blocks of a persistent kernel come to their tiles: shared out beforehand (TileStream), or
// claimed one by one (QueuedTiles).
// In both cases a thread goes through them by first(), and next(), through() and get() for each: next() is
// asked when a tile begins, and gives what get() makes the upcoming tile of, once through(left) has said that
// there is one; left is count() at first.
#pragma once

#include "flash_cute/core/sm90/pipeline.hpp"
#include "flash_cute/core/special_registers.hpp"
#include "flash_cute/scheduler/varlen_list.hpp"

namespace flash_cute {

// TileOrder, of tiles that are claimed. Those of a VarlenOrder are, too.
struct ClaimedOrder : TileOrder {
  int* claimed;  // tiles, beside each block's first
};

template <class Order>
constexpr bool kIsClaimed = requires(Order order) { order.claimed; };

// In shared memory: a block's next tiles, from the thread that claims them to those that load and compute.
struct TileQueue {
  VarlenList list;  // where sequences differ
  cutlass::arch::ClusterBarrier wanted;
  TmaRing<2> ring;
  union {
    VarlenTile varlen;
    TileCoord uniform;
  } tiles[2];  // upcoming ones

  // As TmaRing::init; the loading thread is one more that reads.
  CUTE_DEVICE void init(int consumers) {
    wanted.init(1);
    ring.init(consumers + 1);
  }

  // Of a list, or of an order that needs none.
  CUTE_DEVICE VarlenTile& tile_of_stage(VarlenOrder const&, int i) { return tiles[i].varlen; }
  CUTE_DEVICE TileCoord& tile_of_stage(ClaimedOrder const&, int i) { return tiles[i].uniform; }
  CUTE_DEVICE int count(VarlenOrder const& order) const { return list.tiles(order); }
  CUTE_DEVICE static int count(ClaimedOrder const& order) { return order.tiles(); }
  CUTE_DEVICE VarlenTile tile(ForwardParams const& params, VarlenOrder const& order, int index) const {
    return list.tile(params, order, index);
  }
  CUTE_DEVICE static TileCoord tile(ForwardParams const&, ClaimedOrder const& order, int index) {
    return order(index);
  }
  CUTE_DEVICE VarlenTile first_tile(VarlenOrder const& order) const { return list.first_tile(order); }
  CUTE_DEVICE static TileCoord first_tile(ClaimedOrder const& order) { return order(blockIdx.x); }
};

struct Unannounced {};  // a tile that nobody knows yet

// By one thread, of a warp that has nothing else to do: claims a tile from what is left for the whole grid
// whenever the loading thread wants one. That is when it has nearly loaded the one before, so blocks with
// long tiles get fewer of them: claimed when the one before begins, 8k causal takes 8% longer in a model of
// the schedule. Two claimed at once lose up to 7%, claims 8 blocks before the end up to 1% (both measured).
constexpr int kClaimedAhead = 4;  // blocks of keys before the end
template <class Order>
CUTE_DEVICE void claim_tiles(ForwardParams const& params, Order const& order, TileQueue& queue) {
  PipelineState<2> at{};
  // Nobody cleared the counter before (nor that of a list, see VarlenList::make).
  if (!Order::kVarlen && blockIdx.x == 0) *order.claimed = 0;
  while (true) {
    queue.wanted.wait(at.stage);  // which is the parity of the round
    int const index = order.claimed ? read_grid_size() + atomicAdd(order.claimed, 1) : kNoTile;
    bool const is_tile = unsigned(index) < unsigned(queue.count(order));
    auto& announced = queue.ring.acquire(at);
    auto& upcoming = queue.tile_of_stage(order, at.stage);
    if (is_tile) upcoming = queue.tile(params, order, index);
    if (!is_tile) upcoming.m_begin = kNoTile;
    announced.arrive();
    at.advance();
    if (!is_tile) break;
  }
}

template <class Order>
struct QueuedTiles {
  Order const& order;
  TileQueue& queue;
  unsigned lanes;  // of this warp, that go through them together
  decltype(queue.first_tile(order)) tile;
  PipelineState<2> at{};

  // A block's first one is that of its own index.
  CUTE_DEVICE auto const& first() const { return tile; }
  CUTE_DEVICE static int count() { return 0; }
  CUTE_DEVICE static Unannounced next() { return {}; }
  CUTE_DEVICE bool through(int) {
    queue.ring.wait(at);
    tile = queue.tile_of_stage(order, at.stage);
    __syncwarp(lanes);
    if (threadIdx.x % 32 == __ffs(lanes) - 1) queue.ring.release(at);
    at.advance();
    return tile.m_begin == kNoTile;
  }
  CUTE_DEVICE auto const& get(Unannounced) const { return tile; }
  CUTE_DEVICE void claim() { queue.wanted.arrive(); }
};

CUTE_DEVICE TileStream tiles_of(ForwardParams const&, TileOrder const& order, TileQueue&, unsigned) {
  return {order, int(blockIdx.x), int(gridDim.x)};
}
template <class Order>
  requires kIsClaimed<Order>
CUTE_DEVICE QueuedTiles<Order> tiles_of(ForwardParams const&, Order const& order, TileQueue& queue,
                                        unsigned lanes) {
  return {order, queue, lanes, queue.first_tile(order)};
}

}  // namespace flash_cute
