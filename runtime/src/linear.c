// Matrix products, shared out to the threads by blocks of rows.
#include "engine.h"

enum {
  MIN_TASK_PRODUCTS = 1 << 15,  // below this, handing out a task costs more than computing it
  TASKS_PER_THREAD = 4,         // so that a thread that was held up does not hold up the job
  ROW_STEP = 8,                 // a multiple of the kernels' tile
};

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
  clb_matmul_rows(e->kernels, w->type, w->data, w->row_bytes, w->cols, row0, row1, l->x, l->ldx, l->n_tokens, y,
                  l->ldy);
}

static void run_rows(const clb_engine *e, const clb_linear *l, size_t row0, size_t row1) {
  multiply(e, l, l->w, l->y, row0, row1);
  if (l->up) multiply(e, l, l->up, l->y_up, row0, row1);
  for (size_t t = 0; t < l->n_tokens; t++) {
    float *y = l->y + t * l->ldy;
    if (l->bias) {
      for (size_t r = row0; r < row1; r++) y[r] += l->bias[r];
    }
    if (l->up) clb_silu_mul(e->kernels, y + row0, y + row0, l->y_up + t * l->ldy + row0, row1 - row0);
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

void clb_linear_run(clb_engine *e, const clb_linear *linears, size_t n) {
  linear_job job = {.engine = e, .linears = linears};
  for (size_t i = 0; i < n; i++) {
    const clb_linear *l = &linears[i];
    size_t products_per_row = l->w->cols * l->n_tokens * (l->up ? 2 : 1);
    size_t least = MIN_TASK_PRODUCTS / (products_per_row + 1) + 1;
    size_t fair = l->w->rows / (clb_pool_threads(e->pool) * TASKS_PER_THREAD) + 1;
    size_t rows = clb_pool_threads(e->pool) == 1 ? l->w->rows : (least > fair ? least : fair);
    job.rows_per_task[i] = round_up(rows, ROW_STEP);
    job.first_task[i + 1] = job.first_task[i] + (l->w->rows + job.rows_per_task[i] - 1) / job.rows_per_task[i];
  }
  clb_pool_run(e->pool, linear_task, &job, job.first_task[n]);
}
