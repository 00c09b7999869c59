/* Hot: counts of events, the clock, and memory that begins with a cache line. A part of `_recorder.c`. */

/* Find the kernel's function that reads the clock in this process. It saves two cache lines against that of libc. Keep
 * libc's function if another library overrides it, as the clock of a test does. */
static void find_clock(void)
{
#if defined(__GLIBC__) && defined(__x86_64__)
    void *kernel = dlopen("linux-vdso.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void *function = kernel == NULL ? NULL : dlsym(kernel, "__vdso_clock_gettime");
    Dl_info clock, libc;
    if (function != NULL && dladdr((void *)clock_gettime, &clock) != 0 && dladdr((void *)confstr, &libc) != 0 &&
        clock.dli_fbase == libc.dli_fbase)
        hot.read_clock = (int (*)(clockid_t, struct timespec *))function;
    if (kernel != NULL)
        dlclose(kernel);
#endif
}

static inline int64_t read_monotonic_into(struct timespec *now)
{
    hot.read_clock(CLOCK_MONOTONIC, now);
    return (int64_t)now->tv_sec * 1000000000 + now->tv_nsec;
}

static inline int64_t read_monotonic(void)
{
    struct timespec now;
    return read_monotonic_into(&now);
}

static inline void count_event(Core *core, reason_t reason)
{
    core->counted->reasons[reason]++;
}

/* An exception that is saved while other code runs. */
typedef struct {
    PyObject *type, *value, *traceback;
} raised_t;

static inline raised_t take_raised(void)
{
    raised_t raised;
    PyErr_Fetch(&raised.type, &raised.value, &raised.traceback);
    return raised;
}

/* Take the raised exception, normalised: its value is an instance of its class. */
static inline raised_t take_normal(void)
{
    raised_t raised = take_raised();
    PyErr_NormalizeException(&raised.type, &raised.value, &raised.traceback);
    return raised;
}

static inline void raise_again(raised_t raised)
{
    PyErr_Restore(raised.type, raised.value, raised.traceback);
}

static inline void drop_raised(raised_t raised)
{
    Py_XDECREF(raised.type);
    Py_XDECREF(raised.value);
    Py_XDECREF(raised.traceback);
}

/* Return true if the raised exception is the service's own: a signal handler raised it while our Python code ran. Our
 * code raises only an Exception, and raises it in its own frame. */
static int is_of_service(void)
{
    raised_t raised = take_raised();
    int is_foreign = raised.type != NULL && !PyErr_GivenExceptionMatches(raised.type, PyExc_Exception);
    if (!is_foreign && raised.traceback != NULL && PyTraceBack_Check(raised.traceback)) {
        PyTracebackObject *last = (PyTracebackObject *)raised.traceback;
        while (last->tb_next != NULL)
            last = last->tb_next;
        PyObject *globals = PyObject_GetAttrString((PyObject *)last->tb_frame, "f_globals");
        PyObject *name = globals == NULL ? NULL : PyMapping_GetItemString(globals, "__name__");
        const char *text = name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
        is_foreign = text != NULL && strncmp(text, "instrument.", 11) != 0;
        Py_XDECREF(name);
        Py_XDECREF(globals);
        PyErr_Clear();
    }
    raise_again(raised);
    return is_foreign;
}

/* Clear an exception of ours. Return -1 for an exception of the service, which stays set. */
static int clear_fault(void)
{
    if (PyErr_Occurred()) {
        if (is_of_service())
            return -1;
        PyErr_Clear();
    }
    return 0;
}

/* Count a call that could not be recorded, and clear its exception as `clear_fault` does. Without an exception, the loss
 * has been counted before. */
static int count_loss(Core *core)
{
    if (PyErr_Occurred()) {
        int no_memory = PyErr_ExceptionMatches(PyExc_MemoryError);
        if (clear_fault() < 0)
            return -1;
        count_event(core, no_memory ? NO_MEMORY : FAULT);
    }
    return 0;
}

/* Report an exception of ours by FAULTS.note, which raises it again only under pytest. */
static void note_fault(const char *place)
{
    raised_t raised = take_normal();
    PyObject *errors = PyImport_ImportModule("instrument.runtime.faults");
    PyObject *faults = errors == NULL ? NULL : PyObject_GetAttrString(errors, "FAULTS");
    if (faults == NULL)
        PyErr_Clear(); /* the interpreter is ending */
    PyObject *none = faults == NULL || raised.value == NULL
                         ? NULL
                         : PyObject_CallMethod(faults, "note", "sO", place, raised.value);
    Py_XDECREF(none);
    Py_XDECREF(faults);
    Py_XDECREF(errors);
    drop_raised(raised);
}

/* Report an exception of ours. Return -1 for an exception of the service, which stays set. */
static SELDOM int note_unless_of_service(const char *place)
{
    if (is_of_service())
        return -1;
    note_fault(place);
    return PyErr_Occurred() ? -1 : 0;
}

#if defined(__x86_64__)
#include <x86intrin.h>
#define HAS_TICKS 1
static inline int64_t read_ticks(void)
{
    /* Without a fence: one costs ten nanoseconds, and reordering by the processor changes the time by less. */
    return (int64_t)__rdtsc();
}
#else
#define HAS_TICKS 0
static inline int64_t read_ticks(void)
{
    return 0;
}
#endif

static inline int64_t ticks_as_ns(const ticks_t *ticks, int64_t now)
{
    return ticks->base_ns + (int64_t)(((__int128)(now - ticks->base_ticks) * (__int128)ticks->rate) >> 32);
}

/* Return true if spans begin, are timed by the monotonic clock, and none is timed on a device. */
static inline int is_on_and_nothing_else(const Core *core)
{
    return hot.plain == core;
}

/* Update the copies of a recorder's features, after a change of one of them or of the uid. */
static void note_features(Core *core)
{
    if (core->on && !core->reads_ticks && !core->times_devices)
        hot.plain = core;
    else if (hot.plain == core)
        hot.plain = NULL;
    if (hot.plain == core)
        hot.plain_uid = core->uid;
}

/* Return true if spans begin, are timed by the time stamp counter, and none is timed on a device. */
static inline int is_on_with_ticks(const Core *core)
{
    static const char expected[] = {1, 1, 0, 0};
    return memcmp(&core->on, expected, sizeof expected) == 0;
}

static inline int64_t read_clock(const Core *core)
{
    if (__builtin_expect(core->reads_ticks, 0)) /* with this hint both branches cost less */
        return ticks_as_ns(&core->ticks, read_ticks());
    return read_monotonic();
}

/* Read both clocks at one moment. The tightest of several readings is used. */
static void read_both(int64_t *ticks, int64_t *ns)
{
    int64_t best = INT64_MAX;
    for (int i = 0; i < 16; i++) {
        int64_t before = read_ticks(), now = read_monotonic(), after = read_ticks();
        if (after - before < best) {
            best = after - before;
            *ticks = before + (after - before) / 2;
            *ns = now;
        }
    }
}

/* The time at which the module was loaded, on both clocks. Calibrations start from it. */
static int64_t loaded_ticks, loaded_ns;

/* Return the ns per tick since the load, times 2^32. */
static uint64_t rate_since_load(int64_t now_ticks, int64_t now_ns)
{
    return (uint64_t)(((unsigned __int128)(now_ns - loaded_ns) << 32) / (uint64_t)(now_ticks - loaded_ticks));
}

/* Return zeroed memory that begins with a cache line, NULL without memory. The address to free is stored in front of
 * it. */
static void *new_lines(size_t size)
{
    char *memory = PyMem_Calloc(1, size + sizeof(void *) + LINE);
    if (memory == NULL)
        return NULL;
    void **lines = (void **)(((uintptr_t)memory + sizeof(void *) + LINE - 1) & ~(uintptr_t)(LINE - 1));
    lines[-1] = memory;
    return lines;
}

static void free_lines(void *lines)
{
    if (lines != NULL)
        PyMem_Free(((void **)lines)[-1]);
}
