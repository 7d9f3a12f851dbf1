#include "emu_host.hpp"
#include "flash_cute/backward/plan.hpp"
#include "run.hpp"
#include <vector>
#include <random>
#include <cstdio>
#include <cstring>
#include <cmath>
#include <string>
#include <cstdlib>
#include <chrono>
#include <functional>
#include <utility>
using namespace flash_cute;

static size_t region_at[9]; static char const* names[9] = {"k", "v", "q", "dout", "ds", "p", "weights", "lse", "delta"};
namespace flash_cute { void set_regions(size_t const (&at)[9]) { memcpy(region_at, at, sizeof region_at); } }
char const* emu::region(size_t b) { int f = 0; for (int i = 0; i < 9; ++i) if (b >= region_at[i]) f = i; return names[f]; }
// allocations that global accesses must be in
struct Range { char const* b; char const* e; bool w; };
static std::vector<Range> ranges;
void emu::check_global(void const* p, size_t n, bool write) {
  for (auto& r : ranges) if ((char const*)p >= r.b && (char const*)p + n <= r.e && (!write || r.w)) return;
  printf("GLOBAL ACCESS outside of everything (%s)\n", write ? "atomic" : "cp.async"); exit(4);
}
static float from16(uint16_t h) { if (kHalf) { _Float16 f; memcpy(&f, &h, 2); return f; } uint32_t u = uint32_t(h) << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t to16(float f) { if (kHalf) { _Float16 h = f; uint16_t u; memcpy(&u, &h, 2); return u; } uint32_t u; memcpy(&u, &f, 4); if (f != f) return 0x7fff; u += 0x7fff + ((u >> 16) & 1); return u >> 16; }
struct T4 { int b, h, s, d; std::vector<uint16_t> x; uint16_t* at(int i, int j, int k) { return &x[((size_t(i) * s + k) * h + j) * d]; } };  // bshd
struct Case { int batch, hq, hk, sq, sk, d; int left = 1 << 30, right = 1 << 30; bool dq = true, dkv = true, dout = true, dlse = true; std::vector<int> cq, ck, uq, uk, lp; int mp = 132; std::string name; int smem = 232448; };
static int fails = 0;
static void run_case(Case c, unsigned seed, int policy) {
  std::mt19937 g(seed); std::normal_distribution<float> N(0, 1);
  bool pk = !c.cq.empty(); int nb = c.batch, eb = pk ? 1 : c.batch, dpad = (c.d + 7) / 8 * 8;
  auto make = [&](int h, int s) { T4 t{eb, h, s, dpad, {}}; t.x.assign(size_t(eb) * h * s * dpad + 8, to16(NAN)); return t; };
  T4 q = make(c.hq, c.sq), k = make(c.hk, c.sk), v = make(c.hk, c.sk), o = make(c.hq, c.sq), dO = make(c.hq, c.sq), dq = make(c.hq, c.sq), dk = make(c.hk, c.sk), dv = make(c.hk, c.sk);
  std::vector<float> lse(size_t(eb) * c.hq * c.sq, NAN), dlse(lse.size(), NAN);
  struct Seq { int e, q0, nq, k0, nk; }; std::vector<Seq> seqs;
  for (int b = 0; b < nb; ++b) {
    int q0 = pk ? c.cq[b] : 0, q1 = pk ? c.cq[b + 1] : c.sq, k0 = pk ? c.ck[b] : 0, k1 = pk ? c.ck[b + 1] : c.sk;
    int nq = c.uq.empty() ? q1 - q0 : c.uq[b], uk = c.uk.empty() ? k1 - k0 : c.uk[b], lp = c.lp.empty() ? 0 : c.lp[b];
    seqs.push_back({pk ? 0 : b, q0, nq, k0 + lp, uk - lp});
  }
  auto vis = [&](Seq const& s, int i, int j) { long x = (long)i + s.nk - s.nq; return j >= x - c.left && j <= x + c.right; };
  float scale = 1 / std::sqrt(float(c.d));
  // inputs: only rows that see / are seen are finite
  for (auto& s : seqs) {
    for (int i = 0; i < s.nq; ++i) { bool any = false; for (int j = 0; j < s.nk; ++j) any |= vis(s, i, j); if (!any) continue;
      for (int h = 0; h < c.hq; ++h) for (int e = 0; e < c.d; ++e) { q.at(s.e, h, s.q0 + i)[e] = to16(N(g)); dO.at(s.e, h, s.q0 + i)[e] = to16(N(g)); } }
    for (int j = 0; j < s.nk; ++j) { bool any = false; for (int i = 0; i < s.nq; ++i) any |= vis(s, i, j); if (!any) continue;
      for (int h = 0; h < c.hk; ++h) for (int e = 0; e < c.d; ++e) { k.at(s.e, h, s.k0 + j)[e] = to16(N(g)); v.at(s.e, h, s.k0 + j)[e] = to16(N(g)); } }
  }
  // reference
  std::vector<double> rq(q.x.size(), 0), rk(k.x.size(), 0), rv(v.x.size(), 0);
  int G = c.hq / c.hk;
  for (auto& s : seqs) for (int h = 0; h < c.hq; ++h) {
    int hk = h / G;
    for (int i = 0; i < s.nq; ++i) {
      std::vector<double> p(s.nk, 0); double m = -1e300; bool any = false;
      for (int j = 0; j < s.nk; ++j) if (vis(s, i, j)) { any = true; double x = 0; for (int e = 0; e < c.d; ++e) x += double(from16(q.at(s.e, h, s.q0 + i)[e])) * from16(k.at(s.e, hk, s.k0 + j)[e]); p[j] = x * scale; m = std::max(m, p[j]); }
      size_t li = (size_t(s.e) * c.hq + h) * c.sq + s.q0 + i;
      if (!any) { lse[li] = -INFINITY; for (int e = 0; e < c.d; ++e) o.at(s.e, h, s.q0 + i)[e] = 0; continue; }
      double sum = 0; for (int j = 0; j < s.nk; ++j) if (vis(s, i, j)) { p[j] = std::exp(p[j] - m); sum += p[j]; }
      lse[li] = m + std::log(sum); dlse[li] = N(g);
      std::vector<double> out(c.d, 0);
      for (int j = 0; j < s.nk; ++j) { p[j] /= sum; if (p[j]) for (int e = 0; e < c.d; ++e) out[e] += p[j] * from16(v.at(s.e, hk, s.k0 + j)[e]); }
      double D = 0; for (int e = 0; e < c.d; ++e) { o.at(s.e, h, s.q0 + i)[e] = to16(out[e]); if (c.dout) D += out[e] * from16(dO.at(s.e, h, s.q0 + i)[e]); }
      double dl = c.dlse ? dlse[li] : 0;
      for (int j = 0; j < s.nk; ++j) if (vis(s, i, j)) {
        double dp = 0; if (c.dout) for (int e = 0; e < c.d; ++e) dp += double(from16(dO.at(s.e, h, s.q0 + i)[e])) * from16(v.at(s.e, hk, s.k0 + j)[e]);
        double ds = p[j] * (dp - D + dl) * scale;
        for (int e = 0; e < c.d; ++e) {
          rq[q.at(s.e, h, s.q0 + i) - q.x.data() + e] += ds * from16(k.at(s.e, hk, s.k0 + j)[e]);
          rk[k.at(s.e, hk, s.k0 + j) - k.x.data() + e] += ds * from16(q.at(s.e, h, s.q0 + i)[e]);
          if (c.dout) rv[v.at(s.e, hk, s.k0 + j) - v.x.data() + e] += p[j] * from16(dO.at(s.e, h, s.q0 + i)[e]);
        }
      }
    }
  }
  BackwardParams P{};
  P.shape = {nb, c.hq, c.hk, c.sq, c.sk, dpad};
  auto view = [&](T4& t) { return TensorView{t.x.data(), int64_t(pk ? 0 : int64_t(t.s) * t.h * t.d), t.d, int64_t(t.h) * t.d}; };
  P.q = view(q); P.k = view(k); P.v = view(v); P.out = view(o); if (c.dout) P.dout = view(dO); else P.dout = TensorView{}; P.dq = view(dq); P.dk = view(dk); P.dv = view(dv);
  P.lse = lse.data(); P.dlse = c.dlse ? dlse.data() : nullptr; P.lse_batch_stride = pk ? 0 : int64_t(c.hq) * c.sq; P.softmax_scale = scale;
  P.mask = WindowMask::make(c.sq, c.sk, c.left, c.right);
  P.device = {0, c.mp, c.smem, 50 << 20};
  auto ptr = [](std::vector<int> const& x) { return x.empty() ? nullptr : x.data(); };
  P.lengths.cu_seqlens_q = ptr(c.cq); P.lengths.cu_seqlens_k = ptr(c.ck); P.lengths.seqused_q = ptr(c.uq); P.lengths.seqused_k = ptr(c.uk); P.lengths.leftpad_k = ptr(c.lp);
  P.lengths.given = pk || !c.uq.empty() || !c.uk.empty() || !c.lp.empty();
  bool ragged = P.lengths.given;
  if (!ragged) { // the host cuts unreachable keys off before the launch
    int cut = P.mask.first_reachable_key(); P.mask.seqlen_k -= cut; P.shape.seqlen_k -= cut;
    for (auto* t : {&P.k, &P.v, &P.dk, &P.dv}) t->data = (uint16_t*)t->data + cut * t->row_stride;
  }
  BackwardPlan plan = plan_backward(Family::sm80, kBucket, P, c.dq, c.dkv, false);
  if (!plan.runs_keys) { printf("no key kernel\n"); return; }
  std::vector<float> ws(plan.workspace_bytes / 4 + 64, NAN); void* wsp = (void*)((uintptr_t(ws.data()) + 127) & ~uintptr_t(127));
  P.workspace = plan.parts(wsp);
  ranges.clear();
  auto add = [&](auto& x, bool w) { ranges.push_back({(char const*)x.data(), (char const*)(x.data() + x.size()), w}); };
  add(q.x, false); add(k.x, false); add(v.x, false); add(dO.x, false);
  ranges.push_back({(char*)P.workspace.lse, (char*)(P.workspace.lse + 2 * plan.rows), false});
  if (P.workspace.dq) ranges.push_back({(char*)P.workspace.dq, (char*)(P.workspace.dq + plan.rows * plan.dq_columns), true});
  emu::stats = {};
  auto t0 = std::chrono::steady_clock::now();
  run(P, plan, seed, policy);
  double sec = std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
  // Each unwritten place of dk/dv that keys do not reach: as backward_clear would; skip rows nobody sees.
  auto cmp = [&](T4& t, std::vector<double>& r, bool of_q) { double worst = 0, big = 0; long nan = 0, touched = 0;
    std::vector<char> counts(size_t(t.b) * t.s, 0); for (auto& s : seqs) for (int i = 0; i < (of_q ? s.nq : s.nk); ++i) counts[size_t(s.e) * t.s + (of_q ? s.q0 : s.k0) + i] = 1;
    for (int b = 0; b < t.b; ++b) for (int s = 0; s < t.s; ++s) for (int h = 0; h < t.h; ++h) for (int e = 0; e < t.d; ++e) {
      float f = from16(t.at(b, h, s)[e]); double x = r[t.at(b, h, s) - t.x.data() + e];
      if (!counts[size_t(b) * t.s + s]) { touched += f == f; continue; }
      if (f != f) { // unreachable keys are cleared elsewhere
        bool reach = of_q; if (!of_q) for (auto& q : seqs) if (q.e == b && s >= q.k0 && s < q.k0 + q.nk) for (int i = 0; i < q.nq && !reach; ++i) reach = vis(q, i, s - q.k0);
        nan += reach; continue; }
      worst = std::max(worst, std::fabs(f - x)); big = std::max(big, std::fabs(x)); }
    if (nan || touched || worst > (kHalf ? 0.02 : 0.06) * (1 + big)) fails++, printf("  !!! ");
    printf(" %.4f/%.2f nan %ld touched %ld;", worst, big, nan, touched); };
  printf("%-34s pol %d parts %d races %ld bars %ld atomics %ld %.1fs:", c.name.c_str(), policy, plan.group_parts, emu::stats.races, emu::stats.barriers, emu::stats.atomics, sec);
  if (emu::stats.races) fails++;
  if (c.dq) cmp(dq, rq, true); cmp(dk, rk, false); cmp(dv, rv, false); printf("\n"); fflush(stdout);
}
int main(int argc, char** argv) {
  int D = kBucket, big = 1 << 30; std::string only = argc > 1 ? argv[1] : ""; int pol_only = argc > 2 ? atoi(argv[2]) : -1;
  std::vector<Case> cs;
  auto C = [&](std::string n, Case c) { c.name = n; if (getenv("SMEM")) c.smem = atoi(getenv("SMEM")); cs.push_back(c); };
  C("one step", {1, 1, 1, 64, 64, D});
  C("two steps two tiles", {1, 1, 1, 128, 128, D});
  C("three steps, odd", {1, 2, 2, 150, 201, D});
  C("group whole (few sms) causal", {.batch = 1, .hq = 3, .hk = 1, .sq = 130, .sk = 90, .d = D, .right = 0, .mp = 1});
  C("group split causal", {.batch = 2, .hq = 4, .hk = 2, .sq = 100, .sk = 201, .d = D - 8, .right = 0});
  C("blind causal", {.batch = 1, .hq = 2, .hk = 1, .sq = 201, .sk = 50, .d = D - 8, .right = 0});
  C("window", {.batch = 1, .hq = 2, .hk = 2, .sq = 230, .sk = 300, .d = D, .left = 17, .right = 17});
  C("window left", {.batch = 1, .hq = 2, .hk = 2, .sq = 130, .sk = 400, .d = D, .left = 40, .right = 0});
  C("no dq, group whole", {.batch = 1, .hq = 4, .hk = 2, .sq = 150, .sk = 130, .d = D, .right = 0, .dq = false, .mp = 1});
  C("no dq", {.batch = 1, .hq = 2, .hk = 2, .sq = 200, .sk = 130, .d = D, .dq = false});
  C("no dout", {.batch = 1, .hq = 2, .hk = 2, .sq = 100, .sk = 130, .d = D, .dout = false});
  C("no dlse", {.batch = 1, .hq = 2, .hk = 2, .sq = 100, .sk = 130, .d = D, .dlse = false});
  C("packed odd", {.batch = 5, .hq = 4, .hk = 2, .sq = 3 + 1 + 130 + 64 + 70 + 3 + 5, .sk = 5 + 1 + 150 + 257 + 40 + 100 + 9, .d = D, .right = 0, .cq = {3, 4, 134, 198, 268, 271}, .ck = {5, 6, 156, 413, 453, 553}});
  C("packed odd, groups whole", {.batch = 5, .hq = 4, .hk = 2, .sq = 3 + 1 + 130 + 64 + 70 + 3 + 5, .sk = 5 + 1 + 150 + 257 + 40 + 100 + 9, .d = D, .right = 0, .cq = {3, 4, 134, 198, 268, 271}, .ck = {5, 6, 156, 413, 453, 553}, .mp = 1});
  C("padded used leftpad", {.batch = 4, .hq = 2, .hk = 1, .sq = 100, .sk = 200, .d = D, .right = 0, .uq = {90, 30, 3, 5}, .uk = {120, 50, 9, 131}, .lp = {40, 50, 0, 1}});
  C("padded used leftpad whole", {.batch = 4, .hq = 2, .hk = 1, .sq = 100, .sk = 200, .d = D, .left = 50, .right = 20, .uq = {90, 30, 3, 5}, .uk = {120, 50, 9, 131}, .lp = {40, 50, 0, 1}, .mp = 1});
  C("narrow head dim", {.batch = 1, .hq = 2, .hk = 2, .sq = 70, .sk = 70, .d = D == 192 ? 136 : D == 256 ? 200 : D - 8});
  if (getenv("FUZZ")) { std::mt19937 g(atoi(getenv("FUZZ"))); auto R=[&](int a,int b){return a+int(g()%unsigned(b-a+1));};
    for (int n=0;n<25;++n) { Case c{}; c.name="fuzz "+std::to_string(n); c.hk=R(1,2); c.hq=c.hk*R(1,4); c.d=D-8*R(0,3); c.mp=R(0,1)?1:132; c.batch=R(1,3);
      int kind=R(0,4); c.left=big; c.right=big; if(kind==1)c.right=0; if(kind==2){c.left=R(0,80);c.right=R(0,80);} if(kind==3){c.left=R(0,90);c.right=0;} if(kind==4){c.right=R(0,60);}
      c.dq=R(0,3)>0; c.dout=R(0,5)>0; c.dlse=R(0,2)>0;
      if (R(0,1)) { c.cq={R(0,7)}; c.ck={R(0,7)}; for(int b=0;b<c.batch;++b){c.cq.push_back(c.cq.back()+R(0,180)); c.ck.push_back(c.ck.back()+R(0,180));} c.sq=c.cq.back()+R(0,9)+1; c.sk=c.ck.back()+R(0,9)+1; }
      else { c.sq=R(1,200); c.sk=R(1,200); if (R(0,1)) for(int b=0;b<c.batch;++b){ c.uq.push_back(R(0,c.sq)); int u=R(0,c.sk); c.uk.push_back(u); c.lp.push_back(R(0,u)); } }
      printf("%dx%d/%d %dx%d d%d kind %d dq%d dout%d packed%d used%d mp%d  ",c.batch,c.hq,c.hk,c.sq,c.sk,c.d,kind,c.dq,c.dout,!c.cq.empty(),!c.uq.empty(),c.mp);
      run_case(c, 1000+n, R(0,5)); }
    printf("fails: %d\n", fails); return fails; }
  unsigned seed = argc > 3 ? atoi(argv[3]) : 1;
  for (auto& c : cs) { if (!only.empty() && c.name.find(only) == std::string::npos) continue;
    for (int p = 0; p < 6; ++p) if (pol_only < 0 || p == pol_only) run_case(c, seed + 17 * p, p); }
  printf("fails: %d\n", fails); return fails > 0;
}
