// The regions of a workspace: memory that the kernels of a call share.
#pragma once

#include <cstdint>

#include "flash_cute/core/platform.hpp"

namespace flash_cute {

constexpr int kRegionAlignment = 256;  // of regions that are read and written by vectors
constexpr int kZeroFillBytes = 16;     // that a thread zero fills at a time

// Cuts a workspace into regions, which lie one after the other in the order in which they are added. Name: an
// enumeration of them.
template <class Name, int kRegions>
struct WorkspaceLayout {
  struct Region {
    int64_t begin, bytes;  // no bytes: the region does not exist
  };
  Region regions[kRegions] = {};
  int64_t bytes = 0;                       // of all
  int64_t zero_begin = 0, zero_bytes = 0;  // what is zero filled before the first tile

  template <class T>
  void add(Name name, int64_t count, int64_t alignment = alignof(T)) {
    if (count == 0) return;
    int64_t const begin = ceil_div(bytes, alignment) * alignment;
    regions[int(name)] = {begin, count * int64_t(sizeof(T))};
    bytes = begin + regions[int(name)].bytes;
  }
  void begin_zero_fill() { zero_begin = bytes = ceil_div(bytes, int64_t(kZeroFillBytes)) * kZeroFillBytes; }
  void end_zero_fill() {
    bytes = ceil_div(bytes, int64_t(kZeroFillBytes)) * kZeroFillBytes;
    zero_bytes = bytes - zero_begin;
  }

  template <class T>
  T* find(void* workspace, Name name) const {
    Region const& region = regions[int(name)];
    return region.bytes > 0 ? reinterpret_cast<T*>(static_cast<char*>(workspace) + region.begin) : nullptr;
  }
};

}  // namespace flash_cute
