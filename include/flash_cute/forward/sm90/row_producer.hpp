// The producer warpgroup of the Hopper family's forward where keys are cut into splits: it loads K and V row
// by row, as rows may lie in pages, and with many copies in flight. TMA has a few boxes in flight at a time,
// which is 32 GB/s an SM with boxes of 64 rows and 128 bytes: half of what a decoding step can read (H200).
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "flash_cute/core/fp8.hpp"
#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/forward/sm90/traits.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

template <class Traits>
struct ForwardRowProducerSm90 {
  using Element = typename Traits::Element;
  static constexpr int kWarps = 4, kArrivals = kWarpgroupThreads;  // as of ForwardProducerSm90
  static constexpr int kChunkBytes = 16, kChunk = kChunkBytes / int(sizeof(Element)), kLanes = 32;
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  ForwardMaps const& maps;
  PipelineState<Traits::kStagesQ> at_q{};
  PipelineState<2> at_queue{};

  // take: takes the next tile from the scheduler, by one thread.
  template <class Tiles, class Take>
  CUTE_DEVICE void run(Tiles tiles, Take&& take) {
    if (params.cache.is_fp8) {
      load_tiles<uint8_t>(tiles, take);
    } else {
      load_tiles<Element>(tiles, take);
    }
  }

 private:
  // The threads of a row copy a panel of it, 16 bytes each; those of the warpgroup copy kRows rows at once.
  template <class Stored>
  struct Copies {
    static constexpr bool kCodes = sizeof(Stored) < sizeof(Element);
    static constexpr int kWidth = kChunkBytes / int(sizeof(Stored)), kChunks = Traits::kPanel / kWidth;
    static constexpr int kRows = kWarpgroupThreads / kChunks, kPasses = Traits::kBlockN / kRows;
    static constexpr int kRowsOfWarp = kLanes / kChunks;
    static_assert(kPasses * kRowsOfWarp <= kLanes, "a lane finds one row");
    static_assert(kRows % 8 == 0 && Traits::kBlockN % kRows == 0,
                  "a thread's rows have one place in the swizzle");

    CUTE_DEVICE static int chunk() { return thread() % kChunks; }
    CUTE_DEVICE static int first_row() { return thread() / kChunks; }
    // Each lane finds the page of one of the warp's rows of a block, a block ahead: the table's answer is
    // there when a stage is free. found_key: the row, among the block's.
    CUTE_DEVICE static int found_key() {
      int const lane = thread() % kLanes;
      return thread() / kLanes * kRowsOfWarp + lane / kRowsOfWarp * kRows + lane % kRowsOfWarp;
    }
    CUTE_DEVICE static int find_page(PagedCoords const& operands, SplitTile const& tile, int block) {
      return operands.table ? operands.page(tile, block * Traits::kBlockN + found_key()) : 0;
    }
    // Where the thread's first chunk goes in a stage; in it, and in the chunk beside it, codes become what
    // they stand for.
    CUTE_DEVICE static int target() {
      int const row = first_row(), first = chunk() * (kWidth / kChunk);
      int const swizzled = first ^ (Traits::kPanel == 64 ? row % 8 : row / 2 % 4);
      return row * Traits::kPanel + swizzled * kChunk;
    }
    // Calls visit(pass, column, offset from target()) for each of the thread's chunks.
    template <int kColumns, class Visit>
    CUTE_DEVICE static void visit(Visit&& visit) {
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        CUTE_UNROLL
        for (int column = 0; column < kColumns; column += Traits::kPanel) {
          visit(pass, column, column * Traits::kBlockN + pass * kRows * Traits::kPanel);
        }
      }
    }
  };

  // K or V.
  template <int kColumns>
  struct Operand {
    static constexpr int kStageElements = Traits::kBlockN * kColumns;
    TensorView const& view;
    int columns;
    TmaRing<Traits::kStages>& ring;
    Element* stages;
    PipelineState<Traits::kStages> at{};
    bool has_codes = false;  // in the stage before
  };

  CUTE_DEVICE static int thread() { return threadIdx.x % kWarpgroupThreads; }

  // K comes a block ahead of V, as consumers ask for it.
  template <class Stored, class Tiles, class Take>
  CUTE_DEVICE void load_tiles(Tiles& tiles, Take&& take) {
    Operand<Traits::kHeadDim> k{params.k, params.shape.head_dim, shared.ring_k, shared.k};
    Operand<Traits::kHeadDimV> v{params.v, params.shape.head_dim_v, shared.ring_v, shared.v};
    do {
      SplitTile const& tile = tiles.first();
      auto const& operands = tiles.source.operands;
      auto blocks = kv_blocks_of<Traits::kBlockN>(tiles.source, tile);
      int const requested_at = smaller(kRequestedAhead, blocks.remaining());
      int ahead = Copies<Stored>::find_page(operands, tile, blocks.block);
      int block_v = 0, page_v = 0;
      for (bool has_k = true, has_v = false; has_k || has_v;) {
        int const block = blocks.block, page = ahead;
        if (has_k) {
          if (blocks.remaining() > 0) ahead = Copies<Stored>::find_page(operands, tile, blocks.next());
          if (blocks.remaining() == requested_at && thread() == 0) take(at_queue);
          load_rows<Stored>(operands, tile, k, block, page);
        } else {
          cp_async_fence();
        }
        if (has_v) {
          load_rows<Stored>(operands, tile, v, block_v, page_v);
        } else {
          cp_async_fence();
          if (thread() == 0) load_q(tiles.source, tile);
          at_q.advance();
        }
        block_v = block;
        page_v = page;
        has_v = has_k;
        has_k = has_k && blocks.advance();
      }
    } while (!is_done(tiles));
    if constexpr (Copies<Stored>::kCodes) {
      cp_async_wait<0>();
      widen_codes(k);
      widen_codes(v);
    }
  }
  template <class Tiles>
  CUTE_DEVICE static bool is_done(Tiles& tiles) {
    int remaining = tiles.count();
    return tiles.done(remaining);
  }

  template <class Source>
  CUTE_DEVICE void load_q(Source const& source, SplitTile const& tile) {
    PackGqa const& rows = source.rows();
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
  template <class Stored, int kColumns>
  CUTE_DEVICE void load_rows(PagedCoords const& operands, SplitTile const& tile, Operand<kColumns>& operand,
                             int block, int page) {
    using Own = Copies<Stored>;
    auto& [view, columns, ring, stages, at, has_codes] = operand;
    Element* const target = stages + at.stage * Operand<kColumns>::kStageElements + Own::target();
    int const first_column = Own::chunk() * Own::kWidth;
    Stored const* const head =
        static_cast<Stored const*>(view.data) + tile.head_kv * view.head_stride + first_column;
    int const first_key = block * Traits::kBlockN + Own::first_row();
    // Found before a stage is free.
    Stored const* sources[Own::kPasses];
    if (operands.table) {
      int const found_row = operands.row_in_page(block * Traits::kBlockN + Own::found_key());
      int64_t const found = page * view.batch_stride + found_row * view.row_stride;
      CUTE_UNROLL
      for (int pass = 0; pass < Own::kPasses; ++pass) {
        sources[pass] =
            head + __shfl_sync(~0u, found, pass * Own::kRowsOfWarp + thread() % kLanes / Own::kChunks);
      }
    } else {
      RowCoord const at_key = operands.in_entry(tile, first_key);
      Stored const* const first = head + at_key.entry * view.batch_stride + at_key.row * view.row_stride;
      CUTE_UNROLL
      for (int pass = 0; pass < Own::kPasses; ++pass) {
        sources[pass] = first + pass * Own::kRows * view.row_stride;
      }
    }
    if (thread() % kLanes == 0) ring.acquire(at);  // one lane asks, 128 would slow each other down
    __syncwarp();
    Own::template visit<kColumns>([&](int pass, int column, int offset) {
      bool const is_seen = unsigned(first_key + pass * Own::kRows - tile.k_first) < unsigned(tile.seqlen_k);
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
          *reinterpret_cast<uint128_t const*>(sources[pass] + column),
          *reinterpret_cast<uint128_t*>(target + offset), is_seen && column + first_column < columns);
    });
    if constexpr (Own::kCodes) {
      cp_async_fence();
      if (has_codes) {
        cp_async_wait<2>();  // for all but these and the other operand's
        widen_codes(operand);
      }
      has_codes = true;
    } else {
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&ring.full[at.stage]));
    }
    at.advance();
  }

  // A thread widens, in place, the codes that it has copied into the stage before.
  template <int kColumns>
  CUTE_DEVICE static void widen_codes(Operand<kColumns>& operand) {
    using Own = Copies<uint8_t>;
    constexpr int kCount = Own::kPasses * kColumns / Traits::kPanel, kAtOnce = kCount % 4 == 0 ? 4 : 3;
    int const stage = operand.at.before().stage;
    Element* const first = operand.stages + stage * Operand<kColumns>::kStageElements + Own::target();
    Element* const second =
        operand.stages + stage * Operand<kColumns>::kStageElements + (Own::target() ^ kChunk);
    int offsets[kCount], count = 0;
    Own::template visit<kColumns>([&](int, int, int offset) { offsets[count++] = offset; });
    CUTE_UNROLL
    for (int begin = 0; begin < kCount; begin += kAtOnce) {
      uint4 codes[kAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i)
        codes[i] = *reinterpret_cast<uint4 const*>(first + offsets[begin + i]);
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        uint4 chunks[2];
        widen<Element>(codes[i], chunks);
        *reinterpret_cast<uint4*>(first + offsets[begin + i]) = chunks[0];
        *reinterpret_cast<uint4*>(second + offsets[begin + i]) = chunks[1];
      }
    }
    operand.ring.full[stage].arrive();
  }
};

}  // namespace flash_cute
