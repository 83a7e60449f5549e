// The encoders, written once for every instruction set: included by quantize.c (portable) and quantize_avx2.c.
//
// Groups of weights that share a scale are encoded eight at a time: lane g of a vector belongs to group g, and element
// j of every group is handled at the same moment. So no sum of floats runs across lanes, every lane sees its operations
// in one order, and any instruction set gives the same bits, as long as none fuses a multiplication with an addition.
#include "quantize_search.h"

// ---------------------------------------------------------------------------------------------------------------------
// Simple types: eight quant blocks of 32 at a time, each with scales of its own

typedef struct {
  m8 q[32];
  uint8_t rows[LANES][32];
} codes32;

INLINE void load_blocks(groups *g, const clb_encode_context *c, const float *x, size_t block, size_t n_blocks) {
  const float *importance[LANES] = {NULL};
  for (size_t i = 0; i < n_blocks && c->importance; i++) {
    importance[i] = c->importance + (block + i) % c->row_blocks * 32;
  }
  load_groups(g, x + block * 32, c->importance ? importance : NULL, 32, (int)n_blocks);
}

INLINE bool is_searched(const clb_encode_context *c) {
  return c->importance || c->effort == CLB_EFFORT_BEST;
}

INLINE void put_nibbles(uint8_t *dst, const uint8_t codes[32]) {
  for (int j = 0; j < 16; j++) dst[j] = (uint8_t)((codes[j] & 15) | codes[j + 16] << 4);
}
// Bit j of lane i is bit 4 of lane i of q[j].
INLINE m8 fifth_bits(const m8 q[32]) {
  m8 bits = {0};
  for (int j = 0; j < 32; j++) bits |= (m8)((u8)(q[j] >> 4 & 1) << j);
  return bits;
}

// gguf's encoder of q4_0 and q5_0: the peak is the lowest code, `half` from the middle.
INLINE v8 symmetric_reference(const groups *g, m8 *q, float half) {
  const v8 scale = peak_of(g) / splat(-half), inv = inverse(scale);
  for (int j = 0; j < 32; j++) {
    q[j] = __builtin_convertvector(vector_min(g->x[j] * inv + splat(half + 0.5f), splat(2 * half - 1)), m8);
  }
  return scale;
}

// Ends of the range of codes, `first` and so on within or beyond it.
INLINE candidates both_ends(const code_set *c, int n_steps, float first, float step) {
  candidates t = {.n = 2 * n_steps};
  for (int i = 0; i < n_steps; i++) {
    t.steps[2 * i] = (float)c->low - (first + step * (float)i);
    t.steps[2 * i + 1] = (float)c->high + (first + step * (float)i);
  }
  return t;
}
INLINE candidates upper_end(const code_set *c, int n_steps, float first, float step) {
  candidates t = {.n = n_steps};
  for (int i = 0; i < n_steps; i++) t.steps[i] = (float)c->high + (first + step * (float)i);
  return t;
}

// A scale that is searched, as it is stored, and its codes plus `zero`, which is even.
INLINE v8 symmetric_best(const groups *g, m8 *q, const code_set *set, const candidates *t, int zero) {
  fixed f;
  v8 found;
  scale_search(&f, g, set, t, &found);
  const v8 scale = f16_round_lanes(found), inv = inverse(scale);
  for (int j = 0; j < 32; j++) q[j] = low_bits(code_value(set, g->x[j] * inv), (float)zero);
  return scale;
}
INLINE candidates plan_symmetric(const clb_encode_context *c, const code_set *set) {
  const bool best = c->effort == CLB_EFFORT_BEST;
  return both_ends(set, best ? 32 : 20, -1.6f, best ? 0.1f : 0.15f);
}

INLINE void encode_symmetric(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst, bool five) {
  const int half = five ? 16 : 8;
  const size_t block_bytes = five ? 22 : 18;
  const code_set set = {-half, half - 1, NULL};
  const candidates t = is_searched(c) ? plan_symmetric(c, &set) : (candidates){0};
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    const v8 scale =
        is_searched(c) ? symmetric_best(&g, codes.q, &set, &t, half) : symmetric_reference(&g, codes.q, (float)half);
    store_rows(codes.rows, codes.q);
    const m8 fifth = five ? fifth_bits(codes.q) : (m8){0};
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * block_bytes;
      const int32_t bits = fifth[i];
      store_f16(to, scale[i]);
      if (five) memcpy(to + 2, &bits, sizeof bits);
      put_nibbles(to + (five ? 6 : 2), codes.rows[i]);
    }
  }
}

// Scales and bases are stored as binary16, which can undo what the search found where the base is far from zero: so the
// rounded ones are compared, those of the plain range among them.
INLINE affine affine_best(const groups *g, const code_set *set, const candidates *t) {
  const float q_max = (float)set->high;
  fixed f;
  v8 low, high;
  affine found;
  affine_search(&f, g, set, false, t, &found);
  range_of(g, &low, &high);
  affine best = {.scale = f16_round_lanes((high - low) / splat(q_max)), .base = f16_round_lanes(low)};
  best.gain = -affine_error(g, best.scale, best.base, q_max);
  affine other = {.scale = f16_round_lanes(found.scale), .base = f16_round_lanes(found.base)};
  for (int round = 0; round < 3; round++) {
    other.gain = -affine_error(g, other.scale, other.base, q_max);
    keep_better(&best, &other);
    other.base = best.base;  // next: the scale that fits this base
    other.scale = f16_round_lanes(affine_scale_fit(g, inverse(best.scale), best.base, q_max));
  }
  return best;
}

// gguf's encoder of q4_1 and q5_1.
INLINE affine affine_reference(const groups *g, m8 *q, float q_max) {
  v8 low, high;
  range_of(g, &low, &high);
  const v8 scale = (high - low) / splat(q_max), inv = inverse(scale);
  for (int j = 0; j < 32; j++) {
    q[j] = __builtin_convertvector(vector_min((g->x[j] - low) * inv + splat(0.5f), splat(q_max)), m8);
  }
  return (affine){.scale = scale, .base = low};
}

INLINE affine affine_searched(const groups *g, m8 *q, const code_set *set, const candidates *t) {
  const affine best = affine_best(g, set, t);
  const v8 inv = inverse(best.scale);
  for (int j = 0; j < 32; j++) q[j] = low_bits(affine_code(g->x[j], inv, best.base, (float)set->high), 0);
  return best;
}

INLINE void encode_affine(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst, bool five) {
  const bool thorough = c->effort == CLB_EFFORT_BEST;
  const size_t block_bytes = five ? 24 : 20;
  const code_set set = {0, five ? 31 : 15, NULL};
  const candidates t = upper_end(&set, thorough ? 28 : 14, -1.8f, thorough ? 0.1f : 0.2f);
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    const affine a =
        is_searched(c) ? affine_searched(&g, codes.q, &set, &t) : affine_reference(&g, codes.q, (float)set.high);
    store_rows(codes.rows, codes.q);
    const m8 fifth = five ? fifth_bits(codes.q) : (m8){0};
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * block_bytes;
      const int32_t bits = fifth[i];
      store_f16(to, a.scale[i]);
      store_f16(to + 2, a.base[i]);
      if (five) memcpy(to + 4, &bits, sizeof bits);
      put_nibbles(to + (five ? 8 : 4), codes.rows[i]);
    }
  }
}

TARGET static void encode_q4_0(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  encode_symmetric(c, x, n, dst, false);
}
TARGET static void encode_q5_0(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  encode_symmetric(c, x, n, dst, true);
}
TARGET static void encode_q4_1(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  encode_affine(c, x, n, dst, false);
}
TARGET static void encode_q5_1(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  encode_affine(c, x, n, dst, true);
}

// Halves away from zero, as gguf rounds here. What is added is the float before 1/2: with 1/2 itself, 0.49999997 would
// become 1.
INLINE m8 round_half_away(v8 x) {
  return __builtin_convertvector(x + (v8)(((m8)x & INT32_MIN) | (m8)splat(0x1.fffffep-2f)), m8);
}

TARGET static void encode_q8_0(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const code_set set = {-127, 127, NULL};
  const candidates t = is_searched(c) ? plan_symmetric(c, &set) : (candidates){0};
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    v8 scale;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    if (is_searched(c)) {
      scale = symmetric_best(&g, codes.q, &set, &t, 0);
    } else {
      scale = reach_of(&g) / splat(127);
      const v8 inv = inverse(scale);
      for (int j = 0; j < 32; j++) codes.q[j] = round_half_away(g.x[j] * inv);
    }
    store_rows(codes.rows, codes.q);
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * 34;
      store_f16(to, scale[i]);
      memcpy(to + 2, codes.rows[i], 32);
    }
  }
}

// The index into clb_values_e2m1 nearest to y; halfway, the smaller magnitude.
INLINE m8 e2m1_code(v8 y) {
  static const float middles[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
  const v8 a = magnitude(y);
  m8 code = {0};
  for (int i = 0; i < 7; i++) code -= a > splat(middles[i]);
  const m8 sign = (m8)y < 0;
  return code + ((sign & (code > 0)) & 8);
}

INLINE v8 e8m0_half_lanes(m8 e) {  // of e >= 2 as a float's exponent, of 0 and 1 as subnormals
  return (v8)((((e - 1) << 23) & (e > 1)) | (0x00200000 & (e == 0)) | (0x00400000 & (e == 1)));
}

// Codes for the scale of e. Small scales have no finite inverse, so weights are enlarged first.
INLINE void e2m1_codes(const groups *g, m8 e, m8 codes[32]) {
  const v8 enlarge = pick(e < 64, splat(0x1p64f), splat(1)), inv = splat(1) / (e8m0_half_lanes(e) * enlarge);
  for (int j = 0; j < 32; j++) codes[j] = e2m1_code(g->x[j] * enlarge * inv);
}

INLINE v8 mxfp4_error(const groups *g, m8 e) {
  static const float values[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  const v8 d = e8m0_half_lanes(e);
  m8 codes[32];
  v8 error = splat(0);
  e2m1_codes(g, e, codes);
  for (int j = 0; j < 32; j++) {
    const m8 code = codes[j];
    v8 value = splat(0);
    for (int i = 1; i < 8; i++) value = pick((code & 7) == i, splat(values[i]), value);
    const v8 difference = magnitude(g->x[j]) - value * d;
    error += weigh(g, j, difference * difference);
  }
  return error;
}

// floor(log2(a)) as gguf computes it, in f32, which rounds up to the next power of two from just below it.
INLINE int32_t exponent_of(float a) {
  uint32_t bits;
  memcpy(&bits, &a, sizeof bits);
  const bool normal = bits >= 0x00800000, just_below = (bits & 0x007FFFFF) >= 0x007FF000;
  return normal && !just_below ? (int32_t)(bits >> 23) - 127 : (int32_t)floorf((float)log2((double)a));
}

// The exponent of the largest magnitude, less that of the largest code.
INLINE m8 mxfp4_exponent(v8 reach) {
  m8 e = {0};
  for (int i = 0; i < LANES; i++) {
    const int32_t exponent = reach[i] > 0 ? exponent_of(reach[i]) + 125 : 0;
    e[i] = exponent < 0 ? 0 : exponent;
  }
  return e;
}

TARGET static void encode_mxfp4(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    m8 e = mxfp4_exponent(reach_of(&g));
    if (is_searched(c)) {
      v8 least = mxfp4_error(&g, e);
      for (int step = -1; step < 2; step += 2) {
        const m8 other = e + step, possible = (other >= 2) & (other < 253) & (e > 2);
        const v8 error = mxfp4_error(&g, (other & possible) | (e & ~possible));
        const m8 better = (error < least) & possible;
        least = pick(better, error, least);
        e += (step & better);
      }
    }
    e2m1_codes(&g, e, codes.q);
    store_rows(codes.rows, codes.q);
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * 17;
      to[0] = (uint8_t)e[i];
      put_nibbles(to + 1, codes.rows[i]);
    }
  }
}

TARGET static void encode_iq4_nl(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const code_set set = {-127, 113, clb_values_iq4};
  const int n_steps = c->effort == CLB_EFFORT_FAST ? 4 : c->effort == CLB_EFFORT_NORMAL ? 8 : 16;
  const candidates t = both_ends(&set, n_steps, -14, 28.0f / (float)n_steps);
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    fixed f;
    v8 found;
    scale_search(&f, &g, &set, &t, &found);
    const v8 scale = f16_round_lanes(found), inv = inverse(scale);
    for (int j = 0; j < 32; j++) {
      m8 code = {0};
      for (int i = 1; i < 16; i++) {
        code -= g.x[j] * inv > splat(0.5f * (float)(clb_values_iq4[i - 1] + clb_values_iq4[i]));
      }
      codes.q[j] = code;
    }
    store_rows(codes.rows, codes.q);
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * 18;
      store_f16(to, scale[i]);
      put_nibbles(to + 2, codes.rows[i]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Super-blocks of 256: groups whose scales are integers times a common factor

typedef struct {
  int n_vectors;  // 1: eight groups of 32; 2: sixteen of 16
  groups g[2];
  fixed f[2];
} super_block;

// A choice of scales: integers of the groups, scale and minimum where there is one; the factors as stored; and the sums
// over the codes that these give.
typedef struct {
  v8 scale[2], low[2];
  float d, d_min;
  code_sums sums[2];
} scales;

typedef struct {
  code_set set;
  int scale_low, scale_high;  // range of a group's integer
  candidates t;
  int radius, n_rounds;  // how far integer scales are tried around the rounded ones, how often d is fitted anew
} super_plan;

INLINE void load_super(super_block *s, const clb_encode_context *c, const float *x, size_t block, int group) {
  const float *importance[2][LANES] = {{NULL}};
  const float *row = c->importance ? c->importance + block % c->row_blocks * 256 : NULL;
  s->n_vectors = group == 32 ? 1 : 2;
  for (int v = 0; v < s->n_vectors; v++) {
    for (int i = 0; i < LANES && row; i++) importance[v][i] = row + (v * LANES + i) * group;
    load_groups(&s->g[v], x + block * 256 + v * LANES * group, row ? importance[v] : NULL, group, LANES);
  }
}

INLINE code_sums pick_sums(m8 mask, code_sums yes, code_sums no) {
  return (code_sums){pick(mask, yes.q, no.q), pick(mask, yes.qq, no.qq), pick(mask, yes.yq, no.yq)};
}

// Codes of all weights of a super-block, in their order; `q` has those of its vectors, one behind the other.
INLINE void store_codes(const super_block *s, uint8_t codes[256], const m8 q[32]) {
  uint8_t rows[LANES][32];
  store_rows(rows, q);
  if (s->n_vectors == 1) {
    memcpy(codes, rows, sizeof rows);
    return;
  }
  for (int i = 0; i < LANES; i++) {
    memcpy(codes + i * 16, rows[i], 16);
    memcpy(codes + 128 + i * 16, rows[i] + 16, 16);
  }
}

// The best integers within `radius` of the present ones, for the present factors. Returns the gain of all groups.
typedef float tune_integers(const super_block *s, scales *k, const super_plan *p, int radius);
// The least-squares factors for the present codes.
typedef void fit_factors(const super_block *s, scales *k);

// Integers and factors by turns, as long as it gains.
INLINE void improve(const super_block *s, scales *best, const super_plan *p, tune_integers *tune, fit_factors *fit) {
  float most = tune(s, best, p, p->radius);
  for (int round = 0; round < p->n_rounds; round++) {
    scales other = *best;
    fit(s, &other);
    const float gain = tune(s, &other, p, 1);
    if (!(gain > most)) break;
    most = gain;
    *best = other;
  }
}

// --- with minimums ---

// Far beyond what fixed point holds; squares of it still fit a float.
INLINE v8 in_units(const fixed *f, v8 x) {
  return clamp(x * f->inv_unit, -0x1p40f, 0x1p40f);
}

// The gain of integers `scale` and `low` with the factors of k.
INLINE v8 min_gain(const fixed *f, const scales *k, const code_set *c, v8 scale, v8 low, code_sums *sums) {
  const v8 units = in_units(f, splat(k->d) * scale), base = in_units(f, splat(-k->d_min) * low - f->low);
  const h16 factor = factor_of(inverse(units));
  add_codes(f, c, &factor, &base, sums);
  return affine_gain(f, sums, units, base);
}

// The best integers around the present ones, for the present d and d_min. Returns the gain of all groups.
OUTLINE float tune_min(const super_block *s, scales *k, const super_plan *p, int radius) {
  const float top = (float)p->scale_high;
  float total = 0;
  for (int v = 0; v < s->n_vectors; v++) {
    const fixed *f = &s->f[v];
    const v8 middle = k->scale[v], middle_low = k->low[v];
    v8 gain = min_gain(f, k, &p->set, middle, middle_low, &k->sums[v]);
    for (int i = -radius; i <= radius; i++) {
      for (int j = -radius; j <= radius; j++) {
        // A scale that grows while the minimum shrinks, or the reverse, moves all weights one way: it never pays.
        if ((i == 0 && j == 0) || i * j < 0) continue;
        const v8 scale = clamp(middle + splat((float)i), 0, top), low = clamp(middle_low + splat((float)j), 0, top);
        code_sums sums;
        const v8 other = min_gain(f, k, &p->set, scale, low, &sums);
        const m8 better = other > gain;
        gain = pick(better, other, gain);
        k->scale[v] = pick(better, scale, k->scale[v]);
        k->low[v] = pick(better, low, k->low[v]);
        k->sums[v] = pick_sums(better, sums, k->sums[v]);
      }
    }
    total += sum_lanes(gain * f->square);
  }
  return total;
}

// The least-squares d and d_min for the present codes: x ~ d u - d_min v, u = scale * q, v = low.
INLINE void fit_min_factors(const super_block *s, scales *k) {
  v8 uu = splat(0), uv = splat(0), vv = splat(0), xu = splat(0), xv = splat(0);
  for (int v = 0; v < s->n_vectors; v++) {
    const fixed *f = &s->f[v];
    const code_sums *q = &k->sums[v];
    const v8 share = f->share, scale = share * k->scale[v], low = share * k->low[v];
    uu += scale * k->scale[v] * q->qq;
    uv += scale * k->low[v] * q->q;
    xu += scale * (f->unit * q->yq + f->low * q->q);
    vv += low * k->low[v] * f->sum_w;
    xv += low * (f->unit * f->sum_y + f->low * f->sum_w);
  }
  const double a = (double)sum_lanes(uu), b = (double)sum_lanes(uv), c = (double)sum_lanes(vv);
  const double r = (double)sum_lanes(xu), t = (double)sum_lanes(xv), det = a * c - b * b;
  if (det > 1e-9 * a * c && det > 0) {
    const double d = (r * c - b * t) / det, d_min = (r * b - a * t) / det;
    if (d > 0 && d_min >= 0) {
      k->d = f16_round((float)d);
      k->d_min = f16_round((float)d_min);
    }
  } else if (a > 0 && c <= 0) {
    k->d = f16_round((float)(r / a));
  }
}

INLINE void round_min(const super_block *s, scales *k, const super_plan *p, const affine *found) {
  const float top = (float)p->scale_high;
  float scale = 0, low = 0;
  for (int v = 0; v < s->n_vectors; v++) {
    const float most = max_lanes(found[v].scale), most_low = max_lanes(-found[v].base);
    scale = most > scale ? most : scale;  // not fmaxf: of 0 and -0 it may return either
    low = most_low > low ? most_low : low;
  }
  k->d = f16_round(scale / top);
  k->d_min = f16_round(low / top);
  for (int v = 0; v < s->n_vectors; v++) {
    k->scale[v] = nearest(clamp(found[v].scale * inverse(splat(k->d)), 0, top));
    k->low[v] = nearest(clamp(-found[v].base * inverse(splat(k->d_min)), 0, top));
  }
}

INLINE scales encode_min_super(super_block *s, const super_plan *p, uint8_t codes[256]) {
  affine found[2];
  scales best;
  m8 q[32];
  for (int v = 0; v < s->n_vectors; v++) affine_search(&s->f[v], &s->g[v], &p->set, true, &p->t, &found[v]);
  round_min(s, &best, p, found);
  improve(s, &best, p, tune_min, fit_min_factors);
  for (int v = 0; v < s->n_vectors; v++) {
    const groups *g = &s->g[v];
    const v8 base = splat(-best.d_min) * best.low[v], inv = inverse(splat(best.d) * best.scale[v]);
    for (int j = 0; j < g->n; j++) {
      q[v * 16 + j] = low_bits(clamp((g->x[j] - base) * inv, 0, (float)p->set.high), 0);
    }
  }
  store_codes(s, codes, q);
  return best;
}

// Bytes of 6-bit scales and minimums as q4_k and q5_k keep them; see blocks.c.
INLINE void put_scales_6(uint8_t *dst, const scales *k) {
  for (int i = 0; i < 4; i++) {
    const uint32_t scale = (uint32_t)k->scale[0][i], low = (uint32_t)k->low[0][i];
    const uint32_t scale4 = (uint32_t)k->scale[0][i + 4], low4 = (uint32_t)k->low[0][i + 4];
    dst[i] = (uint8_t)(scale | (scale4 >> 4) << 6);
    dst[i + 4] = (uint8_t)(low | (low4 >> 4) << 6);
    dst[i + 8] = (uint8_t)((scale4 & 15) | (low4 & 15) << 4);
  }
}

// The steps tried, the radius and the rounds were chosen on normal, heavy-tailed, one-sided and outlier-ridden
// matrices: with fewer, one of these comes out worse than it needs to.
INLINE super_plan plan_min(const clb_encode_context *c, int q_max, int scale_max) {
  const bool fast = c->effort == CLB_EFFORT_FAST, best = c->effort == CLB_EFFORT_BEST;
  const int n_steps = fast ? 6 : best ? 28 : q_max > 3 ? 10 : 14;
  super_plan p = {.set = {0, q_max, NULL}, .scale_high = scale_max};
  if (fast) {
    p.t = upper_end(&p.set, n_steps, -0.7f, 0.2f);
  } else {
    p.t = upper_end(&p.set, n_steps, q_max > 3 ? -1.8f : -1.2f, (q_max > 3 ? 3.0f : 2.0f) / (float)n_steps);
  }
  p.radius = fast ? 0 : best ? 2 : 1;
  p.n_rounds = fast ? 0 : best ? 4 : 1;
  return p;
}

// What q4_k and q5_k have in common: block `b` encoded, its first 16 bytes written, its codes in `codes`.
INLINE void encode_min_block(const clb_encode_context *c, const super_plan *plan, const float *x, size_t b,
                             uint8_t *dst, uint8_t codes[256]) {
  super_block s;
  load_super(&s, c, x, b, 32);
  const scales k = encode_min_super(&s, plan, codes);
  store_f16(dst, k.d);
  store_f16(dst + 2, k.d_min);
  put_scales_6(dst + 4, &k);
}

// Pairs of 4-bit codes as q4_k and q5_k place them.
INLINE void put_nibble_pairs(uint8_t dst[128], const uint8_t codes[256]) {
  for (int i = 0; i < 4; i++) {
    const uint8_t *pair_of = codes + i * 64;
    for (int j = 0; j < 32; j++) dst[i * 32 + j] = (uint8_t)((pair_of[j] & 15) | pair_of[j + 32] << 4);
  }
}
// Bit `shift` of 256 codes, as q3_k and q5_k place it.
INLINE void put_bits(uint8_t dst[32], const uint8_t codes[256], int shift) {
  for (int k = 0; k < 32; k++) {
    uint32_t byte = 0;
    for (int g = 0; g < 8; g++) byte |= (uint32_t)(codes[g * 32 + k] >> shift & 1) << g;
    dst[k] = (uint8_t)byte;
  }
}
// 2-bit parts of 256 codes, as q2_k, q3_k and q6_k place them.
INLINE void put_crumbs(uint8_t dst[64], const uint8_t codes[256], int shift) {
  for (int i = 0; i < 2; i++) {
    const uint8_t *q = codes + i * 128;
    for (int k = 0; k < 32; k++) {
      dst[i * 32 + k] = (uint8_t)((q[k] >> shift & 3) | (q[k + 32] >> shift & 3) << 2 | (q[k + 64] >> shift & 3) << 4 |
                                  (q[k + 96] >> shift & 3) << 6);
    }
  }
}

TARGET static void encode_q4_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const super_plan plan = plan_min(c, 15, 63);
  for (size_t b = 0; b < n; b++, dst += 144) {
    uint8_t codes[256];
    encode_min_block(c, &plan, x, b, dst, codes);
    put_nibble_pairs(dst + 16, codes);
  }
}

TARGET static void encode_q5_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const super_plan plan = plan_min(c, 31, 63);
  for (size_t b = 0; b < n; b++, dst += 176) {
    uint8_t codes[256];
    encode_min_block(c, &plan, x, b, dst, codes);
    put_bits(dst + 16, codes, 4);
    put_nibble_pairs(dst + 48, codes);
  }
}

TARGET static void encode_q2_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const super_plan plan = plan_min(c, 3, 15);
  for (size_t b = 0; b < n; b++, dst += 84) {
    super_block s;
    uint8_t codes[256];
    load_super(&s, c, x, b, 16);
    const scales k = encode_min_super(&s, &plan, codes);
    for (int i = 0; i < 16; i++) {
      dst[i] = (uint8_t)((int)k.scale[i / LANES][i % LANES] | (int)k.low[i / LANES][i % LANES] << 4);
    }
    put_crumbs(dst + 16, codes, 0);
    store_f16(dst + 80, k.d);
    store_f16(dst + 82, k.d_min);
  }
}

// --- with scales alone ---

OUTLINE float tune_scales(const super_block *s, scales *k, const super_plan *p, int radius) {
  float total = 0;
  for (int v = 0; v < s->n_vectors; v++) {
    const fixed *f = &s->f[v];
    const v8 middle = k->scale[v];
    v8 gain = splat(0);
    for (int i = 0; i <= 2 * radius; i++) {
      const int step = i == 0 ? 0 : i <= radius ? -i : i - radius;
      const v8 scale = clamp(middle + splat((float)step), (float)p->scale_low, (float)p->scale_high);
      const v8 units = in_units(f, splat(k->d) * scale);
      const h16 factor = factor_of(inverse(units));
      code_sums sums;
      add_codes(f, &p->set, &factor, NULL, &sums);
      const v8 other = units * (splat(2) * sums.yq - units * sums.qq);
      const m8 better = i == 0 ? (m8){-1, -1, -1, -1, -1, -1, -1, -1} : other > gain;
      gain = pick(better, other, gain);
      k->scale[v] = pick(better, scale, k->scale[v]);
      k->sums[v] = pick_sums(better, sums, k->sums[v]);
    }
    total += sum_lanes(gain * f->square);
  }
  return total;
}

INLINE void fit_factor(const super_block *s, scales *k) {
  v8 uu = splat(0), xu = splat(0);
  for (int v = 0; v < s->n_vectors; v++) {
    const v8 scale = s->f[v].share * k->scale[v];
    uu += scale * k->scale[v] * k->sums[v].qq;
    xu += scale * (s->f[v].unit * k->sums[v].yq);
  }
  const float below = sum_lanes(uu);
  if (below > 0) k->d = f16_round(sum_lanes(xu) / below);
}

// The scale of largest magnitude becomes the lowest integer, which reaches further than the highest one.
INLINE void round_scales(const super_block *s, scales *k, const super_plan *p, const v8 *found) {
  float peak = 0;
  for (int v = 0; v < s->n_vectors; v++) {
    for (int i = 0; i < LANES; i++) peak = fabsf(found[v][i]) > fabsf(peak) ? found[v][i] : peak;
  }
  k->d = f16_round(peak / (float)p->scale_low);
  for (int v = 0; v < s->n_vectors; v++) {
    k->scale[v] = nearest(clamp(found[v] * inverse(splat(k->d)), (float)p->scale_low, (float)p->scale_high));
  }
}

// The codes are those of the set's values plus `zero`, which is even.
INLINE scales encode_scaled_super(super_block *s, const super_plan *p, uint8_t codes[256], int zero) {
  v8 found[2];
  scales best;
  m8 q[32];
  for (int v = 0; v < s->n_vectors; v++) scale_search(&s->f[v], &s->g[v], &p->set, &p->t, &found[v]);
  round_scales(s, &best, p, found);
  improve(s, &best, p, tune_scales, fit_factor);
  for (int v = 0; v < s->n_vectors; v++) {
    const groups *g = &s->g[v];
    const v8 inv = inverse(splat(best.d) * best.scale[v]);
    for (int j = 0; j < g->n; j++) q[v * 16 + j] = low_bits(code_value(&p->set, g->x[j] * inv), (float)zero);
  }
  store_codes(s, codes, q);
  return best;
}

INLINE super_plan plan_scales(const clb_encode_context *c, code_set set, int scale_low, float width) {
  const bool fast = c->effort == CLB_EFFORT_FAST, best = c->effort == CLB_EFFORT_BEST;
  const int n_steps = fast ? 3 : best ? 14 : 4;
  super_plan p = {.set = set, .scale_low = scale_low, .scale_high = -scale_low - 1};
  p.t = both_ends(&set, n_steps, -width, 2 * width / (float)(n_steps - 1));
  p.radius = fast ? 0 : best ? 3 : 1;
  p.n_rounds = fast ? 0 : best ? 4 : 2;
  return p;
}

TARGET static void encode_q3_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const super_plan plan = plan_scales(c, (code_set){-4, 3, NULL}, -32, 1.0f);
  for (size_t b = 0; b < n; b++, dst += 110) {
    super_block s;
    uint8_t codes[256];
    load_super(&s, c, x, b, 16);
    const scales k = encode_scaled_super(&s, &plan, codes, 4);
    put_bits(dst, codes, 2);
    put_crumbs(dst + 32, codes, 0);
    memset(dst + 96, 0, 12);
    for (int i = 0; i < 16; i++) {
      const uint32_t scale = (uint32_t)((int)k.scale[i / LANES][i % LANES] + 32);
      dst[96 + i % 8] = (uint8_t)(dst[96 + i % 8] | (scale & 15) << (i / 8 * 4));
      dst[104 + i % 4] = (uint8_t)(dst[104 + i % 4] | (scale >> 4) << (i / 4 * 2));
    }
    store_f16(dst + 108, k.d);
  }
}

TARGET static void encode_q6_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const super_plan plan = plan_scales(c, (code_set){-32, 31, NULL}, -128, 0.9f);
  for (size_t b = 0; b < n; b++, dst += 210) {
    super_block s;
    uint8_t codes[256];
    load_super(&s, c, x, b, 16);
    const scales k = encode_scaled_super(&s, &plan, codes, 32);
    for (int i = 0; i < 2; i++) {
      const uint8_t *half = codes + i * 128;
      for (int j = 0; j < 64; j++) dst[i * 64 + j] = (uint8_t)((half[j] & 15) | half[j + 64] << 4);
    }
    put_crumbs(dst + 128, codes, 4);
    for (int i = 0; i < 16; i++) dst[192 + i] = (uint8_t)(int8_t)k.scale[i / LANES][i % LANES];
    store_f16(dst + 208, k.d);
  }
}

// The index of a value of the iq4 codebook.
INLINE uint32_t iq4_index(uint8_t value) {
  uint32_t index = 0;
  for (int i = 1; i < 16; i++) index += (int8_t)value >= clb_values_iq4[i];
  return index;
}

TARGET static void encode_iq4_xs(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const super_plan plan = plan_scales(c, (code_set){-127, 113, clb_values_iq4}, -32, 12);
  for (size_t b = 0; b < n; b++, dst += 136) {
    super_block s;
    uint8_t values[256];
    uint32_t scales_high = 0;
    load_super(&s, c, x, b, 32);
    const scales k = encode_scaled_super(&s, &plan, values, 0);
    store_f16(dst, k.d);
    memset(dst + 4, 0, 4);
    for (int g = 0; g < 8; g++) {
      const uint32_t scale = (uint32_t)((int)k.scale[0][g] + 32);
      scales_high |= (scale >> 4) << (2 * g);
      dst[4 + g / 2] = (uint8_t)(dst[4 + g / 2] | (scale & 15) << (g % 2 * 4));
      for (int i = 0; i < 16; i++) {
        dst[8 + g * 16 + i] = (uint8_t)(iq4_index(values[g * 32 + i]) | iq4_index(values[g * 32 + 16 + i]) << 4);
      }
    }
    dst[2] = (uint8_t)scales_high;
    dst[3] = (uint8_t)(scales_high >> 8);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The table

static const struct {
  uint32_t type;
  clb_encode_fn *encode;
} encoders[] = {
    {CLB_Q4_0, encode_q4_0},   {CLB_Q4_1, encode_q4_1}, {CLB_Q5_0, encode_q5_0},     {CLB_Q5_1, encode_q5_1},
    {CLB_Q8_0, encode_q8_0},   {CLB_Q2_K, encode_q2_k}, {CLB_Q3_K, encode_q3_k},     {CLB_Q4_K, encode_q4_k},
    {CLB_Q5_K, encode_q5_k},   {CLB_Q6_K, encode_q6_k}, {CLB_IQ4_NL, encode_iq4_nl}, {CLB_IQ4_XS, encode_iq4_xs},
    {CLB_MXFP4, encode_mxfp4},
};

clb_encode_fn *ENCODER(uint32_t type) {
  for (size_t i = 0; i < sizeof encoders / sizeof *encoders; i++) {
    if (encoders[i].type == type) return encoders[i].encode;
  }
  return NULL;
}
