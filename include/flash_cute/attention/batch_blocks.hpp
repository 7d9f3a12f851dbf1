// Numbers blocks of rows through a batch, where each sequence begins with a block of its own; known without
// looking at any length but the sequence's own.
#pragma once

#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// The last sequence whose first block is not after `block`, or sequence 0. Each round of the search compares
// kWays - 1 candidates at once, as independent loads overlap and dependent ones do not.
template <class First>
FLASH_CUTE_HOST_DEVICE int last_beginning_before(int block, int sequences, First&& first) {
  constexpr int kWays = 4;
  int found = 0;
  for (int left = sequences; left > 1;) {
    int const step = ceil_div(left, kWays);
    int passed = 0;
    for (int way = 1; way < kWays; ++way) {
      bool const begins_before = way * step < left && first(found + way * step) <= block;
      if (begins_before && passed == (way - 1) * step) passed = way * step;
    }
    found += passed;
    left = smaller(step, left - passed);
  }
  return found;
}

struct BatchBlocks {
  int const* offsets;  // of packed rows, null where each sequence has `rows`
  int rows, batch, block;

  // Room for all of them: the last block of each packed sequence may be short.
  FLASH_CUTE_HOST_DEVICE int count() const { return offsets ? rows / block + batch : batch * of_one(); }

  // Blocks of a sequence of a uniform batch.
  FLASH_CUTE_HOST_DEVICE int of_one() const { return ceil_div(rows, block); }

  // The number of a sequence's first block. Offsets out of order give numbers that are in range all the same.
  FLASH_CUTE_HOST_DEVICE int first(int sequence) const {
    if (!offsets) return sequence * of_one();
    return owned(sequence).begin / block + sequence;
  }

  // The rows that a sequence has; senseless offsets are cut to what is there.
  FLASH_CUTE_HOST_DEVICE RowRange owned(int sequence) const {
    if (!offsets) return {0, rows};
    int const begin = larger(0, smaller(offsets[sequence], rows));
    return {begin, larger(begin, smaller(offsets[sequence + 1], rows))};
  }

  // A head, and the number of a block among the count() blocks of the head.
  struct HeadBlock {
    int head, block;
  };
  // Thread blocks go through the blocks of one head, then through those of the next.
  FLASH_CUTE_HOST_DEVICE HeadBlock of_block(int index) const {
    int const head = index / count();
    return {head, index - head * count()};
  }

  // Thread blocks go through all heads of one block, then of the next, where heads lie side by side in
  // memory: thread blocks that run together then touch neighbouring addresses.
  FLASH_CUTE_HOST_DEVICE HeadBlock of_block(int index, int heads, bool side_by_side) const {
    if (!side_by_side) return of_block(index);
    int const block_of_head = index / heads;
    return {index - block_of_head * heads, block_of_head};
  }

  // The sequence that a block belongs to. Blocks before the first sequence (rows before the first offset) are
  // given to it, too: see has_rows.
  FLASH_CUTE_HOST_DEVICE int sequence(int block_of_head) const {
    if (!offsets) return block_of_head / of_one();
    return last_beginning_before(block_of_head, batch, [this](int sequence) { return first(sequence); });
  }
};

// Does a block that begins at row `begin` of its sequence have any of the sequence's `count` rows? It has
// none before the first sequence, where begin is negative, and in the room after a short last block.
FLASH_CUTE_HOST_DEVICE bool has_rows(int begin, int count) { return 0 <= begin && begin < count; }

}  // namespace flash_cute
