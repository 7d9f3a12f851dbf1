// Key ranges: each query sees the union of a few ranges of keys, of what the window and the lengths leave.
#pragma once

#include "flash_cute/core/platform.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

constexpr int kMaxRanges = 4;  // of a query

// The union of a query's ranges, of what the window leaves: sorted, without gaps that are empty. shift: the
// sequence's first key that counts, from its first row.
struct CutRanges {
  KeyRange ranges[kMaxRanges];

  // All that the window leaves.
  FLASH_CUTE_HOST_DEVICE CutRanges(int first, int end) : ranges{{first, larger(first, end)}} {
    for (int i = 1; i < kMaxRanges; ++i) ranges[i] = {0, 0};
  }

  template <class Mask>
  FLASH_CUTE_HOST_DEVICE CutRanges(int const* given, int count, int shift, Mask const& mask, int row) {
    int const first = mask.first_key(row), end = mask.end_key(row);
    for (KeyRange& range : ranges) range = {0, 0};
    int used = 0;
    for (int i = 0; i < count; ++i) {
      auto within = [&](int key) {
        return int(larger<int64_t>(first, smaller<int64_t>(int64_t(key) - shift, end)));
      };
      KeyRange const range{within(given[2 * i]), within(given[2 * i + 1])};
      if (range.begin >= range.end) continue;
      int at = used++;
      for (; at > 0 && ranges[at - 1].begin > range.begin; --at) ranges[at] = ranges[at - 1];
      ranges[at] = range;
    }
    int last = 0;
    for (int i = 1; i < used; ++i) {
      if (ranges[i].begin <= ranges[last].end) {
        ranges[last].end = larger(ranges[last].end, ranges[i].end);
      } else {
        ranges[++last] = ranges[i];
      }
    }
    for (int i = last + 1; i < kMaxRanges; ++i) ranges[i] = {0, 0};
  }
};

}  // namespace flash_cute
