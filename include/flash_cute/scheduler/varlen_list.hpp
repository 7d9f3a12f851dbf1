// Sequences, longest first: what their list depends on, and the list of a few that each block of a persistent
// kernel makes for itself (of many, scheduler/varlen_prepare.cuh makes one for all blocks).
#pragma once

#include <cute/config.hpp>

#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

constexpr int kLengthClasses = 256;

// A sequence, and what decides its place in a list.
struct ListedSequence {
  Sequence sequence;
  int m_blocks;      // of queries
  int length_class;  // of its longest tile: lengths within an eighth of a power of two; 0 has the longest
  bool unwritten;    // are there rows at its ends that no tile writes?

  CUTE_DEVICE static ListedSequence of(ForwardParams const& params, VarlenOrder const& order, int b) {
    Sequence const s = flash_cute::sequence(params, b);
    int const queries = order.rows.tile_queries(), m_blocks = order.m_blocks(s);
    auto keys = [&](int m_block) {
      BlockRange const visited = s.mask.visited(m_block * queries, queries, 1);
      return visited.end - visited.begin;
    };
    int const longest = larger(1, larger(keys(m_blocks / 2), larger(keys(0), keys(m_blocks - 1))));
    int const octave = 31 - __clz(longest);
    int const eighth = octave < 3 ? 0 : (longest >> (octave - 3)) & 7;
    bool const before = b == 0 && s.queries.begin > 0;
    bool const behind = b == params.shape.batch - 1 && s.queries.end < params.shape.seqlen_q;
    return {.sequence = s,
            .m_blocks = m_blocks,
            .length_class = kLengthClasses - 1 - (octave * 8 + eighth),
            .unwritten = before || behind || s.queries.begin + s.used < s.queries.end};
  }
};

// In shared memory.
struct VarlenList {
  static constexpr int kSearch = 64;
  static_assert(kSearch <= kFewSequences && kFewSequences <= 2 * kSearch);
  static constexpr int kLanes = 4;        // threads that count for a sequence
  SequenceRecord records[kFewSequences];  // where the block makes them; those without a query come last
  int places, first;                      // first: the sequence that has the block's first tile
  int unwritten;                          // as in VarlenListHeader

  // By all threads of a block, of which there are at least kLanes for each of kFewSequences.
  CUTE_DEVICE void make(ForwardParams const& params, VarlenOrder const& order) {
    if (order.is_prepared()) {
      if (threadIdx.x == 0) {
        places = order.header->places;
        unwritten = order.header->unwritten;
      }
      __syncthreads();
      return;
    }
    // Nobody cleared the counter before. A block that claims earlier than this gets any tile or none; one
    // that two blocks compute is written twice, alike.
    if (threadIdx.x == 0 && blockIdx.x == 0 && order.claimed) *order.claimed = 0;

    struct Key {
      int length_class, m_blocks;
    };
    auto* const keys = reinterpret_cast<Key*>(records);
    int const b = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, batch = params.shape.batch;
    bool const is_sequence = b < batch;
    ListedSequence const own = is_sequence ? ListedSequence::of(params, order, b) : ListedSequence{};
    Key const key{own.m_blocks > 0 ? own.length_class : kLengthClasses, own.m_blocks};
    if (is_sequence && lane == 0) keys[b] = key;
    int const any_unwritten = __syncthreads_or(own.unwritten);

    SequenceRecord record = order.record(b, own.sequence, 0);
    int rank = 0, first_block = 0;  // behind all that are longer, or as long and before it
    if (is_sequence) {
#pragma unroll 4
      for (int other = lane; other < batch; other += kLanes) {
        auto const [length_class, m_blocks] = keys[other];
        if (length_class < key.length_class || (length_class == key.length_class && other < b)) {
          ++rank;
          first_block += m_blocks;
        }
      }
    }
    first_block = smaller(first_block, order.capacity);
    CUTE_UNROLL
    for (int step = 1; step < kLanes; step *= 2) {
      rank += __shfl_xor_sync(~0u, rank, step);
      first_block = smaller(first_block + __shfl_xor_sync(~0u, first_block, step), order.capacity);
    }
    __syncthreads();
    if (is_sequence && lane == 0) {
      record.first_block = first_block;
      records[rank] = record;
      int const place = order.packs_of_all.quotient(blockIdx.x);
      if (first_block <= place && place < first_block + own.m_blocks) first = rank;
      if (rank == batch - 1) {
        places = smaller(first_block + own.m_blocks, order.capacity);
        unwritten = any_unwritten;
      }
    }
    __syncthreads();
  }

  CUTE_DEVICE int tiles(VarlenOrder const& order) const { return places * int(order.packs_of_all.value); }

  CUTE_DEVICE VarlenTile tile(ForwardParams const& params, VarlenOrder const& order, int index) const {
    int const place = order.packs_of_all.quotient(index);
    SequenceRecord const* found = order.prepared() + place;
    if (!order.is_prepared()) {
      found = records;  // the last that begins no later
#pragma unroll 1
      for (int step = kSearch; step > 0; step /= 2) {
        if (found + step < records + params.shape.batch && found[step].first_block <= place) found += step;
      }
    }
    return order.tile(*found, index);
  }
  // Of a block that has one.
  CUTE_DEVICE VarlenTile first_tile(VarlenOrder const& order) const {
    int const index = blockIdx.x;
    if (order.is_prepared()) return order(index);
    return order.tile(records[first], index);
  }
};

}  // namespace flash_cute
