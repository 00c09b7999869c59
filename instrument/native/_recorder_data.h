/* The structures that the parts of the recorder share, and the state of the process. A part of `_recorder.c`. */

#define CLOSED 0
#define OPEN 1
#define MANUAL 2

#define NODE_LIMIT 16384
#define OVERFLOW_SITES 4096 /* sites with a node of their own below the overflow node, once the node limit is reached */
/* Steps to nodes that are not children; steps beyond the limit are searched for each time. */
#define EDGE_LIMIT (8 * NODE_LIMIT)
#define SMALLEST_RING 64 /* rows */
#define LARGEST_RING (1u << 31)
#define ENDED_RINGS_KEPT 1000
#define OBJECTS_KEPT 256 /* free Frame objects, and free scopes */
#define NAMES_CACHED 64 /* cached names of scopes; a power of two */
#define CACHED_AT_FIRST 16
#define CACHED_LIMIT 4096 /* cached instances of a method's class */
#define DEEPEST_CHAIN 64 /* contexts, each copied from the next */
#define ERROR_NAME_LIMIT 200 /* as in errors.py */
#define TRIES 4 /* attempts, because finalisers of the service may undo our changes */
#define VALUE_LIMIT 256      /* characters of an attribute, as in spans.py */
#define ATTRIBUTE_LIMIT 128  /* of a span, as in spans.py */
#define FIRST_OF_SERVER 500 /* HTTP statuses from here on are errors */
#define STACK_MARGIN (64 << 10)
#define LINE 64 /* bytes of a cache line */
#define BUCKETS_WAITING 7
#define HAS_MORE 8 /* as in rows.py */

/* Events that are counted in addition to spans. C counts them, because counting a loss for lack of memory must need no
 * memory. */
typedef enum {
    CROSSED, FOREIGN, ENDED_TWICE, TICKS_STRAYED, NO_MEMORY, NOT_TALLIED, NO_DETAILS, FAULT, THREAD_ENDING, SATURATED,
    RENAMED_LATE, RENAMED_KIND, ANNOTATED_LATE, TOO_MANY_ATTRIBUTES, REASON_COUNT,
} reason_t;

/* This bit of a span id is set only for requests that are roots. So a root id shows whether the tree is a request. */
#define REQUEST_BIT 1

#define CHUNKS 60 /* of 64 histogram buckets each: up to 2^63 ns, see histogram.bucket */

typedef struct node {
    PyObject *site;
    struct node *parent;
    uint32_t index;
    uint32_t children;
    uint32_t slots; /* a power of two, or 0 */
    unsigned char is_request : 1, is_copy : 1;
    char is_device; /* true if its site asks for device time */
    char may_recur;  /* true if a call of it may run inside another one */
    char is_known;   /* true if it is in the current tree, and not spare */
    /* Steps, hashed by the site's address with linear probing; a step to a node that is not a child is marked. */
    struct node **table;
    int64_t min_ns; /* a span that is shorter, and has neither children nor an error, gets no row */
    /* The tag of the ring that `totals` belongs to, which is that of the last thread here; 0 for none. */
    uint32_t ring_tag;
    struct totals *totals;
} node_t;

_Static_assert(sizeof(node_t) == LINE, "a node is one cache line");

/* Counts of 64 bits. The upper part is allocated once a lower part overflows, which few do. */
typedef struct {
    uint16_t low[64];
    uint64_t *high;
} chunk_t;

#define LOW_BITS 16

/* The first cache line has all fields that a call changes. A service computes between two spans. So nearly each line
 * that a span touches comes from memory, at 100 ns, while everything else takes 50 ns. For this reason the buckets of
 * the last calls wait in the first line, until there are enough to fetch their counters at once. */
typedef struct totals {
    uint64_t calls;
    int64_t total_ns, self_ns, min_ns, max_ns, first_ns;
    /* Filled from the end; `waiting_room` is the number of free places. */
    uint16_t waiting[BUCKETS_WAITING], waiting_room;
    uint64_t errors, moved_bytes;
    int64_t device_ns, beyond_ns; /* `beyond_ns`: the elapsed time less the total */
    int64_t first_total_ns;       /* the total of the call with `first_ns` */
    uint64_t steps;               /* steps of generators, including open ones */
    int64_t waiting_ns;           /* the part of `self_ns` that an await suspended */
    chunk_t *chunks[CHUNKS];
    uint64_t ring_number; /* the number of its ring, for readers in other processes */
    uint32_t node;
    uint64_t cancelled; /* requests cancelled without an error */
} totals_t;

/* One cache line. An odd `rare` is an active time, times two, plus one. `HAS_MORE` in `rare` means that the rare
 * facts are in the details of the recording. */
typedef struct {
    uint64_t span_id, parent_id, root_id;
    int64_t start_ns, end_ns;
    int64_t children_ns; /* less the span's waits; the active time less this is the self time including waits */
    uint64_t rare;
    uint32_t node;
    uint32_t task; /* the lower half of the task's number */
} row_t;

_Static_assert(sizeof(row_t) == LINE, "a row is one cache line");
_Static_assert(offsetof(totals_t, errors) == LINE, "what a call adds to totals is one cache line");

/* Totals by node index, in pages, so that a thread takes memory only for the call paths that it uses. */
typedef struct {
    totals_t ***pages;
    uint32_t slots;
} book_t;

#define PAGE 64

struct ring;

typedef struct frame {
    struct frame *above;
    node_t *node;
    uint64_t span_id, parent_id, root_id; /* from here to `start_ns` in the order of a row */
    int64_t start_ns;
    uint64_t task; /* the task's address without its four low bits; 0 without a task */
    int64_t counted_from_ns, children_ns;
    struct ring *ring;
    PyObject *request; /* the Frame of the request around this span, or NULL */
    PyObject *attributes;
    PyObject *pair; /* the pair of events that times the span on a device, or NULL */
    PyObject *self; /* the Frame object of this frame; NULL for a function's frame */
    PyObject *published; /* its identity for contexts that were copied while it was open, or NULL */
    /* True if another call of its node is open around it on this thread: that call's time includes this one's. */
    char is_inner;
    unsigned char has_rows : 1; /* true if rows may name it as their parent that do not count against its self time */
    unsigned char has_more : 1; /* true if it got attributes or was published after its begin */
    char state;
    /* True if a step to a node that is not a child led here, in this chain or in the one that it continues. */
    char below_fold;
    uint32_t place; /* during a rename: its place among the open spans, counted from 1; else 0 */
} frame_t;

_Static_assert(REASON_COUNT <= REASONS_MOST, "a recording has room for all reasons");
_Static_assert(sizeof(frame_t) == 2 * LINE, "a frame is two cache lines");
_Static_assert(offsetof(frame_t, start_ns) - offsetof(frame_t, span_id) == offsetof(row_t, start_ns),
               "a row begins as a part of a frame");

typedef struct {
    PyObject_HEAD
    frame_t *frame; /* in memory that other processes can read */
    struct stretch *stretch; /* the generator that has this span, or NULL */
    /* The awaited object around it, which knows the suspended time, or NULL; borrowed if the span is its own. */
    struct stepped *stepped;
    int64_t waited_before_ns;  /* the suspended time of `stepped` when the span began */
    int64_t children_waited_ns; /* the part of `children_ns` that they waited */
} Frame;

/* The size of a type whose objects begin with a cache line. Python's allocator gives a block of whole lines an address
 * 48 bytes behind the begin of a line. The object begins 16 bytes into its block, behind the collector's header. */
#define SIZE_IN_LINES(type) ((sizeof(type) + 16 + LINE - 1) / LINE * LINE - 16)

/* An awaited object that we step, so that its suspensions are timed. They belong to the span of a coroutine, or to
 * another open span. */
typedef struct stepped {
    PyObject_HEAD
    struct core *core;
    PyObject *awaited; /* the iterator that is stepped */
    struct function *function; /* the function whose span begins with the first step, or NULL */
    PyObject *attributes;      /* the attributes of that span, or NULL */
    Frame *span; /* that span, while it is open */
    int64_t waited_ns;
    int64_t suspended_ns; /* the time of the suspension's begin, or 0 */
    uint64_t task; /* the task that steps it, or 0 if unknown */
    char has_begun, is_running;
    PyObject *weak_references;
} Stepped;

struct core;
struct published;
struct memory;

typedef struct current {
    PyObject_HEAD
    frame_t *top;
    /* The span that was open when the context was copied. Once it has ended, the nearest open span above it, or NULL.
     * See `is_outdated`. */
    struct published *base;
    uint64_t link_id; /* the id of the ended span in which the context was copied, or 0 */
    PyObject *linked; /* the attributes of roots in this context, with a link to that span */
    uint64_t task;
    char is_shared; /* true if several tasks run in the context, so that each span asks for the current task */
    char eager;   /* true if the context may be copied without a call of `publish` */
    char loop_reports; /* true if the loop reports its new tasks, so that only requests need to be published */
    PyObject *context; /* weak reference to its context */
    struct core *core; /* NULL once that core is freed */
    struct core *maker; /* the core that made it */
    struct current *previous, *next; /* neighbours in the core's list */
    uint64_t published_id; /* the span that copies of the context inherit; 0 for `base` */
    uint64_t link_root;
    PyObject *link_remote; /* the span of another tracer that its request continues, or NULL */
} Current;

/* The identity of a span for other contexts. A generator's span may be published by two contexts. Then it has two
 * identities: the second one has only an owner, and refers to the first one by `of`. */
typedef struct published {
    PyObject_HEAD
    PyObject *owner; /* the Current that published it */
    struct published *of;
    frame_t *frame; /* NULL once the span has ended */
    struct published *above; /* once the span has ended: the nearest open span above it, or NULL */
    uint64_t span_id, root_id;
    PyObject *request;
} Published;

typedef struct ring {
    PyObject_HEAD
    /* A call uses only the cache line up to `state`. */
    row_t *rows;
    uint32_t mask;
    /* Derived from `number`; only rings whose numbers differ by four billion share a tag; NO_TAG once the rows are
     * freed. */
    uint32_t tag;
    uint64_t head;
    Current *current;
    /* The version of the context of `current`. It changes with the thread's context. NO_VERSION without a `current`. */
    uint64_t context_version;
    PyThreadState *state; /* the state of its thread while `thread_cache` may refer to the ring, else `nobody` */
    uint64_t number; /* never reused; NO_NUMBER once its rows are freed */
    uint64_t capacity;
    uint64_t too_short; /* spans without a row, as they were too short */
    long thread_id;
    PyObject *name;
    char ended;
    book_t totals;
    uint64_t generation; /* the generation of the recording that it is in, or 0 */
    char label[LABEL_BYTES];
} Ring;

_Static_assert(offsetof(Ring, number) == LINE, "what a call needs of a ring is one cache line");

#define NO_NUMBER UINT64_MAX
#define NO_TAG UINT32_MAX
#define NO_VERSION UINT64_MAX /* a version that no thread's context has */

static PyThreadState nobody; /* a thread state without a context */

typedef struct {
    PyObject_HEAD
    Ring *ring;
} Mark;

struct stretch;
typedef struct scope Scope;

/* A conversion of the processor's time stamp counter to nanoseconds of the monotonic clock. */
typedef struct {
    int64_t base_ticks, base_ns;
    uint64_t rate; /* ns per tick, times 2^32 */
} ticks_t;

typedef struct {
    node_t *parent, *step;
} step_t;

/* The steps to a site's nodes that were used last, from two parents. */
typedef struct {
    step_t newest, before;
    PyObject *site; /* borrowed */
} path_t;

/* The cached site of a method's instance, or of a scope's name. It is valid while `version` equals that of the dict of
 * sites. A lookup takes one cache line instead of twelve. */
typedef struct cached {
    PyObject *instance; /* borrowed for an instance; a reference to a name */
    uint64_t version;
    path_t path; /* without a site, calls of the instance pass without a span */
    union {
        struct cached *before; /* in the entry after the last: the smaller table before this one */
        Scope *scope; /* for a name: the scope that is reused while no other code has it, or NULL */
    };
} cached_t;

_Static_assert(sizeof(cached_t) == LINE, "a cached site is one cache line");

/* The call tree. `overflow` counts the calls on new paths once it is full. */
typedef struct {
    node_t root, **nodes, *overflow;
    uint32_t node_count, node_slots;
    uint32_t edges; /* marked steps in the tables of nodes */
} tree_t;

typedef struct core {
    PyObject_HEAD
    /* These four fields are read as one word: 1 means on, without another feature. Code that changes one calls
     * `note_features`. */
    char on;
    char reads_ticks; /* true if the time stamp counter is the clock */
    char times_devices; /* true if `begin_device` is set */
    char unused;
    char watches_all; /* true if `begin_device` is called for every span, not only for sites that ask for it */
    uint64_t uid;
    /* Begins to time a span on a device; called with site, attributes and span id; returns a pair of events or None. */
    PyObject *begin_device;
    ticks_t ticks;
    Current *currents;
    struct stretch *stretches;
    PyObject *variable;
    PyObject *remote_parent;
    PyObject *remote_key;
    /* By module and class: an HTTP status, or the name of the exception's attribute with the status. */
    PyObject *answers;
    PyObject *task_readers; /* returns the two functions below; None until asyncio is imported */
    PyObject *running_loop, *task_of_loop; /* return the running loop, and a loop's current task; or NULL */
    /* Returns the attributes of a root whose context was copied in an ended span; called with span id, root id and
     * remote parent. */
    PyObject *link_of;
    PyObject *reports_tasks; /* returns true if the running loop reports its tasks */
    PyObject *thread_name;
    tree_t tree;
    uint32_t node_limit;
    /* Nodes that a reset freed, linked by `parent`. They are kept, because unknown pointers may still refer to them.
     * `spare` has those in `memory`. */
    node_t *spare, *private_spare;
    PyObject *rings; /* list of Ring */
    uint64_t row_budget;
    Ring *ended; /* the totals of freed rings */
    struct memory *memory; /* the memory that other processes can read, or NULL */
    counted_t *counted; /* part of `memory`, or `own_counted` */
    counted_t own_counted;
    PyObject *described_sites; /* the addresses of the sites whose facts are in `memory` */
    Scope *no_scope; /* what `scope` returns if there is no memory for a scope */
    PyObject *user_sites; /* sites of scopes of kind user, by name; for a muted site, a scope that is reused */
    PyObject *scope_type;
    PyObject *passes; /* the counter of each muted site */
} Core;

/* Counts the calls of a muted site. */
typedef struct {
    PyObject_HEAD
    Core *core;
    uint64_t calls;
    uint64_t cut; /* spans of generators that muting ended early */
} Pass;

typedef struct function {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Core *core;
    PyObject *wrapped;
    uint64_t uid; /* the core's uid when the paths were noted; it changes with a reset, which frees the nodes */
    path_t path; /* of its site, which the function owns; a call reads only the cache line up to the newest step */
    /* For a method whose instances have their own sites: the dict {identity: site or None}, and the function that
     * decides for a new instance. `evaluate` sets the evaluator of Python frames and returns the previous one. With it
     * we keep a compiler of the service from compiling `decide`. */
    PyObject *sites;
    cached_t *cached; /* cached sites by the instance's address, or NULL */
    uint32_t cached_slots; /* a power of two */
    char is_followed; /* true if changes of `sites` are noticed */
    char muted; /* true if calls pass without a span */
    char form; /* the form of its calls */
    Pass *pass; /* counts the calls that pass, or NULL */
    PyObject *decide, *evaluate;
    PyObject *works; /* returns the objects of a call's device work; called with its arguments; or NULL */
    /* Return attributes of the span; called with the arguments and with the result; or NULL. */
    PyObject *attributes, *results;
    PyObject *passes; /* returns True if a call passes without a span; called with its positional arguments; or NULL */
    PyObject *weak_references;
} Function;

_Static_assert(offsetof(Function, path.before) == LINE, "a call reads one cache line");

/* The bound `__enter__` or `__exit__` of a scope, as a member of the scope. Up to Python 3.13, making a bound method of
 * a C function costs more than the span. It owns a reference to the scope while it has references itself. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    size_t at; /* its offset in the scope */
} BoundMethod;

struct scope {
    PyObject_HEAD
    Core *core;
    path_t *path; /* the path of its site, if the scope has a cached name and no attributes; else `no_path` */
    Frame *frame;
    Frame *spare;           /* a Frame for the next span, or NULL */
    frame_t *spare_frame;   /* the frame of `spare`, or a freed frame: it is prefetched, never read */
    BoundMethod enter, exit;
    PyObject *site; /* NULL for a scope that begins no span; then `core` is NULL, too */
    PyObject *attributes;
};

_Static_assert(offsetof(struct scope, site) <= 2 * LINE, "a span needs two cache lines of its scope");

typedef struct stretch {
    PyObject_HEAD
    Core *core;
    PyObject *body; /* the replaced generator */
    PyObject *weak_references;
    struct stretch *previous, *next; /* neighbours in the core's list */
    char listed;
    char is_running;
    PyObject *site, *attributes;
    Frame *frame;
    /* The innermost frame of the suspended body; the chain from here to `frame` owns references to its frames. */
    frame_t *inner;
    Published *parent; /* the span around the first step, or NULL; later steps may be in other spans */
    char has_parent; /* true if `parent` has been set */
    char lost; /* true if the begin could not be recorded */
    int64_t active_ns, resumed_ns, suspended_ns;
    int64_t items, first_item_ns, last_item_ns, longest_gap_ns; /* the count and the times of its items */
    Stepped *stepped; /* the object that an async generator awaits, or NULL */
    int64_t waited_counted_ns; /* the part of its waits that already counts against the spans that resumed it */
} Stretch;

/* A function that is submitted to another thread. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Core *core;
    PyObject *function;
    Published *parent; /* the innermost span that was open at the submission */
    PyObject *site;    /* the site of the wait in the queue, or NULL */
    int64_t since_ns;
} Carried;

/* The awaitable of one step of an async generator. */
typedef struct {
    PyObject_HEAD
    Stretch *generator;
    PyObject *awaitable, *steps; /* the body's awaitable, and what steps it once it has begun */
    char closes;  /* true if the step ends the generator */
    char has_begun, is_ours; /* `is_ours`: the body runs in this step, inside the generator's span */
} AsyncStep;

static PyTypeObject FrameType, CurrentType, PublishedType, RingType, MarkType, CoreType, FunctionType_, ScopeType,
    SteppedType, CoroutineType, GeneratorType, AwaitableType, AsyncGeneratorType, AsyncStepType, StandInType,
    BoundMethodType, CarriedType, KeysType, PassType;

/* The forms of a function's calls. CALL and SCOPE: the call is the span, with SCOPE possibly of a request. SUBMIT and
 * START: the call submits a function to another thread. All others: the result has the span. */
enum { CALL, SCOPE, COROUTINE, GENERATOR, AWAITABLE, ASYNC_GENERATOR, SUBMIT, START };

#define SELDOM __attribute__((noinline, cold)) /* not inlined into each call */

static uint64_t last_uid, last_ring;
#if defined(__GLIBC__)
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec"))) /* saves a call, and three cache lines */
#else
#define THREAD_LOCAL _Thread_local
#endif
/* A thread's ring, the uid of its recorder, the lowest address of the thread's C stack, and the margin above it that
 * must stay free. */
typedef struct {
    uint64_t uid;
    Ring *ring;
    Stepped *stepping; /* the innermost awaited object that runs on this thread, or NULL */
    uintptr_t stack_end, stack_margin;
} thread_cache_t;

static THREAD_LOCAL thread_cache_t own_thread_cache __attribute__((aligned(LINE)));
/* The id of a thread state whose Mark was freed: what such a thread caches now is never freed. */
static THREAD_LOCAL uint64_t ending_state;
/* Free objects. Each has no references, is tracked by the collector, and is in one of three arrays. */
static Frame *free_frame_objects[OBJECTS_KEPT];
static Scope *free_scopes[OBJECTS_KEPT];
static Stepped *free_stepped[OBJECTS_KEPT];
static uint32_t free_frame_object_count, free_scope_count, free_stepped_count;
/* The number of Frame objects, the number with older frames outside of the memory, and the number of free objects to keep
 * without a check, which is 0 while there are older frames. */
static uint32_t frame_object_count, frame_objects_elsewhere, frame_objects_kept = OBJECTS_KEPT;
static path_t no_path;
/* All data of the process that spans read, in one cache line. Two constants are copied here, which the compiler would
 * otherwise read from another line. */
static struct {
    int (*read_clock)(clockid_t, struct timespec *);
    PyObject *none;
    PyTypeObject *free_scope_type; /* the type of `free_scopes` */
    frame_t *free_frames;
    uint64_t last_id; /* of the newest span */
    struct core *plain; /* the newest recorder that is on and has no other feature, or NULL */
    uint64_t plain_uid;
    ptrdiff_t thread_cache_offset; /* the offset of `own_thread_cache` from the begin of a thread's variables */
} hot __attribute__((aligned(LINE))) = {.read_clock = clock_gettime, .none = Py_None};

_Static_assert(sizeof hot == LINE, "what spans read of the process is one cache line");

#if defined(__SEG_FS) && defined(__GLIBC__)
#define OF_THREAD __seg_fs
static void find_thread_cache(void)
{
    char *thread;
    __asm__("mov %%fs:0, %0" : "=r"(thread));
    hot.thread_cache_offset = (char *)&own_thread_cache - thread;
}

static inline thread_cache_t OF_THREAD *thread_cache(void)
{
    return (thread_cache_t OF_THREAD *)hot.thread_cache_offset;
}
#else
#define OF_THREAD
static void find_thread_cache(void)
{
}

static inline thread_cache_t *thread_cache(void)
{
    return &own_thread_cache;
}
#endif

/* Cached sites of scopes, by the address of the name. `version` is the address of the entry's recorder, 0 if the entry
 * is unused. */
static cached_t scope_names[NAMES_CACHED] __attribute__((aligned(LINE)));

/* The references of an object are listed once, in `REFERENCES_type`. These are the actions for each of them. */
#define VISIT(field) Py_VISIT(self->field);
#define RELEASE(field) Py_XDECREF(self->field);
#define CLEAR(field) Py_CLEAR(self->field);
#define TRAVERSE(type)                                                                                                 \
    static int type##_traverse(type *self, visitproc visit, void *arg)                                                 \
    {                                                                                                                  \
        REFERENCES_##type(VISIT) return 0;                                                                             \
    }
#define TRAVERSE_AND_DEALLOC(type)                                                                                     \
    TRAVERSE(type)                                                                                                     \
    static void type##_dealloc(type *self)                                                                             \
    {                                                                                                                  \
        PyObject_GC_UnTrack(self);                                                                                     \
        REFERENCES_##type(RELEASE) PyObject_GC_Del(self);                                                              \
    }

/* The first fields of a type's definition, and an entry of a table of methods. */
#define TYPE(type, metatype, name, size, flags)                                                                        \
    PyVarObject_HEAD_INIT(metatype, 0)                                                                                 \
    .tp_name = name, .tp_basicsize = size, .tp_flags = Py_TPFLAGS_DEFAULT | (flags),                                   \
    .tp_dealloc = (destructor)type##_dealloc
#define RECORDER_TYPE(type, size, flags) TYPE(type, NULL, "instrument.native._recorder." #type, size, flags)
#define COLLECTED_TYPE(type, size, flags)                                                                              \
    RECORDER_TYPE(type, size, Py_TPFLAGS_HAVE_GC | (flags)), .tp_traverse = (traverseproc)type##_traverse
#define METHOD(type, name, flags, doc) {#name, (PyCFunction)(void (*)(void))type##_##name, flags, doc}

/* Insert an object at the head of a doubly linked list, or remove it. */
#define LINK(list, item)                                                                                               \
    do {                                                                                                               \
        if (((item)->next = (list)) != NULL)                                                                           \
            (item)->next->previous = (item);                                                                           \
        (list) = (item);                                                                                               \
    } while (0)
#define UNLINK(list, item)                                                                                             \
    do {                                                                                                               \
        *((item)->previous != NULL ? &(item)->previous->next : &(list)) = (item)->next;                                \
        if ((item)->next != NULL)                                                                                      \
            (item)->next->previous = (item)->previous;                                                                 \
        (item)->previous = (item)->next = NULL;                                                                        \
    } while (0)

/* Run a statement for each frame of an open span: in the chains of contexts, then in those of suspended generators. */
#define FOR_EACH_OPEN_FRAME(core, frame, statement)                                                                    \
    for (const Current *current = (core)->currents; current != NULL; current = current->next)                          \
        for (frame_t *frame = current->top; frame != NULL; frame = frame->above)                                       \
            statement;                                                                                                 \
    for (const Stretch *stretch = (core)->stretches; stretch != NULL; stretch = stretch->next)                         \
        for (frame_t *frame = stretch->inner; frame != NULL; frame = frame->above)                                     \
            statement;

/* Return the object at an offset in another object, as a new reference. Return None for NULL. */
static PyObject *object_at(PyObject *self, void *offset)
{
    PyObject *object = *(PyObject **)((char *)self + (size_t)offset);
    return Py_NewRef(object != NULL ? object : Py_None);
}

/* Texts that are made once. */
#define TEXTS(EACH)                                                                                            \
    EACH(bytes, "bytes") EACH(kind, "kind") EACH(request, "request") EACH(copy, "copy")                        \
    EACH(module_dunder, "__module__") EACH(status, "http.response.status_code")                                \
    EACH(request_size, "http.request.body.size") EACH(answer_size, "http.response.body.size")                  \
    EACH(status_code, "otel.status_code") EACH(outcome, "instrument.outcome") EACH(cancelled, "cancelled")     \
    EACH(closed_early, "closed early") EACH(stopped, "stopped") EACH(error_type, "error.type") EACH(ok, "OK")  \
    EACH(error, "ERROR") EACH(other, "_OTHER") EACH(annotate_checked, "_annotate_checked")                     \
    EACH(make_scope, "make_scope") EACH(min_ns, "min_ns") EACH(device, "device")             \
    EACH(pause, "pause") EACH(resume, "resume") EACH(items, "items") EACH(first_item, "first_item_ns")         \
    EACH(last_item, "last_item_ns") EACH(longest_gap, "longest_gap_ns") EACH(error_key, "error")               \
    EACH(fields, "fields") EACH(attributes, "attributes") EACH(key, "instrument.key") EACH(key_word, "key")  \
    EACH(batch_word, "batch") EACH(bind_innermost, "bind_innermost") EACH(batch_keys, "instrument.batch.keys") \
    EACH(batch_weights, "instrument.batch.weights")
#define DECLARE_TEXT(name, text) static PyObject *str_##name;
TEXTS(DECLARE_TEXT)
static PyTypeObject *cached_type; /* the type of `functools.lru_cache` objects */
static PyObject *name_of_type; /* the descriptor of `type.__name__` */
