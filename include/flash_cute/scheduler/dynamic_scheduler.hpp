// Tiles of a persistent kernel that its thread blocks take one by one, from a counter in global memory.
#pragma once

#include <type_traits>

#include "flash_cute/core/sm90/pipeline.hpp"
#include "flash_cute/core/special_registers.hpp"
#include "flash_cute/scheduler/static_scheduler.hpp"
#include "flash_cute/scheduler/varlen_list.hpp"

namespace flash_cute {

struct DynamicScheduler {
  static constexpr bool kDynamic = true;
  int* tile_counter;  // tiles taken beside each block's first; null where each block has one tile at most
};

// In shared memory: the upcoming tiles of a block, from the thread that takes them to those that load and
// compute.
struct TileQueue {
  cutlass::arch::ClusterBarrier requested;
  TmaRing<2> ring;
  union {
    TileCoord uniform;
    VarlenTile varlen;
    SplitTile split;
  } tiles[2];

  // readers: arrivals that free a stage, one of each warp that goes through the tiles.
  CUTE_DEVICE void init(int readers) {
    requested.init(1);
    ring.init(readers);
  }

  template <class Tile>
  CUTE_DEVICE Tile& tile(int stage) {
    if constexpr (std::is_same_v<Tile, SplitTile>) {
      return tiles[stage].split;
    } else if constexpr (std::is_same_v<Tile, VarlenTile>) {
      return tiles[stage].varlen;
    } else {
      return tiles[stage].uniform;
    }
  }
};

// Takes a tile from what is left for the whole grid, and hands it over; false if there is none.
template <class Source, class List>
CUTE_DEVICE bool take_tile(Source const& source, DynamicScheduler const& scheduler, List const& list,
                           TileQueue& queue, PipelineState<2>& at) {
  using Tile = typename Source::Tile;
  int const index =
      scheduler.tile_counter ? read_grid_size() + atomicAdd(scheduler.tile_counter, 1) : kNoTile;
  bool const is_tile = unsigned(index) < unsigned(source.tiles(list));
  auto& full = queue.ring.acquire(at);
  Tile& upcoming = queue.template tile<Tile>(at.stage);
  if (is_tile) upcoming = source.tile(list, index);
  if (!is_tile) upcoming.m_begin = kNoTile;
  full.arrive();
  at.advance();
  return is_tile;
}

// By one thread of a warp that has nothing else to do: takes a tile from what is left for the whole grid
// whenever the loading thread requests one. It does when it has nearly loaded the tile before, so blocks with
// long tiles get fewer of them: requested when the tile before begins, 8k causal takes 8% longer in a model
// of the schedule. Two at once lose up to 7%, requests 8 blocks before the end up to 1% (both measured).
constexpr int kRequestedAhead = 4;  // blocks of keys before the end
template <class Source, class List>
CUTE_DEVICE void schedule_tiles(Source const& source, DynamicScheduler const& scheduler, List const& list,
                                TileQueue& queue) {
  PipelineState<2> at{};
  // No kernel has zero filled the counter (nor that of a list: see VarlenList::make).
  if (!Source::kVarlen && blockIdx.x == 0) *scheduler.tile_counter = 0;
  do {
    queue.requested.wait(at.stage);  // which is the parity of the round
  } while (take_tile(source, scheduler, list, queue, at));
}

struct Unknown {};  // the upcoming tile, until done() has read it

// As StaticTiles.
template <class Source>
struct DynamicTiles {
  using Tile = typename Source::Tile;
  Source const& source;
  TileQueue& queue;
  unsigned lanes;  // of this warp, that go through the tiles together
  Tile tile;       // a block's first one is that of its own number
  PipelineState<2> at{};

  CUTE_DEVICE Tile const& first() const { return tile; }
  CUTE_DEVICE static int count() { return 0; }
  CUTE_DEVICE static Unknown next() { return {}; }
  CUTE_DEVICE bool done(int) {
    queue.ring.wait(at);
    tile = queue.template tile<Tile>(at.stage);
    __syncwarp(lanes);
    if (threadIdx.x % 32 == __ffs(lanes) - 1) queue.ring.release(at);
    at.advance();
    return tile.m_begin == kNoTile;
  }
  CUTE_DEVICE Tile const& get(Unknown) const { return tile; }
  CUTE_DEVICE void request() { queue.requested.arrive(); }
};

template <class Source, class List>
CUTE_DEVICE StaticTiles<Source> tiles_of(Source const& source, StaticScheduler const&, List const&,
                                         TileQueue&, unsigned) {
  return {source, int(blockIdx.x), int(gridDim.x)};
}
template <class Source, class List>
CUTE_DEVICE DynamicTiles<Source> tiles_of(Source const& source, DynamicScheduler const&, List const& list,
                                          TileQueue& queue, unsigned lanes) {
  return {source, queue, lanes, source.first_tile(list, blockIdx.x)};
}

}  // namespace flash_cute
