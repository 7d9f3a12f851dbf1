// What both families' launches of sequences of unequal lengths share.
#pragma once

#include <limits>
#include <stdexcept>

#include "flash_cute/attention/prepare.cuh"
#include "flash_cute/forward/launch_kernel.cuh"

namespace flash_cute {

// Stands for the batch where a tile is chosen: as many sequences of the mean length, as the host knows no
// other.
inline ForwardParams of_mean_length(ForwardParams const& params) {
  ForwardParams mean = params;
  auto per_sequence = [&](int rows, int const* offsets) {
    return larger(1, offsets ? ceil_div(rows, larger(1, params.shape.batch)) : rows);
  };
  mean.shape.seqlen_q = per_sequence(params.shape.seqlen_q, params.lengths.cu_seqlens_q);
  mean.shape.seqlen_k = per_sequence(params.shape.seqlen_k, params.lengths.cu_seqlens_k);
  mean.mask = WindowMask::make(mean.shape.seqlen_q, mean.shape.seqlen_k, params.mask.left, params.mask.right);
  return mean;
}

inline RaggedOrder ragged_order(ForwardParams const& params, PackedRows const& rows) {
  ProblemShape const& shape = params.shape;
  int const heads_per_kv = shape.heads_q / shape.heads_kv;
  auto entry = [](TensorView const& view) {
    return view.batch_stride == 0 ? 0 : int(view.batch_stride / view.row_stride);
  };
  return {.header = static_cast<TileListHeader const*>(params.lengths.workspace),
          .rows = rows,
          .heads_per_kv = heads_per_kv,
          .packs = Divisor(ceil_div(heads_per_kv, int(rows.packed.value))),
          .heads_kv = shape.heads_kv,
          .entries = {entry(params.q), entry(params.k), entry(params.v), entry(params.out)}};
}

// Tiles of all heads, at most.
inline int most_tiles(ForwardParams const& params, RaggedOrder const& order) {
  int64_t const tiles = tile_capacity(params, order.rows) * order.heads_kv * int64_t(order.packs.value);
  if (tiles > std::numeric_limits<int>::max()) {
    throw std::runtime_error("flash_cute: there are more than 2**31 tiles of queries");
  }
  return int(tiles);
}

inline int64_t list_bytes(ForwardParams const& params, RaggedOrder const& order) {
  return sizeof(TileListHeader) + tile_capacity(params, order.rows) * sizeof(TileRecord);
}

template <bool kStartsEarly>
void launch_prepare(ForwardParams const& params, RaggedOrder const& order, cudaStream_t stream) {
  int const clearing = smaller(params.shape.batch + 1, 2 * params.device.multiprocessors);
  launch_kernel<prepare_kernel<kPrepareThreads>, kStartsEarly>(params.device, 1 + clearing, kPrepareThreads,
                                                               0, stream, params, order,
                                                               int(tile_capacity(params, order.rows)));
}

}  // namespace flash_cute
