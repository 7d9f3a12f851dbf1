// A row is read as chunks of 16 bytes that begin at multiples of 16 bytes, wherever the row itself begins.
// Its first and last chunk may have elements of neighbouring rows, which are neither used nor written.
#pragma once

#include "flash_cute/softmax/chunk.hpp"
#include "flash_cute/softmax/params.hpp"

namespace flash_cute {

// The constants of a kernel; RowTile and RowSoftmaxPlan::plain explain them.
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
  // Loops over the tiles of a part, even where there is one. Weights that are computed twice need the loop,
  // too: without it ptxas interleaves the results of all chunks and spills 208 bytes.
  static constexpr bool kInTiles = kShared || (kFromScores && !kKeepsWeights);
  static constexpr int kWidth = Chunk::kWidth;
  static constexpr int kRows = kShape.rows();
};

// Positions count elements from a thread's first chunk of a row, which lies at `data` in a tensor. The row
// consists of the positions from `start` to `size` - 1. Those from `begin` to `end` - 1 are visible; `end` is
// 0 or less where none is.
template <class Traits>
struct Row {
  using Chunk = typename Traits::Chunk;
  using Storage = typename Traits::Storage;
  static constexpr int kWidth = Traits::kWidth;

  int start, size, begin, end;

  // Returns by how many elements `data` is past a multiple of 16 bytes.
  __device__ static int skew_of(Storage const* data) {
    return int(reinterpret_cast<uintptr_t>(data) % kChunkBytes / sizeof(Storage));
  }

  __device__ Row after(int elements) const {
    return {start - elements, size - elements, begin - elements, end - elements};
  }

  // Tells whether the row's last chunk is one of this thread's, or lies before them.
  __device__ bool ends_here() const { return size < position_of(Traits::kChunks - 1) + kWidth; }

  // Loads a thread's chunks, which begin at multiples of 16 bytes. Hidden elements become `hidden`.
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
  // Loads them element by element, wherever they begin.
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
