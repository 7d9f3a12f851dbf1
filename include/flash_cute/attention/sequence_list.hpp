// Sequences, longest first: what their list depends on, and the list of a few that each block of a persistent
// kernel makes for itself (of many, attention/prepare.cuh makes one for all blocks).
#pragma once

#include <cute/config.hpp>

#include "flash_cute/attention/ragged.hpp"

namespace flash_cute {

constexpr int kLengthClasses = 256;

// A sequence, and what decides its place in a list.
struct Listed {
  Sequence sequence;
  int m_blocks;      // of queries
  int length_class;  // of its longest tile: lengths within an eighth of a power of two; 0 has the longest
  bool unwritten;    // are there rows at its ends that no tile writes?

  CUTE_DEVICE static Listed of(ForwardParams const& params, RaggedOrder const& order, int b) {
    Sequence const s = flash_cute::sequence(params, b);
    int const queries = order.rows.tile_queries(), m_blocks = ceil_div(s.used, queries);
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
struct SequenceList {
  static constexpr int kSearch = 64;
  static_assert(kSearch <= kFewSequences && kFewSequences <= 2 * kSearch);
  SequenceRecord records[kFewSequences];  // where the block makes them; those without a query come last
  int places;
  int unwritten, alike;  // as in TileListHeader

  // By all threads of a block, of which there are at least kFewSequences.
  CUTE_DEVICE void make(ForwardParams const& params, RaggedOrder const& order) {
    int const b = threadIdx.x;
    if (order.is_prepared()) {
      if (b == 0) {
        places = order.header->places;
        unwritten = order.header->unwritten;
        alike = order.header->alike;
      }
      __syncthreads();
      return;
    }
    // Nobody cleared the counter before. A block that claims earlier than this gets any tile or none; one
    // that two blocks compute is written twice, alike.
    if (b == 0 && blockIdx.x == 0 && order.claimed) *order.claimed = 0;

    struct Key {
      int length_class, m_blocks;
    };
    auto* const keys = reinterpret_cast<Key*>(records);
    bool const is_sequence = b < params.shape.batch;
    Listed const own = is_sequence ? Listed::of(params, order, b) : Listed{};
    if (is_sequence) keys[b] = {own.m_blocks > 0 ? own.length_class : kLengthClasses, own.m_blocks};
    int const any_unwritten = __syncthreads_or(own.unwritten);
    int const all_alike = __syncthreads_and(!is_sequence || order.expected.are_met(own.sequence));

    int rank = 0, first_place = 0;  // behind all that are longer, or as long and before it
    if (all_alike) {
      rank = b;
      first_place = b * own.m_blocks;
    } else if (is_sequence) {
      Key const key = keys[b];
#pragma unroll 4
      for (int other = 0; other < params.shape.batch; ++other) {
        auto const [length_class, m_blocks] = keys[other];
        if (length_class < key.length_class || (length_class == key.length_class && other < b)) {
          ++rank;
          first_place = smaller(first_place + m_blocks, order.capacity);  // overlapping offsets make more
        }
      }
    }
    __syncthreads();
    if (is_sequence) {
      records[rank] = order.record(b, own.sequence, first_place, all_alike);
      if (rank == params.shape.batch - 1) {
        places = smaller(first_place + own.m_blocks, order.capacity);
        unwritten = any_unwritten;
        alike = all_alike;
      }
    }
    __syncthreads();
  }

  CUTE_DEVICE int tiles(RaggedOrder const& order) const { return places * int(order.packs_of_all.value); }
  // That have one.
  CUTE_DEVICE int blocks(RaggedOrder const& order) const {
    return alike ? order.expected.blocks : tiles(order);
  }

  CUTE_DEVICE RaggedTile tile(ForwardParams const& params, RaggedOrder const& order, int index) const {
    int const place = order.packs_of_all.quotient(index);
    SequenceRecord const* found = order.prepared() + place;
    if (!order.is_prepared()) {
      found = records;  // the last that begins no later
#pragma unroll 1
      for (int step = kSearch; step > 0; step /= 2) {
        if (found + step < records + params.shape.batch && found[step].first_place <= place) found += step;
      }
    }
    return order.tile(*found, index);
  }
};

}  // namespace flash_cute
