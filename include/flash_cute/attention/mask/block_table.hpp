// Which blocks of keys a block of queries visits, and of which it sees every pair, where no window says so:
// two bits for each pair of blocks, made by a kernel before. Both passes walk over them.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/mask/block_range.hpp"
#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// A bit for each of 32 neighbouring blocks: does some query of the tile see a key of the block, and do all
// see all of its keys?
struct alignas(8) BlockBits {
  static constexpr int kBlocks = 32;
  uint32_t visited, full;
};

// Bits [begin, end), cut to a word.
FLASH_CUTE_HOST_DEVICE uint32_t bits_between(int begin, int end) {
  auto below = [](int limit) { return limit >= 32 ? ~0u : (1u << larger(0, limit)) - 1; };
  return below(end) & ~below(begin);
}

FLASH_CUTE_HOST_DEVICE int count_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}
FLASH_CUTE_HOST_DEVICE int lowest_bit(uint32_t bits) { return count_bits((bits & -bits) - 1); }
FLASH_CUTE_HOST_DEVICE int highest_bit(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return 31 - __clz(bits);
#else
  return bits == 0 ? -1 : 31 - __builtin_clz(bits);
#endif
}

// Blocks in which every pair of the tile is visible.
struct FullBlocks {
  BlockBits const* bits;

  FLASH_CUTE_HOST_DEVICE bool contains(int block) const {
    return bits[block / BlockBits::kBlocks].full >> block % BlockBits::kBlocks & 1;
  }
};

struct FullInTable {};  // the walk's table says which blocks are: see is_full

// The walk over the blocks of keys that a tile visits, from the last to the first; as KvBlocks. A tile that
// visits none walks over one block that is hidden from it. Memory is read once for every 32 blocks.
struct TableKvBlocks {
  BlockBits const* bits;
  int word;
  BlockBits of_word;  // with those blocks alone that the walk has not passed
  int block;          // where the walk is
  int remaining_;     // blocks after this one
  bool first = true;
  static constexpr bool kNeighbours = false;

  FLASH_CUTE_HOST_DEVICE TableKvBlocks(BlockBits const* bits_, int words, int visited)
      : bits(bits_), word(words - 1), of_word(bits_[words - 1]), remaining_(visited - 1) {
    find_block();
  }

  // The same over a part of the blocks.
  FLASH_CUTE_HOST_DEVICE TableKvBlocks(BlockBits const* bits_, BlockRange const& part)
      : bits(bits_), word((part.end - 1) / BlockBits::kBlocks), of_word(bits_[word]), remaining_(-1) {
    auto cut = [&](int of) {
      return bits_between(part.begin - of * BlockBits::kBlocks, part.end - of * BlockBits::kBlocks);
    };
    for (int of = part.begin / BlockBits::kBlocks; of <= word; ++of)
      remaining_ += count_bits(bits[of].visited & cut(of));
    of_word.visited &= cut(word);
    if (remaining_ < 0) {
      word = part.begin / BlockBits::kBlocks;
      of_word = {1u << part.begin % BlockBits::kBlocks, 0};
      remaining_ = 0;
    }
    find_block();
  }

  FLASH_CUTE_HOST_DEVICE static bool empty() { return false; }
  FLASH_CUTE_HOST_DEVICE bool is_full(FullInTable) const {
    return of_word.full >> block % BlockBits::kBlocks & 1;
  }
  FLASH_CUTE_HOST_DEVICE bool is_first() const { return first; }
  FLASH_CUTE_HOST_DEVICE int remaining() const { return remaining_; }
  FLASH_CUTE_HOST_DEVICE bool done() const { return remaining_ < 0; }
  FLASH_CUTE_HOST_DEVICE bool advance() {
    first = false;
    if (--remaining_ < 0) return false;
    of_word.visited ^= 1u << block % BlockBits::kBlocks;
    find_block();
    return true;
  }
  FLASH_CUTE_HOST_DEVICE int next() const {
    TableKvBlocks following = *this;
    following.advance();
    return following.block;
  }

 private:
  // The last one that is left; there is one.
  FLASH_CUTE_HOST_DEVICE void find_block() {
    while (of_word.visited == 0 && word > 0) of_word = bits[--word];
    block = word * BlockBits::kBlocks + larger(0, highest_bit(of_word.visited));
  }
};

// The blocks of queries that see a block of keys, from the first to the last; none after those of the
// sequence, whatever its bits say where offsets make no sense.
struct TableQueryBlocks {
  static constexpr int kEnd = -1;
  BlockBits const* bits;
  int blocks;  // of the sequence

  FLASH_CUTE_HOST_DEVICE int first() const { return from(0); }
  FLASH_CUTE_HOST_DEVICE int after(int block) const { return from(block + 1); }
  FLASH_CUTE_HOST_DEVICE int end() const { return kEnd; }
  FLASH_CUTE_HOST_DEVICE int count() const {
    int sum = 0;
    for (int chunk = 0; chunk * BlockBits::kBlocks < blocks; ++chunk) sum += count_bits(visited(chunk, 0));
    return sum;
  }
  FLASH_CUTE_HOST_DEVICE BlockBits of_chunk(int chunk) const { return {visited(chunk, 0), bits[chunk].full}; }

 private:
  // Of a chunk's blocks, from this one on.
  FLASH_CUTE_HOST_DEVICE uint32_t visited(int chunk, int begin) const {
    int const first = chunk * BlockBits::kBlocks;
    return bits[chunk].visited & bits_between(begin - first, blocks - first);
  }
  FLASH_CUTE_HOST_DEVICE int from(int block) const {
    for (int chunk = block / BlockBits::kBlocks; chunk * BlockBits::kBlocks < blocks; ++chunk) {
      uint32_t const found = visited(chunk, block);
      if (found != 0) return chunk * BlockBits::kBlocks + lowest_bit(found);
    }
    return kEnd;
  }
};

}  // namespace flash_cute
