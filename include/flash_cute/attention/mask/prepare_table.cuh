// The kernels that make a MaskTable of key ranges.
#pragma once

#include "flash_cute/attention/mask/mask_table.hpp"
#include "flash_cute/attention/mask/ranges.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/core/dependent_launch.hpp"
#include "flash_cute/core/launch_kernel.hpp"

namespace flash_cute {

constexpr int kRangeThreads = 256;

template <bool kStartsEarly>
__device__ void start_early() {
  if constexpr (kStartsEarly) {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();  // the kernel after this one waits by itself
#endif
    wait_for_grid_before();
  }
}

// The blocks of keys in which a range has keys, and those that it covers.
struct BlockSpans {
  BlockRange visited, full;

  BlockSpans() = default;
  __device__ BlockSpans(KeyRange range, int block) : visited{0, 0}, full{0, 0} {
    if (range.begin >= range.end) return;
    visited = {range.begin / block, ceil_div(range.end, block)};
    full = {ceil_div(range.begin, block), range.end / block};
  }
};

// The eight bits of eight bytes, of which none is zero means 1.
__device__ inline uint32_t bits_of_bytes(uint64_t bytes) {
  constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7fu;
  uint64_t const set = (((bytes & kLow) + kLow) | bytes) & ~kLow;  // the highest bit of each
  return uint32_t((set >> 7) * 0x0102040810204080u >> 56);
}

// The bits of 32 keys of a row of a mask of pairs, from column `first` on, which may lie outside of it.
__device__ inline uint32_t mask_word(PairMaskParams const& pairs, uint8_t const* row, int first) {
  auto set = [&](int column) {
    if (column < 0) return true;  // a mask of fewer columns than keys is of the last ones
    if (column >= pairs.columns) return false;
    uint8_t const byte = row[(pairs.is_packed ? column / 8 : column) * pairs.byte_stride];
    return pairs.is_packed ? (byte >> column % 8 & 1) != 0 : byte != 0;
  };
  bool const is_inside = 0 <= first && first + 32 <= pairs.columns && pairs.byte_stride == 1;
  uint32_t word = 0;
  if (is_inside && !pairs.is_packed && (reinterpret_cast<uintptr_t>(row) + first) % 8 == 0) {
    for (int i = 0; i < 4; ++i)
      word |= bits_of_bytes(reinterpret_cast<uint64_t const*>(row + first)[i]) << 8 * i;
    return word;
  }
  if (is_inside && pairs.is_packed && first % 8 == 0) {
    for (int i = 0; i < 4; ++i) word |= uint32_t(row[first / 8 + i]) << 8 * i;
    return word;
  }
  for (int i = 0; i < 32; ++i) word |= uint32_t(set(first + i)) << i;
  return word;
}

// A mask of pairs as the bits of a table: a warp for each row, of sequence blockIdx.y and head blockIdx.z.
template <bool kStartsEarly, class SequenceOf, class Params>
__global__ void __launch_bounds__(kRangeThreads)
    pack_pair_mask_kernel(__grid_constant__ Params const params, __grid_constant__ WindowMask const limits,
                          __grid_constant__ MaskTable const table) {
  start_early<kStartsEarly>();
  constexpr int kWarps = kRangeThreads / 32;
  PairMaskParams const& pairs = params.pair_mask;
  int const blocks = ceil_div(table.bits_rows, kWarps), b = blockIdx.x / blocks, head = blockIdx.y,
            row = int(blockIdx.x) % blocks * kWarps + threadIdx.x / 32;
  if (row >= table.bits_rows) return;
  auto const s = SequenceOf{}(params, limits, b);
  // Keys of the table are counted from this row of the sequence's; `end` is the last one's that counts,
  // plus 1.
  int const first = s.k_begin - table.n_blocks.owned(b).begin, end = SequenceOf::end_key(s) + first;
  // One of fewer columns is of a sequence's last keys.
  bool const is_short = pairs.columns < params.shape.seqlen_k;
  int const first_column = first - (is_short ? end - pairs.columns : 0);
  uint8_t const* const of_row =
      pairs.data + b * pairs.entry_stride + head * pairs.head_stride + row * pairs.row_stride;
  uint32_t* const target = table.bits_of(b, head, row);
  for (int word = threadIdx.x % 32; word < table.bits_words; word += 32)
    target[word] = mask_word(pairs, of_row, first_column + 32 * word);
}

// What a block of threads knows of the queries of its M block.
struct QuerySpans {
  KeyRange ranges[kMostQueries][kMaxRanges];
  BlockSpans blocks[kMostQueries][kMaxRanges];
  int sees[kMostQueries];
  BlockBits parts[kRangeThreads / 32];  // of warps that have shares of the queries
};

// The bits of a word of blocks for some queries: by ranges alone, whose ends tell.
__device__ inline BlockBits block_bits_of_ranges(QuerySpans const& spans, int count, int first_block,
                                                 int queries) {
  int const lane = threadIdx.x % 32;
  BlockBits bits{0, ~0u};
  for (int i = lane; i < queries; i += 32) {
    BlockBits of_query{};
    for (int r = 0; r < count; ++r) {
      auto const [visited, full] = spans.blocks[i][r];
      of_query.visited |= bits_between(visited.begin - first_block, visited.end - first_block);
      of_query.full |= bits_between(full.begin - first_block, full.end - first_block);
    }
    bits.visited |= of_query.visited;
    bits.full &= of_query.full;
  }
  return {__reduce_or_sync(~0u, bits.visited), __reduce_and_sync(~0u, bits.full)};
}

// The same with bits of pairs. A lane has a block.
__device__ inline BlockBits block_bits_of_pairs(MaskTable const& table, TableMask const& mask,
                                                QuerySpans& spans, int count, int m_begin, int first_block,
                                                int begin, int end) {
  int const lane = threadIdx.x % 32, block_n = table.n_blocks.block;
  int const first_key = (first_block + lane) * block_n;
  bool const exists = first_key + block_n <= table.bits_words * 32;
  bool visited = false, full = exists;
  for (int i = begin; i < end; ++i) {
    bool sees = false;
    uint32_t const* const words = mask.bits_of(m_begin + i);
    for (int key = first_key; exists && key < first_key + block_n; key += 32) {
      int const first_bit = key % 32;  // of blocks of fewer keys
      int const keys = smaller(block_n, 32);
      uint32_t in_ranges = 0;
      for (int r = 0; r < count; ++r) {
        KeyRange const range = spans.ranges[i][r];
        in_ranges |= bits_between(range.begin - key, range.end - key);
      }
      uint32_t const seen = words[key / 32] >> first_bit & in_ranges & bits_between(0, keys);
      sees |= seen != 0;
      full &= seen == bits_between(0, keys);
    }
    visited |= sees;
    if (__any_sync(~0u, sees) && lane == 0) spans.sees[i] = 1;
  }
  return {__ballot_sync(~0u, visited), __ballot_sync(~0u, full)};
}

// By one block for each M block of a head. kStartsEarly: as of the kernel after it. Each family so has a
// kernel of its own, from its own PTX.
template <bool kStartsEarly, class SequenceOf, class Params>
__global__ void __launch_bounds__(kRangeThreads)
    prepare_ranges_kernel(__grid_constant__ Params const params, __grid_constant__ WindowMask const limits,
                          __grid_constant__ MaskTable const table) {
  start_early<kStartsEarly>();
  __shared__ QuerySpans spans;
  __shared__ int visited;
  int const b = table.m_blocks.sequence(blockIdx.x), block_m = table.m_blocks.block, head = blockIdx.y;
  int const m_begin = (int(blockIdx.x) - table.m_blocks.first(b)) * block_m;
  auto const s = SequenceOf{}(params, limits, b);
  if (!has_rows(m_begin, s.used)) return;
  int const queries = smaller(block_m, s.used - m_begin);
  int const first_row = table.n_blocks.owned(b).begin;  // of the sequence's keys, whether they count or not
  if (threadIdx.x == 0) {
    visited = 0;
    *table.has_lowest_rows = 0;  // whichever block does
  }
  RangeParams const& ranges = params.ranges;
  KeyRange* const merged = table.ranges_of(b, s.queries.begin);
  int64_t const entry = (table.m_blocks.offsets ? 0 : b) * ranges.entry_stride;
  for (int i = threadIdx.x; i < queries; i += kRangeThreads) {
    int const row = m_begin + i;
    int64_t const at = int64_t(row) * table.count;
    CutRanges own(s.mask.first_key(row), s.mask.end_key(row));
    if (ranges.count > 0) {
      int64_t const of_query = int64_t(s.queries.begin + row) * ranges.count;
      own = CutRanges(ranges.given + entry + 2 * of_query, ranges.count, s.k_begin - first_row, s.mask, row);
    }
#pragma unroll
    for (int r = 0; r < kMaxRanges; ++r) {
      if (r < table.count && head == 0) merged[at + r] = own.ranges[r];
      spans.ranges[i][r] = own.ranges[r];
      spans.blocks[i][r] = BlockSpans(own.ranges[r], table.n_blocks.block);
    }
    spans.sees[i] = 0;
  }
  __syncthreads();

  constexpr int kWarps = kRangeThreads / 32;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const index = head * table.m_blocks.count() + blockIdx.x;
  BlockBits* const words = table.key_bits_of(index);
  int count = 0;
  if (!table.bits) {
    // A warp for each word, as each of its queries decides on every bit.
    for (int word = warp; word < table.words; word += kWarps) {
      BlockBits const bits = block_bits_of_ranges(spans, table.count, word * BlockBits::kBlocks, queries);
      if (lane == 0) words[word] = bits;
      count += count_bits(bits.visited);
    }
    if (lane == 0 && count > 0) atomicAdd(&visited, count);
  } else {
    // All warps for a word, each with a share of the queries.
    TableMask const mask = table.mask(b, head, s.queries.begin, s.used, SequenceOf::end_key(s));
    int const share = ceil_div(queries, kWarps), begin = smaller(queries, warp * share);
    for (int word = 0; word < table.words; ++word) {
      BlockBits const bits =
          block_bits_of_pairs(table, mask, spans, table.count, m_begin, word * BlockBits::kBlocks, begin,
                              smaller(queries, begin + share));
      if (lane == 0) spans.parts[warp] = bits;
      __syncthreads();
      if (threadIdx.x == 0) {
        BlockBits all{0, ~0u};
        for (BlockBits const& part : spans.parts) {
          all.visited |= part.visited;
          all.full &= part.full;
        }
        words[word] = all;
        visited += count_bits(all.visited);
      }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < queries; i += kRangeThreads)
      table.sees_of(b, head, s.queries.begin)[m_begin + i] = spans.sees[i];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (visited == 0) words[0] = {1, 0};  // a tile computes one block at least
  table.visited[index] = larger(1, visited);
}

// The bits by blocks of keys, of all heads that share them: a warp for 32 M blocks of a sequence.
template <bool kStartsEarly, class SequenceOf, class Params>
__global__ void __launch_bounds__(32)
    transpose_ranges_kernel(__grid_constant__ Params const params, __grid_constant__ WindowMask const limits,
                            __grid_constant__ MaskTable const table,
                            __grid_constant__ BatchBlocks const groups) {
  start_early<kStartsEarly>();
  int const b = groups.sequence(blockIdx.x), chunk = int(blockIdx.x) - groups.first(b), lane = threadIdx.x;
  Sequence const s = SequenceOf{}(params, limits, b);
  if (!has_rows(chunk * groups.block, s.used)) return;
  int const m_begin = chunk * groups.block + lane * table.m_blocks.block;
  int const head_kv = blockIdx.z, heads = table.heads / table.kv_heads;
  int const n_blocks = ceil_div(s.mask.seqlen_k, table.n_blocks.block);
  for (int word = blockIdx.y; word * BlockBits::kBlocks < n_blocks; word += gridDim.y) {
    BlockBits own{0, ~0u};
    for (int head = head_kv * heads; head < (head_kv + 1) * heads; ++head) {
      BlockBits const of_head = table.key_bits_of(table.m_block(b, head, smaller(m_begin, s.used - 1)))[word];
      own.visited |= of_head.visited;
      own.full &= of_head.full;
    }
    if (m_begin >= s.used) own = {0, 0};
    BlockBits transposed{};
    for (int i = 0; i < BlockBits::kBlocks; ++i) {
      BlockBits const of_keys{__ballot_sync(~0u, own.visited >> i & 1),
                              __ballot_sync(~0u, own.full >> i & 1)};
      if (i == lane) transposed = of_keys;
    }
    int const n_block = word * BlockBits::kBlocks + lane;
    if (n_block < n_blocks) table.query_bits_of(b, head_kv, n_block)[chunk] = transposed;
  }
}

// Makes a table, by the forward's or the backward's params.
template <bool kStartsEarly, class SequenceOf = WholeSequence, class Params>
void launch_mask_table(Params const& params, WindowMask const& limits, MaskTable const& table,
                       cudaStream_t stream) {
  if (table.bits) {
    int const blocks = ceil_div(table.bits_rows, kRangeThreads / 32) * table.bits_entries;
    launch_kernel<pack_pair_mask_kernel<kStartsEarly, SequenceOf, Params>, kStartsEarly>(
        params.device, dim3(blocks, table.heads), kRangeThreads, 0, stream, params, limits, table);
  }
  launch_kernel<prepare_ranges_kernel<kStartsEarly, SequenceOf, Params>, kStartsEarly>(
      params.device, dim3(table.m_blocks.count(), table.heads), kRangeThreads, 0, stream, params, limits,
      table);
}

// And its bits by blocks of keys, if it has them.
template <bool kStartsEarly, class SequenceOf = WholeSequence, class Params>
void launch_transposed_mask_table(Params const& params, WindowMask const& limits, MaskTable const& table,
                                  cudaStream_t stream) {
  launch_mask_table<kStartsEarly, SequenceOf>(params, limits, table, stream);
  if (table.chunks == 0) return;
  BatchBlocks groups = table.m_blocks;
  groups.block *= BlockBits::kBlocks;
  launch_kernel<transpose_ranges_kernel<kStartsEarly, SequenceOf, Params>, kStartsEarly>(
      params.device, dim3(groups.count(), smaller(table.words, 64), table.kv_heads), 32, 0, stream, params,
      limits, table, groups);
}

}  // namespace flash_cute
