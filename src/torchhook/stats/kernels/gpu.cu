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

  // Calls `vector` and `odd` with all that this thread has to see, after `begin`, and `flush` now and then. The next
  // vectors are on their way while these are looked at. What was written last is seen first: it may be in the cache.
  template <class B, class V, class F, class G>
  __device__ void each(B begin, V vector, F odd, G flush, Index most) const {
    const uint4* last = reinterpret_cast<const uint4*>(data + head * SIZE) + vectors - 1;
    Index step = Index(gridDim.x) * THREADS * AHEAD, end = vectors < most ? vectors : most;
    Index i = Index(blockIdx.x) * THREADS * AHEAD + threadIdx.x;
    uint4 coming[AHEAD], here[AHEAD];
    bool more = i + (AHEAD - 1) * THREADS < end;
    if (more)
#pragma unroll
      for (int k = 0; k < AHEAD; k++) coming[k] = last[-(i + k * THREADS)];
    begin();
    for (int rounds = 1; more; rounds++) {
#pragma unroll
      for (int k = 0; k < AHEAD; k++) here[k] = coming[k];
      i += step;
      more = i + (AHEAD - 1) * THREADS < end;
      if (more)
#pragma unroll
        for (int k = 0; k < AHEAD; k++) coming[k] = last[-(i + k * THREADS)];
#pragma unroll
      for (int k = 0; k < AHEAD; k++) vector(here[k]);
      if (rounds % FLUSH == 0) flush();
    }
    for (int k = 0; k < AHEAD; k++)
      if (i + k * THREADS < end) vector(last[-(i + k * THREADS)]);
    if (blockIdx.x == 0 && threadIdx.x < odd_ones()) odd(odd_one(threadIdx.x));
    flush();
  }

  // The same, value by value.
  template <class F> __device__ void each(F f, Index most) const {
    each([] {},
         [&](const uint4& v) {
#pragma unroll
           for (int l = 0; l < LANES; l++) f(lane(v, l));
         },
         f, [] {}, most);
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
// Two at a time, as they lie there. The counts of zeros are halves as well, and exact as long as they are small.
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
      asm("set.eq.bf16x2.bf16x2 %0, %1, %2;" : "=r"(equal) : "r"(pair), "r"(0u));
      asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(counts) : "r"(equal));
    } else {
      asm("min.f16x2 %0, %0, %1;" : "+r"(lows) : "r"(pair));
      asm("max.f16x2 %0, %0, %1;" : "+r"(highs) : "r"(pair));
      asm("set.eq.f16x2.f16x2 %0, %1, %2;" : "=r"(equal) : "r"(pair), "r"(0u));
      asm("add.f16x2 %0, %0, %1;" : "+r"(counts) : "r"(equal));
    }
  }
  __device__ void add(const uint4& v) { add(v.x), add(v.y), add(v.z), add(v.w); }
  __device__ void flush() {
    const uint4 found = {lows, highs, counts, 0};
    low = fminf(low, fminf(Values<kind>::lane(found, 0), Values<kind>::lane(found, 1)));
    high = fmaxf(high, fmaxf(Values<kind>::lane(found, 2), Values<kind>::lane(found, 3)));
    zeros += unsigned(Values<kind>::lane(found, 4) + Values<kind>::lane(found, 5));
    counts = 0;
  }
};
template <> struct Extremes<BFLOAT16> : Pairs<BFLOAT16> {};
template <> struct Extremes<FLOAT16> : Pairs<FLOAT16> {};
#endif

// What the threads of a block have found, put together in all of them: sums, then the smallest of some.
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
    __syncthreads();  // the one before may still be read
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
      most);
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
  x.each(
      [&](float v) {
        if (!(fabsf(v) < float(INFINITE))) return;
        double d = v - row.mean, q = d * d;
        s2 += q;
        s3 += q * d;
        s4 += q * q;
      },
      most);
  Together<3, 1> powers = {{s2, s3, s4}, {0}};
  powers.meet();
  row.m2 = powers.sums[0];
  row.m3 = powers.sums[1];
  row.m4 = powers.sums[2];
  return row;
}

// Where a block looks from: near the mean of what `row` saw, in units of about its deviation.
struct Place {
  float centre = 0, scale = 1, shift = 0;

  Place() = default;
  __device__ explicit Place(const Row& row) {
    double n = finite(row), variance = n > 0 ? row.m2 / n : 0;
    centre = row.mean;
    double unit = variance > 0 ? sqrt(variance) : fabs(row.mean);
    int exponent = unit > 0 ? ilogb(unit) : 0;
    scale = ldexpf(1.0f, exponent < -120 ? 120 : exponent > 120 ? -120 : -exponent);
    shift = -centre * scale;
  }
};

// In single precision, in one pass; false if that is not good enough.
template <Kind kind> __device__ bool quickly(const Values<kind>& x, const Row& known, Row& row) {
  float s1 = 0, s2 = 0, s3 = 0, s4 = 0, size = 0;
  double t1 = 0, t2 = 0, t3 = 0, t4 = 0, sizes = 0;
  Extremes<kind> extremes;
  Place from;
  auto add = [&](float v) {
    float d = fmaf(v, from.scale, from.shift), q = d * d;
    s1 += d;
    s2 += q;
    s3 = fmaf(q, d, s3);
    s4 = fmaf(q, q, s4);
    size += fabsf(v);
  };
  x.each(
      [&] {
        // A block that saw nothing yet looks at the first vectors.
        from = Place(finite(known) > 0 ? known : carefully(x, Index(gridDim.x) * THREADS * AHEAD));
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
      },
      ALL);
  double n = x.mine();
  if (n == 0) return row = nothing(), true;
  Together<6, 2> all = {{t1, t2, t3, t4, sizes, double(extremes.zeros)}, {extremes.low, -extremes.high}};
  all.meet();
  t1 = all.sums[0], t2 = all.sums[1], t3 = all.sums[2], t4 = all.sums[3], sizes = all.sums[4];
  double m = t1 / n, mean_of_squares = t2 / n, variance = mean_of_squares - m * m;
  bool finite = sizes < INFINITE && t4 < INFINITE;
  bool constant = t1 == 0 && t2 == 0;
  bool near = m * m <= 4 * variance, in_range = mean_of_squares > 1e-12 && mean_of_squares < 1e12;
  if (!finite || !(constant || (near && in_range))) return false;
  row = from_powers(n, from.centre, from.scale, t1, t2, t3, t4);
  row.abs_sum = sizes;
  row.zeros = all.sums[5];
  row.min = all.least[0];
  row.max = -all.least[1];
  return true;
}

template <Kind kind> __global__ void __launch_bounds__(THREADS, 2) moments(const void* data, Index n, Row* rows) {
  Values<kind> x(data, n);
  Row known = rows[blockIdx.x], found;
  if (!quickly(x, known, found)) found = carefully(x, ALL);
  if (threadIdx.x == 0) {
    merge(known, found);
    rows[blockIdx.x] = known;
  }
}

// The bin of a value is the first eleven bits of it as a float. Zeros are so frequent that they are counted apart.
constexpr int BINS = 2048;

template <Kind kind> __global__ void __launch_bounds__(THREADS, 4) histogram(const void* data, Index n, double* bins) {
  __shared__ unsigned found[BINS];
  for (int i = threadIdx.x; i < BINS; i += THREADS) found[i] = 0;
  __syncthreads();
  Values<kind> x(data, n);
  unsigned zeros = 0;
  x.each(
      [&](float v) {
        unsigned bits = __float_as_uint(v);
        if (bits == 0)
          zeros++;
        else
          atomicAdd(&found[bits >> 21], 1u);
      },
      ALL);
  atomicAdd(&found[0], zeros);
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (found[i]) atomicAdd(&bins[i], double(found[i]));
}
