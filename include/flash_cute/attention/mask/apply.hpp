// The mask applied to a tile of scores.
#pragma once

#include <cute/tensor.hpp>

#include <type_traits>

#include "flash_cute/attention/mask/mask_table.hpp"
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

// Scores of pairs that the mask hides become -inf. m_begin, n_begin: the first query of the rows and the
// first key of the columns. cS has the (row, key) coordinates of acc_s in the tile.
template <class Keys, class Mask, class Pack, class Coords, class Scores>
CUTE_DEVICE void apply_mask(Mask const& mask, Pack const& rows, int m_begin, int n_begin, Coords const& cS,
                            Scores& acc_s) {
  auto scores = row_col_view(acc_s);
  auto coords = row_col_view(cS);
  static_assert(decltype(size<1>(scores))::value <= 32);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    int const query = m_begin + rows.query(get<0>(coords(row, 0)));
    Keys const visible(mask.first_key(query) - n_begin, mask.end_key(query) - n_begin,
                       get<1>(coords(row, 0)));
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

// The same with key ranges, of which those of all rows are loaded at once.
template <class Keys, class Pack, class Coords, class Scores>
CUTE_DEVICE void apply_mask(TableMask const& mask, Pack const& rows, int m_begin, int n_begin,
                            Coords const& cS, Scores& acc_s) {
  auto scores = row_col_view(acc_s);
  auto coords = row_col_view(cS);
  constexpr int kRows = decltype(size<0>(scores))::value;
  uint32_t visible[kRows] = {};
#pragma unroll 1
  for (int i = 0; i < mask.count; ++i) {
    KeyRange ranges[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row)
      ranges[row] = mask.range(m_begin + rows.query(get<0>(coords(row, 0))), i);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      visible[row] |=
          KeyBits(ranges[row].begin - n_begin, ranges[row].end - n_begin, get<1>(coords(row, 0))).bits;
    }
  }
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      if (!(visible[row] & 1u << col)) scores(row, col) = -INFINITY;
    }
  }
}

// The same for S^T, whose rows are kKeys keys and whose columns kQueries queries. Each lane loads the ranges
// of one query of every 32, and a vote for each key of the warp tells which queries see it, unless all see
// the same ones. A quad of lanes owns the pairs of columns of eight neighbours; those of a lane are multiples
// of 8, 16 or 32 queries apart.
template <int kQueries, int kKeys, class Coords, class Scores>
CUTE_DEVICE void apply_transposed(TableMask const& mask, int n_begin, int m_begin, Coords const& cS,
                                  Scores& acc_s) {
  auto scores = row_col_view(acc_s);
  auto coords = row_col_view(cS);
  constexpr int kRows = decltype(size<0>(scores))::value, kColumns = decltype(size<1>(scores))::value;
  constexpr int kLanes = 32, kOwnKeys = kLanes / 4, kGroups = kQueries / kLanes;
  static_assert(kGroups * kLanes == kQueries && kKeys < 1 << 15);
  int const lane = threadIdx.x % kLanes, own_key = lane / 4;
  uint32_t visible[kRows][kGroups] = {};  // a bit for each query
#pragma unroll 1
  for (int i = 0; i < mask.count; ++i) {
    KeyRange ranges[kGroups];
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group)
      ranges[group] = mask.range(m_begin + group * kLanes + lane, i);
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      int const begin = larger(0, ranges[group].begin - n_begin);
      int const end = larger(begin, smaller(kKeys, ranges[group].end - n_begin));
      int all_alike;
      __match_all_sync(~0u, begin < end ? begin | end << 16 : 0, &all_alike);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        int const of_row = get<0>(coords(row, 0)), first_key = of_row - own_key;
        if (all_alike) {
          if (begin <= of_row && of_row < end) visible[row][group] = ~0u;
          continue;
        }
        CUTE_UNROLL
        for (int key = 0; key < kOwnKeys; ++key) {
          uint32_t const seen = __ballot_sync(~0u, begin <= first_key + key && first_key + key < end);
          if (key == own_key) visible[row][group] |= seen;
        }
      }
    }
  }
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) visible[row][group] >>= get<1>(coords(row, 0));
    CUTE_UNROLL
    for (int col = 0; col < kColumns; ++col) {
      int const query = get<1>(coords.layout()(row, col));  // from the lane's first one: a constant
      if (!(visible[row][query / kLanes] & 1u << query % kLanes)) scores(row, col) = -INFINITY;
    }
  }
}

}  // namespace flash_cute
