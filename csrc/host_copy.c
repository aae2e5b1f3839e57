/* Copies between pages in host memory and objects: see maru.h for what is promised. */
#include "host_kernels.h"
#include "maru.h"

#include <string.h>

enum {
  /* Bytes of a tile: what is read for it, the tile, and what is read for the next one all fit into the first cache. */
  TILE = 8192,
  /* How far ahead what will be read is fetched, about: processors do it by themselves only for what lies in a row for
   * long. More would not stay in the first cache. */
  AHEAD = 16384,
  /* About so many bytes of a plane are read from objects before the other plane's: of K, transposed head by head, all
   * heads are in the first cache then. */
  WINDOW = 16384,
  /* Rows from this length on are long: processors fetch them by themselves. */
  LONG = 1024,
};

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* ---- Jobs ------------------------------------------------------------------------------------------------------- */

/* What one thread takes at a time: a piece of one layer. */
struct unit {
  char *page[MARU_PLANES], *object[MARU_PLANES];
  size_t tokens;
};

/* What is read and written in one go: rows, or as many matrices as `matrices` has, if it has any. */
struct pass {
  char *to;
  const char *from;
  struct rows rows;
  struct loop matrices;
  struct matrix matrix;
};

/* In which order a unit is moved. Past the caches it is that in which what is read follows each other: writing minds
 * less. */
enum order {
  /* One plane after the other, all heads of a token at once, as objects have them. */
  PLANES,
  /* Both planes at once: their rows of a token and head lie beside each other in the pages. */
  PAIRS,
  /* A head of each plane in turn, as pages have them where a plane is transposed. */
  HEADS,
};

/* Where a thread is in a job. */
struct walk {
  struct maru_copy_job *job;
  const struct kernels *kernels;
  int store, past;
  enum order order;
  /* So many tokens of a unit are moved in `passes` passes, then the next ones. */
  size_t window, passes;
  struct unit unit;
  /* The first token and the number of the next pass. */
  size_t token, number;
  /* The pass that is under way and the next one, by turns. */
  struct pass pass[2];
  int turn;
};

static void set_unit(struct unit *unit, const struct maru_copy_job *job, uint64_t number) {
  const struct maru_geometry *g = job->geometry;
  const struct maru_piece *p = &job->pieces[number / job->layers];
  size_t step = number % job->layers, row = p->row + step, size = g->element_size;
  unit->tokens = p->tokens;
  for (uint32_t i = 0; i < g->planes; i++) {
    const struct maru_plane *plane = &g->plane[i];
    size_t first = plane->offset + p->block * plane->block + p->slot * plane->token;
    size_t token = (i * (size_t)job->object_layers + row) * g->chunk_tokens + p->token;
    unit->page[i] = (char *)(uintptr_t)job->layer_addresses[p->layer + step] + first * size;
    unit->object[i] = (char *)(uintptr_t)p->object + token * g->heads * g->head_size * size;
  }
}

/* Whether elements of a head follow each other in the pages, too. */
static int has_rows(const struct maru_geometry *g, uint32_t plane) {
  return g->plane[plane].dim == 1 || g->head_size == 1;
}

static int has_matrices(const struct maru_geometry *g) { return !has_rows(g, 0) || !has_rows(g, g->planes - 1); }

static enum order order_of(const struct maru_geometry *g, int by_head) {
  const struct maru_plane *k = &g->plane[0], *v = &g->plane[1];
  if (has_matrices(g)) return by_head ? HEADS : PLANES;
  int alike = g->planes == 2 && k->token == v->token && k->head == v->head && k->block == v->block;
  return alike && k->offset + g->head_size == v->offset ? PAIRS : PLANES;
}

static struct walk walk_of(struct maru_copy_job *job) {
  const struct maru_geometry *g = job->geometry;
  struct walk w = {.job = job, .kernels = maru_best_kernels(), .store = job->direction == MARU_STORE};
  /* Measured: where tiles are written into the caches and far apart, wide vectors make nothing faster. */
  if (w.store && !job->past_caches) w.kernels = &maru_portable_kernels;
  w.past = job->past_caches && w.kernels->stream;
  int direct = w.past && w.kernels->stream_transposed;
  w.order = order_of(g, w.store && direct);
  w.passes = w.order == PAIRS ? 1 : w.order == HEADS ? (size_t)g->planes * g->heads : g->planes;
  w.window = SIZE_MAX;
  if (direct && w.order == PLANES && has_matrices(g)) {
    size_t line = LINE / g->element_size, tokens = WINDOW / ((size_t)g->heads * g->head_size * g->element_size);
    w.window = tokens > line ? tokens - tokens % line : line;
  }
  return w;
}

static void set_loop(struct loop *loop, size_t count, size_t page, size_t object, int store) {
  loop->count = count;
  loop->to = store ? object : page;
  loop->from = store ? page : object;
}

static void set_pass(struct pass *p, const struct walk *w) {
  const struct maru_geometry *g = w->job->geometry;
  size_t number = w->order == HEADS ? w->number % g->planes : w->number;
  size_t first = w->order == HEADS ? w->number / g->planes : 0, heads = w->order == HEADS ? 1 : g->heads;
  const struct maru_plane *plane = &g->plane[number];
  size_t size = g->element_size, row = g->head_size * size, all = g->heads * row;
  size_t token = plane->token * size, head = plane->head * size, pitch = plane->dim * size;
  size_t tokens = least(w->window, w->unit.tokens - w->token);
  char *page = w->unit.page[number] + w->token * token + first * head;
  char *object = w->unit.object[number] + w->token * all + first * row;
  int store = w->store;
  struct rows *r = &p->rows;
  p->to = store ? object : page, p->from = store ? page : object;
  p->matrices.count = 0;
  set_loop(&r->loop[0], tokens, token, all, store);
  set_loop(&r->loop[1], heads, head, row, store);
  set_loop(&r->loop[2], 1, 0, 0, store);
  r->bytes = row;
  if (w->order == PAIRS) {
    set_loop(&r->loop[2], 2, row, (size_t)(w->unit.object[1] - w->unit.object[0]), store);
  } else if (has_rows(g, (uint32_t)number)) {
    if (heads == 1 || head == row) r->bytes *= heads, r->loop[1].count = 1;
    if (token == r->bytes && all == r->bytes) r->bytes *= tokens, r->loop[0].count = 1;
  } else if (plane->token == 1) {
    set_loop(&p->matrices, heads, head, row, store);
    p->matrix.to_pitch = store ? all : pitch, p->matrix.from_pitch = store ? pitch : all;
    p->matrix.rows = store ? g->head_size : tokens, p->matrix.columns = store ? tokens : g->head_size;
    p->matrix.element = size;
  } else {
    set_loop(&r->loop[2], g->head_size, pitch, size, store);
    r->bytes = size;
  }
}

/* The next pass, NULL when none is left. Each pass calls it once, as late as it can: what one thread has taken no other
 * one does. */
static const struct pass *go_on(struct walk *w) {
  if (w->number == w->passes) w->number = 0, w->token += least(w->window, w->unit.tokens - w->token);
  if (w->token == w->unit.tokens) {
    uint64_t unit = __atomic_fetch_add(&w->job->taken, 1, __ATOMIC_RELAXED);
    if (unit >= (uint64_t)w->job->piece_count * w->job->layers) return NULL;
    set_unit(&w->unit, w->job, unit);
    w->token = 0;
  }
  struct pass *next = &w->pass[w->turn ^= 1];
  set_pass(next, w);
  w->number++;
  return next;
}

/* ---- Rows ------------------------------------------------------------------------------------------------------- */

/* A row whose ends may share their lines with something else. */
static void stream_row(const struct kernels *kernels, char *to, const char *from, size_t bytes) {
  size_t head = -(uintptr_t)to & (LINE - 1), body = (bytes - head) & ~(size_t)(LINE - 1);
  struct rows lines = {body, {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}}};
  memcpy(to, from, head);
  kernels->stream(to + head, from + head, &lines, 1, 0);
  memcpy(to + head + body, from + head + body, bytes - head - body);
}

static inline void copy_vectors(char *to, const char *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += VECTOR) memcpy(to + at, from + at, VECTOR);
}

/* `count` times the rows of the inner loops; what lies `ahead` bytes behind each is fetched, if that is not 0. */
static void copy_rows(const struct walk *w, char *to, const char *from, const struct rows *r, size_t count,
                      size_t ahead) {
  const struct kernels *kernels = w->kernels;
  size_t places = (uintptr_t)to | r->bytes;
  for (int i = 0; i < 3; i++) places |= r->loop[i].count > 1 ? r->loop[i].to : 0;
  if (w->past && !(places & (LINE - 1))) {
    kernels->stream(to, from, r, count, ahead);
  } else if (w->past && r->bytes >= LONG) {
#define STREAM_ROW(to, from, bytes) stream_row(kernels, to, from, bytes)
    EACH_ROW(STREAM_ROW, r->bytes);
  } else if (r->bytes <= 16 * VECTOR && !(r->bytes & (VECTOR - 1))) {
    EACH_ROW(copy_vectors, r->bytes);
  } else {
    EACH_ROW(memcpy, r->bytes);
  }
}

/* Rows fetch what is AHEAD bytes further on, the last ones what the next pass begins with. */
static const struct pass *run_rows(struct walk *w, const struct pass *p) {
  const struct rows *r = &p->rows;
  const struct loop *outer = &r->loop[0];
  int fetches = r->bytes >= VECTOR && r->bytes < LONG;
  size_t last = least(outer->count, AHEAD / (r->bytes * r->loop[1].count * r->loop[2].count) + 1);
  size_t most = outer->count - last;
  if (most) copy_rows(w, p->to, p->from, r, most, fetches ? last * outer->from : 0);
  const struct pass *next = go_on(w);
  char *to = p->to + most * outer->to;
  const char *from = p->from + most * outer->from;
  copy_rows(w, to, from, r, last, fetches && next ? (size_t)(next->from - from) : 0);
  return next;
}

/* ---- Matrices --------------------------------------------------------------------------------------------------- */

/* Straight to where they belong. As much as is read is fetched from `soon` on. */
static void stream_matrix(const struct walk *w, char *to, const char *from, const struct matrix *m, const char *soon) {
  /* The last part is fetched during the first one: the first cache does not hold more. */
  size_t line = LINE / m->element, rows = AHEAD / (m->columns * m->element);
  size_t last = least(m->rows, rows > line ? rows - rows % line : line), most = m->rows - last;
  const char *rest = from + most * m->from_pitch;
  if (most) w->kernels->stream_transposed(to, from, m, most, rest);
  w->kernels->stream_transposed(to + most * m->element, rest, m, last, soon);
}

/* By way of tiles in the cache: so what is written are rows of whole lines, not vectors far apart. `soon`: a matrix of
 * the same form that comes after this one, or NULL. */
static void copy_tiles(const struct walk *w, char *to, const char *from, const struct matrix *m, const char *soon) {
  char tile[TILE] __attribute__((aligned(LINE)));
  size_t rows = least(m->rows, TILE / LINE), columns = TILE / (rows * m->element);
  columns -= columns % (LINE / m->element);
  for (size_t r = 0; r < m->rows; r += rows)
    for (size_t c = 0; c < m->columns; c += columns) {
      size_t high = least(rows, m->rows - r), wide = least(columns, m->columns - c), bytes = high * m->element;
      const char *source = from + r * m->from_pitch + c * m->element, *after = soon;
      if (c + columns < m->columns) after = source + columns * m->element;
      else if (r + rows < m->rows) after = from + (r + rows) * m->from_pitch;
      struct matrix part = {bytes, m->from_pitch, high, wide, m->element};
      w->kernels->transpose(tile, source, &part, after);
      char *target = to + c * m->to_pitch + r * m->element;
      if (!w->past && bytes % VECTOR == 0) {
        for (size_t i = 0; i < wide; i++) copy_vectors(target + i * m->to_pitch, tile + i * bytes, bytes);
        continue;
      }
      struct rows out = {bytes, {{wide, m->to_pitch, bytes}, {1, 0, 0}, {1, 0, 0}}};
      if (m->to_pitch == bytes) out.bytes *= wide, out.loop[0].count = 1;
      copy_rows(w, target, tile, &out, out.loop[0].count, 0);
    }
}

static const struct pass *run_matrices(struct walk *w, const struct pass *p) {
  const struct matrix *m = &p->matrix;
  const struct loop *each = &p->matrices;
  size_t row = m->rows * m->element, lines = (uintptr_t)p->to | m->to_pitch | row | (each->count > 1 ? each->to : 0);
  int whole = !(lines & (LINE - 1)) && m->columns * m->element % VECTOR == 0;
  int direct = whole && w->past && w->kernels->stream_transposed;
  const struct pass *next = go_on(w);
  const char *soon = next ? next->from : NULL;
  for (size_t i = 0; i < each->count; i++) {
    char *to = p->to + i * each->to;
    const char *from = p->from + i * each->from;
    if (direct)
      stream_matrix(w, to, from, m, soon ? soon + i * row * m->columns : NULL);
    else
      copy_tiles(w, to, from, m, i + 1 < each->count ? from + each->from : next && next->matrices.count ? soon : NULL);
  }
  return next;
}

/* ---- The interface ---------------------------------------------------------------------------------------------- */

/* Whether tokens of any two blocks that follow each other lie as those of one do. */
static int is_gapless(const struct maru_geometry *g) {
  for (uint32_t n = 0; n < g->planes; n++)
    if (g->plane[n].block != g->block_size * g->plane[n].token) return 0;
  return 1;
}

static int is_sound(const struct maru_copy_job *job) {
  const struct maru_geometry *g = job->geometry;
  uint32_t size = g->element_size;
  if (job->direction > MARU_STORE || !g->planes || g->planes > MARU_PLANES) return 0;
  if (size != 1 && size != 2 && size != 4 && size != 8) return 0;
  if (!g->heads || !g->head_size || !job->layers) return 0;
  int gapless = is_gapless(g);
  for (uint32_t i = 0; i < job->piece_count; i++) {
    const struct maru_piece *p = &job->pieces[i];
    if (!p->tokens || p->block >= g->blocks || p->slot >= g->block_size) return 0;
    uint64_t blocks = gapless ? g->blocks - p->block : 1;
    if ((uint64_t)p->slot + p->tokens > blocks * g->block_size) return 0;
    if ((uint64_t)p->token + p->tokens > g->chunk_tokens) return 0;
    if ((uint64_t)p->layer + job->layers > g->layers || (uint64_t)p->row + job->layers > job->object_layers) return 0;
  }
  return 1;
}

uint32_t maru_copy_abi_version(void) { return MARU_ABI_VERSION; }

int maru_copy_pieces(struct maru_copy_job *job) {
  if (!job || !job->geometry || !job->layer_addresses || !job->pieces) return MARU_E_NULL;
  if (!is_sound(job)) return MARU_E_ARGUMENT;
  struct walk w = walk_of(job);
  for (const struct pass *p = go_on(&w); p;) p = p->matrices.count ? run_matrices(&w, p) : run_rows(&w, p);
  if (w.past) w.kernels->streamed();
  return MARU_OK;
}
