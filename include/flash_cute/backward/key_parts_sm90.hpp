// dK and dV of keys whose query heads were shared out among several tiles: floats that each leaves as its
// registers lie, and the kernel that adds them up.
#pragma once

#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/traits_sm90.hpp"
#include "flash_cute/core/cluster.hpp"

namespace flash_cute {

enum class KeyGradient { dk, dv };

template <class Traits>
struct KeyParts {
  static constexpr int kThreads = Traits::kKeyGroups * 128;  // that have a block's keys
  static constexpr int kFours = Traits::kBlockN * Traits::kHeadDim / 4;

  // slot: of a thread block's keys.
  CUTE_DEVICE static float4* of(BackwardParams const& params, KeyGradient which, int64_t slot) {
    auto* const gradient = params.workspace.dkv + int64_t(which) * params.workspace.floats_of_dk;
    return reinterpret_cast<float4*>(gradient) + slot * kFours;
  }

  // Of this thread block's keys of a tile.
  CUTE_DEVICE static int64_t slot_of(BackwardParams const& params, KeyTile const& tile) {
    ProblemShape const& shape = params.shape;
    BlockPlaces const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, Traits::kTileN};
    int const place = keys.first(tile.pair / shape.heads_kv) + tile.n_begin / Traits::kTileN;
    int const rank = Traits::kInCluster ? read_cluster_rank() : 0;
    return (int64_t(tile.head_kv) * keys.count() + place) * Traits::kCluster + rank;
  }
};

// A thread block for dK or dV of a block of keys of a head.
template <class Traits>
__global__ void __launch_bounds__(KeyParts<Traits>::kThreads)
    backward_join_sm90(__grid_constant__ BackwardParams const params) {
  cudaGridDependencySynchronize();  // launched early
  using Parts = KeyParts<Traits>;
  ProblemShape const& shape = params.shape;
  BlockPlaces const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, Traits::kTileN};
  int const rank = blockIdx.x % Traits::kCluster, rest = blockIdx.x / Traits::kCluster;
  auto const which = KeyGradient(rest % 2);
  auto const [head, place] = keys.of_block(rest / 2);
  int const b = keys.sequence(place);
  Sequence const s = sequence_for<Family::sm90>(params, b);
  int const begin = (place - keys.first(b)) * Traits::kTileN + rank * Traits::kBlockN;
  if (!has_rows(begin, s.mask.seqlen_k)) return;

  typename Traits::MmaKeys const mma;
  Tensor sum = partition_fragment_C(mma, typename Traits::TileKV{});  // (MMA, MMA_N, MMA_D)
  Tensor coords = mma.get_slice(threadIdx.x).partition_C(make_identity_tensor(typename Traits::TileKV{}));
  clear(sum);
#pragma unroll 1
  for (int part = 0; part < params.group_parts; ++part) {
    int64_t const slot = (int64_t(head) * params.group_parts + part) * keys.count() + place;
    auto const* const fours = Parts::of(params, which, slot * Traits::kCluster + rank) + threadIdx.x;
    CUTE_UNROLL
    for (int i = 0; i < size(sum) / 4; ++i) {
      float4 const four = fours[i * Parts::kThreads];
      sum(4 * i) += four.x;
      sum(4 * i + 1) += four.y;
      sum(4 * i + 2) += four.z;
      sum(4 * i + 3) += four.w;
    }
  }
  bool const is_dk = which == KeyGradient::dk;
  CUTE_UNROLL
  for (int i = 0; i < size(sum); ++i) sum(i) *= is_dk ? params.softmax_scale : 1.f;
  TensorView const& view = is_dk ? params.dk : params.dv;
  Tensor target = local_tensor<typename Traits::Element>(
      view, params.lengths.cu_seqlens_k ? 0 : b, head, int64_t(s.k_begin) + begin, typename Traits::TileKV{});
  store_rows(target.data().get(), view.row_stride, s.mask.seqlen_k - begin, shape.head_dim, sum, coords);
}

}  // namespace flash_cute
