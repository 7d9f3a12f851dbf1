// Partial results of tiles whose keys are cut into splits: where they lie between the kernel that computes
// them and the one that combines them.
#pragma once

#include <cstdint>

#include "flash_cute/attention/tile.hpp"
#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// Of each slot the tile, where no list in global memory has it, and its rows in float32: O, each part's
// normalised by its own sum, and its LSE.
struct PartialResults {
  SplitTile* tiles;  // or null
  float *out, *lse;
  int rows, head_dim_v;  // of a slot

  FLASH_CUTE_HOST_DEVICE float* out_row(int slot, int row) const {
    return out + (int64_t(slot) * rows + row) * head_dim_v;
  }
  FLASH_CUTE_HOST_DEVICE float& lse_of(int slot, int row) const { return lse[int64_t(slot) * rows + row]; }

  static int64_t bytes(int slots, int rows, int head_dim_v, bool has_tiles) {
    int64_t const of_rows = int64_t(rows) * (head_dim_v + 1) * int64_t(sizeof(float));
    return slots * (of_rows + (has_tiles ? int64_t(sizeof(SplitTile)) : 0));
  }
  // Of a thread block, see SplitTotal.
  static int64_t total_bytes(int block_m, int head_dim_v) {
    constexpr int kBesideO = 8;
    return int64_t(block_m) * (head_dim_v + kBesideO) * int64_t(sizeof(float));
  }
  // In memory of that many bytes.
  static PartialResults in(void* memory, int slots, int rows, int head_dim_v, bool has_tiles) {
    auto* const tiles = static_cast<SplitTile*>(memory);
    auto* const out = reinterpret_cast<float*>(tiles + (has_tiles ? slots : 0));
    return {has_tiles ? tiles : nullptr, out, out + int64_t(slots) * rows * head_dim_v, rows, head_dim_v};
  }
};

}  // namespace flash_cute
