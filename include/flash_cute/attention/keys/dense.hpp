// Where the rows of a tile lie in a batch whose sequences all have the lengths that the shape says.
#pragma once

#include "flash_cute/attention/tile.hpp"
#include "flash_cute/core/platform.hpp"

namespace flash_cute {

enum class TmaOperand { q, k, v, out };

// A row of an operand: the entry of the batch, and the row in it.
struct RowCoord {
  int entry, row;
};

// Rows of Q and O are counted from the first query of the tile's sequence, rows of K and V from its first
// key.
struct DenseCoords {
  // For loads that take an address.
  FLASH_CUTE_HOST_DEVICE RowCoord query(TileCoord const& tile, int row) const { return {tile.batch, row}; }
  FLASH_CUTE_HOST_DEVICE RowCoord key(TileCoord const& tile, int row) const { return {tile.batch, row}; }

  // For TMA: calls visit with the coordinates that the operand's tensor map has after columns and heads.
  template <TmaOperand, class Visit>
  FLASH_CUTE_HOST_DEVICE void visit_coords(TileCoord const& tile, int row, Visit&& visit) const {
    visit(row, tile.batch);
  }
};

}  // namespace flash_cute
