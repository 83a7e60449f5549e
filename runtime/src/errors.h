// Error texts: one printable line, whatever bytes a hostile file put into a name.
#ifndef CLB_ERRORS_H
#define CLB_ERRORS_H

#include <stddef.h>

#include "colibri.h"

typedef struct {
  char *text;  // [size], always NUL-terminated; NULL when the caller wants none
  size_t size;
} clb_error;

// Writes the text and returns `status`, so that a check is one line: return clb_fail(e, COLIBRI_ERROR_FORMAT, ...).
colibri_status clb_fail(clb_error error, colibri_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// Returns from the calling function unless `call` gives COLIBRI_OK.
#define CLB_TRY(call)                                \
  do {                                               \
    colibri_status try_status = (call);              \
    if (try_status != COLIBRI_OK) return try_status; \
  } while (0)

#endif
