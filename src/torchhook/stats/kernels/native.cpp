// Moments, histograms and statistics of units on the CPU, in one pass over memory. Where it helps, pieces that fit into
// the cache are read twice: first for their mean, then for the powers of the distances from it.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
#endif

// Vectors are as wide as those of the processor: compilers split wider ones into scalars.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int WAYS = 4, WIDE = LANES * WAYS, PIECE = 128 * WIDE;  // sums of more values would round too much
constexpr int64_t WORTH_A_THREAD = 1 << 16;  // fewer values take less time than starting a thread

template <class T, int N> struct VectorOf { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <class T, int N> using Vector = typename VectorOf<T, N>::type;
template <class V> using Number = std::decay_t<decltype(V()[0])>;
template <class V> using Mask = decltype(V() < V());
template <class V> constexpr int lanes = sizeof(V) / sizeof(Number<V>);

typedef Vector<float, LANES> Floats;
typedef Vector<int32_t, LANES> Ints;
typedef Vector<double, LANES / 2> Doubles;

struct BFloat16 { uint16_t bits; };

template <class T> static inline double wide(T x) { return static_cast<double>(x); }
static inline double wide(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

template <class V, class T> static inline V load(const T* x) {
  Vector<T, lanes<V>> values;
  memcpy(&values, x, sizeof(values));
  return __builtin_convertvector(values, V);
}
template <class V> static inline V load(const BFloat16* x) {
  Vector<uint16_t, lanes<V>> values;
  memcpy(&values, x, sizeof(values));
  auto words = __builtin_convertvector(values, Vector<uint32_t, lanes<V>>) << 16;
  return __builtin_convertvector((Vector<float, lanes<V>>)words, V);
}
// Compilers convert a vector of float16 value by value, which takes about nine times as long.
#if defined(__FLT16_MAX__) && defined(__AVX512F__)
template <> inline Floats load<Floats>(const _Float16* x) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
}
#elif defined(__FLT16_MAX__) && defined(__F16C__)
template <> inline Floats load<Floats>(const _Float16* x) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
}
#endif

template <class V> static inline V absolute(V v) {
  return (V)((Mask<V>)v & std::numeric_limits<Number<Mask<V>>>::max());
}

static inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <class V> static inline double total(const V (&parts)[WAYS]) {
  auto sums = __builtin_convertvector((parts[0] + parts[1]) + (parts[2] + parts[3]), Vector<double, LANES>);
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
  return sums[0];
}

// In double precision, value by value: for values beyond single precision, and for those that are not finite.
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
  if (n < WIDE) return carefully(x, n);
  int whole = n - n % (WIDE);
  Floats sum[WAYS] = {}, size[WAYS] = {}, low[WAYS], high[WAYS];
  Ints zeros[WAYS] = {};
  for (int way = 0; way < WAYS; way++) low[way] = high[way] = load<Floats>(x + way * LANES);
  for (int i = 0; i < whole; i += WIDE)
    for (int way = 0; way < WAYS; way++) {
      Floats v = load<Floats>(x + i + way * LANES);
      sum[way] += v;
      size[way] += absolute(v);
      low[way] = smaller(v, low[way]);
      high[way] = larger(v, high[way]);
      zeros[way] -= v == 0;
    }
  double sizes = total(size);
  if (!(sizes < INFINITE)) return carefully(x, n);
  // Scaled by a power of two, so that the fourth power of a tiny value does not underflow.
  int exponent = sizes > 0 ? std::ilogb(sizes / whole) : 0;
  if (exponent < -100 || exponent > 100) return carefully(x, n);
  float centre = total(sum) / whole, scale = std::ldexp(1.0f, -exponent);
  Row row;
  for (bool near = false; !near;) {
    Floats s1[WAYS] = {}, s2[WAYS] = {}, s3[WAYS] = {}, s4[WAYS] = {};
    float shift = -centre * scale;
    for (int i = 0; i < whole; i += WIDE)
      for (int way = 0; way < WAYS; way++) {
        Floats d = load<Floats>(x + i + way * LANES) * scale + shift, q = d * d;
        s1[way] += d;
        s2[way] += q;
        s3[way] += q * d;
        s4[way] += q * q;
      }
    double first = total(s1), second = total(s2), fourth = total(s4), m = first / whole;
    if (!(fourth < INFINITE)) return carefully(x, n);
    row = from_powers(whole, centre, scale, first, second, total(s3), fourth);
    // In single precision, the error of the mean of large values may exceed their differences.
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

// The bin of a value is given by its first eleven bits as a float.
template <class T> static inline uint32_t bin(T x) {
  float value = wide(x);
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits >> 21;
}
template <> inline uint32_t bin<BFloat16>(BFloat16 x) { return x.bits >> 5; }
template <> inline uint32_t bin<double>(double x) {
  float value = x;  // rounding may cross an edge: truncate instead
  if (std::fabs(double(value)) > std::fabs(x)) value = std::nextafterf(value, 0.0f);
  if (std::fabs(x) == INFINITE) value = x;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits >> 21;
}

template <> inline uint32_t bin<int32_t>(int32_t x) { return bin(double(x)); }
template <> inline uint32_t bin<int64_t>(int64_t x) { return bin(double(x)); }

template <class T> static void count(const T* x, int64_t n, double* bins) {
  for (int64_t begin = 0; begin < n; begin += 1 << 30) {
    uint32_t found[WAYS][2048] = {};  // several copies, so that a write need not wait for the last
    int64_t i = begin, end = n - begin < 1 << 30 ? n : begin + (1 << 30);
    for (; i + WAYS <= end; i += WAYS)
      for (int way = 0; way < WAYS; way++) found[way][bin(x[i + way])]++;
    for (; i < end; i++) found[0][bin(x[i])]++;
    for (int number = 0; number < 2048; number++)
      for (int way = 0; way < WAYS; way++) bins[number] += found[way][number];
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

// Statistics of units. In memory a tensor is rows, in which every unit has `inner` values side by side. Sums are of the
// distances from a centre, which is the mean of earlier values. If that turns out to be far from the current ones, the
// block of values, which is still in the cache, is read again with a better centre.
constexpr int ROWS = 128, COLUMNS = 256;  // of a block where `inner` is small
constexpr int MOST = COLUMNS + WIDE;      // columns of a block whose last unit is a whole one

// Rows with the same units. If the units are few, several rows count as one in which they are repeated.
template <class T> struct Block {
  const T* x;
  int64_t stride;  // from row to row
  int rows, times, units, inner;
};

// Of finite values: count, sum of distances, of their squares, of absolutes, and the count of those above zero.
struct Sums {
  double n, first, second, size, active;
};

template <class V> struct VectorSums {
  V first, second, size;
  Mask<V> n, active;

  inline void add(V v, V centre, Mask<V> which) {
    V known = absolute(v);
    which &= known <= std::numeric_limits<Number<V>>::max();
    V d = which ? v - centre : V{};
    first += d;
    second += d * d;
    size += which ? known : V{};
    n -= which;  // true is -1
    active -= which & (v > 0);
  }

  inline void add(const VectorSums& other) {
    first += other.first;
    second += other.second;
    size += other.size;
    n += other.n;
    active += other.active;
  }

  inline void add_to(Sums& sums, int lane) const {
    sums.n += n[lane];
    sums.first += first[lane];
    sums.second += second[lane];
    sums.size += size[lane];
    sums.active += active[lane];
  }
};

// For one unit, whose values in each row fill vectors.
template <class V, class T> static Sums along(const Block<T>& block, Number<V> at) {
  constexpr int L = lanes<V>, STEP = L * WAYS;
  VectorSums<V> parts[WAYS] = {}, rest = {};
  V centre = V{} + at;
  Mask<V> all = ~Mask<V>{}, number;
  for (int lane = 0; lane < L; lane++) number[lane] = lane;
  for (int row = 0; row < block.rows; row++) {
    const T* x = block.x + row * block.stride;
    int i = 0;
    for (; i + STEP <= block.inner; i += STEP)
      for (int way = 0; way < WAYS; way++) parts[way].add(load<V>(x + i + way * L), centre, all);
    for (; i + L <= block.inner; i += L) rest.add(load<V>(x + i), centre, all);
    // The last vector ends where the row ends: count only what is new in it.
    if (i < block.inner) rest.add(load<V>(x + block.inner - L), centre, number >= L - block.inner % L);
  }
  for (const VectorSums<V>& part : parts) rest.add(part);
  Sums sums = {};
  for (int lane = 0; lane < L; lane++) rest.add_to(sums, lane);
  return sums;
}

// For many units with a few values in each row: by column first.
template <class V, class T> static void across(const Block<T>& block, const Number<V>* centres, Sums* sums) {
  constexpr int L = lanes<V>, STEP = L * WAYS, AHEAD = 8;
  Number<V> centre_of[MOST];
  VectorSums<V> found[MOST / L + WAYS];
  int columns = 0;
  for (int time = 0; time < block.times; time++)
    for (int unit = 0; unit < block.units; unit++)
      for (int i = 0; i < block.inner; i++) centre_of[columns++] = centres[unit];
  int odd = columns % STEP, even = columns - odd, again = odd ? STEP - odd : 0;  // the last step reads some twice
  for (int begin = 0; begin < columns; begin += STEP) {
    int here = begin < even ? begin : begin - again;
    V centre[WAYS];
    memcpy(centre, centre_of + here, sizeof(centre));
    VectorSums<V> parts[WAYS] = {};
    for (int row = 0; row < block.rows; row++) {
      const T* x = block.x + row * block.stride + here;
      for (int way = 0; way < WAYS; way++) __builtin_prefetch(x + AHEAD * block.stride + way * L);
      for (int way = 0; way < WAYS; way++) parts[way].add(load<V>(x + way * L), centre[way], ~Mask<V>{});
    }
    memcpy(found + begin / L, parts, sizeof(parts));
  }
  for (int unit = 0; unit < block.units; unit++) sums[unit] = {};
  for (int time = 0, column = 0; time < block.times; time++)
    for (int unit = 0; unit < block.units; unit++) {
      Sums whole = sums[unit];
      for (int i = 0; i < block.inner; i++, column++) {
        int at = column < even ? column : column + again;
        found[at / L].add_to(whole, at % L);
      }
      sums[unit] = whole;
    }
}

// Whether single precision was enough: no sum overflows, and no square underflows.
static inline bool is_right(const Sums& sums) {
  bool is_small = (sums.size > 0 && sums.size < 1e-15 * sums.n) || (sums.second > 0 && sums.second < 1e-30 * sums.n);
  return sums.size < INFINITE && sums.second < INFINITE && !is_small;
}

// Whether the centre is at most two deviations away from the mean.
static inline bool is_near(const Sums& sums) {
  return sums.second < INFINITE && 5 * sums.first * sums.first <= 4 * sums.second * sums.n;
}

// The state has five numbers for each of `all` units: count, mean, m2, sum of absolutes, count above zero.
static inline void merge(double* state, int64_t all, double n, double mean, double m2, double size, double active) {
  if (!(n > 0)) return;
  double before = state[0], share = n / (before + n), d = mean - state[all];
  state[0] += n;
  state[all] += d * share;
  state[2 * all] += m2 + d * (before * share) * d;
  state[3 * all] += size;
  state[4 * all] += active;
}

// Adds a block to the state of its first unit and the next ones; returns false, and adds nothing, if V is too narrow.
template <class V, class T> static bool added(const Block<T>& block, double* state, int64_t all) {
  Number<V> centres[MOST];
  Sums sums[MOST];
  for (int unit = 0; unit < block.units; unit++) centres[unit] = state[all + unit];
  bool near = false;
  for (int round = 0; round < 4 && !near; round++) {
    for (int unit = 0; round && unit < block.units; unit++)
      centres[unit] += sums[unit].first / sums[unit].n;  // NaN if no value counts, and then it is not used
    if (block.inner < WIDE)
      across<V>(block, centres, sums);
    else
      sums[0] = along<V>(block, centres[0]);
    near = true;
    for (int unit = 0; unit < block.units; unit++) {
      if (std::is_same<V, Floats>::value && !is_right(sums[unit])) return false;
      near &= is_near(sums[unit]);
    }
  }
  for (int unit = 0; unit < block.units; unit++) {
    const Sums& found = sums[unit];
    double m = found.first / found.n, m2 = found.second - found.first * m;
    merge(state + unit, all, found.n, centres[unit] + m, m2 < 0 ? 0 : m2, found.size, found.active);
  }
  return true;
}

template <class T> constexpr bool is_single = std::is_same<T, float>::value || std::is_same<T, BFloat16>::value;
#ifdef __FLT16_MAX__
template <> constexpr bool is_single<_Float16> = true;
#endif

template <class T> static void add(const Block<T>& block, double* state, int64_t all) {
  if constexpr (is_single<T>)
    if (added<Floats>(block, state, all)) return;
  int columns = block.times * block.units * block.inner;
  std::vector<double> values(block.rows * columns);
  for (int row = 0; row < block.rows; row++)
    for (int i = 0; i < columns; i++) values[row * columns + i] = wide(block.x[row * block.stride + i]);
  added<Doubles>(Block<double>{values.data(), columns, block.rows, block.times, block.units, block.inner}, state, all);
}
template <> void add<double>(const Block<double>& block, double* state, int64_t all) {
  added<Doubles>(block, state, all);
}

// A tensor in memory.
template <class T> struct Values {
  const T* x;
  int64_t rows, units, inner;
};

static inline int fewer(int64_t a, int64_t b) { return a < b ? a : b; }

// Some units, whose values in a row fill vectors.
template <class T> static void add_long(const Values<T>& v, int64_t begin, int64_t end, double* state) {
  int64_t stride = v.units * v.inner, many = v.inner < PIECE ? PIECE / v.inner : 1, pieces = (v.inner - 1) / PIECE + 1;
  for (int64_t row = 0; row < v.rows; row += many)
    for (int64_t unit = begin; unit < end; unit++)
      for (int64_t i = 0; i < pieces; i++) {
        int64_t first = v.inner * i / pieces, last = v.inner * (i + 1) / pieces;
        const T* x = v.x + row * stride + unit * v.inner + first;
        add(Block<T>{x, stride, fewer(many, v.rows - row), 1, 1, int(last - first)}, state + unit, v.units);
      }
}

// Some units with a few values in a row. If together they do not fill a vector, they are all the units.
template <class T> static void add_short(const Values<T>& v, int64_t begin, int64_t end, double* state) {
  int64_t stride = v.units * v.inner, units = end - begin, columns = units * v.inner;
  int64_t blocks = (columns - 1) / COLUMNS + 1, enough = (WIDE - 1) / columns + 1;
  int times = enough == 1 ? 1 : fewer(COLUMNS / columns, v.rows < enough ? enough : v.rows), inner = v.inner;
  for (int64_t row = 0; row + times <= v.rows; row += ROWS * times)
    for (int64_t i = 0; i < blocks; i++) {
      int64_t first = begin + units * i / blocks, last = begin + units * (i + 1) / blocks;
      const T* x = v.x + row * stride + first * inner;
      int rows = fewer(ROWS, (v.rows - row) / times);
      add(Block<T>{x, times * stride, rows, times, int(last - first), inner}, state + first, v.units);
    }
  int left = v.rows % times * columns;
  if (!left) return;
  double padded[COLUMNS];  // filled up with values that do not count
  const T* x = v.x + v.rows * stride - left;
  for (int i = 0; i < times * columns; i++) padded[i] = i < left ? wide(x[i]) : NAN;
  add(Block<double>{padded, 0, 1, times, int(units), inner}, state, units);
}

template <class T> static void add_units(const Values<T>& v, int64_t begin, int64_t end, double* state) {
  if (v.inner < WIDE) return add_short(v, begin, end, state);
  add_long(v, begin, end, state);
}

template <class T> static void channels(const Values<T>& v, int threads, double* state) {
  int parts = parts_of(v.rows * v.units * v.inner, threads);
  if (parts == 1) return add_units(v, 0, v.units, state);
  if (v.units >= v.rows && v.units / parts * v.inner >= WIDE) {
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int part = 0; part < parts; part++)
      add_units(v, v.units * part / parts, v.units * (part + 1) / parts, state);
    return;
  }
  std::vector<double> states(parts * 5 * v.units);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int part = 0; part < parts; part++) {
    int64_t begin = v.rows * part / parts, end = v.rows * (part + 1) / parts;
    Values<T> mine{v.x + begin * v.units * v.inner, end - begin, v.units, v.inner};
    add_units(mine, 0, v.units, &states[part * 5 * v.units]);
  }
  for (int part = 0; part < parts; part++)
    for (int64_t unit = 0; unit < v.units; unit++) {
      const double* x = &states[part * 5 * v.units + unit];
      merge(state + unit, v.units, x[0], x[v.units], x[2 * v.units], x[3 * v.units], x[4 * v.units]);
    }
}

#define OFFERED(name, T)                                                                                  \
  extern "C" void moments_##name(const void* x, int64_t n, int threads, double* row) {                    \
    moments<T>(x, n, threads, reinterpret_cast<Row*>(row));                                               \
  }                                                                                                       \
  extern "C" void histogram_##name(const void* x, int64_t n, int threads, double* bins) {                 \
    histogram<T>(x, n, threads, bins);                                                                    \
  }                                                                                                       \
  extern "C" void channels_##name(const void* x, int64_t rows, int64_t units, int64_t inner, int threads, \
                                  double* state) {                                                        \
    channels<T>({static_cast<const T*>(x), rows, units, inner}, threads, state);                          \
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
