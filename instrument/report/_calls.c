/* The places of calls in C: the twin of `_Reader` in `calls.py`, which says what it means. */

#include "../_stretches.h"

static PyTypeObject *span_type, *interval_type;
static PyObject *text_exclusive, *text_kind;

#define CLIMBING (NOWHERE - 1)
#define ROOT NOWHERE

typedef struct {
    uint32_t parent; /* the place around it, ROOT for none */
    uint32_t site;
    int64_t thread_id;
    char elsewhere, wanted, inside; /* `elsewhere`: it begins a line */
    int64_t calls, host_max_ns, host_min_ns, first_ns, device_calls, device_max_ns, device_min_ns;
    wide_t host_ns, device_ns;
} spot_t;

typedef struct {
    PyObject *site;
    char of_kinds;
} known_t;

typedef struct {
    uint32_t spot, pair; /* a place, and the number of a device and stream */
    int64_t count, most_ns, least_ns;
    wide_t total_ns;
} use_t;

typedef struct {
    int64_t device, stream;
} pair_t;

typedef struct {
    uint32_t at; /* the number of a span, then that of a call, NOWHERE for none */
    stretch_t stretch;
} held_t;

typedef struct {
    PyObject *own, *kinds, *untimed;
    int64_t first, last;
    int has_tasks;
    table_t by_id, parents, sites, children, elsewhere, threads, lanes, devices, streams, pairs, uses;
    heap_t spots, known, of_pairs, of_uses, held, climbed, call;
    uint32_t *placed; /* the place of the span that stands for an id, by its number */
} tree_t;

#define SPAN(i) ((Span *)PyTuple_GET_ITEM(tree->own, i))
#define SPOT(i) (&((spot_t *)tree->spots.items)[i])
#define KNOWN(i) (&((known_t *)tree->known.items)[i])

/* The number of a site, NOWHERE with an error. */
static uint32_t
number_of(tree_t *tree, PyObject *site)
{
    uint32_t number = numbered(&tree->sites, (int64_t)(intptr_t)site);
    if (number == NOWHERE) {
        PyErr_NoMemory();
        return NOWHERE;
    }
    if (number < tree->known.used)
        return number;
    known_t *made = heap_next(&tree->known, sizeof *made);
    if (made == NULL) {
        PyErr_NoMemory();
        return NOWHERE;
    }
    *made = (known_t){Py_NewRef(site), 0};
    PyObject *kind = PyObject_GetAttr(site, text_kind);
    int is = kind == NULL ? -1 : PySequence_Contains(tree->kinds, kind);
    Py_XDECREF(kind);
    if (is < 0)
        return NOWHERE;
    KNOWN(number)->of_kinds = (char)is;
    return number;
}

/* The place of a site below another, or where it begins a line there, made on first sight. NOWHERE with an error. */
static uint32_t
spot_below(tree_t *tree, uint32_t around, PyObject *site, int64_t thread_id, int elsewhere)
{
    uint32_t of_site = number_of(tree, site);
    if (of_site == NOWHERE)
        return NOWHERE;
    uint32_t *cell;
    if (elsewhere) {
        uint32_t thread = numbered(&tree->threads, thread_id);
        uint32_t lane = thread == NOWHERE ? NOWHERE : numbered(&tree->lanes, PAIR(of_site, thread));
        cell = lane == NOWHERE ? NULL : table_cell(&tree->elsewhere, PAIR(around, lane));
    } else
        cell = table_cell(&tree->children, PAIR(around, of_site));
    if (cell == NULL)
        goto no_memory;
    if (*cell != NOWHERE)
        return *cell;
    uint32_t number = *cell = (uint32_t)tree->spots.used;
    spot_t *made = heap_next(&tree->spots, sizeof *made);
    if (made == NULL)
        goto no_memory;
    memset(made, 0, sizeof *made);
    made->parent = around;
    made->site = of_site;
    made->thread_id = thread_id;
    made->elsewhere = (char)elsewhere;
    made->first_ns = made->host_min_ns = made->device_min_ns = INT64_MAX;
    spot_t *above = elsewhere || around == ROOT ? NULL : SPOT(around);
    int below_one = above != NULL && KNOWN(above->site)->of_kinds;
    made->wanted = (char)(KNOWN(of_site)->of_kinds || below_one);
    made->inside = (char)(below_one || (above != NULL && above->inside));
    return number;
no_memory:
    PyErr_NoMemory();
    return NOWHERE;
}

/* The place of a span by way of its ancestors, which get theirs. NOWHERE with an error. */
static uint32_t
climb(tree_t *tree, Span *span)
{
    tree->climbed.used = 0;
    uint32_t up = table_get(&tree->by_id, span->parent_id);
    while (up != NOWHERE && tree->placed[up] == NOWHERE && SPAN(up)->span_id != span->span_id) {
        uint32_t *next = heap_next(&tree->climbed, sizeof *next);
        if (next == NULL) {
            PyErr_NoMemory();
            return NOWHERE;
        }
        *next = up;
        tree->placed[up] = CLIMBING; /* ids of a damaged file may run in a circle */
        up = table_get(&tree->by_id, SPAN(up)->parent_id);
    }
    uint32_t spot = ROOT;
    for (size_t left = tree->climbed.used + 1; left-- > 0;) {
        uint32_t slot = left == 0 ? NOWHERE : ((uint32_t *)tree->climbed.items)[left - 1];
        Span *one = slot == NOWHERE ? span : SPAN(slot);
        uint32_t above = table_get(&tree->by_id, one->parent_id), around = ROOT;
        if (above != NOWHERE && tree->placed[above] < CLIMBING)
            around = tree->placed[above];
        int elsewhere = above == NOWHERE || SPAN(above)->thread_id != one->thread_id ||
                        SPAN(above)->task_id != one->task_id;
        spot = spot_below(tree, around, one->site, one->thread_id, elsewhere);
        if (spot == NOWHERE)
            return NOWHERE;
        if (slot != NOWHERE)
            tree->placed[slot] = spot;
    }
    return spot;
}

static void
took(spot_t *spot, int64_t device_ns)
{
    spot->device_calls++;
    spot->device_ns += device_ns;
    spot->device_max_ns = device_ns > spot->device_max_ns ? device_ns : spot->device_max_ns;
    spot->device_min_ns = device_ns < spot->device_min_ns ? device_ns : spot->device_min_ns;
}

/* Count a stretch for the stream of a place. 0, or -1 without memory. */
static int
use_stream(tree_t *tree, uint32_t spot, Interval *interval, int64_t took_ns)
{
    uint32_t device = numbered(&tree->devices, interval->device), stream = numbered(&tree->streams, interval->stream);
    uint32_t pair = device == NOWHERE || stream == NOWHERE ? NOWHERE : numbered(&tree->pairs, PAIR(device, stream));
    uint32_t use = pair == NOWHERE ? NOWHERE : numbered(&tree->uses, PAIR(spot, pair));
    if (use == NOWHERE)
        return -1;
    if (pair == tree->of_pairs.used) {
        pair_t *made = heap_next(&tree->of_pairs, sizeof *made);
        if (made == NULL)
            return -1;
        *made = (pair_t){interval->device, interval->stream};
    }
    if (use == tree->of_uses.used) {
        use_t *made = heap_next(&tree->of_uses, sizeof *made);
        if (made == NULL)
            return -1;
        *made = (use_t){spot, pair, 0, took_ns, took_ns, 0};
    }
    use_t *own = &((use_t *)tree->of_uses.items)[use];
    own->count++;
    own->total_ns += took_ns;
    own->most_ns = took_ns > own->most_ns ? took_ns : own->most_ns;
    own->least_ns = took_ns < own->least_ns ? took_ns : own->least_ns;
    return 0;
}

/* Keep the stretches of the call at hand for the calls at and around a span. 0, or -1 without memory. */
static int
hold(tree_t *tree, uint32_t number)
{
    for (size_t i = 0; i < tree->call.used; i++) {
        held_t *next = heap_next(&tree->held, sizeof *next);
        if (next == NULL)
            return -1;
        *next = (held_t){number, ((stretch_t *)tree->call.items)[i]};
    }
    return 0;
}

/* Spans by their ids; the last of an id stands for it. 0, or -1 without memory. */
static int
number_by_id(PyObject *own, table_t *by_id)
{
    size_t total = (size_t)PyTuple_GET_SIZE(own);
    if (table_make(by_id, total) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < total; i++) {
        uint32_t *cell = table_cell(by_id, ((Span *)PyTuple_GET_ITEM(own, i))->span_id);
        if (cell == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        *cell = (uint32_t)i;
        give_way(i);
    }
    return 0;
}

/* The number of the span around one, NOWHERE where there is none on its line. */
static uint32_t
number_around(PyObject *own, const table_t *by_id, const Span *span)
{
    uint32_t up = table_get(by_id, span->parent_id);
    const Span *around = up == NOWHERE ? NULL : (const Span *)PyTuple_GET_ITEM(own, up);
    return around != NULL && around->thread_id == span->thread_id && around->task_id == span->task_id ? up : NOWHERE;
}

/* An interval of a span: 1 if it is timed, 0 if not, -1 with an error, -2 if it is not plain. */
static int
is_timed(const tree_t *tree, PyObject *interval)
{
    if (!Py_IS_TYPE(interval, interval_type))
        return -2;
    PyObject *label = ((Interval *)interval)->label;
    if (label == NULL || label == text_exclusive)
        return 1;
    if (!PyUnicode_CheckExact(label))
        return -2;
    int untimed = PySet_Contains(tree->untimed, label);
    return untimed < 0 ? -1 : !untimed;
}

/* Whether a span has one device interval that holds all stretches of the call at hand: 1 or 0, or as `is_timed`. */
static int
encloses(const tree_t *tree, const Span *span)
{
    if (span->device == NULL || !PyTuple_CheckExact(span->device) || PyTuple_GET_SIZE(span->device) != 1)
        return span->device == NULL || PyTuple_CheckExact(span->device) ? 0 : -2;
    PyObject *own = PyTuple_GET_ITEM(span->device, 0);
    int timed = is_timed(tree, own);
    for (size_t i = 0; timed == 1 && i < tree->call.used; i++) {
        stretch_t *part = &((stretch_t *)tree->call.items)[i];
        timed = ((Interval *)own)->start_ns <= part->start && part->end <= ((Interval *)own)->end_ns;
    }
    return timed;
}

/* Give the device intervals of a span to its call and to those around it that are asked for. `own` is the number of a span
 * that is a parent, else NOWHERE. 1; 0 where they are not plain; -1 with an error. */
static int
take_device(tree_t *tree, Span *span, uint32_t number, uint32_t own)
{
    if (!PyTuple_CheckExact(span->device))
        return 0;
    tree->call.used = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(span->device); i++) {
        Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, i);
        int timed = is_timed(tree, (PyObject *)interval);
        if (timed < 0)
            return timed == -2 ? 0 : -1;
        if (!timed)
            continue;
        int64_t start = interval->start_ns, end = interval->end_ns, took_ns;
        if (start < tree->first || end > tree->last) {
            if (lies_outside(start, end, tree->first, tree->last))
                continue;
            start = start > tree->first ? start : tree->first;
            end = end < tree->last ? end : tree->last;
        }
        if (__builtin_sub_overflow(end, start, &took_ns) || took_ns < 0)
            return 0;
        stretch_t *part = heap_next(&tree->call, sizeof *part);
        if (part == NULL || use_stream(tree, number, interval, took_ns) < 0)
            goto no_memory;
        *part = (stretch_t){start, end};
    }
    if (tree->call.used == 0)
        return 1;
    if (own != NOWHERE) {
        if (hold(tree, own) < 0)
            goto no_memory;
        return 1;
    }
    if (SPOT(number)->wanted) {
        sort_stretches((stretch_t *)tree->call.items, tree->call.used);
        wide_t length = united((stretch_t *)tree->call.items, tree->call.used);
        if (length > INT64_MAX)
            return 0;
        took(SPOT(number), (int64_t)length);
    }
    uint32_t up = number_around(tree->own, &tree->by_id, span);
    if (up == NOWHERE)
        return 1;
    int inside = lies_outside(SPAN(up)->start_ns, SPAN(up)->end_ns, tree->first, tree->last) ? 0 : encloses(tree, SPAN(up));
    if (inside < 0)
        return inside == -2 ? 0 : -1;
    if (inside || hold(tree, up) == 0)
        return 1;
no_memory:
    PyErr_NoMemory();
    return -1;
}

/* Count one span: 1, 0 where it is not plain, -1 with an error. */
static int
count_span(tree_t *tree, Span *span)
{
    int64_t start = span->start_ns, end = span->end_ns, host_ns;
    if (start < tree->first || end > tree->last) {
        if (lies_outside(start, end, tree->first, tree->last))
            return 1;
        start = start > tree->first ? start : tree->first;
        end = end < tree->last ? end : tree->last;
    }
    if (__builtin_sub_overflow(end, start, &host_ns) || host_ns < 0)
        return 0;
    uint32_t above = table_get(&tree->by_id, span->parent_id), number = NOWHERE;
    if (above != NOWHERE && tree->placed[above] < CLIMBING && SPOT(tree->placed[above])->thread_id == span->thread_id &&
        (!tree->has_tasks || SPAN(above)->task_id == span->task_id)) {
        uint32_t site = number_of(tree, span->site);
        if (site == NOWHERE)
            return -1;
        number = table_get(&tree->children, PAIR(tree->placed[above], site));
    }
    if (number == NOWHERE)
        number = climb(tree, span);
    if (number == NOWHERE)
        return -1;
    uint32_t own = table_get(&tree->parents, span->span_id) == NOWHERE ? NOWHERE : table_get(&tree->by_id, span->span_id);
    if (own != NOWHERE) /* also one that has been given an id meanwhile that no span had */
        tree->placed[own] = number;
    spot_t *spot = SPOT(number);
    spot->calls++;
    spot->host_ns += host_ns;
    spot->host_max_ns = host_ns > spot->host_max_ns ? host_ns : spot->host_max_ns;
    spot->host_min_ns = host_ns < spot->host_min_ns ? host_ns : spot->host_min_ns;
    spot->first_ns = start < spot->first_ns ? start : spot->first_ns;
    if (span->device == NULL || !(spot->wanted || spot->inside))
        return 1;
    return take_device(tree, span, number, own);
}

/* ---- what lies below calls */

#define UNKNOWN (NOWHERE - 1)

/* Stretches in order and disjoint, and their length. Those of `borrowed` memory are another's. */
typedef struct {
    stretch_t *items;
    size_t used, room;
    wide_t length;
    char borrowed;
} list_t;

/* A call that has something at or below it; `up` is the nearest call around it. */
typedef struct {
    uint32_t span, up, waiting; /* `waiting`: how many calls right below it are not over */
    char is_done;
    list_t list; /* what has come up from below, and then all of it; what goes up is gone */
    wide_t length;
} call_t;

/* What is held, by call: each stretch is held once, however deep it lies, and goes up from call to call. */
typedef struct {
    PyObject *own;
    const table_t *by_id;
    int (*is_call)(const void *with, uint32_t number);
    const void *with;
    uint32_t *nearest; /* by the number of a span: the nearest call at or around it; UNKNOWN if nobody asked yet */
    uint32_t *call_of; /* by the number of a span */
    stretch_t *laid;   /* what each call has of its own, one call's behind the other's */
    size_t *ends;      /* where that of each call ends */
    heap_t calls, climbed, ready;
} below_t;

#define CALL(i) (&((call_t *)all->calls.items)[i])

static void
list_free(list_t *list)
{
    if (!list->borrowed)
        PyMem_RawFree(list->items);
    *list = (list_t){0};
}

static int
below_make(below_t *all)
{
    size_t size = ((size_t)PyTuple_GET_SIZE(all->own) + 1) * sizeof(uint32_t);
    all->nearest = PyMem_RawMalloc(size);
    all->call_of = PyMem_RawMalloc(size);
    if (all->nearest == NULL || all->call_of == NULL)
        return -1;
    for (size_t i = 0; i < size / sizeof(uint32_t); i++)
        all->nearest[i] = UNKNOWN;
    memset(all->call_of, 0xFF, size);
    return 0;
}

static void
below_free(below_t *all)
{
    PyMem_RawFree(all->nearest);
    PyMem_RawFree(all->call_of);
    for (size_t i = 0; i < all->calls.used; i++)
        list_free(&CALL(i)->list);
    PyMem_RawFree(all->laid);
    PyMem_RawFree(all->ends);
    PyMem_RawFree(all->calls.items);
    PyMem_RawFree(all->climbed.items);
    PyMem_RawFree(all->ready.items);
}

/* Find the nearest call at a span or around it on its line, NOWHERE for none. 0, or -1 without memory. */
static int
find_call(below_t *all, uint32_t number, uint32_t *found)
{
    uint32_t at = number;
    all->climbed.used = 0;
    while (at != NOWHERE && all->nearest[at] == UNKNOWN) {
        if (all->is_call(all->with, at)) {
            all->nearest[at] = at;
            break;
        }
        uint32_t *step = heap_next(&all->climbed, sizeof *step);
        if (step == NULL)
            return -1;
        *step = at;
        all->nearest[at] = NOWHERE; /* which it stays where parents run in a circle without a call */
        at = number_around(all->own, all->by_id, (Span *)PyTuple_GET_ITEM(all->own, at));
    }
    *found = at == NOWHERE ? NOWHERE : all->nearest[at];
    for (size_t i = 0; i < all->climbed.used; i++)
        all->nearest[((uint32_t *)all->climbed.items)[i]] = *found;
    return 0;
}

/* A call, after which come those around it that were not known. Its number, NOWHERE without memory. */
static uint32_t
call_at(below_t *all, uint32_t span)
{
    uint32_t first = all->call_of[span], below = NOWHERE;
    if (first != NOWHERE)
        return first;
    while (span != NOWHERE) {
        uint32_t number = all->call_of[span], around;
        int is_known = number != NOWHERE;
        if (!is_known) {
            call_t *made = heap_next(&all->calls, sizeof *made);
            if (made == NULL)
                return NOWHERE;
            number = all->call_of[span] = (uint32_t)all->calls.used - 1;
            *made = (call_t){.span = span, .up = NOWHERE};
            first = first == NOWHERE ? number : first;
        }
        if (below != NOWHERE) {
            CALL(below)->up = number;
            CALL(number)->waiting++;
        }
        if (is_known)
            break;
        below = number;
        around = number_around(all->own, all->by_id, (Span *)PyTuple_GET_ITEM(all->own, span));
        if (around == NOWHERE)
            break;
        if (find_call(all, around, &span) < 0)
            return NOWHERE;
    }
    return first;
}

/* The first of a list that ends no sooner than a time. */
static size_t
first_until(const list_t *list, int64_t at)
{
    size_t low = 0, high = list->used;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (list->items[middle].end < at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Memory of its own for a list, with room for so many more. 0, or -1 without memory. */
static int
make_room(list_t *list, size_t more)
{
    if (!list->borrowed && list->room - list->used >= more)
        return 0;
    size_t room = list->used + more + list->used / 2;
    stretch_t *larger = PyMem_RawMalloc(room * sizeof *larger);
    if (larger == NULL)
        return -1;
    if (list->used > 0)
        memcpy(larger, list->items, list->used * sizeof *larger);
    if (!list->borrowed)
        PyMem_RawFree(list->items);
    list->items = larger;
    list->room = room;
    list->borrowed = 0;
    return 0;
}

/* Add a stretch to a list of its own memory that has room for it. */
static void
add_stretch(list_t *list, stretch_t part)
{
    size_t first = first_until(list, part.start), next = first;
    for (; next < list->used && list->items[next].start <= part.end; next++) {
        part.start = list->items[next].start < part.start ? list->items[next].start : part.start;
        part.end = list->items[next].end > part.end ? list->items[next].end : part.end;
        list->length -= (wide_t)list->items[next].end - list->items[next].start;
    }
    if (next != first + 1)
        memmove(&list->items[first + 1], &list->items[next], (list->used - next) * sizeof part);
    list->used = list->used - (next - first) + 1;
    list->items[first] = part;
    list->length += (wide_t)part.end - part.start;
}

/* Unite two lists into new memory. 0, or -1 without. */
static int
merge(list_t *into, const list_t *other)
{
    list_t merged = {PyMem_RawMalloc((into->used + other->used) * sizeof(stretch_t)), 0, into->used + other->used, 0, 0};
    if (merged.items == NULL)
        return -1;
    for (size_t i = 0, j = 0; i < into->used || j < other->used;) {
        int is_mine = j == other->used || (i < into->used && into->items[i].start <= other->items[j].start);
        stretch_t part = is_mine ? into->items[i++] : other->items[j++];
        stretch_t *last = merged.used > 0 ? &merged.items[merged.used - 1] : NULL;
        if (last == NULL || part.start > last->end)
            merged.items[merged.used++] = part;
        else if (part.end > last->end)
            last->end = part.end;
    }
    for (size_t i = 0; i < merged.used; i++)
        merged.length += (wide_t)merged.items[i].end - merged.items[i].start;
    list_free(into);
    *into = merged;
    return 0;
}

#define FEW 32 /* of which each finds its place for itself: what lies behind it moves on, at a tenth of a merge's price */

/* Unite a list with another, which is gone then. 0, or -1 without memory. */
static int
take_list(list_t *into, list_t *other)
{
    if (into->used < other->used) {
        list_t smaller = *into;
        *into = *other;
        *other = smaller;
    }
    int is_behind = other->used > 0 && into->items[into->used - 1].end < other->items[0].start;
    if (other->used <= FEW || is_behind) {
        if (other->used > 0 && make_room(into, other->used) < 0)
            return -1;
        if (is_behind) {
            memcpy(&into->items[into->used], other->items, other->used * sizeof *other->items);
            into->used += other->used;
            into->length += other->length;
        } else
            for (size_t i = 0; i < other->used; i++)
                add_stretch(into, other->items[i]);
    } else if (merge(into, other) < 0)
        return -1;
    list_free(other);
    return 0;
}

/* Sort what is held by call. 0, or -1 without memory. */
static int
lay(below_t *all, const heap_t *held)
{
    const held_t *items = (const held_t *)held->items;
    size_t total = 0;
    all->ends = PyMem_RawCalloc(all->calls.used + 2, sizeof *all->ends);
    all->laid = PyMem_RawMalloc((held->used + 1) * sizeof *all->laid);
    if (all->ends == NULL || all->laid == NULL)
        return -1;
    for (size_t i = 0; i < held->used; i++)
        if (items[i].at != NOWHERE)
            all->ends[items[i].at + 1]++;
    for (size_t i = 0; i <= all->calls.used; i++)
        total = all->ends[i] += total;
    for (size_t i = 0; i < held->used; i++)
        if (items[i].at != NOWHERE)
            all->laid[all->ends[items[i].at]++] = items[i].stretch;
    return 0;
}

/* Unite what a call has of its own, which begins at a place, with what came up. 0, or -1 without memory. */
static int
take_own(below_t *all, size_t number, size_t from)
{
    list_t own = {&all->laid[from], 0, 0, 0, 1};
    size_t count = all->ends[number] - from;
    sort_stretches(own.items, count);
    for (size_t i = 0; i < count; i++)
        if (own.used == 0 || own.items[i].start > own.items[own.used - 1].end)
            own.items[own.used++] = own.items[i];
        else if (own.items[i].end > own.items[own.used - 1].end)
            own.items[own.used - 1].end = own.items[i].end;
    for (size_t i = 0; i < own.used; i++)
        own.length += (wide_t)own.items[i].end - own.items[i].start;
    return take_list(&CALL(number)->list, &own);
}

/* Find how long it is together at and below each call, of private memory alone. 0, or -1 without memory. */
static int
send_up(below_t *all)
{
    for (size_t i = 0; i < all->calls.used; i++) {
        uint32_t *ready = CALL(i)->waiting > 0 ? NULL : heap_next(&all->ready, sizeof *ready);
        if (CALL(i)->waiting == 0 && ready == NULL)
            return -1;
        if (ready != NULL)
            *ready = (uint32_t)i;
    }
    for (size_t done = 0; done < all->ready.used; done++) {
        uint32_t number = ((uint32_t *)all->ready.items)[done];
        call_t *call = CALL(number);
        if (take_own(all, number, number == 0 ? 0 : all->ends[number - 1]) < 0)
            return -1;
        call->length = call->list.length;
        call->is_done = 1;
        if (call->up == NOWHERE) {
            list_free(&call->list);
            continue;
        }
        call_t *up = CALL(call->up);
        if (take_list(&up->list, &call->list) < 0)
            return -1;
        if (--up->waiting == 0) {
            uint32_t *ready = heap_next(&all->ready, sizeof *ready);
            if (ready == NULL)
                return -1;
            *ready = call->up;
        }
    }
    /* What is left lies in one another, where parents run in a circle: each has what all of them have. */
    for (size_t i = 0; i < all->calls.used; i++) {
        if (CALL(i)->is_done)
            continue;
        uint32_t at = (uint32_t)i;
        do {
            if (take_own(all, at, at == 0 ? 0 : all->ends[at - 1]) < 0)
                return -1;
            if (at != i && take_list(&CALL(i)->list, &CALL(at)->list) < 0)
                return -1;
            at = CALL(at)->up;
        } while (at != i);
        do {
            CALL(at)->length = CALL(i)->list.length;
            CALL(at)->is_done = 1;
            at = CALL(at)->up;
        } while (at != i);
    }
    return 0;
}

/* Lay what is held at the calls for which it is, and find how long it is together at and below each. 0, or -1 without memory. */
static int
settle(below_t *all, heap_t *held)
{
    if (held->used >= UNKNOWN)
        return -1;
    for (size_t i = 0; i < held->used; i++) {
        held_t *one = &((held_t *)held->items)[i];
        uint32_t span;
        if (find_call(all, one->at, &span) < 0)
            return -1;
        one->at = span == NOWHERE ? NOWHERE : call_at(all, span);
        if (span != NOWHERE && one->at == NOWHERE)
            return -1;
        give_way(i);
    }
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = lay(all, held) < 0 ? -1 : send_up(all);
    Py_END_ALLOW_THREADS
    return done;
}

static int
is_wanted(const void *with, uint32_t number)
{
    const tree_t *tree = with;
    return tree->placed[number] < CLIMBING && SPOT(tree->placed[number])->wanted;
}

/* What calls have of stretches of their own and of calls below them: unions of each. 1, 0 where a sum is beyond 64 bits,
 * -1 without memory. */
static int
take_held(tree_t *tree)
{
    below_t below = {.own = tree->own, .by_id = &tree->by_id, .is_call = is_wanted, .with = tree}, *all = &below;
    int plain = below_make(all) < 0 || settle(all, &tree->held) < 0 ? -1 : 1;
    for (size_t i = 0; plain > 0 && i < all->calls.used; i++) {
        const call_t *call = CALL(i);
        if (lies_outside(SPAN(call->span)->start_ns, SPAN(call->span)->end_ns, tree->first, tree->last))
            continue;
        plain = call->length <= INT64_MAX;
        if (plain)
            took(SPOT(tree->placed[call->span]), (int64_t)call->length);
        give_way(i);
    }
    below_free(all);
    if (plain < 0)
        PyErr_NoMemory();
    return plain;
}

/* ([a place as `Place.of_row` takes it], [(place, device, stream, count, sum, greatest, least)]) */
static PyObject *
found(tree_t *tree)
{
    PyObject *spots = PyList_New(0), *uses = PyList_New(0);
    int done = spots == NULL || uses == NULL ? -1 : 0;
    for (size_t i = 0; done == 0 && i < tree->spots.used; i++) {
        spot_t *spot = SPOT(i);
        PyObject *item = Py_BuildValue(
            "(LOLOLNLLLLNLL)", spot->parent == ROOT ? -1LL : (long long)spot->parent, KNOWN(spot->site)->site,
            spot->thread_id, spot->elsewhere ? Py_True : Py_False, spot->calls, wide_as_long(spot->host_ns),
            spot->host_max_ns, spot->host_min_ns, spot->first_ns, spot->device_calls, wide_as_long(spot->device_ns),
            spot->device_max_ns, spot->device_min_ns);
        done = item == NULL ? -1 : PyList_Append(spots, item);
        Py_XDECREF(item);
        give_way(i);
    }
    for (size_t i = 0; done == 0 && i < tree->of_uses.used; i++) {
        use_t *use = &((use_t *)tree->of_uses.items)[i];
        pair_t *pair = &((pair_t *)tree->of_pairs.items)[use->pair];
        PyObject *item = Py_BuildValue("(ILLLNLL)", use->spot, pair->device, pair->stream, use->count,
                                       wide_as_long(use->total_ns), use->most_ns, use->least_ns);
        done = item == NULL ? -1 : PyList_Append(uses, item);
        Py_XDECREF(item);
        give_way(i);
    }
    if (done == 0)
        return Py_BuildValue("(NN)", spots, uses);
    Py_XDECREF(spots);
    Py_XDECREF(uses);
    return NULL;
}

/* places(spans, kinds, first_ns, last_ns, untimed): what `call_tree` makes its tree of. None where they are not plain. */
static PyObject *
places(PyObject *Py_UNUSED(module), PyObject *args)
{
    tree_t all = {0}, *tree = &all;
    PyObject *spans, *result = NULL;
    long long first, last;
    if (!PyArg_ParseTuple(args, "OOLLO!:places", &spans, &tree->kinds, &first, &last, &PyFrozenSet_Type, &tree->untimed))
        return NULL;
    tree->own = spans_of_type(spans, span_type);
    if (tree->own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    tree->first = first;
    tree->last = last;
    size_t total = (size_t)PyTuple_GET_SIZE(tree->own);
    table_t *small[] = {&tree->sites, &tree->children, &tree->elsewhere, &tree->threads, &tree->lanes,
                        &tree->devices, &tree->streams, &tree->pairs, &tree->uses, &tree->parents};
    int made = table_make(&tree->by_id, total), plain = 1;
    for (size_t i = 0; made == 0 && i < sizeof small / sizeof *small; i++)
        made = table_make(small[i], 64);
    tree->placed = PyMem_RawMalloc((total + 1) * sizeof *tree->placed);
    if (made < 0 || tree->placed == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    memset(tree->placed, 0xFF, (total + 1) * sizeof *tree->placed);
    for (size_t i = 0; i < total; i++) {
        Span *span = SPAN(i);
        *table_cell(&tree->by_id, span->span_id) = (uint32_t)i; /* it has room for all; the last of an id stands for it */
        tree->has_tasks |= span->task_id != 0;
        if (numbered(&tree->parents, span->parent_id) == NOWHERE) {
            PyErr_NoMemory();
            goto end;
        }
        give_way(i);
    }
    for (size_t i = 0; plain && i < total; i++) {
        plain = count_span(tree, SPAN(i));
        if (plain < 0)
            goto end;
        give_way(i);
    }
    if (plain)
        plain = take_held(tree);
    if (plain >= 0)
        result = plain ? found(tree) : Py_NewRef(Py_None);
end:
    for (size_t i = 0; i < tree->known.used; i++)
        Py_DECREF(KNOWN(i)->site);
    for (size_t i = 0; i < sizeof small / sizeof *small; i++)
        table_free(small[i]);
    table_free(&tree->by_id);
    heap_t *heaps[] = {&tree->spots, &tree->known, &tree->of_pairs, &tree->of_uses, &tree->held, &tree->climbed,
                       &tree->call};
    for (size_t i = 0; i < sizeof heaps / sizeof *heaps; i++)
        PyMem_RawFree(heaps[i]->items);
    PyMem_RawFree(tree->placed);
    Py_DECREF(tree->own);
    return result;
}

/* Number a span, after those around it on its line that have no number yet: `climbed` are these, and `arounds` the number of
 * the one right around each, NOWHERE for none. 0, or -1 with an error. */
static int
take_line(PyObject *own, const table_t *by_id, table_t *numbers, PyObject *nodes, heap_t *arounds, heap_t *climbed, Span *span)
{
    uint32_t around = NOWHERE;
    climbed->used = 0;
    for (Span *one = span;;) {
        uint32_t *number = table_cell(numbers, (int64_t)(intptr_t)one);
        Span **step = number == NULL || *number != NOWHERE ? NULL : heap_next(climbed, sizeof *step);
        if (number == NULL || (step == NULL && *number == NOWHERE)) {
            PyErr_NoMemory();
            return -1;
        }
        if (step == NULL) { /* CLIMBING: parents of a damaged file may run in a circle */
            around = *number == CLIMBING ? NOWHERE : *number;
            break;
        }
        *step = one;
        *number = CLIMBING;
        uint32_t up = number_around(own, by_id, one);
        if (up == NOWHERE)
            break;
        one = (Span *)PyTuple_GET_ITEM(own, up);
    }
    while (climbed->used > 0) {
        Span *one = ((Span **)climbed->items)[--climbed->used];
        uint32_t *place = heap_next(arounds, sizeof *place);
        if (place == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        *place = around;
        around = (uint32_t)PyList_GET_SIZE(nodes);
        numbers->values[table_place(numbers, (int64_t)(intptr_t)one)] = around;
        if (PyList_Append(nodes, (PyObject *)one) < 0)
            return -1;
    }
    return 0;
}

/* lines(spans, some): some of the spans and those around them on their lines, each once and after the one right around it,
 * and the number of that one of each, as one of 32 bits: -1 for none. None where they are not plain. */
static PyObject *
lines(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *chosen, *nodes = NULL, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO:lines", &spans, &chosen))
        return NULL;
    PyObject *own = spans_of_type(spans, span_type), *some = own == NULL ? NULL : spans_of_type(chosen, span_type);
    table_t by_id = {0}, numbers = {0}; /* by the address of a span, which `own` and `some` hold */
    heap_t arounds = {0}, climbed = {0};
    if (some == NULL || (nodes = PyList_New(0)) == NULL || number_by_id(own, &by_id) < 0)
        goto end;
    int done = table_make(&numbers, 64);
    if (done < 0)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; done == 0 && i < PyTuple_GET_SIZE(some); i++) {
        done = take_line(own, &by_id, &numbers, nodes, &arounds, &climbed, (Span *)PyTuple_GET_ITEM(some, i));
        give_way((size_t)i);
    }
    if (done == 0)
        result = Py_BuildValue("(ON)", nodes, heap_bytes(&arounds, sizeof(uint32_t)));
end:
    if (result == NULL && !PyErr_Occurred())
        result = Py_NewRef(Py_None);
    table_free(&by_id);
    table_free(&numbers);
    PyMem_RawFree(arounds.items);
    PyMem_RawFree(climbed.items);
    Py_XDECREF(nodes);
    Py_XDECREF(some);
    Py_XDECREF(own);
    return result;
}

/* Hold the timed intervals of spans for the calls at and around them. 1, 0 where they are not plain, -1 with an error. */
static int
hold_all(below_t *all, PyObject *untimed, heap_t *held)
{
    tree_t labels = {.untimed = untimed};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all->own); i++) {
        const Span *span = (Span *)PyTuple_GET_ITEM(all->own, i);
        give_way((size_t)i);
        if (span->device == NULL)
            continue;
        if (!PyTuple_CheckExact(span->device))
            return 0;
        uint32_t number = table_get(all->by_id, span->span_id), call;
        if (number == NOWHERE)
            return 0; /* somebody changed an id meanwhile */
        if (find_call(all, number, &call) < 0) {
            PyErr_NoMemory();
            return -1;
        }
        if (call == NOWHERE)
            continue;
        for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(span->device); n++) {
            const Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, n);
            int timed = is_timed(&labels, (PyObject *)interval);
            if (timed < 0)
                return timed == -2 ? 0 : -1;
            if (!timed || interval->end_ns <= interval->start_ns)
                continue;
            held_t *next = heap_next(held, sizeof *next);
            if (next == NULL) {
                PyErr_NoMemory();
                return -1;
            }
            *next = (held_t){call, {interval->start_ns, interval->end_ns}};
        }
    }
    return 1;
}

typedef struct {
    PyObject *own;
    table_t ids;
} asked_t;

static int
is_asked(const void *with, uint32_t number)
{
    const asked_t *asked = with;
    return table_get(&asked->ids, ((Span *)PyTuple_GET_ITEM(asked->own, number))->span_id) != NOWHERE;
}

/* device_ns(spans, ids, untimed): what `device_ns` in `calls.py` finds of the calls of these ids. None where spans are not
 * plain. */
static PyObject *
device_ns(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *ids, *untimed, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO!O!:device_ns", &spans, &PyTuple_Type, &ids, &PyFrozenSet_Type, &untimed))
        return NULL;
    table_t by_id = {0};
    heap_t held = {0};
    asked_t asked = {spans_of_type(spans, span_type), {0}};
    below_t below = {.own = asked.own, .by_id = &by_id, .is_call = is_asked, .with = &asked}, *all = &below;
    if (asked.own == NULL || number_by_id(asked.own, &by_id) < 0)
        goto end;
    if (table_make(&asked.ids, (size_t)PyTuple_GET_SIZE(ids)) < 0 || below_make(all) < 0) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ids); i++) {
        long long id = PyLong_AsLongLong(PyTuple_GET_ITEM(ids, i));
        if (id == -1 && PyErr_Occurred())
            goto end;
        *table_cell(&asked.ids, id) = (uint32_t)i; /* it has room for all */
    }
    if (hold_all(all, untimed, &held) <= 0)
        goto end;
    if (settle(all, &held) < 0) {
        PyErr_NoMemory();
        goto end;
    }
    result = PyDict_New();
    for (size_t i = 0; result != NULL && i < all->calls.used; i++) {
        PyObject *id = PyLong_FromLongLong(((Span *)PyTuple_GET_ITEM(asked.own, CALL(i)->span))->span_id);
        PyObject *length = wide_as_long(CALL(i)->length);
        if (id == NULL || length == NULL || PyDict_SetItem(result, id, length) < 0)
            Py_CLEAR(result);
        Py_XDECREF(id);
        Py_XDECREF(length);
    }
end:
    if (result == NULL && !PyErr_Occurred())
        result = Py_NewRef(Py_None);
    below_free(all);
    table_free(&by_id);
    table_free(&asked.ids);
    PyMem_RawFree(held.items);
    Py_XDECREF(asked.own);
    return result;
}

static PyMethodDef functions[] = {
    {"places", places, METH_VARARGS, "Sums over the calls of each place in the call tree, and over each stream's part."},
    {"lines", lines, METH_VARARGS, "Some spans and those around them on their lines, each once."},
    {"device_ns", device_ns, METH_VARARGS, "How long devices worked for calls and for what is below them on their lines."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.report._calls",
    .m_doc = "Calls by their place, in C. See `instrument.report.calls`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__calls(void)
{
    text_exclusive = PyUnicode_InternFromString("exclusive");
    text_kind = PyUnicode_InternFromString("kind");
    if (text_exclusive == NULL || text_kind == NULL || import_spans(&span_type, &interval_type) < 0)
        return NULL;
    return PyModule_Create(&definition);
}
