// A mask as a table, which a kernel of its own makes (prepare_table.cuh): the blocks of keys that a block of
// queries visits, and for the element test a query's ranges of keys, cut, sorted and merged. The kernels
// after it know this table alone.
#pragma once

#include "flash_cute/attention/mask/block_table.hpp"
#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

constexpr int kMostQueries = 192;  // of a tile

// A sequence as the kernels that read a table see it: SequenceOf{}(params, limits, b).
struct WholeSequence {
  template <class Params>
  FLASH_CUTE_HOST_DEVICE Sequence operator()(Params const& params, WindowMask const& limits, int b) const {
    return sequence(params.shape, params.lengths, limits, b);
  }
};

// The mask of a sequence, as a table has it.
struct TableMask {
  int seqlen_q, seqlen_k, count;
  KeyRange const* ranges;

  FLASH_CUTE_HOST_DEVICE bool is_fully_masked(int row) const {
    KeyRange const first = range(row, 0);
    return first.begin >= first.end;
  }
  FLASH_CUTE_HOST_DEVICE FullInTable full(int, int, int) const { return {}; }

  // A range of a query; of one after the last, any.
  FLASH_CUTE_HOST_DEVICE KeyRange range(int query, int i) const { return ranges[query * count + i]; }
};

struct MaskTable {
  KeyRange* ranges;     // (query, count), counted from the first key of the sequence that counts; those that
                        // are empty come last
  BlockBits* key_bits;  // (M block, words): the blocks of keys that it visits
  int* visited;         // (M block): how many
  BlockBits* query_bits;  // (N block, chunks): the same bits by blocks of keys; of the backward
  int count, words, chunks;
  BatchBlocks m_blocks, n_blocks;
  int total_q;

  // memory: of that many bytes.
  template <class Params>
  FLASH_CUTE_HOST_DEVICE static MaskTable make(Params const& params, void* memory, int block_m, int block_n,
                                               bool transposes) {
    MaskTable table{};
    table.place(params, memory, block_m, block_n, transposes);
    return table;
  }
  template <class Params>
  static int64_t bytes(Params const& params, int block_m, int block_n, bool transposes) {
    return MaskTable{}.place(params, nullptr, block_m, block_n, transposes);
  }

  // Of query 0 of a sequence that begins at this row of its entry.
  FLASH_CUTE_HOST_DEVICE KeyRange* ranges_of(int b, int q_begin) const {
    return ranges + (int64_t(m_blocks.offsets ? 0 : b) * total_q + q_begin) * count;
  }
  FLASH_CUTE_HOST_DEVICE TableMask mask(int b, int q_begin, int seqlen_q, int seqlen_k) const {
    return {seqlen_q, seqlen_k, count, ranges_of(b, q_begin)};
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
  FLASH_CUTE_HOST_DEVICE int64_t place(Params const& params, void* memory, int block_m, int block_n,
                                       bool transposes) {
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
      values = reinterpret_cast<Value*>(static_cast<char*>(memory) + offset);
      offset += ceil_div<int64_t>(size * sizeof(Value), 16) * 16;
    };
    part(ranges, (entries * total_q + kMostQueries) * count);  // a tile's rows after the last are read, too
    part(key_bits, tiles * words);
    part(visited, tiles);
    part(query_bits, n_blocks.count() * int64_t(chunks));
    return offset;
  }
};

// Does a query, a row of a sequence's entry, see a key? memory: of a table that has been made.
template <class Params>
FLASH_CUTE_HOST_DEVICE bool sees_any_key(Params const& params, void const* memory, int b, int row) {
  int const entry = params.lengths.cu_seqlens_q ? 0 : b;
  KeyRange const range = static_cast<KeyRange const*>(
      memory)[(int64_t(entry) * params.shape.seqlen_q + row) * params.ranges.count];
  return range.begin < range.end;
}

}  // namespace flash_cute
