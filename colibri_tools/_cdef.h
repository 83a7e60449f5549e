/* What Python needs of csrc/: checksums and decoding. */
uint32_t clb_crc32c(uint32_t crc, const void *p, size_t n);
int clb_dequantize_best(uint32_t type, const void *src, float *dst, size_t n);
uint64_t clb_find_nonfinite(uint32_t type, const void *src, uint64_t n_weights);
