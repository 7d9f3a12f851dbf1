// The kernel that writes new keys and values into a cache, rotated if asked for, and rotates their queries.
// A thread has two chunks of 16 bytes of a row: those that a rotation needs together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "flash_cute/append/params.hpp"
#include "flash_cute/core/dependent_launch.hpp"

namespace flash_cute {

template <ElementType>
struct RowElement {
  using type = float;
};
template <>
struct RowElement<ElementType::fp16> {
  using type = __half;
};
template <>
struct RowElement<ElementType::bf16> {
  using type = __nv_bfloat16;
};

template <class T, int kCount>
struct alignas(kCount * sizeof(T) < kAppendChunkBytes ? kCount * sizeof(T) : kAppendChunkBytes) Values {
  T values[kCount];

  FLASH_CUTE_HOST_DEVICE static Values load(void const* base, int64_t offset) {
    return *reinterpret_cast<Values const*>(static_cast<T const*>(base) + offset);
  }
  FLASH_CUTE_HOST_DEVICE void store(void* base, int64_t offset) const {
    *reinterpret_cast<Values*>(static_cast<T*>(base) + offset) = *this;
  }
  FLASH_CUTE_HOST_DEVICE float at(int i) const { return float(values[i]); }
};

// Stored: of the cache, uint8_t for codes of 8 bits.
template <class Element, class Table, class Stored = Element>
struct AppendRow {
  static constexpr int kWidth = kAppendChunkBytes / sizeof(Element);
  using Chunk = Values<Element, kWidth>;

  // Moves the pair of chunks of that number, if it has one, from a row of head_dim elements to another.
  // scale: of codes.
  template <class Target>
  FLASH_CUTE_HOST_DEVICE static void move(AppendParams const& params, int head_dim, int64_t position,
                                          bool rotates, int pair, void const* source, int64_t from,
                                          void* target, int64_t to, float scale = 1.f) {
    using Number = std::conditional_t<std::is_same_v<Target, Element>, Element, float>;
    using Numbers = Values<Number, kWidth>;
    Rotary const& rotary = params.rotary;
    int const chunks = head_dim / kWidth;
    // A rotation of halves takes chunks of both halves; all other pairs are as far apart, or neighbours.
    bool const halves = rotates && !rotary.interleaved;
    int const apart = halves ? rotary.dim / (2 * kWidth) : int(params.pairs.value);
    int const first = pair < apart ? pair : 2 * pair, second = pair < apart ? pair + apart : 2 * pair + 1;
    bool const has_second = second < chunks;
    if (first >= chunks) return;  // of k or v where the other's rows are wider

    Numbers a = converted<Numbers>(Chunk::load(source, from + first * kWidth)), b{};
    if (has_second) b = converted<Numbers>(Chunk::load(source, from + second * kWidth));
    if (halves && pair < apart) {
      rotate_halves(rotary, position * (rotary.dim / 2) + first * kWidth, a, b);
    } else if (rotates && rotary.interleaved) {
      if (first * kWidth < rotary.dim) rotate_neighbours(rotary, position, first, a);
      if (has_second && second * kWidth < rotary.dim) rotate_neighbours(rotary, position, second, b);
    }
    store<Target>(a, scale, target, to + first * kWidth);
    if (has_second) store<Target>(b, scale, target, to + second * kWidth);
  }

  // That of a token: heads of q come first, then those of k and of v.
  FLASH_CUTE_HOST_DEVICE static void run(AppendParams const& params, NewToken const& token, int item) {
    NewTokens const& tokens = params.tokens;
    int const row_of_token = params.pairs.quotient(item), pair = params.pairs.remainder(item);
    auto offset = [](TensorView const& view, int entry, int head, int row) {
      return entry * view.batch_stride + head * view.head_stride + row * view.row_stride;
    };
    bool const rotates = params.rotary.dim > 0;
    if (row_of_token < tokens.heads_q) {
      if (token.row >= tokens.rows_q) return;
      move<Element>(params, params.head_dim, token.position, rotates, pair, params.q.data,
                    offset(params.q, token.entry, row_of_token, token.row), params.rotated_q.data,
                    offset(params.rotated_q, token.entry, row_of_token, token.row));
      return;
    }
    if (token.page < 0 || token.row >= tokens.rows_k) return;
    int const row_of_kv = row_of_token - tokens.heads_q;
    bool const is_v = row_of_kv >= tokens.heads_kv;
    int const head = is_v ? row_of_kv - tokens.heads_kv : row_of_kv;
    TensorView const& source = is_v ? params.v : params.k;
    TensorView const& target = is_v ? params.v_cache : params.k_cache;
    CacheScale const& scale = is_v ? params.v_scale : params.k_scale;
    move<Stored>(params, is_v ? params.head_dim_v : params.head_dim, token.position, rotates && !is_v, pair,
                 source.data, offset(source, token.entry, head, token.row), target.data,
                 offset(target, token.page, head, token.row_in_page), scale.of(token.sequence, head));
  }

 private:
  template <class Numbers>
  FLASH_CUTE_HOST_DEVICE static Numbers converted(Chunk const& chunk) {
    if constexpr (std::is_same_v<Numbers, Chunk>) {
      return chunk;
    } else {
      Numbers numbers;
      for (int i = 0; i < kWidth; ++i) numbers.values[i] = chunk.at(i);
      return numbers;
    }
  }
  template <class Target, class Numbers>
  FLASH_CUTE_HOST_DEVICE static void store(Numbers const& numbers, float scale, void* base, int64_t offset) {
    if constexpr (std::is_same_v<Target, Element>) {
      numbers.store(base, offset);
    } else {
      Values<Target, kWidth> codes;
      for (int i = 0; i < kWidth; ++i) {
        codes.values[i] = __nv_cvt_float_to_fp8(numbers.values[i] / scale, __NV_SATFINITE, __NV_E4M3);
      }
      codes.store(base, offset);
    }
  }
  template <class Numbers>
  FLASH_CUTE_HOST_DEVICE static void rotate_halves(Rotary const& rotary, int64_t offset, Numbers& a,
                                                   Numbers& b) {
    using Angles = Values<Table, kWidth>;
    Angles const cos = Angles::load(rotary.cos, offset), sin = Angles::load(rotary.sin, offset);
    for (int i = 0; i < kWidth; ++i) rotate(cos.at(i), sin.at(i), a.values[i], b.values[i]);
  }
  template <class Numbers>
  FLASH_CUTE_HOST_DEVICE static void rotate_neighbours(Rotary const& rotary, int64_t position, int chunk,
                                                       Numbers& x) {
    using Angles = Values<Table, kWidth / 2>;
    int64_t const offset = position * (rotary.dim / 2) + chunk * (kWidth / 2);
    Angles const cos = Angles::load(rotary.cos, offset), sin = Angles::load(rotary.sin, offset);
    for (int i = 0; i < kWidth / 2; ++i) {
      rotate(cos.at(i), sin.at(i), x.values[2 * i], x.values[2 * i + 1]);
    }
  }
  template <class Number>
  FLASH_CUTE_HOST_DEVICE static void rotate(float cos, float sin, Number& a, Number& b) {
    float const x = float(a), y = float(b);
    a = Number(x * cos - y * sin);
    b = Number(y * cos + x * sin);
  }
};

// Thread (x, y) has items of the block's token y.
template <class Element, class Table, class Stored>
__global__ void append_kv_kernel(__grid_constant__ AppendParams const params) {
  wait_for_grid_before();
  int64_t const index = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (index >= params.tokens.count()) return;
  NewToken const token = token_of(params, int(index));
  int const step = gridDim.y * blockDim.x;
  for (int item = blockIdx.y * blockDim.x + threadIdx.x; item < params.items(); item += step) {
    AppendRow<Element, Table, Stored>::run(params, token, item);
  }
}

}  // namespace flash_cute
