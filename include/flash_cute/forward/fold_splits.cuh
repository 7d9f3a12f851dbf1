// The kernel after a forward whose tiles are cut into splits of a fixed length: it adds them up as a tile
// does that has several (fold.hpp).
#pragma once

#include "flash_cute/forward/combine.cuh"
#include "flash_cute/forward/fold.hpp"

namespace flash_cute {

// One row. As each addition needs the one before, the warps of a team have columns of it, of each kLanes a
// lane one, and load many splits at a time. Lane i finds the weights of the i-th of these.
template <class Element, int kHeadDimV>
struct FoldRow {
  static constexpr int kLanes = 32, kSlices = ceil_div(kHeadDimV, kLanes);
  static constexpr int kTeam = kSlices > 2 ? kCombineWarps : kSlices;  // warps
  static constexpr int kColumns = ceil_div(kSlices, kTeam);            // of a lane
  static constexpr int kAtOnce = kLanes / kColumns;                    // splits
  float const *out, *lse;                                              // of the last split
  int64_t out_step, lse_step;                                          // from one split to the one before it
  int splits, head_dim_v;
  int member;  // of the team

  CUTE_DEVICE static int lane() { return threadIdx.x % kLanes; }
  CUTE_DEVICE int column(int i) const { return (i * kTeam + member) * kLanes + lane(); }
  CUTE_DEVICE bool has(int i) const { return column(i) < head_dim_v; }

  struct Weighted {
    float highest;  // of all LSEs so far
    FoldWeights weights;
  };
  // Of the lane's split.
  CUTE_DEVICE static Weighted weigh(float highest, float own_lse) {
    float raised = fmaxf(highest, own_lse);
    CUTE_UNROLL
    for (int step = 1; step < kAtOnce; step *= 2) {
      float const before = __shfl_up_sync(~0u, raised, step);
      if (lane() >= step) raised = fmaxf(raised, before);
    }
    float const before = __shfl_up_sync(~0u, raised, 1);
    return {__shfl_sync(~0u, raised, kAtOnce - 1),
            fold_weights(lane() == 0 ? highest : before, raised, own_lse)};
  }

  CUTE_DEVICE void add(float (&total)[kColumns], float& highest, float& sum) const {
    for (int first = 0; first < splits; first += kAtOnce) {
      int const count = smaller(kAtOnce, splits - first);
      float const own_lse = lane() < count ? lse[(first + lane()) * lse_step] : -INFINITY;
      float values[kAtOnce][kColumns];
      CUTE_UNROLL
      for (int n = 0; n < kAtOnce; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < kColumns; ++i) {
          if (n < count && has(i)) values[n][i] = out[(first + n) * out_step + column(i)];
        }
      }
      auto const [raised, weights] = weigh(highest, own_lse);  // while these arrive
      highest = raised;
      CUTE_UNROLL
      for (int n = 0; n < kAtOnce; ++n) {
        if (n >= count) break;
        FoldWeights const of_split{__shfl_sync(~0u, weights.total, n), __shfl_sync(~0u, weights.split, n)};
        sum = fold_sum(sum, of_split);
        CUTE_UNROLL
        for (int i = 0; i < kColumns; ++i) total[i] = fold(total[i], values[n][i], of_split);
      }
    }
  }
};

// The thread blocks of a slot, blockIdx.y of gridDim.y, have the split's share of the tile's rows.
// kStartsEarly: as launch_kernel has it.
template <class Element, int kHeadDimV, bool kStartsEarly, class Source>
__global__ void __launch_bounds__(kCombineThreads, 4)
    fold_kernel(__grid_constant__ ForwardParams const params, __grid_constant__ Source const source,
                __grid_constant__ PartialResults const partial) {
  using Fold = FoldRow<Element, kHeadDimV>;
  constexpr int kRowsAtOnce = kCombineWarps / Fold::kTeam;
  int const warp = threadIdx.x / 32, lane = Fold::lane();
  // As in combine_kernel.
  bool const is_known = source.order.is_uniform();
  if (kStartsEarly && !is_known) wait_for_grid_before();
  int const slots = source.order.cut_blocks() * int(source.order.packs_of_all.value);
  for (int slot = blockIdx.x; slot < slots; slot += gridDim.x) {
    SplitTile const tile = partial.tiles ? partial.tiles[slot] : source.tile(slot);
    auto const mask = source.mask(tile);
    int const share = tile.split * gridDim.y + blockIdx.y, shares = tile.splits * gridDim.y;
    int const last_slot = slot + (tile.splits - 1 - tile.split) * tile.tiles_per_split;
    auto row_of = [&](int first) {
      return PartialRow(partial, source.rows(), tile, first + warp / Fold::kTeam);
    };
    PartialRow at = row_of(share * kRowsAtOnce);
    if (kStartsEarly && is_known) wait_for_grid_before();
    for (int first = share * kRowsAtOnce; first < partial.rows;
         first += shares * kRowsAtOnce, at = row_of(first)) {
      if (!at.exists) continue;
      Fold const fold{.out = partial.out_row(last_slot, at.row),
                      .lse = &partial.lse_of(last_slot, at.row),
                      .out_step = -int64_t(tile.tiles_per_split) * partial.rows * partial.head_dim_v,
                      .lse_step = -int64_t(tile.tiles_per_split) * partial.rows,
                      .splits = tile.splits,
                      .head_dim_v = partial.head_dim_v,
                      .member = warp % Fold::kTeam};
      float total[Fold::kColumns];
      CUTE_UNROLL
      for (int i = 0; i < Fold::kColumns; ++i) total[i] = kNoTotal;
      float highest = -INFINITY, sum = 0.f;
      fold.add(total, highest, sum);
      FoldedRow const end(highest, sum, at.template sink<Element>(params));
      // Where all visible scores are -inf, the sum is 0, too, and O NaN.
      float const factor = end.sum == 0.f && mask.is_fully_masked(at.query) ? 0.f : 1.f / end.sum;
      Element* const out = at.template out<Element>(params, tile);
      CUTE_UNROLL
      for (int i = 0; i < Fold::kColumns; ++i) {
        float const value = highest == -INFINITY ? 0.f : total[i];
        if (fold.has(i)) out[fold.column(i)] = Element(value * end.weight * factor);
      }
      if (fold.member == 0 && lane == 0) at.lse(params, tile) = end.lse;
    }
  }
}

template <class Element, int kHeadDimV, bool kStartsEarly, class Source>
void launch_fold(ForwardParams const& params, Source const& source, PartialResults const& partial, int slots,
                 cudaStream_t stream) {
  constexpr int kRowsOfBlock = 4;
  int const blocks_of_slot = ceil_div(partial.rows, kRowsOfBlock);
  // Where lengths are on the device, few of the slots may be taken.
  constexpr int kBlocksAtOnce = 16;
  int const most = larger(1, kBlocksAtOnce * params.device.multiprocessors / blocks_of_slot);
  int const blocks = source.order.is_uniform() ? slots : smaller(slots, most);
  launch_kernel<fold_kernel<Element, kHeadDimV, kStartsEarly, Source>, kStartsEarly>(
      params.device, dim3(blocks, blocks_of_slot), kCombineThreads, 0, stream, params, source, partial);
}

}  // namespace flash_cute
