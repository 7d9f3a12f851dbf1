// One sequence of a batch: where its queries and keys begin, how many count, and the mask between them.
#pragma once

#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/attention/tile.hpp"
#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

struct RowRange {
  int begin, end;
};

struct Sequence {
  RowRange queries;  // its rows of Q, among those of its entry, or of the packed tensor
  int used;          // how many of them count
  int k_begin;       // its first key that some query can reach
  WindowMask mask;   // with its lengths, between the queries and keys that count
};

// Sequence b. Offsets and lengths that make no sense are cut to the tensors, so no row outside of them is
// ever named. limits: the mask, whose own lengths are not read.
FLASH_CUTE_HOST_DEVICE Sequence sequence(ProblemShape const& shape, LengthParams const& lengths,
                                         WindowMask const& limits, int b) {
  auto within = [](int value, int low, int high) { return larger(low, smaller(value, high)); };
  auto value = [](int const* values, int i, int otherwise) { return values ? values[i] : otherwise; };
  int const total_q = shape.seqlen_q, total_k = shape.seqlen_k;
  // All loads are issued before one is used, as each takes a while to arrive.
  int const begin_q = value(lengths.cu_seqlens_q, b, 0), begin_k = value(lengths.cu_seqlens_k, b, 0);
  int const end_q = value(lengths.cu_seqlens_q, b + 1, total_q);
  int const end_k = value(lengths.cu_seqlens_k, b + 1, total_k);
  int const given_q = value(lengths.seqused_q, b, total_q), given_k = value(lengths.seqused_k, b, total_k);
  int const leftpad = value(lengths.leftpad_k, b, 0);

  auto rows = [&](int begin, int end, int total) {
    int const first = within(begin, 0, total);
    return RowRange{first, within(end, first, total)};
  };
  RowRange const q = rows(begin_q, end_q, total_q), k = rows(begin_k, end_k, total_k);
  int const used_q = within(given_q, 0, q.end - q.begin);
  int const used_k = within(given_k, 0, k.end - k.begin), padding = within(leftpad, 0, used_k);
  WindowMask mask{used_q, used_k - padding, limits.left, limits.right};
  int const unreachable = mask.first_reachable_key();
  mask.seqlen_k -= unreachable;
  return {q, used_q, k.begin + padding + unreachable, mask};
}
template <class Params>
FLASH_CUTE_HOST_DEVICE Sequence sequence(Params const& params, int b) {
  return sequence(params.shape, params.lengths, params.mask, b);
}

// Calls visit(entry, rows) for part `part` of `parts` of the rows of Q that do not count: those at the ends
// of sequences, and those before and after packed sequences.
template <class Params, class Visit>
FLASH_CUTE_HOST_DEVICE void for_each_unwritten(Params const& params, int part, int parts, Visit&& visit) {
  int const* const offsets = params.lengths.cu_seqlens_q;
  int const batch = params.shape.batch, total = params.shape.seqlen_q;
  auto visit_share = [&](int entry, RowRange const& rows, int share, int shares) {
    int const size = ceil_div(larger(0, rows.end - rows.begin), shares), begin = rows.begin + share * size;
    int const end = smaller(rows.end, begin + size);
    if (begin < end) visit(entry, RowRange{begin, end});
  };
  if (params.lengths.seqused_q) {
    int const shares = larger(1, parts / batch);  // of a sequence
    for (int i = part; i < batch * shares; i += parts) {
      int const b = i / shares;
      Sequence const s = sequence(params.shape, params.lengths, WindowMask{}, b);
      visit_share(offsets ? 0 : b, {s.queries.begin + s.used, s.queries.end}, i - b * shares, shares);
    }
  }
  if (offsets) {
    visit_share(0, {0, smaller(offsets[0], total)}, part, parts);
    visit_share(0, {larger(0, offsets[batch]), total}, part, parts);
  }
}

}  // namespace flash_cute
