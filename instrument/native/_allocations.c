/* Allocations by their place in C: the twin of the loop in `allocations.py`, which says what it means. */

#include "_stretches.h"

static PyTypeObject *span_type, *interval_type;

typedef struct {
    int64_t device, since_ns, thread_id, size_bytes, address, allocated_bytes, reserved_bytes;
} allocation_t;

/* Places that are no sites come before these. */
enum { UNKNOWN, NO_SPAN, SHARED, SITES };

#define ON_HOST (-1)
#define SEVERAL (-2) /* what stands for the number of a span where several tasks had some open */
#define MOST_ALLOCATORS 4096

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
    int state, apart;
    int64_t outside;
    sites_t sites;
    heap_t thread_ids, allocators, uses;
    table_t thread_of, allocator_of, places, use_of;
} memory_t;

static inline allocation_t
allocation_at(const memory_t *all, uint32_t at)
{
    allocation_t one;
    memcpy(&one, all->rows + at * sizeof one, sizeof one);
    return one;
}

/* The place of what happened in a span, or of what stands for none. NOWHERE with an error. */
static uint32_t
place_of(memory_t *all, PyObject *spans, int32_t number)
{
    uint32_t site = 0;
    if (number < 0)
        return number == SEVERAL ? SHARED : NO_SPAN;
    if (number >= PyTuple_GET_SIZE(spans)) {
        PyErr_SetString(PyExc_ValueError, "an allocation in a span that there is not");
        return NOWHERE;
    }
    if (fact_of(&all->sites, ((Span *)PyTuple_GET_ITEM(spans, number))->site, nothing_of, NULL, &site) == NULL)
        return NOWHERE;
    return site + SITES;
}

/* Which allocations count, of which threads, and where they happened. 1, 0 where one is not plain, -1 with an error. */
static int
choose(memory_t *all, PyObject *spans, const int32_t *numbers)
{
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
        uint32_t thread = numbered(&all->thread_of, one.thread_id);
        if (thread == all->thread_ids.used) {
            int64_t *made = heap_next(&all->thread_ids, sizeof *made);
            if (made != NULL)
                *made = one.thread_id;
        }
        if (thread >= all->thread_ids.used) {
            PyErr_NoMemory();
            return -1;
        }
        all->placed[i] = at_ns < all->known_since ? UNKNOWN : place_of(all, spans, numbers[i]);
        if (all->placed[i] == NOWHERE)
            return -1;
        give_way(i);
    }
    return 1;
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
    for (size_t i = 0; done == 0 && i < all->thread_ids.used; i++)
        done = append_new(threads, PyLong_FromLongLong(((int64_t *)all->thread_ids.items)[i]));
    if (done == 0)
        return Py_BuildValue("(NNNL)", uses, allocators, threads, (long long)all->outside);
    Py_XDECREF(uses);
    Py_XDECREF(allocators);
    Py_XDECREF(threads);
    return NULL;
}

/* memory(spans, numbers, rows, base_ns, first_ns, last_ns, known_since_ns, state, apart, names): what was taken and given
 * back at which place, as `counted` in `report/allocation_sums.py` says. `numbers` are what `innermost` in `report/places.py`
 * finds of each, `rows` those of `Allocations`, `state` is 0 for all of them, 1 for those of the host and 2 for those of
 * devices, and `names` are those of places without a site. None where a span is none of ours, a time beyond 64 bits, or more
 * devices are told of than any process has. */
static PyObject *
memory(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *result = NULL, *own = NULL, *names[SITES];
    Py_buffer numbers, rows;
    long long base_ns, first, last, known_since;
    memory_t all = {0};
    if (!PyArg_ParseTuple(args, "Oy*y*LLLLip(OOO):memory", &spans, &numbers, &rows, &base_ns, &first, &last, &known_since,
                          &all.state, &all.apart, &names[UNKNOWN], &names[NO_SPAN], &names[SHARED]))
        return NULL;
    size_t count = (size_t)rows.len / sizeof(allocation_t);
    table_t *tables[] = {&all.sites.numbers, &all.thread_of, &all.allocator_of, &all.places, &all.use_of};
    own = spans_of_type(spans, span_type);
    if (own == NULL || count >= NOWHERE || (size_t)numbers.len / sizeof(int32_t) != count) {
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
    int plain = all.placed == NULL ? -1 : 1;
    for (size_t i = 0; plain > 0 && i < sizeof tables / sizeof *tables; i++)
        plain = table_make(tables[i], 64) < 0 ? -1 : 1;
    if (plain > 0)
        plain = choose(&all, own, numbers.buf);
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
    PyMem_RawFree(all.thread_ids.items);
    PyMem_RawFree(all.allocators.items);
    PyMem_RawFree(all.uses.items);
    PyMem_RawFree(all.placed);
    for (size_t i = 1; i < sizeof tables / sizeof *tables; i++)
        table_free(tables[i]);
    sites_free(&all.sites);
    PyBuffer_Release(&numbers);
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
    .m_name = "instrument.native._allocations",
    .m_doc = "Allocations by their place, in C. See `instrument.report.allocation_sums`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__allocations(void)
{
    if (import_spans(&span_type, &interval_type) < 0)
        return NULL;
    return PyModule_Create(&definition);
}
