// The tile shape of every compiled kernel of the backward, each row with the measurement that chose it (H200,
// bf16).
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
  constexpr bool operator==(BackwardTile const&) const = default;

  // K and V; Q, dO and two floats of each query; dS, and P where warps share it.
  constexpr int smem_bytes(int head_dim) const {
    int const scores = (warps_across > 1 ? 2 : 1) * block_m * block_n;
    return kElementBytes * (2 * block_n * head_dim + 2 * stages * block_m * head_dim + scores) +
           2 * stages * block_m * int(sizeof(float));
  }
};

// A block of queries stays, blocks of keys pass by: for dQ alone.
struct QueryTile {
  int block_m, block_n, stages, warps;
  int blocks_per_sm = 1;
};

// small: for GPUs whose blocks have less shared memory than the main tile takes. All others fit into the 99
// KB of GPUs of 8.6 and 8.9.
struct BackwardTiles {
  BackwardTile main, small = {};
  QueryTile queries;
};

constexpr BackwardTiles backward_tiles(Family family, int head_dim) {
  if (family == Family::sm80) {
    switch (head_dim) {
      case 64: return {.main = {64, 64, 2, 4, 1, 2, 2}, .queries = {128, 64, 2, 8}};
      case 96: return {.main = {64, 64, 2, 4, 1, 2, 2}, .queries = {128, 64, 2, 8}};
      case 128:
        return {.main = {64, 64, 2, 2, 2, 2, 2}, .small = {64, 64, 1, 2, 2, 2}, .queries = {64, 64, 2, 4, 2}};
      case 192:
        return {.main = {64, 64, 1, 4, 2, 4}, .small = {32, 32, 1, 2, 2, 2}, .queries = {64, 64, 1, 4}};
      case 256:
        return {.main = {64, 64, 1, 2, 4, 2}, .small = {32, 32, 1, 2, 2, 2}, .queries = {64, 32, 1, 4}};
    }
  }
  return {};
}

}  // namespace flash_cute
