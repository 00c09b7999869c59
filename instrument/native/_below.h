/* What lies below calls: each stretch of a span is held once, however deep it lies, and goes up from call to call as part of
 * a list of what is united, the smaller list into the larger. `calls.py` says what it means; its twin is `_Below` there.
 */

#ifndef INSTRUMENT_BELOW_H
#define INSTRUMENT_BELOW_H

#include "_stretches.h"

/* A stretch that is held for the calls at and around a span. */
typedef struct {
    uint32_t at; /* the number of a span, then that of a call, NOWHERE for none */
    stretch_t stretch;
} held_t;

#define UNKNOWN (NOWHERE - 1)

/* Spans by their ids; the last of an id stands for it. 0, or -1 without memory. */
static inline int
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
static inline uint32_t
number_around(PyObject *own, const table_t *by_id, const Span *span)
{
    uint32_t up = table_get(by_id, span->parent_id);
    const Span *around = up == NOWHERE ? NULL : (const Span *)PyTuple_GET_ITEM(own, up);
    return around != NULL && around->thread_id == span->thread_id && around->task_id == span->task_id ? up : NOWHERE;
}

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

static inline void
list_free(list_t *list)
{
    if (!list->borrowed)
        PyMem_RawFree(list->items);
    *list = (list_t){0};
}

static inline int
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

static inline void
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
static inline int
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
static inline uint32_t
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
static inline size_t
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
static inline int
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
static inline void
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
static inline int
merge(list_t *into, const list_t *other)
{
    list_t merged = {PyMem_RawMalloc((into->used + other->used) * sizeof(stretch_t)), 0, into->used + other->used, 0, 0};
    if (merged.items == NULL)
        return -1;
    for (size_t i = 0, j = 0; i < into->used || j < other->used;) {
        int is_mine = j == other->used || (i < into->used && into->items[i].start <= other->items[j].start);
        merged.items[i + j] = is_mine ? into->items[i] : other->items[j];
        i += (size_t)is_mine;
        j += (size_t)!is_mine;
    }
    merged.used = unite(merged.items, merged.room);
    merged.length = united(merged.items, merged.used);
    list_free(into);
    *into = merged;
    return 0;
}

#define FEW 32 /* of which each finds its place for itself, and only what lies behind it moves on */

/* Unite a list with another, which is gone then. 0, or -1 without memory. */
static inline int
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
static inline int
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
static inline int
take_own(below_t *all, size_t number, size_t from)
{
    list_t own = {&all->laid[from], 0, 0, 0, 1};
    size_t count = all->ends[number] - from;
    sort_stretches(own.items, count);
    own.used = unite(own.items, count);
    own.length = united(own.items, own.used);
    return take_list(&CALL(number)->list, &own);
}

/* Find how long it is together at and below each call, of private memory alone. 0, or -1 without memory. */
static inline int
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
static inline int
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

#endif
