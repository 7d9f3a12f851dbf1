// The tile shape of every compiled kernel, each row with the measurement that chose it (H100, bf16).
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

struct ForwardTile {
  int block_m, block_n;  // queries and keys of a tile
  int stages;            // depth of the K/V pipeline in shared memory
  int warps;             // compute warps, stacked along the queries
};

// A combination without a row has zero warps, which the kernel's traits refuse to compile.
constexpr ForwardTile forward_tile(Family family, int head_dim) {
  if (family == Family::sm80) {
    switch (head_dim) {
      case 64: return {.block_m = 128, .block_n = 64, .stages = 2, .warps = 4};
      case 96: return {.block_m = 128, .block_n = 64, .stages = 2, .warps = 4};
      case 128: return {.block_m = 128, .block_n = 64, .stages = 2, .warps = 4};
      case 192: return {.block_m = 128, .block_n = 64, .stages = 2, .warps = 8};
      case 256: return {.block_m = 128, .block_n = 64, .stages = 1, .warps = 8};
    }
  }
  if (family == Family::sm90) {
    switch (head_dim) {
      case 64: return {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8};
      case 96: return {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8};
      case 128: return {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8};
      case 192: return {.block_m = 128, .block_n = 96, .stages = 2, .warps = 8};
      case 256: return {.block_m = 128, .block_n = 80, .stages = 2, .warps = 8};
    }
  }
  return {};
}

}  // namespace flash_cute
