// What is known of each query alone, its LSE and its delta.
#pragma once

#include "flash_cute/backward/dot.hpp"
#include "flash_cute/backward/sm90/warpgroup.hpp"

namespace flash_cute {

// Of a row that sees something. Scores of -inf alone are NaN once they are divided by their sum.
CUTE_DEVICE float lse_in_base_2(float lse) { return lse == -INFINITY ? NAN : lse * float(M_LOG2E); }

// What a block of queries of a sequence brings along, and where what is found of it goes. Rows count from its
// first one, of which LSE and delta have this place in the workspace.
template <class Traits>
struct LseDeltaBlock {
  BackwardParams const& params;
  int64_t place, given;
  int count;
  uint16_t* terms = nullptr;

  CUTE_DEVICE LseDeltaBlock(BackwardParams const& params_, QuerySequence const& s, int head, int begin,
                            int64_t place_)
      : params(params_), place(place_), count(s.used - begin) {
    int const entry = entry_of(params, s);
    int64_t const row = s.begin + begin;
    given = entry * params.lse_batch_stride + int64_t(head) * params.shape.seqlen_q + row;
    if constexpr (Traits::kLseDeltaMma) {
      TensorView const& rows = params.workspace.lse_delta.terms;
      terms = static_cast<uint16_t*>(rows.data) + entry * rows.batch_stride + head * rows.head_stride +
              row * rows.row_stride;
    }
  }

  CUTE_DEVICE float lse(int row) const { return counts(row) ? params.lse[given + row] : INFINITY; }
  CUTE_DEVICE float gradient_of_lse(int row) const {
    return params.dlse && counts(row) ? params.dlse[given + row] : 0.f;
  }
  CUTE_DEVICE void store_lse(int row, float lse) const {
    if constexpr (Traits::kLseDeltaMma) {
      if (has_terms(row)) terms_of(row)[0] = term_of_lse(lse, counts(row), params.softmax_scale);
    } else {
      params.workspace.lse_delta.lse[place + row] = lse_in_base_2(lse);
    }
  }
  CUTE_DEVICE void store_delta(int row, float delta) const {
    if constexpr (Traits::kLseDeltaMma) {
      if (has_terms(row)) terms_of(row)[1] = parts_in_bf16(delta);
    } else {
      params.workspace.lse_delta.delta[place + row] = delta;
    }
  }

 private:
  CUTE_DEVICE bool counts(int row) const { return row < count; }
  CUTE_DEVICE int row_of_terms(int row) const { return row >> params.workspace.lse_delta.log2_terms_of_row; }
  // Others would lie past the sequence's end, where loads find zeros.
  CUTE_DEVICE bool has_terms(int row) const { return row_of_terms(row) < count; }
  CUTE_DEVICE uint2* terms_of(int row) const {
    int64_t const first = row_of_terms(row) * params.workspace.lse_delta.terms.row_stride;
    int const column = row - (row_of_terms(row) << params.workspace.lse_delta.log2_terms_of_row);
    return reinterpret_cast<uint2*>(terms + first) + 2 * column;
  }
};

// Rows of O and dO, on their way through shared memory.
template <class Traits>
struct DeltaOperands {
  static constexpr int kRows = Traits::kBlockM;
  using Element = typename Traits::Element;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  static constexpr int kArrivals = 2;
  BackwardParams const& params;
  BackwardMaps const& maps;
  Element* out;  // and dO behind it
  Barrier& come;

  // By one thread. begin: the first row in the sequence.
  CUTE_DEVICE void load(QuerySequence const& s, int head, int begin) const {
    auto load_rows = [&](CUtensorMap const& map, Element* target, int entry_rows) {
      TmaCoord const place =
          TmaCoord::of(params.lengths.given, entry_of(params, s), entry_rows, s.begin, s.used);
      load_panels<Traits::kHeadDim, Traits::kPanel, kRows>(map, come, target, kRows, 0, head,
                                                           place.shift + begin, place.plane, place.bound);
    };
    load_rows(maps.out, out, maps.entry_rows.out);
    load_rows(maps.dout, dout(), maps.entry_rows.dout);
  }

  // The sum of dO O of a row. Swizzled, eight neighbouring rows have a column in all banks.
  CUTE_DEVICE float multiply(int row) const {
    constexpr int kChunk = 16 / sizeof(Element), kChunks = Traits::kPanel / kChunk;
    int const first = row / (8 / kChunks) % kChunks;
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < Traits::kHeadDim / kChunk; ++i) {
      int const at = (i / kChunks * kRows + row) * Traits::kPanel + (first ^ (i % kChunks)) * kChunk;
      sum += dot_of_chunk<Element>(*reinterpret_cast<uint4 const*>(dout() + at),
                                   *reinterpret_cast<uint4 const*>(out + at));
    }
    return sum;
  }

 private:
  CUTE_DEVICE Element* dout() const { return out + kRows * Traits::kHeadDim; }
};

}  // namespace flash_cute
