// A chunk is 16 bytes of a row, kept in four registers as they lie in memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flash_cute/softmax/plan.hpp"

namespace flash_cute {

__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Operations on two 16-bit elements in one word, with the first one in the lower half.
template <ElementType>
struct Pair;
template <>
struct Pair<ElementType::bf16> {
  static constexpr uint32_t kMinusInfinity = 0xff80;

  __device__ static float2 to_floats(uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
  __device__ static uint32_t max(uint32_t a, uint32_t b) {
    __nv_bfloat162 const pair =
        __hmax2_nan(reinterpret_cast<__nv_bfloat162 const&>(a), reinterpret_cast<__nv_bfloat162 const&>(b));
    return reinterpret_cast<uint32_t const&>(pair);
  }
  __device__ static uint32_t of_floats(float a, float b) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};
template <>
struct Pair<ElementType::fp16> {
  static constexpr uint32_t kMinusInfinity = 0xfc00;

  __device__ static float2 to_floats(uint32_t word) {
    return __half22float2(reinterpret_cast<__half2 const&>(word));
  }
  __device__ static uint32_t max(uint32_t a, uint32_t b) {
    __half2 const pair =
        __hmax2_nan(reinterpret_cast<__half2 const&>(a), reinterpret_cast<__half2 const&>(b));
    return reinterpret_cast<uint32_t const&>(pair);
  }
  __device__ static uint32_t of_floats(float a, float b) {
    __half2 const pair = __floats2half2_rn(a, b);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};

template <ElementType element>
struct Chunk {
  using Storage = uint16_t;  // holds an element's bits
  static constexpr int kWidth = kChunkBytes / sizeof(Storage);
  static constexpr Storage kMinusInfinity = Pair<element>::kMinusInfinity;

  uint32_t words[4];

  __device__ static Chunk filled(Storage bits) {
    uint32_t const word = bits | uint32_t(bits) << 16;
    return {{word, word, word, word}};
  }
  __device__ void set(int i, Storage bits) {
    uint32_t const shift = 16 * (i % 2);
    words[i / 2] = (words[i / 2] & ~(0xffffu << shift)) | uint32_t(bits) << shift;
  }
  __device__ Storage get(int i) const { return Storage(words[i / 2] >> 16 * (i % 2)); }
  // Returns the largest element, or NaN if any is NaN.
  __device__ float max() const {
    using Words = Pair<element>;
    float2 const pair =
        Words::to_floats(Words::max(Words::max(words[0], words[1]), Words::max(words[2], words[3])));
    return max_or_nan(pair.x, pair.y);
  }
  __device__ void to_floats(float (&values)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      float2 const pair = Pair<element>::to_floats(words[i / 2]);
      values[i] = pair.x;
      values[i + 1] = pair.y;
    }
  }
  __device__ static Chunk of_floats(float const (&values)[kWidth]) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      chunk.words[i / 2] = Pair<element>::of_floats(values[i], values[i + 1]);
    }
    return chunk;
  }
};

template <>
struct Chunk<ElementType::fp32> {
  using Storage = uint32_t;
  static constexpr int kWidth = 4;
  static constexpr Storage kMinusInfinity = 0xff800000;

  uint32_t words[4];

  __device__ static Chunk filled(Storage bits) { return {{bits, bits, bits, bits}}; }
  __device__ void set(int i, Storage bits) { words[i] = bits; }
  __device__ Storage get(int i) const { return words[i]; }
  __device__ float max() const {
    return max_or_nan(max_or_nan(__uint_as_float(words[0]), __uint_as_float(words[1])),
                      max_or_nan(__uint_as_float(words[2]), __uint_as_float(words[3])));
  }
  __device__ void to_floats(float (&values)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = __uint_as_float(words[i]);
  }
  __device__ static Chunk of_floats(float const (&values)[kWidth]) {
    return {{__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
             __float_as_uint(values[3])}};
  }
};

// Makes the compiler convert the chunks to floats again after this. It would keep the floats of all chunks
// for the next loop over them and spill.
template <class Chunk, int count>
__device__ void forget_floats(Chunk (&chunks)[count]) {
#pragma unroll
  for (int k = 0; k < count; ++k) {
#pragma unroll
    for (uint32_t& word : chunks[k].words) asm volatile("" : "+r"(word));
  }
}

template <class Chunk, class Storage>
__device__ Chunk read_chunk(Storage const* from) {
  uint4 const words = *reinterpret_cast<uint4 const*>(from);
  return {{words.x, words.y, words.z, words.w}};
}
template <class Chunk, class Storage>
__device__ void write_chunk(Storage* to, Chunk const& chunk) {
  *reinterpret_cast<uint4*>(to) = {chunk.words[0], chunk.words[1], chunk.words[2], chunk.words[3]};
}

}  // namespace flash_cute
