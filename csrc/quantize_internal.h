// What the encoders of quantize_body.h and their callers share; nothing else includes this.
#ifndef CLB_QUANTIZE_INTERNAL_H
#define CLB_QUANTIZE_INTERNAL_H

#include "blocks_internal.h"
#include "quantize.h"

// Encodes `n` quant blocks that lie one behind the other, whose first is number `first` of its row. `importance` is
// that of the row, of `row_blocks` quant blocks, or NULL.
typedef struct {
  clb_effort effort;
  const float *importance;
  size_t row_blocks;
} clb_encode_context;

typedef void clb_encode_fn(const clb_encode_context *context, const float *x, size_t n_blocks, uint8_t *dst);

// The encoder of a type, or NULL.
clb_encode_fn *clb_encoder_portable(uint32_t type);
clb_encode_fn *clb_encoder_avx2(uint32_t type);

#endif
