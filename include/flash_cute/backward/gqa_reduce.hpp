// Reduction of dK and dV where the query heads of a KV head are shared out among several tiles (GQA parts):
// the tiles add to float32 sums in the workspace, and a kernel converts the sums to rows of dK and dV.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/core/dependent_launch.hpp"
#include "flash_cute/core/element.hpp"
#include "flash_cute/core/special_registers.hpp"

namespace flash_cute {

enum class KvGradient { dk, dv };

FLASH_CUTE_HOST_DEVICE int width_of(KvGradient which, ProblemShape const& shape) {
  return which == KvGradient::dk ? shape.head_dim : shape.head_dim_v;
}

// dK is the derivative by K of S * softmax_scale; dV has the factor of weights that dropout keeps.
template <class Traits>
CUTE_DEVICE float factor_of(BackwardParams const& params, KvGradient which) {
  if (which == KvGradient::dk) return params.softmax_scale;
  return Traits::kMasking == Masking::table ? params.scores.dropout.inverse_keep : 1.f;
}
template <class Traits, class Accumulator>
CUTE_DEVICE void scale_gradient(BackwardParams const& params, KvGradient which, Accumulator& acc) {
  float const scale = factor_of<Traits>(params, which);
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) acc(i) *= scale;
}

// The sums in the workspace. Each holds dK or dV of one N block in the order of the accumulator: element i of
// all threads side by side.
template <class Traits>
struct GqaSums {
  static constexpr int kThreads = Traits::kKeyThreads;  // the threads that share an accumulator
  static constexpr int kFloats = Traits::kBlockN * larger(Traits::kHeadDim, Traits::kHeadDimV);

  CUTE_DEVICE static BatchBlocks blocks(BackwardParams const& params) {
    return {params.lengths.cu_seqlens_k, params.shape.seqlen_k, params.shape.batch, Traits::kTileN};
  }

  // The sum that a part adds an N block to. `part` counts the parts of all KV heads; parts_of_sum
  // neighbouring ones share a sum.
  CUTE_DEVICE static int sum_index(BackwardParams const& params, int part, int block_of_head) {
    return part / params.workspace.gqa.parts_of_sum * blocks(params).count() + block_of_head;
  }
  CUTE_DEVICE static int sum_index(BackwardParams const& params, KvTile const& tile) {
    int const b = tile.pair / params.shape.heads_kv;
    return sum_index(params, tile.head_kv, blocks(params).first(b) + tile.n_begin / Traits::kTileN);
  }

  // This thread's first float of a sum. rank: of the thread block in its cluster. thread: one of kThreads.
  CUTE_DEVICE static float* of(BackwardParams const& params, KvGradient which, int index, int rank,
                               int thread) {
    return params.workspace.gqa.sums + int64_t(which) * params.workspace.gqa.floats_of_dk +
           (int64_t(index) * Traits::kCluster + rank) * kFloats + thread;
  }

  template <class Accumulator>
  CUTE_DEVICE static void add(float* sums, Accumulator const& acc) {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) atomicAdd(sums + i * kThreads, acc(i));
  }
};

// Adds up the sums of all parts of a KV head and writes rows of dK or dV, with one thread block for each of
// them, N block and head. Without the second launch bound ptxas takes few registers and spills.
template <class Traits>
__global__ void __launch_bounds__(Traits::kKeyThreads, 1)
    backward_gqa_reduce(__grid_constant__ BackwardParams const params,
                        __grid_constant__ WindowMask const mask) {
  wait_for_grid_before();
  using Sums = GqaSums<Traits>;
  BatchBlocks const keys = Sums::blocks(params);
  int const rank = blockIdx.x % Traits::kCluster, rest = blockIdx.x / Traits::kCluster;
  auto const which = KvGradient(rest % 2);
  auto const [head, of_head] = keys.of_block(rest / 2);
  int const b = keys.sequence(of_head);
  Sequence const s = sequence_for<Traits::Instance::family>(params, mask, b);
  int const begin = (of_head - keys.first(b)) * Traits::kTileN + rank * Traits::kBlockN;
  if (!has_rows(begin, s.mask.seqlen_k)) return;

  auto reduce = [&](auto const& mma, auto tile_shape) {
    Tensor sum = partition_fragment_C(mma, tile_shape);  // (MMA, MMA_N, MMA_D)
    clear(sum);
#pragma unroll 1
    for (int part = 0; part < params.gqa_parts; part += params.workspace.gqa.parts_of_sum) {
      int const index = Sums::sum_index(params, head * params.gqa_parts + part, of_head);
      float const* const floats = Sums::of(params, which, index, rank, threadIdx.x);
      CUTE_UNROLL
      for (int i = 0; i < size(sum); ++i) sum(i) += floats[i * Sums::kThreads];
    }
    Tensor coords = mma.get_slice(read_thread_index()).partition_C(make_identity_tensor(tile_shape));
    scale_gradient<Traits>(params, which, sum);
    TensorView const& view = which == KvGradient::dk ? params.dk : params.dv;
    Tensor target =
        local_tensor<typename Traits::Element>(view, b, head, int64_t(s.k_begin) + begin, tile_shape);
    store_rows(target.data().get(), view.row_stride, s.mask.seqlen_k - begin, width_of(which, params.shape),
               sum, coords);
  };
  if (Traits::kHeadDim == Traits::kHeadDimV || which == KvGradient::dk) {
    reduce(typename Traits::MmaDk{}, typename Traits::TileK{});
  } else {
    reduce(typename Traits::MmaDv{}, typename Traits::TileV{});
  }
}

}  // namespace flash_cute
