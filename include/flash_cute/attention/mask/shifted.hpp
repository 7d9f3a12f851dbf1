// A mask between queries and keys that are counted from before the first one that it knows.
#pragma once

#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/core/platform.hpp"

namespace flash_cute {

struct ShiftedMask {
  WindowMask mask;
  int first;  // the mask's key 0
  int seqlen_q;

  FLASH_CUTE_HOST_DEVICE ShiftedMask(WindowMask const& mask_, int first_)
      : mask(mask_), first(first_), seqlen_q(mask_.seqlen_q) {}

  FLASH_CUTE_HOST_DEVICE int first_key(int row) const { return first + mask.first_key(row); }
  FLASH_CUTE_HOST_DEVICE int end_key(int row) const { return first + mask.end_key(row); }
  FLASH_CUTE_HOST_DEVICE bool is_fully_masked(int row) const { return mask.is_fully_masked(row); }

  FLASH_CUTE_HOST_DEVICE BlockRange visited(int m_begin, int block_m, int block_n) const {
    BlockRange const keys = mask.visited(m_begin, block_m, 1);
    if (keys.empty()) return {0, 0};
    return {(first + keys.begin) / block_n, ceil_div(first + keys.end, block_n)};
  }
  FLASH_CUTE_HOST_DEVICE BlockRange full(int m_begin, int block_m, int block_n) const {
    BlockRange const keys = mask.full(m_begin, block_m, 1);
    return {ceil_div(first + keys.begin, block_n), (first + keys.end) / block_n};
  }
};

}  // namespace flash_cute
