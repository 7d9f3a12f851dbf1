// Which block of keys comes at which place of the launch order, and the steps over the queries that see it.
#pragma once

#include "flash_cute/attention/scheduler.hpp"
#include "flash_cute/backward/key_tile.hpp"

namespace flash_cute {

// Of sequences that are alike the blocks of keys go as those of queries do in the forward: longest first, in
// sections. Else sequence by sequence, as BlockPlaces numbers them.
struct KeyOrder {
  TileOrder dense;
  int tiles;
  int block_m, block_n;

  FLASH_CUTE_HOST_DEVICE KeyTile operator()(BackwardParams const& params, int index) const {
    ProblemShape const& shape = params.shape;
    int const* const offsets_q = params.lengths.cu_seqlens_q;
    BlockPlaces const queries{offsets_q, shape.seqlen_q, shape.batch, block_m};
    KeyTile tile{.sequence = {}, .batch = 0, .head_kv = 0, .n_begin = 0, .first_place = 0, .places = 0};
    int b = 0;
    if (params.lengths.given) {
      BlockPlaces const keys{params.lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, block_n};
      auto const [head_kv, place] = keys.of_block(index);
      b = keys.sequence(place);
      tile.head_kv = head_kv;
      tile.n_begin = (place - keys.first(b)) * block_n;
    } else {
      TileCoord const found = dense(index);
      b = found.batch;
      tile.head_kv = found.head_kv;
      tile.n_begin = found.m_begin;
      tile.descending = dense.descending;
    }
    tile.sequence = sequence_for<Family::sm90>(params, b);
    tile.batch = offsets_q ? 0 : b;
    tile.first_place = queries.first(b);
    tile.places = queries.count();
    return tile;
  }
};

// Where sums of dQ lie: those of a tile's heads of queries.
struct SumPlaces {
  int first_head;
  int entry, slot = 0;  // among all heads of K and V
  int uses_before = 0, blocks_of_use = 0;  // of the slot, and the blocks of queries that leave it in each use
  bool used_again = false;
  int64_t first, of_head;

  FLASH_CUTE_HOST_DEVICE SumPlaces(BackwardParams const& params, KeyTile const& tile, int block_m) {
    int const slots = params.workspace.slots.count, heads = params.shape.heads_q / params.shape.heads_kv;
    first_head = tile.head_kv * heads;
    first = int64_t(first_head) * tile.places + tile.first_place;
    of_head = tile.places;
    entry = tile.batch * params.shape.heads_kv + tile.head_kv;
    if (slots == 0) return;
    uses_before = entry / slots;
    slot = entry - uses_before * slots;
    used_again = entry + slots < params.shape.batch * params.shape.heads_kv;
    blocks_of_use = heads * ceil_div(tile.sequence.used, block_m);
    of_head = ceil_div(params.shape.seqlen_q, block_m);
    first = int64_t(slot) * heads * of_head;
  }

  FLASH_CUTE_HOST_DEVICE int64_t of(int head, int block) const {
    return first + (head - first_head) * of_head + block;
  }
};

// The blocks of queries that see a block of keys, of one head after the other of those that share it. The
// last one comes first: under a causal mask all blocks of keys begin with it, so they read the same Q and dO
// at one time, and where they add in turns, each is a step behind the one before it, not two.
struct QuerySteps {
  BlockRange visited;
  int head, block, left;

  FLASH_CUTE_HOST_DEVICE QuerySteps(KeyTile const& tile, int heads, int block_m, int block_n)
      : visited(tile.sequence.mask.visited_rows(tile.n_begin, block_n, block_m)),
        head(tile.head_kv * heads),
        block(visited.end - 1),
        left(visited.empty() ? 0 : heads * (visited.end - visited.begin)) {}

  FLASH_CUTE_HOST_DEVICE void advance() {
    --left;
    if (--block < visited.begin) {
      block = visited.end - 1;
      ++head;
    }
  }
};

}  // namespace flash_cute
