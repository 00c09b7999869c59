/* Stretches of time in C: the twin of the loops in `stretches.py`, which say what they mean.
 *
 * A loop that meets what it does not expect returns None, and its caller takes the twin.
 */

#include "_attributes.h"
#include "_stretches.h"

static PyTypeObject *span_type, *interval_type;
static PyObject *text_exclusive, *text_kind;

/* As `spans_of_type`. */
static PyObject *
own_spans(PyObject *spans)
{
    return spans_of_type(spans, span_type);
}

static int64_t
is_of_kind(PyObject *site, void *kind)
{
    PyObject *own = PyObject_GetAttr(site, text_kind);
    int same = own == NULL ? -1 : PyObject_RichCompareBool(own, kind, Py_EQ);
    Py_XDECREF(own);
    return same;
}

/* owners(spans, kind): of each span the id of the topmost one of that kind at or above it, 0 where there is none, as
 * bytes; the spans of that kind, and the topmost of them. None where one of them is no span of ours. */
static PyObject *
owners(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *kind, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO:owners", &spans, &kind))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(own);
    sites_t sites = {0};
    table_t ids = {0}, by_id = {0};
    heap_t chain = {0};
    int64_t *known = NULL; /* by the number of the span that stands for an id: its owner, or -1 for not known yet */
    char *is_known = NULL;
    PyObject *found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(int64_t))), *those = PyList_New(0);
    PyObject *topmost = PyList_New(0);
    if (found == NULL || those == NULL || topmost == NULL)
        goto end;
    if (table_make(&sites.numbers, 64) < 0 || table_make(&ids, 64) < 0)
        goto no_memory;
    for (size_t i = 0; i < count; i++) {
        PyObject *span = PyTuple_GET_ITEM(own, i);
        uint32_t number;
        site_fact_t *fact = fact_of(&sites, ((Span *)span)->site, is_of_kind, kind, &number);
        if (fact == NULL)
            goto end;
        if (fact->fact) {
            uint32_t *cell = table_cell(&ids, ((Span *)span)->span_id);
            if (cell == NULL)
                goto no_memory;
            *cell = 1;
            if (PyList_Append(those, span) < 0)
                goto end;
        }
        give_way(i);
    }
    char *into = PyBytes_AS_STRING(found);
    for (size_t i = 0; i < count; i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        int64_t owner = 0;
        if (ids.used > 0 && table_get(&ids, span->root_id) != NOWHERE)
            owner = span->root_id;
        else if (ids.used > 0) {
            if (known == NULL) { /* the tree is needed only where a request lies below something else */
                known = PyMem_RawCalloc(count, sizeof *known);
                is_known = PyMem_RawCalloc(count, 1);
                if (known == NULL || is_known == NULL || table_make(&by_id, count) < 0)
                    goto no_memory;
                for (size_t n = 0; n < count; n++)
                    *table_cell(&by_id, ((Span *)PyTuple_GET_ITEM(own, n))->span_id) = (uint32_t)n;
            }
            uint32_t at = table_get(&by_id, span->span_id);
            chain.used = 0;
            while (at != NOWHERE && !is_known[at]) {
                uint32_t *step = heap_next(&chain, sizeof *step);
                if (step == NULL)
                    goto no_memory;
                *step = at;
                is_known[at] = 1; /* and its owner 0, where parents run in a circle */
                at = table_get(&by_id, ((Span *)PyTuple_GET_ITEM(own, at))->parent_id);
            }
            owner = at == NOWHERE ? 0 : known[at];
            while (chain.used > 0) {
                uint32_t step = ((uint32_t *)chain.items)[--chain.used];
                int64_t id = ((Span *)PyTuple_GET_ITEM(own, step))->span_id;
                if (owner == 0 && table_get(&ids, id) != NOWHERE)
                    owner = id;
                known[step] = owner;
            }
        }
        memcpy(into + i * sizeof owner, &owner, sizeof owner);
        if (owner == span->span_id) {
            uint32_t number;
            site_fact_t *fact = fact_of(&sites, span->site, is_of_kind, kind, &number);
            if (fact == NULL || (fact->fact && PyList_Append(topmost, (PyObject *)span) < 0))
                goto end;
        }
        give_way(i);
    }
    result = Py_BuildValue("(OOO)", found, those, topmost);
    goto end;
no_memory:
    PyErr_NoMemory();
end:
    sites_free(&sites);
    table_free(&ids);
    table_free(&by_id);
    PyMem_RawFree(chain.items);
    PyMem_RawFree(known);
    PyMem_RawFree(is_known);
    Py_XDECREF(found);
    Py_XDECREF(those);
    Py_XDECREF(topmost);
    Py_DECREF(own);
    return result;
}

typedef struct {
    uint32_t site;
    int64_t device, stream;
    PyObject *label;
    int timed;
    int64_t count, least_ns, most_ns; /* how many, and of what uncertainty */
    wide_t summed_ns;
    heap_t stretches;
} group_t;

typedef struct {
    uint32_t site;
    int64_t device;
    heap_t lengths; /* of the union of each call's stretches */
} calls_t;

typedef struct {
    int64_t owner;
    stretch_t stretch;
} owned_t;

typedef struct {
    int64_t device, outside;
    heap_t owned;
} device_t;

typedef struct {
    uint32_t site;
    PyObject *label; /* NULL: no interval at all */
    int64_t spans;
} unanswered_t;

typedef struct {
    sites_t sites;
    heap_t groups, calls, devices, unanswered, call;
    table_t group_of, calls_of, device_of, streams, labels, unanswered_of, pairs, triples;
    PyObject *untimed;
    int64_t first, last, asked;
} gathered_t;

static int64_t
wants_device(PyObject *site, void *Py_UNUSED(context))
{
    PyObject *wants = PyObject_GetAttrString(site, "device");
    int is_true = wants == NULL ? -1 : PyObject_IsTrue(wants);
    Py_XDECREF(wants);
    return is_true;
}

/* The group of an interval, NULL with an error. */
static group_t *
group_at(gathered_t *all, uint32_t site, Interval *interval, PyObject *label)
{
    uint32_t device = numbered(&all->device_of, interval->device), stream = numbered(&all->streams, interval->stream);
    uint32_t named = numbered(&all->labels, (int64_t)(intptr_t)label);
    if (device == NOWHERE || stream == NOWHERE || named == NOWHERE)
        return (group_t *)PyErr_NoMemory();
    uint32_t pair = numbered(&all->pairs, PAIR(site, device));
    uint32_t triple = pair == NOWHERE ? NOWHERE : numbered(&all->triples, PAIR(pair, stream));
    uint32_t group = triple == NOWHERE ? NOWHERE : numbered(&all->group_of, PAIR(triple, named));
    if (group == NOWHERE)
        return (group_t *)PyErr_NoMemory();
    if (device == all->devices.used) {
        device_t *made = heap_next(&all->devices, sizeof *made);
        if (made == NULL)
            return (group_t *)PyErr_NoMemory();
        *made = (device_t){interval->device};
    }
    if (group == all->groups.used) {
        group_t *made = heap_next(&all->groups, sizeof *made);
        if (made == NULL)
            return (group_t *)PyErr_NoMemory();
        *made = (group_t){site, interval->device, interval->stream, Py_NewRef(label), 1};
        int untimed = PySet_Contains(all->untimed, label);
        if (untimed < 0)
            return NULL;
        ((group_t *)all->groups.items)[group].timed = !untimed;
    }
    return &((group_t *)all->groups.items)[group];
}

typedef struct {
    uint32_t device;
    stretch_t stretch;
} portion_t;

static int
compare_parts(const void *a, const void *b)
{
    const portion_t *left = a, *right = b;
    if (left->device != right->device)
        return left->device < right->device ? -1 : 1;
    return compare_stretches(&left->stretch, &right->stretch);
}

/* Give what was found of one span to its calls and its owner. 0, or -1 without memory. */
static int
take_call(gathered_t *all, uint32_t site, int64_t owner)
{
    portion_t *parts = (portion_t *)all->call.items;
    size_t count = all->call.used;
    if (count > 1)
        qsort(parts, count, sizeof *parts, compare_parts);
    for (size_t low = 0, high; low < count; low = high) {
        uint32_t device = parts[low].device;
        wide_t length_ns = 0;
        for (high = low; high < count && parts[high].device == device;) {
            int64_t start = parts[high].stretch.start, end = parts[high].stretch.end;
            for (high++; high < count && parts[high].device == device && parts[high].stretch.start <= end; high++)
                end = parts[high].stretch.end > end ? parts[high].stretch.end : end;
            length_ns += (wide_t)end - start;
        }
        uint32_t number = numbered(&all->calls_of, PAIR(site, device));
        if (number == NOWHERE)
            return -1;
        if (number == all->calls.used) {
            calls_t *made = heap_next(&all->calls, sizeof *made);
            if (made == NULL)
                return -1;
            *made = (calls_t){site, ((device_t *)all->devices.items)[device].device};
        }
        int64_t *length = heap_next(&((calls_t *)all->calls.items)[number].lengths, sizeof *length);
        if (length == NULL)
            return -1;
        *length = (int64_t)length_ns; /* it lies within the window, whose length is of 64 bits */
        for (size_t i = low; owner != 0 && i < high; i++) {
            owned_t *owned = heap_next(&((device_t *)all->devices.items)[device].owned, sizeof *owned);
            if (owned == NULL)
                return -1;
            *owned = (owned_t){owner, parts[i].stretch};
        }
    }
    return 0;
}

/* Look at the device time of one span: 1, 0 where it is not plain, -1 with an error. */
static int
gather_span(gathered_t *all, Span *span, int64_t owner)
{
    uint32_t site = 0;
    PyObject *device = span->device;
    site_fact_t *fact = fact_of(&all->sites, span->site, wants_device, NULL, &site);
    if (fact == NULL)
        return -1;
    PyObject *reason = NULL;
    int timed = 0;
    if (device == NULL && !fact->fact)
        return 1;
    if (device != NULL && (!PyTuple_CheckExact(device) || span->device != device))
        return 0;
    all->asked++;
    all->call.used = 0;
    for (Py_ssize_t i = 0; device != NULL && i < PyTuple_GET_SIZE(device); i++) {
        Interval *interval = (Interval *)PyTuple_GET_ITEM(device, i);
        if (!Py_IS_TYPE((PyObject *)interval, interval_type) || interval->end_ns < interval->start_ns)
            return 0;
        PyObject *label = interval->label == NULL ? text_exclusive : interval->label;
        if (!PyUnicode_CheckExact(label))
            return 0;
        reason = i == 0 ? label : reason;
        group_t *group = group_at(all, site, interval, label);
        if (group == NULL)
            return -1;
        int64_t start = interval->start_ns, end = interval->end_ns;
        uint32_t number = table_get(&all->device_of, interval->device);
        timed |= group->timed;
        if (start < all->first || end > all->last) {
            if (start >= all->last || end <= all->first) {
                ((device_t *)all->devices.items)[number].outside += group->timed;
                continue;
            }
            start = start < all->first ? all->first : start;
            end = end > all->last ? all->last : end;
        }
        int64_t uncertain = interval->uncertainty_ns;
        if (group->count == 0 || uncertain < group->least_ns)
            group->least_ns = uncertain;
        if (group->count == 0 || uncertain > group->most_ns)
            group->most_ns = uncertain;
        group->count++;
        if (!group->timed)
            continue;
        group->summed_ns += (wide_t)end - start;
        stretch_t *stretch = heap_next(&group->stretches, sizeof *stretch);
        portion_t *part = heap_next(&all->call, sizeof *part);
        if (stretch == NULL || part == NULL)
            goto no_memory;
        *stretch = (stretch_t){start, end};
        *part = (portion_t){number, {start, end}};
    }
    if (timed) {
        if (take_call(all, site, owner) < 0)
            goto no_memory;
        return 1;
    }
    uint32_t named = reason == NULL ? 0 : numbered(&all->labels, (int64_t)(intptr_t)reason) + 1;
    uint32_t place = numbered(&all->unanswered_of, PAIR(site, named));
    if (place == NOWHERE)
        goto no_memory;
    if (place == all->unanswered.used) {
        unanswered_t *made = heap_next(&all->unanswered, sizeof *made);
        if (made == NULL)
            goto no_memory;
        *made = (unanswered_t){site, Py_XNewRef(reason), 0};
    }
    ((unanswered_t *)all->unanswered.items)[place].spans++;
    return 1;
no_memory:
    PyErr_NoMemory();
    return -1;
}

static PyObject *
gathered(gathered_t *all)
{
#define SITE(number) (((site_fact_t *)all->sites.facts.items)[number].site)
    PyObject *groups = PyList_New(0), *calls = PyList_New(0), *devices = PyList_New(0), *unanswered = PyList_New(0);
    int done = groups == NULL || calls == NULL || devices == NULL || unanswered == NULL ? -1 : 0;
    for (size_t i = 0; done == 0 && i < all->groups.used; i++) {
        group_t *group = &((group_t *)all->groups.items)[i];
        if (group->count > 0)
            done = append_new(groups, Py_BuildValue("(OLLOLNLLN)", SITE(group->site), group->device, group->stream,
                                                    group->label, group->count, wide_as_long(group->summed_ns),
                                                    group->least_ns, group->most_ns,
                                                    heap_bytes(&group->stretches, sizeof(stretch_t))));
    }
    for (size_t i = 0; done == 0 && i < all->calls.used; i++) {
        calls_t *own = &((calls_t *)all->calls.items)[i];
        done = append_new(calls, Py_BuildValue("(OLN)", SITE(own->site), own->device,
                                               heap_bytes(&own->lengths, sizeof(int64_t))));
    }
    for (size_t i = 0; done == 0 && i < all->devices.used; i++) {
        device_t *device = &((device_t *)all->devices.items)[i];
        done = append_new(devices, Py_BuildValue("(LLN)", device->device, device->outside,
                                                 heap_bytes(&device->owned, sizeof(owned_t))));
    }
    for (size_t i = 0; done == 0 && i < all->unanswered.used; i++) {
        unanswered_t *missing = &((unanswered_t *)all->unanswered.items)[i];
        done = append_new(unanswered, Py_BuildValue("(OOL)", SITE(missing->site),
                                                    missing->label == NULL ? Py_None : missing->label,
                                                    missing->spans));
    }
    if (done == 0)
        return Py_BuildValue("(LNNNN)", all->asked, groups, calls, devices, unanswered);
    Py_XDECREF(groups);
    Py_XDECREF(calls);
    Py_XDECREF(devices);
    Py_XDECREF(unanswered);
    return NULL;
#undef SITE
}

/* device_time(spans, owners, first_ns, last_ns, untimed): what `stretches.gathered_in_python` finds. None where the spans
 * are not plain. */
static PyObject *
device_time(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *owned, *untimed, *result = NULL;
    long long first, last;
    if (!PyArg_ParseTuple(args, "OSLLO!:device_time", &spans, &owned, &first, &last, &PyFrozenSet_Type, &untimed))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL || (size_t)PyBytes_GET_SIZE(owned) != (size_t)PyTuple_GET_SIZE(own) * sizeof(int64_t) ||
        last < first || (wide_t)last - first > INT64_MAX) {
        Py_XDECREF(own);
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    gathered_t all = {.untimed = untimed, .first = first, .last = last};
    table_t *tables[] = {&all.sites.numbers, &all.group_of, &all.calls_of, &all.device_of, &all.streams,
                         &all.labels,        &all.unanswered_of, &all.pairs, &all.triples};
    int plain = 1;
    for (size_t i = 0; plain > 0 && i < sizeof tables / sizeof *tables; i++)
        if (table_make(tables[i], 64) < 0) {
            PyErr_NoMemory();
            plain = -1;
        }
    for (Py_ssize_t i = 0; plain > 0 && i < PyTuple_GET_SIZE(own); i++) {
        int64_t owner;
        memcpy(&owner, PyBytes_AS_STRING(owned) + (size_t)i * sizeof owner, sizeof owner);
        plain = gather_span(&all, (Span *)PyTuple_GET_ITEM(own, i), owner);
        give_way((size_t)i);
    }
    if (plain >= 0)
        result = plain ? gathered(&all) : Py_NewRef(Py_None);
    for (size_t i = 0; i < all.groups.used; i++) {
        Py_DECREF(((group_t *)all.groups.items)[i].label);
        PyMem_RawFree(((group_t *)all.groups.items)[i].stretches.items);
    }
    for (size_t i = 0; i < all.calls.used; i++)
        PyMem_RawFree(((calls_t *)all.calls.items)[i].lengths.items);
    for (size_t i = 0; i < all.devices.used; i++)
        PyMem_RawFree(((device_t *)all.devices.items)[i].owned.items);
    for (size_t i = 0; i < all.unanswered.used; i++)
        Py_XDECREF(((unanswered_t *)all.unanswered.items)[i].label);
    PyMem_RawFree(all.groups.items);
    PyMem_RawFree(all.calls.items);
    PyMem_RawFree(all.devices.items);
    PyMem_RawFree(all.unanswered.items);
    PyMem_RawFree(all.call.items);
    for (size_t i = 1; i < sizeof tables / sizeof *tables; i++)
        table_free(tables[i]);
    sites_free(&all.sites);
    Py_DECREF(own);
    return result;
}

typedef struct {
    stretch_t stretch;
    uint32_t span; /* its place */
} laid_t;

static int
compare_laid(const void *a, const void *b)
{
    return compare_stretches(&((const laid_t *)a)->stretch, &((const laid_t *)b)->stretch);
}

typedef struct {
    table_t devices, streams, pairs;
    heap_t lanes; /* of each stream the stretches of spans, as `laid_t` */
} lanes_t;

/* Keep the timed intervals of a span by stream. 1; 0 where they are not plain; -1 with an error. */
static int
lay(lanes_t *all, const Span *span, uint32_t place, PyObject *untimed)
{
    if (!PyTuple_CheckExact(span->device))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(span->device); i++) {
        const Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, i);
        if (!Py_IS_TYPE((PyObject *)interval, interval_type))
            return 0;
        PyObject *label = interval->label != NULL ? interval->label : text_exclusive;
        int is_untimed = PyUnicode_CheckExact(label) ? label != text_exclusive && PySet_Contains(untimed, label) : 2;
        if (is_untimed == 2 || PyErr_Occurred())
            return is_untimed == 2 ? 0 : -1;
        if (is_untimed)
            continue;
        uint32_t device = numbered(&all->devices, interval->device), stream = numbered(&all->streams, interval->stream);
        uint32_t lane = device == NOWHERE || stream == NOWHERE ? NOWHERE : numbered(&all->pairs, PAIR(device, stream));
        if (lane != NOWHERE && lane == all->lanes.used) {
            heap_t *made = heap_next(&all->lanes, sizeof *made);
            if (made != NULL)
                *made = (heap_t){0};
        }
        laid_t *next = lane >= all->lanes.used ? NULL : heap_next((heap_t *)all->lanes.items + lane, sizeof *next);
        if (next == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        int64_t start = interval->start_ns, end = interval->end_ns;
        *next = (laid_t){{start, end < start ? start : end}, place};
    }
    return 1;
}

typedef struct {
    int64_t until; /* where the union of its stretches ends on the stream that is looked at */
    size_t lane;   /* the stream after this one; 0 for none yet */
    wide_t sum;
} sum_t;

/* By key the sum over streams, None for what has nothing on any. NULL with an error. */
static PyObject *
added_up(const lanes_t *all, const int64_t *numbers, const int64_t *keys, size_t key_count)
{
    int64_t most = -1;
    for (size_t i = 0; i < key_count; i++)
        most = keys[i] > most ? keys[i] : most;
    size_t count = (size_t)(most + 1);
    sum_t *sums = PyMem_RawCalloc(count + 1, sizeof *sums);
    if (sums == NULL)
        return PyErr_NoMemory();
    PyObject *found = NULL;
    for (size_t i = 0; i < all->lanes.used; i++) {
        const heap_t *lane = (heap_t *)all->lanes.items + i;
        for (size_t n = 0; n < lane->used; n++) {
            const laid_t *laid = (laid_t *)lane->items + n;
            int64_t number = numbers[laid->span];
            if (number < 0)
                continue;
            if ((size_t)number >= key_count || keys[number] < 0) {
                PyErr_SetString(PyExc_IndexError, "a span has a number without a key");
                goto end;
            }
            sum_t *sum = &sums[keys[number]];
            int64_t start = laid->stretch.start, end = laid->stretch.end;
            if (sum->lane != i + 1 || start >= sum->until) {
                sum->lane = i + 1;
                sum->until = start;
            }
            if (end > sum->until) {
                sum->sum += (wide_t)end - sum->until;
                sum->until = end;
            }
        }
    }
    found = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; found != NULL && i < count; i++) {
        PyObject *sum = sums[i].lane == 0 ? Py_NewRef(Py_None) : wide_as_long(sums[i].sum);
        if (sum == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, (Py_ssize_t)i, sum);
    }
end:
    PyMem_RawFree(sums);
    return found;
}

/* summed(spans, wanted, untimed): as the twin in `stretches.py`; `wanted` is a tuple of pairs of numbers of 64 bits. None
 * where the spans are not plain. */
static PyObject *
summed(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *wanted, *untimed, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO!O!:summed", &spans, &PyTuple_Type, &wanted, &PyFrozenSet_Type, &untimed))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    lanes_t all = {0};
    int plain = 1;
    if (table_make(&all.devices, 64) < 0 || table_make(&all.streams, 64) < 0 || table_make(&all.pairs, 64) < 0) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; plain > 0 && i < PyTuple_GET_SIZE(own); i++) {
        if (((Span *)PyTuple_GET_ITEM(own, i))->device != NULL)
            plain = lay(&all, (Span *)PyTuple_GET_ITEM(own, i), (uint32_t)i, untimed);
        give_way((size_t)i);
    }
    if (plain <= 0) {
        result = plain < 0 ? NULL : Py_NewRef(Py_None);
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < all.lanes.used; i++) {
        heap_t *lane = (heap_t *)all.lanes.items + i;
        qsort(lane->items, lane->used, sizeof(laid_t), compare_laid);
    }
    Py_END_ALLOW_THREADS
    result = PyList_New(0);
    for (Py_ssize_t i = 0; result != NULL && i < PyTuple_GET_SIZE(wanted); i++) {
        PyObject *numbers, *keys, *sums = NULL;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(wanted, i), "SS", &numbers, &keys))
            Py_CLEAR(result);
        else if ((size_t)PyBytes_GET_SIZE(numbers) != (size_t)PyTuple_GET_SIZE(own) * sizeof(int64_t))
            PyErr_SetString(PyExc_ValueError, "there is not a number for each span");
        else
            sums = added_up(&all, (const int64_t *)PyBytes_AS_STRING(numbers), (const int64_t *)PyBytes_AS_STRING(keys),
                            (size_t)PyBytes_GET_SIZE(keys) / sizeof(int64_t));
        if (result != NULL && append_new(result, sums) < 0)
            Py_CLEAR(result);
    }
end:
    for (size_t i = 0; i < all.lanes.used; i++)
        PyMem_RawFree(((heap_t *)all.lanes.items)[i].items);
    PyMem_RawFree(all.lanes.items);
    table_free(&all.devices);
    table_free(&all.streams);
    table_free(&all.pairs);
    Py_DECREF(own);
    return result;
}

/* sites(spans): the sites of spans, each once, by first sight. None where one of them is no span of ours. */
static PyObject *
sites(PyObject *Py_UNUSED(module), PyObject *spans)
{
    PyObject *own = own_spans(spans), *found = NULL;
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    table_t seen;
    if (table_make(&seen, 64) < 0)
        PyErr_NoMemory();
    else
        found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(own); i++) {
        PyObject *site = ((Span *)PyTuple_GET_ITEM(own, i))->site;
        uint32_t number = numbered(&seen, (int64_t)(intptr_t)site);
        if (number == NOWHERE)
            PyErr_NoMemory();
        if (number == NOWHERE || (number == (uint32_t)PyList_GET_SIZE(found) && PyList_Append(found, site) < 0))
            Py_CLEAR(found);
        give_way((size_t)i);
    }
    table_free(&seen);
    Py_DECREF(own);
    return found;
}

/* having(spans, attribute): the spans that have an attribute. None where one of them is no span of ours. */
static PyObject *
having(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *attribute;
    if (!PyArg_ParseTuple(args, "OU:having", &spans, &attribute))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(own); i++) {
        PyObject *span = PyTuple_GET_ITEM(own, i);
        int has = has_attribute((Span *)span, attribute);
        if (has < 0 || (has && PyList_Append(found, span) < 0))
            Py_CLEAR(found);
        give_way((size_t)i);
    }
    Py_DECREF(own);
    return found;
}

/* ---- where device time belongs */

typedef struct {
    int64_t start, end, number;
} piece_t;

typedef struct {
    int64_t first_unit;
    const piece_t *pieces;
    const stretch_t *units;
    size_t unit_count, piece_count;
} line_t;

typedef struct {
    table_t firsts, seconds, pairs;
} names_t;

/* Which line has which name of two numbers. 0, or -1 with an error. */
static int
take_names(names_t *names, PyObject *numbers, size_t lines)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(numbers, &at, &key, &value)) {
        long long first, second;
        if (!PyTuple_Check(key) || !PyArg_ParseTuple(key, "LL", &first, &second))
            return -1;
        unsigned long number = PyLong_AsUnsignedLong(value);
        if (!PyErr_Occurred() && number >= lines)
            PyErr_SetString(PyExc_IndexError, "no line has that number");
        if (PyErr_Occurred())
            return -1;
        uint32_t left = numbered(&names->firsts, first), right = numbered(&names->seconds, second);
        uint32_t *cell = left == NOWHERE || right == NOWHERE ? NULL : table_cell(&names->pairs, PAIR(left, right));
        if (cell == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        *cell = (uint32_t)number;
    }
    return 0;
}

static uint32_t
line_named(const names_t *names, int64_t first, int64_t second)
{
    uint32_t left = table_get(&names->firsts, first), right = table_get(&names->seconds, second);
    return left == NOWHERE || right == NOWHERE ? NOWHERE : table_get(&names->pairs, PAIR(left, right));
}

/* What the line of a span is that has no name: NOWHERE for none, NOWHERE - 1 with an error. */
static uint32_t
line_asked(PyObject *ask, PyObject *span, size_t lines)
{
    PyObject *answer = PyObject_CallOneArg(ask, span);
    if (answer == NULL)
        return NOWHERE - 1;
    uint32_t line = NOWHERE;
    if (answer != Py_None) {
        unsigned long number = PyLong_AsUnsignedLong(answer);
        if (!PyErr_Occurred() && number >= lines)
            PyErr_SetString(PyExc_IndexError, "no line has that number");
        line = PyErr_Occurred() ? NOWHERE - 1 : (uint32_t)number;
    }
    Py_DECREF(answer);
    return line;
}

/* The number of the last that begins by then and is not over, -1 for none. */
#define LAST_AT(items, count, at)                                                                                          \
    size_t low = 0, high = count;                                                                                          \
    while (low < high) {                                                                                                   \
        size_t middle = low + (high - low) / 2;                                                                            \
        if ((items)[middle].start <= (at))                                                                                 \
            low = middle + 1;                                                                                              \
        else                                                                                                               \
            high = middle;                                                                                                 \
    }                                                                                                                      \
    return low > 0 && (at) < (items)[low - 1].end ? (int64_t)low - 1 : -1

static int64_t
unit_at(const line_t *line, int64_t at)
{
    LAST_AT(line->units, line->unit_count, at);
}

static int64_t
piece_at(const line_t *line, int64_t at)
{
    LAST_AT(line->pieces, line->piece_count, at);
}

/* placed(spans, names, by_root, line_of, lines): as the twin in `stretches.py`. None where one of them is no span of ours. */
static PyObject *
placed(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *named, *ask, *lines, *found = NULL, *result = NULL;
    int by_root;
    if (!PyArg_ParseTuple(args, "OO!pOO!:placed", &spans, &PyDict_Type, &named, &by_root, &ask, &PyTuple_Type, &lines))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    size_t line_count = (size_t)PyTuple_GET_SIZE(lines);
    line_t *all = PyMem_RawCalloc(line_count + 1, sizeof *all);
    names_t names = {0};
    heap_t units = {0}, calls = {0};
    found = PyList_New(0);
    if (all == NULL || found == NULL || table_make(&names.firsts, 64) < 0 || table_make(&names.seconds, 64) < 0 ||
        table_make(&names.pairs, 64) < 0)
        goto no_memory;
    if (take_names(&names, named, line_count) < 0)
        goto end;
    for (size_t i = 0; i < line_count; i++) {
        PyObject *of_units, *pieces;
        long long first_unit;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(lines, i), "LSS", &first_unit, &of_units, &pieces))
            goto end;
        all[i] = (line_t){first_unit, (const piece_t *)PyBytes_AS_STRING(pieces),
                          (const stretch_t *)PyBytes_AS_STRING(of_units),
                          (size_t)PyBytes_GET_SIZE(of_units) / sizeof(stretch_t),
                          (size_t)PyBytes_GET_SIZE(pieces) / sizeof(piece_t)};
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        give_way((size_t)i);
        if (span->device == NULL)
            continue;
        uint32_t line = by_root ? line_named(&names, span->root_id, 0)
                                : line_named(&names, span->thread_id, span->task_id);
        if (line == NOWHERE)
            line = line_asked(ask, (PyObject *)span, line_count);
        if (line == NOWHERE - 1)
            goto end;
        int64_t unit = line == NOWHERE ? -1 : unit_at(&all[line], span->start_ns);
        if (unit < 0)
            continue;
        int64_t piece = piece_at(&all[line], span->start_ns);
        int64_t *of_unit = heap_next(&units, sizeof *of_unit), *call = heap_next(&calls, sizeof *call);
        if (of_unit == NULL || call == NULL)
            goto no_memory;
        *of_unit = all[line].first_unit + unit;
        *call = piece < 0 ? -1 : all[line].pieces[piece].number;
        if (PyList_Append(found, (PyObject *)span) < 0)
            goto end;
    }
    result = Py_BuildValue("(ONN)", found, heap_bytes(&units, sizeof(int64_t)), heap_bytes(&calls, sizeof(int64_t)));
    goto end;
no_memory:
    PyErr_NoMemory();
end:
    table_free(&names.firsts);
    table_free(&names.seconds);
    table_free(&names.pairs);
    PyMem_RawFree(units.items);
    PyMem_RawFree(calls.items);
    PyMem_RawFree(all);
    Py_XDECREF(found);
    Py_DECREF(own);
    return result;
}

typedef struct {
    int64_t device, stream;
    stretch_t stretch;
    uint32_t place, group; /* among all intervals; of its site and device */
} interval_t;

/* By stream, and on each by start, longer ones first, then as they come. */
static int
compare_intervals(const void *a, const void *b)
{
    const interval_t *left = a, *right = b;
    if (left->device != right->device)
        return left->device < right->device ? -1 : 1;
    if (left->stream != right->stream)
        return left->stream < right->stream ? -1 : 1;
    if (left->stretch.start != right->stretch.start)
        return left->stretch.start < right->stretch.start ? -1 : 1;
    if (left->stretch.end != right->stretch.end)
        return left->stretch.end > right->stretch.end ? -1 : 1;
    return left->place < right->place ? -1 : left->place > right->place;
}

typedef struct {
    PyObject *span; /* one of them */
    int64_t device;
    heap_t stretches;
} named_t;

/* innermost(spans, first_ns, last_ns, untimed): the timed intervals that enclose no other on their stream, as they lie in
 * the window: how many lie outside of it, and [(a span of the site, device, stretches)]. None where they are not plain. */
static PyObject *
innermost(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *untimed, *result = NULL, *groups = NULL;
    long long first, last;
    if (!PyArg_ParseTuple(args, "OLLO!:innermost", &spans, &first, &last, &PyFrozenSet_Type, &untimed))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    sites_t sites = {0};
    table_t devices = {0}, pairs = {0}, labels = {0};
    heap_t all = {0}, named = {0}, known = {0}; /* `known`: labels, each with whether it is timed */
    int plain = 1;
    long long outside = 0;
    if (table_make(&sites.numbers, 64) < 0 || table_make(&devices, 64) < 0 || table_make(&pairs, 64) < 0 ||
        table_make(&labels, 64) < 0)
        goto no_memory;
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(own); i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        give_way((size_t)i);
        PyObject *device = span->device;
        if (device == NULL)
            continue;
        uint32_t site = 0;
        if (!(plain = PyTuple_CheckExact(device)))
            break;
        if (fact_of(&sites, span->site, nothing_of, NULL, &site) == NULL)
            goto end;
        for (Py_ssize_t n = 0; plain && n < PyTuple_GET_SIZE(device); n++) {
            Interval *interval = (Interval *)PyTuple_GET_ITEM(device, n);
            plain = Py_IS_TYPE((PyObject *)interval, interval_type) && interval->end_ns >= interval->start_ns &&
                    all.used < NOWHERE - 1;
            PyObject *text = plain && interval->label != NULL ? interval->label : text_exclusive;
            if (!plain || !(plain = PyUnicode_CheckExact(text)))
                break;
            uint32_t label = numbered(&labels, (int64_t)(intptr_t)text);
            if (label == NOWHERE)
                goto no_memory;
            if (label == known.used) {
                site_fact_t *made = heap_next(&known, sizeof *made);
                if (made == NULL)
                    goto no_memory;
                *made = (site_fact_t){Py_NewRef(text), 0};
                int is_untimed = PySet_Contains(untimed, text);
                if (is_untimed < 0)
                    goto end;
                ((site_fact_t *)known.items)[label].fact = !is_untimed;
            }
            if (!((site_fact_t *)known.items)[label].fact)
                continue;
            uint32_t number = numbered(&devices, interval->device);
            uint32_t group = number == NOWHERE ? NOWHERE : numbered(&pairs, PAIR(site, number));
            if (group == NOWHERE)
                goto no_memory;
            if (group == named.used) {
                named_t *made = heap_next(&named, sizeof *made);
                if (made == NULL)
                    goto no_memory;
                *made = (named_t){(PyObject *)span, interval->device};
            }
            interval_t *stored = heap_next(&all, sizeof *stored);
            if (stored == NULL)
                goto no_memory;
            *stored = (interval_t){interval->device, interval->stream, {interval->start_ns, interval->end_ns},
                                   (uint32_t)all.used - 1, group};
        }
    }
    if (!plain) {
        result = Py_NewRef(Py_None);
        goto end;
    }
    interval_t *sorted = (interval_t *)all.items;
    Py_BEGIN_ALLOW_THREADS
    if (all.used > 1)
        qsort(sorted, all.used, sizeof *sorted, compare_intervals);
    Py_END_ALLOW_THREADS
    /* From the last to begin back: one encloses another if it ends no sooner than any that begins later. */
    wide_t least_end = 0;
    for (size_t i = all.used; i-- > 0;) {
        interval_t *one = &sorted[i];
        int64_t start = one->stretch.start, end = one->stretch.end;
        int is_last = i + 1 == all.used || sorted[i + 1].device != one->device || sorted[i + 1].stream != one->stream;
        if (is_last)
            least_end = (wide_t)INT64_MAX + 1;
        if (end >= least_end && start != end)
            continue;
        if (start < end && end < least_end)
            least_end = end;
        if (start < first || end > last) {
            if (start >= last || end <= first) {
                outside++;
                continue;
            }
            start = start < first ? first : start;
            end = end > last ? last : end;
        }
        stretch_t *stretch = heap_next(&((named_t *)named.items)[one->group].stretches, sizeof *stretch);
        if (stretch == NULL)
            goto no_memory;
        *stretch = (stretch_t){start, end};
    }
    groups = PyList_New(0);
    for (size_t i = 0; groups != NULL && i < named.used; i++) {
        named_t *its = &((named_t *)named.items)[i];
        if (its->stretches.used > 0 &&
            append_new(groups, Py_BuildValue("(OLN)", its->span, its->device,
                                             heap_bytes(&its->stretches, sizeof(stretch_t)))) < 0)
            Py_CLEAR(groups);
    }
    result = groups == NULL ? NULL : Py_BuildValue("(LN)", outside, groups);
    goto end;
no_memory:
    PyErr_NoMemory();
end:
    for (size_t i = 0; i < named.used; i++)
        PyMem_RawFree(((named_t *)named.items)[i].stretches.items);
    for (size_t i = 0; i < known.used; i++)
        Py_DECREF(((site_fact_t *)known.items)[i].site);
    PyMem_RawFree(named.items);
    PyMem_RawFree(known.items);
    PyMem_RawFree(all.items);
    table_free(&devices);
    table_free(&pairs);
    table_free(&labels);
    sites_free(&sites);
    Py_DECREF(own);
    return result;
}

/* The stretches of a piece of memory; NULL with an error where it holds none. */
static const stretch_t *
stretches_of(PyObject *packed, size_t *count)
{
    if (!PyBytes_Check(packed) || (size_t)PyBytes_GET_SIZE(packed) % sizeof(stretch_t) != 0) {
        PyErr_SetString(PyExc_TypeError, "stretches are bytes, sixteen of them each");
        return NULL;
    }
    *count = (size_t)PyBytes_GET_SIZE(packed) / sizeof(stretch_t);
    return (const stretch_t *)PyBytes_AS_STRING(packed);
}

/* united(parts): the union of stretches of several pieces of memory, in order and disjoint, without empty ones. */
static PyObject *
united_stretches(PyObject *Py_UNUSED(module), PyObject *parts)
{
    PyObject *own = PySequence_Tuple(parts), *result = NULL;
    stretch_t *all = NULL;
    size_t total = 0, count = 0, used = 0;
    if (own == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); i++) {
        if (stretches_of(PyTuple_GET_ITEM(own, i), &count) == NULL)
            goto end;
        total += count;
    }
    if ((all = PyMem_RawMalloc((total + 1) * sizeof *all)) == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); i++) {
        const stretch_t *some = stretches_of(PyTuple_GET_ITEM(own, i), &count);
        for (size_t n = 0; n < count; n++)
            if (some[n].start < some[n].end)
                all[used++] = some[n];
    }
    Py_BEGIN_ALLOW_THREADS
    sort_stretches(all, used);
    used = unite(all, used);
    Py_END_ALLOW_THREADS
    result = PyBytes_FromStringAndSize((char *)all, (Py_ssize_t)(used * sizeof *all));
end:
    PyMem_RawFree(all);
    Py_DECREF(own);
    return result;
}

/* shared_ns(left, right): how long what two unions have in common is. Of one with itself: how long it is. */
static PyObject *
shared_ns(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *packed_left, *packed_right;
    size_t lefts, rights, i = 0, j = 0;
    if (!PyArg_ParseTuple(args, "OO:shared_ns", &packed_left, &packed_right))
        return NULL;
    const stretch_t *left = stretches_of(packed_left, &lefts);
    const stretch_t *right = left == NULL ? NULL : stretches_of(packed_right, &rights);
    if (right == NULL)
        return NULL;
    wide_t shared = 0;
    while (i < lefts && j < rights) {
        int64_t start = left[i].start > right[j].start ? left[i].start : right[j].start;
        int64_t end = left[i].end < right[j].end ? left[i].end : right[j].end;
        if (start < end)
            shared += (wide_t)end - start;
        if (left[i].end < right[j].end)
            i++;
        else
            j++;
    }
    return wide_as_long(shared);
}

static int
compare_numbers(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return left < right ? -1 : left > right;
}

static void
sort_numbers(int64_t *numbers, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (numbers[i - 1] > numbers[i]) {
            qsort(numbers, count, sizeof *numbers, compare_numbers);
            return;
        }
}

/* at_once(unions): how long at least two of several unions went on, and how many did at most. */
static PyObject *
at_once(PyObject *Py_UNUSED(module), PyObject *unions)
{
    PyObject *own = PySequence_Tuple(unions), *result = NULL;
    int64_t *starts = NULL, *ends = NULL;
    size_t total = 0, count = 0, used = 0, busy = 0, most = 0, done = 0;
    wide_t overlap = 0;
    int64_t since = 0;
    if (own == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); i++) {
        if (stretches_of(PyTuple_GET_ITEM(own, i), &count) == NULL)
            goto end;
        total += count;
    }
    starts = PyMem_RawMalloc((total + 1) * sizeof *starts);
    ends = PyMem_RawMalloc((total + 1) * sizeof *ends);
    if (starts == NULL || ends == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); i++) {
        const stretch_t *some = stretches_of(PyTuple_GET_ITEM(own, i), &count);
        for (size_t n = 0; n < count; n++) {
            starts[used] = some[n].start;
            ends[used++] = some[n].end;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    sort_numbers(starts, used);
    sort_numbers(ends, used);
    for (size_t i = 0; i <= used; i++) {
        while (done < used && (i == used || ends[done] <= starts[i])) {
            if (--busy == 1)
                overlap += (wide_t)ends[done] - since;
            done++;
        }
        if (i < used && ++busy == 2)
            since = starts[i];
        most = busy > most ? busy : most;
    }
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("(Nn)", wide_as_long(overlap), (Py_ssize_t)most);
end:
    PyMem_RawFree(starts);
    PyMem_RawFree(ends);
    Py_DECREF(own);
    return result;
}

/* How much of a union lies before a time. */
static int64_t
before(const stretch_t *sorted, const int64_t *sums, size_t count, int64_t at_ns)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (sorted[middle].start <= at_ns)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0)
        return 0;
    int64_t beyond = sorted[low - 1].end > at_ns ? sorted[low - 1].end - at_ns : 0;
    return sums[low] - beyond;
}

/* The numbers of spans by their ids. 0; 1 where an id comes twice or a span is none of ours; -1 without memory. */
static int
numbers_of(PyObject *spans, table_t *numbers)
{
    if (table_make(numbers, (size_t)PyTuple_GET_SIZE(spans)) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(spans); i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(spans, i);
        uint32_t *cell = table_cell(numbers, span->span_id);
        if (cell == NULL)
            return -1;
        if (*cell != NOWHERE || span->end_ns < span->start_ns || (wide_t)span->end_ns - span->start_ns > INT64_MAX)
            return 1;
        *cell = (uint32_t)i;
    }
    return 0;
}

/* within(owned, requests, busy): of each request that owns stretches its number, how long these are within its host
 * interval, as a union, and how much of a device's busy time is. None where the requests are not plain. */
static PyObject *
within(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *owned, *spans, *packed, *result = NULL;
    size_t busy_count;
    if (!PyArg_ParseTuple(args, "SOS:within", &owned, &spans, &packed))
        return NULL;
    const stretch_t *busy = stretches_of(packed, &busy_count);
    PyObject *requests = busy == NULL ? NULL : own_spans(spans);
    if (requests == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    table_t numbers = {0};
    size_t count = (size_t)PyBytes_GET_SIZE(owned) / sizeof(owned_t), request_count = (size_t)PyTuple_GET_SIZE(requests);
    const owned_t *all = (const owned_t *)PyBytes_AS_STRING(owned);
    uint32_t *firsts = PyMem_RawCalloc(request_count + 2, sizeof *firsts);
    stretch_t *sorted = PyMem_RawMalloc((count + 1) * sizeof *sorted);
    int64_t *sums = PyMem_RawMalloc((busy_count + 1) * sizeof *sums);
    int plain = count < NOWHERE && firsts != NULL && sorted != NULL && sums != NULL ? numbers_of(requests, &numbers) : -1;
    if (plain < 0)
        PyErr_NoMemory();
    if (plain != 0) {
        result = plain > 0 ? Py_NewRef(Py_None) : NULL;
        goto end;
    }
    sums[0] = 0;
    for (size_t i = 0; i < busy_count; i++)
        sums[i + 1] = sums[i] + (busy[i].end - busy[i].start);
    for (size_t i = 0; i < count; i++) {
        uint32_t number = table_get(&numbers, all[i].owner);
        if (number != NOWHERE)
            firsts[number + 2]++;
    }
    for (size_t i = 2; i < request_count + 2; i++)
        firsts[i] += firsts[i - 1];
    for (size_t i = 0; i < count; i++) { /* afterwards those of a request begin at its own entry, and end at the next */
        uint32_t number = table_get(&numbers, all[i].owner);
        if (number != NOWHERE)
            sorted[firsts[number + 1]++] = all[i].stretch;
    }
    result = PyList_New(0);
    for (size_t i = 0; result != NULL && i < request_count; i++) {
        stretch_t *own = &sorted[firsts[i]];
        size_t own_count = firsts[i + 1] - firsts[i];
        if (own_count == 0)
            continue;
        Span *request = (Span *)PyTuple_GET_ITEM(requests, i);
        int64_t own_ns = 0, at = request->start_ns;
        sort_stretches(own, own_count);
        for (size_t n = 0; n < own_count; n++) {
            int64_t start = own[n].start > at ? own[n].start : at;
            int64_t end = own[n].end < request->end_ns ? own[n].end : request->end_ns;
            if (end > start) {
                own_ns += end - start;
                at = end;
            }
        }
        int64_t busy_ns = before(busy, sums, busy_count, request->end_ns) - before(busy, sums, busy_count, request->start_ns);
        if (append_new(result, Py_BuildValue("(nLL)", (Py_ssize_t)i, own_ns, busy_ns)) < 0)
            Py_CLEAR(result);
        give_way(i);
    }
end:
    PyMem_RawFree(firsts);
    PyMem_RawFree(sorted);
    PyMem_RawFree(sums);
    table_free(&numbers);
    Py_DECREF(requests);
    return result;
}

typedef struct {
    int64_t start_ns, end_ns, span_id;
    uint32_t label;
} phase_t;

static int
compare_phases(const void *a, const void *b)
{
    const phase_t *left = a, *right = b;
    return compare_places(left->start_ns, left->end_ns, left->span_id, right->start_ns, right->end_ns, right->span_id, 1);
}

static int64_t
label_of(PyObject *site, void *labels)
{
    PyObject *label = PyDict_GetItemWithError(labels, site); /* borrowed */
    return label == NULL ? -1 : PyLong_AsLongLong(label);
}

/* Share the wall of a request out among its phases. `open` is room for as many as there are. */
static void
share_out(Span *request, phase_t *phases, size_t count, phase_t **open, int64_t *times, int64_t *unknown_ns)
{
    size_t running = 0;
    int64_t at = request->start_ns, last = request->end_ns;
    for (size_t i = 1; i < count; i++)
        if (compare_phases(&phases[i - 1], &phases[i]) > 0) {
            qsort(phases, count, sizeof *phases, compare_phases);
            break;
        }
    *unknown_ns = 0;
    for (size_t i = 0; i <= count; i++) {
        int64_t start = i == count || phases[i].start_ns > last ? last : phases[i].start_ns;
        while (at < start && running > 0) {
            phase_t *newest = open[running - 1];
            if (newest->end_ns <= at) {
                running--;
                continue;
            }
            int64_t until = newest->end_ns < start ? newest->end_ns : start;
            times[newest->label] += until - at;
            at = until;
        }
        if (at < start) {
            *unknown_ns += start - at;
            at = start;
        }
        if (i < count)
            open[running++] = &phases[i];
    }
}

/* grouped(spans, labels, count): the spans of sites by the label of the site, from 1 to that many, as lists; 0 is of none. None
 * where one of them is no span of ours. */
static PyObject *
grouped(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *labels;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "OO!n:grouped", &spans, &PyDict_Type, &labels, &count))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    sites_t sites = {0};
    PyObject *found = PyTuple_New(count < 0 ? 0 : count);
    int done = found == NULL ? -1 : 0;
    if (done == 0 && table_make(&sites.numbers, 64) < 0) {
        PyErr_NoMemory();
        done = -1;
    }
    for (Py_ssize_t i = 0; done == 0 && i < PyTuple_GET_SIZE(found); i++) {
        PyObject *list = PyList_New(0);
        if (list == NULL)
            done = -1;
        else
            PyTuple_SET_ITEM(found, i, list);
    }
    for (Py_ssize_t i = 0; done == 0 && i < PyTuple_GET_SIZE(own); i++) {
        PyObject *span = PyTuple_GET_ITEM(own, i);
        uint32_t site;
        site_fact_t *label = fact_of(&sites, ((Span *)span)->site, label_of, labels, &site);
        if (label != NULL && label->fact > PyTuple_GET_SIZE(found))
            PyErr_SetString(PyExc_ValueError, "a label of a site is greater than there are lists");
        if (label == NULL || PyErr_Occurred())
            done = -1;
        else if (label->fact > 0)
            done = PyList_Append(PyTuple_GET_ITEM(found, (Py_ssize_t)label->fact - 1), span);
        give_way((size_t)i);
    }
    if (done < 0)
        Py_CLEAR(found);
    sites_free(&sites);
    Py_DECREF(own);
    return found;
}

/* phases(spans, owners, requests, labels): of each request what each phase of it took and, as that of the label 0, what
 * none took, as ({label: ns}). `labels` has a number for each site, 0 where its spans are no phase. None where the
 * requests are not plain. */
static PyObject *
phases(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *owned, *asked, *labels, *result = NULL;
    if (!PyArg_ParseTuple(args, "OSOO!:phases", &spans, &owned, &asked, &PyDict_Type, &labels))
        return NULL;
    PyObject *own = own_spans(spans), *requests = own == NULL ? NULL : own_spans(asked);
    if (requests == NULL || (size_t)PyBytes_GET_SIZE(owned) != (size_t)PyTuple_GET_SIZE(own) * sizeof(int64_t)) {
        Py_XDECREF(own);
        Py_XDECREF(requests);
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(own), request_count = (size_t)PyTuple_GET_SIZE(requests), longest = 0;
    size_t label_count = (size_t)PyDict_GET_SIZE(labels) + 1;
    sites_t sites = {0};
    table_t numbers = {0};
    phase_t *all = NULL, **open = NULL;
    uint32_t *firsts = PyMem_RawCalloc(request_count + 2, sizeof *firsts);
    uint32_t *places = PyMem_RawMalloc((count + 1) * sizeof *places); /* the number of the request of a span, or NOWHERE */
    int64_t *times = PyMem_RawCalloc(label_count, sizeof *times);
    int plain = firsts != NULL && places != NULL && times != NULL && table_make(&sites.numbers, 64) == 0
                    ? numbers_of(requests, &numbers)
                    : -1;
    if (plain < 0)
        PyErr_NoMemory();
    if (plain != 0) {
        result = plain > 0 ? Py_NewRef(Py_None) : NULL;
        goto end;
    }
    for (size_t i = 0; i < count; i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        uint32_t site;
        site_fact_t *label = fact_of(&sites, span->site, label_of, labels, &site);
        if (label == NULL)
            goto end;
        if ((size_t)label->fact >= label_count) {
            PyErr_SetString(PyExc_ValueError, "a label of a site is greater than there are sites");
            goto end;
        }
        places[i] = NOWHERE;
        int64_t owner;
        memcpy(&owner, PyBytes_AS_STRING(owned) + i * sizeof owner, sizeof owner);
        if (label->fact > 0 && owner != span->span_id) {
            places[i] = table_get(&numbers, owner);
            if (places[i] != NOWHERE)
                firsts[places[i] + 2]++;
        }
        give_way(i);
    }
    for (size_t i = 2; i < request_count + 2; i++) {
        longest = firsts[i] > longest ? firsts[i] : longest;
        firsts[i] += firsts[i - 1];
    }
    all = PyMem_RawMalloc((firsts[request_count + 1] + (size_t)1) * sizeof *all);
    open = PyMem_RawMalloc((longest + 1) * sizeof *open);
    if (all == NULL || open == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (size_t i = 0; i < count; i++) {
        if (places[i] == NOWHERE)
            continue;
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        uint32_t site, at = firsts[places[i] + 1]++;
        site_fact_t *label = fact_of(&sites, span->site, label_of, labels, &site);
        if (label == NULL)
            goto end;
        all[at] = (phase_t){span->start_ns, span->end_ns, span->span_id, (uint32_t)label->fact};
        give_way(i);
    }
    result = PyList_New(0);
    for (size_t i = 0; result != NULL && i < request_count; i++) {
        phase_t *its = &all[firsts[i]];
        size_t its_count = firsts[i + 1] - firsts[i];
        PyObject *found = PyDict_New();
        share_out((Span *)PyTuple_GET_ITEM(requests, i), its, its_count, open, times, &times[0]);
        for (size_t n = 0; n <= its_count; n++) { /* in the order in which the phases begin, and then what none took */
            uint32_t label = n == its_count ? 0 : its[n].label;
            if (times[label] == 0)
                continue;
            PyObject *number = PyLong_FromUnsignedLong(label), *time_ns = PyLong_FromLongLong(times[label]);
            if (found != NULL && (number == NULL || time_ns == NULL || PyDict_SetItem(found, number, time_ns) < 0))
                Py_CLEAR(found);
            Py_XDECREF(number);
            Py_XDECREF(time_ns);
            times[label] = 0;
        }
        if (append_new(result, found) < 0)
            Py_CLEAR(result);
        give_way(i);
    }
end:
    sites_free(&sites);
    table_free(&numbers);
    PyMem_RawFree(all);
    PyMem_RawFree(open);
    PyMem_RawFree(firsts);
    PyMem_RawFree(places);
    PyMem_RawFree(times);
    Py_DECREF(own);
    Py_DECREF(requests);
    return result;
}

static PyMethodDef functions[] = {
    {"sites", sites, METH_O, "The sites of spans, each once."},
    {"grouped", grouped, METH_VARARGS, "The spans of sites by the label of the site."},
    {"having", having, METH_VARARGS, "The spans that have an attribute."},
    {"owners", owners, METH_VARARGS, "Of each span the topmost one of a kind at or above it."},
    {"device_time", device_time, METH_VARARGS, "The device time of spans, by site, device, stream and label."},
    {"innermost", innermost, METH_VARARGS, "Where the device intervals lie that enclose no other."},
    {"united", united_stretches, METH_O, "The union of stretches."},
    {"shared_ns", shared_ns, METH_VARARGS, "How long what two unions have in common is."},
    {"at_once", at_once, METH_O, "How long two or more of several unions went on, and how many at most."},
    {"within", within, METH_VARARGS, "What a device did within requests."},
    {"phases", phases, METH_VARARGS, "What the phases of requests took."},
    {"placed", placed, METH_VARARGS, "In which unit and call each span with device time began."},
    {"summed", summed, METH_VARARGS, "By key, the device time of spans: sums over streams, unions of each."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._stretches",
    .m_doc = "Stretches of time, in C. See `instrument.report.stretches`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__stretches(void)
{
    text_exclusive = PyUnicode_InternFromString("exclusive");
    text_kind = PyUnicode_InternFromString("kind");
    if (text_exclusive == NULL || text_kind == NULL || import_spans(&span_type, &interval_type) < 0)
        return NULL;
    return PyModule_Create(&definition);
}
