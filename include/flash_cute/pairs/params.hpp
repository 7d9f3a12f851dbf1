// What kernels need that store a value of each pair of a query and a key: the gradient of a bias, the weights
// themselves, or both. Plain host structs.
#pragma once

#include "flash_cute/backward/params.hpp"

namespace flash_cute {

// (entries, heads, rows, columns) of values, dense. A dimension of 1 has one sum for all; entries, a divisor
// of the batch, are shared by neighbouring sequences.
struct PairShape {
  int entries, heads, rows, columns;

  FLASH_CUTE_HOST_DEVICE int64_t count() const { return int64_t(entries) * heads * rows * columns; }
};

struct PairParams {
  BackwardParams call;  // operands, and what changes scores and hides pairs; it asks for no other gradient
  PairShape shape;
  // Of the operands' element, null where they are not asked for: sums of dS, which are the gradient of a
  // bias, and weights, where `shape` is that of all pairs. Beside sums these are what multiplies V, after
  // dropout.
  void *sums = nullptr, *weights = nullptr;
  int weights_stride = 0;  // from one row to the next; a tile's may be written to its end
  // Is there a dP = dO V^T? Else it is 0, or not asked for.
  FLASH_CUTE_HOST_DEVICE bool has_dp() const { return call.dout.data != nullptr; }

  float* parts = nullptr;  // (parts, entries, heads, rows, columns) of sums; null where there is one part
};

}  // namespace flash_cute
