// The producer warp of the Hopper family's forward: it loads Q once a tile, K and V block by block, as far
// ahead as there are free stages.
#pragma once

#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/forward/sm90/traits.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

template <TmaOperand operand>
using OperandConstant = std::integral_constant<TmaOperand, operand>;

template <class Traits>
struct ForwardProducerSm90 {
  static constexpr int kWarps = 1, kArrivals = 1;  // that go through the tiles; of a stage of K or V
  static constexpr OperandConstant<TmaOperand::q> kOperandQ{};
  static constexpr OperandConstant<TmaOperand::k> kOperandK{};
  static constexpr OperandConstant<TmaOperand::v> kOperandV{};
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  ForwardMaps const& maps;
  PipelineState<Traits::kStagesQ> at_q{};
  PipelineState<Traits::kStages> at_k{}, at_v{};
  PipelineState<larger(1, Traits::PairTiles::kBiasStages)> at_bias{};

  template <class Tiles>
  CUTE_DEVICE void run(Tiles tiles) {
    auto tile = tiles.first();
    for (int remaining = tiles.count();;) {
      auto const upcoming = load(tile, tiles);
      if (tiles.done(remaining)) return;
      tile = tiles.get(upcoming);
    }
  }

 private:
  template <class Tile, class Tiles>
  CUTE_DEVICE auto load(Tile const& tile, Tiles& tiles) {
    auto const& source = tiles.source;
    PackGqa const& rows = source.rows();
    auto blocks = kv_blocks_of<Traits::kBlockN>(source, tile);

    auto load_rows = [&]<TmaOperand operand, int kRows>(OperandConstant<operand>, Int<kRows>,
                                                        CUtensorMap const& map, auto& full, auto* target,
                                                        int used, int head, int row) {
      constexpr int kColumns = operand == TmaOperand::v ? Traits::kHeadDimV : Traits::kHeadDim;
      source.operands.template visit_coords<operand>(tile, row, [&](auto... coords) {
        load_panels<kColumns, Traits::kPanel, kRows>(map, full, target, used, 0, head, coords...);
      });
    };
    auto load_kv = [&](auto operand, CUtensorMap const& map, auto& ring, auto& at, auto* stage, int block) {
      load_rows(operand, Int<Traits::kBlockN>{}, map, ring.acquire(at), stage, Traits::kBlockN, tile.head_kv,
                block * Traits::kBlockN);
      at.advance();
    };
    auto load_k = [&](int block) {
      load_kv(kOperandK, maps.k, shared.ring_k, at_k, shared.k + at_k.stage * Traits::kStageElementsK, block);
    };
    auto load_v = [&](int block) {
      load_kv(kOperandV, maps.v, shared.ring_v, at_v, shared.v + at_v.stage * Traits::kStageElementsV, block);
    };

    ScorePlace place{};
    int bias_entry = 0;
    if constexpr (Traits::PairTiles::kBiasStages > 0) {
      place = source.place(tile);
      bias_entry = place.sequence / params.scores.bias.sequences_of_entry;
    }
    auto load_bias = [&](int block) {
      if constexpr (Traits::PairTiles::kBiasStages > 0) {
        BiasParams const& bias = params.scores.bias;
        if (!bias.is_tiled) return;
        using Pairs = typename Traits::PairTiles;
        for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
          load_panels<Traits::kBlockN, 64, kWarpgroupRows>(
              maps.bias, shared.pairs.ring_bias[consumer].acquire(at_bias),
              shared.pairs.bias + Pairs::tile(at_bias.stage, consumer) * Pairs::kTileElements, kWarpgroupRows,
              place.key_begin + block * Traits::kBlockN, bias.head_stride == 0 ? 0 : tile.head,
              place.query_begin + tile.m_begin + consumer * rows.queries, bias_entry);
        }
        at_bias.advance();
      }
    };

    // In the order in which the consumers ask: they compute scores one block ahead of P V.
    load_k(blocks.block);
    auto* const stage_q = shared.q + at_q.stage * Traits::kStageElementsQ;
    CUTE_UNROLL
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      load_rows(kOperandQ, Int<Traits::kBlockM>{}, maps.q, shared.ring_q[consumer].acquire(at_q),
                stage_q + consumer * kWarpgroupRows * Traits::kPanel, rows.used(), tile.head,
                tile.m_begin + consumer * rows.queries);
    }
    at_q.advance();
    load_bias(blocks.block);
    auto const upcoming = tiles.next();
    int const requested_at = smaller(kRequestedAhead, blocks.remaining());
    do {
      bool const more = blocks.remaining() > 0;
      if (more) load_k(blocks.next());
      if (blocks.remaining() == requested_at) tiles.request();
      load_v(blocks.block);
      if (Traits::kTakesBiasTiles && more) load_bias(blocks.next());
    } while (blocks.advance());
    return upcoming;
  }
};

}  // namespace flash_cute
