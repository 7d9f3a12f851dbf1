// Where the rows of a split of a sequence lie: queries packed or padded, keys packed, padded or in pages.
#pragma once

#include "flash_cute/attention/keys/varlen.hpp"
#include "flash_cute/core/divisor.hpp"

namespace flash_cute {

// Keys that are not in pages are one page for each entry of the batch, or one for all.
struct PagedCoords : VarlenCoords {
  int const* table;
  int64_t table_stride;
  int table_last, last_page;
  Divisor page_size;
  bool is_packed;  // keys of all sequences lie one after the other

  static PagedCoords of(ForwardParams const& params) {
    CacheParams const& cache = params.cache;
    PagedCoords rows{};
    rows.entry_rows = {.q = entry_rows_of(params.q), .k = 0, .v = 0, .out = entry_rows_of(params.out)};
    rows.table = cache.table;
    rows.table_stride = cache.table_stride;
    rows.table_last = larger(0, cache.table_width - 1);
    rows.last_page = larger(0, cache.pages - 1);
    rows.page_size = Divisor(larger(1, cache.page_size));
    rows.is_packed = params.lengths.cu_seqlens_k != nullptr;
    return rows;
  }

  // The page that has a key of the tile's sequence, and its row there. A number of a page that makes no sense
  // is cut to the pages that there are.
  FLASH_CUTE_HOST_DEVICE int page(SplitTile const& tile, int key) const {
    int const index = smaller(page_size.quotient(key), table_last);
    return larger(0, smaller(table[tile.batch * table_stride + index], last_page));
  }
  FLASH_CUTE_HOST_DEVICE int row_in_page(int key) const { return page_size.remainder(key); }

  // Of keys that are not in pages.
  FLASH_CUTE_HOST_DEVICE RowCoord in_entry(SplitTile const& tile, int key) const {
    return {is_packed ? 0 : tile.batch, tile.k_begin + key};
  }
};

}  // namespace flash_cute
