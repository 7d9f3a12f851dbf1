// A window of keys for each query: full and causal attention are windows, too.
#pragma once

#include <cstdint>

#include "flash_cute/attention/mask/block_range.hpp"
#include "flash_cute/core/platform.hpp"

namespace flash_cute {

// Bottom-right aligned window: row i sees column j iff i + shift - left <= j <= i + shift + right, where
// shift = seqlen_k - seqlen_q. Full attention is an unlimited window and causal one with right = 0, so that
// one kernel serves all three; limits never exceed what the sequence can use, which keeps the sums within
// int.
struct WindowMask {
  int seqlen_q, seqlen_k, left, right;

  // The same limits for a sequence of other lengths.
  FLASH_CUTE_HOST_DEVICE WindowMask of_lengths(int other_q, int other_k) const {
    return {other_q, other_k, left, right};
  }

  static WindowMask make(int seqlen_q, int seqlen_k, int64_t left, int64_t right) {
    int64_t const unlimited = int64_t(seqlen_q) + seqlen_k;
    return {seqlen_q, seqlen_k, int(smaller(left, unlimited)), int(smaller(right, unlimited))};
  }

  FLASH_CUTE_HOST_DEVICE int shift() const { return seqlen_k - seqlen_q; }

  FLASH_CUTE_HOST_DEVICE int first_key(int row) const { return larger(0, row + shift() - left); }
  FLASH_CUTE_HOST_DEVICE int end_key(int row) const { return smaller(seqlen_k, row + shift() + right + 1); }

  FLASH_CUTE_HOST_DEVICE bool visible(int row, int key) const {
    return first_key(row) <= key && key < end_key(row);
  }

  FLASH_CUTE_HOST_DEVICE bool is_fully_masked(int row) const { return end_key(row) <= first_key(row); }
  // The rows before this one see nothing, those from it on do (with no keys, none does).
  FLASH_CUTE_HOST_DEVICE int fully_masked_rows() const {
    return seqlen_k == 0 ? seqlen_q : smaller(seqlen_q, larger(0, -shift() - right));
  }

  // Blocks with at least one visible pair in the tile of rows [m_begin, m_begin + block_m).
  FLASH_CUTE_HOST_DEVICE BlockRange visited(int m_begin, int block_m, int block_n) const {
    int const begin = first_key(m_begin), end = end_key(last_row(m_begin, block_m));
    return end <= begin ? BlockRange{0, 0} : BlockRange{begin / block_n, ceil_div(end, block_n)};
  }

  // Blocks in which every pair of the tile is visible: these need no element test.
  FLASH_CUTE_HOST_DEVICE BlockRange full(int m_begin, int block_m, int block_n) const {
    int const begin = first_key(last_row(m_begin, block_m)), end = larger(0, end_key(m_begin));
    return {ceil_div(begin, block_n), end / block_n};
  }

  // The other way round: what queries are to keys here, keys are to queries there. Row i sees key j here iff
  // row j sees key i there.
  FLASH_CUTE_HOST_DEVICE WindowMask transposed() const { return {seqlen_k, seqlen_q, right, left}; }

  // The same with keys counted from this one on.
  FLASH_CUTE_HOST_DEVICE WindowMask from_key(int key) const {
    return {seqlen_q, seqlen_k - key, left, right};
  }

  // The queries that see a key are those from first_row to end_row - 1.
  FLASH_CUTE_HOST_DEVICE int first_row(int key) const { return transposed().first_key(key); }
  FLASH_CUTE_HOST_DEVICE int end_row(int key) const { return transposed().end_key(key); }

  // Blocks of queries with at least one visible pair in the tile of keys [n_begin, n_begin + block_n), and
  // those in which every pair of the tile is visible.
  FLASH_CUTE_HOST_DEVICE BlockRange visited_rows(int n_begin, int block_n, int block_m) const {
    return transposed().visited(n_begin, block_n, block_m);
  }
  FLASH_CUTE_HOST_DEVICE BlockRange full_rows(int n_begin, int block_n, int block_m) const {
    return transposed().full(n_begin, block_n, block_m);
  }

  // Keys below this one are seen by no query at all: the host cuts them off before the launch.
  FLASH_CUTE_HOST_DEVICE int first_reachable_key() const { return smaller(first_key(0), seqlen_k); }

  // Does the last tile of queries see as many keys as the first one, or more? And do all see as many?
  FLASH_CUTE_HOST_DEVICE bool is_longest_last() const { return left >= right; }
  FLASH_CUTE_HOST_DEVICE bool is_even() const { return left == right; }

  // Visible (query, key) pairs of one head; what FLOP counts are made of.
  int64_t visible_pairs() const {
    int64_t pairs = 0;
    for (int row = 0; row < seqlen_q; ++row) pairs += larger(0, end_key(row) - first_key(row));
    return pairs;
  }

 private:
  FLASH_CUTE_HOST_DEVICE int last_row(int m_begin, int block_m) const {
    return smaller(m_begin + block_m, seqlen_q) - 1;
  }
};

}  // namespace flash_cute
