// Softmax over rows, and its gradient. A row's threads keep it between its sum and its result, in registers
// or in shared memory: one read and one write. Where all thread blocks together don't hold it, what came
// before the last tile is read again.
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
    static_assert(!Traits::kPersistent || Traits::kRows == 1);
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
    tiles = Traits::kShared && Traits::kStages == 0 ? ceil_div(of_part, Traits::kTile) : 1;
  }

  __device__ int chunk(int tile) const { return first + tile * Traits::kTile; }
};

// A thread's chunks of its row of one tensor, or of two, in registers.
template <class Traits, int kStages = Traits::kStages>
class HeldRow {
 public:
  using Chunk = typename Traits::Chunk;
  using Place = RowPlace<Traits>;

  __device__ void fetch(Place const&, unsigned) {}
  __device__ void load(Place const& place, unsigned, int tile, typename Traits::Storage hidden) {
    place.columns.load(chunks_[0], place.input, place.chunk(tile), hidden);
    if constexpr (Traits::kTensors > 1) {
      if (place.gradient) {
        place.columns.load(chunks_[1], place.gradient, place.chunk(tile), 0);
      } else {
#pragma unroll
        for (Chunk& chunk : chunks_[1]) chunk = Chunk::filled(0);
      }
    }
  }
  __device__ Chunk const& get(int tensor, int k) const { return chunks_[tensor][k]; }
  __device__ void forget_floats() {
#pragma unroll
    for (auto& chunks : chunks_) flash_cute::forget_floats(chunks);
  }

 private:
  Chunk chunks_[Traits::kTensors][Traits::kChunks];
};

// In shared memory, where those of the next rows arrive meanwhile. Each thread reads what it has fetched.
template <class Traits>
  requires(Traits::kStages > 0)
class HeldRow<Traits, Traits::kStages> {
 public:
  using Chunk = typename Traits::Chunk;
  using Place = RowPlace<Traits>;

  // turn: of the thread block; one row of each of kStages turns in a row may be here.
  __device__ void fetch(Place const& place, unsigned turn) {
    Chunk* const to = of_turn(turn);
    place.columns.fetch(to, place.input, place.first);
    if constexpr (Traits::kTensors > 1) {
      if (place.gradient) place.columns.fetch(to + Traits::kTile, place.gradient, place.first);
    }
    end_group_of_chunks();
  }
  __device__ void load(Place const& place, unsigned turn, int, typename Traits::Storage hidden) {
    wait_for_chunks<Traits::kStages - 1>();
    held_ = of_turn(turn);
    place.columns.settle(held_, place.input, place.first, hidden);
    if constexpr (Traits::kTensors > 1) {
      has_gradient_ = place.gradient;
      if (has_gradient_) place.columns.settle(held_ + Traits::kTile, place.gradient, place.first, 0);
    }
  }
  __device__ Chunk get(int tensor, int k) const {
    if (tensor == 1 && !has_gradient_) return Chunk::filled(0);
    return held_[tensor * Traits::kTile + k * Traits::kLanes];
  }
  __device__ void forget_floats() { asm volatile("" ::: "memory"); }

 private:
  __device__ static Chunk* of_turn(unsigned turn) {
    extern __shared__ uint4 row_memory[];
    unsigned const stage = turn % Traits::kStages;
    return reinterpret_cast<Chunk*>(row_memory) + stage * Traits::kTensors * Traits::kTile + threadIdx.x;
  }

  Chunk* held_;
  bool has_gradient_ = false;
};

// Calls step(place, turn, held) for each row that this thread has a share in.
template <class Traits, class Step>
__device__ void for_each_row(RowSoftmaxParams const& params, int parts, Step&& step) {
  HeldRow<Traits> held;
  if constexpr (!Traits::kPersistent) {
    step(RowPlace<Traits>(params, 1, 0), 0, held);
  } else {
    unsigned const teams = ceil_div(unsigned(params.shape.all_rows()), unsigned(Traits::kRows));
    auto fetch = [&](unsigned turn) {
      if constexpr (Traits::kStages == 0) return;
      // Without a row the group is empty, but counted.
      if (turn * gridDim.x + blockIdx.x < teams * parts) {
        held.fetch(RowPlace<Traits>(params, parts, turn), turn);
      } else {
        end_group_of_chunks();
      }
    };
    for (int turn = 0; turn < Traits::kStages; ++turn) fetch(turn);
    for (unsigned turn = 0; turn * gridDim.x + blockIdx.x < teams * parts; ++turn) {
      step(RowPlace<Traits>(params, parts, turn), turn, held);
      fetch(turn + Traits::kStages);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    row_softmax(__grid_constant__ RowSoftmaxParams const params, int parts) {
  using Chunk = typename Traits::Chunk;
  constexpr int kWidth = Traits::kWidth;
  using Reduction = RowReduction<Traits, LogSumOp>;
  __shared__ typename Reduction::Storage storage;
  Reduction reduce(storage);
  LogSumOp const op{params.scale * float(M_LOG2E)};
  for_each_row<Traits>(params, parts, [&](RowPlace<Traits> const& place, unsigned turn, auto& held) {
    float values[kWidth];
    auto load = [&](int tile) { held.load(place, turn, tile, Chunk::kMinusInfinity); };
    float2 total = LogSumOp::identity();  // of this thread, relative to the highest score of its warp
    for (int tile = 0; tile < place.tiles; ++tile) {
      load(tile);
      float highest = -INFINITY, sum = 0.f;
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) highest = max_or_nan(highest, held.get(0, k).max());
      highest = reduce_lanes<Traits::kLanes>(highest, MaxOrNan{});
      held.forget_floats();
      float const reference = highest == -INFINITY ? 0.f : highest;
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) {
        held.get(0, k).to_floats(values);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum += exp2_approx((values[i] - reference) * op.scale_log2);
      }
      held.forget_floats();
      total = place.tiles == 1 ? float2{highest, sum} : op(total, {highest, sum});
    }
    total.y = reduce_lanes<Traits::kLanes>(total.y, Sum{});
    total = reduce(total, op, place.part, parts, {params.workspace, int64_t(place.row) * parts});
    float const highest = total.x, factor = __fdividef(1.f, total.y);
    if (place.valid && place.part == 0 && place.lane == 0) {
      params.lse[place.row] = isinf(highest) ? highest : fmaf(highest, params.scale, logf(total.y));
    }
    for (int tile = place.tiles - 1; tile >= 0; --tile) {
      if (tile + 1 < place.tiles) load(tile);
      place.columns.store(place.output, place.chunk(tile), [&](int k) {
        held.get(0, k).to_floats(values);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          values[i] = exp2_approx((values[i] - highest) * op.scale_log2) * factor;
        }
        return Chunk::of_floats(values);
      });
    }
  });
}

// dS = scale * P (dP + dLSE - sum(P dP)). Of scores, the row's highest and the sum of its weights are found
// anew: the LSE, as float32, does not tell probabilities of scores of thousands.
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
  float const scale_log2 = params.scale * float(M_LOG2E);
  Op op;
  if constexpr (Traits::kFromScores) op.sum = {scale_log2};
  for_each_row<Traits>(params, parts, [&](RowPlace<Traits> const& place, unsigned turn, auto& held) {
    float p[kWidth], dp[kWidth];
    auto load = [&](int tile) {
      held.load(place, turn, tile, Traits::kFromScores ? Chunk::kMinusInfinity : 0);
    };
    auto compute = [&](int k, float highest) {  // weights and dp of a chunk
      held.get(0, k).to_floats(p);
      held.get(1, k).to_floats(dp);
      if constexpr (Traits::kFromScores) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) p[i] = exp2_approx((p[i] - highest) * scale_log2);
      }
    };
    Value total = Op::identity();
    for (int tile = 0; tile < place.tiles; ++tile) {
      load(tile);
      [[maybe_unused]] float highest = -INFINITY, sum = 0.f;
      float dot = 0.f;
      if constexpr (Traits::kFromScores) {
#pragma unroll
        for (int k = 0; k < Traits::kChunks; ++k) highest = max_or_nan(highest, held.get(0, k).max());
        highest = reduce_lanes<Traits::kLanes>(highest, MaxOrNan{});
        held.forget_floats();
      }
      float const reference = highest == -INFINITY ? 0.f : highest;
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) {
        compute(k, reference);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if constexpr (Traits::kFromScores) sum += p[i];
          dot = fmaf(p[i], dp[i], dot);
        }
      }
      held.forget_floats();
      if constexpr (Traits::kFromScores) {
        Value const of_tile{highest, sum, dot, 0.f};
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
    // p is weight * factor.
    float highest = 0.f, factor = 1.f, dot = total.x;
    if constexpr (Traits::kFromScores) {
      highest = total.x;
      factor = __fdividef(1.f, total.y);
      dot = total.z * factor;
    }
    factor *= params.scale;
    float const shift = (params.dlse && place.valid ? params.dlse[place.row] : 0.f) - dot;
    for (int tile = place.tiles - 1; tile >= 0; --tile) {
      if (tile + 1 < place.tiles) load(tile);
      place.columns.store(place.output, place.chunk(tile), [&](int k) {
        compute(k, highest);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) p[i] *= factor * (dp[i] + shift);
        return Chunk::of_floats(p);
      });
    }
  });
}

}  // namespace flash_cute
