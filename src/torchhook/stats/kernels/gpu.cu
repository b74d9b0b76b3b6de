// Moments, histograms and statistics of units on a GPU. For moments, every block adds to a row of its own, so that no
// block waits for another, and a launch has no tail. The rows are merged when they are read.
//
// Powers are of (x - centre) * scale, in single precision; centre and scale come from the values of the last launch. If
// these are far from the current values, or something is not finite, the block reads its values again in double
// precision. So the result is as good for a mean of 1e6 and a deviation of 1 as for any other.
typedef long long Index;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int AHEAD = 4;  // vectors that a thread loads in advance
constexpr int FLUSH = 4;  // rounds of these after which single-precision sums go into double ones

enum Kind { FLOAT32, BFLOAT16, FLOAT16 };

// The values of one tensor: vectors of 16 bytes, and the values before and after them.
template <Kind kind> struct Values {
  static constexpr int SIZE = kind == FLOAT32 ? 4 : 2, LANES = 16 / SIZE;
  const char* data;
  Index n, head, vectors;

  __device__ Values(const void* x, Index n) : data(static_cast<const char*>(x)), n(n) {
    Index odd = (16 - reinterpret_cast<unsigned long long>(x) % 16) % 16 / SIZE;
    head = odd < n ? odd : n;
    vectors = (n - head) / LANES;
  }

  __device__ static float lane(const uint4& v, int i) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    if (kind == FLOAT32) return __uint_as_float(words[i]);
    unsigned word = words[i / 2];
    if (kind == BFLOAT16) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    return half(i % 2 ? word >> 16 : word & 0xffffu);
  }

  __device__ static float half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }

  // The value at a position.
  __device__ float operator[](Index at) const {
    if (kind == FLOAT32) return reinterpret_cast<const float*>(data)[at];
    unsigned short bits = reinterpret_cast<const unsigned short*>(data)[at];
    return kind == BFLOAT16 ? __uint_as_float(unsigned(bits) << 16) : half(bits);
  }

  // The values outside of vectors, fewer than two vectors of them.
  __device__ Index odd_ones() const { return n - vectors * LANES; }
  __device__ float odd_one(Index i) const { return (*this)[i < head ? i : i + vectors * LANES]; }

  // How many values the block reads.
  __device__ Index mine() const {
    constexpr Index TILE = THREADS * AHEAD;
    Index tiles = (vectors + TILE - 1) / TILE, block = blockIdx.x, seen = block == 0 ? odd_ones() : 0;
    if (block >= tiles) return seen;
    seen += ((tiles - 1 - block) / gridDim.x + 1) * TILE * LANES;
    bool has_last = (tiles - 1) % gridDim.x == block;
    return has_last ? seen - (tiles * TILE - vectors) * LANES : seen;
  }

  // All vectors, the last one first, since what was written last may still be in the cache.
  __device__ const uint4* last() const { return reinterpret_cast<const uint4*>(data + head * SIZE) + vectors - 1; }

  // The first vector of this thread, if it has one.
  __device__ const uint4* first() const {
    Index i = Index(blockIdx.x) * THREADS * AHEAD + threadIdx.x;
    return i < vectors ? last() - i : nullptr;
  }

  // Calls `begin`, then `vector` and `odd` with all values of this thread, and `flush` now and then. The next vectors
  // are loaded while these are processed.
  template <class B, class V, class F, class G>
  __device__ void each(B begin, V vector, F odd, G flush) const {
    const uint4* last = this->last();
    Index step = Index(gridDim.x) * THREADS * AHEAD;
    Index i = Index(blockIdx.x) * THREADS * AHEAD + threadIdx.x;
    uint4 coming[AHEAD], here[AHEAD];
    bool more = i + (AHEAD - 1) * THREADS < vectors;
    if (more)
#pragma unroll
      for (int k = 0; k < AHEAD; k++) coming[k] = last[-(i + k * THREADS)];
    begin();
    for (int rounds = 1; more; rounds++) {
#pragma unroll
      for (int k = 0; k < AHEAD; k++) here[k] = coming[k];
      i += step;
      more = i + (AHEAD - 1) * THREADS < vectors;
      if (more)
#pragma unroll
        for (int k = 0; k < AHEAD; k++) coming[k] = last[-(i + k * THREADS)];
#pragma unroll
      for (int k = 0; k < AHEAD; k++) vector(here[k]);
      if (rounds % FLUSH == 0) flush();
    }
    for (int k = 0; k < AHEAD; k++)
      if (i + k * THREADS < vectors) vector(last[-(i + k * THREADS)]);
    if (blockIdx.x == 0 && threadIdx.x < odd_ones()) odd(odd_one(threadIdx.x));
    flush();
  }

  // The same, value by value.
  template <class F> __device__ void each(F f) const {
    each([] {},
         [&](const uint4& v) {
#pragma unroll
           for (int l = 0; l < LANES; l++) f(lane(v, l));
         },
         f, [] {});
  }
};

// The smallest and the largest value, and how many are zero.
template <Kind kind> struct Extremes {
  float low = INFINITE, high = -INFINITE;
  unsigned zeros = 0;

  __device__ void add(float v) {
    low = fminf(low, v);
    high = fmaxf(high, v);
    zeros += v == 0;
  }
  __device__ void add(const uint4& v) {
#pragma unroll
    for (int l = 0; l < Values<kind>::LANES; l++) add(Values<kind>::lane(v, l));
  }
  __device__ void flush() {}
};

#if __CUDA_ARCH__ >= 900
// Two at a time, as they are in memory. For a zero, all bits of its half of `equal` are set: this is 65535 for the lower
// half, and -65536 for the upper one. So -counts is the zeros below, plus 65536 times how many more there are above.
template <Kind kind> struct Pairs {
  float low = INFINITE, high = -INFINITE;
  unsigned zeros = 0;
  unsigned lows = kind == BFLOAT16 ? 0x7f807f80u : 0x7c007c00u, highs = lows | 0x80008000u, counts = 0;

  __device__ void add(float v) {
    low = fminf(low, v);
    high = fmaxf(high, v);
    zeros += v == 0;
  }
  __device__ void add(unsigned pair) {
    unsigned equal;
    if (kind == BFLOAT16) {
      asm("min.bf16x2 %0, %0, %1;" : "+r"(lows) : "r"(pair));
      asm("max.bf16x2 %0, %0, %1;" : "+r"(highs) : "r"(pair));
      asm("set.eq.u32.bf16x2 %0, %1, %2;" : "=r"(equal) : "r"(pair), "r"(0u));
    } else {
      asm("min.f16x2 %0, %0, %1;" : "+r"(lows) : "r"(pair));
      asm("max.f16x2 %0, %0, %1;" : "+r"(highs) : "r"(pair));
      asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(equal) : "r"(pair), "r"(0u));
    }
    counts += equal;
  }
  __device__ void add(const uint4& v) { add(v.x), add(v.y), add(v.z), add(v.w); }
  __device__ void flush() {
    const uint4 found = {lows, highs, 0, 0};
    low = fminf(low, fminf(Values<kind>::lane(found, 0), Values<kind>::lane(found, 1)));
    high = fmaxf(high, fmaxf(Values<kind>::lane(found, 2), Values<kind>::lane(found, 3)));
    unsigned below = -counts & 0xffffu;
    zeros += 2 * below + (int(-counts) >> 16);
    counts = 0;
  }
};
template <> struct Extremes<BFLOAT16> : Pairs<BFLOAT16> {};
template <> struct Extremes<FLOAT16> : Pairs<FLOAT16> {};
#endif

// Combines the results of the threads of a block, for all of them: sums, then minima.
template <int SUMS, int LEAST> struct Together {
  double sums[SUMS];
  float least[LEAST];

  __device__ void meet() {
    __shared__ Together parts[WARPS];
    for (int away = 16; away; away /= 2) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) sums[i] += __shfl_down_sync(~0u, sums[i], away);
#pragma unroll
      for (int i = 0; i < LEAST; i++) least[i] = fminf(least[i], __shfl_down_sync(~0u, least[i], away));
    }
    __syncthreads();  // the previous result may still be read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = *this;
    __syncthreads();
    *this = parts[0];
    for (int warp = 1; warp < WARPS; warp++) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) sums[i] += parts[warp].sums[i];
#pragma unroll
      for (int i = 0; i < LEAST; i++) least[i] = fminf(least[i], parts[warp].least[i]);
    }
  }
};

// In double precision, in two passes.
template <Kind kind> __device__ __noinline__ Row carefully(const Values<kind>& x) {
  double total = 0, size = 0;
  int nan = 0, posinf = 0, neginf = 0, zeros = 0, count = 0;
  float low = INFINITE, high = -INFINITE;
  x.each([&](float v) {
    count++;
    nan += v != v;
    posinf += v == float(INFINITE);
    neginf += v == -float(INFINITE);
    if (!(fabsf(v) < float(INFINITE))) return;
    total += v;
    size += fabsf(v);
    zeros += v == 0;
    low = fminf(low, v);
    high = fmaxf(high, v);
  });
  Together<7, 2> all = {{double(count), double(nan), double(posinf), double(neginf), double(zeros), total, size},
                        {low, -high}};
  all.meet();
  Row row = nothing();
  row.count = all.sums[0];
  row.nan = all.sums[1];
  row.posinf = all.sums[2];
  row.neginf = all.sums[3];
  row.zeros = all.sums[4];
  row.abs_sum = all.sums[6];
  row.min = all.least[0];
  row.max = -all.least[1];
  double left = finite(row);
  row.mean = left > 0 ? all.sums[5] / left : 0;
  double s2 = 0, s3 = 0, s4 = 0;
  x.each([&](float v) {
    if (!(fabsf(v) < float(INFINITE))) return;
    double d = v - row.mean, q = d * d;
    s2 += q;
    s3 += q * d;
    s4 += q * q;
  });
  Together<3, 1> powers = {{s2, s3, s4}, {0}};
  powers.meet();
  row.m2 = powers.sums[0];
  row.m3 = powers.sums[1];
  row.m4 = powers.sums[2];
  return row;
}

// The centre and scale of a block; a scale of zero means that they are not known yet.
struct Place {
  float centre, scale;
};

// Near the mean of the values in `row`, in units of about their deviation.
__device__ Place near(const Row& row) {
  double n = finite(row), variance = n > 0 ? row.m2 / n : 0, unit = variance > 0 ? sqrt(variance) : fabs(row.mean);
  int exponent = unit > 0 ? ilogb(unit) : 0;
  return {float(row.mean), ldexpf(1.0f, exponent < -120 ? 120 : exponent > 120 ? -120 : -exponent)};
}

// An estimate for a block: the mean and the deviation of one vector per thread.
template <Kind kind> __device__ Row glance(const Values<kind>& x) {
  double n = 0, first = 0, second = 0;
  if (const uint4* vector = x.first())
    for (int l = 0; l < Values<kind>::LANES; l++) {
      float v = Values<kind>::lane(*vector, l);
      if (!(fabsf(v) < float(INFINITE))) continue;
      n++, first += v, second += double(v) * v;
    }
  Together<3, 1> all = {{n, first, second}, {0}};
  all.meet();
  n = all.sums[0];
  return n > 0 ? from_powers(n, 0, 1, all.sums[1], all.sums[2], 0, 0) : nothing();
}

// In single precision, in one pass, in which `also` gets each value once; false if that is not good enough.
template <Kind kind, class F> __device__ bool quickly(const Values<kind>& x, Place from, Row& row, F also) {
  float s1 = 0, s2 = 0, s3 = 0, s4 = 0, size = 0;
  double t1 = 0, t2 = 0, t3 = 0, t4 = 0, sizes = 0;
  float shift;
  Extremes<kind> extremes;
  auto add = [&](float v) {
    also(v);
    float d = fmaf(v, from.scale, shift), q = d * d;
    s1 += d;
    s2 += q;
    s3 = fmaf(q, d, s3);
    s4 = fmaf(q, q, s4);
    size += fabsf(v);
  };
  x.each(
      [&] {
        if (from.scale == 0) from = near(glance(x));
        shift = -from.centre * from.scale;
      },
      [&](const uint4& v) {
#pragma unroll
        for (int l = 0; l < Values<kind>::LANES; l++) add(Values<kind>::lane(v, l));
        extremes.add(v);
      },
      [&](float v) {
        add(v);
        extremes.add(v);
      },
      [&] {
        t1 += s1, t2 += s2, t3 += s3, t4 += s4, sizes += size;
        s1 = s2 = s3 = s4 = size = 0;
        extremes.flush();
      });
  double n = x.mine();
  if (n == 0) return row = nothing(), true;
  Together<6, 2> all = {{t1, t2, t3, t4, sizes, double(extremes.zeros)}, {extremes.low, -extremes.high}};
  all.meet();
  t1 = all.sums[0], t2 = all.sums[1], t3 = all.sums[2], t4 = all.sums[3], sizes = all.sums[4];
  double m = t1 / n, mean_of_squares = t2 / n, variance = mean_of_squares - m * m;
  bool finite = sizes < INFINITE && t4 < INFINITE;
  bool constant = t1 == 0 && t2 == 0 && all.least[0] == -all.least[1];  // else squares have vanished
  bool is_near = m * m <= 4 * variance, in_range = mean_of_squares > 1e-12 && mean_of_squares < 1e12;
  if (!finite || !(constant || (is_near && in_range))) return false;
  row = from_powers(n, from.centre, from.scale, t1, t2, t3, t4);
  row.abs_sum = sizes;
  row.zeros = all.sums[5];
  row.min = all.least[0];
  row.max = -all.least[1];
  return true;
}

// Adds to the row of this block; `also` gets each value once.
template <Kind kind, class F> __device__ void add_moments(const Values<kind>& x, Row* rows, Place* places, F also) {
  Row known = rows[blockIdx.x], found;
  if (!quickly(x, places[blockIdx.x], found, also)) found = carefully(x);
  if (threadIdx.x == 0) {
    if (finite(found) > 0) places[blockIdx.x] = near(found);
    merge(known, found);
    rows[blockIdx.x] = known;
  }
}

// `places` outlast the rows: these are reset again and again, while the values do not change much.
template <Kind kind>
__global__ void __launch_bounds__(THREADS, 2) moments(const void* data, Index n, Row* rows, Place* places) {
  add_moments(Values<kind>(data, n), rows, places, [](float) {});
}

// Merges the rows of each state into one.
__global__ void settle(const Row* rows, Index each, Row* settled) {
  __shared__ Row parts[32];
  const Row* mine = rows + blockIdx.x * each;
  Row row = nothing();
  for (Index i = threadIdx.x; i < each; i += 32) merge(row, mine[i]);
  parts[threadIdx.x] = row;
  for (int away = 16; away; away /= 2) {
    __syncwarp();
    if (threadIdx.x < away) merge(parts[threadIdx.x], parts[threadIdx.x + away]);
  }
  if (threadIdx.x == 0) settled[blockIdx.x] = parts[0];
}

// How many values of a block are in each bin, which is given by the first eleven bits of a value as a float. That many
// values are zero does no harm: lanes of a warp that add one to the same count in shared memory do so together.
constexpr int BINS = 2048;

struct Tally {
  unsigned* counts;

  __device__ Tally() {
    __shared__ unsigned memory[BINS];
    counts = memory;
    for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0;
    __syncthreads();
  }

  __device__ void add(float v) { atomicAdd(&counts[__float_as_uint(v) >> 21], 1u); }

  __device__ void add_to(double* bins) const {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
      if (counts[i]) atomicAdd(&bins[i], double(counts[i]));
  }
};

template <Kind kind> __global__ void __launch_bounds__(THREADS, 4) histogram(const void* data, Index n, double* bins) {
  Tally tally;
  Values<kind>(data, n).each([&](float v) { tally.add(v); });
  tally.add_to(bins);
}

// Both in one pass.
template <Kind kind>
__global__ void __launch_bounds__(THREADS, 2)
    moments_and_histogram(const void* data, Index n, Row* rows, Place* places, double* bins) {
  Tally tally;
  add_moments(Values<kind>(data, n), rows, places, [&](float v) { tally.add(v); });
  tally.add_to(bins);
}

// Statistics of units. In memory a tensor is rows, in which every unit has `inner` values side by side. Sums are of the
// distances from the unit's first value, in double precision, and go into `sums`, which `merge_units` merges into the
// state: five numbers per unit, as in native.cpp.
struct Sums {
  double first, second, size;
  unsigned n, active;

  __device__ void add(float v, double from) {
    if (!(fabsf(v) < float(INFINITE))) return;
    double d = v - from;
    first += d;
    second += d * d;
    size += fabsf(v);
    n++;
    active += v > 0;
  }
  __device__ void add_to(double* sums, Index units, Index unit) const {
    const double all[] = {double(n), first, second, size, double(active)};
    for (int i = 0; i < 5; i++) atomicAdd(&sums[i * units + unit], all[i]);
  }
};

template <Kind kind> __device__ double begin_of(const Values<kind>& x, Index unit, Index inner) {
  float v = x[unit * inner];
  return fabsf(v) < float(INFINITE) ? v : 0;
}

// Units with few values in a row: a warp reads as many columns as it has lanes, the next warp the next row.
template <Kind kind>
__global__ void __launch_bounds__(THREADS) across(const void* data, Index rows, Index units, Index inner, double* sums) {
  __shared__ Sums parts[WARPS][32];
  Values<kind> x(data, rows * units * inner);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Index columns = units * inner, column = Index(blockIdx.x) * 32 + lane, unit = column / inner;
  Sums found = {};
  if (column < columns) {
    double from = begin_of(x, unit, inner);
#pragma unroll 8
    for (Index row = Index(blockIdx.y) * WARPS + warp; row < rows; row += gridDim.y * WARPS)
      found.add(x[row * columns + column], from);
  }
  parts[warp][lane] = found;
  __syncthreads();
  if (warp || column >= columns) return;
  for (int other = 1; other < WARPS; other++) {
    const Sums& part = parts[other][lane];
    found.first += part.first, found.second += part.second, found.size += part.size;
    found.n += part.n, found.active += part.active;
  }
  found.add_to(sums, units, unit);
}

// Units with many values in a row: a warp reads those of one row, the next warp those of the next.
template <Kind kind>
__global__ void __launch_bounds__(THREADS) along(const void* data, Index rows, Index units, Index inner, double* sums) {
  Values<kind> x(data, rows * units * inner);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Index unit = blockIdx.x;
  double from = begin_of(x, unit, inner);
  Sums found = {};
  for (Index row = Index(blockIdx.y) * WARPS + warp; row < rows; row += gridDim.y * WARPS) {
    Index begin = (row * units + unit) * inner;
#pragma unroll 4
    for (Index i = lane; i < inner; i += 32) found.add(x[begin + i], from);
  }
  Together<5, 1> all = {{found.first, found.second, found.size, double(found.n), double(found.active)}, {0}};
  all.meet();
  if (threadIdx.x) return;
  const double order[] = {all.sums[3], all.sums[0], all.sums[1], all.sums[2], all.sums[4]};
  for (int i = 0; i < 5; i++) atomicAdd(&sums[i * units + unit], order[i]);
}

template <Kind kind>
__global__ void merge_units(const void* data, Index units, Index inner, const double* sums, double* state) {
  Index unit = Index(blockIdx.x) * THREADS + threadIdx.x;
  if (unit >= units || !(sums[unit] > 0)) return;
  double n = sums[unit], first = sums[units + unit], m2 = sums[2 * units + unit] - first * first / n;
  double mean = begin_of(Values<kind>(data, 0), unit, inner) + first / n;
  double before = state[unit], share = n / (before + n), d = mean - state[units + unit];
  state[unit] += n;
  state[units + unit] += d * share;
  state[2 * units + unit] += (m2 > 0 ? m2 : 0) + d * (before * share) * d;
  state[3 * units + unit] += sums[3 * units + unit];
  state[4 * units + unit] += sums[4 * units + unit];
}
