// The kernel before the Ampere family's backward: what is known of each query alone, and sums that start at
// 0.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/backward/dot.hpp"
#include "flash_cute/backward/zero_fill.cuh"
#include "flash_cute/core/element.hpp"

namespace flash_cute {

// One block of threads for each block of queries of a head. A row is read by as many neighbouring lanes as it
// has chunks of 16 bytes.
template <class Instance, int kBlockM, int kThreads>
__global__ void __launch_bounds__(kThreads)
    backward_preprocess_sm80(__grid_constant__ BackwardParams const params) {
  using Element = typename ElementOf<Instance::element>::type;
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kLanes = Instance::head_dim > 128 ? 32 : Instance::head_dim > 64 ? 16 : 8;
  static_assert(kLanes * kChunk >= Instance::head_dim && kBlockM % (kThreads / kLanes) == 0);
  ProblemShape const& shape = params.shape;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  if (int(blockIdx.x) >= shape.heads_q * queries.count()) return zero_fill_workspace(params.workspace);
  auto const [head, of_head] = queries.of_block(blockIdx.x);
  int const b = queries.sequence(of_head);
  Sequence const s = sequence_for<Family::sm80>(params, b);
  int const m_begin = (of_head - queries.first(b)) * kBlockM;
  int64_t const place = blockIdx.x;
  zero_fill_workspace(params.workspace);
  varlen_prepare<Family::sm80, kThreads>(params);
  if (!has_rows(m_begin, s.used)) return;

  int const first_row = s.mask.fully_masked_rows(), lane = threadIdx.x % kLanes;
  auto chunk = [&](TensorView const& view, int row) {
    auto const* const data = static_cast<Element const*>(view.data) + b * view.batch_stride +
                             head * view.head_stride + int64_t(s.queries.begin + row) * view.row_stride;
    return *reinterpret_cast<uint4 const*>(data + lane * kChunk);
  };
#pragma unroll
  for (int i = threadIdx.x / kLanes; i < kBlockM; i += kThreads / kLanes) {
    int const row = m_begin + i;
    bool const sees = first_row <= row && row < s.used;
    float sum = 0;
    if (sees && params.dout.data && lane * kChunk < shape.head_dim) {
      sum = dot_of_chunk<Element>(chunk(params.dout, row), chunk(params.out, row));
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (lane != 0) continue;
    int64_t const at = b * params.lse_batch_stride + int64_t(head) * shape.seqlen_q + s.queries.begin + row;
    float const lse = sees ? params.lse[at] : INFINITY;
    // Scores of -inf alone, which the row sees, are NaN once they are divided by their sum.
    params.workspace.lse[place * kBlockM + i] = lse == -INFINITY ? NAN : lse * float(M_LOG2E);
    params.workspace.delta[place * kBlockM + i] = sees ? (params.dlse ? params.dlse[at] : 0.f) - sum : 0.f;
  }
  if (params.workspace.dq) {
    constexpr int kFloats = kBlockM * Instance::head_dim;
    auto* const sums = reinterpret_cast<uint4*>(params.workspace.dq + place * kFloats);
#pragma unroll
    for (int i = threadIdx.x; i < kFloats / 4; i += kThreads) sums[i] = {};
  }
}

}  // namespace flash_cute
