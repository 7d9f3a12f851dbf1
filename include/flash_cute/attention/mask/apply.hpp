// The mask applied to a tile of scores.
#pragma once

#include <cute/tensor.hpp>

#include <type_traits>

#include "flash_cute/attention/mask/ranges.hpp"
#include "flash_cute/core/accumulator.hpp"

namespace flash_cute {

using namespace cute;

// Which keys a row sees: [first, end), asked for by key.
struct ComparedKeys {
  int first, end;

  CUTE_DEVICE ComparedKeys(int first_, int end_, int) : first(first_), end(end_) {}

  CUTE_DEVICE bool contains(int, int key) const { return first <= key && key < end; }
};

// The same, compared with the offset of a key from the first column that a lane owns, which is a constant: no
// column takes a register.
struct OffsetKeys {
  int first, end;

  CUTE_DEVICE OffsetKeys(int first_, int end_, int lane_begin)
      : first(first_ - lane_begin), end(end_ - lane_begin) {}

  CUTE_DEVICE bool contains(int offset) const { return first <= offset && offset < end; }
};

// The same, asked for by the index of a key among the columns that a lane owns in a row, two neighbours of
// every eight from lane_begin on: a test of one bit instead of two comparisons, for kernels with a register
// to spare.
struct KeyBits {
  uint32_t bits;

  CUTE_DEVICE KeyBits(int first, int end, int lane_begin)
      : bits(below(end - lane_begin) & ~below(first - lane_begin)) {}

  CUTE_DEVICE bool contains(int col, int) const { return bits & (1u << col); }

 private:
  CUTE_DEVICE static uint32_t below(int limit) {
    int const owned = ((limit + 7) >> 3) + ((limit + 6) >> 3);  // of the pairs' first and second
    return ~__funnelshift_lc(0u, ~0u, max(0, owned));           // 32 and more shift everything out
  }
};

// The keys that a query sees through its ranges, which are loaded at once.
CUTE_DEVICE KeyBits visible_keys(RangesMask const& mask, int query, int n_begin, int lane_begin) {
  KeyRange ranges[kMaxRanges];
  CUTE_UNROLL
  for (int i = 0; i < kMaxRanges; ++i) ranges[i] = i < mask.count ? mask.range(query, i) : KeyRange{};
  KeyBits keys(0, 0, 0);
  CUTE_UNROLL
  for (int i = 0; i < kMaxRanges; ++i)
    keys.bits |= KeyBits(ranges[i].begin - n_begin, ranges[i].end - n_begin, lane_begin).bits;
  return keys;
}

// Scores of pairs that the mask hides become -inf. m_begin, n_begin: the first query of the rows and the
// first key of the columns. cS has the (row, key) coordinates of acc_s in the tile.
template <class Keys, class Mask, class Rows, class Coords, class Scores>
CUTE_DEVICE void apply_mask(Mask const& mask, Rows const& rows, int m_begin, int n_begin, Coords const& cS,
                            Scores& acc_s) {
  auto scores = row_col_view(acc_s);
  auto coords = row_col_view(cS);
  static_assert(decltype(size<1>(scores))::value <= 32);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    int const query = m_begin + rows.query(get<0>(coords(row, 0)));
    auto const visible = [&] {
      int const lane_begin = get<1>(coords(row, 0));
      if constexpr (std::is_same_v<Mask, RangesMask>) {
        return visible_keys(mask, query, n_begin, lane_begin);
      } else {
        return Keys(mask.first_key(query) - n_begin, mask.end_key(query) - n_begin, lane_begin);
      }
    }();
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      if constexpr (requires { visible.contains(0); }) {
        if (!visible.contains(get<1>(coords.layout()(row, col)))) scores(row, col) = -INFINITY;
      } else {
        if (!visible.contains(col, get<1>(coords(row, col)))) scores(row, col) = -INFINITY;
      }
    }
  }
}

// The same for S^T, whose rows are keys and whose columns are queries. Ranges of several columns are loaded
// at once.
template <class Coords, class Scores>
CUTE_DEVICE void apply_transposed(RangesMask const& mask, int n_begin, int m_begin, Coords const& cS,
                                  Scores& acc_s) {
  auto scores = row_col_view(acc_s);
  auto coords = row_col_view(cS);
  constexpr int kRows = decltype(size<0>(scores))::value, kColumns = decltype(size<1>(scores))::value;
  static_assert(kColumns <= 32);
  uint32_t visible[kRows] = {};  // a bit for each column
#pragma unroll 1
  for (int i = 0; i < mask.count; ++i) {
    constexpr int kAtOnce = 4;
    CUTE_UNROLL
    for (int first = 0; first < kColumns; first += kAtOnce) {
      KeyRange ranges[kAtOnce];
      CUTE_UNROLL
      for (int col = 0; col < kAtOnce; ++col)
        ranges[col] = mask.range(m_begin + get<1>(coords(0, first + col)), i);
      CUTE_UNROLL
      for (int col = 0; col < kAtOnce; ++col) {
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) {
          int const key = n_begin + get<0>(coords(row, 0));
          if (ranges[col].begin <= key && key < ranges[col].end) visible[row] |= 1u << (first + col);
        }
      }
    }
  }
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    CUTE_UNROLL
    for (int col = 0; col < kColumns; ++col) {
      if (!(visible[row] & 1u << col)) scores(row, col) = -INFINITY;
    }
  }
}

}  // namespace flash_cute
