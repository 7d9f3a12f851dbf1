// Numbers blocks of rows through a batch, where each sequence begins with a block of its own; known without
// looking at any length but the sequence's own.
#pragma once

#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// The last of some sequences that begins no later than a place, or the first. Searched in so many ways at a
// time, as loads that wait for each other take longer than those side by side.
template <class First>
FLASH_CUTE_HOST_DEVICE int last_beginning_before(int place, int sequences, First&& first) {
  constexpr int kWays = 4;
  int found = 0;
  for (int left = sequences; left > 1;) {
    int const step = ceil_div(left, kWays);
    int passed = 0;
    for (int way = 1; way < kWays; ++way) {
      bool const begins_before = way * step < left && first(found + way * step) <= place;
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

  // Of one sequence, where they are alike.
  FLASH_CUTE_HOST_DEVICE int of_one() const { return ceil_div(rows, block); }

  // Of a sequence's first block. Offsets out of order give places that exist all the same.
  FLASH_CUTE_HOST_DEVICE int first(int sequence) const {
    if (!offsets) return sequence * of_one();
    return owned(sequence).begin / block + sequence;
  }

  // The rows that a sequence has; senseless offsets are cut to what is there.
  FLASH_CUTE_HOST_DEVICE Rows owned(int sequence) const {
    if (!offsets) return {0, rows};
    int const begin = larger(0, smaller(offsets[sequence], rows));
    return {begin, larger(begin, smaller(offsets[sequence + 1], rows))};
  }

  // Thread blocks go through the places of one head, then through those of the next.
  struct HeadBlock {
    int head, place;
  };
  FLASH_CUTE_HOST_DEVICE HeadBlock of_block(int index) const {
    int const head = index / count();
    return {head, index - head * count()};
  }

  // Place by place instead, all heads of each: where heads lie side by side, thread blocks that run together
  // then touch what lies together.
  FLASH_CUTE_HOST_DEVICE HeadBlock of_block(int index, int heads, bool side_by_side) const {
    if (!side_by_side) return of_block(index);
    int const place = index / heads;
    return {index - place * heads, place};
  }

  // The sequence that a place belongs to; a place before all of them (rows before the first offset) is given
  // to the first, too: see has_rows.
  FLASH_CUTE_HOST_DEVICE int sequence(int place) const {
    if (!offsets) return place / of_one();
    return last_beginning_before(place, batch, [this](int sequence) { return first(sequence); });
  }
};

// Does a block that begins at row `begin` of its sequence have any of its `count` rows? Not so a place before
// those of the first sequence, where begin is negative, nor one of the room behind a last short block.
FLASH_CUTE_HOST_DEVICE bool has_rows(int begin, int count) { return 0 <= begin && begin < count; }

}  // namespace flash_cute
