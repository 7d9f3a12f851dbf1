// A row as chunks of 16 bytes that begin at multiples of 16 bytes, wherever the row itself begins: its first
// and last chunk may have elements of its neighbours, which are neither used nor written.
#pragma once

#include "flash_cute/softmax/chunk.hpp"
#include "flash_cute/softmax/params.hpp"

namespace flash_cute {

// See RowTile, and RowSoftmaxPlan::plain.
template <ElementType element, bool kBackward, RowTile kShape, bool kPlain_>
struct RowTraits {
  static constexpr bool kPlain = kPlain_;
  using Chunk = flash_cute::Chunk<element>;
  using Storage = typename Chunk::Storage;
  static constexpr int kLanes = kShape.lanes, kChunks = kShape.chunks, kThreads = kShape.threads;
  static constexpr int kMinBlocks = kShape.resident / kThreads;
  static constexpr int kTensors = kBackward ? 2 : 1;
  static constexpr bool kOfBlock = kShape.of_block, kShared = kShape.shared;
  static constexpr bool kFromScores = !kBackward || keeps_scores(element);
  static constexpr bool kKeepsWeights = kFromScores && kShape.weights;
  // May a part be several tiles? Where what is computed twice is computed outside of a loop over tiles, even
  // of one, ptxas mixes the results of all chunks and spills 208 bytes.
  static constexpr bool kInTiles = kShared || (kFromScores && !kKeepsWeights);
  static constexpr int kWidth = Chunk::kWidth;
  static constexpr int kRows = kShape.rows();
};

// Positions count elements from a thread's first chunk of a row on, at `data` in a tensor. The row is those
// from `start` to `size` - 1, of which those from `begin` to `end` - 1 are visible; `end` is 0 or less where
// none is.
template <class Traits>
struct Row {
  using Chunk = typename Traits::Chunk;
  using Storage = typename Traits::Storage;
  static constexpr int kWidth = Traits::kWidth;

  int start, size, begin, end;

  // Elements that `data` is behind a multiple of 16 bytes.
  __device__ static int skew_of(Storage const* data) {
    return int(reinterpret_cast<uintptr_t>(data) % kChunkBytes / sizeof(Storage));
  }

  __device__ Row behind(int elements) const {
    return {start - elements, size - elements, begin - elements, end - elements};
  }

  // Is the row's last chunk one of this thread's, or before them?
  __device__ bool ends_here() const { return size < position_of(Traits::kChunks - 1) + kWidth; }

  // A thread's chunks, which begin at multiples of 16 bytes. What is hidden is `hidden`.
  __device__ void load(Chunk (&chunks)[Traits::kChunks], Storage const* data, Storage hidden) const {
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      chunks[k] = Chunk::filled(hidden);
      if (shows_any(position_of(k))) chunks[k] = read_chunk<Chunk>(data + position_of(k));
    }
    if (Traits::kPlain) return;
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      if (shows_any(position_of(k))) hide(chunks[k], position_of(k), hidden);
    }
  }
  // The same, wherever they begin.
  __device__ void load_elements(Chunk (&chunks)[Traits::kChunks], Storage const* data, Storage hidden) const {
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      chunks[k] = Chunk::filled(hidden);
      if (!shows_any(position_of(k))) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (shows(position_of(k) + i)) chunks[k].set(i, data[position_of(k) + i]);
      }
    }
  }

  // Writes value(k) for each chunk k of a thread, and 0 where the row is hidden.
  template <class Value>
  __device__ void store(Storage* data, Value&& value) const {
    bool const whole_chunks = Traits::kPlain || skew_of(data) == 0;
#pragma unroll
    for (int k = 0; k < Traits::kChunks; ++k) {
      int const position = position_of(k);
      if (position >= size) continue;
      Chunk chunk = Chunk::filled(0);
      if (shows_any(position)) {
        chunk = value(k);
        if (!Traits::kPlain) hide(chunk, position, 0);
      }
      if (Traits::kPlain || (whole_chunks && position >= start && position + kWidth <= size)) {
        write_chunk(data + position, chunk);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (position + i >= start && position + i < size) data[position + i] = chunk.get(i);
        }
      }
    }
  }

 private:
  __device__ static constexpr int position_of(int k) { return k * Traits::kLanes * kWidth; }

  __device__ bool shows(int position) const { return begin <= position && position < end; }
  __device__ bool shows_any(int position) const {
    return position < end && (Traits::kPlain || position + kWidth > begin);
  }
  __device__ void hide(Chunk& chunk, int position, Storage hidden) const {
    if (begin <= position && position + kWidth <= end) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (!shows(position + i)) chunk.set(i, hidden);
    }
  }
};

}  // namespace flash_cute
