// Which tile of queries comes at which place of the launch order.
#pragma once

#include <cstdint>

#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

struct TileCoord {
  int m_block, head, batch;
};

// Walks the (batch, head) pairs in sections; inside a section the longest tiles come first, so that the last
// wave of a masked problem is made of short ones. A section is small enough for its K and V to stay in L2,
// and no larger than asked for: tiles that read K and V anew should mix with tiles that find them in L2
// (H100, d128, 16k tokens: sections of 25 MB take turns in being bound by memory and by arithmetic, and lose
// 20% at seqlen 512 to sections of one head).
struct TileOrder {
  int m_blocks, heads, sequences;  // sequences = batch * heads
  int section;                     // (batch, head) pairs that share L2
  bool descending;                 // is the last block of queries the longest?

  static TileOrder make(ProblemShape const& shape, WindowMask const& mask, int block_m, int element_bytes,
                        int64_t l2_bytes, int section_tiles) {
    int const m_blocks = ceil_div(shape.seqlen_q, block_m);
    int64_t const kv_bytes = 2 * int64_t(element_bytes) * shape.seqlen_k * shape.head_dim;
    int64_t const in_l2 = l2_bytes / 2 / larger<int64_t>(1, kv_bytes);
    int64_t const group = shape.heads_q / shape.heads_kv;
    int64_t const asked_for = section_tiles / (m_blocks * group);
    int64_t const kv_heads = larger<int64_t>(1, smaller(in_l2, asked_for));
    int64_t const sequences = int64_t(shape.batch) * shape.heads_q;
    auto length = [&](int m_block) {
      BlockRange const keys = mask.visited(m_block * block_m, block_m, 1);
      return keys.end - keys.begin;
    };
    return {m_blocks, shape.heads_q, int(sequences), int(smaller(sequences, kv_heads * group)),
            length(m_blocks - 1) >= length(0)};
  }

  FLASH_CUTE_HOST_DEVICE int tiles() const { return m_blocks * sequences; }

  FLASH_CUTE_HOST_DEVICE TileCoord operator()(int index) const {
    int const first = index / (section * m_blocks) * section;
    int const width = smaller(section, sequences - first);
    int const place = index - first * m_blocks;
    int const rank = place / width;
    int const sequence = first + place % width;
    return {descending ? m_blocks - 1 - rank : rank, sequence % heads, sequence / heads};
  }
};

template <class Traits>
TileOrder forward_order(ForwardParams const& params) {
  return TileOrder::make(params.shape, params.mask, Traits::kBlockM, sizeof(typename Traits::Element),
                         params.device.l2_bytes, Traits::kSectionWaves * params.device.multiprocessors);
}

}  // namespace flash_cute
