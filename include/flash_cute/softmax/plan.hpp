// What a softmax runs: how many threads have a row, and how many thread blocks. Knows no CUDA.
#pragma once

#include "flash_cute/softmax/params.hpp"

namespace flash_cute {

constexpr int kChunkBytes = 16;  // what a thread reads and writes at once

// How a row's threads hold it: up to lanes * chunks chunks, in their registers, or with `stages` in shared
// memory, where the rows that come next arrive meanwhile. shared: several thread blocks may have a part of
// the row each, and without stages a part may be more than one tile.
struct RowTile {
  int lanes = 0, chunks = 0, stages = 0;
  bool shared = false;

  constexpr int capacity() const { return lanes * chunks; }
  constexpr int smem_bytes(int tensors) const { return stages * tensors * capacity() * kChunkBytes; }
};

// Registers are for 1024 threads on an SM, or for 768 where a shared row is in them, which takes more. The
// backward holds two tensors. Short rows leave no lane idle.
struct RowTiles {
  static constexpr int kMost = 15;
  int tensors;
  RowTile tiles[kMost];

  constexpr int count() const {
    int count = 0;
    while (count < kMost && tiles[count].lanes > 0) ++count;
    return count;
  }
  // The two shared ones come last; the other of them serves rows of any length.
  constexpr int in_parts() const { return count() - 2; }
  constexpr int in_tiles() const { return count() - 1; }
};

inline constexpr RowTiles kForwardRowTiles{1,
                                           {{1, 1},
                                            {2, 1},
                                            {4, 1},
                                            {4, 2},
                                            {8, 2},
                                            {16, 2},
                                            {32, 2},
                                            {32, 4},
                                            {64, 4},
                                            {128, 4, 2},
                                            {256, 4, 2},
                                            {512, 4, 2},
                                            {1024, 4, 2},
                                            {512, 4, 2, true},
                                            {256, 8, 0, true}}};
inline constexpr RowTiles kBackwardRowTiles{2,
                                            {{1, 1},
                                             {2, 1},
                                             {4, 1},
                                             {8, 1},
                                             {8, 2},
                                             {16, 2},
                                             {32, 2},
                                             {64, 2},
                                             {128, 2},
                                             {128, 4, 2},
                                             {256, 4, 2},
                                             {1024, 2, 2},
                                             {512, 2, 2, true},
                                             {256, 4, 0, true}}};
constexpr RowTiles const& row_tiles(bool backward) { return backward ? kBackwardRowTiles : kForwardRowTiles; }

struct RowSoftmaxPlan {
  int tile;                 // of row_tiles
  int parts;                // thread blocks that share a row; all blocks of such a grid run at once
  int64_t workspace_bytes;  // for what the parts tell each other
};

// Thread blocks of a tile that a GPU runs at once, for those of them that this matters to.
struct ResidentBlocks {
  int in_parts, in_tiles;
};

inline int64_t share_bytes(ScoreShape const& shape, int parts, bool backward) {
  int64_t const share = (backward ? 4 : 2) * int64_t(sizeof(float));  // see LogSumDotOp, LogSumOp
  return parts > 1 ? int64_t(shape.all_rows()) * parts * share : 0;
}

inline int row_chunks(ScoreShape const& shape, int element_bytes, bool aligned) {
  int const width = kChunkBytes / element_bytes;
  return ceil_div(shape.columns + (aligned ? 0 : width - 1), width);
}

// aligned: all rows begin at multiples of 16 bytes; else a row may touch one chunk more.
inline RowSoftmaxPlan plan_row_softmax(ScoreShape const& shape, int element_bytes, bool aligned,
                                       bool backward, DeviceInfo const& device,
                                       ResidentBlocks const& resident) {
  RowTiles const& rows = row_tiles(backward);
  int const chunks = row_chunks(shape, element_bytes, aligned);
  constexpr int kStaticBytes = 2 << 10;  // of shared memory, for sums; at most
  auto serves = [&](RowTile const& tile) {
    return tile.capacity() >= chunks && tile.smem_bytes(rows.tensors) + kStaticBytes <= device.smem_bytes;
  };
  for (int tile = 0; tile < rows.in_parts(); ++tile) {
    if (serves(rows.tiles[tile])) return {tile, 1, 0};
  }
  int const wanted = ceil_div(chunks, rows.tiles[rows.in_parts()].capacity());
  bool const in_tiles = wanted > resident.in_parts;
  int const parts = in_tiles ? smaller(wanted, resident.in_tiles) : wanted;
  return {in_tiles ? rows.in_tiles() : rows.in_parts(), parts, share_bytes(shape, parts, backward)};
}

// Enough for a workspace on any GPU.
inline int64_t row_softmax_workspace(ScoreShape const& shape, int element_bytes, bool backward) {
  RowTiles const& rows = row_tiles(backward);
  int const capacity = rows.tiles[rows.in_parts()].capacity();
  return share_bytes(shape, ceil_div(row_chunks(shape, element_bytes, false), capacity), backward);
}

}  // namespace flash_cute
