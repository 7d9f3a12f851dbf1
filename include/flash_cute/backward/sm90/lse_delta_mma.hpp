// LSE and delta by an extra MMA: products with ones add -LSE / scale to each query's column of S, and
// neg_delta to its column of dP. So P = exp2(S c) and dS = P dP, and no thread loads LSE or delta.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/tensor.hpp>

#include "flash_cute/core/sm90/warpgroup.hpp"

namespace flash_cute {

using namespace cute;

// A float as three BF16 terms that add up to it, and a 0.
CUTE_DEVICE uint2 terms_in_bf16(float x) {
  auto next_term = [&] {
    cutlass::bfloat16_t const rounded(x);
    x -= float(rounded);
    return uint32_t(rounded.raw());
  };
  uint32_t const first = next_term(), second = next_term(), third = next_term();
  return {first | second << 16, third};
}

// The scale has a lower bound, so that LSE / scale is finite. This changes scaled scores by less than 2^-20
// where products of q and k are less than 2^80.
CUTE_DEVICE float scale_of_scores(float softmax_scale) { return fmaxf(softmax_scale, 0x1p-100f); }

// The terms of -LSE / scale. A query that is not valid gets a large LSE, so that its P is 0. An LSE of -inf
// means that all scores are -inf, whose P is NaN; the same holds for an LSE of +inf.
CUTE_DEVICE uint2 terms_of_lse(float lse, bool is_valid, float softmax_scale) {
  if (!is_valid) return terms_in_bf16(-0x1p126f);
  return terms_in_bf16(lse == -INFINITY ? NAN : -lse / scale_of_scores(softmax_scale));
}

// Which term an MMA adds.
struct Lse {};
struct Delta {};

// The operands in shared memory: terms of LSE and delta of each query of a stage, and ones. A row of an
// operand has 16 elements, but both of its halves are the same 8 in memory, so each product counts twice and
// the ones are halves. The type is BF16 for every element type.
template <int kKeys, int kQueries, int kStages, class KeyLayout>
struct LseDeltaMma {
  using Number = cutlass::bfloat16_t;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Number, Number, float, Shape<Int<kKeys>, Int<kQueries>, _16>>(), KeyLayout{}));
  using Row = Shape<_8, _2>;
  using LayoutOnes = Layout<Shape<Shape<_8, Int<kKeys / 8>>, Row>, Stride<Stride<_8, _0>, Stride<_1, _0>>>;
  using LayoutTerms = Layout<Shape<Shape<_8, Int<kQueries / 8>>, Row, Int<kStages>>,
                             Stride<Stride<_8, _64>, Stride<_1, _0>, Int<8 * kQueries>>>;
  struct Storage {
    alignas(128) uint4 terms[kStages][kQueries];
    alignas(128) uint4 ones[2][8];
  };

  // Writes the ones, by 16 threads and before a barrier of the thread block.
  CUTE_DEVICE static void set_ones(Storage& storage, int thread) {
    constexpr uint32_t kHalf = 0x3f00, kDqHalves = kHalf | kHalf << 16;
    storage.ones[thread / 8][thread % 8] =
        thread < 8 ? make_uint4(kDqHalves, kHalf, 0, 0) : make_uint4(0, 0, kDqHalves, kHalf);
    cutlass::arch::fence_view_async_shared();
  }

  // Returns issue(Lse{} or Delta{}, stage, mma, a, b, acc), which puts acc = A B^T + the term of each
  // column's query in flight.
  CUTE_DEVICE static auto issuer(Storage& storage, int warpgroup) {
    auto operand = [](uint4* memory, auto layout) {
      return make_tensor(make_smem_ptr(reinterpret_cast<Number*>(memory)), layout);
    };
    auto const slice = Mma{}.get_slice(warpgroup * kWarpgroupThreads);
    Tensor of_lse = slice.partition_fragment_A(operand(storage.ones[0], LayoutOnes{}));
    Tensor of_delta = slice.partition_fragment_A(operand(storage.ones[1], LayoutOnes{}));
    Tensor terms = slice.partition_fragment_B(operand(storage.terms[0], LayoutTerms{}));
    return [=]<class Term>(Term, int stage, auto& mma, auto const& a, auto const& b, auto& acc) {
      Mma mma_terms;
      warpgroup_fence_operand(acc);
      warpgroup_arrive();
      multiply_slices(GMMA::ScaleOut::Zero, mma, a, b, acc);
      // The terms come last, so that A B^T is rounded as in the forward, and the difference of large numbers
      // loses little. A product of the same shape needs no fence to follow in order (PTX ISA, wgmma.fence).
      multiply_slices(GMMA::ScaleOut::One, mma_terms, std::is_same_v<Term, Lse> ? of_lse : of_delta,
                      terms(_, _, _, stage), acc);
      warpgroup_commit_batch();
    };
  }
};

}  // namespace flash_cute
