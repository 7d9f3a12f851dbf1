// Slices of 16 columns of a tile's K or V that consumers keep in registers, so that the products of S and dP,
// whose left operands K and V are, read less shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/backward/sm90/traits.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"

namespace flash_cute {

// kColumns: of K or of V. Two of its slices stay in shared memory: where none does, ptxas serialises
// products.
template <class Traits, int kColumns>
struct RegisterSlices {
  using Element = typename Traits::Element;
  static constexpr int kSlices = smaller(Traits::kTile.register_slices, kColumns / 16 - 2);
  using TileSlices = Shape<Int<Traits::kBlockN>, Int<16 * (kSlices > 0 ? kSlices : 1)>>;
  using Mma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float,
                           Shape<Int<Traits::kBlockN>, Int<Traits::kBlockM>, Int<kColumns>>>(),
      typename Traits::KeyLayout{}));
  using Slices = decltype(make_tensor<Element>(partition_shape_A(Mma{}, TileSlices{})));
  Slices slices;  // (MMA, MMA_N, SLICE)

  // Loads the slices from K or V in shared memory, (N, D). thread: of kKeyThreads.
  template <class Keys>
  CUTE_DEVICE void load(Keys const& keys, int thread) {
    if constexpr (kSlices > 0) {
      auto const copy_slices = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, Mma{});
      auto const thread_copy = copy_slices.get_slice(thread);
      Tensor from = thread_copy.partition_S(keys);
      Tensor to = thread_copy.retile_D(slices);
      CUTE_UNROLL
      for (int k = 0; k < kSlices; ++k) copy(copy_slices, from(_, _, k), to(_, _, k));
    }
  }

  // The operand with its first slices in registers.
  template <class Operand>
  CUTE_DEVICE auto of(Operand const& operand) const {
    if constexpr (kSlices > 0) {
      return LeftOperand<Mma, Slices, Operand>{slices, operand};
    } else {
      return operand;
    }
  }
};

}  // namespace flash_cute
