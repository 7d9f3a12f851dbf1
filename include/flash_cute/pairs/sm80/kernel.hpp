// Values of pairs on the Ampere family: S = Q K^T and dP = dO V^T of a block, then P and dS. A thread block
// owns a tile of values and adds up what it is broadcast over in registers, in a fixed order: no atomics.
#pragma once

#include "flash_cute/backward/sm80/dq_kernel.hpp"
#include "flash_cute/core/sm80/tensor_core.hpp"
#include "flash_cute/pairs/block.hpp"

namespace flash_cute {

template <ElementType element>
struct PairTraitsSm80 {
  using Element = typename ElementOf<element>::type;
  static constexpr bool kExact = element == ElementType::fp32;
  static constexpr int kGroups = pair_groups(sizeof(Element)), kGroupThreads = 256,
                       kThreads = kGroups * kGroupThreads;
  static constexpr int kBlockM = PairTile::kBlockM, kTileN = kGroups * kPairGroupKeys;
  static constexpr int kColumns = PairTile::kSliceBytes / sizeof(Element);  // of a slice

  // Of a group, as add_scores() sees it.
  struct Group {
    using Element = PairTraitsSm80::Element;
    static constexpr bool kExact = PairTraitsSm80::kExact;
    static constexpr int kBlockM = PairTraitsSm80::kBlockM, kBlockN = kPairGroupKeys, kHeadDim = kColumns,
                         kThreads = kGroupThreads;
    using TensorCore = TensorCoreSm80<Element, kHeadDim>;
    using Mma = typename TensorCore::template TiledMma<kThreads / 32, 1>;
  };
  using TensorCore = typename Group::TensorCore;
  template <int rows>
  using LayoutRows =
      decltype(tile_to_shape(typename TensorCore::LayoutAtom{}, Shape<Int<rows>, Int<kColumns>>{}));
  static constexpr int kStageElements = (kBlockM + kTileN) * kColumns;

  static constexpr int kSumsStride = kTileN + 1;  // floats: against bank conflicts of columns
  static constexpr int kMostSteps = 64;           // that are known: those of two times 32 that were found
  using Values =
      decltype(partition_fragment_C(typename Group::Mma{}, Shape<Int<kBlockM>, Int<Group::kBlockN>>{}));
  struct SharedStorage {
    PairMemory<Element, kTileN> tile;
    PairStep steps[kMostSteps];
    int found;  // of 32 that were tried
    // Slices of a block's queries, then of its keys, of each stage; in the end sums.
    alignas(128) Element slices[1];
  };
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    pair_values_kernel_sm80(__grid_constant__ PairParams const params,
                            __grid_constant__ WindowMask const limits,
                            __grid_constant__ PairPlan const plan) {
  using Element = typename Traits::Element;
  using Group = typename Traits::Group;
  using TensorCore = typename Traits::TensorCore;
  constexpr int kBlockM = Traits::kBlockM, kTileN = Traits::kTileN, kGroupKeys = kPairGroupKeys,
                kColumns = Traits::kColumns;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  BackwardParams const& call = params.call;
  int const group = threadIdx.x / Traits::kGroupThreads, thread = threadIdx.x % Traits::kGroupThreads;
  PairSteps<kTileN> const steps(params, limits, plan, blockIdx.x);
  int const slices_k = ceil_div(call.shape.head_dim, kColumns),
            slices = slices_k + (params.has_dp() ? ceil_div(call.shape.head_dim_v, kColumns) : 0);

  typename Group::Mma const mma;
  Tensor cS = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kGroupKeys>>{}));
  typename Traits::Values values = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kGroupKeys>>{});
  clear(values);
  Tensor acc_s = make_fragment_like(values);  // of the last step, for the weights
  clear(acc_s);

  // The first thread's warp finds steps when all that were found are being loaded.
  int tried = steps.begin(), found = 0;
  auto find_steps = [&] {
    int count = 0;
    for (; count == 0 && tried < steps.end(); tried += 32) {
      __syncthreads();
      if (threadIdx.x < 32) {
        int const of_warp = steps.template find<Traits::kMostSteps>(tried, shared.steps, found);
        if (threadIdx.x == 0) shared.found = of_warp;
      }
      __syncthreads();
      count = shared.found;
    }
    found += count;
  };
  int loading = 0, slice_to_load = 0;
  auto load = [&](int stage) {
    if (slice_to_load == 0 && loading == found) find_steps();
    if (loading < found) {
      PairStep const& step = shared.steps[loading % Traits::kMostSteps];
      bool const of_scores = slice_to_load < slices_k;
      int const column = (of_scores ? slice_to_load : slice_to_load - slices_k) * kColumns;
      int const columns = (of_scores ? call.shape.head_dim : call.shape.head_dim_v) - column;
      int const head_kv = step.head / (call.shape.heads_q / call.shape.heads_kv);
      Element* const target = shared.slices + stage * Traits::kStageElements;
      auto load_rows = [&](auto rows, TensorView view, int head, int first, TileInterior const& interior,
                           Element* memory) {
        view.data = static_cast<Element*>(view.data) + column;
        load_tile<Element, false>(typename TensorCore::template TiledLoad<Traits::kThreads>{},
                                  typename TensorCore::LoadAtom{}, threadIdx.x, view, step.b, head, first,
                                  Shape<decltype(rows), Int<kColumns>>{}, interior,
                                  make_tensor(make_smem_ptr(memory),
                                              typename Traits::template LayoutRows<decltype(rows)::value>{}));
      };
      int const queries = step.queries - step.m_begin;
      load_rows(Int<kBlockM>{}, of_scores ? call.q : call.dout, step.head, step.m_begin,
                {0, {queries, columns}}, target);
      load_rows(Int<kTileN>{}, of_scores ? call.k : call.v, head_kv, step.key_begin + step.n_begin,
                {-step.n_begin, {step.keys - step.n_begin, columns}}, target + kBlockM * kColumns);
      if (++slice_to_load == slices) {
        slice_to_load = 0;
        ++loading;
      }
    }
    cp_async_fence();
  };
  int stage = 0;
  // Calls multiply(queries, the group's keys) for each of so many slices.
  auto for_each_slice = [&](int count, auto&& multiply) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (plan.tile.stages == 3) {
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      __syncthreads();
      load((stage + plan.tile.stages - 1) % plan.tile.stages);
      Element* const slice = shared.slices + stage * Traits::kStageElements;
      multiply(make_tensor(make_smem_ptr(slice), typename Traits::template LayoutRows<kBlockM>{}),
               make_tensor(make_smem_ptr(slice + (kBlockM + group * kGroupKeys) * kColumns),
                           typename Traits::template LayoutRows<kGroupKeys>{}));
      stage = stage + 1 == plan.tile.stages ? 0 : stage + 1;
    }
  };
  int const first_row = thread / 32 * 16, first_column = group * kGroupKeys;  // of the warp
  if (call.scores.bias.given) shared.tile.template load_bias<kGroupKeys>(steps, first_row, first_column);
  for (int i = 0; i + 1 < plan.tile.stages; ++i) load(i);  // and the bias, with the first

#pragma unroll 1
  for (int index = 0; index < found; ++index) {
    PairStep const step = shared.steps[index % Traits::kMostSteps];
    PairBlock<Element, kBlockM, kTileN, decltype(cS)> const block(params, plan, step, first_column, cS);
    // (1) S = Q K^T
    clear(acc_s);
    for_each_slice(slices_k,
                   [&](auto const& sQ, auto const& sK) { add_scores<Group>(thread, sQ, sK, acc_s); });
    // (3) P = exp2(S c - LSE)
    block.weigh(shared.tile, acc_s);
    if (!params.sums) continue;
    // (2) dP = dO V^T
    Tensor acc_dp = make_fragment_like(values);
    clear(acc_dp);
    for_each_slice(slices - slices_k,
                   [&](auto const& sdO, auto const& sV) { add_scores<Group>(thread, sdO, sV, acc_dp); });
    // (5) dS = P (dP - delta)
    block.add_gradients(acc_s, acc_dp, values);
  }

  cp_async_wait<0>();  // for the bias of a tile without a step, too
  if (!shared.tile.template store<kGroupKeys>(steps, first_row, first_column, cS, acc_s, values)) return;
  __syncthreads();
  constexpr int kStride = Traits::kSumsStride;
  auto* const sums = reinterpret_cast<float*>(shared.slices);
  CUTE_UNROLL
  for (int i = 0; i < size(values); ++i)
    sums[get<0>(cS(i)) * kStride + first_column + get<1>(cS(i))] = values(i);
  __syncthreads();
  store_sums<Element, Traits::kThreads>(steps, sums, kStride, threadIdx.x, [] { __syncthreads(); });
}

}  // namespace flash_cute
