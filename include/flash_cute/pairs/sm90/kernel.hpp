// Values of pairs on the Hopper family: S = Q K^T and dP = dO V^T of a block by WGMMA, then P and dS. Thread
// blocks go through tiles of values; what a tile is broadcast over is added up in registers, in a fixed
// order: no atomics.
#pragma once

#include <cuda.h>
#include <cutlass/arch/reg_reconfig.h>

#include "flash_cute/core/sm90/pipeline.hpp"
#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"
#include "flash_cute/pairs/block.hpp"

namespace flash_cute {

struct PairMaps {
  CUtensorMap q, k, v, dout;
};

template <ElementType element>
struct PairTraitsSm90 {
  using Element = typename ElementOf<element>::type;
  static constexpr int kBlockM = PairTile::kBlockM, kTileN = pair_block_n(Family::sm90, sizeof(Element)),
                       kColumns = PairTile::kSliceBytes / sizeof(Element), kStages = 4;
  static constexpr int kConsumers = kBlockM / kWarpgroupRows, kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kBlockM>, Int<kTileN>, Int<kColumns>>>(),
      Layout<Shape<Int<kConsumers>, _1, _1>>{}));
  template <int rows>
  using LayoutRows = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                            Shape<Int<rows>, Int<kColumns>, Int<kStages>>{}));
  static constexpr int kStageBytes = (kBlockM + kTileN) * PairTile::kSliceBytes;
  static constexpr int kSumsStride = kTileN + 1;  // floats: against bank conflicts of columns

  struct SharedStorage {
    alignas(1024) Element queries[kStages * kBlockM * kColumns];  // of Q, or dO
    alignas(1024) Element keys[kStages * kTileN * kColumns];      // of K, or V
    union {
      PairMemory<Element, kTileN> tile;
      float sums[kBlockM * kSumsStride];  // in the end
    };
    TmaRing<kStages> ring;
    PairStep step_of_stage[kStages];  // that begins with its slice
    PairStep found[32];
  };
  static_assert(sizeof(SharedStorage) <= 227 << 10);
};

// A step that ends a tile.
constexpr int kNoSequence = -1;

template <class Traits>
struct PairProducerSm90 {
  typename Traits::SharedStorage& shared;
  PairParams const& params;
  PairMaps const& maps;
  PipelineState<Traits::kStages> at{};

  // By a warp.
  template <class Steps>
  CUTE_DEVICE void load(Steps const& steps) {
    int const lane = threadIdx.x % 32;
    for (int first = steps.begin(); first < steps.end(); first += 32) {
      int const count = steps.template find<32>(first, shared.found, 0);
      __syncwarp();
      for (int i = 0; i < count; ++i) load(shared.found[i], lane == 0);
      __syncwarp();
    }
    auto& full = shared.ring.acquire(at);
    if (lane == 0) {
      shared.step_of_stage[at.stage].b = kNoSequence;
      full.arrive();
    }
    at.advance();
  }

 private:
  CUTE_DEVICE void load(PairStep const& step, bool is_first_lane) {
    ProblemShape const& shape = params.call.shape;
    auto load_slices = [&](CUtensorMap const& queries, CUtensorMap const& keys, int columns, bool begins) {
      for (int column = 0; column < columns; column += Traits::kColumns, begins = false) {
        auto& full = shared.ring.acquire(at);
        if (is_first_lane) {
          if (begins) shared.step_of_stage[at.stage] = step;
          full.arrive_and_expect_tx(Traits::kStageBytes);
          auto load_rows = [&](CUtensorMap const& map, auto* memory, int rows, int head, int row) {
            cute::SM90_TMA_LOAD::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                      static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                      memory + at.stage * rows * Traits::kColumns, column, head, row, step.b);
          };
          load_rows(queries, shared.queries, Traits::kBlockM, step.head, step.m_begin);
          load_rows(keys, shared.keys, Traits::kTileN, step.head / (shape.heads_q / shape.heads_kv),
                    step.key_begin + step.n_begin);
        }
        at.advance();
      }
    };
    load_slices(maps.q, maps.k, shape.head_dim, true);
    if (params.has_dp()) load_slices(maps.dout, maps.v, shape.head_dim_v, false);
  }
};

template <class Traits>
struct PairConsumerSm90 {
  using Element = typename Traits::Element;
  using Mma = typename Traits::Mma;
  using TileS = Shape<Int<Traits::kBlockM>, Int<Traits::kTileN>>;
  static constexpr int kThreads = Traits::kConsumers * kWarpgroupThreads;
  typename Traits::SharedStorage& shared;
  PairParams const& params;
  PairPlan const& plan;
  int thread;  // among the consumers
  PipelineState<Traits::kStages> at{};

  template <class Steps>
  CUTE_DEVICE void compute(Steps const& steps) {
    Mma mma;
    Tensor sA =
        make_tensor(make_smem_ptr(shared.queries), typename Traits::template LayoutRows<Traits::kBlockM>{});
    Tensor sB =
        make_tensor(make_smem_ptr(shared.keys), typename Traits::template LayoutRows<Traits::kTileN>{});
    auto const slice = mma.get_slice(thread / kWarpgroupThreads * kWarpgroupThreads);
    Tensor tSrA = slice.partition_fragment_A(sA);  // (MMA, MMA_M, MMA_K, STAGE)
    Tensor tSrB = slice.partition_fragment_B(sB);  // (MMA, MMA_N, MMA_K, STAGE)
    Tensor cS = mma.get_slice(thread).partition_C(make_identity_tensor(TileS{}));
    Tensor values = partition_fragment_C(mma, TileS{});
    clear(values);
    Tensor acc_s = make_fragment_like(values);  // of the last step, for the weights
    clear(acc_s);
    int const first_row = thread / 32 * 16;  // of the warp
    if (params.call.scores.bias.given) shared.tile.template load_bias<Traits::kTileN>(steps, first_row, 0);
    auto weigh = [&](auto const& block, auto& acc_s) {
      cp_async_wait<0>();
      __syncwarp();  // the bias has arrived
      block.weigh(shared.tile, acc_s);
    };
    // acc = A B^T over slices; all but the last product are done then. begun(): called when the first one has
    // been issued.
    auto multiply = [&](int columns, auto& acc, auto const& begun) {
      auto issue = [&](GMMA::ScaleOut scale) {
        shared.ring.wait(at);
        issue_product(scale, mma, tSrA(_, _, _, at.stage), tSrB(_, _, _, at.stage), acc);
      };
      issue(GMMA::ScaleOut::Zero);
      begun();
      for (int column = Traits::kColumns; column < columns; column += Traits::kColumns) {
        auto const before = at;
        at.advance();
        issue(GMMA::ScaleOut::One);
        wait_products<1>(acc);
        release(before);
      }
    };
    while (true) {
      shared.ring.wait(at);
      PairStep const step = shared.step_of_stage[at.stage].kept();
      if (step.b == kNoSequence) {
        release(at);
        at.advance();
        break;
      }
      PairBlock<Element, Traits::kBlockM, Traits::kTileN, decltype(cS)> const block(params, plan, step, 0,
                                                                                    cS);
      // (1) S = Q K^T
      multiply(params.call.shape.head_dim, acc_s, [] {});
      auto const last_of_s = at;
      at.advance();
      if (!params.has_dp()) {
        wait_products<0>(acc_s);
        release(last_of_s);
        weigh(block, acc_s);
        if (params.sums) {
          Tensor acc_dp = make_fragment_like(values);
          clear(acc_dp);
          block.add_gradients(acc_s, acc_dp, values);
        }
        continue;
      }
      // (2) dP = dO V^T
      Tensor acc_dp = partition_fragment_C(mma, TileS{});
      multiply(params.call.shape.head_dim_v, acc_dp, [&] {
        wait_products<1>(acc_s);
        release(last_of_s);
      });
      // (3) P = exp2(S c - LSE)
      weigh(block, acc_s);
      wait_products<0>(acc_dp);
      release(at);
      at.advance();
      // (5) dS = P (dP - delta)
      block.add_gradients(acc_s, acc_dp, values);
    }
    cp_async_wait<0>();  // for the bias of a tile without a step, too
    if (!shared.tile.template store<Traits::kTileN>(steps, first_row, 0, cS, acc_s, values)) return;
    constexpr int kStride = Traits::kSumsStride;
    sync();  // all have read the bias
    CUTE_UNROLL
    for (int i = 0; i < size(values); ++i) shared.sums[get<0>(cS(i)) * kStride + get<1>(cS(i))] = values(i);
    sync();
    store_sums<Element, kThreads>(steps, shared.sums, kStride, thread, [] { sync(); });
    sync();
  }

 private:
  CUTE_DEVICE static void sync() { NamedBarrier{BarrierId::warp_scheduler, 0}.sync(kThreads); }
  CUTE_DEVICE void release(PipelineState<Traits::kStages> const& stage) {
    if (threadIdx.x % 32 == 0) shared.ring.release(stage);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    pair_values_kernel_sm90(__grid_constant__ PairParams const params,
                            __grid_constant__ WindowMask const limits, __grid_constant__ PairPlan const plan,
                            __grid_constant__ PairMaps const maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    shared.ring.init(4 * Traits::kConsumers);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  unsigned const tiles = unsigned(plan.tiles(params.shape));
  auto steps_of = [&](unsigned tile) { return PairSteps<Traits::kTileN>(params, limits, plan, tile); };
  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (cutlass::canonical_warp_idx_sync() == 0) {
      PairProducerSm90<Traits> producer{shared, params, maps};
      for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) producer.load(steps_of(tile));
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    PairConsumerSm90<Traits> consumer{shared, params, plan, int(threadIdx.x) - kWarpgroupThreads};
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) consumer.compute(steps_of(tile));
  }
}

}  // namespace flash_cute
