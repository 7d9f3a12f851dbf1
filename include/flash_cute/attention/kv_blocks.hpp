// The walk over the blocks of keys that a tile of queries visits.
#pragma once

#include "flash_cute/attention/mask/block_range.hpp"

namespace flash_cute {

// From the last block to the first. Of a tile that visits at least one.
struct KvBlocks {
  BlockRange visited;
  int block;                                 // where the walk is
  static constexpr bool kNeighbours = true;  // does each block follow the one before it?

  FLASH_CUTE_HOST_DEVICE explicit KvBlocks(BlockRange const& visited_)
      : visited(visited_), block(visited_.end - 1) {}

  // full_blocks: the blocks that need no element test.
  FLASH_CUTE_HOST_DEVICE bool is_full(BlockRange const& full_blocks) const {
    return full_blocks.contains(block);
  }
  FLASH_CUTE_HOST_DEVICE bool is_first() const { return block == visited.end - 1; }
  // Blocks after this one.
  FLASH_CUTE_HOST_DEVICE int remaining() const { return block - visited.begin; }
  FLASH_CUTE_HOST_DEVICE bool done() const { return block < visited.begin; }
  // Goes on to the next block; false after the last one.
  FLASH_CUTE_HOST_DEVICE bool advance() {
    --block;
    return !done();
  }
  FLASH_CUTE_HOST_DEVICE int next() const { return block - 1; }
};

}  // namespace flash_cute
