// A mask as a table, which kernels of their own make (prepare_table.cuh): the blocks of keys that a block of
// queries visits, and for the element test a query's ranges of keys, cut, sorted and merged, and bits of
// pairs where a mask of pairs was given. The kernels after them know this table alone.
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
  // After the last key that counts.
  FLASH_CUTE_HOST_DEVICE static int end_key(Sequence const& s) { return s.mask.seqlen_k; }
};

// The mask of a sequence for a head, as a table has it: a query sees the keys that lie in one of its ranges
// and whose bit is set, if there are bits.
struct TableMask {
  int seqlen_q, seqlen_k, count;
  KeyRange const* ranges;
  uint32_t const* bits = nullptr;  // of query 0, 32 keys a word
  int bits_stride = 0;             // words from one query's to the next's, 0 where all are alike
  uint8_t const* sees = nullptr;   // beside bits: does a query see any key?

  FLASH_CUTE_HOST_DEVICE bool is_fully_masked(int row) const {
    if (sees) return !sees[row];
    KeyRange const first = range(row, 0);
    return first.begin >= first.end;
  }
  FLASH_CUTE_HOST_DEVICE FullInTable full(int, int, int) const { return {}; }

  // A range of a query; of one after the last, any.
  FLASH_CUTE_HOST_DEVICE KeyRange range(int query, int i) const { return ranges[query * count + i]; }
  FLASH_CUTE_HOST_DEVICE uint32_t const* bits_of(int query) const {
    return bits + int64_t(query) * bits_stride;
  }
};

struct MaskTable {
  static constexpr int kHeaderBytes = 16;
  int* has_lowest_rows;  // of the backward: see LowestRows
  uint8_t* sees;         // (head, query): where there are bits, does it see any key?
  KeyRange* ranges;      // (query, count), counted from the first key of the sequence that counts; those that
                         // are empty come last
  BlockBits* key_bits;   // (head, M block, words): the blocks of keys that it visits
  int* visited;          // (head, M block): how many
  BlockBits* query_bits;  // (KV head, N block, chunks): the same bits by blocks of keys, of all heads that
                          // share the keys; of the backward
  uint32_t* bits;         // (entry, head, row, bits_words): a mask of pairs; null without one
  int count, words, chunks;
  int heads, kv_heads;  // 1 each where heads do not differ
  int bits_entries, bits_rows, bits_words;
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
    return ranges + row_of(b, q_begin) * count;
  }
  FLASH_CUTE_HOST_DEVICE uint8_t* sees_of(int b, int head, int q_begin) const {
    return sees + of_head(head) * rows() + row_of(b, q_begin);
  }
  FLASH_CUTE_HOST_DEVICE uint32_t* bits_of(int b, int head, int row) const {
    int64_t const of_entry = int64_t(bits_entries == 1 ? 0 : b) * heads + of_head(head);
    return bits + (of_entry * bits_rows + (bits_rows == 1 ? 0 : row)) * bits_words;
  }
  FLASH_CUTE_HOST_DEVICE TableMask mask(int b, int head, int q_begin, int seqlen_q, int seqlen_k) const {
    TableMask mask{seqlen_q, seqlen_k, count, ranges_of(b, q_begin)};
    if (bits) {
      mask.bits = bits_of(b, head, q_begin);  // sequences with such a mask are not packed
      mask.bits_stride = bits_rows == 1 ? 0 : bits_words;
      mask.sees = sees_of(b, head, q_begin);
    }
    return mask;
  }
  // The number of an M block among those of a head; in range where offsets make no sense, too.
  FLASH_CUTE_HOST_DEVICE int m_block(int b, int head, int m_begin) const {
    return of_head(head) * m_blocks.count() +
           smaller(m_blocks.first(b) + m_begin / m_blocks.block, m_blocks.count() - 1);
  }
  FLASH_CUTE_HOST_DEVICE BlockBits* key_bits_of(int m_block) const {
    return key_bits + int64_t(m_block) * words;
  }
  FLASH_CUTE_HOST_DEVICE int visited_by(int m_block) const {
    return larger(1, smaller(visited[m_block], words * BlockBits::kBlocks));
  }
  FLASH_CUTE_HOST_DEVICE BlockBits* query_bits_of(int b, int head_kv, int n_block) const {
    int const of_head = smaller(n_blocks.first(b) + n_block, n_blocks.count() - 1);
    return query_bits + (int64_t(kv_heads == 1 ? 0 : head_kv) * n_blocks.count() + of_head) * chunks;
  }

 private:
  FLASH_CUTE_HOST_DEVICE int of_head(int head) const { return heads == 1 ? 0 : head; }
  FLASH_CUTE_HOST_DEVICE int64_t row_of(int b, int q_begin) const {
    return int64_t(m_blocks.offsets ? 0 : b) * total_q + q_begin;
  }
  FLASH_CUTE_HOST_DEVICE int64_t rows() const {
    return int64_t(m_blocks.offsets ? 1 : m_blocks.batch) * total_q;
  }

  template <class Params>
  FLASH_CUTE_HOST_DEVICE int64_t place(Params const& params, void* memory, int block_m, int block_n,
                                       bool transposes) {
    ProblemShape const& shape = params.shape;
    PairMaskParams const& pairs = params.pair_mask;
    count = larger(1, params.ranges.count);
    total_q = shape.seqlen_q;
    heads = larger(1, pairs.heads);
    kv_heads = heads == 1 ? 1 : shape.heads_kv;
    m_blocks = {params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, block_m};
    n_blocks = {params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, block_n};
    words = ceil_div(ceil_div(shape.seqlen_k, block_n), BlockBits::kBlocks);
    chunks = transposes ? ceil_div(ceil_div(shape.seqlen_q, block_m), BlockBits::kBlocks) : 0;
    int64_t const tiles = int64_t(heads) * m_blocks.count();
    has_lowest_rows = static_cast<int*>(memory);
    int64_t offset = kHeaderBytes;
    auto part = [&]<class Value>(Value*& values, int64_t size) {
      values = reinterpret_cast<Value*>(static_cast<char*>(memory) + offset);
      offset += ceil_div<int64_t>(size * sizeof(Value), 16) * 16;
    };
    part(sees, pairs.given ? heads * rows() + kMostQueries : 0);  // first: see sees_any_key
    part(ranges, (rows() + kMostQueries) * count);  // a tile's rows after the last are read, too
    part(key_bits, tiles * words);
    part(visited, tiles);
    part(query_bits, int64_t(kv_heads) * n_blocks.count() * chunks);
    if (pairs.given) {
      bits_entries = pairs.entries;
      bits_rows = pairs.rows;
      bits_words = ceil_div(ceil_div(shape.seqlen_k, block_n) * block_n, kBitsOfRow) * (kBitsOfRow / 32);
      part(bits, (int64_t(bits_entries) * heads * bits_rows + kMostQueries) * bits_words);
    } else {
      bits = nullptr;
    }
    return offset;
  }
  static constexpr int kBitsOfRow = 128;  // rows of bits are read 16 bytes at a time
};

// Does a query, a row of a sequence's entry, see a key? memory: of a table that has been made.
template <class Params>
FLASH_CUTE_HOST_DEVICE bool sees_any_key(Params const& params, void const* memory, int b, int head, int row) {
  ProblemShape const& shape = params.shape;
  auto const* const rows = static_cast<char const*>(memory) + MaskTable::kHeaderBytes;
  int64_t const of_row = int64_t(params.lengths.cu_seqlens_q ? 0 : b) * shape.seqlen_q + row;
  if (params.pair_mask.given) {
    int64_t const of_head = params.pair_mask.heads == 1 ? 0 : int64_t(head) * shape.batch * shape.seqlen_q;
    return reinterpret_cast<uint8_t const*>(rows)[of_head + of_row];
  }
  KeyRange const range = reinterpret_cast<KeyRange const*>(rows)[of_row * larger(1, params.ranges.count)];
  return range.begin < range.end;
}

}  // namespace flash_cute
