// Numbers blocks of rows through a batch, where each sequence begins with a block of its own; known without
// looking at any length but the sequence's own.
#pragma once

#include "flash_cute/core/platform.hpp"

namespace flash_cute {

struct BlockPlaces {
  int const* offsets;  // of packed rows, null where each sequence has `rows`
  int rows, batch, block;

  // Room for all of them: the last block of each packed sequence may be short.
  FLASH_CUTE_HOST_DEVICE int count() const {
    return offsets ? rows / block + batch : batch * ceil_div(rows, block);
  }

  // Of a sequence's first block. Offsets out of order give places that exist all the same.
  FLASH_CUTE_HOST_DEVICE int first(int sequence) const {
    if (!offsets) return sequence * ceil_div(rows, block);
    return larger(0, smaller(offsets[sequence], rows)) / block + sequence;
  }

  // Thread blocks go through the places of one head, then through those of the next.
  struct PlaceOfHead {
    int head, place;
  };
  FLASH_CUTE_HOST_DEVICE PlaceOfHead of_block(int index) const {
    int const head = index / count();
    return {head, index - head * count()};
  }

  // The sequence that a place belongs to.
  FLASH_CUTE_HOST_DEVICE int sequence(int place) const {
    if (!offsets) return place / ceil_div(rows, block);
    int found = 0;
    for (int step = 1 << 30; step > 0; step /= 2) {
      if (step < batch - found && first(found + step) <= place) found += step;
    }
    return found;
  }
};

}  // namespace flash_cute
