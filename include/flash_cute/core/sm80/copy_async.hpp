// Predicated tile copies from global to shared memory.
#pragma once

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

// The valid part of a tile. What lies outside is never read and becomes zero in shared memory.
struct TileBounds {
  int rows, cols;

  template <class Coord>
  CUTE_DEVICE bool contains(Coord const& coord) const {
    return get<0>(coord) < rows && get<1>(coord) < cols;
  }
};

// The valid part of a tile whose first rows are not valid either.
struct TileInterior {
  int first_row;
  TileBounds bounds;

  template <class Coord>
  CUTE_DEVICE bool contains(Coord const& coord) const {
    return first_row <= get<0>(coord) && bounds.contains(coord);
  }
};

// Issues cp.async for this thread's part of a tile and fills with zeros outside of bounds. All tensors are
// (COPY, COPY_M, COPY_K).
template <class Atom, class Source, class Target, class Coords, class Bounds>
CUTE_DEVICE void copy_async(Atom const& atom, Source const& source, Target&& target, Coords const& coords,
                            Bounds const& bounds) {
  CUTE_UNROLL
  for (int m = 0; m < size<1>(source); ++m) {
    CUTE_UNROLL
    for (int k = 0; k < size<2>(source); ++k) {
      copy(atom.with(bounds.contains(coords(_0{}, m, k))), source(_, m, k), target(_, m, k));
    }
  }
}

}  // namespace flash_cute
