// How the query heads that share K and V are split among tiles, and what that depends on.
#pragma once

#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/backward/params.hpp"
#include "flash_cute/backward/tiles.hpp"

namespace flash_cute {

// The mask of a sequence of the mean length.
inline WindowMask mean_mask(BackwardParams const& params, WindowMask const& mask) {
  int const sequences = params.lengths.cu_seqlens_q ? larger(1, params.shape.batch) : 1;
  WindowMask mean = WindowMask::make(params.shape.seqlen_q / sequences, params.shape.seqlen_k / sequences,
                                     mask.left, mask.right);
  mean.seqlen_k -= mean.first_reachable_key();  // as in each sequence
  return mean;
}

// How many keys a query in the middle sees, and a query at most; of the transposed mask, queries that see a
// key.
struct KeysSeen {
  int mean, most;

  static KeysSeen by(WindowMask const& mask) {
    auto keys_of = [&](int query) { return mask.end_key(query) - mask.first_key(query); };
    int const mean = keys_of(mask.seqlen_q / 2);
    int const of_ends = larger(keys_of(0), keys_of(larger(0, mask.seqlen_q - 1)));
    return {mean, larger(mean, of_ends)};
  }
};

inline KeysSeen keys_of_queries(BackwardParams const& params, WindowMask const& mask) {
  return KeysSeen::by(mean_mask(params, mask));
}
inline KeysSeen queries_of_keys(BackwardParams const& params, WindowMask const& mask) {
  return KeysSeen::by(mean_mask(params, mask).transposed());
}

// Is the key that most queries see seen by a third more than one in the middle?
inline bool are_seen_unevenly(BackwardParams const& params, WindowMask const& mask) {
  auto const [mean, most] = queries_of_keys(params, mask);
  return 3 * int64_t(most) > 4 * int64_t(mean);
}

// Into how many equal parts a group of query heads is split. Each part has tiles of its own, and adds its dK
// and dV to sums of which a kernel after makes rows; that costs about kStepsToBegin steps a tile. As few
// parts as come within 2% of the shortest time by a model of the schedule (H200; 8 query heads, causal, 1k to
// 16k: +5 to +16% over one part): where each key is seen by as many queries, whole rounds of tiles; else the
// work of all tiles, and a quarter of the longest one at the end. But no fewer than keep sums accurate:
// tensor cores seem to cut off what they add, and each row of queries makes dK and dV smaller by 1e-9 of them
// (H200; 2^22 rows: by eight times half a unit of fp16). In deterministic mode each part has sums of its own,
// so the number depends on the group and its lengths alone: then an entry of a dense or padded batch has the
// same bits in any. There each part keeps kStepsAlone steps, and all sums, those of dQ among them, take at
// most twice what one part's do.
inline int choose_gqa_parts(BackwardParams const& params, WindowMask const& mask, BackwardTile const& tile,
                            int kv_blocks, int at_a_time, bool deterministic) {
  ProblemShape const& shape = params.shape;
  auto const [mean, most] = queries_of_keys(params, mask);
  bool const uneven = params.lengths.given || are_seen_unevenly(params, mask);
  int const group = shape.heads_q / larger(1, shape.heads_kv);
  int64_t const tiles = int64_t(kv_blocks) * shape.heads_kv;
  auto steps = [&](int queries) { return int64_t(group) * ceil_div(queries, tile.block_m); };
  constexpr int kStepsToBegin = 6, kStepsAlone = 256;
  constexpr int64_t kRowsOfSum = 1 << 18, kMostTiles = 1 << 30;
  auto time = [&](int parts) {
    double const longest = double(steps(most)) / parts + kStepsToBegin;
    if (!uneven) return double(ceil_div(tiles * parts, int64_t(at_a_time))) * longest;
    double const of_all = tiles * (double(steps(mean)) + parts * kStepsToBegin) / at_a_time;
    return larger(longest, of_all + longest / 4);
  };
  int64_t const for_twice_the_memory = 2 + group * int64_t(shape.seqlen_q) / larger(1, 2 * shape.seqlen_k);
  int64_t const most_parts = deterministic ? smaller(steps(mean) / kStepsAlone, for_twice_the_memory) : group;
  int parts = 1;
  if (tiles == 0) return parts;
  for (int next = 2; next <= smaller<int64_t>(group, most_parts) && tiles * next <= kMostTiles; ++next) {
    if (group % next != 0) continue;
    bool const is_accurate = steps(most) * tile.block_m <= kRowsOfSum * parts;
    if (deterministic || !is_accurate || time(next) < 0.98 * time(parts)) parts = next;
  }
  return parts;
}

}  // namespace flash_cute
