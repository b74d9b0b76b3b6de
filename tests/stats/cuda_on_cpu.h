// What gpu.cu needs of CUDA, for a CPU. The threads of a block take turns: each runs until the next barrier, where it
// waits until the others have come to it, too. Blocks run one after the other.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define __CUDACC__
#define __device__
#define __global__
#define __shared__ static
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

struct uint4 { unsigned x, y, z, w; };
struct Dimensions { unsigned x, y; };
static Dimensions threadIdx, blockIdx, gridDim;

template <class To, class From> static To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
static float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
static unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
static double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
template <class T> static void atomicAdd(T* to, T value) { *to += value; }

// --- threads and barriers

constexpr int MOST_THREADS = 256, STACK = 1 << 16;
enum Stop { RUNS, AT_SYNCTHREADS, AT_SYNCWARP, ENDED };
struct Thread {
  ucontext_t context;
  Stop stop;
  std::vector<char> stack = std::vector<char>(STACK);
};
static Thread threads[MOST_THREADS];
static ucontext_t scheduler;
static std::function<void()> kernel;
static double exchanged[MOST_THREADS];

static void wait(Stop stop) {
  Thread& me = threads[threadIdx.x];
  me.stop = stop;
  swapcontext(&me.context, &scheduler);
}
static void __syncthreads() { wait(AT_SYNCTHREADS); }
static void __syncwarp() { wait(AT_SYNCWARP); }

template <class T> static T __shfl_down_sync(unsigned, T value, int away) {
  unsigned me = threadIdx.x, other = me % 32 + away < 32 ? me + away : me;
  exchanged[me] = value;
  __syncwarp();
  T got = exchanged[other];
  __syncwarp();
  return got;
}

static void run_thread() {
  kernel();
  threads[threadIdx.x].stop = ENDED;
}

static void start(Thread& thread) {
  getcontext(&thread.context);
  thread.context.uc_stack = {thread.stack.data(), 0, thread.stack.size()};
  thread.context.uc_link = &scheduler;
  makecontext(&thread.context, run_thread, 0);
  thread.stop = RUNS;
}

static void run_block(int size) {
  for (int i = 0; i < size; i++) start(threads[i]);
  for (bool more = true; more;) {
    more = false;
    for (int i = 0; i < size; i++) {
      if (threads[i].stop == ENDED) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &threads[i].context);
      more = true;
    }
    for (int i = 1; i < size; i++)
      if (threads[i].stop != threads[i - i % 32].stop) {
        fprintf(stderr, "thread %d is not where its warp is\n", i);
        abort();
      }
  }
}

static void launch(int wide, int high, int size, std::function<void()> what) {
  kernel = what;
  gridDim = {unsigned(wide), unsigned(high)};
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) run_block(size);
}

// --- the instructions that gpu.cu gives as assembler

static float half_to_float(unsigned short bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float size = exponent == 31 ? (fraction ? NAN : INFINITY)
               : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                              : std::ldexp(fraction, -24);
  return std::copysign(size, bits >> 15 ? -1.0f : 1.0f);
}

static float half_of(unsigned pair, int i, bool is_bfloat) {
  unsigned short bits = pair >> 16 * i;
  return is_bfloat ? __uint_as_float(unsigned(bits) << 16) : half_to_float(bits);
}

// The halves of two pairs that `better` prefers; a number is preferred to NaN.
template <class F> static unsigned better_of(unsigned a, unsigned b, bool is_bfloat, F better) {
  unsigned found = 0;
  for (int i = 0; i < 2; i++) {
    float x = half_of(a, i, is_bfloat), y = half_of(b, i, is_bfloat);
    unsigned chosen = std::isnan(x) || better(y, x) ? b : a;
    found |= chosen & 0xffffu << 16 * i;
  }
  return found;
}

static void ptx(const std::string&, float& to, unsigned short from) { to = half_to_float(from); }
static void ptx(const std::string& name, unsigned& to, unsigned from) {
  bool is_bfloat = name.find("bf16") != std::string::npos, is_min = name.find("min") == 0;
  to = better_of(to, from, is_bfloat, [&](float a, float b) { return is_min ? a < b : a > b; });
}
static void ptx(const std::string& name, unsigned& to, unsigned a, unsigned b) {
  bool is_bfloat = name.find("bf16") != std::string::npos;
  to = 0;
  for (int i = 0; i < 2; i++)
    if (half_of(a, i, is_bfloat) == half_of(b, i, is_bfloat)) to |= 0xffffu << 16 * i;
}
