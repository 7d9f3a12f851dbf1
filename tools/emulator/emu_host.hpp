#pragma once
#include <functional>
#include <cstddef>
namespace emu {
struct Stats { long races = 0, mmas = 0, barriers = 0, atomics = 0; };
extern Stats stats;
extern bool detect;
inline size_t smem_limit = 0;
void launch(int blocks, int threads, int smem, unsigned seed, int policy, std::function<void()> f);
char const* region(size_t byte);
void check_global(void const* p, size_t n, bool write);
void access(void* p, size_t n, bool write);
}
