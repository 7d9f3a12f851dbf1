// Launches softmax over rows.
#pragma once

#include "flash_cute/core/check.hpp"
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

// Calls visitor(traits) with the traits of the tile that a plan names.
template <ElementType element, bool kBackward, int kTile = 0, class Visitor>
void visit_row_tile(RowSoftmaxPlan const& plan, Visitor&& visitor) {
  constexpr RowTiles kRows = row_tiles(sizeof(typename Chunk<element>::Storage), kBackward);
  if (plan.tile == kTile) {
    if (plan.plain) return visitor(RowTraits<element, kBackward, kRows.tiles[kTile], true>{});
    if constexpr (!kRows.tiles[kTile].plain_only) {
      return visitor(RowTraits<element, kBackward, kRows.tiles[kTile], false>{});
    }
  }
  if constexpr (kTile + 1 < kRows.count) visit_row_tile<element, kBackward, kTile + 1>(plan, visitor);
}

template <ElementType element, bool kBackward>
void launch_row_softmax(RowSoftmaxParams params, RowSoftmaxPlan const& plan, cudaStream_t stream) {
  using Chunk = flash_cute::Chunk<element>;
  auto whole_chunks_before = [&](TensorView const& view) -> typename Chunk::Storage const* {
    if (!view.data) return nullptr;
    ScoreShape const& shape = params.shape;
    int64_t const last = (shape.batch - 1) * view.batch_stride + (shape.heads - 1) * view.head_stride +
                         (shape.rows - 1) * view.row_stride;
    return static_cast<typename Chunk::Storage const*>(view.data) + last - Chunk::kWidth;
  };
  params.whole_chunks_before = {whole_chunks_before(params.input), whole_chunks_before(params.gradient)};
  visit_row_tile<element, kBackward>(plan, [&]<class Traits>(Traits) {
    constexpr auto kernel = row_kernel<Traits, kBackward>();
    bool const cooperative = plan.parts > 1;
    if (cooperative) {
      check(cudaMemsetAsync(params.workspace, 0xff, plan.workspace_bytes, stream), "clearing the workspace");
    }
    // Programmatic dependent launch wins 1% for rows of any length (H200, calls back to back). Letting the
    // next kernel start before this one has finished, by cudaTriggerProgrammaticLaunchCompletion, wins no
    // more and loses 19% where rows are 2 kB of fp32.
    cudaLaunchAttribute attribute{};
    if (cooperative) {
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    } else {
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(plan.teams, plan.parts);
    config.blockDim = dim3(plan.threads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cooperative || waits_for_grid_before<kernel>(params.device);
    check(cudaLaunchKernelEx(&config, kernel, params), "launching softmax");
  });
}

template <ElementType element>
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
  return plan_row_softmax(params.shape, kBytes, aligned(params.input), plain, backward,
                          params.device.multiprocessors);
}

template <ElementType element>
void RowSoftmaxLaunch<element>::forward(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan,
                                        cudaStream_t stream) {
  launch_row_softmax<element, false>(params, plan, stream);
}

template <ElementType element>
void RowSoftmaxLaunch<element>::backward(RowSoftmaxParams const& params, RowSoftmaxPlan const& plan,
                                         cudaStream_t stream) {
  launch_row_softmax<element, true>(params, plan, stream);
}

}  // namespace flash_cute
