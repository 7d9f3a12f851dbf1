// How O leaves the Hopper family: through shared memory, by TMA.
#pragma once

#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/core/sm90/warpgroup.hpp"
#include "flash_cute/forward/sm90/traits.hpp"

namespace flash_cute {

template <class Traits>
struct ForwardEpilogueSm90 {
  using Element = typename Traits::Element;
  using PartO = Shape<Int<Traits::kBlockM>, Int<Traits::kColumnsO>>;
  typename Traits::SharedStorage& shared;
  ForwardMaps const& maps;
  int warpgroup;  // among the consumers
  int thread;     // of the warpgroup

  // Stores the warpgroup's rows of O, which are finished; tile.m_begin is its first query. Returns while TMA
  // still reads them.
  template <class Output>
  CUTE_DEVICE void store(Output const& acc_o, typename Traits::Source const& source,
                         typename Traits::Source::Tile const& tile) const {
    typename Traits::MmaO const mma_o;
    auto const copy_o = make_tiled_copy_C(typename Traits::StoreAtom{}, mma_o);
    auto const thread_copy = copy_o.get_slice(warpgroup * kWarpgroupThreads + thread);
    Tensor sO = make_tensor(make_smem_ptr(shared.o), typename Traits::LayoutO{});  // (M, D / PARTS, STAGE)
    Tensor tOsO = thread_copy.partition_D(sO);
    Tensor rO = make_tensor<Element>(partition_shape_C(mma_o, PartO{}));
    static_assert(decltype(size<2>(acc_o))::value == 1, "parts of O are slices of one product");
    CUTE_UNROLL
    for (int part = 0; part < Traits::kPartsO; ++part) {
      int const stage = part % Traits::kStagesO;
      convert_into<Element>(make_tensor(acc_o.data() + part * size(rO), rO.layout()), rO);
      // TMA has read what was there: all of the tile before, or of this tile all parts but the newest.
      if (thread == 0) {
        if (part == 0) {
          tma_store_wait<0>();
        } else {
          tma_store_wait<Traits::kStagesO - 1>();
        }
      }
      sync_warpgroup(warpgroup);
      copy(copy_o, thread_copy.retile_S(rO), tOsO(_, _, _, stage));
      cutlass::arch::fence_view_async_shared();
      sync_warpgroup(warpgroup);
      if (thread == 0) {
        auto const* const first = &sO(warpgroup * kWarpgroupRows, 0, stage);
        source.operands.template visit_coords<TmaOperand::out>(tile, tile.m_begin, [&](auto... coords) {
          store_panels<Traits::kColumnsO, Traits::kPanel, Traits::kBlockM>(
              maps.out, first, part * Traits::kColumnsO, tile.head, coords...);
        });
      }
    }
  }

  // Shared memory has been read: the block may end.
  CUTE_DEVICE void finish() const {
    if (thread == 0) tma_store_wait<0>();
  }
};

}  // namespace flash_cute
