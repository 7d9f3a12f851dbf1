// What softmax over the last dimension of a tensor needs, as plain host structs. No torch, no CUDA.
#pragma once

#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// What the backward reads beside gradients: of 16-bit types the scores, of which it computes probabilities
// again, as those that the forward wrote are rounded; of fp32 these.
constexpr bool keeps_scores(ElementType element) { return element != ElementType::fp32; }

// Scores are (batch, heads, rows, columns); columns lie one behind the other.
struct ScoreShape {
  int batch, heads, rows;
  int columns;

  FLASH_CUTE_HOST_DEVICE int all_rows() const { return batch * heads * rows; }  // within int
};

// The columns of a row that count, from begin to end - 1.
struct VisibleColumns {
  int begin, end;
};

// Which columns count: of entry b leftpad_k[b] <= column < seqused_k[b], and with `causal` those up to the
// row's own, the last row standing at the last column that counts. Values that make no sense are cut off.
struct ColumnMask {
  bool causal = false;
  int const *seqused_k = nullptr, *leftpad_k = nullptr;  // (batch,); null: all columns, none

  FLASH_CUTE_HOST_DEVICE VisibleColumns visible(ScoreShape const& shape, int entry, int row) const {
    int const used = seqused_k ? within(shape.columns, seqused_k[entry]) : shape.columns;
    int const begin = leftpad_k ? within(used, leftpad_k[entry]) : 0;
    int const own_end = row + 1 - shape.rows + used;
    int const end = causal ? larger(own_end, begin) : used;
    return {begin, end};
  }

 private:
  FLASH_CUTE_HOST_DEVICE static int within(int size, int value) { return larger(0, smaller(value, size)); }
};

struct RowSoftmaxParams {
  ScoreShape shape;
  TensorView input;             // scores; of the backward see keeps_scores
  TensorView gradient;          // of the backward: of the probabilities; data null: there is none
  TensorView output;            // probabilities; of the backward the gradient of the scores
  float* lse = nullptr;         // (batch, heads, rows), contiguous; of the forward
  float const* dlse = nullptr;  // likewise, of the backward; null: there is none
  float scale;
  ColumnMask mask;
  DeviceInfo device;
  // Of rows that begin here or before, also the last chunk lies inside of the tensor. Set by the launch.
  struct {
    void const *input, *gradient;
  } whole_chunks_before = {};
  void* workspace = nullptr;  // RowSoftmaxPlan::workspace_bytes
};

}  // namespace flash_cute
