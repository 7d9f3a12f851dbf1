// Where new keys and values go in a cache, and how they and their queries are rotated on the way, as plain
// structs without torch or CUDA.
#pragma once

#include "flash_cute/core/divisor.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

constexpr int kAppendChunkBytes = 16;  // a thread moves two of these of a row

// A new row, with its place in the cache.
struct NewToken {
  int entry, row;         // of k, v and q
  int sequence;           // -1: of none, or it is not known
  int page, row_in_page;  // of the cache; page < 0: it is not written
  int64_t position;       // for the rotation
};

// Rows of new keys, values and queries are tokens. A padded batch has as many for each entry; packed
// tokens are those of one entry.
struct NewTokens {
  int entries = 0;
  Divisor rows;  // of an entry: the larger number of rows_q and rows_k
  int rows_q = 0, rows_k = 0;
  int heads_q = 0, heads_kv = 0;
  int const* cu_seqlens = nullptr;  // (sequences + 1,) which tokens each sequence has; null: its entry's

  FLASH_CUTE_HOST_DEVICE int64_t count() const { return int64_t(entries) * rows.value; }
};

// Where a sequence's rows lie: in pages, or in its own entry, which is then the only page that it has.
struct CachePages {
  int sequences = 0;
  int const* cache_seqlens = nullptr;  // (sequences,) rows before the new ones; null: none
  int const* table = nullptr;          // (sequences, width) numbers of pages; null: a sequence has its entry
  int64_t table_stride = 0;
  int width = 1, pages = 0;
  Divisor page_size;
  int64_t const* slots = nullptr;  // (slot_count,) page x page_size + row of each token
  int64_t slot_count = -1;         // of 0 and more they take the others' place, also where slots is null

  FLASH_CUTE_HOST_DEVICE int64_t rows() const { return int64_t(pages) * page_size.value; }
};

// cos and sin are (positions, dim / 2), contiguous. Of a row the columns before dim are rotated: column i
// with i + dim / 2, or interleaved 2i with 2i + 1.
struct Rotary {
  void const *cos = nullptr, *sin = nullptr;
  int64_t const* positions = nullptr;  // of the tokens; null: their places in their sequences
  int64_t positions_stride = 0;        // from one entry to the next
  int64_t length = 0;                  // positions in the table; others are clamped to it
  int dim = 0;                         // 0: nothing is rotated
  bool interleaved = false;
  bool is_fp32 = false;  // the table's type, else it is that of the rows
};

struct AppendParams {
  NewTokens tokens;
  CachePages cache;
  Rotary rotary;
  int head_dim, head_dim_v;  // of q and k; of v
  Divisor pairs;             // of chunks in the widest row
  TensorView k, v, k_cache, v_cache;
  TensorView q, rotated_q;  // of tokens.heads_q > 0
  bool is_fp8 = false;      // the cache has codes of 8 bits, which times their scales are its numbers
  CacheScale k_scale, v_scale;
  DeviceInfo device;

  // Of a token: one for each pair of chunks of each row of q, k and v.
  FLASH_CUTE_HOST_DEVICE int items() const {
    return (tokens.heads_q + 2 * tokens.heads_kv) * int(pairs.value);
  }
};

// The last sequence that begins at the row or before, if it has the row; else -1. Each round asks for seven
// offsets at once, as they arrive late.
FLASH_CUTE_HOST_DEVICE int sequence_of_row(int const* cu_seqlens, int sequences, int row) {
  constexpr int kParts = 8;
  int low = 0, high = sequences;
  while (high - low > 1) {
    int const step = ceil_div(high - low, kParts);
    int before = 0;
    for (int part = 1; part < kParts; ++part) {
      int const sequence = low + part * step;
      before += sequence < high && cu_seqlens[sequence] <= row;
    }
    low += before * step;
    high = smaller(high, low + step);
  }
  return sequences > 0 && cu_seqlens[low] <= row && row < cu_seqlens[low + 1] ? low : -1;
}

// The token of a number from 0 to tokens.count() - 1.
FLASH_CUTE_HOST_DEVICE NewToken token_of(AppendParams const& params, int index) {
  NewTokens const& tokens = params.tokens;
  CachePages const& cache = params.cache;
  int const entry = tokens.rows.quotient(index), row = tokens.rows.remainder(index);
  NewToken token{entry, row, -1, -1, 0, 0};
  Rotary const& rotary = params.rotary;
  // Asked for before slots are looked at, so that both are on their way at once.
  int64_t const* const positions = rotary.dim > 0 ? rotary.positions : nullptr;
  int64_t const position = positions ? positions[entry * rotary.positions_stride + row] : 0;
  if (cache.slot_count >= 0) {
    int64_t const slot = row < cache.slot_count ? cache.slots[row] : -1;
    if (0 <= slot && slot < cache.rows()) {
      token.page =
          slot <= INT32_MAX ? cache.page_size.quotient(int(slot)) : int(slot / cache.page_size.value);
      token.row_in_page = int(slot - int64_t(token.page) * cache.page_size.value);
    }
  } else {
    int const sequence = tokens.cu_seqlens ? sequence_of_row(tokens.cu_seqlens, cache.sequences, row) : entry;
    token.sequence = sequence;
    if (sequence >= 0) {
      int const begin = tokens.cu_seqlens ? tokens.cu_seqlens[sequence] : 0;
      token.position = int64_t(cache.cache_seqlens ? cache.cache_seqlens[sequence] : 0) + row - begin;
      if (0 <= token.position && token.position < int64_t(cache.width) * cache.page_size.value) {
        int const key = int(token.position), place = cache.page_size.quotient(key);
        int const page = cache.table ? cache.table[sequence * cache.table_stride + place] : sequence;
        if (0 <= page && page < cache.pages) {  // else the sequence has no page there
          token.page = page;
          token.row_in_page = key - place * int(cache.page_size.value);
        }
      }
    }
  }
  if (rotary.dim > 0) {
    if (positions) token.position = position;
    token.position = larger<int64_t>(0, smaller(token.position, rotary.length - 1));
  }
  return token;
}

}  // namespace flash_cute
