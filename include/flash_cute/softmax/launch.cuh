// Launches softmax over rows.
#pragma once

#include <type_traits>

#include "flash_cute/core/launch_kernel.hpp"
#include "flash_cute/softmax/kernel.hpp"
#include "flash_cute/softmax/launch.hpp"

namespace flash_cute {

template <class Traits, bool kBackward>
constexpr auto row_kernel() {
  if constexpr (kBackward) {
    return row_softmax_backward<Traits>;
  } else {
    return row_softmax<Traits>;
  }
}

// Calls visitor(traits) for the tile that a plan names.
template <RowElement element, bool kBackward, int kTile = 0, class Visitor>
void visit_row_tile(RowSoftmaxPlan const& plan, Visitor&& visitor) {
  constexpr RowTiles kRows = row_tiles(sizeof(typename Chunk<element>::Storage), kBackward);
  if (plan.tile == kTile) {
    return plan.plain ? visitor(RowTraits<element, kBackward, kRows.tiles[kTile], true>{})
                      : visitor(RowTraits<element, kBackward, kRows.tiles[kTile], false>{});
  }
  if constexpr (kTile + 1 < kRows.count) visit_row_tile<element, kBackward, kTile + 1>(plan, visitor);
}

// Thread blocks of the shared tile that the GPU runs at once.
template <RowElement element, bool kBackward, bool kPlain>
int resident_blocks(DeviceInfo const& device) {
  constexpr RowTiles kRows = row_tiles(sizeof(typename Chunk<element>::Storage), kBackward);
  using Traits = RowTraits<element, kBackward, kRows.tiles[kRows.shared()], kPlain>;
  static std::atomic<int> per_multiprocessor[DeviceInfo::kMaxDevices];  // 0: not asked yet
  int blocks = per_multiprocessor[device.index].load(std::memory_order_relaxed);
  if (blocks == 0) {
    constexpr auto kKernel = row_kernel<Traits, kBackward>();
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, Traits::kThreads, 0),
          "asking how many thread blocks fit");
    per_multiprocessor[device.index].store(blocks, std::memory_order_relaxed);
  }
  return blocks * device.multiprocessors;
}

template <RowElement element, bool kBackward>
void launch_row_softmax(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan, cudaStream_t stream) {
  visit_row_tile<element, kBackward>(plan, [&]<class Traits>(Traits) {
    int blocks = int(ceil_div(int64_t(params.shape.all_rows()), int64_t(Traits::kRows)));
    bool const cooperative = plan.parts > 1;
    if (cooperative) {
      check(cudaMemsetAsync(params.workspace, 0xff, plan.workspace_bytes, stream), "clearing the workspace");
      int const teams = resident_blocks<element, kBackward, Traits::kPlain>(params.device) / plan.parts;
      blocks = smaller(blocks, teams) * plan.parts;
    }
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(Traits::kThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cooperative;
    check(cudaLaunchKernelEx(&config, row_kernel<Traits, kBackward>(), params, plan.parts),
          "launching softmax");
  });
}

template <RowElement element>
RowSoftmaxPlan RowSoftmaxLaunch<element>::plan(RowSoftmaxParams const& params, bool backward) {
  constexpr int kBytes = sizeof(typename Chunk<element>::Storage);
  auto aligned = [](TensorView const& view) {
    return reinterpret_cast<uintptr_t>(view.data) % kChunkBytes == 0 &&
           (view.batch_stride | view.head_stride | view.row_stride) * kBytes % kChunkBytes == 0;
  };
  ColumnMask const& mask = params.mask;
  bool const plain = !mask.causal && !mask.seqused_k && !mask.leftpad_k &&
                     params.shape.columns * kBytes % kChunkBytes == 0 && aligned(params.input) &&
                     aligned(params.gradient) && aligned(params.output);
  auto resident = [&](auto found) {
    constexpr bool kPlain = decltype(found)::value;
    return backward ? resident_blocks<element, true, kPlain>(params.device)
                    : resident_blocks<element, false, kPlain>(params.device);
  };
  return plan_row_softmax(params.shape, kBytes, aligned(params.input), plain, backward,
                          plain ? resident(std::true_type{}) : resident(std::false_type{}));
}

template <RowElement element>
void RowSoftmaxLaunch<element>::forward(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan,
                                        cudaStream_t stream) {
  launch_row_softmax<element, false>(params, plan, stream);
}

template <RowElement element>
void RowSoftmaxLaunch<element>::backward(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan,
                                         cudaStream_t stream) {
  launch_row_softmax<element, true>(params, plan, stream);
}

}  // namespace flash_cute
