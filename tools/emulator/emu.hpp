#pragma once
#include <cstdint>
#include <cstring>
#include <cmath>
#include <cstdio>
#include <cstdlib>
namespace emu {
struct Idx { int x, y, z; };
void mma(bool half, float&, float&, float&, float&, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, float, float, float, float);
void ldmatrix(bool trans, void const* p, uint32_t&, uint32_t&, uint32_t&, uint32_t&);
void cp_async(void const* g, void* s, bool pred);
void cp_wait_all();
void bar(int id, int threads, bool sync);
uint32_t shfl(uint32_t v, int lane_src);
uint32_t shfl_xor(uint32_t v, int m);
void atomic(float* p, float v);
int lane();
}
extern emu::Idx threadIdx, blockIdx;
inline void __syncthreads() { emu::bar(0, -1, true); }
inline int __shfl_sync(unsigned, int v, int src) { return (int)emu::shfl((uint32_t)v, src); }
inline float __shfl_xor_sync(unsigned, float v, int m) { uint32_t u; memcpy(&u, &v, 4); u = emu::shfl_xor(u, m); memcpy(&v, &u, 4); return v; }
inline uint32_t __shfl_xor_sync(unsigned, uint32_t v, int m) { return emu::shfl_xor(v, m); }
inline float atomicAdd(float* p, float v) { emu::atomic(p, v); return 0; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __logf(float a) { return logf(a); }
inline bool __any_sync(unsigned, bool) { abort(); }
inline unsigned __funnelshift_lc(unsigned, unsigned, unsigned) { abort(); }
#ifndef max
inline int max(int a, int b) { return a > b ? a : b; }
#endif
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
inline int __dp4a(...) { abort(); }
inline unsigned __byte_perm(...) { abort(); }
template <class... A> __half2 __hfma2(A...) { abort(); }
