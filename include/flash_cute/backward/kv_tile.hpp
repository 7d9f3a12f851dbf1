// A block of keys, which a thread block of the backward keeps, and the queries that pass by it.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/sequence.hpp"

namespace flash_cute {

// Which block of queries a block of keys begins with: the first or the last that sees it, or the one of its
// own number.
enum class QueryStart : unsigned char { first, last, own };

// A block of keys of one head, and the blocks of queries of its sequence.
struct KvTile {
  Sequence sequence;
  int pair, batch, head_kv, n_begin;  // pair: of a sequence and a head of K and V, among all
  int first_block, places;            // of the sequence's blocks of queries, and of all (see BatchBlocks)
  bool descending = false;            // do the blocks of keys behind it come before it in the launch order?
  QueryStart start = QueryStart::first;

  // Of a block of its queries among those of all heads.
  FLASH_CUTE_HOST_DEVICE int64_t place(int head, int block) const {
    return int64_t(head) * places + first_block + block;
  }
};
static_assert(sizeof(KvTile) % 8 != 0, "ptxas would read the mask as vectors in each step: 1 to 2% (d64)");

// In the Ampere family where halves of a thread block split the work: kept in shared memory, so that this
// takes no register.
struct SplitKvTile : KvTile {
  int first_row;  // that sees a key

  SplitKvTile() = default;
  FLASH_CUTE_HOST_DEVICE SplitKvTile(KvTile const& tile)
      : KvTile(tile), first_row(tile.sequence.mask.fully_masked_rows()) {}
};

// The mask seen from the keys, which are rows here; those past the end see nobody.
struct TransposedMask {
  WindowMask transposed;

  FLASH_CUTE_HOST_DEVICE int first_key(int key) const { return transposed.first_key(key); }
  FLASH_CUTE_HOST_DEVICE int end_key(int key) const {
    return key < transposed.seqlen_q ? transposed.end_key(key) : 0;
  }
};

// The sequence as a family's kernels see it. The Hopper family's tensor maps clip at ends only, so its
// queries are those that see a key: the fully_masked ones before them are no part of it, and without any it
// has no keys either.
template <Family family, class Params, class Mask>
FLASH_CUTE_HOST_DEVICE Sequence sequence_for(Params const& params, Mask const& mask, int b) {
  Sequence s = sequence(params.shape, params.lengths, mask, b);
  if constexpr (family == Family::sm90) {
    int const fully_masked = s.mask.fully_masked_rows();
    s.queries.begin += fully_masked;
    s.used -= fully_masked;
    s.mask.seqlen_q -= fully_masked;
    if (s.mask.seqlen_q == 0) s.mask.seqlen_k = 0;
  }
  return s;
}

}  // namespace flash_cute
