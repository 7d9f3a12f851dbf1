// dK and dV of keys whose query heads were shared out among several tiles: sums that these add to, as
// registers lie, and the kernel that makes rows of them.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/core/dependent_launch.hpp"
#include "flash_cute/core/element.hpp"
#include "flash_cute/core/special_registers.hpp"

namespace flash_cute {

enum class KvGradient { dk, dv };

template <class Accumulator>
CUTE_DEVICE void scale_gradient(BackwardParams const& params, KvGradient which, Accumulator& acc) {
  float const scale = which == KvGradient::dk ? params.softmax_scale : 1.f;
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) acc(i) *= scale;
}

template <class Traits>
struct GqaSums {
  static constexpr int kThreads = Traits::kKeyThreads;  // that have a block's keys
  static constexpr int kFloats = Traits::kBlockN * Traits::kHeadDim;

  CUTE_DEVICE static BatchBlocks places(BackwardParams const& params) {
    return {params.lengths.cu_seqlens_k, params.shape.seqlen_k, params.shape.batch, Traits::kTileN};
  }

  // The sum that a part of a group adds to, of a block of its keys.
  CUTE_DEVICE static int sum_index(BackwardParams const& params, int part, int place) {
    return part / params.workspace.gqa.splits_of_sum * places(params).count() + place;
  }
  CUTE_DEVICE static int sum_index(BackwardParams const& params, KvTile const& tile) {
    int const b = tile.pair / params.shape.heads_kv;
    return sum_index(params, tile.head_kv, places(params).first(b) + tile.n_begin / Traits::kTileN);
  }

  // rank: of a thread block among those that share a tile's keys. thread: one of kThreads.
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

// A thread block for dK or dV of a block of keys of a head.
template <class Traits, class Mask>
__global__ void __launch_bounds__(Traits::kKeyThreads, 1)  // else ptxas takes few registers, and spills
    backward_gqa_reduce(__grid_constant__ BackwardParams const params, __grid_constant__ Mask const mask) {
  wait_for_grid_before();
  using Parts = GqaSums<Traits>;
  BatchBlocks const keys = Parts::places(params);
  int const rank = blockIdx.x % Traits::kCluster, rest = blockIdx.x / Traits::kCluster;
  auto const which = KvGradient(rest % 2);
  auto const [head, place] = keys.of_block(rest / 2);
  int const b = keys.sequence(place);
  Sequence const s = sequence_for<Traits::Instance::family>(params, mask, b);
  int const begin = (place - keys.first(b)) * Traits::kTileN + rank * Traits::kBlockN;
  if (!has_rows(begin, s.mask.seqlen_k)) return;

  using TileKV = typename Traits::TileKV;
  typename Traits::MmaKeys const mma;
  Tensor sum = partition_fragment_C(mma, TileKV{});  // (MMA, MMA_N, MMA_D)
  clear(sum);
#pragma unroll 1
  for (int part = 0; part < params.gqa_splits; part += params.workspace.gqa.splits_of_sum) {
    int const index = Parts::sum_index(params, head * params.gqa_splits + part, place);
    float const* const floats = Parts::of(params, which, index, rank, threadIdx.x);
    CUTE_UNROLL
    for (int i = 0; i < size(sum); ++i) sum(i) += floats[i * Parts::kThreads];
  }
  Tensor coords = mma.get_slice(read_thread_index()).partition_C(make_identity_tensor(TileKV{}));
  scale_gradient(params, which, sum);
  TensorView const& view = which == KvGradient::dk ? params.dk : params.dv;
  Tensor target = local_tensor<typename Traits::Element>(view, b, head, int64_t(s.k_begin) + begin, TileKV{});
  store_rows(target.data().get(), view.row_stride, s.mask.seqlen_k - begin, params.shape.head_dim, sum,
             coords);
}

}  // namespace flash_cute
