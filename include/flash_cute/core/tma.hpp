// Tiles by the tensor memory accelerator: tensor maps on the host, loads in the kernel.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "flash_cute/core/element.hpp"
#include "flash_cute/core/tensor_map.hpp"

namespace flash_cute {

// The part of an operand that one load brings; in shared memory its rows lie head after head of one row of
// the operand, then those of the next.
struct TmaBox {
  int columns, heads, rows;
};

// Describes a (batch, head, row, column) operand that is loaded box by box. What a box covers outside of the
// operand arrives as zeros, whatever lies there in memory.
template <class Element>
CUtensorMap make_tensor_map(int device, TensorView const& view, int head_dim, int seqlen, int heads,
                            int batch, TmaBox box) {
  constexpr uint64_t kAlignment = 16;  // of strides; the stride of a dimension of size 1 is never used
  auto stride = [](int64_t elements, int size) {
    return size == 1 ? kAlignment : uint64_t(elements) * sizeof(Element);
  };
  uint64_t const sizes[4] = {uint64_t(head_dim), uint64_t(heads), uint64_t(seqlen), uint64_t(batch)};
  uint64_t const strides[3] = {stride(view.head_stride, heads), stride(view.row_stride, seqlen),
                               stride(view.batch_stride, batch)};
  uint32_t const extents[4] = {uint32_t(box.columns), uint32_t(box.heads), uint32_t(box.rows), 1};
  uint32_t const steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  encode_tensor_map(device, [&](auto* encoder) {
    return encoder(
        &map,
        std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        4, view.data, sizes, strides, extents, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        box.columns * sizeof(Element) == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
  return map;
}

// Loads kHeadDim columns of `rows` rows of shared memory, which start at this head and row of the operand, by
// one thread: in panels of kPanel columns, with room for kRows rows each.
template <int kHeadDim, int kPanel, int kRows, class Element>
CUTE_DEVICE void load_panels(CUtensorMap const& map, cutlass::arch::ClusterTransactionBarrier& arrived,
                             Element* target, int rows, int head, int begin, int batch) {
  arrived.arrive_and_expect_tx(rows * kHeadDim * sizeof(Element));
  CUTE_UNROLL
  for (int column = 0; column < kHeadDim; column += kPanel) {
    cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&arrived),
                                 static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                 target + column * kRows, column, head, begin, batch);
  }
}

// The way back for kColumns columns from first_column on, by one thread, which has to wait before shared
// memory is written again. Rows and columns outside of the operand are not written.
template <int kColumns, int kPanel, int kRows, class Element>
CUTE_DEVICE void store_panels(CUtensorMap const& map, Element const* source, int first_column, int head,
                              int begin, int batch) {
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kPanel) {
    cute::SM90_TMA_STORE_4D::copy(&map, source + column * kRows, first_column + column, head, begin, batch);
  }
  cute::tma_store_arrive();
}

}  // namespace flash_cute
