// The dQ kernel of the Ampere family: one thread block for each M block, over the N blocks that it sees. It
// adds in a fixed order, so it serves deterministic mode; it also serves calls that ask for dQ only.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/attention/store_rows.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/fully_masked.hpp"
#include "flash_cute/backward/general_step.hpp"
#include "flash_cute/backward/mask.hpp"
#include "flash_cute/backward/scores.hpp"
#include "flash_cute/backward/sm80/operands.hpp"
#include "flash_cute/backward/tiles.hpp"
#include "flash_cute/core/element.hpp"
#include "flash_cute/core/sm80/tensor_core.hpp"
#include "flash_cute/core/sm80/tf32_products.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

// Traits of the dQ kernel.
template <class Instance_>
struct BackwardDqTraitsSm80 {
  using Instance = Instance_;
  using Element = typename ElementOf<Instance::element>::type;
  static constexpr Masking kMasking = masking_of(Instance::variant);
  static constexpr bool kGeneral = kMasking == Masking::table;
  static constexpr QueryTile kTile =
      backward_tiles(Instance::family, Instance::head_dims, kMasking,
                     scores_of(Instance::family, kMasking, Scores::product), element_bytes(Instance::element))
          .queries;
  static constexpr bool kExact = Instance::element == ElementType::fp32;  // see ForwardTraitsSm80
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kHeadDim = Instance::head_dim, kThreads = kTile.warps * 32;

  using TensorCore = TensorCoreSm80<Element, kHeadDim>;
  using Mma = typename TensorCore::template TiledMma<kTile.warps, 1>;
  using LayoutAtom = typename TensorCore::LayoutAtom;
  using LayoutQ = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using LayoutKV = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  using LayoutKVt =
      decltype(composition(LayoutKV{}, Layout<Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>,
                                              Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDim>>>{}));
  struct SharedStorage {
    alignas(128) Element q[cosize_v<LayoutQ>];
    alignas(128) Element dout[cosize_v<LayoutQ>];
    alignas(128) Element k[cosize_v<LayoutKV>];
    alignas(128) Element v[cosize_v<LayoutKV>];
  };
};

// acc += A B^T with both operands from shared memory.
template <class Traits, class SharedA, class SharedB, class Acc>
CUTE_DEVICE void add_scores(int thread, SharedA const& sA, SharedB const& sB, Acc& acc) {
  typename Traits::Mma const mma;
  if constexpr (std::is_same_v<typename Traits::Element, float>) {
    multiply_rows<Traits::kExact, Traits::kHeadDim, true>(
        Tf32Tile<Traits::kBlockM>{raw_pointer_cast(sA.data())}, warp_rows<Traits::kThreads / 32>(thread),
        Tf32Tile<Traits::kBlockN>{raw_pointer_cast(sB.data())}, WarpTiles{0, 8}, acc);
  } else {
    typename Traits::TensorCore::FragmentAtom const atom;
    multiply_shared(thread, mma, make_tiled_copy_A(atom, mma), sA, make_tiled_copy_B(atom, mma), sB, acc);
  }
}

// acc += dS K with dS from registers and K^T from shared memory.
template <class Traits, class Scores, class SharedB, class Acc>
CUTE_DEVICE void add_by_keys(int thread, Scores const& acc_ds, SharedB const& sKt, Acc& acc) {
  typename Traits::Mma const mma;
  if constexpr (std::is_same_v<typename Traits::Element, float>) {
    multiply_by_rows<Traits::kExact, Traits::kBlockN>(
        scores_in_registers<Traits::kExact>(acc_ds), Tf32Tile<Traits::kBlockN>{raw_pointer_cast(sKt.data())},
        WarpTiles{0, 8}, acc, [](float& x, int, int, float sum, bool) { x += sum; });
  } else {
    Tensor rdS = convert<typename Traits::Element>(acc_ds);
    multiply_by_shared(
        thread, mma, operand_a_view(rdS), [](int) {},
        make_tiled_copy_B(typename Traits::TensorCore::FragmentAtomTransposed{}, mma), sKt, acc);
  }
}

// stats_block_m: the block size by which LSE and delta are numbered in the workspace.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    backward_dq_kernel_sm80(__grid_constant__ BackwardParams const params,
                            __grid_constant__ WindowMask const limits, int const stats_block_m) {
  using Element = typename Traits::Element;
  using TensorCore = typename Traits::TensorCore;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kStages = Traits::kStages;
  using TileQ = Shape<Int<kBlockM>, Int<Traits::kHeadDim>>;
  using TileKV = Shape<Int<kBlockN>, Int<Traits::kHeadDim>>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  int const thread = threadIdx.x;
  ProblemShape const& shape = params.shape;
  BatchBlocks const tiles{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, kBlockM};
  BatchBlocks const stats_blocks{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, stats_block_m};
  auto const [head, of_head] = tiles.of_block(blockIdx.x);
  int const b = tiles.sequence(of_head);
  Sequence const s = sequence(params.shape, params.lengths, limits, b);
  WindowMask const& mask = s.mask;
  int const m_begin = (of_head - tiles.first(b)) * kBlockM;
  if (!has_rows(m_begin, s.used)) return;
  constexpr bool kGeneral = Traits::kGeneral;
  ScorePlace const place = BackwardMask<Traits::kMasking>::place(params, s, b, head);
  auto const seen =
      BackwardMask<Traits::kMasking>::template keys_seen_by<Traits>(params, s, b, head, m_begin);

  typename Traits::Mma const mma;
  auto const thread_mma = mma.get_slice(thread);
  Tensor acc_dq = partition_fragment_C(mma, TileQ{});  // (MMA, MMA_M, MMA_D)
  clear(acc_dq);
  Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});      // (M, D)
  Tensor sdO = make_tensor(make_smem_ptr(shared.dout), typename Traits::LayoutQ{});  // (M, D)
  Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKV{});     // (N, D, STAGE)
  Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutKV{});     // (N, D, STAGE)
  Tensor sKt = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutKVt{});   // (D, N, STAGE)
  auto load = [&](auto tile_shape, TensorView const& view, int of_head, int first, int begin,
                  TileInterior const& interior, auto&& target) {
    load_tile<Element, false>(typename TensorCore::template TiledLoad<Traits::kThreads>{},
                              typename TensorCore::LoadAtom{}, thread, view, b, of_head,
                              int64_t(first) + begin, tile_shape, interior, target);
  };
  auto load_keys = [&](int block, int stage) {
    int const begin = block * kBlockN, head_kv = head / (shape.heads_q / params.heads_of_keys());
    TileInterior const interior_k{0, {mask.seqlen_k - begin, shape.head_dim}};
    TileInterior const interior_v{0, {mask.seqlen_k - begin, shape.head_dim_v}};
    load(TileKV{}, params.k, head_kv, s.k_begin, begin, interior_k, sK(_, _, stage));
    load(TileKV{}, params.v, head_kv, s.k_begin, begin, interior_v, sV(_, _, stage));
  };
  int const first_row = mask.fully_masked_rows() - m_begin;
  TileInterior const interior{first_row, {s.used - m_begin, shape.head_dim}};
  TileInterior const interior_dout{first_row, {params.dout.data ? s.used - m_begin : 0, shape.head_dim_v}};
  load(TileQ{}, params.q, head, s.queries.begin, m_begin, interior, sQ);
  load(TileQ{}, params.dout, head, s.queries.begin, m_begin, interior_dout, sdO);

  Tensor cS = thread_mma.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{}));
  auto const coords = row_col_view(cS);
  constexpr int kRows = decltype(size<0>(coords))::value;
  float lse[kRows], neg_delta[kRows];
  int64_t const offset =
      (int64_t(head) * stats_blocks.count() + stats_blocks.first(b)) * stats_block_m + m_begin;
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int const row = get<0>(coords(i, 0));
    bool const is_valid = m_begin + row < s.used;
    lse[i] = is_valid ? params.workspace.lse_delta.lse[offset + row] : INFINITY;
    neg_delta[i] = is_valid ? params.workspace.lse_delta.neg_delta[offset + row] : 0.f;
  }

  if (!seen.visited.done()) load_keys(seen.visited.block, 0);
  cp_async_fence();
  int stage = 0;
  for (auto blocks = seen.visited; !blocks.done(); blocks.advance(), stage ^= kStages - 1) {
    int const block = blocks.block;
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages == 2) {
      if (blocks.remaining() > 0) load_keys(blocks.next(), stage ^ 1);
      cp_async_fence();
    }
    // (1) S = Q K^T
    Tensor acc_s = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
    clear(acc_s);
    add_scores<Traits>(thread, sQ, sK(_, _, stage), acc_s);
    auto step = score_step<Traits, QueryAxis::rows>(params, place, m_begin, block * kBlockN, cS);
    step.change(acc_s);
    step.level(acc_s);
    if (!blocks.is_full(seen.full_blocks)) {
      apply_mask<ComparedKeys>(seen.mask, OneHead{}, m_begin, block * kBlockN, cS, acc_s);
    }
    // (3) P = exp2(S c - LSE)
    compute_p<QueryAxis::rows>(acc_s, step.scale_log2(params.softmax_scale * float(M_LOG2E)),
                               [&](int row) { return lse[row]; });
    // (2) dP = dO V^T, less delta
    Tensor acc_ds = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // dP, then dS
    auto const delta_of_row = [&](int row) { return neg_delta[row]; };
    if constexpr (kGeneral) {
      clear(acc_ds);
    } else {
      fill_with_delta<QueryAxis::rows>(acc_ds, delta_of_row);
    }
    add_scores<Traits>(thread, sdO, sV(_, _, stage), acc_ds);
    // (5) dS = P (dP - delta)
    if constexpr (kGeneral) {
      step.differentiate(acc_s);
      step.drop(acc_ds);
      compute_ds<QueryAxis::rows>(acc_ds, acc_s, delta_of_row);
    } else {
      compute_ds(acc_ds, acc_s);
    }
    // (6) dQ += dS K
    add_by_keys<Traits>(thread, acc_ds, sKt(_, _, stage), acc_dq);
    if constexpr (kStages == 1) {
      __syncthreads();
      if (blocks.remaining() > 0) load_keys(blocks.next(), 0);
      cp_async_fence();
    }
  }

  CUTE_UNROLL
  for (int i = 0; i < size(acc_dq); ++i) acc_dq(i) *= params.softmax_scale;
  Tensor dq_coords = thread_mma.partition_C(make_identity_tensor(TileQ{}));
  zero_fully_masked_rows(acc_dq, dq_coords, first_row);
  Tensor target = local_tensor<Element>(params.dq, b, head, int64_t(s.queries.begin) + m_begin, TileQ{});
  store_rows(target.data().get(), params.dq.row_stride, s.used - m_begin, shape.head_dim, acc_dq, dq_coords);
}

}  // namespace flash_cute
