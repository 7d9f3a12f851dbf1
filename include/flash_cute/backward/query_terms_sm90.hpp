// What a query adds to its column of S and of dP, -LSE / scale and delta, by products with ones beside those
// of S and dP. So P = 2^(S scale log2(e)) and dS = P dP, and no thread asks for what its queries have.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/tensor.hpp>

#include "flash_cute/core/warpgroup.hpp"

namespace flash_cute {

using namespace cute;

// A number as two of TF32, which together have 22 bits and a sign: as exact as a sum of floats.
CUTE_DEVICE float2 halves_in_tf32(float x) {
  auto round = [](float x) {
    uint32_t rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return __uint_as_float(rounded);
  };
  float const high = round(x);
  return {high, round(x - high)};
}

// Scores are multiplied by no less than this, so that LSE / scale is finite. What difference that makes to
// them is less than 2^-20 where products of q and k are less than 2^80.
CUTE_DEVICE float scale_of_scores(float softmax_scale) { return fmaxf(softmax_scale, 0x1p-100f); }

// Of a query with this LSE, +inf if it does not count. Scores of -inf alone, whose LSE is -inf, are NaN once
// they are divided by their sum; so are those among which +inf is.
CUTE_DEVICE float2 term_of_lse(float lse, bool counts, float softmax_scale) {
  if (!counts) return {-0x1p126f, 0};
  return halves_in_tf32(lse == -INFINITY ? NAN : -__fdividef(lse, scale_of_scores(softmax_scale)));
}

struct Lse {};
struct Delta {};

// Both terms of each query of a slot, and the ones: each is half of a row of an operand whose other half is
// the same, so they count twice.
template <int kKeys, int kQueries, int kStages, class KeyLayout>
struct QueryTerms {
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<tfloat32_t, tfloat32_t, float, Shape<Int<kKeys>, Int<kQueries>, _8>>(),
      KeyLayout{}));
  using Row = Shape<_4, _2>;
  using LayoutOnes = Layout<Shape<Shape<_8, Int<kKeys / 8>>, Row>, Stride<Stride<_4, _0>, Stride<_1, _0>>>;
  using LayoutTerms = Layout<Shape<Shape<_8, Int<kQueries / 8>>, Row, Int<kStages>>,
                             Stride<Stride<_4, _32>, Stride<_1, _0>, Int<4 * kQueries>>>;
  struct Storage {
    alignas(128) float4 ones[2][8];
    alignas(128) float4 terms[kStages][kQueries];
  };

  // By 16 threads, before a barrier of the block.
  CUTE_DEVICE static void set_ones(Storage& storage, int thread) {
    storage.ones[thread / 8][thread % 8] =
        thread < 8 ? make_float4(0.5f, 0.5f, 0, 0) : make_float4(0, 0, 0.5f, 0.5f);
    cutlass::arch::fence_view_async_shared();
  }

  // What puts acc = A B^T + Lse or Delta of each of a slot's queries, its columns, in flight.
  CUTE_DEVICE static auto issuer(Storage& storage, int warpgroup) {
    auto operand = [](float4* memory, auto layout) {
      return make_tensor(make_smem_ptr(reinterpret_cast<tfloat32_t*>(memory)), layout);
    };
    auto const slice = Mma{}.get_slice(warpgroup * 128);
    Tensor of_lse = slice.partition_fragment_A(operand(storage.ones[0], LayoutOnes{}));
    Tensor of_delta = slice.partition_fragment_A(operand(storage.ones[1], LayoutOnes{}));
    Tensor terms = slice.partition_fragment_B(operand(storage.terms[0], LayoutTerms{}));
    return [=]<class Term>(Term, int slot, auto& mma, auto const& a, auto const& b, auto& acc) {
      Mma mma_terms;
      warpgroup_fence_operand(acc);
      warpgroup_arrive();
      multiply_slices(GMMA::ScaleOut::Zero, mma_terms, std::is_same_v<Term, Lse> ? of_lse : of_delta,
                      terms(_, _, _, slot), acc);
      multiply_slices(GMMA::ScaleOut::One, mma, a, b, acc);
      warpgroup_commit_batch();
    };
  }
};

}  // namespace flash_cute
