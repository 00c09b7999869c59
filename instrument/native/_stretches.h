/* What the loops over spans share beside `_spans.h`: memory that grows, numbers for values, stretches of time, what is known
 * of sites. */

#ifndef INSTRUMENT_STRETCHES_H
#define INSTRUMENT_STRETCHES_H

#include "_spans.h"

/* ---- numbers and room */

/* A number for each different value, from 0; NOWHERE without memory. */
static inline uint32_t
numbered(table_t *table, int64_t value)
{
    uint32_t *cell = table_cell(table, value);
    if (cell == NULL)
        return NOWHERE;
    if (*cell == NOWHERE)
        *cell = (uint32_t)table->used - 1;
    return *cell;
}

#define PAIR(left, right) ((int64_t)((uint64_t)(left) << 32 | (right)))

static inline PyObject *
wide_as_long(wide_t value)
{
    if (value >= INT64_MIN && value <= INT64_MAX)
        return PyLong_FromLongLong((long long)value);
    PyObject *high = PyLong_FromLongLong((long long)(value >> 64));
    PyObject *low = PyLong_FromUnsignedLongLong((unsigned long long)value), *shift = PyLong_FromLong(64), *made = NULL;
    PyObject *shifted = high == NULL || shift == NULL ? NULL : PyNumber_Lshift(high, shift);
    if (shifted != NULL && low != NULL)
        made = PyNumber_Or(shifted, low);
    Py_XDECREF(high);
    Py_XDECREF(low);
    Py_XDECREF(shift);
    Py_XDECREF(shifted);
    return made;
}

/* Append what "N" values make to a list. 0, or -1 with an error. */
static inline int
append_new(PyObject *list, PyObject *item)
{
    int done = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return done;
}

/* ---- stretches of time */

typedef struct {
    int64_t start, end;
} stretch_t;

static inline int
compare_stretches(const void *a, const void *b)
{
    const stretch_t *left = a, *right = b;
    if (left->start != right->start)
        return left->start < right->start ? -1 : 1;
    return left->end < right->end ? -1 : left->end > right->end;
}

/* The length of the union of sorted intervals. */
static inline wide_t
united(const stretch_t *sorted, size_t count)
{
    wide_t length = 0;
    for (size_t i = 0; i < count;) {
        int64_t start = sorted[i].start, end = sorted[i].end;
        for (i++; i < count && sorted[i].start <= end; i++)
            end = sorted[i].end > end ? sorted[i].end : end;
        length += (wide_t)end - start;
    }
    return length;
}

/* Sort stretches; most come in order already. */
static inline void
sort_stretches(stretch_t *stretches, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (compare_stretches(&stretches[i - 1], &stretches[i]) > 0) {
            qsort(stretches, count, sizeof *stretches, compare_stretches);
            return;
        }
}

/* Unite sorted stretches where they lie: how many are left. */
static inline size_t
unite(stretch_t *sorted, size_t count)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++)
        if (used == 0 || sorted[i].start > sorted[used - 1].end)
            sorted[used++] = sorted[i];
        else if (sorted[i].end > sorted[used - 1].end)
            sorted[used - 1].end = sorted[i].end;
    return used;
}

/* ---- sites */

/* Numbers of sites by their address, and what is known of each. */
typedef struct {
    table_t numbers;
    heap_t facts;
} sites_t;

typedef struct {
    PyObject *site;
    int64_t fact;
} site_fact_t;

/* What `tell` says of a site, asked once; NULL with an error. A negative fact is an error too. */
static inline site_fact_t *
fact_of(sites_t *sites, PyObject *site, int64_t (*tell)(PyObject *site, void *context), void *context, uint32_t *number)
{
    uint32_t *cell = table_cell(&sites->numbers, (int64_t)(intptr_t)site);
    if (cell == NULL)
        return (site_fact_t *)PyErr_NoMemory();
    if (*cell == NOWHERE) {
        uint32_t next = (uint32_t)sites->facts.used;
        *cell = next;
        site_fact_t *made = heap_next(&sites->facts, sizeof *made);
        if (made == NULL)
            return (site_fact_t *)PyErr_NoMemory();
        *made = (site_fact_t){Py_NewRef(site), -1};
        int64_t fact = tell(site, context);
        ((site_fact_t *)sites->facts.items)[next].fact = fact;
        *number = next;
    } else
        *number = *cell;
    site_fact_t *known = &((site_fact_t *)sites->facts.items)[*number];
    if (known->fact < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "a site of which nothing could be told");
        return NULL;
    }
    return known;
}

static inline void
sites_free(sites_t *sites)
{
    for (size_t i = 0; i < sites->facts.used; i++)
        Py_DECREF(((site_fact_t *)sites->facts.items)[i].site);
    PyMem_RawFree(sites->facts.items);
    table_free(&sites->numbers);
}

/* Of sites of which a number is all that is asked. */
static inline int64_t
nothing_of(PyObject *Py_UNUSED(site), void *Py_UNUSED(context))
{
    return 0;
}

#endif
