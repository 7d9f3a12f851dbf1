// Partial results of tiles whose keys are cut into parts: where they lie between the kernel that computes
// them and the one that combines them.
#pragma once

#include <cstdint>

#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// Of each slot the rows of a tile, in float32: O, each part's normalised by its own sum, and its LSE.
struct PartialResults {
  float *out, *lse;
  int rows, head_dim;  // of a slot

  FLASH_CUTE_HOST_DEVICE float* out_row(int slot, int row) const {
    return out + (int64_t(slot) * rows + row) * head_dim;
  }
  FLASH_CUTE_HOST_DEVICE float& lse_of(int slot, int row) const { return lse[int64_t(slot) * rows + row]; }

  static int64_t bytes(int slots, int rows, int head_dim) {
    return int64_t(slots) * rows * (head_dim + 1) * int64_t(sizeof(float));
  }
  // In memory of that many bytes.
  static PartialResults in(void* memory, int slots, int rows, int head_dim) {
    auto* const out = static_cast<float*>(memory);
    return {out, out + int64_t(slots) * rows * head_dim, rows, head_dim};
  }
};

}  // namespace flash_cute
