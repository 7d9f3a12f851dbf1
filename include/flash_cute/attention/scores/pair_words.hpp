// What warps beside the mainloop find out about the pairs of a tile: which are seen, and which dropout keeps.
// A bit for each, in the order in which the lanes of an accumulator own them, so that a lane reads its own in
// one or two words.
#pragma once

#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/scores/dropout.hpp"

namespace flash_cute {

// Of kRows queries and kColumns keys, or the other way round. A lane owns two rows of every 16, eight apart,
// and two columns of every eight.
template <int kRows, int kColumns>
struct PairWords {
  static constexpr int kLanes = 32, kOfRow = kColumns / 4;  // bits of a row that a lane owns
  static constexpr int kThreads = 2 * kRows, kWords = 2 * kOfRow / 32;
  using OfRow = std::conditional_t<kOfRow == 32, uint32_t, uint16_t>;
  static_assert(kOfRow == 32 || kOfRow == 16);
  alignas(16) uint32_t words[kWords][kThreads];  // of a thread's upper row, then of its lower one

  // Those of a thread.
  struct Owned {
    uint32_t words[kWords];

    CUTE_DEVICE void load(PairWords const& of_tile, int thread) {
      CUTE_UNROLL
      for (int i = 0; i < kWords; ++i) words[i] = of_tile.words[i][thread];
    }
    // Values of pairs whose bit is not set become `other`, 0 or -inf, which the compiler must not know. By
    // arithmetic under a predicate, of which an SM does twice as much as of selects; that it differs from
    // pair to pair keeps the compiler from selecting one result.
    template <class Values>
    CUTE_DEVICE void set_others(Values& acc, float other) const {
      auto values = row_col_view(acc);
      CUTE_UNROLL
      for (int row = 0; row < 2; ++row) {
        CUTE_UNROLL
        for (int col = 0; col < kOfRow; ++col) {
          int const bit = row * kOfRow + col;
          asm("{.reg .pred p; setp.eq.u32 p, %1, 0; @p fma.rn.f32 %0, %2, %3, %2;}"
              : "+f"(values(row, col))
              : "r"(words[bit / 32] & 1u << bit % 32), "f"(other), "f"(float(1 + bit)));
        }
      }
    }
    // Values that are rounded to 16 bits, two in a register: those whose bit is not set become 0.
    template <class Rounded>
    CUTE_DEVICE void clear_others(Rounded& acc) const {
      auto pairs = recast<uint32_t>(acc);
      CUTE_UNROLL
      for (int i = 0; i < size(pairs); ++i) {
        int const bit = i % 2 * kOfRow + i / 2 * 2, byte = bit % 32 / 8;
        // Shifted, the bits of both are the highest of this byte, which a permutation spreads over two
        // others.
        uint32_t const word = words[bit / 32], first = word << (7 - bit % 8), second = word << (6 - bit % 8);
        uint32_t mask;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(first), "r"(second), "r"(0xcc88 + 0x1111 * byte));
        pairs(i) &= mask;
      }
    }
  };

  // Of rows that are queries. bits: of a row's columns.
  CUTE_DEVICE void store_query(int row, uint32_t const (&bits)[kColumns / 32]) {
    int const thread = row / 16 * kLanes + row % 8 * 4, lower = row / 8 % 2;
    OfRow of_lanes[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) of_lanes[i] = own_bits<kColumns>(bits, 0, 2 * i);
    if constexpr (kOfRow == 32) {
      *reinterpret_cast<uint4*>(&words[lower][thread]) = {of_lanes[0], of_lanes[1], of_lanes[2], of_lanes[3]};
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) half_of(0, thread + i, lower) = of_lanes[i];
    }
  }

  // Draws a part of the rows, which are queries, by a warp. query, key: of the first pair. A lane draws words
  // of dropout for 4 x 8 pairs; 16 lanes then exchange the two bits of each that a thread owns in a row.
  CUTE_DEVICE void draw_of_queries(DropoutWords const& generator, int query, int key, int part, int parts) {
    constexpr int kAcross = kColumns / DropoutWords::kKeys;     // words of a row
    constexpr int kUnitRows = 8 * (16 / kAcross);               // of 32 words
    constexpr int kAtOnce = smaller(4, kRows / kUnitRows / 4);  // the latency of one is the time of all
    int const lane = threadIdx.x % kLanes, of_sixteen = lane % 16;
    int const row = of_sixteen / kAcross * 8 + lane / 16 * DropoutWords::kQueries;
    int const units = kRows / kUnitRows / parts;
    key += of_sixteen % kAcross * DropoutWords::kKeys;
#pragma unroll 1
    for (int unit = part * units; unit < (part + 1) * units; unit += kAtOnce) {
      uint32_t kept[kAtOnce]{};
      generator.words_at(query + unit * kUnitRows + row, kUnitRows, key, 0, kept);
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const of_unit = unit + i, word = kWords == 2 ? of_unit % 2 : 0;
        words[word][of_unit / kWords * kLanes + lane] = exchange(kept[i], of_sixteen);
      }
    }
  }

  // Where rows are keys and columns 64 queries, 32 lanes make the words of 32 keys from words of 4 queries
  // and 8 keys, two a lane: those of query_of(lane), and of key_of(lane, i).
  static constexpr int kKeysOfWarp = 32;
  CUTE_DEVICE static int query_of(int lane) { return (lane % 8 * 2 + lane / 8 % 2) * DropoutWords::kQueries; }
  CUTE_DEVICE static int key_of(int lane, int i) { return (2 * i + lane / 16) * DropoutWords::kKeys; }

  CUTE_DEVICE void store_of_keys(int first_key, uint32_t const (&of_lane)[2]) {
    static_assert(kColumns == 64);
    int const lane = threadIdx.x % kLanes, of_sixteen = lane % 16;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      // Two queries of a key, of all 64 queries: those of the first four of every eight come first.
      uint32_t const exchanged = exchange(pair_queries(of_lane[i]), of_sixteen);
      int const thread = (first_key / 16 + i) * kLanes + of_sixteen % 8 * 4 + of_sixteen / 8;
      half_of(0, thread, lane / 16) = OfRow(exchanged);
      half_of(0, thread + 2, lane / 16) = OfRow(exchanged >> 16);
    }
  }

 private:
  CUTE_DEVICE OfRow& half_of(int word, int thread, int half) {
    return reinterpret_cast<OfRow*>(&words[word][thread])[half];
  }
  // Of 16 lanes with 16 pairs of bits each: lane i gets pair i of each, in the order of the lanes.
  CUTE_DEVICE static uint32_t exchange(uint32_t word, int lane) {
    CUTE_UNROLL
    for (int distance = 8; distance > 0; distance /= 2) {
      uint32_t const stays = distance == 8   ? 0x0000ffffu
                             : distance == 4 ? 0x00ff00ffu
                             : distance == 2 ? 0x0f0f0f0fu
                                             : 0x33333333u;
      bool const is_upper = lane & distance;
      uint32_t const other = __shfl_xor_sync(~0u, word, distance), own = is_upper ? ~stays : stays;
      uint32_t const moved = __funnelshift_l(other, other, is_upper ? 32 - 2 * distance : 2 * distance);
      word = (word & own) | (moved & ~own);
    }
    return word;
  }
  // Of 4 queries x 8 keys: the bits of two neighbouring queries side by side. Pair 8 i + j is that of queries
  // 2 i and 2 i + 1 and key j.
  CUTE_DEVICE static uint32_t pair_queries(uint32_t word) {
    auto swap = [&](uint32_t bits, int distance) {
      uint32_t const differ = (word ^ word >> distance) & bits;
      word ^= differ ^ differ << distance;
    };
    swap(0x00f000f0u, 4);
    swap(0x0c0c0c0cu, 2);
    swap(0x22222222u, 1);
    return word;
  }
};

// Dropout of a thread's pairs, as such words tell.
template <class Words>
struct OwnedDropout {
  bool drops;
  float zero;  // see set_others
  typename Words::Owned kept;

  template <class Values>
  CUTE_DEVICE void clear(Values& acc) const {
    if (drops) kept.set_others(acc, zero);
  }
  template <class Values>
  CUTE_DEVICE void clear_rounded(Values& acc) const {
    if (drops) kept.clear_others(acc);
  }
};

}  // namespace flash_cute
