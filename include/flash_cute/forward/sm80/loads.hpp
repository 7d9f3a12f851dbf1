// How the Ampere family's forward brings a tile's operands to shared memory: tiles of contiguous rows, or
// rows that have addresses of their own.
#pragma once

#include "flash_cute/attention/keys/row_sources.hpp"
#include "flash_cute/attention/tile_views.hpp"
#include "flash_cute/core/sm80/copy_async.hpp"
#include "flash_cute/core/special_registers.hpp"
#include "flash_cute/forward/sm80/traits.hpp"
#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {

// The thread's index, read anew where registers are short (32 rows a warp, several blocks an SM): what
// follows from it need not stay in registers in between.
CUTE_DEVICE int reread(int thread, bool registers_are_short) {
  if (registers_are_short) thread = read_thread_index();
  return thread;
}

// Q of one head, and keys that lie one after the other.
template <class Traits, class Tile, class Mask>
struct TileLoads {
  using Source = typename Traits::Source;
  using Element = typename Traits::Element;
  ForwardParams const& params;
  Source const& source;
  Tile const& tile;
  Mask const& mask;
  int thread;

  CUTE_DEVICE void start(int) const {}
  template <class Target>
  CUTE_DEVICE void load_q(Target&& target) const {
    load(Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{}, params.q, tile.head,
         source.operands.query(tile, tile.m_begin), tile.m_begin, mask.seqlen_q, params.shape.head_dim,
         target);
  }
  template <class Target>
  CUTE_DEVICE void load_k(int block, Target&& target) const {
    load_keys<Traits::kHeadDim>(params.k, block, params.shape.head_dim, target);
  }
  template <class Target>
  CUTE_DEVICE void load_v(int block, Target&& target) const {
    load_keys<Traits::kHeadDimV>(params.v, block, params.shape.head_dim_v, target);
  }

 private:
  template <int kColumns, class Target>
  CUTE_DEVICE void load_keys(TensorView const& view, int block, int columns, Target&& target) const {
    int const begin = block * Traits::kBlockN;
    load(Shape<Int<Traits::kBlockN>, Int<kColumns>>{}, view, tile.head_kv, source.operands.key(tile, begin),
         begin, mask.seqlen_k, columns, target);
  }
  template <class TileShape, class Target>
  CUTE_DEVICE void load(TileShape tile_shape, TensorView const& view, int head, RowCoord const& first,
                        int begin, int rows, int columns, Target&& target) const {
    auto const loader = typename Traits::TiledLoad{}.get_slice(reread(thread, Traits::kRowsOfWarp > 16));
    Tensor from = local_tensor<Element>(view, first.entry, head, first.row, tile_shape);
    copy_async(typename Traits::LoadAtom{}, loader.partition_S(from), loader.partition_D(target),
               loader.partition_S(make_identity_tensor(tile_shape)), TileBounds{rows - begin, columns});
  }
};

// Q of several heads that share K and V, and keys that may lie in pages. Rows that no query sees become zeros
// and are not read. Blocks of keys are loaded in descending order, V after K: its load asks for the pages of
// the block after it, so that the pages' numbers are there when that is loaded; where the mask is a table
// and blocks are no neighbours, K's load asks.
template <class Traits, class Tile, class Mask>
struct RowLoads {
  using Source = typename Traits::Source;
  using Walk = typename Source::Walk;
  using Element = typename Traits::Element;
  static constexpr int kChunk = 8;  // elements of 16 bytes
  static constexpr int kChunks = decltype(size<1>(typename Traits::LoadThreads{}))::value;
  using Sources = RowSources<Traits::kThreads, kChunks, Traits::kBlockN>;
  ForwardParams const& params;
  Source const& source;
  Tile const& tile;
  Mask const& mask;
  int thread;
  int page = 0;  // that this lane has found in the block to be loaded next

  template <class Target>
  CUTE_DEVICE void load_q(Target&& target) const {
    PackGqa const& rows = source.rows();
    Element const* const data = first_chunk(params.q, tile.head);
    RowCoord const first = source.operands.query(tile, tile.m_begin);
    Element const* const first_row =
        data + first.entry * params.q.batch_stride + first.row * params.q.row_stride;
    copy_rows(
        Int<Traits::kBlockM / Sources::kRows>{}, target,
        [&](int pass) {
          int const row = Sources::first_row(thread) + pass * Sources::kRows, query = rows.query(row);
          bool const is_query = rows.uses(row) && tile.m_begin + query < tile.seqlen_q;
          return Row{first_row + query * params.q.row_stride + rows.head(row) * params.q.head_stride,
                     is_query};
        },
        params.shape.head_dim);
  }
  // Before the first block of keys.
  CUTE_DEVICE void start(int block) { find_page(block); }
  template <class Target>
  CUTE_DEVICE void load_k(int block, Target&& target) {
    if (!Walk::kNeighbours) find_page(block);
    load_keys(params.k, block, params.shape.head_dim, target);
  }
  template <class Target>
  CUTE_DEVICE void load_v(int block, Target&& target) {
    load_keys(params.v, block, params.shape.head_dim_v, target);
    if (Walk::kNeighbours) find_page(block - 1);
  }

 private:
  CUTE_DEVICE void find_page(int block) {
    if (block >= 0) page = Sources::find_page(source.operands, tile, thread, block);
  }

  struct Row {
    Element const* chunk;  // the thread's first
    bool is_seen;          // else it becomes zeros
  };
  CUTE_DEVICE Element const* first_chunk(TensorView const& view, int head) const {
    return static_cast<Element const*>(view.data) + head * view.head_stride + thread % kChunks * kChunk;
  }

  template <class Target>
  CUTE_DEVICE void load_keys(TensorView const& view, int block, int columns, Target&& target) const {
    Element const* chunks[Sources::kPasses];
    int const first_key = Sources::first_key(thread, block);
    Sources::find(source.operands, tile, view, first_chunk(view, tile.head_kv), thread, block, first_key,
                  page, chunks);
    copy_rows(
        Int<Sources::kPasses>{}, target,
        [&](int pass) { return Row{chunks[pass], Sources::is_seen(tile, first_key, pass)}; }, columns);
  }
  // row_of(pass): the row, of so many columns, that the thread copies in a pass.
  template <class Passes, class Target, class RowOf>
  CUTE_DEVICE void copy_rows(Passes passes, Target&& target, RowOf const& row_of, int columns) const {
    Tensor chunks =
        typename Traits::TiledLoad{}.get_slice(thread).partition_D(target);  // (COPY, PASS, PANEL)
    static_assert(decltype(size<1>(chunks))::value == Passes::value);
    CUTE_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
      Row const row = row_of(pass);
      CUTE_UNROLL
      for (int panel = 0; panel < size<2>(chunks); ++panel) {
        int const column = panel * kChunks * kChunk;
        bool const copies = row.is_seen && column + thread % kChunks * kChunk < columns;
        Tensor source = make_tensor(make_gmem_ptr(row.chunk + column), Layout<Shape<Int<kChunk>>>{});
        copy(typename Traits::LoadAtom{}.with(copies), source, chunks(_, pass, panel));
      }
    }
  }
};

template <class Traits, class Tile, class Mask>
using LoadsSm80 = std::conditional_t<Traits::kKernel.loads == Loads::rows, RowLoads<Traits, Tile, Mask>,
                                     TileLoads<Traits, Tile, Mask>>;

}  // namespace flash_cute
