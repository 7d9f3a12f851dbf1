// The tile shape of every compiled kernel of the backward, each row with the measurement that chose it.
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

// A block of keys stays, blocks of queries pass by.
struct BackwardTile {
  int block_m, block_n;   // queries of a step, keys of a thread block
  int stages;             // of Q and dO in shared memory
  int warps_keys;         // warps side by side along the keys
  int warps_across;       // and along the queries of S, or the columns of dK and dV
  int warps_queries;      // of the same warps, along the queries of dQ; the others lie along its columns
  int blocks_per_sm = 1;  // thread blocks that registers must leave room for

  constexpr int warps() const { return warps_keys * warps_across; }
};

// A block of queries stays, blocks of keys pass by: for dQ alone.
struct QueryTile {
  int block_m, block_n, stages, warps;
};

struct BackwardTiles {
  BackwardTile keys;
  QueryTile queries;
};

constexpr BackwardTiles backward_tiles(Family family, int head_dim) {
  if (family == Family::sm80) {
    switch (head_dim) {
      case 64: return {{64, 128, 2, 8, 1, 4}, {128, 64, 2, 8}};
      case 96: return {{64, 128, 2, 8, 1, 4}, {128, 64, 2, 8}};
      case 128: return {{64, 128, 2, 8, 1, 4}, {128, 64, 2, 8}};
      case 192: return {{64, 64, 1, 4, 2, 2}, {64, 64, 1, 4}};
      case 256: return {{64, 64, 1, 4, 2, 2}, {64, 32, 1, 4}};
    }
  }
  return {};
}

}  // namespace flash_cute
