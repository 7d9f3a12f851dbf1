// Tiles of a persistent kernel that are shared out beforehand.
#pragma once

#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// The number of the tile that one of `blocks` thread blocks has in a round: to and fro, which evens out what
// the blocks get.
FLASH_CUTE_HOST_DEVICE int tile_of_round(int block, int blocks, int round) {
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

struct StaticScheduler {
  static constexpr bool kDynamic = false;
};

// A role's walk over the tiles of its thread block: first(); then, for each tile, next() when it begins, and
// done(remaining) and get() when it ends. next() returns what get() makes the upcoming tile of, once
// done(remaining) has said that there is one; remaining is count() at first. DynamicTiles has the same
// functions.
template <class Source>
struct StaticTiles {
  using Tile = typename Source::Tile;
  Source const& source;
  int block, blocks;
  int round = 0;

  FLASH_CUTE_HOST_DEVICE int count() const {
    int const rounds = source.order.tiles() / blocks;
    return rounds + (tile_of_round(block, blocks, rounds) < source.order.tiles());
  }
  FLASH_CUTE_HOST_DEVICE Tile first() const { return source.tile(block); }
  // After the last tile any.
  FLASH_CUTE_HOST_DEVICE Tile next() { return source.tile(tile_of_round(block, blocks, ++round)); }
  FLASH_CUTE_HOST_DEVICE bool done(int& remaining) const { return --remaining == 0; }
  FLASH_CUTE_HOST_DEVICE Tile const& get(Tile const& upcoming) const { return upcoming; }

  FLASH_CUTE_HOST_DEVICE void request() const {}  // see DynamicTiles
};

}  // namespace flash_cute
