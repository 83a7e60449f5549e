#include "report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void print_json_text(const char *text, size_t n_bytes) {
  putchar('"');
  for (size_t i = 0; i < n_bytes; i++) {
    const unsigned char c = (unsigned char)text[i];
    if (c == '"' || c == '\\') {
      printf("\\%c", c);
    } else if (c < 0x20 || c == 0x7f) {
      printf("\\u%04x", c);
    } else {
      putchar(c);
    }
  }
  putchar('"');
}

void print_json_string(const char *text) {
  print_json_text(text, strlen(text));
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

static double mib(uint64_t n_bytes) {
  return (double)n_bytes / 0x1p20;
}

void print_memory(const colibri_memory *m) {
  fprintf(stderr, "memory: %.1f MiB planned, budget %.1f MiB", mib(m->total_bytes), mib(m->budget_bytes));
  if (m->available_limit[0]) {
    fprintf(stderr, "\n  of %.1f MiB available (%s)", mib(m->available_bytes), m->available_limit);
  }
  fprintf(stderr, "\n  experts %.1f of %.1f MiB, resident %.1f, KV %.1f,\n", mib(m->cache_bytes),
          mib(m->all_experts_bytes), mib(m->resident_bytes), mib(m->kv_bytes));
  fprintf(stderr, "  scratch %.1f, metadata %.1f, other %.1f MiB\n", mib(m->scratch_bytes), mib(m->metadata_bytes),
          mib(m->other_bytes));
}

void print_memory_json(const colibri_memory *m) {
  const struct {
    const char *name;
    uint64_t value;
  } fields[] = {{"ctx", m->ctx},
                {"context_length", m->context_length},
                {"vocab_size", m->vocab_size},
                {"n_tokens", m->n_tokens},
                {"metadata_bytes", m->metadata_bytes},
                {"resident_bytes", m->resident_bytes},
                {"kv_bytes", m->kv_bytes},
                {"cache_bytes", m->cache_bytes},
                {"min_cache_bytes", m->min_cache_bytes},
                {"token_bytes", m->token_bytes},
                {"all_experts_bytes", m->all_experts_bytes},
                {"scratch_bytes", m->scratch_bytes},
                {"other_bytes", m->other_bytes},
                {"total_bytes", m->total_bytes},
                {"min_total_bytes", m->min_total_bytes},
                {"budget_bytes", m->budget_bytes},
                {"reserve_bytes", m->reserve_bytes},
                {"available_bytes", m->available_bytes}};
  printf("{");
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    printf("\"%s\": %" PRIu64 ", ", fields[i].name, fields[i].value);
  }
  printf("\"available_limit\": ");
  print_json_string(m->available_limit);
  printf("}");
}

// ---------------------------------------------------------------------------------------------------------------------
// Profile

// One phase of a run: time by part, and what was read.
typedef struct {
  uint64_t tokens;
  double seconds, attention, router, experts, io_wait, head;
  uint64_t requests, hits, reads, bytes;
} phase;

static phase phase_of(const colibri_metrics *m) {
  return (phase){.tokens = m->tokens,
                 .seconds = m->seconds,
                 .attention = m->attention_seconds,
                 .router = m->router_seconds,
                 .experts = m->experts_seconds,
                 .io_wait = m->io_wait_seconds,
                 .head = m->head_seconds,
                 .requests = m->expert_requests,
                 .hits = m->expert_hits,
                 .reads = m->reads,
                 .bytes = m->bytes_read};
}

static phase phase_between(const colibri_metrics *from, const colibri_metrics *to) {
  const phase a = phase_of(from), b = phase_of(to);
  return (phase){.tokens = b.tokens - a.tokens,
                 .seconds = b.seconds - a.seconds,
                 .attention = b.attention - a.attention,
                 .router = b.router - a.router,
                 .experts = b.experts - a.experts,
                 .io_wait = b.io_wait - a.io_wait,
                 .head = b.head - a.head,
                 .requests = b.requests - a.requests,
                 .hits = b.hits - a.hits,
                 .reads = b.reads - a.reads,
                 .bytes = b.bytes - a.bytes};
}

static colibri_layer_metrics layer_between(const colibri_layer_metrics *a, const colibri_layer_metrics *b) {
  return (colibri_layer_metrics){.attention_seconds = b->attention_seconds - a->attention_seconds,
                                 .router_seconds = b->router_seconds - a->router_seconds,
                                 .experts_seconds = b->experts_seconds - a->experts_seconds,
                                 .io_wait_seconds = b->io_wait_seconds - a->io_wait_seconds,
                                 .expert_requests = b->expert_requests - a->expert_requests,
                                 .expert_hits = b->expert_hits - a->expert_hits,
                                 .reads = b->reads - a->reads,
                                 .bytes_read = b->bytes_read - a->bytes_read};
}

static double share(double part, double whole) {
  return whole > 0 ? part / whole : 0;
}

static int compare_seconds(const void *a, const void *b) {
  const double *x = a, *y = b;
  return (*x > *y) - (*x < *y);
}

// The least value that `percent` of all do not exceed. Values are sorted.
static double percentile(const double *values, size_t n, size_t percent) {
  return values[(n * percent + 99) / 100 - 1];
}

static double mean(const double *values, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; i++) sum += values[i];
  return sum / (double)n;
}

static void print_parts_json(const phase *p) {
  printf("\"seconds\": %.6f, \"attention_seconds\": %.6f, \"router_seconds\": %.6f, \"experts_seconds\": %.6f, ",
         p->seconds, p->attention, p->router, p->experts);
  printf("\"io_wait_seconds\": %.6f, \"head_seconds\": %.6f", p->io_wait, p->head);
}

static void print_share_json(const char *name, bool known, double value) {
  if (known) {
    printf(", \"%s\": %.6f", name, value);
  } else {
    printf(", \"%s\": null", name);
  }
}

static void print_layers_json(const run_profile *p, bool decode) {
  static const colibri_layer_metrics none = {0};
  printf(", \"layers\": [");
  for (size_t i = 0; i < p->n_layers; i++) {
    const colibri_layer_metrics m =
        decode ? layer_between(&p->prefill_layers[i], &p->layers[i]) : layer_between(&none, &p->prefill_layers[i]);
    printf("%s\n      {\"layer\": %zu, \"attention_seconds\": %.6f, \"router_seconds\": %.6f, ", i ? "," : "", i,
           m.attention_seconds, m.router_seconds);
    printf("\"experts_seconds\": %.6f, \"io_wait_seconds\": %.6f, ", m.experts_seconds, m.io_wait_seconds);
    printf("\"expert_requests\": %" PRIu64 ", \"expert_hits\": %" PRIu64 ", \"reads\": %" PRIu64
           ", \"bytes_read\": %" PRIu64 "}",
           m.expert_requests, m.expert_hits, m.reads, m.bytes_read);
  }
  printf("]");
}

static void print_phase_json(const run_profile *p, const phase *q, bool decode) {
  const double speed = share((double)q->bytes, q->seconds);
  printf("\n    \"%s\": {\"tokens\": %" PRIu64 ", ", decode ? "decode" : "prefill", q->tokens);
  print_parts_json(q);
  print_share_json("io_wait_share", q->seconds > 0, share(q->io_wait, q->seconds));
  print_share_json("hit_rate", q->requests > 0, share((double)q->hits, (double)q->requests));
  printf(", \"reads\": %" PRIu64 ", \"bytes_read\": %" PRIu64, q->reads, q->bytes);
  print_share_json("bytes_per_second", q->seconds > 0, speed);
  const bool known = p->has_drive && p->drive.bytes_per_second > 0;
  print_share_json("drive_share", known && q->seconds > 0, share(speed, p->drive.bytes_per_second));
  print_layers_json(p, decode);
  printf("}");
}

static void print_token_seconds_json(run_profile *p) {
  const size_t n = p->n_token_seconds;
  double *v = p->token_seconds;
  if (n == 0) {
    printf("null");
    return;
  }
  qsort(v, n, sizeof *v, compare_seconds);
  printf("{\"n\": %zu, \"mean\": %.6f, \"p50\": %.6f, \"p95\": %.6f, \"p99\": %.6f, \"max\": %.6f}", n, mean(v, n),
         percentile(v, n, 50), percentile(v, n, 95), percentile(v, n, 99), v[n - 1]);
}

static void print_drive_json(const run_profile *p) {
  const colibri_drive *d = &p->drive;
  if (!p->has_drive) {
    printf("null");
    return;
  }
  printf("{\"bytes_per_second\": %.0f, \"bytes\": %" PRIu64 ", \"reads\": %" PRIu64 ", \"seconds\": %.6f, ",
         d->bytes_per_second, d->bytes, d->reads, d->seconds);
  printf("\"block_bytes\": %" PRIu64 ", \"depth\": %" PRIu32 ", \"direct\": %s}", d->block_bytes, d->depth,
         d->direct ? "true" : "false");
}

static void print_prefetch_json(const colibri_metrics *m) {
  if (m->prefetch_guessed == 0) {
    printf("null");
    return;
  }
  if (m->prefetch_chosen > 0) {
    printf("{\"recall\": %.6f", share((double)m->prefetch_right, (double)m->prefetch_chosen));
  } else {
    printf("{\"recall\": null");
  }
  printf(", \"guessed\": %" PRIu64 ", \"right\": %" PRIu64 ", \"chosen\": %" PRIu64 ", \"reads\": %" PRIu64,
         m->prefetch_guessed, m->prefetch_right, m->prefetch_chosen, m->prefetch_reads);
  printf(", \"useful_bytes\": %" PRIu64 ", \"wasted_bytes\": %" PRIu64 ", \"paused\": %" PRIu64 "}",
         m->prefetch_useful_bytes, m->prefetch_wasted_bytes, m->prefetch_paused);
}

void print_profile_json(run_profile *p) {
  const phase total = phase_of(&p->total), prefill = phase_of(&p->prefill),
              decode = phase_between(&p->prefill, &p->total);
  printf("{");
  print_parts_json(&total);
  printf(",\n    \"token_seconds\": ");
  print_token_seconds_json(p);
  printf(",\n    \"prefetch\": ");
  print_prefetch_json(&p->total);
  printf(",\n    \"drive\": ");
  print_drive_json(p);
  printf(",\n    \"phases\": {");
  print_phase_json(p, &prefill, false);
  printf(",");
  print_phase_json(p, &decode, true);
  printf("}}");
}

static void print_part(const char *name, double prefill, const phase *p, double decode, const phase *d) {
  fprintf(stderr, "  %-10s %9.3f s %5.1f %%   %9.3f s %5.1f %%\n", name, prefill, 100 * share(prefill, p->seconds),
          decode, 100 * share(decode, d->seconds));
}

static void print_layers(const run_profile *p) {
  static const colibri_layer_metrics none = {0};
  const bool decode = p->total.tokens > p->prefill.tokens;
  const double per_token = 1e3 / (double)(decode              ? p->total.tokens - p->prefill.tokens
                                          : p->prefill.tokens ? p->prefill.tokens
                                                              : 1);
  fprintf(stderr, "%s by layer, ms per token\n", decode ? "decode" : "prefill");
  fprintf(stderr, "  layer attention   router  experts  io wait    hits\n");
  for (size_t i = 0; i < p->n_layers; i++) {
    const colibri_layer_metrics m =
        decode ? layer_between(&p->prefill_layers[i], &p->layers[i]) : layer_between(&none, &p->prefill_layers[i]);
    fprintf(stderr, "  %5zu %9.3f %8.3f %8.3f %8.3f ", i, per_token * m.attention_seconds, per_token * m.router_seconds,
            per_token * m.experts_seconds, per_token * m.io_wait_seconds);
    if (m.expert_requests > 0) {
      fprintf(stderr, "%5.1f %%\n", 100 * share((double)m.expert_hits, (double)m.expert_requests));
    } else {
      fprintf(stderr, "      -\n");
    }
  }
}

static void print_reading(const char *name, const run_profile *p, const phase *q) {
  if (q->tokens == 0) return;
  const double speed = share((double)q->bytes, q->seconds);
  fprintf(stderr, "%s: %.1f MiB in %" PRIu64 " reads, %.1f %% of experts in cache,\n  %.0f MB/s", name, mib(q->bytes),
          q->reads, 100 * share((double)q->hits, (double)q->requests), speed / 1e6);
  if (p->has_drive && p->drive.bytes_per_second > 0) {
    fprintf(stderr, ", %.0f %% of what the drive gives", 100 * speed / p->drive.bytes_per_second);
  }
  fprintf(stderr, "\n");
}

static void print_prefetch(const colibri_metrics *m) {
  if (m->prefetch_guessed == 0) return;
  fprintf(stderr, "prefetch: %.1f %% of chosen experts were guessed,\n  %.1f MiB read ahead were used, %.1f were not\n",
          100 * share((double)m->prefetch_right, (double)m->prefetch_chosen), mib(m->prefetch_useful_bytes),
          mib(m->prefetch_wasted_bytes));
  if (m->prefetch_paused > 0) {
    fprintf(stderr, "  %" PRIu64 " guesses not followed, as that lost time\n", m->prefetch_paused);
  }
}

void print_profile(run_profile *p) {
  const phase a = phase_of(&p->prefill), b = phase_between(&p->prefill, &p->total);
  fprintf(stderr, "  %-10s  prefill, %5" PRIu64 " tokens   decode, %6" PRIu64 " tokens\n", "", a.tokens, b.tokens);
  print_part("attention", a.attention, &a, b.attention, &b);
  print_part("router", a.router, &a, b.router, &b);
  print_part("experts", a.experts, &a, b.experts, &b);
  print_part("io wait", a.io_wait, &a, b.io_wait, &b);
  print_part("head", a.head, &a, b.head, &b);
  print_part("all", a.seconds, &a, b.seconds, &b);
  print_layers(p);
  print_reading("prefill", p, &a);
  print_reading("decode", p, &b);
  print_prefetch(&p->total);
  if (p->has_drive) {
    const colibri_drive *d = &p->drive;
    fprintf(stderr,
            "drive: %.0f MB/s, random blocks up to %.1f MiB, %" PRIu32 " at once,\n  %s, %" PRIu64 " reads in %.2f s\n",
            d->bytes_per_second / 1e6, mib(d->block_bytes), d->depth, d->direct ? "O_DIRECT" : "through the page cache",
            d->reads, d->seconds);
  }
  if (p->n_token_seconds == 0) return;
  qsort(p->token_seconds, p->n_token_seconds, sizeof *p->token_seconds, compare_seconds);
  fprintf(stderr, "ms per token: P50 %.4g, P95 %.4g, P99 %.4g, max %.4g\n",
          1e3 * percentile(p->token_seconds, p->n_token_seconds, 50),
          1e3 * percentile(p->token_seconds, p->n_token_seconds, 95),
          1e3 * percentile(p->token_seconds, p->n_token_seconds, 99), 1e3 * p->token_seconds[p->n_token_seconds - 1]);
}
