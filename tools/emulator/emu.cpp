// Scheduler, barriers, collectives and race detector. Compiled without instrumentation.
#include "emu.hpp"
#include "emu_host.hpp"
#include <ucontext.h>
#include <unistd.h>
#include <vector>
#include <random>
#include <functional>
#include <algorithm>
emu::Idx threadIdx, blockIdx;
namespace flash_cute { alignas(1024) unsigned char memory[262144]; }
namespace emu {
constexpr int MAXT = 256, STACK = 256 << 10;
static ucontext_t main_ctx, ctx[MAXT];
static char* stacks = nullptr;
int nthreads; static int cur; static bool running = false;
enum St { RUN, BLOCK, DONE };
static St st[MAXT];
static std::function<void()> body;
static std::mt19937 rng;
Stats stats;
[[noreturn]] void fail(char const* what) { printf("EMU FAIL block %d thread %d: %s\n", blockIdx.x, cur, what); fflush(stdout); _exit(3); }
// ---- race detector
static uint32_t vc[MAXT][MAXT];
struct Ep { int16_t t = -1; uint32_t c = 0; };
struct Word { Ep w; std::vector<Ep> r; };
static std::vector<Word> shadow;
static std::vector<std::pair<uint32_t,uint32_t>> pending_words[MAXT];
struct Pend { void* s; alignas(16) unsigned char d[16]; };
static std::vector<Pend> pend[MAXT];
bool detect = true;
static long races = 0;
static void report(char const* kind, size_t word, int other) {
  if (races++ < 12) printf("RACE %s at smem byte %zu (%s): thread %d vs %d\n", kind, word * 4, region(word * 4), cur, other);
  stats.races = races;
}
static inline bool before(Ep e, int t) { return e.t < 0 || vc[t][e.t] >= e.c; }
void access(void* p, size_t n, bool write) {
  auto a = (unsigned char*)p - flash_cute::memory;
  if (a < 0 || a >= (long)sizeof(flash_cute::memory) || !running) return;
  if (a + n > smem_limit) { report("OUT OF BOUNDS", a / 4, -1); return; }
  if (!detect) return;
  for (size_t w = a / 4; w <= (a + n - 1) / 4; ++w) {
    Word& x = shadow[w];
    if (!before(x.w, cur)) report(write ? "write after write" : "read after write", w, x.w.t);
    if (write) {
      for (auto& e : x.r) if (e.t != cur && !before(e, cur)) { report("write after read", w, e.t); break; }
      x.r.clear(); x.w = {(int16_t)cur, vc[cur][cur]};
    } else {
      bool found = false;
      for (auto& e : x.r) if (e.t == cur) { e.c = vc[cur][cur]; found = true; break; }
      if (!found) x.r.push_back({(int16_t)cur, vc[cur][cur]});
    }
  }
}
// ---- scheduling
static int policy; static int prio[8]; static int steps_left;
static void yield() { st[cur] = BLOCK; int me = cur; swapcontext(&ctx[me], &main_ctx); }
struct Warp { int arrived = 0; int kind = -1; void* args[32]; int id = 0; };
static Warp warps[8];
struct Barrier { int count = 0, expected = 0; std::vector<int> waiting, came; uint32_t joined[MAXT]; };
static Barrier bars[16];
static void wake_warp(int w) { for (int l = 0; l < 32; ++l) if (w * 32 + l < nthreads && st[w * 32 + l] == BLOCK) st[w * 32 + l] = RUN; }
struct MmaArg { bool half; float* d[4]; uint32_t a[4], b[2]; float c[4]; };
struct LdArg { bool trans; void const* p; uint32_t* d[4]; };
struct ShArg { uint32_t v; int src; uint32_t out; };
struct BarArg { int id, n; bool sync; };
static float tof(bool half, uint32_t w, int hi) {
  uint16_t h = hi ? w >> 16 : w & 0xffff;
  if (!half) { uint32_t u = uint32_t(h) << 16; float f; memcpy(&f, &u, 4); return f; }
  _Float16 f; memcpy(&f, &h, 2); return float(f);
}
static bool perform(int w) {  // true: warp goes on
  Warp& W = warps[w];
  if (W.kind == 0) {
    float A[16][16], B[8][16];
    for (int l = 0; l < 32; ++l) {
      MmaArg& m = *(MmaArg*)W.args[l]; int g = l / 4, t = l % 4;
      for (int i = 0; i < 4; ++i) for (int h = 0; h < 2; ++h) A[g + 8 * (i & 1)][t * 2 + h + 8 * (i >> 1)] = tof(m.half, m.a[i], h);
      for (int i = 0; i < 2; ++i) for (int h = 0; h < 2; ++h) B[g][t * 2 + h + 8 * i] = tof(m.half, m.b[i], h);
    }
    for (int l = 0; l < 32; ++l) {
      MmaArg& m = *(MmaArg*)W.args[l]; int g = l / 4, t = l % 4;
      for (int i = 0; i < 4; ++i) {
        int r = g + 8 * (i >> 1), c = t * 2 + (i & 1); float s = 0;
        for (int k = 0; k < 16; ++k) s += A[r][k] * B[c][k];
        *m.d[i] = m.c[i] + s;
      }
    }
    stats.mmas++;
    return true;
  }
  if (W.kind == 1) {
    uint16_t M[4][8][8];
    for (int l = 0; l < 32; ++l) {
      LdArg& a = *(LdArg*)W.args[l];
      if ((uintptr_t)a.p % 16) fail("ldmatrix address not aligned to 16");
      auto off = (unsigned char const*)a.p - flash_cute::memory;
      if (off < 0 || off + 16 > (long)smem_limit) fail("ldmatrix outside of shared memory");
      int save = cur; cur = w * 32 + l; access((void*)a.p, 16, false); cur = save;
      memcpy(M[l / 8][l % 8], a.p, 16);
    }
    for (int l = 0; l < 32; ++l) { LdArg& a = *(LdArg*)W.args[l];
      for (int i = 0; i < 4; ++i) {
        uint16_t lo, hi; int r = l / 4, c = (l % 4) * 2;
        if (a.trans) { lo = M[i][c][r]; hi = M[i][c + 1][r]; } else { lo = M[i][r][c]; hi = M[i][r][c + 1]; }
        *a.d[i] = lo | uint32_t(hi) << 16;
      } }
    return true;
  }
  if (W.kind == 2) { for (int l = 0; l < 32; ++l) { ShArg& a = *(ShArg*)W.args[l]; a.out = ((ShArg*)W.args[a.src])->v; } return true; }
  // barrier
  BarArg a = *(BarArg*)W.args[0];
  for (int l = 1; l < 32; ++l) { BarArg b = *(BarArg*)W.args[l]; if (b.id != a.id || b.n != a.n || b.sync != a.sync) fail("lanes of a warp at different barriers"); }
  int n = a.n < 0 ? nthreads : a.n;
  Barrier& b = bars[a.id];
  if (b.count == 0) { b.expected = n; memset(b.joined, 0, sizeof b.joined); }
  if (b.expected != n) fail("barrier: different counts");
  if (std::find(b.came.begin(), b.came.end(), w) != b.came.end()) fail("barrier: a warp comes twice in one round");
  b.came.push_back(w);
  for (int l = 0; l < 32; ++l) { int t = w * 32 + l; for (int i = 0; i < nthreads; ++i) b.joined[i] = std::max(b.joined[i], vc[t][i]); vc[t][t]++; }
  b.count += 32;
  if (a.sync) b.waiting.push_back(w);
  if (b.count > b.expected) fail("barrier: too many");
  if (b.count == b.expected) {
    for (int v : b.waiting) { for (int l = 0; l < 32; ++l) for (int i = 0; i < nthreads; ++i) vc[v * 32 + l][i] = std::max(vc[v * 32 + l][i], b.joined[i]); if (v != w) wake_warp(v); }
    b.count = 0; b.waiting.clear(); b.came.clear();
    stats.barriers++;
    return true;
  }
  return !a.sync;
}
static void collective(int kind, void* arg) {
  int w = cur / 32; Warp& W = warps[w];
  if (W.arrived == 0) W.kind = kind; else if (W.kind != kind) fail("lanes of a warp at different collectives");
  W.args[cur % 32] = arg;
  if (++W.arrived < 32) { yield(); return; }
  W.arrived = 0;
  int me = cur;
  if (perform(w)) { for (int l = 0; l < 32; ++l) if (w * 32 + l != me) st[w * 32 + l] = RUN;  if (policy == 0) { st[me] = RUN; swapcontext(&ctx[me], &main_ctx); } }
  else yield();
}
void mma(bool half, float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  MmaArg m{half, {&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}}; collective(0, &m);
}
void ldmatrix(bool trans, void const* p, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) { LdArg x{trans, p, {&a, &b, &c, &d}}; collective(1, &x); }
uint32_t shfl(uint32_t v, int s) { ShArg a{v, s, 0}; collective(2, &a); return a.out; }
uint32_t shfl_xor(uint32_t v, int m) { ShArg a{v, (cur % 32) ^ m, 0}; collective(2, &a); return a.out; }
void bar(int id, int n, bool sync) { BarArg a{id, n, sync}; collective(3, &a); }
void cp_async(void const* g, void* s, bool pred) {
  if ((uintptr_t)s % 16 || (pred && (uintptr_t)g % 16)) fail("cp.async not aligned");
  if (pred) check_global(g, 16, false);
  Pend p; p.s = s; if (pred) memcpy(p.d, g, 16); else memset(p.d, 0, 16);
  access(s, 16, true);
  auto off = (unsigned char*)s - flash_cute::memory;
  if (off < 0 || off + 16 > (long)smem_limit) fail("cp.async outside");
  for (int i = 0; i < 4; ++i) { shadow[off / 4 + i].w.c = 0xffffffff; }
  memset(s, 0xff, 16);  // NaN until it has come
  pend[cur].push_back(p);
}
void cp_wait_all() {
  for (auto& p : pend[cur]) {
    memcpy(p.s, p.d, 16);
    auto off = (unsigned char*)p.s - flash_cute::memory;
    for (int i = 0; i < 4; ++i) shadow[off / 4 + i].w = {(int16_t)cur, vc[cur][cur]};
  }
  pend[cur].clear();
}
void atomic(float* p, float v) { check_global(p, 4, true); *p += v; stats.atomics++; }
int lane() { return cur % 32; }
static void entry() { body(); st[cur] = DONE; swapcontext(&ctx[cur], &main_ctx); }
void launch(int blocks, int threads, int smem, unsigned seed, int pol, std::function<void()> f) {
  if (!stacks) { stacks = (char*)malloc(size_t(STACK) * MAXT); shadow.resize(sizeof(flash_cute::memory) / 4); }
  body = f; nthreads = threads; rng.seed(seed); policy = pol; smem_limit = smem;
  std::vector<int> order(blocks); for (int i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), rng);
  int nw = threads / 32;
  for (int b : order) {
    blockIdx = {b, 0, 0};
    memset(flash_cute::memory, 0xff, sizeof flash_cute::memory);
    for (auto& w : shadow) { w.w = {}; w.r.clear(); }
    memset(vc, 0, sizeof vc);
    for (int t = 0; t < threads; ++t) {
      vc[t][t] = 1; st[t] = RUN; pend[t].clear();
      getcontext(&ctx[t]); ctx[t].uc_stack.ss_sp = stacks + size_t(t) * STACK; ctx[t].uc_stack.ss_size = STACK; ctx[t].uc_link = nullptr;
      makecontext(&ctx[t], entry, 0);
    }
    for (auto& w : warps) w = {};
    for (auto& x : bars) { x.count = 0; x.waiting.clear(); x.came.clear(); }
    for (int i = 0; i < 8; ++i) prio[i] = i;
    // policies: 0 random warp at each collective, 1 random warp run until it blocks, 2 first half first, 3 second half first,
    // 4 random priorities that change now and then, 5 one warp lags behind all others
    if (pol >= 4) std::shuffle(prio, prio + 8, rng);
    running = true;
    long picks = 0;
    for (;;) {
      int best = -1, n = 0; int cand[8];
      for (int w = 0; w < nw; ++w) { bool any = false; for (int l = 0; l < 32; ++l) any |= st[w * 32 + l] == RUN; if (any) cand[n++] = w; }
      if (n == 0) break;
      if (pol <= 1) best = cand[rng() % n];
      else if (pol == 2) best = cand[0];
      else if (pol == 3) best = cand[n - 1];
      else { if (pol == 4 && ++picks % 97 == 0) std::shuffle(prio, prio + 8, rng); best = *std::min_element(cand, cand + n, [](int a, int b) { return prio[a] < prio[b]; }); }
      int l0 = rng() % 32;
      for (int i = 0; i < 32; ++i) { int t = best * 32 + (l0 + i) % 32; if (st[t] != RUN) continue;
        cur = t; threadIdx = {t, 0, 0}; swapcontext(&main_ctx, &ctx[t]); if (pol == 0 && false) break; }
    }
    running = false;
    for (int t = 0; t < threads; ++t) if (st[t] != DONE) { cur = t; for (int i = 0; i < 16; ++i) if (bars[i].count) printf("barrier %d: %d of %d\n", i, bars[i].count, bars[i].expected); fail("deadlock"); }
    for (int i = 0; i < 16; ++i) if (bars[i].count) fail("arrivals left at a barrier at the end");
    for (int t = 0; t < threads; ++t) if (!pend[t].empty()) fail("cp.async not waited for at the end");
  }
}
}
extern "C" {
#define RW(n) void __tsan_read##n(void* p) { emu::access(p, n, false); } void __tsan_write##n(void* p) { emu::access(p, n, true); } \
 void __tsan_unaligned_read##n(void* p) { emu::access(p, n, false); } void __tsan_unaligned_write##n(void* p) { emu::access(p, n, true); }
RW(1) RW(2) RW(4) RW(8) RW(16)
void __tsan_read_range(void* p, size_t n) { emu::access(p, n, false); }
void __tsan_write_range(void* p, size_t n) { emu::access(p, n, true); }
void __tsan_func_entry(void*) {} void __tsan_func_exit() {} void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {} void __tsan_vptr_read(void*) {}
}
