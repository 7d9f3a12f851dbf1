// Key ranges: each query sees the union of a few ranges of keys. A kernel of its own cuts them by the window
// and the lengths, sorts and merges them (attention/mask/prepare_ranges.cuh), and marks for each block of
// queries the blocks of keys that it visits. Everything behind it knows this table alone.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// A bit for each of 32 neighbouring blocks: does some query of the tile see a key of the block, and do all
// see all of its keys?
struct alignas(8) BlockBits {
  static constexpr int kBlocks = 32;
  uint32_t visited, full;
};

// Bits [begin, end), cut to a word.
FLASH_CUTE_HOST_DEVICE uint32_t bits_between(int begin, int end) {
  auto below = [](int limit) { return limit >= 32 ? ~0u : (1u << larger(0, limit)) - 1; };
  return below(end) & ~below(begin);
}

FLASH_CUTE_HOST_DEVICE int count_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}
FLASH_CUTE_HOST_DEVICE int lowest_bit(uint32_t bits) { return count_bits((bits & -bits) - 1); }
FLASH_CUTE_HOST_DEVICE int highest_bit(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return 31 - __clz(bits);
#else
  return bits == 0 ? -1 : 31 - __builtin_clz(bits);
#endif
}

constexpr int kMaxRanges = 4, kMostQueries = 192;  // of a query, of a tile

// The union of a query's ranges, of what the window leaves: sorted, without gaps that are empty. shift: the
// sequence's first key that counts, from its first row.
struct CutRanges {
  KeyRange ranges[kMaxRanges];

  template <class Mask>
  FLASH_CUTE_HOST_DEVICE CutRanges(int const* given, int count, int shift, Mask const& mask, int row) {
    int const first = mask.first_key(row), end = mask.end_key(row);
    for (KeyRange& range : ranges) range = {0, 0};
    int used = 0;
    for (int i = 0; i < count; ++i) {
      auto within = [&](int key) {
        return int(larger<int64_t>(first, smaller<int64_t>(int64_t(key) - shift, end)));
      };
      KeyRange const range{within(given[2 * i]), within(given[2 * i + 1])};
      if (range.begin >= range.end) continue;
      int at = used++;
      for (; at > 0 && ranges[at - 1].begin > range.begin; --at) ranges[at] = ranges[at - 1];
      ranges[at] = range;
    }
    int last = 0;
    for (int i = 1; i < used; ++i) {
      if (ranges[i].begin <= ranges[last].end) {
        ranges[last].end = larger(ranges[last].end, ranges[i].end);
      } else {
        ranges[++last] = ranges[i];
      }
    }
    for (int i = last + 1; i < kMaxRanges; ++i) ranges[i] = {0, 0};
  }
};

// A sequence as the kernels that read a table see it: SequenceOf{}(params, limits, b).
struct WholeSequence {
  template <class Params>
  FLASH_CUTE_HOST_DEVICE Sequence operator()(Params const& params, WindowMask const& limits, int b) const {
    return sequence(params.shape, params.lengths, limits, b);
  }
};

struct RangeTable {
  KeyRange* rows;       // (query, count), counted from the first key of the sequence that counts; those that
                        // are empty come last
  BlockBits* key_bits;  // (M block, words): the blocks of keys that it visits
  int* visited;         // (M block): how many
  BlockBits* query_bits;  // (N block, chunks): the same bits by blocks of keys; of the backward
  int count, words, chunks;
  BatchBlocks m_blocks, n_blocks;
  int total_q;

  // In params.ranges.workspace.
  template <class Params>
  FLASH_CUTE_HOST_DEVICE static RangeTable make(Params const& params, int block_m, int block_n,
                                                bool transposes) {
    RangeTable table{};
    table.place(params, block_m, block_n, transposes);
    return table;
  }
  template <class Params>
  static int64_t bytes(Params const& params, int block_m, int block_n, bool transposes) {
    return RangeTable{}.place(params, block_m, block_n, transposes);
  }

  // Row 0 of a sequence that begins at this row of its entry.
  FLASH_CUTE_HOST_DEVICE KeyRange* rows_of(int b, int q_begin) const {
    return rows + (int64_t(m_blocks.offsets ? 0 : b) * total_q + q_begin) * count;
  }
  // The number of an M block; in range where offsets make no sense, too.
  FLASH_CUTE_HOST_DEVICE int m_block(int b, int m_begin) const {
    return smaller(m_blocks.first(b) + m_begin / m_blocks.block, m_blocks.count() - 1);
  }
  FLASH_CUTE_HOST_DEVICE BlockBits* key_bits_of(int m_block) const {
    return key_bits + int64_t(m_block) * words;
  }
  FLASH_CUTE_HOST_DEVICE int visited_by(int m_block) const {
    return larger(1, smaller(visited[m_block], words * BlockBits::kBlocks));
  }
  FLASH_CUTE_HOST_DEVICE BlockBits* query_bits_of(int b, int n_block) const {
    return query_bits + int64_t(smaller(n_blocks.first(b) + n_block, n_blocks.count() - 1)) * chunks;
  }

 private:
  template <class Params>
  FLASH_CUTE_HOST_DEVICE int64_t place(Params const& params, int block_m, int block_n, bool transposes) {
    ProblemShape const& shape = params.shape;
    count = params.ranges.count;
    total_q = shape.seqlen_q;
    m_blocks = {params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, block_m};
    n_blocks = {params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, block_n};
    words = ceil_div(ceil_div(shape.seqlen_k, block_n), BlockBits::kBlocks);
    chunks = transposes ? ceil_div(ceil_div(shape.seqlen_q, block_m), BlockBits::kBlocks) : 0;
    int64_t const entries = m_blocks.offsets ? 1 : shape.batch, tiles = m_blocks.count();
    int64_t offset = 0;
    auto part = [&]<class Value>(Value*& values, int64_t size) {
      values = reinterpret_cast<Value*>(static_cast<char*>(params.ranges.workspace) + offset);
      offset += ceil_div<int64_t>(size * sizeof(Value), 16) * 16;
    };
    part(rows, (entries * total_q + kMostQueries) * count);  // a tile's rows behind the last are read, too
    part(key_bits, tiles * words);
    part(visited, tiles);
    part(query_bits, n_blocks.count() * int64_t(chunks));
    return offset;
  }
};

// Has a query, a row of a sequence's entry, a key in its ranges? Their table has been made.
template <class Params>
FLASH_CUTE_HOST_DEVICE bool sees_ranges(Params const& params, int b, int row) {
  int const entry = params.lengths.cu_seqlens_q ? 0 : b;
  KeyRange const range = static_cast<KeyRange const*>(
      params.ranges.workspace)[(int64_t(entry) * params.shape.seqlen_q + row) * params.ranges.count];
  return range.begin < range.end;
}

// Blocks in which every pair of the tile is visible.
struct FullBlocks {
  BlockBits const* bits;

  FLASH_CUTE_HOST_DEVICE bool contains(int block) const {
    return bits[block / BlockBits::kBlocks].full >> block % BlockBits::kBlocks & 1;
  }
};

struct WalkKnows {};  // which blocks need no element test: see is_full

// The mask of a sequence.
struct RangesMask {
  int seqlen_q, seqlen_k, count;
  KeyRange const* rows;

  FLASH_CUTE_HOST_DEVICE bool is_fully_masked(int row) const {
    KeyRange const first = range(row, 0);
    return first.begin >= first.end;
  }
  FLASH_CUTE_HOST_DEVICE WalkKnows unmasked(int, int, int) const { return {}; }

  // A range of a query; of one behind the last, any.
  FLASH_CUTE_HOST_DEVICE KeyRange range(int query, int i) const { return rows[query * count + i]; }
};

// The walk over the blocks of keys that a tile visits, from the last to the first; as KvBlocks. A tile that
// visits none walks over one block that is hidden from it. Memory is read once for every 32 blocks.
struct RangeKvBlocks {
  BlockBits const* bits;
  int word;
  BlockBits of_word;  // with those blocks alone that are not behind the walk
  int block;          // where the walk is
  int behind;         // how many there are behind this one
  bool first = true;

  FLASH_CUTE_HOST_DEVICE RangeKvBlocks(BlockBits const* bits_, int words, int visited)
      : bits(bits_), word(words - 1), of_word(bits_[words - 1]), behind(visited - 1) {
    find_block();
  }

  // The same over a part of the blocks.
  FLASH_CUTE_HOST_DEVICE RangeKvBlocks(BlockBits const* bits_, BlockRange const& part)
      : bits(bits_), word((part.end - 1) / BlockBits::kBlocks), of_word(bits_[word]), behind(-1) {
    auto cut = [&](int of) {
      return bits_between(part.begin - of * BlockBits::kBlocks, part.end - of * BlockBits::kBlocks);
    };
    for (int of = part.begin / BlockBits::kBlocks; of <= word; ++of)
      behind += count_bits(bits[of].visited & cut(of));
    of_word.visited &= cut(word);
    if (behind < 0) {
      word = part.begin / BlockBits::kBlocks;
      of_word = {1u << part.begin % BlockBits::kBlocks, 0};
      behind = 0;
    }
    find_block();
  }

  FLASH_CUTE_HOST_DEVICE bool is_full(WalkKnows) const {
    return of_word.full >> block % BlockBits::kBlocks & 1;
  }
  FLASH_CUTE_HOST_DEVICE bool is_first() const { return first; }
  FLASH_CUTE_HOST_DEVICE int left() const { return behind; }
  FLASH_CUTE_HOST_DEVICE bool done() const { return behind < 0; }
  FLASH_CUTE_HOST_DEVICE bool advance() {
    first = false;
    if (--behind < 0) return false;
    of_word.visited ^= 1u << block % BlockBits::kBlocks;
    find_block();
    return true;
  }
  FLASH_CUTE_HOST_DEVICE int next() const {
    RangeKvBlocks following = *this;
    following.advance();
    return following.block;
  }

 private:
  // The last one that is left; there is one.
  FLASH_CUTE_HOST_DEVICE void find_block() {
    while (of_word.visited == 0 && word > 0) of_word = bits[--word];
    block = word * BlockBits::kBlocks + larger(0, highest_bit(of_word.visited));
  }
};

// The blocks of queries that see a block of keys, from the first to the last; none behind those of the
// sequence, whatever its bits say where offsets make no sense.
struct RangeQueryBlocks {
  static constexpr int kEnd = -1;
  BlockBits const* bits;
  int blocks;  // of the sequence

  FLASH_CUTE_HOST_DEVICE int first() const { return from(0); }
  FLASH_CUTE_HOST_DEVICE int after(int block) const { return from(block + 1); }
  FLASH_CUTE_HOST_DEVICE int end() const { return kEnd; }
  FLASH_CUTE_HOST_DEVICE int count() const {
    int sum = 0;
    for (int chunk = 0; chunk * BlockBits::kBlocks < blocks; ++chunk) sum += count_bits(visited(chunk, 0));
    return sum;
  }
  FLASH_CUTE_HOST_DEVICE BlockBits of_chunk(int chunk) const { return {visited(chunk, 0), bits[chunk].full}; }

 private:
  // Of a chunk's blocks, from this one on.
  FLASH_CUTE_HOST_DEVICE uint32_t visited(int chunk, int begin) const {
    int const first = chunk * BlockBits::kBlocks;
    return bits[chunk].visited & bits_between(begin - first, blocks - first);
  }
  FLASH_CUTE_HOST_DEVICE int from(int block) const {
    for (int chunk = block / BlockBits::kBlocks; chunk * BlockBits::kBlocks < blocks; ++chunk) {
      uint32_t const found = visited(chunk, block);
      if (found != 0) return chunk * BlockBits::kBlocks + lowest_bit(found);
    }
    return kEnd;
  }
};

}  // namespace flash_cute
