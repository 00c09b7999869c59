/* Spans in C: the twin of the classes `Span` and `DeviceInterval` of `spans.py`, and of the loop over rows in `rows.py`.
 *
 * A span is 136 bytes with its numbers inside, where that of Python is 160 and nine integers of 32. It is unknown to the
 * collector of cycles, which would otherwise look through a million of them again and again: what a span holds (a site,
 * texts, numbers, intervals) does not lead back to it. One that is put into its own attributes is never freed.
 *
 * A loop that meets what it does not expect (a span of another class, one that ends before it begins) returns None, and
 * its caller takes the twin.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef __int128 wide_t;

typedef struct {
    PyObject_HEAD
    PyObject *site;
    int64_t span_id, parent_id, root_id, thread_id, task_id, start_ns, end_ns, active_ns, self_ns;
    PyObject *error;      /* NULL: None */
    PyObject *attributes; /* NULL: an empty dict that nobody has asked for yet */
    PyObject *device;     /* NULL: () */
    PyObject *remote;     /* NULL: None */
    char clipped;
} Span;

typedef struct {
    PyObject_HEAD
    int64_t device, stream, start_ns, end_ns;
    PyObject *label; /* NULL: "exclusive" */
    int64_t uncertainty_ns;
} Interval;

static PyTypeObject Span_Type, Interval_Type;
static PyObject *frozen_error; /* dataclasses.FrozenInstanceError */
static PyObject *text_exclusive;

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
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instrument.recording.spans.DeviceInterval",
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
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instrument.recording.spans.Span",
    .tp_basicsize = sizeof(Span),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_doc = "Span(site, span_id, parent_id, root_id, thread_id, task_id, start_ns, end_ns, active_ns, self_ns, "
              "error=None, attributes={}, device=(), clipped=False, remote=None)\n--\n\n"
              "One timed execution: see `instrument.recording.spans`.",
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

#define TURN 4096

/* Long loops over spans let other threads of the service run about every millisecond. */
static void
give_way(size_t done)
{
    if (done % TURN == TURN - 1) {
        Py_BEGIN_ALLOW_THREADS
        Py_END_ALLOW_THREADS
    }
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
    {"of_rows", of_rows, METH_VARARGS, "The spans of rows that reach into a window, clipped to it."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._spans",
    .m_doc = "Spans in C. See `instrument.recording.spans`.",
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
    if (frozen_error == NULL || text_exclusive == NULL ||
        prepare(&Span_Type, &span_layout, span_attributes + 3, 1) < 0 ||
        prepare(&Interval_Type, &interval_layout, interval_attributes, 0) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddObjectRef(module, "Span", (PyObject *)&Span_Type) < 0 ||
        PyModule_AddObjectRef(module, "DeviceInterval", (PyObject *)&Interval_Type) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
