// The walk over the blocks of keys that a tile of queries visits.
#pragma once

#include "flash_cute/attention/mask/block_range.hpp"

namespace flash_cute {

// From the last block to the first. Of a tile that visits at least one.
struct KvBlocks {
  BlockRange visited;
  int block;  // where the walk is

  FLASH_CUTE_HOST_DEVICE explicit KvBlocks(BlockRange const& visited_)
      : visited(visited_), block(visited_.end - 1) {}

  // unmasked: the blocks that need no element test.
  FLASH_CUTE_HOST_DEVICE bool is_full(BlockRange const& unmasked) const { return unmasked.contains(block); }
  FLASH_CUTE_HOST_DEVICE bool is_first() const { return block == visited.end - 1; }
  // Blocks behind this one.
  FLASH_CUTE_HOST_DEVICE int left() const { return block - visited.begin; }
  FLASH_CUTE_HOST_DEVICE bool done() const { return block < visited.begin; }
  // Goes on to the next block; false behind the last one.
  FLASH_CUTE_HOST_DEVICE bool advance() {
    --block;
    return !done();
  }
  FLASH_CUTE_HOST_DEVICE int next() const { return block - 1; }
};

}  // namespace flash_cute
