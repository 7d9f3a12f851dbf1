// The tile scheduler of the backward: the launch order of KV tiles, the walk of a tile over M blocks, and the
// order in which the Hopper family converts dQ.
#pragma once

#include "flash_cute/attention/mask/block_table.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/scheduler/tile_order.hpp"

namespace flash_cute {

// The Ampere family's order for sequences that differ in length: head by head, and within a head sequence by
// sequence, with the block numbers that varlen_prepare computed.
FLASH_CUTE_HOST_DEVICE TileCoord varlen_kv_tile(BackwardParams const& params, int block_n, int index) {
  int const* const first = params.workspace.varlen.kv_block_offsets;
  int const batch = params.shape.batch, blocks_of_head = first[batch], head_kv = index / blocks_of_head;
  int const block_of_head = index - head_kv * blocks_of_head;
  int const b = last_beginning_before(block_of_head, batch, [&](int sequence) { return first[sequence]; });
  return {.m_begin = (block_of_head - first[b]) * block_n, .head = 0, .head_kv = head_kv, .batch = b};
}

// The Hopper family's scheduler. KV tiles of sequences that differ in length go sequence by sequence, and
// within a sequence head by head.
struct KvTileScheduler {
  TileOrder uniform;  // the order where all sequences have the same number of N blocks
  int tiles;
  int block_m, block_n;
  QueryStart start;
  WindowMask mask;

  FLASH_CUTE_HOST_DEVICE int count(BackwardParams const& params) const {
    if (!params.lengths.given) return tiles;
    return params.shape.heads_kv * params.workspace.varlen.kv_block_offsets[params.shape.batch];
  }

  FLASH_CUTE_HOST_DEVICE KvTile operator()(BackwardParams const& params, int index) const {
    ProblemShape const& shape = params.shape;
    int const* const offsets_q = params.lengths.cu_seqlens_q;
    BatchBlocks const queries{offsets_q, shape.seqlen_q, shape.batch, block_m};
    KvTile tile{};
    int b = 0;
    if (params.lengths.given && !*params.workspace.varlen.is_uniform) {
      int const* const first = params.workspace.varlen.kv_block_offsets;
      int const heads = shape.heads_kv;
      b = last_beginning_before(index / heads, shape.batch, [&](int sequence) { return first[sequence]; });
      int const of_sequence = index - first[b] * heads, blocks = first[b + 1] - first[b];
      tile.head_kv = of_sequence / blocks;
      tile.n_begin = (of_sequence - tile.head_kv * blocks) * block_n;
    } else {
      TileCoord const found = uniform(index);
      b = found.batch;
      tile.head_kv = found.head_kv;
      tile.n_begin = found.m_begin;
      tile.descending = uniform.descending;
    }
    // Tiles whose additions to dQ are ordered begin with the queries that they have in common under a causal
    // mask. So each tile is one step after the tile before it; from the other end it would be two.
    bool const from_other_end = start == QueryStart::last && tile.descending;
    tile.start = from_other_end ? QueryStart::first : start;
    tile.sequence = sequence_for<Family::sm90>(params, mask, b);
    tile.pair = b * shape.heads_kv + tile.head_kv;
    tile.batch = offsets_q ? 0 : b;
    tile.first_block = queries.first(b);
    tile.q_blocks_of_head = queries.count();
    return tile;
  }
};

// The Ampere family's scheduler, with one tile for each thread block. There may be fewer tiles than thread
// blocks; the others get kNoTile.
struct KvTileSchedulerSm80 {
  TileOrder uniform;  // the order where all sequences have the same number of N blocks
  WindowMask mask;

  // The block sizes are arguments so that they are constants in the kernel.
  FLASH_CUTE_HOST_DEVICE TileCoord coord(BackwardParams const& params, int block_n, int index) const {
    ProblemShape const& shape = params.shape;
    BackwardWorkspace const& workspace = params.workspace;
    if (workspace.varlen.kv_block_offsets) {
      bool const is_uniform = *workspace.varlen.is_uniform;
      int const tiles =
          is_uniform ? uniform.tiles() : shape.heads_kv * workspace.varlen.kv_block_offsets[shape.batch];
      if (index >= tiles) return {.m_begin = kNoTile, .head = 0, .head_kv = 0, .batch = 0};
      if (!is_uniform) return varlen_kv_tile(params, block_n, index);
    }
    return uniform(index);
  }

  FLASH_CUTE_HOST_DEVICE KvTile operator()(BackwardParams const& params, int block_m, int block_n,
                                           int index) const {
    ProblemShape const& shape = params.shape;
    int const* const offsets_q = params.lengths.cu_seqlens_q;
    BatchBlocks const queries{offsets_q, shape.seqlen_q, shape.batch, block_m};
    TileCoord const found = coord(params, block_n, index);
    return {.sequence = sequence_for<Family::sm80>(params, mask, found.batch),
            .pair = found.batch * shape.heads_kv + found.head_kv,
            .batch = offsets_q ? 0 : found.batch,
            .head_kv = found.head_kv,
            .n_begin = found.m_begin,
            .first_block = queries.first(found.batch),
            .q_blocks_of_head = queries.count()};
  }
};

// How many N blocks of a sequence have a key.
template <Family family, class Params>
FLASH_CUTE_HOST_DEVICE int kv_blocks(Params const& params, WindowMask const& mask, int b, int block_n) {
  return ceil_div(sequence_for<family>(params, mask, b).mask.seqlen_k, block_n);
}

// What a block of queries asks of its sequence.
struct QuerySequence {
  int index, first_block, begin, used;
};

// The sequence of an M block, given by its number in a head.
FLASH_CUTE_HOST_DEVICE QuerySequence sequence_at(BackwardParams const& params, WindowMask const& mask,
                                                 BatchBlocks const& queries, int block_of_head) {
  int const b = queries.sequence(block_of_head);
  Sequence const s = sequence_for<Family::sm90>(params, mask, b);
  return {.index = b, .first_block = queries.first(b), .begin = s.queries.begin, .used = s.used};
}

// The batch entry of tensors that holds the sequence.
FLASH_CUTE_HOST_DEVICE int entry_of(BackwardParams const& params, QuerySequence const& s) {
  return params.lengths.cu_seqlens_q ? 0 : s.index;
}

// The order in which the Hopper family's main kernel converts M blocks of dQ: all blocks of one (sequence, KV
// head) pair after those of the pair before it, in the order in which KvTileScheduler comes to the pairs.
// Block numbers that a packed sequence does not use come after the blocks of all its heads.
struct DqConvertOrder {
  BackwardParams const& params;
  WindowMask const& mask;
  BatchBlocks queries;

  struct Block {
    QuerySequence sequence;
    int pair, head;
    int block_of_head;  // the number of the M block in its head
    int begin;          // its first row in the sequence
    bool exists;        // does it have rows?
  };

  FLASH_CUTE_HOST_DEVICE int count() const { return params.shape.heads_q * queries.count(); }
  FLASH_CUTE_HOST_DEVICE Block operator()(int index) const {
    int const heads_q = params.shape.heads_q, heads_kv = params.shape.heads_kv, heads = heads_q / heads_kv;
    Block block{};
    block.sequence = sequence_at(params, mask, queries, index / heads_q);
    int const first = block.sequence.first_block, of_sequence = index - first * heads_q;
    int const of_head_kv = of_sequence / heads, blocks = blocks_of(block.sequence),
              head_kv = of_head_kv / blocks;
    block.block_of_head = first + of_head_kv - head_kv * blocks;
    block.pair = block.sequence.index * heads_kv + head_kv;
    block.head = head_kv * heads + of_sequence - of_head_kv * heads;
    block.begin = (block.block_of_head - block.sequence.first_block) * queries.block;
    block.exists = of_sequence >= 0 && head_kv < heads_kv && has_rows(block.begin, block.sequence.used);
    return block;
  }

 private:
  FLASH_CUTE_HOST_DEVICE int blocks_of(QuerySequence const& s) const {
    return queries.offsets ? larger(1, ceil_div(s.used, queries.block)) : queries.of_one();
  }
};

// The walk of a KV tile over the M blocks that see it, for one query head after the other of those that share
// the KV head. In each head it begins at block `start` and wraps around at the end of the range.
struct QBlockIterator {
  BlockRange visited;
  bool backwards;
  int start, head, block;
  int left;  // how many steps are left, the current one included

  FLASH_CUTE_HOST_DEVICE QBlockIterator(KvTile const& tile, int heads, int block_m, int block_n)
      : visited(tile.sequence.mask.visited_rows(tile.n_begin, block_n, block_m)),
        backwards(tile.start == QueryStart::last),
        start(first(tile, block_m)),
        head(tile.head_kv * heads),
        block(start),
        left(visited.empty() ? 0 : heads * (visited.end - visited.begin)) {}

  // full_blocks: the blocks that need no element test.
  FLASH_CUTE_HOST_DEVICE bool is_full(BlockRange const& full_blocks) const {
    return full_blocks.contains(block);
  }
  FLASH_CUTE_HOST_DEVICE void advance() {
    --left;
    block += backwards ? -1 : 1;
    if (block < visited.begin) block = visited.end - 1;
    if (block == visited.end) block = visited.begin;
    if (block == start) ++head;
  }

 private:
  FLASH_CUTE_HOST_DEVICE int first(KvTile const& tile, int block_m) const {
    if (backwards) return visited.end - 1;
    if (tile.start == QueryStart::first) return visited.begin;
    return larger(visited.begin, smaller(visited.end - 1, tile.n_begin / block_m));
  }
};

// As QBlockIterator, by a table. A tile that no query sees has a step in which all pairs are hidden.
// Memory is read once for every 32 blocks.
struct TableQBlockIterator {
  TableQueryBlocks visited;
  int first, head, block, left;
  BlockBits of_chunk;  // with those blocks alone that the walk has not passed

  FLASH_CUTE_HOST_DEVICE TableQBlockIterator(TableQueryBlocks const& visited_, KvTile const& tile, int heads)
      : visited(visited_),
        first(larger(0, visited.first())),
        head(tile.head_kv * heads),
        block(first),
        left(heads * larger(1, visited.count())),
        of_chunk(visited.of_chunk(first / BlockBits::kBlocks)) {}

  FLASH_CUTE_HOST_DEVICE bool is_full(FullInTable) const {
    return of_chunk.full >> block % BlockBits::kBlocks & 1;
  }
  FLASH_CUTE_HOST_DEVICE void advance() {
    --left;
    of_chunk.visited &= ~(1u << block % BlockBits::kBlocks);
    int chunk = block / BlockBits::kBlocks;
    while (of_chunk.visited == 0 && ++chunk * BlockBits::kBlocks < visited.blocks) {
      of_chunk = visited.of_chunk(chunk);
    }
    block = chunk * BlockBits::kBlocks + lowest_bit(of_chunk.visited);
    if (of_chunk.visited != 0) return;
    block = first;
    of_chunk = visited.of_chunk(first / BlockBits::kBlocks);
    ++head;
  }
};

}  // namespace flash_cute
