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

// The bits of the two keys of every eight that a lane owns, from column lane_begin on, as those of KeyBits,
// of neighbouring words of 32 keys; or of half a word.
template <int kKeys>
CUTE_DEVICE uint32_t own_bits(uint32_t const (&words)[ceil_div(kKeys, 32)], int n_begin, int lane_begin) {
  // Moves the two low bits of each byte side by side, into the highest byte.
  auto compact = [&](uint32_t word) {
    return (word >> lane_begin & 0x03030303u) * (1u << 24 | 1u << 18 | 1u << 12 | 1u << 6) >> 24;
  };
  if constexpr (kKeys < 32) {
    static_assert(kKeys == 16);
    return compact(words[0] >> n_begin % 32);
  } else {
    uint32_t bits = 0;
    CUTE_UNROLL
    for (int i = 0; i < kKeys / 32; ++i) bits |= compact(words[i]) << 8 * i;
    return bits;
  }
}

// Which keys of a block one query sees. The bits of a mask of pairs are loaded a block ahead.
template <int kKeys>
class SeenKeys {
  int query_;
  KeyRange first_;  // range
  alignas(16) uint32_t words_[kKeys / 32];

 public:
  CUTE_DEVICE void begin(TableMask const& mask, int query) {
    query_ = query;
    first_ = mask.range(query, 0);
  }

  // Issues the loads for a block that begins at this key.
  CUTE_DEVICE void load(TableMask const& mask, int n_begin) {
    if (!mask.bits) return;
    using Loaded = std::conditional_t<kKeys == 128, uint4, uint2>;
    static_assert(sizeof(Loaded) == sizeof(words_));
    *reinterpret_cast<Loaded*>(words_) =
        *reinterpret_cast<Loaded const*>(mask.bits_of(query_) + n_begin / 32);
  }

  // bits: a bit for each key of the block whose loads were issued last.
  CUTE_DEVICE void find(TableMask const& mask, int n_begin, uint32_t (&bits)[kKeys / 32]) const {
    add(first_, n_begin, bits, 0);
#pragma unroll 1
    for (int i = 1; i < mask.count; ++i) add(mask.range(query_, i), n_begin, bits, ~0u);
    if (!mask.bits) return;
    CUTE_UNROLL
    for (int i = 0; i < kKeys / 32; ++i) bits[i] &= words_[i];
  }

 private:
  // kept: of the bits that were there.
  CUTE_DEVICE static void add(KeyRange range, int n_begin, uint32_t (&bits)[kKeys / 32], uint32_t kept) {
    auto below = [](int limit) { return ~__funnelshift_lc(0u, ~0u, larger(0, limit)); };
    CUTE_UNROLL
    for (int i = 0; i < kKeys / 32; ++i) {
      int const begin = n_begin + 32 * i;
      bits[i] = (bits[i] & kept) | (below(range.end - begin) & ~below(range.begin - begin));
    }
  }
};

// Which pairs of a tile a table leaves: found before the scores are there, beside the product. kHasBits: may
// there be a mask of pairs? Its bits are loaded a block ahead, and with them the ranges of a tile's rows are
// kept.
template <class Coords, bool kHasBits>
class VisiblePairs {
  using View = decltype(row_col_view(std::declval<Coords const&>()));
  static constexpr int kRows = decltype(size<0>(std::declval<View>()))::value,
                       kKeys = 4 * decltype(size<1>(std::declval<View>()))::value,
                       kWords = kHasBits ? ceil_div(kKeys, 32) : 1;
  uint32_t visible_[kRows];  // of the keys that a lane owns in a row, as KeyBits
  KeyRange first_[kRows];    // a row's first range
  uint32_t words_[kRows][kWords];

 public:
  // What is alike for all blocks of keys.
  template <class Pack>
  CUTE_DEVICE void begin_tile(TableMask const& mask, Pack const& rows, int m_begin, Coords const& cS) {
    if constexpr (kHasBits) load_ranges(first_, mask, rows, m_begin, cS, 0);
  }

  // Issues the loads for a block that begins at this key; other blocks may come before find().
  template <class Pack>
  CUTE_DEVICE void load(TableMask const& mask, Pack const& rows, int m_begin, int n_begin, Coords const& cS) {
    if constexpr (kHasBits) {
      if (!mask.bits) return;
      auto const coords = row_col_view(cS);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        uint32_t const* const words =
            mask.bits_of(m_begin + rows.query(get<0>(coords(row, 0)))) + n_begin / 32;
        CUTE_UNROLL
        for (int i = 0; i < kWords; ++i) words_[row][i] = words[i];
      }
    }
  }

  template <class Pack>
  CUTE_DEVICE void find(TableMask const& mask, Pack const& rows, int m_begin, int n_begin, Coords const& cS) {
    auto const coords = row_col_view(cS);
    auto add = [&](KeyRange const(&ranges)[kRows]) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        visible_[row] |=
            KeyBits(ranges[row].begin - n_begin, ranges[row].end - n_begin, get<1>(coords(row, 0))).bits;
      }
    };
    CUTE_UNROLL
    for (uint32_t& bits : visible_) bits = 0;
    if constexpr (kHasBits) add(first_);
#pragma unroll 1
    for (int i = kHasBits; i < mask.count; ++i) {
      KeyRange ranges[kRows];
      load_ranges(ranges, mask, rows, m_begin, cS, i);
      add(ranges);
    }
    if constexpr (kHasBits) {
      if (!mask.bits) return;
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row)
        visible_[row] &= own_bits<kKeys>(words_[row], n_begin, get<1>(coords(row, 0)));
    }
  }

  // Scores of the others become -inf.
  template <class Scores>
  CUTE_DEVICE void apply(Scores& acc_s) const {
    auto scores = row_col_view(acc_s);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        if (!(visible_[row] & 1u << col)) scores(row, col) = -INFINITY;
      }
    }
  }

 private:
  // Those of all rows at once.
  template <class Pack>
  CUTE_DEVICE static void load_ranges(KeyRange (&ranges)[kRows], TableMask const& mask, Pack const& rows,
                                      int m_begin, Coords const& cS, int i) {
    auto const coords = row_col_view(cS);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row)
      ranges[row] = mask.range(m_begin + rows.query(get<0>(coords(row, 0))), i);
  }
};

// The same at once.
template <class Keys, class Pack, class Coords, class Scores>
CUTE_DEVICE void apply_mask(TableMask const& mask, Pack const& rows, int m_begin, int n_begin,
                            Coords const& cS, Scores& acc_s) {
  VisiblePairs<Coords, true> visible;
  visible.begin_tile(mask, rows, m_begin, cS);
  visible.load(mask, rows, m_begin, n_begin, cS);
  visible.find(mask, rows, m_begin, n_begin, cS);
  visible.apply(acc_s);
}

// The same for S^T, whose rows are kKeys keys and whose columns kQueries queries. Each lane loads the ranges
// of one query of every 32, and a vote for each key of the warp tells which queries see it, unless all see
// the same ones. A quad of lanes owns the pairs of columns of eight neighbours; those of a lane are multiples
// of 8, 16 or 32 queries apart.
template <int kQueries, int kKeys, class Coords, bool kHasBits>
class VisiblePairsTransposed {
  using View = decltype(row_col_view(std::declval<Coords const&>()));
  static constexpr int kRows = decltype(size<0>(std::declval<View>()))::value,
                       kColumns = decltype(size<1>(std::declval<View>()))::value;
  static constexpr int kLanes = 32, kOwnKeys = kLanes / 4, kGroups = kQueries / kLanes;
  static_assert(kGroups * kLanes == kQueries && kKeys < 1 << 15);
  uint32_t visible_[kRows][kGroups];  // a bit for each query, from the lane's first one on

 public:
  CUTE_DEVICE void find(TableMask const& mask, int n_begin, int m_begin, Coords const& cS) {
    auto const coords = row_col_view(cS);
    int const lane = threadIdx.x % kLanes, own_key = lane / 4;
    CUTE_UNROLL
    for (auto& of_row : visible_) {
      CUTE_UNROLL
      for (uint32_t& bits : of_row) bits = 0;
    }
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
            if (begin <= of_row && of_row < end) visible_[row][group] = ~0u;
            continue;
          }
          visible_[row][group] |=
              votes([&](int key) { return begin <= first_key + key && first_key + key < end; }, own_key);
        }
      }
    }
    if (kHasBits && mask.bits) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        int const first_key = n_begin + get<0>(coords(row, 0)) - own_key;  // a multiple of 8
        CUTE_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          auto const* const of_query =
              reinterpret_cast<uint8_t const*>(mask.bits_of(m_begin + group * kLanes + lane));
          uint32_t const bits = of_query[first_key / 8];
          visible_[row][group] &= votes([&](int key) { return (bits >> key & 1) != 0; }, own_key);
        }
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (uint32_t& bits : visible_[row]) bits >>= get<1>(coords(row, 0));
    }
  }

  template <class Scores>
  CUTE_DEVICE void apply(Scores& acc_s) const {
    auto scores = row_col_view(acc_s);
    typename Coords::layout_type const layout{};
    auto const offsets = row_col_view(make_tensor(static_cast<int*>(nullptr), layout)).layout();
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < kColumns; ++col) {
        int const query = get<1>(offsets(row, col));  // from the lane's first one: a constant
        if (!(visible_[row][query / kLanes] & 1u << query % kLanes)) scores(row, col) = -INFINITY;
      }
    }
  }

 private:
  // Of the warp's eight keys, what all lanes' queries say of this lane's own.
  template <class Sees>
  CUTE_DEVICE static uint32_t votes(Sees const& sees, int own_key) {
    uint32_t own = 0;
    CUTE_UNROLL
    for (int key = 0; key < kOwnKeys; ++key) {
      uint32_t const seen = __ballot_sync(~0u, sees(key));
      if (key == own_key) own = seen;
    }
    return own;
  }
};

}  // namespace flash_cute
