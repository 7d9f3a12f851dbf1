// What a kernel's masking, a window or a table, is to the backward: the blocks that a tile visits, those that
// need no element test, that test, and which queries see a key. Main loops do not ask which of the two it is.
#pragma once

#include "flash_cute/attention/kv_blocks.hpp"
#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/mask/mask_table.hpp"
#include "flash_cute/backward/params.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"

namespace flash_cute {

// What queries see of a tile of keys: M blocks that see one of its keys, those in which all queries see all
// of its keys, and the mask of S^T.
struct WindowOfKeys {
  TransposedMask mask;
  BlockRange visited, full_blocks;

  FLASH_CUTE_HOST_DEVICE bool empty() const { return visited.empty(); }
  FLASH_CUTE_HOST_DEVICE int count() const { return visited.end - visited.begin; }
  FLASH_CUTE_HOST_DEVICE int first() const { return visited.begin; }
  FLASH_CUTE_HOST_DEVICE int after(int block) const { return block + 1; }
  FLASH_CUTE_HOST_DEVICE int end() const { return visited.end; }
};
struct TableOfKeys : TableQueryBlocks {
  FullBlocks full_blocks;
  TableMask mask;

  FLASH_CUTE_HOST_DEVICE bool empty() const { return count() == 0; }
};

// What a block of queries sees of keys.
template <class Walk, class Full, class Mask>
struct KeysOfQueries {
  Walk visited;
  Full full_blocks;
  Mask mask;
};

template <Masking masking>
struct BackwardMask;

template <>
struct BackwardMask<Masking::window> {
  // Of queries that the window leaves a key.
  CUTE_DEVICE static bool sees_any_key(BackwardParams const&, int, int) { return true; }

  // The steps of a tile of keys.
  template <class Traits>
  CUTE_DEVICE static auto steps(BackwardParams const& params, KvTile const& tile) {
    return QBlockIterator(tile, params.shape.heads_q / params.shape.heads_kv, Traits::kBlockM,
                          Traits::kTileN);
  }
  // The M blocks whose queries all see keys [begin, begin + keys).
  CUTE_DEVICE static BlockRange full_blocks(KvTile const& tile, int begin, int keys, int block_m) {
    WindowMask const& mask = tile.sequence.mask;
    return begin + keys <= mask.seqlen_k ? mask.full_rows(begin, keys, block_m) : BlockRange{0, 0};
  }
  // Hides pairs of S^T, of queries from m_begin and keys from n_begin on.
  template <class Traits, class Coords, class Scores>
  CUTE_DEVICE static void apply(BackwardParams const&, KvTile const& tile, int n_begin, int m_begin,
                                Coords const& cS, Scores& acc_s) {
    apply_mask<KeyBits>(TransposedMask{tile.sequence.mask.transposed()}, OneHead{}, n_begin, m_begin, cS,
                        acc_s);
  }
  template <class Traits>
  CUTE_DEVICE static WindowOfKeys queries_that_see(BackwardParams const&, KvTile const& tile) {
    WindowMask const& mask = tile.sequence.mask;
    return {{mask.transposed()},
            mask.visited_rows(tile.n_begin, Traits::kBlockN, Traits::kBlockM),
            full_blocks(tile, tile.n_begin, Traits::kBlockN, Traits::kBlockM)};
  }
  template <class Traits>
  CUTE_DEVICE static auto keys_seen_by(BackwardParams const&, Sequence const& s, int, int m_begin) {
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    return KeysOfQueries{KvBlocks(s.mask.visited(m_begin, kBlockM, kBlockN)),
                         s.mask.full(m_begin, kBlockM, kBlockN), s.mask};
  }
};

template <>
struct BackwardMask<Masking::table> {
  CUTE_DEVICE static bool sees_any_key(BackwardParams const& params, int b, int row) {
    return flash_cute::sees_any_key(params, params.workspace.mask_table, b, row);
  }

  template <class Traits>
  CUTE_DEVICE static auto steps(BackwardParams const& params, KvTile const& tile) {
    int const heads = params.shape.heads_q / params.shape.heads_kv;
    return TableQBlockIterator(query_blocks<Traits>(params, tile), tile, heads);
  }
  // Of the tile's keys, as its steps know.
  CUTE_DEVICE static FullInTable full_blocks(KvTile const&, int, int, int) { return {}; }
  template <class Traits, class Coords, class Scores>
  CUTE_DEVICE static void apply(BackwardParams const& params, KvTile const& tile, int n_begin, int m_begin,
                                Coords const& cS, Scores& acc_s) {
    apply_transposed<Traits::kBlockM, Traits::kBlockN>(mask<Traits>(params, tile), n_begin, m_begin, cS,
                                                       acc_s);
  }
  template <class Traits>
  CUTE_DEVICE static TableOfKeys queries_that_see(BackwardParams const& params, KvTile const& tile) {
    TableQueryBlocks const blocks = query_blocks<Traits>(params, tile);
    return {blocks, {blocks.bits}, mask<Traits>(params, tile)};
  }
  template <class Traits>
  CUTE_DEVICE static auto keys_seen_by(BackwardParams const& params, Sequence const& s, int b, int m_begin) {
    auto const table = MaskTable::make(params, params.workspace.mask_table, Traits::kBlockM, Traits::kBlockN,
                                       /*transposes=*/false);
    int const m_block = table.m_block(b, m_begin);
    return KeysOfQueries{TableKvBlocks(table.key_bits_of(m_block), table.words, table.visited_by(m_block)),
                         FullInTable{}, table.mask(b, s.queries.begin, s.used, s.mask.seqlen_k)};
  }

  // The table of the tiles of a kernel.
  template <class Traits>
  FLASH_CUTE_HOST_DEVICE static MaskTable table(BackwardParams const& params) {
    return MaskTable::make(params, params.workspace.mask_table, Traits::kBlockM, Traits::kTileN,
                           /*transposes=*/true);
  }

 private:
  template <class Traits>
  CUTE_DEVICE static TableQueryBlocks query_blocks(BackwardParams const& params, KvTile const& tile) {
    int const b = tile.pair / params.shape.heads_kv;
    return {table<Traits>(params).query_bits_of(b, tile.n_begin / Traits::kTileN),
            ceil_div(tile.sequence.used, Traits::kBlockM)};
  }
  template <class Traits>
  CUTE_DEVICE static TableMask mask(BackwardParams const& params, KvTile const& tile) {
    int const b = tile.pair / params.shape.heads_kv;
    Sequence const& s = tile.sequence;
    return table<Traits>(params).mask(b, s.queries.begin, s.used, s.mask.seqlen_k);
  }
};

// The steps of a tile of keys.
template <class Traits>
CUTE_DEVICE auto steps_of(BackwardParams const& params, KvTile const& tile) {
  return BackwardMask<Traits::kMasking>::template steps<Traits>(params, tile);
}

}  // namespace flash_cute
