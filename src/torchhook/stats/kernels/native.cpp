// Moments and histograms on the CPU, in one pass over memory: pieces that fit into the cache are read twice there,
// first for their mean, then for the powers of what is left of it.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int LANES = 16, WAYS = 4, PIECE = 8192;
constexpr int64_t WORTH_A_THREAD = 1 << 16;  // fewer values than this are counted before a thread has begun

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

struct BFloat16 { uint16_t bits; };

template <class T> static inline double wide(T x) { return static_cast<double>(x); }
static inline double wide(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

template <class T> static inline Floats load(const T* x) {
  typedef T Vector __attribute__((vector_size(LANES * sizeof(T))));
  Vector values;
  memcpy(&values, x, sizeof(values));
  return __builtin_convertvector(values, Floats);
}
template <> inline Floats load<BFloat16>(const BFloat16* x) {
  typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
  typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
  Halves values;
  memcpy(&values, x, sizeof(values));
  Words words = __builtin_convertvector(values, Words) << 16;
  return reinterpret_cast<Floats&>(words);
}

static inline Floats absolute(Floats v) {
  Ints bits = reinterpret_cast<Ints&>(v) & 0x7fffffff;
  return reinterpret_cast<Floats&>(bits);
}

static inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <class V> static inline double total(const V (&parts)[WAYS]) {
  typedef double Doubles __attribute__((vector_size(LANES * 8)));
  Doubles sums = __builtin_convertvector((parts[0] + parts[1]) + (parts[2] + parts[3]), Doubles);
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
  return sums[0];
}

// In double precision, value by value: for what single precision cannot hold, and for non-finite values.
template <class T> static Row carefully(const T* x, int64_t n) {
  Row row = nothing();
  double sum = 0;
  for (int64_t i = 0; i < n; i++) {
    double value = wide(x[i]);
    row.nan += value != value;
    row.posinf += value == INFINITE;
    row.neginf += value == -INFINITE;
    if (!(std::fabs(value) < INFINITE)) continue;
    sum += value;
    row.abs_sum += std::fabs(value);
    row.zeros += value == 0;
    row.min = value < row.min ? value : row.min;
    row.max = value > row.max ? value : row.max;
  }
  row.count = n;
  double left = finite(row);
  if (!(left > 0)) return row;
  double mean = sum / left, s1 = 0, s2 = 0, s3 = 0, s4 = 0;
  for (int64_t i = 0; i < n; i++) {
    double d = wide(x[i]) - mean;
    if (!(std::fabs(d) < INFINITE)) continue;
    s1 += d;
    s2 += d * d;
    s3 += d * d * d;
    s4 += d * d * d * d;
  }
  Row powers = from_powers(left, mean, 1, s1, s2, s3, s4);
  row.mean = powers.mean, row.m2 = powers.m2, row.m3 = powers.m3, row.m4 = powers.m4;
  return row;
}

template <class T> static Row piece(const T* x, int n) {
  if (n < LANES * WAYS) return carefully(x, n);
  int whole = n - n % (LANES * WAYS);
  Floats sum[WAYS] = {}, size[WAYS] = {}, low[WAYS], high[WAYS];
  Ints zeros[WAYS] = {};
  for (int way = 0; way < WAYS; way++) low[way] = high[way] = load(x + way * LANES);
  for (int i = 0; i < whole; i += LANES * WAYS)
    for (int way = 0; way < WAYS; way++) {
      Floats v = load(x + i + way * LANES);
      sum[way] += v;
      size[way] += absolute(v);
      low[way] = smaller(v, low[way]);
      high[way] = larger(v, high[way]);
      zeros[way] -= v == 0;
    }
  double sizes = total(size);
  if (!(sizes < INFINITE)) return carefully(x, n);
  // Scaled by a power of two, so that the fourth power of something tiny is not nothing.
  int exponent = sizes > 0 ? std::ilogb(sizes / whole) : 0;
  if (exponent < -100 || exponent > 100) return carefully(x, n);
  float centre = total(sum) / whole, scale = std::ldexp(1.0f, -exponent);
  Row row;
  for (bool near = false; !near;) {
    Floats s1[WAYS] = {}, s2[WAYS] = {}, s3[WAYS] = {}, s4[WAYS] = {};
    float shift = -centre * scale;
    for (int i = 0; i < whole; i += LANES * WAYS)
      for (int way = 0; way < WAYS; way++) {
        Floats d = load(x + i + way * LANES) * scale + shift, q = d * d;
        s1[way] += d;
        s2[way] += q;
        s3[way] += q * d;
        s4[way] += q * q;
      }
    double first = total(s1), second = total(s2), fourth = total(s4), m = first / whole;
    if (!(fourth < INFINITE)) return carefully(x, n);
    row = from_powers(whole, centre, scale, first, second, total(s3), fourth);
    // Single precision may have missed the mean of large values by more than they differ.
    float better = row.mean;
    near = better == centre || m * m <= 4 * (second / whole - m * m);
    centre = better;
  }
  row.abs_sum = sizes;
  row.zeros = total(zeros);
  Floats lowest = smaller(smaller(low[0], low[1]), smaller(low[2], low[3]));
  Floats highest = larger(larger(high[0], high[1]), larger(high[2], high[3]));
  for (int lane = 0; lane < LANES; lane++) {
    row.min = lowest[lane] < row.min ? lowest[lane] : row.min;
    row.max = highest[lane] > row.max ? highest[lane] : row.max;
  }
  if (whole < n) merge(row, carefully(x + whole, n - whole));
  return row;
}

template <class T> static Row pieces(const T* x, int64_t n) {
  Row row = nothing();
  for (int64_t i = 0; i < n; i += PIECE) merge(row, piece(x + i, n - i < PIECE ? int(n - i) : PIECE));
  return row;
}
template <> Row pieces<double>(const double* x, int64_t n) { return carefully(x, n); }
template <> Row pieces<int32_t>(const int32_t* x, int64_t n) { return carefully(x, n); }
template <> Row pieces<int64_t>(const int64_t* x, int64_t n) { return carefully(x, n); }

static int parts_of(int64_t n, int threads) {
  int64_t most = n / WORTH_A_THREAD;
  return most < 1 ? 1 : most < threads ? int(most) : threads;
}

template <class T> static void moments(const void* data, int64_t n, int threads, Row* row) {
  const T* x = static_cast<const T*>(data);
  int parts = parts_of(n, threads);
  if (parts == 1) return merge(*row, pieces(x, n));
  std::vector<Row> rows(parts);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int part = 0; part < parts; part++) {
    int64_t begin = n * part / parts, end = n * (part + 1) / parts;
    rows[part] = pieces(x + begin, end - begin);
  }
  for (const Row& part : rows) merge(*row, part);
}

// The bin of a value is the first eleven bits of it as a float.
template <class T> static inline uint32_t bin(T x) {
  float value = wide(x);
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits >> 21;
}
template <> inline uint32_t bin<BFloat16>(BFloat16 x) { return x.bits >> 5; }
template <> inline uint32_t bin<double>(double x) {
  float value = x;  // rounded to the nearest, which may lie beyond an edge: cut off instead
  if (std::fabs(double(value)) > std::fabs(x)) value = std::nextafterf(value, 0.0f);
  if (std::fabs(x) == INFINITE) value = x;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits >> 21;
}

template <> inline uint32_t bin<int32_t>(int32_t x) { return bin(double(x)); }
template <> inline uint32_t bin<int64_t>(int64_t x) { return bin(double(x)); }

template <class T> static void count(const T* x, int64_t n, double* bins) {
  std::vector<uint32_t> found(2048 * WAYS);  // several, for one that is written to has to be waited for
  for (int64_t begin = 0; begin < n; begin += 1 << 30) {
    int64_t end = n - begin < 1 << 30 ? n : begin + (1 << 30);
    for (int64_t i = begin; i < end; i++) found[(i % WAYS) * 2048 + bin(x[i])]++;
    for (int i = 0; i < 2048; i++)
      for (int way = 0; way < WAYS; way++) {
        bins[i] += found[way * 2048 + i];
        found[way * 2048 + i] = 0;
      }
  }
}

template <class T> static void histogram(const void* data, int64_t n, int threads, double* bins) {
  const T* x = static_cast<const T*>(data);
  int parts = parts_of(n, threads);
  if (parts == 1) return count(x, n, bins);
  std::vector<double> found(2048 * parts);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int part = 0; part < parts; part++) {
    int64_t begin = n * part / parts, end = n * (part + 1) / parts;
    count(x + begin, end - begin, &found[2048 * part]);
  }
  for (int i = 0; i < 2048 * parts; i++) bins[i % 2048] += found[i];
}

#define OFFERED(name, T)                                                                                  \
  extern "C" void moments_##name(const void* x, int64_t n, int threads, double* row) {                    \
    moments<T>(x, n, threads, reinterpret_cast<Row*>(row));                                               \
  }                                                                                                       \
  extern "C" void histogram_##name(const void* x, int64_t n, int threads, double* bins) {                 \
    histogram<T>(x, n, threads, bins);                                                                    \
  }

OFFERED(float32, float)
OFFERED(bfloat16, BFloat16)
#ifdef __FLT16_MAX__
OFFERED(float16, _Float16)
#endif
OFFERED(float64, double)
OFFERED(int8, int8_t)
OFFERED(uint8, uint8_t)
OFFERED(bool, uint8_t)
OFFERED(int16, int16_t)
OFFERED(int32, int32_t)
OFFERED(int64, int64_t)
