// The producer warpgroup of the Hopper family's forward where keys are cut into splits: it loads K and V row
// by row, as rows may lie in pages, and with many copies in flight. TMA has a few boxes in flight at a time,
// which is 32 GB/s an SM with boxes of 64 rows and 128 bytes: half of what a decoding step can read (H200).
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/forward/sm90/traits.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

template <class Traits>
struct ForwardRowProducerSm90 {
  using Element = typename Traits::Element;
  static constexpr int kWarps = 4, kArrivals = kWarpgroupThreads;  // as of ForwardProducerSm90
  // The threads of a row copy a panel of it, 16 bytes each; those of the warpgroup copy kRows rows at once.
  static constexpr int kChunk = 8, kChunks = Traits::kPanel / kChunk;
  static constexpr int kRows = kWarpgroupThreads / kChunks, kPasses = Traits::kBlockN / kRows;
  static constexpr int kLanes = 32, kRowsOfWarp = kLanes / kChunks;
  static_assert(kPasses * kRowsOfWarp <= kLanes, "a lane finds one row");
  static_assert(kRows % 8 == 0 && Traits::kBlockN % kRows == 0,
                "a thread's rows have one place in the swizzle");
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  ForwardMaps const& maps;
  PipelineState<Traits::kStagesQ> at_q{};
  PipelineState<Traits::kStages> at_k{}, at_v{};
  PipelineState<2> at_queue{};

  // take: takes the next tile from the scheduler, by one thread.
  template <class Tiles, class Take>
  CUTE_DEVICE void run(Tiles tiles, Take&& take) {
    while (true) {
      load(tiles.source, tiles.first(), take);
      int remaining = tiles.count();
      if (tiles.done(remaining)) return;
    }
  }

 private:
  CUTE_DEVICE static int thread() { return threadIdx.x % kWarpgroupThreads; }
  CUTE_DEVICE static int first_row() { return thread() / kChunks; }

  template <class Source, class Take>
  CUTE_DEVICE void load(Source const& source, SplitTile const& tile, Take&& take) {
    PackGqa const& rows = source.rows();
    auto blocks = kv_blocks_of<Traits::kBlockN>(source, tile);
    if (thread() == 0) load_q(source, tile, rows);
    at_q.advance();
    int const requested_at = smaller(kRequestedAhead, blocks.remaining());
    int ahead = find_page(source.operands, tile, blocks.block);
    do {
      int const page = ahead;
      if (blocks.remaining() > 0) ahead = find_page(source.operands, tile, blocks.next());
      if (blocks.remaining() == requested_at && thread() == 0) take(at_queue);
      load_rows<Traits::kHeadDim>(source.operands, tile, params.k, params.shape.head_dim, shared.ring_k, at_k,
                                  shared.k, blocks.block, page);
      load_rows<Traits::kHeadDimV>(source.operands, tile, params.v, params.shape.head_dim_v, shared.ring_v,
                                   at_v, shared.v, blocks.block, page);
    } while (blocks.advance());
  }

  // Each lane finds the page of one of the warp's rows of a block, a block ahead: the table's answer is there
  // when a stage is free. found_key: the row, among the block's.
  CUTE_DEVICE static int found_key() {
    int const lane = thread() % kLanes;
    return thread() / kLanes * kRowsOfWarp + lane / kRowsOfWarp * kRows + lane % kRowsOfWarp;
  }
  CUTE_DEVICE static int find_page(PagedCoords const& operands, SplitTile const& tile, int block) {
    return operands.table ? operands.page(tile, block * Traits::kBlockN + found_key()) : 0;
  }

  template <class Source>
  CUTE_DEVICE void load_q(Source const& source, SplitTile const& tile, PackGqa const& rows) {
    auto* const stage = shared.q + at_q.stage * Traits::kStageElementsQ;
    CUTE_UNROLL
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      auto& full = shared.ring_q[consumer].acquire(at_q);
      source.operands.template visit_coords<TmaOperand::q>(
          tile, tile.m_begin + consumer * rows.queries, [&](auto... coords) {
            load_panels<Traits::kHeadDim, Traits::kPanel, Traits::kBlockM>(
                maps.q, full, stage + consumer * kWarpgroupRows * Traits::kPanel, rows.used(), 0, tile.head,
                coords...);
          });
    }
  }

  // Rows that no query sees become zeros, whatever lies there.
  template <int kColumns>
  CUTE_DEVICE void load_rows(PagedCoords const& operands, SplitTile const& tile, TensorView const& view,
                             int columns, TmaRing<Traits::kStages>& ring, PipelineState<Traits::kStages>& at,
                             Element* stages, int block, int page) {
    int const chunk = thread() % kChunks, row = first_row();
    int const swizzled = chunk ^ (Traits::kPanel == 64 ? row % 8 : row / 2 % 4);
    Element* const target =
        stages + at.stage * (Traits::kBlockN * kColumns) + row * Traits::kPanel + swizzled * kChunk;
    Element const* const head =
        static_cast<Element const*>(view.data) + tile.head_kv * view.head_stride + chunk * kChunk;
    int const first_key = block * Traits::kBlockN + row;
    auto copy_row = [&](int pass, Element const* source) {
      bool const is_seen = unsigned(first_key + pass * kRows - tile.k_first) < unsigned(tile.seqlen_k);
      CUTE_UNROLL
      for (int column = 0; column < kColumns; column += Traits::kPanel) {
        bool const copies = is_seen && column + chunk * kChunk < columns;
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
            *reinterpret_cast<uint128_t const*>(source + column),
            *reinterpret_cast<uint128_t*>(target + column * Traits::kBlockN + pass * kRows * Traits::kPanel),
            copies);
      }
    };
    // Found before a stage is free.
    Element const* sources[kPasses];
    if (operands.table) {
      int const found_row = operands.row_in_page(block * Traits::kBlockN + found_key());
      int64_t const found = page * view.batch_stride + found_row * view.row_stride;
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        sources[pass] = head + __shfl_sync(~0u, found, pass * kRowsOfWarp + thread() % kLanes / kChunks);
      }
    } else {
      RowCoord const at_key = operands.in_entry(tile, first_key);
      Element const* const first = head + at_key.entry * view.batch_stride + at_key.row * view.row_stride;
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) sources[pass] = first + pass * kRows * view.row_stride;
    }
    if (thread() % kLanes == 0) ring.acquire(at);  // one lane asks, 128 would slow each other down
    __syncwarp();
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) copy_row(pass, sources[pass]);
    cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&ring.full[at.stage]));
    at.advance();
  }
};

}  // namespace flash_cute
