/* The structures that the sources of the recorder share, and the state of the process. A part of `_recorder.c`. */

#define CLOSED 0
#define OPEN 1
#define MANUAL 2

#define NODE_LIMIT 16384
#define OVERFLOW_SITES 4096 /* with a node of their own below the overflow, after the node limit */
#define EDGE_LIMIT (8 * NODE_LIMIT) /* steps to nodes that are no descendants; further ones are searched each time */
#define SMALLEST_RING 64 /* rows */
#define LARGEST_RING (1u << 31)
#define ENDED_RINGS_KEPT 1000
#define FRAMES_KEPT 1024 /* of functions, while they are free */
#define OBJECTS_KEPT 256 /* Frame objects that are free, and scopes */
#define NAMES_AT_HAND 64 /* of scopes; a power of two */
#define KNOWN_AT_FIRST 16
#define KNOWN_LIMIT 4096 /* instances of a method's class */
#define DEEPEST_CHAIN 64 /* of contexts, each copied from the next */
#define ERROR_NAME_LIMIT 200 /* as in errors.py */
#define TRIES 4 /* attempts, as finalisers of the host's may undo our changes */
#define VALUE_LIMIT 256      /* characters of an attribute, as in spans.py */
#define ATTRIBUTE_LIMIT 128  /* of a span, as in spans.py */
#define FIRST_OF_SERVER 500 /* statuses of HTTP from here on are errors */
#define STACK_MARGIN (64 << 10)
#define LINE 64 /* bytes that the processor fetches at once */
#define BUCKETS_WAITING 7
#define HAS_MORE 8 /* as in rows.py */

/* Events that are counted in addition to spans. Counted in C, because a loss for lack of memory must need none. */
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

/* The bit of a span id that is set only for root requests: a root id shows if it is a request's. */
#define REQUEST_BIT 1

#define CHUNKS 60 /* of 64 histogram buckets: up to 2^63 ns, see histogram.bucket */

#if PY_VERSION_HEX < 0x030D0000
#define UNCHECKED_THREAD_STATE() _PyThreadState_UncheckedGet()
#else
#define UNCHECKED_THREAD_STATE() PyThreadState_GetUnchecked()
#endif

/* ------------------------------------------------------------------ data */

typedef struct node {
    PyObject *site;
    struct node *parent;
    uint32_t index;
    uint32_t children;
    uint32_t slots; /* a power of two, or 0 */
    unsigned char is_request : 1, is_copy : 1;
    char is_device; /* true if its site asks for device time */
    char may_recur;  /* true if a call of it may run inside another one */
    char is_known;   /* true if it is in the current tree: others are spare */
    struct node **table; /* by the site's address, linear probing; a step to a node that is no descendant is marked */
    int64_t min_ns; /* a shorter span without children and error gets no row */
    uint32_t ring_tag; /* of the ring with `totals`: that of the last thread here, or 0 */
    struct totals *totals;
} node_t;

_Static_assert(sizeof(node_t) == LINE, "a node is one cache line");

/* Counts of 64 bits and more. The upper part of most is 0: it is allocated once a lower part has wrapped. */
typedef struct {
    uint16_t low[64];
    uint64_t *high;
} chunk_t;

#define LOW_BITS 16

/* The first cache line has all fields that a call changes. In a service that computes between two spans, nearly each
 * line that a span touches comes from memory, at 100 ns, while all the rest takes 50 ns. So the buckets of the last
 * calls wait there, too, until there are enough of them to fetch their counters at once. */
typedef struct totals {
    uint64_t calls;
    int64_t total_ns, self_ns, min_ns, max_ns, first_ns;
    uint16_t waiting[BUCKETS_WAITING], waiting_room; /* filled from the end; room: how many more fit */
    uint64_t errors, moved_bytes;
    int64_t device_ns, beyond_ns; /* beyond: the elapsed time less the total */
    int64_t first_total_ns;       /* of the call that began first */
    uint64_t steps;               /* of generators, also of open ones */
    int64_t waiting_ns;           /* of `self_ns`: suspended by an await */
    chunk_t *chunks[CHUNKS];
    uint64_t ring_number; /* of their ring, by which readers outside find them */
    uint32_t node;
    uint64_t cancelled; /* requests cancelled without an error */
} totals_t;

/* One cache line. `rare` is an odd number for an active time alone, see `number_as_rare`. With `HAS_MORE` the other
 * rare facts are in the details of the recording. */
typedef struct {
    uint64_t span_id, parent_id, root_id;
    int64_t start_ns, end_ns;
    int64_t children_ns; /* less the span's waits: the active time less this is its self time with waits */
    uint64_t rare;
    uint32_t node;
    uint32_t task; /* the lower half of the task's number */
} row_t;

_Static_assert(sizeof(row_t) == LINE, "a row is one cache line");
_Static_assert(offsetof(totals_t, errors) == LINE, "what a call adds to totals is one cache line");

/* Totals by node index, in pages: a thread takes memory only for the call paths that it uses. */
typedef struct {
    totals_t ***pages;
    uint32_t slots;
} book_t;

#define PAGE 64

struct ring;

typedef struct frame {
    struct frame *above;
    node_t *node;
    uint64_t span_id, parent_id, root_id; /* these and the begin in the order of a row */
    int64_t start_ns;
    uint64_t task; /* its number: its address without the four low bits, or 0 */
    int64_t counted_from_ns, children_ns;
    struct ring *ring;
    PyObject *request; /* the Frame of the request that this is in, or NULL */
    PyObject *attributes;
    PyObject *pair; /* the pair of events that times the span on a device, or NULL */
    PyObject *self; /* the Frame object of this frame; NULL for a function's */
    PyObject *published; /* its identity for contexts that were copied under it, or NULL */
    char is_inner;   /* true if a call of its node is open around it on this thread, whose time includes its time */
    unsigned char has_rows : 1; /* true if a row may name it as its parent without counting time against it */
    unsigned char has_more : 1; /* whether it has got attributes or been published since it began */
    char state;
    char below_fold; /* true if a step to a node that is no descendant led here, on this or a continued chain */
    uint32_t is_extra : 1; /* true if it is freed when its call ends, and not reused */
    uint32_t place : 31;   /* while spans are renamed: its number among the open ones, from 1 on, or 0 */
} frame_t;

_Static_assert(REASON_COUNT <= REASONS_MOST, "a recording has room for all reasons");
_Static_assert(sizeof(frame_t) == 2 * LINE, "a frame is two cache lines");
_Static_assert(offsetof(frame_t, start_ns) - offsetof(frame_t, span_id) == offsetof(row_t, start_ns),
               "a row begins as a part of a frame");

typedef struct {
    PyObject_HEAD
    frame_t *frame; /* in memory that other processes can read */
    struct stretch *stretch; /* the generator with this span, or NULL */
    struct stepped *stepped; /* the awaited object around it, or NULL: it has the suspended time. Borrowed by its own */
    int64_t waited_before_ns;  /* the suspended time when the span began */
    int64_t children_waited_ns; /* of `children_ns` */
} Frame;

/* The size of a type whose objects begin with a cache line: Python's allocator gives blocks of whole lines addresses of
 * 48 bytes behind one, and the object of a type for the collector begins 16 bytes into its block. */
#define SIZE_IN_LINES(type) ((sizeof(type) + 16 + LINE - 1) / LINE * LINE - 16)

/* An awaited object that we step, and whose suspensions we time: for its own span, as a coroutine, or for another
 * span. */
typedef struct stepped {
    PyObject_HEAD
    struct core *core;
    PyObject *awaited; /* an iterator */
    struct function *function; /* its span begins with the first step; or NULL */
    PyObject *attributes;      /* of that span, or NULL */
    Frame *own; /* that span, while it is open */
    int64_t waited_ns;
    int64_t suspended_ns; /* the begin of the suspension, or 0 */
    uint64_t task; /* that steps it, or 0 if unknown */
    char has_begun, is_running;
    PyObject *weak_references;
} Stepped;

struct core;
struct published;
struct memory;

typedef struct current {
    PyObject_HEAD
    frame_t *top;
    /* The span under which the context was copied; once it has ended, the nearest open span above it, or NULL. See
     * `is_outdated`. */
    struct published *base;
    uint64_t link_id; /* the ended span from which the context came, or 0 */
    PyObject *linked; /* the attributes of roots here with that link */
    uint64_t task;
    char is_shared; /* true if several tasks run here: each span looks for the current one */
    char eager;   /* true if contexts may be copied without a report */
    char is_told; /* true if the loop reports its tasks, so that only requests must be published */
    PyObject *context; /* weak reference to its context */
    struct core *core; /* NULL once the core is gone */
    struct core *maker; /* the core that was */
    struct current *previous, *next; /* list of all of a core */
    uint64_t published_id; /* the span that a copy of the context finds, 0 for `base` */
    uint64_t link_root;
    PyObject *link_remote; /* its request's span of another tracer, or NULL */
} Current;

/* The identity of a span for other contexts. A span that two contexts publish (a generator's) has two. The second one
 * has only its owner, and the first one as `of`. */
typedef struct published {
    PyObject_HEAD
    PyObject *owner; /* the Current that published it */
    struct published *of;
    frame_t *frame; /* NULL once the span has ended */
    struct published *above; /* after its end: the nearest span above it that was open, or NULL */
    uint64_t span_id, root_id;
    PyObject *request;
} Published;

typedef struct ring {
    PyObject_HEAD
    /* A call needs only the line up to `state`. */
    row_t *rows;
    uint32_t mask;
    uint32_t tag; /* what is left of `number`: the same for two of four billion rings; NO_TAG once its rows are freed */
    uint64_t head;
    Current *current;
    /* The version of the context of `current`, which changes with the thread's context; NO_VERSION without a `current`. */
    uint64_t context_version;
    PyThreadState *state; /* of its thread, while `at_hand` may refer to the ring; else `nobody` */
    uint64_t number; /* never reused; NO_NUMBER once its rows are freed */
    uint64_t capacity;
    uint64_t too_short; /* spans that were counted and got no row */
    long thread_id;
    PyObject *name;
    char ended;
    book_t totals;
    uint64_t generation; /* of its recording, or 0 */
    char label[LABEL_BYTES];
} Ring;

_Static_assert(offsetof(Ring, number) == LINE, "what a call needs of a ring is one cache line");

#define NO_NUMBER UINT64_MAX
#define NO_TAG UINT32_MAX
#define NO_VERSION UINT64_MAX /* which no thread's context has */

static PyThreadState nobody; /* in no context */

typedef struct {
    PyObject_HEAD
    Ring *ring;
} Mark;

struct stretch;
typedef struct scope Scope;

/* The processor's time stamp counter as nanoseconds of the monotonic clock. */
typedef struct {
    int64_t base_ticks, base_ns;
    uint64_t rate; /* ns a tick, times 2^32 */
} ticks_t;

typedef struct {
    node_t *parent, *step;
} step_t;

/* The last known steps to a site's nodes, from two parents. */
typedef struct {
    step_t newest, before;
    PyObject *site; /* borrowed */
} path_t;

/* The cached site of a method's instance, or of a scope's name, valid while `version` is its dict's: one cache line
 * instead of a dozen. */
typedef struct known {
    PyObject *instance; /* borrowed; a name is not */
    uint64_t version;
    path_t path; /* none: calls of the instance pass */
    union {
        struct known *before; /* after the last: the smaller table before this one */
        Scope *scope; /* of a name: its scope, handed out again once it is unused; or NULL */
    };
} known_t;

_Static_assert(sizeof(known_t) == LINE, "what is known of an instance is one cache line");

typedef struct core {
    PyObject_HEAD
    /* One word: 1 means on and no further feature. Who changes one calls `note_features`. */
    char on;
    char reads_ticks; /* true if the time stamp counter is the clock */
    char times_devices; /* true if there is a `begin_device` */
    char unused;
    char watches_all; /* true if `begin_device` is called for every span, not only for sites that ask for it */
    uint64_t uid;
    PyObject *begin_device; /* begins to time a span on a device: (site, attributes, span id) -> pair or None */
    ticks_t ticks;
    Current *currents;
    struct stretch *stretches;
    PyObject *variable;
    PyObject *remote_parent;
    PyObject *remote_key;
    PyObject *answers; /* exceptions that are a status of HTTP: by module and class the status, or its attribute */
    PyObject *task_readers; /* returns the two below, or None until asyncio is imported */
    PyObject *running_loop, *task_of_loop; /* functions for the running loop, and for a loop's current task; or NULL */
    PyObject *link_of; /* attributes of a root that came from an ended span: (span id, root id, its remote parent) */
    PyObject *tells_of_tasks; /* returns true if the running loop reports its tasks */
    PyObject *thread_name;
    node_t root;
    node_t **nodes;
    uint32_t node_count, node_slots, node_limit;
    node_t *overflow;
    /* Freed by a reset, listed by `parent`; kept, because unknown pointers may still refer to them. First those that
     * can be read from outside. */
    node_t *spare, *private_spare;
    uint32_t edges; /* marked entries in the tables of nodes */
    PyObject *rings; /* list of Ring */
    uint64_t row_budget;
    Ring *ended; /* its totals are those of freed rings */
    struct memory *memory; /* the memory that other processes can read, or NULL */
    counted_t *counted; /* in `memory`, or `own_counted` */
    counted_t own_counted;
    PyObject *told_sites; /* of the sites that the memory describes, by address */
    PyObject *counts; /* counts of Python code, by text */
    Scope *no_scope; /* returned by `scope` without memory for another one */
    PyObject *user_sites; /* sites of scopes of kind user, by name; for a muted one a scope that is reused */
    PyObject *scope_type;
    PyObject *passes; /* the counter of each muted site */
} Core;

/* Counts the calls of a muted site. */
typedef struct {
    PyObject_HEAD
    Core *core;
    uint64_t calls;
    uint64_t cut; /* spans of generators that were cut */
} Pass;

typedef struct function {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Core *core;
    PyObject *wrapped;
    uint64_t uid; /* of the core when its paths were found: a reset frees the nodes */
    path_t path; /* of its site, which it owns; a call reads only the line up to the newest step */
    /* For a method whose instances have sites of their own: {identity: site or None}, and the function that decides for
     * a new instance. `evaluate` sets the evaluator of Python's frames and returns the earlier one: a compiler of the
     * host's must not compile `decide`. */
    PyObject *sites;
    known_t *known; /* by the instance's address, or NULL */
    uint32_t known_slots; /* a power of two */
    char is_followed; /* true if `sites` reports its changes */
    char muted; /* true if calls pass without a span */
    char form; /* the form of its calls */
    Pass *pass; /* counts them, or NULL */
    PyObject *decide, *evaluate;
    PyObject *works; /* returns the objects of a call's device work from its arguments, or NULL */
    PyObject *attributes, *results; /* return the attributes of its span from its arguments and its result; or NULL */
    PyObject *passes; /* returns true if a call passes without a span, from its positional arguments; or NULL */
    PyObject *weak_references;
} Function;

_Static_assert(offsetof(Function, path.before) == LINE, "a call reads one cache line");

/* The bound `__enter__` or `__exit__` of a scope, a member of it: up to Python 3.13 the bound methods of C functions
 * cost more than the span. While referenced, it references the scope. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    size_t at; /* in its scope */
} BoundMethod;

struct scope {
    PyObject_HEAD
    Core *core;
    path_t *path; /* of its site, if it has a known name and no attributes; else `no_path` */
    Frame *frame;
    Frame *spare;           /* for the next span, or NULL */
    frame_t *spare_frame;   /* its frame, or a freed one: prefetched but never read */
    BoundMethod enter, exit;
    PyObject *site; /* NULL, as is core: it begins no span */
    PyObject *attributes;
};

_Static_assert(offsetof(struct scope, site) <= 2 * LINE, "a span needs two cache lines of its scope");

typedef struct stretch {
    PyObject_HEAD
    Core *core;
    PyObject *body; /* the replaced generator */
    PyObject *weak_references;
    struct stretch *previous, *next; /* all of the core's */
    char listed;
    char is_running;
    PyObject *site, *attributes;
    Frame *frame;
    frame_t *inner; /* innermost frame of the suspended body; the chain from here to `frame` owns its references */
    Published *parent; /* of the first step, as later steps may have another; or NULL */
    char has_parent; /* whether that is known */
    char lost; /* its begin could not be recorded */
    int64_t active_ns, resumed_ns, suspended_ns;
    int64_t items, first_item_ns, last_item_ns, longest_gap_ns; /* the count and the times of its items */
    Stepped *stepped; /* the object that an async generator awaits, or NULL */
    int64_t waited_told_ns; /* of its waits: already counted against its resumers */
} Stretch;

/* A function that is submitted to another thread. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Core *core;
    PyObject *function;
    Published *parent; /* the innermost span that was open */
    PyObject *site;    /* of the wait, or NULL */
    int64_t since_ns;
} Carried;

/* The awaitable of one step of an async generator. */
typedef struct {
    PyObject_HEAD
    Stretch *generator;
    PyObject *awaitable, *steps; /* the body's awaitable, and its stepper once it has begun */
    char closes;  /* true if it ends the generator */
    char has_begun, is_ours; /* is_ours: the body runs in this step, inside its span */
} AsyncStep;

static PyTypeObject FrameType, CurrentType, PublishedType, RingType, MarkType, CoreType, FunctionType_, ScopeType,
    SteppedType, CoroutineType, GeneratorType, AwaitableType, AsyncGeneratorType, AsyncStepType, StandInType;

/* The forms of a function's calls: a span (with SCOPE perhaps of a request), a call whose result has the span, or a
 * call that submits a function to another thread. */
enum { CALL, SCOPE, COROUTINE, GENERATOR, AWAITABLE, ASYNC_GENERATOR, SUBMIT, START };

#define SELDOM __attribute__((noinline, cold)) /* not inlined into each call */

static uint64_t last_uid, last_ring;
#if defined(__GLIBC__)
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec"))) /* saves a call and three lines */
#else
#define THREAD_LOCAL _Thread_local
#endif
/* The ring of this thread, the uid of its recorder, and the lowest address of its C stack, with a margin that calls leave. */
typedef struct {
    uint64_t uid;
    Ring *ring;
    Stepped *stepping; /* the innermost that runs on this thread, or NULL */
    uintptr_t stack_end, stack_margin;
} at_hand_t;

static THREAD_LOCAL at_hand_t own_at_hand __attribute__((aligned(LINE)));
static THREAD_LOCAL uint64_t ending_state; /* the thread state that lost its Mark: what it caches now is never freed */
static uint32_t frame_count;
/* Free objects. Each has no references, is tracked by the collector, and is referenced from here. */
static Frame *free_frame_objects[OBJECTS_KEPT];
static Scope *free_scopes[OBJECTS_KEPT];
static Stepped *free_stepped[OBJECTS_KEPT];
static uint32_t free_frame_object_count, free_scope_count, free_stepped_count;
/* The number of Frame objects; of those with frames outside of the memory, as they are older; and of free ones that are
 * kept unchecked: 0 while there are such older ones. */
static uint32_t frame_object_count, frame_objects_elsewhere, frame_objects_kept = OBJECTS_KEPT;
static path_t no_path;
/* What spans read of the process, in one line: also what the compiler would take from another line of the linker's. */
static struct {
    int (*read_clock)(clockid_t, struct timespec *);
    PyObject *none;
    PyTypeObject *free_scope_type; /* of the free scopes */
    frame_t *free_frames;
    uint64_t last_id; /* of the newest span */
    struct core *plain; /* the recorder that is on and has no further feature, the last of several; or NULL */
    uint64_t plain_uid;
    ptrdiff_t at_hand_offset; /* of `own_at_hand` from where a thread's own variables begin */
} hot __attribute__((aligned(LINE))) = {.read_clock = clock_gettime, .none = Py_None};

_Static_assert(sizeof hot == LINE, "what spans read of the process is one cache line");

#if defined(__SEG_FS) && defined(__GLIBC__)
#define OF_THREAD __seg_fs
static void find_own_variables(void)
{
    char *thread;
    __asm__("mov %%fs:0, %0" : "=r"(thread));
    hot.at_hand_offset = (char *)&own_at_hand - thread;
}

static inline at_hand_t OF_THREAD *at_hand(void)
{
    return (at_hand_t OF_THREAD *)hot.at_hand_offset;
}
#else
#define OF_THREAD
static void find_own_variables(void)
{
}

static inline at_hand_t *at_hand(void)
{
    return &own_at_hand;
}
#endif

/* Sites of scopes by the address of the name. `version` identifies an entry's recorder; 0 if unused. */
static known_t names_at_hand[NAMES_AT_HAND] __attribute__((aligned(LINE)));
/* The actions for each reference of an object, so that the references are listed once. */
#define VISIT(field) Py_VISIT(self->field);
#define LET_GO(field) Py_XDECREF(self->field);
#define CLEAR(field) Py_CLEAR(self->field);

/* The texts that are made once. */
#define TEXTS(EACH)                                                                                            \
    EACH(bytes, "bytes") EACH(kind, "kind") EACH(request, "request") EACH(copy, "copy")                        \
    EACH(module_dunder, "__module__") EACH(status, "http.response.status_code")                                \
    EACH(request_size, "http.request.body.size") EACH(answer_size, "http.response.body.size")                  \
    EACH(status_code, "otel.status_code") EACH(outcome, "instrument.outcome") EACH(cancelled, "cancelled")     \
    EACH(closed_early, "closed early") EACH(stopped, "stopped") EACH(error_type, "error.type") EACH(ok, "OK")  \
    EACH(error, "ERROR") EACH(other, "_OTHER") EACH(annotate_checked, "_annotate_checked")                     \
    EACH(make_scope, "make_scope") EACH(min_ns, "min_ns") EACH(device, "device") EACH(end, "end")              \
    EACH(pause, "pause") EACH(resume, "resume") EACH(items, "items") EACH(first_item, "first_item_ns")         \
    EACH(last_item, "last_item_ns") EACH(longest_gap, "longest_gap_ns") EACH(error_key, "error")               \
    EACH(fact_names, "told") EACH(attributes, "attributes") EACH(key, "instrument.key") EACH(key_word, "key")  \
    EACH(batch_word, "batch") EACH(bind_innermost, "bind_innermost") EACH(batch_keys, "instrument.batch.keys") \
    EACH(batch_weights, "instrument.batch.weights")
#define DECLARE_TEXT(name, text) static PyObject *str_##name;
TEXTS(DECLARE_TEXT)
static PyTypeObject *cached_type; /* the type of `functools.lru_cache` objects */
static PyObject *name_of_type; /* the descriptor of `type.__name__` */
