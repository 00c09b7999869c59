/* The native recorder: the hot path of recorder.py in C. Both behave the same and pass the same tests.
 *
 * A call costs two clock reads, a few pointer moves and one fixed-size row. Nothing is allocated: the frame of a
 * function's span comes from a list of used ones; spans that may outlive a call (scopes, coroutines, generators) are
 * Frame objects. Both kinds are linked into one chain per context, whose innermost frame is `Current.top`. No frame
 * lies on the C stack, because a chain may be read when that stack is gone or elsewhere: greenlets move theirs to the
 * heap while another one of the same context runs, a fork leaves those of other threads behind, and so does the end
 * of the interpreter.
 *
 * Whatever allocates an object, or gives one up, may run code of the host's (the collector, finalisers), and that code
 * may record, reset, end scopes and change context. So state is consistent before such a place and read anew after it.
 *
 * Which chain is current follows PyThreadState.context: every task, callback and copied context has a Context of its
 * own, and a Current object in one context variable. A new context finds there what its maker published: a Published
 * object, the identity of the span that was innermost when the context was copied, which says whether that is still
 * open, and if not, which of those above it was the nearest. Publishing costs a context variable
 * write, which is more than the rest of a call, so `publish` is called by what copies a context. Under an event loop
 * contexts are also copied behind our back: there a span that stays open from one step of the loop to the next is
 * published as it begins and ends, and each span is where the loop does not tell of the tasks that it makes.
 *
 * A service computes between two spans, and that leaves nothing of ours in the processor's caches: a span of 60 ns costs
 * 600 then, all of it waiting for memory. So what a span touches is counted in cache lines, and has few: what a call
 * changes lies at the begin of its object, what a lookup would walk to is remembered where the call comes by anyway. A
 * clock that is read waits for what was asked of memory before it, so what only the end needs is fetched while the
 * host's own work runs, and nothing of it is looked at before.
 *
 * All state is guarded by the GIL. A build without one turns the GIL on when it imports this module.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CLOSED 0
#define OPEN 1
#define MANUAL 2

#define NODE_LIMIT 16384
#define OVERFLOW_SITES 4096 /* that have a line of their own below that of what came after the node limit */
#define EDGE_LIMIT (8 * NODE_LIMIT) /* steps to nodes that are not below; those beyond are looked for each time */
#define SMALLEST_RING 64
#define ENDED_RINGS_KEPT 1000
#define FREE_FRAMES_KEPT 1024
#define KNOWN_AT_FIRST 16
#define KNOWN_LIMIT 4096 /* instances of a method's class */
#define DEEPEST_CHAIN 64 /* of contexts that were copied one from another */
#define ERROR_NAME_LIMIT 200 /* as in errors.py */
#define TRIES 4 /* where finalisers of the host's undo what we do */
#define VALUE_LIMIT 256      /* characters of an attribute, as in spans.py */
#define ATTRIBUTE_LIMIT 128  /* of a span, as in spans.py */
#define FIRST_OF_SERVER 500 /* statuses of HTTP from here on are errors */
#define STACK_MARGIN (64 << 10)
#define LINE 64 /* bytes that the processor fetches at once */
#define BUCKETS_WAITING 7
/* What is counted beside the spans. In C, because what is lost for want of memory cannot wait for some. */
typedef enum {
    CROSSED,
    FOREIGN,
    ENDED_TWICE,
    TICKS_STRAYED,
    NO_MEMORY,
    NOT_TALLIED,
    NO_DETAILS,
    FAULT,
    THREAD_ENDING,
    SATURATED,
    RENAMED_LATE,
    RENAMED_KIND,
    ANNOTATED_LATE,
    TOO_MANY_ATTRIBUTES,
    REASON_COUNT,
} reason_t;

static const char *const REASONS[REASON_COUNT] = {
    [CROSSED] = "scope closed before a scope inside it",
    [FOREIGN] = "span ended outside the context that began it",
    [ENDED_TWICE] = "scope ended twice",
    [TICKS_STRAYED] = "time stamp counter given up because it strayed from the monotonic clock",
    [NO_MEMORY] = "calls not recorded for want of memory",
    [NOT_TALLIED] = "calls not tallied for want of memory",
    [NO_DETAILS] = "errors, attributes or percentiles not kept for want of memory",
    [FAULT] = "calls not recorded for a fault of instrument",
    [THREAD_ENDING] = "calls not recorded because their thread was ending",
    [SATURATED] = "additions to totals that are as large as they can be",
    [RENAMED_LATE] = "span renamed that is not open",
    [RENAMED_KIND] = "span not renamed to a site of another kind",
    [ANNOTATED_LATE] = "span annotated that is not open",
    [TOO_MANY_ATTRIBUTES] = "attributes beyond the limit of a span",
};

/* Set in the id of a request that is a root, and in no other: a root id says whether it is a request's. */
#define REQUEST_BIT 1

#define CHUNKS 60 /* of 64 histogram buckets: up to 2^63 ns, see tally.bucket */
#define FIRST_BUCKET(chunks) ((uint32_t)__builtin_ctzll(chunks) << 6) /* that of the lowest of chunks, bit by bit */

#if PY_VERSION_HEX < 0x030D0000
#define UNCHECKED_THREAD_STATE() _PyThreadState_UncheckedGet()
#else
#define UNCHECKED_THREAD_STATE() PyThreadState_GetUnchecked()
#endif

static inline int64_t
read_monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ------------------------------------------------------------------ data */

typedef struct node {
    PyObject *site;
    struct node *parent;
    uint32_t index;
    uint32_t children;
    uint32_t slots; /* a power of two, or 0 */
    unsigned char is_request : 1, is_copy : 1;
    char is_device; /* whether its site asks for device time */
    char may_recur;  /* whether a call of it may run inside another one */
    struct node **table; /* by the site's address, linear probing; an edge to a node that is not below has its mark */
    int64_t min_ns; /* what is shorter, and has neither children nor an error, gets no row */
    uint64_t ring_number; /* of the ring that `totals` are of: that of the thread that was here last, or 0 */
    struct totals *totals;
} node_t;

_Static_assert(sizeof(node_t) == LINE, "a node is one cache line");

/* Counts are 64 bits wide and more. Of most the upper part is 0: it exists once a lower one has wrapped. */
typedef struct {
    uint16_t low[64];
    uint64_t *high;
} chunk_t;

#define LOW_BITS 16

/* What each call changes lies in the first cache line. In a service that computes between two spans, nearly every line
 * that a span touches comes from memory, at 100 ns, against 50 ns for all the rest: so the buckets of the last calls
 * wait there, too, until there are enough of them to fetch their counters at once. */
typedef struct totals {
    uint64_t calls;
    int64_t total_ns, self_ns, min_ns, max_ns, first_ns;
    uint16_t waiting[BUCKETS_WAITING], waiting_count;
    uint64_t errors, moved_bytes;
    int64_t device_ns, beyond_ns; /* beyond: by what the elapsed time exceeds the total */
    int64_t first_total_ns;       /* of the call that began first */
    uint64_t steps;               /* of generators, also of those that go on */
    chunk_t *chunks[CHUNKS];
} totals_t;

/* One cache line. What few spans have lies in a tuple of its own, (active ns or -1, name of the error, attributes), or is
 * the dict of the attributes where there is nothing else. */
typedef struct {
    uint64_t span_id, parent_id, root_id;
    int64_t start_ns, end_ns, children_ns;
    PyObject *rare;
    uint32_t node;
    uint32_t task; /* the task's address, without its four low bits */
} row_t;

_Static_assert(sizeof(row_t) == LINE, "a row is one cache line");
_Static_assert(offsetof(totals_t, errors) == LINE, "what a call adds to totals is one cache line");

/* Totals by node index, in pages: a thread pays for the call paths that it uses. */
typedef struct {
    totals_t ***pages;
    uint32_t slots;
} book_t;

#define PAGE 64

struct ring;

typedef struct frame {
    struct frame *above;
    node_t *node;
    uint64_t span_id, parent_id, root_id, task;
    int64_t start_ns, counted_from_ns, children_ns;
    struct ring *ring;
    PyObject *request; /* the Frame of the request that this is in, or NULL */
    PyObject *attributes;
    PyObject *pair; /* what times the span on a device, or NULL */
    PyObject *self; /* the Frame object that holds this frame; NULL for a function's */
    PyObject *published; /* what contexts that were copied under it know it by, or NULL */
    char state;
    char has_rows; /* whether what counts no time against it may name it as its parent */
    char below_fold; /* whether a step to a node that is not below led here, on this chain or one that it continues */
    char is_inner;   /* whether a call of its node is open around it on this thread: the time of that holds its time */
    uint32_t place;  /* while spans are renamed: its number among those that are open, from 1 on, or 0 */
} frame_t;

_Static_assert(sizeof(frame_t) == 2 * LINE, "a frame is two cache lines");

typedef struct {
    PyObject_HEAD
    frame_t frame;
    struct stretch *stretch; /* whose span it is, or NULL */
} Frame;

struct core;
struct published;

typedef struct current {
    PyObject_HEAD
    frame_t *top;
    /* What the context was copied under; once that has ended the nearest span above that is open, or NULL. See
     * `is_outdated`. */
    struct published *base;
    uint64_t link_id; /* the span that the context came from, once it has ended, or 0 */
    PyObject *linked; /* attributes that say so, which the roots here have */
    uint64_t task;
    char is_shared; /* whether tasks run here by turns: which one does must be asked for anew */
    char eager;   /* whether contexts may be copied behind our back */
    char is_told; /* whether the loop tells of its tasks, so that only what stays open is published all the same */
    PyObject *context; /* weak reference to the context that this belongs to */
    struct core *core; /* NULL once the core is gone */
    struct current *previous, *next; /* all of a core's */
    uint64_t published_id; /* the span that a copy of the context would find now, 0 for `base` */
    uint64_t link_root;
    PyObject *link_remote; /* what its request noted of another tracer, or NULL */
} Current;

/* A span as other contexts know it. One that two contexts publish (a generator's) has two, of which the second has
 * nothing but its owner and `of`, the first. */
typedef struct published {
    PyObject_HEAD
    PyObject *owner; /* the Current that published */
    struct published *of;
    frame_t *frame; /* NULL once the span has ended */
    struct published *above; /* then the nearest span above it that had not, or NULL */
    uint64_t span_id, root_id;
    PyObject *request;
} Published;

typedef struct ring {
    PyObject_HEAD
    row_t *rows;
    uint64_t mask, head;
    uint64_t number; /* never given twice */
    Current *current;
    /* The context that `current` belongs to, for comparison only: holding it would keep the host's objects alive. The
     * version tells it from a later one at the same address. */
    PyObject *context;
    uint64_t context_version;
    uintptr_t stack_end, stack_margin;
    char has_rare; /* whether a row has something to give up */
    uint64_t capacity;
    uint64_t too_short; /* spans that were counted and got no row */
    long thread_id;
    PyObject *name;
    char ended;
    book_t totals;
} Ring;

typedef struct {
    PyObject_HEAD
    Ring *ring;
} Mark;

struct stretch;
typedef struct scope Scope;

/* The processor's time stamp counter as nanoseconds of the monotonic clock. */
typedef struct {
    char in_use;
    int64_t base_ticks, base_ns;
    uint64_t rate; /* ns a tick, times 2^32 */
    int64_t first_ticks, first_ns; /* the pair that the calibration began with */
} ticks_t;

typedef struct core {
    PyObject_HEAD
    char on;
    char watches_all; /* whether `begin_device` is asked for every span, and not for those whose sites ask for it */
    uint64_t uid;
    uint64_t next_id;
    PyObject *begin_device; /* begins to time a span on a device: (site, attributes, span id) -> pair or None */
    ticks_t ticks;
    Current *currents;
    struct stretch *stretches;
    PyObject *variable;
    PyObject *remote_parent;
    PyObject *remote_key;
    PyObject *answers; /* exceptions that are a status of HTTP: by module and class the status, or its attribute */
    PyObject *task_readers; /* what gives the two below, or None as long as nothing has imported asyncio */
    PyObject *running_loop, *task_of_loop; /* what gives the loop that runs, and the task that runs on one; or NULL */
    PyObject *link_of; /* attributes of a root that came from an ended span: (span id, root id, its remote parent) */
    PyObject *tells_of_tasks; /* whether the loop that runs now does */
    PyObject *thread_name;
    node_t root;
    node_t **nodes;
    uint32_t node_count, node_slots, node_limit;
    node_t *overflow;
    node_t *spare; /* given up by a reset, each by its `parent`; kept, for what nobody finds may still point there */
    uint32_t edges; /* marked entries in the tables of nodes */
    PyObject *rings; /* list of Ring */
    uint64_t ended_rows, ended_too_short, row_budget;
    Ring *ended; /* its totals are those of the rings that were given up */
    uint64_t reasons[REASON_COUNT];
    PyObject *counts; /* what Python code counts, by its text */
    Scope *no_scope; /* what `scope` gives where there is no memory for one */
    PyObject *user_sites; /* sites of scopes of kind user, by name; of a muted one a scope that is handed out again */
    PyObject *scope_type;
    PyObject *passes; /* what counts the calls of each muted site */
} Core;

/* Counts the calls of a muted site. */
typedef struct {
    PyObject_HEAD
    Core *core;
    uint64_t calls;
    uint64_t cut; /* spans of generators that were ended early */
} Pass;

/* Where a site was met last: the steps to its nodes from two parents. */
typedef struct {
    PyObject *site; /* borrowed */
    node_t *parents[2], *steps[2];
} path_t;

/* What a method knows of an instance as long as `version` is that of its `sites`: one cache line instead of a dozen. */
typedef struct known {
    PyObject *instance; /* borrowed */
    uint64_t version;
    path_t path; /* without a site: the instance passes */
    union {
        struct known *before; /* after the last: the smaller table before this one */
        uint64_t unused;
    };
} known_t;

_Static_assert(sizeof(known_t) == LINE, "what is known of an instance is one cache line");

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Core *core;
    PyObject *wrapped;
    /* Of a method whose instances have sites of their own: {identity: site or None}, what tells that of an instance
     * which is not there yet. `evaluate` sets what evaluates Python's frames and returns what did: a compiler of the
     * host's must not take `decide` for its own. */
    PyObject *sites;
    known_t *known; /* by the instance's address, or NULL */
    uint32_t known_slots; /* a power of two */
    char is_followed; /* whether `sites` tells when it changes */
    char muted; /* whether calls pass without a span */
    path_t path; /* of its site */
    uint64_t uid; /* of the core when its paths were met: a reset gives the nodes up */
    Pass *pass; /* what counts them, or NULL */
    PyObject *site, *decide, *evaluate;
    PyObject *works; /* tells the device timer by a call's arguments what the call works on, or NULL */
    PyObject *dict;
    PyObject *weak_references;
} Function;

struct scope {
    PyObject_HEAD
    Core *core;
    PyObject *site; /* NULL, as is core: begins nothing */
    PyObject *attributes;
    Frame *frame;
};

typedef struct stretch {
    PyObject_HEAD
    Core *core;
    struct stretch *previous, *next; /* all of the core's */
    char listed;
    PyObject *site, *attributes;
    Frame *frame;
    frame_t *inner; /* innermost frame of the body while it is suspended; the chain from here to `frame` owns itself */
    Published *parent; /* of the first step: whoever resumes it later may be another; NULL without one */
    char has_parent; /* whether that is known */
    char lost; /* its begin could not be recorded */
    int64_t active_ns, resumed_ns, suspended_ns;
    int64_t items, first_item_ns, last_item_ns, longest_gap_ns; /* what it has yielded, and when */
} Stretch;

static PyTypeObject FrameType, CurrentType, PublishedType, RingType, MarkType, CoreType, FunctionType_, ScopeType,
    StretchType;

static uint64_t last_uid, last_ring;
#if defined(__GLIBC__)
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec"))) /* a call less, and three lines */
#else
#define THREAD_LOCAL _Thread_local
#endif
static THREAD_LOCAL uint64_t cached_uid;
static THREAD_LOCAL Ring *cached_ring;
static THREAD_LOCAL uint64_t ending_state; /* the thread state that lost its Mark: what it keeps now is never freed */
static frame_t *free_frames;
static uint32_t free_frame_count;
static PyObject *str_bytes, *str_kind, *str_request, *str_copy, *str_module_dunder, *str_status, *str_request_size,
    *str_answer_size,
    *str_status_code, *str_error_type, *str_ok, *str_error, *str_other, *str_annotate_checked, *str_make_scope,
    *str_min_ns, *str_device, *str_end, *str_pause, *str_resume, *str_ag_frame, *str_anext, *str_asend, *str_athrow,
    *str_aclose, *str_throw, *str_close, *str_items, *str_first_item, *str_last_item, *str_longest_gap;
static PyObject *name_of_type; /* the descriptor of `type.__name__` */

/* ------------------------------------------------------------------ the clock */

#if defined(__x86_64__)
#include <x86intrin.h>
#define HAS_TICKS 1
static inline int64_t
read_ticks(void)
{
    /* Not serialised: what the processor moves across it is a few nanoseconds, a fence costs ten. */
    return (int64_t)__rdtsc();
}
#else
#define HAS_TICKS 0
static inline int64_t
read_ticks(void)
{
    return 0;
}
#endif

static inline int64_t
ticks_as_ns(const ticks_t *ticks, int64_t now)
{
    return ticks->base_ns + (int64_t)(((__int128)(now - ticks->base_ticks) * (__int128)ticks->rate) >> 32);
}

static inline int64_t
read_clock(const Core *core)
{
    return core->ticks.in_use ? ticks_as_ns(&core->ticks, read_ticks()) : read_monotonic();
}

/* One moment on both clocks: the tightest of several readings. */
static void
read_both(int64_t *ticks, int64_t *ns)
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

/* ------------------------------------------------------------------ cache lines */

/* Zeroed memory that begins with a line; NULL without any. Its own address lies before it. */
static void *
new_lines(size_t size)
{
    char *memory = PyMem_Calloc(1, size + sizeof(void *) + LINE);
    if (memory == NULL)
        return NULL;
    void **lines = (void **)(((uintptr_t)memory + sizeof(void *) + LINE - 1) & ~(uintptr_t)(LINE - 1));
    lines[-1] = memory;
    return lines;
}

static void
free_lines(void *lines)
{
    if (lines != NULL)
        PyMem_Free(((void **)lines)[-1]);
}

/* ------------------------------------------------------------------ counts and nodes */

static inline void
count(Core *core, reason_t reason)
{
    core->reasons[reason]++;
}

/* Whether what has just been raised while we worked is the host's: by a signal handler that came in while code of ours
 * in Python ran. No code of ours raises anything but an Exception, and that in its own frame. */
static int
is_hosts(void)
{
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    int hosts = type != NULL && !PyErr_GivenExceptionMatches(type, PyExc_Exception);
    if (!hosts && traceback != NULL && PyTraceBack_Check(traceback)) {
        PyTracebackObject *last = (PyTracebackObject *)traceback;
        while (last->tb_next != NULL)
            last = last->tb_next;
        PyObject *globals = PyObject_GetAttrString((PyObject *)last->tb_frame, "f_globals");
        PyObject *name = globals == NULL ? NULL : PyMapping_GetItemString(globals, "__name__");
        const char *text = name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
        hosts = text != NULL && strncmp(text, "instrument.", 11) != 0;
        Py_XDECREF(name);
        Py_XDECREF(globals);
        PyErr_Clear();
    }
    PyErr_Restore(type, raised, traceback);
    return hosts;
}

/* Take a fault of ours back: -1 where it is the host's exception, which stays. */
static int
forgive(void)
{
    if (PyErr_Occurred()) {
        if (is_hosts())
            return -1;
        PyErr_Clear();
    }
    return 0;
}

/* Count a call that could not be recorded; as `forgive`. Without an exception the reason has been counted already. */
static int
lose(Core *core)
{
    if (PyErr_Occurred()) {
        int no_memory = PyErr_ExceptionMatches(PyExc_MemoryError);
        if (forgive() < 0)
            return -1;
        count(core, no_memory ? NO_MEMORY : FAULT);
    }
    return 0;
}

static inline uint64_t
scrambled(uint64_t id)
{
    return id * 0x9E3779B97F4A7C15u;
}

static inline uint32_t
slot_of(PyObject *site, uint32_t slots)
{
    uintptr_t address = (uintptr_t)site;
    return (uint32_t)((address >> 4) * 0x9E3779B1u) & (slots - 1);
}

/* A step from a node to one that is not below it bears a mark in the address, whose low bits are free. */
static inline node_t *
as_edge(node_t *node)
{
    return (node_t *)((uintptr_t)node | 1);
}

static inline int
is_edge(const node_t *step)
{
    return (uintptr_t)step & 1;
}

static inline node_t *
end_of(node_t *step)
{
    return (node_t *)((uintptr_t)step & ~(uintptr_t)1);
}

static node_t *
known_child(node_t *parent, PyObject *site)
{
    if (parent->slots == 0)
        return NULL;
    for (uint32_t i = slot_of(site, parent->slots);; i = (i + 1) & (parent->slots - 1)) {
        node_t *step = parent->table[i];
        if (step == NULL || end_of(step)->site == site)
            return step;
    }
}

static int
add_child(node_t *parent, node_t *child)
{
    if ((parent->children + 1) * 2 > parent->slots) {
        uint32_t slots = parent->slots ? parent->slots * 2 : 4;
        node_t **table = PyMem_Calloc(slots, sizeof(node_t *));
        if (table == NULL)
            return -1;
        for (uint32_t i = 0; i < parent->slots; i++) {
            node_t *node = parent->table[i];
            if (node == NULL)
                continue;
            uint32_t at = slot_of(end_of(node)->site, slots);
            while (table[at] != NULL)
                at = (at + 1) & (slots - 1);
            table[at] = node;
        }
        PyMem_Free(parent->table);
        parent->table = table;
        parent->slots = slots;
    }
    uint32_t at = slot_of(end_of(child)->site, parent->slots);
    while (parent->table[at] != NULL)
        at = (at + 1) & (parent->slots - 1);
    parent->table[at] = child;
    parent->children++;
    return 0;
}

static int
kind_is(PyObject *site, PyObject *word)
{
    PyObject *kind = PyObject_GetAttr(site, str_kind);
    if (kind == NULL) {
        PyErr_Clear();
        return 0;
    }
    int same = PyUnicode_Check(kind) && PyUnicode_Compare(kind, word) == 0;
    Py_DECREF(kind);
    return same;
}

static int
asks_for_device(PyObject *site)
{
    PyObject *device = PyObject_GetAttr(site, str_device);
    int asks = device == Py_True;
    Py_XDECREF(device);
    PyErr_Clear();
    return asks;
}

static int64_t
min_ns_of(PyObject *site)
{
    PyObject *value = PyObject_GetAttr(site, str_min_ns);
    long long min_ns = value == NULL || !PyLong_Check(value) ? 0 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return min_ns;
}

static node_t *
new_node(Core *core, node_t *parent, PyObject *site)
{
    if (core->node_count == core->node_slots) {
        uint32_t slots = core->node_slots ? core->node_slots * 2 : 64;
        node_t **nodes = PyMem_Realloc(core->nodes, slots * sizeof(node_t *));
        if (nodes == NULL)
            return NULL;
        core->nodes = nodes;
        core->node_slots = slots;
    }
    node_t *node = core->spare;
    if (node != NULL) {
        core->spare = node->parent;
        memset(node, 0, sizeof *node);
    } else if ((node = new_lines(sizeof *node)) == NULL) {
        return NULL;
    }
    node->site = Py_NewRef(site);
    node->parent = parent;
    node->index = core->node_count;
    node->is_request = kind_is(site, str_request) != 0;
    node->is_copy = kind_is(site, str_copy) != 0;
    node->is_device = (char)asks_for_device(site);
    node->min_ns = min_ns_of(site);
    if (add_child(parent, node) < 0) {
        Py_CLEAR(node->site);
        node->parent = core->spare;
        core->spare = node;
        return NULL;
    }
    core->nodes[core->node_count++] = node;
    return node;
}

/* Where calls of a site are counted that come when the tally is full. */
static node_t *
overflow_of(Core *core, PyObject *site)
{
    node_t *node = end_of(known_child(core->overflow, site));
    if (node == NULL && core->overflow->children < OVERFLOW_SITES &&
        (node = new_node(core, core->overflow, site)) != NULL)
        node->may_recur = 1;
    PyErr_Clear();
    return node != NULL ? node : core->overflow;
}

/* The step from a node to that of a site called there. On first sight: to that of its path which is of the site, where
 * there is one, so that recursion makes no nodes; else to a new one, as long as the tally has room. Never fails. */
static node_t *
node_of(Core *core, node_t *parent, PyObject *site)
{
    node_t *step = known_child(parent, site);
    if (step != NULL)
        return step;
    node_t *again = parent;
    while (again != NULL && again->site != site)
        again = again->parent;
    if (again != NULL) {
        for (node_t *between = parent; between != again; between = between->parent)
            between->may_recur = 1;
        again->may_recur = 1;
        step = as_edge(again);
    } else {
        if (core->node_count < core->node_limit && (step = new_node(core, parent, site)) != NULL)
            return step;
        PyErr_Clear();
        step = as_edge(overflow_of(core, site));
    }
    if (core->edges < EDGE_LIMIT && add_child(parent, step) == 0)
        core->edges++;
    return step;
}

/* ------------------------------------------------------------------ totals */

static inline totals_t *
known_totals(const book_t *book, uint32_t index)
{
    totals_t **page = index / PAGE < book->slots ? book->pages[index / PAGE] : NULL;
    return page == NULL ? NULL : page[index % PAGE];
}

static totals_t *
totals_of(book_t *book, uint32_t index)
{
    uint32_t number = index / PAGE;
    if (number >= book->slots) {
        uint32_t wanted = book->slots ? book->slots : 8;
        while (wanted <= number)
            wanted *= 2;
        totals_t ***grown = PyMem_Realloc(book->pages, wanted * sizeof(totals_t **));
        if (grown == NULL)
            return NULL;
        memset(grown + book->slots, 0, (wanted - book->slots) * sizeof(totals_t **));
        book->pages = grown;
        book->slots = wanted;
    }
    if (book->pages[number] == NULL && (book->pages[number] = PyMem_Calloc(PAGE, sizeof(totals_t *))) == NULL)
        return NULL;
    totals_t **totals = &book->pages[number][index % PAGE];
    if (*totals == NULL)
        *totals = new_lines(sizeof(totals_t));
    return *totals;
}

/* The index that tally.bucket computes. */
static inline uint32_t
bucket_of(uint64_t value)
{
    if (value < 128)
        return (uint32_t)value;
    uint32_t exponent = 64 - (uint32_t)__builtin_clzll(value) - 7;
    return (exponent << 6) + (uint32_t)(value >> exponent);
}

static int
carry(chunk_t *chunk, uint32_t at, uint64_t times)
{
    if (chunk->high == NULL && (chunk->high = PyMem_Calloc(64, sizeof *chunk->high)) == NULL)
        return -1;
    chunk->high[at] += times;
    return 0;
}

static inline chunk_t *
chunk_of(totals_t *totals, uint32_t bucket)
{
    chunk_t **chunk = &totals->chunks[bucket >> 6];
    if (*chunk == NULL)
        *chunk = PyMem_Calloc(1, sizeof(chunk_t));
    return *chunk;
}

static void
count_bucket(Core *core, totals_t *totals, uint32_t bucket, uint64_t times)
{
    chunk_t *chunk = chunk_of(totals, bucket);
    if (chunk == NULL) {
        core->reasons[NO_DETAILS] += times;
        return;
    }
    uint16_t *low = &chunk->low[bucket & 63];
    if (times > (uint64_t)(UINT16_MAX - *low)) {
        uint64_t sum = *low + (times & UINT16_MAX);
        if (carry(chunk, bucket & 63, (times >> LOW_BITS) + (sum >> LOW_BITS)) < 0) {
            core->reasons[NO_DETAILS] += times - (uint64_t)(UINT16_MAX - *low);
            *low = UINT16_MAX; /* no memory to count on in */
        } else {
            *low = (uint16_t)sum;
        }
    } else {
        *low += (uint16_t)times;
    }
}

/* Count the buckets that wait; those for which there is no memory wait on, if that can be. */
static void
count_waiting(Core *core, totals_t *totals)
{
    for (int i = 0; i < totals->waiting_count; i++) {
        chunk_t *chunk = totals->chunks[totals->waiting[i] >> 6];
        if (chunk != NULL)
            __builtin_prefetch(&chunk->low[totals->waiting[i] & 63], 1);
    }
    while (totals->waiting_count > 0) {
        uint32_t bucket = totals->waiting[totals->waiting_count - 1];
        chunk_t *chunk = chunk_of(totals, bucket);
        if (core == NULL && (chunk == NULL || (chunk->low[bucket & 63] == UINT16_MAX && carry(chunk, bucket & 63, 0) < 0)))
            return;
        totals->waiting_count--;
        count_bucket(core, totals, bucket, 1);
    }
}

/* Add to a sum of times, which stays at its largest value instead of turning negative. Without a core nobody is told. */
static inline void
add_time(Core *core, int64_t *sum, int64_t more)
{
    if (__builtin_add_overflow(*sum, more, sum)) {
        *sum = INT64_MAX;
        if (core != NULL)
            count(core, SATURATED);
    }
}

static inline uint64_t
times_of(const totals_t *totals, uint32_t bucket)
{
    const chunk_t *chunk = totals->chunks[bucket >> 6];
    if (chunk == NULL)
        return 0;
    return (chunk->high == NULL ? 0 : chunk->high[bucket & 63] << LOW_BITS) + chunk->low[bucket & 63];
}

/* Add all but the histogram. */
static void
add_totals(Core *core, totals_t *into, const totals_t *from)
{
    if (into->calls == 0 || from->min_ns < into->min_ns)
        into->min_ns = from->min_ns;
    if (into->calls == 0 || from->first_ns < into->first_ns) {
        into->first_ns = from->first_ns;
        into->first_total_ns = from->first_total_ns;
    }
    if (from->max_ns > into->max_ns)
        into->max_ns = from->max_ns;
    into->calls += from->calls;
    into->errors += from->errors;
    into->moved_bytes += from->moved_bytes;
    add_time(core, &into->total_ns, from->total_ns);
    add_time(core, &into->self_ns, from->self_ns);
    add_time(core, &into->device_ns, from->device_ns);
    add_time(core, &into->beyond_ns, from->beyond_ns);
}

static void
merge_totals(Core *core, totals_t *into, totals_t *from)
{
    if (from->calls == 0)
        return;
    count_waiting(core, from);
    add_totals(core, into, from);
    for (uint32_t c = 0; c < CHUNKS; c++)
        for (uint32_t i = c << 6; from->chunks[c] != NULL && i < (c + 1) << 6; i++)
            if (times_of(from, i))
                count_bucket(core, into, i, times_of(from, i));
}

static void
free_book(book_t *book)
{
    for (uint32_t p = 0; p < book->slots; p++) {
        for (uint32_t i = 0; book->pages[p] != NULL && i < PAGE; i++) {
            totals_t *totals = book->pages[p][i];
            for (uint32_t c = 0; totals != NULL && c < CHUNKS; c++) {
                if (totals->chunks[c] != NULL)
                    PyMem_Free(totals->chunks[c]->high);
                PyMem_Free(totals->chunks[c]);
            }
            free_lines(totals);
        }
        PyMem_Free(book->pages[p]);
    }
    PyMem_Free(book->pages);
    book->pages = NULL;
    book->slots = 0;
}

static int64_t
elapsed_of(const totals_t *totals)
{
    return totals->total_ns > INT64_MAX - totals->beyond_ns ? INT64_MAX : totals->total_ns + totals->beyond_ns;
}

/* A bucket of a packed histogram, and the calls in it: `tally.PACKED`. */
#define PACKED_BYTES (sizeof(uint32_t) + sizeof(uint64_t))

static size_t
packed_size(const totals_t *totals)
{
    size_t used = 0;
    for (uint32_t c = 0; c < CHUNKS; c++)
        for (uint32_t i = c << 6; totals->chunks[c] != NULL && i < (c + 1) << 6; i++)
            used += times_of(totals, i) != 0;
    return used * PACKED_BYTES;
}

static char *
pack_bucket(char *at, uint32_t bucket, uint64_t times)
{
    memcpy(at, &bucket, sizeof bucket);
    memcpy(at + sizeof bucket, &times, sizeof times);
    return at + PACKED_BYTES;
}

/* Where the packed histogram ends. */
static char *
pack(char *at, const totals_t *totals)
{
    for (uint32_t c = 0; c < CHUNKS; c++)
        for (uint32_t i = c << 6; totals->chunks[c] != NULL && i < (c + 1) << 6; i++) {
            uint64_t times = times_of(totals, i);
            if (times != 0)
                at = pack_bucket(at, i, times);
        }
    return at;
}

/* The fields of `Totals` up to `first_ns`, in their order, and the histogram, packed. It is handed over. */
static PyObject *
totals_as_tuple(const totals_t *t, PyObject *packed)
{
    return packed == NULL ? NULL
                          : Py_BuildValue("(KKLLLLLLKLN)", t->calls, t->errors, t->total_ns, t->self_ns, t->device_ns,
                                          elapsed_of(t), t->min_ns, t->max_ns, t->moved_bytes, t->first_ns, packed);
}

/* {node index: totals} */
static PyObject *
book_as_dict(const book_t *book)
{
    PyObject *all = PyDict_New();
    for (uint32_t n = 0; all != NULL && n < book->slots * PAGE; n++) {
        totals_t *t = known_totals(book, n);
        if (t == NULL || t->calls == 0)
            continue;
        count_waiting(NULL, t);
        PyObject *packed = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)packed_size(t));
        if (packed != NULL)
            pack(PyBytes_AS_STRING(packed), t);
        PyObject *key = PyLong_FromUnsignedLong(n);
        PyObject *value = totals_as_tuple(t, packed);
        if (key == NULL || value == NULL || PyDict_SetItem(all, key, value) < 0)
            Py_CLEAR(all);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return all;
}

/* {node index: (when its first call began, how long that took)} */
static PyObject *
firsts_as_dict(const book_t *book)
{
    PyObject *all = PyDict_New();
    for (uint32_t n = 0; all != NULL && n < book->slots * PAGE; n++) {
        totals_t *t = known_totals(book, n);
        if (t == NULL || t->calls == 0)
            continue;
        PyObject *key = PyLong_FromUnsignedLong(n);
        PyObject *value = Py_BuildValue("(LL)", t->first_ns, t->first_total_ns);
        if (key == NULL || value == NULL || PyDict_SetItem(all, key, value) < 0)
            Py_CLEAR(all);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return all;
}

/* ------------------------------------------------------------------ rings */

/* Rows are mapped, not allocated: only touched pages cost memory, and what is given up goes back to the system at once,
 * which the C library does not do with the heap that it keeps for each thread. */
static size_t
mapped_bytes(uint64_t capacity)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (capacity * sizeof(row_t) + page - 1) / page * page;
}

static row_t *
map_rows(uint64_t capacity)
{
    void *rows = mmap(NULL, mapped_bytes(capacity), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return rows == MAP_FAILED ? NULL : rows;
}

/* Give up the rows. A ring without rows is of no use to its thread any more, but a reader may still hold it. */
static void
free_rows_of(Ring *ring)
{
    row_t *rows = ring->rows;
    uint64_t written = ring->head < ring->capacity ? ring->head : ring->capacity;
    ring->rows = NULL;
    ring->head = 0;
    for (uint64_t i = 0; rows != NULL && i < written; i++)
        Py_XDECREF(rows[i].rare);
    if (rows != NULL)
        munmap(rows, mapped_bytes(ring->capacity));
}

static void
Ring_dealloc(Ring *self)
{
    free_rows_of(self);
    free_book(&self->totals);
    Py_XDECREF(self->current);
    Py_XDECREF(self->name);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
row_as_tuple(const row_t *row)
{
    PyObject *rare = Py_XNewRef(row->rare); /* the row may be overwritten while the tuple is made */
    PyObject *tuple;
    if (rare != NULL && PyTuple_CheckExact(rare))
        tuple = Py_BuildValue("(IKKKILLLOOO)", row->node, row->span_id, row->parent_id, row->root_id, row->task,
                              row->start_ns, row->end_ns, row->children_ns, PyTuple_GET_ITEM(rare, 0),
                              PyTuple_GET_ITEM(rare, 1), PyTuple_GET_ITEM(rare, 2));
    else
        tuple = Py_BuildValue("(IKKKILLLiOO)", row->node, row->span_id, row->parent_id, row->root_id, row->task,
                              row->start_ns, row->end_ns, row->children_ns, -1, Py_None,
                              rare != NULL ? rare : Py_None);
    Py_XDECREF(rare);
    return tuple;
}

static PyObject *
Ring_newest(Ring *self, PyObject *argument)
{
    uint64_t since = PyLong_AsUnsignedLongLong(argument);
    if (since == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    uint64_t head = self->head;
    uint64_t first = head > self->capacity ? head - self->capacity : 0;
    first = first > since ? first : since;
    first = first < head ? first : head;
    uint64_t late = first > since ? first - since : 0;
    PyObject *rows = PyList_New(0);
    for (uint64_t i = first; rows != NULL && i < head; i++) {
        /* Making tuples may run the collector, and that a finaliser of the host's which overwrites or resets. */
        if (i >= self->head)
            break;
        if (self->head - i > self->capacity) {
            late++;
            continue;
        }
        PyObject *row = row_as_tuple(&self->rows[i & self->mask]);
        if (row == NULL || PyList_Append(rows, row) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    return rows == NULL ? NULL : Py_BuildValue("(NKK)", rows, head, late);
}

/* The number of the first row that ended after a time: a ring's rows lie in the order of their ends. */
static uint64_t
number_after(const Ring *self, int64_t after_ns)
{
    uint64_t low = self->head > self->capacity ? self->head - self->capacity : 0, high = self->head;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (self->rows[middle & self->mask].end_ns > after_ns)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static PyObject *
Ring_first_after(Ring *self, PyObject *argument)
{
    long long after_ns = PyLong_AsLongLong(argument);
    if (after_ns == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(number_after(self, after_ns));
}

/* (rows, the end of the oldest, ids of those whose nodes are marked) of the rows that ended after a time. */
static PyObject *
Ring_held(Ring *self, PyObject *args)
{
    long long after_ns;
    Py_buffer marks;
    if (!PyArg_ParseTuple(args, "Ly*:held", &after_ns, &marks))
        return NULL;
    uint64_t first = number_after(self, after_ns), head = self->head;
    uint64_t *ids = NULL, count = 0, room = marks.len == 0 ? 0 : head - first;
    PyObject *found = NULL;
    if (room != 0 && (ids = PyMem_RawMalloc(room * sizeof *ids)) == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (uint64_t i = first; room != 0 && i < head; i++) {
        const row_t *row = &self->rows[i & self->mask];
        if (row->node < (uint64_t)marks.len && ((const char *)marks.buf)[row->node])
            ids[count++] = row->span_id;
    }
    found = Py_BuildValue("KLy#", head - first, first < head ? self->rows[first & self->mask].end_ns : (int64_t)0,
                          ids == NULL ? "" : (char *)ids, (Py_ssize_t)(count * sizeof *ids));
end:
    PyMem_RawFree(ids);
    PyBuffer_Release(&marks);
    return found;
}

/* [(node index, calls, total ns, steps of generators)] of each call path. */
static PyObject *
Ring_usage(Ring *self, PyObject *Py_UNUSED(none))
{
    PyObject *found = PyList_New(0);
    for (uint32_t n = 0; found != NULL && n < self->totals.slots * PAGE; n++) {
        totals_t *totals = known_totals(&self->totals, n);
        if (totals == NULL || (totals->calls == 0 && totals->steps == 0))
            continue;
        PyObject *item = Py_BuildValue("(IKLK)", n, totals->calls, totals->total_ns, totals->steps);
        if (item == NULL || PyList_Append(found, item) < 0)
            Py_CLEAR(found);
        Py_XDECREF(item);
    }
    return found;
}

static PyObject *
Ring_copied_totals(Ring *self, PyObject *Py_UNUSED(none))
{
    return book_as_dict(&self->totals);
}

static PyObject *
Ring_firsts(Ring *self, PyObject *Py_UNUSED(none))
{
    return firsts_as_dict(&self->totals);
}

/* For tests: begin a thread's totals of a call path at these: calls, total ns, self ns and times in every bucket that it
 * has. */
static PyObject *
Ring_preset_totals(Ring *self, PyObject *args)
{
    unsigned int node;
    unsigned long long calls, times;
    long long total_ns, self_ns;
    if (!PyArg_ParseTuple(args, "IKLLK:_preset_totals", &node, &calls, &total_ns, &self_ns, &times))
        return NULL;
    totals_t *totals = known_totals(&self->totals, node);
    if (totals == NULL) {
        PyErr_SetString(PyExc_KeyError, "a call path that this thread has not recorded");
        return NULL;
    }
    count_waiting(NULL, totals);
    totals->calls = calls;
    totals->total_ns = total_ns;
    totals->self_ns = self_ns;
    for (uint32_t c = 0; c < CHUNKS; c++) {
        chunk_t *chunk = totals->chunks[c];
        for (uint32_t i = 0; chunk != NULL && i < 64; i++) {
            if (times_of(totals, (c << 6) + i) == 0)
                continue;
            if (times >> LOW_BITS != 0 && carry(chunk, i, 0) < 0)
                return PyErr_NoMemory();
            chunk->low[i] = (uint16_t)times;
            if (chunk->high != NULL)
                chunk->high[i] = times >> LOW_BITS;
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef Ring_methods[] = {
    {"newest", (PyCFunction)Ring_newest, METH_O, "Rows from a number on, the head, and how many came too late."},
    {"first_after", (PyCFunction)Ring_first_after, METH_O, "The number of the first row that ended after a time."},
    {"held", (PyCFunction)Ring_held, METH_VARARGS, "Rows that ended after a time, the first end, ids of marked ones."},
    {"usage", (PyCFunction)Ring_usage, METH_NOARGS, "Node index, calls, total ns and steps of each call path."},
    {"copied_totals", (PyCFunction)Ring_copied_totals, METH_NOARGS, "Totals by node index, as tuples."},
    {"firsts", (PyCFunction)Ring_firsts, METH_NOARGS, "Begin and length of the first call by node index."},
    {"_preset_totals", (PyCFunction)Ring_preset_totals, METH_VARARGS, "For tests: begin a call path's totals at these."},
    {NULL},
};

static PyMemberDef Ring_members[] = {
    {"capacity", T_ULONGLONG, offsetof(Ring, capacity), READONLY, "rows that it holds"},
    {"head", T_ULONGLONG, offsetof(Ring, head), READONLY, "rows ever written"},
    {"thread_id", T_LONG, offsetof(Ring, thread_id), READONLY, "native id of its thread"},
    {"name", T_OBJECT, offsetof(Ring, name), READONLY, "name of its thread"},
    {"too_short", T_ULONGLONG, offsetof(Ring, too_short), READONLY, "spans counted that got no row"},
    {"ended", T_BOOL, offsetof(Ring, ended), READONLY, "whether its thread has ended"},
    {NULL},
};

static PyTypeObject RingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Ring",
    .tp_basicsize = sizeof(Ring),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The newest rows of one thread, and the totals of all of them.",
    .tp_dealloc = (destructor)Ring_dealloc,
    .tp_methods = Ring_methods,
    .tp_members = Ring_members,
};

/* The calling thread writes to this ring no more. */
static void
part_with(Ring *ring)
{
    ring->ended = 1;
    if (cached_ring == ring)
        cached_uid = 0;
    Py_CLEAR(ring->current);
    Py_DECREF(ring);
}

static void
Mark_dealloc(Mark *self)
{
    Ring *ring = self->ring;
    if (ring != NULL && ring->thread_id == (long)PyThread_get_thread_native_id()) {
        ending_state = PyThreadState_GetID(PyThreadState_Get());
        part_with(ring);
    } else if (ring != NULL) {
        /* The state of a thread is cleared by another one: what that thread has cached stays valid, at the cost of one
         * ring. It has gone in a fork, is stopped at the end of the interpreter, or lives on without Python. */
        ring->ended = 1;
        Py_CLEAR(ring->current);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject MarkType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Mark",
    .tp_basicsize = sizeof(Mark),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Lives in a thread's state; its end is the thread's end.",
    .tp_dealloc = (destructor)Mark_dealloc,
};

static uint64_t
free_rows(Core *core)
{
    uint64_t used = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(core->rings); i++)
        used += ((Ring *)PyList_GET_ITEM(core->rings, i))->capacity;
    return used < core->row_budget ? core->row_budget - used : 0;
}

/* A thread that has ended needs no room beyond the rows that it wrote. */
static void
shrink(Ring *ring)
{
    uint64_t capacity = ring->capacity;
    while (capacity > SMALLEST_RING && capacity / 2 >= ring->head)
        capacity /= 2;
    if (capacity == ring->capacity)
        return;
    size_t kept = mapped_bytes(capacity), mapped = mapped_bytes(ring->capacity);
    if (ring->rows != NULL && kept < mapped && munmap((char *)ring->rows + kept, mapped - kept) < 0)
        return;
    ring->capacity = capacity;
    ring->mask = capacity - 1;
}

/* Give up the rings of threads that have ended, oldest first, until there is room for another and few enough
 * are left; their totals stay. */
static void
retire(Core *core)
{
    Py_ssize_t ended = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(core->rings); i++) {
        Ring *ring = (Ring *)PyList_GET_ITEM(core->rings, i);
        if (ring->ended) {
            shrink(ring);
            ended++;
        }
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(core->rings);) {
        if (ended <= ENDED_RINGS_KEPT && free_rows(core) >= core->row_budget / 32)
            return;
        Ring *ring = (Ring *)PyList_GET_ITEM(core->rings, i);
        if (!ring->ended) {
            i++;
            continue;
        }
        uint32_t totals_count = ring->totals.slots * PAGE;
        for (uint32_t n = 0; n < totals_count; n++)
            if (known_totals(&ring->totals, n) != NULL && totals_of(&core->ended->totals, n) == NULL)
                return; /* no memory to take its totals over: it stays */
        for (uint32_t n = 0; n < totals_count; n++) {
            totals_t *from = known_totals(&ring->totals, n);
            if (from != NULL)
                merge_totals(core, totals_of(&core->ended->totals, n), from);
        }
        core->ended_rows += ring->head;
        core->ended_too_short += ring->too_short;
        if (PyList_SetSlice(core->rings, i, i + 1, NULL) < 0) {
            PyErr_Clear();
            return;
        }
        ended--;
    }
}

static Ring *
empty_ring(void)
{
    Ring *ring = PyObject_New(Ring, &RingType);
    if (ring != NULL)
        memset((char *)ring + sizeof(PyObject), 0, sizeof(Ring) - sizeof(PyObject));
    return ring;
}

/* Where the calling thread's C stack ends, and how much of it is left to what a call needs at least. */
static void
find_stack_end(Ring *ring)
{
#if defined(__linux__)
    pthread_attr_t attributes;
    void *lowest;
    size_t size;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    if (pthread_attr_getstack(&attributes, &lowest, &size) == 0) {
        ring->stack_end = (uintptr_t)lowest;
        ring->stack_margin = size / 8 < STACK_MARGIN ? size / 8 : STACK_MARGIN;
    }
    pthread_attr_destroy(&attributes);
#elif defined(__APPLE__)
    size_t size = pthread_get_stacksize_np(pthread_self());
    ring->stack_end = (uintptr_t)pthread_get_stackaddr_np(pthread_self()) - size;
    ring->stack_margin = size / 8 < STACK_MARGIN ? size / 8 : STACK_MARGIN;
#endif
}

/* A call of Python from C takes C stack, which a raised recursion limit does not watch. A stack that is not the
 * thread's own is nowhere near. */
static inline int
is_stack_used_up(const Ring *ring)
{
    return (uintptr_t)__builtin_frame_address(0) - ring->stack_end < ring->stack_margin;
}

static Ring *
new_ring(Core *core)
{
    PyObject *name = PyObject_CallNoArgs(core->thread_name);
    if (name == NULL)
        return NULL;
    retire(core);
    uint64_t quarter = free_rows(core) / 4, capacity = SMALLEST_RING;
    while (capacity * 2 <= quarter)
        capacity *= 2;
    Ring *ring = empty_ring();
    if (ring == NULL) {
        Py_DECREF(name);
        return NULL;
    }
    ring->name = name;
    ring->number = ++last_ring;
    ring->capacity = capacity;
    ring->mask = capacity - 1;
    ring->thread_id = (long)PyThread_get_thread_native_id();
    ring->rows = map_rows(capacity);
    if (ring->rows == NULL) {
        Py_DECREF(ring);
        return (Ring *)PyErr_NoMemory();
    }
    find_stack_end(ring);
    return ring;
}

/* What the calling thread's state holds of a recorder, made where it is missing. Borrowed. NULL with an exception. */
static Mark *
find_mark(Core *core)
{
    PyObject *locals = PyThreadState_GetDict(); /* borrowed */
    if (locals == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "no thread state");
        return NULL;
    }
    /* By the recorder's address: the ring of one that is gone, or from before a reset, has no rows and is replaced. */
    PyObject *key = Py_BuildValue("(ON)", &MarkType, PyLong_FromVoidPtr(core));
    if (key == NULL)
        return NULL;
    Mark *mark = (Mark *)PyDict_GetItemWithError(locals, key); /* borrowed; nobody takes it out */
    if (mark == NULL && !PyErr_Occurred() && (mark = PyObject_New(Mark, &MarkType)) != NULL) {
        mark->ring = NULL;
        if (PyDict_SetItem(locals, key, (PyObject *)mark) < 0)
            Py_CLEAR(mark);
        else
            Py_DECREF(mark);
    }
    Py_DECREF(key);
    return mark;
}

/* The calling thread's ring, made at its first span and after a reset. Borrowed from the thread's state. NULL with an
 * exception, or without one where the reason has been counted. */
static Ring *
find_ring(Core *core)
{
    if (core->overflow == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the recorder has not been initialised");
        return NULL;
    }
    if (ending_state != 0 && ending_state == PyThreadState_GetID(PyThreadState_Get())) {
        /* A finaliser of what the thread leaves behind. A ring made now would not be given up when the thread ends. */
        count(core, THREAD_ENDING);
        return NULL;
    }
    Mark *mark = find_mark(core);
    if (mark == NULL)
        return NULL;
    /* Making one, and giving one up, may run code that records or resets. */
    for (int tries = 0; mark->ring == NULL || mark->ring->rows == NULL; tries++) {
        Ring *ring = tries < TRIES ? new_ring(core) : NULL;
        if (ring == NULL) {
            if (tries == TRIES)
                count(core, FAULT);
            return NULL;
        }
        if (PyList_Append(core->rings, (PyObject *)ring) < 0) {
            Py_DECREF(ring);
            return NULL;
        }
        Ring *before = mark->ring;
        mark->ring = ring; /* takes the reference over */
        if (before != NULL)
            part_with(before);
    }
    cached_uid = core->uid;
    cached_ring = mark->ring;
    return cached_ring;
}

static inline Ring *
ring_of(Core *core)
{
    return cached_uid == core->uid ? cached_ring : find_ring(core);
}

/* ------------------------------------------------------------------ contexts */

static void
leave_list(Current *self)
{
    if (self->core == NULL)
        return;
    if (self->previous != NULL)
        self->previous->next = self->next;
    else
        self->core->currents = self->next;
    if (self->next != NULL)
        self->next->previous = self->previous;
    self->previous = self->next = NULL;
    self->core = NULL;
}

static void
Current_dealloc(Current *self)
{
    PyObject_GC_UnTrack(self);
    leave_list(self);
    /* Frames of a context that is gone: scopes that nobody ended. A function that runs holds its Current. */
    frame_t *frame = self->top;
    self->top = NULL;
    while (frame != NULL) {
        frame_t *above = frame->above;
        frame->above = NULL;
        Py_XDECREF(frame->self);
        frame = above;
    }
    Py_XDECREF(self->context);
    Py_XDECREF(self->base);
    Py_XDECREF(self->linked);
    Py_XDECREF(self->link_remote);
    PyObject_GC_Del(self);
}

static int
Current_traverse(Current *self, visitproc visit, void *arg)
{
    for (frame_t *frame = self->top; frame != NULL; frame = frame->above)
        Py_VISIT(frame->self);
    Py_VISIT(self->base);
    Py_VISIT(self->linked);
    return 0;
}

static PyTypeObject CurrentType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Current",
    .tp_basicsize = sizeof(Current),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "The chain of open spans of one context.",
    .tp_dealloc = (destructor)Current_dealloc,
    .tp_traverse = (traverseproc)Current_traverse,
};

static void
Published_dealloc(Published *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->of);
    Py_XDECREF(self->above);
    Py_XDECREF(self->request);
    PyObject_GC_Del(self);
}

static int
Published_traverse(Published *self, visitproc visit, void *arg)
{
    Py_VISIT(self->owner);
    Py_VISIT(self->of);
    Py_VISIT(self->above);
    Py_VISIT(self->request);
    return 0;
}

static int
Published_clear(Published *self)
{
    Py_CLEAR(self->owner);
    Py_CLEAR(self->of);
    Py_CLEAR(self->above);
    Py_CLEAR(self->request);
    return 0;
}

static PyTypeObject PublishedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Published",
    .tp_basicsize = sizeof(Published),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "The innermost span of a context, for contexts that are copied from it.",
    .tp_dealloc = (destructor)Published_dealloc,
    .tp_traverse = (traverseproc)Published_traverse,
    .tp_clear = (inquiry)Published_clear,
};

static PyObject * /* new reference or NULL without an exception */
referent(PyObject *reference)
{
    if (reference == NULL)
        return NULL;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = NULL;
    if (PyWeakref_GetRef(reference, &found) < 0)
        PyErr_Clear();
    return found;
#else
    PyObject *found = PyWeakref_GetObject(reference);
    return found == NULL || found == Py_None ? NULL : Py_NewRef(found);
#endif
}

static int
set_variable(Core *core, PyObject *value)
{
#if PY_VERSION_HEX < 0x030C0000
    /* A collection in its middle could run a finaliser that records here, and with that sets a variable of this
     * context: CPython then goes on with a mapping that has been freed. Later versions collect elsewhere. */
    int was_enabled = PyGC_Disable();
#endif
    PyObject *token = PyContextVar_Set(core->variable, value);
#if PY_VERSION_HEX < 0x030C0000
    if (was_enabled)
        PyGC_Enable();
#endif
    if (token == NULL)
        return -1;
    Py_DECREF(token);
    return 0;
}

/* Whether a Current belongs to the context that runs now. */
static int
is_here(Current *current, PyThreadState *state)
{
    PyObject *context = referent(current->context);
    int here = context != NULL && context == state->context;
    Py_XDECREF(context);
    return here;
}

static inline Published *
first_of(PyObject *published)
{
    Published *self = (Published *)published;
    return self->of != NULL ? self->of : self;
}

/* The span, if it is still open, or the nearest above it that is; NULL without one. Borrowed. */
static Published *
nearest_open(Published *published)
{
    while (published != NULL && published->frame == NULL)
        published = published->above;
    return published;
}

/* What a request noted of another tracer, borrowed, or NULL. No exception is set. */
static PyObject *
remote_in(const Core *core, PyObject *request)
{
    PyObject *attributes = request == NULL ? NULL : ((Frame *)request)->frame.attributes, *remote = NULL;
    if (attributes != NULL && PyDict_Check(attributes) &&
        (remote = PyDict_GetItemWithError(attributes, core->remote_key)) == NULL)
        PyErr_Clear();
    return remote;
}

/* The context that was copied came from this span, which has ended. */
static void
note_link(Core *core, Current *current, uint64_t span_id, uint64_t root_id, PyObject *request)
{
    PyObject *remote = remote_in(core, request);
    PyObject *before = current->linked;
    current->link_id = span_id;
    current->link_root = root_id;
    current->linked = NULL;
    Py_XSETREF(current->link_remote, Py_XNewRef(remote));
    Py_XDECREF(before);
}

/* Leave a base that has ended for the nearest span above it that is open. Runs no code of the host's but finalisers. */
static void
leave_ended_base(Core *core, Current *current)
{
    Published *base = current->base;
    if (base == NULL || base->frame != NULL)
        return;
    if (current->link_id == 0)
        note_link(core, current, base->span_id, base->root_id, base->request);
    Published *open = nearest_open(base);
    if (open != NULL)
        open->frame->has_rows = 1; /* or soon will */
    current->base = (Published *)Py_XNewRef((PyObject *)open);
    Py_DECREF(base);
}

/* Whether the parent that a span would have here now must be looked for: what it would be has ended. */
static inline int
is_outdated(const Current *current)
{
    if (current->top != NULL)
        return current->top->state == CLOSED;
    if (current->base != NULL)
        return current->base->frame == NULL;
    return current->link_id != 0 && current->linked == NULL;
}

static void unlink_frame(Current *, frame_t *, frame_t *);

/* Find the parent that spans here have from now on: the nearest that is open. Where none is, they are roots, and say
 * which span the context came from. -1 with an exception of the host's. */
static int
find_parent(Core *core, Current *current)
{
    for (int first = 1; current->top != NULL && current->top->state == CLOSED; first = 0) {
        frame_t *frame = current->top; /* ended by another context */
        if (first)
            note_link(core, current, frame->span_id, frame->root_id, frame->request);
        unlink_frame(current, NULL, frame);
    }
    leave_ended_base(core, current);
    if (current->top != NULL || current->base != NULL || current->link_id == 0 || current->linked != NULL)
        return 0;
    uint64_t id = current->link_id;
    PyObject *ask = Py_NewRef(core->link_of);
    PyObject *remote = Py_NewRef(current->link_remote != NULL ? current->link_remote : Py_None);
    PyObject *linked = PyObject_CallFunction(ask, "KKO", id, current->link_root, remote);
    Py_DECREF(remote);
    Py_DECREF(ask);
    if (linked == NULL && forgive() < 0)
        return -1;
    if (linked == NULL)
        current->link_id = 0;
    else if (current->link_id == id && current->linked == NULL)
        current->linked = linked;
    else
        Py_DECREF(linked);
    return 0;
}

/* Take over what the copied-from context had published. */
static void
inherit(Core *core, Current *current, PyObject *value)
{
    if (value != NULL && Py_TYPE(value) == &PublishedType) {
        current->base = (Published *)Py_NewRef((PyObject *)first_of(value));
    } else if (value != NULL && Py_TYPE(value) == &CurrentType) {
        /* Copied behind our back: what was innermost then is not known; what that context came from is. */
        Current *owner = (Current *)value;
        current->base = (Published *)Py_XNewRef((PyObject *)owner->base);
        current->link_id = owner->link_id;
        current->link_root = owner->link_root;
        current->link_remote = Py_XNewRef(owner->link_remote);
        current->linked = Py_XNewRef(owner->linked);
    }
    if (current->base != NULL && current->base->frame != NULL)
        current->base->frame->has_rows = 1; /* or soon will */
    leave_ended_base(core, current);
}

/* Note whether a loop runs, and which task. 0, or -1 with an exception of the host's. */
static int
note_task(Core *core, Current *current)
{
    if (core->running_loop == NULL) {
        PyObject *readers = PyObject_CallNoArgs(core->task_readers);
        if (readers != NULL && PyTuple_Check(readers) && PyTuple_GET_SIZE(readers) == 2 && core->running_loop == NULL) {
            core->task_of_loop = Py_NewRef(PyTuple_GET_ITEM(readers, 1));
            core->running_loop = Py_NewRef(PyTuple_GET_ITEM(readers, 0));
        }
        Py_XDECREF(readers);
        if (forgive() < 0)
            return -1;
    }
    PyObject *loop = core->running_loop == NULL ? NULL : PyObject_CallNoArgs(core->running_loop);
    int in_loop = loop != NULL && loop != Py_None;
    PyObject *task = in_loop ? PyObject_CallOneArg(core->task_of_loop, loop) : NULL;
    current->task = task == NULL || task == Py_None ? 0 : (uint64_t)(uintptr_t)task;
    Py_XDECREF(task);
    Py_XDECREF(loop);
    current->eager = (char)in_loop;
    return forgive();
}

/* The context may have changed since this thread's last span: find or make the chain of the one that runs now. */
static Current *
follow(Core *core, Ring *ring, PyThreadState *state)
{
    if (ring->current != NULL && ring->current->core != NULL && is_here(ring->current, state)) {
        ring->context = state->context;
        ring->context_version = state->context_ver;
        Current *same = ring->current;
        if (!same->is_shared && !is_outdated(same))
            return same;
        Py_INCREF(same);
        int failed = (same->is_shared && note_task(core, same) < 0) || (is_outdated(same) && find_parent(core, same) < 0);
        Py_DECREF(same);
        return failed ? NULL : same; /* `settle` looks whether it still is */
    }
    PyObject *value = NULL;
    if (PyContextVar_Get(core->variable, NULL, &value) < 0)
        return NULL;
    Current *current = NULL;
    if (value != NULL && Py_TYPE(value) == &CurrentType)
        current = (Current *)value;
    else if (value != NULL && Py_TYPE(value) == &PublishedType)
        current = (Current *)((Published *)value)->owner;
    if (current != NULL && current->core == NULL)
        Py_CLEAR(value); /* forgotten: from before a fork */
    if (value != NULL && current != NULL && is_here(current, state)) {
        Py_INCREF(current);
        if (current->is_shared && note_task(core, current) < 0) {
            Py_DECREF(current);
            Py_DECREF(value);
            return NULL;
        }
    } else {
        current = PyObject_GC_New(Current, &CurrentType);
        if (current == NULL) {
            Py_XDECREF(value);
            return NULL;
        }
        memset((char *)current + sizeof(PyObject), 0, sizeof(Current) - sizeof(PyObject));
        current->core = core;
        current->next = core->currents;
        if (current->next != NULL)
            current->next->previous = current;
        core->currents = current;
        PyObject_GC_Track(current);
        inherit(core, current, value);
        if (note_task(core, current) < 0) {
            Py_DECREF(current);
            Py_XDECREF(value);
            return NULL;
        }
        if (current->eager && core->tells_of_tasks != NULL && core->tells_of_tasks != Py_None) {
            PyObject *ask = Py_NewRef(core->tells_of_tasks), *tells = PyObject_CallNoArgs(ask);
            current->is_told = tells == Py_True;
            Py_XDECREF(tells);
            Py_DECREF(ask);
            if (forgive() < 0) {
                Py_DECREF(current);
                Py_XDECREF(value);
                return NULL;
            }
        }
        if (set_variable(core, (PyObject *)current) < 0 ||
            (current->context = PyWeakref_NewRef(state->context, NULL)) == NULL) {
            Py_DECREF(current);
            Py_XDECREF(value);
            return NULL;
        }
    }
    Current *before = ring->current;
    ring->current = current;
    ring->context = state->context;
    ring->context_version = state->context_ver;
    Py_XDECREF(value);
    Py_XDECREF(before);
    return current;
}

static Current *
settle(Core *core, Ring **found)
{
    for (int tries = 0; tries < TRIES; tries++) {
        Ring *ring = *found;
        Py_INCREF(ring);
        Current *current = follow(core, ring, UNCHECKED_THREAD_STATE());
        int settled = current != NULL && cached_uid == core->uid && cached_ring == ring && ring->current == current &&
                      !is_outdated(current);
        Py_DECREF(ring);
        if (current == NULL || settled)
            return current;
        *found = ring_of(core);
        if (*found == NULL)
            return NULL;
    }
    count(core, FAULT);
    return NULL;
}

/* The chain of the context that runs now, where that is the one of this thread's last span, and spans in it have the
 * parent that it says. Runs no code. */
static inline Current *
current_at_hand(Core *core, Ring **found)
{
    if (cached_uid != core->uid)
        return NULL;
    Ring *ring = *found = cached_ring;
    PyThreadState *state = UNCHECKED_THREAD_STATE();
    if (ring->context != state->context || ring->context_version != state->context_ver || ring->current == NULL)
        return NULL;
    return __builtin_expect(is_outdated(ring->current), 0) ? NULL : ring->current;
}

/* The chain of the context that runs now, and the calling thread's ring. Both are borrowed, and valid until code of the
 * host's may run. NULL as `find_ring`. */
static inline Current *
current_of(Core *core, Ring **found)
{
    Current *current = current_at_hand(core, found);
    if (current != NULL)
        return current;
    *found = ring_of(core);
    return *found == NULL ? NULL : settle(core, found);
}

static void publish_rest(Core *core, Current *current);

/* Tell who the span of an open frame is, for contexts that a Current's is copied to. NULL without memory, and no
 * exception. Making it may run a finaliser of the host's that ends or begins scopes. */
static PyObject *
new_published(Current *current, frame_t *frame)
{
    PyObject *request = Py_XNewRef(frame->request), *holder = Py_XNewRef(frame->self);
    uint64_t span_id = frame->span_id, root_id = frame->root_id;
    Published *made = PyObject_GC_New(Published, &PublishedType);
    if (made == NULL) {
        PyErr_Clear();
        Py_XDECREF(request);
        Py_XDECREF(holder);
        return NULL;
    }
    int is_open = frame->state != CLOSED;
    made->owner = Py_NewRef((PyObject *)current);
    made->of = frame->published == NULL ? NULL : (Published *)Py_NewRef((PyObject *)first_of(frame->published));
    made->frame = is_open && made->of == NULL ? frame : NULL;
    made->above = NULL;
    made->span_id = span_id;
    made->root_id = root_id;
    made->request = request;
    PyObject_GC_Track(made);
    if (is_open)
        Py_XSETREF(frame->published, Py_NewRef((PyObject *)made));
    Py_XDECREF(holder);
    return (PyObject *)made;
}

/* Make a span, or without one what the context was copied under, known to contexts that are copied from now on. Errors
 * are cleared: parentage only. */
static void
publish(Core *core, Current *current, frame_t *frame)
{
    uint64_t wanted_id = frame != NULL ? frame->span_id : 0;
    if (current->published_id == wanted_id)
        return;
    PyObject *value = frame == NULL ? (PyObject *)current : frame->published;
    if (value != NULL && (frame == NULL || ((Published *)value)->owner == (PyObject *)current)) {
        Py_INCREF(value);
    } else {
        frame_t *top = current->top;
        value = new_published(current, frame);
        if (value == NULL)
            return;
        if (current->top != top) {
            Py_DECREF(value);
            publish_rest(core, current);
            return;
        }
    }
    if (set_variable(core, value) == 0)
        current->published_id = wanted_id;
    else
        PyErr_Clear();
    Py_DECREF(value);
}

/* The span of a frame has ended: take what it was published as, or NULL. */
static inline PyObject *
take_published(frame_t *frame)
{
    PyObject *published = frame->published;
    frame->published = NULL;
    if (published != NULL)
        first_of(published)->frame = NULL;
    return published;
}

/* Contexts that were copied under a span that has ended, and is out of its chain, find the nearest open one instead:
 * from `above` on, or what the context of its chain was copied under. Takes the reference. */
static void
pass_on(Core *core, Current *current, PyObject *published, frame_t *above)
{
    Published *ended = first_of(published);
    if (!current->eager && current->published_id == ended->span_id)
        publish(core, current, NULL);
    while (above != NULL && above->state == CLOSED)
        above = above->above;
    Current *owner = (Current *)ended->owner;
    if (ended == (Published *)published && Py_REFCNT(published) == 1) {
        /* no other context knows it */
    } else if (above == NULL && owner != NULL) {
        Py_INCREF(owner);
        leave_ended_base(core, owner); /* or tasks that start one another would hold all that ever were */
        Py_XSETREF(ended->above, (Published *)Py_XNewRef((PyObject *)owner->base));
        Py_DECREF(owner);
    } else if (above != NULL && above->published != NULL) {
        Py_XSETREF(ended->above, (Published *)Py_NewRef((PyObject *)first_of(above->published)));
    } else if (above != NULL && owner == current) {
        /* Not of the chain of another thread, whose functions may return meanwhile. */
        PyObject *made = new_published(owner, above);
        Py_XSETREF(ended->above, (Published *)made);
    }
    Py_DECREF(published);
}

static inline int
tells_of_tasks(const Core *core)
{
    return core->tells_of_tasks != NULL && core->tells_of_tasks != Py_None;
}

/* A span has begun that stays open during a call, or a step of the loop, alone. */
static inline void
publish_begun(Core *core, Current *current)
{
    if (current->eager && !(current->is_told && tells_of_tasks(core)))
        publish(core, current, current->top);
}

/* A span has ended, or stands still. */
static void
publish_rest(Core *core, Current *current)
{
    frame_t *frame = current->top;
    if (!current->eager)
        return;
    int only_lasting = current->is_told && tells_of_tasks(core);
    while (frame != NULL && (frame->state == CLOSED || (only_lasting && frame->self == NULL)))
        frame = frame->above;
    publish(core, current, frame);
}

/* The chain that the context that runs now has, a new reference; NULL without one, maybe with an exception. */
static Current *
known_here(Core *core)
{
    PyThreadState *state = UNCHECKED_THREAD_STATE();
    PyObject *value = NULL;
    if (state->context == NULL || PyContextVar_Get(core->variable, NULL, &value) < 0)
        return NULL;
    Current *current = NULL;
    if (value != NULL && Py_TYPE(value) == &CurrentType)
        current = (Current *)Py_NewRef(value);
    else if (value != NULL && Py_TYPE(value) == &PublishedType)
        current = (Current *)Py_NewRef(((Published *)value)->owner);
    Py_XDECREF(value);
    if (current != NULL && !(current->core == core && is_here(current, state)))
        Py_CLEAR(current);
    return current;
}

/* The same for the context that runs now. One without a span of its own passes on what it was copied with. */
static int
publish_here(Core *core)
{
    Current *current = known_here(core);
    if (current == NULL)
        return forgive();
    frame_t *frame = current->top;
    while (frame != NULL && frame->state == CLOSED)
        frame = frame->above;
    publish(core, current, frame);
    Py_DECREF(current);
    return 0;
}

static inline int
is_open_request(PyObject *request)
{
    return request != NULL && ((Frame *)request)->frame.state != CLOSED;
}

/* ------------------------------------------------------------------ frames */

static void
Frame_dealloc(Frame *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->frame.ring);
    if (self->frame.request != (PyObject *)self)
        Py_XDECREF(self->frame.request);
    Py_XDECREF(self->frame.attributes);
    Py_XDECREF(self->frame.pair);
    Py_XDECREF(take_published(&self->frame));
    PyObject_GC_Del(self);
}

static int
Frame_traverse(Frame *self, visitproc visit, void *arg)
{
    if (self->frame.request != (PyObject *)self)
        Py_VISIT(self->frame.request);
    Py_VISIT(self->frame.attributes);
    Py_VISIT(self->frame.published);
    return 0;
}

static int
Frame_clear(Frame *self)
{
    Py_XDECREF(take_published(&self->frame));
    return 0;
}

static PyMemberDef Frame_members[] = {
    {"span_id", T_ULONGLONG, offsetof(Frame, frame.span_id), READONLY, "identity of the span"},
    {"root_id", T_ULONGLONG, offsetof(Frame, frame.root_id), READONLY, "identity of the tree's root"},
    {"task", T_ULONGLONG, offsetof(Frame, frame.task), READONLY, "identity of the task, 0 outside of one"},
    {NULL},
};

static PyTypeObject FrameType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Frame",
    .tp_basicsize = sizeof(Frame),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A span that is open.",
    .tp_dealloc = (destructor)Frame_dealloc,
    .tp_traverse = (traverseproc)Frame_traverse,
    .tp_clear = (inquiry)Frame_clear,
    .tp_members = Frame_members,
};

/* Whether a call of a node is open on a thread, from a frame upwards, also in what its context was copied under. */
static int
is_open_around(Current *current, const frame_t *frame, const Ring *ring, const node_t *node)
{
    int found = 0;
    Py_XINCREF(current);
    for (int chains = 0; chains < DEEPEST_CHAIN && current != NULL && !found; chains++) {
        for (; frame != NULL && !found; frame = frame->above)
            found = frame->node == node && frame->ring != NULL && frame->ring->thread_id == ring->thread_id &&
                    frame->state != CLOSED;
        Published *base = nearest_open(current->base);
        frame = base != NULL ? base->frame : NULL;
        Current *owner = base != NULL ? (Current *)Py_XNewRef(base->owner) : NULL;
        Py_DECREF(current);
        current = owner;
    }
    Py_XDECREF(current);
    return found;
}

/* Fill in who the span is and where it belongs; the clock is read by the caller, last. */
static inline void
identify(Core *core, Ring *ring, Current *current, frame_t *frame, PyObject *site, path_t *path)
{
    frame_t *above = current->top;
    node_t *parent, *step;
    frame->above = above;
    frame->below_fold = frame->is_inner = 0;
    frame->span_id = core->next_id;
    core->next_id = core->next_id >= INT64_MAX - 1 ? 2 : core->next_id + 2; /* 0 means none; readers have 63 bits */
    frame->ring = ring;
    frame->task = current->task;
    frame->children_ns = 0;
    frame->has_rows = 0;
    if (above != NULL) {
        parent = above->node;
        frame->below_fold = above->below_fold;
        frame->parent_id = above->span_id;
        frame->root_id = above->root_id;
        frame->request = Py_XNewRef(above->request);
    } else if (current->base != NULL) {
        const frame_t *base = current->base->frame;
        parent = base != NULL ? base->node : &core->root;
        frame->below_fold = base != NULL && base->below_fold;
        frame->parent_id = current->base->span_id;
        frame->root_id = current->base->root_id;
        frame->request = Py_XNewRef(current->base->request);
    } else {
        parent = &core->root;
        frame->parent_id = 0;
        frame->root_id = frame->span_id;
        frame->request = NULL;
        if (current->linked != NULL && frame->attributes == NULL)
            frame->attributes = Py_NewRef(current->linked);
    }
    /* What runs between may have given the place to another instance. */
    if (path != NULL && path->site == site && path->parents[0] == parent) {
        step = path->steps[0];
    } else if (path != NULL && path->site == site && path->parents[1] == parent) {
        step = path->steps[1];
    } else {
        step = node_of(core, parent, site);
        if (path != NULL && path->site == site) {
            path->parents[1] = path->parents[0];
            path->steps[1] = path->steps[0];
            path->parents[0] = parent;
            path->steps[0] = step;
        }
    }
    frame->node = end_of(step);
    if (is_edge(step))
        frame->below_fold = 1;
    if (frame->below_fold && frame->node->may_recur)
        frame->is_inner = (char)is_open_around(current, current->top, ring, frame->node);
}

/* A fault of ours: as FAULTS.note does it, which raises it again under pytest only. */
static void
note_fault(const char *place)
{
    PyObject *type, *fault, *traceback;
    PyErr_Fetch(&type, &fault, &traceback);
    PyErr_NormalizeException(&type, &fault, &traceback);
    PyObject *errors = PyImport_ImportModule("instrument.runtime.faults");
    PyObject *faults = errors == NULL ? NULL : PyObject_GetAttrString(errors, "FAULTS");
    if (faults == NULL)
        PyErr_Clear(); /* the interpreter ends */
    PyObject *none = faults == NULL || fault == NULL ? NULL : PyObject_CallMethod(faults, "note", "sO", place, fault);
    Py_XDECREF(none);
    Py_XDECREF(faults);
    Py_XDECREF(errors);
    Py_XDECREF(type);
    Py_XDECREF(fault);
    Py_XDECREF(traceback);
}

static int
note_remote(Core *core, Frame *frame)
{
    PyObject *ask = Py_NewRef(core->remote_parent);
    PyObject *remote = PyObject_CallNoArgs(ask);
    Py_DECREF(ask);
    if (remote != NULL && remote != Py_None) {
        PyObject *attributes = frame->frame.attributes ? PyDict_Copy(frame->frame.attributes) : PyDict_New();
        if (attributes != NULL && PyDict_SetItem(attributes, core->remote_key, remote) == 0)
            Py_XSETREF(frame->frame.attributes, attributes);
        else
            Py_XDECREF(attributes);
    }
    Py_XDECREF(remote);
    if (PyErr_Occurred())
        note_fault("current OpenTelemetry span");
    return PyErr_Occurred() ? -1 : 0;
}

/* What a root has to say besides its own attributes of where its context came from; a new reference or NULL, without
 * an exception. Making a dict may run code of the host's. */
static PyObject *
with_link(const Current *current, PyObject *attributes)
{
    if (current->top != NULL || current->base != NULL || current->linked == NULL || attributes == NULL)
        return Py_XNewRef(attributes); /* a root without any takes those of its context */
    PyObject *linked = Py_NewRef(current->linked);
    PyObject *both = PyDict_Check(attributes) ? PyDict_Copy(attributes) : NULL;
    if (both != NULL && PyDict_Update(both, linked) < 0)
        Py_CLEAR(both);
    PyErr_Clear(); /* for want of memory */
    Py_DECREF(linked);
    return both != NULL ? both : Py_NewRef(attributes);
}

static int close_frame(Core *core, Frame *self, PyObject *error, int anywhere);

/* ------------------------------------------------------------------ device time */

static inline int
is_timed_on_device(const Core *core, const frame_t *frame)
{
    return core->begin_device != NULL && core->begin_device != Py_None && (frame->node->is_device || core->watches_all);
}

/* What runs in Python here is ours and may be interrupted by a signal handler: -1 with the host's exception. `told` is
 * what the timer is to know in place of the span's attributes, or NULL. */
static int
begin_on_device(Core *core, frame_t *frame, PyObject *told)
{
    PyObject *begin = Py_NewRef(core->begin_device);
    PyObject *attributes = told != NULL ? told : frame->attributes;
    PyObject *args[] = {frame->node->site, attributes != NULL ? attributes : Py_None,
                        PyLong_FromUnsignedLongLong(frame->span_id)};
    PyObject *pair = args[2] == NULL ? NULL : PyObject_Vectorcall(begin, args, 3, NULL);
    Py_XDECREF(args[2]);
    Py_DECREF(begin);
    if (pair == Py_None)
        Py_CLEAR(pair);
    frame->pair = pair;
    if (!PyErr_Occurred())
        return 0;
    if (is_hosts())
        return -1;
    note_fault("device timer");
    return PyErr_Occurred() ? -1 : 0;
}

/* Call a method of a pair; an exception that was raised before stays. -1 with one of the host's that came in here. */
static int
tell_pair(PyObject *method, PyObject *const *args, size_t count)
{
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    PyObject *none = PyObject_VectorcallMethod(method, args, count, NULL);
    Py_XDECREF(none);
    if (none == NULL && !is_hosts())
        note_fault("device timer");
    if (PyErr_Occurred()) {
        Py_XDECREF(type);
        Py_XDECREF(raised);
        Py_XDECREF(traceback);
        return -1;
    }
    PyErr_Restore(type, raised, traceback);
    return 0;
}

/* The span has been stored: its pair learns which it was. Takes the frame's reference. */
static int
end_on_device(Ring *ring, frame_t *frame, int64_t end_ns)
{
    PyObject *pair = frame->pair;
    frame->pair = NULL;
    /* The device time of an inner call is part of what is around it. */
    PyObject *args[] = {pair, (PyObject *)ring, PyLong_FromLongLong(frame->is_inner ? -1 : (int64_t)frame->node->index),
                        PyLong_FromUnsignedLongLong(frame->span_id), PyLong_FromLongLong(frame->start_ns),
                        PyLong_FromLongLong(end_ns < frame->start_ns ? frame->start_ns : end_ns)};
    int failed = 0;
    if (args[2] != NULL && args[3] != NULL && args[4] != NULL && args[5] != NULL)
        failed = tell_pair(str_end, args, 6);
    else
        PyErr_Clear(); /* for want of memory */
    if (failed) { /* perhaps before anything was done: told again, or the pair would never end */
        PyObject *type, *raised, *traceback;
        PyErr_Fetch(&type, &raised, &traceback);
        if (tell_pair(str_end, args, 6) < 0)
            PyErr_Clear(); /* of two that handlers raised, the first */
        PyErr_Restore(type, raised, traceback);
    }
    for (int i = 2; i < 6; i++)
        Py_XDECREF(args[i]);
    Py_DECREF(pair);
    return failed;
}

/* NULL with an exception, or without one where the reason has been counted: see `lose`. */
static Frame *
open_frame(Core *core, PyObject *site, PyObject *attributes, char state)
{
    Frame *self = PyObject_GC_New(Frame, &FrameType);
    if (self == NULL)
        return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof(Frame) - sizeof(PyObject));
    frame_t *frame = &self->frame;
    frame->self = (PyObject *)self;
    frame->state = state;
    PyObject_GC_Track(self);
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current != NULL && attributes != NULL) {
        frame->attributes = with_link(current, attributes);
        if (frame->attributes != attributes)
            current = current_of(core, &ring);
    }
    if (current == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    identify(core, ring, current, frame, site, NULL);
    Py_INCREF(ring);
    int is_request = frame->node == core->overflow ? kind_is(site, str_request) : frame->node->is_request;
    if (is_request && !is_open_request(frame->request)) {
        frame->root_id = frame->span_id |= REQUEST_BIT;
        Py_XSETREF(frame->request, (PyObject *)self); /* borrowed: of itself */
        if (core->remote_parent != NULL && core->remote_parent != Py_None) {
            uint64_t uid = core->uid;
            int failed = note_remote(core, self) < 0;
            if (core->uid != uid) /* reset meanwhile, and nobody knew of the frame */
                frame->node = core->overflow;
            if (failed) {
                Py_DECREF(self);
                return NULL;
            }
            current = current_of(core, &ring);
            if (current == NULL) {
                Py_DECREF(self);
                return NULL;
            }
            frame->above = current->top; /* it may have ended scopes */
        }
    }
    Py_INCREF(self); /* the chain's */
    Py_INCREF(current);
    current->top = frame;
    if (current->eager)
        publish(core, current, frame);
    Py_DECREF(current);
    frame->start_ns = frame->counted_from_ns = read_clock(core);
    if (is_timed_on_device(core, frame) && begin_on_device(core, frame, NULL) < 0) {
        PyObject *type, *raised, *traceback;
        PyErr_Fetch(&type, &raised, &traceback);
        if (close_frame(core, self, Py_None, 0) < 0)
            PyErr_Clear(); /* of two that handlers raised, the first */
        PyErr_Restore(type, raised, traceback);
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

static uint64_t
bytes_in(PyObject *attributes)
{
    PyObject *moved = PyDict_Check(attributes) ? PyDict_GetItemWithError(attributes, str_bytes) : NULL; /* borrowed */
    uint64_t bytes = moved != NULL && PyLong_Check(moved) ? PyLong_AsUnsignedLongLong(moved) : 0;
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return bytes;
}

static inline int
is_too_short(const frame_t *frame, int64_t end_ns)
{
    return end_ns - frame->start_ns < frame->node->min_ns && frame->children_ns == 0 && !frame->has_rows;
}

/* The totals of a call path on the ring's thread; NULL without memory. */
static inline totals_t *
totals_here(Ring *ring, node_t *node)
{
    if (node->ring_number == ring->number)
        return node->totals;
    totals_t *totals = totals_of(&ring->totals, node->index);
    if (totals != NULL) {
        node->totals = totals;
        node->ring_number = ring->number;
    }
    return totals;
}

/* The error of a span that has ended: what its status says, where somebody has set one, else what it was. Borrowed. */
static PyObject *
error_told(PyObject *attributes, PyObject *error)
{
    PyObject *status = PyDict_Check(attributes) ? PyDict_GetItemWithError(attributes, str_status_code) : NULL;
    if (status == NULL) {
        if (PyErr_Occurred())
            PyErr_Clear();
        return error;
    }
    PyObject *type = PyDict_GetItemWithError(attributes, str_error_type);
    PyErr_Clear();
    if (!PyUnicode_Check(status))
        return error;
    if (PyUnicode_Compare(status, str_ok) == 0)
        return NULL;
    if (PyUnicode_Compare(status, str_error) != 0)
        return error;
    if (type != NULL && PyUnicode_Check(type) && PyUnicode_GET_LENGTH(type) > 0)
        return type;
    return error != NULL ? error : str_other;
}

/* What a row has beside its numbers: attributes alone as they are, which most have that have anything. */
static PyObject *
rare_of(int64_t active_ns, PyObject *error, PyObject *attributes)
{
    if (error == NULL && active_ns < 0 && PyDict_Check(attributes))
        return Py_NewRef(attributes);
    return Py_BuildValue("(LOO)", active_ns, error != NULL ? error : Py_None,
                         attributes != NULL ? attributes : Py_None);
}

/* All that may run code of the host's comes first and last: in between, the ring is between two rows. */
static void
store(Core *core, Ring *ring, frame_t *frame, int64_t end_ns, int64_t active_ns, PyObject *error)
{
    PyObject *rare = NULL;
    uint64_t moved_bytes = 0;
    if (frame->attributes != NULL)
        error = error_told(frame->attributes, error);
    if (error != NULL || frame->attributes != NULL || active_ns >= 0) {
        rare = rare_of(active_ns, error, frame->attributes);
        if (rare == NULL) {
            PyErr_Clear();
            count(core, NO_DETAILS);
        }
        if (frame->node->is_copy && frame->attributes != NULL)
            moved_bytes = bytes_in(frame->attributes);
    }
    if (ring->rows == NULL) { /* reset meanwhile, and no memory for a new one */
        Py_XDECREF(rare);
        return;
    }
    if (end_ns < frame->start_ns) /* the time stamp counters of two processors may differ by a little */
        end_ns = frame->start_ns;
    int64_t total_ns = end_ns - frame->start_ns;
    int64_t own_ns = (active_ns < 0 ? total_ns : active_ns) - frame->children_ns;
    PyObject *old = rare;
    if (error == NULL && is_too_short(frame, end_ns)) {
        ring->too_short++;
    } else {
        row_t *row = &ring->rows[ring->head & ring->mask];
        /* Reading a row that is not at hand costs more than writing it. */
        old = ring->has_rare ? row->rare : NULL;
        if (rare != NULL)
            ring->has_rare = 1;
        row->span_id = frame->span_id;
        row->parent_id = frame->parent_id;
        row->root_id = frame->root_id;
        row->start_ns = frame->start_ns;
        row->end_ns = end_ns;
        row->children_ns = frame->children_ns;
        row->rare = rare;
        row->node = frame->node->index;
        row->task = (uint32_t)(frame->task >> 4);
        ring->head++;
        __builtin_prefetch(&ring->rows[ring->head & ring->mask], 1);
    }
    totals_t *totals = totals_here(ring, frame->node);
    if (totals != NULL) {
        if (totals->calls == 0) {
            totals->min_ns = totals->max_ns = total_ns;
            totals->first_ns = frame->start_ns;
            totals->first_total_ns = total_ns;
        } else {
            if (total_ns < totals->min_ns)
                totals->min_ns = total_ns;
            if (total_ns > totals->max_ns)
                totals->max_ns = total_ns;
            if (frame->start_ns < totals->first_ns) {
                totals->first_ns = frame->start_ns;
                totals->first_total_ns = total_ns;
            }
        }
        totals->calls++;
        if (error != NULL)
            totals->errors++;
        if (moved_bytes != 0)
            totals->moved_bytes += moved_bytes;
        if (!frame->is_inner)
            add_time(core, &totals->total_ns, total_ns);
        add_time(core, &totals->self_ns, own_ns > 0 ? own_ns : 0);
        totals->waiting[totals->waiting_count++] = (uint16_t)bucket_of((uint64_t)total_ns);
        if (totals->waiting_count == BUCKETS_WAITING)
            count_waiting(core, totals);
    } else {
        count(core, NOT_TALLIED);
    }
    Py_XDECREF(old); /* last: it may run code of the host's */
}

/* Count a span's time against the span above it, where both ran on one thread and task. */
static inline void
count_against_above(Current *current, frame_t *frame, Ring *ring, int64_t end_ns)
{
    frame_t *above = frame->above;
    if (above == NULL && current->base != NULL && frame->parent_id == current->base->span_id)
        above = current->base->frame;
    if (above != NULL && above->ring == ring && above->task == frame->task)
        above->children_ns += end_ns - frame->counted_from_ns;
}

/* Take a frame out of the chain and give the chain's reference up. */
static void
unlink_frame(Current *current, frame_t *below, frame_t *frame)
{
    if (below == NULL)
        current->top = frame->above;
    else
        below->above = frame->above;
    frame->above = NULL;
    Py_XDECREF(frame->self);
}

/* End a frame while others, begun inside it, go on: what follows counts against the frame above. -1 where it is not in
 * the chain. */
static int
cross(Current *current, frame_t *frame, int64_t end_ns)
{
    frame_t *below = current->top;
    while (below != NULL && below->above != frame)
        below = below->above;
    if (below == NULL)
        return -1;
    if (below->ring == frame->ring && below->task == frame->task)
        frame->children_ns += end_ns - below->counted_from_ns;
    below->counted_from_ns = end_ns;
    unlink_frame(current, below, frame);
    return 0;
}

/* The name of an exception's class, cut where it is long. No code of the class is run: a metaclass may have a `__name__`
 * of its own. */
static PyObject * /* new reference or NULL; no exception */
error_name(PyObject *type)
{
    PyObject *whole = Py_TYPE(name_of_type)->tp_descr_get(name_of_type, type, (PyObject *)Py_TYPE(type));
    PyObject *name = whole == NULL ? NULL : PyUnicode_Substring(whole, 0, ERROR_NAME_LIMIT);
    Py_XDECREF(whole);
    if (name == NULL)
        PyErr_Clear();
    return name;
}

/* What a class of a web framework's own says of its status, borrowed; NULL for any other class. */
static PyObject *
answer_of(Core *core, PyTypeObject *type)
{
    if (!PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE))
        return NULL;
    PyObject *module = PyDict_GetItem(type->tp_dict, str_module_dunder);
    PyObject *known = module != NULL && PyUnicode_CheckExact(module) ? PyDict_GetItem(core->answers, module) : NULL;
    return known == NULL ? NULL : PyDict_GetItem(known, ((PyHeapTypeObject *)type)->ht_qualname);
}

/* The status of HTTP by which an exception answers a request, -1 where it is not of a web framework. No exception is
 * set. Twin of `status_of` in http_status.py. */
static long
status_of(Core *core, PyObject *error)
{
    PyObject *classes = Py_TYPE(error)->tp_mro, *answer = NULL;
    for (Py_ssize_t i = 0; answer == NULL && i < PyTuple_GET_SIZE(classes); i++)
        answer = answer_of(core, (PyTypeObject *)PyTuple_GET_ITEM(classes, i));
    if (answer == NULL)
        return -1;
    PyObject *found = PyLong_Check(answer) ? Py_NewRef(answer) : PyObject_GetAttr(error, answer);
    if (found != NULL && PyUnicode_Check(found)) {
        PyObject *digits = PyUnicode_Substring(found, 0, 3);
        Py_SETREF(found, digits == NULL ? NULL : PyLong_FromUnicodeObject(digits, 10));
        Py_XDECREF(digits);
    }
    long status = found != NULL && PyLong_Check(found) ? PyLong_AsLong(found) : -1;
    Py_XDECREF(found);
    if (PyErr_Occurred()) /* a class of the host's makes something else of it */
        PyErr_Clear();
    return 100 <= status && status < 1000 ? status : -1;
}

/* Whether what a span ended with is an answer below 500 and no error; a request bears the answer's status. */
static int
is_answer(Core *core, Frame *ended, PyObject *error)
{
    if (core->answers == NULL || !PyDict_CheckExact(core->answers) || !PyExceptionInstance_Check(error))
        return 0;
    long status = status_of(core, error);
    if (status >= 0 && ended != NULL && ended->frame.node->is_request) {
        PyObject *number = PyLong_FromLong(status);
        PyObject *attributes = ended->frame.attributes ? PyDict_Copy(ended->frame.attributes) : PyDict_New();
        if (number != NULL && attributes != NULL && PyDict_SetItem(attributes, str_status, number) == 0)
            Py_XSETREF(ended->frame.attributes, Py_NewRef(attributes));
        else
            count(core, NO_DETAILS);
        PyErr_Clear();
        Py_XDECREF(attributes);
        Py_XDECREF(number);
    }
    return status >= 0 && status < FIRST_OF_SERVER;
}

/* End a span with an exception, or the name of an error, or None. `anywhere`: it is no mistake that it ends before what
 * is inside it, or in another context. -1 with an exception of the host's, else 0: what could not be recorded has been
 * counted. */
static int
close_frame(Core *core, Frame *self, PyObject *error, int anywhere)
{
    int64_t end_ns = read_clock(core);
    frame_t *frame = &self->frame;
    if (frame->state == CLOSED) {
        count(core, ENDED_TWICE);
        return 0;
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (frame->state == CLOSED) { /* by code that ran meanwhile */
        count(core, ENDED_TWICE);
        return 0;
    }
    if (current == NULL) {
        frame->state = CLOSED;
        return lose(core);
    }
    Py_INCREF(self);
    Py_INCREF(ring);
    Py_INCREF(current);
    frame->state = CLOSED;
    if (current->top != frame)
        frame->has_rows = 1; /* what was begun inside it goes on */
    count_against_above(current, frame, ring, end_ns);
    PyObject *published = take_published(frame);
    frame_t *above = frame->above;
    if (current->top == frame) {
        unlink_frame(current, NULL, frame);
        publish_rest(core, current);
        above = current->top;
    } else if (current->top != NULL || current->base != NULL || current->link_id != 0) {
        reason_t reason = cross(current, frame, end_ns) < 0 ? FOREIGN : CROSSED;
        if (!anywhere)
            count(core, reason);
    }
    if (published != NULL)
        pass_on(core, current, published, above);
    PyObject *name = error != NULL && PyUnicode_CheckExact(error) ? Py_NewRef(error)
                     : error == NULL || error == Py_None || is_answer(core, self, error)
                         ? NULL
                         : error_name((PyObject *)Py_TYPE(error));
    store(core, ring, frame, end_ns, -1, name);
    Py_XDECREF(name);
    int failed = frame->pair != NULL ? end_on_device(ring, frame, end_ns) : 0;
    Py_DECREF(current);
    Py_DECREF(ring);
    Py_DECREF(self);
    return failed;
}

/* ------------------------------------------------------------------ muted sites */

static inline void
count_passed(Pass *pass)
{
    pass->calls += (uint64_t)pass->core->on;
}

static PyTypeObject PassType;

/* What counts the calls of a site, borrowed; NULL where it is not muted. Sites are compared by identity: runs no code. */
static inline Pass *
pass_of(Core *core, PyObject *site)
{
    if (__builtin_expect(PyDict_GET_SIZE(core->passes) == 0, 1))
        return NULL;
    PyObject *found = PyDict_GetItemWithError(core->passes, site);
    if (found == NULL)
        PyErr_Clear(); /* a site of a test's own that cannot be hashed */
    return found != NULL && Py_TYPE(found) == &PassType ? (Pass *)found : NULL;
}

static PyObject *
Pass_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", NULL};
    PyObject *core;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Pass", words, &CoreType, &core))
        return NULL;
    Pass *self = (Pass *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->core = (Core *)Py_NewRef(core);
    return (PyObject *)self;
}

static int
Pass_traverse(Pass *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    return 0;
}

static void
Pass_dealloc(Pass *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->core);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* For a wrapper that asks whether its recorder is on. */
static PyObject *
Pass_on(Pass *self, void *Py_UNUSED(closure))
{
    count_passed(self);
    Py_RETURN_FALSE;
}

static PyObject *
Pass_count(Pass *self, PyObject *Py_UNUSED(none))
{
    count_passed(self);
    Py_RETURN_NONE;
}

static PyMethodDef Pass_methods[] = {
    {"count", (PyCFunction)Pass_count, METH_NOARGS, "Count a call."},
    {NULL},
};

static PyMemberDef Pass_members[] = {
    {"calls", T_ULONGLONG, offsetof(Pass, calls), READONLY, "calls that passed"},
    {"cut", T_ULONGLONG, offsetof(Pass, cut), READONLY, "spans of generators that were ended early"},
    {NULL},
};

static PyGetSetDef Pass_getset[] = {
    {"on", (getter)Pass_on, NULL, "False, whoever asks; it is counted as a call", NULL},
    {NULL},
};

static PyTypeObject PassType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Pass",
    .tp_basicsize = sizeof(Pass),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Counts the calls of a muted site: Pass(recorder).",
    .tp_new = Pass_new,
    .tp_dealloc = (destructor)Pass_dealloc,
    .tp_traverse = (traverseproc)Pass_traverse,
    .tp_methods = Pass_methods,
    .tp_members = Pass_members,
    .tp_getset = Pass_getset,
};

/* ------------------------------------------------------------------ functions */

static inline frame_t *
take_frame(void)
{
    frame_t *frame = free_frames;
    if (frame != NULL) {
        free_frames = frame->above;
        free_frame_count--;
    } else {
        frame = new_lines(sizeof(frame_t));
        if (frame == NULL)
            return NULL;
    }
    frame->state = OPEN; /* one that has been released holds nothing */
    frame->start_ns = frame->counted_from_ns = 0;
    return frame;
}

static inline void
release_frame(frame_t *frame)
{
    if (free_frame_count >= FREE_FRAMES_KEPT) {
        free_lines(frame);
        return;
    }
    frame->above = free_frames;
    free_frames = frame;
    free_frame_count++;
}

/* End a call that raised, was crossed, reset, linked, or is known to other contexts. The raised exception stays as it
 * is. Returns whether the frame is out of every chain: one that is not found in its own must not be used again. */
static int
end_call(Core *core, Ring *ring, Current *current, frame_t *frame, int64_t end_ns)
{
    PyObject *type, *raised, *traceback, *error = NULL;
    PyErr_Fetch(&type, &raised, &traceback);
    if (type != NULL && !(raised != NULL && is_answer(core, NULL, raised)))
        error = error_name(type);
    int found = 1;
    frame->state = CLOSED;
    if (current->top != frame)
        frame->has_rows = 1; /* what was begun inside it goes on */
    count_against_above(current, frame, ring, end_ns);
    PyObject *published = take_published(frame);
    frame_t *above = frame->above;
    if (current->top == frame) {
        current->top = above;
        publish_rest(core, current);
        above = current->top;
    } else {
        found = cross(current, frame, end_ns) == 0;
        count(core, found ? CROSSED : FOREIGN);
    }
    if (published != NULL)
        pass_on(core, current, published, above);
    if (ring->rows == NULL && (ring = ring_of(core)) == NULL && lose(core) < 0) {
        /* A signal handler raised: in place of what the call raised, as it would have without us. */
        Py_CLEAR(type);
        Py_CLEAR(raised);
        Py_CLEAR(traceback);
        PyErr_Fetch(&type, &raised, &traceback);
    }
    if (ring != NULL) {
        Py_INCREF(ring);
        store(core, ring, frame, end_ns, -1, error);
        if (frame->pair != NULL && end_on_device(ring, frame, end_ns) < 0) {
            Py_CLEAR(type);
            Py_CLEAR(raised);
            Py_CLEAR(traceback);
            PyErr_Fetch(&type, &raised, &traceback);
        }
        Py_DECREF(ring);
    }
    Py_CLEAR(frame->pair);
    Py_CLEAR(frame->attributes);
    if (!found) {
        Py_CLEAR(frame->request);
        frame->ring = NULL;
    }
    Py_XDECREF(error);
    PyErr_Restore(type, raised, traceback);
    return found;
}

static void forget_paths(Function *);

static PyObject *settle_and_call(Function *, PyObject *, path_t *, PyObject *const *, size_t, PyObject *);

/* What a call works on, by its arguments: a new reference in `told`, NULL where nobody can tell. -1 with an exception of
 * the host's. */
static int
tell_work(Function *self, PyObject *const *args, size_t nargsf, PyObject *names, PyObject **told)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf), named_count = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    PyObject *positional = PyTuple_New(count), *named = PyDict_New();
    int failed = positional == NULL || named == NULL;
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        PyTuple_SET_ITEM(positional, i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; !failed && i < named_count; i++)
        failed = PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[count + i]) < 0;
    *told = failed ? NULL : PyObject_CallFunctionObjArgs(self->works, positional, named, NULL);
    Py_XDECREF(positional);
    Py_XDECREF(named);
    if (*told == Py_None)
        Py_CLEAR(*told);
    if (!PyErr_Occurred())
        return 0;
    if (is_hosts())
        return -1;
    note_fault("device timer");
    return PyErr_Occurred() ? -1 : 0;
}

static int
begin_call_on_device(Function *self, frame_t *frame, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *told = NULL;
    int failed = self->works != NULL ? tell_work(self, args, nargsf, names, &told) : 0;
    if (!failed)
        failed = begin_on_device(self->core, frame, told);
    Py_XDECREF(told);
    return failed;
}

/* Call what is wrapped inside a span. `path` remembers where the site was met, which is borrowed. */
static inline PyObject *
call_in_span(Function *self, PyObject *site, path_t *path, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Core *core = self->core;
    Ring *ring;
    if (path != NULL)
        __builtin_prefetch(path->steps[0]);
    Current *current = current_at_hand(core, &ring);
    if (current == NULL)
        return settle_and_call(self, site, path, args, nargsf, names);
    if (self->uid != core->uid)
        forget_paths(self);
    if (is_stack_used_up(ring)) {
        PyErr_SetString(PyExc_RecursionError, "the C stack is used up by calls of instrumented functions");
        return NULL;
    }
    frame_t *frame = take_frame();
    if (frame == NULL) {
        count(core, NO_MEMORY);
        return PyObject_Vectorcall(self->wrapped, args, nargsf, names);
    }
    identify(core, ring, current, frame, site, path);
    Py_INCREF(self);
    Py_INCREF(ring);
    Py_INCREF(current);
    current->top = frame;
    publish_begun(core, current);
    frame->start_ns = frame->counted_from_ns = read_clock(core);
    PyObject *result = NULL;
    node_t *node = frame->node;
    totals_t *totals = node->totals;
    __builtin_prefetch(totals, 1);
    if (!is_timed_on_device(core, frame) || begin_call_on_device(self, frame, args, nargsf, names) == 0)
        result = PyObject_Vectorcall(self->wrapped, args, nargsf, names);
    /* What the end needs comes from memory while the clock is read. */
    __builtin_prefetch(frame, 1);
    __builtin_prefetch((char *)frame + LINE, 1);
    __builtin_prefetch(totals, 1);
    __builtin_prefetch(node);
    __builtin_prefetch(ring, 1);
    __builtin_prefetch((char *)ring + LINE, 1);
    __builtin_prefetch(current, 1);
    __builtin_prefetch((char *)current + LINE, 1);
    int64_t end_ns = read_clock(core);
    int plain = result != NULL && current->top == frame && ring->rows != NULL &&
                ((uintptr_t)frame->published | (uintptr_t)frame->attributes) == 0;
    if (plain) {
        count_against_above(current, frame, ring, end_ns);
        current->top = frame->above;
        store(core, ring, frame, end_ns, -1, NULL);
        if (frame->pair != NULL && end_on_device(ring, frame, end_ns) < 0)
            Py_CLEAR(result);
    } else {
        plain = end_call(core, ring, current, frame, end_ns);
        if (result != NULL && PyErr_Occurred())
            Py_CLEAR(result);
    }
    Py_XDECREF(frame->request);
    if (plain)
        release_frame(frame);
    Py_DECREF(current);
    Py_DECREF(ring);
    Py_DECREF(self);
    return result;
}

/* Finding the chain of another context may run code, which may let go of the site. */
static PyObject *
settle_and_call(Function *self, PyObject *site, path_t *path, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Ring *ring;
    PyObject *result = NULL;
    Py_INCREF(site);
    if (current_of(self->core, &ring) != NULL)
        result = call_in_span(self, site, path, args, nargsf, names); /* it is at hand now */
    else if (lose(self->core) == 0)
        result = PyObject_Vectorcall(self->wrapped, args, nargsf, names);
    Py_DECREF(site);
    return result;
}

/* Call what is wrapped without a span, as the last thing of a call: a function of Python's is jumped to, and what called
 * us checks its result. */
static inline PyObject *
call_wrapped(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *wrapped = self->wrapped;
    if (__builtin_expect(PyFunction_Check(wrapped), 1))
        return ((PyFunctionObject *)wrapped)->vectorcall(wrapped, args, nargsf, names);
    return PyObject_Vectorcall(wrapped, args, nargsf, names);
}

static PyObject *
Function_call(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Core *core = self->core;
    if (!core->on || self->muted) {
        if (self->pass != NULL)
            count_passed(self->pass);
        return call_wrapped(self, args, nargsf, names);
    }
    return call_in_span(self, self->path.site, &self->path, args, nargsf, names);
}

/* When a method's `sites` changed last: a number that does not come twice. */
#if PY_VERSION_HEX < 0x030C0000
static inline uint64_t
version_of(PyObject *sites)
{
    return ((PyDictObject *)sites)->ma_version_tag;
}

static int
follow_changes(PyObject *Py_UNUSED(sites))
{
    return 1;
}
#else
static uint64_t changes = 1; /* of all that are followed */
static int watcher = -1;

static int
note_change(PyDict_WatchEvent Py_UNUSED(event), PyObject *Py_UNUSED(sites), PyObject *Py_UNUSED(key),
            PyObject *Py_UNUSED(value))
{
    changes++;
    return 0;
}

static inline uint64_t
version_of(PyObject *Py_UNUSED(sites))
{
    return changes;
}

/* Not where the process has no watcher left to give: each call asks `sites` then. */
static int
follow_changes(PyObject *sites)
{
    if (watcher < 0)
        watcher = PyDict_AddWatcher(note_change);
    if (watcher >= 0 && PyDict_Watch(watcher, sites) == 0)
        return 1;
    PyErr_Clear();
    return 0;
}
#endif

/* What is known of an instance now, or the one of its two places where that could be kept. */
static inline known_t *
place_of(const Function *self, PyObject *instance, uint64_t version)
{
    known_t *place = &self->known[(uint32_t)(scrambled((uintptr_t)instance) >> 32) & (self->known_slots - 1)];
    if (place->instance == instance && place->version == version)
        return place;
    known_t *other = self->known + ((place - self->known) ^ 1);
    if ((other->instance == instance && other->version == version) || place->version == version)
        return other;
    return place;
}

/* Keep what `sites` says of an instance. There is more room once three that are in use want two places; what a call
 * may still write to is given up with the function. */
static void
remember(Function *self, PyObject *instance, PyObject *site)
{
    uint64_t version = version_of(self->sites);
    known_t *place = self->known == NULL ? NULL : place_of(self, instance, version);
    if (place == NULL || (place->version == version && place->instance != instance && self->known_slots < KNOWN_LIMIT)) {
        uint32_t slots = place == NULL ? KNOWN_AT_FIRST : self->known_slots * 2;
        known_t *room = new_lines((slots + 1) * sizeof(known_t));
        if (room != NULL) {
            room[slots].before = self->known;
            room[slots].version = self->known_slots;
            self->known = room;
            self->known_slots = slots;
            place = place_of(self, instance, version);
        }
    }
    if (place != NULL) {
        place->instance = instance;
        place->version = version;
        place->path = (path_t){.site = site};
    }
}

/* The nodes that its paths lead to were given up. */
static void
forget_paths(Function *self)
{
    self->uid = self->core->uid;
    memset(self->path.parents, 0, sizeof self->path.parents);
    uint32_t slots = self->known_slots;
    for (known_t *known = self->known; known != NULL;) {
        for (uint32_t i = 0; i < slots; i++)
            memset(known[i].path.parents, 0, sizeof known[i].path.parents);
        known_t *last = &known[slots];
        slots = (uint32_t)last->version;
        known = last->before;
    }
}

static void
forget_known(Function *self)
{
    while (self->known != NULL) {
        known_t *last = &self->known[self->known_slots], *known = self->known;
        self->known = last->before;
        self->known_slots = (uint32_t)last->version;
        free_lines(known);
    }
}

/* The site of the instance that a method is called on, a new reference in `found`; NULL where it has none. -1 with an
 * exception of the host's. */
static inline int
site_of_instance(Function *self, PyObject *instance, PyObject **found)
{
    PyObject *key = PyLong_FromVoidPtr(instance);
    PyObject *site = key == NULL ? NULL : PyDict_GetItemWithError(self->sites, key);
    if (site != NULL && self->is_followed)
        remember(self, instance, site == Py_None ? NULL : site);
    if (site == NULL && !PyErr_Occurred()) {
        PyObject *evaluator = self->evaluate == NULL ? NULL : PyObject_CallOneArg(self->evaluate, Py_None);
        PyObject *decided = PyErr_Occurred() ? NULL : PyObject_CallOneArg(self->decide, instance);
        site = decided == NULL ? NULL : PyDict_GetItemWithError(self->sites, key);
        Py_XDECREF(decided); /* what it has decided for good stands in `sites` now */
        if (evaluator != NULL) {
            PyObject *type, *raised, *traceback;
            PyErr_Fetch(&type, &raised, &traceback);
            Py_XDECREF(PyObject_CallOneArg(self->evaluate, evaluator));
            Py_DECREF(evaluator);
            PyErr_Restore(type, raised, traceback);
        }
    }
    *found = site == Py_None ? NULL : Py_XNewRef(site);
    Py_XDECREF(key);
    return *found == NULL ? lose(self->core) : 0;
}

/* Where the instance has a site, or it is not known whether it has. */
static __attribute__((noinline)) PyObject *
call_of_instance(Function *self, known_t *known, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *site, *asked = NULL, *result = NULL;
    path_t *path = NULL;
    if (known != NULL) {
        path = &known->path;
        site = path->site;
    } else if (site_of_instance(self, args[0], &asked) < 0) {
        return NULL;
    } else {
        site = asked;
    }
    Pass *pass = site == NULL ? NULL : pass_of(self->core, site);
    if (pass != NULL)
        count_passed(pass);
    if (site == NULL || pass != NULL)
        result = PyObject_Vectorcall(self->wrapped, args, nargsf, names);
    else
        result = call_in_span(self, site, path, args, nargsf, names);
    Py_XDECREF(asked);
    return result;
}

/* An instance that passes is in a hurry: for it there is no frame of ours on the C stack. */
static PyObject *
Function_call_by_instance(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (!self->core->on || PyVectorcall_NARGS(nargsf) == 0)
        return call_wrapped(self, args, nargsf, names);
    uint64_t version = version_of(self->sites);
    known_t *known = self->known == NULL ? NULL : place_of(self, args[0], version);
    if (known != NULL && (known->instance != args[0] || known->version != version))
        known = NULL;
    if (known != NULL && known->path.site == NULL)
        return call_wrapped(self, args, nargsf, names);
    return call_of_instance(self, known, args, nargsf, names);
}

static PyObject *Function_call_async_generator(Function *, PyObject *const *, size_t, PyObject *);

static PyObject *
Function_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", "function", "site", "sites", "decide", "evaluate", "makes_async_generators",
                            "works", NULL};
    PyObject *core, *wrapped, *site, *sites = NULL, *decide = NULL, *evaluate = Py_None, *works = Py_None;
    int makes_async_generators = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO|O!OO$pO:Function", words, &CoreType, &core, &wrapped, &site,
                                     &PyDict_Type, &sites, &decide, &evaluate, &makes_async_generators, &works))
        return NULL;
    if (sites != NULL && decide == NULL) {
        PyErr_SetString(PyExc_TypeError, "Function: sites go with decide");
        return NULL;
    }
    Function *self = (Function *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = (vectorcallfunc)(makes_async_generators ? Function_call_async_generator
                                        : sites == NULL          ? Function_call
                                                                 : Function_call_by_instance);
    self->sites = Py_XNewRef(sites);
    self->decide = Py_XNewRef(decide);
    self->is_followed = (char)(sites != NULL && follow_changes(sites));
    self->evaluate = evaluate == Py_None ? NULL : Py_NewRef(evaluate);
    self->works = works == Py_None ? NULL : Py_NewRef(works);
    self->core = (Core *)Py_NewRef(core);
    self->wrapped = Py_NewRef(wrapped);
    self->site = self->path.site = Py_NewRef(site);
    self->dict = PyDict_New();
    if (self->dict == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int
Function_traverse(Function *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->wrapped);
    Py_VISIT(self->site);
    Py_VISIT(self->dict);
    Py_VISIT(self->sites);
    Py_VISIT(self->decide);
    Py_VISIT(self->works);
    Py_VISIT(self->pass);
    return 0;
}

static int
Function_clear(Function *self)
{
    Py_CLEAR(self->dict);
    return 0;
}

static void
Function_dealloc(Function *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Py_XDECREF(self->dict);
    Py_XDECREF(self->core);
    Py_XDECREF(self->wrapped);
    Py_XDECREF(self->site);
    Py_XDECREF(self->sites);
    Py_XDECREF(self->decide);
    Py_XDECREF(self->pass);
    forget_known(self);
    Py_XDECREF(self->evaluate);
    Py_XDECREF(self->works);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
Function_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    if (instance == NULL || instance == Py_None)
        return Py_NewRef(self);
    return PyMethod_New(self, instance);
}

static PyObject *
Function_repr(Function *self)
{
    return PyUnicode_FromFormat("<instrumented %R>", self->wrapped);
}

/* By name, as functions are: unpickling finds what the module holds then. */
static PyObject *
Function_reduce(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyObject_GetAttrString(self, "__qualname__");
}

/* What is not set on the wrapper itself is the function's: __code__, __defaults__, __globals__, __closure__ ... */
static PyObject *
Function_getattro(PyObject *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(((Function *)self)->wrapped, name);
}

/* What says how a call runs is the function's: set on the wrapper, it would have no effect. */
static int
Function_setattro(PyObject *self, PyObject *name, PyObject *value)
{
    if (PyUnicode_Check(name) && (PyUnicode_CompareWithASCIIString(name, "__defaults__") == 0 ||
                                  PyUnicode_CompareWithASCIIString(name, "__kwdefaults__") == 0 ||
                                  PyUnicode_CompareWithASCIIString(name, "__code__") == 0))
        return PyObject_SetAttr(((Function *)self)->wrapped, name, value);
    return PyObject_GenericSetAttr(self, name, value);
}

static PyMethodDef Function_methods[] = {
    {"__reduce__", (PyCFunction)Function_reduce, METH_NOARGS, NULL},
    {NULL},
};

/* What asks `isinstance(f, FunctionType)` or `inspect.isfunction(f)` wants to know how to call it: like the function. */
static PyObject *
Function_class(Function *self, void *Py_UNUSED(closure))
{
    PyObject *wrapped = self->wrapped;
    while (Py_TYPE(wrapped) == &FunctionType_) /* by a decorator and by a rule */
        wrapped = ((Function *)wrapped)->wrapped;
    return Py_NewRef((PyObject *)(PyFunction_Check(wrapped) ? &PyFunction_Type : Py_TYPE(self)));
}

static PyObject *
Function_pass(Function *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->pass != NULL ? (PyObject *)self->pass : self->muted ? Py_False : Py_None);
}

static int
Function_set_pass(Function *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL || (value != Py_None && value != Py_False && Py_TYPE(value) != &PassType)) {
        PyErr_SetString(PyExc_TypeError, "what counts the calls of a muted function is a Pass, False or None");
        return -1;
    }
    self->muted = value != Py_None;
    Py_XSETREF(self->pass, Py_TYPE(value) == &PassType ? (Pass *)Py_NewRef(value) : NULL);
    return 0;
}

static PyGetSetDef Function_getset[] = {
    {"__class__", (getter)Function_class, NULL, NULL, NULL},
    {"__instrument_pass__", (getter)Function_pass, (setter)Function_set_pass,
     "what counts the calls that pass without a span; False: they do, and nothing counts them; None: none does", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

static PyTypeObject FunctionType_ = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Function",
    .tp_basicsize = sizeof(Function),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = Function_new,
    .tp_dealloc = (destructor)Function_dealloc,
    .tp_traverse = (traverseproc)Function_traverse,
    .tp_clear = (inquiry)Function_clear,
    .tp_repr = (reprfunc)Function_repr,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Function, vectorcall),
    .tp_getattro = Function_getattro,
    .tp_setattro = Function_setattro,
    .tp_descr_get = Function_get,
    .tp_dictoffset = offsetof(Function, dict),
    .tp_weaklistoffset = offsetof(Function, weak_references),
    .tp_methods = Function_methods,
    .tp_getset = Function_getset,
};

/* ------------------------------------------------------------------ attributes of open spans */

enum { GIVEN, INNERMOST, REQUEST };

/* The innermost open span of this context, the open request that it is in, or the one that is given: NULL without one.
 * Valid until code of the host's may run. */
static frame_t *
open_span(Core *core, int which, Frame *given)
{
    if (which == GIVEN)
        return given->frame.state == CLOSED ? NULL : &given->frame;
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL)
        return NULL;
    frame_t *frame = current->top;
    if (frame == NULL && current->base != NULL)
        frame = current->base->frame;
    if (frame == NULL || which == INNERMOST)
        return frame;
    return is_open_request(frame->request) ? &((Frame *)frame->request)->frame : NULL;
}

/* An attribute that is kept as it is: one that runs no code and takes little memory. */
static int
is_plain_attribute(PyObject *name, PyObject *value)
{
    if (!PyUnicode_CheckExact(name) || PyUnicode_GET_LENGTH(name) > VALUE_LIMIT || PyUnicode_GET_LENGTH(name) == 0)
        return 0;
    if (PyUnicode_CheckExact(value))
        return PyUnicode_GET_LENGTH(value) <= VALUE_LIMIT;
    if (PyLong_CheckExact(value)) {
        int overflow;
        PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow;
    }
    return PyFloat_CheckExact(value) || PyBool_Check(value);
}

static int
put_attribute(Core *core, PyObject *made, PyObject *name, PyObject *value)
{
    if (PyDict_GET_SIZE(made) >= ATTRIBUTE_LIMIT && PyDict_Contains(made, name) == 0) {
        count(core, TOO_MANY_ATTRIBUTES);
        return 0;
    }
    return PyDict_SetItem(made, name, value);
}

/* Set attributes of an open span: those of a dict, or by their names. What may have been handed on stays as it is: they
 * are copied each time. -1 with an exception of the host's. */
static int
set_attributes(Core *core, int which, Frame *given, PyObject *more, PyObject *names, PyObject *const *values)
{
    frame_t *frame = open_span(core, which, given);
    for (int tries = 0; frame != NULL && tries < TRIES; tries++) {
        uint64_t span_id = frame->span_id;
        PyObject *before = Py_XNewRef(frame->attributes), *name, *value;
        PyObject *made = before != NULL && PyDict_Check(before) ? PyDict_Copy(before) : PyDict_New();
        int failed = made == NULL;
        for (Py_ssize_t i = 0; !failed && names != NULL && i < PyTuple_GET_SIZE(names); i++)
            failed = put_attribute(core, made, PyTuple_GET_ITEM(names, i), values[i]) < 0;
        for (Py_ssize_t at = 0; !failed && more != NULL && PyDict_Next(more, &at, &name, &value);)
            failed = put_attribute(core, made, name, value) < 0;
        /* To make a dict may have run code of the host's. */
        frame = failed ? NULL : open_span(core, which, given);
        if (frame != NULL && frame->span_id == span_id && frame->attributes == before) {
            frame->attributes = made;
            Py_XDECREF(before); /* the frame's */
            Py_XDECREF(before);
            return 0;
        }
        Py_XDECREF(before);
        Py_XDECREF(made);
    }
    if (frame == NULL && !PyErr_Occurred()) {
        if (which == GIVEN)
            count(core, ANNOTATED_LATE);
        return 0;
    }
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_MemoryError))
        count(core, NO_DETAILS);
    return forgive();
}

/* Set attributes that a service gives by their names. Those that have to be looked at go the long way in Python. */
static PyObject *
annotate_by(Core *core, int which, Frame *given, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (!core->on && which != GIVEN)
        Py_RETURN_NONE;
    int plain = nargs == 0;
    for (Py_ssize_t i = 0; plain && names != NULL && i < PyTuple_GET_SIZE(names); i++)
        plain = is_plain_attribute(PyTuple_GET_ITEM(names, i), args[i]);
    if (plain) {
        if (set_attributes(core, which, given, NULL, names, args) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    if (which != GIVEN && open_span(core, which, given) == NULL) {
        if (forgive() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    PyObject *more = PyDict_New(), *first = nargs > 0 ? args[0] : Py_None, *checked = NULL;
    for (Py_ssize_t i = 0; more != NULL && i < named; i++)
        if (PyDict_SetItem(more, PyTuple_GET_ITEM(names, i), args[nargs + i]) < 0)
            Py_CLEAR(more);
    if (nargs > 1)
        PyErr_SetString(PyExc_TypeError, "annotate(attributes=None, /, **more)");
    else if (more != NULL)
        checked = PyObject_CallMethodObjArgs((PyObject *)core, str_annotate_checked, first, more, NULL);
    int failed = nargs > 1;
    if (!failed && checked != NULL && PyDict_Check(checked))
        failed = set_attributes(core, which, given, checked, NULL, NULL) < 0;
    else if (!failed)
        failed = lose(core) < 0;
    Py_XDECREF(checked);
    Py_XDECREF(more);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------ scopes */

static PyObject *
Scope_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", "site", "attributes", NULL};
    PyObject *core, *site, *attributes = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|O:Scope", words, &CoreType, &core, &site, &attributes))
        return NULL;
    Scope *self = (Scope *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->core = (Core *)Py_NewRef(core);
    self->site = Py_NewRef(site);
    self->attributes = attributes == Py_None ? NULL : Py_NewRef(attributes);
    return (PyObject *)self;
}

static int
Scope_traverse(Scope *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->site);
    Py_VISIT(self->attributes);
    Py_VISIT(self->frame);
    return 0;
}

/* Nobody is left who could end it: its `with` lost it (from 3.14 on a signal's handler may raise after `__enter__`
 * and before the block), or it was entered by hand. */
static void
end_dropped(Scope *self)
{
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    if (close_frame(self->core, self->frame, NULL, 0) < 0)
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(type, raised, traceback);
}

static void
Scope_dealloc(Scope *self)
{
    PyObject_GC_UnTrack(self);
    if (self->frame != NULL && self->frame->frame.state == OPEN)
        end_dropped(self);
    Py_XDECREF(self->core);
    Py_XDECREF(self->site);
    Py_XDECREF(self->attributes);
    Py_XDECREF(self->frame);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
Scope_enter(Scope *self, PyObject *Py_UNUSED(none))
{
    if (self->site != NULL && self->core->on && self->frame == NULL) {
        Pass *pass = pass_of(self->core, self->site);
        if (pass != NULL) {
            count_passed(pass);
            return Py_NewRef((PyObject *)self);
        }
        self->frame = open_frame(self->core, self->site, self->attributes, OPEN);
        if (self->frame == NULL && lose(self->core) < 0)
            return NULL;
    }
    return Py_NewRef((PyObject *)self);
}

static PyObject *
Scope_exit(Scope *self, PyObject *const *args, Py_ssize_t nargs)
{
    Frame *frame = self->frame;
    self->frame = NULL;
    int closed = frame == NULL ? 0 : close_frame(self->core, frame, nargs > 1 ? args[1] : NULL, 0);
    Py_XDECREF(frame);
    if (closed < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *annotate_by(Core *, int, Frame *, PyObject *const *, Py_ssize_t, PyObject *);

static PyObject *
Scope_annotate(Scope *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (self->frame == NULL)
        Py_RETURN_NONE;
    return annotate_by(self->core, 0, self->frame, args, nargs, names);
}

static PyMethodDef Scope_methods[] = {
    {"annotate", (PyCFunction)(void (*)(void))Scope_annotate, METH_FASTCALL | METH_KEYWORDS,
     "annotate($self, attributes=None, /, **more)\n--\n\nSet attributes of the span; see instrument.annotate."},
    {"__enter__", (PyCFunction)Scope_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))Scope_exit, METH_FASTCALL, NULL},
    {NULL},
};

static PyMemberDef Scope_members[] = {
    {"_recorder", T_OBJECT, offsetof(Scope, core), READONLY, NULL},
    {"_site", T_OBJECT, offsetof(Scope, site), READONLY, NULL},
    {"_attributes", T_OBJECT, offsetof(Scope, attributes), READONLY, NULL},
    {NULL},
};

static PyObject *
Scope_frame(Scope *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->frame != NULL ? (PyObject *)self->frame : Py_None);
}

static int
Scope_set_frame(Scope *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (value != NULL && value != Py_None && Py_TYPE(value) != &FrameType) {
        PyErr_SetString(PyExc_TypeError, "a scope's frame is a Frame or None");
        return -1;
    }
    Frame *frame = value == NULL || value == Py_None ? NULL : (Frame *)Py_NewRef(value);
    Py_XSETREF(self->frame, frame);
    return 0;
}

static PyGetSetDef Scope_getset[] = {
    {"_frame", (getter)Scope_frame, (setter)Scope_set_frame, NULL, NULL},
    {NULL},
};

static PyTypeObject ScopeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Scope",
    .tp_basicsize = sizeof(Scope),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "A span around a block: Scope(recorder, site, attributes=None).",
    .tp_new = Scope_new,
    .tp_dealloc = (destructor)Scope_dealloc,
    .tp_traverse = (traverseproc)Scope_traverse,
    .tp_methods = Scope_methods,
    .tp_members = Scope_members,
    .tp_getset = Scope_getset,
};

/* ------------------------------------------------------------------ generators */

static PyObject *
Stretch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", "site", "attributes", NULL};
    PyObject *core, *site, *attributes = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|O:Stretch", words, &CoreType, &core, &site, &attributes))
        return NULL;
    Stretch *self = (Stretch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->core = (Core *)Py_NewRef(core);
    self->site = Py_NewRef(site);
    self->attributes = attributes == Py_None ? NULL : Py_NewRef(attributes);
    self->next = self->core->stretches;
    if (self->next != NULL)
        self->next->previous = self;
    self->core->stretches = self;
    self->listed = 1;
    return (PyObject *)self;
}

/* The scopes that the body left open while it is suspended belong to nobody's chain: give them up. */
static void
drop_inner(Stretch *self)
{
    frame_t *own = self->frame != NULL ? &self->frame->frame : NULL;
    frame_t *frame = self->inner;
    self->inner = NULL;
    while (frame != NULL) {
        frame_t *above = frame->above;
        int last = frame == own;
        frame->above = NULL;
        Py_XDECREF(frame->self);
        if (last)
            break;
        frame = above;
    }
}

static void
Stretch_dealloc(Stretch *self)
{
    PyObject_GC_UnTrack(self);
    if (self->listed) {
        if (self->previous != NULL)
            self->previous->next = self->next;
        else
            self->core->stretches = self->next;
        if (self->next != NULL)
            self->next->previous = self->previous;
    }
    drop_inner(self);
    if (self->frame != NULL)
        self->frame->stretch = NULL;
    Py_XDECREF(self->frame);
    Py_XDECREF(self->parent);
    Py_XDECREF(self->core);
    Py_XDECREF(self->site);
    Py_XDECREF(self->attributes);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int
Stretch_traverse(Stretch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->site);
    Py_VISIT(self->attributes);
    Py_VISIT(self->frame);
    Py_VISIT(self->parent);
    return 0;
}

/* The span goes on in this thread and task. */
static void
move_frame(frame_t *frame, Ring *ring, uint64_t task)
{
    frame->task = task;
    if (frame->ring != ring && frame->self != NULL) {
        Py_INCREF(ring);
        Py_XSETREF(frame->ring, ring);
    }
}

static PyObject *Stretch_finish(Stretch *, PyObject *);
static int told(PyObject *);

/* True where its site is muted: it has begun no span then, or has ended the one that it had, and the generator goes on
 * without. One that has scopes open inside waits until they are closed. */
static PyObject *
Stretch_resume(Stretch *self, PyObject *Py_UNUSED(none))
{
    Core *core = self->core;
    if (self->lost)
        Py_RETURN_NONE;
    Pass *pass = pass_of(core, self->site);
    if (pass != NULL && (self->frame == NULL || self->inner == &self->frame->frame)) {
        if (self->frame == NULL) {
            self->lost = 1;
            count_passed(pass);
        } else {
            pass->cut++;
            if (told(Stretch_finish(self, Py_None)) < 0)
                return NULL;
        }
        Py_RETURN_TRUE;
    }
    if (self->frame == NULL) {
        self->frame = open_frame(core, self->site, self->attributes, OPEN);
        if (self->frame == NULL) {
            self->lost = 1;
            if (lose(core) < 0)
                return NULL;
            Py_RETURN_NONE;
        }
        self->frame->stretch = self;
        self->resumed_ns = self->frame->frame.start_ns;
        Py_RETURN_NONE;
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL) { /* the span goes on, but is not current during this step */
        if (forgive() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    frame_t *own = &self->frame->frame;
    int64_t now_ns = read_clock(core);
    int64_t gap_ns = now_ns - self->suspended_ns;
    frame_t *frame = self->inner;
    if (frame == NULL) /* finished already */
        Py_RETURN_NONE;
    totals_t *totals = totals_here(ring, own->node);
    if (totals != NULL)
        totals->steps++;
    Py_INCREF(ring);
    Py_INCREF(current);
    for (; frame != own; frame = frame->above) {
        /* A scope left open across a yield did not work meanwhile. */
        frame->children_ns += gap_ns;
        frame->counted_from_ns += gap_ns;
        move_frame(frame, ring, current->task);
    }
    move_frame(own, ring, current->task);
    own->above = current->top; /* the references of the inner chain move with it */
    current->top = self->inner;
    self->inner = NULL;
    publish_begun(core, current);
    self->resumed_ns = now_ns;
    Py_DECREF(current);
    Py_DECREF(ring);
    if (own->pair != NULL && tell_pair(str_resume, &own->pair, 1) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The span that is current here, as other contexts know it; a new reference, NULL without one. */
static Published *
parent_here(Current *current)
{
    frame_t *frame = current->top;
    while (frame != NULL && frame->state == CLOSED)
        frame = frame->above;
    if (frame == NULL)
        return (Published *)Py_XNewRef((PyObject *)current->base);
    PyObject *published = frame->published != NULL ? Py_NewRef(frame->published) : new_published(current, frame);
    if (published == NULL)
        return NULL;
    Published *first = (Published *)Py_NewRef((PyObject *)first_of(published));
    Py_DECREF(published);
    return first;
}

static PyObject *
Stretch_suspend(Stretch *self, PyObject *Py_UNUSED(none))
{
    Core *core = self->core;
    if (self->frame == NULL || self->inner != NULL)
        Py_RETURN_NONE;
    frame_t *own = &self->frame->frame;
    int64_t now_ns = read_clock(core);
    int64_t step_ns = now_ns - self->resumed_ns;
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL) {
        if (forgive() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    self->active_ns += step_ns;
    self->suspended_ns = now_ns;
    frame_t *frame = current->top;
    while (frame != NULL && frame != own)
        frame = frame->above;
    if (frame == NULL)
        Py_RETURN_NONE; /* ended elsewhere */
    self->inner = current->top;
    current->top = own->above;
    frame_t *caller = own->above;
    own->above = NULL;
    if (caller == NULL && current->base != NULL)
        caller = current->base->frame;
    if (caller != NULL)
        caller->has_rows = 1; /* as soon as this has ended */
    if (caller != NULL && caller->ring == ring && caller->task == own->task)
        caller->children_ns += step_ns;
    Py_INCREF(current);
    publish_rest(core, current);
    if (!self->has_parent) {
        self->has_parent = 1;
        self->parent = parent_here(current);
    }
    Py_DECREF(current);
    if (own->pair != NULL && tell_pair(str_pause, &own->pair, 1) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The body stands still, for it has yielded an item. */
static PyObject *
Stretch_yielded(Stretch *self, PyObject *Py_UNUSED(none))
{
    PyObject *none = Stretch_suspend(self, NULL);
    if (none == NULL || self->inner == NULL)
        return none;
    int64_t gap_ns = self->suspended_ns - self->last_item_ns;
    self->last_item_ns = self->suspended_ns;
    if (gap_ns > self->longest_gap_ns) { /* always for the first item, since `last_item_ns` is 0 then */
        if (self->items == 0)
            self->first_item_ns = self->suspended_ns;
        else
            self->longest_gap_ns = gap_ns;
    }
    self->items++;
    return none;
}

/* Tell of its items, but for what the service has set by the same names. -1 with an exception of the host's. */
static int
tell_items(Stretch *self)
{
    frame_t *frame = &self->frame->frame;
    struct {
        PyObject *name;
        int64_t value;
    } facts[] = {{str_items, self->items},
                 {str_first_item, self->first_item_ns - frame->start_ns},
                 {str_last_item, self->last_item_ns - frame->start_ns},
                 {str_longest_gap, self->longest_gap_ns}};
    PyObject *known = frame->attributes != NULL && PyDict_Check(frame->attributes) ? frame->attributes : NULL;
    PyObject *made = PyDict_New();
    for (int i = 0; made != NULL && i < (self->items > 1 ? 4 : 3); i++) {
        if (known != NULL && PyDict_Contains(known, facts[i].name) != 0)
            continue;
        PyObject *value = PyLong_FromLongLong(facts[i].value);
        if (value == NULL || PyDict_SetItem(made, facts[i].name, value) < 0)
            Py_CLEAR(made);
        Py_XDECREF(value);
    }
    if (made == NULL) {
        count(self->core, NO_DETAILS);
        return forgive();
    }
    int failed = set_attributes(self->core, GIVEN, self->frame, made, NULL, NULL);
    Py_DECREF(made);
    return failed;
}

static PyObject *
Stretch_finish(Stretch *self, PyObject *error)
{
    if (self->frame == NULL || self->frame->frame.state == CLOSED)
        Py_RETURN_NONE;
    frame_t *frame = &self->frame->frame;
    if (self->inner == NULL) { /* a signal handler has ended it in the middle of a step */
        PyObject *pair = frame->pair;
        frame->pair = NULL;
        PyObject *none = Stretch_suspend(self, NULL);
        frame->pair = pair;
        if (none == NULL)
            return NULL;
        Py_DECREF(none);
        if (frame->state == CLOSED)
            Py_RETURN_NONE;
    }
    int64_t end_ns = read_clock(self->core);
    if (self->items > 0 && tell_items(self) < 0)
        return NULL;
    frame->state = CLOSED;
    PyObject *published = take_published(frame);
    if (published != NULL) {
        Py_XSETREF(first_of(published)->above, (Published *)Py_XNewRef((PyObject *)nearest_open(self->parent)));
        Py_DECREF(published);
    }
    Py_CLEAR(self->parent);
    drop_inner(self);
    Ring *ring = ring_of(self->core);
    if (ring == NULL) {
        if (lose(self->core) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    Py_INCREF(ring);
    PyObject *name = error == Py_None || is_answer(self->core, self->frame, error)
                         ? NULL
                         : error_name((PyObject *)Py_TYPE(error));
    store(self->core, ring, frame, end_ns, self->active_ns, name);
    Py_XDECREF(name);
    int failed = frame->pair != NULL ? end_on_device(ring, frame, end_ns) : 0;
    Py_DECREF(ring);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef Stretch_methods[] = {
    {"resume", (PyCFunction)Stretch_resume, METH_NOARGS,
     "The body goes on. True where the site is muted, and the span has ended or never begins."},
    {"suspend", (PyCFunction)Stretch_suspend, METH_NOARGS, "The body stands still, or has ended."},
    {"yielded", (PyCFunction)Stretch_yielded, METH_NOARGS, "The body stands still, for it has yielded an item."},
    {"finish", (PyCFunction)Stretch_finish, METH_O, "The generator has ended, with this exception or None."},
    {NULL},
};

static PyMemberDef Stretch_members[] = {
    {"frame", T_OBJECT, offsetof(Stretch, frame), READONLY, "its span's frame, None before the first step"},
    {NULL},
};

static PyTypeObject StretchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Stretch",
    .tp_basicsize = sizeof(Stretch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A generator's span: current only while the body runs, its active time against whoever resumed it.",
    .tp_new = Stretch_new,
    .tp_dealloc = (destructor)Stretch_dealloc,
    .tp_traverse = (traverseproc)Stretch_traverse,
    .tp_methods = Stretch_methods,
    .tp_members = Stretch_members,
};

/* ------------------------------------------------------------------ renaming */

/* Nothing in this section runs code of the host's: what is open stays as it is from its begin to its end. */

/* An open span, and the nearest above it that is open. */
typedef struct {
    frame_t *frame, *above;
    Current *owner; /* whose chain the one above is in */
    node_t *node;   /* where the span was counted */
    uint32_t from;  /* while its place is looked for: the one below that asked, or 0 */
    char is_settled, is_below;
} open_t;

typedef struct {
    open_t *spans;
    uint32_t count, room;
    const frame_t *renamed;
} open_spans_t;

/* The nearest open span from a frame of a chain on, or from what the chain's context was copied under. */
static frame_t *
nearest_above(frame_t *frame, Current **owner, Published *base)
{
    while (frame != NULL && frame->state == CLOSED)
        frame = frame->above;
    if (frame != NULL)
        return frame;
    base = nearest_open(base);
    *owner = base == NULL ? NULL : (Current *)base->owner;
    return base == NULL ? NULL : base->frame;
}

/* Note the open spans of a chain, whose outermost hangs below `base`. -1 without memory. */
static int
note_chain(open_spans_t *open, frame_t *top, Current *owner, Published *base)
{
    const frame_t *renamed = open->renamed;
    int is_in_request = is_open_request(renamed->request);
    if (is_in_request && top != NULL && top->root_id != renamed->root_id && top->state != CLOSED)
        return 0;
    for (frame_t *frame = top; frame != NULL; frame = frame->above) {
        /* A request that is open is the root of all that is below it. */
        if (frame->state == CLOSED || (is_in_request && frame->root_id != renamed->root_id))
            continue;
        if (open->count == open->room) {
            uint32_t room = open->room == 0 ? 64 : open->room * 2;
            open_t *grown = PyMem_Realloc(open->spans, room * sizeof *grown);
            if (grown == NULL)
                return -1;
            open->spans = grown;
            open->room = room;
        }
        const Stretch *stretch = frame->self == NULL ? NULL : ((Frame *)frame->self)->stretch;
        open_t *span = &open->spans[open->count++];
        *span = (open_t){.frame = frame, .node = frame->node, .owner = owner};
        /* A generator's span stays below the one that it began in, whoever resumes it. */
        span->above = stretch != NULL && stretch->has_parent ? nearest_above(NULL, &span->owner, stretch->parent)
                                                             : nearest_above(frame->above, &span->owner, base);
        frame->place = open->count;
    }
    return 0;
}

static int
note_open(Core *core, open_spans_t *open)
{
    for (Current *current = core->currents; current != NULL; current = current->next)
        if (note_chain(open, current->top, current, current->base) < 0)
            return -1;
    for (Stretch *stretch = core->stretches; stretch != NULL; stretch = stretch->next)
        if (note_chain(open, stretch->inner, NULL, NULL) < 0)
            return -1;
    return 0;
}

/* Count a span, of a site, below the one above it, at the path that led from there to where it was counted. `from` is
 * where the one above was counted then. */
static void
move_below(Core *core, const open_t *span, PyObject *site, const node_t *from)
{
    frame_t *frame = span->frame;
    const frame_t *above = span->above;
    const node_t *full = core->overflow;
    node_t *old = frame->node, *node = above != NULL ? above->node : &core->root;
    uint32_t steps = 0;
    if (above == NULL && old != full && old->parent != full)
        node = old->parent; /* all above it have ended */
    for (const node_t *at = old; above != NULL && at != from; at = at->parent, steps++)
        if (at == NULL) { /* it is not below: its calls fold into one around it, or the tally is full */
            steps = 0;
            break;
        }
    frame->below_fold = above != NULL && above->below_fold;
    for (; steps > 1; steps--) { /* spans between the two that have ended */
        const node_t *at = old;
        for (uint32_t i = 1; i < steps; i++)
            at = at->parent;
        node_t *step = node_of(core, node, at->site);
        frame->below_fold |= (char)is_edge(step);
        node = end_of(step);
    }
    node_t *step = node_of(core, node, site);
    frame->below_fold |= (char)is_edge(step);
    frame->node = end_of(step);
}

/* Move the open spans below the one that has been renamed, each after that above it. */
static void
move_all_below(Core *core, open_spans_t *open)
{
    for (uint32_t i = 1; i <= open->count; i++) {
        uint32_t at = i, from = 0;
        int is_below = 0;
        for (;;) {
            open_t *span = &open->spans[at - 1];
            if (span->is_settled) {
                is_below = span->is_below;
                break;
            }
            span->from = from;
            span->is_settled = 1; /* or will be, in the second loop */
            from = at;
            if (span->above == NULL || span->above->place == 0)
                break;
            at = span->above->place;
        }
        while (from != 0) {
            open_t *span = &open->spans[from - 1];
            span->is_below = (char)is_below;
            if (is_below)
                move_below(core, span, span->node->site, open->spans[span->above->place - 1].node);
            from = span->from;
        }
    }
}

/* Whether a call of a span's node is open around it, by the spans above it. */
static int
is_inner_now(const open_spans_t *open, const open_t *span)
{
    const frame_t *frame = span->frame;
    for (; span->above != NULL && span->above->place != 0; span = &open->spans[span->above->place - 1])
        if (span->above->node == frame->node && span->above->ring->thread_id == frame->ring->thread_id)
            return 1;
    return span->above != NULL && is_open_around(span->owner, span->above, frame->ring, frame->node);
}

/* The same for the innermost span of this context, below which nothing has begun elsewhere: the way of nearly every
 * request, whatever else is open. 0 where it is another one. */
static int
rename_alone(Core *core, frame_t *frame, PyObject *site)
{
    Ring *ring;
    Current *current = current_of(core, &ring);
    const Stretch *stretch = frame->self == NULL ? NULL : ((Frame *)frame->self)->stretch;
    if (current == NULL || current->top != frame || frame->has_rows || frame->state == CLOSED || stretch != NULL)
        return 0;
    open_t span = {.frame = frame, .owner = current};
    span.above = nearest_above(frame->above, &span.owner, current->base);
    move_below(core, &span, site, span.above == NULL ? NULL : span.above->node);
    frame->is_inner = frame->below_fold && frame->node->may_recur && span.above != NULL &&
                      is_open_around(span.owner, span.above, frame->ring, frame->node);
    return 1;
}

/* Let an open span be one of another site from now on; what is open below it moves with it. */
static void
rename_frame(Core *core, frame_t *frame, PyObject *site)
{
    if (rename_alone(core, frame, site))
        return;
    open_spans_t open = {.renamed = frame};
    int failed = note_open(core, &open) < 0;
    if (failed || frame->place == 0) {
        count(core, failed ? NO_DETAILS : RENAMED_LATE);
    } else {
        open_t *renamed = &open.spans[frame->place - 1];
        renamed->is_settled = renamed->is_below = 1;
        move_below(core, renamed, site, renamed->above == NULL ? NULL : renamed->above->node);
        move_all_below(core, &open);
        for (uint32_t i = 0; i < open.count; i++) {
            const open_t *span = &open.spans[i];
            if (span->is_below)
                span->frame->is_inner = span->frame->below_fold && span->frame->node->may_recur &&
                                        is_inner_now(&open, span);
        }
    }
    for (uint32_t i = 0; i < open.count; i++)
        open.spans[i].frame->place = 0;
    PyMem_Free(open.spans);
}

/* ------------------------------------------------------------------ async generators */

struct step;

/* An async generator of the host's, to whoever asks for its class, and the span that is current during its steps. */
typedef struct {
    PyObject_HEAD
    Core *core;
    PyObject *site, *generator, *work; /* what it works on, for the device timer, or NULL */
    Stretch *stretch; /* NULL before the first step, and where recording was off then */
    struct step *under_way; /* borrowed */
    PyObject *finaliser; /* what its event loop wants to be told when it is given up */
    char has_hooks;
    char has_begun;
    PyObject *weak_references;
} AsyncGenerator;

/* What a step gives to be awaited, in place of the generator's own. */
typedef struct step {
    PyObject_HEAD
    AsyncGenerator *of;
    PyObject *awaitable;
    char begins; /* whether it runs the body of a generator that has not begun */
    char ends;   /* whether the generator has ended when it has */
    char waits;  /* nothing was sent yet */
} AsyncStep;

static PyTypeObject AsyncGeneratorType, AsyncStepType;

/* Take the exception that is raised now and leave none. */
static PyObject *
take_raised(void)
{
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    if (type == NULL)
        return NULL;
    PyErr_NormalizeException(&type, &raised, &traceback);
    if (traceback != NULL && PyException_SetTraceback(raised, traceback) < 0)
        PyErr_Clear();
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return raised;
}

/* Raise it again; where a signal handler has raised another one meanwhile, that one, in its context. */
static int
raise_again(PyObject *raised)
{
    PyObject *later = take_raised();
    if (later != NULL && raised != NULL)
        PyException_SetContext(later, raised); /* takes the reference */
    if (later == NULL)
        later = raised;
    if (later == NULL)
        return 0;
    PyErr_SetObject((PyObject *)Py_TYPE(later), later);
    Py_DECREF(later);
    return -1;
}

static int
told(PyObject *none)
{
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

static int
has_ended(AsyncGenerator *self)
{
    PyObject *frame = self->generator == NULL ? NULL : PyObject_GetAttr(self->generator, str_ag_frame);
    if (frame == NULL)
        PyErr_Clear(); /* no generator of Python's: whatever it raises ends it */
    int ended = frame == NULL || frame == Py_None;
    Py_XDECREF(frame);
    return ended;
}

/* -1 with an exception of the host's. */
static int
begin_step(AsyncStep *step, int is_throw)
{
    AsyncGenerator *self = step->of;
    step->waits = 0;
    if (!self->has_begun) {
        if (!step->begins || is_throw)
            return 0; /* it ends before its body could begin */
        self->has_begun = 1;
        Pass *pass = self->core->on ? pass_of(self->core, self->site) : NULL;
        if (pass != NULL) {
            count_passed(pass);
        } else if (self->core->on) {
            PyObject *stretch =
                PyObject_CallFunctionObjArgs((PyObject *)&StretchType, self->core, self->site, self->work, NULL);
            if (stretch == NULL && lose(self->core) < 0)
                return -1;
            Py_XSETREF(self->stretch, (Stretch *)stretch);
        }
    }
    if (self->stretch == NULL || self->under_way != NULL)
        return 0;
    self->under_way = step;
    PyObject *passes = Stretch_resume(self->stretch, NULL);
    if (passes == Py_None) {
        Py_DECREF(passes);
        return 0;
    }
    self->under_way = NULL;
    if (passes == NULL)
        return -1;
    Py_DECREF(passes);
    Py_CLEAR(self->stretch); /* the site is muted */
    return 0;
}

/* The step is over, with the exception that is raised now or without one, which stays as it is. -1 where one is.
 * `gives` says whether it has a result, which is an item but where the step is to end the generator. */
static int
end_step(AsyncStep *step, int gives)
{
    AsyncGenerator *self = step->of;
    if (self->under_way != step)
        return PyErr_Occurred() ? -1 : 0;
    self->under_way = NULL;
    PyObject *raised = take_raised();
    Stretch *stretch = (Stretch *)Py_NewRef((PyObject *)self->stretch);
    int failed = told(gives && !step->ends ? Stretch_yielded(stretch, NULL) : Stretch_suspend(stretch, NULL));
    if ((raised != NULL || step->ends) && !failed && has_ended(self)) {
        int is_usual = raised == NULL || PyErr_GivenExceptionMatches(raised, PyExc_StopAsyncIteration) ||
                       PyErr_GivenExceptionMatches(raised, PyExc_GeneratorExit);
        (void)told(Stretch_finish(stretch, is_usual ? Py_None : raised));
    }
    Py_DECREF(stretch);
    return raise_again(raised);
}

static PySendResult
AsyncStep_am_send(AsyncStep *self, PyObject *value, PyObject **result)
{
    *result = NULL;
    if (self->waits && begin_step(self, 0) < 0)
        return PYGEN_ERROR;
    PySendResult sent = PyIter_Send(self->awaitable, value, result);
    if (sent == PYGEN_NEXT || end_step(self, sent == PYGEN_RETURN) == 0)
        return sent;
    Py_CLEAR(*result);
    return PYGEN_ERROR;
}

/* A step's result as an iterator gives it: by StopIteration. */
static PyObject *
as_iterator(PySendResult sent, PyObject *result)
{
    if (sent != PYGEN_RETURN)
        return result;
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
    if (stop != NULL)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

static PyObject *
AsyncStep_send(AsyncStep *self, PyObject *value)
{
    PyObject *result;
    PySendResult sent = AsyncStep_am_send(self, value, &result);
    return as_iterator(sent, result);
}

static PyObject *
AsyncStep_next(AsyncStep *self)
{
    return AsyncStep_send(self, Py_None);
}

static PyObject *
AsyncStep_throw(AsyncStep *self, PyObject *args)
{
    if (self->waits && begin_step(self, 1) < 0)
        return NULL;
    PyObject *throw = PyObject_GetAttr(self->awaitable, str_throw);
    PyObject *result = throw == NULL ? NULL : PyObject_CallObject(throw, args);
    Py_XDECREF(throw);
    if (result != NULL) /* it waits again */
        return result;
    if (!PyErr_ExceptionMatches(PyExc_StopIteration)) {
        end_step(self, 0);
        return NULL;
    }
    PyObject *stop = take_raised();
    if (end_step(self, 1) < 0)
        Py_XDECREF(stop);
    else
        raise_again(stop);
    return NULL;
}

static PyObject *
AsyncStep_close(AsyncStep *self, PyObject *Py_UNUSED(none))
{
    self->waits = 0;
    PyObject *result = PyObject_CallMethodNoArgs(self->awaitable, str_close);
    if (end_step(self, 0) < 0)
        Py_CLEAR(result);
    return result;
}

static int
AsyncStep_traverse(AsyncStep *self, visitproc visit, void *arg)
{
    Py_VISIT(self->of);
    Py_VISIT(self->awaitable);
    return 0;
}

/* One that is given up in its middle: the generator stands still in it. */
static void
AsyncStep_dealloc(AsyncStep *self)
{
    PyObject_GC_UnTrack(self);
    if (self->of->under_way == self) {
        PyObject *raised = take_raised();
        self->of->under_way = NULL;
        if (told(Stretch_suspend(self->of->stretch, NULL)) < 0)
            PyErr_WriteUnraisable(NULL);
        (void)raise_again(raised);
    }
    Py_XDECREF(self->awaitable);
    Py_DECREF(self->of);
    PyObject_GC_Del(self);
}

static PyMethodDef AsyncStep_methods[] = {
    {"send", (PyCFunction)AsyncStep_send, METH_O, NULL},
    {"throw", (PyCFunction)AsyncStep_throw, METH_VARARGS, NULL},
    {"close", (PyCFunction)AsyncStep_close, METH_NOARGS, NULL},
    {NULL},
};

static PyAsyncMethods AsyncStep_as_async = {
    .am_await = PyObject_SelfIter,
    .am_send = (sendfunc)AsyncStep_am_send,
};

static PyTypeObject AsyncStepType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.AsyncStep",
    .tp_basicsize = sizeof(AsyncStep),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A step of an async generator, to be awaited.",
    .tp_dealloc = (destructor)AsyncStep_dealloc,
    .tp_traverse = (traverseproc)AsyncStep_traverse,
    .tp_as_async = &AsyncStep_as_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)AsyncStep_next,
    .tp_methods = AsyncStep_methods,
};

/* What the generator's own finaliser calls: ours tells the event loop. */
static PyObject *
leave_to_us(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(generator))
{
    Py_RETURN_NONE;
}

static PyMethodDef leave_to_us_method = {"leave_to_us", leave_to_us, METH_O, NULL};
static PyObject *left_to_us;

/* The generator's method is called where no event loop listens: the loop is told of us, who stand for it, as it would
 * have been told of the generator. */
static PyObject *
call_unheard(AsyncGenerator *self, PyObject *name, PyObject *args)
{
    PyObject *method = PyObject_GetAttr(self->generator, name);
    if (method == NULL)
        return NULL;
    PyThreadState *state = PyThreadState_Get();
    PyObject *firstiter = NULL, *finaliser = NULL;
    int is_first = !self->has_hooks;
    if (is_first) {
        self->has_hooks = 1;
        firstiter = state->async_gen_firstiter;
        finaliser = state->async_gen_finalizer;
        state->async_gen_firstiter = NULL;
        /* In a cycle the collector may come to the generator first, which would close itself on the spot. */
        state->async_gen_finalizer = finaliser == NULL ? NULL : left_to_us;
    }
    PyObject *awaitable = PyObject_CallObject(method, args);
    Py_DECREF(method);
    if (!is_first)
        return awaitable;
    state->async_gen_firstiter = firstiter;
    state->async_gen_finalizer = finaliser;
    self->finaliser = Py_XNewRef(finaliser);
    if (awaitable != NULL && firstiter != NULL) {
        Py_INCREF(firstiter);
        if (told(PyObject_CallOneArg(firstiter, (PyObject *)self)) < 0)
            Py_CLEAR(awaitable);
        Py_DECREF(firstiter);
    }
    return awaitable;
}

/* What is sent to, of something that is awaited; takes the reference. */
static PyObject *
iterator_of(PyObject *awaitable)
{
    PyAsyncMethods *methods = awaitable == NULL ? NULL : Py_TYPE(awaitable)->tp_as_async;
    if (methods == NULL || methods->am_await == NULL)
        return awaitable;
    PyObject *iterator = methods->am_await(awaitable);
    Py_DECREF(awaitable);
    return iterator;
}

static PyObject *
new_step(AsyncGenerator *self, PyObject *name, PyObject *args, char begins, char ends)
{
    if (self->generator == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the async generator has been given up");
        return NULL;
    }
    PyObject *iterator = iterator_of(self->has_hooks && args == NULL
                                         ? PyObject_CallMethodNoArgs(self->generator, name)
                                         : call_unheard(self, name, args));
    AsyncStep *step = iterator == NULL ? NULL : PyObject_GC_New(AsyncStep, &AsyncStepType);
    if (step == NULL) {
        Py_XDECREF(iterator);
        return NULL;
    }
    step->of = (AsyncGenerator *)Py_NewRef((PyObject *)self);
    step->awaitable = iterator;
    step->begins = begins;
    step->ends = ends;
    step->waits = 1;
    PyObject_GC_Track(step);
    return (PyObject *)step;
}

static PyObject *
AsyncGenerator_anext(AsyncGenerator *self)
{
    return new_step(self, str_anext, NULL, 1, 0);
}

static PyObject *
AsyncGenerator_asend(AsyncGenerator *self, PyObject *args)
{
    return new_step(self, str_asend, args, 1, 0);
}

static PyObject *
AsyncGenerator_athrow(AsyncGenerator *self, PyObject *args)
{
    return new_step(self, str_athrow, args, 0, 0);
}

static PyObject *
AsyncGenerator_aclose(AsyncGenerator *self, PyObject *Py_UNUSED(none))
{
    return new_step(self, str_aclose, NULL, 0, 1);
}

static int
AsyncGenerator_traverse(AsyncGenerator *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->site);
    Py_VISIT(self->generator);
    Py_VISIT(self->work);
    Py_VISIT(self->stretch);
    Py_VISIT(self->finaliser);
    return 0;
}

static int
AsyncGenerator_clear(AsyncGenerator *self)
{
    Py_CLEAR(self->generator);
    Py_CLEAR(self->finaliser);
    return 0;
}

/* As a generator's own: the event loop closes it, or, without one, the generator closes itself. */
static void
AsyncGenerator_finalize(AsyncGenerator *self)
{
    PyObject *raised = take_raised();
    if (self->finaliser != NULL && !has_ended(self)) {
        if (told(PyObject_CallOneArg(self->finaliser, (PyObject *)self)) < 0)
            PyErr_WriteUnraisable((PyObject *)self);
    } else if (self->stretch != NULL && self->stretch->frame != NULL && self->stretch->frame->frame.state != CLOSED) {
        Stretch *stretch = self->stretch;
        int failed = self->under_way == NULL ? told(Stretch_resume(stretch, NULL)) : 0;
        Py_CLEAR(self->generator);
        failed |= told(Stretch_suspend(stretch, NULL));
        failed |= told(Stretch_finish(stretch, Py_None));
        if (failed)
            PyErr_WriteUnraisable(NULL);
    }
    (void)raise_again(raised);
}

static void
AsyncGenerator_dealloc(AsyncGenerator *self)
{
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return; /* the event loop has it */
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->generator);
    Py_XDECREF(self->stretch);
    Py_XDECREF(self->finaliser);
    Py_XDECREF(self->work);
    Py_DECREF(self->site);
    Py_DECREF(self->core);
    PyObject_GC_Del(self);
}

static PyObject *
AsyncGenerator_repr(AsyncGenerator *self)
{
    return PyUnicode_FromFormat("<instrumented %R>", self->generator);
}

/* `ag_frame`, `ag_running`, `__name__` ... */
static PyObject *
AsyncGenerator_getattro(AsyncGenerator *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr((PyObject *)self, name);
    if (found != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError) || self->generator == NULL)
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(self->generator, name);
}

static PyObject *
AsyncGenerator_class(AsyncGenerator *self, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)(self->generator == NULL ? Py_TYPE(self) : Py_TYPE(self->generator)));
}

static PyGetSetDef AsyncGenerator_getset[] = {
    {"__class__", (getter)AsyncGenerator_class, NULL, NULL, NULL},
    {NULL},
};

static PyMethodDef AsyncGenerator_methods[] = {
    {"asend", (PyCFunction)AsyncGenerator_asend, METH_VARARGS, NULL},
    {"athrow", (PyCFunction)AsyncGenerator_athrow, METH_VARARGS, NULL},
    {"aclose", (PyCFunction)AsyncGenerator_aclose, METH_NOARGS, NULL},
    {NULL},
};

static PyAsyncMethods AsyncGenerator_as_async = {
    .am_aiter = PyObject_SelfIter,
    .am_anext = (unaryfunc)AsyncGenerator_anext,
};

static PyTypeObject AsyncGeneratorType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.AsyncGenerator",
    .tp_basicsize = sizeof(AsyncGenerator),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "An async generator whose steps are one span.",
    .tp_dealloc = (destructor)AsyncGenerator_dealloc,
    .tp_finalize = (destructor)AsyncGenerator_finalize,
    .tp_traverse = (traverseproc)AsyncGenerator_traverse,
    .tp_clear = (inquiry)AsyncGenerator_clear,
    .tp_repr = (reprfunc)AsyncGenerator_repr,
    .tp_getattro = (getattrofunc)AsyncGenerator_getattro,
    .tp_weaklistoffset = offsetof(AsyncGenerator, weak_references),
    .tp_as_async = &AsyncGenerator_as_async,
    .tp_methods = AsyncGenerator_methods,
    .tp_getset = AsyncGenerator_getset,
};

/* Call what makes an async generator. Its span begins with its first step. */
static PyObject *
Function_call_async_generator(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *generator = PyObject_Vectorcall(self->wrapped, args, nargsf, names), *work = NULL;
    if (self->pass != NULL)
        count_passed(self->pass);
    if (generator == NULL || self->muted)
        return generator;
    if (self->works != NULL && self->core->on && tell_work(self, args, nargsf, names, &work) < 0) {
        Py_DECREF(generator);
        return NULL;
    }
    AsyncGenerator *made = PyObject_GC_New(AsyncGenerator, &AsyncGeneratorType);
    if (made == NULL) {
        Py_XDECREF(work);
        if (lose(self->core) == 0)
            return generator;
        Py_DECREF(generator);
        return NULL;
    }
    memset((char *)made + sizeof(PyObject), 0, sizeof(AsyncGenerator) - sizeof(PyObject));
    made->core = (Core *)Py_NewRef((PyObject *)self->core);
    made->site = Py_NewRef(self->site);
    made->generator = generator;
    made->work = work;
    PyObject_GC_Track(made);
    return (PyObject *)made;
}

/* ------------------------------------------------------------------ the shelf */

#define UNDECIDED 0
#define KEPT 1
#define PASSED 2

typedef struct {
    row_t row;
    long thread_id;
} held_t;

/* What is known of a root: the rows that wait for its end, or what came of it. In one list for each of these, in the
 * order in which they came there. */
typedef struct root {
    uint64_t id;
    struct root *chained;
    struct root *previous, *next;
    held_t *rows;
    uint32_t count, slots;
    char state;
} root_t;

typedef struct {
    root_t *first, *last;
    uint32_t length;
} roots_t;

typedef struct {
    PyObject_HEAD
    char all_sampled, busy;
    uint64_t threshold, spans_per_request, held_limit, decided_limit;
    uint64_t held, beyond, too_long;
    root_t **table;
    uint32_t slots, known; /* a power of two */
    roots_t lists[3];
} Shelf;

static root_t *
known_root(const Shelf *self, uint64_t id)
{
    root_t *root = self->table[(scrambled(id) >> 32) & (self->slots - 1)];
    while (root != NULL && root->id != id)
        root = root->chained;
    return root;
}

static void
enter_list(Shelf *self, root_t *root)
{
    roots_t *list = &self->lists[(int)root->state];
    root->previous = list->last;
    root->next = NULL;
    if (list->last != NULL)
        list->last->next = root;
    else
        list->first = root;
    list->last = root;
    list->length++;
}

static void
leave_roots(Shelf *self, root_t *root)
{
    roots_t *list = &self->lists[(int)root->state];
    if (root->previous != NULL)
        root->previous->next = root->next;
    else
        list->first = root->next;
    if (root->next != NULL)
        root->next->previous = root->previous;
    else
        list->last = root->previous;
    list->length--;
}

static void
double_table(Shelf *self)
{
    root_t **table = PyMem_Calloc(self->slots * 2, sizeof(root_t *));
    if (table == NULL)
        return; /* longer chains, then */
    for (uint32_t i = 0; i < self->slots; i++) {
        for (root_t *root = self->table[i], *next; root != NULL; root = next) {
            root_t **slot = &table[(scrambled(root->id) >> 32) & (self->slots * 2 - 1)];
            next = root->chained;
            root->chained = *slot;
            *slot = root;
        }
    }
    PyMem_Free(self->table);
    self->table = table;
    self->slots *= 2;
}

static root_t *
new_root(Shelf *self, uint64_t id, char state)
{
    root_t *root = PyMem_Calloc(1, sizeof(root_t));
    if (root == NULL)
        return NULL;
    if (self->known >= self->slots)
        double_table(self);
    root_t **slot = &self->table[(scrambled(id) >> 32) & (self->slots - 1)];
    root->id = id;
    root->state = state;
    root->chained = *slot;
    *slot = root;
    self->known++;
    enter_list(self, root);
    return root;
}

/* Give rows up. It may run code of the host's. */
static void
free_held(held_t *rows, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        Py_XDECREF(rows[i].row.rare);
    PyMem_Free(rows);
}

static void
forget_root(Shelf *self, root_t *root)
{
    root_t **slot = &self->table[(scrambled(root->id) >> 32) & (self->slots - 1)];
    while (*slot != root)
        slot = &(*slot)->chained;
    *slot = root->chained;
    self->known--;
    leave_roots(self, root);
    held_t *rows = root->rows;
    uint32_t count = root->state == UNDECIDED ? root->count : 0;
    self->held -= count;
    PyMem_Free(root);
    free_held(rows, count);
}

/* Put a row aside until its root ends. */
static void
hold(Shelf *self, root_t *root, const row_t *row, long thread_id)
{
    if (root == NULL && (root = new_root(self, row->root_id, UNDECIDED)) == NULL) {
        self->too_long++;
        return;
    }
    if (root->count >= self->spans_per_request) {
        self->beyond++;
        return;
    }
    if (root->count == root->slots) {
        uint32_t slots = root->slots ? root->slots * 2 : 16;
        held_t *rows = PyMem_Realloc(root->rows, slots * sizeof(held_t));
        if (rows == NULL) {
            self->beyond++;
            return;
        }
        root->rows = rows;
        root->slots = slots;
    }
    held_t *held = &root->rows[root->count++];
    held->row = *row;
    Py_XINCREF(held->row.rare);
    held->thread_id = thread_id;
    self->held++;
    while (self->held > self->held_limit) {
        root_t *oldest = self->lists[UNDECIDED].first;
        self->too_long += oldest->count;
        forget_root(self, oldest);
    }
}

/* Whether somebody has to look at a row now; one that is to wait for its root is put aside. */
static int
is_found(Shelf *self, const row_t *row, long thread_id)
{
    int in_request = row->root_id & REQUEST_BIT;
    if (row->span_id == row->root_id && in_request)
        return 1;
    root_t *root = known_root(self, row->root_id);
    if (root != NULL && root->state == KEPT) {
        if (++root->count <= self->spans_per_request)
            return 1;
        self->beyond++;
        return 0;
    }
    if (!in_request)
        return self->all_sampled || scrambled(row->root_id) < self->threshold;
    if (root == NULL || root->state == UNDECIDED)
        hold(self, root, row, thread_id);
    return 0;
}

static PyObject *
Shelf_sort(Shelf *self, PyObject *args)
{
    Ring *ring;
    unsigned long long since;
    if (!PyArg_ParseTuple(args, "O!K:sort", &RingType, &ring, &since))
        return NULL;
    if (self->busy) { /* a finaliser that came in while another row was made up */
        PyErr_SetString(PyExc_RuntimeError, "the shelf is in use");
        return NULL;
    }
    self->busy = 1;
    uint64_t head = ring->head;
    uint64_t first = head > ring->capacity ? head - ring->capacity : 0;
    first = first > since ? first : since;
    first = first < head ? first : head;
    uint64_t missed = first > since ? first - since : 0;
    PyObject *found = PyList_New(0);
    for (uint64_t i = first; found != NULL && i < head; i++) {
        /* Making tuples and giving rows up may run code of the host's, which overwrites or resets. */
        if (i >= ring->head)
            break;
        if (ring->head > i + ring->capacity) {
            missed++;
            continue;
        }
        const row_t *row = &ring->rows[i & ring->mask];
        if (!is_found(self, row, ring->thread_id))
            continue;
        PyObject *tuple = row_as_tuple(row);
        if (tuple == NULL || PyList_Append(found, tuple) < 0)
            Py_CLEAR(found);
        Py_XDECREF(tuple);
    }
    self->busy = 0;
    return found == NULL ? NULL : Py_BuildValue("(NKK)", found, head, missed);
}

static PyObject *
Shelf_decide(Shelf *self, PyObject *args)
{
    unsigned long long id;
    int keep, wanted;
    if (!PyArg_ParseTuple(args, "Kpp:decide", &id, &keep, &wanted))
        return NULL;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the shelf is in use");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    self->busy = 1;
    held_t *rows = NULL;
    uint32_t count = 0;
    root_t *root = known_root(self, id);
    char state = keep ? KEPT : PASSED;
    if (root == NULL) {
        root = new_root(self, id, state);
    } else {
        if (root->state == UNDECIDED) {
            rows = root->rows;
            count = root->count;
            self->held -= count;
        }
        leave_roots(self, root);
        root->rows = NULL;
        root->slots = 0;
        root->state = state;
        enter_list(self, root);
    }
    if (root != NULL)
        root->count = count;
    if (self->lists[(int)state].length > self->decided_limit)
        forget_root(self, self->lists[(int)state].first);
    for (uint32_t i = 0; wanted && found != NULL && i < count; i++) {
        PyObject *row = row_as_tuple(&rows[i].row);
        PyObject *pair = row == NULL ? NULL : Py_BuildValue("(Nl)", row, rows[i].thread_id);
        if (pair == NULL || PyList_Append(found, pair) < 0)
            Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    free_held(rows, count);
    self->busy = 0;
    return found;
}

static PyObject *
Shelf_counts(Shelf *self, void *Py_UNUSED(closure))
{
    PyObject *counts = PyDict_New();
    const char *names[] = {"spans beyond spans_per_request", "spans of requests that stayed open too long"};
    uint64_t values[] = {self->beyond, self->too_long};
    for (int i = 0; counts != NULL && i < 2; i++) {
        PyObject *value = values[i] == 0 ? NULL : PyLong_FromUnsignedLongLong(values[i]);
        if (values[i] != 0 && (value == NULL || PyDict_SetItemString(counts, names[i], value) < 0))
            Py_CLEAR(counts);
        Py_XDECREF(value);
    }
    return counts;
}

static void
shelve_by(Shelf *self, double sample, unsigned long long spans_per_request)
{
    self->all_sampled = sample >= 1.0;
    self->threshold = sample <= 0.0 || sample >= 1.0 ? 0 : (uint64_t)(sample * 18446744073709551616.0);
    self->spans_per_request = spans_per_request;
}

static PyObject *
Shelf_change(Shelf *self, PyObject *args)
{
    double sample;
    unsigned long long spans_per_request;
    if (!PyArg_ParseTuple(args, "dK:change", &sample, &spans_per_request))
        return NULL;
    shelve_by(self, sample, spans_per_request);
    Py_RETURN_NONE;
}

static PyObject *
Shelf_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"sample", "spans_per_request", "held_rows", "decided_roots", NULL};
    double sample;
    unsigned long long spans_per_request, held_rows, decided_roots;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "dKKK:Shelf", words, &sample, &spans_per_request, &held_rows,
                                     &decided_roots))
        return NULL;
    Shelf *self = (Shelf *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->slots = 1024;
    self->table = PyMem_Calloc(self->slots, sizeof(root_t *));
    if (self->table == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    shelve_by(self, sample, spans_per_request);
    self->held_limit = held_rows;
    self->decided_limit = decided_roots;
    return (PyObject *)self;
}

static void
Shelf_dealloc(Shelf *self)
{
    for (int state = 0; state < 3 && self->table != NULL; state++)
        while (self->lists[state].first != NULL)
            forget_root(self, self->lists[state].first);
    PyMem_Free(self->table);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Shelf_methods[] = {
    {"change", (PyCFunction)Shelf_change, METH_VARARGS, "Sort by another sample and limit from now on."},
    {"sort", (PyCFunction)Shelf_sort, METH_VARARGS, "Go through a ring from a row number on: rows, head, missed."},
    {"decide", (PyCFunction)Shelf_decide, METH_VARARGS, "A root has ended: its rows, and what comes of the rest."},
    {NULL},
};

static PyMemberDef Shelf_members[] = {
    {"held", T_ULONGLONG, offsetof(Shelf, held), READONLY, "rows that are put aside now"},
    {NULL},
};

static PyGetSetDef Shelf_getset[] = {
    {"counts", (getter)Shelf_counts, NULL, "What was not kept, by reason.", NULL},
    {NULL},
};

static PyTypeObject ShelfType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Shelf",
    .tp_basicsize = sizeof(Shelf),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Rows of requests that have not ended yet, put aside by their root.",
    .tp_new = Shelf_new,
    .tp_dealloc = (destructor)Shelf_dealloc,
    .tp_methods = Shelf_methods,
    .tp_members = Shelf_members,
    .tp_getset = Shelf_getset,
};

/* ------------------------------------------------------------------ the recorder */

static PyObject *
Core_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Core *self = (Core *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->uid = ++last_uid;
    self->next_id = 2;
    self->node_limit = NODE_LIMIT;
    self->rings = PyList_New(0);
    self->counts = PyDict_New();
    self->user_sites = PyDict_New();
    self->passes = PyDict_New();
    self->variable = PyContextVar_New("instrument_current", NULL);
    self->ended = empty_ring();
    if (self->rings == NULL || self->counts == NULL || self->user_sites == NULL || self->passes == NULL ||
        self->variable == NULL || self->ended == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int
Core_init(Core *self, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"ring_bytes", "overflow", "remote_key", "link_of", "task_readers", "thread_name", NULL};
    unsigned long long ring_bytes;
    PyObject *overflow, *remote_key, *link_of, *task_readers, *thread_name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KOOOOO:Core", words, &ring_bytes, &overflow, &remote_key, &link_of,
                                     &task_readers, &thread_name))
        return -1;
    if (self->overflow != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a recorder is initialised once");
        return -1;
    }
    self->row_budget = ring_bytes / sizeof(row_t);
    Py_XSETREF(self->remote_key, Py_NewRef(remote_key));
    Py_XSETREF(self->link_of, Py_NewRef(link_of));
    Py_XSETREF(self->task_readers, Py_NewRef(task_readers));
    Py_XSETREF(self->thread_name, Py_NewRef(thread_name));
    self->overflow = new_node(self, &self->root, overflow);
    return self->overflow == NULL ? -1 : 0;
}

static int
Core_traverse(Core *self, visitproc visit, void *arg)
{
    Py_VISIT(self->remote_parent);
    Py_VISIT(self->begin_device);
    Py_VISIT(self->remote_key);
    Py_VISIT(self->link_of);
    Py_VISIT(self->answers);
    Py_VISIT(self->task_readers);
    Py_VISIT(self->running_loop);
    Py_VISIT(self->task_of_loop);
    Py_VISIT(self->tells_of_tasks);
    Py_VISIT(self->thread_name);
    Py_VISIT(self->counts);
    Py_VISIT(self->user_sites);
    Py_VISIT(self->scope_type);
    Py_VISIT(self->passes);
    return 0;
}

static int
Core_clear(Core *self)
{
    Py_CLEAR(self->remote_parent);
    Py_CLEAR(self->begin_device);
    Py_CLEAR(self->tells_of_tasks);
    return 0;
}

/* Give up the rows of rings that no thread writes to any more, for the threads that hold them live on. */
static void
free_rings(PyObject *rings)
{
    for (Py_ssize_t i = 0; rings != NULL && i < PyList_GET_SIZE(rings); i++)
        free_rows_of((Ring *)PyList_GET_ITEM(rings, i));
    Py_XDECREF(rings);
}

static void
Core_dealloc(Core *self)
{
    PyObject_GC_UnTrack(self);
    while (self->currents != NULL)
        leave_list(self->currents);
    free_rings(self->rings);
    Py_XDECREF(self->ended);
    Py_XDECREF(self->variable);
    Py_XDECREF(self->remote_parent);
    Py_XDECREF(self->begin_device);
    Py_XDECREF(self->remote_key);
    Py_XDECREF(self->link_of);
    Py_XDECREF(self->answers);
    Py_XDECREF(self->task_readers);
    Py_XDECREF(self->running_loop);
    Py_XDECREF(self->task_of_loop);
    Py_XDECREF(self->tells_of_tasks);
    Py_XDECREF(self->thread_name);
    Py_XDECREF(self->counts);
    Py_XDECREF(self->user_sites);
    Py_XDECREF(self->scope_type);
    Py_XDECREF(self->passes);
    Py_XDECREF(self->no_scope);
    for (uint32_t i = 0; i < self->node_count; i++) {
        PyMem_Free(self->nodes[i]->table);
        Py_DECREF(self->nodes[i]->site);
        free_lines(self->nodes[i]);
    }
    while (self->spare != NULL) {
        node_t *spare = self->spare;
        self->spare = spare->parent;
        free_lines(spare);
    }
    PyMem_Free(self->nodes);
    PyMem_Free(self->root.table);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
Core_open(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 1 || nargs > 3) {
        PyErr_SetString(PyExc_TypeError, "open(site, attributes=None, state=1)");
        return NULL;
    }
    long state = nargs > 2 ? PyLong_AsLong(args[2]) : OPEN;
    if (state == -1 && PyErr_Occurred())
        return NULL;
    PyObject *attributes = nargs > 1 && args[1] != Py_None ? args[1] : NULL;
    Frame *frame = args[0] == Py_None ? NULL : open_frame(self, args[0], attributes, (char)state);
    if (frame != NULL)
        return (PyObject *)frame;
    if (lose(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Let a dict that its caller gives away be the attributes of an open span, with what that has of other names, and with
 * the span of another tracer that the recorder has noted itself. -1 with an exception of the host's. */
static int
take_attributes(Core *core, Frame *self, PyObject *given)
{
    if (self->frame.state == CLOSED)
        return 0;
    PyObject *before = self->frame.attributes, *name, *value;
    if (before == given)
        return 0;
    self->frame.attributes = Py_NewRef(given);
    int failed = 0;
    for (Py_ssize_t at = 0; !failed && before != NULL && PyDict_Check(before) &&
                            PyDict_Next(before, &at, &name, &value);) {
        int known = name == core->remote_key ? 0 : PyDict_Contains(given, name);
        failed = known < 0 || (known == 0 && put_attribute(core, given, name, value) < 0);
    }
    Py_XDECREF(before);
    if (failed)
        count(core, NO_DETAILS);
    return failed ? forgive() : 0;
}

static PyObject *
Core_close(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs > 0 && args[0] == Py_None) /* its begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs < 1 || nargs > 4 || Py_TYPE(args[0]) != &FrameType) {
        PyErr_SetString(PyExc_TypeError, "close(frame, error=None, anywhere=False, attributes=None)");
        return NULL;
    }
    if (nargs > 3 && PyDict_Check(args[3]) && take_attributes(self, (Frame *)args[0], args[3]) < 0)
        return NULL;
    if (close_frame(self, (Frame *)args[0], nargs > 1 ? args[1] : NULL, nargs > 2 && args[2] == Py_True) < 0)
        return NULL;
    Py_RETURN_NONE;
}

#define LENGTH_DIGITS 18 /* what fits into 63 bits, however large */

/* Note the length that a request's header tells, in bytes or text: digits alone, or it tells none. */
static int
put_length(PyObject *facts, PyObject *header)
{
    const char *digits = NULL;
    Py_ssize_t count = 0;
    if (PyBytes_Check(header)) {
        digits = PyBytes_AS_STRING(header);
        count = PyBytes_GET_SIZE(header);
    } else if (PyUnicode_Check(header) && PyUnicode_IS_ASCII(header)) {
        digits = (const char *)PyUnicode_1BYTE_DATA(header);
        count = PyUnicode_GET_LENGTH(header);
    }
    long long length = 0;
    for (Py_ssize_t i = 0; i < count && count <= LENGTH_DIGITS; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return 0;
        length = 10 * length + (digits[i] - '0');
    }
    if (count == 0 || count > LENGTH_DIGITS)
        return 0;
    PyObject *number = PyLong_FromLongLong(length);
    int failed = number == NULL || PyDict_SetItem(facts, str_request_size, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static PyObject *
Core_open_request(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "open_request(site, attributes, caller, length)");
        return NULL;
    }
    if ((args[2] != Py_None && PyDict_SetItem(args[1], self->remote_key, args[2]) < 0) ||
        (args[3] != Py_None && put_length(args[1], args[3]) < 0))
        return NULL;
    return Core_open(self, args, 2);
}

static PyObject *
Core_close_request(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs > 0 && args[0] == Py_None) /* its begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs != 5 || Py_TYPE(args[0]) != &FrameType || !PyDict_Check(args[1]) || !PyLong_Check(args[2]) ||
        !PyLong_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "close_request(frame, attributes, status, answer_bytes, error)");
        return NULL;
    }
    PyObject *given = args[1], *status = args[2], *size = args[3];
    int overflow;
    long number = PyLong_AsLongAndOverflow(status, &overflow);
    if ((number != 0 && PyDict_SetItem(given, str_status, status) < 0) ||
        (PyObject_IsTrue(size) == 1 && PyDict_SetItem(given, str_answer_size, size) < 0)) {
        count(self, NO_DETAILS);
        PyErr_Clear();
    }
    PyObject *error = args[4] == Py_None && number >= FIRST_OF_SERVER ? PyObject_Str(status) : Py_NewRef(args[4]);
    PyErr_Clear(); /* for want of memory: then it is none */
    int failed = take_attributes(self, (Frame *)args[0], given) < 0 || close_frame(self, (Frame *)args[0], error, 1) < 0;
    Py_XDECREF(error);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
Core_begun_ns(Core *Py_UNUSED(self), PyObject *given)
{
    if (Py_TYPE(given) != &FrameType) {
        PyErr_SetString(PyExc_TypeError, "begun_ns(frame)");
        return NULL;
    }
    const frame_t *frame = &((Frame *)given)->frame;
    return PyLong_FromLongLong(frame->start_ns);
}

static void
rename_to(Core *core, frame_t *frame, PyObject *site)
{
    PyObject *kind = frame->state == CLOSED ? NULL : PyObject_GetAttr(frame->node->site, str_kind);
    if (frame->state == CLOSED)
        count(core, RENAMED_LATE);
    else if (kind == NULL || !PyUnicode_Check(kind) || !kind_is(site, kind))
        count(core, RENAMED_KIND);
    else if (frame->node->site != site)
        rename_frame(core, frame, site);
    PyErr_Clear();
    Py_XDECREF(kind);
}

static PyObject *
Core_rename(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs == 2 && args[0] == Py_None) /* its begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs != 2 || Py_TYPE(args[0]) != &FrameType) {
        PyErr_SetString(PyExc_TypeError, "rename(frame, site)");
        return NULL;
    }
    rename_to(self, &((Frame *)args[0])->frame, args[1]);
    Py_RETURN_NONE;
}

static PyObject *
Core_rename_innermost(Core *self, PyObject *site)
{
    frame_t *frame = open_span(self, INNERMOST, NULL);
    if (frame != NULL)
        rename_to(self, frame, site);
    if (forgive() < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The site of an open span, by its frame, or of the innermost one of this context. */
static PyObject *
Core_site_of_open(Core *self, PyObject *frame)
{
    if (frame != Py_None && Py_TYPE(frame) != &FrameType) {
        PyErr_SetString(PyExc_TypeError, "site_of_open(frame)");
        return NULL;
    }
    frame_t *found = open_span(self, frame == Py_None ? INNERMOST : GIVEN, (Frame *)frame);
    if (found == NULL && forgive() < 0)
        return NULL;
    return Py_NewRef(found == NULL ? Py_None : found->node->site);
}

static PyObject *
Core_annotate(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs == 2 && args[0] == Py_None) /* its begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs != 2 || Py_TYPE(args[0]) != &FrameType || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "annotate(frame, attributes)");
        return NULL;
    }
    if (set_attributes(self, GIVEN, (Frame *)args[0], args[1], NULL, NULL) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
Core_annotate_innermost(Core *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return annotate_by(self, INNERMOST, NULL, args, nargs, names);
}

static PyObject *
Core_annotate_request(Core *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return annotate_by(self, REQUEST, NULL, args, nargs, names);
}

PyDoc_STRVAR(annotate_doc,
             "annotate_innermost($self, attributes=None, /, **more)\n--\n\n"
             "Set attributes of the innermost open span; see instrument.recorder.scopes.annotate.");

PyDoc_STRVAR(annotate_request_doc,
             "annotate_request($self, attributes=None, /, **more)\n--\n\n"
             "Set attributes of the open request; see instrument.recorder.scopes.annotate_request.");

static PyObject *
Core_record(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 3 || nargs > 4) {
        PyErr_SetString(PyExc_TypeError, "record(site, start_ns, attributes, pair=None)");
        return NULL;
    }
    int64_t end_ns = read_clock(self);
    int64_t start_ns = PyLong_AsLongLong(args[1]);
    if (start_ns == -1 && PyErr_Occurred())
        return NULL;
    Ring *ring;
    Current *current = current_of(self, &ring);
    if (current == NULL) {
        if (lose(self) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    frame_t frame;
    frame.attributes = with_link(current, args[2] == Py_None ? NULL : args[2]);
    if (frame.attributes != NULL && (current = current_of(self, &ring)) == NULL) {
        Py_DECREF(frame.attributes);
        if (lose(self) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    identify(self, ring, current, &frame, args[0], NULL);
    frame.pair = nargs > 3 && args[3] != Py_None ? Py_NewRef(args[3]) : NULL;
    frame.start_ns = frame.counted_from_ns = start_ns;
    Py_INCREF(ring);
    count_against_above(current, &frame, ring, end_ns);
    store(self, ring, &frame, end_ns, -1, NULL);
    int failed = frame.pair != NULL ? end_on_device(ring, &frame, end_ns) : 0;
    Py_DECREF(ring);
    Py_XDECREF(frame.request);
    Py_XDECREF(frame.attributes);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
no_scope(Core *self)
{
    if (self->no_scope == NULL || lose(self) < 0)
        return NULL;
    return Py_NewRef((PyObject *)self->no_scope);
}

static PyObject *
Core_new_span(Core *self, PyObject *site)
{
    Scope *scope = (Scope *)ScopeType.tp_alloc(&ScopeType, 0);
    if (scope == NULL)
        return no_scope(self);
    scope->core = (Core *)Py_NewRef(self);
    scope->site = Py_NewRef(site);
    return (PyObject *)scope;
}

/* scope(name): a scope whose name is known costs a dict lookup; everything else goes the long way in Python. */
static PyObject *
Core_scope(Core *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (nargs == 1 && names == NULL && PyUnicode_CheckExact(args[0]) && self->scope_type != NULL) {
        PyObject *site = PyDict_GetItemWithError(self->user_sites, args[0]); /* borrowed */
        if (site != NULL) {
            PyTypeObject *type = (PyTypeObject *)self->scope_type;
            if (Py_TYPE(site) == type) { /* of a muted one: handed out again as long as nobody has it */
                if (Py_REFCNT(site) == 1 && ((Scope *)site)->frame == NULL)
                    return Py_NewRef(site);
                site = ((Scope *)site)->site;
            }
            Py_INCREF(site);
            Scope *scope = (Scope *)type->tp_alloc(type, 0);
            if (scope == NULL) {
                Py_DECREF(site);
                return no_scope(self);
            }
            scope->core = (Core *)Py_NewRef(self);
            scope->site = site;
            return (PyObject *)scope;
        }
        if (PyErr_Occurred())
            return NULL;
    }
    PyObject *method = PyObject_GetAttr((PyObject *)self, str_make_scope);
    PyObject *scope = method == NULL ? NULL : PyObject_Vectorcall(method, args, (size_t)nargs, names);
    Py_XDECREF(method);
    if (scope == NULL && PyErr_ExceptionMatches(PyExc_MemoryError))
        return no_scope(self);
    return scope;
}

PyDoc_STRVAR(scope_doc,
             "scope($self, name, *, kind=None, device=False, attributes=None, phase=None, stream=None)\n--\n\n"
             "A span around a block; see instrument.recorder.scopes.scope.");

static PyObject *
Core_rings(Core *self, PyObject *Py_UNUSED(none))
{
    return PyList_GetSlice(self->rings, 0, PyList_GET_SIZE(self->rings));
}

static PyObject *
Core_ended_totals(Core *self, PyObject *Py_UNUSED(none))
{
    Ring *ended = (Ring *)Py_NewRef((PyObject *)self->ended); /* a reset may come in between */
    PyObject *totals = book_as_dict(&ended->totals);
    Py_DECREF(ended);
    return totals;
}

/* Totals are read one after the other, and lie anywhere: those of the next nodes are fetched meanwhile. */
#define AHEAD 12
#define AHEAD_ON_EACH 4 /* where those of all threads are read by turns */

/* How often the nodes of each group were called, on all threads together. */
static PyObject *
Core_calls_by(Core *self, PyObject *args)
{
    Py_buffer groups;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*n:calls_by", &groups, &count))
        return NULL;
    const int32_t *group_of = groups.buf;
    uint32_t nodes = (uint32_t)((size_t)groups.len / sizeof *group_of);
    PyObject *all = NULL;
    uint64_t *calls = count < 0 ? NULL : PyMem_RawCalloc((size_t)count + 1, sizeof *calls);
    if (calls == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0, rings = PyList_GET_SIZE(self->rings); i <= rings; i++) {
        const Ring *ring = i < rings ? (Ring *)PyList_GET_ITEM(self->rings, i) : self->ended;
        for (uint32_t n = 0; n < nodes && n < ring->totals.slots * PAGE; n++) {
            const totals_t *totals = known_totals(&ring->totals, n);
            __builtin_prefetch(known_totals(&ring->totals, n + AHEAD));
            if (totals != NULL && group_of[n] >= 0 && group_of[n] < count)
                calls[group_of[n]] += totals->calls;
        }
    }
    all = PyList_New(count);
    for (Py_ssize_t g = 0; all != NULL && g < count; g++) {
        PyObject *number = PyLong_FromUnsignedLongLong(calls[g]);
        if (number == NULL)
            Py_CLEAR(all);
        else
            PyList_SET_ITEM(all, g, number);
    }
end:
    PyMem_RawFree(calls);
    PyBuffer_Release(&groups);
    return all;
}

/* Numbers of a line, in the order of `lines.Sum`; its first is its node. */
#define LINE_WIDTH 11

typedef struct {
    int64_t numbers[LINE_WIDTH];
    uint32_t first_node; /* that of the nodes of its place which was called first */
} line_t;

static int
compare_lines(const void *left, const void *right)
{
    const line_t *a = *(const line_t *const *)left, *b = *(const line_t *const *)right;
    int64_t a_ns = a->numbers[LINE_WIDTH - 1], b_ns = b->numbers[LINE_WIDTH - 1];
    return a_ns != b_ns ? (a_ns < b_ns ? -1 : 1) : (a->first_node < b->first_node ? -1 : a->first_node > b->first_node);
}

static int64_t
at_most(uint64_t number)
{
    return number > INT64_MAX ? INT64_MAX : (int64_t)number;
}

/* The totals of the nodes that places are given for, on these rings together, in the order of first calls. */
static PyObject *
lines_of(Ring *const *rings, Py_ssize_t count, PyObject *places)
{
    Py_buffer view;
    PyObject *found = NULL;
    if (PyObject_GetBuffer(places, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const int32_t *place_of = view.buf;
    uint32_t nodes = (uint32_t)((size_t)view.len / sizeof *place_of), used = 0;
    line_t *lines = PyMem_RawCalloc(nodes + 1, sizeof *lines), **order = PyMem_RawMalloc((nodes + 1) * sizeof *order);
    if (lines == NULL || order == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (uint32_t n = 0; n < nodes; n++) {
        totals_t sum; /* all but the histogram */
        memset(&sum, 0, offsetof(totals_t, chunks));
        for (Py_ssize_t i = 0; i < count; i++) {
            const totals_t *t = known_totals(&rings[i]->totals, n);
            const totals_t *ahead = known_totals(&rings[i]->totals, n + AHEAD_ON_EACH);
            if (ahead != NULL) {
                __builtin_prefetch(ahead);
                __builtin_prefetch(&ahead->errors);
            }
            if (t != NULL && t->calls != 0)
                add_totals(NULL, &sum, t);
        }
        if (sum.calls == 0)
            continue;
        if (place_of[n] < 0 || (uint32_t)place_of[n] > n) {
            PyErr_SetString(PyExc_ValueError, "the place of a node is not before it");
            goto end;
        }
        int64_t *to = lines[place_of[n]].numbers;
        const int64_t from[LINE_WIDTH] = {
            place_of[n], at_most(sum.calls), at_most(sum.errors), sum.total_ns, sum.self_ns, sum.device_ns,
            elapsed_of(&sum), sum.min_ns, sum.max_ns, at_most(sum.moved_bytes), sum.first_ns,
        };
        if (to[1] == 0) {
            memcpy(to, from, sizeof from);
            lines[place_of[n]].first_node = n;
            order[used++] = &lines[place_of[n]];
            continue;
        }
        for (int i = 1; i < LINE_WIDTH - 1; i++)
            if (i == 7 || i == 8)
                to[i] = (i == 7) == (from[i] < to[i]) ? from[i] : to[i];
            else
                add_time(NULL, &to[i], from[i]);
        if (from[LINE_WIDTH - 1] < to[LINE_WIDTH - 1]) {
            to[LINE_WIDTH - 1] = from[LINE_WIDTH - 1];
            lines[place_of[n]].first_node = n;
        }
    }
    int in_order = 1; /* as they are where one thread has made the nodes */
    for (uint32_t i = 1; i < used && in_order; i++)
        in_order = compare_lines(&order[i - 1], &order[i]) < 0;
    if (!in_order)
        qsort(order, used, sizeof *order, compare_lines);
    found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(used * sizeof lines->numbers));
    for (uint32_t i = 0; found != NULL && i < used; i++)
        memcpy(PyBytes_AS_STRING(found) + i * sizeof lines->numbers, order[i]->numbers, sizeof lines->numbers);
end:
    PyMem_RawFree(lines);
    PyMem_RawFree(order);
    PyBuffer_Release(&view);
    return found;
}

/* Every ring, and that of the threads that were given up; NULL without memory. */
static Ring **
all_rings(Core *self, Py_ssize_t *count)
{
    Py_ssize_t rings = PyList_GET_SIZE(self->rings);
    Ring **all = PyMem_RawMalloc(((size_t)rings + 1) * sizeof *all);
    for (Py_ssize_t i = 0; all != NULL && i < rings; i++)
        all[i] = (Ring *)PyList_GET_ITEM(self->rings, i);
    if (all != NULL)
        all[rings] = self->ended;
    else
        PyErr_NoMemory();
    *count = rings + 1;
    return all;
}

/* [(thread id, name, lines)] of each ring, and at last of the threads that were given up, or of all as one. No object is
 * made that the collector knows before all are read: it may run then, and a ring be given up. */
static PyObject *
Core_lines_by_place(Core *self, PyObject *args)
{
    PyObject *places, *found = NULL;
    int merged;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "Op:lines_by_place", &places, &merged))
        return NULL;
    Ring **rings = all_rings(self, &count);
    Py_ssize_t books = merged ? 1 : count;
    PyObject **lines = rings == NULL ? NULL : PyMem_RawCalloc((size_t)books, sizeof *lines);
    if (rings == NULL || lines == NULL) {
        PyMem_RawFree(rings);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++)
        Py_INCREF(rings[i]);
    for (Py_ssize_t i = 0; i < books; i++)
        if ((lines[i] = lines_of(rings + i, merged ? count : 1, places)) == NULL)
            goto end;
    found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < books; i++) {
        int ended = rings[i] == rings[count - 1];
        PyObject *name = merged  ? PyUnicode_FromString("(all threads)")
                         : ended ? PyUnicode_FromString("(ended threads)")
                                 : Py_NewRef(rings[i]->name);
        PyObject *book = name == NULL ? NULL
                                      : Py_BuildValue("(lNO)", merged || ended ? 0L : rings[i]->thread_id, name, lines[i]);
        if (book == NULL || PyList_Append(found, book) < 0)
            Py_CLEAR(found);
        Py_XDECREF(book);
    }
end:
    for (Py_ssize_t i = 0; i < books; i++)
        Py_XDECREF(lines[i]);
    for (Py_ssize_t i = 0; i < count; i++)
        Py_DECREF(rings[i]);
    PyMem_RawFree(lines);
    PyMem_RawFree(rings);
    return found;
}

/* Histograms added up. What lies in the lower parts is summed on 32 bits, for as many chunks as can be. */
typedef struct {
    uint64_t used; /* chunks with calls, bit by bit; the counts of others are not set */
    uint32_t left; /* chunks that may be added before the sums must be moved */
    uint32_t sums[CHUNKS * 64];
    uint64_t times[CHUNKS * 64];
} histogram_t;

static void
move_sums(histogram_t *histogram)
{
    for (uint64_t left = histogram->used; left != 0; left &= left - 1)
        for (uint32_t bucket = FIRST_BUCKET(left), end = bucket + 64; bucket < end; bucket++) {
            histogram->times[bucket] += histogram->sums[bucket];
            histogram->sums[bucket] = 0;
        }
    histogram->left = UINT32_MAX / UINT16_MAX;
}

static inline void
add_low(uint32_t *restrict to, const uint16_t *restrict low)
{
    for (int at = 0; at < 64; at++)
        to[at] += low[at];
}

static inline void
use_chunk(histogram_t *histogram, uint32_t c)
{
    if (histogram->used >> c & 1)
        return;
    memset(histogram->sums + c * 64, 0, 64 * sizeof *histogram->sums);
    memset(histogram->times + c * 64, 0, 64 * sizeof *histogram->times);
    histogram->used |= (uint64_t)1 << c;
}

_Static_assert(CHUNKS % 12 == 0, "chunks are looked for by the dozen");

/* Nothing is changed that the thread whose calls they are may be about to change: its caches keep it. */
static void
add_histogram(histogram_t *histogram, const totals_t *totals)
{
    if (histogram->left <= CHUNKS)
        move_sums(histogram);
    for (uint32_t several = 0; several < CHUNKS; several += 12) {
        uintptr_t any = 0;
        for (uint32_t c = several; c < several + 12; c++)
            any |= (uintptr_t)totals->chunks[c];
        for (uint32_t c = several; any != 0 && c < several + 12; c++) {
            const chunk_t *chunk = totals->chunks[c];
            if (chunk == NULL)
                continue;
            use_chunk(histogram, c);
            histogram->left--;
            add_low(histogram->sums + c * 64, chunk->low);
            for (uint32_t at = 0; chunk->high != NULL && at < 64; at++)
                histogram->times[c * 64 + at] += chunk->high[at] << LOW_BITS;
        }
    }
    histogram->left -= totals->waiting_count > 0;
    for (int i = 0; i < totals->waiting_count; i++) {
        use_chunk(histogram, totals->waiting[i] >> 6);
        histogram->sums[totals->waiting[i]]++;
    }
}

/* The histogram of nodes on a thread (0: those that were given up), or on all, packed. */
static PyObject *
Core_histogram_of(Core *self, PyObject *args)
{
    PyObject *nodes, *thread, *found = NULL;
    Py_ssize_t count, buckets = 0;
    if (!PyArg_ParseTuple(args, "OO:histogram_of", &nodes, &thread))
        return NULL;
    long thread_id = thread == Py_None ? -1 : PyLong_AsLong(thread);
    Py_buffer view;
    if ((thread_id == -1 && PyErr_Occurred()) || PyObject_GetBuffer(nodes, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Ring **rings = all_rings(self, &count);
    histogram_t *sum = rings == NULL ? NULL : PyMem_RawMalloc(sizeof *sum);
    if (sum == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    sum->used = sum->left = 0;
    const uint32_t *node = view.buf;
    size_t length = (size_t)view.len / sizeof *node;
    /* Ring by ring: what one thread has recorded lies together. */
    for (Py_ssize_t r = 0; r < count; r++) {
        if (thread_id != -1 && thread_id != (r == count - 1 ? 0 : rings[r]->thread_id))
            continue;
        for (size_t i = 0; i < length; i++) {
            const totals_t *t = known_totals(&rings[r]->totals, node[i]);
            const totals_t *ahead = i + AHEAD < length ? known_totals(&rings[r]->totals, node[i + AHEAD]) : NULL;
            for (size_t at = 0; ahead != NULL && at < sizeof *ahead; at += LINE)
                __builtin_prefetch((const char *)ahead + at);
            if (t != NULL && t->calls != 0)
                add_histogram(sum, t);
        }
    }
    move_sums(sum);
    for (uint64_t left = sum->used; left != 0; left &= left - 1)
        for (uint32_t bucket = FIRST_BUCKET(left), end = bucket + 64; bucket < end; bucket++)
            buckets += sum->times[bucket] != 0;
    found = PyBytes_FromStringAndSize(NULL, buckets * (Py_ssize_t)PACKED_BYTES);
    char *to = found == NULL ? NULL : PyBytes_AS_STRING(found);
    for (uint64_t left = sum->used; to != NULL && left != 0; left &= left - 1)
        for (uint32_t bucket = FIRST_BUCKET(left), end = bucket + 64; bucket < end; bucket++)
            if (sum->times[bucket] != 0)
                to = pack_bucket(to, bucket, sum->times[bucket]);
end:
    PyMem_RawFree(sum);
    PyMem_RawFree(rings);
    PyBuffer_Release(&view);
    return found;
}

static PyObject *
Core_ended_firsts(Core *self, PyObject *Py_UNUSED(none))
{
    Ring *ended = (Ring *)Py_NewRef((PyObject *)self->ended); /* a reset may come in between */
    PyObject *firsts = firsts_as_dict(&ended->totals);
    Py_DECREF(ended);
    return firsts;
}

/* Where an object stands in a table, or would. */
static uint32_t *
place_in(uint32_t *table, uint32_t slots, PyObject *sites, PyObject *site)
{
    uint32_t at = slot_of(site, slots);
    while (table[at] != 0 && PyList_GET_ITEM(sites, table[at] - 1) != site)
        at = (at + 1) & (slots - 1);
    return &table[at];
}

/* Of the nodes from a number on, where their sites are in a list, to which new ones are added, and the numbers of their
 * parents, -1 for none. */
static PyObject *
Core_nodes_from(Core *self, PyObject *args)
{
    unsigned int first;
    PyObject *sites, *of_sites = NULL, *of_parents = NULL, *both = NULL;
    if (!PyArg_ParseTuple(args, "IO!:nodes_from", &first, &PyList_Type, &sites))
        return NULL;
    size_t count = self->node_count > first ? self->node_count - first : 0;
    uint32_t slots = 8;
    while (slots < 2 * (count + (size_t)PyList_GET_SIZE(sites)))
        slots *= 2;
    /* Of what is in the list, by its address: 1 more than where, 0 for none. */
    uint32_t *table = count == 0 ? NULL : PyMem_RawCalloc(slots, sizeof *table);
    if ((count != 0 && table == NULL) ||
        (of_sites = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(uint32_t)))) == NULL ||
        (of_parents = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(uint32_t)))) == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t known = 0; count != 0 && known < PyList_GET_SIZE(sites); known++)
        *place_in(table, slots, sites, PyList_GET_ITEM(sites, known)) = (uint32_t)known + 1;
    for (size_t i = 0; i < count; i++) {
        const node_t *node = self->nodes[first + i];
        uint32_t *place = place_in(table, slots, sites, node->site);
        if (*place == 0) {
            if (PyList_Append(sites, node->site) < 0)
                goto end;
            *place = (uint32_t)PyList_GET_SIZE(sites);
        }
        ((uint32_t *)PyBytes_AS_STRING(of_sites))[i] = *place - 1;
        ((int32_t *)PyBytes_AS_STRING(of_parents))[i] = node->parent == &self->root ? -1 : (int32_t)node->parent->index;
    }
    both = PyTuple_Pack(2, of_sites, of_parents);
end:
    Py_XDECREF(of_sites);
    Py_XDECREF(of_parents);
    PyMem_RawFree(table);
    return both;
}

static int
add_open(PyObject *found, PyObject *seen, frame_t *frame, int64_t now_ns)
{
    PyObject *key = PyLong_FromUnsignedLongLong(frame->span_id);
    if (key == NULL)
        return -1;
    int known = PySet_Contains(seen, key);
    if (known == 0 && PySet_Add(seen, key) == 0 && frame->state != CLOSED && frame->start_ns != 0) {
        row_t row = {.span_id = frame->span_id, .parent_id = frame->parent_id, .root_id = frame->root_id,
                     .start_ns = frame->start_ns, .end_ns = now_ns, .children_ns = frame->children_ns,
                     .node = frame->node->index, .task = (uint32_t)(frame->task >> 4)};
        if (frame->attributes != NULL) /* a copy, for whoever opened the span may still add to them */
            row.rare = PyDict_Check(frame->attributes) ? PyDict_Copy(frame->attributes)
                                                       : rare_of(-1, NULL, frame->attributes);
        PyObject *tuple = PyErr_Occurred() ? NULL : row_as_tuple(&row);
        Py_XDECREF(row.rare);
        PyObject *pair = tuple == NULL ? NULL : Py_BuildValue("(lN)", frame->ring->thread_id, tuple);
        if (pair == NULL || PyList_Append(found, pair) < 0)
            known = -1;
        Py_XDECREF(pair);
    }
    Py_DECREF(key);
    return known < 0 ? -1 : 0;
}

/* (thread id, row) of each span that is open now, ending now. */
static PyObject *
Core_open_rows(Core *self, PyObject *Py_UNUSED(none))
{
    int64_t now_ns = read_clock(self);
    PyObject *found = PyList_New(0), *seen = PySet_New(NULL);
    int failed = found == NULL || seen == NULL;
    /* A collection in between could end a context and take it off the list. */
    int was_enabled = PyGC_Disable();
    for (Current *current = self->currents; !failed && current != NULL; current = current->next)
        for (frame_t *frame = current->top; !failed && frame != NULL; frame = frame->above)
            failed = add_open(found, seen, frame, now_ns) < 0;
    for (Stretch *stretch = self->stretches; !failed && stretch != NULL; stretch = stretch->next)
        for (frame_t *frame = stretch->inner; !failed && frame != NULL; frame = frame->above)
            failed = add_open(found, seen, frame, now_ns) < 0;
    if (was_enabled)
        PyGC_Enable();
    Py_XDECREF(seen);
    if (failed)
        Py_CLEAR(found);
    return found;
}

static int
is_open_request_of_task(const frame_t *frame, long thread_id)
{
    return frame->state != CLOSED && frame->task != 0 && frame->span_id == frame->root_id &&
           frame->root_id & REQUEST_BIT && frame->ring->thread_id == thread_id;
}

static PyObject *
Core_open_requests(Core *self, PyObject *given)
{
    long thread_id = PyLong_AsLong(given), found = 0;
    if (thread_id == -1 && PyErr_Occurred())
        return NULL;
    for (const Current *current = self->currents; current != NULL; current = current->next)
        for (const frame_t *frame = current->top; frame != NULL; frame = frame->above)
            found += is_open_request_of_task(frame, thread_id);
    for (const Stretch *stretch = self->stretches; stretch != NULL; stretch = stretch->next)
        for (const frame_t *frame = stretch->inner; frame != NULL; frame = frame->above)
            found += is_open_request_of_task(frame, thread_id);
    return PyLong_FromLong(found);
}

/* The innermost open frame of this context that was opened as manual, by the name of its site where one is given. */
static PyObject *
Core_innermost_manual(Core *self, PyObject *name)
{
    Ring *ring;
    Current *current = current_of(self, &ring);
    if (current == NULL) {
        if (forgive() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    frame_t *frame = current->top;
    if (frame == NULL && current->base != NULL)
        frame = current->base->frame;
    for (; frame != NULL; frame = frame->above) {
        if (frame->state != MANUAL || frame->self == NULL)
            continue;
        if (name == Py_None)
            return Py_NewRef(frame->self);
        PyObject *own = PyObject_GetAttrString(frame->node->site, "name");
        if (own == NULL)
            return NULL;
        /* Not by `==`, which may be code of the host's. */
        int same = PyUnicode_Check(own) && PyUnicode_Check(name) && PyUnicode_Compare(own, name) == 0;
        Py_DECREF(own);
        if (same)
            return Py_NewRef(frame->self);
    }
    Py_RETURN_NONE;
}

static PyObject *
Core_current_id(Core *self, PyObject *Py_UNUSED(none))
{
    Ring *ring;
    Current *current = current_of(self, &ring);
    if (current == NULL)
        return forgive() < 0 ? NULL : PyLong_FromLong(0);
    if (current->top != NULL)
        return PyLong_FromUnsignedLongLong(current->top->span_id);
    return PyLong_FromUnsignedLongLong(current->base != NULL ? current->base->span_id : 0);
}

static PyObject *
Core_current_trace(Core *self, PyObject *Py_UNUSED(none))
{
    const frame_t *frame = open_span(self, INNERMOST, NULL);
    if (frame == NULL) {
        if (PyErr_Occurred() && forgive() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    PyObject *remote = remote_in(self, frame->request);
    return Py_BuildValue("KKO", (unsigned long long)frame->span_id, (unsigned long long)frame->root_id,
                         remote != NULL ? remote : Py_None);
}

static PyObject *
Core_publish(Core *self, PyObject *Py_UNUSED(none))
{
    if (publish_here(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* share(context, again): a task is about to be given a context, for the first time or again. Where another runs there,
 * too, each span asks which one it is in. */
static PyObject *
Core_share(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyContext_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "share(context, again)");
        return NULL;
    }
    int elsewhere = args[0] != UNCHECKED_THREAD_STATE()->context;
    if (!self->on)
        Py_RETURN_NONE;
    if (elsewhere && PyContext_Enter(args[0]) < 0) { /* it runs: on another thread, or around this one's */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    Ring *ring;
    Current *current = known_here(self);
    if (current == NULL && !PyErr_Occurred() && args[1] == Py_True)
        current = (Current *)Py_XNewRef((PyObject *)current_of(self, &ring));
    if (current != NULL)
        current->is_shared = 1;
    int failed = current == NULL && forgive() < 0;
    Py_XDECREF(current);
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    if (elsewhere && PyContext_Exit(args[0]) < 0)
        PyErr_Clear();
    PyErr_Restore(type, raised, traceback);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *
Core_copy_context(Core *self, PyObject *Py_UNUSED(none))
{
    return publish_here(self) < 0 ? NULL : PyContext_CopyCurrent();
}

/* Forget what is open in this context. Makes no ring: that would be a thread's first span. */
static PyObject *
Core_forget_current(Core *self, PyObject *Py_UNUSED(none))
{
    if (set_variable(self, Py_None) < 0)
        return NULL;
    Mark *mark = find_mark(self);
    if (mark == NULL)
        return NULL;
    if (mark->ring != NULL)
        Py_CLEAR(mark->ring->current);
    Py_RETURN_NONE;
}

/* Forget what is open in every context: in a forked child, where the other threads are gone. */
static PyObject *
Core_forget_all(Core *self, PyObject *none)
{
    while (self->currents != NULL)
        leave_list(self->currents);
    for (Stretch *stretch = self->stretches; stretch != NULL;) {
        Stretch *next = stretch->next;
        stretch->previous = stretch->next = NULL;
        stretch->listed = 0;
        stretch = next;
    }
    self->stretches = NULL;
    return Core_forget_current(self, none);
}

/* The node of the same path in a tree that has just been begun. */
static node_t *
made_again(Core *core, const node_t *old)
{
    uint32_t depth = 0;
    for (const node_t *node = old; node != &core->root; node = node->parent)
        depth++;
    PyObject **path = PyMem_Malloc((depth + 1) * sizeof *path);
    if (path == NULL)
        return core->overflow;
    uint32_t at = depth;
    for (const node_t *node = old; node != &core->root; node = node->parent)
        path[--at] = node->site;
    node_t *node = &core->root;
    for (; at < depth; at++)
        node = end_of(node_of(core, node, path[at]));
    PyMem_Free(path);
    return node;
}

/* Begin a new call tree, which has the paths of what is open now and no other. Gives the sites of the old one, which
 * are to be let go of where that may run code of the host's, NULL at the end; NULL for want of memory, and nothing is
 * changed then. */
static PyObject **
give_up_nodes(Core *core)
{
    node_t **old = core->nodes, *overflow = core->overflow, root = core->root;
    uint32_t count = core->node_count, slots = core->node_slots;
    PyObject **sites = PyMem_Calloc((size_t)count + 1, sizeof *sites);
    if (sites == NULL)
        return NULL;
    core->nodes = NULL;
    core->node_count = core->node_slots = core->root.children = core->root.slots = 0;
    core->root.table = NULL;
    core->overflow = new_node(core, &core->root, overflow->site);
    if (core->overflow == NULL) {
        PyMem_Free(core->nodes);
        PyMem_Free(core->root.table);
        core->nodes = old;
        core->node_count = count;
        core->node_slots = slots;
        core->overflow = overflow;
        core->root = root;
        PyMem_Free(sites);
        return NULL;
    }
    core->edges = 0;
    for (Current *current = core->currents; current != NULL; current = current->next)
        for (frame_t *frame = current->top; frame != NULL; frame = frame->above)
            frame->node = made_again(core, frame->node);
    for (Stretch *stretch = core->stretches; stretch != NULL; stretch = stretch->next)
        for (frame_t *frame = stretch->inner; frame != NULL; frame = frame->above)
            frame->node = made_again(core, frame->node);
    for (uint32_t i = 0; i < count; i++) {
        PyMem_Free(old[i]->table);
        sites[i] = old[i]->site; /* and its reference */
        memset(old[i], 0, sizeof *old[i]);
        /* Until it is taken again it counts as the overflow, for an open span that no chain holds any more. */
        old[i]->site = overflow->site;
        old[i]->parent = core->spare;
        core->spare = old[i];
    }
    PyMem_Free(old);
    PyMem_Free(root.table);
    return sites;
}

static PyObject *
Core_reset(Core *self, PyObject *argument)
{
    if (argument != Py_None) {
        unsigned long long ring_bytes = PyLong_AsUnsignedLongLong(argument);
        if (ring_bytes == (unsigned long long)-1 && PyErr_Occurred())
            return NULL;
        self->row_budget = ring_bytes / sizeof(row_t);
    }
    PyObject *rings = PyList_New(0), **old_sites = NULL;
    Ring *ended = rings == NULL ? NULL : empty_ring();
    if (ended == NULL || (self->overflow != NULL && (old_sites = give_up_nodes(self)) == NULL)) {
        Py_XDECREF(rings);
        Py_XDECREF((PyObject *)ended);
        return PyErr_NoMemory();
    }
    PyObject *old_rings = self->rings;
    Ring *old_ended = self->ended;
    self->uid = ++last_uid;
    self->rings = rings;
    self->ended = ended;
    self->ended_rows = self->ended_too_short = 0;
    memset(self->reasons, 0, sizeof(self->reasons));
    PyDict_Clear(self->counts);
    Py_DECREF(old_ended);
    free_rings(old_rings); /* last: it may run code of the host's */
    PyDict_Clear(self->user_sites);
    for (uint32_t i = 0; old_sites != NULL && old_sites[i] != NULL; i++)
        Py_DECREF(old_sites[i]);
    PyMem_Free(old_sites);
    Py_RETURN_NONE;
}

/* For tests: put counters near their ends, the next span's identity and the calling thread's head. */
static PyObject *
Core_preset(Core *self, PyObject *args)
{
    unsigned long long next_id, head;
    if (!PyArg_ParseTuple(args, "KK:_preset", &next_id, &head))
        return NULL;
    Ring *ring = ring_of(self);
    if (ring == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    for (uint64_t i = 0; i < ring->capacity; i++)
        Py_CLEAR(ring->rows[i].rare);
    self->next_id = next_id;
    ring->head = head;
    Py_RETURN_NONE;
}

/* Begin to read the time stamp counter. False where the processor has none. Calibrated over about two milliseconds,
 * refined by each check_ticks. */
static PyObject *
Core_start_ticks(Core *self, PyObject *Py_UNUSED(none))
{
    if (!HAS_TICKS)
        Py_RETURN_FALSE;
    ticks_t ticks = {0};
    int64_t now_ticks = 0, now_ns = 0;
    read_both(&ticks.first_ticks, &ticks.first_ns);
    do {
        read_both(&now_ticks, &now_ns);
    } while (now_ns - ticks.first_ns < 2000000);
    if (now_ticks <= ticks.first_ticks)
        Py_RETURN_FALSE;
    ticks.rate = (uint64_t)(((unsigned __int128)(now_ns - ticks.first_ns) << 32) / (uint64_t)(now_ticks - ticks.first_ticks));
    ticks.base_ticks = now_ticks;
    ticks.base_ns = now_ns;
    ticks.in_use = 1;
    self->ticks = ticks;
    Py_RETURN_TRUE;
}

/* Compare with the monotonic clock; the counter catches up over the next second instead of jumping. Returns by how
 * many ns it was off, or None after giving the counter up because that was more than `limit_ns`, or it is not in use. */
static PyObject *
Core_check_ticks(Core *self, PyObject *argument)
{
    long long limit_ns = PyLong_AsLongLong(argument);
    if (limit_ns == -1 && PyErr_Occurred())
        return NULL;
    ticks_t *ticks = &self->ticks;
    if (!ticks->in_use)
        Py_RETURN_NONE;
    int64_t now_ticks = 0, now_ns = 0;
    read_both(&now_ticks, &now_ns);
    int64_t shown_ns = ticks_as_ns(ticks, now_ticks);
    int64_t off_ns = shown_ns - now_ns;
    if (off_ns > limit_ns || off_ns < -limit_ns || now_ticks <= ticks->first_ticks) {
        ticks->in_use = 0;
        count(self, TICKS_STRAYED);
        Py_RETURN_NONE;
    }
    uint64_t rate = (uint64_t)(((unsigned __int128)(now_ns - ticks->first_ns) << 32) / (uint64_t)(now_ticks - ticks->first_ticks));
    ticks->base_ticks = now_ticks;
    ticks->base_ns = shown_ns;
    ticks->rate = rate - (uint64_t)((__int128)rate * off_ns / 1000000000);
    return PyLong_FromLongLong(off_ns);
}

static PyObject *
Core_stop_ticks(Core *self, PyObject *Py_UNUSED(none))
{
    self->ticks.in_use = 0;
    Py_RETURN_NONE;
}

static PyObject *
Core_now_ns(Core *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromLongLong(read_clock(self));
}

/* The lowest value of a bucket. */
static inline int64_t
bucket_start(uint32_t bucket)
{
    if (bucket < 128)
        return bucket;
    uint32_t exponent = (bucket >> 6) - 1;
    return (int64_t)(bucket - (exponent << 6)) << exponent;
}

/* A call that was counted as long as its host time turns out to have taken longer, for the device went on. The least
 * elapsed time is exact as long as it was another call's; else it is where the lowest bucket begins. */
static PyObject *
Core_count_device(Core *self, PyObject *args)
{
    Ring *ring;
    unsigned int index;
    long long host_ns, device_ns, elapsed_ns;
    if (!PyArg_ParseTuple(args, "O!ILLL:count_device", &RingType, &ring, &index, &host_ns, &device_ns, &elapsed_ns))
        return NULL;
    totals_t *totals = known_totals(&ring->totals, index);
    uint32_t from = bucket_of((uint64_t)host_ns);
    if (totals != NULL)
        count_waiting(self, totals);
    if (totals == NULL || host_ns < 0 || device_ns < 0 || elapsed_ns < host_ns || times_of(totals, from) == 0)
        Py_RETURN_FALSE;
    add_time(self, &totals->device_ns, device_ns);
    if (elapsed_ns == host_ns)
        Py_RETURN_TRUE;
    add_time(self, &totals->beyond_ns, elapsed_ns - host_ns);
    count_bucket(self, totals, bucket_of((uint64_t)elapsed_ns), 1);
    chunk_t *chunk = totals->chunks[from >> 6];
    if (chunk->low[from & 63]-- == 0)
        chunk->high[from & 63]--;
    if (elapsed_ns > totals->max_ns)
        totals->max_ns = elapsed_ns;
    if (bucket_of((uint64_t)totals->min_ns) == from) {
        uint32_t lowest = from;
        while (times_of(totals, lowest) == 0)
            lowest++;
        int64_t start_ns = bucket_start(lowest);
        if (start_ns > totals->min_ns)
            totals->min_ns = start_ns;
    }
    Py_RETURN_TRUE;
}

static PyObject *
Core_count(Core *self, PyObject *what)
{
    PyObject *before = PyDict_GetItemWithError(self->counts, what); /* borrowed */
    if (before == NULL && PyErr_Occurred())
        return NULL;
    PyObject *after = PyLong_FromLongLong(before == NULL ? 1 : PyLong_AsLongLong(before) + 1);
    if (after == NULL || PyDict_SetItem(self->counts, what, after) < 0) {
        Py_XDECREF(after);
        return NULL;
    }
    Py_DECREF(after);
    Py_RETURN_NONE;
}

static PyMethodDef Core_methods[] = {
    {"open", (PyCFunction)(void (*)(void))Core_open, METH_FASTCALL, "Begin a span and make it current."},
    {"close", (PyCFunction)(void (*)(void))Core_close, METH_FASTCALL, "End a span."},
    {"open_request", (PyCFunction)(void (*)(void))Core_open_request, METH_FASTCALL, "Begin the span of a request."},
    {"close_request", (PyCFunction)(void (*)(void))Core_close_request, METH_FASTCALL, "End the span of a request."},
    {"open_requests", (PyCFunction)Core_open_requests, METH_O,
     "How many requests are open that tasks have begun on a thread."},
    {"begun_ns", (PyCFunction)Core_begun_ns, METH_O, "When a span began."},
    {"annotate", (PyCFunction)(void (*)(void))Core_annotate, METH_FASTCALL, "Set attributes of an open span."},
    {"annotate_innermost", (PyCFunction)(void (*)(void))Core_annotate_innermost, METH_FASTCALL | METH_KEYWORDS,
     annotate_doc},
    {"annotate_request", (PyCFunction)(void (*)(void))Core_annotate_request, METH_FASTCALL | METH_KEYWORDS,
     annotate_request_doc},
    {"rename_innermost", (PyCFunction)Core_rename_innermost, METH_O, "Rename the innermost open span of this context."},
    {"site_of_open", (PyCFunction)Core_site_of_open, METH_O,
     "The site of an open span, or with None of the innermost one; None where there is none."},
    {"rename", (PyCFunction)(void (*)(void))Core_rename, METH_FASTCALL,
     "Let an open span be one of another site of its kind from now on."},
    {"record", (PyCFunction)(void (*)(void))Core_record, METH_FASTCALL, "Store a span that has just ended."},
    {"new_span", (PyCFunction)Core_new_span, METH_O, "A scope of a site: a span around a block."},
    {"scope", (PyCFunction)(void (*)(void))Core_scope, METH_FASTCALL | METH_KEYWORDS, scope_doc},
    {"rings", (PyCFunction)Core_rings, METH_NOARGS, "The rings in the order in which their threads first recorded."},
    {"calls_by", (PyCFunction)Core_calls_by, METH_VARARGS, "Calls by group of nodes, on all threads together."},
    {"lines_by_place", (PyCFunction)Core_lines_by_place, METH_VARARGS, "The lines of each thread, or of all as one, by place."},
    {"histogram_of", (PyCFunction)Core_histogram_of, METH_VARARGS, "The histogram of nodes on a thread, or on all, packed."},
    {"ended_totals", (PyCFunction)Core_ended_totals, METH_NOARGS, "Totals of threads whose rings were given up."},
    {"ended_firsts", (PyCFunction)Core_ended_firsts, METH_NOARGS, "Their first calls, as `Ring.firsts` has them."},
    {"nodes_from", (PyCFunction)Core_nodes_from, METH_VARARGS, "Sites and parents of the nodes from a number on."},
    {"open_rows", (PyCFunction)Core_open_rows, METH_NOARGS, "(thread id, row) of each span that is open now."},
    {"innermost_manual", (PyCFunction)Core_innermost_manual, METH_O, "The innermost manual frame, by name or None."},
    {"current_trace", (PyCFunction)Core_current_trace, METH_NOARGS,
     "Identities of the innermost open span and of its tree's root, and what the request noted of another tracer."},
    {"current_id", (PyCFunction)Core_current_id, METH_NOARGS, "Identity of the current span, 0 if there is none."},
    {"publish", (PyCFunction)Core_publish, METH_NOARGS, "Make the current span known to a context about to be copied."},
    {"share", (PyCFunction)(void (*)(void))Core_share, METH_FASTCALL,
     "A task is about to be given a context, again if that is True: two may run there by turns."},
    {"copy_context", (PyCFunction)Core_copy_context, METH_NOARGS,
     "copy_context($self)\n--\n\nAs contextvars.copy_context; the copy knows the current span."},
    {"forget_current", (PyCFunction)Core_forget_current, METH_NOARGS, "Forget what is open in this context."},
    {"_forget_all", (PyCFunction)Core_forget_all, METH_NOARGS, "Forget what is open in every context."},
    {"_reset", (PyCFunction)Core_reset, METH_O, "Forget every row and total; a new limit in bytes, or None."},
    {"_preset", (PyCFunction)Core_preset, METH_VARARGS, "For tests: the next identity and this thread's head."},
    {"start_ticks", (PyCFunction)Core_start_ticks, METH_NOARGS, "Begin to read the time stamp counter."},
    {"check_ticks", (PyCFunction)Core_check_ticks, METH_O, "Compare the counter with the monotonic clock."},
    {"stop_ticks", (PyCFunction)Core_stop_ticks, METH_NOARGS, "Read the monotonic clock again."},
    {"now_ns", (PyCFunction)Core_now_ns, METH_NOARGS, "The clock that spans are timed with."},
    {"count_device", (PyCFunction)Core_count_device, METH_VARARGS,
     "Add a call's device time: ring, node index, host, device and elapsed ns. False where no such call was counted."},
    {"count", (PyCFunction)Core_count, METH_O, "Count an irregular event."},
    {NULL},
};

static PyMemberDef Core_members[] = {
    {"on", T_BOOL, offsetof(Core, on), 0, "whether spans begin"},
    {"node_limit", T_UINT, offsetof(Core, node_limit), 0, "call paths that the tally keeps"},
    {"node_count", T_UINT, offsetof(Core, node_count), READONLY, "call paths known"},
    {"ended_rows", T_ULONGLONG, offsetof(Core, ended_rows), READONLY, "rows of rings that were given up"},
    {"ended_too_short", T_ULONGLONG, offsetof(Core, ended_too_short), READONLY, "the same of `too_short`"},
    {"user_sites", T_OBJECT, offsetof(Core, user_sites), READONLY, "sites of scopes of kind user, by name"},
    {"passes", T_OBJECT, offsetof(Core, passes), READONLY, "what counts the calls of each muted site"},
    {"remote_parent", T_OBJECT, offsetof(Core, remote_parent), 0, "tells another tracer's current span, or None"},
    {"answers", T_OBJECT, offsetof(Core, answers), 0, "exceptions that answer a request, as http_status.ANSWERS has them"},
    {"tells_of_tasks", T_OBJECT, offsetof(Core, tells_of_tasks), 0, "says whether a loop calls publish for a task, or None"},
    {"begin_device", T_OBJECT, offsetof(Core, begin_device), 0, "begins to time a span on a device, or None"},
    {"watches_all", T_BOOL, offsetof(Core, watches_all), 0, "whether begin_device is asked for every span"},
    {NULL},
};

static PyObject *
Core_irregular(Core *self, void *Py_UNUSED(closure))
{
    PyObject *all = PyDict_Copy(self->counts);
    for (int i = 0; all != NULL && i < REASON_COUNT; i++) {
        if (self->reasons[i] == 0)
            continue;
        PyObject *times = PyLong_FromUnsignedLongLong(self->reasons[i]);
        if (times == NULL || PyDict_SetItemString(all, REASONS[i], times) < 0)
            Py_CLEAR(all);
        Py_XDECREF(times);
    }
    return all;
}

static PyObject *
Core_scope_type(Core *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->scope_type != NULL ? self->scope_type : Py_None);
}

static int
Core_set_scope_type(Core *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL || !PyType_Check(value) || !PyType_IsSubtype((PyTypeObject *)value, &ScopeType)) {
        PyErr_SetString(PyExc_TypeError, "scope_type is a kind of Scope");
        return -1;
    }
    Scope *scope = (Scope *)((PyTypeObject *)value)->tp_alloc((PyTypeObject *)value, 0);
    if (scope == NULL)
        return -1;
    Py_XSETREF(self->no_scope, scope);
    Py_XSETREF(self->scope_type, Py_NewRef(value));
    return 0;
}

static PyGetSetDef Core_getset[] = {
    {"irregular", (getter)Core_irregular, NULL, "irregular events by what happened", NULL},
    {"scope_type", (getter)Core_scope_type, (setter)Core_set_scope_type, "what scope makes", NULL},
    {NULL},
};

static PyTypeObject CoreType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Core",
    .tp_basicsize = sizeof(Core),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "Rows, totals and open spans of one process.",
    .tp_new = Core_new,
    .tp_init = (initproc)Core_init,
    .tp_dealloc = (destructor)Core_dealloc,
    .tp_traverse = (traverseproc)Core_traverse,
    .tp_clear = (inquiry)Core_clear,
    .tp_methods = Core_methods,
    .tp_members = Core_members,
    .tp_getset = Core_getset,
};

#define CAPTURED 1000000 /* no code of the driver's */

typedef int (*record_call)(void *event, void *stream);
typedef int (*capturing_call)(void *stream, int *status);
typedef int (*number_call)(void *stream, unsigned long long *number);

typedef struct {
    record_call record;
    capturing_call is_capturing;
    number_call number_of; /* or NULL: nobody asks for the stream's number */
    void *event, *stream;
    unsigned long long number;
} mark_t;

/* Stream 0 is the default one, which nobody has to ask about: its number is 0, and 1 is another handle of it. */
static int
record_unless_captured(mark_t *mark)
{
    int status = 0;
    int error = mark->is_capturing(mark->stream, &status);
    if (error == 0 && status != 0)
        return CAPTURED;
    if (error == 0 && mark->number_of != NULL && (uintptr_t)mark->stream > 1)
        error = mark->number_of(mark->stream, &mark->number);
    return error == 0 ? mark->record(mark->event, mark->stream) : error;
}

/* Record an event on a stream through the driver's own functions, unless the stream is being captured into a graph.
 * Returns the number of the stream where it is asked for, else 0; the driver's error, or CAPTURED, below 0.
 *
 * The driver may wait here, for room in a full queue or for a lock that the thread of a host function holds, and a host
 * function may wait for the interpreter's lock: a caller who keeps it (`releases` is 0) has to know that there are
 * none. To let go of it costs the wait for whoever takes it meanwhile, so it is let go of once for all three calls. */
static PyObject *
mark(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    void *value[6];
    if (nargs != 6) {
        PyErr_SetString(PyExc_TypeError,
                        "mark(cuEventRecord, cuStreamIsCapturing, cuStreamGetId or 0, releases, event, stream)");
        return NULL;
    }
    for (int i = 0; i < 6; i++) {
        value[i] = PyLong_AsVoidPtr(args[i]);
        if (value[i] == NULL && PyErr_Occurred())
            return NULL;
    }
    mark_t mark = {(record_call)value[0], (capturing_call)value[1], (number_call)value[2], value[4], value[5], 0};
    int error;
    if (value[3] != NULL) {
        Py_BEGIN_ALLOW_THREADS
        error = record_unless_captured(&mark);
        Py_END_ALLOW_THREADS
    }
    else
        error = record_unless_captured(&mark);
    return error != 0 ? PyLong_FromLong(-error) : PyLong_FromUnsignedLongLong(mark.number);
}

typedef struct {
    void *begin, *end;
    float device_ms, offset_ms;
    int error;
} measured_t;

#define NOT_READY 600

/* Ask for pairs of events in the order of their ends, up to the first that has not happened: how long each took, and
 * how long after the anchor it began. The interpreter's lock is let go of once for all of them, for a thread that has
 * to win it back after each question gets few answers from a busy service. */
static PyObject *
measure(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t query_address, elapsed_address, anchor_address;
    PyObject *events;
    if (!PyArg_ParseTuple(args, "nnnO!:measure", &query_address, &elapsed_address, &anchor_address, &PyList_Type,
                          &events))
        return NULL;
    int (*query)(void *) = (int (*)(void *))query_address;
    int (*elapsed)(float *, void *, void *) = (int (*)(float *, void *, void *))elapsed_address;
    void *anchor = (void *)anchor_address;
    Py_ssize_t pairs = PyList_GET_SIZE(events) / 2, done = 0;
    measured_t *found = PyMem_Calloc((size_t)pairs + 1, sizeof(measured_t));
    if (found == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < pairs; i++) {
        found[i].begin = PyLong_AsVoidPtr(PyList_GET_ITEM(events, 2 * i));
        found[i].end = PyLong_AsVoidPtr(PyList_GET_ITEM(events, 2 * i + 1));
    }
    if (PyErr_Occurred()) {
        PyMem_Free(found);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (; done < pairs; done++) {
        measured_t *pair = &found[done];
        pair->error = query(pair->end);
        if (pair->error == NOT_READY)
            break;
        if (pair->error == 0)
            pair->error = elapsed(&pair->device_ms, pair->begin, pair->end);
        if (pair->error == 0 && anchor != NULL)
            pair->error = elapsed(&pair->offset_ms, anchor, pair->begin);
    }
    Py_END_ALLOW_THREADS
    PyObject *answers = PyList_New(done);
    for (Py_ssize_t i = 0; answers != NULL && i < done; i++) {
        PyObject *answer = Py_BuildValue("(iff)", found[i].error, found[i].device_ms, found[i].offset_ms);
        if (answer == NULL)
            Py_CLEAR(answers);
        else
            PyList_SET_ITEM(answers, i, answer);
    }
    PyMem_Free(found);
    return answers;
}

/* The values of headers by their names, of pairs of both: of several by one name the last, None where there is none. Of a
 * request some ten headers come, and to make a dict of them takes five times as long. Twin: `pure.header_values`. */
static PyObject *
header_values(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "header_values(headers, names)");
        return NULL;
    }
    PyObject *names = args[1], *headers = PySequence_Fast(args[0], "headers are pairs");
    Py_ssize_t count = PyTuple_GET_SIZE(names);
    PyObject *values = headers == NULL ? NULL : PyTuple_New(count);
    for (Py_ssize_t i = 0; values != NULL && i < count; i++)
        PyTuple_SET_ITEM(values, i, Py_NewRef(Py_None));
    for (Py_ssize_t at = 0; values != NULL && at < PySequence_Fast_GET_SIZE(headers); at++) {
        PyObject *pair = PySequence_Fast(PySequence_Fast_GET_ITEM(headers, at), "a header is a pair");
        PyObject *name = pair != NULL && PySequence_Fast_GET_SIZE(pair) == 2 ? PySequence_Fast_GET_ITEM(pair, 0) : NULL;
        for (Py_ssize_t i = 0; name != NULL && PyBytes_Check(name) && i < count; i++) {
            PyObject *wanted = PyTuple_GET_ITEM(names, i);
            Py_ssize_t size = PyBytes_GET_SIZE(name);
            if (PyBytes_Check(wanted) && PyBytes_GET_SIZE(wanted) == size &&
                memcmp(PyBytes_AS_STRING(wanted), PyBytes_AS_STRING(name), (size_t)size) == 0) {
                PyObject *old = PyTuple_GET_ITEM(values, i);
                PyTuple_SET_ITEM(values, i, Py_NewRef(PySequence_Fast_GET_ITEM(pair, 1)));
                Py_DECREF(old);
            }
        }
        if (name == NULL) {
            if (pair != NULL)
                PyErr_SetString(PyExc_ValueError, "a header is a pair");
            Py_CLEAR(values);
        }
        Py_XDECREF(pair);
    }
    Py_XDECREF(headers);
    return values;
}

static PyMethodDef module_methods[] = {
    {"header_values", (PyCFunction)(void (*)(void))header_values, METH_FASTCALL,
     "Values of headers by their names: header_values(pairs, names)."},
    {"mark", (PyCFunction)(void (*)(void))mark, METH_FASTCALL,
     "Record an event: mark(cuEventRecord, cuStreamIsCapturing, cuStreamGetId or 0, releases, event, stream), all as "
     "addresses. The stream's number, or what the driver says against it below 0."},
    {"measure", measure, METH_VARARGS,
     "Time pairs of events: measure(cuEventQuery, cuEventElapsedTime, anchor or 0, [begin, end, begin, end, ...]). "
     "A list of (error, device ms, ms since the anchor), as long as there are pairs that have happened."},
    {NULL},
};

static int
execute(PyObject *made)
{
    /* Types and frames are the process's. Where they may not be, the twin records. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "instrument.native._recorder works in the main interpreter only");
        return -1;
    }
#ifdef Py_GIL_DISABLED
    PyObject *ask = PySys_GetObject("_is_gil_enabled"); /* borrowed */
    PyObject *enabled = ask == NULL ? NULL : PyObject_CallNoArgs(ask);
    Py_XDECREF(enabled);
    if (enabled != Py_True) { /* switched off by hand, as PYTHON_GIL=0 does */
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ImportError, "instrument.native._recorder needs the GIL");
        return -1;
    }
#endif
    PyTypeObject *types[] = {&RingType,    &MarkType,  &CurrentType,        &PublishedType, &FrameType, &FunctionType_,
                             &ScopeType,   &StretchType, &AsyncGeneratorType, &AsyncStepType, &ShelfType, &PassType,
                             &CoreType};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (PyType_Ready(types[i]) < 0)
            return -1;
    struct {
        PyObject **kept;
        const char *text;
    } texts[] = {
        {&str_bytes, "bytes"},
        {&str_kind, "kind"},
        {&str_request, "request"},
        {&str_copy, "copy"},
        {&str_module_dunder, "__module__"},
        {&str_status, "http.response.status_code"},
        {&str_request_size, "http.request.body.size"},
        {&str_answer_size, "http.response.body.size"},
        {&str_status_code, "otel.status_code"},
        {&str_error_type, "error.type"},
        {&str_ok, "OK"},
        {&str_error, "ERROR"},
        {&str_other, "_OTHER"},
        {&str_annotate_checked, "_annotate_checked"},
        {&str_make_scope, "make_scope"},
        {&str_min_ns, "min_ns"},
        {&str_device, "device"},
        {&str_end, "end"},
        {&str_pause, "pause"},
        {&str_resume, "resume"},
        {&str_ag_frame, "ag_frame"},
        {&str_anext, "__anext__"},
        {&str_asend, "asend"},
        {&str_athrow, "athrow"},
        {&str_items, "items"},
        {&str_first_item, "first_item_ns"},
        {&str_last_item, "last_item_ns"},
        {&str_longest_gap, "longest_gap_ns"},
        {&str_aclose, "aclose"},
        {&str_throw, "throw"},
        {&str_close, "close"},
    };
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        if ((*texts[i].kept = PyUnicode_InternFromString(texts[i].text)) == NULL)
            return -1;
    if (name_of_type == NULL) {
        PyObject *names = PyObject_GetAttrString((PyObject *)&PyType_Type, "__dict__");
        name_of_type = names == NULL ? NULL : PyMapping_GetItemString(names, "__name__");
        Py_XDECREF(names);
        if (name_of_type == NULL)
            return -1;
    }
    if (left_to_us == NULL && (left_to_us = PyCFunction_New(&leave_to_us_method, NULL)) == NULL)
        return -1;
    if (PyModule_AddObjectRef(made, "Core", (PyObject *)&CoreType) < 0 ||
        PyModule_AddObjectRef(made, "Frame", (PyObject *)&FrameType) < 0 ||
        PyModule_AddObjectRef(made, "Function", (PyObject *)&FunctionType_) < 0 ||
        PyModule_AddObjectRef(made, "Pass", (PyObject *)&PassType) < 0 ||
        PyModule_AddObjectRef(made, "Ring", (PyObject *)&RingType) < 0 ||
        PyModule_AddObjectRef(made, "Scope", (PyObject *)&ScopeType) < 0 ||
        PyModule_AddObjectRef(made, "Shelf", (PyObject *)&ShelfType) < 0 ||
        PyModule_AddObjectRef(made, "Stretch", (PyObject *)&StretchType) < 0 ||
        PyModule_AddIntConstant(made, "ROW_BYTES", sizeof(row_t)) < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._recorder",
    .m_doc = "The hot path of instrument.recorder.recorder.",
    .m_methods = module_methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__recorder(void)
{
    return PyModuleDef_Init(&module);
}
