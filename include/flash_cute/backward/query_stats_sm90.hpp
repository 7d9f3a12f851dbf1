// What is known of each query alone, its LSE and its delta, and a warp that finds it while others
// compute.
#pragma once

#include "flash_cute/backward/dot.hpp"
#include "flash_cute/backward/warpgroup_sm90.hpp"
#include "flash_cute/core/bulk_add.hpp"

namespace flash_cute {

// May the loading thread load what a tile's queries have?
CUTE_DEVICE bool are_stats_known(BackwardParams const& params, KeyTile const& tile, int block_m) {
  int const* const known = params.workspace.stats_known;
  if (!known || tile.pair < params.workspace.pairs_before) return true;
  bool const in_order = offsets_in_order(params);
  bool const are_known =
      load_acquire(known + (in_order ? tile.pair : 0)) >= stats_wanted(params.shape, tile, block_m, in_order);
  fence_async_global();
  return are_known;
}

// Of a row that sees something. Scores of -inf alone are NaN once they are divided by their sum.
CUTE_DEVICE float lse_in_base_2(float lse) { return lse == -INFINITY ? NAN : lse * float(M_LOG2E); }

// What a block of queries of a sequence brings along, and where what is found of it goes. Rows count from its
// first one, of which LSE and delta have this place in the workspace.
template <class Traits>
struct QueryStatsBlock {
  BackwardParams const& params;
  int64_t place, given;
  int count;
  uint16_t* terms = nullptr;

  CUTE_DEVICE QueryStatsBlock(BackwardParams const& params_, SequenceOfQueries const& s, int head, int begin,
                              int64_t place_)
      : params(params_), place(place_), count(s.used - begin) {
    int const entry = entry_of(params, s);
    int64_t const row = s.begin + begin;
    given = entry * params.lse_batch_stride + int64_t(head) * params.shape.seqlen_q + row;
    if constexpr (Traits::kAddsTerms) {
      TensorView const& rows = params.workspace.terms;
      terms = static_cast<uint16_t*>(rows.data) + entry * rows.batch_stride + head * rows.head_stride +
              row * rows.row_stride;
    }
  }

  CUTE_DEVICE float lse(int row) const { return counts(row) ? params.lse[given + row] : INFINITY; }
  CUTE_DEVICE float gradient_of_lse(int row) const {
    return params.dlse && counts(row) ? params.dlse[given + row] : 0.f;
  }
  CUTE_DEVICE void store_lse(int row, float lse) const {
    if constexpr (Traits::kAddsTerms) {
      if (has_terms(row)) terms_of(row)[0] = term_of_lse(lse, counts(row), params.softmax_scale);
    } else {
      params.workspace.lse[place + row] = lse_in_base_2(lse);
    }
  }
  CUTE_DEVICE void store_delta(int row, float delta) const {
    if constexpr (Traits::kAddsTerms) {
      if (has_terms(row)) terms_of(row)[1] = parts_in_bf16(delta);
    } else {
      params.workspace.delta[place + row] = delta;
    }
  }

 private:
  CUTE_DEVICE bool counts(int row) const { return row < count; }
  CUTE_DEVICE int row_of_terms(int row) const { return row >> params.workspace.log2_terms_of_row; }
  // Others would lie past the sequence's end, where loads find zeros.
  CUTE_DEVICE bool has_terms(int row) const { return row_of_terms(row) < count; }
  CUTE_DEVICE uint2* terms_of(int row) const {
    int64_t const first = row_of_terms(row) * params.workspace.terms.row_stride;
    int const column = row - (row_of_terms(row) << params.workspace.log2_terms_of_row);
    return reinterpret_cast<uint2*>(terms + first) + 2 * column;
  }
};

// kRows rows of O and dO, on their way through shared memory.
template <class Traits, int kRows = Traits::kBlockM>
struct QueryStatsRows {
  using Element = typename Traits::Element;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  static constexpr int kArrivals = 2;
  BackwardParams const& params;
  BackwardMaps const& maps;
  Element* out;  // and dO behind it
  Barrier& come;

  // By one thread. begin: the first row in the sequence.
  template <cute::TMA::CacheHintSm90 hint = cute::TMA::CacheHintSm90::EVICT_NORMAL>
  CUTE_DEVICE void load(SequenceOfQueries const& s, int head, int begin) const {
    auto load_rows = [&](CUtensorMap const& map, Element* target, int entry_rows) {
      MapPlace const place =
          MapPlace::of(params.lengths.given, entry_of(params, s), entry_rows, s.begin, s.used);
      load_panels<Traits::kHeadDim, Traits::kPanel, kRows, hint>(
          map, come, target, kRows, 0, head, place.shift + begin, place.plane, place.bound);
    };
    constexpr bool kAll = kRows == Traits::kBlockM;
    load_rows(kAll ? maps.out : maps.few_out, out, maps.entry_rows.out);
    load_rows(kAll ? maps.dout : maps.few_dout, dout(), maps.entry_rows.dout);
  }

  // The sum of dO O of a row, so many chunks at a time. Swizzled, eight neighbouring rows have a column in
  // all banks.
  template <int kAtOnce>
  CUTE_DEVICE float multiply(int row) const {
    constexpr int kChunk = 16 / sizeof(Element), kChunks = Traits::kPanel / kChunk;
    int const first = row / (8 / kChunks) % kChunks;
    float sum = 0;
#pragma unroll kAtOnce
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

// The warp. It takes block after block, in the order in which tiles come to their heads, and waits for
// nothing but its own loads: so a block that somebody waits for is being worked on or comes next, or will be
// taken by whoever waits. O and dO come where sums of dQ will later.
template <class Traits>
struct QueryStatsFinder {
  static constexpr int kBlockM = Traits::kBlockM, kRows = Traits::kStatsRows;
  static constexpr int kLanes = 32;                               // each has its own rows
  static constexpr int kAtOnce = Traits::kHeadDim == 64 ? 8 : 4;  // chunks; more spill
  static constexpr int kFloats = Traits::kBlockFloats;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  BackwardMaps const& maps;
  uint32_t phase = 0;

  CUTE_DEVICE void run() {
    ProblemShape const& shape = params.shape;
    bool const in_order = offsets_in_order(params);
    BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
    RowsOrder const rows{params, queries, in_order};
    int const before = params.workspace.pairs_before * queries.of_one();
    auto take = [&] {
      int const taken = read_lane_index() == 0 ? before + atomicAdd(params.workspace.stats_taken, 1) : 0;
      return __shfl_sync(0xffffffffu, taken, 0);
    };
    for (int index = take(), next; index < rows.count(); index = next) {
      RowsOrder::Block const block = rows(index);
      int64_t const place = int64_t(block.head) * queries.count() + block.place;
      if (!in_order && params.workspace.dq) clear_sums(params.workspace.dq + place * kFloats);
      QueryStatsBlock<Traits> const found(params, block.sequence, block.head, block.begin, place * kBlockM);
      for (int part = 0; block.exists && part < kBlockM - kRows; part += kRows) {
        start(block, found, part);
        finish(found, part);
        __syncwarp();
      }
      constexpr int kLast = kBlockM - kRows;
      if (block.exists) start(block, found, kLast);
      next = take();  // while O and dO come
      if (block.exists) finish(found, kLast);
      __syncwarp();
      if ((block.exists || !in_order) && read_lane_index() == 0) {
        add_release(params.workspace.stats_known + (in_order ? block.pair : 0));
      }
    }
  }

 private:
  // Rows are made of them although nobody may come to add.
  CUTE_DEVICE static void clear_sums(float* sums) {
    for (int i = read_lane_index(); i < kFloats / 4; i += 32) reinterpret_cast<float4*>(sums)[i] = {};
    fence_async_global();
  }

  CUTE_DEVICE QueryStatsRows<Traits, kRows> loaded() const {
    return {params, maps, reinterpret_cast<typename Traits::Element*>(shared.sums), shared.stats_come};
  }

  // Of so many rows from row `part` of the block on.
  CUTE_DEVICE void start(RowsOrder::Block const& block, QueryStatsBlock<Traits> const& found,
                         int part) const {
    if (params.dout.data && read_lane_index() == 0) {
      loaded().load(block.sequence, block.head, block.begin + part);
    }
    int const first = part + read_lane_index();
    float lse[kRows / kLanes];
    CUTE_UNROLL
    for (int i = 0; i < kRows / kLanes; ++i) lse[i] = found.lse(first + kLanes * i);
    CUTE_UNROLL
    for (int i = 0; i < kRows / kLanes; ++i) found.store_lse(first + kLanes * i, lse[i]);
  }
  CUTE_DEVICE void finish(QueryStatsBlock<Traits> const& found, int part) {
    bool const has_dout = params.dout.data;
    if (has_dout) {
      shared.stats_come.wait(phase);
      phase ^= 1;
    }
#pragma unroll 1
    for (int row = read_lane_index(); row < kRows; row += kLanes) {
      float const of_lse = found.gradient_of_lse(part + row);
      found.store_delta(part + row, of_lse - (has_dout ? loaded().template multiply<kAtOnce>(row) : 0.f));
    }
  }
};

}  // namespace flash_cute
