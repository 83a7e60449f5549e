// Matrix products, shared out to the threads by blocks of rows; quantizing their inputs in fast precision.
#include "engine.h"

enum {
  MIN_TASK_PRODUCTS = 1 << 15,  // below this, handing out a task costs more than computing it
  TASKS_PER_THREAD = 8,         // of a job, so that a thread that was held up does not hold up the job
  ROW_STEP = 16,                // a multiple of the rows that kernels multiply together
  SERIAL_QUANTIZE = 1 << 14,    // floats that are quantized sooner than threads are woken
};

// ---------------------------------------------------------------------------------------------------------------------
// Inputs

clb_rows clb_rows_from(clb_rows rows, size_t row) {
  rows.x += row * rows.ld;
  for (size_t kind = 0; kind < CLB_FAST_X_KINDS; kind++) {
    if (rows.codes[kind]) rows.codes[kind] += row * rows.code_bytes[kind];
  }
  return rows;
}

typedef struct {
  const clb_engine *engine;
  clb_rows rows;
  size_t n, n_cols, rows_per_task;
  clb_kinds kinds;
} quantize_job;

static void quantize_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const quantize_job *job = context;
  const size_t end = (task + 1) * job->rows_per_task;
  for (size_t i = task * job->rows_per_task; i < end && i < job->n; i++) {
    const clb_rows row = clb_rows_from(job->rows, i);
    for (clb_fast_x_kind kind = CLB_FAST_X_NONE + 1; kind < CLB_FAST_X_KINDS; kind++) {
      if (!(job->kinds >> kind & 1)) continue;
      clb_fast_quantize_x(job->engine->kernels, kind, row.codes[kind], row.x, job->n_cols);
    }
  }
}

void clb_quantize(clb_engine *e, clb_rows rows, size_t n, size_t n_cols, clb_kinds kinds) {
  if (kinds >> (CLB_FAST_X_NONE + 1) == 0) return;
  const size_t step = SERIAL_QUANTIZE / n_cols + 1;
  quantize_job job = {.engine = e, .rows = rows, .n = n, .n_cols = n_cols, .rows_per_task = step, .kinds = kinds};
  clb_pool_run(e->pool, quantize_task, &job, (n + step - 1) / step);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

typedef struct {
  const clb_engine *engine;
  const clb_linear *linears;
  size_t rows_per_task[CLB_MAX_LINEARS];
  size_t first_task[CLB_MAX_LINEARS + 1];
} linear_job;

static size_t round_up(size_t n, size_t step) {
  return (n + step - 1) / step * step;
}

static void multiply(const clb_engine *e, const clb_linear *l, const clb_matrix *w, float *y, size_t row0,
                     size_t row1) {
  if (l->exact || e->precision == COLIBRI_EXACT) {
    clb_matmul_rows(e->kernels, w->type, w->data, w->row_bytes, w->cols, row0, row1, l->x.x, l->x.ld, l->n_tokens, y,
                    l->ldy);
  } else {
    const clb_fast_x_kind kind = clb_fast_kind(w->type);
    clb_fast_matmul_rows(e->kernels, w->type, w->data, w->row_bytes, w->cols, row0, row1, l->x.codes[kind],
                         l->x.code_bytes[kind], l->x.x, l->x.ld, l->n_tokens, y, l->ldy);
  }
}

static void add_bias(float *y, const float *bias, size_t row0, size_t row1) {
  if (!bias) return;
  for (size_t r = row0; r < row1; r++) y[r] += bias[r];
}

static void run_rows(const clb_engine *e, const clb_linear *l, size_t row0, size_t row1) {
  multiply(e, l, l->w, l->y, row0, row1);
  if (l->up) multiply(e, l, l->up, l->y_up, row0, row1);
  for (size_t t = 0; t < l->n_tokens; t++) {
    float *y = l->y + t * l->ldy;
    add_bias(y, l->bias, row0, row1);
    if (!l->up) continue;
    float *up = l->y_up + t * l->ldy;
    add_bias(up, l->up_bias, row0, row1);
    clb_activate(e, y + row0, y + row0, up + row0, row1 - row0);
  }
}

static void linear_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const linear_job *job = context;
  size_t i = 0;
  while (task >= job->first_task[i + 1]) i++;
  const clb_linear *l = &job->linears[i];
  size_t row0 = (task - job->first_task[i]) * job->rows_per_task[i];
  size_t row1 = row0 + job->rows_per_task[i];
  run_rows(job->engine, l, row0, row1 < l->w->rows ? row1 : l->w->rows);
}

static size_t row_products(const clb_linear *l) {
  return l->w->cols * l->n_tokens * (l->up ? 2 : 1);
}

// Tasks are about equally long, and of as many consecutive rows as that allows: weights stream from memory.
void clb_linear_run(clb_engine *e, const clb_linear *linears, size_t n) {
  linear_job job = {.engine = e, .linears = linears};
  const size_t n_threads = clb_pool_threads(e->pool);
  size_t products = 0;
  for (size_t i = 0; i < n; i++) products += linears[i].w->rows * row_products(&linears[i]);
  size_t share = n_threads == 1 ? products : products / (n_threads * TASKS_PER_THREAD);
  if (share < MIN_TASK_PRODUCTS) share = MIN_TASK_PRODUCTS;
  for (size_t i = 0; i < n; i++) {
    const size_t rows = linears[i].w->rows, wanted = share / (row_products(&linears[i]) + 1) + 1;
    const size_t n_tasks = (rows + wanted - 1) / wanted;
    job.rows_per_task[i] = round_up((rows + n_tasks - 1) / n_tasks, ROW_STEP);
    job.first_task[i + 1] = job.first_task[i] + (rows + job.rows_per_task[i] - 1) / job.rows_per_task[i];
  }
  clb_pool_run(e->pool, linear_task, &job, job.first_task[n]);
}
