// Eight groups of weights, and the search for their scales. Included by quantize_body.h.
//
// A search compares many candidates, and needs little precision for each: it runs on weights in fixed point, sixteen at
// a time, and its sums are of integers. What is stored is then computed from the weights themselves.
#include "quantize_vectors.h"

typedef struct {
  int n;
  bool weighted;
  v8 x[MAX_GROUP];  // weights
  v8 w[MAX_GROUP];  // how much their squared errors count; 1 where not `weighted`
} groups;

static const float equal_weights[MAX_GROUP] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                               1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
static const float no_weights[MAX_GROUP];

// Groups lie one behind the other at x. `importance` has that of each group; NULL for equal weights, which groups also
// get where theirs is zero throughout.
INLINE void load_groups(groups *g, const float *x, const float *const *importance, int n, int n_groups) {
  const float *rows[LANES], *weights[LANES];
  for (int i = 0; i < LANES; i++) {
    rows[i] = i < n_groups ? x + i * n : no_weights;
    weights[i] = importance && i < n_groups ? importance[i] : equal_weights;
  }
  g->n = n;
  g->weighted = importance != NULL;
  load_columns(g->x, rows, n);
  if (!g->weighted) return;
  load_columns(g->w, weights, n);
  v8 most = g->w[0];
  for (int j = 1; j < n; j++) most = vector_max(most, g->w[j]);
  const m8 none = ~(most > splat(0x1p-100f));
  for (int j = 0; j < n; j++) g->w[j] = pick(none, splat(1), g->w[j]);
}

INLINE v8 weigh(const groups *g, int j, v8 x) {
  return g->weighted ? g->w[j] * x : x;
}

INLINE void range_of(const groups *g, v8 *low, v8 *high) {
  *low = *high = g->x[0];
  for (int j = 1; j < g->n; j++) {
    *low = vector_min(*low, g->x[j]);
    *high = vector_max(*high, g->x[j]);
  }
}

// The weight of largest magnitude, with its sign; the first among equals.
INLINE v8 peak_of(const groups *g) {
  v8 peak = g->x[0];
  for (int j = 1; j < g->n; j++) peak = pick(magnitude(g->x[j]) > magnitude(peak), g->x[j], peak);
  return peak;
}
INLINE v8 reach_of(const groups *g) {
  v8 reach = magnitude(g->x[0]);
  for (int j = 1; j < g->n; j++) reach = vector_max(reach, magnitude(g->x[j]));
  return reach;
}

// ---------------------------------------------------------------------------------------------------------------------
// Fixed point

// Codes: integers of a range, or the 16 values of a codebook in ascending order.
typedef struct {
  int low, high;
  const int8_t *values;  // or NULL
} code_set;

// The largest magnitude of a code, and what stands for the largest weight: times a factor of 16 bits, codes then come
// out right to about 1/64 (those of 7 bits to 1/32).
INLINE int largest_code(const code_set *c) {
  return -c->low > c->high ? -c->low : c->high;
}
INLINE float largest_y(const code_set *c) {
  return largest_code(c) > 63 ? 2047 : 1023;
}

typedef struct {
  int n_pairs;
  bool weighted;
  h16 y[MAX_GROUP / 2], w[MAX_GROUP / 2];  // x ~ low + unit * y
  v8 low, unit, inv_unit;                  // inv_unit is 0 where weights are so small that nothing can hold them
  v8 sum_w, sum_y;                         // of w, and of w * y
  v8 share, square;                        // what one of `w` counts beside those of other groups; times unit^2
} fixed;

// w times any code stays within 15 bits, and 32 of these times y within 31.
INLINE void fix_weights(fixed *f, const groups *g, const code_set *c) {
  const int most_w = 32767 / largest_code(c);
  const float w_max = (float)(most_w < 1023 ? most_w : 1023);
  v8 most = g->w[0];
  for (int j = 1; j < g->n; j++) most = vector_max(most, g->w[j]);
  const v8 to = splat(w_max) / most;
  for (int p = 0; p < f->n_pairs; p++) f->w[p] = pair(g->w[2 * p] * to, g->w[2 * p + 1] * to);
  f->share = most / splat(w_max);
}

// `reach` is what the largest y stands for.
INLINE void fix_groups(fixed *f, const groups *g, const code_set *c, v8 low, v8 reach) {
  f->n_pairs = g->n / 2;
  f->weighted = g->weighted;
  f->low = low;
  f->unit = reach / splat(largest_y(c));
  f->inv_unit = pick(reach > splat(0x1p-60f), splat(largest_y(c)) / reach, splat(0));
  f->share = splat(1);
  if (f->weighted) fix_weights(f, g, c);
  f->square = f->unit * f->unit * f->share;
  for (int p = 0; p < f->n_pairs; p++) {
    f->y[p] = pair((g->x[2 * p] - low) * f->inv_unit, (g->x[2 * p + 1] - low) * f->inv_unit);
  }
}

INLINE void add_groups(fixed *f) {
  m8 w = {0}, y = {0};
  for (int p = 0; p < f->n_pairs; p++) {
    const h16 weight = f->weighted ? f->w[p] : splat_16(1);
    w += dot_16(weight, splat_16(1));
    y += dot_16(weight, f->y[p]);
  }
  f->sum_w = to_float(w);
  f->sum_y = to_float(y);
}

INLINE h16 code_16(const code_set *c, h16 y) {
  if (!c->values) return min_16(max_16(y, splat_16(c->low)), splat_16(c->high));
  h16 v = splat_16(c->values[0]);
  for (int i = 1; i < 16; i++) {
    const int middle = (c->values[i - 1] + c->values[i]) >> 1;
    v += splat_16(c->values[i] - c->values[i - 1]) & (y > splat_16(middle));
  }
  return v;
}

// Weighted sums of codes q: of q, q * q and y * q.
typedef struct {
  v8 q, qq, yq;
} code_sums;

// What scale_16 takes for `inv` codes per unit.
INLINE h16 factor_of(v8 inv) {
  return pair_of_same(clamp(inv * splat(32768), -32767, 32767));
}

// Codes of (y - base) times a factor; no base is 0.
OUTLINE void add_codes(const fixed *f, const code_set *c, const h16 *factor, const v8 *base, code_sums *sums) {
  const h16 from = base ? pair_of_same(clamp(*base, -16384, 16384)) : splat_16(0);
  h16 plain = splat_16(0);
  m8 q = {0}, qq = {0}, yq = {0};
  for (int p = 0; p < f->n_pairs; p++) {
    const h16 code = code_16(c, scale_16(base ? f->y[p] - from : f->y[p], *factor));
    const h16 weighted = f->weighted ? f->w[p] * code : code;
    if (f->weighted) {
      q += dot_16(weighted, splat_16(1));
    } else {
      plain += code;
    }
    qq += dot_16(weighted, code);
    yq += dot_16(weighted, f->y[p]);
  }
  *sums = (code_sums){to_float(f->weighted ? q : dot_16(plain, splat_16(1))), to_float(qq), to_float(yq)};
}

// Scales to try: a group's largest weight becomes steps[i] of its codes.
typedef struct {
  int n;
  float steps[64];
} candidates;

// ---------------------------------------------------------------------------------------------------------------------
// Codes with a scale and a minimum: x ~ scale * q + base, q in 0 .. q_max

typedef struct {
  v8 scale, base;
  v8 gain;  // how far the squared error is below that of no scale and no base
} affine;

// How far the squared error of y ~ scale * q + base is below that of 0.
INLINE v8 affine_gain(const fixed *f, const code_sums *s, v8 scale, v8 base) {
  return splat(2) * (scale * s->yq + base * f->sum_y) - scale * (scale * s->qq + splat(2) * (base * s->q)) -
         base * base * f->sum_w;
}

// The scale and base of least squared error for these codes, the base at most `top`; for codes that tell nothing of
// the scale, `plain` and 0.
INLINE affine affine_fit(const fixed *f, const code_sums *s, v8 plain, v8 top) {
  const v8 det = f->sum_w * s->qq - s->q * s->q, inv_det = inverse(det);
  v8 scale = (f->sum_w * s->yq - f->sum_y * s->q) * inv_det, base = (s->qq * f->sum_y - s->q * s->yq) * inv_det;
  const m8 above = base > top;
  if (any_lane(above)) {
    scale = pick(above, (s->yq - top * s->q) * inverse(s->qq), scale);
    base = pick(above, top, base);
  }
  const m8 sound = (det > splat(0)) & (scale > splat(0));
  scale = pick(sound, scale, plain);
  base = (v8)((m8)base & sound);
  return (affine){.scale = scale, .base = base, .gain = affine_gain(f, s, scale, base)};
}

INLINE void keep_better(affine *best, const affine *found) {
  const m8 better = found->gain > best->gain;
  best->scale = pick(better, found->scale, best->scale);
  best->base = pick(better, found->base, best->base);
  best->gain = pick(better, found->gain, best->gain);
}

// The range is cut into q_max + t steps for several t: some weights at its ends are better clipped, or not reached.
// Then the best is fitted to its own codes a few times. With `below`, the base is at most 0.
enum { POLISH = 2 };

OUTLINE void affine_search(fixed *f, const groups *g, const code_set *c, bool below, const candidates *t,
                           affine *result) {
  v8 low, high;
  range_of(g, &low, &high);
  if (below) low = vector_min(low, splat(0));
  // Where a base far from zero is rounded, its error counts as well: it must not leave the fixed point.
  fix_groups(f, g, c, low, vector_max(high - low, magnitude(low) * splat(0.125f)));
  add_groups(f);
  const v8 range = (high - low) * f->inv_unit, inv_range = inverse(range);
  const v8 top = below ? -low * f->inv_unit : splat(0x1p40f);
  affine best = {.scale = splat(0), .base = splat(0), .gain = splat(0)};
  for (int i = 0; i < t->n; i++) {
    const h16 factor = factor_of(splat(t->steps[i]) * inv_range);
    code_sums sums;
    add_codes(f, c, &factor, NULL, &sums);
    const affine found = affine_fit(f, &sums, range * splat(1 / t->steps[i]), top);
    keep_better(&best, &found);
  }
  for (int i = 0; i < POLISH; i++) {
    const h16 factor = factor_of(inverse(best.scale));
    code_sums sums;
    add_codes(f, c, &factor, &best.base, &sums);
    const affine found = affine_fit(f, &sums, best.scale, top);
    keep_better(&best, &found);
  }
  *result = (affine){.scale = best.scale * f->unit, .base = best.base * f->unit + low};
}

INLINE v8 affine_code(v8 x, v8 inv, v8 base, float q_max) {
  return nearest(clamp((x - base) * inv, 0, q_max));
}

INLINE v8 affine_error(const groups *g, v8 scale, v8 base, float q_max) {
  const v8 inv = inverse(scale);
  v8 error = splat(0);
  for (int j = 0; j < g->n; j++) {
    const v8 e = g->x[j] - (scale * affine_code(g->x[j], inv, base, q_max) + base);
    error += weigh(g, j, e * e);
  }
  return error;
}

// The least-squares scale for the codes that `inv` and `base` give, and this base.
INLINE v8 affine_scale_fit(const groups *g, v8 inv, v8 base, float q_max) {
  v8 sqq = splat(0), sxq = splat(0);
  for (int j = 0; j < g->n; j++) {
    const v8 q = affine_code(g->x[j], inv, base, q_max), wq = weigh(g, j, q);
    sqq += wq * q;
    sxq += wq * (g->x[j] - base);
  }
  return sxq * inverse(sqq);
}

// ---------------------------------------------------------------------------------------------------------------------
// Codes with a scale alone: x ~ scale * v

// The weight of largest magnitude goes to the end of the range, or somewhat within or beyond it, on either side; then
// the best is fitted to its own codes. The gain of a fitted scale, yq / qq, is yq^2 / qq. Also fills `f`.
OUTLINE void scale_search(fixed *f, const groups *g, const code_set *c, const candidates *t, v8 *scale) {
  v8 low, high, qq = splat(1), yq = splat(0);
  range_of(g, &low, &high);
  fix_groups(f, g, c, splat(0), vector_max(high, -low));
  const m8 negative = -low > high;
  for (int i = 0; i <= t->n; i++) {
    const h16 factor = i < t->n ? splat_16((int)(t->steps[i] * (32768 / largest_y(c)))) : factor_of(qq * inverse(yq));
    const h16 turned = i < t->n ? (factor ^ (h16)negative) - (h16)negative : factor;
    code_sums s;
    add_codes(f, c, &turned, NULL, &s);
    const m8 better = s.yq * s.yq * qq > yq * yq * s.qq;
    qq = pick(better, s.qq, qq);
    yq = pick(better, s.yq, yq);
  }
  *scale = yq * inverse(qq) * f->unit;
}

INLINE v8 code_value(const code_set *c, v8 y) {
  if (!c->values) return nearest(clamp(y, (float)c->low, (float)c->high));
  v8 v = splat(c->values[0]);
  for (int i = 1; i < 16; i++) {
    const float middle = 0.5f * (float)(c->values[i - 1] + c->values[i]);
    v += (v8)((m8)splat((float)(c->values[i] - c->values[i - 1])) & (y > splat(middle)));
  }
  return v;
}
