// The tensor memory accelerator moves tiles: tensor maps are made on the host, loads and stores issued in
// kernels.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "flash_cute/core/element.hpp"
#include "flash_cute/core/sm90/tensor_map.hpp"

namespace flash_cute {

// The part of an operand that one load brings. In shared memory the heads of one row of the operand are
// neighbouring rows, and those of the next row of the operand follow.
struct TmaBox {
  int columns, heads, rows;
  bool swizzled = true;
};

// Describes an operand of `dims` dimensions (columns, heads and rows come first) that is loaded box by box.
// What a box covers outside of the operand arrives as zeros, whatever lies there in memory. Strides count
// elements and begin with that of the heads.
template <class Element, int dims>
CUtensorMap make_tensor_map(int device, void* data, uint64_t const (&sizes)[dims],
                            int64_t const (&strides)[dims - 1], TmaBox box) {
  uint64_t bytes[dims - 1];
  for (int dim = 1; dim < dims; ++dim) {
    constexpr uint64_t kAlignment = 16;  // the stride of a dimension of size 1 is never used
    bytes[dim - 1] = sizes[dim] == 1 ? kAlignment : uint64_t(strides[dim - 1]) * sizeof(Element);
  }
  uint32_t const extents[5] = {uint32_t(box.columns), uint32_t(box.heads), uint32_t(box.rows), 1, 1};
  uint32_t const steps[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  encode_tensor_map(device, [&](auto* encoder) {
    return encoder(&map,
                   std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                   dims, data, sizes, bytes, extents, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   !box.swizzled                          ? CU_TENSOR_MAP_SWIZZLE_NONE
                   : box.columns * sizeof(Element) == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                          : CU_TENSOR_MAP_SWIZZLE_64B,
                   box.swizzled ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
  return map;
}

// Loads kColumns columns, from first_column on, into `rows` rows of shared memory, which consists of panels
// of kPanel columns with room for kRows rows each. One thread calls it. head and coordinates are those of the
// first row in the operand.
template <int kColumns, int kPanel, int kRows, class Element, class... Coordinates>
CUTE_DEVICE void load_panels(CUtensorMap const& map, cutlass::arch::ClusterTransactionBarrier& arrived,
                             Element* target, int rows, int first_column, int head,
                             Coordinates... coordinates) {
  arrived.arrive_and_expect_tx(rows * kColumns * sizeof(Element));
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kPanel) {
    cute::SM90_TMA_LOAD::copy(&map, reinterpret_cast<uint64_t*>(&arrived),
                              static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                              target + column * kRows, first_column + column, head, coordinates...);
  }
}

// Stores kColumns columns, from first_column on. One thread calls it and has to wait before shared memory is
// written again. Rows and columns outside of the operand are not written.
template <int kColumns, int kPanel, int kRows, class Element, class... Coordinates>
CUTE_DEVICE void store_panels(CUtensorMap const& map, Element const* source, int first_column, int head,
                              Coordinates... coordinates) {
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kPanel) {
    cute::SM90_TMA_STORE::copy(&map, source + column * kRows, first_column + column, head, coordinates...);
  }
  cute::tma_store_arrive();
}

}  // namespace flash_cute
