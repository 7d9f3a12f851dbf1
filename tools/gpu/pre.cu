#include "flash_cute/backward/preprocess.cuh"
#include "flash_cute/core/tma.hpp"
#include "flash_cute/core/pipeline.hpp"
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

template <class Instance, int kBlockM, int kThreads, bool kPlaces, int kPersist>
__global__ void __launch_bounds__(kThreads) pre3(__grid_constant__ BackwardParams const params, __grid_constant__ CUtensorMap const mo, __grid_constant__ CUtensorMap const md, int blocks) {
  using Element = typename ElementOf<Instance::element>::type;
  constexpr int D = Instance::head_dim, kLanes = kThreads / kBlockM, kStages = kPersist ? 2 : 1;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto* slots = reinterpret_cast<Element*>(memory);
  __shared__ uint64_t barriers[kStages];
  auto* const arrived = reinterpret_cast<cutlass::arch::ClusterTransactionBarrier*>(barriers);
  ProblemShape const& shape = params.shape;
  if (params.workspace.claimed && blockIdx.x == 0 && threadIdx.x == 0) *params.workspace.claimed = 0;
  BlockPlaces const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  if (threadIdx.x == 0) { for (int i = 0; i < kStages; ++i) arrived[i].init(1); cutlass::arch::fence_barrier_init(); }
  __syncthreads();
  auto load = [&](int index, int stage) {
    auto const [head, of_head] = queries.of_block(index, shape.heads_q, kPlaces);
    int const b = queries.sequence(of_head), m_begin = (of_head - queries.first(b)) * kBlockM;
    auto* o = slots + stage * 2 * kBlockM * D;
    load_panels<D, 64, kBlockM>(mo, arrived[stage], o, kBlockM, 0, head, m_begin, b);
    arrived[stage].expect_transaction(kBlockM * D * 2);
    for (int c = 0; c < D; c += 64) cute::SM90_TMA_LOAD::copy(&md, reinterpret_cast<uint64_t*>(&arrived[stage]), static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), o + kBlockM * D + c * kBlockM, c, head, m_begin, b);
  };
  int n = 0;
  if (threadIdx.x == 0) load(blockIdx.x, 0);
  for (int index = blockIdx.x; index < blocks; index += gridDim.x, ++n) {
    int const stage = kPersist ? n % 2 : 0;
    if (kPersist && threadIdx.x == 0 && index + int(gridDim.x) < blocks) load(index + gridDim.x, stage ^ 1);
    auto const [head, of_head] = queries.of_block(index, shape.heads_q, kPlaces);
    int const b = queries.sequence(of_head);
    Sequence const s = sequence_for<Instance::family>(params, b);
    int const m_begin = (of_head - queries.first(b)) * kBlockM;
    int64_t const place = int64_t(head) * queries.count() + of_head;
    if (params.workspace.additions && threadIdx.x < kSumParts) params.workspace.additions[place * kSumParts + threadIdx.x] = 0;
    int const i = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, row = m_begin + i, first_row = s.mask.first_seeing_row();
    bool const sees = first_row <= row && row < s.used;
    int64_t const at = int64_t(b) * params.lse_batch_stride + int64_t(head) * shape.seqlen_q + s.queries.begin + row;
    float const lse = sees && lane == 0 ? params.lse[at] : INFINITY;
    arrived[stage].wait(kPersist ? n / 2 % 2 : 0);
    auto const* o = reinterpret_cast<uint4 const*>(slots + stage * 2 * kBlockM * D) + i * 8;
    float sum = 0;
    constexpr int kChunks = 8 / kLanes;  // of a panel's row
    int const turn = i * kLanes / 8 * 0 + i;
#pragma unroll
    for (int c = 0; c < D; c += 64)
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        int const chunk = (lane + kLanes * ((j + turn) % kChunks));
        uint4 x = o[c * kBlockM / 8 + chunk], y = o[kBlockM * D / 8 + c * kBlockM / 8 + chunk];
        sum += dot_of_chunk<Element>(x, y);
      }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) {
      params.workspace.lse[place * kBlockM + i] = lse == -INFINITY ? NAN : lse * float(M_LOG2E);
      params.workspace.delta[place * kBlockM + i] = sees ? (params.dlse ? params.dlse[at] : 0.f) - sum : 0.f;
    }
    if (kPersist) __syncthreads();
  }
}
template <int D, int M, bool places, int persist> int go3(BackwardParams const& p, cudaStream_t st) {
  using I = Instance<Family::sm90, ElementType::bf16, D>;
  int blocks = p.shape.batch * ((p.shape.seqlen_q + M - 1) / M) * p.shape.heads_q;
  constexpr int T = M == 128 ? 256 : 256, smem = 2 * M * D * 2 * (persist ? 2 : 1);
  auto map = [&](TensorView const& v) { return make_tensor_map<cutlass::bfloat16_t, 4>(0, v.data, {uint64_t(D), uint64_t(p.shape.heads_q), uint64_t(p.shape.seqlen_q), uint64_t(p.shape.batch)}, {v.head_stride, v.row_stride, v.batch_stride}, TmaBox{64, 1, M}); };
  auto k = pre3<I, M, T, places, persist>;
  cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  int grid = persist ? 132 * persist : blocks;
  k<<<grid < blocks ? grid : blocks, T, smem, st>>>(p, map(p.out), map(p.dout), blocks);
  return cudaGetLastError();
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
    case 8: return go3<D, M, false, 0>(p, st);
    case 9: return go3<D, M, true, 0>(p, st);
    case 10: return go3<D, M, false, (D == 256 ? 1 : 3)>(p, st);
    case 11: return go3<D, M, true, (D == 256 ? 1 : 3)>(p, st);
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
