// What a softmax runs: how many threads have a row, and how many thread blocks. Knows no CUDA.
#pragma once

#include "flash_cute/softmax/params.hpp"

namespace flash_cute {

constexpr int kChunkBytes = 16;  // what a thread reads and writes at once

// A row's threads hold up to lanes * chunks chunks of it in their registers. shared: several thread blocks
// may have a part of the row each, and a part more than one tile.
struct RowTile {
  int lanes, chunks;
  bool shared = false;

  constexpr int capacity() const { return lanes * chunks; }
};

// Up to 128 chunks a warp or less has a row. Registers are for 1024 threads on an SM, or for 768 where rows
// are shared, which takes more of them.
inline constexpr RowTile kRowTiles[] = {{1, 1},   {4, 1},   {8, 2},   {32, 2},   {32, 4},       {64, 4},
                                        {128, 4}, {256, 4}, {512, 4}, {1024, 4}, {256, 8, true}};
inline constexpr int kRowTileCount = sizeof(kRowTiles) / sizeof(kRowTiles[0]);

// The backward holds two tensors, so chunks of half the row.
constexpr RowTile backward_tile(RowTile const& tile) {
  return {tile.lanes, larger(1, tile.chunks / 2), tile.shared};
}

struct RowSoftmaxPlan {
  int tile;                 // of kRowTiles
  int parts;                // thread blocks that share a row; all blocks of such a grid run at once
  int64_t workspace_bytes;  // for what the parts tell each other
};

// resident_blocks: how many a GPU runs at once of the shared tile's. aligned: all rows begin at multiples of
// 16 bytes; else a row may touch one chunk more.
inline RowSoftmaxPlan plan_row_softmax(ScoreShape const& shape, int element_bytes, bool aligned,
                                       bool backward, int resident_blocks) {
  int const width = kChunkBytes / element_bytes;
  int const chunks = ceil_div(shape.columns + (aligned ? 0 : width - 1), width);
  auto capacity = [&](int tile) {
    return (backward ? backward_tile(kRowTiles[tile]) : kRowTiles[tile]).capacity();
  };
  int tile = 0;
  while (tile + 1 < kRowTileCount && capacity(tile) < chunks) ++tile;
  int const parts = smaller(larger(1, ceil_div(chunks, capacity(tile))), resident_blocks);
  int64_t const share = (backward ? 4 : 2) * int64_t(sizeof(float));  // see LogSumDotOp, LogSumOp
  return {tile, parts, parts > 1 ? int64_t(shape.all_rows()) * parts * share : 0};
}

}  // namespace flash_cute
