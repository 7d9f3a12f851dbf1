// What changes a call beside a window, from a dict of Python's.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>

#include "flash_cute/params.hpp"

namespace flash_cute::host {

namespace py = pybind11;

struct Changes {
  RangeParams ranges;
  PairMaskParams pair_mask;
  ScoreParams scores;
  bool batch_invariant = false, is_fp8 = false;  // of the forward, a cache's codes

  // Without memory: what a plan asks of them. ranges: of a query. mask: how many entries, heads and rows
  // differ. keep: of 4096 pairs.
  explicit Changes(py::dict const& values) {
    for (auto const& [key, value] : values) {
      auto const name = key.cast<std::string>();
      if (name == "ranges") {
        ranges.count = value.cast<int>();
      } else if (name == "mask") {
        auto const [entries, heads, rows] = value.cast<std::array<int, 3>>();
        pair_mask.given = true;
        pair_mask.entries = entries;
        pair_mask.heads = heads;
        pair_mask.rows = rows;
      } else if (name == "softcap") {
        scores.softcap = value.cast<float>();
      } else if (name == "slopes") {
        scores.has_slopes = value.cast<bool>();
      } else if (name == "bias") {
        scores.bias.given = value.cast<bool>();
      } else if (name == "keep") {
        scores.dropout.keep = value.cast<int>();
      } else if (name == "batch_invariant") {
        batch_invariant = value.cast<bool>();
      } else if (name == "is_fp8") {
        is_fp8 = value.cast<bool>();
      } else {
        throw std::invalid_argument("no change is named " + name);
      }
    }
  }

  // Sets them in the params of a pass.
  template <class Params>
  void apply(Params& params) const {
    params.ranges = ranges;
    params.pair_mask = pair_mask;
    params.scores = scores.derive();
  }
};

}  // namespace flash_cute::host
