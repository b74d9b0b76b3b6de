// The moments of some values, and how to merge those of two parts. Shared by native.cpp and gpu.cu.
#ifdef __CUDACC__
#define HERE __device__ inline
#define INFINITE __longlong_as_double(0x7ff0000000000000)
#else
#define HERE static inline
#define INFINITE __builtin_huge_val()
#endif

// The fields of torchhook.stats.kernels.plain.FIELDS, in that order. Moments are over the finite values.
struct Row {
  double count, nan, posinf, neginf, zeros, mean, abs_sum, m2, m3, m4, min, max;
};

HERE Row nothing() { return Row{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, INFINITE, -INFINITE}; }

HERE double finite(const Row& row) { return row.count - row.nan - row.posinf - row.neginf; }

// The row of n finite values whose powers, of (x - centre) * scale, have these sums.
HERE Row from_powers(double n, double centre, double scale, double s1, double s2, double s3, double s4) {
  Row row = nothing();
  double m = s1 / n, unit = 1 / scale;
  row.count = n;
  row.mean = centre + m * unit;
  row.m2 = (s2 - n * m * m) * unit * unit;
  if (!(row.m2 > 0)) row.m2 = 0;
  row.m3 = (s3 - 3 * m * s2 + 2 * n * m * m * m) * unit * unit * unit;
  row.m4 = (s4 - 4 * m * s3 + 6 * m * m * s2 - 3 * n * m * m * m * m) * unit * unit * unit * unit;
  if (!(row.m4 > 0)) row.m4 = 0;
  return row;
}

HERE void merge(Row& a, const Row& b) {
  double na = finite(a), nb = finite(b), n = na + nb;
  if (nb > 0) {
    double d = b.mean - a.mean, share = nb / n;
    if (!(na > 0)) d = b.mean, share = 1;
    double da = -d * share, db = d * (1 - share);  // distances of the old means from the new one
    double m4 = a.m4 + 4 * da * a.m3 + 6 * da * da * a.m2 + na * da * da * da * da;
    double m3 = a.m3 + 3 * da * a.m2 + na * da * da * da;
    double m2 = a.m2 + na * da * da;
    a.m4 = m4 + b.m4 + 4 * db * b.m3 + 6 * db * db * b.m2 + nb * db * db * db * db;
    a.m3 = m3 + b.m3 + 3 * db * b.m2 + nb * db * db * db;
    a.m2 = m2 + b.m2 + nb * db * db;
    a.mean += d * share;
    a.min = b.min < a.min ? b.min : a.min;
    a.max = b.max > a.max ? b.max : a.max;
  }
  a.count += b.count;
  a.nan += b.nan;
  a.posinf += b.posinf;
  a.neginf += b.neginf;
  a.zeros += b.zeros;
  a.abs_sum += b.abs_sum;
}
