// The Hopper family's forward of up to 16 rows over a cache of codes of 8 bits. Codes become numbers of 16
// bits in registers, between shared memory and mma.sync. Each warp has keys and a softmax of its own, and
// waits for no other before the end of a tile.
#pragma once

#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/online_softmax.hpp"
#include "flash_cute/attention/scores/general.hpp"
#include "flash_cute/core/fp8.hpp"
#include "flash_cute/core/named_barrier.hpp"
#include "flash_cute/forward/epilogue.hpp"
#include "flash_cute/forward/sm90/code_loads.hpp"
#include "flash_cute/forward/sm90/code_tiles.hpp"
#include "flash_cute/forward/zero_fill.hpp"

namespace flash_cute {

// A warp that computes.
//
// Products are of float16, whatever q is: codes are exact in it, and one instruction makes two of them where
// bfloat16 takes four. Rows of q of bfloat16 are brought to its range by a power of two, and probabilities,
// which are below 256, by 128: down to 2^-24 they keep the 8 bits that bfloat16 has, down to 2^-21 eleven.
//
// Which number of a row is which k of a product is left to the kernel, as it is the same for both operands,
// and so is which column of V is which n. So lane t of a quad has neighbouring codes of a key of K, and lane
// g of those in a column of V: loads are up to 16 bytes wide.
template <class Traits>
struct CodeWarpSm90 {
  using Element = typename Traits::Element;
  using LayoutK = typename Traits::LayoutK;
  using LayoutV = typename Traits::LayoutV;
  using Product = SM80_16x8x16_F32F16F16F32_TN;
  using Mma = decltype(make_tiled_mma(Product{}));
  using TileS = Shape<Int<Traits::kBlockM>, Int<Traits::kKeys>>;
  static constexpr int kWarps = Traits::kWarps, kKeys = Traits::kKeys, kHeadDimV = Traits::kHeadDimV,
                       kOwnK = Traits::kOwnK, kOwnV = Traits::kOwnV, kSteps = Traits::kSteps,
                       kStepsAtOnce = Traits::kStepsAtOnce;
  static constexpr float kOfProbabilities = 128;

  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  typename Traits::Source const& source;
  int warp, lane;
  int rounds = 0;  // of results

  CUTE_DEVICE int row() const { return lane / 4; }  // the first of two, eight apart
  CUTE_DEVICE int of_quad() const { return lane % 4; }

  CUTE_DEVICE void run(SplitTile const& first) {
    CodeLoadsSm90<Traits> loads(shared, params, source, first, warp, lane);
    Tensor cS = Mma{}.get_slice(lane).partition_C(make_identity_tensor(TileS{}));
    Tensor acc_o = make_tensor<float>(Shape<Shape<_2, _2>, _1, Int<kHeadDimV / 8>>{});  // (MMA, 1, MMA_D)
    OnlineSoftmax<2, Traits::kRescaleThreshold> softmax(params.softmax.scale_log2);
    PackGqa const& rows = source.rows();
    PipelineState<2> at{};
    for (int number = 0;; ++number, at.advance()) {
      shared.ring_tiles.wait(at);
      auto const& [tile, scale_of_row, q] = shared.tiles[at.stage];
      auto const& mask = source.mask(tile);
      float const k_scale = tile.seqlen_k > 0 ? params.cache.k_scale.of(tile.batch, tile.head_kv) : 1.f;
      bool const is_of_scores = Traits::kGeneral && params.scores.change();
      float const scale = params.softmax.scale_log2 * (is_of_scores ? 1.f : k_scale);
      softmax.scale_log2 = scale < FLT_MIN ? FLT_MIN : scale;  // times -inf it must not be NaN
      float of_row[2];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half)
        of_row[half] = scale_of_row[row() + 8 * half] * (is_of_scores ? k_scale : 1.f);
      AlibiSlopes<QueryAxis::rows, decltype(cS)> slopes;
      if constexpr (Traits::kGeneral) slopes.begin(params.scores, source.place(tile), rows, tile.m_begin, cS);
      auto blocks = kv_blocks_of<Traits::kBlockN>(source, tile);
      auto const full_blocks = mask.full(tile.m_begin, rows.tile_queries(), Traits::kBlockN);
      uint32_t const own_q = shared_address(&q[0][lane]);
      softmax.reset();
      clear(acc_o);
      do {
        int const stage = loads.wait(number);
        Tensor acc_s = partition_fragment_C(Mma{}, TileS{});  // (MMA, 1, MMA_N)
        multiply_keys(own_q, loads.k.stages + stage * LayoutK::kBytes, acc_s);
        CUTE_UNROLL
        for (int i = 0; i < size(acc_s); ++i) acc_s(i) *= of_row[i / 2 % 2];
        int const first_key = loads.first_of(blocks.block);
        if constexpr (Traits::kGeneral) {
          if (params.scores.change()) {
            GeneralScores<Element, BiasLoads::none>::template change<QueryAxis::rows>(
                params.scores, source.place(tile), rows, tile.m_begin, first_key, cS, slopes, acc_s);
          }
        }
        if (!blocks.is_full(full_blocks)) apply_mask<KeyBits>(mask, rows, tile.m_begin, first_key, cS, acc_s);
        softmax.update(acc_s).apply(acc_o);
        multiply_values(loads.v.stages + stage * LayoutV::kBytes, acc_s, acc_o);
      } while (blocks.advance());
      finish(tile, mask, rows, softmax, acc_o);
      __syncwarp();
      if (lane == 0) shared.ring_tiles.release(at);
      if (loads.number == number) return;  // no other tile has been begun
    }
  }

 private:
  CUTE_DEVICE static uint32_t widen_low(uint32_t codes) {
    return widen_pair<cutlass::half_t>(uint16_t(codes));
  }
  CUTE_DEVICE static uint32_t widen_high(uint32_t codes) {
    return widen_pair<cutlass::half_t>(uint16_t(codes >> 16));
  }
  template <int kWords>
  CUTE_DEVICE static void load_words(uint32_t address, uint32_t (&words)[kWords]) {
    if constexpr (kWords == 4) {
      uint4 const chunk = load_chunk(address);
      words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
    } else if constexpr (kWords == 2) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1])
                   : "r"(address)
                   : "memory");
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
    }
  }
  CUTE_DEVICE static void multiply(uint32_t const (&a)[4], uint32_t b0, uint32_t b1, float* c) {
    Product::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
  }

  // S = Q K^T. q, stage: addresses in shared memory.
  template <class Scores>
  CUTE_DEVICE void multiply_keys(uint32_t q, uint32_t stage, Scores& acc_s) const {
    clear(acc_s);
    CUTE_UNROLL
    for (int i = 0; i < kSteps / kStepsAtOnce; ++i) {
      int const byte = (i * 4 + of_quad()) * kOwnK;  // of a row
      int const panel = i * 4 * kOwnK / LayoutK::kPanel, of_panel = byte - panel * LayoutK::kPanel;
      uint32_t codes[kKeys / 8][kOwnK / 4];
      CUTE_UNROLL
      for (int n = 0; n < kKeys / 8; ++n)
        load_words(stage + LayoutK::offset(panel, n * 8 + row(), of_panel / 16) + of_panel % 16, codes[n]);
      CUTE_UNROLL
      for (int step = 0; step < kStepsAtOnce; ++step) {
        uint32_t a[4];
        load_words(q + (i * kStepsAtOnce + step) * int(sizeof(uint4[32])), a);
        CUTE_UNROLL
        for (int n = 0; n < kKeys / 8; ++n)
          multiply(a, widen_low(codes[n][step]), widen_high(codes[n][step]), &acc_s(0, 0, n));
      }
    }
  }

  // O += P V.
  template <class Probabilities, class Output>
  CUTE_DEVICE void multiply_values(uint32_t stage, Probabilities const& acc_p, Output& acc_o) const {
    CUTE_UNROLL
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t p[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const n = 2 * k + i / 2;
        p[i] = pack<cutlass::half_t>(acc_p(make_coord(0, i % 2), 0, n) * kOfProbabilities,
                                     acc_p(make_coord(1, i % 2), 0, n) * kOfProbabilities);
      }
      CUTE_UNROLL
      for (int panel = 0; panel < LayoutV::kPanels; ++panel) {
        uint32_t codes[4][kOwnV / 4];  // of the keys 2t, 2t + 1, 2t + 8 and 2t + 9
        int const byte = row() * kOwnV;
        CUTE_UNROLL
        for (int key = 0; key < 4; ++key) {
          int const of_stage = k * 16 + key / 2 * 8 + 2 * of_quad() + key % 2;
          load_words(stage + LayoutV::offset(panel, of_stage, byte / 16) + byte % 16, codes[key]);
        }
        CUTE_UNROLL
        for (int i = 0; i < kOwnV; i += 2) {
          int const word = i / 4, pairs = i % 4 == 0 ? 0x5140 : 0x7362;
          uint32_t const low = __byte_perm(codes[0][word], codes[1][word], pairs);
          uint32_t const high = __byte_perm(codes[2][word], codes[3][word], pairs);
          float* const out = &acc_o(0, 0, panel * kOwnV + i);
          multiply(p, widen_low(low), widen_low(high), out);
          multiply(p, widen_high(low), widen_high(high), out + 4);
        }
      }
    }
  }

  static constexpr int kComputing = 32 * kWarps;  // threads
  // NamedBarrier would let stores of results move across.
  CUTE_DEVICE static void sync() {
    asm volatile("bar.sync %0, %1;" ::"r"(int(BarrierId::warpgroup)), "r"(kComputing) : "memory");
  }

  // Where four columns of a row of O lie among others, permuted against conflicts of banks.
  CUTE_DEVICE static int chunk_of(int row, int column) {
    int const chunk = column / 4;
    return chunk ^ ((chunk / (kOwnV / 2) & 3) | (row & 1) << 2);
  }

  // Adds up what warps have, a few rows at once, and stores it. Where there is room for results of two
  // rounds, all warps have been at the barrier of the next one before they are written again.
  template <class Mask, class Softmax, class Output>
  CUTE_DEVICE void finish(SplitTile const& tile, Mask const& mask, PackGqa const& rows, Softmax& softmax,
                          Output& acc_o) {
    constexpr int kRows = Traits::kRowsAtOnce, kPairs = kRows * kHeadDimV / 2;
    float sums[2];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) sums[half] = reduce_quad(softmax.row_sum[half], SumOp{});
    int const used = rows.used();
#pragma unroll 1
    for (int first = 0; first < used; first += kRows) {
      auto& results = shared.results[rounds++ % Traits::kResults];
      bool const is_low = first < 8;
      if (row() / kRows == first % 8 / kRows) {
        put(acc_o, is_low, row() % kRows, results.out[warp][row() % kRows]);
        if (of_quad() == 0) {
          results.softmax[warp][row() % kRows] = {is_low ? softmax.row_max[0] : softmax.row_max[1],
                                                  is_low ? sums[0] : sums[1]};
        }
      }
      sync();
#pragma unroll 1
      for (int pair = warp * 32 + lane; pair < kPairs; pair += kComputing) {
        int const own_row = pair / (kHeadDimV / 2), column = pair % (kHeadDimV / 2) * 2;
        store_pair(tile, mask, rows, first + own_row, results, own_row, column, softmax.scale_log2);
      }
      if (Traits::kResults == 1) sync();
    }
  }
  // The lane's columns of a row.
  template <class Output>
  CUTE_DEVICE void put(Output const& acc_o, bool is_low, int row, float (&target)[kHeadDimV]) const {
    auto* const chunks = reinterpret_cast<float4*>(target);
    CUTE_UNROLL
    for (int panel = 0; panel < LayoutV::kPanels; ++panel) {
      CUTE_UNROLL
      for (int column = 0; column < 2 * kOwnV; column += 4) {  // of n tile i, k: column (2t + k) kOwnV + i
        auto value = [&](int i) {
          int const k = (column + i) / kOwnV, n = panel * kOwnV + (column + i) % kOwnV;
          return is_low ? acc_o(make_coord(k, 0), 0, n) : acc_o(make_coord(k, 1), 0, n);
        };
        int const of_row = panel * LayoutV::kPanel + of_quad() * 2 * kOwnV + column;
        chunks[chunk_of(row, of_row)] = {value(0), value(1), value(2), value(3)};
      }
    }
  }
  // Two columns of a row; those of a quad are of one row.
  template <class Mask, class Results>
  CUTE_DEVICE void store_pair(SplitTile const& tile, Mask const& mask, PackGqa const& rows, int row,
                              Results const& results, int row_of_results, int column, float scale_log2) {
    using Pair = Shape<Shape<_2, _1>, _1, _1>;
    Tensor acc = make_tensor<float>(Pair{});
    clear(acc);
    OnlineSoftmax<1, Traits::kRescaleThreshold> softmax(scale_log2);
    CUTE_UNROLL
    for (int other = 0; other < kWarps; ++other)
      softmax.row_max[0] = fmaxf(softmax.row_max[0], results.softmax[other][row_of_results].x);
    float sum = 0.f;
    int const place = 2 * chunk_of(row_of_results, column) + column / 2 % 2;
    CUTE_UNROLL
    for (int other = 0; other < kWarps; ++other) {
      float2 const of_warp = results.softmax[other][row_of_results];
      float const weight = fast_exp2(of_warp.x - softmax.row_max[0]);
      float2 const values = reinterpret_cast<float2 const*>(results.out[other][row_of_results])[place];
      sum += of_warp.y * weight;
      acc(0) += values.x * weight;
      acc(1) += values.y * weight;
    }
    softmax.row_sum[0] = of_quad() == 0 ? sum : 0.f;
    Tensor const all = domain_offset(make_coord(row, column),
                                     make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<kHeadDimV>>{}));
    Tensor const coords = make_tensor(
        all.data(), make_layout(Pair{}, make_stride(make_stride(E<1>{}, E<0>{}), E<0>{}, E<0>{})));
    softmax.finalize();
    softmax.scale_output(params.cache.v_scale.of(tile.batch, tile.head_kv) * (1 / kOfProbabilities));
    if (tile.slot != SplitTile::kUnsplit) {
      normalize_split(softmax, acc);
      if (row == 0 && column == 0 && source.partial.tiles) source.partial.tiles[tile.slot] = tile;
      store_partial(source.partial, tile, 0, rows, softmax, coords, acc);
      return;
    }
    normalize_rows<Traits>(params, softmax, mask, tile, rows, coords, acc);
    store_lse(params, source, tile, mask.seqlen_q, rows, softmax, coords);
    int const query = rows.query(row);
    if (!rows.uses(row) || tile.m_begin + query >= mask.seqlen_q || column >= params.shape.head_dim_v) return;
    RowCoord const first = source.operands.query(tile, tile.m_begin);
    auto* const out = static_cast<Element*>(params.out.data) + first.entry * params.out.batch_stride +
                      (first.row + query) * params.out.row_stride +
                      (tile.head + rows.head(row)) * params.out.head_stride + column;
    *reinterpret_cast<uint32_t*>(out) = pack<Element>(acc(0), acc(1));
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    code_kernel_sm90(__grid_constant__ ForwardParams const params,
                     __grid_constant__ typename Traits::Source const source,
                     __grid_constant__ DynamicScheduler const scheduler) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    shared.ring_tiles.init(Traits::kWarps);
    shared.requested.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  cudaGridDependencySynchronize();            // launched early: nothing above touches global memory
  cudaTriggerProgrammaticLaunchCompletion();  // combine_kernel waits by itself
  shared.list.make(source, scheduler.tile_counter);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x < source.tiles(shared.list)) {
    SplitTile const first = source.first_tile(shared.list, blockIdx.x);
    if (warp == Traits::kWarps) {
      CodeTilesSm90<Traits>{shared, params, source, scheduler.tile_counter, lane}.run(first);
    } else if (warp < Traits::kWarps) {
      CodeWarpSm90<Traits>{shared, params, source, warp, lane}.run(first);
    }
  }
  if (shared.list.unwritten) {
    constexpr int kWarps = Traits::kThreads / 32;
    zero_fill_unwritten<typename Traits::Element>(params, blockIdx.x * kWarps + warp, gridDim.x * kWarps);
  }
}

}  // namespace flash_cute
