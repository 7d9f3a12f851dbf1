// The tile that a thread block of the Ampere family works on.
#pragma once

#include <type_traits>
#include <utility>

#include <cute/config.hpp>

#include "flash_cute/core/special_registers.hpp"

namespace flash_cute {

// find() is called once, by one thread, and its result stays in shared memory, where it takes no registers;
// or it is called whenever the tile is asked for.
template <bool in_shared_memory, class Find>
struct TileOfBlock {
  using Tile = decltype(std::declval<Find>()());
  Find find;

  CUTE_DEVICE explicit TileOfBlock(Find find_) : find(find_) {
    if constexpr (in_shared_memory) {
      if (threadIdx.x == 0) kept() = find();
      __syncthreads();
    }
  }
  CUTE_DEVICE decltype(auto) get() const {
    if constexpr (in_shared_memory) {
      return static_cast<Tile const&>(kept());
    } else {
      return find();
    }
  }

 private:
  CUTE_DEVICE static Tile& kept() {
    static_assert(std::is_trivially_copyable_v<Tile>);
    alignas(Tile) __shared__ unsigned char memory[sizeof(Tile)];  // which has no initial values
    return *reinterpret_cast<Tile*>(memory);
  }
};

template <bool in_shared_memory, class Find>
CUTE_DEVICE auto tile_of_block(Find find) {
  return TileOfBlock<in_shared_memory, Find>(find);
}

}  // namespace flash_cute
