// What changes scores between the product and the softmax: x = cap tanh(scale S / cap) + bias - slope
// |distance|, in base 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flash_cute/attention/online_softmax.hpp"
#include "flash_cute/attention/scores/dropout.hpp"
#include "flash_cute/attention/scores/lowest.hpp"
#include "flash_cute/attention/scores/pairs.hpp"
#include "flash_cute/attention/scores/place.hpp"
#include "flash_cute/core/math.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// ALiBi for an accumulator's pairs. Rows that are queries may be of several heads, columns are of one.
template <QueryAxis axis, class Coords>
class AlibiSlopes {
  static constexpr int kRows =
      axis == QueryAxis::rows ? decltype(size<0>(row_col_view(std::declval<Coords const&>())))::value : 1;
  float slopes_[kRows], distances_[kRows];  // from the first query of a row to key 0

 public:
  // Loads the slopes of `place`, from query m_begin on: of all blocks of keys.
  template <class Pack>
  CUTE_DEVICE void begin(ScoreParams const& params, ScorePlace const& place, Pack const& rows, int m_begin,
                         Coords const& cS) {
    if (!params.has_slopes) return;
    auto const coords = query_key_view<axis>(cS);
    float const* const of_heads = params.slopes + place.sequence * params.slopes_stride + place.head;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = query_of<axis>(coords(i, 0));
      slopes_[i] = -of_heads[rows.uses(row) ? rows.head(row) : 0] * params.inverse_unit;
      distances_[i] = place.diagonal + m_begin + rows.query(row) - key_of<axis>(coords(0, 0));
    }
  }

  // Of a block of keys from n_begin on.
  template <class Scores>
  CUTE_DEVICE void apply(int n_begin, Coords const& cS, Scores& acc_s) const {
    auto scores = query_key_view<axis>(acc_s);
    auto const offsets = query_key_view<axis>(cS).layout();  // from the first pair, constants
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      int const row = axis == QueryAxis::rows ? i : 0;
      float const distance = distances_[row] - n_begin;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        int const query = axis == QueryAxis::rows ? 0 : int(query_of<axis>(offsets(i, 0)));
        float const further = query - int(key_of<axis>(offsets(0, j)));
        scores(i, j) = fmaf(slopes_[row], fabsf(distance + further), scores(i, j));
      }
    }
  }
};

// Loads four matrices of 8 x 8 numbers of 16 bits from shared memory; each lane has the address of a row.
template <bool kTransposed>
CUTE_DEVICE void load_matrices(uint32_t address, uint32_t (&words)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
  }
}

struct DoNothing {
  CUTE_DEVICE void operator()() const {}
};

// How a kernel gets a bias.
enum class BiasLoads {
  none,     // it has none
  threads,  // each thread loads its own, of any strides
  tiles,    // in tiles, which the kernel adds itself, where TMA can load them
};

template <class Element, BiasLoads loads = BiasLoads::threads>
struct GeneralScores {
  // Accurate where float32 is asked for; else within 2^-11 of it, as 16-bit operands are.
  CUTE_DEVICE static float tanh_of(float x) {
    if constexpr (std::is_same_v<Element, float>) {
      return tanhf(x);
    } else {
      float y;
      asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
      return y;
    }
  }

  // Products become scores, those of `place` from query m_begin and key n_begin on; something changes them.
  // In units of ScoreParams::unit. at_tanh(): called when they are tanh(scale S / cap).
  template <QueryAxis axis, class Pack, class Coords, class Scores, class AtTanh = DoNothing>
  CUTE_DEVICE static void change(ScoreParams const& params, ScorePlace const& place, Pack const& rows,
                                 int m_begin, int n_begin, Coords const& cS,
                                 AlibiSlopes<axis, Coords> const& slopes, Scores& acc_s,
                                 AtTanh&& at_tanh = {}) {
    if (params.softcap > 0) {
      cap(params, acc_s);
      at_tanh();
    }
    if (params.has_slopes) slopes.apply(n_begin, cS, acc_s);
    if constexpr (loads != BiasLoads::none) {
      if (params.bias.given && !params.bias.is_tiled)
        add_bias<axis>(params, place, rows, m_begin, n_begin, cS, acc_s);
    }
  }

  // tanh(scale S / cap).
  template <class Scores>
  CUTE_DEVICE static void cap(ScoreParams const& params, Scores& acc_s) {
    CUTE_UNROLL
    for (int i = 0; i < size(acc_s); ++i) acc_s(i) = tanh_of(acc_s(i) * params.of_tanh);
  }

  // Scores of queries that do not count become 0, whatever their bias was: of the backward, where they are
  // columns of sums.
  template <QueryAxis axis, class Coords, class Scores>
  CUTE_DEVICE static void clear_unused(ScorePlace const& place, int m_begin, Coords const& cS,
                                       Scores& acc_s) {
    auto scores = query_key_view<axis>(acc_s);
    auto const coords = query_key_view<axis>(cS);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      if (m_begin + query_of<axis>(coords(i, 0)) < place.queries) continue;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) scores(i, j) = 0;
    }
  }

  // Scores of LowestRows become 0, but for those that their bias hides.
  template <QueryAxis axis, class Coords, class Scores>
  CUTE_DEVICE static void level_lowest(ScoreParams const& params, ScorePlace const& place, int m_begin,
                                       int n_begin, Coords const& cS, Scores& acc_s) {
    auto scores = query_key_view<axis>(acc_s);
    auto const coords = query_key_view<axis>(cS);
    float const* const lse = params.lowest.lse + place.sequence * params.lowest.lse_batch_stride +
                             int64_t(place.head) * params.lowest.seqlen_q + place.query_begin + m_begin;
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      int const query = query_of<axis>(coords(i, 0));
      bool const exists = place.query_begin + m_begin + query < params.lowest.seqlen_q;
      if (!exists || !LowestRows::has(lse[query])) continue;
#pragma unroll 1
      for (int j = 0; j < size<1>(scores); ++j) {
        float const bias = bias_of(params.bias, place, place.query_begin + m_begin + query,
                                   place.key_begin + n_begin + key_of<axis>(coords(i, j)));
        CUTE_UNROLL
        for (int k = 0; k < size<1>(scores); ++k) {
          if (k == j) scores(i, k) = bias == -INFINITY ? -INFINITY : 0.f;
        }
      }
    }
  }
  CUTE_DEVICE static float bias_of(BiasParams const& bias, ScorePlace const& place, int query, int key) {
    return static_cast<Element const*>(
        bias.data)[place.sequence / bias.sequences_of_entry * bias.entry_stride +
                   place.head * bias.head_stride + smaller(query, bias.rows - 1) * bias.row_stride +
                   smaller(key, bias.columns - 1) * bias.key_stride];
  }

  template <QueryAxis axis, class Pack, class Coords, class Scores>
  CUTE_DEVICE static void add_bias(ScoreParams const& params, ScorePlace const& place, Pack const& rows,
                                   int m_begin, int n_begin, Coords const& cS, Scores& acc_s) {
    auto scores = query_key_view<axis>(acc_s);
    auto const coords = query_key_view<axis>(cS);
    BiasParams const& bias = params.bias;
    Element const* const entry =
        static_cast<Element const*>(bias.data) + place.sequence / bias.sequences_of_entry * bias.entry_stride;
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      int const row = query_of<axis>(coords(i, 0));
      int const head = rows.uses(row) ? rows.head(row) : 0;
      // What lies behind the last row or column belongs to pairs that are hidden.
      int const query = smaller(place.query_begin + m_begin + rows.query(row), bias.rows - 1);
      Element const* const of_row = entry + (place.head + head) * bias.head_stride + query * bias.row_stride;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        int const key = smaller(place.key_begin + n_begin + key_of<axis>(coords(i, j)), bias.columns - 1);
        scores(i, j) = plus_bias(params, scores(i, j), of_row[key * bias.key_stride]);
      }
    }
  }

  // Calls visit(row, score, bias) for each of a lane's scores, of a bias in shared memory that has the
  // accumulator's rows and columns. first_row: of the warp. Rows of queries have 128 bytes in the swizzle of
  // TMA, whose addresses differ by constants but for two bits.
  template <QueryAxis axis, class Bias, class Scores, class Visit>
  CUTE_DEVICE static void visit_bias_tile(Bias const& sBias, int first_row, Scores& acc_s,
                                          Visit const& visit) {
    auto scores = row_col_view(acc_s);
    static_assert(decltype(size<0>(scores))::value == 2);
    int const lane = threadIdx.x % 32, next_rows = lane / 8 % 2 * 8, next_columns = lane / 16 * 8,
              own = lane % 8;
    constexpr bool kByRows = axis == QueryAxis::rows;
    constexpr uint32_t kRowBytes = 128, kPanelBytes = kWarpgroupRows * kRowBytes, kChunks = 4;  // of a row
    uint32_t const first = cast_smem_ptr_to_uint(
        &sBias(first_row + next_rows + (kByRows ? own : 0), next_columns + (kByRows ? 0 : own)));
    CUTE_UNROLL
    for (int column = 0; column < size<1>(scores); column += 4) {
      uint32_t const chunk = column / 4;  // 16 columns of the tile
      uint32_t words[4];  // of the upper and lower rows, of eight columns and then of the next eight
      if constexpr (kByRows) {
        load_matrices<false>((first ^ chunk % kChunks * 32) + chunk / kChunks * kPanelBytes, words);
      } else {
        load_matrices<true>(first + chunk * 16 * kRowBytes, words);
      }
      auto const& biases = reinterpret_cast<cutlass::Array<Element, 8> const&>(words);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        int const row = i / 2 % 2;
        visit(row, scores(row, column + i / 4 * 2 + i % 2), float(biases[i]));
      }
    }
  }

  // Lowest numbers may become -inf: no matter beside others of a row, but see weigh_lowest.
  template <QueryAxis axis, class Bias, class Scores>
  CUTE_DEVICE static void add_bias_tile(ScoreParams const& params, Bias const& sBias, int first_row,
                                        Scores& acc_s) {
    visit_bias_tile<axis>(sBias, first_row, acc_s,
                          [&](int, float& score, float bias) { score = fmaf(bias, params.of_bias, score); });
  }

  // Rows that have seen no score above the lowest, from which their maxima start, up to this block of keys
  // weigh alike those that are not hidden.
  // acc_p: probabilities, of which softmax has the sums.
  // apply_mask(acc): makes those of hidden pairs -inf.
  template <class Softmax, class Bias, class ApplyMask, class Probabilities>
  CUTE_DEVICE static void weigh_lowest(ScoreParams const& params, Softmax& softmax, Bias const& sBias,
                                       int first_row, ApplyMask const& apply_mask, Probabilities& acc_p) {
    float const lowest = params.lowest_score * softmax.scale_log2;
    bool is_low = false;
    CUTE_UNROLL
    for (float const highest : softmax.row_max) is_low |= highest <= lowest;
    if (!__any_sync(~0u, is_low)) return;
    // In the place of such a row's probabilities: its biases, cut by the mask, and what they weigh.
    auto p = row_col_view(acc_p);
    bool low[2];
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      low[row] = softmax.row_max[row] <= lowest;
      CUTE_UNROLL
      for (int col = 0; low[row] && col < size<1>(p); ++col) softmax.row_sum[row] -= p(row, col);
    }
    visit_bias_tile<QueryAxis::rows>(sBias, first_row, acc_p, [&](int row, float& p, float bias) {
      if (low[row]) p = bias;
    });
    apply_mask(acc_p);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      float sum = 0;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(p); ++col) {
        bool const is_hidden = p(row, col) == -INFINITY;
        if (is_hidden || low[row]) p(row, col) = is_hidden ? 0.f : 1.f;
        sum += p(row, col);
      }
      if (low[row]) softmax.row_sum[row] += sum;
    }
  }

  // The lowest numbers of bfloat16 and float32 would become infinite in other units, which hides a pair.
  CUTE_DEVICE static float plus_bias(ScoreParams const& params, float score, float bias) {
    float const sum = fmaf(bias, params.of_bias, score);
    return sum < params.lowest_score && bias != -INFINITY ? params.lowest_score : sum;
  }
};

}  // namespace flash_cute
