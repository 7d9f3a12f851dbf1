// The tile shape of every compiled kernel, each row with the measurement that chose it (H100, bf16).
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

struct ForwardTile {
  int block_m, block_n;   // rows (queries, or several heads of each) and keys of a tile
  int stages;             // depth of the K/V pipeline in shared memory
  int warps;              // compute warps, stacked along the queries
  int stages_q = 1;       // 2: the next tile's Q may come while this one's is in use
  int blocks_per_sm = 1;  // thread blocks that registers must leave room for
};

// A kernel's tile, and a smaller one (or none) for problems in which the first covers many pairs that are
// hidden or past the end (short masked sequences, few queries) or leaves multiprocessors without a tile (one
// long sequence on few heads).
struct ForwardTiles {
  ForwardTile main, small = {};
};

// A combination without a row has zero warps, which the kernel's traits refuse to compile. The sm80 family
// stays within the 99 KB of shared memory that a block has on GPUs of 8.6 and 8.9. Measurements:
// docs/forward_sm80.md and _sm90.md.
constexpr ForwardTiles forward_tiles(Family family, int head_dim) {
  if (family == Family::sm80) {
    switch (head_dim) {
      // Three blocks an SM: 168 registers, which 64 keys exceed by 44 bytes. Two blocks of 64 keys: 2-5%
      // slower at 512.
      case 64: return {{.block_m = 128, .block_n = 48, .stages = 2, .warps = 4, .blocks_per_sm = 3}};
      case 96: return {{.block_m = 128, .block_n = 64, .stages = 2, .warps = 4}};
      // 32 rows a warp: K and V are read from shared memory half as often as with 16, which loses 20%. 32 or
      // 48 keys lose 5-8% to 64.
      case 128: return {{.block_m = 128, .block_n = 64, .stages = 2, .warps = 4}};
      case 192: return {{.block_m = 64, .block_n = 64, .stages = 1, .warps = 4}};
      // 48 keys lose 3-6%.
      case 256: return {{.block_m = 64, .block_n = 64, .stages = 1, .warps = 4}};
    }
  }
  if (family == Family::sm90) {
    switch (head_dim) {
      // 128 x 128 loses up to 19% on the same pairs, but wins 22% at 512 causal and 23% at 1024 causal.
      case 64:
        return {{.block_m = 192, .block_n = 128, .stages = 2, .warps = 12, .stages_q = 2},
                {.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2}};
      case 96: return {{.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2}};
      case 128: return {{.block_m = 128, .block_n = 128, .stages = 2, .warps = 8, .stages_q = 2}};
      case 192: return {{.block_m = 128, .block_n = 96, .stages = 2, .warps = 8}};
      // 80 keys lose 10% at 512 and 37% at 16k to 64.
      case 256: return {{.block_m = 128, .block_n = 64, .stages = 2, .warps = 8}};
    }
  }
  return {};
}

}  // namespace flash_cute
