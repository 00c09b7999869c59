/* Allocations by their place in C: the twin of the loop in `allocations.py`, which says what it means. */

#include "../_stretches.h"

static PyTypeObject *span_type, *interval_type;
static PyObject *text_correlation;

/* As `spans_of_type`. */
static PyObject *
own_spans(PyObject *spans)
{
    return spans_of_type(spans, span_type);
}

typedef struct {
    int64_t device, since_ns, thread_id, size_bytes, address, allocated_bytes, reserved_bytes;
} allocation_t;

/* Places that are no sites come before these. */
enum { UNKNOWN, NO_SPAN, SHARED, SITES };

#define ON_HOST (-1)
#define MOST_ALLOCATORS 4096

/* A span that is open, on its thread between the one that began before it and the one that began after. */
typedef struct {
    int64_t end_ns, span_id, parent_id;
    uint32_t site, task, thread, before, after, seen;
} open_t;

typedef struct {
    int64_t end_ns;
    uint32_t at;
} end_t;

/* A thread that allocated, and its innermost span at a time. */
typedef struct {
    int64_t thread_id;
    uint32_t last, count; /* of its spans that are open: the one that began last */
    uint32_t place;
    int is_told; /* whether the place is that of those that are open */
} thread_t;

typedef struct {
    wide_t begin, peak;
    int64_t end;
    uint32_t at; /* the allocation that reached the peak, NOWHERE where none rose above the begin */
} level_t;

typedef struct {
    int64_t device;
    level_t allocated, reserved;
    wide_t earlier_bytes;
    table_t held; /* which allocation holds an address */
} allocator_t;

typedef struct {
    int64_t device, thread_id;
    uint32_t place;
    int64_t allocations, frees;
    wide_t allocated_bytes, freed_bytes, held_bytes;
} use_t;

typedef struct {
    const char *rows;
    uint32_t count, *placed; /* of each allocation its place, then its use; NOWHERE where it does not count */
    int64_t base_ns, first, last, known_since;
    int state, apart, launches;
    int64_t outside;
    sites_t sites;
    heap_t threads, allocators, uses;
    heap_t open, ends, of_task; /* spans that are open, the first of them to end first; how many are of each task */
    uint32_t spare, walks;      /* an item of `open` that is free, and from there on the next */
    int ids_twice;
    table_t thread_of, allocator_of, places, use_of, tasks, task_on, by_id;
} memory_t;

static inline allocation_t
allocation_at(const memory_t *all, uint32_t at)
{
    allocation_t one;
    memcpy(&one, all->rows + at * sizeof one, sizeof one);
    return one;
}

/* Which allocations count, and of which threads; *ordered tells whether they come by time. 1, 0 where one is not plain, -1
 * without memory. */
static int
choose(memory_t *all, int *ordered)
{
    int64_t before = INT64_MIN;
    *ordered = 1;
    for (uint32_t i = 0; i < all->count; i++) {
        allocation_t one = allocation_at(all, i);
        int64_t at_ns;
        if (__builtin_add_overflow(all->base_ns, one.since_ns, &at_ns))
            return 0;
        all->placed[i] = NOWHERE;
        if (at_ns < all->first || at_ns > all->last) {
            all->outside++;
            continue;
        }
        if (all->state != 0 && (one.device == ON_HOST) != (all->state == 1))
            continue;
        *ordered &= at_ns >= before;
        before = at_ns;
        uint32_t thread = numbered(&all->thread_of, one.thread_id);
        if (thread == all->threads.used) {
            thread_t *made = heap_next(&all->threads, sizeof *made);
            if (made != NULL)
                *made = (thread_t){one.thread_id, NOWHERE, 0, NO_SPAN, 1};
        }
        if (thread >= all->threads.used)
            return -1;
        all->placed[i] = UNKNOWN;
        give_way(i);
    }
    return 1;
}

/* Add an end to those that wait, the first of which is the least: each comes no later than the two below it. 0, or -1
 * without memory. */
static int
push_end(heap_t *ends, end_t one)
{
    if (heap_next(ends, sizeof one) == NULL)
        return -1;
    end_t *items = (end_t *)ends->items;
    size_t at = ends->used - 1;
    for (; at > 0 && items[(at - 1) / 2].end_ns > one.end_ns; at = (at - 1) / 2)
        items[at] = items[(at - 1) / 2];
    items[at] = one;
    return 0;
}

/* Take the first of the ends. */
static uint32_t
pop_end(heap_t *ends)
{
    end_t *items = (end_t *)ends->items, moved = items[--ends->used];
    uint32_t first = items[0].at;
    size_t at = 0;
    for (size_t below = 1; below < ends->used; below = 2 * at + 1) {
        below += below + 1 < ends->used && items[below + 1].end_ns < items[below].end_ns;
        if (items[below].end_ns >= moved.end_ns)
            break;
        items[at] = items[below];
        at = below;
    }
    items[at] = moved;
    return first;
}

/* A span that has begun: open on its thread, if it is still so at a time and its body runs all along. 1, 0 where it is not
 * plain, -1 with an error. */
static int
open_span(memory_t *all, Span *span, int64_t at_ns)
{
    uint32_t thread = table_get(&all->thread_of, span->thread_id), site = 0;
    if (thread == NOWHERE || span->end_ns <= at_ns || span->active_ns < (wide_t)span->end_ns - span->start_ns)
        return 1;
    if (all->launches && span->attributes != NULL) {
        if (!PyDict_CheckExact(span->attributes))
            return 0;
        int launches = PyDict_Contains(span->attributes, text_correlation);
        if (launches != 0)
            return launches;
    }
    if (span->site == NULL || fact_of(&all->sites, span->site, nothing_of, NULL, &site) == NULL)
        return span->site == NULL ? 0 : -1;
    uint32_t task = numbered(&all->tasks, span->task_id);
    task = task == NOWHERE ? NOWHERE : numbered(&all->task_on, PAIR(thread, task));
    uint32_t *of_task = task == all->of_task.used ? heap_next(&all->of_task, sizeof *of_task) : NULL;
    if (of_task != NULL)
        *of_task = 0;
    uint32_t at = all->spare;
    if (at == NOWHERE && heap_next(&all->open, sizeof(open_t)) != NULL)
        at = (uint32_t)all->open.used - 1;
    uint32_t *own = all->ids_twice ? NULL : table_cell(&all->by_id, span->span_id);
    if (task >= all->of_task.used || at == NOWHERE || (own == NULL && !all->ids_twice) ||
        push_end(&all->ends, (end_t){span->end_ns, at}) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    open_t *open = (open_t *)all->open.items;
    thread_t *on = &((thread_t *)all->threads.items)[thread];
    if (at == all->spare)
        all->spare = open[at].after;
    if (own != NULL) {
        all->ids_twice = *own != NOWHERE;
        *own = at;
    }
    open[at] = (open_t){span->end_ns, span->span_id, span->parent_id, site + SITES, task, thread, on->last, NOWHERE, 0};
    if (on->last != NOWHERE)
        open[on->last].after = at;
    on->last = at;
    on->count++;
    on->is_told = 0;
    ((uint32_t *)all->of_task.items)[task]++;
    return 1;
}

/* Close the spans that have ended by a time. */
static void
close_spans(memory_t *all, int64_t at_ns)
{
    open_t *open = (open_t *)all->open.items;
    while (all->ends.used > 0 && ((end_t *)all->ends.items)->end_ns <= at_ns) {
        uint32_t at = pop_end(&all->ends);
        thread_t *on = &((thread_t *)all->threads.items)[open[at].thread];
        if (open[at].before != NOWHERE)
            open[open[at].before].after = open[at].after;
        if (open[at].after != NOWHERE)
            open[open[at].after].before = open[at].before;
        else
            on->last = open[at].before;
        on->count--;
        on->is_told = 0;
        ((uint32_t *)all->of_task.items)[open[at].task]--;
        if (!all->ids_twice)
            table_drop(&all->by_id, table_place(&all->by_id, open[at].span_id));
        open[at].after = all->spare;
        all->spare = at;
    }
}

/* The innermost of the spans that are open on a thread, SHARED where several tasks have some that are not around it;
 * NOWHERE without memory. */
static uint32_t
innermost_on(memory_t *all, uint32_t thread)
{
    thread_t *on = &((thread_t *)all->threads.items)[thread];
    open_t *open = (open_t *)all->open.items, *last = &open[on->last];
    uint32_t others = on->count - ((uint32_t *)all->of_task.items)[last->task], around = 0, walk = ++all->walks;
    table_t own = {0}, *by_id = &all->by_id;
    if (others == 0)
        return last->site;
    if (all->ids_twice) { /* of one id the last stands for all */
        by_id = &own;
        if (table_make(&own, on->count) < 0)
            return NOWHERE;
        for (uint32_t at = on->last; at != NOWHERE; at = open[at].before) {
            uint32_t *cell = table_cell(&own, open[at].span_id); /* it has room for all */
            *cell = *cell == NOWHERE ? at : *cell;
        }
    }
    for (uint32_t at = on->last; at != NOWHERE && open[at].thread == thread && open[at].seen != walk;) {
        open[at].seen = walk;
        around += open[at].task != last->task;
        at = table_get(by_id, open[at].parent_id);
    }
    if (all->ids_twice) {
        around = 0;
        for (uint32_t at = on->last; at != NOWHERE; at = open[at].before)
            around += open[at].task != last->task && open[table_get(&own, open[at].span_id)].seen == walk;
        table_free(&own);
    }
    return around == others ? last->site : SHARED;
}

/* The place of what happens on a thread; NOWHERE without memory. */
static uint32_t
place_on(memory_t *all, uint32_t thread)
{
    thread_t *on = &((thread_t *)all->threads.items)[thread];
    if (!on->is_told) {
        on->place = on->count == 0 ? NO_SPAN : innermost_on(all, thread);
        on->is_told = 1;
    }
    return on->place;
}

/* Find the place of each allocation that counts, in one way through the spans by start and the allocations by time. 1, 0
 * where one is not plain, -1 with an error. */
static int
find_places(memory_t *all, PyObject *spans, int ordered)
{
    uint32_t *order = NULL;
    place_t *times = NULL;
    size_t count = (size_t)PyTuple_GET_SIZE(spans), coming = 0, counted = all->count;
    int plain = -1;
    if (order_spans(&PyTuple_GET_ITEM(spans, 0), count, 1, &order) < 0)
        goto without_memory;
    if (!ordered) {
        times = PyMem_RawMalloc(2 * counted * sizeof *times);
        if (times == NULL)
            goto without_memory;
        counted = 0;
        for (uint32_t i = 0; i < all->count; i++)
            if (all->placed[i] != NOWHERE)
                times[counted++] = (place_t){allocation_at(all, i).since_ns, 0, i, i};
        sort_places(times, times + counted, counted, 0);
    }
    plain = 1;
    for (size_t i = 0; plain > 0 && i < counted; i++) {
        uint32_t at = times == NULL ? (uint32_t)i : times[i].index;
        give_way(i);
        if (all->placed[at] == NOWHERE)
            continue;
        allocation_t one = allocation_at(all, at);
        int64_t at_ns = all->base_ns + one.since_ns;
        for (; plain > 0 && coming < count; coming++) {
            Span *span = (Span *)PyTuple_GET_ITEM(spans, order == NULL ? coming : order[coming]);
            if (span->start_ns > at_ns)
                break;
            plain = open_span(all, span, at_ns);
            give_way(coming);
        }
        if (plain <= 0 || at_ns < all->known_since)
            continue;
        close_spans(all, at_ns);
        all->placed[at] = place_on(all, table_get(&all->thread_of, one.thread_id));
        if (all->placed[at] == NOWHERE)
            goto without_memory;
    }
    goto end;
without_memory:
    PyErr_NoMemory();
    plain = -1;
end:
    PyMem_RawFree(order);
    PyMem_RawFree(times);
    return plain;
}

static void
rise(level_t *level, int64_t level_bytes, uint32_t at)
{
    if (level_bytes > level->peak) {
        level->peak = level_bytes;
        level->at = at;
    }
    level->end = level_bytes;
}

/* The allocator of a device, NULL without memory. */
static allocator_t *
allocator_of(memory_t *all, const allocation_t *one, uint32_t *number)
{
    *number = numbered(&all->allocator_of, one->device);
    if (*number == all->allocators.used) {
        allocator_t *made = heap_next(&all->allocators, sizeof *made);
        if (made == NULL)
            return NULL;
        wide_t begin = (wide_t)one->allocated_bytes - one->size_bytes;
        *made = (allocator_t){.device = one->device,
                              .allocated = {begin, begin, 0, NOWHERE},
                              .reserved = {one->reserved_bytes, one->reserved_bytes, 0, NOWHERE}};
        if (table_make(&made->held, 64) < 0) {
            all->allocators.used--;
            return NULL;
        }
    }
    return *number < all->allocators.used ? &((allocator_t *)all->allocators.items)[*number] : NULL;
}

/* The number of what was done at a place, NOWHERE without memory. */
static uint32_t
use_of(memory_t *all, uint32_t allocator, const allocation_t *one, uint32_t place)
{
    uint32_t pair = numbered(&all->places, PAIR(allocator, place));
    uint32_t thread = all->apart ? table_get(&all->thread_of, one->thread_id) : 0;
    uint32_t use = pair == NOWHERE ? NOWHERE : numbered(&all->use_of, PAIR(pair, thread));
    if (use == all->uses.used) {
        use_t *made = heap_next(&all->uses, sizeof *made);
        if (made != NULL)
            *made = (use_t){.device = one->device, .thread_id = all->apart ? one->thread_id : 0, .place = place};
    }
    return use < all->uses.used ? use : NOWHERE;
}

/* Sums, levels and what is still held, in the order in which they stand. 1, 0 where they are of more devices than any
 * process has, -1 without memory. */
static int
sum_up(memory_t *all)
{
    for (uint32_t i = 0; i < all->count; i++) {
        give_way(i);
        if (all->placed[i] == NOWHERE)
            continue;
        allocation_t one = allocation_at(all, i);
        uint32_t number;
        allocator_t *of = allocator_of(all, &one, &number);
        uint32_t at = of == NULL ? NOWHERE : use_of(all, number, &one, all->placed[i]);
        if (at == NOWHERE)
            return -1;
        if (number >= MOST_ALLOCATORS)
            return 0;
        all->placed[i] = at;
        use_t *uses = (use_t *)all->uses.items;
        size_t cell = table_place(&of->held, one.address);
        uint32_t before = of->held.values[cell];
        if (before != NOWHERE) /* taken again where it was never given back: that was not told */
            uses[all->placed[before]].held_bytes -= allocation_at(all, before).size_bytes;
        if (one.size_bytes >= 0) {
            uses[at].allocations++;
            uses[at].allocated_bytes += one.size_bytes;
            uses[at].held_bytes += one.size_bytes;
            uint32_t *holder = table_cell(&of->held, one.address);
            if (holder == NULL)
                return -1;
            *holder = i;
        } else {
            uses[at].frees++;
            uses[at].freed_bytes -= one.size_bytes;
            if (before == NOWHERE)
                of->earlier_bytes -= one.size_bytes;
            else
                table_drop(&of->held, cell);
        }
        rise(&of->allocated, one.allocated_bytes, i);
        rise(&of->reserved, one.reserved_bytes, i);
    }
    return 1;
}

static PyObject *
place_object(memory_t *all, uint32_t place, PyObject *const *names)
{
    return place < SITES ? names[place] : ((site_fact_t *)all->sites.facts.items)[place - SITES].site;
}

static PyObject *
level_object(memory_t *all, const level_t *level, PyObject *const *names)
{
    uint32_t use = level->at == NOWHERE ? NOWHERE : all->placed[level->at];
    PyObject *place = use == NOWHERE ? Py_None : place_object(all, ((use_t *)all->uses.items)[use].place, names);
    return Py_BuildValue("(NNLLO)", wide_as_long(level->begin), wide_as_long(level->peak), (long long)level->end,
                         level->at == NOWHERE ? -1LL : (long long)level->at, place);
}

static PyObject *
memory_object(memory_t *all, PyObject *const *names)
{
    PyObject *uses = PyList_New(0), *allocators = PyList_New(0), *threads = PyList_New(0);
    int done = uses == NULL || allocators == NULL || threads == NULL ? -1 : 0;
    for (size_t i = 0; done == 0 && i < all->uses.used; i++) {
        use_t *use = &((use_t *)all->uses.items)[i];
        done = append_new(uses, Py_BuildValue("(LOLLLNNN)", (long long)use->device,
                                              place_object(all, use->place, names), (long long)use->thread_id,
                                              (long long)use->allocations, (long long)use->frees,
                                              wide_as_long(use->allocated_bytes), wide_as_long(use->freed_bytes),
                                              wide_as_long(use->held_bytes)));
    }
    for (size_t i = 0; done == 0 && i < all->allocators.used; i++) {
        allocator_t *of = &((allocator_t *)all->allocators.items)[i];
        done = append_new(allocators, Py_BuildValue("(LNNN)", (long long)of->device,
                                                    level_object(all, &of->allocated, names),
                                                    level_object(all, &of->reserved, names),
                                                    wide_as_long(of->earlier_bytes)));
    }
    for (size_t i = 0; done == 0 && i < all->threads.used; i++)
        done = append_new(threads, PyLong_FromLongLong(((thread_t *)all->threads.items)[i].thread_id));
    if (done == 0)
        return Py_BuildValue("(NNNL)", uses, allocators, threads, (long long)all->outside);
    Py_XDECREF(uses);
    Py_XDECREF(allocators);
    Py_XDECREF(threads);
    return NULL;
}

/* memory(spans, rows, base_ns, first_ns, last_ns, known_since_ns, state, apart, launches, names): what was taken and given
 * back at which place, as `counted` in `report/allocations.py` says. `rows` are those of `Allocations`, `state` is 0 for all
 * of them, 1 for those of the host and 2 for those of devices, `launches` tells whether calls with a correlation are no
 * places, and `names` are those of places without a site. None where a span is none of ours, a time beyond 64 bits, or more
 * devices are told of than any process has. */
static PyObject *
memory(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *result = NULL, *own = NULL, *names[SITES];
    Py_buffer rows;
    long long base_ns, first, last, known_since;
    memory_t all = {.spare = NOWHERE};
    if (!PyArg_ParseTuple(args, "Oy*LLLLipp(OOO):memory", &spans, &rows, &base_ns, &first, &last, &known_since, &all.state,
                          &all.apart, &all.launches, &names[UNKNOWN], &names[NO_SPAN], &names[SHARED]))
        return NULL;
    size_t count = (size_t)rows.len / sizeof(allocation_t);
    table_t *tables[] = {&all.sites.numbers, &all.thread_of, &all.allocator_of, &all.places,
                         &all.use_of,        &all.tasks,     &all.task_on,      &all.by_id};
    own = own_spans(spans);
    if (own == NULL || count >= NOWHERE) {
        if (!PyErr_Occurred())
            result = Py_NewRef(Py_None);
        goto end;
    }
    all.rows = rows.buf;
    all.count = (uint32_t)count;
    all.base_ns = base_ns;
    all.first = first;
    all.last = last;
    all.known_since = known_since;
    all.placed = PyMem_RawMalloc((count + 1) * sizeof *all.placed);
    int plain = all.placed == NULL ? -1 : 1, ordered = 1;
    for (size_t i = 0; plain > 0 && i < sizeof tables / sizeof *tables; i++)
        plain = table_make(tables[i], 64) < 0 ? -1 : 1;
    if (plain > 0)
        plain = choose(&all, &ordered);
    if (plain > 0)
        plain = find_places(&all, own, ordered);
    if (plain > 0)
        plain = sum_up(&all);
    if (plain > 0)
        result = memory_object(&all, names);
    else if (plain == 0)
        result = Py_NewRef(Py_None);
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
end:
    for (size_t i = 0; i < all.allocators.used; i++)
        table_free(&((allocator_t *)all.allocators.items)[i].held);
    PyMem_RawFree(all.threads.items);
    PyMem_RawFree(all.allocators.items);
    PyMem_RawFree(all.uses.items);
    PyMem_RawFree(all.open.items);
    PyMem_RawFree(all.ends.items);
    PyMem_RawFree(all.of_task.items);
    PyMem_RawFree(all.placed);
    for (size_t i = 1; i < sizeof tables / sizeof *tables; i++)
        table_free(tables[i]);
    sites_free(&all.sites);
    PyBuffer_Release(&rows);
    Py_XDECREF(own);
    return result;
}

static PyMethodDef functions[] = {
    {"memory", memory, METH_VARARGS, "What was taken and given back of memory at which place."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.report._allocations",
    .m_doc = "Allocations by their place, in C. See `instrument.report.allocations`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__allocations(void)
{
    text_correlation = PyUnicode_InternFromString("correlation");
    if (text_correlation == NULL || import_spans(&span_type, &interval_type) < 0)
        return NULL;
    return PyModule_Create(&definition);
}
