// What a gated feed-forward network makes of its two projections.
#include "engine.h"

static void silu(const clb_engine *e, float *y, const float *gate, float *up, size_t n) {
  clb_silu_mul(e->kernels, y, gate, up, n);
}

// (u + 1) * g * sigmoid(alpha g), with g clamped above and u on both sides. As g * sigmoid(alpha g) is
// silu(alpha g) / alpha, this is the same kernel over other operands.
static void swiglu_oai(const clb_engine *e, float *y, const float *gate, float *up, size_t n) {
  const float alpha = (float)e->graph.activation_alpha, limit = (float)e->graph.activation_limit;
  for (size_t i = 0; i < n; i++) {
    const float g = gate[i] > limit ? limit : gate[i], capped = up[i] > limit ? limit : up[i];
    y[i] = alpha * g;
    up[i] = ((capped < -limit ? -limit : capped) + 1) / alpha;
  }
  clb_silu_mul(e->kernels, y, y, up, n);
}

typedef void (*activate_fn)(const clb_engine *e, float *y, const float *gate, float *up, size_t n);

static const activate_fn ACTIVATIONS[] = {
    [CLB_ACTIVATION_SILU] = silu,
    [CLB_ACTIVATION_SWIGLU_OAI] = swiglu_oai,
};

void clb_activate(const clb_engine *e, float *y, const float *gate, float *up, size_t n) {
  ACTIVATIONS[e->graph.activation](e, y, gate, up, n);
}
