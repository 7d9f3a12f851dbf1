// The list of up to 256 sequences that are cut into splits, longest first, which each thread block of a
// persistent kernel makes for itself:
// a kernel before it costs 10 us and more.
#pragma once

#include <cub/block/block_scan.cuh>

#include "flash_cute/scheduler/varlen_list.hpp"

namespace flash_cute {

// The work of all threads of a block; of_warps: in shared memory.
template <int kThreads>
CUTE_DEVICE SplitWork add_work(SplitWork own, SplitWork (&of_warps)[kThreads / 32]) {
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) {
    own = own + SplitWork{__shfl_xor_sync(~0u, own.blocks, step), __shfl_xor_sync(~0u, own.tiles, step),
                          __shfl_xor_sync(~0u, own.longest, step)};
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  SplitWork sum{};
#pragma unroll 4
  for (int warp = 0; warp < kThreads / 32; ++warp) sum = sum + of_warps[warp];
  return sum;
}

// As SplitOrder::blocks_per_split, by the lanes of a warp side by side: one after the other they take a
// microsecond.
template <bool kMayFold>
CUTE_DEVICE int blocks_per_split(SplitOrder const& order, SplitWork const& work) {
  SplitLengths const& lengths = order.lengths;
  if (lengths.fixed_blocks > 0 || !work.is_even() || work.tiles == 0 ||
      work.tiles >= lengths.wanted_items() || work.blocks >= 1 << 30) {
    return order.blocks_per_split<kMayFold>(work);
  }
  int const round = threadIdx.x % 32, share = ceil_div(int(work.blocks), lengths.blocks);
  int const split = lengths.split_of(work.longest, share, round);
  int const time = lengths.time(int(work.tiles), work.longest, split);
  return lengths.best_split([&](int other) {
    return SplitLengths::Choice{__shfl_sync(~0u, split, other), __shfl_sync(~0u, time, other)};
  });
}

// In shared memory. Of a sequence it has what its order decides; the lengths are read again for each tile.
// All blocks make the same list: sequences of a class stay in the order of the batch.
// kMayFold: as of SplitOrder.
template <int kThreads, bool kMayFold>
struct SplitList {
  using Listed = ListedSequence<SplitOrder>;
  static constexpr int kFewSequences = SplitOrder::kFewSequences, kWarps = kThreads / 32;
  // Of lengths; class 0 has the sequences that are cut: their splits are as long as the longest others.
  static constexpr int kClasses = 16;
  using Scan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  static_assert(kFewSequences <= kThreads && kClasses * kWarps <= kThreads);
  SplitTile first;                      // the block's first tile
  int m_blocks, unwritten, cut_blocks;  // as in VarlenListHeader
  int blocks_per_split;
  int first_blocks[kFewSequences];  // of the sequences in their order
  unsigned char batch[kFewSequences];
  int counts[kClasses * kWarps];  // of sequences
  SplitWork of_warps[kWarps];
  typename Scan::TempStorage scan;

  // By all threads of a block; tile_counter: of the dynamic scheduler, null where each block has one tile at
  // most.
  template <class Source>
  CUTE_DEVICE void make(Source const& source, int* tile_counter) {
    SplitOrder const& order = source.order;
    if (order.is_uniform() || order.is_prepared()) {
      if (threadIdx.x == 0) {
        m_blocks = order.is_uniform() ? order.capacity : order.header->m_blocks;
        unwritten = order.unwritten();
        if (order.is_uniform() && blockIdx.x == 0 && tile_counter) *tile_counter = 0;
      }
      __syncthreads();
      return;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) *tile_counter = 0;  // see VarlenList
    if (order.batch == 1) {
      if (threadIdx.x < 32) make_of_one(source);
      __syncthreads();
      return;
    }

    int const b = threadIdx.x, lane = b % 32, warp = b / 32;
    bool const is_sequence = b < order.batch;
    Listed const own = is_sequence ? Listed::of(source, source.limits, order, b) : Listed{};
    if (threadIdx.x < kClasses * kWarps) counts[threadIdx.x] = 0;
    SplitWork const own_work = own.m_blocks > 0 ? order.work(own.sequence) : SplitWork{};
    SplitWork const work = add_work<kThreads>(own_work, of_warps);
    int const any_unwritten = __syncthreads_or(own.unwritten);
    int const split_length = flash_cute::blocks_per_split<kMayFold>(order, work);
    int const splits = own.m_blocks > 0 ? order.splits<kMayFold>(own.sequence, split_length) : 1;
    int const own_blocks = int(smaller<int64_t>(int64_t(own.m_blocks) * splits, order.capacity));

    int const longest = larger(1, smaller(split_length, work.longest));
    int const length_class = splits > 1 ? 0 : 1 + (kClasses - 2) * (longest - own_work.longest) / longest;
    int* const count = counts + length_class * kWarps + warp;
    unsigned const same_class = __match_any_sync(~0u, is_sequence ? length_class : kClasses);
    int const before = __popc(same_class & ((1u << lane) - 1));
    if (is_sequence && before == 0) *count = __popc(same_class);
    __syncthreads();
    bool const is_count = threadIdx.x < kClasses * kWarps;
    int own_count = is_count ? counts[threadIdx.x] : 0;
    Scan(scan).ExclusiveSum(own_count, own_count);
    if (is_count) counts[threadIdx.x] = own_count;
    __syncthreads();
    if (is_sequence) {
      int const rank = *count + before;
      first_blocks[rank] = own_blocks;
      batch[rank] = b;
    }
    __syncthreads();

    int const listed = is_sequence ? first_blocks[threadIdx.x] : 0;
    int const capacity = order.capacity;
    int first_block = 0, end = 0;
    Scan(scan).ExclusiveScan(
        listed, first_block, 0,
        [=](int x, int y) { return int(smaller<unsigned>(unsigned(x) + unsigned(y), capacity)); }, end);
    if (is_sequence) first_blocks[threadIdx.x] = first_block;
    if (threadIdx.x == 0) {
      m_blocks = end;
      unwritten = any_unwritten;
      blocks_per_split = split_length;
    }
    __syncthreads();
    int const m_block = order.packs_of_all.quotient(blockIdx.x), cut = counts[kWarps];
    if (first_block <= m_block && m_block < first_block + listed && m_block < end) {
      first = tile_of(source, threadIdx.x, blockIdx.x);
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) {
      order.header->cut_blocks = cut < order.batch ? first_blocks[cut] : end;
    }
    __syncthreads();
  }

  CUTE_DEVICE int tiles(SplitOrder const& order) const { return m_blocks * int(order.packs_of_all.value); }

  template <class Source>
  CUTE_DEVICE SplitTile tile(Source const& source, int index) const {
    SplitOrder const& order = source.order;
    if (order.is_uniform() || order.is_prepared()) return order(index);
    int const m_block = order.packs_of_all.quotient(index);
    int rank = 0;  // of the last sequence that begins no later
#pragma unroll 1
    for (int step = kFewSequences / 2; step > 0; step /= 2) {
      if (rank + step < order.batch && first_blocks[rank + step] <= m_block) rank += step;
    }
    return tile_of(source, rank, index);
  }
  // The tile of the block's own number, which exists.
  template <class Source>
  CUTE_DEVICE SplitTile first_tile(Source const& source, int block) const {
    SplitOrder const& order = source.order;
    return order.is_uniform() || order.is_prepared() ? order(block) : first;
  }

 private:
  // By one warp, without a barrier: 1 us less than that of several sequences.
  template <class Source>
  CUTE_DEVICE void make_of_one(Source const& source) {
    SplitOrder const& order = source.order;
    Listed const own = Listed::of(source, source.limits, order, 0);
    int const split_length = flash_cute::blocks_per_split<kMayFold>(
        order, own.m_blocks > 0 ? order.work(own.sequence) : SplitWork{});
    SplitRecord const record = order.record<kMayFold>(0, own.sequence, 0, split_length);
    if (threadIdx.x > 0) return;
    m_blocks = int(smaller<int64_t>(int64_t(own.m_blocks) * record.splits, order.capacity));
    unwritten = own.unwritten;
    blocks_per_split = split_length;
    first_blocks[0] = batch[0] = 0;
    if (int(blockIdx.x) < tiles(order)) first = order.tile(record, blockIdx.x);
    if (blockIdx.x == 0) order.header->cut_blocks = record.splits > 1 ? m_blocks : 0;
  }

  template <class Source>
  CUTE_DEVICE SplitTile tile_of(Source const& source, int rank, int index) const {
    int const b = batch[rank];
    SplitSequence const s = SplitOrder::sequence_of(source, source.limits, b);
    return source.order.tile(
        source.order.template record<kMayFold>(b, s, first_blocks[rank], blocks_per_split), index);
  }
};

}  // namespace flash_cute
