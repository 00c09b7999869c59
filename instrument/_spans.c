/* Spans in C: the twin of the classes `Span` and `DeviceInterval` of `spans.py`, and of the loops over all spans there
 * and in `tally.py`.
 *
 * A span is 136 bytes with its numbers inside, where that of Python is 160 and nine integers of 32. It is unknown to the
 * collector of cycles, which would otherwise look through a million of them again and again: what a span holds (a site,
 * texts, numbers, intervals) does not lead back to it. One that is put into its own attributes is never freed.
 *
 * A loop that meets what it does not expect (a span of another class, one that ends before it begins) returns None, and
 * its caller takes the twin.
 */

#include "_spans.h"
#include <stddef.h>

static PyTypeObject Span_Type, Interval_Type;
static PyObject *frozen_error; /* dataclasses.FrozenInstanceError */
static PyObject *text_exclusive, *text_get, *text_bytes, *text_key, *text_kind, *text_correlation;

/* ------------------------------------------------------------------ fields */

enum kind { ANY, NUMBER, MAYBE, MAPPING, TUPLE, LABEL, FLAG };

typedef struct {
    const char *name;
    enum kind kind;
    size_t offset;
    PyObject *key; /* the name, interned */
} field_t;

typedef struct {
    field_t *fields;
    int count, required;
    const char *name;
} layout_t;

static field_t span_fields[] = {
    {"site", ANY, offsetof(Span, site)},
    {"span_id", NUMBER, offsetof(Span, span_id)},
    {"parent_id", NUMBER, offsetof(Span, parent_id)},
    {"root_id", NUMBER, offsetof(Span, root_id)},
    {"thread_id", NUMBER, offsetof(Span, thread_id)},
    {"task_id", NUMBER, offsetof(Span, task_id)},
    {"start_ns", NUMBER, offsetof(Span, start_ns)},
    {"end_ns", NUMBER, offsetof(Span, end_ns)},
    {"active_ns", NUMBER, offsetof(Span, active_ns)},
    {"self_ns", NUMBER, offsetof(Span, self_ns)},
    {"error", MAYBE, offsetof(Span, error)},
    {"attributes", MAPPING, offsetof(Span, attributes)},
    {"device", TUPLE, offsetof(Span, device)},
    {"clipped", FLAG, offsetof(Span, clipped)},
    {"remote", MAYBE, offsetof(Span, remote)},
};
static field_t interval_fields[] = {
    {"device", NUMBER, offsetof(Interval, device)},
    {"stream", NUMBER, offsetof(Interval, stream)},
    {"start_ns", NUMBER, offsetof(Interval, start_ns)},
    {"end_ns", NUMBER, offsetof(Interval, end_ns)},
    {"label", LABEL, offsetof(Interval, label)},
    {"uncertainty_ns", NUMBER, offsetof(Interval, uncertainty_ns)},
};
static layout_t span_layout = {span_fields, 15, 10, "Span"};
static layout_t interval_layout = {interval_fields, 6, 4, "DeviceInterval"};

static layout_t *
layout_of(PyObject *self)
{
    return PyObject_TypeCheck(self, &Span_Type) ? &span_layout : &interval_layout;
}

#define OBJECT(self, field) (*(PyObject **)((char *)(self) + (field)->offset))
#define INTEGER(self, field) (*(int64_t *)((char *)(self) + (field)->offset))

static PyObject *
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

/* The value of a field, as Python sees it. A new reference. */
static PyObject *
field_value(PyObject *self, field_t *field)
{
    if (field->kind == NUMBER)
        return PyLong_FromLongLong(INTEGER(self, field));
    if (field->kind == FLAG)
        return PyBool_FromLong(*((char *)self + field->offset));
    PyObject *value = OBJECT(self, field);
    if (value != NULL)
        return Py_NewRef(value);
    switch (field->kind) {
    case MAYBE:
        Py_RETURN_NONE;
    case TUPLE:
        return PyTuple_New(0);
    case LABEL:
        return Py_NewRef(text_exclusive);
    case MAPPING:
        value = PyDict_New();
        if (value != NULL && OBJECT(self, field) == NULL)
            OBJECT(self, field) = Py_NewRef(value);
        return value;
    default:
        PyErr_Format(PyExc_AttributeError, "'%s' object has no attribute '%s'", Py_TYPE(self)->tp_name, field->name);
        return NULL;
    }
}

static int
set_field(PyObject *self, field_t *field, PyObject *value)
{
    if (value == NULL) {
        PyErr_Format(PyExc_AttributeError, "the attribute '%s' of a %s cannot be deleted", field->name,
                     layout_of(self)->name);
        return -1;
    }
    if (field->kind == NUMBER) {
        PyObject *whole = PyLong_CheckExact(value) ? Py_NewRef(value) : PyNumber_Index(value);
        int overflow = 0;
        long long number = whole == NULL ? -1 : PyLong_AsLongLongAndOverflow(whole, &overflow);
        Py_XDECREF(whole);
        if (number == -1 && PyErr_Occurred()) {
            if (PyErr_ExceptionMatches(PyExc_TypeError))
                PyErr_Format(PyExc_TypeError, "%s of a %s is a whole number; found %.200s", field->name,
                             layout_of(self)->name, Py_TYPE(value)->tp_name);
            return -1;
        }
        if (overflow) {
            PyErr_Format(PyExc_OverflowError, "%s of a %s is a number of 64 bits; found one beyond", field->name,
                         layout_of(self)->name);
            return -1;
        }
        INTEGER(self, field) = number;
        return 0;
    }
    if (field->kind == FLAG) {
        int flag = PyObject_IsTrue(value);
        if (flag >= 0)
            *((char *)self + field->offset) = (char)flag;
        return flag < 0 ? -1 : 0;
    }
    int is_default = (field->kind == MAYBE && value == Py_None) ||
                     (field->kind == TUPLE && PyTuple_CheckExact(value) && PyTuple_GET_SIZE(value) == 0);
    PyObject *before = OBJECT(self, field);
    OBJECT(self, field) = is_default ? NULL : Py_NewRef(value);
    Py_XDECREF(before);
    return 0;
}

static PyObject *
get_attribute(PyObject *self, void *field)
{
    return field_value(self, field);
}

static int
set_attribute(PyObject *self, PyObject *value, void *field)
{
    return set_field(self, field, value);
}

/* ------------------------------------------------------------------ both types */

static int
fill(PyObject *self, layout_t *layout, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *const *named)
{
    if (count > layout->count) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments; found %zd", layout->name, layout->count, count);
        return -1;
    }
    uint32_t given = 0;
    for (int i = 0; i < count; i++) {
        if (set_field(self, &layout->fields[i], args[i]) < 0)
            return -1;
        given |= 1u << i;
    }
    Py_ssize_t more = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t n = 0; n < more; n++) {
        PyObject *name = PyTuple_GET_ITEM(names, n);
        int at = 0;
        while (at < layout->count && layout->fields[at].key != name)
            at++;
        if (at == layout->count) /* a name that is not interned */
            for (at = 0; at < layout->count; at++)
                if (PyUnicode_Compare(layout->fields[at].key, name) == 0)
                    break;
        if (PyErr_Occurred())
            return -1;
        if (at == layout->count) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R", layout->name, name);
            return -1;
        }
        if (given & 1u << at) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument %R", layout->name, name);
            return -1;
        }
        if (set_field(self, &layout->fields[at], named[n]) < 0)
            return -1;
        given |= 1u << at;
    }
    for (int i = 0; i < layout->required; i++)
        if (!(given & 1u << i)) {
            PyErr_Format(PyExc_TypeError, "%s() missing the required argument '%s'", layout->name,
                         layout->fields[i].name);
            return -1;
        }
    return 0;
}

static PyObject *
make(PyObject *type, PyObject *const *args, size_t flags, PyObject *names)
{
    PyObject *self = ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (self != NULL && fill(self, layout_of(self), args, count, names, args + count) < 0)
        Py_CLEAR(self);
    return self;
}

/* A class below this one may have arguments of its own, so they are taken when it is initialised. */
static PyObject *
new_empty(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(named))
{
    return type->tp_alloc(type, 0);
}

static int
initialise(PyObject *self, PyObject *args, PyObject *named)
{
    PyObject *names = NULL, *values = NULL;
    int done = -1;
    if (named != NULL && PyDict_GET_SIZE(named) > 0) {
        PyObject *keys = PyDict_Keys(named);
        names = keys == NULL ? NULL : PyList_AsTuple(keys);
        Py_XDECREF(keys);
        keys = PyDict_Values(named);
        values = keys == NULL ? NULL : PyList_AsTuple(keys);
        Py_XDECREF(keys);
        if (names == NULL || values == NULL)
            goto end;
    }
    done = fill(self, layout_of(self), &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), names,
                values == NULL ? NULL : &PyTuple_GET_ITEM(values, 0));
end:
    Py_XDECREF(names);
    Py_XDECREF(values);
    return done;
}

static void
dealloc(PyObject *self)
{
    layout_t *layout = layout_of(self);
    for (int i = 0; i < layout->count; i++)
        if (layout->fields[i].kind != NUMBER && layout->fields[i].kind != FLAG)
            Py_CLEAR(OBJECT(self, &layout->fields[i]));
    Py_TYPE(self)->tp_free(self);
}

/* The fields as a tuple. */
static PyObject *
facts(PyObject *self)
{
    layout_t *layout = layout_of(self);
    PyObject *values = PyTuple_New(layout->count);
    for (int i = 0; values != NULL && i < layout->count; i++) {
        PyObject *value = field_value(self, &layout->fields[i]);
        if (value == NULL)
            Py_CLEAR(values);
        else
            PyTuple_SET_ITEM(values, i, value);
    }
    return values;
}

static PyObject *
reduce(PyObject *self, PyObject *Py_UNUSED(none))
{
    PyObject *values = facts(self);
    return values == NULL ? NULL : Py_BuildValue("(ON)", (PyObject *)Py_TYPE(self), values);
}

static PyObject *
compare(PyObject *self, PyObject *other, int how)
{
    if ((how != Py_EQ && how != Py_NE) || Py_TYPE(self) != Py_TYPE(other))
        Py_RETURN_NOTIMPLEMENTED;
    layout_t *layout = layout_of(self);
    int same = 1;
    for (int i = 0; same == 1 && i < layout->count; i++) {
        field_t *field = &layout->fields[i];
        if (field->kind == NUMBER) {
            same = INTEGER(self, field) == INTEGER(other, field);
            continue;
        }
        PyObject *mine = field_value(self, field), *theirs = mine == NULL ? NULL : field_value(other, field);
        same = theirs == NULL ? -1 : PyObject_RichCompareBool(mine, theirs, Py_EQ);
        Py_XDECREF(mine);
        Py_XDECREF(theirs);
    }
    return same < 0 ? NULL : PyBool_FromLong(same == (how == Py_EQ));
}

static PyObject *
represent(PyObject *self)
{
    int outer = Py_ReprEnter(self);
    if (outer != 0)
        return outer < 0 ? NULL : PyUnicode_FromString("...");
    layout_t *layout = layout_of(self);
    PyObject *parts = PyList_New(0), *text = NULL, *comma = NULL, *name = NULL;
    for (int i = 0; parts != NULL && i < layout->count; i++) {
        PyObject *value = field_value(self, &layout->fields[i]);
        PyObject *part = value == NULL ? NULL : PyUnicode_FromFormat("%s=%R", layout->fields[i].name, value);
        if (part == NULL || PyList_Append(parts, part) < 0)
            Py_CLEAR(parts);
        Py_XDECREF(value);
        Py_XDECREF(part);
    }
    comma = parts == NULL ? NULL : PyUnicode_FromString(", ");
    PyObject *joined = comma == NULL ? NULL : PyUnicode_Join(comma, parts);
    name = joined == NULL ? NULL : PyObject_GetAttrString((PyObject *)Py_TYPE(self), "__qualname__");
    if (name != NULL)
        text = PyUnicode_FromFormat("%U(%U)", name, joined);
    Py_XDECREF(name);
    Py_XDECREF(joined);
    Py_XDECREF(comma);
    Py_XDECREF(parts);
    Py_ReprLeave(self);
    return text;
}

static PyMethodDef methods[] = {
    {"__reduce__", (PyCFunction)reduce, METH_NOARGS, NULL},
    {NULL},
};

/* ------------------------------------------------------------------ device intervals */

static Py_hash_t
Interval_hash(PyObject *self)
{
    PyObject *values = facts(self);
    Py_hash_t hash = values == NULL ? -1 : PyObject_Hash(values);
    Py_XDECREF(values);
    return hash;
}

static int
Interval_setattro(PyObject *Py_UNUSED(self), PyObject *name, PyObject *value)
{
    PyErr_Format(frozen_error, value == NULL ? "cannot delete field %R" : "cannot assign to field %R", name);
    return -1;
}

static PyGetSetDef interval_attributes[7];

static PyTypeObject Interval_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instrument.spans.DeviceInterval",
    .tp_basicsize = sizeof(Interval),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "DeviceInterval(device, stream, start_ns, end_ns, label='exclusive', uncertainty_ns=0)\n--\n\n"
              "One stretch of a device stream on the host clock, with its label and the uncertainty of its place.",
    .tp_new = new_empty,
    .tp_init = initialise,
    .tp_vectorcall = make,
    .tp_dealloc = dealloc,
    .tp_repr = represent,
    .tp_hash = Interval_hash,
    .tp_setattro = Interval_setattro,
    .tp_richcompare = compare,
    .tp_methods = methods,
    .tp_getset = interval_attributes,
};

typedef struct {
    int64_t start, end;
} stretch_t;

static int
compare_stretches(const void *a, const void *b)
{
    const stretch_t *left = a, *right = b;
    if (left->start != right->start)
        return left->start < right->start ? -1 : 1;
    return left->end < right->end ? -1 : left->end > right->end;
}

/* The length of the union of sorted intervals. */
static wide_t
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

/* The device time of a span and its elapsed time. 1; 0 where they are not plain; -1 with an error. */
static int
times_of(Span *span, wide_t *device_ns, wide_t *elapsed_ns)
{
    *device_ns = 0;
    *elapsed_ns = (wide_t)span->end_ns - span->start_ns;
    if (span->device == NULL)
        return 1;
    if (!PyTuple_CheckExact(span->device) || span->end_ns < span->start_ns)
        return 0;
    Py_ssize_t count = PyTuple_GET_SIZE(span->device);
    stretch_t few[8], *stretches = few;
    if (count + 1 > 8 && (stretches = PyMem_Malloc((size_t)(count + 1) * sizeof *stretches)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int plain = 1;
    for (Py_ssize_t i = 0; plain && i < count; i++) {
        Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, i);
        plain = Py_IS_TYPE((PyObject *)interval, &Interval_Type) && interval->end_ns >= interval->start_ns;
        if (plain)
            stretches[i] = (stretch_t){interval->start_ns, interval->end_ns};
    }
    if (plain) {
        qsort(stretches, (size_t)count, sizeof *stretches, compare_stretches);
        *device_ns = united(stretches, (size_t)count);
        stretches[count] = (stretch_t){span->start_ns, span->end_ns};
        qsort(stretches, (size_t)count + 1, sizeof *stretches, compare_stretches);
        *elapsed_ns = united(stretches, (size_t)count + 1);
    }
    if (stretches != few)
        PyMem_Free(stretches);
    return plain;
}

/* ------------------------------------------------------------------ spans */

static PyObject *twin_device_ns, *twin_elapsed_ns; /* the getters of the twin, for spans whose intervals are not plain */

static PyObject *
Span_total_ns(PyObject *self, void *Py_UNUSED(closure))
{
    return wide_as_long((wide_t)((Span *)self)->end_ns - ((Span *)self)->start_ns);
}

static PyObject *
Span_times(PyObject *self, void *asks_device)
{
    wide_t device_ns, elapsed_ns;
    int plain = times_of((Span *)self, &device_ns, &elapsed_ns);
    if (plain > 0)
        return wide_as_long(asks_device != NULL ? device_ns : elapsed_ns);
    return plain < 0 ? NULL : PyObject_CallOneArg(asks_device != NULL ? twin_device_ns : twin_elapsed_ns, self);
}

static PyGetSetDef span_attributes[19] = {
    {"total_ns", Span_total_ns, NULL, "The host interval's length."},
    {"device_ns", Span_times, NULL, "Length of the union of the span's device intervals.", "device"},
    {"elapsed_ns", Span_times, NULL, "Length of the union of the host interval and the device intervals."},
};

static PyTypeObject Span_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instrument.spans.Span",
    .tp_basicsize = sizeof(Span),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_doc = "Span(site, span_id, parent_id, root_id, thread_id, task_id, start_ns, end_ns, active_ns, self_ns, "
              "error=None, attributes={}, device=(), clipped=False, remote=None)\n--\n\n"
              "One timed execution: see `instrument.spans`.",
    .tp_new = new_empty,
    .tp_init = initialise,
    .tp_vectorcall = make,
    .tp_dealloc = dealloc,
    .tp_repr = represent,
    .tp_hash = PyObject_HashNotImplemented,
    .tp_richcompare = compare,
    .tp_methods = methods,
    .tp_getset = span_attributes,
};

/* ------------------------------------------------------------------ loops over spans */

/* The spans as a tuple of our own, so that nobody changes it meanwhile; NULL without an error where one is no span. */
static PyObject *
own_spans(PyObject *spans)
{
    PyObject *own = PySequence_Tuple(spans);
    for (Py_ssize_t i = 0; own != NULL && i < PyTuple_GET_SIZE(own); i++)
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(own, i), &Span_Type))
            Py_CLEAR(own);
    if (own != NULL && PyTuple_GET_SIZE(own) >= NOWHERE)
        Py_CLEAR(own);
    return own;
}

/* Put a list of spans in the order of `Trace.trees`: True; None where one of them is no span of ours. */
static PyObject *
sort_spans(PyObject *Py_UNUSED(module), PyObject *spans)
{
    if (!PyList_CheckExact(spans))
        Py_RETURN_NONE;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    uint32_t *order;
    Py_ssize_t count = PyTuple_GET_SIZE(own);
    if (order_spans(&PyTuple_GET_ITEM(own, 0), (size_t)count, 1, &order) < 0) {
        Py_DECREF(own);
        return PyErr_NoMemory();
    }
    if (order != NULL && PyList_GET_SIZE(spans) == count)
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *before = PyList_GET_ITEM(spans, i);
            PyList_SET_ITEM(spans, i, Py_NewRef(PyTuple_GET_ITEM(own, order[i])));
            Py_DECREF(before); /* never its last reference: `own` has one */
        }
    PyMem_RawFree(order);
    Py_DECREF(own);
    Py_RETURN_TRUE;
}

/* ---- rows */

static int64_t
item_number(PyObject *row, int at)
{
    return PyLong_AsLongLong(PyTuple_GET_ITEM(row, at));
}

/* of_rows(rows, thread_id, sites, first_ns, last_ns, remote_key, stream_key): the spans of a ring's rows that reach into
 * the window, clipped to it. A row is described in `ring.py`. */
static PyObject *
of_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *rows, *sites, *remote_key, *stream_key;
    long long thread_id, first_ns, last_ns;
    if (!PyArg_ParseTuple(args, "O!LO!LLOO:of_rows", &PyList_Type, &rows, &thread_id, &PyList_Type, &sites, &first_ns,
                          &last_ns, &remote_key, &stream_key))
        return NULL;
    PyObject *spans = PyList_New(0);
    for (Py_ssize_t i = 0; spans != NULL && i < PyList_GET_SIZE(rows); i++) {
        give_way((size_t)i);
        PyObject *row = PyList_GET_ITEM(rows, i);
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != 11) {
            PyErr_SetString(PyExc_TypeError, "a row is a tuple of eleven");
            goto failed;
        }
        int64_t node = item_number(row, 0), start_ns = item_number(row, 5), end_ns = item_number(row, 6);
        if (start_ns >= last_ns || end_ns <= first_ns)
            continue;
        if (node < 0 || node >= PyList_GET_SIZE(sites)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "a row of a call path that is not known");
            goto failed;
        }
        Span *span = PyObject_New(Span, &Span_Type);
        if (span == NULL)
            goto failed;
        int64_t total_ns = end_ns - start_ns, children_ns = item_number(row, 7), active_ns = item_number(row, 8);
        active_ns = active_ns < 0 ? total_ns : active_ns;
        span->site = Py_NewRef(PyList_GET_ITEM(sites, node));
        span->span_id = item_number(row, 1);
        span->parent_id = item_number(row, 2);
        span->root_id = item_number(row, 3);
        span->thread_id = thread_id;
        span->task_id = item_number(row, 4);
        span->start_ns = start_ns;
        span->end_ns = end_ns;
        span->active_ns = active_ns;
        span->self_ns = active_ns > children_ns ? active_ns - children_ns : 0;
        PyObject *error = PyTuple_GET_ITEM(row, 9), *attributes = PyTuple_GET_ITEM(row, 10);
        span->error = error == Py_None ? NULL : Py_NewRef(error);
        span->attributes = span->device = span->remote = NULL;
        span->clipped = 0;
        int done = PyList_Append(spans, (PyObject *)span);
        Py_DECREF(span);
        if (done < 0 || PyErr_Occurred())
            goto failed;
        if (PyDict_Check(attributes) && PyDict_GET_SIZE(attributes) > 0) {
            int has_remote = PyDict_Contains(attributes, remote_key);
            int has_stream = has_remote < 0 ? -1 : PyDict_Contains(attributes, stream_key);
            if (has_stream < 0)
                goto failed;
            if (has_remote || has_stream) {
                attributes = PyDict_Copy(attributes);
                if (attributes == NULL)
                    goto failed;
                span->attributes = attributes;
                if (has_remote) {
                    PyObject *remote = PyDict_GetItemWithError(attributes, remote_key);
                    span->remote = remote == NULL || remote == Py_None ? NULL : Py_NewRef(remote);
                    if (PyDict_DelItem(attributes, remote_key) < 0)
                        goto failed;
                }
                if (has_stream && PyDict_DelItem(attributes, stream_key) < 0)
                    goto failed;
            } else
                span->attributes = Py_NewRef(attributes);
        }
        if (start_ns < first_ns || end_ns > last_ns) {
            span->start_ns = start_ns > first_ns ? start_ns : first_ns;
            span->end_ns = end_ns < last_ns ? end_ns : last_ns;
            span->end_ns = span->end_ns > span->start_ns ? span->end_ns : span->start_ns;
            total_ns = span->end_ns - span->start_ns;
            span->active_ns = span->active_ns < total_ns ? span->active_ns : total_ns;
            span->self_ns = span->self_ns < total_ns ? span->self_ns : total_ns;
            span->clipped = 1;
        }
    }
    return spans;
failed:
    Py_XDECREF(spans);
    return NULL;
}

/* ---- self times */

typedef struct {
    uint32_t parent; /* its number among the spans */
    stretch_t at;
} child_t;

static int
compare_children(const void *a, const void *b)
{
    const child_t *left = a, *right = b;
    if (left->parent != right->parent)
        return left->parent < right->parent ? -1 : 1;
    return compare_stretches(&left->at, &right->at);
}

/* assign_self_times(spans): as in `spans.py`. True; None where the spans are not plain. */
static PyObject *
assign_self_times(PyObject *Py_UNUSED(module), PyObject *spans)
{
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(own), found = 0;
    table_t by_id = {0};
    child_t *children = PyMem_RawMalloc((count + 1) * sizeof *children);
    uint32_t *first = PyMem_RawMalloc((count + 1) * sizeof *first);
    int plain = 1, memory = children != NULL && first != NULL && table_make(&by_id, count) == 0;
    for (size_t i = 0; memory && i < count; i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        uint32_t *cell = table_cell(&by_id, span->span_id);
        memory = cell != NULL;
        if (memory)
            *cell = (uint32_t)i;
        plain &= span->end_ns >= span->start_ns && span->start_ns >= 0;
        give_way(i);
    }
    for (size_t i = 0; memory && plain && i < count; i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        uint32_t at = table_get(&by_id, span->parent_id);
        Span *parent = at == NOWHERE ? NULL : (Span *)PyTuple_GET_ITEM(own, at);
        if (parent != NULL && parent->thread_id == span->thread_id && parent->task_id == span->task_id)
            children[found++] = (child_t){at, {span->start_ns, span->end_ns}};
        give_way(i);
    }
    if (memory && plain) {
        Py_BEGIN_ALLOW_THREADS
        qsort(children, found, sizeof *children, compare_children);
        memset(first, 0xFF, (count + 1) * sizeof *first);
        for (size_t i = found; i-- > 0;)
            first[children[i].parent] = (uint32_t)i;
        Py_END_ALLOW_THREADS
    }
    for (size_t i = 0; memory && plain && i < count; i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        uint32_t at = table_get(&by_id, span->span_id);
        int64_t covered = 0, until = span->start_ns; /* all before it is counted, or before the span */
        for (size_t c = first[at]; c < found && children[c].parent == at; c++) {
            int64_t start = children[c].at.start > until ? children[c].at.start : until;
            int64_t end = children[c].at.end < span->end_ns ? children[c].at.end : span->end_ns;
            if (end > start) {
                covered += end - start;
                until = end;
            }
        }
        span->self_ns = span->end_ns - span->start_ns - covered;
        give_way(i);
    }
    PyMem_RawFree(children);
    PyMem_RawFree(first);
    table_free(&by_id);
    Py_DECREF(own);
    if (!memory)
        return PyErr_NoMemory();
    if (!plain)
        Py_RETURN_NONE;
    Py_RETURN_TRUE;
}

/* backward(spans): how many spans come before their parents. None where one of them is no span of ours. */
static PyObject *
backward(PyObject *Py_UNUSED(module), PyObject *spans)
{
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(own), found = 0;
    table_t first = {0};
    int memory = table_make(&first, count) == 0;
    for (size_t i = count; memory && i-- > 0;) {
        uint32_t *cell = table_cell(&first, ((Span *)PyTuple_GET_ITEM(own, i))->span_id);
        memory = cell != NULL;
        if (memory)
            *cell = (uint32_t)i;
        give_way(i);
    }
    for (size_t i = 0; memory && i < count; i++) {
        uint32_t at = table_get(&first, ((Span *)PyTuple_GET_ITEM(own, i))->parent_id);
        found += at != NOWHERE && at >= i;
        give_way(i);
    }
    table_free(&first);
    Py_DECREF(own);
    return memory ? PyLong_FromSize_t(found) : PyErr_NoMemory();
}

/* ---- the tally */

typedef struct {
    uint32_t parent, place; /* the node above or NOWHERE, and what its path is counted as */
    PyObject *site;         /* borrowed of `known` */
} node_t;

typedef struct {
    uint32_t node;
    int64_t thread_id, calls, errors, min_ns, max_ns, first_ns;
    wide_t total_ns, self_ns, device_ns, elapsed_ns, moved_bytes;
    PyObject *histogram;
} cell_t;

typedef struct {
    node_t *nodes;
    size_t node_count, node_room;
    cell_t *cells;
    size_t cell_count, cell_room;
    table_t by_id, sites, threads, fine, coarse, cell_of, histogram;
    uint32_t place_count, thread_count;
    struct {
        PyObject *site;
        uint32_t value; /* its number among sites that mean the same place */
        int is_copy;
    } *known;
    size_t known_count, known_room;
    PyObject *values; /* the key of a site -> its `value` */
} count_t;

/* The number of a site object, NOWHERE with an error. */
static uint32_t
number_of_site(count_t *count, PyObject *site)
{
    uint32_t *cell = table_cell(&count->sites, (int64_t)(intptr_t)site);
    if (cell == NULL) {
        PyErr_NoMemory();
        return NOWHERE;
    }
    if (*cell != NOWHERE)
        return *cell;
    *cell = (uint32_t)count->known_count;
    void *larger = grown(count->known, &count->known_room, count->known_count, sizeof *count->known, 64);
    if (larger == NULL)
        return NOWHERE;
    count->known = larger;
    PyObject *key = PyObject_GetAttr(site, text_key);
    PyObject *kind = key == NULL ? NULL : PyObject_GetAttr(site, text_kind);
    PyObject *next = kind == NULL ? NULL : PyLong_FromSsize_t(PyDict_GET_SIZE(count->values));
    PyObject *value = next == NULL ? NULL : PyDict_SetDefault(count->values, key, next); /* borrowed */
    uint32_t number = NOWHERE;
    if (value != NULL) {
        number = (uint32_t)count->known_count++;
        count->known[number].site = Py_NewRef(site);
        count->known[number].value = (uint32_t)PyLong_AsUnsignedLong(value);
        count->known[number].is_copy = PyUnicode_Check(kind) && PyUnicode_CompareWithASCIIString(kind, "copy") == 0;
    }
    Py_XDECREF(key);
    Py_XDECREF(kind);
    Py_XDECREF(next);
    return number;
}

/* The node of a site (by its number) under another, NOWHERE with an error. */
static uint32_t
node_below(count_t *count, uint32_t parent, uint32_t site)
{
    uint32_t *cell = table_cell(&count->fine, (int64_t)((uint64_t)parent << 32 | site));
    if (cell == NULL) {
        PyErr_NoMemory();
        return NOWHERE;
    }
    if (*cell != NOWHERE)
        return *cell;
    uint32_t node = *cell = (uint32_t)count->node_count;
    uint32_t above = parent == NOWHERE ? NOWHERE : count->nodes[parent].place;
    cell = table_cell(&count->coarse, (int64_t)((uint64_t)above << 32 | count->known[site].value));
    if (cell == NULL) {
        PyErr_NoMemory();
        return NOWHERE;
    }
    if (*cell == NOWHERE)
        *cell = count->place_count++;
    uint32_t place = *cell;
    void *larger = grown(count->nodes, &count->node_room, count->node_count, sizeof *count->nodes, 64);
    if (larger == NULL)
        return NOWHERE;
    count->nodes = larger;
    count->nodes[count->node_count++] = (node_t){parent, place, count->known[site].site};
    return node;
}

/* What a span that is a copy moved; -1 with an error. Above the most, it counts for nothing. */
static int64_t
moved_bytes(Span *span, int64_t most)
{
    if (span->attributes == NULL)
        return 0;
    PyObject *attributes = Py_NewRef(span->attributes), *found;
    if (PyDict_CheckExact(attributes))
        found = Py_XNewRef(PyDict_GetItemWithError(attributes, text_bytes));
    else
        found = PyObject_CallMethodObjArgs(attributes, text_get, text_bytes, NULL);
    Py_DECREF(attributes);
    if (found == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int overflow = 0;
    long long moved = PyLong_Check(found) ? PyLong_AsLongLongAndOverflow(found, &overflow) : 0;
    Py_DECREF(found);
    return overflow || moved < 0 || moved > most ? 0 : moved;
}

static uint32_t
bucket(int64_t value_ns)
{
    int exponent = (value_ns == 0 ? 0 : 64 - __builtin_clzll((unsigned long long)value_ns)) - 7;
    return exponent <= 0 ? (uint32_t)value_ns : ((uint32_t)exponent << 6) + (uint32_t)(value_ns >> exponent);
}

/* The node of a span, as `Tally.of_spans` finds its path; NOWHERE with an error. `paths` is by the number of the span
 * that stands for an id; `above` is room for as many numbers as there are spans. */
#define CLIMBING (NOWHERE - 1)

static uint32_t
node_of(count_t *count, PyObject *own, const uint32_t *order, uint32_t *paths, uint32_t *above, uint32_t at)
{
#define SPAN_AT(i) ((Span *)PyTuple_GET_ITEM(own, order == NULL ? (i) : order[i]))
    Span *span = SPAN_AT(at);
    uint32_t slot = table_get(&count->by_id, span->span_id), node = NOWHERE;
    size_t depth = 0;
    while (paths[slot] == NOWHERE) {
        paths[slot] = CLIMBING;
        above[depth++] = slot;
        Span *shown = depth == 1 ? span : SPAN_AT(slot);
        slot = table_get(&count->by_id, shown->parent_id);
        if (slot == NOWHERE)
            break;
    }
    if (slot != NOWHERE && paths[slot] != CLIMBING)
        node = paths[slot];
    while (depth-- > 0) {
        Span *shown = depth == 0 ? span : SPAN_AT(above[depth]);
        uint32_t site = number_of_site(count, shown->site);
        node = site == NOWHERE ? NOWHERE : node_below(count, node, site);
        if (node == NOWHERE)
            return NOWHERE;
        paths[above[depth]] = node;
    }
    return node;
}

/* The cell of a node on a thread, NULL with an error. */
static cell_t *
cell_at(count_t *count, uint32_t node, int64_t thread_id)
{
    uint32_t *thread = table_cell(&count->threads, thread_id);
    if (thread == NULL)
        goto no_memory;
    if (*thread == NOWHERE)
        *thread = count->thread_count++;
    uint32_t *cell = table_cell(&count->cell_of, (int64_t)((uint64_t)count->nodes[node].place << 32 | *thread));
    if (cell == NULL)
        goto no_memory;
    if (*cell == NOWHERE) {
        *cell = (uint32_t)count->cell_count;
        void *larger = grown(count->cells, &count->cell_room, count->cell_count, sizeof *count->cells, 64);
        if (larger == NULL)
            return NULL;
        count->cells = larger;
        cell_t *made = &count->cells[count->cell_count++];
        memset(made, 0, sizeof *made);
        made->node = node;
        made->thread_id = thread_id;
    }
    return &count->cells[*cell];
no_memory:
    PyErr_NoMemory();
    return NULL;
}

/* Count one span in its cell: 1, 0 where it is not plain, -1 with an error. */
static int
count_span(count_t *count, Span *span, uint32_t node, int64_t most_bytes)
{
    wide_t device_ns, elapsed_ns;
    int plain = times_of(span, &device_ns, &elapsed_ns);
    if (plain <= 0)
        return plain;
    if (span->end_ns < span->start_ns || elapsed_ns > INT64_MAX)
        return 0;
    cell_t *cell = cell_at(count, node, span->thread_id);
    if (cell == NULL)
        return -1;
    uint32_t place = (uint32_t)(cell - count->cells);
    uint32_t site = number_of_site(count, span->site);
    if (site == NOWHERE)
        return -1;
    if (count->known[site].is_copy) {
        int64_t moved = moved_bytes(span, most_bytes);
        if (moved < 0)
            return -1;
        cell->moved_bytes += moved;
    }
    if (cell->calls == 0) {
        cell->min_ns = cell->max_ns = (int64_t)elapsed_ns;
        cell->first_ns = span->start_ns;
    }
    cell->calls++;
    cell->errors += span->error != NULL;
    cell->total_ns += (wide_t)span->end_ns - span->start_ns;
    cell->self_ns += span->self_ns;
    cell->device_ns += device_ns;
    cell->elapsed_ns += elapsed_ns;
    if (elapsed_ns < cell->min_ns)
        cell->min_ns = (int64_t)elapsed_ns;
    if (elapsed_ns > cell->max_ns)
        cell->max_ns = (int64_t)elapsed_ns;
    if (span->start_ns < cell->first_ns)
        cell->first_ns = span->start_ns;
    uint32_t *calls = table_cell(&count->histogram, (int64_t)((uint64_t)place << 12 | bucket((int64_t)elapsed_ns)));
    if (calls == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *calls = *calls == NOWHERE ? 1 : *calls + 1;
    return 1;
}

/* What was counted: ([(parent or -1, site)], [(node, thread id, *the fields of `Totals`)]). */
static PyObject *
counted(count_t *count)
{
    PyObject *nodes = PyList_New(0), *cells = PyList_New(0);
    if (nodes == NULL || cells == NULL)
        goto failed;
    for (size_t i = 0; i < count->node_count; i++) {
        node_t *node = &count->nodes[i];
        PyObject *item = Py_BuildValue("(LO)", node->parent == NOWHERE ? -1LL : (long long)node->parent, node->site);
        int done = item == NULL ? -1 : PyList_Append(nodes, item);
        Py_XDECREF(item);
        if (done < 0)
            goto failed;
        give_way(i);
    }
    for (size_t i = 0; i < count->cell_count; i++)
        if ((count->cells[i].histogram = PyDict_New()) == NULL)
            goto failed;
    for (size_t i = 0; i <= count->histogram.mask; i++) {
        if (count->histogram.values[i] == NOWHERE)
            continue;
        uint64_t key = (uint64_t)count->histogram.keys[i];
        PyObject *index = PyLong_FromLong((long)(key & 0xFFF));
        PyObject *calls = PyLong_FromUnsignedLong(count->histogram.values[i]);
        int done = index == NULL || calls == NULL ? -1
                                                  : PyDict_SetItem(count->cells[key >> 12].histogram, index, calls);
        Py_XDECREF(index);
        Py_XDECREF(calls);
        if (done < 0)
            goto failed;
    }
    for (size_t i = 0; i < count->cell_count; i++) {
        cell_t *cell = &count->cells[i];
        PyObject *item = Py_BuildValue("(ILLLNNNNLLNLO)", cell->node, cell->thread_id, cell->calls, cell->errors,
                                       wide_as_long(cell->total_ns), wide_as_long(cell->self_ns),
                                       wide_as_long(cell->device_ns), wide_as_long(cell->elapsed_ns), cell->min_ns,
                                       cell->max_ns, wide_as_long(cell->moved_bytes), cell->first_ns, cell->histogram);
        int done = item == NULL ? -1 : PyList_Append(cells, item);
        Py_XDECREF(item);
        if (done < 0)
            goto failed;
        give_way(i);
    }
    return Py_BuildValue("(NN)", nodes, cells);
failed:
    Py_XDECREF(nodes);
    Py_XDECREF(cells);
    return NULL;
}

/* count(spans, most_bytes): the totals of spans by call path and thread, as `Tally.of_spans` counts them. None where
 * the spans are not plain. */
static PyObject *
count_spans(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *result = NULL;
    long long most_bytes;
    if (!PyArg_ParseTuple(args, "OL:count", &spans, &most_bytes))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    size_t total = (size_t)PyTuple_GET_SIZE(own);
    count_t count = {0};
    uint32_t *order = NULL, *paths = PyMem_RawMalloc((total + 1) * sizeof *paths);
    uint32_t *above = PyMem_RawMalloc((total + 1) * sizeof *above);
    int plain = 1;
    count.values = PyDict_New();
    if (count.values == NULL)
        goto end;
    if (paths == NULL || above == NULL || order_spans(&PyTuple_GET_ITEM(own, 0), total, 1, &order) < 0 ||
        table_make(&count.by_id, total) < 0 || table_make(&count.sites, 64) < 0 || table_make(&count.threads, 64) < 0 ||
        table_make(&count.fine, 64) < 0 || table_make(&count.coarse, 64) < 0 || table_make(&count.cell_of, 64) < 0 ||
        table_make(&count.histogram, 1024) < 0) {
        PyErr_NoMemory();
        goto end;
    }
    memset(paths, 0xFF, (total + 1) * sizeof *paths);
    for (size_t i = 0; i < total; i++) {
        *table_cell(&count.by_id, SPAN_AT(i)->span_id) = (uint32_t)i; /* it has room for all */
        give_way(i);
    }
    for (size_t i = 0; plain && i < total; i++) {
        Span *span = SPAN_AT(i);
        uint32_t node = node_of(&count, own, order, paths, above, (uint32_t)i);
        int done = node == NOWHERE ? -1 : count_span(&count, span, node, most_bytes);
        if (done < 0)
            goto end;
        plain = done;
        give_way(i);
    }
    result = plain ? counted(&count) : Py_NewRef(Py_None);
end:
    for (size_t i = 0; i < count.cell_count; i++)
        Py_XDECREF(count.cells[i].histogram);
    for (size_t i = 0; i < count.known_count; i++)
        Py_DECREF(count.known[i].site);
    PyMem_RawFree(count.nodes);
    PyMem_RawFree(count.cells);
    PyMem_RawFree(count.known);
    table_free(&count.by_id);
    table_free(&count.sites);
    table_free(&count.threads);
    table_free(&count.fine);
    table_free(&count.coarse);
    table_free(&count.cell_of);
    table_free(&count.histogram);
    Py_XDECREF(count.values);
    PyMem_RawFree(order);
    PyMem_RawFree(paths);
    PyMem_RawFree(above);
    Py_DECREF(own);
    return result;
}

/* ---- device time and requests */

/* Memory that grows: `used` items of one size. */
typedef struct {
    char *items;
    size_t used, room;
} heap_t;

/* Room for one item more, NULL without memory. */
static void *
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

static PyObject *
heap_bytes(const heap_t *heap, size_t size)
{
    return PyBytes_FromStringAndSize(heap->items, (Py_ssize_t)(heap->used * size));
}

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
static site_fact_t *
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

static void
sites_free(sites_t *sites)
{
    for (size_t i = 0; i < sites->facts.used; i++)
        Py_DECREF(((site_fact_t *)sites->facts.items)[i].site);
    PyMem_RawFree(sites->facts.items);
    table_free(&sites->numbers);
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

/* Sort stretches; most come in order already. */
static void
sort_stretches(stretch_t *stretches, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (compare_stretches(&stretches[i - 1], &stretches[i]) > 0) {
            qsort(stretches, count, sizeof *stretches, compare_stretches);
            return;
        }
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

/* A number for each different value, from 0; NOWHERE without memory. */
static uint32_t
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
} part_t;

static int
compare_parts(const void *a, const void *b)
{
    const part_t *left = a, *right = b;
    if (left->device != right->device)
        return left->device < right->device ? -1 : 1;
    return compare_stretches(&left->stretch, &right->stretch);
}

/* Give what was found of one span to its calls and its owner. 0, or -1 without memory. */
static int
take_call(gathered_t *all, uint32_t site, int64_t owner)
{
    part_t *parts = (part_t *)all->call.items;
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
        if (!Py_IS_TYPE((PyObject *)interval, &Interval_Type) || interval->end_ns < interval->start_ns)
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
        part_t *part = heap_next(&all->call, sizeof *part);
        if (stretch == NULL || part == NULL)
            goto no_memory;
        *stretch = (stretch_t){start, end};
        *part = (part_t){number, {start, end}};
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

/* Append what "N" values make to a list. 0, or -1 with an error. */
static int
append_new(PyObject *list, PyObject *item)
{
    int done = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return done;
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
    int64_t key, device, stream, start, end;
} keyed_t;

static int
compare_keyed(const void *a, const void *b)
{
    const keyed_t *left = a, *right = b;
    if (left->key != right->key)
        return left->key < right->key ? -1 : 1;
    if (left->device != right->device)
        return left->device < right->device ? -1 : 1;
    if (left->stream != right->stream)
        return left->stream < right->stream ? -1 : 1;
    return left->start == right->start ? 0 : left->start < right->start ? -1 : 1;
}

/* The sums of sorted stretches, as a dict by key; None where one is beyond 64 bits. */
static PyObject *
summed_by_key(const keyed_t *all, size_t count)
{
    PyObject *sums = PyDict_New();
    for (size_t i = 0; sums != NULL && i < count;) {
        int64_t key = all[i].key, sum = 0;
        int beyond = 0;
        while (i < count && all[i].key == key) {
            const keyed_t *first = &all[i];
            int64_t over = first->start, more;
            for (; i < count && all[i].key == key && all[i].device == first->device && all[i].stream == first->stream; i++) {
                if (all[i].end <= over)
                    continue;
                beyond |= __builtin_sub_overflow(all[i].end, all[i].start > over ? all[i].start : over, &more);
                beyond |= __builtin_add_overflow(sum, more, &sum);
                over = all[i].end;
            }
        }
        PyObject *of = PyLong_FromLongLong(key), *total = PyLong_FromLongLong(sum);
        if (of == NULL || total == NULL || PyDict_SetItem(sums, of, total) < 0)
            Py_CLEAR(sums);
        Py_XDECREF(of);
        Py_XDECREF(total);
        if (beyond && sums != NULL) {
            Py_DECREF(sums);
            Py_RETURN_NONE;
        }
    }
    return sums;
}

/* summed(spans, keys, untimed): as `phases.summed_in_python`, a key of 64 bits for each span. None where they are not plain. */
static PyObject *
summed(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *keys, *untimed, *result = NULL, *known = NULL;
    if (!PyArg_ParseTuple(args, "OSO!:summed", &spans, &keys, &PyFrozenSet_Type, &untimed))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL || (size_t)PyBytes_GET_SIZE(keys) != (size_t)PyTuple_GET_SIZE(own) * sizeof(int64_t)) {
        Py_XDECREF(own);
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    heap_t all = {0};
    int plain = 1, is_untimed = 0;
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(own); i++) {
        PyObject *device = ((Span *)PyTuple_GET_ITEM(own, i))->device;
        int64_t key;
        memcpy(&key, PyBytes_AS_STRING(keys) + (size_t)i * sizeof key, sizeof key);
        if (device == NULL)
            continue;
        plain = PyTuple_CheckExact(device);
        for (Py_ssize_t n = 0; plain && n < PyTuple_GET_SIZE(device); n++) {
            const Interval *interval = (Interval *)PyTuple_GET_ITEM(device, n);
            PyObject *label = NULL;
            plain = Py_IS_TYPE((PyObject *)interval, &Interval_Type);
            if (plain)
                label = interval->label != NULL ? interval->label : text_exclusive;
            if (!plain || !(plain = PyUnicode_CheckExact(label)))
                break;
            if (label != known) { /* most are the same few */
                known = label;
                is_untimed = PySet_Contains(untimed, label);
                if (is_untimed < 0)
                    goto end;
            }
            if (is_untimed)
                continue;
            keyed_t *next = heap_next(&all, sizeof *next);
            if (next == NULL) {
                PyErr_NoMemory();
                goto end;
            }
            *next = (keyed_t){key, interval->device, interval->stream, interval->start_ns, interval->end_ns};
        }
    }
    if (plain) {
        if (all.used > 0)
            qsort(all.items, all.used, sizeof(keyed_t), compare_keyed);
        result = summed_by_key(all.items, all.used);
    } else
        result = Py_NewRef(Py_None);
end:
    PyMem_RawFree(all.items);
    Py_DECREF(own);
    return result;
}

static int64_t
nothing_of(PyObject *Py_UNUSED(site), void *Py_UNUSED(context))
{
    return 0;
}

/* Whether nothing of an interval lies in a window. One without length on an edge is in it. */
static int
lies_outside(int64_t start, int64_t end, int64_t first, int64_t last)
{
    return (end <= first && start < first) || (start >= last && end > last);
}

/* host_time(spans, first_ns, last_ns): of each site how many spans lie in the window, and where: [(site, spans,
 * stretches)]. None where one of them is no span of ours. */
static PyObject *
host_time(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *result = NULL;
    long long first, last;
    if (!PyArg_ParseTuple(args, "OLL:host_time", &spans, &first, &last))
        return NULL;
    PyObject *own = own_spans(spans);
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    sites_t sites = {0};
    heap_t found = {0}; /* heaps of stretches, by the number of their site */
    if (table_make(&sites.numbers, 64) < 0) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        int64_t start = span->start_ns, end = span->end_ns;
        give_way((size_t)i);
        if (lies_outside(start, end, first, last))
            continue;
        uint32_t number;
        if (fact_of(&sites, span->site, nothing_of, NULL, &number) == NULL)
            goto end;
        if (number == found.used) {
            heap_t *made = heap_next(&found, sizeof *made);
            if (made != NULL)
                *made = (heap_t){0};
        }
        stretch_t *stretch = number < found.used ? heap_next(&((heap_t *)found.items)[number], sizeof *stretch) : NULL;
        if (stretch == NULL) {
            PyErr_NoMemory();
            goto end;
        }
        *stretch = (stretch_t){start < first ? first : start, end > last ? last : end};
    }
    result = PyList_New(0);
    for (size_t i = 0; result != NULL && i < found.used; i++) {
        heap_t *its = &((heap_t *)found.items)[i];
        PyObject *site = ((site_fact_t *)sites.facts.items)[i].site;
        if (append_new(result, Py_BuildValue("(OnN)", site, (Py_ssize_t)its->used, heap_bytes(its, sizeof(stretch_t)))) < 0)
            Py_CLEAR(result);
    }
end:
    for (size_t i = 0; i < found.used; i++)
        PyMem_RawFree(((heap_t *)found.items)[i].items);
    PyMem_RawFree(found.items);
    sites_free(&sites);
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
        PyObject *device = span->device;
        give_way((size_t)i);
        if (span->device == NULL)
            continue;
        device = span->device;
        uint32_t site = 0;
        if (!(plain = PyTuple_CheckExact(device)))
            break;
        if (fact_of(&sites, span->site, nothing_of, NULL, &site) == NULL)
            goto end;
        for (Py_ssize_t n = 0; plain && n < PyTuple_GET_SIZE(device); n++) {
            Interval *interval = (Interval *)PyTuple_GET_ITEM(device, n);
            plain = Py_IS_TYPE((PyObject *)interval, &Interval_Type) && interval->end_ns >= interval->start_ns &&
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
    size_t last = 0;
    for (size_t i = 1; i < used; i++) {
        if (all[i].start > all[last].end)
            all[++last] = all[i];
        else if (all[i].end > all[last].end)
            all[last].end = all[i].end;
    }
    used = used == 0 ? 0 : last + 1;
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

/* ---- allocations */

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
    uint32_t thread = table_get(&all->thread_of, span->thread_id), site;
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

/* unpacked([bytes]): the sum of packed histograms, {bucket: calls}. None where one of them is not the recorder's. */
#define BUCKETS (60 << 6)

static PyObject *
unpacked(PyObject *Py_UNUSED(module), PyObject *parts)
{
    if (!PyList_CheckExact(parts))
        Py_RETURN_NONE;
    size_t record = sizeof(uint32_t) + sizeof(uint64_t);
    uint64_t *sums = PyMem_RawCalloc(BUCKETS, sizeof *sums);
    int plain = 1;
    if (sums == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; plain && i < PyList_GET_SIZE(parts); i++) {
        PyObject *part = PyList_GET_ITEM(parts, i);
        plain = PyBytes_CheckExact(part) && (size_t)PyBytes_GET_SIZE(part) % record == 0;
        const char *at = plain ? PyBytes_AS_STRING(part) : NULL;
        for (const char *end = plain ? at + PyBytes_GET_SIZE(part) : NULL; plain && at < end; at += record) {
            uint32_t bucket;
            uint64_t calls;
            memcpy(&bucket, at, sizeof bucket);
            memcpy(&calls, at + sizeof bucket, sizeof calls);
            plain = bucket < BUCKETS && !__builtin_add_overflow(sums[bucket], calls, &sums[bucket]);
        }
    }
    PyObject *histogram = plain ? PyDict_New() : Py_NewRef(Py_None);
    for (uint32_t i = 0; plain && histogram != NULL && i < BUCKETS; i++) {
        if (sums[i] == 0)
            continue;
        PyObject *bucket = PyLong_FromUnsignedLong(i), *calls = PyLong_FromUnsignedLongLong(sums[i]);
        if (bucket == NULL || calls == NULL || PyDict_SetItem(histogram, bucket, calls) < 0)
            Py_CLEAR(histogram);
        Py_XDECREF(bucket);
        Py_XDECREF(calls);
    }
    PyMem_RawFree(sums);
    return histogram;
}

/* ------------------------------------------------------------------ the module */

static int
adopt_class(PyTypeObject *type, PyObject *twin)
{
    /* What `dataclasses`, `copy.replace` and `match` ask of a class. */
    static const char *const names[] = {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__slots__",
                                        "__annotations__", "__replace__"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        PyObject *value = PyObject_GetAttrString(twin, names[i]);
        if (value == NULL) {
            PyErr_Clear(); /* older versions have not all of them */
            continue;
        }
        int done = PyDict_SetItemString(type->tp_dict, names[i], value);
        Py_DECREF(value);
        if (done < 0)
            return -1;
    }
    PyType_Modified(type);
    return 0;
}

/* adopt(span, interval): be the classes of which these are the twins, dataclasses in all that can be asked of one. */
static PyObject *
adopt(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *span, *interval;
    if (!PyArg_ParseTuple(args, "OO:adopt", &span, &interval))
        return NULL;
    PyObject *device = PyObject_GetAttrString(span, "device_ns"), *elapsed = PyObject_GetAttrString(span, "elapsed_ns");
    PyObject *of_device = device == NULL ? NULL : PyObject_GetAttrString(device, "fget");
    PyObject *of_elapsed = elapsed == NULL ? NULL : PyObject_GetAttrString(elapsed, "fget");
    Py_XDECREF(device);
    Py_XDECREF(elapsed);
    if (of_device == NULL || of_elapsed == NULL || adopt_class(&Span_Type, span) < 0 ||
        adopt_class(&Interval_Type, interval) < 0) {
        Py_XDECREF(of_device);
        Py_XDECREF(of_elapsed);
        return NULL;
    }
    Py_XSETREF(twin_device_ns, of_device);
    Py_XSETREF(twin_elapsed_ns, of_elapsed);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"adopt", adopt, METH_VARARGS, "Take over what dataclasses have from the twins of Span and DeviceInterval."},
    {"sort", sort_spans, METH_O, "Sort a list of spans by start, then longer ones first, then by id."},
    {"of_rows", of_rows, METH_VARARGS, "The spans of rows that reach into a window, clipped to it."},
    {"assign_self_times", assign_self_times, METH_O, "Set the self times of spans from their tree."},
    {"backward", backward, METH_O, "How many spans come before their parents."},
    {"owners", owners, METH_VARARGS, "Of each span the topmost one of a kind at or above it."},
    {"device_time", device_time, METH_VARARGS, "The device time of spans, by site, device, stream and label."},
    {"host_time", host_time, METH_VARARGS, "Where the spans of each site lie in a window."},
    {"summed", summed, METH_VARARGS, "By key, the device time of spans: sums over streams, unions of each."},
    {"innermost", innermost, METH_VARARGS, "Where the device intervals lie that enclose no other."},
    {"united", united_stretches, METH_O, "The union of stretches."},
    {"shared_ns", shared_ns, METH_VARARGS, "How long what two unions have in common is."},
    {"at_once", at_once, METH_O, "How long two or more of several unions went on, and how many at most."},
    {"within", within, METH_VARARGS, "What a device did within requests."},
    {"phases", phases, METH_VARARGS, "What the phases of requests took."},
    {"memory", memory, METH_VARARGS, "What was taken and given back of memory at which place."},
    {"unpacked", unpacked, METH_O, "The sum of packed histograms."},
    {"count", count_spans, METH_VARARGS, "The totals of spans by call path and thread."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument._spans",
    .m_doc = "Spans in C. See `instrument.spans`.",
    .m_size = -1,
    .m_methods = functions,
};

static int
prepare(PyTypeObject *type, layout_t *layout, PyGetSetDef *attributes, int writable)
{
    for (int i = 0; i < layout->count; i++) {
        field_t *field = &layout->fields[i];
        if ((field->key = PyUnicode_InternFromString(field->name)) == NULL)
            return -1;
        *attributes++ = (PyGetSetDef){field->name, get_attribute, writable ? set_attribute : NULL, NULL, field};
    }
    return PyType_Ready(type);
}

PyMODINIT_FUNC
PyInit__spans(void)
{
    PyObject *dataclasses = PyImport_ImportModule("dataclasses");
    frozen_error = dataclasses == NULL ? NULL : PyObject_GetAttrString(dataclasses, "FrozenInstanceError");
    Py_XDECREF(dataclasses);
    text_exclusive = PyUnicode_InternFromString("exclusive");
    text_get = PyUnicode_InternFromString("get");
    text_bytes = PyUnicode_InternFromString("bytes");
    text_key = PyUnicode_InternFromString("key");
    text_kind = PyUnicode_InternFromString("kind");
    text_correlation = PyUnicode_InternFromString("correlation");
    if (frozen_error == NULL || text_exclusive == NULL || text_get == NULL || text_bytes == NULL || text_key == NULL ||
        text_kind == NULL || text_correlation == NULL || prepare(&Span_Type, &span_layout, span_attributes + 3, 1) < 0 ||
        prepare(&Interval_Type, &interval_layout, interval_attributes, 0) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddIntConstant(module, "LAYOUT", SPANS_LAYOUT) < 0 ||
        PyModule_AddObjectRef(module, "Span", (PyObject *)&Span_Type) < 0 ||
        PyModule_AddObjectRef(module, "DeviceInterval", (PyObject *)&Interval_Type) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
