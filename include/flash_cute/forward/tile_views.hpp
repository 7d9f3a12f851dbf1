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

// A lane owns two neighbouring columns of every eight. One bit for each of them that lies below `limit`,
// which counts from the first.
CUTE_DEVICE uint32_t columns_below(int limit) {
  int const columns = max(0, min(limit, 128));
  int const owned = 2 * (columns / 8) + min(columns % 8, 2);
  return owned == 32 ? ~0u : (1u << owned) - 1;
}

// Scores of pairs that the mask hides become -inf. cS holds the (row, key) coordinates of acc_s within the
// tile.
template <class Mask, class Coords, class Scores>
CUTE_DEVICE void hide_invisible(Mask const& mask, int m_begin, int n_begin, Coords const& cS, Scores& acc_s) {
  auto scores = row_col_view(acc_s);
  auto coords = row_col_view(cS);
  constexpr int kColumns = decltype(size<1>(scores))::value;
  static_assert(kColumns <= 32);
  int const lane_begin = n_begin + get<1>(coords(0, 0));
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    int const query = m_begin + get<0>(coords(row, 0));
    uint32_t const visible =
        columns_below(mask.end_key(query) - lane_begin) & ~columns_below(mask.first_key(query) - lane_begin);
    CUTE_UNROLL
    for (int col = 0; col < kColumns; ++col) {
      if (!(visible & (1u << col))) scores(row, col) = -INFINITY;
    }
  }
}

}  // namespace flash_cute
