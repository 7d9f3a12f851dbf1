#include "flash_cute/backward/preprocess.cuh"
using namespace flash_cute;
// variant: loads of kAhead rows first
template <class Instance, int kBlockM, int kThreads, int kAhead>
__global__ void __launch_bounds__(kThreads) pre2(__grid_constant__ BackwardParams const params) {
  using Element = typename ElementOf<Instance::element>::type;
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kLanes = Instance::head_dim > 128 ? 32 : Instance::head_dim > 64 ? 16 : 8;
  ProblemShape const& shape = params.shape;
  if (params.workspace.claimed && blockIdx.x == 0 && threadIdx.x == 0) *params.workspace.claimed = 0;
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  auto const [head, of_head] = queries.of_block(blockIdx.x);
  int const b = queries.sequence(of_head);
  Sequence const s = sequence_for<Instance::family>(params, b);
  int const m_begin = (of_head - queries.first(b)) * kBlockM;
  int64_t const place = blockIdx.x;
  if (params.workspace.additions && threadIdx.x < kSumParts) params.workspace.additions[place * kSumParts + threadIdx.x] = 0;
  if (!has_rows(m_begin, s.used)) return;
  int const entry = params.lengths.cu_seqlens_q ? 0 : b, first_row = s.mask.first_seeing_row();
  int const lane = threadIdx.x % kLanes;
  auto start = [&](TensorView const& view) {
    return static_cast<Element const*>(view.data) + entry * view.batch_stride + head * view.head_stride + int64_t(s.queries.begin + m_begin + int(threadIdx.x / kLanes)) * view.row_stride + lane * kChunk;
  };
  constexpr int kStep = kThreads / kLanes, kRows = kBlockM / kStep, kA = kAhead < kRows ? kAhead : kRows;
  Element const *po = start(params.out), *pd = params.dout.data ? start(params.dout) : nullptr;
  bool const reads = pd && lane * kChunk < shape.head_dim;
#pragma unroll 1
  for (int r0 = 0; r0 < kRows; r0 += kA) {
    uint4 o[kA], d[kA];
#pragma unroll
    for (int r = 0; r < kA; ++r) {
      int const row = m_begin + int(threadIdx.x / kLanes) + (r0 + r) * kStep;
      o[r] = d[r] = uint4{};
      if (reads && first_row <= row && row < s.used) {
        d[r] = *reinterpret_cast<uint4 const*>(pd + int64_t(r0 + r) * kStep * params.dout.row_stride);
        o[r] = *reinterpret_cast<uint4 const*>(po + int64_t(r0 + r) * kStep * params.out.row_stride);
      }
    }
#pragma unroll
    for (int r = 0; r < kA; ++r) {
      int const i = int(threadIdx.x / kLanes) + (r0 + r) * kStep, row = m_begin + i;
      bool const sees = first_row <= row && row < s.used;
      float sum = dot_of_chunk<Element>(d[r], o[r]);
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (lane != 0) continue;
      int64_t const at = entry * params.lse_batch_stride + int64_t(head) * shape.seqlen_q + s.queries.begin + row;
      float const lse = sees ? params.lse[at] : INFINITY;
      params.workspace.lse[place * kBlockM + i] = lse == -INFINITY ? NAN : lse * float(M_LOG2E);
      params.workspace.delta[place * kBlockM + i] = sees ? (params.dlse ? params.dlse[at] : 0.f) - sum : 0.f;
    }
  }
}
template <int D, int M> int go(int variant, BackwardParams const& p, cudaStream_t st) {
  using I = Instance<Family::sm90, ElementType::bf16, D>;
  int blocks = p.shape.batch * ((p.shape.seqlen_q + M - 1) / M) * p.shape.heads_q;
  switch (variant) {
    case 0: backward_preprocess<I, M, 256><<<blocks, 256, 0, st>>>(p); break;
    case 1: backward_preprocess<I, M, 128><<<blocks, 128, 0, st>>>(p); break;
    case 2: pre2<I, M, 256, 4><<<blocks, 256, 0, st>>>(p); break;
    case 3: pre2<I, M, 128, 4><<<blocks, 128, 0, st>>>(p); break;
    case 4: pre2<I, M, 128, 8><<<blocks, 128, 0, st>>>(p); break;
    case 5: pre2<I, M, 64, 4><<<blocks, 64, 0, st>>>(p); break;
    case 6: pre2<I, M, 64, 8><<<blocks, 64, 0, st>>>(p); break;
    case 7: pre2<I, M, 256, 2><<<blocks, 256, 0, st>>>(p); break;
  }
  return cudaGetLastError();
}
extern "C" int pre(int variant, int d, int b, int h, int s, void* out, void* dout, float* lse, float* ws, int* ints, void* stream) {
  BackwardParams p{};
  p.shape = {b, h, h, s, s, d};
  auto view = [&](void* x) { return TensorView{x, int64_t(s) * h * d, d, int64_t(h) * d}; };
  p.out = view(out); p.dout = view(dout); p.lse = lse; p.lse_batch_stride = int64_t(h) * s; p.softmax_scale = 0.1f;
  p.mask = WindowMask::make(s, s, 2000000000, 2000000000);
  int64_t rows = int64_t(b) * h * s;
  p.workspace.lse = ws; p.workspace.delta = ws + rows; p.workspace.dq = ws; p.workspace.additions = ints + 2; p.workspace.claimed = ints;
  auto st = static_cast<cudaStream_t>(stream);
  return d == 64 ? go<64, 128>(variant, p, st) : d == 128 ? go<128, 64>(variant, p, st) : go<256, 64>(variant, p, st);
}
