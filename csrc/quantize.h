// Encoding f32 weights into the block formats of blocks.h.
//
// Two kinds of types. The simple ones (q8_0, q4_0, q4_1, q5_0, q5_1, mxfp4) have a reference encoder that everybody
// shares, and without importance or more effort the bytes equal gguf-py's. The others (k-quants, iq4) leave the choice
// of scales to the encoder, which searches for the least squared error, weighted by importance where it is given.
//
// The scale that is stored, as it is rounded into its field, is the one codes are rounded with. Results depend on
// nothing but the arguments: the portable code and the SIMD code give the same bytes.
#ifndef CLB_QUANTIZE_H
#define CLB_QUANTIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "blocks.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  CLB_EFFORT_FAST = 0,    // few candidates
  CLB_EFFORT_NORMAL = 1,  // the scales of a block are tuned together
  CLB_EFFORT_BEST = 2,    // many candidates, several rounds; the simple types are searched as well
} clb_effort;

// Whether this type can be encoded.
bool clb_can_quantize(uint32_t type);

// Encodes rows of n_cols weights, one behind the other.
//   x           [n_rows, n_cols], finite
//   importance  [n_cols], finite, >= 0: the weight of each column's squared error, or NULL for equal weights. Where it
//               is zero (below 2^-100) over a whole group of weights that share a scale, they count equally.
//   dst         [n_rows, bytes of a row]
// Returns 0; -1 for a type that cannot be encoded or an n_cols that is no multiple of its block; or 1 when a weight is
// too large for the type, or is not finite: *bad is then the index of the first such weight, and dst is undefined.
// Takes about 10 KiB of stack; allocates nothing.
int clb_quantize_rows(const clb_kernels *k, uint32_t type, clb_effort effort, const float *x, size_t n_rows,
                      size_t n_cols, const float *importance, void *dst, uint64_t *bad);
int clb_quantize_rows_best(uint32_t type, clb_effort effort, const float *x, size_t n_rows, size_t n_cols,
                           const float *importance, void *dst, uint64_t *bad);

// What encoding lost.
typedef struct {
  double error, weight;                      // sums of squares: of the differences, and of the weights themselves
  double important_error, important_weight;  // the same, each column's squares times its importance
} clb_loss;

// Adds to *loss what n_rows encoded rows lost, in one fixed order of sums. Returns 0, or -1 as clb_quantize_rows.
int clb_add_loss(uint32_t type, const void *encoded, const float *x, size_t n_rows, size_t n_cols,
                 const float *importance, clb_loss *loss);

// From one type to another. `src` has whole blocks of type `from`; its first `skip` weights are left out, the next
// n_rows * n_cols become rows of `type` at dst.
typedef struct {
  uint32_t from, type;
  clb_effort effort;
  const void *src;
  size_t skip, n_rows, n_cols;
  const float *importance;  // as above
  void *dst;
} clb_conversion;

// Decodes and encodes by pieces that stay in a core's cache; the bytes are those of clb_quantize_rows. With a loss (or
// NULL) adds to it what is lost. Returns what clb_quantize_rows does, and -1 for a `from` that cannot be decoded too;
// *bad counts from the first weight that is not left out. Takes about 30 KiB of stack; allocates nothing.
int clb_convert_rows(const clb_conversion *c, uint64_t *bad, clb_loss *loss);

#ifdef __cplusplus
}
#endif

#endif
