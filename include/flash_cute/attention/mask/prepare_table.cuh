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

// By one block for each M block. kStartsEarly: as of the kernel after it. Each family so has a kernel of its
// own, from its own PTX.
template <bool kStartsEarly, class SequenceOf, class Params>
__global__ void __launch_bounds__(kRangeThreads)
    prepare_ranges_kernel(__grid_constant__ Params const params, __grid_constant__ WindowMask const limits,
                          __grid_constant__ MaskTable const table) {
  start_early<kStartsEarly>();
  __shared__ BlockSpans spans[kMostQueries][kMaxRanges];
  __shared__ int visited;
  int const b = table.m_blocks.sequence(blockIdx.x), block_m = table.m_blocks.block;
  int const m_begin = (int(blockIdx.x) - table.m_blocks.first(b)) * block_m;
  auto const s = SequenceOf{}(params, limits, b);
  if (!has_rows(m_begin, s.used)) return;
  int const queries = smaller(block_m, s.used - m_begin);
  int const first_row = table.n_blocks.owned(b).begin;  // of the sequence's keys, whether they count or not
  if (threadIdx.x == 0) visited = 0;
  RangeParams const& ranges = params.ranges;
  int const* const given = ranges.given + (table.m_blocks.offsets ? 0 : b) * ranges.entry_stride +
                           2 * int64_t(s.queries.begin) * ranges.count;
  KeyRange* const merged = table.ranges_of(b, s.queries.begin);
  for (int i = threadIdx.x; i < queries; i += kRangeThreads) {
    int64_t const at = int64_t(m_begin + i) * ranges.count;
    CutRanges const own(given + 2 * at, ranges.count, s.k_begin - first_row, s.mask, m_begin + i);
#pragma unroll
    for (int r = 0; r < kMaxRanges; ++r) {
      if (r < ranges.count) merged[at + r] = own.ranges[r];
      spans[i][r] = BlockSpans(own.ranges[r], table.n_blocks.block);
    }
  }
  __syncthreads();

  // A warp for each word, as each of its queries decides on every bit.
  constexpr int kWarps = kRangeThreads / 32;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  BlockBits* const words = table.key_bits_of(blockIdx.x);
  int count = 0;
  for (int word = warp; word < table.words; word += kWarps) {
    int const first_block = word * BlockBits::kBlocks;
    BlockBits bits{0, ~0u};
    for (int i = lane; i < queries; i += 32) {
      BlockBits of_query{};
      for (int r = 0; r < ranges.count; ++r) {
        auto const [visited, full] = spans[i][r];
        of_query.visited |= bits_between(visited.begin - first_block, visited.end - first_block);
        of_query.full |= bits_between(full.begin - first_block, full.end - first_block);
      }
      bits.visited |= of_query.visited;
      bits.full &= of_query.full;
    }
    bits = {__reduce_or_sync(~0u, bits.visited), __reduce_and_sync(~0u, bits.full)};
    if (lane == 0) words[word] = bits;
    count += count_bits(bits.visited);
  }
  if (lane == 0 && count > 0) atomicAdd(&visited, count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (visited == 0) words[0] = {1, 0};  // a tile computes one block at least
  table.visited[blockIdx.x] = larger(1, visited);
}

// The bits by blocks of keys: a warp for 32 M blocks of a sequence.
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
  BlockBits const* const words = table.key_bits_of(table.m_block(b, smaller(m_begin, s.used - 1)));
  int const n_blocks = ceil_div(s.mask.seqlen_k, table.n_blocks.block);
  for (int word = blockIdx.y; word * BlockBits::kBlocks < n_blocks; word += gridDim.y) {
    BlockBits const own = m_begin < s.used ? words[word] : BlockBits{0, 0};
    BlockBits transposed{};
    for (int i = 0; i < BlockBits::kBlocks; ++i) {
      BlockBits const of_keys{__ballot_sync(~0u, own.visited >> i & 1),
                              __ballot_sync(~0u, own.full >> i & 1)};
      if (i == lane) transposed = of_keys;
    }
    int const n_block = word * BlockBits::kBlocks + lane;
    if (n_block < n_blocks) table.query_bits_of(b, n_block)[chunk] = transposed;
  }
}

// Makes a table, by the forward's or the backward's params.
template <bool kStartsEarly, class SequenceOf = WholeSequence, class Params>
void launch_mask_table(Params const& params, WindowMask const& limits, MaskTable const& table,
                       cudaStream_t stream) {
  launch_kernel<prepare_ranges_kernel<kStartsEarly, SequenceOf, Params>, kStartsEarly>(
      params.device, table.m_blocks.count(), kRangeThreads, 0, stream, params, limits, table);
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
      params.device, dim3(groups.count(), smaller(table.words, 64)), 32, 0, stream, params, limits, table,
      groups);
}

}  // namespace flash_cute
