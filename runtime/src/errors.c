#include "errors.h"

#include <stdarg.h>
#include <stdio.h>

colibri_status clb_fail(clb_error error, colibri_status status, const char *format, ...) {
  if (!error.text || error.size == 0) return status;
  va_list arguments;
  va_start(arguments, format);
  if (vsnprintf(error.text, error.size, format, arguments) < 0) error.text[0] = '\0';
  va_end(arguments);
  for (char *c = error.text; *c; c++) {
    if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
  }
  return status;
}
