// The plan of a softmax: how many threads and thread blocks share a row. It needs no CUDA.
#pragma once

#include <limits>

#include "flash_cute/softmax/params.hpp"

namespace flash_cute {

constexpr int kChunkBytes = 16;  // that a thread reads or writes at once
constexpr int kWarp = 32;

// How a row is held in registers: each of its threads holds `chunks` chunks of it.
struct RowTile {
  int lanes, chunks;  // a row has so many lanes of a warp, unless of_block
  int threads;        // of a thread block, at most
  bool weights;       // threads hold the weights that they compute from scores, too
  bool of_block;      // a row has all threads of a block, which has as many warps as the row needs
  bool shared;        // several blocks have a part of the row each; a part may be more than one tile
  int resident;       // threads of a multiprocessor that registers must leave room for
  bool plain_only;    // it does not serve rows with edges, see RowSoftmaxPlan::plain

  constexpr int rows() const { return of_block ? 1 : threads / lanes; }  // of a block
  constexpr int capacity() const { return (of_block ? threads : lanes) * chunks; }
};

// Each tile holds more than the previous one, and the last one is shared.
struct RowTiles {
  static constexpr int kMost = 16;
  RowTile tiles[kMost] = {};
  int count = 0;

  constexpr int shared() const { return count - 1; }
};

// So many resident threads leave 64 registers to each, and up to 128 kB of rows are under way on a
// multiprocessor.
constexpr int kResidentThreads = 1024;

// 32 of a thread's registers hold either weights that were computed from scores, or chunks from which weights
// are computed twice; of 16-bit types, chunks hold twice as many elements. The backward has two tensors.
// Measured on an H200, as parts of a copy's speed: rows of 64 B reach 0.85 with 1 chunk in a thread and 0.96
// with 2, rows of 32 kB 1.01 with 4 and 0.99 with 8 (fp32), rows of 64 kB 0.88 and 0.99, as blocks of 1024
// threads are alone on an SM. Two chunks in a thread win up to 1% where a row has no edges, with 4 kB of
// fp32; twice as many threads are resident then for 16-bit types.
constexpr RowTiles row_tiles(int element_bytes, bool backward) {
  int const kept = 32 / (kChunkBytes / element_bytes) / (backward ? 2 : 1), most = backward ? 4 : 8;
  int const single = backward ? 8 : 2;
  RowTiles rows;
  for (int capacity = 1; capacity <= 64; capacity *= 2) {
    int const chunks = smaller(most / 2, capacity <= single ? 1 : capacity <= 4 * single ? 2 : 4);
    rows.tiles[rows.count++] = {capacity / chunks, chunks, 128, chunks <= kept, false, false,
                                kResidentThreads,  false};
  }
  auto add = [&](int chunks, int threads, bool shared) {
    rows.tiles[rows.count++] = {kWarp, chunks, threads,          chunks <= kept && !shared,
                                true,  shared, kResidentThreads, false};
  };
  if (!backward) {
    bool const narrow = element_bytes == 2;
    int const threads = narrow ? 512 : 256, resident = narrow ? 2048 : kResidentThreads;
    rows.tiles[rows.count++] = {kWarp, 2, threads, true, true, false, resident, /*plain_only=*/true};
    add(most / 2, kResidentThreads / 2, false);
  }
  add(most, kResidentThreads, false);
  add(most, kResidentThreads / 2, /*shared=*/true);
  return rows;
}

struct RowSoftmaxPlan {
  int tile;                 // of row_tiles
  bool plain;               // no column is hidden, and all rows are whole chunks of memory
  int threads;              // of a thread block
  int parts;                // thread blocks that share a row, a team
  int teams;                // of `parts` blocks each; where blocks share rows, all teams run at once
  int64_t workspace_bytes;  // for the shares of the parts
};

inline int64_t share_bytes(ScoreShape const& shape, int parts, bool backward) {
  int64_t const share = (backward ? 4 : 2) * int64_t(sizeof(float));  // see LogSumDotOp, LogSumOp
  return parts > 1 ? int64_t(shape.all_rows()) * parts * share : 0;
}

inline int row_chunks(ScoreShape const& shape, int element_bytes, bool aligned) {
  int const width = kChunkBytes / element_bytes;
  return ceil_div(shape.columns + (aligned ? 0 : width - 1), width);
}

// With `aligned`, all rows begin at multiples of 16 bytes; else a row may touch one chunk more.
inline RowSoftmaxPlan plan_row_softmax(ScoreShape const& shape, int element_bytes, bool aligned, bool plain,
                                       bool backward, int multiprocessors) {
  RowTiles const rows = row_tiles(element_bytes, backward);
  int const chunks = row_chunks(shape, element_bytes, aligned);
  int number = 0;
  auto serves = [&](RowTile const& tile) { return tile.capacity() >= chunks && (plain || !tile.plain_only); };
  while (number < rows.shared() && !serves(rows.tiles[number])) ++number;
  RowTile const& tile = rows.tiles[number];
  // With small blocks fewer of those that a GPU runs at once stay without a row, but many blocks wait longer
  // for each other.
  int const most = tile.shared && chunks < 8 * tile.capacity() ? tile.threads / 2 : tile.threads;
  int64_t const blocks = int64_t(multiprocessors) * (kResidentThreads / most);  // that run at once
  int const parts = tile.shared ? int(smaller<int64_t>(ceil_div(chunks, most * tile.chunks), blocks)) : 1;
  int const needed = ceil_div(ceil_div(chunks, parts), kWarp * tile.chunks) * kWarp;
  int const groups = int(ceil_div<int64_t>(shape.all_rows(), tile.rows()));
  return {.tile = number,
          .plain = plain,
          .threads = tile.of_block ? smaller(needed, most) : most,
          .parts = parts,
          .teams = tile.shared ? int(smaller<int64_t>(groups, blocks / parts)) : groups,
          .workspace_bytes = share_bytes(shape, parts, backward)};
}

// Returns bytes that suffice for the workspace on any GPU, wherever rows begin.
inline int64_t row_softmax_workspace(ScoreShape const& shape, int element_bytes, bool backward) {
  auto bytes = [&](bool aligned) {
    int const any = std::numeric_limits<int>::max();
    return plan_row_softmax(shape, element_bytes, aligned, /*plain=*/false, backward, any).workspace_bytes;
  };
  return larger(bytes(true), bytes(false));
}

}  // namespace flash_cute
