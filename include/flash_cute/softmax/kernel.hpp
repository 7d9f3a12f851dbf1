// Softmax over rows, and its gradient. The threads of a row keep it in registers between its sum and its
// result, so that it is read once and written once. Where the registers of all thread blocks do not hold it,
// the tiles before the last one are read again.
#pragma once

#include <type_traits>

#include "flash_cute/core/dependent_launch.hpp"
#include "flash_cute/softmax/reduce.hpp"
#include "flash_cute/softmax/row.hpp"

namespace flash_cute {

// Which row a thread works on, and which part of it.
template <class Traits>
struct RowPlace {
  using Storage = typename Traits::Storage;

  bool valid;           // false: there is no such row
  int row;              // among all rows
  int tiles;            // of the part of the row that the thread block has
  Row<Traits> columns;  // of the part, from the thread's first chunk on
  Storage const *input, *gradient;
  Storage* output;
  // The row's last chunk may reach past the tensor's end, so it is read element by element.
  bool input_ends, gradient_ends;

  // number: the index of the row, or of the group of rows, among those that thread blocks take.
  __device__ RowPlace(RowSoftmaxParams const& params, unsigned number) {
    ScoreShape const& shape = params.shape;
    unsigned const found = Traits::kOfBlock ? number : number * Traits::kRows + threadIdx.x / Traits::kLanes;
    valid = found < unsigned(shape.all_rows());
    row = valid ? int(found) : 0;
    int index = row, head = 0, entry = 0;
    if (shape.heads * shape.batch > 1) {  // divisions take as long as an access to the L2
      int const pair = row / shape.rows;
      index = row % shape.rows, head = pair % shape.heads, entry = pair / shape.heads;
    }
    auto at = [&](TensorView const& view) {
      return static_cast<Storage*>(view.data) + entry * view.batch_stride + head * view.head_stride +
             index * view.row_stride;
    };
    VisibleColumns const visible =
        Traits::kPlain ? VisibleColumns{0, shape.columns} : params.mask.visible(shape, entry, index);
    int const skew = Traits::kPlain ? 0 : Row<Traits>::skew_of(at(params.input)), size = skew + shape.columns;
    int const chunks = ceil_div(size, Traits::kWidth);
    int const of_split = Traits::kShared ? ceil_div(chunks, int(gridDim.y)) : chunks;
    int const before = Traits::kShared ? int(blockIdx.y) * of_split : 0;
    int const part_end = valid ? smaller((before + of_split) * Traits::kWidth, size) : 0;
    // A warp's chunks are contiguous, so the distances between a thread's chunks are constants.
    int const of_warps = Traits::kOfBlock ? threadIdx.x / kWarp * kWarp * Traits::kChunks : 0;
    int const first = (before + of_warps + int(threadIdx.x % Traits::kLanes)) * Traits::kWidth;
    int const end = visible.begin < visible.end ? smaller(part_end, skew + visible.end) : 0;
    columns = Row<Traits>{skew, part_end, skew + visible.begin, end}.after(first);
    input = at(params.input) + (first - skew);
    gradient = params.gradient.data ? at(params.gradient) + (first - skew) : nullptr;
    output = at(params.output) + (first - skew);
    input_ends = !Traits::kPlain && at(params.input) > params.whole_chunks_before.input;
    gradient_ends = !Traits::kPlain && at(params.gradient) > params.whole_chunks_before.gradient;
    tiles = Traits::kInTiles ? ceil_div(of_split, int(blockDim.x) * Traits::kChunks) : 1;
  }

  // Tells whether this thread is the one that writes the row's single values, as the LSE.
  __device__ bool first_of_row() const {
    return valid && threadIdx.x % (Traits::kOfBlock ? Traits::kThreads : Traits::kLanes) == 0 &&
           blockIdx.y == 0;
  }
};

// A thread's chunks of a tile of its row: those of the input and, in the backward, those of the gradient.
template <class Traits>
class HeldRow {
 public:
  using Chunk = typename Traits::Chunk;
  using Storage = typename Traits::Storage;
  using Place = RowPlace<Traits>;

  __device__ Chunk const (&inputs() const)[Traits::kChunks] { return chunks_[0]; }
  __device__ Chunk const (&gradients() const)[Traits::kChunks] { return chunks_[Traits::kTensors - 1]; }

  __device__ void load(Place const& place, int tile, Storage hidden) {
    int const before = elements_before(tile);
    Row<Traits> const columns = place.columns.after(before);
    if (place.input_ends && columns.ends_here()) {
      columns.load_elements(chunks_[0], place.input + before, hidden);
    } else {
      columns.load(chunks_[0], place.input + before, hidden);
    }
    if constexpr (Traits::kTensors > 1) {
      if (!place.gradient) {
#pragma unroll
        for (Chunk& chunk : chunks_[1]) chunk = Chunk::filled(0);
      } else if (Traits::kPlain || (Row<Traits>::skew_of(place.gradient) == 0 &&
                                    !(place.gradient_ends && columns.ends_here()))) {
        columns.load(chunks_[1], place.gradient + before, 0);
      } else {
        columns.load_elements(chunks_[1], place.gradient + before, 0);
      }
    }
  }
  template <class Value>
  __device__ void store(Place const& place, int tile, Value&& value) const {
    int const before = elements_before(tile);
    place.columns.after(before).store(place.output + before, value);
  }
  // See forget_floats in chunk.hpp. Where weights are kept, there is no next loop over the chunks of scores,
  // and these would be kept needlessly.
  __device__ void forget_floats() {
    if constexpr (!Traits::kKeepsWeights) flash_cute::forget_floats(chunks_[0]);
    if constexpr (Traits::kTensors > 1) flash_cute::forget_floats(chunks_[1]);
  }

 private:
  __device__ static int elements_before(int tile) {
    return Traits::kInTiles ? tile * int(blockDim.x) * Traits::kChunks * Traits::kWidth : 0;
  }

  Chunk chunks_[Traits::kTensors][Traits::kChunks];
};

// Calls step(place, held) for each row that this thread works on.
template <class Traits, class Step>
__device__ void for_each_row(RowSoftmaxParams const& params, Step&& step) {
  HeldRow<Traits> held;
  if constexpr (!Traits::kShared) {
    step(RowPlace<Traits>(params, blockIdx.x), held);
  } else {
    for (unsigned row = blockIdx.x; row < unsigned(params.shape.all_rows()); row += gridDim.x) {
      step(RowPlace<Traits>(params, row), held);
    }
  }
}

// The weights of scores, relative to a reference score. They are computed once and kept, or each time that
// they are asked for. Where the input is not scores, the weights are the probabilities themselves.
template <class Traits>
class Weights {
 public:
  using Chunks = typename Traits::Chunk[Traits::kChunks];

  __device__ void set_reference(float score, Chunks const& scores, LogSumOp const& op) {
    reference_ = score;
    if constexpr (Traits::kKeepsWeights) {
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) compute(scores[k], op, values_[k]);
    }
  }
  // Finds the highest score among those of a warp's lanes that share a row, makes it the reference and
  // returns it.
  __device__ float set_reference(Chunks const& scores, LogSumOp const& op) {
    float highest = -INFINITY;
#pragma unroll
    for (auto const& chunk : scores) highest = max_or_nan(highest, chunk.max());
    highest = reduce_lanes<Traits::kLanes>(highest, MaxOrNan{});
    set_reference(highest == -INFINITY ? 0.f : highest, scores, op);
    return highest;
  }
  __device__ void get(int k, Chunks const& scores, LogSumOp const& op,
                      float (&values)[Traits::kWidth]) const {
    if constexpr (Traits::kKeepsWeights) {
#pragma unroll
      for (int i = 0; i < Traits::kWidth; ++i) values[i] = values_[k][i];
    } else {
      compute(scores[k], op, values);
    }
  }

 private:
  __device__ void compute(typename Traits::Chunk const& scores, LogSumOp const& op,
                          float (&values)[Traits::kWidth]) const {
    scores.to_floats(values);
    if constexpr (Traits::kFromScores) {
#pragma unroll
      for (float& value : values) value = op.weight(value, reference_);
    }
  }

  float reference_ = 0.f;
  float values_[Traits::kKeepsWeights ? Traits::kChunks : 1][Traits::kWidth];
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    row_softmax(__grid_constant__ RowSoftmaxParams const params) {
  using Chunk = typename Traits::Chunk;
  using Reduction = RowReduction<Traits, LogSumOp>;
  __shared__ typename Reduction::Storage storage;
  wait_for_grid_before();
  Reduction reduce(storage);
  LogSumOp const op{params.scale * float(M_LOG2E)};
  for_each_row<Traits>(params, [&](RowPlace<Traits> const& place, auto& held) {
    Weights<Traits> weights;
    float values[Traits::kWidth];
    float2 total = LogSumOp::identity();  // of this thread, relative to the highest score of its warp
    float highest_of_warp = -INFINITY;    // in the last tile, whose weights are kept
    for (int tile = 0; tile < place.tiles; ++tile) {
      held.load(place, tile, Chunk::kMinusInfinity);
      highest_of_warp = weights.set_reference(held.inputs(), op);
      held.forget_floats();
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) {
        weights.get(k, held.inputs(), op, values);
#pragma unroll
        for (float const value : values) sum += value;
      }
      held.forget_floats();
      total = place.tiles == 1 ? float2{highest_of_warp, sum} : op(total, {highest_of_warp, sum});
    }
    total.y = reduce_lanes<Traits::kLanes>(total.y, SumOp{});
    total = reduce(total, op, {params.workspace, int64_t(place.row) * gridDim.y});
    if (place.first_of_row()) {
      params.lse[place.row] = isinf(total.x) ? total.x : op.lse(total, params.scale);
    }
    float const whole = __fdividef(1.f, total.y);
    float factor = whole;
    if constexpr (!Traits::kKeepsWeights) {
      weights.set_reference(total.x, held.inputs(), op);
    } else if constexpr (Traits::kOfBlock) {
      factor *= op.change(highest_of_warp, total.x);
    }
    for (int tile = place.tiles - 1; tile >= 0; --tile) {
      if (tile + 1 < place.tiles) {
        held.load(place, tile, Chunk::kMinusInfinity);
        weights.set_reference(total.x, held.inputs(), op);
        factor = whole;
      }
      held.store(place, tile, [&](int k) {
        weights.get(k, held.inputs(), op, values);
#pragma unroll
        for (float& value : values) value *= factor;
        return Chunk::of_floats(values);
      });
    }
  });
}

// Computes dS = scale * P (dP + dLSE - sum(P dP)), from P or from S. From scores, the row's highest one and
// the sum of its weights are found anew: a float32 LSE is too coarse for the probabilities of scores of
// thousands.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    row_softmax_backward(__grid_constant__ RowSoftmaxParams const params) {
  using Chunk = typename Traits::Chunk;
  using Op = std::conditional_t<Traits::kFromScores, LogSumDotOp, DotOp>;
  using Value = typename Op::Value;
  using Reduction = RowReduction<Traits, Op>;
  constexpr int kWidth = Traits::kWidth;
  constexpr typename Traits::Storage kHidden = Traits::kFromScores ? Chunk::kMinusInfinity : 0;
  __shared__ typename Reduction::Storage storage;
  wait_for_grid_before();
  Reduction reduce(storage);
  LogSumOp const compute_p{params.scale * float(M_LOG2E)};
  Op op;
  if constexpr (Traits::kFromScores) op.sum = compute_p;
  for_each_row<Traits>(params, [&](RowPlace<Traits> const& place, auto& held) {
    Weights<Traits> weights;
    float p[kWidth], dp[kWidth];
    Value total = Op::identity();
    [[maybe_unused]] float highest_of_warp = -INFINITY;
    for (int tile = 0; tile < place.tiles; ++tile) {
      held.load(place, tile, kHidden);
      if constexpr (Traits::kFromScores) highest_of_warp = weights.set_reference(held.inputs(), compute_p);
      held.forget_floats();
      [[maybe_unused]] float sum = 0.f;
      float dot = 0.f;
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) {
        weights.get(k, held.inputs(), compute_p, p);
        held.gradients()[k].to_floats(dp);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if constexpr (Traits::kFromScores) sum += p[i];
          dot = fmaf(p[i], dp[i], dot);
        }
      }
      held.forget_floats();
      if constexpr (Traits::kFromScores) {
        Value const of_tile{highest_of_warp, sum, dot, 0.f};
        total = place.tiles == 1 ? of_tile : op(total, of_tile);
      } else {
        total.x += dot;
      }
    }
    if constexpr (Traits::kFromScores) {
      total.y = reduce_lanes<Traits::kLanes>(total.y, SumOp{});
      total.z = reduce_lanes<Traits::kLanes>(total.z, SumOp{});
    } else {
      total.x = reduce_lanes<Traits::kLanes>(total.x, SumOp{});
    }
    total = reduce(total, op, {params.workspace, int64_t(place.row) * gridDim.y});
    float whole = 1.f, dot = total.x;
    if constexpr (Traits::kFromScores) {
      whole = __fdividef(1.f, total.y);
      dot = total.z * whole;
    }
    float const shift = (params.dlse && place.valid ? params.dlse[place.row] : 0.f) - dot;
    whole *= params.scale;
    float factor = whole;
    if constexpr (Traits::kKeepsWeights && Traits::kOfBlock) {
      factor *= compute_p.change(highest_of_warp, total.x);
    } else if constexpr (Traits::kFromScores && !Traits::kKeepsWeights) {
      weights.set_reference(total.x, held.inputs(), compute_p);
    }
    for (int tile = place.tiles - 1; tile >= 0; --tile) {
      if (tile + 1 < place.tiles) {
        held.load(place, tile, kHidden);
        if constexpr (Traits::kFromScores) weights.set_reference(total.x, held.inputs(), compute_p);
        factor = whole;
      }
      held.store(place, tile, [&](int k) {
        weights.get(k, held.inputs(), compute_p, p);
        held.gradients()[k].to_floats(dp);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) p[i] *= factor * (dp[i] + shift);
        return Chunk::of_floats(p);
      });
    }
  });
}

}  // namespace flash_cute
