/* The innermost span at a time on a thread, in C: the twin of the loop in `places.py`, which says what it means. */

#include "_attributes.h"
#include "_stretches.h"

static PyTypeObject *span_type, *interval_type;
static PyObject *text_correlation;

#define NO_SPAN (-1)
#define SEVERAL (-2)

/* A span that is open, on its thread between the one that began before it and the one that began after. */
typedef struct {
    int64_t end_ns, span_id, parent_id;
    uint32_t number, task, thread, before, after, seen;
} open_t;

typedef struct {
    int64_t end_ns;
    uint32_t at;
} end_t;

/* A thread on which something happened, and its innermost span at a time. */
typedef struct {
    uint32_t last, count; /* of its spans that are open: the one that began last */
    int32_t innermost;
    int is_told; /* whether `innermost` is that of those that are open */
} thread_t;

typedef struct {
    int64_t at_ns;
    uint32_t index;
} point_t;

typedef struct {
    int64_t base_ns;
    int launches;
    heap_t threads;
    heap_t open, ends, of_task; /* spans that are open, the first of them to end first; how many are of each task */
    uint32_t spare, walks;      /* an item of `open` that is free, and from there on the next */
    int ids_twice;
    table_t thread_of, tasks, task_on, by_id;
} sweep_t;

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
open_span(sweep_t *all, Span *span, uint32_t number, int64_t at_ns)
{
    uint32_t thread = table_get(&all->thread_of, span->thread_id);
    if (thread == NOWHERE || span->end_ns <= at_ns || span->active_ns < (wide_t)span->end_ns - span->start_ns)
        return 1;
    if (all->launches && span->attributes != NULL) {
        if (!PyDict_CheckExact(span->attributes) && !is_unread(span))
            return 0;
        int launches = has_attribute(span, text_correlation);
        if (launches != 0)
            return launches;
    }
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
    open[at] = (open_t){span->end_ns, span->span_id, span->parent_id, number, task, thread, on->last, NOWHERE, 0};
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
close_spans(sweep_t *all, int64_t at_ns)
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

/* Find the innermost of the spans that are open on a thread. 0, or -1 without memory. */
static int
tell_innermost(sweep_t *all, uint32_t thread)
{
    thread_t *on = &((thread_t *)all->threads.items)[thread];
    on->is_told = 1;
    on->innermost = NO_SPAN;
    if (on->count == 0)
        return 0;
    open_t *open = (open_t *)all->open.items, *last = &open[on->last];
    uint32_t others = on->count - ((uint32_t *)all->of_task.items)[last->task], around = 0, walk = ++all->walks;
    on->innermost = (int32_t)last->number;
    if (others == 0)
        return 0;
    table_t own = {0}, *by_id = &all->by_id;
    if (all->ids_twice) { /* of one id the last stands for all */
        by_id = &own;
        if (table_make(&own, on->count) < 0)
            return -1;
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
    if (around != others)
        on->innermost = SEVERAL;
    return 0;
}

static int
compare_points(const void *a, const void *b)
{
    const point_t *left = a, *right = b;
    if (left->at_ns != right->at_ns)
        return left->at_ns < right->at_ns ? -1 : 1;
    return left->index < right->index ? -1 : left->index > right->index;
}

/* Number the threads on which something happened. *ordered tells whether all of it comes by time. 1, 0 where a time is beyond
 * 64 bits, -1 without memory. */
static int
take_threads(sweep_t *all, const int64_t *thread_ids, const int64_t *times, size_t count, int *ordered)
{
    *ordered = 1;
    for (size_t i = 0; i < count; i++) {
        int64_t at_ns;
        if (__builtin_add_overflow(all->base_ns, times[i], &at_ns))
            return 0;
        *ordered &= i == 0 || times[i - 1] <= times[i];
        uint32_t thread = numbered(&all->thread_of, thread_ids[i]);
        if (thread == all->threads.used) {
            thread_t *made = heap_next(&all->threads, sizeof *made);
            if (made != NULL)
                *made = (thread_t){NOWHERE, 0, NO_SPAN, 1};
        }
        if (thread >= all->threads.used)
            return -1;
        give_way(i);
    }
    return 1;
}

/* One way through the spans by start and the points by time. 1, 0 where a span is not plain, -1 with an error. */
static int
sweep(sweep_t *all, PyObject *spans, const int64_t *thread_ids, const int64_t *times, size_t count, int32_t *found)
{
    uint32_t *order = NULL;
    point_t *points = NULL;
    size_t total = (size_t)PyTuple_GET_SIZE(spans), coming = 0;
    int ordered, plain = take_threads(all, thread_ids, times, count, &ordered);
    if (plain == 0)
        return 0;
    if (plain < 0 || order_spans(&PyTuple_GET_ITEM(spans, 0), total, 1, &order) < 0)
        goto without_memory;
    if (!ordered) {
        points = PyMem_RawMalloc(count * sizeof *points);
        if (points == NULL)
            goto without_memory;
        for (size_t i = 0; i < count; i++)
            points[i] = (point_t){times[i], (uint32_t)i};
        Py_BEGIN_ALLOW_THREADS
        qsort(points, count, sizeof *points, compare_points);
        Py_END_ALLOW_THREADS
    }
    for (size_t i = 0; plain > 0 && i < count; i++) {
        size_t at = points == NULL ? i : points[i].index;
        int64_t at_ns = all->base_ns + times[at];
        for (; plain > 0 && coming < total; coming++) {
            uint32_t number = order == NULL ? (uint32_t)coming : order[coming];
            Span *span = (Span *)PyTuple_GET_ITEM(spans, number);
            if (span->start_ns > at_ns)
                break;
            plain = open_span(all, span, number, at_ns);
            give_way(coming);
        }
        if (plain <= 0)
            break;
        close_spans(all, at_ns);
        uint32_t thread = table_get(&all->thread_of, thread_ids[at]);
        thread_t *on = &((thread_t *)all->threads.items)[thread];
        if (!on->is_told && tell_innermost(all, thread) < 0)
            goto without_memory;
        found[at] = on->innermost;
        give_way(i);
    }
    goto end;
without_memory:
    PyErr_NoMemory();
    plain = -1;
end:
    PyMem_RawFree(order);
    PyMem_RawFree(points);
    return plain;
}

/* innermost(spans, thread_ids, times_ns, base_ns, launches): of each thread and time, which are numbers of 64 bits in two
 * pieces of memory, times from a base, the number of the innermost span as one of 32 bits: -1 where none was open, -2 where
 * nobody can tell which. `launches` says whether calls with a correlation are none. None where a span is none of ours or not
 * plain, or a time beyond 64 bits. */
static PyObject *
innermost(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *result = NULL, *own = NULL;
    Py_buffer thread_ids, times;
    sweep_t all = {.spare = NOWHERE};
    long long base_ns;
    if (!PyArg_ParseTuple(args, "Oy*y*Lp:innermost", &spans, &thread_ids, &times, &base_ns, &all.launches))
        return NULL;
    all.base_ns = base_ns;
    size_t count = (size_t)times.len / sizeof(int64_t);
    table_t *tables[] = {&all.thread_of, &all.tasks, &all.task_on, &all.by_id};
    if (thread_ids.len != times.len) {
        PyErr_SetString(PyExc_ValueError, "there are as many threads as times");
        goto end;
    }
    own = spans_of_type(spans, span_type);
    if (own == NULL || PyTuple_GET_SIZE(own) > INT32_MAX || count >= NOWHERE) {
        if (!PyErr_Occurred())
            result = Py_NewRef(Py_None);
        goto end;
    }
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(int32_t)));
    int plain = result == NULL ? -1 : 1;
    for (size_t i = 0; plain > 0 && i < sizeof tables / sizeof *tables; i++)
        if (table_make(tables[i], 64) < 0) {
            PyErr_NoMemory();
            plain = -1;
        }
    if (plain > 0)
        plain = sweep(&all, own, thread_ids.buf, times.buf, count, (int32_t *)PyBytes_AS_STRING(result));
    if (plain <= 0)
        Py_XSETREF(result, plain == 0 ? Py_NewRef(Py_None) : NULL);
end:
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        table_free(tables[i]);
    heap_t *heaps[] = {&all.threads, &all.open, &all.ends, &all.of_task};
    for (size_t i = 0; i < sizeof heaps / sizeof *heaps; i++)
        PyMem_RawFree(heaps[i]->items);
    PyBuffer_Release(&thread_ids);
    PyBuffer_Release(&times);
    Py_XDECREF(own);
    return result;
}

static PyMethodDef functions[] = {
    {"innermost", innermost, METH_VARARGS, "The innermost span that was open on a thread at a time, of many of both."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._places",
    .m_doc = "Where something happened, in C. See `instrument.report.places`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__places(void)
{
    text_correlation = PyUnicode_InternFromString("correlation");
    if (text_correlation == NULL || import_spans(&span_type, &interval_type) < 0)
        return NULL;
    return PyModule_Create(&definition);
}
