// How O leaves the Ampere family: straight from the registers of the compute warps.
#pragma once

#include "flash_cute/attention/ragged.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/layout.hpp"

namespace flash_cute {

// Writes O in chunks of 16 bytes. The four lanes of a quad own two neighbouring columns each of every eight;
// after a transpose among them each lane owns eight neighbouring columns. Shared memory and its barriers stay
// out of it.
template <class Element, class Tile, class Output, class Coords>
CUTE_DEVICE void store_output(ForwardParams const& params, Tile const& tile, Output const& acc_o,
                              Coords const& cO) {
  constexpr int kWords = 4, kColumns = 2 * kWords;  // that a lane owns of 32 columns
  auto const output = row_col_view(acc_o);
  auto const coords = row_col_view(cO);
  static_assert(decltype(size<1>(output))::value % kColumns == 0, "head dims come in multiples of 32");
  Element* const data = static_cast<Element*>(params.out.data) + entry_of(tile) * params.out.batch_stride +
                        tile.head * params.out.head_stride +
                        int64_t(first_query_of(tile) + tile.m_begin) * params.out.row_stride;
  int const seqlen_q = mask_of(params, tile).seqlen_q;
  int const lane = threadIdx.x % kWords;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(output); ++i) {
    int const row = get<0>(coords(i, 0));
    CUTE_UNROLL
    for (int group = 0; group < size<1>(output) / kColumns; ++group) {
      uint32_t words[kWords];
      CUTE_UNROLL
      for (int word = 0; word < kWords; ++word) {
        int const column = group * kColumns + 2 * word;
        words[word] = pack<Element>(output(i, column), output(i, column + 1));
      }
      transpose_quad(words, lane);
      int const column = (group * kWords + lane) * kColumns;
      if (tile.m_begin + row < seqlen_q && column < params.shape.head_dim) {
        *reinterpret_cast<uint4*>(data + row * params.out.row_stride + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace flash_cute
