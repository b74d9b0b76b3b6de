// Moments and histograms on a GPU. Every block has a row of its own, which it finds, adds to and leaves behind: no
// block waits for another, and a launch has no tail. The rows are merged when somebody reads them.
//
// Powers are of (x - centre) * scale, in single precision, where centre and scale come from what the block saw before.
// If that turns out to be far from what it sees now, or something is not finite, the block reads its values again in
// double precision. So the result is as good for a mean of 1e6 and a deviation of 1 as for any other.
typedef long long Index;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int AHEAD = 4;  // vectors that a thread has on their way
constexpr int FLUSH = 4;  // rounds of these after which single-precision sums go into double ones

enum Kind { FLOAT32, BFLOAT16, FLOAT16 };

// Some values of one tensor: vectors of 16 bytes, and what is before and after those.
template <Kind kind> struct Values {
  static constexpr int SIZE = kind == FLOAT32 ? 4 : 2, LANES = 16 / SIZE;
  const char* data;
  Index n, head, vectors;

  __device__ Values(const void* x, Index n) : data(static_cast<const char*>(x)), n(n) {
    Index odd = (16 - reinterpret_cast<unsigned long long>(x) % 16) % 16 / SIZE;
    head = odd < n ? odd : n;
    vectors = (n - head) / LANES;
  }

  __device__ uint4 vector(Index i) const { return reinterpret_cast<const uint4*>(data + head * SIZE)[i]; }

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

  // The values outside of vectors: there are fewer than two vectors of them.
  __device__ Index odd_ones() const { return n - vectors * LANES; }
  __device__ float odd_one(Index i) const {
    Index at = i < head ? i : i + vectors * LANES;
    if (kind == FLOAT32) return reinterpret_cast<const float*>(data)[at];
    unsigned short bits = reinterpret_cast<const unsigned short*>(data)[at];
    return kind == BFLOAT16 ? __uint_as_float(unsigned(bits) << 16) : half(bits);
  }

  // How many values the block sees.
  __device__ Index mine() const {
    constexpr Index TILE = THREADS * AHEAD;
    Index tiles = (vectors + TILE - 1) / TILE, block = blockIdx.x, seen = block == 0 ? odd_ones() : 0;
    if (block >= tiles) return seen;
    seen += ((tiles - 1 - block) / gridDim.x + 1) * TILE * LANES;
    bool has_last = (tiles - 1) % gridDim.x == block;
    return has_last ? seen - (tiles * TILE - vectors) * LANES : seen;
  }

  // Calls f with each value that this thread has to see, a few vectors on their way at a time; flush now and then.
  template <class F, class G> __device__ void each(F f, G flush, Index most) const {
    Index step = Index(gridDim.x) * THREADS * AHEAD;
    Index end = vectors < most ? vectors : most;
    int rounds = 0;
    for (Index i = Index(blockIdx.x) * THREADS * AHEAD + threadIdx.x; i < end; i += step) {
      uint4 loaded[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        if (i + k * THREADS < end) loaded[k] = vector(i + k * THREADS);
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        if (i + k * THREADS < end)
#pragma unroll
          for (int l = 0; l < LANES; l++) f(lane(loaded[k], l));
      if (++rounds % FLUSH == 0) flush();
    }
    if (blockIdx.x == 0 && threadIdx.x < odd_ones()) f(odd_one(threadIdx.x));
    flush();
  }
};

// The sum over the threads of a block, for all of them.
template <class T> __device__ T sum(T value) {
  __shared__ T parts[WARPS];
  for (int away = 16; away; away /= 2) value += __shfl_down_sync(~0u, value, away);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  T total = parts[0];
  for (int warp = 1; warp < WARPS; warp++) total += parts[warp];
  return total;
}

__device__ float least(float value) {
  __shared__ float parts[WARPS];
  for (int away = 16; away; away /= 2) value = fminf(value, __shfl_down_sync(~0u, value, away));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float total = parts[0];
  for (int warp = 1; warp < WARPS; warp++) total = fminf(total, parts[warp]);
  return total;
}

constexpr Index ALL = 1ll << 62;

// In double precision, in two passes.
template <Kind kind> __device__ __noinline__ Row carefully(const Values<kind>& x, Index most) {
  double total = 0, size = 0;
  int nan = 0, posinf = 0, neginf = 0, zeros = 0, count = 0;
  float low = INFINITE, high = -INFINITE;
  x.each(
      [&](float v) {
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
      },
      [] {}, most);
  Row row = nothing();
  row.count = sum(double(count));
  row.nan = sum(double(nan));
  row.posinf = sum(double(posinf));
  row.neginf = sum(double(neginf));
  row.zeros = sum(double(zeros));
  row.abs_sum = sum(size);
  row.min = least(low);
  row.max = -least(-high);
  double left = finite(row), mean = sum(total) / (left > 0 ? left : 1);
  double s2 = 0, s3 = 0, s4 = 0;
  x.each(
      [&](float v) {
        if (!(fabsf(v) < float(INFINITE))) return;
        double d = v - mean, q = d * d;
        s2 += q;
        s3 += q * d;
        s4 += q * q;
      },
      [] {}, most);
  row.mean = mean;
  row.m2 = sum(s2);
  row.m3 = sum(s3);
  row.m4 = sum(s4);
  return row;
}

// Where a block looks from: near the mean of what `row` saw, in units of about its deviation.
struct Place {
  float centre, scale;
  __device__ explicit Place(const Row& row) {
    double n = finite(row), variance = n > 0 ? row.m2 / n : 0;
    centre = row.mean;
    double unit = variance > 0 ? sqrt(variance) : fabs(row.mean);
    int exponent = unit > 0 ? ilogb(unit) : 0;
    scale = ldexpf(1.0f, exponent < -120 ? 120 : exponent > 120 ? -120 : -exponent);
  }
};

// In single precision, in one pass; false if that is not good enough.
template <Kind kind> __device__ bool quickly(const Values<kind>& x, Place from, Row& row) {
  float s1 = 0, s2 = 0, s3 = 0, s4 = 0, size = 0, low = INFINITE, high = -INFINITE;
  double t1 = 0, t2 = 0, t3 = 0, t4 = 0, sizes = 0;
  unsigned zeros = 0;
  float shift = from.centre * from.scale;
  x.each(
      [&](float v) {
        float d = fmaf(v, from.scale, -shift), q = d * d;
        s1 += d;
        s2 += q;
        s3 = fmaf(q, d, s3);
        s4 = fmaf(q, q, s4);
        size += fabsf(v);
        low = fminf(low, v);
        high = fmaxf(high, v);
        zeros += v == 0;
      },
      [&] {
        t1 += s1, t2 += s2, t3 += s3, t4 += s4, sizes += size;
        s1 = s2 = s3 = s4 = size = 0;
      },
      ALL);
  double n = x.mine();
  if (n == 0) return row = nothing(), true;
  t1 = sum(t1), t2 = sum(t2), t3 = sum(t3), t4 = sum(t4), sizes = sum(sizes);
  double m = t1 / n, mean_of_squares = t2 / n, variance = mean_of_squares - m * m;
  bool finite = sizes < INFINITE && t4 < INFINITE;
  bool constant = t1 == 0 && t2 == 0;
  bool near = m * m <= 4 * variance, in_range = mean_of_squares > 1e-12 && mean_of_squares < 1e12;
  if (!finite || !(constant || (near && in_range))) return false;
  row = from_powers(n, from.centre, from.scale, t1, t2, t3, t4);
  row.abs_sum = sizes;
  row.zeros = sum(zeros);
  row.min = least(low);
  row.max = -least(-high);
  return true;
}

template <Kind kind> __global__ void __launch_bounds__(THREADS, 4) moments(const void* data, Index n, Row* rows) {
  Values<kind> x(data, n);
  Row known = rows[blockIdx.x], found;
  // A block that saw nothing yet looks at the first vectors.
  Place from(finite(known) > 0 ? known : carefully(x, Index(gridDim.x) * THREADS * AHEAD));
  if (!quickly(x, from, found)) found = carefully(x, ALL);
  if (threadIdx.x == 0) {
    merge(known, found);
    rows[blockIdx.x] = known;
  }
}

// The bin of a value is the first eleven bits of it as a float. Zeros are so frequent that they are counted apart, and
// each bin has several counters, for threads that add to the same one wait for each other.
constexpr int BINS = 2048, COPIES = 4;

template <Kind kind> __global__ void __launch_bounds__(THREADS, 4) histogram(const void* data, Index n, double* bins) {
  __shared__ unsigned found[BINS * COPIES];
  for (int i = threadIdx.x; i < BINS * COPIES; i += THREADS) found[i] = 0;
  __syncthreads();
  Values<kind> x(data, n);
  unsigned zeros = 0, copy = threadIdx.x % COPIES;
  x.each(
      [&](float v) {
        unsigned bits = __float_as_uint(v);
        if (bits == 0)
          zeros++;
        else
          atomicAdd(&found[(bits >> 21) * COPIES + copy], 1u);
      },
      [] {}, ALL);
  atomicAdd(&found[copy], zeros);
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    unsigned total = 0;
    for (int k = 0; k < COPIES; k++) total += found[i * COPIES + k];
    if (total) atomicAdd(&bins[i], double(total));
  }
}
