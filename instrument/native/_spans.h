/* What the native parts of the package share: the memory of a span and of a device interval (types of `_spans.c`), the
 * order of spans, and a table of integers. */

#ifndef INSTRUMENT_SPANS_H
#define INSTRUMENT_SPANS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SPANS_LAYOUT 2
/* Raised with every change of the two structures, so that an extension never meets the other's older build. */

typedef __int128 wide_t;

typedef struct {
    PyObject_HEAD
    PyObject *site;
    int64_t span_id, parent_id, root_id, thread_id, task_id, start_ns, end_ns, active_ns, self_ns;
    PyObject *error;      /* NULL: None */
    PyObject *attributes; /* NULL: an empty dict that nobody has asked for yet; bytes: see `_attributes.h` */
    PyObject *device;     /* NULL: () */
    PyObject *remote;     /* NULL: None */
    char clipped;
    uint32_t attributes_at;
} Span;

typedef struct {
    PyObject_HEAD
    int64_t device, stream, start_ns, end_ns;
    PyObject *label; /* NULL: "exclusive" */
    int64_t uncertainty_ns;
} Interval;

/* ---- memory that grows */

/* `used` items of one size. */
typedef struct {
    char *items;
    size_t used, room;
} heap_t;

/* Room for one item more, NULL without memory. */
static inline void *
heap_next(heap_t *heap, size_t size)
{
    if (heap->used == heap->room) {
        size_t room = heap->room == 0 ? 16 : heap->room * 2;
        char *larger = PyMem_RawRealloc(heap->items, room * size);
        if (larger == NULL)
            return NULL;
        heap->items = larger;
        heap->room = room;
    }
    return heap->items + heap->used++ * size;
}

static inline PyObject *
heap_bytes(const heap_t *heap, size_t size)
{
    return PyBytes_FromStringAndSize(heap->items, (Py_ssize_t)(heap->used * size));
}

/* ---- a table from int64 to uint32 */

#define NOWHERE UINT32_MAX

typedef struct {
    int64_t *keys;
    uint32_t *values; /* NOWHERE: the cell is free */
    size_t mask, used;
} table_t;

/* What tells where keys lie. It is another in each process: a file may have been written so that all of its ids and
 * addresses would lie in one place, where a look for one meets all the others. */
static uint64_t table_seed = 0x9E3779B97F4A7C15u;

/* Take the seed from what Python keeps its own tables apart by, before the first table is made. 0, or -1 with an error. */
static inline int
table_set_seed(void)
{
    PyObject *text = PyUnicode_FromString("instrument.native._spans.table_t");
    Py_hash_t hash = text == NULL ? -1 : PyObject_Hash(text);
    Py_XDECREF(text);
    table_seed = (uint64_t)hash;
    return hash == -1 ? -1 : 0;
}

static inline uint64_t
folded(uint64_t left, uint64_t right)
{
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Where a key would be if no other were there. Folded but once, and by the seed, ids in a row may still lie in a row, with
 * one seed of some thousands: a look for what is not there then goes through all of them. */
static inline size_t
table_home(const table_t *table, int64_t key)
{
    /* Ids are given in a row: eight of them lie side by side, where one look into memory fetches all. */
    uint64_t mixed = folded(folded((uint64_t)key >> 3 ^ table_seed, 0x9E3779B97F4A7C15u) ^ table_seed, 0xE7037ED1A0B428DBu);
    return (mixed << 3 | ((size_t)key & 7)) & table->mask;
}

static inline size_t
table_place(const table_t *table, int64_t key)
{
    size_t at = table_home(table, key);
    while (table->values[at] != NOWHERE && table->keys[at] != key)
        at = (at + 1) & table->mask;
    return at;
}

static inline void
table_free(table_t *table)
{
    PyMem_RawFree(table->keys);
    PyMem_RawFree(table->values);
    memset(table, 0, sizeof *table);
}

/* A table with room for so many keys before it grows. 0, or -1 without memory. */
static inline int
table_make(table_t *table, size_t room)
{
    size_t cells = 64;
    while (cells / 2 < room)
        cells *= 2;
    table->keys = PyMem_RawMalloc(cells * sizeof *table->keys);
    table->values = PyMem_RawMalloc(cells * sizeof *table->values);
    table->mask = cells - 1;
    table->used = 0;
    if (table->keys == NULL || table->values == NULL) {
        table_free(table);
        return -1;
    }
    memset(table->values, 0xFF, cells * sizeof *table->values);
    return 0;
}

static inline uint32_t
table_get(const table_t *table, int64_t key)
{
    return table->values[table_place(table, key)];
}

/* Where the value of a key is, NOWHERE if it was not known; NULL without memory. Valid until the next call. */
static inline uint32_t *
table_cell(table_t *table, int64_t key)
{
    if (table->used * 2 > table->mask) {
        table_t larger;
        if (table_make(&larger, table->used * 2) < 0)
            return NULL;
        for (size_t i = 0; i <= table->mask; i++) {
            if (table->values[i] == NOWHERE)
                continue;
            size_t at = table_place(&larger, table->keys[i]);
            larger.keys[at] = table->keys[i];
            larger.values[at] = table->values[i];
        }
        larger.used = table->used;
        table_free(table);
        *table = larger;
    }
    size_t at = table_place(table, key);
    if (table->values[at] == NOWHERE) {
        table->keys[at] = key;
        table->used++; /* its caller gives it a value */
    }
    return &table->values[at];
}

/* Forget the key at a place. Those that had to make way for it move up. */
static inline void
table_drop(table_t *table, size_t at)
{
    for (size_t next = (at + 1) & table->mask; table->values[next] != NOWHERE; next = (next + 1) & table->mask) {
        size_t home = table_home(table, table->keys[next]);
        if (((next - home) & table->mask) < ((next - at) & table->mask))
            continue;
        table->keys[at] = table->keys[next];
        table->values[at] = table->values[next];
        at = next;
    }
    table->values[at] = NOWHERE;
    table->used--;
}

/* ---- room for more */

/* The same memory with room for one more than are used, `least` at first; NULL with an error. */
static inline void *
grown(void *memory, size_t *room, size_t used, size_t size, size_t least)
{
    if (used < *room)
        return memory;
    size_t more = *room == 0 ? least : *room * 2;
    void *larger = PyMem_RawRealloc(memory, more * size);
    if (larger == NULL)
        PyErr_NoMemory();
    else
        *room = more;
    return larger;
}

/* ---- room for the other threads */

#define TURN 4096

/* Long loops over spans let other threads of the service run about every millisecond. */
static inline void
give_way(size_t done)
{
    if (done % TURN == TURN - 1) {
        Py_BEGIN_ALLOW_THREADS
        Py_END_ALLOW_THREADS
    }
}

/* ---- order */

typedef struct {
    int64_t start_ns, end_ns, span_id;
    uint32_t index;
} place_t;

/* By start, then (longer first, if `by_end`) by id: negative, 0 or positive. */
static inline int
compare_places(int64_t start_a, int64_t end_a, int64_t id_a, int64_t start_b, int64_t end_b, int64_t id_b, int by_end)
{
    if (start_a != start_b)
        return start_a < start_b ? -1 : 1;
    if (by_end && end_a != end_b)
        return end_a > end_b ? -1 : 1;
    return id_a == id_b ? 0 : id_a < id_b ? -1 : 1;
}

/* Sort places by start, digit by digit, and those of one start by end and id; equal ones keep their order. `other` is as much memory
 * again. No Python is called. */
static inline void
sort_places(place_t *places, place_t *other, size_t count, int by_end)
{
    int64_t least = INT64_MAX, most = INT64_MIN;
    for (size_t i = 0; i < count; i++) {
        least = places[i].start_ns < least ? places[i].start_ns : least;
        most = places[i].start_ns > most ? places[i].start_ns : most;
    }
    place_t *from = places, *into = other;
    uint64_t range = count == 0 ? 0 : (uint64_t)most - (uint64_t)least;
    for (int shift = 0; shift < 64 && range >> shift != 0; shift += 11) {
        uint32_t counts[2048] = {0}, sum = 0;
        for (size_t i = 0; i < count; i++)
            counts[((uint64_t)from[i].start_ns - (uint64_t)least) >> shift & 2047]++;
        for (int digit = 0; digit < 2048; digit++) {
            uint32_t of_digit = counts[digit];
            counts[digit] = sum;
            sum += of_digit;
        }
        for (size_t i = 0; i < count; i++)
            into[counts[((uint64_t)from[i].start_ns - (uint64_t)least) >> shift & 2047]++] = from[i];
        place_t *swap = from;
        from = into;
        into = swap;
    }
    /* What begins at one time, by merging: a hostile file may have it all begin at once. */
    for (size_t low = 0, high; low < count; low = high) {
        for (high = low + 1; high < count && from[high].start_ns == from[low].start_ns; high++)
            ;
        for (size_t width = 1; width < high - low; width *= 2) {
            for (size_t first = low; first + width < high; first += 2 * width) {
                size_t middle = first + width, last = middle + width < high ? middle + width : high;
                size_t i = first, j = middle, at = first;
                while (i < middle && j < last)
                    into[at++] = compare_places(0, from[i].end_ns, from[i].span_id, 0, from[j].end_ns, from[j].span_id,
                                                by_end) > 0
                                     ? from[j++]
                                     : from[i++];
                memcpy(&into[at], &from[i], (middle - i) * sizeof *into);
                memcpy(&into[at + middle - i], &from[j], (last - j) * sizeof *into);
                memcpy(&from[first], &into[first], (last - first) * sizeof *into);
            }
        }
    }
    if (from != places)
        memcpy(places, from, count * sizeof *places);
}

/* The order of spans as a new array of their numbers; *found is NULL where they stand in order already. Equal ones keep
 * theirs. The other threads run meanwhile: what is sorted are copies of the numbers. Those that come by start, as in a
 * file, need little memory: only what begins at one time is sorted. 0, or -1 without memory. */
static inline int
order_spans(PyObject *const *spans, size_t count, int by_end, uint32_t **found)
{
#define AS_PLACE(i)                                                                                                        \
    (place_t){((Span *)spans[i])->start_ns, ((Span *)spans[i])->end_ns, ((Span *)spans[i])->span_id, (uint32_t)(i)}
    *found = NULL;
    size_t longest = 1, length = 1, by_start = 1;
    int sorted = 1;
    for (; by_start < count; by_start++) {
        place_t a = AS_PLACE(by_start - 1), b = AS_PLACE(by_start);
        if (a.start_ns > b.start_ns)
            break;
        length = a.start_ns == b.start_ns ? length + 1 : 1;
        longest = length > longest ? length : longest;
        sorted &= compare_places(a.start_ns, a.end_ns, a.span_id, b.start_ns, b.end_ns, b.span_id, by_end) <= 0;
    }
    if (by_start >= count && sorted)
        return 0;
    size_t room = by_start >= count ? longest : count;
    place_t *places = PyMem_RawMalloc(room * sizeof *places), *other = PyMem_RawMalloc(room * sizeof *other);
    uint32_t *order = PyMem_RawMalloc(count * sizeof *order);
    if (places == NULL || other == NULL || order == NULL) {
        PyMem_RawFree(places);
        PyMem_RawFree(other);
        PyMem_RawFree(order);
        return -1;
    }
    for (size_t low = 0, high; low < count; low = high) {
        /* All at once, or each stretch of spans that begin together. */
        for (high = low; high < count && high - low < room &&
                         (room == count || high == low || AS_PLACE(high).start_ns == places[0].start_ns);
             high++)
            places[high - low] = AS_PLACE(high);
        if (room == count) {
            Py_BEGIN_ALLOW_THREADS
            sort_places(places, other, high - low, by_end);
            Py_END_ALLOW_THREADS
        } else if (high - low > 1)
            sort_places(places, other, high - low, by_end);
        for (size_t i = low; i < high; i++)
            order[i] = places[i - low].index;
    }
    PyMem_RawFree(places);
    PyMem_RawFree(other);
    *found = order;
    return 0;
}

/* ---- the types */

/* The spans as a tuple of our own, so that nobody changes it meanwhile; NULL without an error where one is no span. */
static inline PyObject *
spans_of_type(PyObject *spans, PyTypeObject *type)
{
    PyObject *own = PySequence_Tuple(spans);
    for (Py_ssize_t i = 0; own != NULL && i < PyTuple_GET_SIZE(own); i++)
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(own, i), type))
            Py_CLEAR(own);
    if (own != NULL && PyTuple_GET_SIZE(own) >= NOWHERE)
        Py_CLEAR(own);
    return own;
}

/* The type of that name of `_spans`, or NULL with an error: also where the two were not built from one source. */
static inline PyTypeObject *
spans_type(PyObject *module, const char *name, size_t size)
{
    PyObject *type = PyObject_GetAttrString(module, name);
    if (type != NULL && (!PyType_Check(type) || ((PyTypeObject *)type)->tp_basicsize != (Py_ssize_t)size))
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

/* The types of `_spans`. 0, or -1 with ImportError where it was not built together with the caller. */
static inline int
import_spans(PyTypeObject **span_type, PyTypeObject **interval_type)
{
    PyObject *module = PyImport_ImportModule("instrument.native._spans");
    if (module == NULL || table_set_seed() < 0) {
        Py_XDECREF(module);
        return -1;
    }
    PyObject *layout = PyObject_GetAttrString(module, "LAYOUT");
    int fits = layout != NULL && PyLong_Check(layout) && PyLong_AsLong(layout) == SPANS_LAYOUT;
    Py_XDECREF(layout);
    PyErr_Clear();
    *span_type = fits ? spans_type(module, "Span", sizeof(Span)) : NULL;
    *interval_type = fits ? spans_type(module, "DeviceInterval", sizeof(Interval)) : NULL;
    Py_DECREF(module);
    if (*span_type != NULL && *interval_type != NULL)
        return 0;
    PyErr_SetString(PyExc_ImportError, "instrument.native._spans is of another build; build the extensions together");
    return -1;
}

#endif
