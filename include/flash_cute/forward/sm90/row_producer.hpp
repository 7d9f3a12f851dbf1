// The producer warpgroup of the Hopper family's forward where keys are cut into splits: it loads K and V row
// by row, as rows may lie in pages, and with many copies in flight. TMA has a few boxes in flight at a time,
// which is 32 GB/s an SM with boxes of 64 rows and 128 bytes: half of what a decoding step can read (H200).
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "flash_cute/core/fp8.hpp"
#include "flash_cute/core/named_barrier.hpp"
#include "flash_cute/core/sm90/shared_address.hpp"
#include "flash_cute/core/sm90/tma.hpp"
#include "flash_cute/forward/sm90/code_ring.hpp"
#include "flash_cute/forward/sm90/traits.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

template <class Traits>
struct ForwardRowProducerSm90 {
  using Element = typename Traits::Element;
  static constexpr int kThreads = Traits::kProducers * kWarpgroupThreads;
  static constexpr int kWarps = kThreads / 32, kArrivals = kThreads;  // as of ForwardProducerSm90
  static constexpr int kChunkBytes = 16, kChunk = kChunkBytes / int(sizeof(Element)), kLanes = 32;

  // K or V.
  template <int kColumns>
  struct Operand {
    TensorView const& view;
    int columns;
    TmaRing<Traits::kStages>& ring;
    uint32_t stages;  // in shared memory
    PipelineState<Traits::kStages> at{};
    int parts = 0;  // of the stage, that have their numbers already, where codes come

    // Where a number of the stage lies.
    CUTE_DEVICE uint32_t place(int number) const {
      return stages + (at.stage * Traits::kBlockN * kColumns + number) * int(sizeof(Element));
    }
  };

  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  ForwardMaps const& maps;
  PipelineState<Traits::kStagesQ> at_q{};
  PipelineState<2> at_queue{};
  Operand<Traits::kHeadDim> k{params.k, params.shape.head_dim, shared.ring_k, shared_address(shared.k)};
  Operand<Traits::kHeadDimV> v{params.v, params.shape.head_dim_v, shared.ring_v, shared_address(shared.v)};
  bool others_are_behind = false;  // is the first warp at another block than the others?
  CodeRing<Traits::kCodeSlots> codes{};
  // The thread's first chunk of a slot. In bytes: nvcc 13.0 has another size of a struct that ends with an
  // empty member.
  uint32_t own_codes =
      shared_address(reinterpret_cast<unsigned char*>(&shared) + sizeof(shared) + threadIdx.x * kChunkBytes);
  int tiles_begun = 0,
      tiles_with_q = 0;  // where codes come: whose first K has been copied, and has been widened

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
  // The threads of a row copy a panel of it, 16 bytes each; all threads together copy kRows rows at once.
  template <class Stored>
  struct Copies {
    static constexpr bool kCodes = sizeof(Stored) < sizeof(Element);
    static constexpr int kWidth = kChunkBytes / int(sizeof(Stored)), kChunks = Traits::kPanel / kWidth;
    static constexpr int kRows = kThreads / kChunks, kParts = kCodes ? Traits::kCodeParts : 1,
                         kPasses = Traits::kBlockN / kRows / kParts;  // of a part of a block
    static constexpr int kRowsOfWarp = kLanes / kChunks;
    static_assert(kParts * kPasses * kRowsOfWarp <= kLanes, "a lane finds one row");
    static_assert(kRows % 8 == 0 && Traits::kBlockN % (kRows * kParts) == 0,
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
    // Where the thread's first chunk goes in a stage. What 16 codes stand for goes there and to the chunk
    // beside it.
    CUTE_DEVICE static int target() {
      int const row = first_row(), first = chunk() * (kWidth / kChunk);
      int const swizzled = first ^ (Traits::kPanel == 64 ? row % 8 : row / 2 % 4);
      return row * Traits::kPanel + swizzled * kChunk;
    }
    // Of a part, from target().
    CUTE_DEVICE static int part_offset(int part) { return part * kPasses * kRows * Traits::kPanel; }
    // Calls visit(pass, column, offset from target()) for each of the thread's chunks of the first part.
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

  CUTE_DEVICE static int thread() { return threadIdx.x; }

  // K comes a block ahead of V, as consumers ask for it.
  template <class Stored, class Tiles, class Take>
  CUTE_DEVICE void load_tiles(Tiles& tiles, Take&& take) {
    auto const& source = tiles.source;
    auto const& operands = source.operands;
    do {
      SplitTile const& tile = tiles.first();
      auto blocks = kv_blocks_of<Traits::kBlockN>(source, tile);
      int const requested_at = smaller(kRequestedAhead, blocks.remaining());
      int ahead = Copies<Stored>::find_page(operands, tile, blocks.block);
      if (Copies<Stored>::kCodes && thread() == 0) shared.code_tiles[tiles_begun % 2] = tile;
      ++tiles_begun;
      int block_v = 0, page_v = 0;
      for (bool has_k = true, has_v = false; has_k || has_v;) {
        int const block = blocks.block, page = ahead;
        if (has_k) {
          if (blocks.remaining() > 0) ahead = Copies<Stored>::find_page(operands, tile, blocks.next());
          if (blocks.remaining() == requested_at && thread() == 0) take(at_queue);
          load_rows<Stored>(source, tile, k, has_v ? CodePart::k : CodePart::first_k, block, page);
        }
        if (has_v) load_rows<Stored>(source, tile, v, CodePart::v, block_v, page_v);
        if (!Copies<Stored>::kCodes && !has_v) load_q(source, tile);
        block_v = block;
        page_v = page;
        has_v = has_k;
        has_k = has_k && blocks.advance();
      }
    } while (!is_done(tiles));
    if constexpr (Copies<Stored>::kCodes) {
      cp_async_wait<0>();
      while (codes.filled > 0) widen_oldest(source);
    }
  }
  template <class Tiles>
  CUTE_DEVICE static bool is_done(Tiles& tiles) {
    int remaining = tiles.count();
    return tiles.done(remaining);
  }

  template <class Source>
  CUTE_DEVICE void load_q(Source const& source, SplitTile const& tile) {
    if (thread() == 0) {
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
    at_q.advance();
  }

  // Rows that no query sees become zeros, whatever lies there.
  template <class Stored, class Source, int kColumns>
  CUTE_DEVICE void load_rows(Source const& source, SplitTile const& tile, Operand<kColumns>& operand,
                             CodePart kind, int block, int page) {
    using Own = Copies<Stored>;
    PagedCoords const& operands = source.operands;
    TensorView const& view = operand.view;
    int const first_column = Own::chunk() * Own::kWidth;
    Stored const* const head =
        static_cast<Stored const*>(view.data) + tile.head_kv * view.head_stride + first_column;
    int const first_key = block * Traits::kBlockN + Own::first_row();
    if constexpr (Traits::kMayLoadBoxes && !Own::kCodes) {
      int const hidden = tile.k_first - block * Traits::kBlockN;  // of the block, at its begin
      if (maps.has_boxes && hidden <= 0 && hidden + tile.seqlen_k >= Traits::kBlockN) {
        bool const is_v = kind == CodePart::v;
        load_boxes(operands, tile, operand, is_v ? maps.v : maps.k, is_v ? shared.v : shared.k, block, page);
        return;
      }
      if (others_are_behind) NamedBarrier{BarrierId::producers, 0}.sync(kThreads);
      others_are_behind = false;
    }
    // Found before there is room.
    int64_t found = 0;
    Stored const* first = head;
    if (operands.table) {
      int const found_row = operands.row_in_page(block * Traits::kBlockN + Own::found_key());
      found = page * view.batch_stride + found_row * view.row_stride;
    } else {
      RowCoord const at_key = operands.in_entry(tile, first_key);
      first += at_key.entry * view.batch_stride + at_key.row * view.row_stride;
    }
#pragma unroll 1
    for (int part = 0; part < Own::kParts; ++part) {
      int const first_pass = part * Own::kPasses;
      Stored const* sources[Own::kPasses];
      if (operands.table) {
        CUTE_UNROLL
        for (int pass = 0; pass < Own::kPasses; ++pass) {
          int const finder = (first_pass + pass) * Own::kRowsOfWarp + thread() % kLanes / Own::kChunks;
          sources[pass] = head + __shfl_sync(~0u, found, finder);
        }
      } else {
        CUTE_UNROLL
        for (int pass = 0; pass < Own::kPasses; ++pass) {
          sources[pass] = first + (first_pass + pass) * Own::kRows * view.row_stride;
        }
      }
      // target(index, offset): where the thread's chunk of that number and place goes.
      auto copy = [&](auto&& target) {
        int index = 0;
        Own::template visit<kColumns>([&](int pass, int column, int offset) {
          int const key = first_key + (first_pass + pass) * Own::kRows;
          bool const is_seen = unsigned(key - tile.k_first) < unsigned(tile.seqlen_k);
          copy_chunk(target(index++, offset), sources[pass] + column,
                     is_seen && column + first_column < operand.columns);
        });
      };
      if constexpr (Own::kCodes) {
        if (codes.is_full()) {
          cp_async_wait<Traits::kCodeSlots - 1>();
          widen_oldest(source);
        }
        uint32_t const slot = own_codes + codes.next * Traits::kCodeBytes;
        copy([&](int index, int) { return slot + index * kThreads * kChunkBytes; });
        cp_async_fence();
        codes.push(kind);
        if (kind == CodePart::first_k) kind = CodePart::k;
      } else {
        uint32_t const first_place = operand.place(Own::target());
        acquire(operand);
        copy([&](int, int offset) { return first_place + offset * int(sizeof(Element)); });
        auto& full = operand.ring.full[operand.at.stage];
        cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
        operand.at.advance();
      }
    }
  }
  // Of a block without rows that no query may use, by the first warp: a lane that has found the page of a
  // box's first row loads it. The other warps go on to the next block that needs them, and wait there.
  template <int kColumns>
  CUTE_DEVICE void load_boxes(PagedCoords const& operands, SplitTile const& tile, Operand<kColumns>& operand,
                              CUtensorMap const& map, Element* stages, int block, int page) {
    constexpr int kBox = Traits::kBoxRows, kBoxes = Traits::kBlockN / kBox;
    others_are_behind = true;
    if (thread() < kLanes) {
      int const row = Copies<Element>::found_key(), key = block * Traits::kBlockN + row;
      RowCoord const found =
          operands.table ? RowCoord{page, operands.row_in_page(key)} : operands.in_entry(tile, key);
      Element* const target = stages + (operand.at.stage * Traits::kBlockN * kColumns + row * Traits::kPanel);
      auto& full = operand.ring.full[operand.at.stage];
      acquire(operand);
      if (row % kBox == 0 && row < Traits::kBlockN) {
        load_panels<kColumns, Traits::kPanel, Traits::kBlockN>(map, full, target, kBox, 0, tile.head_kv,
                                                               found.row, found.entry);
      } else if (row == 1) {
        arrive(full, kArrivals - kBoxes);
      }
    }
    operand.at.advance();
  }
  template <int kColumns>
  CUTE_DEVICE static void acquire(Operand<kColumns>& operand) {
    if (thread() % kLanes == 0) operand.ring.acquire(operand.at);  // 128 lanes would slow each other down
    __syncwarp();
  }

  // Its codes have arrived. Q comes beside the first block of a tile: sooner, consumers might not get to
  // where they give its stage back.
  template <class Source>
  CUTE_DEVICE void widen_oldest(Source const& source) {
    uint32_t const slot = own_codes + codes.oldest() * Traits::kCodeBytes;
    auto const kind = codes.pop();
    if (kind == CodePart::first_k) load_q(source, shared.code_tiles[tiles_with_q++ % 2]);
    if (kind == CodePart::v) {
      widen_part(v, slot);
    } else {
      widen_part(k, slot);
    }
  }
  template <int kColumns>
  CUTE_DEVICE void widen_part(Operand<kColumns>& operand, uint32_t slot) {
    using Own = Copies<uint8_t>;
    constexpr int kCount = Own::kPasses * kColumns / Traits::kPanel, kBytes = sizeof(Element);
    int const part_offset = Own::part_offset(operand.parts);
    uint32_t const first = operand.place(part_offset + Own::target()),
                   second = operand.place(part_offset + (Own::target() ^ kChunk));
    if (operand.parts == 0) acquire(operand);
    uint4 own[kCount];
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) own[i] = load_chunk(slot + i * kThreads * kChunkBytes);
    int i = 0;
    Own::template visit<kColumns>([&](int, int, int offset) {
      uint4 chunks[2];
      widen<Element>(own[i++], chunks);
      store_chunk(first + offset * kBytes, chunks[0]);
      store_chunk(second + offset * kBytes, chunks[1]);
    });
    if (++operand.parts == Own::kParts) {
      operand.parts = 0;
      operand.ring.full[operand.at.stage].arrive();
      operand.at.advance();
    }
  }
};

}  // namespace flash_cute
