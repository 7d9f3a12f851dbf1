// How the rows of a tile of queries lie: one query head, or several that share K and V.
#pragma once

#include "flash_cute/core/divisor.hpp"
#include "flash_cute/core/family.hpp"
#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// The rows of a tile lie in groups, on Hopper one for each warpgroup. A group has `heads` neighbouring query
// heads of its first query, then those of its second, and so on. Heads that share K and V are packed where
// the queries of one head would leave most rows of a tile empty, in as many packs as their number needs. The
// last pack ends with the last head: it may have heads in common with the pack before it, and both write the
// same.
struct PackGqa {
  Divisor heads;
  int queries = 0, groups = 0;  // queries of a group, groups of a tile

  PackGqa() = default;
  PackGqa(int group_rows, int groups_, int heads_ = 1)
      : heads(heads_), queries(group_rows / heads_), groups(groups_) {}

  // Of a row of a group, counted from the group's first.
  FLASH_CUTE_HOST_DEVICE int query(int row) const { return heads.quotient(row); }
  FLASH_CUTE_HOST_DEVICE int head(int row) const { return heads.remainder(row); }
  FLASH_CUTE_HOST_DEVICE bool uses(int row) const { return row < used(); }

  FLASH_CUTE_HOST_DEVICE int used() const { return int(heads.value) * queries; }
  FLASH_CUTE_HOST_DEVICE int tile_queries() const { return groups * queries; }
  FLASH_CUTE_HOST_DEVICE int packs(int of_group) const { return ceil_div(of_group, int(heads.value)); }
};

// One query head a tile.
struct OneHead {
  FLASH_CUTE_HOST_DEVICE int query(int row) const { return row; }
  FLASH_CUTE_HOST_DEVICE int head(int) const { return 0; }
  FLASH_CUTE_HOST_DEVICE bool uses(int) const { return true; }
};

}  // namespace flash_cute
