// What a kernel of the forward asks of the batch: which tile a number is, and of a tile its mask, its blocks
// of keys and where its rows lie. The mask is a part of it; schedulers know only numbers of tiles.
#pragma once

#include <type_traits>

#include "flash_cute/attention/keys/dense.hpp"
#include "flash_cute/attention/keys/paged.hpp"
#include "flash_cute/attention/keys/varlen.hpp"
#include "flash_cute/attention/kv_blocks.hpp"
#include "flash_cute/attention/mask/mask_table.hpp"
#include "flash_cute/attention/mask/shifted.hpp"
#include "flash_cute/attention/scores/place.hpp"
#include "flash_cute/forward/kernel.hpp"
#include "flash_cute/forward/partial.hpp"
#include "flash_cute/scheduler/split_order.hpp"
#include "flash_cute/scheduler/tile_order.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

// All sequences have the lengths that the shape says.
struct UniformSource {
  using Tile = TileCoord;
  using Walk = KvBlocks;
  static constexpr bool kVarlen = false;
  TileOrder order;
  WindowMask limits;
  DenseCoords operands;

  FLASH_CUTE_HOST_DEVICE PackGqa const& rows() const { return order.rows; }
  FLASH_CUTE_HOST_DEVICE Tile tile(int index) const { return order(index); }
  FLASH_CUTE_HOST_DEVICE WindowMask const& mask(Tile const&) const { return limits; }

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
template <class Order_, class Operands, class Tile_>
struct ListedSource {
  using Order = Order_;
  using Tile = Tile_;
  using Walk = KvBlocks;
  static constexpr bool kVarlen = true;
  Order order;
  WindowMask limits;
  Operands operands;

  FLASH_CUTE_HOST_DEVICE PackGqa const& rows() const { return order.rows; }
  FLASH_CUTE_HOST_DEVICE Tile tile(int index) const { return order(index); }
  FLASH_CUTE_HOST_DEVICE WindowMask mask(Tile const& tile) const {
    return limits.of_lengths(tile.seqlen_q, tile.seqlen_k);
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
using VarlenSource = ListedSource<VarlenOrder, VarlenCoords, VarlenTile>;

// The same, where sequences are cut into splits of their keys, which may lie in pages.
struct SplitSource : ListedSource<SplitOrder, PagedCoords, SplitTile> {
  PartialResults partial;
  ProblemShape shape;
  LengthParams lengths;
  float* totals;  // see SplitTotal

  FLASH_CUTE_HOST_DEVICE ShiftedMask mask(Tile const& tile) const {
    return ShiftedMask(limits.of_lengths(tile.seqlen_q, tile.seqlen_k), tile.k_first);
  }
  using ListedSource::tile;
  template <class List>
  FLASH_CUTE_HOST_DEVICE SplitTile tile(List const& list, int index) const {
    return list.tile(*this, index);
  }
  template <class List>
  FLASH_CUTE_HOST_DEVICE SplitTile first_tile(List const& list, int block) const {
    return list.first_tile(*this, block);
  }
};

// A sequence as the kernel that makes a table sees it. Where it is cut into splits, keys are counted from its
// first row, and those that no query can reach are hidden.
template <class Source>
struct SequenceOf : WholeSequence {};
template <>
struct SequenceOf<SplitSource> {
  struct Result {
    RowRange queries;
    int used, k_begin;
    ShiftedMask mask;
  };
  template <class Params>
  FLASH_CUTE_HOST_DEVICE Result operator()(Params const& params, WindowMask const& limits, int b) const {
    SplitSequence const s = SplitOrder::sequence_of(params, limits, b);
    return {s.queries, s.used, s.k_begin - s.k_first, ShiftedMask(s.mask, s.k_first)};
  }
  FLASH_CUTE_HOST_DEVICE static int end_key(Result const& s) { return s.mask.first + s.mask.mask.seqlen_k; }
};

// The same as another source, where the mask is a table that is made before.
template <class Source>
struct WithTable : Source {
  using Tile = typename Source::Tile;
  using Walk = TableKvBlocks;
  MaskTable table;

  FLASH_CUTE_HOST_DEVICE TableMask mask(Tile const& tile) const {
    return table.mask(tile.batch, tile.head, tile.q_begin, tile.seqlen_q, tile.seqlen_k);
  }
  FLASH_CUTE_HOST_DEVICE ScorePlace place(Tile const& tile) const {
    int first_key = 0, key_begin = 0;
    if constexpr (std::is_base_of_v<SplitTile, Tile>) {
      first_key = tile.k_first;
    } else {
      key_begin = tile.k_begin - table.n_blocks.owned(tile.batch).begin;
    }
    return {.sequence = tile.batch,
            .head = tile.head,
            .diagonal = first_key + tile.seqlen_k - tile.seqlen_q,
            .queries = tile.seqlen_q,
            .query_begin = 0,
            .key_begin = key_begin};
  }
  FLASH_CUTE_HOST_DEVICE Walk walk(Tile const& tile) const {
    int const m_block = table.m_block(tile.batch, tile.head, tile.m_begin);
    BlockBits const* const bits = table.key_bits_of(m_block);
    if constexpr (std::is_base_of_v<SplitTile, Tile>) {
      return {bits, BlockRange{tile.block_begin, tile.block_end}};
    } else {
      return {bits, table.words, table.visited_by(m_block)};
    }
  }
};

// The source of a kernel.
template <ForwardKernel kernel>
using WindowSourceOf =
    std::conditional_t<kernel.keys == Keys::split, SplitSource,
                       std::conditional_t<kernel.seqlens == Seqlens::varlen, VarlenSource, UniformSource>>;
template <ForwardKernel kernel>
using SourceOf = std::conditional_t<kernel.masking == Masking::table, WithTable<WindowSourceOf<kernel>>,
                                    WindowSourceOf<kernel>>;

// The blocks of keys that the queries of a tile see, of those of its split.
template <int kBlockN, class Mask, class Tile>
FLASH_CUTE_HOST_DEVICE BlockRange visited_blocks(Mask const& mask, int tile_queries, Tile const& tile) {
  BlockRange const visited = mask.visited(tile.m_begin, tile_queries, kBlockN);
  if constexpr (std::is_base_of_v<SplitTile, Tile>) {
    return {larger(visited.begin, tile.block_begin), smaller(visited.end, tile.block_end)};
  } else {
    return visited;
  }
}

// The blocks of keys that a tile of queries computes: those that its queries see, or one block that is hidden
// from them all.
template <int kBlockN, class Source>
FLASH_CUTE_HOST_DEVICE auto kv_blocks_of(Source const& source, typename Source::Tile const& tile) {
  if constexpr (std::is_same_v<typename Source::Walk, KvBlocks>) {
    BlockRange const visited = visited_blocks<kBlockN>(source.mask(tile), source.rows().tile_queries(), tile);
    int hidden = 0;
    if constexpr (std::is_base_of_v<SplitTile, typename Source::Tile>) hidden = tile.block_begin;
    return KvBlocks(visited.empty() ? BlockRange{hidden, hidden + 1} : visited);
  } else {
    return source.walk(tile);
  }
}

}  // namespace flash_cute
