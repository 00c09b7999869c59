/* What the sources of the recorder share: structures, and what there is once in a process. A part of `_recorder.c`. */

#define CLOSED 0
#define OPEN 1
#define MANUAL 2

#define NODE_LIMIT 16384
#define OVERFLOW_SITES 4096 /* that have a line of their own below that of what came after the node limit */
#define EDGE_LIMIT (8 * NODE_LIMIT) /* steps to nodes that are not below; those beyond are looked for each time */
#define SMALLEST_RING 64
#define ENDED_RINGS_KEPT 1000
#define FRAMES_KEPT 1024 /* of functions, however many are open at once */
#define OBJECTS_KEPT 256 /* Frame objects that are free, and scopes */
#define NAMES_AT_HAND 64 /* of scopes; a power of two */
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
#define HAS_MORE 8 /* as in rows.py */

/* Events that are counted in addition to spans. In C, because what is lost for want of memory cannot wait for some. */
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

/* Set in the id of a request that is a root, and in no other: a root id says whether it is a request's. */
#define REQUEST_BIT 1

#define CHUNKS 60 /* of 64 histogram buckets: up to 2^63 ns, see histogram.bucket */

#if PY_VERSION_HEX < 0x030D0000
#define UNCHECKED_THREAD_STATE() _PyThreadState_UncheckedGet()
#else
#define UNCHECKED_THREAD_STATE() PyThreadState_GetUnchecked()
#endif

static inline int64_t read_monotonic_into(struct timespec *now)
{
    clock_gettime(CLOCK_MONOTONIC, now);
    return (int64_t)now->tv_sec * 1000000000 + now->tv_nsec;
}

static inline int64_t read_monotonic(void)
{
    struct timespec now;
    return read_monotonic_into(&now);
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
    char is_known;   /* whether it is of the tree of now: others are spare */
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

/* The first cache line has what each call changes. In a service that computes between two spans, nearly every line
 * that a span touches comes from memory, at 100 ns, against 50 ns for all the rest: so the buckets of the last calls
 * wait there, too, until there are enough of them to fetch their counters at once. */
typedef struct totals {
    uint64_t calls;
    int64_t total_ns, self_ns, min_ns, max_ns, first_ns;
    uint16_t waiting[BUCKETS_WAITING], waiting_room; /* filled from the end; room: how many more fit */
    uint64_t errors, moved_bytes;
    int64_t device_ns, beyond_ns; /* beyond: by what the elapsed time exceeds the total */
    int64_t first_total_ns;       /* of the call that began first */
    uint64_t steps;               /* of generators, also of those that go on */
    int64_t waiting_ns;           /* of `self_ns`: while what was awaited suspended them */
    chunk_t *chunks[CHUNKS];
    uint64_t ring_number; /* of the ring that has them: who reads from outside finds them by this */
    uint32_t node;
    uint64_t cancelled; /* requests that were broken off, and have no error */
} totals_t;

/* One cache line. Of what few spans have the active time alone is an odd number: see `number_as_rare`. All else is in the
 * details of the recording, which is so of a row with `HAS_MORE`. */
typedef struct {
    uint64_t span_id, parent_id, root_id;
    int64_t start_ns, end_ns;
    int64_t children_ns; /* less what the span waited: the active time less this is its own, in which it waits, too */
    uint64_t rare;
    uint32_t node;
    uint32_t task; /* the lower half of the task's number */
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
    uint64_t span_id, parent_id, root_id; /* these and the begin in the order of a row */
    int64_t start_ns;
    uint64_t task; /* its number: its address without the four low bits, or 0 */
    int64_t counted_from_ns, children_ns;
    struct ring *ring;
    PyObject *request; /* the Frame of the request that this is in, or NULL */
    PyObject *attributes;
    PyObject *pair; /* what times the span on a device, or NULL */
    PyObject *self; /* the Frame object that holds this frame; NULL for a function's */
    PyObject *published; /* what contexts that were copied under it know it by, or NULL */
    char is_inner;   /* whether a call of its node is open around it on this thread: the time of that holds its time */
    unsigned char has_rows : 1; /* whether what counts no time against it may name it as its parent */
    unsigned char has_more : 1; /* whether it has got attributes or been published since it began */
    char state;
    char below_fold; /* whether a step to a node that is not below led here, on this chain or one that it continues */
    uint32_t is_extra : 1; /* whether it is given up when its call ends, and not kept for another one */
    uint32_t place : 31;   /* while spans are renamed: its number among those that are open, from 1 on, or 0 */
} frame_t;

_Static_assert(REASON_COUNT <= REASONS_MOST, "a recording has room for all reasons");
_Static_assert(sizeof(frame_t) == 2 * LINE, "a frame is two cache lines");
_Static_assert(offsetof(frame_t, start_ns) - offsetof(frame_t, span_id) == offsetof(row_t, start_ns),
               "a row begins as a part of a frame");

typedef struct {
    PyObject_HEAD
    frame_t *frame; /* its own, where others can read it */
    struct stretch *stretch; /* whose span it is, or NULL */
    struct stepped *stepped; /* what is awaited around it, or NULL: has the time suspended. Borrowed by its own */
    int64_t waited_before_ns;  /* how long that had been suspended when the span began */
    int64_t children_waited_ns; /* of `children_ns` */
} Frame;

/* What a coroutine awaits, step by step: knows how long it was suspended. As the span of the coroutine that it is, or for
 * the span of somebody else. */
typedef struct stepped {
    PyObject_HEAD
    struct core *core;
    PyObject *awaited; /* an iterator */
    struct function *function; /* whose span begins with the first step; or NULL */
    PyObject *attributes;      /* of that span, or NULL */
    Frame *own; /* that span, while it is open */
    int64_t waited_ns;
    int64_t suspended_ns; /* since when it is, or 0 */
    uint64_t task; /* that steps it, or 0 where that is not known */
    char has_begun, is_running;
    PyObject *weak_references;
} Stepped;

struct core;
struct published;
struct memory;

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
    char is_told; /* whether the loop reports its tasks, so that only requests are published all the same */
    PyObject *context; /* weak reference to the context that this belongs to */
    struct core *core; /* NULL once the core is gone */
    struct core *maker; /* the core that was */
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
    uint64_t number; /* never given twice; NO_NUMBER once its rows are given up */
    Current *current;
    /* The version of the context that `current` belongs to, which each change of the thread's context makes another;
     * NO_VERSION where there is no `current`. What the end of a call needs is one line up to here. */
    uint64_t context_version;
    PyThreadState *state; /* of its thread, as long as `at_hand` may name it; `nobody` before and after */
    uintptr_t stack_end, stack_margin;
    uint64_t capacity;
    uint64_t too_short; /* spans that were counted and got no row */
    long thread_id;
    PyObject *name;
    char ended;
    book_t totals;
    uint64_t generation; /* of the recording that it counts in, or 0 */
    char label[LABEL_BYTES];
} Ring;

#define NO_NUMBER UINT64_MAX
#define NO_VERSION UINT64_MAX /* that no thread's context has */

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
    int64_t first_ticks, first_ns; /* the pair that the calibration began with */
} ticks_t;

/* Where a site was met last: the steps to its nodes from two parents. */
typedef struct {
    PyObject *site; /* borrowed */
    node_t *parents[2], *steps[2];
} path_t;

/* The site of a method's instance, or of a scope's name, as long as `version` is that of the dict that has it: one cache
 * line instead of a dozen. */
typedef struct known {
    PyObject *instance; /* borrowed; a name is not */
    uint64_t version;
    path_t path; /* without a site: the instance passes */
    union {
        struct known *before; /* after the last: the smaller table before this one */
        Scope *scope; /* of a name: what is handed out for it, again as soon as nobody has it; or NULL */
    };
} known_t;

_Static_assert(sizeof(known_t) == LINE, "what is known of an instance is one cache line");

typedef struct core {
    PyObject_HEAD
    /* One word, for a call that asks whether it is 1: on, and nothing else. */
    char on;
    char reads_ticks; /* whether the time stamp counter is the clock */
    char times_devices; /* whether there is a `begin_device` */
    char unused;
    char watches_all; /* whether `begin_device` is asked for every span, and not for those whose sites ask for it */
    uint64_t uid;
    uint64_t last_id;
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
    /* Given up by a reset, each by its `parent`; kept, for what nobody finds may still point there. First those that can
     * be read from outside. */
    node_t *spare, *private_spare;
    uint32_t edges; /* marked entries in the tables of nodes */
    PyObject *rings; /* list of Ring */
    uint64_t row_budget;
    Ring *ended; /* its totals are those of the rings that were given up */
    struct memory *memory; /* where others can read what is recorded, or NULL */
    counted_t *counted; /* there, or `own_counted` */
    counted_t own_counted;
    PyObject *told_sites; /* of which the memory says what they are, by their addresses */
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

typedef struct function {
    PyObject_HEAD
    /* What each call reads is one line or two up to `uid`. */
    vectorcallfunc vectorcall;
    Core *core;
    PyObject *wrapped;
    path_t path; /* of its site */
    uint64_t uid; /* of the core when its paths were met: a reset gives the nodes up */
    /* Of a method whose instances have sites of their own: {identity: site or None}, what finds that of an instance
     * which is not there yet. `evaluate` sets what evaluates Python's frames and returns what did: a compiler of the
     * host's must not take `decide` for its own. */
    PyObject *sites;
    known_t *known; /* by the instance's address, or NULL */
    uint32_t known_slots; /* a power of two */
    char is_followed; /* whether `sites` reports its changes */
    char muted; /* whether calls pass without a span */
    char form; /* what its calls are */
    Pass *pass; /* what counts them, or NULL */
    PyObject *site, *decide, *evaluate;
    PyObject *works; /* returns for the device timer by a call's arguments what the call works on, or NULL */
    PyObject *attributes, *results; /* return by its arguments and its result the attributes of its span; or NULL */
    PyObject *passes; /* says by its positional arguments whether a call passes without a span, or NULL */
    PyObject *weak_references;
} Function;

/* `__enter__` or `__exit__` of a scope that is a part of it, and that a `with` binds: up to Python 3.13 the bound methods
 * of C functions cost more than the span. It holds the scope while somebody holds it. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
} BoundMethod;

struct scope {
    PyObject_HEAD
    Core *core;
    path_t *path; /* of its site, where it is that of a name that is known, and has no attributes; else `no_path` */
    Frame *frame;
    Frame *spare;           /* for the next span, or NULL */
    frame_t *spare_frame;   /* that one's, or another that may be gone: asked of memory and not looked at */
    BoundMethod enter, exit;
    PyObject *site; /* NULL, as is core: begins nothing */
    PyObject *attributes;
};

typedef struct stretch {
    PyObject_HEAD
    Core *core;
    PyObject *body; /* the generator that it replaces */
    PyObject *weak_references;
    struct stretch *previous, *next; /* all of the core's */
    char listed;
    char is_running;
    PyObject *site, *attributes;
    Frame *frame;
    frame_t *inner; /* innermost frame of the body while it is suspended; the chain from here to `frame` owns itself */
    Published *parent; /* of the first step: its later steps may have another; NULL without one */
    char has_parent; /* whether that is known */
    char lost; /* its begin could not be recorded */
    int64_t active_ns, resumed_ns, suspended_ns;
    int64_t items, first_item_ns, last_item_ns, longest_gap_ns; /* what it has yielded, and when */
    Stepped *stepped; /* what an async generator awaits, or NULL */
    int64_t waited_told_ns; /* of what that waited: counted against who resumed it */
} Stretch;

/* What is awaited for one step of an async generator. */
typedef struct {
    PyObject_HEAD
    Stretch *generator;
    PyObject *awaitable, *steps; /* what the body gives for it, and what steps that once it has begun */
    char closes;  /* whether the generator ends by it */
    char has_begun, is_ours; /* is_ours: the body is in this step, inside its span */
} AsyncStep;

static PyTypeObject FrameType, CurrentType, PublishedType, RingType, MarkType, CoreType, FunctionType_, ScopeType,
    SteppedType, CoroutineType, GeneratorType, AwaitableType, AsyncGeneratorType, AsyncStepType, StandInType;

/* What the calls of a function are: spans of their own (as a scope is where one may be a request's), what gives something
 * that is one, or what hands a function over to another thread. */
enum { CALL, SCOPE, COROUTINE, GENERATOR, AWAITABLE, ASYNC_GENERATOR, SUBMIT, START };

#define SELDOM __attribute__((noinline, cold)) /* kept out of what each call runs */

static uint64_t last_uid, last_ring;
#if defined(__GLIBC__)
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec"))) /* a call less, and three lines */
#else
#define THREAD_LOCAL _Thread_local
#endif
/* The ring of this thread, and the uid of the recorder that it is of. */
static THREAD_LOCAL struct {
    uint64_t uid;
    Ring *ring;
    Stepped *stepping; /* the innermost that runs on this thread, or NULL */
} at_hand;
static THREAD_LOCAL uint64_t ending_state; /* the thread state that lost its Mark: what it keeps now is never freed */
static frame_t *free_frames;
static uint32_t frame_count;
/* Objects that are free. Each holds nothing, but is known to the collector, with the reference that is here. */
static Frame *free_frame_objects[OBJECTS_KEPT];
static Scope *free_scopes[OBJECTS_KEPT];
static Stepped *free_stepped[OBJECTS_KEPT];
static uint32_t free_frame_object_count, free_scope_count, free_stepped_count;
/* How many Frame objects there are; of these, whose frames lie where others do not look, for they are older than the memory;
 * and how many are kept without a look at that: none as long as there are such. */
static uint32_t frame_object_count, frame_objects_elsewhere, frame_objects_kept = OBJECTS_KEPT;
static PyTypeObject *free_scope_type; /* that they are of */
static path_t no_path;
/* Sites of scopes by the address of the name. The recorder that an entry is of is its `version`; 0 where it is out of use. */
static known_t names_at_hand[NAMES_AT_HAND] __attribute__((aligned(LINE)));
/* What is done to each thing that an object holds, where a list of them is written once. */
#define VISIT(field) Py_VISIT(self->field);
#define LET_GO(field) Py_XDECREF(self->field);
#define CLEAR(field) Py_CLEAR(self->field);

static PyObject *str_bytes, *str_kind, *str_request, *str_copy, *str_module_dunder, *str_status, *str_request_size,
    *str_answer_size,
    *str_status_code, *str_error_type, *str_ok, *str_error, *str_other, *str_annotate_checked, *str_make_scope,
    *str_min_ns, *str_device, *str_end, *str_pause, *str_resume, *str_items, *str_first_item, *str_last_item, *str_longest_gap,
    *str_error_key, *str_told, *str_attributes, *str_key, *str_key_word, *str_batch_word, *str_bind_innermost,
    *str_batch_keys, *str_batch_weights, *str_outcome, *str_cancelled, *str_closed_early, *str_stopped;
static PyTypeObject *cached_type; /* of what `functools.lru_cache` makes */
static PyObject *name_of_type; /* the descriptor of `type.__name__` */
