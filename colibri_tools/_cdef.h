/* What Python needs beside colibri.h: checksums and decoding. */
uint32_t clb_crc32c(uint32_t crc, const void *p, size_t n);
int clb_dequantize_best(uint32_t type, const void *src, float *dst, size_t n);
uint64_t clb_find_nonfinite(uint32_t type, const void *src, uint64_t n_weights);

/* Encoding: see csrc/quantize.h. */
typedef enum { CLB_EFFORT_FAST, CLB_EFFORT_NORMAL, CLB_EFFORT_BEST, ... } clb_effort;
bool clb_can_quantize(uint32_t type);
int clb_quantize_rows_best(uint32_t type, clb_effort effort, const float *x, size_t n_rows, size_t n_cols,
                           const float *importance, void *dst, uint64_t *bad);
typedef struct {
  double error, weight, important_error, important_weight;
} clb_loss;
int clb_add_loss(uint32_t type, const void *encoded, const float *x, size_t n_rows, size_t n_cols,
                 const float *importance, clb_loss *loss);
typedef struct {
  uint32_t from, type;
  clb_effort effort;
  const void *src;
  size_t skip, n_rows, n_cols;
  const float *importance;
  void *dst;
} clb_conversion;
int clb_convert_rows(const clb_conversion *c, uint64_t *bad, clb_loss *loss);

/* Replaying traces, timing requests: see runtime/src/simulate.h. */
typedef struct {
  uint64_t hits, misses;
  uint64_t bytes_read;
} clb_simulation;
bool clb_simulate(const char *path, uint64_t cache_bytes, bool preload, const uint32_t *rows, size_t n_rows,
                  const uint32_t *experts, size_t n_tokens, size_t k, clb_simulation *out, uint64_t *by_misses,
                  char *error, size_t error_bytes);
typedef struct {
  uint64_t n;
  double seconds;
  uint64_t bytes_read;
} clb_request_time;
bool clb_time_requests(const char *path, size_t k, uint32_t io_threads, double seconds, clb_request_time *times,
                       bool *direct, char *error, size_t error_bytes);
