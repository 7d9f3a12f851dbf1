// How results leave: LSE from the softmax's registers, O through shared memory in 16-byte rows.
#pragma once

#include "flash_cute/attention/scheduler.hpp"
#include "flash_cute/core/copy.hpp"
#include "flash_cute/core/layout.hpp"
#include "flash_cute/forward/tile_views.hpp"

namespace flash_cute {

// Writes the LSE of the rows whose first column this thread owns. cO: (row, column) coordinates of acc_o.
template <class Softmax, class Coords>
CUTE_DEVICE void store_lse(ForwardParams const& params, TileCoord const& tile, int m_begin, Softmax const& softmax,
                           Coords const& cO) {
  ProblemShape const& shape = params.shape;
  float* const lse = params.lse + (int64_t(tile.batch) * shape.heads_q + tile.head) * shape.seqlen_q + m_begin;
  auto const coords = row_col_view(cO);
  CUTE_UNROLL
  for (int i = 0; i < size<0>(coords); ++i) {
    auto const coord = coords(i, 0);
    if (get<1>(coord) == 0 && m_begin + get<0>(coord) < shape.seqlen_q) lse[get<0>(coord)] = softmax.lse(i);
  }
}

template <class Traits>
struct ForwardEpilogueSm80 {
  using Element = typename Traits::Element;
  using TileShape = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>;

  template <class Softmax, class Output>
  CUTE_DEVICE static void store(ForwardParams const& params, TileCoord const& tile,
                                typename Traits::SharedStorage& shared, int thread, Softmax const& softmax,
                                Output const& acc_o) {
    typename Traits::TiledMma const mma;
    int const m_begin = tile.m_block * Traits::kBlockM;
    Tensor cO = mma.get_slice(thread).partition_C(make_identity_tensor(TileShape{}));
    store_lse(params, tile, m_begin, softmax, cO);

    // O takes Q's place: a warp overwrites only the rows of Q that it alone has read.
    Tensor sO = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});
    Tensor rO = convert<Element>(acc_o);
    auto const writer = make_tiled_copy_C(typename Traits::OutputAtom{}, mma).get_slice(thread);
    copy(typename Traits::OutputAtom{}, writer.retile_S(rO), writer.partition_D(sO));
    __syncthreads();

    Tensor gO = local_tensor<Element>(params.out, tile.batch, tile.head, m_begin, TileShape{});
    auto const storer = typename Traits::TiledStore{}.get_slice(thread);
    copy_inside(typename Traits::StoreAtom{}, storer.partition_S(sO), storer.partition_D(gO),
                storer.partition_S(make_identity_tensor(TileShape{})),
                TileBounds{params.shape.seqlen_q - m_begin, params.shape.head_dim});
  }
};

}  // namespace flash_cute
