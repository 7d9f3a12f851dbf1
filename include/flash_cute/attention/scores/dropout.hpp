// Which pairs dropout keeps. A word of 32 bits is drawn for 4 queries x 8 keys, by their place alone: the
// sequence, the head and the numbers of its rows. So the pairs are the same in every tile, pass and family.
#pragma once

#include "flash_cute/attention/scores/pairs.hpp"
#include "flash_cute/attention/scores/place.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// Philox4x32 (Salmon et al., SC 2011) with seven rounds, of several counters at once.
template <int kCounters>
CUTE_DEVICE void philox(uint4 (&counters)[kCounters], uint2 key) {
  constexpr int kRounds = 7;
  CUTE_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    CUTE_UNROLL
    for (uint4& counter : counters) {
      uint64_t const first = uint64_t(0xd2511f53u) * counter.x, second = uint64_t(0xcd9e8d57u) * counter.z;
      counter = {uint32_t(second >> 32) ^ counter.y ^ key.x, uint32_t(second),
                 uint32_t(first >> 32) ^ counter.w ^ key.y, uint32_t(first)};
    }
    key.x += 0x9e3779b9u;
    key.y += 0xbb67ae85u;
  }
}

// The generator of a (sequence, head).
struct DropoutWords {
  static constexpr int kQueries = 4, kKeys = 8;  // of a word: bit (query % 4) * 8 + key % 8
  uint2 key;
  uint32_t pair, offset;  // of sequence and head; the seed's offset, its low word
  int keep;

  CUTE_DEVICE DropoutWords(DropoutParams const& params, int sequence, int heads, int head)
      : pair(sequence * heads + head), keep(params.keep) {
    uint64_t const seed = params.seed[0], offset_ = params.seed[1];
    key = {uint32_t(seed), uint32_t(seed >> 32) ^ uint32_t(offset_ >> 32)};
    offset = uint32_t(offset_);
  }

  // Several words at once. A bit is 1 with probability keep / 4096: the draw of twelve bits is compared with
  // keep, one bit after the other and all pairs at once.
  template <int kWords>
  CUTE_DEVICE void words(int const (&query_groups)[kWords], int const (&key_groups)[kWords],
                         uint32_t (&kept)[kWords]) const {
    // The eight lowest bits of a pair are sums of two bits of other pairs of the word, so many places away in
    // the words i % 4 and (i + 1) % 4 that are drawn; the others are drawn. With these distances all bits of
    // any two pairs are independent.
    constexpr int kDerived = 8, kFirst[kDerived] = {3, 26, 9, 31, 25, 31, 1, 8},
                  kSecond[kDerived] = {16, 16, 1, 27, 27, 13, 14, 31};
    uint4 drawn[kWords];
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      drawn[i] = {uint32_t(key_groups[i]), uint32_t(query_groups[i]), pair, offset};
    }
    philox(drawn, key);
    CUTE_UNROLL
    for (uint32_t& word : kept) word = 0;
    CUTE_UNROLL
    for (int i = 0; i < 12; ++i) {
      uint32_t const all = -(keep >> i & 1);
      CUTE_UNROLL
      for (int word = 0; word < kWords; ++word) {
        uint32_t const of_call[] = {drawn[word].x, drawn[word].y, drawn[word].z, drawn[word].w};
        uint32_t bits = of_call[i % 4];
        if (i < kDerived) bits = rotated(bits, kFirst[i]) ^ rotated(of_call[(i + 1) % 4], kSecond[i]);
        kept[word] = (bits & (kept[word] | all)) | (kept[word] & all);  // of 1 `or`, of 0 `and`
      }
    }
  }
  CUTE_DEVICE static uint32_t rotated(uint32_t word, int left) { return __funnelshift_l(word, word, left); }
  CUTE_DEVICE uint32_t word(int query_group, int key_group) const {
    uint32_t kept[1];
    words({query_group}, {key_group}, kept);
    return kept[0];
  }

  // As word_at, of several places: multiples of 4 queries and 8 keys apart.
  template <int kWords>
  CUTE_DEVICE void words_at(int query, int queries_apart, int key_, int keys_apart,
                            uint32_t (&kept)[kWords]) const {
    if (query % kQueries == 0 && key_ % kKeys == 0) {
      int query_groups[kWords], key_groups[kWords];
      CUTE_UNROLL
      for (int i = 0; i < kWords; ++i) {
        query_groups[i] = (query + i * queries_apart) / kQueries;
        key_groups[i] = (key_ + i * keys_apart) / kKeys;
      }
      words(query_groups, key_groups, kept);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kWords; ++i) {
      uint32_t const drawn = word_at(query + i * queries_apart, key_ + i * keys_apart);
      CUTE_UNROLL
      for (int j = 0; j < kWords; ++j) kept[j] = i == j ? drawn : kept[j];
    }
  }

  // The bits of the 4 x 8 pairs from a query and a key on that may lie within words.
  CUTE_DEVICE uint32_t word_at(int query, int key_) const {
    int const query_group = query / kQueries, key_group = key_ / kKeys;
    int const below = query % kQueries * kKeys, left = key_ % kKeys;
    auto row_of_words = [&](int group) {
      uint32_t const first = word(group, key_group);
      if (left == 0) return first;
      uint32_t const second = word(group, key_group + 1), from_first = 0x01010101u * (0xffu >> left);
      return (first >> left & from_first) | (second << (kKeys - left) & ~from_first);
    };
    uint32_t const upper = row_of_words(query_group);
    return below == 0 ? upper : __funnelshift_r(upper, row_of_words(query_group + 1), below);
  }
};

// The bits of the pairs of a warp's accumulator: each lane draws a share of the words, and all exchange them.
template <QueryAxis axis, class Coords>
class WarpDropout {
  using View = decltype(row_col_view(std::declval<Coords const&>()));
  static constexpr int kRows = decltype(size<0>(std::declval<View>()))::value,
                       kPairs = decltype(size<1>(std::declval<View>()))::value / 2,
                       kWords = 2 * kRows * kPairs, kLanes = 32, kOwned = ceil_div(kWords, kLanes);
  uint32_t owned_[kOwned];
  int half_, bit_;  // which of the words of 8 x 8 pairs has this lane's two, and where

 public:
  // query, key: of the accumulator's coordinate (0, 0), in the numbering of the words.
  CUTE_DEVICE void draw(DropoutWords const& words, int query, int key, Coords const& cS) {
    int const lane = threadIdx.x % kLanes, row = lane / 4, column = 2 * (lane % 4);
    int const own_query = axis == QueryAxis::rows ? row : column,
              own_key = axis == QueryAxis::rows ? column : row;
    half_ = own_query / DropoutWords::kQueries;
    bit_ = own_query % DropoutWords::kQueries * DropoutWords::kKeys + own_key;
    auto const coords = row_col_view(cS);
#pragma unroll 1
    for (int i = 0; i < kOwned; ++i) {
      int const index = smaller(i * kLanes + lane, kWords - 1), tile = index / 2;
      auto const coord = coords(tile / kPairs, 2 * (tile % kPairs));
      uint32_t const drawn =
          words.word_at(query + query_of<axis>(coord) - own_query + index % 2 * DropoutWords::kQueries,
                        key + key_of<axis>(coord) - own_key);
      CUTE_UNROLL
      for (int j = 0; j < kOwned; ++j) {
        if (i == j) owned_[j] = drawn;
      }
    }
  }

  // Calls visit(row, column, is kept) for each of this lane's values, by all lanes.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) const {
    constexpr int kNext = axis == QueryAxis::rows ? 1 : DropoutWords::kKeys;
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        int const index = 2 * (row * kPairs + pair);
        uint32_t const word = __shfl_sync(~0u, owned_[index / kLanes], index % kLanes + half_);
        visit(row, 2 * pair, (word & 1u << bit_) != 0);
        visit(row, 2 * pair + 1, (word & 1u << kNext << bit_) != 0);
      }
    }
  }
};

// The same of a tile, if anything is dropped.
template <QueryAxis axis, class Coords>
struct TileDropout {
  bool drops;
  WarpDropout<axis, Coords> pairs;

  // Of the pairs of `place` from query m_begin and key n_begin on.
  CUTE_DEVICE TileDropout(ScoreParams const& params, ScorePlace const& place, int heads, int m_begin,
                          int n_begin, Coords const& cS)
      : drops(params.dropout.drops()) {
    if (!drops) return;
    DropoutWords const words(params.dropout, place.sequence, heads, place.head);
    pairs.draw(words, place.query_begin + m_begin, place.key_begin + n_begin, cS);
  }

  // Values of pairs that are dropped become 0.
  template <class Values>
  CUTE_DEVICE void clear(Values& acc) const {
    if (!drops) return;
    auto values = row_col_view(acc);
    pairs.for_each([&](int row, int column, bool is_kept) {
      if (!is_kept) values(row, column) = 0;
    });
  }
};

}  // namespace flash_cute
