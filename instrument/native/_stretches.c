/* Stretches of time in C: the twin of the loops in `stretches.py`, which say what they mean.
 *
 * A loop that meets what it does not expect returns None, and its caller takes the twin.
 */

#include "_attributes.h"
#include "_stretches.h"

static PyTypeObject *span_type, *interval_type;
static PyObject *text_exclusive;

/* As `spans_of_type`. */
static PyObject *
own_spans(PyObject *spans)
{
    return spans_of_type(spans, span_type);
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

static int64_t
label_of(PyObject *site, void *labels)
{
    PyObject *label = PyDict_GetItemWithError(labels, site); /* borrowed */
    return label == NULL ? -1 : PyLong_AsLongLong(label);
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

static PyMethodDef functions[] = {
    {"sites", sites, METH_O, "The sites of spans, each once."},
    {"grouped", grouped, METH_VARARGS, "The spans of sites by the label of the site."},
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
    if (text_exclusive == NULL || import_spans(&span_type, &interval_type) < 0)
        return NULL;
    return PyModule_Create(&definition);
}
