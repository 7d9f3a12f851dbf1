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
  uint32_t pair, offset;  // of sequence and head; four times the seed's offset
  int keep;

  CUTE_DEVICE DropoutWords(DropoutParams const& params, int sequence, int heads, int head)
      : pair(sequence * heads + head), keep(params.keep) {
    uint64_t const seed = params.seed[0], offset_ = params.seed[1];
    key = {uint32_t(seed), uint32_t(seed >> 32) ^ uint32_t(offset_ >> 30)};
    offset = uint32_t(offset_) * 4;
  }

  // A bit is 1 with probability keep / 4096: the draw of twelve bits is compared with keep, one bit after the
  // other and all pairs at once.
  CUTE_DEVICE uint32_t word(int query_group, int key_group) const {
    uint4 drawn[3];
    CUTE_UNROLL
    for (int call = 0; call < 3; ++call) {
      drawn[call] = {uint32_t(key_group), uint32_t(query_group), pair, offset + call};
    }
    philox(drawn, key);
    uint32_t kept = 0;
    CUTE_UNROLL
    for (int i = 0; i < 12; ++i) {
      uint4 const& of_call = drawn[i / 4];
      uint32_t const bits = i % 4 == 0   ? of_call.x
                            : i % 4 == 1 ? of_call.y
                            : i % 4 == 2 ? of_call.z
                                         : of_call.w;
      uint32_t const all = -(keep >> i & 1);
      kept = (bits & (kept | all)) | (kept & all);  // of 1 `or`, of 0 `and`: one instruction
    }
    return kept;
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

// Words in shared memory, which other warps have drawn, in the order in which lanes of an accumulator of
// kRows x kColumns pairs read them: those of neighbouring groups of eight columns side by side.
template <QueryAxis axis, int kRows, int kColumns>
struct SharedDropoutWords {
  static constexpr int kLanes = 32;
  // Groups of rows and, of each row of words, groups of columns. A word is 4 rows x 8 columns, or 8 x 4.
  static constexpr int kHalves = 2, kTilesDown = kRows / 8, kTilesAcross = kColumns / 8;
  static constexpr int kWords = kHalves * kTilesDown * kTilesAcross;
  static_assert(kTilesAcross % 4 == 0);
  uint32_t words[kTilesDown][kHalves][kTilesAcross];

  // Draws the words of a part of the rows of tiles, by a warp. query, key: of the first pair.
  CUTE_DEVICE void draw(DropoutWords const& generator, int query, int key, int part, int parts) {
    constexpr int kOfRow = kHalves * kTilesAcross;
    int const size = kTilesDown / parts * kOfRow;
#pragma unroll 1
    for (int i = threadIdx.x % kLanes; i < size; i += kLanes) {
      int const row = part * (kTilesDown / parts) + i / kOfRow, half = i / kTilesAcross % kHalves,
                column = i % kTilesAcross;
      int const down = 8 * row, across = 8 * column, within = DropoutWords::kQueries * half;
      words[row][half][column] = axis == QueryAxis::rows
                                     ? generator.word_at(query + down + within, key + across)
                                     : generator.word_at(query + across + within, key + down);
    }
  }

  // Calls visit(row, column, is kept) for each value of a lane's accumulator, of a warp whose rows begin at
  // first_row: two rows eight apart, and two columns of every eight.
  template <class Visit>
  CUTE_DEVICE void for_each(int first_row, Visit&& visit) const {
    int const lane = threadIdx.x % kLanes, row = lane / 4, column = 2 * (lane % 4);
    int const own_query = axis == QueryAxis::rows ? row : column,
              own_key = axis == QueryAxis::rows ? column : row;
    int const half = own_query / DropoutWords::kQueries;
    uint32_t const first_bit = 1u << (own_query % DropoutWords::kQueries * DropoutWords::kKeys + own_key);
    constexpr int kNext = axis == QueryAxis::rows ? 1 : DropoutWords::kKeys;
    CUTE_UNROLL
    for (int first = 0; first < kTilesAcross; first += 4) {
      CUTE_UNROLL
      for (int down = 0; down < 2; ++down) {
        uint4 const four = *reinterpret_cast<uint4 const*>(&words[first_row / 8 + down][half][first]);
        uint32_t const of_tiles[] = {four.x, four.y, four.z, four.w};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          visit(down, 2 * (first + i), (of_tiles[i] & first_bit) != 0);
          visit(down, 2 * (first + i) + 1, (of_tiles[i] & first_bit << kNext) != 0);
        }
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

  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) const {
    pairs.for_each(visit);
  }
};

// The same from words in shared memory. first_row: of the warp's in the accumulator's tile.
template <class Words>
struct SharedTileDropout {
  bool drops;
  Words const& words;
  int first_row;

  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) const {
    words.for_each(first_row, visit);
  }
};

// Values of pairs that are dropped become 0.
template <class Dropout, class Values>
CUTE_DEVICE void drop_pairs(Dropout const& dropout, Values& acc) {
  if (!dropout.drops) return;
  auto values = row_col_view(acc);
  dropout.for_each([&](int row, int column, bool is_kept) {
    if (!is_kept) values(row, column) = 0;
  });
}

}  // namespace flash_cute
