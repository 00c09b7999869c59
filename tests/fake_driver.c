/* A CUDA driver without a card: two devices whose memory is the host's, every call done when it returns. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int CUresult; typedef uintptr_t ptr;
static int context[2]; static void *current;
CUresult cuInit(unsigned f) { return 0; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return 0; }
CUresult cuDeviceGetCount(int *n) { *n = 2; return 0; }
CUresult cuDeviceGet(int *d, int n) { *d = n; return 0; }
CUresult cuDevicePrimaryCtxRetain(void **c, int d) { *c = &context[d]; return 0; }
CUresult cuDevicePrimaryCtxRelease(int d) { return 0; }
CUresult cuDevicePrimaryCtxReset(int d) { return 0; }
CUresult cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
CUresult cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : 1; return 0; }
CUresult cuDeviceGetName(char *n, int l, int d) { strncpy(n, "fake", l); return 0; }
CUresult cuDeviceGetUuid(char *u, int d) { memset(u, d, 16); return 0; }
CUresult cuDeviceTotalMem(size_t *n, int d) { *n = 1 << 30; return 0; }
CUresult cuCtxGetCurrent(void **c) { *c = current; return 0; }
CUresult cuCtxSetCurrent(void *c) { current = c; return 0; }
CUresult cuCtxPushCurrent(void *c) { current = c; return 0; }
CUresult cuCtxPopCurrent(void **c) { if (c) *c = current; current = 0; return 0; }
CUresult cuCtxGetDevice(int *d) { *d = current == &context[1]; return 0; }
CUresult cuCtxSynchronize(void) { return 0; }
CUresult cuCtxGetApiVersion(void *c, unsigned *v) { *v = 13000; return 0; }
CUresult cuMemGetInfo(size_t *f, size_t *t) { *f = *t = 1 << 30; return 0; }
CUresult cuMemAlloc(ptr *p, size_t n) { *p = (ptr)malloc(n); return 0; }
CUresult cuMemFree(ptr p) { free((void *)p); return 0; }
CUresult cuMemHostAlloc(void **p, size_t n, unsigned f) { *p = malloc(n); return 0; }
CUresult cuMemFreeHost(void *p) { free(p); return 0; }
CUresult cuMemHostGetDevicePointer(ptr *d, void *p, unsigned f) { *d = (ptr)p; return 0; }
CUresult cuMemGetAddressRange(ptr *b, size_t *n, ptr p) { if (b) *b = p; if (n) *n = 1 << 20; return 0; }
CUresult cuPointerGetAttribute(void *v, int a, ptr p) { if (a == 1) *(void **)v = &context[0]; else if (a == 3) *(ptr *)v = p; else if (a==9) *(int*)v=0; else *(unsigned *)v = 2; return 0; }
CUresult cuStreamCreate(void **s, unsigned f) { *s = malloc(1); return 0; }
CUresult cuStreamDestroy(void *s) { free(s); return 0; }
CUresult cuStreamSynchronize(void *s) { return 0; }
static CUresult copy(void *d, const void *s, size_t n) { if (!d || !s) return 1; memcpy(d, s, n); return 0; }
CUresult cuMemcpyHtoD(ptr d, const void *s, size_t n) { return copy((void *)d, s, n); }
CUresult cuMemcpyDtoH(void *d, ptr s, size_t n) { return copy(d, (void *)s, n); }
CUresult cuMemcpyDtoD(ptr d, ptr s, size_t n) { return copy((void *)d, (void *)s, n); }
CUresult cuMemcpy(ptr d, ptr s, size_t n) { return copy((void *)d, (void *)s, n); }
CUresult cuMemcpyHtoDAsync(ptr d, const void *s, size_t n, void *q) { return copy((void *)d, s, n); }
CUresult cuMemcpyDtoHAsync(void *d, ptr s, size_t n, void *q) { return copy(d, (void *)s, n); }
CUresult cuMemcpyDtoDAsync(ptr d, ptr s, size_t n, void *q) { return copy((void *)d, (void *)s, n); }
CUresult cuMemcpyPeer(ptr d, void *dc, ptr s, void *sc, size_t n) { return copy((void *)d, (void *)s, n); }
typedef struct { size_t sx, sy; int st; const void *sh; ptr sd; void *sa; size_t sp, dx, dy; int dt; void *dh; ptr dd; void *da; size_t dp, w, h; } rect;
CUresult cuMemcpy2D(const rect *r) {
    const char *s = (r->st == 1 ? r->sh : (void *)r->sd); char *d = (r->dt == 1 ? r->dh : (void *)r->dd);
    for (size_t y = 0; y < r->h; y++) memcpy(d + (y + r->dy) * r->dp + r->dx, s + (y + r->sy) * r->sp + r->sx, r->w);
    return 0;
}
CUresult cuGetProcAddress_v2(const char *n, void **f, int v, uint64_t g, int *q) {
    Dl_info i; dladdr((void *)cuInit, &i); void *me = dlopen(i.dli_fname, RTLD_LAZY);
    *f = dlsym(me, n);
    if (q) *q = *f ? 0 : 1;
    return *f ? 0 : 500;
}
CUresult cuGetProcAddress(const char *n, void **f, int v, uint64_t g) { return cuGetProcAddress_v2(n, f, v, g, 0); }
CUresult cuGetErrorName(int e, const char **s) { *s = "CUDA_ERROR_FAKE"; return 0; }
CUresult cuGetErrorString(int e, const char **s) { *s = "fake"; return 0; }
