// What softmax over the last dimension of a tensor needs, as plain host structs without torch or CUDA.
#pragma once

#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// Tells what the backward reads beside gradients. For 16-bit types it reads the scores and computes the
// probabilities again, as those that the forward wrote are rounded; for fp32 it reads the probabilities.
constexpr bool keeps_scores(ElementType element) { return element != ElementType::fp32; }

// Scores are (batch, heads, rows, columns), and columns are contiguous.
struct ScoreShape {
  int batch, heads, rows;
  int columns;

  FLASH_CUTE_HOST_DEVICE int all_rows() const { return batch * heads * rows; }  // within int
};

// The columns of a row that count are those from begin to end - 1.
struct VisibleColumns {
  int begin, end;
};

// Tells which columns count: for entry b those with leftpad_k[b] <= column < seqused_k[b], and with `causal`
// those up to the row's own, where the last row's own is the last column that counts. Values out of range are
// clamped.
struct ColumnMask {
  bool causal = false;
  int const *seqused_k = nullptr, *leftpad_k = nullptr;  // (batch,); null: all columns count, none is padding

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
  TensorView input;             // scores; for the backward see keeps_scores
  TensorView gradient;          // backward: the gradient of the probabilities; data null: there is none
  TensorView output;            // forward: probabilities; backward: the gradient of the scores
  float* lse = nullptr;         // forward: (batch, heads, rows), contiguous
  float const* dlse = nullptr;  // backward: the gradient of lse, likewise; null: there is none
  float scale;
  ColumnMask mask;
  DeviceInfo device;
  // The last chunk of a row that begins here or before lies inside of the tensor. The launch sets these.
  struct {
    void const *input, *gradient;
  } whole_chunks_before = {};
  void* workspace = nullptr;  // RowSoftmaxPlan::workspace_bytes
};

}  // namespace flash_cute
