// Zero fills the rows of out that no tile writes, and sets their LSE to -inf, beside the products and with
// few registers.
#pragma once

#include <cute/config.hpp>

#include "flash_cute/attention/sequence.hpp"

namespace flash_cute {

// By one warp, for these rows of an entry and all heads.
template <class Element>
CUTE_DEVICE void zero_fill_rows(ForwardParams const& params, int entry, RowRange const& rows) {
  constexpr int kLanes = 32, kChunk = 16 / sizeof(Element);  // elements of 16 bytes
  ProblemShape const& shape = params.shape;
  TensorView const& view = params.out;
  int const count = rows.end - rows.begin, lane = threadIdx.x % kLanes;

  // What lies closest in memory is written side by side: the heads of a row, or the rows of a head.
  bool const by_row = view.head_stride <= view.row_stride;
  int64_t const outer_stride = by_row ? view.row_stride : view.head_stride;
  int64_t const inner_stride = by_row ? view.head_stride : view.row_stride;
  int const outer_count = by_row ? count : shape.heads_q, inner_count = by_row ? shape.heads_q : count;
  constexpr int kMaxChunks = 256 / kChunk;  // of a row; those of a float32 row may be more than the lanes
  CUTE_UNROLL
  for (int before = 0; before < kMaxChunks; before += kLanes) {
    int chunks = shape.head_dim_v / kChunk;
    if constexpr (kMaxChunks > kLanes) chunks = smaller(chunks - before, kLanes);
    if (before > 0 && chunks <= 0) break;
    int const side_by_side = kLanes / chunks;
    int const first = lane / chunks, last = first < side_by_side ? inner_count : 0;
    auto* out = static_cast<Element*>(view.data) + entry * view.batch_stride + rows.begin * view.row_stride +
                first * inner_stride + (before + lane % chunks) * kChunk;
#pragma unroll 1
    for (int outer = 0; outer < outer_count; ++outer) {
      auto* chunk = out;
#pragma unroll 1
      for (int inner = first; inner < last; inner += side_by_side) {
        __stcs(reinterpret_cast<uint4*>(chunk), uint4{});  // streaming stores, so that K and V stay in L2
        chunk += side_by_side * inner_stride;
      }
      out += outer_stride;
    }
  }

  float* lse = params.lse + entry * params.lse_batch_stride + rows.begin;
#pragma unroll 1
  for (int head = 0; head < shape.heads_q; ++head) {
#pragma unroll 1
    for (int row = lane; row < count; row += kLanes) lse[row] = -INFINITY;
    lse += shape.seqlen_q;
  }
}

// Part `part` of `parts`, each by one warp.
template <class Element>
CUTE_DEVICE void zero_fill_unwritten(ForwardParams const& params, int part, int parts) {
  for_each_unwritten(params, part, parts,
                     [&](int entry, RowRange const& rows) { zero_fill_rows<Element>(params, entry, rows); });
}

}  // namespace flash_cute
