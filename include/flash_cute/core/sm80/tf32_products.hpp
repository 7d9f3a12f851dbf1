// Products of float32 tiles in shared memory, and of scores in registers, added to accumulators.
#pragma once

#include "flash_cute/core/platform.hpp"
#include "flash_cute/core/sm80/tf32.hpp"

namespace flash_cute {

// Products are added up in pieces of at most so many k steps, each in an accumulator of its own, which is
// added in float32: tensor cores cut the last digit of a sum at each addition, and the mean of what they cut
// grows with the additions.
constexpr int kTf32Steps = 4;
// Tiles of eight columns side by side, as products that are added to one sum wait for each other.
constexpr int kTf32Columns = 2;

// Where a warp's tiles lie in a product: the first one, and from one to the next.
struct WarpTiles {
  int first, step;

  CUTE_DEVICE int operator()(int i) const { return first + i * step; }
};
// Of a TiledMma of warps_m x warps_n warps.
template <int warps_m>
CUTE_DEVICE WarpTiles warp_rows(int thread) {
  return {thread / 32 % warps_m * 16, warps_m * 16};
}
template <int warps_m, int warps_n>
CUTE_DEVICE WarpTiles warp_columns(int thread) {
  return {warps_n == 1 ? 0 : thread / 32 / warps_m * 8, warps_n * 8};
}

// Calls add(element of acc, index of its tile's element, tile of rows, sum) for the sums of one piece, A B^T,
// where load_b(b, place among its tiles, tile of columns) brings B.
template <bool kExact, int kSteps, int kRowTiles, class Acc, class LoadB, class Add>
CUTE_DEVICE void multiply_piece(Tf32Rows<kExact, kRowTiles, kSteps> const& a, Acc& acc, LoadB const& load_b,
                                Add const& add) {
  constexpr int kTiles = decltype(size<2>(acc))::value, kTogether = smaller(kTf32Columns, kTiles);
  CUTE_UNROLL
  for (int n = 0; n < kTiles; n += kTogether) {
    Tf32Columns<kExact, kTogether, kSteps> b;
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) load_b(b, i, n + i);
    float sums[kRowTiles][kTogether][4] = {};
    multiply_tf32<kExact, kRowTiles, kTogether, kSteps>(sums, a, b);
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) add(acc(j, m, n + i), j, m, sums[m][i][j]);
      }
    }
  }
}

// acc = A B^T, or with kAdds acc += A B^T, over kDepth columns that both have. acc: (MMA, MMA_M, MMA_N).
template <bool kExact, int kDepth, bool kAdds, class TileA, class TileB, class Acc>
CUTE_DEVICE void multiply_rows(TileA const& tile_a, WarpTiles const& rows, TileB const& tile_b,
                               WarpTiles const& columns, Acc& acc) {
  constexpr int kRowTiles = decltype(size<1>(acc))::value, kSteps = kTf32Steps;
  CUTE_UNROLL
  for (int step = 0; step < kDepth / 8; step += kSteps) {
    Tf32Rows<kExact, kRowTiles, kSteps> a;
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      tile_a.template load_rows<kExact, kRowTiles, kSteps>(a, m, rows(m), step);
    }
    multiply_piece<kExact, kSteps, kRowTiles>(
        a, acc,
        [&](auto& b, int i, int n) { tile_b.template load_columns<kExact, kSteps>(b, i, columns(n), step); },
        [&](float& x, int, int, float sum) { x = !kAdds && step == 0 ? sum : x + sum; });
  }
}

// X B with X from load_x(a, first k step) and B from rows of shared memory, kDepth of them; add is called as
// by multiply_piece, and is told whether it is the first piece.
template <bool kExact, int kDepth, class LoadX, class TileB, class Acc, class Add>
CUTE_DEVICE void multiply_by_rows(LoadX const& load_x, TileB const& tile_b, WarpTiles const& columns,
                                  Acc& acc, Add const& add) {
  constexpr int kRowTiles = decltype(size<1>(acc))::value, kSteps = smaller(kTf32Steps, kDepth / 8);
  CUTE_UNROLL
  for (int step = 0; step < kDepth / 8; step += kSteps) {
    Tf32Rows<kExact, kRowTiles, kSteps> a;
    load_x(a, step);
    multiply_piece<kExact, kSteps, kRowTiles>(
        a, acc,
        [&](auto& b, int i, int n) {
          tile_b.template load_transposed<kExact, kSteps>(b, i, step * 8, columns(n));
        },
        [&](float& x, int j, int m, float sum) { add(x, j, m, sum, step == 0); });
  }
}

// load_x of scores in an accumulator, whose columns are k. Lane t of a quad has columns 2t and 2t + 1 of
// every eight, and as operand those of the places t and t + 4; load_transposed brings rows in this order.
template <bool kExact, class Scores>
CUTE_DEVICE auto scores_in_registers(Scores const& scores) {
  return [&]<int kCount>(Tf32Operand<kExact, kCount>& a, int first) {
    constexpr int kPlaces[] = {0, 2, 1, 3}, kRowTiles = decltype(size<1>(scores))::value;
    constexpr int kSteps = kCount / 4 / kRowTiles;
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      CUTE_UNROLL
      for (int k = 0; k < kSteps; ++k) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          a.set((m * kSteps + k) * 4 + i, scores(kPlaces[i], m, first + k), kAddedBesideScores);
        }
      }
    }
  };
}

}  // namespace flash_cute
