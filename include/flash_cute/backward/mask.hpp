// What a kernel's masking, a window or a table, is to the backward: the blocks that a tile visits, those that
// need no element test, that test, and which queries see a key. Main loops do not ask which of the two it is.
#pragma once

#include "flash_cute/attention/kv_blocks.hpp"
#include "flash_cute/attention/mask/apply.hpp"
#include "flash_cute/attention/mask/mask_table.hpp"
#include "flash_cute/attention/scores/lowest.hpp"
#include "flash_cute/attention/scores/place.hpp"
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
  // What the pairs of a tile of keys have in common.
  struct OfTile {
    ScorePlace place = {};
  };
  template <class Traits>
  CUTE_DEVICE static OfTile of_tile(BackwardParams const&, KvTile const&) {
    return {};
  }
  struct Nothing {};
  template <class Traits, class Coords>
  using Visible = Nothing;

  CUTE_DEVICE static float lse_in_base_2(BackwardParams const&, float lse) { return lse * float(M_LOG2E); }

  // Of queries that the window leaves a key.
  CUTE_DEVICE static bool sees_any_key(BackwardParams const&, int, int, int) { return true; }
  template <class Traits>
  CUTE_DEVICE static ScorePlace place(BackwardParams const&, KvTile const&, int) {
    return {};
  }

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
  template <class Coords, class Scores>
  CUTE_DEVICE static void apply(KvTile const& tile, int n_begin, int m_begin, Coords const& cS,
                                Scores& acc_s) {
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
  CUTE_DEVICE static auto keys_seen_by(BackwardParams const&, Sequence const& s, int, int, int m_begin) {
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    return KeysOfQueries{KvBlocks(s.mask.visited(m_begin, kBlockM, kBlockN)),
                         s.mask.full(m_begin, kBlockM, kBlockN), s.mask};
  }
  CUTE_DEVICE static ScorePlace place(BackwardParams const&, Sequence const&, int, int) { return {}; }
};

template <>
struct BackwardMask<Masking::table> {
  // Of LowestRows what is left when their scores are 0.
  CUTE_DEVICE static float lse_in_base_2(BackwardParams const& params, float lse) {
    if (params.scores.bias.given && LowestRows::has(lse)) {
      *static_cast<int*>(params.workspace.mask_table) = 1;
      return LowestRows::log2_keys(lse);
    }
    return lse * float(M_LOG2E);
  }
  // A bias may hide keys, too: then the LSE alone tells.
  CUTE_DEVICE static bool sees_any_key(BackwardParams const& params, int b, int head, int row) {
    if (params.scores.bias.given) {
      int const entry = params.lengths.cu_seqlens_q ? 0 : b;
      float const lse =
          params.lse[entry * params.lse_batch_stride + int64_t(head) * params.shape.seqlen_q + row];
      if (lse == -INFINITY) return false;
    }
    return flash_cute::sees_any_key(params, params.workspace.mask_table, b, head, row);
  }
  // Of a head of q.
  CUTE_DEVICE static ScorePlace place(BackwardParams const& params, Sequence const& s, int b, int head) {
    auto first_row = [&](int const* offsets, int rows) {
      return BatchBlocks{offsets, rows, params.shape.batch, 1}.owned(b).begin;
    };
    return {.sequence = b,
            .head = head,
            .diagonal = s.mask.shift(),
            .queries = s.used,
            .query_begin = s.queries.begin - first_row(params.lengths.cu_seqlens_q, params.shape.seqlen_q),
            .key_begin = s.k_begin - first_row(params.lengths.cu_seqlens_k, params.shape.seqlen_k)};
  }
  template <class Traits>
  CUTE_DEVICE static ScorePlace place(BackwardParams const& params, KvTile const& tile, int head) {
    return place(params, tile.sequence, tile.pair / params.shape.heads_kv, head);
  }

  template <class Traits>
  CUTE_DEVICE static auto steps(BackwardParams const& params, KvTile const& tile) {
    int const heads = params.shape.heads_q / params.shape.heads_kv;
    return TableQBlockIterator(query_blocks<Traits>(params, tile), tile, heads);
  }
  // Of the tile's keys, as its steps know.
  CUTE_DEVICE static FullInTable full_blocks(KvTile const&, int, int, int) { return {}; }
  template <class Traits, class Coords>
  using Visible = VisiblePairsTransposed<Traits::kBlockM, Traits::kBlockN, Coords, Traits::kGeneral>;
  struct OfTile {
    ScorePlace place;  // its head is any
  };
  template <class Traits>
  CUTE_DEVICE static OfTile of_tile(BackwardParams const& params, KvTile const& tile) {
    return {place<Traits>(params, tile, 0)};
  }
  // Of a block of queries of a head.
  template <class Traits, class Coords>
  CUTE_DEVICE static void find(BackwardParams const& params, KvTile const& tile, int head, int n_begin,
                               int m_begin, Coords const& cS, Visible<Traits, Coords>& visible) {
    visible.find(mask<Traits>(params, tile, head), n_begin, m_begin, cS);
  }
  template <class Traits>
  CUTE_DEVICE static TableOfKeys queries_that_see(BackwardParams const& params, KvTile const& tile) {
    TableQueryBlocks const blocks = query_blocks<Traits>(params, tile);
    return {blocks, {blocks.bits}};
  }
  template <class Traits>
  CUTE_DEVICE static auto keys_seen_by(BackwardParams const& params, Sequence const& s, int b, int head,
                                       int m_begin) {
    auto const table = MaskTable::make(params, params.workspace.mask_table, Traits::kBlockM, Traits::kBlockN,
                                       /*transposes=*/false);
    int const m_block = table.m_block(b, head, m_begin);
    return KeysOfQueries{TableKvBlocks(table.key_bits_of(m_block), table.words, table.visited_by(m_block)),
                         FullInTable{}, table.mask(b, head, s.queries.begin, s.used, s.mask.seqlen_k)};
  }

  // The table of the tiles of a kernel.
  template <class Traits>
  FLASH_CUTE_HOST_DEVICE static MaskTable table(BackwardParams const& params) {
    return MaskTable::make(params, params.workspace.mask_table, Traits::kBlockM, Traits::kTileN,
                           /*transposes=*/true);
  }

  template <class Traits>
  CUTE_DEVICE static TableMask mask(BackwardParams const& params, KvTile const& tile, int head) {
    int const b = tile.pair / params.shape.heads_kv;
    Sequence const& s = tile.sequence;
    return table<Traits>(params).mask(b, head, s.queries.begin, s.used, s.mask.seqlen_k);
  }

 private:
  // Of all heads that share the keys.
  template <class Traits>
  CUTE_DEVICE static TableQueryBlocks query_blocks(BackwardParams const& params, KvTile const& tile) {
    int const b = tile.pair / params.shape.heads_kv;
    return {table<Traits>(params).query_bits_of(b, tile.head_kv, tile.n_begin / Traits::kTileN),
            ceil_div(tile.sequence.used, Traits::kBlockM)};
  }
};

// The steps of a tile of keys.
template <class Traits>
CUTE_DEVICE auto steps_of(BackwardParams const& params, KvTile const& tile) {
  return BackwardMask<Traits::kMasking>::template steps<Traits>(params, tile);
}

}  // namespace flash_cute
