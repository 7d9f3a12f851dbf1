// Launches the kernels of the Hopper family's backward, and encodes their tensor maps.
#pragma once

#include "flash_cute/attention/mask/prepare_ranges.cuh"
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
  auto encode = [&](TensorView const& view, int heads, int rows, int first_row, TmaBox const& box) {
    uint64_t const columns = shape.head_dim;
    if (varlen) {  // see VarlenCoord
      uint64_t const planes = uint64_t(shape.batch - 1) * entry_rows(view) + rows + 1;
      int64_t const back = VarlenCoord::kWrap / int64_t(sizeof(Element)) - view.row_stride;
      return make_tensor_map<Element, 5>(
          params.device.index, view.data,
          {columns, uint64_t(heads), VarlenCoord::kBound, planes, VarlenCoord::kBound + 1},
          {view.head_stride, view.row_stride, view.row_stride, back}, box);
    }
    return make_tensor_map<Element, 5>(
        params.device.index, static_cast<Element*>(view.data) + first_row * view.row_stride,
        {columns, uint64_t(heads), uint64_t(rows - first_row), uint64_t(shape.batch), 1},
        {view.head_stride, view.row_stride, view.batch_stride, 0}, box);
  };
  auto encode_queries = [&](TensorView const& view, TmaBox const& box) {
    return encode(view, shape.heads_q, shape.seqlen_q, mask.fully_masked_rows(), box);
  };
  auto queries = [&](TensorView const& view, int box_rows) {
    return encode_queries(view, {Traits::kPanel, 1, box_rows});
  };
  auto keys = [&](TensorView const& view, int box_rows) {
    return encode(view, params.heads_of_keys(), shape.seqlen_k, 0, {Traits::kPanel, 1, box_rows});
  };
  // Tensors that were not given are never accessed, but a map must have an address.
  TensorView const &dout = params.dout.data ? params.dout : params.q,
                   &dq = params.dq.data ? params.dq : params.q, &dk = params.dk.data ? params.dk : params.k,
                   &dv = params.dv.data ? params.dv : params.v, &terms = params.workspace.lse_delta.terms;
  BackwardMaps maps{
      .q = queries(params.q, Traits::kBlockM),
      .k = keys(params.k, Traits::kBlockN),
      .v = keys(params.v, Traits::kBlockN),
      .out = queries(params.out, Traits::kBlockM),
      .dout = queries(dout, Traits::kBlockM),
      .dq = queries(dq, Traits::kWarpRows),
      .dk = keys(dk, Traits::kWarpRows),
      .dv = keys(dv, Traits::kWarpRows),
      .entry_rows = {entry_rows(params.q), entry_rows(params.k), entry_rows(params.v), entry_rows(params.out),
                     entry_rows(dout), entry_rows(dq), entry_rows(dk), entry_rows(dv), entry_rows(terms)}};
  if constexpr (Traits::kLseDeltaMma) {
    int const side_by_side = 1 << params.workspace.lse_delta.log2_terms_of_row;
    maps.terms = encode_queries(terms, {side_by_side * kTermBytes / int(sizeof(Element)), 1,
                                        Traits::kBlockM / side_by_side, /*swizzled=*/false});
  }
  return maps;
}

struct SequenceSm90 {
  FLASH_CUTE_HOST_DEVICE Sequence operator()(BackwardParams const& params, WindowMask const& limits,
                                             int b) const {
    return sequence_for<Family::sm90>(params, limits, b);
  }
};

// Calls visitor(traits) for the main kernel that a plan names.
template <class Instance, int index = 0, class Visitor>
auto visit_backward_sm90(BackwardPlan const& plan, Visitor&& visitor) {
  constexpr BackwardTiles kTiles = backward_tiles(Instance::family, Instance::head_dim, Instance::variant);
  if constexpr (index + 1 < kTiles.count()) {
    if (plan.tile != kTiles.keys[index]) return visit_backward_sm90<Instance, index + 1>(plan, visitor);
  }
  if (plan.gqa.splits > 1) return visitor(BackwardTraitsSm90<Instance, kTiles.keys[index], true>{});
  return visitor(BackwardTraitsSm90<Instance, kTiles.keys[index]>{});
}

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
    launch_kernel<backward_zero_fill<Family::sm90, kRowThreads, WindowMask>, kStartsEarly>(
        device, 2 * device.multiprocessors, kRowThreads, 0, stream, params, mask);
  }
  visit_backward_sm90<Instance>(plan, [&]<class Traits>(Traits) {
    BackwardMaps const maps = maps_of<Traits>(params, mask);
    if constexpr (Traits::kRanges) {
      launch_prepare_transposed_ranges<kStartsEarly, SequenceSm90>(params, mask, range_table<Traits>(params),
                                                                   stream);
    }
    auto preprocess = [&]<bool kZeroFills>(std::bool_constant<kZeroFills>) {
      bool const all_rows_used = !lengths.seqused_q && !lengths.seqused_k && !lengths.leftpad_k;
      int const zero_fill_blocks = kZeroFills ? (all_rows_used ? 1 : 4) * device.multiprocessors : 0;
      launch_kernel<backward_preprocess_sm90<Traits, kZeroFills, WindowMask>, kStartsEarly>(
          device, zero_fill_blocks + plan.preprocess_blocks, Traits::kBlockM,
          sizeof(PreprocessStorage<Traits>), stream, params, mask, maps, zero_fill_blocks);
    };
    is_packed ? preprocess(std::true_type{}) : preprocess(std::false_type{});
    BackwardParams const ordered = params.with_ordered_offsets();
    KvTileScheduler<WindowMask> const order{plan.order,     plan.tiles,       Traits::kBlockM,
                                            Traits::kTileN, plan.query_start, mask};
    launch_kernel<backward_kernel_sm90<Traits, WindowMask>, kStartsEarly>(
        device, plan.blocks, Traits::kThreads, sizeof(typename Traits::SharedStorage), stream, ordered, order,
        maps);
    if (plan.dq.is_accumulated() && !plan.dq.is_converted) {
      launch_kernel<backward_postprocess_sm90<Traits, WindowMask>, kStartsEarly>(
          device, queries, Traits::kConsumers * kWarpgroupThreads, 0, stream, ordered, mask);
    }
    if constexpr (Traits::kSplitsGroups) {
      if (plan.gqa_reduce_blocks() > 0) {
        launch_kernel<backward_gqa_reduce<Traits, WindowMask>, kStartsEarly>(
            device, plan.gqa_reduce_blocks(), Traits::kKeyThreads, 0, stream, ordered, mask);
      }
    }
    launch_sum_sinks<typename Traits::Element, kStartsEarly>(params, plan.q_blocks, stream);
  });
}

template <class Instance>
KernelAttributes BackwardLaunch<Instance>::attributes(BackwardPlan const& plan) {
  return visit_backward_sm90<Instance>(plan, []<class Traits>(Traits) {
    return read_attributes(backward_kernel_sm90<Traits, WindowMask>, Traits::kThreads,
                           sizeof(typename Traits::SharedStorage));
  });
}

}  // namespace flash_cute
