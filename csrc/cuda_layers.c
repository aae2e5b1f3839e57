/* Who follows a load by layer: waits for one, asks how many are there, cancels. Any thread, at any time. */
#include <stdio.h>
#include <stdlib.h>

#include "cuda_internal.h"

void maru_tell_layers(struct maru_layers *layers, uint32_t submitted, int status, const char *text) {
  pthread_mutex_lock(&layers->lock);
  if (submitted > layers->submitted) layers->submitted = submitted;
  if (status && !layers->status) {
    layers->status = status;
    snprintf(layers->text, MARU_TEXT, "%s", text);
  }
  pthread_cond_broadcast(&layers->changed);
  pthread_mutex_unlock(&layers->lock);
}

int maru_is_cancelled(struct maru_layers *layers) {
  pthread_mutex_lock(&layers->lock);
  int cancelled = layers->cancelled;
  pthread_mutex_unlock(&layers->lock);
  return cancelled;
}

static int begin(struct maru_layers *layers, CUhandle_ stream, char *text, size_t room) {
  const struct maru_driver *driver = &layers->cuda->driver;
  int status;
  STEP(maru_take_event(layers->cuda, &layers->began, text, room));
  TRY(EventRecord, layers->began, stream);
  return MARU_OK;
}

int maru_cuda_layers_open(struct maru_cuda *cuda, uint32_t count, uint64_t stream, struct maru_layers **out, char *text,
                          size_t room) {
  if (!cuda || !out) return MARU_E_NULL;
  *out = NULL;
  if (!count) return MARU_E_ARGUMENT;
  struct maru_layers *layers = calloc(1, sizeof *layers);
  CUhandle_ *arrived = calloc(count, sizeof *arrived);
  if (!layers || !arrived) {
    free(layers), free(arrived);
    return MARU_E_MEMORY;
  }
  layers->cuda = cuda, layers->arrived = arrived, layers->count = count;
  pthread_mutex_init(&layers->lock, NULL);
  pthread_cond_init(&layers->changed, NULL);
  struct maru_entered before = maru_enter(cuda);
  int status = begin(layers, (CUhandle_)(uintptr_t)stream, text, room);
  maru_leave(cuda, before);
  if (status)
    maru_cuda_layers_close(layers);
  else
    *out = layers;
  return status;
}

void maru_cuda_layers_close(struct maru_layers *layers) {
  if (!layers) return;
  struct maru_entered before = maru_enter(layers->cuda);
  CUhandle_ last = layers->began;
  if (last) maru_give_event(layers->cuda, last);
  for (uint32_t k = 0; k < layers->count; last = layers->arrived[k++])
    if (layers->arrived[k] && layers->arrived[k] != last) maru_give_event(layers->cuda, layers->arrived[k]);
  maru_leave(layers->cuda, before);
  pthread_cond_destroy(&layers->changed);
  pthread_mutex_destroy(&layers->lock);
  free(layers->arrived);
  free(layers);
}

int maru_cuda_layers_cancel(struct maru_layers *layers) {
  if (!layers) return MARU_E_NULL;
  pthread_mutex_lock(&layers->lock);
  layers->cancelled = 1;
  pthread_mutex_unlock(&layers->lock);
  return MARU_OK;
}

int maru_cuda_layers_error(struct maru_layers *layers, char *text, size_t room) {
  if (!layers || !text || !room) return MARU_E_NULL;
  pthread_mutex_lock(&layers->lock);
  snprintf(text, room, "%s", layers->text);
  pthread_mutex_unlock(&layers->lock);
  return MARU_OK;
}

/* With the lock held: what the driver said is kept for every later call. */
static int fail(struct maru_layers *layers, const char *call, int result) {
  layers->status = maru_explain(&layers->cuda->driver, layers->text, MARU_TEXT, call, result);
  return layers->status;
}

int maru_cuda_wait_layer(struct maru_layers *layers, uint32_t layer, uint64_t stream) {
  if (!layers) return MARU_E_NULL;
  if (layer >= layers->count) return MARU_E_ARGUMENT;
  pthread_mutex_lock(&layers->lock);
  while (!layers->status && layers->submitted <= layer) pthread_cond_wait(&layers->changed, &layers->lock);
  int status = layers->status;
  pthread_mutex_unlock(&layers->lock);
  if (status || !layers->arrived[layer]) return status;
  /* Without the lock: a driver may block here for as long as the stream is full. */
  struct maru_entered before = maru_enter(layers->cuda);
  int result = layers->cuda->driver.StreamWaitEvent((CUhandle_)(uintptr_t)stream, layers->arrived[layer], 0);
  maru_leave(layers->cuda, before);
  if (!result) return MARU_OK;
  pthread_mutex_lock(&layers->lock);
  status = fail(layers, "StreamWaitEvent", result);
  pthread_mutex_unlock(&layers->lock);
  return status;
}

int maru_cuda_layers_done(struct maru_layers *layers, uint32_t *submitted, uint32_t *done) {
  if (!layers || !submitted || !done) return MARU_E_NULL;
  pthread_mutex_lock(&layers->lock);
  struct maru_entered before = maru_enter(layers->cuda);
  while (!layers->status && layers->done < layers->submitted) {
    CUhandle_ event = layers->arrived[layers->done];
    int result = event ? layers->cuda->driver.EventQuery(event) : 0;
    if (result == CU_ERROR_NOT_READY_) break;
    if (result) fail(layers, "EventQuery", result);
    while (!result && layers->done < layers->submitted && layers->arrived[layers->done] == event) layers->done++;
  }
  maru_leave(layers->cuda, before);
  int status = layers->status;
  *submitted = layers->submitted, *done = layers->done;
  pthread_mutex_unlock(&layers->lock);
  return status;
}
