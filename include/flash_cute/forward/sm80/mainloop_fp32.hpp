// The Ampere family's forward maths of float32.
#pragma once

#include "flash_cute/core/sm80/tf32_products.hpp"
#include "flash_cute/forward/sm80/mainloop.hpp"

namespace flash_cute {

// As of 16-bit types with one stage: K(n - 1) loads under P(n) V(n), V(n - 1) under Q K(n - 1)^T.
template <class Traits>
  requires std::is_same_v<typename Traits::Element, float>
struct ForwardMainloopSm80<Traits> {
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr bool kExact = Traits::kExact;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kWarps = Traits::kThreads / 32;
  static_assert(Traits::kStages == 1);

  template <class Source, class Tile, class Softmax, class Output>
  CUTE_DEVICE static void run(ForwardParams const& params, Source const& source, Tile const& tile,
                              SharedStorage& shared, int thread, Softmax& softmax, Output& acc_o) {
    auto const& mask = mask_of(source, tile);
    using Mask = std::remove_cvref_t<decltype(mask)>;
    auto const visited = visited_of<Traits>(source, tile, mask);
    decltype(auto) full_blocks = full_blocks_of<Traits>(source, tile);
    if (visited.empty()) return;

    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{});           // (M, D)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{})(_, _, 0);  // (N, D)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutV{})(_, _, 0);  // (N, D)
    TileLoads<Traits, Tile, Mask> const loads{params, source, tile, mask, thread};
    typename Traits::TiledMma const mma;
    Tensor cS = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{}));

    typename Source::Walk blocks(visited);
    loads.load_q(sQ);
    loads.load_k(blocks.block, sK);
    cp_async_fence();
    loads.load_v(blocks.block, sV);
    cp_async_fence();
    wait_for_loads<1>();
    for (; !blocks.done(); blocks.advance()) {
      bool const more = blocks.remaining() > 0;
      Tensor acc_s = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
      int const reader = read_thread_index();  // so that no address stays in a register between products
      WarpTiles const rows = warp_rows<kWarps>(reader), columns{0, 8};  // a warp has all columns
      multiply_rows<kExact, kHeadDim, false>(Tf32Tile<kBlockM>{shared.q}, rows, Tf32Tile<kBlockN>{shared.k},
                                             columns, acc_s);  // S = Q K^T
      change_scores<Traits>(params, source, tile, blocks.block, cS, acc_s);
      if (!blocks.is_full(full_blocks)) {
        apply_mask<ComparedKeys>(mask, OneHead{}, tile.m_begin, blocks.block * kBlockN, cS, acc_s);
      }
      auto const correction = softmax.update(acc_s);
      drop<Traits>(params, source, tile, blocks.block, cS, acc_s);
      wait_for_loads<0>();
      if (more) loads.load_k(blocks.next(), sK);
      cp_async_fence();
      multiply_by_rows<kExact, kBlockN>(  // O = O factor + P V
          scores_in_registers<kExact>(acc_s), Tf32Tile<kBlockN>{shared.v}, columns, acc_o,
          [&](float& o, int i, int m, float sum, bool is_first) {
            o = is_first ? fmaf(o, correction.factor[2 * m + i / 2], sum) : o + sum;
          });
      wait_for_loads<0>();
      if (more) loads.load_v(blocks.next(), sV);
      cp_async_fence();
    }
  }

 private:
  template <int kPending>
  CUTE_DEVICE static void wait_for_loads() {
    cp_async_wait<kPending>();
    __syncthreads();
  }
};

}  // namespace flash_cute
