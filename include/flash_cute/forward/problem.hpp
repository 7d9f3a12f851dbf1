// What a kernel of the forward asks of the batch: which tile a number is, and of a tile its mask, its blocks
// of keys and where its rows lie. The mask is a part of it; schedulers know only numbers of tiles.
#pragma once

#include <type_traits>

#include "flash_cute/attention/keys/dense.hpp"
#include "flash_cute/attention/keys/paged.hpp"
#include "flash_cute/attention/keys/varlen.hpp"
#include "flash_cute/attention/kv_blocks.hpp"
#include "flash_cute/attention/mask/ranges.hpp"
#include "flash_cute/attention/mask/shifted.hpp"
#include "flash_cute/forward/partial.hpp"
#include "flash_cute/scheduler/split_order.hpp"
#include "flash_cute/scheduler/tile_order.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

// All sequences have the lengths that the shape says.
template <class Mask_>
struct UniformProblem {
  using Mask = Mask_;
  using Tile = TileCoord;
  static constexpr bool kVarlen = false, kSplits = false, kRanges = false;
  TileOrder order;
  Mask limits;
  DenseRows operands;

  FLASH_CUTE_HOST_DEVICE PackedRows const& rows() const { return order.rows; }
  FLASH_CUTE_HOST_DEVICE Tile tile(int index) const { return order(index); }
  FLASH_CUTE_HOST_DEVICE Mask const& mask(Tile const&) const { return limits; }

  // The offset of the LSE of the tile's head and of its sequence's first query.
  FLASH_CUTE_HOST_DEVICE int64_t lse_offset(ForwardParams const& params, Tile const& tile) const {
    return (int64_t(tile.batch) * params.shape.heads_q + tile.head) * params.shape.seqlen_q;
  }

  // Of a persistent kernel, which keeps a list of sequences that differ in shared memory.
  template <class List>
  FLASH_CUTE_HOST_DEVICE int tiles(List const&) const {
    return order.tiles();
  }
  template <class List>
  FLASH_CUTE_HOST_DEVICE Tile tile(List const&, int index) const {
    return order(index);
  }
  template <class List>
  FLASH_CUTE_HOST_DEVICE Tile first_tile(List const&, int block) const {
    return order(block);
  }
};

// Sequences differ in length, as the device alone knows.
template <class Mask_, class Order_ = VarlenOrder, class Operands_ = VarlenRows, class Tile_ = VarlenTile>
struct VarlenProblem {
  using Mask = Mask_;
  using Order = Order_;
  using Tile = Tile_;
  static constexpr bool kVarlen = true, kSplits = Order::kSplits, kRanges = false;
  Order order;
  Mask limits;
  Operands_ operands;

  FLASH_CUTE_HOST_DEVICE PackedRows const& rows() const { return order.rows; }
  FLASH_CUTE_HOST_DEVICE Tile tile(int index) const { return order(index); }
  FLASH_CUTE_HOST_DEVICE auto mask(Tile const& tile) const {
    auto const own = limits.of_lengths(tile.seqlen_q, tile.seqlen_k);
    if constexpr (kSplits) {
      return ShiftedMask(own, tile.k_first);
    } else {
      return own;
    }
  }
  FLASH_CUTE_HOST_DEVICE int64_t lse_offset(ForwardParams const& params, Tile const& tile) const {
    return tile.batch * params.lse_batch_stride + int64_t(tile.head) * params.shape.seqlen_q + tile.q_begin;
  }

  template <class List>
  FLASH_CUTE_HOST_DEVICE int tiles(List const& list) const {
    return list.tiles(order);
  }
  template <class List>
  FLASH_CUTE_HOST_DEVICE Tile tile(List const& list, int index) const {
    return list.tile(order, index);
  }
  template <class List>
  FLASH_CUTE_HOST_DEVICE Tile first_tile(List const& list, int block) const {
    return list.first_tile(order, block);
  }
};

// The same, where sequences are cut into parts of their keys, which may lie in pages.
template <class Mask>
struct SplitProblem : VarlenProblem<Mask, SplitOrder, PagedRows, PartTile> {
  PartialResults partial;
  ProblemShape shape;
  LengthParams lengths;

  using VarlenProblem<Mask, SplitOrder, PagedRows, PartTile>::tile;
  template <class List>
  FLASH_CUTE_HOST_DEVICE PartTile tile(List const& list, int index) const {
    return list.tile(*this, index);
  }
  template <class List>
  FLASH_CUTE_HOST_DEVICE PartTile first_tile(List const& list, int block) const {
    return list.first_tile(*this, block);
  }
};

// A sequence that is cut into parts, as their kernels see it: keys are counted from its first row, and those
// that no query can reach are hidden.
struct SequenceOfParts {
  struct Result {
    Rows queries;
    int used, k_begin;
    ShiftedMask<WindowMask> mask;
  };
  template <class Params>
  FLASH_CUTE_HOST_DEVICE Result operator()(Params const& params, WindowMask const& limits, int b) const {
    SplitSequence const s = SplitOrder::sequence_of(params, limits, b);
    return {s.queries, s.used, s.k_begin - s.k_first, ShiftedMask(s.mask, s.k_first)};
  }
};

// The same as another problem, where each query has key ranges beside the window, whose table is made before.
template <class Problem>
struct WithRanges : Problem {
  using WithoutRanges = Problem;
  using Tile = typename Problem::Tile;
  using SequenceOf = std::conditional_t<Problem::kSplits, SequenceOfParts, WholeSequence>;
  static constexpr bool kRanges = true;
  RangeTable table;

  FLASH_CUTE_HOST_DEVICE RangesMask mask(Tile const& tile) const {
    return {tile.seqlen_q, tile.seqlen_k, table.count, table.rows_of(tile.batch, tile.q_begin)};
  }
  FLASH_CUTE_HOST_DEVICE RangeKvBlocks kv_blocks(Tile const& tile) const {
    int const m_block = table.m_block(tile.batch, tile.m_begin);
    BlockBits const* const bits = table.key_bits_of(m_block);
    if constexpr (Problem::kSplits) {
      return {bits, BlockRange{tile.block_begin, tile.block_end}};
    } else {
      return {bits, table.words, table.visited_by(m_block)};
    }
  }
};
template <class Mask>
using RangesProblem = WithRanges<VarlenProblem<Mask>>;
template <class Mask>
using SplitRangesProblem = WithRanges<SplitProblem<Mask>>;

// The blocks of keys that the queries of a tile see, of those of its part.
template <int kBlockN, class Mask, class Tile>
FLASH_CUTE_HOST_DEVICE BlockRange visited_blocks(Mask const& mask, int tile_queries, Tile const& tile) {
  BlockRange const visited = mask.visited(tile.m_begin, tile_queries, kBlockN);
  if constexpr (std::is_base_of_v<PartTile, Tile>) {
    return {larger(visited.begin, tile.block_begin), smaller(visited.end, tile.block_end)};
  } else {
    return visited;
  }
}

// The blocks of keys that a tile of queries computes: those that its queries see, or one block that is hidden
// from them all.
template <int kBlockN, class Problem>
FLASH_CUTE_HOST_DEVICE auto kv_blocks_of(Problem const& problem, typename Problem::Tile const& tile) {
  if constexpr (Problem::kRanges) {
    return problem.kv_blocks(tile);
  } else {
    BlockRange const visited =
        visited_blocks<kBlockN>(problem.mask(tile), problem.rows().tile_queries(), tile);
    int hidden = 0;
    if constexpr (Problem::kSplits) hidden = tile.block_begin;
    return KvBlocks(visited.empty() ? BlockRange{hidden, hidden + 1} : visited);
  }
}

}  // namespace flash_cute
