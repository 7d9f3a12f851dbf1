// Softmax over rows, and its gradient. A row's threads keep it in registers between its sum and its result:
// one read and one write. Where the registers of all thread blocks don't hold it, what came before the last
// tile is read again.
#pragma once

#include <type_traits>

#include "flash_cute/softmax/reduce.hpp"
#include "flash_cute/softmax/row.hpp"

namespace flash_cute {

// A thread's place among the rows, and in its row.
template <class Traits>
struct RowPlace {
  using Storage = typename Traits::Storage;

  bool valid;  // else there is no such row
  int row;     // among all rows
  int part, lane;
  Row<Traits> columns;  // of the row, as far as the part has them
  Storage const *input, *gradient;
  Storage* output;
  int first, tiles;  // the thread's first chunk, and how many tiles the part has

  __device__ RowPlace(RowSoftmaxParams const& params, int parts, unsigned turn) {
    static_assert(!Traits::kShared || Traits::kRows == 1);
    ScoreShape const& shape = params.shape;
    unsigned const team = (blockIdx.x + turn * gridDim.x) / parts;
    unsigned const found = team * Traits::kRows + threadIdx.x / Traits::kLanes;
    part = int(blockIdx.x % parts);
    lane = int(threadIdx.x % Traits::kLanes);
    valid = found < unsigned(shape.all_rows());
    row = valid ? int(found) : 0;
    int const index = row % shape.rows, pair = row / shape.rows;
    int const head = pair % shape.heads, entry = pair / shape.heads;
    auto at = [&](TensorView const& view) {
      return static_cast<Storage*>(view.data) + entry * view.batch_stride + head * view.head_stride +
             index * view.row_stride;
    };
    input = at(params.input);
    gradient = params.gradient.data ? at(params.gradient) : nullptr;
    output = at(params.output);

    VisibleColumns const visible = params.mask.visible(shape, entry, index);
    int const skew = Row<Traits>::skew_of(input), size = skew + shape.columns;
    int const chunks = ceil_div(size, Traits::kWidth), of_part = ceil_div(chunks, parts);
    int const part_end = valid ? smaller((part + 1) * of_part * Traits::kWidth, size) : 0;
    int const end = visible.begin < visible.end ? smaller(part_end, skew + visible.end) : 0;
    columns = {skew, part_end, skew + visible.begin, end};
    first = part * of_part + lane;
    tiles = Traits::kShared ? ceil_div(of_part, Traits::kTile) : 1;
  }

  __device__ int chunk(int tile) const { return first + tile * Traits::kTile; }
};

// Calls step(place) for each row that this thread has a share in.
template <class Traits, class Step>
__device__ void for_each_row(RowSoftmaxParams const& params, int parts, Step&& step) {
  if constexpr (!Traits::kShared) return step(RowPlace<Traits>(params, 1, 0));
  unsigned const teams = ceil_div(unsigned(params.shape.all_rows()), unsigned(Traits::kRows));
  for (unsigned turn = 0; turn * gridDim.x + blockIdx.x < teams * parts; ++turn) {
    step(RowPlace<Traits>(params, parts, turn));
  }
}

// The weights of scores: each exponential is computed once, and kept.
template <class Traits>
struct Weights {
  float values[Traits::kChunks][Traits::kWidth];

  // Of all the chunks, relative to the highest score among those of a warp's lanes that share a row. The
  // result is that score.
  __device__ float relative_to_warp(typename Traits::Chunk const (&scores)[Traits::kChunks],
                                    LogSumOp const& op) {
    float highest = -INFINITY;
#pragma unroll
    for (auto const& chunk : scores) highest = max_or_nan(highest, chunk.max());
    highest = reduce_lanes<Traits::kLanes>(highest, MaxOrNan{});
    relative_to(highest == -INFINITY ? 0.f : highest, scores, op);
    return highest;
  }
  __device__ void relative_to(float highest, typename Traits::Chunk const (&scores)[Traits::kChunks],
                              LogSumOp const& op) {
    float const reference = op.reference(highest);
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      scores[k].to_floats(values[k]);
#pragma unroll
      for (float& value : values[k]) value = op.weight(value, reference);
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    row_softmax(__grid_constant__ RowSoftmaxParams const params, int parts) {
  using Chunk = typename Traits::Chunk;
  using Reduction = RowReduction<Traits, LogSumOp>;
  __shared__ typename Reduction::Storage storage;
  Reduction reduce(storage);
  LogSumOp const op{params.scale * float(M_LOG2E)};
  for_each_row<Traits>(params, parts, [&](RowPlace<Traits> const& place) {
    Chunk chunks[Traits::kChunks];
    Weights<Traits> weights;
    auto load = [&](int tile) {
      place.columns.load(chunks, place.input, place.chunk(tile), Chunk::kMinusInfinity);
    };
    float2 total = LogSumOp::identity();  // of this thread, relative to the highest score of its warp
    float highest_of_warp = -INFINITY;    // in the last tile, whose weights stay
    for (int tile = 0; tile < place.tiles; ++tile) {
      load(tile);
      highest_of_warp = weights.relative_to_warp(chunks, op);
      float sum = 0.f;
#pragma unroll
      for (auto const& values : weights.values) {
#pragma unroll
        for (float const value : values) sum += value;
      }
      total = place.tiles == 1 ? float2{highest_of_warp, sum} : op(total, {highest_of_warp, sum});
    }
    total.y = reduce_lanes<Traits::kLanes>(total.y, Sum{});
    total = reduce(total, op, place.part, parts, {params.workspace, int64_t(place.row) * parts});
    if (place.valid && place.part == 0 && place.lane == 0) {
      params.lse[place.row] = isinf(total.x) ? total.x : op.lse(total, params.scale);
    }
    float const whole = __fdividef(1.f, total.y);
    float factor = whole;
    if constexpr (Traits::kLanes > kWarp) factor *= op.change(highest_of_warp, total.x);
    for (int tile = place.tiles - 1; tile >= 0; --tile) {
      if (tile + 1 < place.tiles) {
        load(tile);
        weights.relative_to(total.x, chunks, op);
        factor = whole;
      }
      place.columns.store(place.output, place.chunk(tile), [&](int k) {
        float values[Traits::kWidth];
#pragma unroll
        for (int i = 0; i < Traits::kWidth; ++i) values[i] = weights.values[k][i] * factor;
        return Chunk::of_floats(values);
      });
    }
  });
}

// dS = scale * P (dP + dLSE - sum(P dP)), from P or from S. Of scores, the row's highest and the sum of its
// weights are found anew: the LSE, as float32, does not tell probabilities of scores of thousands.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    row_softmax_backward(__grid_constant__ RowSoftmaxParams const params, int parts) {
  using Chunk = typename Traits::Chunk;
  using Op = std::conditional_t<Traits::kFromScores, LogSumDotOp, DotOp>;
  using Value = typename Op::Value;
  using Reduction = RowReduction<Traits, Op>;
  constexpr int kWidth = Traits::kWidth;
  __shared__ typename Reduction::Storage storage;
  Reduction reduce(storage);
  LogSumOp const weigh{params.scale * float(M_LOG2E)};
  Op op;
  if constexpr (Traits::kFromScores) op.sum = weigh;
  for_each_row<Traits>(params, parts, [&](RowPlace<Traits> const& place) {
    Chunk inputs[Traits::kChunks], gradients[Traits::kChunks];
    Weights<Traits> weights;
    float dp[kWidth];
#pragma unroll
    for (Chunk& chunk : gradients) chunk = Chunk::filled(0);
    auto load = [&](int tile) {
      place.columns.load(inputs, place.input, place.chunk(tile),
                         Traits::kFromScores ? Chunk::kMinusInfinity : 0);
      if (place.gradient) place.columns.load(gradients, place.gradient, place.chunk(tile), 0);
      if constexpr (!Traits::kFromScores) {
#pragma unroll
        for (int k = 0; k < Traits::kChunks; ++k) inputs[k].to_floats(weights.values[k]);
      }
    };
    Value total = Op::identity();
    [[maybe_unused]] float highest_of_warp = -INFINITY;
    for (int tile = 0; tile < place.tiles; ++tile) {
      load(tile);
      if constexpr (Traits::kFromScores) highest_of_warp = weights.relative_to_warp(inputs, weigh);
      [[maybe_unused]] float sum = 0.f;
      float dot = 0.f;
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) {
        gradients[k].to_floats(dp);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if constexpr (Traits::kFromScores) sum += weights.values[k][i];
          dot = fmaf(weights.values[k][i], dp[i], dot);
        }
      }
      forget_floats(gradients);
      if constexpr (Traits::kFromScores) {
        Value const of_tile{highest_of_warp, sum, dot, 0.f};
        total = place.tiles == 1 ? of_tile : op(total, of_tile);
      } else {
        total.x += dot;
      }
    }
    if constexpr (Traits::kFromScores) {
      total.y = reduce_lanes<Traits::kLanes>(total.y, Sum{});
      total.z = reduce_lanes<Traits::kLanes>(total.z, Sum{});
    } else {
      total.x = reduce_lanes<Traits::kLanes>(total.x, Sum{});
    }
    total = reduce(total, op, place.part, parts, {params.workspace, int64_t(place.row) * parts});
    float whole = 1.f, dot = total.x;
    if constexpr (Traits::kFromScores) {
      whole = __fdividef(1.f, total.y);
      dot = total.z * whole;
    }
    float const shift = (params.dlse && place.valid ? params.dlse[place.row] : 0.f) - dot;
    whole *= params.scale;
    float factor = whole;
    if constexpr (Traits::kFromScores && Traits::kLanes > kWarp) {
      factor *= weigh.change(highest_of_warp, total.x);
    }
    for (int tile = place.tiles - 1; tile >= 0; --tile) {
      if (tile + 1 < place.tiles) {
        load(tile);
        if constexpr (Traits::kFromScores) weights.relative_to(total.x, inputs, weigh);
        factor = whole;
      }
      place.columns.store(place.output, place.chunk(tile), [&](int k) {
        gradients[k].to_floats(dp);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) dp[i] = weights.values[k][i] * factor * (dp[i] + shift);
        return Chunk::of_floats(dp);
      });
    }
  });
}

}  // namespace flash_cute
