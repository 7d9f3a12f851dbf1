// What is computed of a block of pairs whose S and dP a thread has in accumulators, and how a tile of values
// is stored: alike in both families.
#pragma once

#include "flash_cute/attention/scores/dropout.hpp"
#include "flash_cute/attention/scores/general.hpp"
#include "flash_cute/backward/scores.hpp"
#include "flash_cute/core/sm80/copy_async.hpp"
#include "flash_cute/pairs/steps.hpp"

namespace flash_cute {

// Scores become -inf where the mask hides their pairs. A row has at most 32 of a thread's.
template <class Coords, class Scores>
CUTE_DEVICE void hide_pairs(TableMask const& mask, int m_begin, int n_begin, Coords const& cS,
                            Scores& acc_s) {
  auto const coords = row_col_view(cS);
  auto scores = row_col_view(acc_s);
  constexpr int kColumns = decltype(size<1>(scores))::value;
  static_assert(kColumns <= 32);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    int const query = m_begin + get<0>(coords(row, 0)), first = n_begin + get<1>(coords(row, 0));
    auto key_of_column = [&](int col) { return first + get<1>(coords(0, col)) - get<1>(coords(0, 0)); };
    uint32_t seen = 0;
    int const ranges = query < mask.seqlen_q ? mask.count : 0;
#pragma unroll 1
    for (int i = 0; i < ranges; ++i) {
      KeyRange const range = mask.range(query, i);
      CUTE_UNROLL
      for (int col = 0; col < kColumns; ++col) {
        int const key = key_of_column(col);
        seen |= uint32_t(range.begin <= key && key < range.end) << col;
      }
    }
    if (mask.bits && seen != 0) {
      uint32_t const* const bits = mask.bits_of(query);
      CUTE_UNROLL
      for (int col = 0; col < kColumns; ++col) {
        int const key = key_of_column(col);
        if (seen >> col & 1) seen &= ~(uint32_t(~bits[key / 32] >> key % 32 & 1) << col);
      }
    }
    CUTE_UNROLL
    for (int col = 0; col < kColumns; ++col) {
      if (!(seen >> col & 1)) scores(row, col) = -INFINITY;
    }
  }
}

// A tile in shared memory of what there is of a pair: the bias, then the values. Chunks of 16 bytes are
// permuted against bank conflicts of a warp's accumulator, which has eight rows and four words of each.
template <class Element, int kTileN_>
struct PairMemory {
  static constexpr int kTileN = kTileN_, kChunk = 16 / sizeof(Element), kWarpRows = 16;
  static_assert(kTileN / kChunk % 8 == 0);
  struct alignas(2 * sizeof(Element)) Pair {
    Element values[2];
  };
  struct alignas(16) Chunk {
    Element values[kChunk];
  };
  Chunk chunks[PairTile::kBlockM * kTileN / kChunk];

  CUTE_DEVICE Chunk& chunk(int row, int column) {
    return chunks[row * (kTileN / kChunk) + (column / kChunk ^ row % 8)];
  }
  // Of neighbours, the first of which has an even column.
  CUTE_DEVICE Pair& pair(int row, int column) {
    return reinterpret_cast<Pair&>(chunk(row, column).values[column % kChunk]);
  }

  // Calls visit(i, j, pair) for the pairs (row i, columns j and j + 1) of a thread's accumulator, whose first
  // element has this row and column: rows are 8 apart, and every two columns 8. The first address is hidden
  // from the compiler, which would else keep all of them in registers.
  template <int kRows, int kColumns, class Visit>
  CUTE_DEVICE void for_each_pair(int row, int column, Visit const& visit) {
    uint32_t first = cast_smem_ptr_to_uint(&pair(row, column));
    asm volatile("" : "+r"(first));
    constexpr int kApart = 8 / kChunk;  // chunks
    CUTE_UNROLL
    for (int j = 0; j < kColumns; j += 2) {
      uint32_t const chunk = j / 2 * kApart, of_chunk = (first ^ chunk % 8 * 16) + chunk / 8 * 128;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        uint32_t words[sizeof(Pair) / 4];
        uint32_t const address = of_chunk + i * 8 * kTileN * uint32_t(sizeof(Element));
        if constexpr (sizeof(Pair) == 4) {
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(address));
        } else {
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
        }
        visit(i, j, reinterpret_cast<Pair const&>(words));
      }
    }
  }

  // Calls visit(row, column) for the chunks that a warp's lane copies of its rows and kColumns of the
  // columns.
  template <int kColumns, class Visit>
  CUTE_DEVICE static void for_each_chunk(int first_row, int first_column, Visit const& visit) {
    constexpr int kOfRow = kColumns / kChunk, kChunks = kWarpRows * kOfRow;
    static_assert(kChunks % 32 == 0);
    CUTE_UNROLL
    for (int i = 0; i < kChunks; i += 32) {
      int const index = i + threadIdx.x % 32;
      visit(first_row + index / kOfRow, first_column + index % kOfRow * kChunk);
    }
  }

  // Issues the loads of a warp's part of a tile's bias, which the warp waits for. In all steps it is the
  // same: what a bias is broadcast over has one number.
  template <int kColumns, class Steps>
  CUTE_DEVICE void load_bias(Steps const& steps, int first_row, int first_column) {
    BiasParams const& bias = steps.params.call.scores.bias;
    int const sequence = steps.entry * steps.sequences_of_entry();
    auto const* const data = static_cast<Element const*>(bias.data) +
                             sequence / bias.sequences_of_entry * bias.entry_stride +
                             steps.head * bias.head_stride;
    bool const has_chunks =
        bias.key_stride == 1 &&
        (reinterpret_cast<uintptr_t>(data) / sizeof(Element) | bias.row_stride) % kChunk == 0;
    int const m_begin = steps.m_block * PairTile::kBlockM, n_begin = steps.n_block * kTileN;
    for_each_chunk<kColumns>(first_row, first_column, [&](int row, int column) {
      Element const* const of_row = data + smaller(m_begin + row, bias.rows - 1) * bias.row_stride;
      int const key = n_begin + column;
      if (has_chunks && key + kChunk <= bias.columns) {
        SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(*reinterpret_cast<uint128_t const*>(of_row + key),
                                                   reinterpret_cast<uint128_t&>(chunk(row, column)));
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kChunk; ++i)
          chunk(row, column).values[i] = of_row[smaller(key + i, bias.columns - 1) * bias.key_stride];
      }
    });
  }

  // Stores a warp's part of a tile's values, times scale, to rows that are `stride` apart; column: of the
  // accumulator's first.
  template <int kColumns, class Steps, class Coords, class Values>
  CUTE_DEVICE void store(Steps const& steps, int first_row, int first_column, Coords const& cS,
                         Values const& acc, void* all, int stride, float scale) {
    PairShape const& shape = steps.params.shape;
    auto const coords = row_col_view(cS);
    auto const values = row_col_view(acc);
    asm volatile("" : "+r"(first_column));  // the compiler would else keep all addresses in registers
    __syncwarp();
    CUTE_UNROLL
    for (int row = 0; row < size<0>(values); ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(values); col += 2) {
        pair(get<0>(coords(row, col)), first_column + get<1>(coords(row, col))) = {
            Element(scale * values(row, col)), Element(scale * values(row, col + 1))};
      }
    }
    __syncwarp();
    auto* const target = static_cast<Element*>(all) + steps.first_value(stride);
    int const rows = shape.rows - steps.m_block * PairTile::kBlockM,
              columns = shape.columns - steps.n_block * kTileN;
    for_each_chunk<kColumns>(first_row, first_column, [&](int row, int column) {
      if (row >= rows) return;
      Element* const of_row = target + int64_t(row) * stride + column;
      Chunk const& found = chunk(row, column);
      if (stride % kChunk == 0) {
        if (column < columns) *reinterpret_cast<Chunk*>(of_row) = found;
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kChunk; ++i) {
          if (column + i < columns) of_row[i] = found.values[i];
        }
      }
    });
    __syncwarp();
  }

  // Stores what is asked for of a tile but sums that are to be added up; returns whether these are.
  template <int kColumns, class Steps, class Coords, class Values>
  CUTE_DEVICE bool store(Steps const& steps, int first_row, int first_column, Coords const& cS,
                         Values const& weights, Values const& sums) {
    PairParams const& params = steps.params;
    if (params.weights) {
      store<kColumns>(steps, first_row, first_column, cS, weights, params.weights, params.weights_stride,
                      1.f);
    }
    if (params.sums && steps.stores_values()) {
      store<kColumns>(steps, first_row, first_column, cS, sums, params.sums, params.shape.columns,
                      params.call.scores.bias_scale);
    }
    return params.sums && !steps.stores_values();
  }
};

// The block of a step.
template <class Element, int kBlockM, int kTileN, class Coords>
struct PairBlock {
  using Dropout = TileDropout<QueryAxis::rows, Coords>;
  using Change = GeneralScores<Element, BiasLoads::none>;
  static constexpr int kRows = decltype(size<0>(row_col_view(std::declval<Coords const&>())))::value;
  PairParams const& params;
  PairStep const& step;
  int column, n_begin;  // the first one of the accumulator, in the tile and of the sequence's keys
  Coords const& cS;
  float lse[kRows], neg_delta[kRows];

  CUTE_DEVICE PairBlock(PairParams const& params_, PairPlan const& plan, PairStep const& step_, int column_,
                        Coords const& cS_)
      : params(params_), step(step_), column(column_), n_begin(step_.n_begin + column_), cS(cS_) {
    BackwardParams const& call = params.call;
    int64_t const block = int64_t(step.head) * plan.q_blocks + step.b * (plan.q_blocks / call.shape.batch);
    int64_t const offset = block * kBlockM + step.m_begin;
    auto const coords = row_col_view(cS);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = get<0>(coords(i, 0));
      bool const is_valid = step.m_begin + row < step.queries;
      lse[i] = is_valid ? call.workspace.lse_delta.lse[offset + row] : INFINITY;
      neg_delta[i] = is_valid ? call.workspace.lse_delta.neg_delta[offset + row] : 0.f;
    }
  }

  // S becomes P.
  template <class Memory, class Scores>
  CUTE_DEVICE void weigh(Memory& bias, Scores& acc_s) const {
    BackwardParams const& call = params.call;
    ScoreParams const& scores = call.scores;
    ScorePlace const place = step.place();
    AlibiSlopes<QueryAxis::rows, Coords> slopes;
    slopes.begin(scores, place, OneHead{}, step.m_begin, cS);
    Change::template change<QueryAxis::rows>(scores, place, OneHead{}, step.m_begin, n_begin, cS, slopes,
                                             acc_s);
    if (scores.bias.given) {
      auto rows = row_col_view(acc_s);
      auto const first = cS(0);
      bias.template for_each_pair<kRows, decltype(size<1>(rows))::value>(
          get<0>(first), column + get<1>(first), [&](int i, int j, auto const& pair) {
            rows(i, j) = fmaf(float(pair.values[0]), scores.of_bias, rows(i, j));
            rows(i, j + 1) = fmaf(float(pair.values[1]), scores.of_bias, rows(i, j + 1));
          });
    }
    if (scores.bias.given && *scores.lowest.exist)
      Change::template level_lowest<QueryAxis::rows>(scores, place, step.m_begin, n_begin, cS, acc_s);
    if (!step.is_full) {
      auto const table = MaskTable::make(call, call.workspace.mask_table, kBlockM, kTileN, false);
      hide_pairs(table.mask(step.b, step.head, 0, step.queries, step.keys), step.m_begin, n_begin, cS, acc_s);
    }
    compute_p<QueryAxis::rows>(acc_s, scores.unit * float(M_LOG2E), [&](int row) { return lse[row]; });
    if (step.is_full) return;
    // Of a query that does not count, whose row may be no number.
    auto p = row_col_view(acc_s);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; lse[row] == INFINITY && col < size<1>(p); ++col) p(row, col) = 0.f;
    }
  }

  // Adds dS = P (dP - delta), which is 0 where P is: neither factor counts then, whatever it is. P becomes
  // what multiplies V, where that is asked for.
  template <class Probabilities, class Gradients, class Values>
  CUTE_DEVICE void add_gradients(Probabilities& acc_p, Gradients& acc_dp, Values& values) const {
    Dropout const dropout(params.call.scores, step.place(), params.call.shape.heads_q, step.m_begin, n_begin,
                          cS);
    drop(dropout, acc_dp);
    auto const p = row_col_view(acc_p);
    auto const dp = row_col_view(acc_dp);
    auto sums = row_col_view(values);
    auto add = [&](auto of_all) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int col = 0; col < size<1>(p); ++col) {
          float const gradient = dp(row, col) + neg_delta[row];
          if (of_all || p(row, col) != 0.f) sums(row, col) = fmaf(p(row, col), gradient, sums(row, col));
        }
      }
    };
    if (step.is_full) {
      add(std::true_type{});
    } else {
      add(std::false_type{});
    }
    if (params.weights) drop(dropout, acc_p);
  }

 private:
  template <class Values>
  CUTE_DEVICE void drop(Dropout const& dropout, Values& acc) const {
    BackwardParams const& call = params.call;
    if (!dropout.drops) return;
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) acc(i) *= call.scores.dropout.inverse_keep;
    dropout.clear(acc);
  }
};

// Adds up a tile of sums, which lies in shared memory in rows of `stride`, over the dimensions that have one
// number for all, and stores it. By kThreads threads, which sync() synchronises.
template <class Element, int kThreads, class Steps, class Sync>
CUTE_DEVICE void store_sums(Steps const& steps, float* tile, int stride, int thread, Sync const& sync) {
  PairParams const& params = steps.params;
  PairShape const& shape = params.shape;
  if (shape.columns == 1) {
    for (int row = thread / 32; row < Steps::kBlockM; row += kThreads / 32) {
      float sum = 0;
      for (int column = thread % 32; column < Steps::kTileN; column += 32) sum += tile[row * stride + column];
      CUTE_UNROLL
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      __syncwarp();
      tile[row * stride] = sum;
    }
    sync();
  }
  int const rows = smaller(Steps::kBlockM, shape.rows - steps.m_block * Steps::kBlockM),
            columns = smaller(Steps::kTileN, shape.columns - steps.n_block * Steps::kTileN);
  float const scale = params.call.scores.bias_scale;
  int64_t const first = steps.first_value(shape.columns);
  for (int i = thread; i < rows * columns; i += kThreads) {
    int const row = i / columns, column = i - row * columns;
    float sum = tile[row * stride + column];
    for (int m = 1; shape.rows == 1 && m < Steps::kBlockM; ++m) sum += tile[m * stride + column];
    int64_t const at = first + int64_t(row) * shape.columns + column;
    if (params.parts) {
      params.parts[at] = sum;
    } else {
      static_cast<Element*>(params.sums)[at] = Element(scale * sum);
    }
  }
}

// The sums of parts, in their order. family: each has a kernel of its own, for its own GPUs.
template <Family family, class Element>
__global__ void sum_pair_parts(__grid_constant__ PairParams const params, int const parts) {
  int64_t const count = params.shape.count(), step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    float sum = 0;
    for (int part = 0; part < parts; ++part) sum += params.parts[part * count + i];
    static_cast<Element*>(params.sums)[i] = Element(params.call.scores.bias_scale * sum);
  }
}

}  // namespace flash_cute
