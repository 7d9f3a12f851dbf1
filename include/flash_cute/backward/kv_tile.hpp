// The tile of the backward: a block of keys (N block) that a thread block keeps while it walks over the
// blocks of queries (M blocks) that see it.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/core/family.hpp"

namespace flash_cute {

// The M block that a KV tile begins with: the first or the last that sees it, or the one whose rows have the
// numbers of the tile's keys.
enum class QueryStart : unsigned char { first, last, own };

// A block of keys of one KV head of a sequence.
struct KvTile {
  Sequence sequence;
  int pair;                     // the number of the (sequence, KV head) pair among all pairs
  int batch, head_kv, n_begin;  // batch is 0 where sequences are packed
  int first_block;              // the number of the sequence's first M block in a head (see BatchBlocks)
  int q_blocks_of_head;         // how many M blocks a head has in the whole batch
  bool descending = false;      // do later N blocks of the sequence come before this one in the launch order?
  QueryStart start = QueryStart::first;

  // The number of the sequence's M block `block` among the M blocks of all heads: the index of its LSE, delta
  // and dQ accumulator in the workspace.
  FLASH_CUTE_HOST_DEVICE int64_t block_index(int head, int block) const {
    return int64_t(head) * q_blocks_of_head + first_block + block;
  }
};
static_assert(sizeof(KvTile) % 8 != 0, "ptxas would read the mask as vectors in each step: 1 to 2% (d64)");

// The tile of the Ampere family's split mainloop. It is kept in shared memory, so that first_row takes no
// register.
struct TwoRoleKvTile : KvTile {
  int first_row;  // the first query that sees a key

  TwoRoleKvTile() = default;
  FLASH_CUTE_HOST_DEVICE TwoRoleKvTile(KvTile const& tile)
      : KvTile(tile), first_row(tile.sequence.mask.fully_masked_rows()) {}
};

// The mask of S^T, whose rows are keys. Keys past the end of the sequence are seen by no query.
struct TransposedMask {
  WindowMask transposed;

  FLASH_CUTE_HOST_DEVICE int first_key(int key) const { return transposed.first_key(key); }
  FLASH_CUTE_HOST_DEVICE int end_key(int key) const {
    return key < transposed.seqlen_q ? transposed.end_key(key) : 0;
  }
};

// The sequence as a family's kernels see it. Tensor maps clip rows at the end of a sequence only, so for the
// Hopper family fully masked queries, which come first, are cut off the sequence; if that leaves no query,
// the sequence has no keys either.
template <Family family, class Params>
FLASH_CUTE_HOST_DEVICE Sequence sequence_for(Params const& params, WindowMask const& mask, int b) {
  Sequence s = sequence(params.shape, params.lengths, mask, b);
  if constexpr (traits_of(family).cuts_masked_rows) {
    int const fully_masked = s.mask.fully_masked_rows();
    s.queries.begin += fully_masked;
    s.used -= fully_masked;
    s.mask.seqlen_q -= fully_masked;
    if (s.mask.seqlen_q == 0) s.mask.seqlen_k = 0;
  }
  return s;
}

}  // namespace flash_cute
