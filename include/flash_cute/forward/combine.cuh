// The kernel after a forward whose tiles are cut into splits of their keys: it combines their results.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/core/dependent_launch.hpp"
#include "flash_cute/core/element.hpp"
#include "flash_cute/core/launch_kernel.hpp"
#include "flash_cute/core/math.hpp"
#include "flash_cute/forward/partial.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

constexpr int kCombineWarps = 4, kCombineThreads = 32 * kCombineWarps;

// One row, by a team of warps that share its splits: the mean of the splits' O, weighted by exp(LSE). A split
// in which the row sees nothing has an LSE of -inf and an O of zeros. The order of additions depends on the
// numbers of the splits alone.
template <class Element, int kHeadDimV>
struct CombineRow {
  static constexpr int kLanes = 32, kWidth = 2;  // columns that a lane has side by side
  static constexpr int kChunks = (kHeadDimV + kLanes * kWidth - 1) / (kLanes * kWidth);
  static constexpr int kAtOnce = kHeadDimV <= 128 ? 8 : 4;  // splits of a warp whose loads overlap
  using Sums = float2[kCombineWarps][kChunks][kLanes];
  PartialResults const& partial;
  int slot, stride;  // of the tile's first split, and from one to the next
  int begin, end;    // the splits, of which lane i of 32 has those that are i modulo 32
  int row;

  CUTE_DEVICE static int lane() { return threadIdx.x % kLanes; }
  CUTE_DEVICE int slot_of(int split) const { return slot + (split - begin) * stride; }
  CUTE_DEVICE bool exists(int split) const { return begin <= split && split < end; }
  CUTE_DEVICE float lse_of(int split) const {
    return exists(split) ? partial.lse_of(slot_of(split), row) : -INFINITY;
  }

  CUTE_DEVICE float highest_lse() const {
    float highest = -INFINITY;
    for (int split = lane(); split < end; split += kLanes) highest = fmaxf(highest, lse_of(split));
    CUTE_UNROLL
    for (int step = kLanes / 2; step > 0; step /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
    }
    return highest;
  }

  // The splits member, member + team, member + 2 team, ... Returns the sum of all splits' weights.
  CUTE_DEVICE float add(float reference, int member, int team, float2 (&total)[kChunks]) const {
    float sum = 0.f;
    for (int first = 0; first < end; first += kLanes) {
      float const own_weight = expf(lse_of(first + lane()) - reference);
      for (int i = member; i < smaller(kLanes, end - first); i += kAtOnce * team) {
        float2 values[kAtOnce][kChunks];
        CUTE_UNROLL
        for (int n = 0; n < kAtOnce; ++n) {
          int const split = first + i + n * team;
          auto const* const out = reinterpret_cast<float2 const*>(partial.out_row(slot_of(split), row));
          CUTE_UNROLL
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            int const column = chunk * kLanes + lane();
            bool const is_value =
                i + n * team < kLanes && exists(split) && column * kWidth < partial.head_dim_v;
            values[n][chunk] = is_value ? out[column] : float2{};
          }
        }
        CUTE_UNROLL
        for (int n = 0; n < kAtOnce; ++n) {
          float const weight = __shfl_sync(~0u, own_weight, (i + n * team) % kLanes);
          CUTE_UNROLL
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            total[chunk].x += weight * values[n][chunk].x;
            total[chunk].y += weight * values[n][chunk].y;
          }
        }
      }
      sum += own_weight;
    }
    CUTE_UNROLL
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  }

  CUTE_DEVICE void store(Element* target, float factor, float2 const (&total)[kChunks]) const {
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      int const column = (chunk * kLanes + lane()) * kWidth;
      if (column < partial.head_dim_v) {
        *reinterpret_cast<uint32_t*>(target + column) =
            pack<Element>(total[chunk].x * factor, total[chunk].y * factor);
      }
    }
  }
};

// The thread blocks of a slot, blockIdx.y of gridDim.y, combine the part's share of the tile's rows.
// kStartsEarly: as launch_kernel has it.
template <class Element, int kHeadDimV, bool kStartsEarly, class Source>
__global__ void __launch_bounds__(kCombineThreads, 5)
    combine_kernel(__grid_constant__ ForwardParams const params, __grid_constant__ Source const source,
                   __grid_constant__ PartialResults const partial) {
  using Combine = CombineRow<Element, kHeadDimV>;
  __shared__ typename Combine::Sums sums;
  // Also where nothing is cut: the kernel after this one waits for this one alone.
  if constexpr (kStartsEarly) wait_for_grid_before();
  int const slot = blockIdx.x, lane = Combine::lane(), warp = threadIdx.x / 32;
  if (slot >= source.order.cut_blocks() * int(source.order.packs_of_all.value)) return;
  SplitTile const tile = partial.tiles ? partial.tiles[slot] : source.tile(slot);
  auto const mask = source.mask(tile);
  PackGqa const& rows = source.rows();
  // Splits of a fixed length are added up as their place among all splits of the sequence says.
  int const fixed_blocks = source.order.lengths.fixed_blocks;
  int const begin = fixed_blocks > 0 ? (tile.block_begin / fixed_blocks - tile.split) % 32 : 0;
  int const team = fixed_blocks == 0 && tile.splits <= Combine::kAtOnce       ? 1
                   : fixed_blocks == 0 && tile.splits <= 2 * Combine::kAtOnce ? 2
                                                                              : kCombineWarps;
  int const teams = kCombineWarps / team, member = warp % team;
  int const group_rows = partial.rows / rows.groups;

  int const share = tile.split * gridDim.y + blockIdx.y, shares = tile.splits * gridDim.y;
  for (int first = share * teams; first < partial.rows; first += shares * teams) {
    int const row = first + warp / team, group = row / group_rows, of_group = row - group * group_rows;
    int const query = tile.m_begin + group * rows.queries + rows.query(of_group);
    bool const is_row = row < partial.rows && rows.uses(of_group) && query < tile.seqlen_q;
    Combine const combine{
        partial, slot - tile.split * tile.tiles_per_split, tile.tiles_per_split, begin, begin + tile.splits,
        row};
    int const head = tile.head + rows.head(of_group);
    float const sink = params.sinks.logits && is_row ? params.sinks.logit<Element>(head) : -INFINITY;
    float2 total[Combine::kChunks]{};
    float sum = 0.f, reference = 0.f;
    if (is_row) {
      float const highest = fmaxf(combine.highest_lse(), sink);
      reference = highest == -INFINITY ? 0.f : highest;
      sum = combine.add(reference, member, team, total) + expf(sink - reference);
    }
    if (team > 1) {
      CUTE_UNROLL
      for (int chunk = 0; chunk < Combine::kChunks; ++chunk) sums[warp][chunk][lane] = total[chunk];
      __syncthreads();
      for (int other = 1; member == 0 && other < team; ++other) {
        CUTE_UNROLL
        for (int chunk = 0; chunk < Combine::kChunks; ++chunk) {
          total[chunk].x += sums[warp + other][chunk][lane].x;
          total[chunk].y += sums[warp + other][chunk][lane].y;
        }
      }
      __syncthreads();
    }
    if (!is_row || member > 0) continue;
    Element* const target = static_cast<Element*>(params.out.data) + tile.batch * params.out.batch_stride +
                            head * params.out.head_stride + (tile.q_begin + query) * params.out.row_stride;
    // Where all visible scores are -inf, the sum is 0, too, and O NaN, as it is without splits.
    combine.store(target, sum == 0.f && mask.is_fully_masked(query) ? 0.f : 1.f / sum, total);
    if (lane == 0) {
      params.lse[tile.batch * params.lse_batch_stride + int64_t(head) * params.shape.seqlen_q + tile.q_begin +
                 query] = reference + logf(sum);
    }
  }
}

template <class Element, int kHeadDimV, bool kStartsEarly, class Source>
void launch_combine(ForwardParams const& params, Source const& source, PartialResults const& partial,
                    int slots, cudaStream_t stream) {
  constexpr int kRowsOfBlock = 16;  // of two splits, about half as many
  int const blocks_of_slot = ceil_div(partial.rows, kRowsOfBlock);
  launch_kernel<combine_kernel<Element, kHeadDimV, kStartsEarly, Source>, kStartsEarly>(
      params.device, dim3(slots, blocks_of_slot), kCombineThreads, 0, stream, params, source, partial);
}

}  // namespace flash_cute
