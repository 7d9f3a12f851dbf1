// What a query adds to its column of S and of dP, -LSE / scale and delta, by products with ones beside those
// of S and dP. So P = 2^(S scale log2(e)) and dS = P dP, and no thread asks for what its queries have.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/tensor.hpp>

#include "flash_cute/core/sm90/warpgroup.hpp"

namespace flash_cute {

using namespace cute;

// A number as the sum of three of BF16, and a 0.
CUTE_DEVICE uint2 parts_in_bf16(float x) {
  auto part = [&] {
    cutlass::bfloat16_t const rounded(x);
    x -= float(rounded);
    return uint32_t(rounded.raw());
  };
  uint32_t const first = part(), second = part(), third = part();
  return {first | second << 16, third};
}

// Scores are multiplied by no less than this, so that LSE / scale is finite. What difference that makes to
// them is less than 2^-20 where products of q and k are less than 2^80.
CUTE_DEVICE float scale_of_scores(float softmax_scale) { return fmaxf(softmax_scale, 0x1p-100f); }

// Of a query with this LSE, +inf if it does not count. Scores of -inf alone, whose LSE is -inf, are NaN once
// they are divided by their sum; so are those among which +inf is.
CUTE_DEVICE uint2 term_of_lse(float lse, bool counts, float softmax_scale) {
  if (!counts) return parts_in_bf16(-0x1p126f);
  return parts_in_bf16(lse == -INFINITY ? NAN : -lse / scale_of_scores(softmax_scale));
}

struct Lse {};
struct Delta {};

// Both terms of each query of a stage, and the ones: each is half of a row of an operand whose other half is
// the same, so they count twice. BF16, as products of one shape follow each other in order without a fence.
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

  // By 16 threads, before a barrier of the block.
  CUTE_DEVICE static void set_ones(Storage& storage, int thread) {
    constexpr uint32_t kHalf = 0x3f00, kHalves = kHalf | kHalf << 16;
    storage.ones[thread / 8][thread % 8] =
        thread < 8 ? make_uint4(kHalves, kHalf, 0, 0) : make_uint4(0, 0, kHalves, kHalf);
    cutlass::arch::fence_view_async_shared();
  }

  // What puts acc = A B^T + Lse or Delta of each of a stage's queries, its columns, in flight.
  CUTE_DEVICE static auto issuer(Storage& storage, int warpgroup) {
    auto operand = [](uint4* memory, auto layout) {
      return make_tensor(make_smem_ptr(reinterpret_cast<Number*>(memory)), layout);
    };
    auto const slice = Mma{}.get_slice(warpgroup * 128);
    Tensor of_lse = slice.partition_fragment_A(operand(storage.ones[0], LayoutOnes{}));
    Tensor of_delta = slice.partition_fragment_A(operand(storage.ones[1], LayoutOnes{}));
    Tensor terms = slice.partition_fragment_B(operand(storage.terms[0], LayoutTerms{}));
    return [=]<class Term>(Term, int stage, auto& mma, auto const& a, auto const& b, auto& acc) {
      Mma mma_terms;
      warpgroup_fence_operand(acc);
      warpgroup_arrive();
      multiply_slices(GMMA::ScaleOut::Zero, mma, a, b, acc);
      // Last, so that A B^T is what it is in the forward, and little is lost of a difference of large
      // numbers.
      multiply_slices(GMMA::ScaleOut::One, mma_terms, std::is_same_v<Term, Lse> ? of_lse : of_delta,
                      terms(_, _, _, stage), acc);
      warpgroup_commit_batch();
    };
  }
};

}  // namespace flash_cute
