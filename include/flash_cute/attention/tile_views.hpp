// Tiles of the operands as CuTe tensors.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/accumulator.hpp"
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

}  // namespace flash_cute
