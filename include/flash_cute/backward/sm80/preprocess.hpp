// The preprocess kernel of the Ampere family's backward: the LSE in base 2 and delta = dLSE - rowsum(dO O) of
// each query, and zeros in the dQ accumulator.
#pragma once

#include <cuda_runtime.h>

#include "flash_cute/backward/dot.hpp"
#include "flash_cute/backward/mask.hpp"
#include "flash_cute/backward/sink_gradients.hpp"
#include "flash_cute/backward/zero_fill.cuh"
#include "flash_cute/core/element.hpp"

namespace flash_cute {

// One thread block for each M block of a head. A row is read by as many neighbouring lanes as it has chunks
// of 16 bytes, but by 32 at most. Without the second launch bound ptxas takes 40 registers and spills.
template <class Instance, int kBlockM, int kThreads>
__global__ void __launch_bounds__(kThreads, 5)
    backward_preprocess_sm80(__grid_constant__ BackwardParams const params,
                             __grid_constant__ WindowMask const mask) {
  using Element = typename ElementOf<Instance::element>::type;
  using Mask = BackwardMask<masking_of(Instance::variant)>;
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kRowBytes = Instance::head_dim * sizeof(Element);
  constexpr int kLanes = kRowBytes > 256 ? 32 : kRowBytes > 128 ? 16 : 8, kAtOnce = kLanes * kChunk;
  static_assert(kBlockM % (kThreads / kLanes) == 0);
  ProblemShape const& shape = params.shape;
  BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  if (int(blockIdx.x) >= shape.heads_q * queries.count()) return zero_fill_workspace(params.workspace);
  auto const [head, of_head] = queries.of_block(blockIdx.x);
  int const b = queries.sequence(of_head);
  Sequence const s = sequence_for<Family::sm80>(params, mask, b);
  int const m_begin = (of_head - queries.first(b)) * kBlockM;
  int64_t const block_index = blockIdx.x;
  zero_fill_workspace(params.workspace);
  varlen_prepare<Family::sm80, kThreads>(params, mask);
  __shared__ float sums[kThreads / 32];
  SinkShare<Element> of_sink{params.sinks, head};
  if (!has_rows(m_begin, s.used)) return of_sink.template store<kThreads>(block_index, sums);

  int const first_row = s.mask.fully_masked_rows(), lane = threadIdx.x % kLanes;
  auto chunk = [&](TensorView const& view, int row, int column) {
    auto const* const data = static_cast<Element const*>(view.data) + b * view.batch_stride +
                             head * view.head_stride + int64_t(s.queries.begin + row) * view.row_stride;
    return *reinterpret_cast<uint4 const*>(data + column);
  };
#pragma unroll
  for (int i = threadIdx.x / kLanes; i < kBlockM; i += kThreads / kLanes) {
    int const row = m_begin + i;
    bool const is_valid = first_row <= row && row < s.used;
    float dot = 0;  // of this lane's chunks, then of the row
#pragma unroll
    for (int first = 0; first < Instance::head_dim; first += kAtOnce) {
      int const column = first + lane * kChunk;
      if (is_valid && params.dout.data && column < shape.head_dim_v) {
        dot += dot_of_chunk<Element>(chunk(params.dout, row, column), chunk(params.out, row, column));
      }
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      dot += __shfl_xor_sync(0xffffffffu, dot, distance);
    }
    if (lane != 0) continue;
    int64_t const offset =
        b * params.lse_batch_stride + int64_t(head) * shape.seqlen_q + s.queries.begin + row;
    bool const sees_keys = is_valid && Mask::sees_any_key(params, b, head, s.queries.begin + row);
    float const lse = sees_keys ? params.lse[offset] : INFINITY;
    // A row that sees only scores of -inf has P = NaN, as their sum is 0.
    params.workspace.lse_delta.lse[block_index * kBlockM + i] =
        lse == -INFINITY ? NAN : Mask::lse_in_base_2(params, lse);
    params.workspace.lse_delta.neg_delta[block_index * kBlockM + i] =
        is_valid ? (params.dlse ? params.dlse[offset] : 0.f) - dot : 0.f;
  }
  if (params.sinks.shares) {  // from what the block has written: in the loop above it would spill
    __syncthreads();
    for (int i = threadIdx.x; i < smaller(kBlockM, s.used - m_begin); i += kThreads) {
      int const row = m_begin + i;
      int64_t const offset =
          b * params.lse_batch_stride + int64_t(head) * shape.seqlen_q + s.queries.begin + row;
      float const dlse = params.dlse ? params.dlse[offset] : 0.f;
      auto const& [lse, deltas, terms, terms_of_row] = params.workspace.lse_delta;
      int64_t const at = block_index * kBlockM + i;
      of_sink.add(params.lse[offset], lse[at] == INFINITY ? dlse : deltas[at]);
    }
    of_sink.template store<kThreads>(block_index, sums);
  }
  if (params.workspace.dq.accum) {
    constexpr int kFloats = kBlockM * Instance::head_dim;
    auto* const dq_accum = reinterpret_cast<uint4*>(params.workspace.dq.accum + block_index * kFloats);
#pragma unroll
    for (int i = threadIdx.x; i < kFloats / 4; i += kThreads) dq_accum[i] = {};
  }
}

}  // namespace flash_cute
