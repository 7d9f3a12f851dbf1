// Launches the Hopper family's forward.
#pragma once

#include "flash_cute/attention/keys/tensor_maps.hpp"
#include "flash_cute/forward/launch.cuh"
#include "flash_cute/forward/sm90/code_kernel.hpp"
#include "flash_cute/forward/sm90/kernel.hpp"

namespace flash_cute {

// The maps of q, k, v and out, by encode(view, shape, rows from entry to entry, box).
template <class Traits, bool kHasKeys, class Encode>
ForwardMaps encode_maps(ForwardParams const& params, PackGqa const& rows, VarlenCoords const& operands,
                        Encode&& encode) {
  auto const [batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v] = params.shape;
  TmaBox const box_q{Traits::kPanel, int(rows.heads.value), rows.queries};
  auto const& entry_rows = operands.entry_rows;
  ForwardMaps maps{};
  maps.q = encode(params.q, MapShape{head_dim, heads_q, seqlen_q, batch}, entry_rows.q, box_q);
  maps.out = encode(params.out, MapShape{head_dim_v, heads_q, seqlen_q, batch}, entry_rows.out, box_q);
  if constexpr (kHasKeys) {
    TmaBox const box_kv{Traits::kPanel, 1, Traits::kBlockN};
    maps.k = encode(params.k, MapShape{head_dim, heads_kv, seqlen_k, batch}, entry_rows.k, box_kv);
    maps.v = encode(params.v, MapShape{head_dim_v, heads_kv, seqlen_k, batch}, entry_rows.v, box_kv);
  }
  return maps;
}

// The maps of K and V where rows are loaded, unless pages are smaller than a box or TMA does not take
// strides.
template <class Traits>
void add_box_maps(ForwardParams const& params, ForwardMaps& maps) {
  using Element = typename Traits::Element;
  constexpr int64_t kStrideEnd = (int64_t(1) << 40) / int64_t(sizeof(Element));
  CacheParams const& cache = params.cache;
  ProblemShape const& shape = params.shape;
  int const rows = cache.table ? cache.page_size : shape.seqlen_k;
  int const entries = cache.table ? cache.pages : params.lengths.cu_seqlens_k ? 1 : shape.batch;
  auto is_map_of = [&](TensorView const& view) {
    auto fits = [](int count, int64_t stride) { return count == 1 || (stride > 0 && stride < kStrideEnd); };
    return fits(shape.heads_kv, view.head_stride) && fits(rows, view.row_stride) &&
           fits(entries, view.batch_stride);
  };
  bool const splits_pages = cache.table && cache.page_size % Traits::kBoxRows != 0;
  maps.has_boxes = !cache.is_fp8 && !splits_pages && is_map_of(params.k) && is_map_of(params.v);
  if (!maps.has_boxes) return;
  auto encode = [&](TensorView const& view, int columns) {
    return uniform_map<Element, 4>(params.device.index, view, {columns, shape.heads_kv, rows, entries},
                                   {Traits::kPanel, 1, Traits::kBoxRows});
  };
  maps.k = encode(params.k, shape.head_dim);
  maps.v = encode(params.v, shape.head_dim_v);
}

template <class Traits>
ForwardMaps maps_of(ForwardParams const& params, typename Traits::Source const& source) {
  using Element = typename Traits::Element;
  int const device = params.device.index;
  if constexpr (std::is_same_v<typename Traits::Source, UniformSource>) {
    return encode_maps<Traits, true>(params, source.rows(), {},
                                     [&](TensorView const& view, MapShape const& shape, int, TmaBox box) {
                                       return uniform_map<Element, 4>(device, view, shape, box);
                                     });
  } else {
    constexpr bool kHasKeys = !Traits::kLoadsRows;  // rows are loaded without a map
    ForwardMaps maps = encode_maps<Traits, kHasKeys>(
        params, source.rows(), source.operands,
        [&](TensorView const& view, MapShape const& shape, int entry_rows, TmaBox box) {
          return ragged_map<Element>(device, view, shape, entry_rows, box);
        });
    if constexpr (Traits::kMayLoadBoxes) add_box_maps<Traits>(params, maps);
    if constexpr (Traits::PairTiles::kBiasStages > 0) {
      BiasParams const& bias = params.scores.bias;
      if (bias.is_tiled) {
        maps.bias = bias_map<Element>(device, bias, params.shape, {64, 1, kWarpgroupRows});
      }
    }
    return maps;
  }
}

// Is it the tile of a kernel of codes, which have fewer rows than a WGMMA?
constexpr bool is_of_codes(ForwardTile const& tile) { return tile.block_m < kWarpgroupRows; }

template <>
struct FamilyForward<Family::sm90> {
  static constexpr bool kStartsEarly = true;
  template <class Instance, ForwardKernel kernel>
  using Traits = std::conditional_t<is_of_codes(kernel.tile), CodeTraitsSm90<Instance, kernel>,
                                    ForwardTraitsSm90<Instance, kernel>>;

  template <class Traits>
  static auto* kernel() {
    if constexpr (is_of_codes(Traits::kTile)) {
      return code_kernel_sm90<Traits>;
    } else {
      return forward_kernel_sm90<Traits>;
    }
  }
  // Of codes that are widened beside the stages. Without codes a thread block leaves room for those of
  // combine_kernel, which then start beside it.
  template <class Traits>
  static constexpr int bytes_of_codes() {
    if constexpr (is_of_codes(Traits::kTile)) {
      return 0;
    } else {
      return Traits::kCodeSlots * Traits::kCodeBytes;
    }
  }
  template <class Traits>
  static constexpr int smem_bytes(ForwardPlan const& plan) {
    return sizeof(typename Traits::SharedStorage) + plan.reads_codes * bytes_of_codes<Traits>();
  }
  template <class Traits>
  static void launch(ForwardParams const& params, typename Traits::Source const& source,
                     ForwardPlan const& plan, void* workspace, cudaStream_t stream) {
    auto launch = [&]<auto kernel>(auto const&... args) {
      launch_kernel<kernel, kStartsEarly, sizeof(typename Traits::SharedStorage) + bytes_of_codes<Traits>()>(
          params.device, plan.blocks, Traits::kThreads, smem_bytes<Traits>(plan), stream, params, source,
          args...);
    };
    typename Traits::Scheduler scheduler;
    if constexpr (Traits::Scheduler::kDynamic) scheduler = {plan.tile_counter(workspace)};
    if constexpr (is_of_codes(Traits::kTile)) {
      launch.template operator()<code_kernel_sm90<Traits>>(scheduler);
    } else {
      launch.template operator()<forward_kernel_sm90<Traits>>(scheduler, maps_of<Traits>(params, source));
    }
  }
};

}  // namespace flash_cute
