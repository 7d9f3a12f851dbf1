// What a step of the backward does where scores are not the product's alone, or where dropout drops pairs:
// P = exp2(x - LSE), dS = P (Z dP / keep - delta) (1 - tanh^2), and P Z for dV, of Z = 0 for a pair that is
// dropped, else 1.
#pragma once

#include <cuda_fp16.h>

#include "flash_cute/attention/scores/dropout.hpp"
#include "flash_cute/attention/scores/general.hpp"
#include "flash_cute/backward/mask.hpp"

namespace flash_cute {

// Of kernels that know of nothing but products.
struct ProductStep {
  template <class Scores>
  CUTE_DEVICE void change(Scores&) {}
  template <class Scores>
  CUTE_DEVICE void level(Scores&) const {}
  CUTE_DEVICE float scale_log2(float of_product) const { return of_product; }
  template <class Probabilities>
  CUTE_DEVICE Probabilities& of_dv(Probabilities& acc_p) const {
    return acc_p;
  }
  template <class Probabilities>
  CUTE_DEVICE void differentiate(Probabilities&) const {}
  template <class Gradients>
  CUTE_DEVICE void drop(Gradients&) const {}
};

// Dropout: of TileDropout's kind. kQueries: of the tile.
template <class Element, QueryAxis axis, int kQueries, class Coords, class Dropout, BiasLoads loads>
struct GeneralStep {
  static constexpr int kValues = decltype(size(std::declval<Coords>()))::value;
  static constexpr bool kClearsRounded =
      requires(Dropout dropout, decltype(make_tensor<Element>(Coords{}.layout())) rounded) {
        dropout.clear_rounded(rounded);
      };
  ScoreParams const& params;
  ScorePlace place;
  int m_begin, n_begin;  // the first query and the first key of the pairs
  Coords const& cS;
  Dropout dropout;
  AlibiSlopes<axis, Coords> slopes;
  // Tanh of what a cap bounds: of 16-bit operands as numbers of 11 bits.
  std::conditional_t<std::is_same_v<Element, float>, float2, __half2> tanhs[kValues / 2];

  CUTE_DEVICE GeneralStep(ScoreParams const& params_, ScorePlace const& place_, int m_begin_, int n_begin_,
                          Coords const& cS_, Dropout const& dropout_)
      : params(params_), place(place_), m_begin(m_begin_), n_begin(n_begin_), cS(cS_), dropout(dropout_) {
    slopes.begin(params, place, OneHead{}, m_begin, cS);
  }

  // Products become scores, if anything changes them.
  template <class Scores>
  CUTE_DEVICE void change(Scores& acc_s) {
    if (!params.change()) return;
    auto keep = [&] {
      CUTE_UNROLL
      for (int i = 0; i < kValues; i += 2) keep_tanhs(i, acc_s(i), acc_s(i + 1));
    };
    GeneralScores<Element, loads>::template change<axis>(params, place, OneHead{}, m_begin, n_begin, cS,
                                                         slopes, acc_s, keep);
  }
  // After all of the bias has been added.
  template <class Scores>
  CUTE_DEVICE void level(Scores& acc_s) const {
    if (!params.bias.given) return;
    if (m_begin + kQueries > place.queries)
      GeneralScores<Element>::template clear_unused<axis>(place, m_begin, cS, acc_s);
    if (*params.lowest.exist)
      GeneralScores<Element>::template level_lowest<axis>(params, place, m_begin, n_begin, cS, acc_s);
  }
  CUTE_DEVICE float scale_log2(float) const { return params.unit * float(M_LOG2E); }

  // Returns P Z, as an operand where operands have 16 bits. P becomes P (1 - tanh^2), of which dS is a
  // multiple.
  template <class Probabilities>
  CUTE_DEVICE auto of_dv(Probabilities& acc_p) const {
    if constexpr (kClearsRounded) {
      Tensor kept = convert<Element>(acc_p);
      dropout.clear_rounded(kept);
      differentiate(acc_p);
      return kept;
    } else {
      Tensor kept = make_fragment_like(acc_p);
      copy(acc_p, kept);
      dropout.clear(kept);
      differentiate(acc_p);
      return rounded<Element>(kept);
    }
  }
  template <class Probabilities>
  CUTE_DEVICE void differentiate(Probabilities& acc_p) const {
    if (params.softcap == 0) return;
    CUTE_UNROLL
    for (int i = 0; i < kValues; i += 2) {
      float2 const t = tanhs_at(i);
      acc_p(i) *= 1 - t.x * t.x;
      acc_p(i + 1) *= 1 - t.y * t.y;
    }
  }

  // dP of kept pairs, over their part; of others 0.
  template <class Gradients>
  CUTE_DEVICE void drop(Gradients& acc_dp) const {
    if (dropout.drops) {
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) acc_dp(i) *= params.dropout.inverse_keep;
    }
    dropout.clear(acc_dp);
  }

 private:
  CUTE_DEVICE void keep_tanhs(int i, float first, float second) {
    if constexpr (std::is_same_v<Element, float>) {
      tanhs[i / 2] = {first, second};
    } else {
      tanhs[i / 2] = __floats2half2_rn(first, second);
    }
  }
  CUTE_DEVICE float2 tanhs_at(int i) const {
    if constexpr (std::is_same_v<Element, float>) {
      return tanhs[i / 2];
    } else {
      return __half22float2(tanhs[i / 2]);
    }
  }
};

// A step of a kernel whose threads draw dropout themselves: do so while products are in flight.
template <class Traits, QueryAxis axis, class Coords>
CUTE_DEVICE auto score_step(BackwardParams const& params, ScorePlace const& place, int m_begin, int n_begin,
                            Coords const& cS) {
  if constexpr (Traits::kGeneral) {
    using Dropout = TileDropout<axis, Coords>;
    return GeneralStep<typename Traits::Element, axis, Traits::kBlockM, Coords, Dropout, BiasLoads::threads>(
        params.scores, place, m_begin, n_begin, cS,
        Dropout(params.scores, place, params.shape.heads_q, m_begin, n_begin, cS));
  } else {
    return ProductStep{};
  }
}

}  // namespace flash_cute
