// Tensor maps of operands on the Hopper family, for both passes.
#pragma once

#include "flash_cute/attention/keys/varlen.hpp"
#include "flash_cute/core/sm90/tma.hpp"

namespace flash_cute {

// The rows of an operand that a map has.
struct MapShape {
  int columns, heads, rows, batch;
};

// Of sequences that are all as long as the shape says. Of five dimensions the last one has size 1.
template <class Element, int dims>
CUtensorMap uniform_map(int device, TensorView const& view, MapShape const& shape, TmaBox box) {
  uint64_t const columns = shape.columns, heads = shape.heads, rows = shape.rows, batch = shape.batch;
  if constexpr (dims == 4) {
    return make_tensor_map<Element, dims>(device, view.data, {columns, heads, rows, batch},
                                          {view.head_stride, view.row_stride, view.batch_stride}, box);
  } else {
    return make_tensor_map<Element, dims>(device, view.data, {columns, heads, rows, batch, 1},
                                          {view.head_stride, view.row_stride, view.batch_stride, 0}, box);
  }
}

// Of sequences of unequal lengths, whose rows are named by a RaggedCoord. entry_rows: see VarlenCoords.
template <class Element>
CUtensorMap ragged_map(int device, TensorView const& view, MapShape const& shape, int entry_rows,
                       TmaBox box) {
  uint64_t const planes = uint64_t(shape.batch - 1) * entry_rows + shape.rows + 1;
  int64_t const back = RaggedCoord::kWrap / int64_t(sizeof(Element)) - view.row_stride;
  return make_tensor_map<Element, 5>(
      device, view.data,
      {uint64_t(shape.columns), uint64_t(shape.heads), RaggedCoord::kBound, planes, RaggedCoord::kBound + 1},
      {view.head_stride, view.row_stride, view.row_stride, back}, box);
}

// Of a bias that comes in tiles: (columns, heads, rows, entries).
template <class Element>
CUtensorMap bias_map(int device, BiasParams const& bias, ProblemShape const& shape, TmaBox box) {
  TensorView const view{const_cast<void*>(bias.data), bias.entry_stride, bias.head_stride, bias.row_stride};
  int const entries = bias.entry_stride == 0 ? 1 : shape.batch / bias.sequences_of_entry;
  return uniform_map<Element, 4>(
      device, view, {bias.columns, bias.head_stride == 0 ? 1 : shape.heads_q, bias.rows, entries}, box);
}

}  // namespace flash_cute
