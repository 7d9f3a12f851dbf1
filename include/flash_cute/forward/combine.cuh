// The kernels after a forward whose tiles are cut into splits of their keys: they combine their results.
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
// numbers of the splits alone. A warp has little to do but to wait, so instructions count: a lane has as many
// columns side by side as a load takes, and addresses go from split to split.
template <class Element, int kHeadDimV>
struct CombineRow {
  static constexpr int kLanes = 32, kWidth = kHeadDimV % 128 == 0 ? 4 : 2;  // columns side by side
  static constexpr int kChunks = (kHeadDimV + kLanes * kWidth - 1) / (kLanes * kWidth);
  static constexpr int kColumns = kChunks * kWidth;         // of a lane
  static constexpr int kAtOnce = kHeadDimV <= 128 ? 8 : 4;  // splits of a warp whose loads overlap
  using Chunk = std::conditional_t<kWidth == 4, float4, float2>;
  using Sums = Chunk[kCombineWarps][kChunks][kLanes];
  float const *out, *lse;      // of the first split
  int64_t out_step, lse_step;  // from one split to the next
  int end;                     // of the splits, of which lane i of 32 has those that are i modulo 32
  int head_dim_v;

  CUTE_DEVICE static int lane() { return threadIdx.x % kLanes; }
  CUTE_DEVICE int column(int chunk) const { return (chunk * kLanes + lane()) * kWidth; }
  CUTE_DEVICE float lse_of(int split) const { return split < end ? lse[split * lse_step] : -INFINITY; }

  CUTE_DEVICE float highest_lse(float own) const {
#pragma unroll 1
    for (int split = lane() + kLanes; split < end; split += kLanes) own = fmaxf(own, lse_of(split));
    CUTE_UNROLL
    for (int step = kLanes / 2; step > 0; step /= 2) own = fmaxf(own, __shfl_xor_sync(~0u, own, step));
    return own;
  }

  // Adds the splits member, member + team, member + 2 team, ... weighted by exp(LSE - reference), where the
  // reference is the highest LSE, or the sink. Returns the sum of all weights.
  CUTE_DEVICE float add(float sink, int member, int team, float (&total)[kColumns], float& reference) const {
    int split = member;
    float const* from = out + split * out_step + column(0);
    int64_t const step = team * out_step;
    float sum = 0.f;
    for (int first = 0; first < end; first += kLanes) {
      int const stop = smaller(first + kLanes, end);
      float const own_lse = lse_of(first + lane());
      float own_weight = 0.f;
      bool is_weighted = false;
      do {
        Chunk values[kAtOnce][kChunks];
        CUTE_UNROLL
        for (int n = 0; n < kAtOnce; ++n, from += step) {
          CUTE_UNROLL
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            if (split + n * team < stop && column(chunk) < head_dim_v)
              values[n][chunk] = *reinterpret_cast<Chunk const*>(from + chunk * kLanes * kWidth);
          }
        }
        if (!is_weighted) {  // while these arrive
          if (first == 0) {
            float const highest = fmaxf(highest_lse(own_lse), sink);
            reference = highest == -INFINITY ? 0.f : highest;
          }
          own_weight = expf(own_lse - reference);
          sum += own_weight;
          is_weighted = true;
        }
        CUTE_UNROLL
        for (int n = 0; n < kAtOnce; ++n) {
          float const weight = __shfl_sync(~0u, own_weight, (split + n * team) % kLanes);
          if (split + n * team >= stop) continue;
          CUTE_UNROLL
          for (int i = 0; i < kColumns; ++i)
            total[i] += weight * reinterpret_cast<float const*>(&values[n][i / kWidth])[i % kWidth];
        }
        split += kAtOnce * team;
      } while (split < stop);
      int const next = first + kLanes + member;
      from += (next - split) * out_step;
      split = next;
    }
    CUTE_UNROLL
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum + expf(sink - reference);
  }

  CUTE_DEVICE void store(Element* target, float factor, float const (&total)[kColumns]) const {
    CUTE_UNROLL
    for (int i = 0; i < kColumns; i += 2) {
      int const at = column(i / kWidth) + i % kWidth;
      if (at < head_dim_v) {
        *reinterpret_cast<uint32_t*>(target + at) = pack<Element>(total[i] * factor, total[i + 1] * factor);
      }
    }
  }
};

// A row of a tile whose splits have partial results.
struct PartialRow {
  int row, query, head;
  bool exists;

  CUTE_DEVICE PartialRow(PartialResults const& partial, PackGqa const& rows, SplitTile const& tile, int row_)
      : row(row_) {
    int const group_rows = partial.rows / rows.groups, group = row / group_rows;
    int const of_group = row - group * group_rows;
    query = tile.m_begin + group * rows.queries + rows.query(of_group);
    head = tile.head + rows.head(of_group);
    exists = row < partial.rows && rows.uses(of_group) && query < tile.seqlen_q;
  }

  template <class Element>
  CUTE_DEVICE float sink(ForwardParams const& params) const {
    return params.sinks.logits && exists ? params.sinks.logit<Element>(head) : -INFINITY;
  }
  template <class Element>
  CUTE_DEVICE Element* out(ForwardParams const& params, SplitTile const& tile) const {
    return static_cast<Element*>(params.out.data) + tile.batch * params.out.batch_stride +
           head * params.out.head_stride + (tile.q_begin + query) * params.out.row_stride;
  }
  CUTE_DEVICE float& lse(ForwardParams const& params, SplitTile const& tile) const {
    return params.lse[tile.batch * params.lse_batch_stride + int64_t(head) * params.shape.seqlen_q +
                      tile.q_begin + query];
  }
};

// The thread blocks of a slot, blockIdx.y of gridDim.y, combine the part's share of the tile's rows.
// kStartsEarly: as launch_kernel has it.
template <class Element, int kHeadDimV, bool kStartsEarly, class Source>
__global__ void __launch_bounds__(kCombineThreads, 4)
    combine_kernel(__grid_constant__ ForwardParams const params, __grid_constant__ Source const source,
                   __grid_constant__ PartialResults const partial) {
  using Combine = CombineRow<Element, kHeadDimV>;
  __shared__ typename Combine::Sums sums;
  int const slot = blockIdx.x, lane = Combine::lane(), warp = threadIdx.x / 32;
  // What is known without lengths is found while the forward runs, as this takes a microsecond.
  bool const is_known = source.order.is_uniform();
  // Also where nothing is cut: the kernel after this one waits for this one alone.
  if (kStartsEarly && !is_known) wait_for_grid_before();
  SplitTile tile;
  if (partial.tiles) tile = partial.tiles[slot];  // on its way beside what says whether there is one
  bool const is_cut = slot < source.order.cut_blocks() * int(source.order.packs_of_all.value);
  if (!is_known && !is_cut) return;
  if (!partial.tiles) tile = source.tile(slot);
  auto const mask = source.mask(tile);
  int const team = tile.splits <= Combine::kAtOnce       ? 1
                   : tile.splits <= 2 * Combine::kAtOnce ? 2
                                                         : kCombineWarps;
  int const teams = kCombineWarps / team, member = warp & (team - 1);
  int const share = tile.split * gridDim.y + blockIdx.y, shares = tile.splits * gridDim.y;
  int const first_slot = slot - tile.split * tile.tiles_per_split;
  int const warp_row = (team == 1 ? warp : team == 2 ? warp / 2 : 0);
  auto row_of = [&](int first) { return PartialRow(partial, source.rows(), tile, first + warp_row); };
  PartialRow at = row_of(share * teams);
  if (kStartsEarly && is_known) wait_for_grid_before();
  if (!is_cut) return;

  for (int first = share * teams; first < partial.rows; first += shares * teams, at = row_of(first)) {
    bool const is_row = at.exists;
    Combine const combine{.out = partial.out_row(first_slot, at.row),
                          .lse = &partial.lse_of(first_slot, at.row),
                          .out_step = int64_t(tile.tiles_per_split) * partial.rows * partial.head_dim_v,
                          .lse_step = int64_t(tile.tiles_per_split) * partial.rows,
                          .end = tile.splits,
                          .head_dim_v = partial.head_dim_v};
    float const sink = at.template sink<Element>(params);
    float total[Combine::kColumns]{};
    float sum = 0.f, reference = 0.f;
    if (is_row) sum = combine.add(sink, member, team, total, reference);
    if (team > 1) {
      auto& chunks = reinterpret_cast<typename Combine::Chunk(&)[Combine::kChunks]>(total);
      CUTE_UNROLL
      for (int chunk = 0; chunk < Combine::kChunks; ++chunk) sums[warp][chunk][lane] = chunks[chunk];
      __syncthreads();
      for (int other = 1; member == 0 && other < team; ++other) {
        CUTE_UNROLL
        for (int i = 0; i < Combine::kColumns; ++i) {
          total[i] += reinterpret_cast<float const*>(
              &sums[warp + other][i / Combine::kWidth][lane])[i % Combine::kWidth];
        }
      }
      __syncthreads();
    }
    if (!is_row || member > 0) continue;
    // Where all visible scores are -inf, the sum is 0, too, and O NaN, as it is without splits.
    combine.store(at.template out<Element>(params, tile),
                  sum == 0.f && mask.is_fully_masked(at.query) ? 0.f : 1.f / sum, total);
    if (lane == 0) at.lse(params, tile) = reference + logf(sum);
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
