// What all consumer warpgroups of the Hopper family's backward have in common: the loop over tiles, P and dS,
// and the store of dK and dV.
#pragma once

#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/general_step.hpp"
#include "flash_cute/backward/gqa_reduce.hpp"
#include "flash_cute/backward/mask.hpp"
#include "flash_cute/backward/scores.hpp"
#include "flash_cute/backward/sm90/dq_accumulate.hpp"
#include "flash_cute/backward/sm90/tensor_maps.hpp"
#include "flash_cute/backward/sm90/tile_ring.hpp"
#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/core/special_registers.hpp"

namespace flash_cute {

template <class Traits>
struct BackwardConsumerWarpgroup {
  using Element = typename Traits::Element;
  using Mask = BackwardMask<Traits::kMasking>;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static constexpr bool kGeneral = Traits::kGeneral, kHasTable = Traits::kMasking == Masking::table;
  typename Traits::SharedStorage& shared;
  BackwardParams const& params;
  BackwardMaps const& maps;
  int warpgroup;  // index of this one among the consumers
  int thread;     // index in the warpgroup

  // The index of the thread among the kKeyThreads that share an accumulator of dK or dV, and of its warp.
  CUTE_DEVICE int key_thread() const {
    return (Traits::kInCluster ? 0 : kWarpgroupThreads * warpgroup) + thread;
  }
  CUTE_DEVICE int key_warp() const { return key_thread() / 32; }
  CUTE_DEVICE float scale_log2() const {
    float const scale = params.softmax_scale;
    return (Traits::kLseDeltaMma ? scale_of_scores(scale) : scale) * float(M_LOG2E);
  }

  template <int warpgroup_ = 0>
  CUTE_DEVICE DqAccumulator<Traits, warpgroup_> dq_accumulator() const {
    return {shared, params.workspace.dq.accum != nullptr, warpgroup, thread};
  }

  // Calls consumer.compute(tile) for each tile.
  template <class Consumer>
  CUTE_DEVICE void run(Consumer consumer) const {
    PipelineState<2> at{};
    while (true) {
      shared.ring_tiles.wait(at);
      KvTile const& tile = shared.tiles[at.stage];
      if (tile.n_begin == kNoTile) break;
      consumer.compute(tile);
      __syncwarp();  // all lanes have read the tile
      release(shared.ring_tiles, at);
      at.advance();
    }
    wait_stored();
    if constexpr (Traits::kConvertsDq) consumer.dq_converter.finish_all();
  }

  // Waits until the TMA stores of dK and dV have read the shared memory where parts of dQ are staged next.
  // This is called when the next tile has begun.
  CUTE_DEVICE void wait_stored() const {
    if (thread % 32 == 0) cute::tma_store_wait<0>();
    if constexpr (Traits::kDqHalves > 1) {
      sync_warpgroup(warpgroup);  // a warp stages dQ where other warps' rows were
    } else {
      __syncwarp();
    }
  }

  // M blocks whose queries all see all of this warpgroup's keys.
  CUTE_DEVICE auto full(KvTile const& tile) const {
    return Mask::full_blocks(tile, first_own_key<Traits>(tile) + key_warp() / 4 * 64, 64, kBlockM);
  }

  CUTE_DEVICE auto of_tile(KvTile const& tile) const { return Mask::template of_tile<Traits>(params, tile); }

  // The mask of S^T of an M block, whose first key is n_begin: what a table says is found beside the product.
  template <class Coords>
  struct BlockMask {
    BackwardConsumerWarpgroup const& own;
    KvTile const& tile;
    int n_begin, m_begin;
    Coords const& cS;
    typename Mask::template Visible<Traits, Coords> visible;

    CUTE_DEVICE void find(int head) {
      if constexpr (kHasTable) {
        Mask::template find<Traits>(own.params, tile, head, n_begin, m_begin, cS, visible);
      }
    }
    template <class Scores>
    CUTE_DEVICE void apply(Scores& acc_s) const {
      if constexpr (kHasTable) {
        visible.apply(acc_s);
      } else {
        Mask::apply(tile, n_begin, m_begin, cS, acc_s);
      }
    }
  };
  template <class Coords>
  CUTE_DEVICE auto block_mask(KvTile const& tile, int n_begin, int block, Coords const& cS) const {
    return BlockMask<Coords>{*this, tile, n_begin, block * kBlockM, cS};
  }

  // What changes the scores of S^T of an M block, and drops pairs.
  template <class Coords>
  CUTE_DEVICE auto score_step(typename Mask::OfTile const& of_tile, int head, int n_begin, int block,
                              Coords const& cS) const {
    return flash_cute::score_step<Traits, QueryAxis::columns>(params, place_of(of_tile, head),
                                                              block * kBlockM, n_begin, cS);
  }
  // The same where other warps have drawn dropout.
  template <class Coords, class Dropout>
  CUTE_DEVICE auto score_step(typename Mask::OfTile const& of_tile, int head, int n_begin, int block,
                              Coords const& cS, Dropout const& dropout) const {
    if constexpr (kGeneral) {
      return GeneralStep<Element, QueryAxis::columns, kBlockM, Coords, Dropout, BiasLoads::tiles>(
          params.scores, place_of(of_tile, head), block * kBlockM, n_begin, cS, dropout);
    } else {
      return ProductStep{};
    }
  }
  CUTE_DEVICE static ScorePlace place_of(typename Mask::OfTile const& of_tile, int head) {
    ScorePlace place = of_tile.place;
    place.head = head;
    return place;
  }

  // What other warps have found out about a step's pairs.
  template <class Words>
  struct StepPairs {
    float hidden;  // see set_others
    OwnedDropout<Words> dropout;
    typename Words::Owned seen;

    template <class Scores>
    CUTE_DEVICE void apply(Scores& acc_s) const {
      seen.set_others(acc_s, hidden);
    }
  };
  template <class At>
  CUTE_DEVICE auto find_pairs(At& at, bool is_partial, bool drops) const {
    auto& of_tile = shared.pairs;
    float const inverse_keep = params.scores.dropout.inverse_keep;
    StepPairs<typename Traits::PairTiles::Words> pairs{-INFINITY * inverse_keep, {drops, 0.f * inverse_keep}};
    if (!is_partial && !drops) return pairs;
    of_tile.ring_words.wait(at);
    if (is_partial) pairs.seen.load(of_tile.words[at.stage].seen, key_thread());
    if (drops) pairs.dropout.kept.load(of_tile.words[at.stage].kept, key_thread());
    __syncwarp();
    release(of_tile.ring_words, at);
    at.advance();
    return pairs;
  }

  // Adds a tile of a bias to S^T.
  template <class At, class Scores>
  CUTE_DEVICE void add_bias_tile(At& at, Scores& acc_s) const {
    using Pairs = typename Traits::PairTiles;
    auto& pairs = shared.pairs;
    pairs.ring_bias.wait(at);
    Tensor sBias = make_tensor(make_smem_ptr(pairs.bias), typename Pairs::LayoutBias{});  // (N, M, STAGE)
    GeneralScores<Element>::template add_bias_tile<QueryAxis::columns>(params.scores, sBias(_, _, at.stage),
                                                                       16 * key_warp(), acc_s);
    __syncwarp();
    release(pairs.ring_bias, at);
    at.advance();
  }

  // Releases a stage that this warp's products have read, with one arrival for each warp.
  template <class Ring, class Position>
  CUTE_DEVICE static void release(Ring& ring, Position const& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
  }
  // Releases a stage of Q or dO, in a cluster for both thread blocks, as multicast loads fill both (head dim
  // 256, from 1k on: up to 2%).
  template <class Ring, class Position>
  CUTE_DEVICE static void release_queries(Ring& ring, Position const& at) {
    release(ring, at);
    if constexpr (Traits::kInCluster) {
      if (threadIdx.x % 32 == 0) arrive_at_peer(ring.empty[at.stage]);
    }
  }
  // Says that the lanes of this warp have filled a stage.
  CUTE_DEVICE static void arrive(auto& full) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) full.arrive();
  }

  // The LSE of this thread's first column in a stage.
  template <class Coords>
  CUTE_DEVICE float first_lse(Coords const& cS, int stage) const {
    return (shared.lse_delta.lse + stage * kBlockM)[get<1>(cS(0))];
  }

  // S becomes P. first_lse: the LSE of this thread's first column, which has been loaded before S was waited
  // for.
  template <class Scores, class Coords>
  CUTE_DEVICE void compute_p(Scores& acc_s, Coords const& cS, int stage, float first_lse,
                             float scale_log2) const {
    if constexpr (Traits::kLseDeltaMma) {
      flash_cute::compute_p(acc_s, scale_log2);
    } else {
      auto const lse = of_query<QueryAxis::columns>(shared.lse_delta.lse + stage * kBlockM, cS);
      flash_cute::compute_p<QueryAxis::columns>(acc_s, scale_log2,
                                                [&](int col) { return col == 0 ? first_lse : lse(col); });
    }
  }

  // dP becomes dS.
  template <class Gradients, class Probabilities, class Coords>
  CUTE_DEVICE void compute_ds(Gradients& acc_ds, Probabilities const& acc_p, Coords const& cS,
                              int stage) const {
    if constexpr (Traits::kLseDeltaMma) {
      flash_cute::compute_ds(acc_ds, acc_p);
    } else {
      flash_cute::compute_ds<QueryAxis::columns>(
          acc_ds, acc_p, of_query<QueryAxis::columns>(shared.lse_delta.neg_delta + stage * kBlockM, cS));
    }
  }

  // Writes a warp's 16 rows of an accumulator, from column `first` on, to shared memory as TMA stores them.
  template <class LayoutRows, class Accumulator>
  CUTE_DEVICE static void stage(Element* rows, int lane, float scale, Accumulator const& acc, int first) {
    Tensor sRows = make_tensor(make_smem_ptr(rows), LayoutRows{});
    auto const values = row_col_view(acc);
    auto word = [&](int row, int col) {
      return pack<Element>(scale * values(row, col), scale * values(row, col + 1));
    };
    constexpr int kOwned = decltype(size<1>(sRows))::value / 4;  // columns of a lane
    CUTE_UNROLL
    for (int i = 0; i < kOwned; i += 4) {  // 16 columns
      auto& target = sRows(lane % 16, 4 * i + lane / 16 * 8);
      int const col = first / 4 + i;
      SM90_U32x4_STSM_N::copy(word(0, col), word(1, col), word(0, col + 2), word(1, col + 2),
                              reinterpret_cast<uint128_t&>(target));
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
  }

  // The shared memory for this warp's rows of dK or dV: where it stages dQ, or in a cluster the memory of an
  // operand that the tile does not need any more.
  template <int kWarpFloats>
  CUTE_DEVICE float* output_smem() const {
    if constexpr (!Traits::kInCluster) {
      return shared.dq + (warpgroup * 4 + thread / 32) * Traits::kDqWarpFloats;
    } else {
      return reinterpret_cast<float*>(warpgroup == 0 ? shared.v : shared.peer_k) + thread / 32 * kWarpFloats;
    }
  }

  // Stores this warp's 16 rows of dK or dV, as many columns at a time as fit in shared memory, or all at
  // once. With GQA splits the rows are added to sums instead.
  template <KvGradient which, bool kAllFit = false, class Accumulator>
  CUTE_DEVICE void store(KvTile const& tile, Accumulator const& acc) const {
    if constexpr (Traits::kPartsOfGroups) {
      // The second condition is always true, but without it the main loop of head dim 128 has more spills.
      if (Traits::kInCluster || params.workspace.gqa.sums) {
        using Sums = GqaSums<Traits>;
        int const index = shared.sum_indices[&tile - shared.tiles];
        int const rank = Traits::kInCluster ? read_cluster_rank() : 0;
        Sums::add(Sums::of(params, which, index, rank, key_thread()), acc);
        return;
      }
    }
    constexpr bool is_dk = which == KvGradient::dk;
    CUtensorMap const& map = is_dk ? maps.dk : maps.dv;
    int const entry_rows = is_dk ? maps.entry_rows.dk : maps.entry_rows.dv;
    float const scale = factor_of<Traits>(params, which);
    // The lane is read here, so that no address is kept in registers through the main loop.
    int const lane = read_lane_index();
    constexpr int kWidth = is_dk ? Traits::kHeadDim : Traits::kHeadDimV;
    constexpr int kColumns = is_dk ? Traits::kStoreColumnsK : Traits::kStoreColumnsV;
    constexpr int kParts = kWidth / kColumns, kWarpFloats = Traits::kWarpRows * kColumns / 2;
    float* const memory = output_smem<kWarpFloats>();
    TmaCoord const coord = TmaCoord::of_keys(params.lengths.given, tile, entry_rows);
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      auto* const rows = reinterpret_cast<Element*>(memory + (kAllFit ? part * 4 * kWarpFloats : 0));
      if (!kAllFit && lane == 0) cute::tma_store_wait<0>();  // the store before has read the memory
      __syncwarp();
      stage<typename Traits::template LayoutWarpRows<kColumns>>(rows, lane, scale, acc, part * kColumns);
      if (lane == 0) {
        store_panels<kColumns, Traits::kPanel, Traits::kWarpRows>(
            map, rows, part * kColumns, tile.head_kv,
            coord.shift + first_own_key<Traits>(tile) + key_warp() * Traits::kWarpRows, coord.plane,
            coord.bound);
      }
    }
  }
};

}  // namespace flash_cute
