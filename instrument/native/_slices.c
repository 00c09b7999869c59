/* The slices and arrows of a trace as text, in C: the twin of `slices.py`, whose classes say what goes where and why. Both
 * write the same bytes.
 *
 * A file of a million spans is some million lines that differ in a few numbers. What a site has in common is made of it
 * once, in Python; what is rare in a span (an attribute that is no plain text or number, the parent in another tracer) is
 * asked of Python for that span. Numbers are written from integers.
 */

#include "_attributes.h"

#define DEVICE_PIDS ((int64_t)1 << 31)
#define SPARE_TIDS ((int64_t)1 << 31)
#define SPARE_BINDS ((uint64_t)1 << 63)
#define DEEPEST_LANE 511
#define FARTHEST ((int64_t)1 << 62)
/* No time is farther from 0, so that differences are numbers of 64 bits. */

static PyTypeObject *span_type, *interval_type;

/* ------------------------------------------------------------------ text */

typedef struct {
    char *bytes;
    size_t length, room;
    int failed;
} text_t;

static char *
room_for(text_t *text, size_t more)
{
    if (text->length + more > text->room) {
        size_t room = text->room < 4096 ? 4096 : text->room * 2;
        while (room < text->length + more)
            room *= 2;
        char *larger = PyMem_RawRealloc(text->bytes, room);
        if (larger == NULL) {
            text->failed = 1;
            text->length = 0;
            return NULL;
        }
        text->bytes = larger;
        text->room = room;
    }
    return text->bytes + text->length;
}

static void
put(text_t *text, const char *bytes, size_t length)
{
    char *at = room_for(text, length);
    if (at != NULL) {
        memcpy(at, bytes, length);
        text->length += length;
    }
}

#define PUT(text, literal) put(text, literal, sizeof(literal) - 1)

static const char pairs_of_digits[] =
    "00010203040506070809101112131415161718192021222324252627282930313233343536373839404142434445464748495051525354555657"
    "585960616263646566676869707172737475767778798081828384858687888990919293949596979899";

/* The digits of a number before `end`; where they begin. */
static char *
digits(char *end, uint64_t value)
{
    while (value >= 100) {
        end -= 2;
        memcpy(end, &pairs_of_digits[value % 100 * 2], 2);
        value /= 100;
    }
    if (value >= 10) {
        end -= 2;
        memcpy(end, &pairs_of_digits[value * 2], 2);
    } else
        *--end = (char)('0' + value);
    return end;
}

static void
put_number(text_t *text, int64_t value)
{
    char written[24], *end = written + sizeof written;
    char *begin = digits(end, value < 0 ? 0 - (uint64_t)value : (uint64_t)value);
    if (value < 0)
        *--begin = '-';
    put(text, begin, (size_t)(end - begin));
}

/* Nanoseconds that are not negative as microseconds with three decimals. */
static void
put_time(text_t *text, int64_t time_ns)
{
    char written[28], *end = written + sizeof written;
    uint64_t value = (uint64_t)time_ns, rest = value % 1000;
    *--end = (char)('0' + rest % 10);
    *--end = (char)('0' + rest / 10 % 10);
    *--end = (char)('0' + rest / 100);
    *--end = '.';
    end = digits(end, value / 1000);
    put(text, end, (size_t)(written + sizeof written - end));
}

static void
put_hex(text_t *text, uint64_t value)
{
    char written[24];
    put(text, written, (size_t)snprintf(written, sizeof written, "0x%llx", (unsigned long long)value));
}

/* A text that needs no escape, with its quotes: 1; 0 where it needs one, -1 with an error. */
static int
put_plain(text_t *text, PyObject *value)
{
    Py_ssize_t length;
    const char *bytes = PyUnicode_AsUTF8AndSize(value, &length);
    if (bytes == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
            return -1;
        PyErr_Clear(); /* a lone surrogate */
        return 0;
    }
    for (Py_ssize_t i = 0; i < length; i++)
        if ((unsigned char)bytes[i] < 0x20 || bytes[i] == '"' || bytes[i] == '\\')
            return 0;
    PUT(text, "\"");
    put(text, bytes, (size_t)length);
    PUT(text, "\"");
    return 1;
}

/* The JSON of an attribute's value where it is plain: 1; 0 where Python is to say, -1 with an error. */
static int
put_value(text_t *text, PyObject *value)
{
    if (PyUnicode_CheckExact(value))
        return put_plain(text, value);
    if (value == Py_True)
        PUT(text, "true");
    else if (value == Py_False)
        PUT(text, "false");
    else if (value == Py_None)
        PUT(text, "null");
    else if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow)
            return 0;
        put_number(text, number);
    } else if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        if (!(number - number == 0))
            return 0; /* no number, or none that ends */
        char *written = PyOS_double_to_string(number, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
        if (written == NULL)
            return -1;
        put(text, written, strlen(written));
        PyMem_Free(written);
    } else
        return 0;
    return 1;
}

/* What Python has made, whose reference is given up. 0, or -1 with an error, also where it is NULL. */
static int
put_made(text_t *text, PyObject *made)
{
    PyObject *encoded = made == NULL ? NULL : PyUnicode_AsEncodedString(made, "utf-8", "replace");
    Py_XDECREF(made);
    if (encoded == NULL)
        return -1;
    put(text, PyBytes_AS_STRING(encoded), (size_t)PyBytes_GET_SIZE(encoded));
    Py_DECREF(encoded);
    return 0;
}

/* ------------------------------------------------------------------ lanes */

typedef struct {
    int64_t end_ns, span_id, root_id;
    uint32_t thread; /* of an async slice: the lane on which its end stands */
} open_t;

typedef struct {
    char *address, *mark;
    uint32_t address_length, mark_length;
    int64_t tid, opener; /* of an async lane: the id of its first span */
    uint32_t number, count;
    size_t room;
    int is_request;
    open_t *open; /* outermost first */
} lane_t;

/* The lanes of one thread, stream or task. */
typedef struct {
    int64_t first, second;
    uint32_t next; /* the next group of the same hash */
    uint32_t count, room, one;
    uint32_t *lanes; /* where there is more than one */
    int64_t next_ns; /* of a stream: where the interval begins that comes next in time */
} group_t;

typedef struct {
    table_t heads;
    group_t *items;
    size_t count, room;
} groups_t;

static int
groups_make(groups_t *groups)
{
    memset(groups, 0, sizeof *groups);
    return table_make(&groups->heads, 16);
}

static uint32_t *
lanes_of(group_t *group)
{
    return group->lanes != NULL ? group->lanes : &group->one;
}

static void
groups_free(groups_t *groups)
{
    for (size_t i = 0; i < groups->count; i++)
        PyMem_RawFree(groups->items[i].lanes);
    PyMem_RawFree(groups->items);
    table_free(&groups->heads);
    groups->items = NULL;
    groups->count = groups->room = 0;
}

static int64_t
hash_of(int64_t first, int64_t second)
{
    uint64_t mixed = ((uint64_t)first ^ 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    return (int64_t)((mixed ^ (mixed >> 29)) + (uint64_t)second * 0x94D049BB133111EBu);
}

/* The number of a group, which is made if need be; NOWHERE without memory. */
static uint32_t
group_at(groups_t *groups, int64_t first, int64_t second)
{
    uint32_t *head = table_cell(&groups->heads, hash_of(first, second));
    if (head == NULL)
        return NOWHERE;
    for (uint32_t at = *head; at != NOWHERE; at = groups->items[at].next)
        if (groups->items[at].first == first && groups->items[at].second == second)
            return at;
    if (groups->count == groups->room) {
        size_t room = groups->room == 0 ? 16 : groups->room * 2;
        group_t *larger = PyMem_RawRealloc(groups->items, room * sizeof *larger);
        if (larger == NULL)
            return NOWHERE; /* the cell without a value counts as free */
        groups->items = larger;
        groups->room = room;
    }
    groups->items[groups->count] = (group_t){.first = first, .second = second, .next = *head, .next_ns = INT64_MAX};
    return *head = (uint32_t)groups->count++;
}

/* ------------------------------------------------------------------ the writer */

typedef struct {
    char *head, *args, *name, *kind;
    size_t head_length, args_length, name_length, kind_length;
} site_t;

typedef struct {
    uint32_t source, target; /* numbers of spans; of a launch the target is a lane */
    int64_t at_ns;
    int is_launch;
} flow_t;

typedef struct {
    int64_t start_ns, end_ns;
    uint32_t owner, place;
} stretch_t;

/* Places by the id of their span. A recorder gives ids in a row: then they are looked up by number, else in a table. */
typedef struct {
    uint32_t *by_number; /* NULL: in the table */
    int64_t first;
    uint64_t numbers;
    table_t table;
} index_t;

/* For so many spans with ids from `least` to `most`. 0, or -1 without memory. */
static int
index_make(index_t *index, size_t count, int64_t least, int64_t most)
{
    uint64_t numbers = count == 0 ? 0 : (uint64_t)most - (uint64_t)least + 1;
    if (numbers == 0 || numbers > 4 * (uint64_t)count)
        return table_make(&index->table, count);
    index->by_number = PyMem_RawMalloc(numbers * sizeof *index->by_number);
    if (index->by_number == NULL)
        return -1;
    memset(index->by_number, 0xFF, numbers * sizeof *index->by_number);
    index->first = least;
    index->numbers = numbers;
    return 0;
}

static inline uint32_t
index_get(const index_t *index, int64_t id)
{
    if (index->by_number == NULL)
        return table_get(&index->table, id);
    uint64_t number = (uint64_t)id - (uint64_t)index->first;
    return number < index->numbers ? index->by_number[number] : NOWHERE;
}

/* Where the place of an id is; NULL where it is not one of those that were counted with. */
static inline uint32_t *
index_cell(index_t *index, int64_t id)
{
    if (index->by_number == NULL)
        return index->table.used <= index->table.mask / 2 ? table_cell(&index->table, id) : NULL;
    uint64_t number = (uint64_t)id - (uint64_t)index->first;
    return number < index->numbers ? &index->by_number[number] : NULL;
}

enum phase { SPANS, CLOSINGS, DEVICES, ARROWS, DONE };

typedef struct {
    PyObject_HEAD
    PyObject *spans; /* a tuple of our own */
    PyObject *sites; /* every site once, by first sight */
    PyObject *more_args, *text_of; /* of Python: the rarer arguments of a span, and the JSON of a text */
    int64_t base_ns, pid;
    size_t count, batch;
    Span **order;         /* the spans in their order; references of `spans` */
    uint32_t *site_of;    /* the site of each span, by its place in the order */
    char *is_request;     /* of each site */
    size_t site_count, site_room;
    site_t *texts;        /* of each site, once it has been given */
    index_t by_id;        /* span id -> place in the order, of the last that has it */
    int ids_repeat;       /* whether two spans have one id */
    uint32_t *bound;      /* by place: the place of the source of its bind, or NOWHERE */
    int any_bound;
    size_t left_out;
    flow_t *flows;
    size_t flow_count, flow_room;
    uint8_t *started;     /* by place: which of its arrows have begun */
    lane_t *lanes;
    size_t lane_count, lane_room;
    uint32_t *free_lanes;
    size_t free_count, free_room;
    groups_t rows, tasks, streams;
    table_t moved;        /* span id -> lane, of those that the first lane did not take */
    int64_t spare_tid;
    uint64_t locals; /* how many async lanes there have been */
    stretch_t *stretches;
    place_t *stretch_order;
    uint8_t *encloses;
    size_t stretch_count;
    enum phase phase;
    size_t at;            /* how much of the phase is done */
    text_t text;
} Slices;

#define SPAN(self, i) ((self)->order[i])

/* Have the span that comes some places later fetched from memory: in the order of time they lie anywhere. */
#define AHEAD 12
#define STRETCHES_AHEAD 4
#define FETCH_AHEAD(self, i)                                                                                               \
    if ((i) + AHEAD < (self)->count) {                                                                                     \
        const char *ahead = (const char *)SPAN(self, (i) + AHEAD);                                                         \
        __builtin_prefetch(ahead);                                                                                         \
        __builtin_prefetch(ahead + 64);                                                                                    \
        __builtin_prefetch(ahead + 128);                                                                                   \
    }

static int
is_async(Slices *self, uint32_t at)
{
    return SPAN(self, at)->task_id != 0 || self->is_request[self->site_of[at]];
}

static int
may_lead(Slices *self, uint32_t source, int64_t target_ns, int bound)
{
    int64_t start_ns = SPAN(self, source)->start_ns;
    return start_ns < target_ns || (start_ns == target_ns && !(bound || is_async(self, source)));
}

static int
add_flow(Slices *self, flow_t flow)
{
    flow_t *larger = grown(self->flows, &self->flow_room, self->flow_count, sizeof *larger, 64);
    if (larger == NULL)
        return -1;
    self->flows = larger;
    self->flows[self->flow_count++] = flow;
    return 0;
}

/* 0, or -1 without memory. */
static int
put_in_order(Slices *self)
{
    PyObject *const *spans = &PyTuple_GET_ITEM(self->spans, 0);
    uint32_t *numbers;
    self->order = PyMem_RawMalloc((self->count + 1) * sizeof *self->order);
    if (self->order == NULL || order_spans(spans, self->count, 0, &numbers) < 0)
        return -1;
    for (size_t i = 0; i < self->count; i++)
        self->order[i] = (Span *)spans[numbers == NULL ? i : numbers[i]];
    PyMem_RawFree(numbers);
    return 0;
}

/* Whether a span can be written here: its times are near enough, its intervals plain. */
static int
is_plain(Span *span)
{
    if (span->end_ns < span->start_ns || span->start_ns < -FARTHEST || span->end_ns > FARTHEST || span->span_id <= 0)
        return 0;
    if (span->device == NULL)
        return 1;
    if (!PyTuple_CheckExact(span->device))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(span->device); i++) {
        Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, i);
        if (!Py_IS_TYPE((PyObject *)interval, interval_type) || interval->end_ns < interval->start_ns ||
            interval->start_ns < -FARTHEST || interval->end_ns > FARTHEST)
            return 0;
        if (interval->label != NULL && !PyUnicode_CheckExact(interval->label))
            return 0;
    }
    return 1;
}

/* Look at each span once: whether it is plain, its site, the base. 1; 0 where one is not plain; -1 with an error. */
static int
survey(Slices *self)
{
    table_t numbers;
    int plain = 1;
    if (table_make(&numbers, 64) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; plain > 0 && i < self->count; i++) {
        FETCH_AHEAD(self, i)
        Span *span = SPAN(self, i);
        if (!is_plain(span)) {
            plain = 0;
            break;
        }
        uint32_t *number = table_cell(&numbers, (int64_t)(intptr_t)span->site);
        if (number == NULL) {
            PyErr_NoMemory();
            plain = -1;
            break;
        }
        if (*number == NOWHERE) {
            *number = (uint32_t)self->site_count;
            char *larger = grown(self->is_request, &self->site_room, self->site_count, 1, 64);
            if (larger == NULL || PyList_Append(self->sites, span->site) < 0) {
                plain = -1;
                break;
            }
            self->is_request = larger;
            PyObject *kind = PyObject_GetAttrString(span->site, "kind");
            if (kind == NULL || !PyUnicode_CheckExact(kind)) {
                PyErr_Clear();
                Py_XDECREF(kind);
                plain = 0;
                break;
            }
            self->is_request[self->site_count++] = PyUnicode_CompareWithASCIIString(kind, "request") == 0;
            Py_DECREF(kind);
        }
        self->site_of[i] = *number;
        if (span->start_ns < self->base_ns)
            self->base_ns = span->start_ns;
        for (Py_ssize_t n = 0; span->device != NULL && n < PyTuple_GET_SIZE(span->device); n++) {
            Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, n);
            if (interval->start_ns < self->base_ns)
                self->base_ns = interval->start_ns;
            self->stretch_count++;
        }
        uint32_t *cell = index_cell(&self->by_id, span->span_id);
        if (cell == NULL) { /* somebody has changed the span meanwhile */
            plain = 0;
            break;
        }
        self->ids_repeat |= *cell != NOWHERE;
        *cell = (uint32_t)i;
        give_way(i);
    }
    table_free(&numbers);
    return plain;
}

/* Plan the arrows between spans, as `Arrows` does. 0, or -1 with an error. */
static int
plan_arrows(Slices *self)
{
    uint32_t *ties = PyMem_RawMalloc((self->count + 1) * sizeof *ties); /* children */
    size_t tied = 0, stretch = 0;
    if (ties == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->count; i++) {
        FETCH_AHEAD(self, i)
        Span *span = SPAN(self, i);
        int any = 0;
        for (Py_ssize_t n = 0; span->device != NULL && n < PyTuple_GET_SIZE(span->device); n++) {
            Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, n);
            int legal = Py_IS_TYPE((PyObject *)interval, interval_type) && stretch < self->stretch_count &&
                        may_lead(self, (uint32_t)i, interval->start_ns, 0);
            any |= legal;
            self->left_out += !legal;
            if (stretch < self->stretch_count)
                self->stretches[stretch++] = (stretch_t){interval->start_ns, interval->end_ns, (uint32_t)i, (uint32_t)n};
        }
        if (any && is_async(self, (uint32_t)i)) {
            uint32_t at = index_get(&self->by_id, span->span_id);
            self->bound[at] = at;
            self->any_bound = 1;
        }
        give_way(i);
    }
    self->stretch_count = stretch;
    for (size_t i = 0; i < self->count; i++) {
        FETCH_AHEAD(self, i)
        Span *span = SPAN(self, i);
        uint32_t at = index_get(&self->by_id, span->parent_id);
        if (at == NOWHERE)
            continue;
        Span *parent = SPAN(self, at);
        if (parent->thread_id == span->thread_id && parent->task_id == span->task_id)
            continue;
        if (is_async(self, at) || is_async(self, (uint32_t)i))
            ties[tied++] = (uint32_t)i;
        else if (!may_lead(self, at, span->start_ns, 0))
            self->left_out++;
        else if (add_flow(self, (flow_t){at, (uint32_t)i, span->start_ns, 0}) < 0) {
            PyMem_RawFree(ties);
            return -1;
        }
        give_way(i);
    }
    while (tied-- > 0) {
        Span *span = SPAN(self, ties[tied]);
        uint32_t own = index_get(&self->by_id, span->span_id), parent = index_get(&self->by_id, span->parent_id);
        if (own == NOWHERE || parent == NOWHERE)
            continue; /* somebody has changed the span meanwhile */
        int room = self->bound[own] == NOWHERE && (self->bound[parent] == NOWHERE || self->bound[parent] == parent);
        if (room && may_lead(self, parent, span->start_ns, 1))
            self->bound[own] = self->bound[parent] = parent, self->any_bound = 1;
        else
            self->left_out++;
        give_way(tied);
    }
    PyMem_RawFree(ties);
    return 0;
}

/* ------------------------------------------------------------------ the board */

/* A new lane of a group with this address and mark; its number, NOWHERE without memory. */
static uint32_t
new_lane(Slices *self, group_t *group, const char *address, const char *mark, int64_t tid)
{
    uint32_t at;
    if (self->free_count > 0 && group->count == 0)
        at = self->free_lanes[--self->free_count]; /* only first lanes: further ones are remembered in `moved` */
    else {
        lane_t *larger = grown(self->lanes, &self->lane_room, self->lane_count, sizeof *larger, 64);
        if (larger == NULL)
            return NOWHERE;
        self->lanes = larger;
        at = (uint32_t)self->lane_count++;
        memset(&self->lanes[at], 0, sizeof *self->lanes);
    }
    lane_t *lane = &self->lanes[at];
    char numbered[96];
    uint32_t number = group->count + 1;
    snprintf(numbered, sizeof numbered, number == 1 ? "%s" : "%s\"lane\":%u,", mark, number);
    PyMem_RawFree(lane->address);
    PyMem_RawFree(lane->mark);
    lane->address_length = (uint32_t)strlen(address);
    lane->mark_length = (uint32_t)strlen(numbered);
    lane->address = PyMem_RawMalloc(lane->address_length + 1);
    lane->mark = PyMem_RawMalloc(lane->mark_length + 1);
    lane->tid = tid;
    lane->number = number;
    lane->count = 0;
    if (lane->address == NULL || lane->mark == NULL)
        goto no_memory;
    memcpy(lane->address, address, lane->address_length + 1);
    memcpy(lane->mark, numbered, lane->mark_length + 1);
    if (number == 1)
        group->one = at;
    else {
        uint32_t *larger = PyMem_RawRealloc(group->lanes, number * sizeof *larger);
        if (larger == NULL)
            goto no_memory;
        if (number == 2)
            larger[0] = group->one;
        larger[number - 1] = at;
        group->lanes = larger;
    }
    group->count = number;
    return at;
no_memory:
    PyErr_NoMemory();
    return NOWHERE;
}

static int
takes(lane_t *lane, int64_t start_ns, int64_t end_ns)
{
    while (lane->count > 0 && lane->open[lane->count - 1].end_ns <= start_ns)
        lane->count--;
    return lane->count < DEEPEST_LANE && (lane->count == 0 || lane->open[lane->count - 1].end_ns >= end_ns);
}

/* The lane of a group that takes a slice: where its parent was moved to if it can be, else the first; or NOWHERE. */
static uint32_t
fitting(Slices *self, group_t *group, int64_t start_ns, int64_t end_ns, int64_t parent_id)
{
    uint32_t beside = table_get(&self->moved, parent_id), *lanes = lanes_of(group);
    for (uint32_t i = 0; beside != NOWHERE && i < group->count; i++)
        if (lanes[i] == beside) {
            if (takes(&self->lanes[beside], start_ns, end_ns))
                return beside;
            break;
        }
    for (uint32_t i = 0; i < group->count; i++)
        if (takes(&self->lanes[lanes[i]], start_ns, end_ns))
            return lanes[i];
    return NOWHERE;
}

/* The lane of a thread or stream that takes a slice, NOWHERE with an error. */
static uint32_t
row_lane(Slices *self, int64_t pid, int64_t own_id, int64_t start_ns, int64_t end_ns, int64_t parent_id)
{
    uint32_t row = group_at(&self->rows, pid, own_id);
    if (row == NOWHERE) {
        PyErr_NoMemory();
        return NOWHERE;
    }
    group_t *group = &self->rows.items[row];
    uint32_t lane = fitting(self, group, start_ns, end_ns, parent_id);
    if (lane != NOWHERE)
        return lane;
    int own = group->count == 0 && own_id > 0 && own_id < SPARE_TIDS;
    int64_t tid = own ? own_id : self->spare_tid++;
    char address[96], mark[48] = "";
    snprintf(address, sizeof address, ",\"pid\":%lld,\"tid\":%lld", (long long)pid, (long long)tid);
    if (!own && pid == self->pid)
        snprintf(mark, sizeof mark, "\"thread\":%lld,", (long long)own_id);
    return new_lane(self, group, address, mark, tid);
}

static uint32_t
first_lane(Slices *self, int64_t thread_id)
{
    uint32_t row = group_at(&self->rows, self->pid, thread_id);
    if (row != NOWHERE && self->rows.items[row].count > 0)
        return lanes_of(&self->rows.items[row])[0];
    return row_lane(self, self->pid, thread_id, 0, 0, 0);
}

static int
push(lane_t *lane, open_t open)
{
    open_t *larger = grown(lane->open, &lane->room, lane->count, sizeof *larger, 4);
    if (larger == NULL)
        return -1;
    lane->open = larger;
    lane->open[lane->count++] = open;
    return 0;
}

static void
put_category(text_t *text, lane_t *lane)
{
    if (lane->is_request)
        PUT(text, ",\"cat\":\"request\"");
    else
        PUT(text, ",\"cat\":\"task\"");
}

/* End the async slices of a lane that are over by then, innermost first. */
static void
close_lane(Slices *self, lane_t *lane, int64_t until_ns)
{
    text_t *text = &self->text;
    while (lane->count > 0 && lane->open[lane->count - 1].end_ns <= until_ns) {
        open_t *ended = &lane->open[--lane->count];
        lane_t *thread = &self->lanes[ended->thread];
        PUT(text, ",\n{\"ph\":\"e\"");
        put(text, thread->address, thread->address_length);
        put_category(text, lane);
        put(text, lane->address, lane->address_length);
        PUT(text, ",\"ts\":");
        put_time(text, ended->end_ns - self->base_ns);
        PUT(text, "}");
    }
}

/* End all async slices that are over by then; tasks left without one are forgotten. 0, or -1 with an error. */
static int
close_all(Slices *self, int64_t until_ns)
{
    groups_t left;
    if (groups_make(&left) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    int done = 0;
    for (size_t i = 0; i < self->tasks.count; i++) {
        group_t *group = &self->tasks.items[i];
        uint32_t *lanes = lanes_of(group), open = 0;
        for (uint32_t n = 0; n < group->count; n++) {
            close_lane(self, &self->lanes[lanes[n]], until_ns);
            open |= self->lanes[lanes[n]].count;
        }
        if (open) {
            uint32_t at = group_at(&left, group->first, group->second);
            if (at == NOWHERE) {
                PyErr_NoMemory();
                done = -1;
                break;
            }
            left.items[at].one = group->one;
            left.items[at].count = group->count;
            left.items[at].lanes = group->lanes;
            group->lanes = NULL;
            continue;
        }
        if (group->count > 0) {
            uint32_t *larger = grown(self->free_lanes, &self->free_room, self->free_count, sizeof *larger, 64);
            if (larger == NULL) {
                done = -1;
                break;
            }
            self->free_lanes = larger;
            self->free_lanes[self->free_count++] = lanes[0];
        }
    }
    groups_free(&self->tasks);
    self->tasks = left;
    return done;
}

/* ------------------------------------------------------------------ events */

static void
put_bind(text_t *text, uint64_t source_id, int is_out)
{
    PUT(text, ",\"bind_id\":\"");
    put_hex(text, SPARE_BINDS | source_id);
    if (is_out)
        PUT(text, "\",\"flow_out\":true");
    else
        PUT(text, "\",\"flow_in\":true");
}

/* The arguments that only some spans have. 0, or -1 with an error. */
static int
put_more_args(Slices *self, Span *span, int64_t total_ns)
{
    text_t *text = &self->text;
    PyObject *attributes = span->attributes == NULL ? NULL : read_attributes(span);
    if (PyErr_Occurred())
        return -1;
    if (attributes != NULL && PyDict_CheckExact(attributes) && PyDict_GET_SIZE(attributes) == 0)
        Py_CLEAR(attributes);
    if (span->active_ns == total_ns && span->error == NULL && attributes == NULL && !span->clipped &&
        span->remote == NULL)
        return 0;
    size_t before = text->length;
    int plain = span->remote == NULL;
    if (span->active_ns != total_ns) {
        PUT(text, ",\"active_ns\":");
        put_number(text, span->active_ns);
    }
    if (plain && span->error != NULL) {
        PUT(text, ",\"error\":");
        plain = PyUnicode_CheckExact(span->error) ? put_plain(text, span->error) : 0;
    }
    if (span->clipped)
        PUT(text, ",\"clipped\":true");
    if (plain > 0 && attributes != NULL && (plain = PyDict_CheckExact(attributes))) {
        PyObject *key, *value;
        Py_ssize_t at = 0;
        const char *between = ",\"attributes\":{";
        while (plain > 0 && PyDict_Next(attributes, &at, &key, &value)) {
            put(text, between, strlen(between));
            between = ",";
            plain = PyUnicode_CheckExact(key) ? put_plain(text, key) : 0;
            PUT(text, ":");
            if (plain > 0)
                plain = put_value(text, value);
        }
        PUT(text, "}");
    }
    Py_XDECREF(attributes);
    if (plain != 0)
        return plain > 0 ? 0 : -1;
    if (!text->failed)
        text->length = before;
    return put_made(text, PyObject_CallFunction(self->more_args, "OL", (PyObject *)span, (long long)total_ns));
}

static void
put_ids(text_t *text, Span *span, const lane_t *lane, int with_root)
{
    const open_t *around = lane->count > 0 ? &lane->open[lane->count - 1] : NULL;
    int nests = around != NULL && around->span_id == span->parent_id && around->root_id == span->root_id;
    if (!nests && with_root && span->root_id != (span->parent_id != 0 ? span->parent_id : span->span_id)) {
        PUT(text, ",\"root\":");
        put_number(text, span->root_id);
    }
    if (!nests && (span->parent_id != 0 || around != NULL)) {
        PUT(text, ",\"parent\":");
        put_number(text, span->parent_id);
    }
    PUT(text, ",\"id\":");
    put_number(text, span->span_id);
}

/* The bind of a span, if it has one. */
static void
put_bind_of(Slices *self, uint32_t place, Span *span)
{
    if (!self->any_bound)
        return;
    uint32_t own = self->ids_repeat ? index_get(&self->by_id, span->span_id) : place;
    uint32_t source = own == NOWHERE ? NOWHERE : self->bound[own];
    if (source != NOWHERE)
        put_bind(&self->text, (uint64_t)SPAN(self, source)->span_id, source == own);
}

/* The async slice of a span. 0, or -1 with an error. */
static int
put_async(Slices *self, uint32_t place, Span *span, site_t *site, int64_t start_ns, int64_t end_ns)
{
    text_t *text = &self->text;
    uint32_t at = group_at(&self->tasks, span->root_id, span->task_id);
    if (at == NOWHERE) {
        PyErr_NoMemory();
        return -1;
    }
    group_t *group = &self->tasks.items[at];
    uint32_t *lanes = lanes_of(group);
    for (uint32_t i = 0; i < group->count; i++)
        close_lane(self, &self->lanes[lanes[i]], start_ns);
    uint32_t lane_at = fitting(self, group, start_ns, end_ns, span->parent_id);
    if (lane_at == NOWHERE) {
        char address[96];
        snprintf(address, sizeof address, ",\"id2\":{\"local\":\"%#llx\"}", (unsigned long long)++self->locals);
        lane_at = new_lane(self, group, address, "", 0);
        if (lane_at != NOWHERE) {
            self->lanes[lane_at].opener = span->span_id;
            self->lanes[lane_at].is_request = self->is_request[self->site_of[place]];
        }
    }
    uint32_t thread_at = lane_at == NOWHERE ? NOWHERE : first_lane(self, span->thread_id);
    if (thread_at == NOWHERE)
        return -1;
    lane_t *lane = &self->lanes[lane_at], *thread = &self->lanes[thread_at];
    if (lane->number > 1) {
        uint32_t *moved = table_cell(&self->moved, span->span_id);
        if (moved == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        *moved = lane_at;
    }
    PUT(text, ",\n{\"ph\":\"b\"");
    put(text, thread->address, thread->address_length);
    put_category(text, lane);
    put(text, site->name, site->name_length);
    PUT(text, ",\"args\":{");
    put(text, thread->mark, thread->mark_length);
    put(text, lane->mark, lane->mark_length);
    PUT(text, "\"kind\":");
    put(text, site->kind, site->kind_length);
    PUT(text, ",");
    put(text, site->args, site->args_length);
    int opens = span->span_id == lane->opener;
    if (opens && span->task_id != 0) {
        PUT(text, ",\"task\":");
        put_number(text, span->task_id);
    }
    put_ids(text, span, lane, opens);
    if (push(lane, (open_t){end_ns, span->span_id, span->root_id, thread_at}) < 0)
        return -1;
    int64_t total_ns = end_ns - start_ns;
    if (span->self_ns != total_ns) {
        PUT(text, ",\"self_ns\":");
        put_number(text, span->self_ns);
    }
    if (put_more_args(self, span, total_ns) < 0)
        return -1;
    PUT(text, "}");
    put(text, self->lanes[lane_at].address, self->lanes[lane_at].address_length);
    PUT(text, ",\"ts\":");
    put_time(text, start_ns - self->base_ns);
    put_bind_of(self, place, span);
    PUT(text, "}");
    return 0;
}

/* The slice of a span. 0, or -1 with an error. */
static int
put_span(Slices *self, uint32_t place)
{
    text_t *text = &self->text;
    FETCH_AHEAD(self, place)
    Span *span = SPAN(self, place);
    int64_t start_ns = span->start_ns, end_ns = span->end_ns;
    site_t *site = &self->texts[self->site_of[place]];
    if (start_ns < self->base_ns || end_ns < start_ns || end_ns > FARTHEST) {
        PyErr_SetString(PyExc_RuntimeError, "a span was changed while it was written");
        return -1;
    }
    if (is_async(self, place))
        return put_async(self, place, span, site, start_ns, end_ns);
    uint32_t lane_at = first_lane(self, span->thread_id);
    if (lane_at == NOWHERE)
        return -1;
    lane_t *lane = &self->lanes[lane_at];
    if (!takes(lane, start_ns, end_ns) ||
        (self->moved.used > 0 && table_get(&self->moved, span->parent_id) != NOWHERE)) {
        lane_at = row_lane(self, self->pid, span->thread_id, start_ns, end_ns, span->parent_id);
        if (lane_at == NOWHERE)
            return -1;
        lane = &self->lanes[lane_at];
        if (lane->number > 1) {
            uint32_t *moved = table_cell(&self->moved, span->span_id);
            if (moved == NULL) {
                PyErr_NoMemory();
                return -1;
            }
            *moved = lane_at;
        }
    }
    int64_t total_ns = end_ns - start_ns;
    PUT(text, ",\n{\"ph\":\"X\"");
    put(text, lane->address, lane->address_length);
    put(text, site->head, site->head_length);
    put(text, lane->mark, lane->mark_length);
    put(text, site->args, site->args_length);
    put_ids(text, span, lane, 1);
    if (push(lane, (open_t){end_ns, span->span_id, span->root_id, 0}) < 0)
        return -1;
    if (span->self_ns != total_ns) {
        PUT(text, ",\"self_ns\":");
        put_number(text, span->self_ns);
    }
    if (put_more_args(self, span, total_ns) < 0)
        return -1;
    PUT(text, "},\"ts\":");
    put_time(text, start_ns - self->base_ns);
    PUT(text, ",\"dur\":");
    put_time(text, total_ns);
    put_bind_of(self, place, span);
    PUT(text, "}");
    return 0;
}

/* A device interval, if it is one; NULL where somebody has changed its span meanwhile. */
static inline PyObject *
found_at(Slices *self, const stretch_t *stretch)
{
    PyObject *device = SPAN(self, stretch->owner)->device;
    if (device == NULL || !PyTuple_CheckExact(device) || PyTuple_GET_SIZE(device) <= stretch->place)
        return NULL;
    return PyTuple_GET_ITEM(device, stretch->place);
}

static inline Interval *
interval_of(Slices *self, const stretch_t *stretch)
{
    PyObject *found = found_at(self, stretch);
    return found != NULL && Py_IS_TYPE(found, interval_type) ? (Interval *)found : NULL;
}

/* Have the device interval that comes `step` by `step` places later fetched from memory: what says where it lies comes first. */
static inline void
fetch_stretch(Slices *self, size_t i, Py_ssize_t step)
{
    const stretch_t *stretch[5];
    for (int n = 1; n <= 4; n++) {
        size_t ahead = i + (size_t)(n * step); /* beyond the first it wraps */
        if (ahead >= self->stretch_count)
            return;
        stretch[n] = &self->stretches[self->stretch_order[ahead].index];
    }
    __builtin_prefetch(stretch[4]);
    __builtin_prefetch(&SPAN(self, stretch[3]->owner)->device);
    __builtin_prefetch(SPAN(self, stretch[2]->owner)->device);
    __builtin_prefetch(found_at(self, stretch[1]));
}

/* Sort the device intervals by start, longer first, and find those that enclose another. 0, or -1 with an error. */
static int
order_stretches(Slices *self)
{
    size_t count = self->stretch_count;
    place_t *places = PyMem_RawMalloc((count + 1) * sizeof *places), *other = PyMem_RawMalloc((count + 1) * sizeof *other);
    self->encloses = PyMem_RawCalloc(count + 1, 1);
    if (places == NULL || other == NULL || self->encloses == NULL || groups_make(&self->streams) < 0) {
        PyMem_RawFree(places);
        PyMem_RawFree(other);
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++)
        places[i] = (place_t){self->stretches[i].start_ns, self->stretches[i].end_ns, (int64_t)i, (uint32_t)i};
    Py_BEGIN_ALLOW_THREADS
    sort_places(places, other, count, 1);
    Py_END_ALLOW_THREADS
    PyMem_RawFree(other);
    self->stretch_order = places;
    for (size_t i = count; i-- > 0;) {
        stretch_t *stretch = &self->stretches[places[i].index];
        fetch_stretch(self, i, -STRETCHES_AHEAD);
        Interval *interval = interval_of(self, stretch);
        if (interval == NULL)
            continue;
        uint32_t at = group_at(&self->streams, interval->device, interval->stream);
        if (at == NOWHERE) {
            PyErr_NoMemory();
            return -1;
        }
        self->encloses[i] = self->streams.items[at].next_ns < stretch->end_ns;
        self->streams.items[at].next_ns = stretch->start_ns;
        give_way(i);
    }
    return 0;
}

/* The slice of a device interval. 0, or -1 with an error. */
static int
put_stretch(Slices *self, size_t i)
{
    text_t *text = &self->text;
    stretch_t *stretch = &self->stretches[self->stretch_order[i].index];
    Span *owner = SPAN(self, stretch->owner);
    Interval *interval = interval_of(self, stretch);
    fetch_stretch(self, i, STRETCHES_AHEAD);
    if (interval == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a span was changed while it was written");
        return -1;
    }
    int64_t device = interval->device % DEVICE_PIDS;
    int64_t pid = DEVICE_PIDS + (device < 0 ? device + DEVICE_PIDS : device);
    uint32_t lane_at = row_lane(self, pid, interval->stream, stretch->start_ns, stretch->end_ns, 0);
    if (lane_at == NOWHERE || push(&self->lanes[lane_at], (open_t){stretch->end_ns, 0, 0, 0}) < 0)
        return -1;
    lane_t *lane = &self->lanes[lane_at];
    site_t *site = &self->texts[self->site_of[stretch->owner]];
    PUT(text, ",\n{\"ph\":\"X\"");
    put(text, lane->address, lane->address_length);
    put(text, site->name, site->name_length);
    PUT(text, ",\"cat\":\"device\",\"args\":{");
    put(text, lane->mark, lane->mark_length);
    PUT(text, "\"device\":");
    put_number(text, interval->device);
    if (self->encloses[i])
        PUT(text, ",\"enclosing_stream\":");
    else
        PUT(text, ",\"stream\":");
    put_number(text, interval->stream);
    PUT(text, ",\"label\":");
    int plain = 1;
    if (interval->label == NULL)
        PUT(text, "\"exclusive\"");
    else
        plain = put_plain(text, interval->label);
    if (plain < 0 || (plain == 0 && put_made(text, PyObject_CallOneArg(self->text_of, interval->label)) < 0))
        return -1;
    PUT(text, ",\"uncertainty_ns\":");
    put_number(text, interval->uncertainty_ns);
    if (stretch->place > 0) {
        PUT(text, ",\"place\":");
        put_number(text, stretch->place);
    }
    PUT(text, ",\"owner\":");
    put_number(text, owner->span_id);
    PUT(text, "},\"ts\":");
    put_time(text, stretch->start_ns - self->base_ns);
    PUT(text, ",\"dur\":");
    put_time(text, stretch->end_ns - stretch->start_ns);
    if (may_lead(self, stretch->owner, stretch->start_ns, 0)) {
        if (is_async(self, stretch->owner))
            put_bind(text, (uint64_t)owner->span_id, 0);
        else if (add_flow(self, (flow_t){stretch->owner, lane_at, stretch->start_ns, 1}) < 0)
            return -1;
    }
    PUT(text, "}");
    return 0;
}

/* The lane of a span's complete event, NOWHERE with an error. */
static uint32_t
lane_of(Slices *self, Span *span)
{
    uint32_t lane = table_get(&self->moved, span->span_id);
    return lane != NOWHERE ? lane : first_lane(self, span->thread_id);
}

static void
put_arrow(Slices *self, const char *phase, flow_t *flow, int64_t at_ns, uint32_t lane_at)
{
    text_t *text = &self->text;
    const char *name = flow->is_launch ? "ac2g" : "call";
    PUT(text, ",\n{\"ph\":\"");
    put(text, phase, strlen(phase));
    put(text, self->lanes[lane_at].address, self->lanes[lane_at].address_length);
    PUT(text, ",\"name\":\"");
    put(text, name, 4);
    PUT(text, "\",\"cat\":\"");
    put(text, name, 4);
    PUT(text, "\",\"id\":");
    put_number(text, SPAN(self, flow->source)->span_id);
    PUT(text, ",\"ts\":");
    put_time(text, at_ns - self->base_ns);
    PUT(text, "}");
}

/* An arrow between complete events. 0, or -1 with an error. */
static int
put_flow(Slices *self, flow_t *flow)
{
    Span *source = SPAN(self, flow->source);
    uint32_t own = index_get(&self->by_id, source->span_id);
    uint8_t bit = flow->is_launch ? 2 : 1;
    if (own != NOWHERE && !(self->started[own] & bit)) {
        self->started[own] |= bit;
        uint32_t lane = lane_of(self, source);
        if (lane == NOWHERE)
            return -1;
        put_arrow(self, "s\"", flow, source->start_ns, lane);
    }
    uint32_t lane = flow->is_launch ? flow->target : lane_of(self, SPAN(self, flow->target));
    if (lane == NOWHERE)
        return -1;
    put_arrow(self, "f\",\"bp\":\"e\"", flow, flow->at_ns, lane);
    return 0;
}

/* ------------------------------------------------------------------ the type */

/* start(texts): give the texts of the sites, in their order: head, args, name, kind. */
static PyObject *
Slices_start(Slices *self, PyObject *texts)
{
    if (self->texts != NULL || !PyList_CheckExact(texts) || PyList_GET_SIZE(texts) != (Py_ssize_t)self->site_count) {
        PyErr_SetString(PyExc_ValueError, "one text for each site, once");
        return NULL;
    }
    self->texts = PyMem_RawCalloc(self->site_count + 1, sizeof *self->texts);
    if (self->texts == NULL)
        return PyErr_NoMemory();
    for (size_t i = 0; i < self->site_count; i++) {
        PyObject *item = PyList_GET_ITEM(texts, (Py_ssize_t)i);
        site_t *site = &self->texts[i];
        char **parts[] = {&site->head, &site->args, &site->name, &site->kind};
        size_t *lengths[] = {&site->head_length, &site->args_length, &site->name_length, &site->kind_length};
        for (Py_ssize_t n = 0; n < 4; n++) {
            PyObject *part = PySequence_GetItem(item, n);
            Py_ssize_t length;
            const char *bytes = part == NULL ? NULL : PyUnicode_AsUTF8AndSize(part, &length);
            if (bytes != NULL && (*parts[n] = PyMem_RawMalloc((size_t)length + 1)) != NULL) {
                memcpy(*parts[n], bytes, (size_t)length + 1);
                *lengths[n] = (size_t)length;
            }
            Py_XDECREF(part);
            if (*parts[n] == NULL)
                return PyErr_Occurred() ? NULL : PyErr_NoMemory();
        }
    }
    Py_RETURN_NONE;
}

/* next(): the next events, each behind a comma and a new line; nothing at the end. */
static PyObject *
Slices_next(Slices *self, PyObject *Py_UNUSED(none))
{
    if (self->texts == NULL) {
        PyErr_SetString(PyExc_ValueError, "the texts of the sites come first");
        return NULL;
    }
    self->text.length = 0;
    while (self->phase != DONE && self->text.length == 0) {
        size_t total = self->phase == SPANS     ? self->count
                       : self->phase == DEVICES ? self->stretch_count
                       : self->phase == ARROWS  ? self->flow_count
                                                : 0;
        size_t until = total - self->at < self->batch ? total : self->at + self->batch;
        int done = 0;
        if (self->phase == CLOSINGS)
            done = close_all(self, INT64_MAX);
        else if (self->phase == DEVICES && self->at == 0 && total > 0)
            done = order_stretches(self);
        for (; done == 0 && self->at < until; self->at++)
            done = self->phase == SPANS     ? put_span(self, (uint32_t)self->at)
                   : self->phase == DEVICES ? put_stretch(self, self->at)
                                            : put_flow(self, &self->flows[self->at]);
        if (done == 0 && self->phase == SPANS && total > 0)
            done = close_all(self, SPAN(self, until - 1)->start_ns);
        if (done < 0)
            return NULL;
        if (self->text.failed)
            return PyErr_NoMemory();
        if (self->at >= total) {
            self->phase++;
            self->at = 0;
        }
    }
    return PyBytes_FromStringAndSize(self->text.bytes, (Py_ssize_t)self->text.length);
}

/* rows(): the lanes of threads and streams: [(process, own id, [(number, tid)])]. */
static PyObject *
Slices_rows(Slices *self, PyObject *Py_UNUSED(none))
{
    PyObject *rows = PyList_New(0);
    for (size_t i = 0; rows != NULL && i < self->rows.count; i++) {
        group_t *group = &self->rows.items[i];
        PyObject *lanes = PyList_New(0);
        for (uint32_t n = 0; lanes != NULL && n < group->count; n++) {
            lane_t *lane = &self->lanes[lanes_of(group)[n]];
            PyObject *item = Py_BuildValue("(IL)", lane->number, lane->tid);
            if (item == NULL || PyList_Append(lanes, item) < 0)
                Py_CLEAR(lanes);
            Py_XDECREF(item);
        }
        PyObject *item = lanes == NULL ? NULL : Py_BuildValue("(LLN)", group->first, group->second, lanes);
        if (item == NULL || PyList_Append(rows, item) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(item);
    }
    return rows;
}

static void
Slices_dealloc(Slices *self)
{
    for (size_t i = 0; self->texts != NULL && i < self->site_count; i++) {
        PyMem_RawFree(self->texts[i].head);
        PyMem_RawFree(self->texts[i].args);
        PyMem_RawFree(self->texts[i].name);
        PyMem_RawFree(self->texts[i].kind);
    }
    for (size_t i = 0; i < self->lane_count; i++) {
        PyMem_RawFree(self->lanes[i].address);
        PyMem_RawFree(self->lanes[i].mark);
        PyMem_RawFree(self->lanes[i].open);
    }
    void *const owned[] = {self->order,  self->site_of,   self->is_request,    self->texts,    self->bound,     self->flows,
                           self->lanes,  self->started,   self->free_lanes,    self->stretches, self->stretch_order,
                           self->encloses, self->text.bytes, self->by_id.by_number};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        PyMem_RawFree(owned[i]);
    table_free(&self->by_id.table);
    table_free(&self->moved);
    groups_free(&self->rows);
    groups_free(&self->tasks);
    groups_free(&self->streams);
    Py_XDECREF(self->spans);
    Py_XDECREF(self->sites);
    Py_XDECREF(self->more_args);
    Py_XDECREF(self->text_of);
    PyObject_Free(self);
}

static PyMethodDef Slices_methods[] = {
    {"start", (PyCFunction)Slices_start, METH_O, "Give the texts of the sites, in the order of `sites`."},
    {"next", (PyCFunction)Slices_next, METH_NOARGS, "The next events as text, nothing at the end."},
    {"rows", (PyCFunction)Slices_rows, METH_NOARGS, "The lanes of threads and streams."},
    {NULL},
};

static PyObject *
Slices_number(Slices *self, void *asks_base)
{
    return asks_base != NULL ? PyLong_FromLongLong(self->base_ns) : PyLong_FromSize_t(self->left_out);
}

static PyObject *
Slices_sites(Slices *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->sites);
}

static PyGetSetDef Slices_attributes[] = {
    {"base_ns", (getter)Slices_number, NULL, "The time from which the file counts.", "base"},
    {"left_out", (getter)Slices_number, NULL, "Arrows that are not drawn.", NULL},
    {"sites", (getter)Slices_sites, NULL, "Every site once, by first sight.", NULL},
    {NULL},
};

static PyTypeObject Slices_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instrument.native._slices.Slices",
    .tp_basicsize = sizeof(Slices),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The slices and arrows of a trace as text.",
    .tp_dealloc = (destructor)Slices_dealloc,
    .tp_methods = Slices_methods,
    .tp_getset = Slices_attributes,
};

/* slices(spans, since_ns, pid, batch, more_args, text_of): a new `Slices`; None where a span is not plain, or no time near enough. */
static PyObject *
slices(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *more_args, *text_of;
    long long since_ns, pid, batch;
    if (!PyArg_ParseTuple(args, "OLLLOO:slices", &spans, &since_ns, &pid, &batch, &more_args, &text_of))
        return NULL;
    Slices *self = PyObject_New(Slices, &Slices_Type);
    if (self == NULL)
        return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->more_args = Py_NewRef(more_args);
    self->text_of = Py_NewRef(text_of);
    self->base_ns = since_ns;
    self->pid = pid;
    self->batch = batch < 1 ? 1 : (size_t)batch;
    self->spare_tid = SPARE_TIDS;
    self->sites = PyList_New(0);
    self->spans = PySequence_Tuple(spans);
    if (self->sites == NULL || self->spans == NULL)
        goto failed;
    self->count = (size_t)PyTuple_GET_SIZE(self->spans);
    int plain = self->count < NOWHERE && since_ns > -FARTHEST && since_ns < FARTHEST;
    int64_t least_id = INT64_MAX, most_id = INT64_MIN;
    for (size_t i = 0; plain && i < self->count; i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(self->spans, i);
        plain = PyObject_TypeCheck((PyObject *)span, span_type) && span->site != NULL;
        if (!plain)
            break;
        least_id = span->span_id < least_id ? span->span_id : least_id;
        most_id = span->span_id > most_id ? span->span_id : most_id;
    }
    if (plain) {
        self->site_of = PyMem_RawMalloc((self->count + 1) * sizeof *self->site_of);
        self->bound = PyMem_RawMalloc((self->count + 1) * sizeof *self->bound);
        self->started = PyMem_RawCalloc(self->count + 1, 1);
        if (self->site_of == NULL || self->bound == NULL || self->started == NULL ||
            put_in_order(self) < 0 ||
            index_make(&self->by_id, self->count, least_id, most_id) < 0 || table_make(&self->moved, 16) < 0 ||
            groups_make(&self->rows) < 0 || groups_make(&self->tasks) < 0) {
            PyErr_NoMemory();
            goto failed;
        }
        memset(self->bound, 0xFF, (self->count + 1) * sizeof *self->bound);
        plain = survey(self);
    }
    if (plain > 0) {
        self->stretches = PyMem_RawMalloc((self->stretch_count + 1) * sizeof *self->stretches);
        if (self->stretches == NULL)
            PyErr_NoMemory();
        if (self->stretches == NULL || plan_arrows(self) < 0)
            goto failed;
        return (PyObject *)self;
    }
    if (plain < 0)
        goto failed;
    Py_DECREF(self);
    Py_RETURN_NONE;
failed:
    Py_DECREF(self);
    return NULL;
}

/* allocations(rows, moved_ns): rows of `Allocations`, so much later, as lists with commas between them; None where they are
 * not plain. The twin is in `allocations.py`. */
#define IN_A_ROW 7

static PyObject *
allocations(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer rows;
    long long moved_ns;
    if (!PyArg_ParseTuple(args, "y*L:allocations", &rows, &moved_ns))
        return NULL;
    text_t text = {0};
    int plain = 1;
    size_t size = IN_A_ROW * sizeof(int64_t), count = (size_t)rows.len / size;
    for (size_t i = 0; plain && !text.failed && i < count; i++) {
        int64_t row[IN_A_ROW];
        memcpy(row, (const char *)rows.buf + i * size, size);
        plain = !__builtin_add_overflow(row[1], moved_ns, &row[1]);
        for (int at = 0; at < IN_A_ROW; at++) {
            put(&text, at ? "," : i ? ",[" : "[", at || !i ? 1 : 2);
            put_number(&text, row[at]);
        }
        PUT(&text, "]");
    }
    PyBuffer_Release(&rows);
    PyObject *written = text.failed ? PyErr_NoMemory()
                        : plain     ? PyBytes_FromStringAndSize(text.bytes, (Py_ssize_t)text.length)
                                    : Py_NewRef(Py_None);
    PyMem_RawFree(text.bytes);
    return written;
}

static PyMethodDef functions[] = {
    {"allocations", allocations, METH_VARARGS, "Rows of allocations as text; None where they are not plain."},
    {"slices", slices, METH_VARARGS, "The slices and arrows of spans as text; None where a span is not plain."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._slices",
    .m_doc = "Slices as text, in C. See `instrument.chrome.slices`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__slices(void)
{
    if (import_spans(&span_type, &interval_type) < 0 || PyType_Ready(&Slices_Type) < 0)
        return NULL;
    return PyModule_Create(&definition);
}
