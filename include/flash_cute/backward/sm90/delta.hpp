// What the preprocess kernel computes for each query: the LSE in base 2 and neg_delta = dLSE -
// rowsum(dO O), as floats or as BF16 terms for LseDeltaMma.
#pragma once

#include "flash_cute/backward/dot.hpp"
#include "flash_cute/backward/sm90/warpgroup.hpp"

namespace flash_cute {

// The LSE and dLSE of an M block's rows, and where LSE and delta go. Rows count from the block's first one,
// whose LSE and delta are at `offset` in the workspace.
template <class Traits>
struct LseDeltaBlock {
  BackwardParams const& params;
  int64_t offset, lse_offset;  // in the workspace; in params.lse and dlse
  int count, sequence, head, first_row;
  uint16_t* terms = nullptr;

  CUTE_DEVICE LseDeltaBlock(BackwardParams const& params_, QuerySequence const& s, int head_, int begin,
                            int64_t offset_)
      : params(params_),
        offset(offset_),
        count(s.used - begin),
        sequence(s.index),
        head(head_),
        first_row(s.begin + begin) {
    int const entry = entry_of(params, s);
    int64_t const row = s.begin + begin;
    lse_offset = entry * params.lse_batch_stride + int64_t(head) * params.shape.seqlen_q + row;
    if constexpr (Traits::kLseDeltaMma) {
      TensorView const& rows = params.workspace.lse_delta.terms;
      terms = static_cast<uint16_t*>(rows.data) + entry * rows.batch_stride + head * rows.head_stride +
              row * rows.row_stride;
    }
  }

  CUTE_DEVICE float lse(int row) const { return sees_keys(row) ? params.lse[lse_offset + row] : INFINITY; }
  // Of a query that sees no key, too.
  CUTE_DEVICE float given_lse(int row) const {
    return is_valid(row) ? params.lse[lse_offset + row] : INFINITY;
  }
  CUTE_DEVICE float dlse(int row) const {
    return params.dlse && is_valid(row) ? params.dlse[lse_offset + row] : 0.f;
  }
  // An LSE of -inf is NaN: it means that a query sees only scores of -inf, whose P is NaN.
  CUTE_DEVICE void store_lse(int row, float lse) const {
    if constexpr (Traits::kLseDeltaMma) {
      if (has_terms(row)) terms_of(row)[0] = terms_of_lse(lse, sees_keys(row), params.softmax_scale);
    } else {
      params.workspace.lse_delta.lse[offset + row] =
          lse == -INFINITY ? NAN : BackwardMask<Traits::kMasking>::lse_in_base_2(params, lse);
    }
  }
  CUTE_DEVICE void store_delta(int row, float neg_delta) const {
    if constexpr (Traits::kLseDeltaMma) {
      if (has_terms(row)) terms_of(row)[1] = terms_in_bf16(neg_delta);
    } else {
      params.workspace.lse_delta.neg_delta[offset + row] = neg_delta;
    }
  }

 private:
  CUTE_DEVICE bool is_valid(int row) const { return row < count; }
  CUTE_DEVICE bool sees_keys(int row) const {
    return is_valid(row) &&
           BackwardMask<Traits::kMasking>::sees_any_key(params, sequence, head, first_row + row);
  }
  CUTE_DEVICE int row_of_terms(int row) const { return row >> params.workspace.lse_delta.log2_terms_of_row; }
  // Rows without terms are those whose terms would lie past the sequence's end, where loads give zeros.
  CUTE_DEVICE bool has_terms(int row) const { return row_of_terms(row) < count; }
  CUTE_DEVICE uint2* terms_of(int row) const {
    int64_t const first = row_of_terms(row) * params.workspace.lse_delta.terms.row_stride;
    int const column = row - (row_of_terms(row) << params.workspace.lse_delta.log2_terms_of_row);
    return reinterpret_cast<uint2*>(terms + first) + 2 * column;
  }
};

// O and dO of an M block in shared memory, and rowsum(dO O).
template <class Traits>
struct DeltaOperands {
  static constexpr int kRows = Traits::kBlockM;
  using Element = typename Traits::Element;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  static constexpr int kArrivals = 2;
  BackwardParams const& params;
  BackwardMaps const& maps;
  Element* out;  // dO lies after it
  Barrier& full;

  // Issues the loads, in one thread. begin: the block's first row in the sequence.
  CUTE_DEVICE void load(QuerySequence const& s, int head, int begin) const {
    auto load_rows = [&](CUtensorMap const& map, Element* target, int entry_rows) {
      TmaCoord const coord =
          TmaCoord::of(params.lengths.given, entry_of(params, s), entry_rows, s.begin, s.used);
      load_panels<Traits::kHeadDimV, Traits::kPanel, kRows>(map, full, target, kRows, 0, head,
                                                            coord.shift + begin, coord.plane, coord.bound);
    };
    load_rows(maps.out, out, maps.entry_rows.out);
    load_rows(maps.dout, dout(), maps.entry_rows.dout);
  }

  // rowsum(dO O) of a row, by one thread. As rows are swizzled, eight neighbouring threads read different
  // banks.
  CUTE_DEVICE float dot(int row) const {
    constexpr int kChunk = 16 / sizeof(Element), kChunks = Traits::kPanel / kChunk;
    int const first = row / (8 / kChunks) % kChunks;
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < Traits::kHeadDimV / kChunk; ++i) {
      int const at = (i / kChunks * kRows + row) * Traits::kPanel + (first ^ (i % kChunks)) * kChunk;
      sum += dot_of_chunk<Element>(*reinterpret_cast<uint4 const*>(dout() + at),
                                   *reinterpret_cast<uint4 const*>(out + at));
    }
    return sum;
  }

 private:
  CUTE_DEVICE Element* dout() const { return out + kRows * Traits::kHeadDimV; }
};

}  // namespace flash_cute
