#include "blocks_internal.h"
#if defined(CLB_HAVE_NEON)
#include "fast_internal.h"
const clb_fast_kernels *clb_fast_neon(void) { return 0; }
const clb_fast_kernels *clb_fast_neon_dot(void) { return 0; }
#endif
