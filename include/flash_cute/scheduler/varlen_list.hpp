// The list of sequences, longest first: what the order depends on, and the list of a few sequences that each
// thread block makes for itself. scheduler/varlen_prepare.cuh makes the list of many for all blocks.
#pragma once

#include <utility>

#include <cute/config.hpp>

#include "flash_cute/scheduler/split_order.hpp"

namespace flash_cute {

constexpr int kLengthClasses = 256;

// A sequence, and what decides where it comes in a list.
template <class Order>
struct ListedSequence {
  decltype(Order::sequence_of(std::declval<ForwardParams>(), WindowMask{}, 0)) sequence;
  int m_blocks;      // of all splits, once it is cut
  int length_class;  // of its longest tile: lengths within an eighth of a power of two; 0 has the longest
  bool unwritten;    // are there rows at its ends that no tile writes?

  template <class Params>
  CUTE_DEVICE static ListedSequence of(Params const& params, WindowMask const& limits, Order const& order,
                                       int b) {
    auto const s = Order::sequence_of(params, limits, b);
    int const queries = order.rows.tile_queries(), m_blocks = order.m_blocks(s);
    auto keys = [&](int m_block) {
      auto const visited = s.mask.visited(m_block * queries, queries, 1);
      return visited.end - visited.begin;
    };
    int const longest = larger(1, larger(keys(m_blocks / 2), larger(keys(0), keys(m_blocks - 1))));
    int const octave = 31 - __clz(longest);
    int const eighth = octave < 3 ? 0 : (longest >> (octave - 3)) & 7;
    bool const before = b == 0 && s.queries.begin > 0;
    bool const after = b == params.shape.batch - 1 && s.queries.end < params.shape.seqlen_q;
    return {.sequence = s,
            .m_blocks = m_blocks,
            .length_class = kLengthClasses - 1 - (octave * 8 + eighth),
            .unwritten = before || after || s.queries.begin + s.used < s.queries.end};
  }

  // Cut sequences come first: their splits are as long as the longest sequences that are not cut.
  CUTE_DEVICE void cut(Order const& order, int blocks_per_split) {
    int const splits = m_blocks > 0 ? order.splits(sequence, blocks_per_split) : 1;
    m_blocks *= splits;
    length_class = splits > 1 ? 0 : larger(1, length_class);
  }
};

// In shared memory.
template <class Order>
struct VarlenList {
  static constexpr int kFewSequences = Order::kFewSequences, kSearch = kFewSequences < 64 ? 32 : 64;
  static_assert(kSearch <= kFewSequences && kFewSequences <= 2 * kSearch);
  typename Order::Record
      records[kFewSequences];  // where the block makes them; those without a query come last
  int m_blocks, unwritten;     // as in VarlenListHeader
  int first;                   // the record that has the block's first tile

  // By all threads of a block. tile_counter: of the dynamic scheduler, null where each block has one tile at
  // most.
  template <int kThreads>
  CUTE_DEVICE void make(ForwardParams const& params, WindowMask const& limits, Order const& order,
                        int* tile_counter) {
    constexpr int kLanes = kThreads >= 4 * kFewSequences ? 4 : 2;  // threads that count for a sequence
    static_assert(kThreads >= kLanes * kFewSequences);
    if (order.is_prepared()) {
      if (threadIdx.x == 0) {
        m_blocks = order.header->m_blocks;
        unwritten = order.header->unwritten;
      }
      __syncthreads();
      return;
    }
    // No kernel has zero filled the counter. A block that adds to it before this store gets any tile or none;
    // a tile that two blocks compute is written twice, with the same values.
    if (threadIdx.x == 0 && blockIdx.x == 0 && tile_counter) *tile_counter = 0;

    struct Key {
      int length_class, m_blocks;
    };
    auto* const keys = reinterpret_cast<Key*>(records);
    int const b = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, batch = params.shape.batch;
    bool const is_sequence = b < batch;
    using Listed = ListedSequence<Order>;
    Listed const own = is_sequence ? Listed::of(params, limits, order, b) : Listed{};
    Key const key{own.m_blocks > 0 ? own.length_class : kLengthClasses, own.m_blocks};
    if (is_sequence && lane == 0) keys[b] = key;
    int const any_unwritten = __syncthreads_or(own.unwritten);

    auto record = order.record(b, own.sequence, 0);
    int rank = 0, first_block = 0;  // after all that are longer, or as long with a smaller index
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
      int const m_block = order.packs_of_all.quotient(blockIdx.x);
      if (first_block <= m_block && m_block < first_block + own.m_blocks) first = rank;
      if (rank == batch - 1) {
        m_blocks = smaller(first_block + own.m_blocks, order.capacity);
        unwritten = any_unwritten;
      }
    }
    __syncthreads();
  }

  CUTE_DEVICE int tiles(Order const& order) const { return m_blocks * int(order.packs_of_all.value); }

  CUTE_DEVICE auto tile(Order const& order, int index) const {
    int const m_block = order.packs_of_all.quotient(index);
    typename Order::Record const* found = order.prepared() + m_block;
    if (!order.is_prepared()) {
      found = records;  // the last that begins no later
#pragma unroll 1
      for (int step = kSearch; step > 0; step /= 2) {
        if (found + step < records + order.batch && found[step].first_block <= m_block) found += step;
      }
    }
    return order.tile(*found, index);
  }
  // The tile of the block's own number, which exists.
  CUTE_DEVICE auto first_tile(Order const& order, int block) const {
    if (order.is_prepared()) return order.tile(order.prepared()[order.packs_of_all.quotient(block)], block);
    return order.tile(records[first], block);
  }
};

}  // namespace flash_cute
