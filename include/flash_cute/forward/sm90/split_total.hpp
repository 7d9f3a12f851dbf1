// Splits of a fixed length of the keys, added up by the tile of the Hopper family's forward that has them.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/core/special_registers.hpp"
#include "flash_cute/forward/epilogue.hpp"
#include "flash_cute/forward/fold.hpp"

namespace flash_cute {

using namespace cute;

// The total of a tile's splits before the one that it computes. Registers have no room for a second O, so it
// lies in the workspace, where L2 serves it: of each of kThreads consumers its share, kPieces of four
// numbers.
template <class Softmax, int kPieces, int kFirstThread, int kThreads>
struct SplitTotal {
  static constexpr int kRows = 2;
  static constexpr int kOfRows = kPieces;  // the piece that has LSEs and sums
  struct Sums {
    static constexpr bool kAreOfSinks = false;  // there may be none
    float of_row[kRows];
    CUTE_DEVICE float weighted(int row, float weight) const { return __fmul_rn(of_row[row], weight); }
  };
  float* totals;
  bool exists = false;  // of this tile

  static constexpr int kAtOnce = 4;  // pieces
  static_assert(kPieces % kAtOnce == 0);

  // Adds a split that has ended.
  template <class Output>
  CUTE_DEVICE void add(Softmax& split, Output& acc_o) {
    normalize_split(split, acc_o);
    Rows const rows = fold_rows(split);
    piece(kOfRows) = make_float4(rows.highest[0], rows.highest[1], rows.sum[0], rows.sum[1]);
    CUTE_UNROLL
    for (int first = 0; first < kPieces; first += kAtOnce) {
      float4 before[kAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i)
        before[i] = exists ? piece(first + i) : make_float4(kNoTotal, kNoTotal, kNoTotal, kNoTotal);
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const at = 4 * (first + i);
        fold_piece(before[i], rows, at, acc_o);
        piece(first + i) = make_float4(acc_o(at), acc_o(at + 1), acc_o(at + 2), acc_o(at + 3));
      }
    }
    exists = true;
  }

  // Adds the last split, which has been normalised: its softmax and O become those of all. Returns the sums
  // of weights, which are 1 where there is no other split.
  template <class Output>
  CUTE_DEVICE Sums add_last(Softmax& split, Output& acc_o) const {
    if (!exists) return {{1.f, 1.f}};
    Rows const rows = fold_rows(split);
    float4 const* const own = &piece(0);
    CUTE_UNROLL
    for (int first = 0; first < kPieces; first += kAtOnce) {
      float4 before[kAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) before[i] = own[(first + i) * kThreads];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) fold_piece(before[i], rows, 4 * (first + i), acc_o);
      __threadfence_block();  // else the compiler loads all pieces at once, and spills
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) split.row_max[row] = rows.highest[row];
    bool const is_empty = rows.highest[0] == -INFINITY || rows.highest[1] == -INFINITY;
    if (__any_sync(~0u, is_empty)) {
      CUTE_UNROLL
      for (int i = 0; i < size(acc_o); ++i) {
        if (rows.highest[row_of(i)] == -INFINITY) acc_o(i) = 0.f;
      }
    }
    return {{rows.sum[0], rows.sum[1]}};
  }

 private:
  struct Rows {
    float highest[kRows], sum[kRows];
    FoldWeights weights[kRows];
  };

  // Found anew each time: that takes fewer registers. The compiler then cannot tell one from another either,
  // so that it loads no piece before those of the step before are stored.
  CUTE_DEVICE float4& piece(int i) const {
    int const thread = read_thread_index() - kFirstThread;  // among the consumers
    auto* const of_block =
        reinterpret_cast<float4*>(totals) + int64_t(read_block_index()) * (kPieces + 1) * kThreads;
    return of_block[i * kThreads + thread];
  }

  // Two neighbouring columns of the first row, two of the second, and so on.
  CUTE_DEVICE static constexpr int row_of(int i) { return i / 2 % kRows; }

  // The rows with one more split, which has ended.
  CUTE_DEVICE Rows fold_rows(Softmax const& split) const {
    Rows rows{{-INFINITY, -INFINITY}, {0.f, 0.f}};
    if (exists) {
      float4 const before = piece(kOfRows);
      rows = {{before.x, before.y}, {before.z, before.w}};
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const lse = split.lse(row), raised = fmaxf(rows.highest[row], lse);
      rows.weights[row] = fold_weights(rows.highest[row], raised, lse);
      rows.highest[row] = raised;
      rows.sum[row] = fold_sum(rows.sum[row], rows.weights[row]);
    }
    return rows;
  }
  template <class Output>
  CUTE_DEVICE static void fold_piece(float4 const& before, Rows const& rows, int at, Output& acc_o) {
    static_assert(decltype(size(acc_o))::value == 4 * kPieces);
    float const total[4] = {before.x, before.y, before.z, before.w};
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) acc_o(at + j) = fold(total[j], acc_o(at + j), rows.weights[row_of(j)]);
  }
};

}  // namespace flash_cute
