// How a warp brings its keys of a cache of codes to shared memory: a few blocks ahead of its products, also
// those of the next tile, and without a barrier between warps.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "flash_cute/core/sm90/shared_address.hpp"
#include "flash_cute/forward/sm90/code_traits.hpp"

namespace flash_cute {

// What a lane copies of K or V: of each row a chunk in every panel.
template <class Layout, int kKeys>
struct CodeRows {
  static constexpr int kRowsOfPass = 32 / Layout::kChunks, kPasses = kKeys / kRowsOfPass;
  TensorView const& view;
  int lane;
  int panels;                 // of the lane's chunk, that exist
  uint32_t stages;            // in shared memory
  unsigned char const* head;  // of the tile: the lane's chunk of the first row, in pages of page 0

  CUTE_DEVICE CodeRows(TensorView const& view_, int columns, void const* stages_, int lane_)
      : view(view_), lane(lane_), stages(shared_address(stages_)) {
    panels = ceil_div(larger(0, columns - chunk() * Layout::kChunk), Layout::kPanel);
  }

  CUTE_DEVICE int chunk() const { return lane % Layout::kChunks; }
  CUTE_DEVICE int row() const { return lane / Layout::kChunks; }

  CUTE_DEVICE void begin_tile(SplitTile const& tile, bool has_table, RowCoord const& first) {
    head = static_cast<unsigned char const*>(view.data) + tile.head_kv * view.head_stride +
           chunk() * Layout::kChunk;
    if (!has_table) head += first.entry * view.batch_stride + int64_t(first.row) * view.row_stride;
  }

  // A bit for each pass whose row of the lane is one of [begin, end).
  CUTE_DEVICE uint32_t seen(int begin, int end) const {
    auto below = [&](int limit) {
      int const passes = (limit - row() + kRowsOfPass - 1) / kRowsOfPass;
      return ~__funnelshift_lc(0u, ~0u, larger(0, passes));
    };
    return begin < end ? below(end) & ~below(begin) : 0u;
  }
  // Rows [first, first + kKeys); those that are not seen become zeros.
  CUTE_DEVICE void copy(int stage, int first, uint32_t seen) const {
    unsigned char const* source = head + int64_t(first + row()) * view.row_stride;
    int64_t const step = kRowsOfPass * view.row_stride;
    copy_passes(stage, seen, [&](int) {
      auto const* const own = source;
      source += step;
      return own;
    });
  }
  // The same where lane i has row i, at row_of_page of page.
  CUTE_DEVICE void copy_found(int stage, int page, int row_of_page, uint32_t seen) const {
    int64_t const found = page * view.batch_stride + row_of_page * view.row_stride;
    copy_passes(stage, seen, [&](int first) { return head + __shfl_sync(~0u, found, first + row()); });
  }

 private:
  // source_of(first row of a pass).
  template <class SourceOf>
  CUTE_DEVICE void copy_passes(int stage, uint32_t seen, SourceOf&& source_of) const {
    uint32_t const target = stages + stage * Layout::kBytes;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int const of_pass = row() + pass * kRowsOfPass;
      auto const* const source = source_of(pass * kRowsOfPass);
      bool const is_seen = seen & 1u << pass;
      CUTE_UNROLL
      for (int panel = 0; panel < Layout::kPanels; ++panel) {
        copy_chunk(target + Layout::offset(panel, of_pass, chunk()), source + panel * Layout::kPanel,
                   is_seen && panel < panels);
      }
    }
  }
};

template <class Traits>
struct CodeLoadsSm90 {
  using Source = typename Traits::Source;
  static constexpr int kStages = Traits::kStages, kKeys = Traits::kKeys;
  typename Traits::SharedStorage& shared;
  Source const& source;
  int warp, lane;
  CodeRows<typename Traits::LayoutK, kKeys> k;
  CodeRows<typename Traits::LayoutV, kKeys> v;
  typename Source::Walk blocks;
  KeyRange seen;   // keys of the tile that is loaded
  int number = 0;  // of it, among the block's
  int loaded = 0;  // blocks of keys
  int computed = 0;
  bool has_block = true;          // are there others of this tile?
  bool has_ended = false;         // is there no other tile?
  bool has_requested = false;     // one
  int page = 0, row_of_page = 0;  // of the lane's key of the next block

  // first: the block's first tile.
  CUTE_DEVICE CodeLoadsSm90(typename Traits::SharedStorage& shared_, ForwardParams const& params,
                            Source const& source_, SplitTile const& first, int warp_, int lane_)
      : shared(shared_),
        source(source_),
        warp(warp_),
        lane(lane_),
        k(params.k, params.shape.head_dim, shared_.k[warp_], lane_),
        v(params.v, params.shape.head_dim_v, shared_.v[warp_], lane_),
        blocks(kv_blocks_of<Traits::kBlockN>(source_, first)) {
    begin_tile(first);
  }

  // Issues loads while there is room, and waits until the oldest block that is on its way has arrived, whose
  // stage is returned. What was returned before may be overwritten. computed_tile: the number of the block's
  // tile.
  CUTE_DEVICE int wait(int computed_tile) {
    __syncwarp();
#pragma unroll 1
    do {
      if (!has_block && !next_tile(computed_tile)) break;
      load();
    } while (loaded - computed < kStages);
    if (loaded - computed == kStages) {
      cp_async_wait<kStages - 1>();
    } else {
      cp_async_wait<0>();
    }
    __syncwarp();
    return computed++ % kStages;
  }

  CUTE_DEVICE int first_of(int block) const { return block * Traits::kBlockN + warp * kKeys; }

 private:
  CUTE_DEVICE void load() {
    int const stage = loaded++ % kStages, first = first_of(blocks.block);
    uint32_t const of_k = k.seen(seen.begin - first, seen.end - first);
    uint32_t const of_v = v.seen(seen.begin - first, seen.end - first);
    if (source.operands.table) {
      k.copy_found(stage, page, row_of_page, of_k);
      v.copy_found(stage, page, row_of_page, of_v);
    } else {
      k.copy(stage, first, of_k);
      v.copy(stage, first, of_v);
    }
    cp_async_fence();
    if (blocks.remaining() <= kRequestedAhead) request();
    has_block = blocks.advance();
    if (has_block) find_page(shared.tiles[number % 2].tile);
  }
  // There is none, or none yet: not before the tile before it is computed.
  CUTE_DEVICE bool next_tile(int computed_tile) {
    if (has_ended || number > computed_tile) return false;
    request();
    int const next = number + 1;
    shared.ring_tiles.full[next % 2].wait(next / 2 % 2);
    SplitTile const& begun = shared.tiles[next % 2].tile;
    has_ended = begun.m_begin == kNoTile;
    if (has_ended) return false;
    number = next;
    blocks = kv_blocks_of<Traits::kBlockN>(source, begun);
    begin_tile(begun);
    return true;
  }
  CUTE_DEVICE void request() {
    if (warp == 0 && lane == 0 && !has_requested) shared.requested.arrive();
    has_requested = true;
  }
  CUTE_DEVICE void begin_tile(SplitTile const& begun) {
    PagedCoords const& operands = source.operands;
    RowCoord const first = operands.in_entry(begun, 0);
    k.begin_tile(begun, operands.table, first);
    v.begin_tile(begun, operands.table, first);
    seen = {begun.k_first, begun.k_first + begun.seqlen_k};
    has_block = true;
    has_requested = false;
    find_page(begun);
  }
  CUTE_DEVICE void find_page(SplitTile const& of) {
    PagedCoords const& operands = source.operands;
    if (!operands.table) return;
    int const key = first_of(blocks.block) + lane % kKeys;
    page = operands.page(of, key);
    row_of_page = operands.row_in_page(key);
  }
};

}  // namespace flash_cute
