#include "quantize.h"

#include <math.h>

#include "quantize_internal.h"

#define TARGET
#define ENCODER clb_encoder_portable

#define INLINE static inline __attribute__((always_inline))

#if !defined(CLB_HAVE_NEON)
#define OUTLINE static __attribute__((noinline))  // for old CPUs: not worth what inlining all takes to compile
#else
#define OUTLINE INLINE
#include <arm_neon.h>

typedef int16_t neon_h16 __attribute__((vector_size(32)));
typedef int32_t neon_m8 __attribute__((vector_size(32)));
typedef union {
  neon_h16 all;
  int16x8_t half[2];
} neon_halves;

INLINE neon_h16 neon_scale(neon_h16 a, neon_h16 b) {
  neon_halves x = {a}, y = {b};
  for (int i = 0; i < 2; i++) x.half[i] = vqrdmulhq_s16(x.half[i], y.half[i]);
  return x.all;
}
INLINE neon_m8 neon_dot(neon_h16 a, neon_h16 b) {
  const neon_halves x = {a}, y = {b};
  union {
    neon_m8 all;
    int32x4_t half[2];
  } sum;
  for (int i = 0; i < 2; i++) {
    const int32x4_t low = vmull_s16(vget_low_s16(x.half[i]), vget_low_s16(y.half[i]));
    sum.half[i] = vpaddq_s32(low, vmull_high_s16(x.half[i], y.half[i]));
  }
  return sum.all;
}
#define SCALE_16 neon_scale
#define DOT_16 neon_dot
#endif

#include "quantize_body.h"

// The largest magnitude a type can hold: its largest scale, 65504, times its largest code, times the largest integer
// scale of a group.
static const struct {
  uint32_t type;
  double max;
} limits[] = {
    {CLB_Q4_0, 65504.0 * 8},
    {CLB_Q4_1, 65504.0},
    {CLB_Q5_0, 65504.0 * 16},
    {CLB_Q5_1, 65504.0},
    {CLB_Q8_0, 65504.0 * 127},
    {CLB_Q2_K, 65504.0 * 15 * 3},
    {CLB_Q3_K, 65504.0 * 32 * 4},
    {CLB_Q4_K, 65504.0 * 63 * 15},
    {CLB_Q5_K, 65504.0 * 63 * 31},
    {CLB_Q6_K, 65504.0 * 128 * 32},
    {CLB_IQ4_NL, 65504.0 * 127},
    {CLB_IQ4_XS, 65504.0 * 32 * 127},
    {CLB_F16, 65519.0},  // what is larger rounds to infinity
    {CLB_BF16, 0x1.fefffep127},
};

// Plain floats have no limit but their own: 3.4e38.
static float limit_of(uint32_t type) {
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
    if (limits[i].type == type) return (float)limits[i].max;
  }
  return 0x1.fffffep127f;
}

static bool is_float(uint32_t type) {
  return type == CLB_F32 || type == CLB_F16 || type == CLB_BF16;
}

bool clb_can_quantize(uint32_t type) {
  return is_float(type) || clb_encoder_portable(type) != NULL;
}

// The first of n weights that is not finite or beyond the limit; UINT64_MAX when there is none.
static uint64_t find_beyond(const float *x, uint64_t n, float limit) {
  enum { STEP = 1024 };
  for (uint64_t first = 0; first < n; first += STEP) {
    const uint64_t end = n - first < STEP ? n : first + STEP;
    uint32_t beyond = 0;
    for (uint64_t i = first; i < end; i++) beyond |= !(fabsf(x[i]) <= limit);
    for (uint64_t i = first; beyond && i < end; i++) {
      if (!(fabsf(x[i]) <= limit)) return i;
    }
  }
  return UINT64_MAX;
}

int clb_quantize_rows(const clb_kernels *k, uint32_t type, clb_effort effort, const float *x, size_t n_rows,
                      size_t n_cols, const float *importance, void *dst, uint64_t *bad) {
  const clb_type *t = clb_type_by_id(type);
  if (!t || !clb_can_quantize(type) || n_cols % t->block_weights != 0) return -1;
  const size_t n = n_rows * n_cols;
  *bad = find_beyond(x, n, limit_of(type));
  if (*bad != UINT64_MAX) return 1;
  if (type == CLB_F32) memcpy(dst, x, n * sizeof *x);
  if (type == CLB_F16) clb_f32_to_f16(k, dst, x, n);
  if (type == CLB_BF16) clb_f32_to_bf16(k, dst, x, n);
  if (is_float(type)) return 0;
  clb_encode_fn *encode = k == clb_kernels_scalar() ? NULL : clb_encoder_avx2(type);
  if (!encode) encode = clb_encoder_portable(type);
  const clb_encode_context context = {effort, importance, n_cols / t->block_weights};
  encode(&context, x, n / t->block_weights, dst);
  return 0;
}

int clb_quantize_rows_best(uint32_t type, clb_effort effort, const float *x, size_t n_rows, size_t n_cols,
                           const float *importance, void *dst, uint64_t *bad) {
  return clb_quantize_rows(clb_kernels_best(), type, effort, x, n_rows, n_cols, importance, dst, bad);
}

enum { LOSS_STEP = 1024, LOSS_LANES = 8 };

// Lane by lane, so that the order of sums is one for every instruction set.
static void add_loss(const float *x, const float *y, const float *importance, size_t n, double lanes[4][LOSS_LANES]) {
  for (size_t i = 0; i < n; i++) {
    const double difference = (double)x[i] - (double)y[i], w = importance ? (double)importance[i] : 1;
    const double error = difference * difference, weight = (double)x[i] * (double)x[i];
    const size_t lane = i % LOSS_LANES;
    lanes[0][lane] += error;
    lanes[1][lane] += weight;
    lanes[2][lane] += w * error;
    lanes[3][lane] += w * weight;
  }
}

int clb_add_loss(uint32_t type, const void *encoded, const float *x, size_t n_rows, size_t n_cols,
                 const float *importance, clb_loss *loss) {
  const clb_type *t = clb_type_by_id(type);
  if (!t || !clb_can_quantize(type) || n_cols % t->block_weights != 0) return -1;
  const uint8_t *src = encoded;
  double lanes[4][LOSS_LANES] = {{0}};
  float decoded[LOSS_STEP];
  for (size_t row = 0; row < n_rows; row++) {
    for (size_t first = 0; first < n_cols; first += LOSS_STEP) {
      const size_t n = n_cols - first < LOSS_STEP ? n_cols - first : LOSS_STEP;
      (void)clb_dequantize_best(type, src, decoded, n);
      add_loss(x, decoded, importance ? importance + first : NULL, n, lanes);
      src += n / t->block_weights * t->block_bytes;
      x += n;
    }
  }
  double *sums[4] = {&loss->error, &loss->weight, &loss->important_error, &loss->important_weight};
  for (int k = 0; k < 4; k++) {
    for (int lane = 0; lane < LOSS_LANES; lane++) *sums[k] += lanes[k][lane];
  }
  return 0;
}

enum { CONVERT_STEP = 4096, MAX_BLOCK = 256 };

// Weights `first` to `first` + n_rows * n_cols, at most CONVERT_STEP; the importance is that of their columns.
static int convert_piece(const clb_conversion *c, size_t first, size_t n_rows, size_t n_cols, const float *importance,
                         uint64_t *bad, clb_loss *loss) {
  const clb_type *from = clb_type_by_id(c->from), *to = clb_type_by_id(c->type);
  const size_t block = from->block_weights, begin = (c->skip + first) / block * block;
  const size_t end = (c->skip + first + n_rows * n_cols + block - 1) / block * block;
  float buffer[CONVERT_STEP + 2 * MAX_BLOCK];
  const uint8_t *src = (const uint8_t *)c->src + begin / block * from->block_bytes;
  uint8_t *dst = (uint8_t *)c->dst + first / to->block_weights * to->block_bytes;
  if (clb_dequantize_best(c->from, src, buffer, end - begin) != 0) return -1;
  const float *x = buffer + (c->skip + first - begin);
  const int status = clb_quantize_rows_best(c->type, c->effort, x, n_rows, n_cols, importance, dst, bad);
  if (status == 1) *bad += first;
  if (status != 0 || !loss) return status;
  return clb_add_loss(c->type, dst, x, n_rows, n_cols, importance, loss);
}

int clb_convert_rows(const clb_conversion *c, uint64_t *bad, clb_loss *loss) {
  const clb_type *from = clb_type_by_id(c->from), *to = clb_type_by_id(c->type);
  if (!from || !to || from->block_weights > MAX_BLOCK || c->n_cols % to->block_weights != 0) return -1;
  const size_t rows_at_once = c->n_cols < CONVERT_STEP && c->n_cols > 0 ? CONVERT_STEP / c->n_cols : 1;
  for (size_t row = 0; row < c->n_rows; row += rows_at_once) {
    const size_t n_rows = c->n_rows - row < rows_at_once ? c->n_rows - row : rows_at_once;
    for (size_t column = 0; column < c->n_cols; column += CONVERT_STEP) {
      const size_t n_cols = c->n_cols - column < CONVERT_STEP ? c->n_cols - column : CONVERT_STEP;
      const float *importance = c->importance ? c->importance + column : NULL;
      const int status = convert_piece(c, row * c->n_cols + column, n_rows, n_cols, importance, bad, loss);
      if (status != 0) return status;
    }
  }
  return 0;
}
