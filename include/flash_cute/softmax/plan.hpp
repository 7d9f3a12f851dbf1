// What a softmax runs: how many threads have a row, and how many thread blocks. Knows no CUDA.
#pragma once

#include <limits>

#include "flash_cute/softmax/params.hpp"

namespace flash_cute {

constexpr int kChunkBytes = 16;  // what a thread reads and writes at once

// A row's threads hold up to lanes * chunks chunks of it in their registers. weights: and, of scores, what
// they compute of them. shared: several thread blocks have a part of the row each, and where there are too
// few a part is more than one tile.
struct RowTile {
  int lanes = 0, chunks = 0;
  bool weights = false, shared = false;

  constexpr int capacity() const { return lanes * chunks; }
};

// Each holds twice as much as the one before; the last one is shared.
struct RowTiles {
  static constexpr int kMost = 16;
  RowTile tiles[kMost] = {};
  int count = 0;

  constexpr int shared() const { return count - 1; }
};

// Short rows leave no lane idle. A thread has at most 64 registers, so that an SM has 1024 threads, and with
// them up to 128 kB under way (H200, of a copy's speed, 16-bit rows of 64 kB: 0.96, with half of that 0.77).
// 32 of them hold numbers that were computed of scores, or chunks of them, of which they are computed twice:
// of 16-bit types twice as many. That pays where rows are long (32 kB: 0.96 and 0.95, 16 kB: 0.96 and 0.98),
// and in the backward always (2 to 32 kB: 1.02, else 0.91 to 0.57). float32 has the fewer chunks in a thread
// the shorter its row (4 kB: 2, 4 or 8 of them at 1.00, 0.99 and 0.97; 16 kB: 4 and 8 at 0.96).
constexpr RowTiles row_tiles(int element_bytes, bool backward) {
  int const kept = 32 / (kChunkBytes / element_bytes) / (backward ? 2 : 1), most = backward ? 4 : 8;
  int const single = backward ? 8 : 4, spread = element_bytes == 4 && !backward ? 128 : 32;
  RowTiles rows;
  for (int capacity = 1; capacity <= 1024 * most; capacity *= 2) {
    int const wanted = backward || capacity > 1024 ? most : kept;
    int const chunks = capacity <= single ? 1 : smaller(wanted, larger(2, capacity / spread));
    rows.tiles[rows.count++] = {capacity / chunks, chunks, chunks <= kept};
  }
  rows.tiles[rows.count++] = {2048 / most, most, false, true};
  return rows;
}

struct RowSoftmaxPlan {
  int tile;                 // of row_tiles
  bool plain;               // no column is hidden, and all rows are whole chunks of memory
  int parts;                // thread blocks that share a row; all blocks of such a grid run at once
  int64_t workspace_bytes;  // for what the parts tell each other
};

inline int64_t share_bytes(ScoreShape const& shape, int parts, bool backward) {
  int64_t const share = (backward ? 4 : 2) * int64_t(sizeof(float));  // see LogSumDotOp, LogSumOp
  return parts > 1 ? int64_t(shape.all_rows()) * parts * share : 0;
}

inline int row_chunks(ScoreShape const& shape, int element_bytes, bool aligned) {
  int const width = kChunkBytes / element_bytes;
  return ceil_div(shape.columns + (aligned ? 0 : width - 1), width);
}

// aligned: all rows begin at multiples of 16 bytes; else a row may touch one chunk more. resident_blocks: how
// many a GPU runs at once of the shared tile's.
inline RowSoftmaxPlan plan_row_softmax(ScoreShape const& shape, int element_bytes, bool aligned, bool plain,
                                       bool backward, int resident_blocks) {
  RowTiles const rows = row_tiles(element_bytes, backward);
  int const chunks = row_chunks(shape, element_bytes, aligned);
  int tile = 0;
  while (tile < rows.shared() && rows.tiles[tile].capacity() < chunks) ++tile;
  int const parts =
      tile < rows.shared() ? 1 : smaller(ceil_div(chunks, rows.tiles[tile].capacity()), resident_blocks);
  return {tile, plain, parts, share_bytes(shape, parts, backward)};
}

// Enough for a workspace on any GPU.
inline int64_t row_softmax_workspace(ScoreShape const& shape, int element_bytes, bool backward) {
  int const any = std::numeric_limits<int>::max();
  return plan_row_softmax(shape, element_bytes, /*aligned=*/false, /*plain=*/false, backward, any)
      .workspace_bytes;
}

}  // namespace flash_cute
