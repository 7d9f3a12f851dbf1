// Tiles of the operands as CuTe tensors, and the mask applied to a tile of scores.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/layout.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

using namespace cute;

// The tile of `tile_shape` that starts at row `begin` of one head, in global memory.
template <class Element, class TileShape>
CUTE_DEVICE auto local_tensor(TensorView const& view, int batch, int head, int64_t begin,
                              TileShape tile_shape) {
  Element* const data = static_cast<Element*>(view.data) + batch * view.batch_stride +
                        head * view.head_stride + begin * view.row_stride;
  return make_tensor(make_gmem_ptr(data), tile_shape, make_stride(view.row_stride, _1{}));
}

// A tensor of the same shape without swizzle: what register fragments are shaped after.
template <class SharedTensor>
CUTE_DEVICE auto plain_like(SharedTensor const& tensor) {
  return make_tensor(tensor.data(), make_layout(shape(tensor.layout())));
}

// Scores of pairs that the mask hides become -inf. cS holds the (row, key) coordinates of acc_s within the
// tile.
template <class Mask, class Coords, class Scores>
CUTE_DEVICE void hide_invisible(Mask const& mask, int m_begin, int n_begin, Coords const& cS, Scores& acc_s) {
  auto scores = row_col_view(acc_s);
  auto coords = row_col_view(cS);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    int const query = m_begin + get<0>(coords(row, 0));
    int const first = mask.first_key(query) - n_begin, end = mask.end_key(query) - n_begin;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      int const key = get<1>(coords(row, col));
      if (key < first || key >= end) scores(row, col) = -INFINITY;
    }
  }
}

}  // namespace flash_cute
