// Matrix products of float32 on the tensor cores of Ampere and newer, by mma.sync of TF32: operands in
// registers, how they arrive from shared memory, and products that are as exact as those of float32.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/tensor.hpp>

#include "flash_cute/core/special_registers.hpp"

namespace flash_cute {

using namespace cute;

// What mma.sync takes of an operand: it ignores the low 13 bits of a word. kExact: a number is the sum of a
// high and a low part, each with the 11 digits of TF32, and a product is the sum of three, high x low,
// low x high, high x high. What is lost, of low parts and low x low, is less than 2^-20, but always of one
// sign; 2^-22 of the number, added to its low part at no cost, makes up for the mean. Otherwise a number is
// cut, and made larger before by the mean of what is cut from normally distributed ones: to round it would
// take four instructions for one. The error of out is 1.1 times, of the LSE 1.2 times that of rounding. An
// infinity stays one only where not kExact.
template <bool kExact, int kCount>
struct Tf32Operand {
  uint32_t high[kCount], low[kExact ? kCount : 1];

  // added: to the low part, of x.
  CUTE_DEVICE void set(int i, float x, float added = 0x1p-22f) {
    if constexpr (kExact) {
      high[i] = __float_as_uint(x) & 0xffffe000u;
      low[i] = __float_as_uint(fmaf(x, 1.f + added, -__uint_as_float(high[i])));
    } else {
      high[i] = __float_as_uint(x * (1.f + 0.725f * 0x1p-11f));
    }
  }
};

// With scores as an operand, which may be 1 and few, less is added.
constexpr float kAddedBesideScores = 0x1p-23f;

// A warp's operands of kSteps k steps, eight columns each: kTiles tiles of sixteen rows, or of eight columns
// of the result.
template <bool kExact, int kTiles, int kSteps>
using Tf32Rows = Tf32Operand<kExact, kTiles * kSteps * 4>;
template <bool kExact, int kTiles, int kSteps>
using Tf32Columns = Tf32Operand<kExact, kTiles * kSteps * 2>;

// acc += A B^T, acc[tile of rows][tile of columns][4]. The small products come first: an addition on tensor
// cores cuts the sum's last digit, and of a sum of small products that is a small one.
template <bool kExact, int kRowTiles, int kColumnTiles, int kSteps>
CUTE_DEVICE void multiply_tf32(float (&acc)[kRowTiles][kColumnTiles][4],
                               Tf32Rows<kExact, kRowTiles, kSteps> const& a,
                               Tf32Columns<kExact, kColumnTiles, kSteps> const& b) {
  auto multiply = [&](uint32_t const* rows, uint32_t const* columns) {
    CUTE_UNROLL
    for (int n = 0; n < kColumnTiles; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        float (&c)[4] = acc[m][n];
        uint32_t const *x = rows + m * kSteps * 4, *y = columns + n * kSteps * 2;
        SM80_16x8x8_F32TF32TF32F32_TN::fma(c[0], c[1], c[2], c[3], x[0], x[1], x[2], x[3], y[0], y[1], c[0],
                                           c[1], c[2], c[3]);
      }
    }
  };
  if constexpr (kExact) {
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      multiply(a.low + k * 4, b.high + k * 2);
      multiply(a.high + k * 4, b.low + k * 2);
    }
  }
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) multiply(a.high + k * 4, b.high + k * 2);
}

// A tile of kRows rows in shared memory, as TensorCoreSm80<float, ...> lays it out: panels of 32 columns,
// groups of eight rows, and in these the 16-byte chunk c of row r at c ^ r. All lanes of a warp call this.
template <int kRows>
struct Tf32Tile {
  static constexpr int kPanel = 32, kGroup = 8 * kPanel;
  static_assert(kRows % 8 == 0);
  float const* data;
  int lane = read_lane_index();  // read anew for each product, so that no address stays in a register between

  // Sixteen rows of A from `row` on, k steps from `step` on.
  template <bool kExact, int kTiles, int kSteps>
  CUTE_DEVICE void load_rows(Tf32Rows<kExact, kTiles, kSteps>& a, int tile, int row, int step) const {
    int const half = lane / 8 % 2, right = lane / 16;
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      uint32_t words[4];
      load_matrices(row + half * 8, step + k, right, words);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) a.set((tile * kSteps + k) * 4 + i, __uint_as_float(words[i]));
    }
  }

  // B with k along the columns of shared memory: its rows from `row` on are eight columns of the result.
  template <bool kExact, int kSteps, int kCount>
  CUTE_DEVICE void load_columns(Tf32Operand<kExact, kCount>& b, int tile, int row, int step) const {
    static_assert(kSteps % 2 == 0);
    int const right = lane / 8 % 2, next = lane / 16;
    CUTE_UNROLL
    for (int k = 0; k < kSteps; k += 2) {
      uint32_t words[4];
      load_matrices(row, step + k, 2 * next + right, words);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) b.set((tile * kSteps + k) * 2 + i, __uint_as_float(words[i]));
    }
  }

  // B with k along the rows of shared memory, from `row` on, and eight columns from `column` on. Of eight
  // rows, a step has 0, 2, 4, 6 before 1, 3, 5, 7: so lanes read 32 banks.
  template <bool kExact, int kSteps, int kCount>
  CUTE_DEVICE void load_transposed(Tf32Operand<kExact, kCount>& b, int tile, int row, int column) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float const* const first = at(row, 2 * (lane % 4) + i, column, lane / 4);
      CUTE_UNROLL
      for (int k = 0; k < kSteps; ++k) {
        b.set((tile * kSteps + k) * 2 + i, first[k * kGroup], kAddedBesideScores);
      }
    }
  }

  // Scores of rows `rows` and columns `columns` of an accumulator, which load_rows and load_scores_transposed
  // read as operands: of eight columns 0, 2, 4, 6 come before 1, 3, 5, 7.
  template <class Scores, class Tiles>
  CUTE_DEVICE void store_scores(Scores const& scores, Tiles const& rows, Tiles const& columns) const {
    CUTE_UNROLL
    for (int n = 0; n < size<2>(scores); ++n) {
      CUTE_UNROLL
      for (int m = 0; m < size<1>(scores); ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          *const_cast<float*>(at(rows(m) + i / 2 * 8, lane / 4, columns(n), lane % 4 + i % 2 * 4)) =
              scores(i, m, n);
        }
      }
    }
  }
  // Sixteen columns of scores from `column` on as rows of A, with k along their rows, from `row` on, in the
  // order of load_transposed.
  template <bool kExact, int kSteps, int kCount>
  CUTE_DEVICE void load_scores_transposed(Tf32Operand<kExact, kCount>& a, int tile, int row,
                                          int column) const {
    int const of_column = lane / 4 / 2 + lane / 4 % 2 * 4;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      float const* const first = at(row, 2 * (lane % 4) + i / 2, column + i % 2 * 8, of_column);
      CUTE_UNROLL
      for (int k = 0; k < kSteps; ++k) {
        a.set((tile * kSteps + k) * 4 + i, first[k * kGroup], kAddedBesideScores);
      }
    }
  }

 private:
  // A row among eight from `row` on, and a column among eight from `column` on: of constants and of a lane's
  // places, so that no division is left.
  CUTE_DEVICE float const* at(unsigned row, unsigned of_row, unsigned column, unsigned of_column) const {
    unsigned const chunk = (column % kPanel / 4 + of_column / 4) ^ of_row;
    return data + column / kPanel * (kRows * kPanel) + row * kPanel + of_row * kPanel + chunk * 4 +
           of_column % 4;
  }
  // Four matrices of eight rows and four columns; this lane names a row of one of them: of the eight from
  // `row` on, and which chunk of 16 bytes from that of a k step on.
  CUTE_DEVICE void load_matrices(int row, int step, int of_step, uint32_t (&words)[4]) const {
    int const of_row = lane % 8;
    int const chunk = (step % 4 * 2 + of_step) ^ of_row;
    auto const* const source = reinterpret_cast<uint128_t const*>(data + step / 4 * (kRows * kPanel) +
                                                                  (row + of_row) * kPanel + chunk * 4);
    SM75_U32x4_LDSM_N::copy(*source, words[0], words[1], words[2], words[3]);
  }
};

}  // namespace flash_cute
