// A row as chunks of 16 bytes that begin at multiples of 16 bytes, wherever the row itself begins: its first
// and last chunk may have elements of its neighbours, which are neither used nor written.
#pragma once

#include "flash_cute/softmax/chunk.hpp"
#include "flash_cute/softmax/params.hpp"

namespace flash_cute {

// See RowTile, and RowSoftmaxPlan::plain.
template <RowElement element, bool kBackward, int kIndex, bool kPlain_>
struct RowTraits {
  static constexpr bool kPlain = kPlain_;
  using Chunk = flash_cute::Chunk<element>;
  using Storage = typename Chunk::Storage;
  static constexpr RowTile kShape = row_tiles(sizeof(Storage), kBackward).tiles[kIndex];
  static constexpr int kLanes = kShape.lanes, kChunks = kShape.chunks, kTile = kLanes * kChunks;
  static constexpr int kTensors = kBackward ? 2 : 1;
  static constexpr bool kShared = kShape.shared;
  static constexpr bool kFromScores = !kBackward || keeps_scores(element);
  static constexpr bool kKeepsWeights = kFromScores && kShape.weights;
  static constexpr int kWidth = Chunk::kWidth;
  static constexpr int kThreads =
      kLanes > 32 ? kLanes : 128;                  // a row of several warps has a block of its own
  static constexpr int kRows = kThreads / kLanes;  // of a thread block
  static constexpr int kMinBlocks = (!kShared ? 1024 : kBackward ? 512 : 768) / kThreads;
  // Do the chunks of the next row arrive in shared memory meanwhile? Where rows have edges that costs more
  // than it brings (H200, 50257 columns, of a copy's speed: 0.48 for 0.65).
  static constexpr bool kAhead = kShared && kPlain;
  static constexpr int kSmemBytes = kAhead ? kTensors * kTile * kChunkBytes : 0;
};

// Positions count elements from the row's first chunk on. The row is those from `skew` to `size` - 1, of
// which those from `begin` to `end` - 1 are visible; `end` is 0 where none is.
template <class Traits>
struct Row {
  using Chunk = typename Traits::Chunk;
  using Storage = typename Traits::Storage;
  static constexpr int kWidth = Traits::kWidth;

  int skew, size, begin, end;

  // Elements that `data` is behind a multiple of 16 bytes.
  __device__ static int skew_of(Storage const* data) {
    return int(reinterpret_cast<uintptr_t>(data) % kChunkBytes / sizeof(Storage));
  }

  // Is each chunk of the row, in a tensor where it is at `data`, visible as a whole?
  __device__ bool is_plain(Storage const* data) const {
    return Traits::kPlain ||
           (skew == 0 && begin == 0 && end == size && size % kWidth == 0 && skew_of(data) == 0);
  }

  // A thread's chunks of a tensor whose row is at `data`; first: its first one. What is hidden is `hidden`.
  __device__ void load(Chunk (&chunks)[Traits::kChunks], Storage const* data, int first,
                       Storage hidden) const {
    load(chunks, data, first, hidden,
         [&](int, int position) { return read_chunk<Chunk>(data + (position - skew)); });
  }
  // read(k, position): chunk k, where it is a whole one of memory.
  template <class Read>
  __device__ void load(Chunk (&chunks)[Traits::kChunks], Storage const* data, int first, Storage hidden,
                       Read&& read) const {
    bool const whole_chunks = Traits::kPlain || skew_of(data) == skew;
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      int const position = position_of(first, k);
      chunks[k] = Chunk::filled(hidden);
      if (whole_chunks && shows_any(position)) chunks[k] = read(k, position);
    }
    if (is_plain(data)) return;
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      int const position = position_of(first, k);
      if (!shows_any(position) || (whole_chunks && shows_all(position))) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (!shows(position + i)) {
          chunks[k].set(i, hidden);
        } else if (!whole_chunks) {
          chunks[k].set(i, data[position + i - skew]);
        }
      }
    }
  }

  // Begins to copy those that load reads whole; chunk k goes to to[k * kLanes].
  __device__ void fetch(uint4* to, Storage const* data, int first) const {
    if (!Traits::kPlain && skew_of(data) != skew) return;
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      int const position = position_of(first, k);
      if (shows_any(position)) fetch_chunk(to + k * Traits::kLanes, data + (position - skew));
    }
  }

  // Writes value(k) for each chunk k of a thread, and 0 where the row is hidden.
  template <class Value>
  __device__ void store(Storage* data, int first, Value&& value) const {
    if (is_plain(data)) {
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) {
        int const position = position_of(first, k);
        if (position < size) write_chunk(data + position, value(k));
      }
      return;
    }
    bool const whole_chunks = skew_of(data) == skew;
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      int const position = position_of(first, k);
      if (position >= size) continue;
      Chunk chunk = Chunk::filled(0);
      if (shows_any(position)) {
        chunk = value(k);
        if (!shows_all(position)) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            if (!shows(position + i)) chunk.set(i, 0);
          }
        }
      }
      if (whole_chunks && position >= skew && position + kWidth <= size) {
        write_chunk(data + (position - skew), chunk);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (position + i >= skew && position + i < size) data[position + i - skew] = chunk.get(i);
        }
      }
    }
  }

 private:
  __device__ static int position_of(int first, int k) { return (first + k * Traits::kLanes) * kWidth; }

  __device__ bool shows(int position) const { return begin <= position && position < end; }
  __device__ bool shows_any(int position) const {
    return position < end && (Traits::kPlain || position + kWidth > begin);
  }
  __device__ bool shows_all(int position) const { return begin <= position && position + kWidth <= end; }
};

}  // namespace flash_cute
