// Operands of the Ampere family's backward: loads of tiles into shared memory by cp.async, and products of
// operands that lie there.
#pragma once

#include <cute/tensor.hpp>

#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/backward/kv_tile.hpp"
#include "flash_cute/core/sm80/copy_async.hpp"
#include "flash_cute/core/sm80/gemm.hpp"

namespace flash_cute {

using namespace cute;

// Issues the loads of the tile of this shape that begins at row `first` of a head. hides_coord: hide the
// thread's row and column from the compiler at each call. Otherwise it adds them to the address of the batch
// entry and keeps the sums, 64 bits for each view, in registers throughout the loop around the call.
template <class Element, bool hides_coord, class TiledLoad, class Atom, class TileShape, class Target>
CUTE_DEVICE void load_tile(TiledLoad const& tiled_load, Atom const& atom, int thread, TensorView const& view,
                           int entry, int head, int64_t first, TileShape tile_shape,
                           TileInterior const& interior, Target&& target) {
  auto const loader = tiled_load.get_slice(thread);
  Tensor source = local_tensor<Element>(view, entry, head, first, tile_shape);
  Tensor own = loader.partition_S(source);
  Tensor coords = loader.partition_S(make_identity_tensor(tile_shape));
  if constexpr (hides_coord) {
    int row = get<0>(coords(0)), column = get<1>(coords(0));
    asm volatile("" : "+r"(column));
    asm volatile("" : "+r"(row));
    int64_t const offset = uint32_t(row) * view.row_stride + uint32_t(column);
    copy_async(atom, make_tensor(source.data() + offset, own.layout()), loader.partition_D(target),
               make_tensor(make_inttuple_iter(make_arithmetic_tuple(row, column)), coords.layout()),
               interior);
  } else {
    copy_async(atom, own, loader.partition_D(target), coords, interior);
  }
}

// The loads of a KV tile from global to shared memory, by kKeyThreads threads. Fully masked queries are not
// read, as what they hold would reach dK and dV as 0 x NaN.
template <class Traits>
struct KvTileLoader {
  BackwardParams const& params;
  typename Traits::Tile const& tile;
  typename Traits::SharedStorage& shared;
  int thread;                                                   // of kKeyThreads
  int kept_first_row = tile.sequence.mask.fully_masked_rows();  // not used where the tile holds it

  // Loads K or V, with so many columns.
  CUTE_DEVICE void load_keys(TensorView const& view, int columns, typename Traits::Element* target) const {
    load(typename Traits::TileKV{}, view, tile.head_kv / params.gqa_parts,
         int64_t(tile.sequence.k_begin) + tile.n_begin,
         {0, {tile.sequence.mask.seqlen_k - tile.n_begin, columns}},
         make_tensor(make_smem_ptr(target), typename Traits::LayoutKV{})(_, _, 0));
  }

  // Loads Q, dO, LSE and delta of an M block.
  CUTE_DEVICE void load_queries(int head, int block, int stage) const {
    constexpr int kBlockM = Traits::kBlockM;
    int const begin = block * kBlockM, seqlen_q = tile.sequence.mask.seqlen_q;
    int first_row = kept_first_row;
    if constexpr (Traits::kTwoRoles) first_row = tile.first_row;
    TileInterior const interior{first_row - begin, {seqlen_q - begin, params.shape.head_dim}};
    int const rows_dout = params.dout.data ? seqlen_q - begin : 0;
    TileInterior const interior_dout{first_row - begin, {rows_dout, params.shape.head_dim_v}};
    int64_t const first = int64_t(tile.sequence.queries.begin) + begin;
    auto load_rows = [&](TensorView const& view, TileInterior const& rows, typename Traits::Element* target) {
      load(Shape<Int<kBlockM>, Int<Traits::kHeadDim>>{}, view, head, first, rows,
           make_tensor(make_smem_ptr(target), typename Traits::LayoutQ{})(_, _, stage));
    };
    load_rows(params.q, interior, shared.q);
    load_rows(params.dout, interior_dout, shared.dout);
    constexpr int kChunk = 4, kChunks = kBlockM / kChunk;  // floats of 16 bytes
    if (thread < 2 * kChunks) {
      int const chunk = thread % kChunks * kChunk;
      float const* const source =
          thread < kChunks ? params.workspace.lse_delta.lse : params.workspace.lse_delta.neg_delta;
      float* const target = thread < kChunks ? shared.lse : shared.neg_delta;
      SM80_CP_ASYNC_CACHEALWAYS<uint128_t>::copy(
          *reinterpret_cast<uint128_t const*>(source + tile.block_index(head, block) * kBlockM + chunk),
          *reinterpret_cast<uint128_t*>(target + stage * kBlockM + chunk));
    }
  }

 private:
  template <class TileShape, class Target>
  CUTE_DEVICE void load(TileShape tile_shape, TensorView const& view, int head, int64_t first,
                        TileInterior const& interior, Target&& target) const {
    load_tile<typename Traits::Element, Traits::kSparesRegisters>(
        typename Traits::TiledLoad{}, typename Traits::LoadAtom{}, thread, view, tile.batch, head, first,
        tile_shape, interior, target);
  }
};

// acc += A B^T with B from shared memory and A from registers, where load_a(k) has brought it if it is not
// there.
template <class Mma, class FragmentA, class LoadA, class CopyB, class SharedB, class Acc,
          class Beside = IssueNothing>
CUTE_DEVICE void multiply_by_shared(int thread, Mma const& mma, FragmentA const& rA, LoadA load_a,
                                    CopyB const& copy_b, SharedB const& sB, Acc& acc, Beside beside = {}) {
  Tensor rB = mma.get_slice(thread).partition_fragment_B(plain_like(sB));
  Tensor rB_copy = copy_b.get_slice(thread).retile_D(rB);
  Tensor tB = copy_b.get_slice(thread).partition_S(sB);
  gemm_from_shared(
      mma, acc, rA, rB, load_a, [&](int n, int k) { copy(copy_b, tB(_, n, k), rB_copy(_, n, k)); }, beside);
}

// acc += A B^T with both operands from shared memory.
template <class Mma, class CopyA, class SharedA, class CopyB, class SharedB, class Acc,
          class Beside = IssueNothing>
CUTE_DEVICE void multiply_shared(int thread, Mma const& mma, CopyA const& copy_a, SharedA const& sA,
                                 CopyB const& copy_b, SharedB const& sB, Acc& acc, Beside beside = {}) {
  Tensor rA = mma.get_slice(thread).partition_fragment_A(plain_like(sA));
  Tensor rA_copy = copy_a.get_slice(thread).retile_D(rA);
  Tensor tA = copy_a.get_slice(thread).partition_S(sA);
  multiply_by_shared(
      thread, mma, rA, [&](int k) { copy(copy_a, tA(_, _, k), rA_copy(_, _, k)); }, copy_b, sB, acc, beside);
}

// K as the right operand of dQ = dS K, cut into the kDqParts parts of columns that dQ is computed in:
// (D, N, PART).
template <class Traits>
CUTE_DEVICE auto columns_of_keys(typename Traits::Element* keys) {
  Tensor all = make_tensor(make_smem_ptr(keys), typename Traits::LayoutKVt{})(_, _, 0);
  return local_tile(all, Shape<Int<Traits::kHeadDim / Traits::kDqParts>, Int<Traits::kBlockN>>{},
                    make_coord(_, 0));
}

}  // namespace flash_cute
