// Launches the kernels of the Hopper family's backward, and encodes their tensor maps.
#pragma once

#include "flash_cute/attention/keys/tensor_maps.hpp"
#include "flash_cute/attention/mask/prepare_table.cuh"
#include "flash_cute/backward/launch.hpp"
#include "flash_cute/backward/sm90/kernel.hpp"
#include "flash_cute/backward/sm90/postprocess.hpp"
#include "flash_cute/backward/sm90/preprocess.hpp"
#include "flash_cute/backward/zero_fill.cuh"

namespace flash_cute {

// The tensor maps of a launch.
template <class Traits>
BackwardMaps maps_of(BackwardParams const& params, WindowMask const& mask) {
  using Element = typename Traits::Element;
  ProblemShape const& shape = params.shape;
  bool const varlen = params.lengths.given;
  auto entry_rows = [&](TensorView const& view) {
    return varlen && view.batch_stride != 0 ? int(view.batch_stride / view.row_stride) : 0;
  };
  auto encode = [&](TensorView view, int columns, int heads, int rows, int first_row, TmaBox const& box) {
    int const device = params.device.index;
    MapShape of_map{columns, heads, rows, shape.batch};
    if (varlen) return ragged_map<Element>(device, view, of_map, entry_rows(view), box);
    view.data = static_cast<Element*>(view.data) + first_row * view.row_stride;
    of_map.rows -= first_row;
    return uniform_map<Element, 5>(device, view, of_map, box);
  };
  int const head_dim = shape.head_dim, head_dim_v = shape.head_dim_v;
  auto encode_queries = [&](TensorView const& view, int columns, TmaBox const& box) {
    return encode(view, columns, shape.heads_q, shape.seqlen_q, mask.fully_masked_rows(), box);
  };
  auto queries = [&](TensorView const& view, int columns, int box_rows) {
    return encode_queries(view, columns, {Traits::kPanel, 1, box_rows});
  };
  auto keys = [&](TensorView const& view, int columns, int box_rows) {
    return encode(view, columns, params.heads_of_keys(), shape.seqlen_k, 0, {Traits::kPanel, 1, box_rows});
  };
  // Tensors that were not given are never accessed, but a map must have an address.
  TensorView const &dout = params.dout.data ? params.dout : params.out,
                   &dq = params.dq.data ? params.dq : params.q, &dk = params.dk.data ? params.dk : params.k,
                   &dv = params.dv.data ? params.dv : params.v, &terms = params.workspace.lse_delta.terms;
  BackwardMaps maps{
      .q = queries(params.q, head_dim, Traits::kBlockM),
      .k = keys(params.k, head_dim, Traits::kBlockN),
      .v = keys(params.v, head_dim_v, Traits::kBlockN),
      .out = queries(params.out, head_dim_v, Traits::kBlockM),
      .dout = queries(dout, head_dim_v, Traits::kBlockM),
      .dq = queries(dq, head_dim, Traits::kWarpRows),
      .dk = keys(dk, head_dim, Traits::kWarpRows),
      .dv = keys(dv, head_dim_v, Traits::kWarpRows),
      .entry_rows = {entry_rows(params.q), entry_rows(params.k), entry_rows(params.v), entry_rows(params.out),
                     entry_rows(dout), entry_rows(dq), entry_rows(dk), entry_rows(dv), entry_rows(terms)}};
  if constexpr (Traits::kLseDeltaMma) {
    int const side_by_side = 1 << params.workspace.lse_delta.log2_terms_of_row;
    maps.terms = encode_queries(terms, head_dim,
                                {side_by_side * kTermBytes / int(sizeof(Element)), 1,
                                 Traits::kBlockM / side_by_side, /*swizzled=*/false});
  }
  if constexpr (Traits::kBiasStages > 0) {
    BiasParams const& bias = params.scores.bias;
    if (bias.is_tiled) {
      maps.bias = bias_map<Element>(params.device.index, bias, params.shape, {64, 1, Traits::kBlockM});
    }
  }
  return maps;
}

struct SequenceSm90 : WholeSequence {
  FLASH_CUTE_HOST_DEVICE Sequence operator()(BackwardParams const& params, WindowMask const& limits,
                                             int b) const {
    return sequence_for<Family::sm90>(params, limits, b);
  }
};

template <class Instance>
void BackwardLaunch<Instance>::run(BackwardParams const& params, WindowMask const& mask,
                                   BackwardPlan const& plan, cudaStream_t stream) {
  DeviceInfo const& device = params.device;
  int const queries = plan.q_blocks * params.shape.heads_q;
  constexpr int kRowThreads = 256;
  constexpr bool kStartsEarly = true;  // by programmatic dependent launch
  LengthParams const& lengths = params.lengths;
  bool const is_packed = lengths.cu_seqlens_q;
  // For packed sequences preprocess zeroes gradients. Padded batches may have much to zero, for which its
  // small thread blocks take longer than a kernel of its own (head dim 256, uniform lengths: 2 to 3% of all).
  if (has_unwritten(params, mask) && !is_packed) {
    launch_kernel<backward_zero_fill<Family::sm90, kRowThreads>, kStartsEarly>(
        device, 2 * device.multiprocessors, kRowThreads, 0, stream, params, mask);
  }
  visit_kernel<BackwardListOf<Instance>>(plan.kernel, [&]<BackwardKernel kernel>() {
    using Traits = BackwardTraitsSm90<Instance, kernel>;
    BackwardMaps const maps = maps_of<Traits>(params, mask);
    if constexpr (Traits::kMasking == Masking::table) {
      using Mask = BackwardMask<Masking::table>;
      launch_transposed_mask_table<kStartsEarly, SequenceSm90>(params, mask,
                                                               Mask::template table<Traits>(params), stream);
    }
    auto preprocess = [&]<bool kZeroFills>(std::bool_constant<kZeroFills>) {
      bool const all_rows_used = !lengths.seqused_q && !lengths.seqused_k && !lengths.leftpad_k;
      int const zero_fill_blocks = kZeroFills ? (all_rows_used ? 1 : 4) * device.multiprocessors : 0;
      launch_kernel<backward_preprocess_sm90<Traits, kZeroFills>, kStartsEarly>(
          device, zero_fill_blocks + plan.preprocess_blocks, Traits::kBlockM,
          sizeof(PreprocessStorage<Traits>), stream, params, mask, maps, zero_fill_blocks);
    };
    is_packed ? preprocess(std::true_type{}) : preprocess(std::false_type{});
    BackwardParams const ordered = params.with_ordered_offsets();
    KvTileScheduler const order{plan.order,     plan.tiles,       Traits::kBlockM,
                                Traits::kTileN, plan.query_start, mask};
    launch_kernel<backward_kernel_sm90<Traits>, kStartsEarly>(device, plan.blocks, Traits::kThreads,
                                                              sizeof(typename Traits::SharedStorage), stream,
                                                              ordered, order, maps);
    if (plan.dq.is_accumulated() && !plan.dq.is_converted) {
      launch_kernel<backward_postprocess_sm90<Traits>, kStartsEarly>(
          device, queries, Traits::kConsumers * kWarpgroupThreads, 0, stream, ordered, mask);
    }
    if constexpr (Traits::kPartsOfGroups) {
      if (plan.gqa_reduce_blocks() > 0) {
        launch_kernel<backward_gqa_reduce<Traits>, kStartsEarly>(
            device, plan.gqa_reduce_blocks(), Traits::kKeyThreads, 0, stream, ordered, mask);
      }
    }
    launch_sum_sinks<typename Traits::Element, kStartsEarly>(params, plan.q_blocks, stream);
  });
}

template <class Instance>
KernelAttributes BackwardLaunch<Instance>::attributes(BackwardPlan const& plan) {
  return visit_kernel<BackwardListOf<Instance>>(plan.kernel, [&]<BackwardKernel kernel>() {
    using Traits = BackwardTraitsSm90<Instance, kernel>;
    return read_attributes(backward_kernel_sm90<Traits>, Traits::kThreads,
                           sizeof(typename Traits::SharedStorage));
  });
}

}  // namespace flash_cute
