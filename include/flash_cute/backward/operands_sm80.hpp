// How the Ampere family's backward brings tiles to shared memory and multiplies what lies there.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/copy.hpp"
#include "flash_cute/core/gemm.hpp"

namespace flash_cute {

using namespace cute;

// Issues the loads of the tile of this shape that begins at row `first` of a head.
template <class Element, class TiledLoad, class Atom, class TileShape, class Target>
CUTE_DEVICE void load_tile(TiledLoad const& tiled_load, Atom const& atom, int thread, TensorView const& view,
                           int entry, int head, int64_t first, TileShape tile_shape,
                           TileInterior const& interior, Target&& target) {
  auto const loader = tiled_load.get_slice(thread);
  Tensor source = local_tensor<Element>(view, entry, head, first, tile_shape);
  copy_async(atom, loader.partition_S(source), loader.partition_D(target),
             loader.partition_S(make_identity_tensor(tile_shape)), interior);
}

// acc += A B^T with B from shared memory, and A as it is in registers or brought there by load_a(k).
template <class Mma, class FragmentA, class LoadA, class CopyB, class SharedB, class Acc>
CUTE_DEVICE void multiply_by_shared(int thread, Mma const& mma, FragmentA const& rA, LoadA load_a,
                                    CopyB const& copy_b, SharedB const& sB, Acc& acc) {
  Tensor rB = mma.get_slice(thread).partition_fragment_B(plain_like(sB));
  Tensor rB_copy = copy_b.get_slice(thread).retile_D(rB);
  Tensor tB = copy_b.get_slice(thread).partition_S(sB);
  gemm_from_shared(mma, acc, rA, rB, load_a,
                   [&](int n, int k) { copy(copy_b, tB(_, n, k), rB_copy(_, n, k)); });
}

// acc += A B^T, both from shared memory.
template <class Mma, class CopyA, class SharedA, class CopyB, class SharedB, class Acc>
CUTE_DEVICE void multiply_shared(int thread, Mma const& mma, CopyA const& copy_a, SharedA const& sA,
                                 CopyB const& copy_b, SharedB const& sB, Acc& acc) {
  Tensor rA = mma.get_slice(thread).partition_fragment_A(plain_like(sA));
  Tensor rA_copy = copy_a.get_slice(thread).retile_D(rA);
  Tensor tA = copy_a.get_slice(thread).partition_S(sA);
  multiply_by_shared(
      thread, mma, rA, [&](int k) { copy(copy_a, tA(_, _, k), rA_copy(_, _, k)); }, copy_b, sB, acc);
}

}  // namespace flash_cute
