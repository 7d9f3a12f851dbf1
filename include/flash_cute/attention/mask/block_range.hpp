// A range of blocks of keys, or of queries.
#pragma once

#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// Half open; empty when begin >= end.
struct BlockRange {
  int begin, end;

  FLASH_CUTE_HOST_DEVICE bool empty() const { return begin >= end; }
  FLASH_CUTE_HOST_DEVICE bool contains(int block) const { return begin <= block && block < end; }
};

}  // namespace flash_cute
