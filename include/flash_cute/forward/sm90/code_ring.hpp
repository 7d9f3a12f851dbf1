// Which parts of blocks of K and V are on their way as codes of 8 bits, in slots beside the stages, and which
// comes next. Of a thread, which widens what it has copied itself: its own groups of copies say what is
// there.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace flash_cute {

enum class CodePart : unsigned { k, first_k, v };  // first_k: with which a tile begins

// A part takes a stage no sooner than its codes have arrived, so copies do not wait for consumers. Slots have
// room for three blocks at most. So when the tile after the next is taken, which waits until consumers have
// read the next one (TileQueue), they have all keys of the tile before this one.
template <int kSlots>
struct CodeRing {
  static constexpr int kBits = 2;  // of a kind

  int filled = 0, next = 0;  // slots that are taken, and that which is filled next
  uint32_t kinds = 0;        // of the newest part in the lowest bits

  CUTE_DEVICE bool is_full() const { return filled == kSlots; }
  CUTE_DEVICE int oldest() const { return next < filled ? next - filled + kSlots : next - filled; }
  CUTE_DEVICE void push(CodePart kind) {
    kinds = kinds << kBits | uint32_t(kind);
    next = next + 1 == kSlots ? 0 : next + 1;
    ++filled;
  }
  CUTE_DEVICE CodePart pop() {
    --filled;
    return CodePart(kinds >> kBits * filled & ((1u << kBits) - 1));
  }
};

}  // namespace flash_cute
