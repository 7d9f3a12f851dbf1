// How a group of threads copies blocks of keys row by row, wherever the rows lie.
#pragma once

#include <cute/config.hpp>

#include "flash_cute/attention/keys/paged.hpp"

namespace flash_cute {

// kChunks neighbouring threads of kThreads copy a row, 16 bytes each, so that kRows rows are copied at once,
// and a block of keys in kPasses. Of a table, each lane asks for the page of one of its warp's rows, and the
// others get it by a shuffle. Hopper's producer has the same of its own, as its kernels were measured: with
// this struct ptxas gives them other registers.
template <int kThreads, int kChunks, int kBlockN>
struct RowSources {
  static constexpr int kRows = kThreads / kChunks, kPasses = kBlockN / kRows;
  static constexpr int kLanes = 32, kRowsOfWarp = kLanes / kChunks;
  static_assert(kPasses * kRowsOfWarp <= kLanes, "a lane finds one row");
  static_assert(kBlockN % kRows == 0);

  CUTE_DEVICE static int first_row(int thread) { return thread / kChunks; }
  CUTE_DEVICE static int first_key(int thread, int block) { return block * kBlockN + first_row(thread); }

  // The row, among the block's, whose page this lane finds.
  CUTE_DEVICE static int found_key(int thread) {
    int const lane = thread % kLanes;
    return thread / kLanes * kRowsOfWarp + lane / kRowsOfWarp * kRows + lane % kRowsOfWarp;
  }
  CUTE_DEVICE static int find_page(PagedCoords const& operands, SplitTile const& tile, int thread,
                                   int block) {
    return operands.table ? operands.page(tile, block * kBlockN + found_key(thread)) : 0;
  }

  // Where the thread's rows of a block lie. first_key: of them; head: what the thread copies of the head's
  // first row; page: what find_page found for the block.
  template <class Element>
  CUTE_DEVICE static void find(PagedCoords const& operands, SplitTile const& tile, TensorView const& view,
                               Element const* head, int thread, int block, int first_key, int page,
                               Element const* (&sources)[kPasses]) {
    if (operands.table) {
      int const found_row = operands.row_in_page(block * kBlockN + found_key(thread));
      int64_t const found = page * view.batch_stride + found_row * view.row_stride;
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        sources[pass] = head + __shfl_sync(~0u, found, pass * kRowsOfWarp + thread % kLanes / kChunks);
      }
    } else {
      RowCoord const at_key = operands.in_entry(tile, first_key);
      Element const* const first = head + at_key.entry * view.batch_stride + at_key.row * view.row_stride;
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) sources[pass] = first + pass * kRows * view.row_stride;
    }
  }

  // Does any query see the thread's row of a pass?
  CUTE_DEVICE static bool is_seen(SplitTile const& tile, int first_key, int pass) {
    return unsigned(first_key + pass * kRows - tile.k_first) < unsigned(tile.seqlen_k);
  }
};

}  // namespace flash_cute
