// Measures on one H100 or H200 the rates and latencies that bound an attention backward pass: see README.md.
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

constexpr int kKiB = 1 << 10;
constexpr int kRuns = 5;                   // launches that a median is taken of, after one that warms up
constexpr int kStages = 4;                 // bulk operations of a block in flight
constexpr int kPiece = 16 * kKiB;          // bytes of a bulk operation, where the size does not vary
constexpr int kMemory = 16 * 1024 * kKiB;  // global memory that blocks walk around in, stays in L2
constexpr int kWalk = 8 * 1024 * kKiB;     // bytes of it that a block walks over
constexpr int kBuffers = 48 * kKiB;    // in shared memory: bulk operations' buffers, behind WGMMA's operands
constexpr int kBarriers = 160 * kKiB;  // in shared memory: mbarriers
constexpr int kSharedBytes = kBarriers + 64;  // too much for a second block in an SM

struct Sample {  // what a block measured
  long long cycles, begin_ns, end_ns, count[3];
  float ballast;  // keeps results in use
};

struct Work {  // the arguments of every kernel
  Sample* samples;
  char* memory;  // kMemory bytes and counters behind them
  int steps, size = kPiece, in_flight = kStages, peer = 0;
};

// ---- device helpers; addresses in shared memory are 32-bit ----

#define PTX(text, ...) asm volatile(text::__VA_ARGS__ : "memory")

extern __shared__ __align__(1024) uint32_t shared_memory[];

__device__ void start(Sample& sample) {
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(sample.begin_ns)::"memory");
  sample.cycles = -clock64();
}

__device__ void stop(Sample& sample) {
  sample.cycles += clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(sample.end_ns)::"memory");
}

// A word that is two bfloat16, and also one float32, of random sign and mantissa, of magnitude 1/32 to 1/8.
__device__ uint32_t random_word(uint32_t seed) {
  seed = (seed ^ (seed >> 16)) * 0x7feb352du;
  seed = (seed ^ (seed >> 15)) * 0x846ca68bu;
  return ((seed ^ (seed >> 16)) & 0x80ff80ffu) | 0x3d003d00u;
}

// Fills shared memory, makes the mbarriers and returns the address.
__device__ uint32_t prepare_shared() {
  uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  for (int i = threadIdx.x; i < kBarriers / 4; i += blockDim.x)
    shared_memory[i] = random_word(blockIdx.x * kBarriers + i);
  for (int i = 0; i < kStages && threadIdx.x == 0; ++i)
    PTX("mbarrier.init.shared::cta.b64 [%0], 1;", "r"(shared + kBarriers + i * 8));
  PTX("fence.mbarrier_init.release.cluster;");
  PTX("fence.proxy.async;");
  __syncthreads();
  return shared;
}

__device__ void barrier_expect(uint32_t barrier, int bytes) {
  PTX("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", "r"(barrier), "r"(bytes));
}

__device__ void barrier_wait(uint32_t barrier, int parity) {  // until the phase of that parity is over
  PTX("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }",
      "r"(barrier), "r"(parity));
}

__device__ void bulk_reduce(char* target, uint32_t source, int bytes) {
  PTX("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;", "l"(target), "r"(source),
      "r"(bytes));
  PTX("cp.async.bulk.commit_group;");
}

template <int kPending>  // waits until all bulk reductions but kPending have read their sources
__device__ void bulk_wait_read() {
  PTX("cp.async.bulk.wait_group.read %0;", "n"(kPending));
}

__device__ void bulk_wait_complete() { PTX("cp.async.bulk.wait_group 0;"); }
__device__ void signal(char* counter) { PTX("red.release.gpu.global.add.u32 [%0], 1;", "l"(counter)); }

__device__ void wait_for(const char* counter, int value) {
  int seen = 0;
  while (seen < value)
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
}
__device__ void cluster_sync() { PTX("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"); }

// Where a block is after so many bytes; blocks start apart.
__device__ char* walk(const Work& work, uint32_t bytes) {
  return work.memory + (blockIdx.x * (96 * kKiB) + bytes) % kMemory;
}

// ---- WGMMA ----

#define D8(i) "d" #i "0, d" #i "1, d" #i "2, d" #i "3, d" #i "4, d" #i "5, d" #i "6, d" #i "7"
#define D32 D8(0) ", " D8(1) ", " D8(2) ", " D8(3)
#define D64 D32 ", " D8(4) ", " D8(5) ", " D8(6) ", " D8(7)
#define D128 D64 ", " D8(8) ", " D8(9) ", " D8(10) ", " D8(11) ", " D8(12) ", " D8(13) ", " D8(14) ", " D8(15)
#define WGMMA(n, d, a, b, trans) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" d "}, " a ", " b ", p, 1, 1, " trans ";\n"
// Four WGMMA in a loop that keeps a group of them in flight; the sums are registers of the assembly's own.
#define WGMMA_LOOP(n, d, a0, a1, a2, a3, trans) \
  "{ .reg .pred p, q; .reg .b32 i; .reg .f32 " d "; mov.b32 i, 0;\n"                              \
  "again: setp.ne.b32 p, i, 0; wgmma.fence.sync.aligned;\n" /* p: add to the sums, not set them */ \
  WGMMA(n, d, a0, "%2", trans) WGMMA(n, d, a1, "%3", trans)                                       \
  WGMMA(n, d, a2, "%4", trans) WGMMA(n, d, a3, "%5", trans)                                       \
  "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;\n"                           \
  "add.s32 i, i, 1; setp.lt.s32 q, i, %1; @q bra again;\n"                                        \
  "wgmma.wait_group.sync.aligned 0; add.f32 %0, d00, d37; }"
#define WGMMA_OPERANDS(...) \
  : "=f"(sum) : "r"(steps), "l"(b), "l"(b + 2), "l"(b + 4), "l"(b + 6), __VA_ARGS__ : "memory"
#define WGMMA_SS(n, d)                                          \
  asm volatile(WGMMA_LOOP(n, d, "%6", "%7", "%8", "%9", "0, 0") \
                   WGMMA_OPERANDS("l"(a), "l"(a + 2), "l"(a + 4), "l"(a + 6)))
#define R4(i) "r"(r[i]), "r"(r[i + 1]), "r"(r[i + 2]), "r"(r[i + 3])
#define WGMMA_RS(n, d)                                                                              \
  asm volatile(WGMMA_LOOP(n, d, "{%6, %7, %8, %9}", "{%10, %11, %12, %13}", "{%14, %15, %16, %17}", \
                          "{%18, %19, %20, %21}", "0") WGMMA_OPERANDS(R4(0), R4(4), R4(8), R4(12)))

// Descriptor of a K-major panel of 64 columns, swizzled over 128 bytes: 8 rows are 1024 bytes.
__device__ uint64_t panel(uint32_t shared) { return 1ull << 62 | 64ull << 32 | 1ull << 16 | shared >> 4; }

template <int kN, bool kFromRegisters>  // products of 64 x 64 and 64 x kN
__device__ float wgmma_loop(uint64_t a, uint64_t b, int steps) {
  float sum = 0;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // nvcc 13.0 compiles for compute_90 too with -arch=sm_90a
  uint32_t r[16];
  for (int i = 0; i < 16; ++i) r[i] = random_word(threadIdx.x * 16 + i);
  if constexpr (kN == 64 && !kFromRegisters) WGMMA_SS(64, D32);
  if constexpr (kN == 64 && kFromRegisters) WGMMA_RS(64, D32);
  if constexpr (kN == 128 && !kFromRegisters) WGMMA_SS(128, D64);
  if constexpr (kN == 128 && kFromRegisters) WGMMA_RS(128, D64);
  if constexpr (kN == 256 && !kFromRegisters) WGMMA_SS(256, D128);
  if constexpr (kN == 256 && kFromRegisters) WGMMA_RS(256, D128);
#endif
  return sum;
}

enum class Beside { nothing, bulk_load, bulk_reduce, broadcast };

// Two warpgroups of WGMMA (with no steps they sleep) and, beside them, a third one that does something else.
template <int kN, bool kFromRegisters, Beside kBeside>
__global__ void __launch_bounds__(kN == 256 ? 256 : 384, 1) wgmma(Work work) {
  __shared__ volatile int done;
  __shared__ int count;  // operations of the third warpgroup
  if (threadIdx.x == 0) done = count = 0;
  uint32_t shared = prepare_shared(), full = shared + kBarriers;
  int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  Sample sample{};
  if (warpgroup < 2) {
    start(sample);
    if (work.steps > 0) {
      uint64_t a = panel(shared + warpgroup * 8 * kKiB), b = panel(shared + 16 * kKiB);
      sample.ballast = wgmma_loop<kN, kFromRegisters>(a, b, work.steps);
    } else {
      while (clock64() + sample.cycles < 1'000'000) __nanosleep(500);
    }
    PTX("bar.sync 1, 256;");
    stop(sample);
    if (threadIdx.x == 0) done = 1;
  } else if (kBeside == Beside::broadcast) {
    uint32_t sum = 0, x, y, z, w;
    int loads = 0;
    for (; !done; loads += 64) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                     : "r"(shared + kBuffers + i * 16));
        sum ^= x;
      }
    }
    sample.ballast = __uint_as_float(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(&count, loads);
  } else if (threadIdx.x == 256 && kBeside != Beside::nothing) {
    auto await_load = [&](int n) { barrier_wait(full + n % kStages * 8, n / kStages & 1); };
    int n = 0;
    for (; !done; ++n) {
      uint32_t buffer = shared + kBuffers + n % kStages * kPiece, barrier = full + n % kStages * 8;
      char* memory = walk(work, n * kPiece);
      if (kBeside == Beside::bulk_reduce) {
        bulk_reduce(memory, buffer, kPiece);
        bulk_wait_read<kStages - 1>();
      } else {
        if (n >= kStages) await_load(n - kStages);
        barrier_expect(barrier, kPiece);
        PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];",
            "r"(buffer), "l"(memory), "r"(kPiece), "r"(barrier));
      }
    }
    for (int m = max(n - kStages, 0); kBeside == Beside::bulk_load && m < n; ++m) await_load(m);
    bulk_wait_complete();
    count = n;
  }
  __syncthreads();
  sample.count[0] = count;
  if (threadIdx.x == 0 || sample.ballast == 1e30f) work.samples[blockIdx.x] = sample;
}

// ---- reductions into global memory and signals ----

// One thread of a block adds pieces of shared memory to global memory.
__global__ void reduce_bulk(Work work) {
  uint32_t shared = prepare_shared();
  if (threadIdx.x != 0) return;
  Sample sample{};
  start(sample);
  for (int i = 0; i < work.steps; ++i) {
    bulk_reduce(walk(work, i * work.size), shared + i % kStages * work.size, work.size);
    if (work.in_flight == 1) bulk_wait_read<0>();
    if (work.in_flight == kStages) bulk_wait_read<kStages - 1>();
    if (work.in_flight == 4 * kStages) bulk_wait_read<4 * kStages - 1>();
  }
  bulk_wait_complete();
  stop(sample);
  work.samples[blockIdx.x] = sample;
}

// All threads of a block add four floats each to global memory.
__global__ void reduce_vector(Work work) {
  float value = __uint_as_float(random_word(threadIdx.x));
  Sample sample{};
  start(sample);
#pragma unroll 8
  for (int i = 0; i < work.steps; ++i)
    PTX("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %1, %1, %1};",
        "l"(walk(work, (i * blockDim.x + threadIdx.x) * 16)), "f"(value));
  __threadfence();
  __syncthreads();
  stop(sample);
  if (threadIdx.x == 0) work.samples[blockIdx.x] = sample;
}

// Clocks from a bulk reduction until its source was read and until it is complete, and of a signal after it.
__global__ void reduce_latency(Work work) {
  uint32_t shared = prepare_shared();
  if (threadIdx.x != 0) return;
  Sample sample{};
  start(sample);
  for (int i = 0; i < work.steps; ++i) {
    char* target = walk(work, i * kPiece);
    long long issued = clock64();
    bulk_reduce(target, shared, kPiece);
    bulk_wait_read<0>();
    long long read = clock64();
    bulk_wait_complete();
    long long complete = clock64();
    PTX("fence.proxy.async;");
    signal(work.memory + kMemory + blockIdx.x * 128);
    long long signalled = clock64();
    sample.count[0] += read - issued;
    sample.count[1] += complete - issued;
    sample.count[2] += signalled - complete;
  }
  stop(sample);
  work.samples[blockIdx.x] = sample;
}

// Block 0 and its peer signal each other in turn.
__global__ void ping_pong(Work work) {
  bool first = blockIdx.x == 0;
  if (threadIdx.x != 0 || (!first && blockIdx.x != work.peer)) return;
  char *ping = work.memory + kMemory, *pong = ping + 4 * kKiB;
  Sample sample{};
  start(sample);
  for (int i = 1; i <= work.steps; ++i) {
    if (first) signal(ping);
    wait_for(first ? pong : ping, i);
    if (!first) signal(pong);
  }
  stop(sample);
  if (first) work.samples[0] = sample;
}

// ---- distributed shared memory ----

enum class Remote { load, store, bulk_copy };
constexpr int kRound = 32;  // bulk copies that a block sends before it waits for as many from the other one

template <Remote kRemote>  // the two blocks of a cluster read or write each other's shared memory
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256, 1) remote(Work work) {
  uint32_t shared = prepare_shared(), barrier = shared + kBarriers, peer, sum = threadIdx.x, x, y, z, w;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(shared), "r"(blockIdx.x % 2 ^ 1));
  cluster_sync();
  Sample sample{};
  start(sample);
  for (int i = 0; kRemote == Remote::bulk_copy && i < work.steps; ++i) {
    if (threadIdx.x == 0) barrier_expect(barrier, kRound * kPiece);
    cluster_sync();
    for (int n = 0; threadIdx.x == 0 && n < kRound; ++n)
      PTX("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];",
          "r"(peer + (kStages + n % kStages) * kPiece), "r"(shared + n % kStages * kPiece), "r"(kPiece),
          "r"(peer + kBarriers));
    barrier_wait(barrier, i & 1);
  }
#pragma unroll 8
  for (int i = 0; kRemote != Remote::bulk_copy && i < work.steps; ++i) {
    uint32_t address = peer + i % 16 * 4 * kKiB + threadIdx.x * 16;
    if (kRemote == Remote::store) {
      PTX("st.shared::cluster.v4.u32 [%0], {%1, %1, %1, %1};", "r"(address), "r"(sum));
    } else {
      asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                   : "r"(address));
      sum ^= x ^ y ^ z ^ w;
    }
  }
  sample.ballast = __uint_as_float(sum);
  cluster_sync();
  stop(sample);
  if (threadIdx.x == 0 || sample.ballast == 1e30f) work.samples[blockIdx.x] = sample;
}

// ---- host ----

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <class... Values>
std::string text(const char* format, Values... values) {
  char line[256];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

struct Result {  // one launch; cycles, counts and the clock rate are the mean of its blocks
  double seconds = 0, cycles = 0, mhz = 0, count[3] = {};
};

struct Gpu {
  int sms;
  Sample* samples;
  char* memory;

  Gpu() {
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    check(cudaMalloc(&samples, sms * sizeof(Sample)));
    check(cudaMalloc(&memory, kMemory + 64 * kKiB));
    check(cudaMemset(memory, 0, kMemory));
    for (int i = 0; i < 20; ++i)
      measure(wgmma<128, false, Beside::nothing>, sms, 256, 2000);  // clocks settle
  }

  // The median launch by its cycles.
  Result measure(void (*kernel)(Work), int blocks, int threads, int steps, Work work = {}) {
    work.samples = samples, work.memory = memory, work.steps = steps;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    std::vector<Result> results(1 + kRuns);
    for (Result& result : results) {
      std::vector<Sample> seen(sms);
      check(cudaMemset(samples, 0, sms * sizeof(Sample)));
      check(cudaMemset(memory + kMemory, 0, 64 * kKiB));
      kernel<<<blocks, threads, kSharedBytes>>>(work);
      check(cudaGetLastError());
      check(cudaMemcpy(seen.data(), samples, sms * sizeof(Sample), cudaMemcpyDeviceToHost));
      seen.erase(std::remove_if(seen.begin(), seen.end(), [](auto& s) { return s.cycles == 0; }), seen.end());
      if (seen.empty()) throw std::runtime_error("no block measured anything");
      long long begin = seen[0].begin_ns, end = 0;
      for (const Sample& sample : seen) {
        begin = std::min(begin, sample.begin_ns), end = std::max(end, sample.end_ns);
        result.cycles += 1.0 * sample.cycles / seen.size();
        result.mhz += 1e3 * sample.cycles / (sample.end_ns - sample.begin_ns) / seen.size();
        for (int i = 0; i < 3; ++i) result.count[i] += 1.0 * sample.count[i] / seen.size();
      }
      result.seconds = 1e-9 * (end - begin);
    }
    std::sort(results.begin() + 1, results.end(), [](auto& l, auto& r) { return l.cycles < r.cycles; });
    return results[1 + kRuns / 2];
  }
};

void row(const std::string& what, double measured, const char* unit, const Result& result,
         const std::string& note) {
  std::printf("| %s | %.4g | %s | %s; %.0f MHz |\n", what.c_str(), measured, unit, note.c_str(), result.mhz);
}

double flop_per_clock(const Result& result, int n, int steps) {
  return 2.0 * 64 * n * 64 * steps * 2 / result.cycles;  // of two warpgroups
}

template <int kN, bool kFromRegisters>
void wgmma_row(Gpu& gpu) {
  int steps = 2000 * 128 / kN;
  Result result = gpu.measure(wgmma<kN, kFromRegisters, Beside::nothing>, gpu.sms, 256, steps);
  double rate = flop_per_clock(result, kN, steps);
  row(text("WGMMA m64n%dk16 %s", kN, kFromRegisters ? "RS" : "SS"), rate, "FLOP/clock/SM", result,
      text("%.1f%% of 4096; random bf16, 2 warpgroups", rate / 40.96));
}

// 1. WGMMA by shape, A in shared memory (SS) or in registers (RS).
void probe_wgmma(Gpu& gpu) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  std::printf("| %s | %d | SMs | |\n", properties.name, gpu.sms);
  wgmma_row<64, false>(gpu), wgmma_row<64, true>(gpu);
  wgmma_row<128, false>(gpu), wgmma_row<128, true>(gpu);
  wgmma_row<256, false>(gpu), wgmma_row<256, true>(gpu);
}

template <Beside kBeside>
void beside_rows(Gpu& gpu, const char* name, double amount, const char* unit) {
  constexpr int kSteps = 2000;
  Result mma = gpu.measure(wgmma<128, false, Beside::nothing>, gpu.sms, 384, kSteps);
  Result other = gpu.measure(wgmma<128, false, kBeside>, gpu.sms, 384, 0);
  Result both = gpu.measure(wgmma<128, false, kBeside>, gpu.sms, 384, kSteps);
  double alone = flop_per_clock(mma, 128, kSteps), beside = flop_per_clock(both, 128, kSteps);
  row(text("%s alone", name), other.count[0] * amount / other.cycles, unit, other,
      "WGMMA's warpgroups sleep");
  row(text("%s beside WGMMA", name), both.count[0] * amount / both.cycles, unit, both, "m64n128k16 SS");
  row(text("WGMMA beside %s", name), beside, "FLOP/clock/SM", both,
      text("%.1f%% of %.0f alone", 100 * beside / alone, alone));
}

// 2. WGMMA beside bulk operations between shared memory and L2, 4 in flight.
void probe_bulk_beside(Gpu& gpu) {
  beside_rows<Beside::bulk_load>(gpu, "bulk load of 16 KiB", kPiece, "B/clock/SM");
  beside_rows<Beside::bulk_reduce>(gpu, "bulk reduction of 16 KiB", kPiece, "B/clock/SM");
}

void reduce_row(Gpu& gpu, const std::string& what, const Result& result) {
  row(what, 1e-12 * kWalk * gpu.sms / result.seconds, "TB/s", result,
      text("%.1f B/clock/SM", kWalk / result.cycles));
}

// 3. Bulk reductions into L2 by size and by how many are in flight.
void probe_reduce_bulk(Gpu& gpu) {
  Work work{};
  for (int in_flight : {1, kStages, 4 * kStages}) {
    for (int size = kKiB; size <= 32 * kKiB; size *= 2) {
      work.size = size, work.in_flight = in_flight;
      Result result = gpu.measure(reduce_bulk, gpu.sms, 128, kWalk / size, work);
      reduce_row(gpu, text("bulk reduction of %d KiB, %d in flight", size / kKiB, in_flight), result);
    }
  }
}

// 4. Vector reductions from registers into L2.
void probe_reduce_vector(Gpu& gpu) {
  Result result = gpu.measure(reduce_vector, gpu.sms, 256, kWalk / (256 * 16));
  reduce_row(gpu, "red.global.add.v4.f32, 256 threads", result);
}

// 5. Latency of a bulk reduction, of the signal after it, and of a signal from SM to SM.
void probe_latency(Gpu& gpu) {
  constexpr int kSteps = 500, kTurns = 1000;
  const char* names[] = {"bulk reduction of 16 KiB to wait_group.read 0",
                         "bulk reduction of 16 KiB to wait_group 0",
                         "fence.proxy.async and red.release.gpu after it"};
  for (int blocks : {1, gpu.sms}) {
    Result result = gpu.measure(reduce_latency, blocks, 128, kSteps);
    for (int i = 0; i < 3; ++i) {
      double clocks = result.count[i] / kSteps;
      row(names[i], clocks, "clocks", result,
          text("%.0f ns; %s", 1e3 * clocks / result.mhz,
               blocks == 1 ? "one SM, idle GPU" : "all SMs at once"));
    }
  }
  std::vector<Result> pairs;
  Work work{};
  for (int peer : {1, 2, 3, gpu.sms / 4, gpu.sms / 2, gpu.sms * 3 / 4, gpu.sms - 1}) {
    work.peer = peer;
    pairs.push_back(gpu.measure(ping_pong, gpu.sms, 32, kTurns, work));
  }
  std::sort(pairs.begin(), pairs.end(), [](auto& l, auto& r) { return l.cycles < r.cycles; });
  auto one_way = [](const Result& result) { return result.cycles / kTurns / 2; };
  const Result& middle = pairs[pairs.size() / 2];
  row("red.release.gpu to ld.acquire.gpu in another SM", one_way(middle), "clocks", middle,
      text("%.0f ns; %.0f to %.0f clocks by pair of SMs", 1e3 * one_way(middle) / middle.mhz,
           one_way(pairs.front()), one_way(pairs.back())));
}

template <Remote kRemote>
void remote_row(Gpu& gpu, const char* name) {
  int steps = kRemote == Remote::bulk_copy ? 32 : 4096,
      bytes = kRemote == Remote::bulk_copy ? kRound * kPiece : 4096;
  Result result = gpu.measure(remote<kRemote>, gpu.sms / 2 * 2, 256, steps);
  row(name, 1.0 * steps * bytes / result.cycles, "B/clock/SM", result,
      "cluster of 2, both ways at once, all SMs");
}

// 6. Distributed shared memory.
void probe_remote(Gpu& gpu) {
  remote_row<Remote::load>(gpu, "ld.shared::cluster.v4, 256 threads");
  remote_row<Remote::store>(gpu, "st.shared::cluster.v4, 256 threads");
  remote_row<Remote::bulk_copy>(gpu, "cp.async.bulk shared::cta to shared::cluster, 16 KiB");
}

// 7. Loads of 16 bytes of one address by all lanes, beside WGMMA.
void probe_broadcast(Gpu& gpu) {
  beside_rows<Beside::broadcast>(gpu, "LDS.128 broadcast", 1, "warp loads/clock/SM");
}

int main() {
  void (*probes[])(Gpu&) = {probe_wgmma,   probe_bulk_beside, probe_reduce_bulk, probe_reduce_vector,
                            probe_latency, probe_remote,      probe_broadcast};
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  std::printf("| what | measured | unit | note |\n| --- | --- | --- | --- |\n");
  for (int i = 0; i < 7; ++i) {  // a process each, so that a fault or a hang ends one probe only
    pid_t child = fork();
    if (child == 0) {
      alarm(10);
      try {
        Gpu gpu;
        probes[i](gpu);
      } catch (const std::exception& error) {
        std::printf("| probe %d | error | | %s |\n", i + 1, error.what());
      }
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) std::printf("| probe %d | error | | ended by signal %d |\n", i + 1, WTERMSIG(status));
  }
}
