// The blocks of pairs that are added up to a tile of values.
#pragma once

#include <cute/config.hpp>

#include "flash_cute/attention/mask/mask_table.hpp"
#include "flash_cute/attention/scores/place.hpp"
#include "flash_cute/pairs/plan.hpp"

namespace flash_cute {

// A block of pairs. Keys are counted from the first that counts, which may lie within the block.
struct alignas(16) PairStep {
  int b, head;
  int m_begin, n_begin;
  int queries, keys;  // that count, of the sequence
  int key_begin;      // the row of key 0
  int is_full;        // does every pair of the block count, and is it seen?

  // A copy that is in registers: the compiler might read its original again, which is written anew meanwhile.
  CUTE_DEVICE PairStep kept() const {
    PairStep step = *this;
    for (int* const part : {&step.b, &step.head, &step.m_begin, &step.n_begin, &step.queries, &step.keys,
                            &step.key_begin, &step.is_full}) {
      asm volatile("" : "+r"(*part));
    }
    return step;
  }
  // Sequences are not packed: their first query is row 0.
  CUTE_DEVICE ScorePlace place() const {
    return {.sequence = b,
            .head = head,
            .diagonal = keys - queries,
            .queries = queries,
            .query_begin = 0,
            .key_begin = key_begin};
  }
};

// The tile of a thread block, and its steps, which are found 32 at a time, by a warp.
template <int kTileN_>
struct PairSteps {
  static constexpr int kBlockM = PairTile::kBlockM, kTileN = kTileN_, kLanes = 32;
  PairParams const& params;
  WindowMask const& limits;
  PairPlan const& plan;
  int entry, head, m_block, n_block, part;

  CUTE_DEVICE PairSteps(PairParams const& params_, WindowMask const& limits_, PairPlan const& plan_,
                        unsigned tile)
      : params(params_), limits(limits_), plan(plan_) {
    auto next = [&](int size) {
      int const index = int(tile % unsigned(size));
      tile /= unsigned(size);
      return index;
    };
    n_block = next(plan.n_blocks);
    m_block = next(plan.m_blocks);
    head = next(params.shape.heads);
    entry = next(params.shape.entries);
    part = int(tile);
  }

  CUTE_DEVICE int sequences_of_entry() const { return params.call.shape.batch / params.shape.entries; }

  // Are a tile's sums those of its own values?
  CUTE_DEVICE bool stores_values() const {
    return !params.parts && params.shape.rows > 1 && params.shape.columns > 1;
  }
  // Of the tile, among all of a part's. stride: from one row to the next.
  CUTE_DEVICE int64_t first_value(int stride) const {
    PairShape const& shape = params.shape;
    int64_t const row = ((int64_t(part) * shape.entries + entry) * shape.heads + head) * shape.rows;
    return (row + m_block * kBlockM) * stride + n_block * kTileN;
  }

  // The first of the steps, and the one after the last.
  CUTE_DEVICE int begin() const { return int(plan.steps * part / plan.parts); }
  CUTE_DEVICE int end() const { return int(plan.steps * (part + 1) / plan.parts); }

  // Finds those from `first` on that see a pair, and writes them to a ring of kMost from `place` on; returns
  // how many there are.
  template <int kMost>
  CUTE_DEVICE int find(int first, PairStep* ring, int place) const {
    int const lane = threadIdx.x % kLanes;
    PairStep step;
    bool const is_seen = first + lane < end() && find(first + lane, step);
    unsigned const seen = __ballot_sync(~0u, is_seen);
    if (is_seen) ring[(place + __popc(seen & ((1u << lane) - 1))) % kMost] = step;
    return __popc(seen);
  }

 private:
  CUTE_DEVICE bool find(int index, PairStep& step) const {
    BackwardParams const& call = params.call;
    PairShape const& shape = params.shape;
    auto next = [&](int size) {
      int const of_size = index % size;
      index /= size;
      return of_size;
    };
    int const m = shape.rows == 1 ? next(ceil_div(call.shape.seqlen_q, kBlockM)) : m_block;
    int const n = shape.columns == 1 ? next(ceil_div(call.shape.seqlen_k, kTileN)) : n_block;
    step.head = shape.heads == 1 ? next(call.shape.heads_q) : head;
    step.b = entry * sequences_of_entry() + index;
    Sequence const s = sequence(call.shape, call.lengths, limits, step.b);
    step.m_begin = m * kBlockM;
    step.key_begin = s.k_begin;
    step.n_begin = n * kTileN - s.k_begin;
    step.queries = s.used;
    step.keys = s.mask.seqlen_k;
    if (step.m_begin >= s.used || step.n_begin >= step.keys || step.n_begin + kTileN <= 0) return false;
    // The table's blocks begin with key 0: a block of values may lie in two of them.
    auto const table = MaskTable::make(call, call.workspace.mask_table, kBlockM, kTileN, false);
    BlockBits const* const bits = table.key_bits_of(table.m_block(step.b, step.head, step.m_begin));
    int const first = larger(0, step.n_begin) / kTileN, last = smaller(step.n_begin + kTileN, step.keys) - 1;
    bool is_visited = false;
    step.is_full =
        step.n_begin >= 0 && step.n_begin + kTileN <= step.keys && step.m_begin + kBlockM <= s.used;
    for (int block = first; block <= last / kTileN; ++block) {
      BlockBits const word = bits[block / BlockBits::kBlocks];
      is_visited |= word.visited >> block % BlockBits::kBlocks & 1;
      step.is_full &= word.full >> block % BlockBits::kBlocks & 1;
    }
    return is_visited;
  }
};

}  // namespace flash_cute
