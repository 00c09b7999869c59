/* A CUDA driver without a card: libcuda.so.1 as cuda.bindings, numba and ctypes load it, with behaviour.

   What is real here: handles that go stale, contexts that belong to threads, streams as queues in the time of a device
   whose clock runs beside the host's, events that complete when their stream reaches them, graph capture and what
   kills it, errors that stick, forks. What is not: kernels compute nothing (a test says how long one takes), device
   memory is the host's and a copy is done when its call returns.

   Whoever writes a test scripts it by the fake_* functions of the last section (typed in tests/driver.py). A process
   that finds it by LD_LIBRARY_PATH alone can be scripted by FAKE_DRIVER_VERSION (13000) and FAKE_DRIVER_DEVICES (2).

   The rules follow the comments of cuda.h (CUDA 13.0). Where that leaves a question open, the stricter answer was
   taken, because a service that passes here must pass there; such places say so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---------------------------------------------------------------------------------------------- words of cuda.h -- */

#define RESULTS(X) \
    X(CUDA_SUCCESS, 0) X(CUDA_ERROR_INVALID_VALUE, 1) X(CUDA_ERROR_OUT_OF_MEMORY, 2) \
    X(CUDA_ERROR_NOT_INITIALIZED, 3) X(CUDA_ERROR_NO_DEVICE, 100) X(CUDA_ERROR_INVALID_DEVICE, 101) \
    X(CUDA_ERROR_INVALID_CONTEXT, 201) X(CUDA_ERROR_INVALID_HANDLE, 400) X(CUDA_ERROR_ILLEGAL_STATE, 401) \
    X(CUDA_ERROR_NOT_READY, 600) X(CUDA_ERROR_ILLEGAL_ADDRESS, 700) X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709) \
    X(CUDA_ERROR_LAUNCH_FAILED, 719) X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900) \
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901) X(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902) \
    X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903) X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904) \
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905) X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906) \
    X(CUDA_ERROR_CAPTURED_EVENT, 907) X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908) X(CUDA_ERROR_UNKNOWN, 999)
#define AS_CODE(name, code) name = code,
typedef enum { RESULTS(AS_CODE) } CUresult;

enum { CU_STREAM_LEGACY = 1, CU_STREAM_PER_THREAD = 2, CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2, CU_EVENT_INTERPROCESS = 4 };
enum { CU_EVENT_RECORD_EXTERNAL = 1 };
enum { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED };
enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALIDATED };

typedef uintptr_t handle; /* CUcontext, CUstream, CUevent, CUgraph, CUgraphExec: never looked through by a caller */
typedef uintptr_t address;
typedef int CUdevice;

/* ------------------------------------------------------------------------------------------- state of the driver -- */

enum { DEVICES = 8, STACK = 16, CHUNK = 4096, CHUNKS = 16384 };
#define SECOND 1000000000LL

/* Objects live in slots that are used again, their handles are not: a handle that was destroyed is known as stale. */
typedef struct {
    handle handle; /* 0 in a free slot */
    uint32_t index, generation, next_free;
} Slot;

typedef struct {
    const uintptr_t kind;
    const size_t size;
    char *chunks[CHUNKS];
    uint32_t used, first_free;
    int64_t live, made;
} Pool;

typedef struct {
    int64_t host_base_ns, device_base_ns, drift_ppb; /* the device's clock: a line through the base */
    int64_t event_ns;                                /* what a record takes of its stream */
    int64_t latency_ns;                              /* from a call to the moment at which the device hears of it */
    int64_t tick_ns;                                 /* how fine the device's time stamps are */
    int shared;        /* 1: one kernel at a time, in the order of launch; 2: events, too, wait in that one queue */
    int64_t busy_until_ns;                           /* of a shared device, on its clock */
    CUresult broken;                                 /* what every call answers ... */
    int64_t broken_at_ns;                            /* ... from this host time on */
    handle primary;
    int retained;
    unsigned flags;
} Device;

typedef struct {
    Slot slot;
    bool alive;
    int device;
    unsigned flags;
    handle legacy;             /* its stream 0 */
    int64_t blocking_until_ns; /* until when its blocking streams have work, on the device's clock */
} Context;

typedef struct {
    Slot slot;
    Context *context;
    bool builtin, legacy, blocking;
    unsigned flags;
    int priority;
    int64_t until_ns; /* when all that was enqueued so far is done, on the device's clock */
    handle capture;
    bool unjoined;    /* the capture's first stream does not depend on what this one captured yet */
    uint64_t sequence;
    uint64_t number;  /* never another stream's, as handles may be */
    int pending;      /* host functions that have not returned */
    uint64_t enqueued;
    int64_t *queue;   /* where launch queues are bounded: when each of the last things enqueued is done */
} Stream;

typedef struct {
    Slot slot;
    Context *context;
    unsigned flags;
    enum { NEVER, RECORDED, CAPTURED } state;
    int64_t done_ns; /* on the device's clock */
    handle capture, stream;
    uint64_t sequence;
} Event;

typedef struct {
    enum { KERNEL, RECORD, COPY } kind;
    int64_t work_ns;
    handle event;
    void *to;
    const void *from;
    size_t size;
} Node;

typedef struct {
    Slot slot;
    Node *nodes;
    size_t count;
} Graph; /* also what an instantiated one is */

typedef struct Capture {
    Slot slot;
    struct Capture *next;
    handle origin, graph;
    Context *context;
    bool blocking;
    int mode, status;
    uint64_t id;
    struct Thread *owner;
} Capture;

static Pool contexts = {.kind = 1, .size = sizeof(Context)};
static Pool streams = {.kind = 2, .size = sizeof(Stream)};
static Pool events = {.kind = 3, .size = sizeof(Event)};
static Pool graphs = {.kind = 4, .size = sizeof(Graph)};
static Pool captures = {.kind = 5, .size = sizeof(Capture)};

/* Every function that is counted, by the name without _v2 and _ptsz. */
#define SYMBOLS(X) \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuGetProcAddress) X(cuDeviceGetCount) \
    X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceTotalMem) \
    X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxReset) \
    X(cuDevicePrimaryCtxGetState) X(cuDevicePrimaryCtxSetFlags) X(cuCtxCreate) X(cuCtxDestroy) X(cuCtxGetCurrent) \
    X(cuCtxSetCurrent) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxGetDevice) X(cuCtxGetId) X(cuCtxGetFlags) \
    X(cuCtxGetApiVersion) X(cuCtxGetStreamPriorityRange) X(cuCtxSynchronize) X(cuStreamCreate) \
    X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamQuery) X(cuStreamSynchronize) X(cuStreamWaitEvent) \
    X(cuStreamGetCtx) X(cuStreamGetDevice) X(cuStreamGetFlags) X(cuStreamGetId) X(cuStreamGetPriority) \
    X(cuStreamIsCapturing) X(cuStreamGetCaptureInfo) X(cuStreamBeginCapture) X(cuStreamEndCapture) \
    X(cuThreadExchangeStreamCaptureMode) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) \
    X(cuEventRecordWithFlags) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime) X(cuLaunchKernel) X(cuLaunchHostFunc) \
    X(cuGraphInstantiate) X(cuGraphLaunch) X(cuGraphDestroy) X(cuGraphExecDestroy) X(cuMemGetInfo) X(cuMemAlloc) \
    X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemHostGetDevicePointer) X(cuMemGetAddressRange) \
    X(cuPointerGetAttribute) X(cuMemcpy) X(cuMemcpyAsync)
#define AS_ENUM(name) S_##name,
#define AS_STRING(name) #name,
enum { SYMBOLS(AS_ENUM) SYMBOL_COUNT };
static const char *const symbol_names[] = {SYMBOLS(AS_STRING)};

typedef struct Thread {
    struct Thread *next;
    int tid;
    uint64_t epoch;
    int64_t calls[SYMBOL_COUNT];
    handle stack[STACK]; /* its contexts, the current one on top */
    int depth;
    int capture_mode;
    struct { handle context, stream; } own[STACK]; /* its streams CU_STREAM_PER_THREAD */
} Thread;

typedef struct {
    CUresult code;
    int64_t skip, times; /* after `skip` more calls, for `times` calls (-1: for ever) */
    int64_t cost_ns;
    bool closed; /* a gate at which every call waits */
} Script;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t gate;
    bool initialised, forked, is_virtual;
    int version, device_count;
    int64_t virtual_ns;
    uint64_t epoch; /* counts the resets: what threads remember of an earlier one is void */
    Device devices[DEVICES];
    Script scripts[SYMBOL_COUNT];
    int64_t calls[SYMBOL_COUNT];
    Thread *threads;
    Capture *captures; /* those not ended yet */
    uint64_t capture_ids;
    int64_t event_limit; /* -1: none */
    int64_t captures_killed, captured_records;
    bool reuses_streams; /* a stream gets the handle of one that was destroyed */
    int64_t queue_limit; /* 0: none */
    uint64_t streams_made;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER, .gate = PTHREAD_COND_INITIALIZER, .version = 13000, .device_count = 2, .event_limit = -1};

static int64_t *forked_calls; /* in memory that a process shares with its children */
static __thread Thread *self;

/* -------------------------------------------------------------------------------------------------------- handles -- */

static Slot *slot_at(Pool *pool, uint32_t index) {
    return (Slot *)(pool->chunks[index / CHUNK] + (size_t)(index % CHUNK) * pool->size);
}

static void *take(Pool *pool) {
    Slot *slot;
    if (pool->first_free) {
        slot = slot_at(pool, pool->first_free - 1);
        pool->first_free = slot->next_free;
    } else {
        if (pool->used == (uint32_t)CHUNK * CHUNKS) return NULL;
        if (pool->used % CHUNK == 0) pool->chunks[pool->used / CHUNK] = calloc(CHUNK, pool->size);
        slot = slot_at(pool, pool->used);
        slot->index = pool->used++;
    }
    if (pool == &streams) free(((Stream *)slot)->queue);
    bool again = pool == &streams && state.reuses_streams && slot->generation;
    uint32_t index = slot->index, generation = again ? slot->generation : (slot->generation + 1) & 0xffffff;
    memset(slot, 0, pool->size);
    slot->index = index;
    slot->generation = generation;
    slot->handle = pool->kind << 52 | (handle)generation << 28 | (index + 1);
    pool->live++;
    pool->made++;
    if (pool == &streams) ((Stream *)slot)->number = ++state.streams_made;
    return slot;
}

static void give(Pool *pool, void *object) {
    Slot *slot = object;
    slot->handle = 0;
    slot->next_free = pool->first_free;
    pool->first_free = slot->index + 1;
    pool->live--;
}

static void *find(Pool *pool, handle wanted) {
    uint32_t index = (uint32_t)(wanted & 0xfffffff) - 1;
    if (wanted >> 52 != pool->kind || index >= pool->used) return NULL;
    Slot *slot = slot_at(pool, index);
    return slot->handle == wanted ? slot : NULL;
}

#define EACH(type, object, pool) \
    for (uint32_t i_##object = 0; i_##object < (pool).used; i_##object++) \
        for (type *object = (type *)slot_at(&(pool), i_##object); object && object->slot.handle; object = NULL)

/* ----------------------------------------------------------------------------------------------------------- time -- */

static int64_t host_now(void) {
    if (state.is_virtual) return state.virtual_ns;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

static int64_t to_device(const Device *device, int64_t host_ns) {
    __int128 passed = host_ns - device->host_base_ns;
    return device->device_base_ns + (int64_t)(passed * (SECOND + device->drift_ppb) / SECOND);
}

/* The first host nanosecond at which the device's clock shows at least `device_ns`. */
static int64_t to_host(const Device *device, int64_t device_ns) {
    __int128 passed = (__int128)(device_ns - device->device_base_ns) * SECOND, rate = SECOND + device->drift_ppb;
    return device->host_base_ns + (int64_t)(passed > 0 ? (passed + rate - 1) / rate : passed / rate);
}

static int64_t device_now(const Device *device) { return to_device(device, host_now()); }

static void set_drift(Device *device, int64_t drift_ppb) {
    int64_t now = host_now();
    device->device_base_ns = to_device(device, now);
    device->host_base_ns = now;
    device->drift_ppb = drift_ppb;
}

static void spend(int64_t cost_ns) {
    if (cost_ns <= 0) return;
    if (state.is_virtual) {
        state.virtual_ns += cost_ns;
        return;
    }
    struct timespec left = {cost_ns / SECOND, cost_ns % SECOND};
    pthread_mutex_unlock(&state.lock);
    while (nanosleep(&left, &left) && errno == EINTR) {}
    pthread_mutex_lock(&state.lock);
}

/* What a call that synchronises does: virtual time jumps to the end of the work, real time is waited for. */
static void wait_until(Device *device, int64_t device_ns) {
    while (device_now(device) < device_ns) spend(to_host(device, device_ns) - host_now());
}

/* ---------------------------------------------------------------------------------------------- the way into a call -- */

static Thread *this_thread(void) {
    if (self == NULL) {
        self = calloc(1, sizeof *self);
        self->tid = (int)syscall(SYS_gettid);
        self->next = state.threads;
        state.threads = self;
    }
    if (self->epoch != state.epoch) {
        self->epoch = state.epoch;
        self->depth = 0;
        self->capture_mode = CAPTURE_GLOBAL;
        memset(self->own, 0, sizeof self->own);
        memset(self->calls, 0, sizeof self->calls);
    }
    return self;
}

static CUresult broken(const Device *device) {
    return device->broken && host_now() >= device->broken_at_ns ? device->broken : CUDA_SUCCESS;
}

static Context *top(void) { return self->depth ? find(&contexts, self->stack[self->depth - 1]) : NULL; }

/* What a call needs before it can begin. ANYTIME: these look at nothing that a fork or an error could have spoilt.
   CONTEXT is asked of every call about a stream or an event, also where cuda.h does not list INVALID_CONTEXT
   (cuEventQuery): a thread that binds its context first is right in both cases. */
typedef enum { ANYTIME, INITIALISED, CONTEXT } Needs;

static CUresult enter(int symbol, Needs needs) {
    pthread_mutex_lock(&state.lock);
    Thread *thread = this_thread();
    thread->calls[symbol]++;
    state.calls[symbol]++;
    if (state.forked && needs != ANYTIME) {
        __atomic_add_fetch(forked_calls, 1, __ATOMIC_RELAXED);
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    Script *script = &state.scripts[symbol];
    while (script->closed) pthread_cond_wait(&state.gate, &state.lock);
    spend(script->cost_ns);
    if (script->times) {
        if (script->skip) {
            script->skip--;
        } else {
            if (script->times > 0) script->times--;
            return script->code;
        }
    }
    if (needs >= INITIALISED && !state.initialised && symbol != S_cuInit) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs == CONTEXT) {
        Context *context = top();
        if (context == NULL) return CUDA_ERROR_INVALID_CONTEXT;
        if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        return broken(&state.devices[context->device]);
    }
    return CUDA_SUCCESS;
}

static void leave(void *entered) {
    (void)entered;
    pthread_mutex_unlock(&state.lock);
}

/* One lock for everything, from here to the end of the function. */
#define ENTER(symbol, needs) \
    __attribute__((cleanup(leave))) CUresult entered = enter(S_##symbol, needs); \
    if (entered != CUDA_SUCCESS) return entered
#define LOCKED \
    __attribute__((cleanup(leave), unused)) int entered = pthread_mutex_lock(&state.lock); \
    this_thread()
#define TRY(call) \
    do { \
        CUresult tried = (call); \
        if (tried != CUDA_SUCCESS) return tried; \
    } while (0)
#define ALSO(name, as) extern __typeof__(name) as __attribute__((alias(#name)))

/* A child of a process that had initialised CUDA can use nothing of it, and cannot initialise it again. */
static void before_fork(void) { pthread_mutex_lock(&state.lock); }
static void after_fork(void) { pthread_mutex_unlock(&state.lock); }
static void in_child(void) {
    pthread_mutex_init(&state.lock, NULL);
    state.forked = state.forked || state.initialised;
    state.threads = self = NULL;
    memset(state.calls, 0, sizeof state.calls);
}

/* --------------------------------------------------------------------------------------- the driver and its devices -- */

CUresult cuInit(unsigned flags) {
    ENTER(cuInit, INITIALISED);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (state.device_count == 0) return CUDA_ERROR_NO_DEVICE;
    state.initialised = true;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    ENTER(cuDriverGetVersion, ANYTIME);
    *version = state.version;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(int error, const char **name) {
#define AS_NAME(name, code) {code, #name},
    static const struct { int code; const char *name; } names[] = {RESULTS(AS_NAME)};
    ENTER(cuGetErrorName, ANYTIME);
    *name = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].code == error) *name = names[i].name;
    }
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(int error, const char **text) {
    ENTER(cuGetErrorString, ANYTIME);
    *text = error ? "an error of the fake driver" : "no error";
    return CUDA_SUCCESS;
}

static Device *device_of(CUdevice number) {
    return number >= 0 && number < state.device_count ? &state.devices[number] : NULL;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount, INITIALISED);
    *count = state.device_count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
    ENTER(cuDeviceGet, INITIALISED);
    if (device_of(number) == NULL) return CUDA_ERROR_INVALID_DEVICE;
    *device = number;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    enum { COMPUTE_CAPABILITY_MAJOR = 75, COMPUTE_CAPABILITY_MINOR = 76 };
    ENTER(cuDeviceGetAttribute, INITIALISED);
    if (device_of(device) == NULL) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == COMPUTE_CAPABILITY_MAJOR ? 9 : attribute == COMPUTE_CAPABILITY_MINOR ? 0 : 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(cuDeviceGetName, INITIALISED);
    if (device_of(device) == NULL) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, length, "fake GPU %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(char *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid, INITIALISED);
    if (device_of(device) == NULL) return CUDA_ERROR_INVALID_DEVICE;
    memset(uuid, device + 1, 16);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *size, CUdevice device) {
    ENTER(cuDeviceTotalMem, INITIALISED);
    if (device_of(device) == NULL) return CUDA_ERROR_INVALID_DEVICE;
    *size = 1 << 30;
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------------------- contexts -- */

static Context *create_context(CUdevice device, unsigned flags) {
    Context *context = take(&contexts);
    context->alive = true;
    context->device = device;
    context->flags = flags;
    Stream *legacy = take(&streams);
    legacy->context = context;
    legacy->builtin = legacy->legacy = true;
    context->legacy = legacy->slot.handle;
    return context;
}

static void end_capture(Capture *capture);

/* A destroyed context stays known, so that threads in which it is current are told; all that was in it is gone. */
static void destroy_context(Context *context) {
    for (Capture *capture = state.captures, *next; capture; capture = next) {
        next = capture->next;
        if (capture->context == context) end_capture(capture);
    }
    EACH(Event, event, events) {
        if (event->context == context) give(&events, event);
    }
    EACH(Stream, stream, streams) {
        if (stream->context == context) give(&streams, stream);
    }
    context->alive = false;
    contexts.live--;
}

CUresult cuDevicePrimaryCtxRetain(handle *context, CUdevice number) {
    ENTER(cuDevicePrimaryCtxRetain, INITIALISED);
    Device *device = device_of(number);
    if (device == NULL) return CUDA_ERROR_INVALID_DEVICE;
    TRY(broken(device));
    if (device->primary == 0) device->primary = create_context(number, device->flags)->slot.handle;
    device->retained++;
    *context = device->primary;
    return CUDA_SUCCESS;
}

static void reset_primary(Device *device) {
    if (device->primary) destroy_context(find(&contexts, device->primary));
    device->primary = 0;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice number) {
    ENTER(cuDevicePrimaryCtxRelease, INITIALISED);
    Device *device = device_of(number);
    if (device == NULL) return CUDA_ERROR_INVALID_DEVICE;
    if (device->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--device->retained == 0) reset_primary(device);
    return CUDA_SUCCESS;
}
ALSO(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2);

CUresult cuDevicePrimaryCtxReset(CUdevice number) {
    ENTER(cuDevicePrimaryCtxReset, INITIALISED);
    Device *device = device_of(number);
    if (device == NULL) return CUDA_ERROR_INVALID_DEVICE;
    reset_primary(device); /* a broken device stays so: only a new process can use it again */
    return CUDA_SUCCESS;
}
ALSO(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2);

CUresult cuDevicePrimaryCtxGetState(CUdevice number, unsigned *flags, int *active) {
    ENTER(cuDevicePrimaryCtxGetState, INITIALISED);
    Device *device = device_of(number);
    if (device == NULL) return CUDA_ERROR_INVALID_DEVICE;
    *flags = device->flags;
    *active = device->primary != 0;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice number, unsigned flags) {
    ENTER(cuDevicePrimaryCtxSetFlags, INITIALISED);
    Device *device = device_of(number);
    if (device == NULL) return CUDA_ERROR_INVALID_DEVICE;
    device->flags = flags;
    return CUDA_SUCCESS;
}
ALSO(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2);

static CUresult create_current(handle *context, unsigned flags, CUdevice number) {
    ENTER(cuCtxCreate, INITIALISED);
    Device *device = device_of(number);
    if (device == NULL) return CUDA_ERROR_INVALID_DEVICE;
    TRY(broken(device));
    if (self->depth == STACK) return CUDA_ERROR_OUT_OF_MEMORY;
    *context = self->stack[self->depth++] = create_context(number, flags)->slot.handle;
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(handle *context, unsigned flags, CUdevice device) {
    return create_current(context, flags, device);
}
ALSO(cuCtxCreate_v2, cuCtxCreate);

CUresult cuCtxCreate_v4(handle *context, const void *params, unsigned flags, CUdevice device) {
    (void)params;
    return create_current(context, flags, device);
}

CUresult cuCtxDestroy(handle wanted) {
    ENTER(cuCtxDestroy, INITIALISED);
    Context *context = find(&contexts, wanted);
    if (context == NULL || !context->alive) return CUDA_ERROR_INVALID_CONTEXT;
    if (state.devices[context->device].primary == wanted) return CUDA_ERROR_INVALID_CONTEXT;
    destroy_context(context);
    if (self->depth && self->stack[self->depth - 1] == wanted) self->depth--;
    return CUDA_SUCCESS;
}
ALSO(cuCtxDestroy, cuCtxDestroy_v2);

CUresult cuCtxGetCurrent(handle *context) {
    ENTER(cuCtxGetCurrent, INITIALISED);
    *context = self->depth ? self->stack[self->depth - 1] : 0;
    return CUDA_SUCCESS;
}

static CUresult usable(handle wanted) {
    Context *context = find(&contexts, wanted);
    if (context == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    return context->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult cuCtxSetCurrent(handle context) {
    ENTER(cuCtxSetCurrent, INITIALISED);
    if (context) TRY(usable(context));
    if (self->depth) self->depth--;
    if (context) self->stack[self->depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(handle context) {
    ENTER(cuCtxPushCurrent, INITIALISED);
    TRY(usable(context));
    if (self->depth == STACK) return CUDA_ERROR_OUT_OF_MEMORY;
    self->stack[self->depth++] = context;
    return CUDA_SUCCESS;
}
ALSO(cuCtxPushCurrent, cuCtxPushCurrent_v2);

CUresult cuCtxPopCurrent(handle *context) {
    ENTER(cuCtxPopCurrent, INITIALISED);
    if (self->depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    handle popped = self->stack[--self->depth];
    if (context) *context = popped;
    return CUDA_SUCCESS;
}
ALSO(cuCtxPopCurrent, cuCtxPopCurrent_v2);

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(cuCtxGetDevice, CONTEXT);
    *device = top()->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, handle wanted) {
    if (wanted == 0) return cuCtxGetDevice(device);
    ENTER(cuCtxGetDevice, INITIALISED);
    TRY(usable(wanted));
    *device = ((Context *)find(&contexts, wanted))->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(handle wanted, unsigned long long *id) {
    ENTER(cuCtxGetId, INITIALISED);
    Context *context = wanted ? find(&contexts, wanted) : top();
    if (context == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *id = context->slot.index + 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned *flags) {
    ENTER(cuCtxGetFlags, CONTEXT);
    *flags = top()->flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(handle context, unsigned *version) {
    ENTER(cuCtxGetApiVersion, INITIALISED);
    if (context) TRY(usable(context));
    *version = state.version;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(cuCtxGetStreamPriorityRange, CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

static bool prohibited(void);

static CUresult drain(Context *context) {
    if (prohibited()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    int64_t until = 0;
    EACH(Stream, stream, streams) {
        if (stream->context == context && stream->until_ns > until) until = stream->until_ns;
    }
    wait_until(&state.devices[context->device], until);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    ENTER(cuCtxSynchronize, CONTEXT);
    return drain(top());
}

CUresult cuCtxSynchronize_v2(handle wanted) {
    if (wanted == 0) return cuCtxSynchronize();
    ENTER(cuCtxSynchronize, INITIALISED);
    TRY(usable(wanted));
    return drain(find(&contexts, wanted));
}

/* -------------------------------------------------------------------------------------------------------- capture -- */

static void kill_capture(Capture *capture) {
    if (capture->status != CAPTURE_ACTIVE) return;
    capture->status = CAPTURE_INVALIDATED;
    state.captures_killed++;
}

/* Forgets a capture, with whatever became of its graph. */
static void end_capture(Capture *capture) {
    for (Capture **at = &state.captures; *at; at = &(*at)->next) {
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    }
    EACH(Stream, stream, streams) {
        if (stream->capture == capture->slot.handle) stream->capture = 0;
    }
    give(&captures, capture);
}

static Capture *capture_of(const Stream *stream) { return stream->capture ? find(&captures, stream->capture) : NULL; }

/* May this thread make a potentially unsafe call now? If not, every capture that forbids it is dead
   (cuThreadExchangeStreamCaptureMode in cuda.h). Which calls are unsafe is not listed there; that cuEventQuery is, from
   any thread, is what NCCL's watchdog taught (pytorch 104487). cuEventElapsedTime is counted among them to be strict. */
static bool prohibited(void) {
    bool found = false;
    for (Capture *capture = state.captures; capture; capture = capture->next) {
        bool mine = capture->owner == self;
        if (self->capture_mode == CAPTURE_RELAXED || capture->mode == CAPTURE_RELAXED) continue;
        if (mine || (self->capture_mode == CAPTURE_GLOBAL && capture->mode == CAPTURE_GLOBAL)) {
            kill_capture(capture);
            found = true;
        }
    }
    return found;
}

/* Is the legacy stream of this context unusable, because a blocking stream of it captures? */
static bool implicit(const Context *context, bool kill) {
    bool found = false;
    for (Capture *capture = state.captures; capture; capture = capture->next) {
        if (capture->context == context && capture->blocking) {
            found = true;
            if (kill) kill_capture(capture);
        }
    }
    return found;
}

static void append(Graph *graph, Node node) {
    if ((graph->count & (graph->count - 1)) == 0) {
        size_t room = graph->count ? 2 * graph->count : 1;
        graph->nodes = realloc(graph->nodes, room * sizeof *graph->nodes);
    }
    graph->nodes[graph->count++] = node;
}

/* ------------------------------------------------------------------------------------------------ streams, and work -- */

static CUresult find_stream(handle wanted, Stream **found) {
    Context *context = top();
    if (wanted <= CU_STREAM_LEGACY) {
        *found = find(&streams, context->legacy);
        return CUDA_SUCCESS;
    }
    if (wanted == CU_STREAM_PER_THREAD) {
        for (int i = 0; i < STACK; i++) {
            if (self->own[i].context == 0) {
                Stream *made = take(&streams);
                made->context = context;
                made->builtin = made->blocking = true;
                self->own[i].context = context->slot.handle;
                self->own[i].stream = made->slot.handle;
            }
            if (self->own[i].context == context->slot.handle) {
                *found = find(&streams, self->own[i].stream);
                return CUDA_SUCCESS;
            }
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *found = find(&streams, wanted);
    if (*found == NULL) return CUDA_ERROR_INVALID_HANDLE;
    return broken(&state.devices[(*found)->context->device]);
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

/* Waits, as the driver does, for room in the launch queue of a stream, and for the host functions that it has: cuda.h
   does not say that a call waits for those, but one may (LMCache 2823, 2952), so the fake is strict and means all. */
static void wait_for_room(Stream *stream) {
    Device *device = &state.devices[stream->context->device];
    while (stream->pending) pthread_cond_wait(&state.gate, &state.lock);
    if (state.queue_limit == 0) return;
    if (stream->queue == NULL) stream->queue = calloc((size_t)state.queue_limit, sizeof *stream->queue);
    wait_until(device, stream->queue[stream->enqueued % (uint64_t)state.queue_limit]);
}

/* Puts work behind all that the stream has; returns when it will be done, on the device's clock. The work begins when
   the device has heard of it, the stream has come to it, and, across the legacy stream, blocking streams have, too. */
static int64_t enqueue(Stream *stream, int64_t work_ns, bool kernel) {
    wait_for_room(stream);
    Context *context = stream->context;
    Device *device = &state.devices[context->device];
    int64_t start = later(device_now(device) + device->latency_ns, stream->until_ns);
    if (stream->legacy) start = later(start, context->blocking_until_ns);
    if (stream->blocking) start = later(start, ((Stream *)find(&streams, context->legacy))->until_ns);
    if (device->shared > (kernel ? 0 : 1)) {
        start = later(start, device->busy_until_ns);
        device->busy_until_ns = start + work_ns;
    }
    stream->until_ns = start + work_ns;
    if (stream->queue) stream->queue[stream->enqueued++ % (uint64_t)state.queue_limit] = stream->until_ns;
    if (stream->blocking) context->blocking_until_ns = later(context->blocking_until_ns, stream->until_ns);
    return stream->until_ns;
}

static void stamp(Event *event, Stream *stream) {
    event->state = RECORDED;
    event->done_ns = enqueue(stream, state.devices[stream->context->device].event_ns, false);
}

static int64_t run(const Node *node, Stream *stream) {
    if (node->kind == RECORD) {
        Event *event = find(&events, node->event);
        if (event) stamp(event, stream);
        return stream->until_ns;
    }
    if (node->kind == COPY) memcpy(node->to, node->from, node->size);
    return enqueue(stream, node->work_ns, true);
}

/* What may be done on this stream now, and whether it is to be captured (into `capture`) rather than done. */
static CUresult open_stream(Stream *stream, Capture **capture) {
    if (stream->legacy && implicit(stream->context, true)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *capture = capture_of(stream);
    if (*capture == NULL) return CUDA_SUCCESS;
    if ((*capture)->status != CAPTURE_ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->sequence++;
    stream->unjoined = stream->slot.handle != (*capture)->origin;
    return CUDA_SUCCESS;
}

static CUresult submit(handle wanted, Node node, int64_t *until_ns) {
    Stream *stream;
    Capture *capture;
    TRY(find_stream(wanted, &stream));
    TRY(open_stream(stream, &capture));
    if (capture) {
        append(find(&graphs, capture->graph), node);
    } else {
        int64_t until = run(&node, stream);
        if (until_ns) *until_ns = to_host(&state.devices[stream->context->device], until);
    }
    return CUDA_SUCCESS;
}

typedef struct {
    void (*function)(void *);
    void *data;
    handle stream;
    int64_t due_ns; /* on the host's clock */
    uint64_t epoch;
} HostCall;

static void *call_host(void *argument) {
    HostCall call = *(HostCall *)argument;
    free(argument);
    pthread_mutex_lock(&state.lock);
    while (host_now() < call.due_ns && state.epoch == call.epoch) {
        pthread_mutex_unlock(&state.lock);
        usleep(100); /* virtual time may pass meanwhile */
        pthread_mutex_lock(&state.lock);
    }
    bool is_due = state.epoch == call.epoch;
    pthread_mutex_unlock(&state.lock);
    if (!is_due) return NULL;
    call.function(call.data);
    pthread_mutex_lock(&state.lock);
    Stream *stream = find(&streams, call.stream);
    if (stream && state.epoch == call.epoch) {
        stream->until_ns = later(stream->until_ns, device_now(&state.devices[stream->context->device]));
        stream->pending--;
    }
    pthread_cond_broadcast(&state.gate);
    pthread_mutex_unlock(&state.lock);
    return NULL;
}

/* Calls a function of the host's, on a thread of the driver's, when the stream comes to it. */
CUresult cuLaunchHostFunc(handle wanted, void (*function)(void *), void *data) {
    ENTER(cuLaunchHostFunc, CONTEXT);
    Stream *stream;
    Capture *capture;
    TRY(find_stream(wanted, &stream));
    TRY(open_stream(stream, &capture));
    if (capture) { /* a node of the graph on a card; no test needs one */
        kill_capture(capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    int64_t until_ns = enqueue(stream, 0, false);
    HostCall *call = malloc(sizeof *call);
    *call = (HostCall){function, data, stream->slot.handle,
                       to_host(&state.devices[stream->context->device], until_ns), state.epoch};
    pthread_t thread;
    stream->pending++;
    if (pthread_create(&thread, NULL, call_host, call) != 0) abort();
    pthread_detach(thread);
    return CUDA_SUCCESS;
}

static CUresult create_stream(handle *made, unsigned flags, int priority) {
    if (flags & ~CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    Stream *stream = take(&streams);
    stream->context = top();
    stream->flags = flags;
    stream->blocking = !(flags & CU_STREAM_NON_BLOCKING);
    stream->priority = priority;
    *made = stream->slot.handle;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(handle *stream, unsigned flags) {
    ENTER(cuStreamCreate, CONTEXT);
    return create_stream(stream, flags, 0);
}

CUresult cuStreamCreateWithPriority(handle *stream, unsigned flags, int priority) {
    ENTER(cuStreamCreateWithPriority, CONTEXT);
    return create_stream(stream, flags, priority);
}

CUresult cuStreamDestroy(handle wanted) {
    ENTER(cuStreamDestroy, CONTEXT);
    Stream *stream = find(&streams, wanted);
    if (stream == NULL || stream->builtin) return CUDA_ERROR_INVALID_HANDLE;
    if (capture_of(stream)) {
        kill_capture(capture_of(stream));
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    give(&streams, stream); /* events recorded in it know when they are done */
    return CUDA_SUCCESS;
}
ALSO(cuStreamDestroy, cuStreamDestroy_v2);

/* When the stream has nothing left to do, with what it has to wait for. */
static CUresult drained(handle wanted, Device **device, int64_t *until) {
    Stream *stream;
    TRY(find_stream(wanted, &stream));
    Capture *capture = capture_of(stream);
    if (capture) {
        kill_capture(capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream->legacy && implicit(stream->context, true)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (prohibited()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    *device = &state.devices[stream->context->device];
    *until = stream->legacy ? later(stream->until_ns, stream->context->blocking_until_ns) : stream->until_ns;
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(handle stream) {
    ENTER(cuStreamQuery, CONTEXT);
    Device *device;
    int64_t until;
    TRY(drained(stream, &device, &until));
    return device_now(device) < until ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(handle stream) {
    ENTER(cuStreamSynchronize, CONTEXT);
    Device *device;
    int64_t until;
    TRY(drained(stream, &device, &until));
    wait_until(device, until);
    return CUDA_SUCCESS;
}

/* What a stream is may not be asked while it captures (cccl 11118 says so of cuStreamGetId and cuStreamGetDevice and has
   it kill the capture; the fake is strict and means all of them). cuStreamIsCapturing may. */
static CUresult describe(handle wanted, Stream **found) {
    TRY(find_stream(wanted, found));
    if ((*found)->legacy && implicit((*found)->context, true)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    Capture *capture = capture_of(*found);
    if (capture == NULL) return CUDA_SUCCESS;
    kill_capture(capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuStreamGetCtx(handle wanted, handle *context) {
    ENTER(cuStreamGetCtx, CONTEXT);
    Stream *stream;
    TRY(describe(wanted, &stream));
    *context = stream->context->slot.handle;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx_v2(handle stream, handle *context, handle *green) {
    if (green) *green = 0;
    return cuStreamGetCtx(stream, context);
}

CUresult cuStreamGetDevice(handle wanted, CUdevice *device) {
    ENTER(cuStreamGetDevice, CONTEXT);
    Stream *stream;
    TRY(describe(wanted, &stream));
    *device = stream->context->device;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(handle wanted, unsigned *flags) {
    ENTER(cuStreamGetFlags, CONTEXT);
    Stream *stream;
    TRY(describe(wanted, &stream));
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetId(handle wanted, unsigned long long *id) {
    ENTER(cuStreamGetId, CONTEXT);
    Stream *stream;
    TRY(describe(wanted, &stream));
    *id = stream->number;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(handle wanted, int *priority) {
    ENTER(cuStreamGetPriority, CONTEXT);
    Stream *stream;
    TRY(describe(wanted, &stream));
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

/* --------------------------------------------------------------------------------------------------------- events -- */

CUresult cuEventCreate(handle *made, unsigned flags) {
    ENTER(cuEventCreate, CONTEXT);
    if (flags & ~(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
    if (state.event_limit >= 0 && events.live >= state.event_limit) return CUDA_ERROR_OUT_OF_MEMORY;
    Event *event = take(&events);
    if (event == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    event->context = top();
    event->flags = flags;
    *made = event->slot.handle;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(handle wanted) {
    ENTER(cuEventDestroy, CONTEXT);
    Event *event = find(&events, wanted);
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    give(&events, event);
    return CUDA_SUCCESS;
}
ALSO(cuEventDestroy, cuEventDestroy_v2);

static CUresult record(handle wanted, handle on, unsigned flags) {
    Event *event = find(&events, wanted);
    Stream *stream;
    Capture *capture;
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    TRY(find_stream(on, &stream));
    if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
    if (flags && capture_of(stream) == NULL) return CUDA_ERROR_INVALID_VALUE;
    TRY(open_stream(stream, &capture));
    if (capture == NULL) {
        stamp(event, stream);
        return CUDA_SUCCESS;
    }
    state.captured_records++;
    if (flags & CU_EVENT_RECORD_EXTERNAL) { /* a node that records at every launch of the graph */
        append(find(&graphs, capture->graph), (Node){.kind = RECORD, .event = wanted});
        return CUDA_SUCCESS;
    }
    event->state = CAPTURED; /* an edge of the graph and nothing else */
    event->capture = capture->slot.handle;
    event->stream = stream->slot.handle;
    event->sequence = stream->sequence;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(handle event, handle stream) {
    ENTER(cuEventRecord, CONTEXT);
    return record(event, stream, 0);
}

CUresult cuEventRecordWithFlags(handle event, handle stream, unsigned flags) {
    ENTER(cuEventRecordWithFlags, CONTEXT);
    return record(event, stream, flags);
}

/* May this event be asked about? To ask about a captured one is illegal, and kills the capture it is part of. */
static CUresult askable(handle wanted, Event **found) {
    Event *event = *found = find(&events, wanted);
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    TRY(broken(&state.devices[event->context->device]));
    if (event->state == CAPTURED) {
        Capture *capture = find(&captures, event->capture);
        if (capture) kill_capture(capture);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return CUDA_SUCCESS;
}

static bool done(const Event *event) {
    return event->state == NEVER || device_now(&state.devices[event->context->device]) >= event->done_ns;
}

CUresult cuEventQuery(handle wanted) {
    ENTER(cuEventQuery, CONTEXT);
    Event *event;
    TRY(askable(wanted, &event));
    if (state.captures && prohibited()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(handle wanted) {
    ENTER(cuEventSynchronize, CONTEXT);
    Event *event;
    TRY(askable(wanted, &event));
    if (state.captures && prohibited()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (event->state == RECORDED) wait_until(&state.devices[event->context->device], event->done_ns);
    return CUDA_SUCCESS;
}

static int64_t ticks(int64_t device_ns, int64_t tick_ns) { return device_ns - device_ns % tick_ns; }

CUresult cuEventElapsedTime(float *milliseconds, handle first, handle second) {
    ENTER(cuEventElapsedTime, CONTEXT);
    Event *start, *end;
    if (milliseconds == NULL) return CUDA_ERROR_INVALID_VALUE;
    TRY(askable(first, &start));
    TRY(askable(second, &end));
    if (state.captures && prohibited()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
    if (start->state == NEVER || end->state == NEVER) return CUDA_ERROR_INVALID_HANDLE;
    if (start->context->device != end->context->device) return CUDA_ERROR_INVALID_HANDLE;
    if (!done(start) || !done(end)) return CUDA_ERROR_NOT_READY;
    int64_t tick_ns = state.devices[start->context->device].tick_ns;
    *milliseconds = (float)((double)(ticks(end->done_ns, tick_ns) - ticks(start->done_ns, tick_ns)) / 1e6);
    return CUDA_SUCCESS;
}
ALSO(cuEventElapsedTime, cuEventElapsedTime_v2);

/* Joins a stream to the capture that the event is part of. */
static CUresult wait_for_captured(Stream *stream, const Event *event) {
    Capture *theirs = find(&captures, event->capture), *ours = capture_of(stream);
    if (theirs == NULL) return CUDA_ERROR_CAPTURED_EVENT;
    if (theirs->status != CAPTURE_ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->legacy) {
        kill_capture(theirs);
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (ours && ours != theirs) {
        kill_capture(ours);
        kill_capture(theirs);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    Stream *from = find(&streams, event->stream);
    if (from && from->sequence == event->sequence) from->unjoined = false;
    stream->capture = theirs->slot.handle;
    stream->sequence++;
    stream->unjoined = stream->slot.handle != theirs->origin;
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(handle wanted, handle on, unsigned flags) {
    ENTER(cuStreamWaitEvent, CONTEXT);
    (void)flags;
    Stream *stream;
    Event *event = find(&events, on);
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    TRY(find_stream(wanted, &stream));
    if (event->state == CAPTURED) return wait_for_captured(stream, event);
    if (event->state == NEVER) return CUDA_SUCCESS;
    Capture *capture;
    TRY(open_stream(stream, &capture));
    if (capture) {
        kill_capture(capture);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    int64_t host_ns = to_host(&state.devices[event->context->device], event->done_ns);
    bool same = event->context->device == stream->context->device;
    int64_t done_ns = same ? event->done_ns : to_device(&state.devices[stream->context->device], host_ns);
    stream->until_ns = later(stream->until_ns, done_ns);
    if (stream->blocking) {
        stream->context->blocking_until_ns = later(stream->context->blocking_until_ns, stream->until_ns);
    }
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------- capturing into graphs -- */

CUresult cuStreamBeginCapture(handle wanted, int mode) {
    ENTER(cuStreamBeginCapture, CONTEXT);
    Stream *stream;
    TRY(find_stream(wanted, &stream));
    if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    Capture *capture = take(&captures);
    Graph *graph = take(&graphs);
    capture->origin = stream->slot.handle;
    capture->context = stream->context;
    capture->blocking = stream->blocking;
    capture->mode = mode;
    capture->status = CAPTURE_ACTIVE;
    capture->id = ++state.capture_ids;
    capture->owner = self;
    capture->graph = graph->slot.handle;
    capture->next = state.captures;
    state.captures = capture;
    stream->capture = capture->slot.handle;
    stream->unjoined = false;
    return CUDA_SUCCESS;
}
ALSO(cuStreamBeginCapture, cuStreamBeginCapture_v2);

static void free_graph(handle wanted) {
    Graph *graph = find(&graphs, wanted);
    free(graph->nodes);
    give(&graphs, graph);
}

CUresult cuStreamEndCapture(handle wanted, handle *made) {
    ENTER(cuStreamEndCapture, CONTEXT);
    Stream *stream;
    TRY(find_stream(wanted, &stream));
    Capture *capture = capture_of(stream);
    *made = 0;
    if (capture == NULL) return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->slot.handle != capture->origin) {
        kill_capture(capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->owner != self && capture->mode != CAPTURE_RELAXED) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    CUresult result = capture->status == CAPTURE_ACTIVE ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    EACH(Stream, other, streams) {
        bool lost = other->capture == capture->slot.handle && other->unjoined;
        if (lost && result == CUDA_SUCCESS) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    if (result == CUDA_SUCCESS) {
        *made = capture->graph;
    } else {
        free_graph(capture->graph);
    }
    end_capture(capture);
    return result;
}

static CUresult capture_status(handle wanted, int *status, Capture **found) {
    Stream *stream;
    TRY(find_stream(wanted, &stream));
    if (stream->legacy && implicit(stream->context, false)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *found = capture_of(stream);
    *status = *found ? (*found)->status : CAPTURE_NONE;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(handle stream, int *status) {
    ENTER(cuStreamIsCapturing, CONTEXT);
    Capture *capture;
    return capture_status(stream, status, &capture);
}

CUresult cuStreamGetCaptureInfo_v3(handle stream, int *status, uint64_t *id, handle *graph, const handle **dependencies,
                                   const void **edges, size_t *count) {
    ENTER(cuStreamGetCaptureInfo, CONTEXT);
    Capture *capture;
    TRY(capture_status(stream, status, &capture));
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? capture->graph : 0;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(handle stream, int *status, uint64_t *id, handle *graph, const handle **dependencies,
                                   size_t *count) {
    return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, NULL, count);
}

CUresult cuStreamGetCaptureInfo(handle stream, int *status, uint64_t *id) {
    return cuStreamGetCaptureInfo_v3(stream, status, id, NULL, NULL, NULL, NULL);
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode, INITIALISED);
    if (*mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    int before = self->capture_mode;
    self->capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult instantiate(handle *made, handle wanted) {
    ENTER(cuGraphInstantiate, INITIALISED);
    Graph *graph = find(&graphs, wanted);
    if (graph == NULL) return CUDA_ERROR_INVALID_VALUE;
    Graph *copy = take(&graphs);
    graph = find(&graphs, wanted);
    for (size_t i = 0; i < graph->count; i++) append(copy, graph->nodes[i]);
    *made = copy->slot.handle;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(handle *made, handle graph, unsigned long long flags) {
    (void)flags;
    return instantiate(made, graph);
}

CUresult cuGraphInstantiateWithParams(handle *made, handle graph, void *params) {
    (void)params;
    return instantiate(made, graph);
}

/* The nodes run one after another on the stream, in the order of their capture, also those of parallel branches. */
CUresult cuGraphLaunch(handle wanted, handle stream) {
    ENTER(cuGraphLaunch, CONTEXT);
    Graph *graph = find(&graphs, wanted);
    if (graph == NULL) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < graph->count; i++) TRY(submit(stream, graph->nodes[i], NULL));
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(handle graph) {
    ENTER(cuGraphDestroy, INITIALISED);
    if (find(&graphs, graph) == NULL) return CUDA_ERROR_INVALID_VALUE;
    free_graph(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(handle graph) {
    ENTER(cuGraphExecDestroy, INITIALISED);
    if (find(&graphs, graph) == NULL) return CUDA_ERROR_INVALID_VALUE;
    free_graph(graph);
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------------- memory, which is the host's -- */

typedef struct Allocation {
    struct Allocation *next;
    address start;
    size_t size;
    handle context;
    int device;
    bool host;
} Allocation;

static Allocation *allocations;

static CUresult allocate(size_t size, bool host, void **made) {
    if (prohibited()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (size == 0) return CUDA_ERROR_INVALID_VALUE;
    Allocation *allocation = malloc(sizeof *allocation);
    Context *context = top();
    *made = malloc(size);
    *allocation = (Allocation){allocations, (address)*made, size, context->slot.handle, context->device, host};
    allocations = allocation;
    return CUDA_SUCCESS;
}

static CUresult release(address start) {
    if (start == 0) return CUDA_SUCCESS;
    if (prohibited()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    for (Allocation **at = &allocations; *at; at = &(*at)->next) {
        if ((*at)->start == start) {
            Allocation *found = *at;
            *at = found->next;
            free((void *)start);
            free(found);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static Allocation *allocation_of(address inside) {
    for (Allocation *at = allocations; at; at = at->next) {
        if (inside >= at->start && inside < at->start + at->size) return at;
    }
    return NULL;
}

CUresult cuMemGetInfo(size_t *available, size_t *total) {
    ENTER(cuMemGetInfo, CONTEXT);
    *available = *total = 1 << 30;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(address *made, size_t size) {
    ENTER(cuMemAlloc, CONTEXT);
    return allocate(size, false, (void **)made);
}

CUresult cuMemFree(address start) {
    ENTER(cuMemFree, CONTEXT);
    return release(start);
}

CUresult cuMemHostAlloc(void **made, size_t size, unsigned flags) {
    ENTER(cuMemHostAlloc, CONTEXT);
    (void)flags;
    return allocate(size, true, made);
}

CUresult cuMemFreeHost(void *start) {
    ENTER(cuMemFreeHost, CONTEXT);
    return release((address)start);
}

CUresult cuMemHostGetDevicePointer(address *there, void *here, unsigned flags) {
    ENTER(cuMemHostGetDevicePointer, CONTEXT);
    (void)flags;
    *there = (address)here;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(address *start, size_t *size, address inside) {
    ENTER(cuMemGetAddressRange, CONTEXT);
    Allocation *found = allocation_of(inside);
    if (found == NULL) return CUDA_ERROR_INVALID_VALUE;
    if (start) *start = found->start;
    if (size) *size = found->size;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, int attribute, address inside) {
    enum { OF_CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, DEVICE_ORDINAL = 9 };
    enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };
    ENTER(cuPointerGetAttribute, CONTEXT);
    Allocation *found = allocation_of(inside);
    if (found == NULL) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case OF_CONTEXT: *(handle *)value = found->context; return CUDA_SUCCESS;
    case MEMORY_TYPE: *(unsigned *)value = found->host ? MEMORY_HOST : MEMORY_DEVICE; return CUDA_SUCCESS;
    case DEVICE_POINTER:
    case HOST_POINTER: *(address *)value = inside; return CUDA_SUCCESS;
    case DEVICE_ORDINAL: *(int *)value = found->device; return CUDA_SUCCESS;
    default: *(unsigned *)value = 0; return CUDA_SUCCESS;
    }
}

static CUresult copy(address to, address from, size_t size) {
    ENTER(cuMemcpy, CONTEXT);
    if (to == 0 || from == 0) return CUDA_ERROR_INVALID_VALUE;
    memcpy((void *)to, (const void *)from, size);
    return CUDA_SUCCESS;
}

static CUresult copy_async(address to, address from, size_t size, handle stream) {
    ENTER(cuMemcpyAsync, CONTEXT);
    if (to == 0 || from == 0) return CUDA_ERROR_INVALID_VALUE;
    return submit(stream, (Node){.kind = COPY, .to = (void *)to, .from = (const void *)from, .size = size}, NULL);
}

CUresult cuMemcpy(address to, address from, size_t size) { return copy(to, from, size); }
ALSO(cuMemcpy, cuMemcpyHtoD);
ALSO(cuMemcpy, cuMemcpyDtoH);
ALSO(cuMemcpy, cuMemcpyDtoD);

CUresult cuMemcpyAsync(address to, address from, size_t size, handle stream) {
    return copy_async(to, from, size, stream);
}
ALSO(cuMemcpyAsync, cuMemcpyHtoDAsync);
ALSO(cuMemcpyAsync, cuMemcpyDtoHAsync);
ALSO(cuMemcpyAsync, cuMemcpyDtoDAsync);

CUresult cuMemcpyPeer(address to, handle to_context, address from, handle from_context, size_t size) {
    (void)to_context;
    (void)from_context;
    return copy(to, from, size);
}

typedef struct { /* CUDA_MEMCPY2D */
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    address from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void *to_host;
    address to_device;
    void *to_array;
    size_t to_pitch, width, height;
} Rectangle;

CUresult cuMemcpy2D(const Rectangle *r) {
    enum { MEMORY_HOST = 1 };
    ENTER(cuMemcpy, CONTEXT);
    const char *from = r->from_type == MEMORY_HOST ? r->from_host : (const void *)r->from_device;
    char *to = r->to_type == MEMORY_HOST ? r->to_host : (void *)r->to_device;
    for (size_t y = 0; y < r->height; y++) {
        char *row = to + (y + r->to_y) * r->to_pitch + r->to_x;
        memcpy(row, from + (y + r->from_y) * r->from_pitch + r->from_x, r->width);
    }
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------- where stream 0 is the calling thread's own one -- */

#define OWN(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)
#define PER_THREAD_1(name) \
    CUresult name##_ptsz(handle stream) { return name(OWN(stream)); }
#define PER_THREAD_2(name, type) \
    CUresult name##_ptsz(handle stream, type value) { return name(OWN(stream), value); }

CUresult cuLaunchHostFunc_ptsz(handle stream, void (*function)(void *), void *data) {
    return cuLaunchHostFunc(OWN(stream), function, data);
}
PER_THREAD_1(cuStreamQuery)
PER_THREAD_1(cuStreamSynchronize)
PER_THREAD_2(cuStreamGetCtx, handle *)
PER_THREAD_2(cuStreamGetDevice, CUdevice *)
PER_THREAD_2(cuStreamGetFlags, unsigned *)
PER_THREAD_2(cuStreamGetId, unsigned long long *)
PER_THREAD_2(cuStreamGetPriority, int *)
PER_THREAD_2(cuStreamIsCapturing, int *)
PER_THREAD_2(cuStreamBeginCapture_v2, int)
PER_THREAD_2(cuStreamEndCapture, handle *)
CUresult cuEventRecord_ptsz(handle event, handle stream) { return cuEventRecord(event, OWN(stream)); }
CUresult cuEventRecordWithFlags_ptsz(handle event, handle stream, unsigned flags) {
    return cuEventRecordWithFlags(event, OWN(stream), flags);
}
CUresult cuStreamWaitEvent_ptsz(handle stream, handle event, unsigned flags) {
    return cuStreamWaitEvent(OWN(stream), event, flags);
}
CUresult cuStreamGetCaptureInfo_v3_ptsz(handle stream, int *status, uint64_t *id, handle *graph,
                                        const handle **dependencies, const void **edges, size_t *count) {
    return cuStreamGetCaptureInfo_v3(OWN(stream), status, id, graph, dependencies, edges, count);
}
CUresult cuMemcpyAsync_ptsz(address to, address from, size_t size, handle stream) {
    return cuMemcpyAsync(to, from, size, OWN(stream));
}
ALSO(cuMemcpyAsync_ptsz, cuMemcpyHtoDAsync_ptsz);
ALSO(cuMemcpyAsync_ptsz, cuMemcpyDtoHAsync_ptsz);
ALSO(cuMemcpyAsync_ptsz, cuMemcpyDtoDAsync_ptsz);
CUresult cuGraphLaunch_ptsz(handle graph, handle stream) { return cuGraphLaunch(graph, OWN(stream)); }

/* ----------------------------------------------------------------------------------------- how the bindings find us -- */

/* Functions that came after CUDA 4 or changed: the version that brought them, and the exported name. Any other is
   exported by the name under which it is asked for. */
static const struct { const char *name, *exported; int since; } versions[] = {
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo", 10000},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v2", 11030},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3", 12030},
    {"cuStreamIsCapturing", "cuStreamIsCapturing", 10000},
    {"cuLaunchHostFunc", "cuLaunchHostFunc", 10000},
    {"cuStreamBeginCapture", "cuStreamBeginCapture_v2", 10010},
    {"cuStreamEndCapture", "cuStreamEndCapture", 10000},
    {"cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode", 10010},
    {"cuStreamGetCtx", "cuStreamGetCtx", 9020},
    {"cuStreamGetCtx", "cuStreamGetCtx_v2", 12050},
    {"cuStreamGetId", "cuStreamGetId", 12000},
    {"cuStreamGetDevice", "cuStreamGetDevice", 12080},
    {"cuEventRecordWithFlags", "cuEventRecordWithFlags", 11010},
    {"cuEventElapsedTime", "cuEventElapsedTime", 2000},
    {"cuEventElapsedTime", "cuEventElapsedTime_v2", 12080},
    {"cuCtxCreate", "cuCtxCreate_v2", 3020},
    {"cuCtxCreate", "cuCtxCreate_v4", 12050},
    {"cuCtxGetId", "cuCtxGetId", 12000},
    {"cuCtxGetDevice", "cuCtxGetDevice", 2000},
    {"cuCtxGetDevice", "cuCtxGetDevice_v2", 13000},
    {"cuCtxSynchronize", "cuCtxSynchronize", 2000},
    {"cuCtxSynchronize", "cuCtxSynchronize_v2", 13000},
    {"cuGraphInstantiateWithFlags", "cuGraphInstantiateWithFlags", 11040},
    {"cuGraphInstantiateWithParams", "cuGraphInstantiateWithParams", 12000},
    {"cuGraphLaunch", "cuGraphLaunch", 10000},
    {"cuGraphDestroy", "cuGraphDestroy", 10000},
    {"cuGraphExecDestroy", "cuGraphExecDestroy", 10000},
    {"cuGetProcAddress", "cuGetProcAddress", 11030},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    enum { FOUND, NOT_FOUND, VERSION_NOT_SUFFICIENT, PER_THREAD_DEFAULT_STREAM = 2 };
    static void *library;
    ENTER(cuGetProcAddress, ANYTIME);
    if (version > state.version) return CUDA_ERROR_INVALID_VALUE;
    if (library == NULL) {
        Dl_info here;
        dladdr((void *)cuInit, &here);
        library = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    const char *exported = name;
    int found = FOUND;
    for (size_t i = 0, since = 0; i < sizeof versions / sizeof *versions; i++) {
        if (strcmp(versions[i].name, name) != 0) continue;
        if (since == 0) found = VERSION_NOT_SUFFICIENT;
        if (versions[i].since <= version && versions[i].since > (int)since) {
            exported = versions[i].exported;
            since = versions[i].since;
            found = FOUND;
        }
    }
    *function = NULL;
    if (found == FOUND && flags & PER_THREAD_DEFAULT_STREAM) {
        char own[128];
        snprintf(own, sizeof own, "%s_ptsz", exported);
        *function = dlsym(library, own);
    }
    if (found == FOUND && *function == NULL) *function = dlsym(library, exported);
    if (found == FOUND && *function == NULL) found = NOT_FOUND;
    if (status) *status = found;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* ------------------------------------------------------------------------------------ the script: what a test calls -- */

static int symbol_of(const char *name) {
    for (int symbol = 0; symbol < SYMBOL_COUNT; symbol++) {
        if (strcmp(symbol_names[symbol], name) == 0) return symbol;
    }
    return -1;
}

static Device *scripted(int number) {
    if (number >= 0 && number < state.device_count) return &state.devices[number];
    fprintf(stderr, "fake_driver: device %d was scripted, and there are %d\n", number, state.device_count);
    abort();
}

static void empty(Pool *pool) {
    pool->live = pool->made = 0;
    pool->first_free = 0;
    for (uint32_t index = pool->used; index-- > 0;) {
        Slot *slot = slot_at(pool, index);
        slot->handle = 0;
        slot->next_free = pool->first_free;
        pool->first_free = index + 1;
    }
}

/* The driver as a fresh process finds it. Virtual time begins at 1000 s; the clocks of the devices are 7 s and more
   ahead of the host's, each by another amount. Handles and threads of before are void. */
void fake_reset(bool is_virtual, int device_count, int version) {
    LOCKED;
    EACH(Graph, graph, graphs) free(graph->nodes);
    empty(&contexts);
    empty(&streams);
    empty(&events);
    empty(&graphs);
    empty(&captures);
    state.captures = NULL;
    state.epoch++;
    state.initialised = state.forked = false;
    state.is_virtual = is_virtual;
    state.virtual_ns = 1000 * SECOND;
    state.version = version;
    state.device_count = device_count < 0 ? 0 : device_count > DEVICES ? DEVICES : device_count;
    state.event_limit = -1;
    state.captures_killed = state.captured_records = 0;
    *forked_calls = 0;
    memset(state.scripts, 0, sizeof state.scripts);
    pthread_cond_broadcast(&state.gate);
    state.reuses_streams = false;
    state.queue_limit = 0;
    memset(state.calls, 0, sizeof state.calls);
    memset(state.devices, 0, sizeof state.devices);
    for (int number = 0; number < DEVICES; number++) {
        Device *device = &state.devices[number];
        device->host_base_ns = host_now();
        device->device_base_ns = device->host_base_ns + (number + 1) * 7 * SECOND;
        device->tick_ns = 500;
    }
}

int64_t fake_now_ns(void) {
    LOCKED;
    return host_now();
}

void fake_advance(int64_t ns) {
    LOCKED;
    state.virtual_ns += ns;
}

int64_t fake_device_now_ns(int device) {
    LOCKED;
    return device_now(scripted(device));
}

void fake_set_offset(int number, int64_t offset_ns) {
    LOCKED;
    Device *device = scripted(number);
    device->host_base_ns = host_now();
    device->device_base_ns = device->host_base_ns + offset_ns;
}

void fake_set_drift(int device, int64_t drift_ppb) {
    LOCKED;
    set_drift(scripted(device), drift_ppb);
}

void fake_set_device(int number, int64_t event_ns, int64_t latency_ns, int64_t tick_ns, int shared) {
    LOCKED; /* a negative number leaves a thing as it is */
    Device *device = scripted(number);
    if (event_ns >= 0) device->event_ns = event_ns;
    if (latency_ns >= 0) device->latency_ns = latency_ns;
    if (tick_ns > 0) device->tick_ns = tick_ns;
    if (shared >= 0) device->shared = shared;
}

/* A kernel that takes work_ns of the device. Counted, scripted and captured as cuLaunchKernel is. */
CUresult fake_launch(handle stream, int64_t work_ns, int64_t *until_host_ns) {
    ENTER(cuLaunchKernel, CONTEXT);
    return submit(stream, (Node){.kind = KERNEL, .work_ns = work_ns}, until_host_ns);
}

/* When the event is done, on the host's clock: what a test compares with. */
CUresult fake_event_host_ns(handle wanted, int64_t *host_ns) {
    LOCKED;
    Event *event = find(&events, wanted);
    if (event == NULL || event->state != RECORDED) return CUDA_ERROR_INVALID_HANDLE;
    *host_ns = to_host(&state.devices[event->context->device], event->done_ns);
    return CUDA_SUCCESS;
}

int fake_fail(const char *name, int code, int64_t times, int64_t skip) {
    LOCKED;
    int symbol = symbol_of(name);
    if (symbol < 0) return -1;
    state.scripts[symbol].code = code;
    state.scripts[symbol].times = times;
    state.scripts[symbol].skip = skip;
    return 0;
}

int fake_cost(const char *name, int64_t ns) {
    LOCKED;
    int symbol = symbol_of(name);
    if (symbol < 0) return -1;
    state.scripts[symbol].cost_ns = ns;
    return 0;
}

int fake_close(const char *name, int closed) {
    LOCKED;
    int symbol = symbol_of(name);
    if (symbol < 0) return -1;
    state.scripts[symbol].closed = closed;
    pthread_cond_broadcast(&state.gate);
    return 0;
}

void fake_reuse_streams(int reuses) {
    LOCKED;
    state.reuses_streams = reuses;
}

/* How many things of a stream may wait for the device; before any stream has work. */
void fake_limit_queue(int64_t limit) {
    LOCKED;
    state.queue_limit = limit;
}

void fake_break_device(int number, int code, int64_t after_ns) {
    LOCKED;
    Device *device = scripted(number);
    device->broken = code;
    device->broken_at_ns = host_now() + after_ns;
}

void fake_destroy_context(handle wanted) { /* as some other part of the process would, from a thread of its own */
    LOCKED;
    Context *context = find(&contexts, wanted);
    if (context == NULL || !context->alive) return;
    Device *device = &state.devices[context->device];
    if (device->primary == wanted) {
        reset_primary(device);
    } else {
        destroy_context(context);
    }
}

void fake_limit_events(int64_t limit) {
    LOCKED;
    state.event_limit = limit;
}

const char *fake_symbol(int index) { return index >= 0 && index < SYMBOL_COUNT ? symbol_names[index] : NULL; }

/* Calls of a function; of a thread, or of all (0). */
int64_t fake_calls(int symbol, int tid) {
    LOCKED;
    if (tid == 0) return state.calls[symbol];
    int64_t calls = 0;
    for (Thread *thread = state.threads; thread; thread = thread->next) {
        if (thread->tid == tid && thread->epoch == state.epoch) calls += thread->calls[symbol];
    }
    return calls;
}

void fake_forget_calls(void) {
    LOCKED;
    memset(state.calls, 0, sizeof state.calls);
    for (Thread *thread = state.threads; thread; thread = thread->next) {
        memset(thread->calls, 0, sizeof thread->calls);
    }
}

void fake_counts(int64_t counts[9]) {
    LOCKED;
    int64_t builtin = 0, threads = 0;
    EACH(Stream, stream, streams) builtin += stream->builtin;
    for (Thread *thread = state.threads; thread; thread = thread->next) threads++;
    counts[0] = events.live;
    counts[1] = events.made;
    counts[2] = streams.live - builtin;
    counts[3] = contexts.live;
    counts[4] = contexts.made;
    counts[5] = state.captured_records;
    counts[6] = state.captures_killed;
    counts[7] = *forked_calls;
    counts[8] = threads;
}

__attribute__((constructor)) static void load(void) {
    const char *version = getenv("FAKE_DRIVER_VERSION"), *devices = getenv("FAKE_DRIVER_DEVICES");
    forked_calls = mmap(NULL, sizeof *forked_calls, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_atfork(before_fork, after_fork, in_child);
    fake_reset(false, devices ? atoi(devices) : 2, version ? atoi(version) : 13000);
}
