/* Events of other profilers read in C: the twin of `Foreign.add`, for complete slices, and of `_nest` in `foreign.py`, which
 * say what they mean. At an event that is not plain (a lane that is no number, an escape in a name, a key twice) or of
 * another kind the scanner stops before it, and the twin reads it.
 */

#include "_attributes.h"
#include "_stretches.h"
#include <math.h>
#include <structmember.h>

#define MOST_EXACT_DIGITS 15 /* of a number whose digits and power of ten are each exact as a double */
#define MOST_MICROSECONDS ((int64_t)1 << 53)

static PyTypeObject *span_type, *interval_type;
static PyObject *text_step, *text_flops;

/* ------------------------------------------------------------------ one event */

enum { PH = 1, CAT = 2, NAME = 4, PID = 8, TID = 16, TS = 32, DUR = 64, ARGS = 128 };
/* Of the arguments: those that are asked for, and whether there are some that are no attributes. */
enum { CORRELATION = 256, DEVICE = 512, STREAM = 1024, FLOPS = 2048, OTHERS = 4096 };

/* A number as JSON has it: whole, or as near as a float comes. */
typedef struct {
    int is_whole;
    int64_t whole;
    double real;
} number_t;

typedef struct {
    uint32_t has;
    char phase;
    part_t category, name, args;
    int64_t pid, tid;
    number_t ts, dur;
    int64_t correlation, device, stream; /* of its arguments */
} event_t;

/* Any number. Whether there was one that is plain. */
static int
number_of(cursor_t *in, number_t *number)
{
    static const double powers[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
    const char *first = in->at;
    number->is_whole = 1;
    if (whole_number(in, &number->whole)) {
        number->real = (double)number->whole;
        return 1;
    }
    in->at = first;
    number->is_whole = 0;
    number->whole = 0;
    if (!skip_number(in, &number->is_whole) || number->is_whole)
        return 0;
    int64_t digits = 0;
    int count = 0, decimals = -1;
    for (const char *at = first; at < in->at; at++) {
        if (*at >= '0' && *at <= '9') {
            digits = count < MOST_EXACT_DIGITS ? digits * 10 + (*at - '0') : digits;
            count++;
            decimals += decimals >= 0;
        } else if (*at == '.')
            decimals = 0;
        else if (*at != '-')
            count = MOST_EXACT_DIGITS + 1; /* an exponent */
    }
    if (count <= MOST_EXACT_DIGITS) {
        double value = (double)digits / powers[decimals];
        number->real = *first == '-' ? -value : value;
        return 1;
    }
    char text[80];
    size_t length = (size_t)(in->at - first);
    if (length >= sizeof text)
        return 0;
    memcpy(text, first, length);
    text[length] = '\0';
    number->real = PyOS_string_to_double(text, NULL, NULL);
    if (number->real == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return isfinite(number->real);
}

/* Microseconds as nanoseconds, as Python's `round` has them. Whether they are in the range of times. */
static int
nanoseconds(const number_t *time_us, int64_t *time_ns)
{
    if (time_us->is_whole) {
        if (!(-MOST_MICROSECONDS < time_us->whole && time_us->whole < MOST_MICROSECONDS))
            return 0;
        *time_ns = time_us->whole * 1000;
        return 1;
    }
    if (!(-(double)MOST_MICROSECONDS < time_us->real && time_us->real < (double)MOST_MICROSECONDS))
        return 0;
    *time_ns = (int64_t)nearbyint(time_us->real * 1000);
    return 1;
}

/* The arguments of an event. Whether they are plain. */
static int
arguments_of(cursor_t *in, event_t *event)
{
    event->args.text = in->at;
    if (!take(in, '{'))
        return 0;
    if (!take(in, '}')) {
        do {
            part_t key;
            blanks(in);
            if (!plain_string(in, &key.text, &key.length) || !take(in, ':'))
                return 0;
            int64_t *asked = IS(key.text, key.length, "correlation")    ? &event->correlation
                             : IS(key.text, key.length, "correlation id") ? &event->correlation /* Paddle's */
                             : IS(key.text, key.length, "device")         ? &event->device
                             : IS(key.text, key.length, "stream")         ? &event->stream
                                                                          : NULL;
            blanks(in);
            event->has |= (IS(key.text, key.length, "flops") ? FLOPS : 0) | (is_scalar(in) ? 0 : OTHERS);
            if (asked == &event->correlation && event->has & CORRELATION)
                return 0; /* under both of its names, or twice */
            if (asked == NULL ? !skip_value(in, 1) : !whole_number(in, asked))
                return 0;
            if (asked != NULL)
                event->has |= asked == &event->correlation ? CORRELATION : asked == &event->device ? DEVICE : STREAM;
        } while (take(in, ','));
        if (!take(in, '}'))
            return 0;
    }
    event->args.length = (size_t)(in->at - event->args.text);
    return 1;
}

/* An event. Whether it is plain. */
static int
event_of(cursor_t *in, event_t *event)
{
    event->has = 0;
    if (!take(in, '{') || take(in, '}'))
        return 0;
    do {
        const char *key;
        size_t length;
        blanks(in);
        if (!plain_string(in, &key, &length) || !take(in, ':'))
            return 0;
        blanks(in);
        uint32_t bit = IS(key, length, "ph")     ? PH
                       : IS(key, length, "cat")  ? CAT
                       : IS(key, length, "name") ? NAME
                       : IS(key, length, "pid")  ? PID
                       : IS(key, length, "tid")  ? TID
                       : IS(key, length, "ts")   ? TS
                       : IS(key, length, "dur")  ? DUR
                       : IS(key, length, "args") ? ARGS
                                                 : 0;
        if (event->has & bit)
            return 0;
        event->has |= bit;
        part_t phase;
        int plain;
        switch (bit) {
        case PH:
            plain = plain_string(in, &phase.text, &phase.length) && phase.length == 1;
            event->phase = plain ? *phase.text : ' ';
            break;
        case CAT:
            plain = plain_string(in, &event->category.text, &event->category.length);
            break;
        case NAME:
            plain = plain_string(in, &event->name.text, &event->name.length);
            break;
        case PID:
            plain = whole_number(in, &event->pid);
            break;
        case TID:
            plain = whole_number(in, &event->tid);
            break;
        case TS:
            plain = number_of(in, &event->ts);
            break;
        case DUR:
            plain = number_of(in, &event->dur);
            break;
        case ARGS:
            plain = arguments_of(in, event);
            break;
        default:
            plain = skip_value(in, 0);
        }
        if (!plain)
            return 0;
    } while (take(in, ','));
    return take(in, '}');
}

/* ------------------------------------------------------------------ the scanner */

typedef struct {
    PyObject_HEAD
    PyObject *facts_of, *thread_id_of, *flops_of; /* of the twin */
    PyObject *known, *thread_ids;                 /* what the first two said */
    PyObject *spans, *telling, *work, *launches, *device_rows;
    reading_t reading;
    heap_t kept; /* the text of arguments */
    int64_t pid, tid, thread_id; /* the newest lane */
    PyObject *row;
} Scanner;

/* What the twin says of a category and a name: site, step, kind of work, whether it launches, whether its operations are
 * counted. A new reference; NULL with an error. */
static PyObject *
facts_of(Scanner *self, const event_t *event)
{
    const char *category = event->has & CAT ? event->category.text : "";
    size_t length = event->has & CAT ? event->category.length : 0;
    PyObject *key = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(length + 1 + (event->has & NAME ? event->name.length : 0)));
    if (key == NULL)
        return NULL;
    char *into = PyBytes_AS_STRING(key);
    memcpy(into, category, length);
    into[length] = event->has & NAME ? '\0' : '\1'; /* neither stands in a string of JSON as it is */
    if (event->has & NAME)
        memcpy(into + length + 1, event->name.text, event->name.length);
    PyObject *facts = PyDict_GetItemWithError(self->known, key);
    Py_XINCREF(facts);
    if (facts == NULL && !PyErr_Occurred()) {
        PyObject *name = event->has & NAME
                             ? PyUnicode_DecodeUTF8(event->name.text, (Py_ssize_t)event->name.length, NULL)
                             : Py_NewRef(Py_None);
        PyObject *text = PyUnicode_DecodeUTF8(category, (Py_ssize_t)length, NULL);
        if (name != NULL && text != NULL)
            facts = PyObject_CallFunctionObjArgs(self->facts_of, text, name, NULL);
        Py_XDECREF(name);
        Py_XDECREF(text);
        if (facts != NULL && (!PyTuple_Check(facts) || PyTuple_GET_SIZE(facts) != 5)) {
            PyErr_SetString(PyExc_TypeError, "facts are a tuple of five");
            Py_CLEAR(facts);
        }
        /* Each step has a name of its own. */
        if (facts != NULL && PyTuple_GET_ITEM(facts, 1) == Py_None && PyDict_SetItem(self->known, key, facts) < 0)
            Py_CLEAR(facts);
    }
    Py_DECREF(key);
    return facts;
}

/* Find the thread of an event's lane: 0, or -1 with an error. */
static int
find_thread(Scanner *self, const event_t *event)
{
    if (self->row != NULL && self->pid == event->pid && self->tid == event->tid)
        return 0;
    PyObject *row = Py_BuildValue("(LL)", (long long)event->pid, (long long)event->tid);
    PyObject *id = row == NULL ? NULL : PyDict_GetItemWithError(self->thread_ids, row);
    Py_XINCREF(id);
    if (row != NULL && id == NULL && !PyErr_Occurred()) {
        id = PyObject_CallFunctionObjArgs(self->thread_id_of, row, NULL);
        if (id != NULL && PyDict_SetItem(self->thread_ids, row, id) < 0)
            Py_CLEAR(id);
    }
    long long thread_id = id == NULL ? -1 : PyLong_AsLongLong(id);
    Py_XDECREF(id);
    if (PyErr_Occurred()) {
        Py_XDECREF(row);
        return -1;
    }
    Py_XSETREF(self->row, row);
    self->pid = event->pid;
    self->tid = event->tid;
    self->thread_id = thread_id;
    return 0;
}

/* A whole number as Python has it, or another object where there is none. A new reference. */
static PyObject *
long_or(const event_t *event, uint32_t bit, int64_t number, PyObject *otherwise)
{
    return event->has & bit ? PyLong_FromLongLong(number) : Py_NewRef(otherwise);
}

/* Take down the work of a device, or the call that asks for some. 0, or -1 with an error. */
static int
add_work(Scanner *self, const event_t *event, PyObject *facts, Span *span)
{
    PyObject *kind = PyTuple_GET_ITEM(facts, 2), *launches = PyTuple_GET_ITEM(facts, 3);
    if (kind == Py_None && (launches != Py_True || !(event->has & CORRELATION)))
        return 0;
    PyObject *correlation = long_or(event, CORRELATION, event->correlation, Py_None);
    if (correlation == NULL)
        return -1;
    if (kind == Py_None) {
        int done = PyDict_SetItem(self->launches, correlation, (PyObject *)span);
        Py_DECREF(correlation);
        return done;
    }
    PyObject *device = long_or(event, DEVICE, event->device, PyTuple_GET_ITEM(self->row, 0));
    PyObject *stream = long_or(event, STREAM, event->stream, PyTuple_GET_ITEM(self->row, 1));
    PyObject *name = PyObject_GetAttrString(span->site, "name"), *work = NULL;
    if (device != NULL && stream != NULL && name != NULL && PySet_Add(self->device_rows, self->row) == 0)
        work = Py_BuildValue("(OOOOLLO)", name, kind, device, stream, (long long)span->start_ns, (long long)span->end_ns,
                             correlation);
    Py_XDECREF(name);
    Py_XDECREF(device);
    Py_XDECREF(stream);
    Py_DECREF(correlation);
    return append_new(self->work, work);
}

/* Give a span the attributes of its event. 0, or -1 with an error. */
static int
add_attributes(Scanner *self, const event_t *event, PyObject *facts, Span *span)
{
    PyObject *step = PyTuple_GET_ITEM(facts, 1), *flops = NULL;
    int has_args = event->has & ARGS && event->args.length > 2, counts = PyTuple_GET_ITEM(facts, 4) == Py_True, done = 0;
    if (has_args && counts) {
        PyObject *args = PyUnicode_DecodeUTF8(event->args.text, (Py_ssize_t)event->args.length, NULL);
        flops = args == NULL ? NULL : PyObject_CallFunctionObjArgs(self->flops_of, PyTuple_GET_ITEM(facts, 0), args, NULL);
        Py_XDECREF(args);
        if (flops == NULL)
            return -1;
        if (flops == Py_None)
            Py_CLEAR(flops);
    }
    if (step == Py_None && flops == NULL)
        done = has_args ? keep_attributes(&self->kept, &event->args, (event->has & OTHERS) != 0, span) : 0;
    else {
        span->attributes = has_args ? attributes_in(event->args.text, event->args.length) : PyDict_New();
        if (span->attributes == NULL || (step != Py_None && PyDict_SetItem(span->attributes, text_step, step) < 0) ||
            (flops != NULL && PyDict_SetItem(span->attributes, text_flops, flops) < 0))
            done = -1;
    }
    if (done == 0 && (flops != NULL || event->has & FLOPS))
        done = PyList_Append(self->telling, (PyObject *)span);
    Py_XDECREF(flops);
    return done;
}

/* Take an event: 1, 0 where it is not plain, -1 with an error. */
static int
add_event(Scanner *self, const event_t *event)
{
    if (!(event->has & PH) || strchr("BEbeMi", event->phase) != NULL)
        return 0;
    if (event->phase != 'X')
        return 1; /* nothing that a trace is read from */
    if ((event->has & (PID | TID | TS | DUR)) != (PID | TID | TS | DUR))
        return 0;
    number_t ended = {event->ts.is_whole && event->dur.is_whole, event->ts.whole + event->dur.whole,
                      event->ts.real + event->dur.real};
    int64_t start_ns, end_ns;
    if (!nanoseconds(&event->ts, &start_ns) || !nanoseconds(&ended, &end_ns) || end_ns < start_ns)
        return 0;
    if (event->has & ARGS && !has_room(&self->kept, &event->args))
        return 0;
    PyObject *facts = find_thread(self, event) < 0 ? NULL : facts_of(self, event);
    Span *span = NULL;
    int done = -1;
    if (facts == NULL || (span = PyObject_New(Span, span_type)) == NULL)
        goto end;
    memset((char *)span + sizeof(PyObject), 0, sizeof *span - sizeof(PyObject));
    span->site = Py_NewRef(PyTuple_GET_ITEM(facts, 0));
    span->thread_id = self->thread_id;
    span->start_ns = start_ns;
    span->end_ns = end_ns;
    if (add_attributes(self, event, facts, span) == 0 && PyList_Append(self->spans, (PyObject *)span) == 0 &&
        add_work(self, event, facts, span) == 0)
        done = 1;
end:
    Py_XDECREF(span);
    Py_XDECREF(facts);
    return done;
}

static int
take_event(void *scanner, cursor_t *in)
{
    event_t event;
    return event_of(in, &event) ? add_event(scanner, &event) : 0;
}

/* scan(text, at): take the events that begin at the place, as many as are plain; the place after the last of them. */
static PyObject *
Scanner_scan(Scanner *self, PyObject *args)
{
    PyObject *text;
    Py_ssize_t at, first = PyList_GET_SIZE(self->spans);
    if (!PyArg_ParseTuple(args, "Un:scan", &text, &at))
        return NULL;
    self->kept.used = 0;
    at = take_all(&self->reading, text, at, take_event, self);
    return at < 0 || share_attributes(&self->kept, self->spans, first) < 0 ? NULL : PyLong_FromSsize_t(at);
}

static void
Scanner_dealloc(Scanner *self)
{
    PyObject *own[] = {self->facts_of, self->thread_id_of, self->flops_of,    self->known,        self->thread_ids, self->spans,
                       self->telling,  self->work,         self->launches,    self->device_rows, self->reading.text, self->row};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        Py_XDECREF(own[i]);
    PyMem_RawFree(self->kept.items);
    PyObject_Free(self);
}

/* Scanner(facts_of, thread_id_of, flops_of, spans, telling, work, launches, device_rows) */
static PyObject *
Scanner_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named))
{
    PyObject *facts, *threads, *flops, *spans, *telling, *work, *launches, *rows;
    if (!PyArg_ParseTuple(args, "OOOO!O!O!O!O!:Scanner", &facts, &threads, &flops, &PyList_Type, &spans, &PyList_Type,
                          &telling, &PyList_Type, &work, &PyDict_Type, &launches, &PySet_Type, &rows))
        return NULL;
    Scanner *self = PyObject_New(Scanner, type);
    if (self == NULL)
        return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->facts_of = Py_NewRef(facts);
    self->thread_id_of = Py_NewRef(threads);
    self->flops_of = Py_NewRef(flops);
    self->spans = Py_NewRef(spans);
    self->telling = Py_NewRef(telling);
    self->work = Py_NewRef(work);
    self->launches = Py_NewRef(launches);
    self->device_rows = Py_NewRef(rows);
    self->known = PyDict_New();
    self->thread_ids = PyDict_New();
    if (self->known == NULL || self->thread_ids == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef Scanner_methods[] = {
    {"scan", (PyCFunction)Scanner_scan, METH_VARARGS, "Take the plain events from a place on; the place after them."},
    {NULL},
};

static PyTypeObject Scanner_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instrument.native._foreign.Scanner",
    .tp_basicsize = sizeof(Scanner),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Reads the plain slices of another profiler's trace.",
    .tp_new = Scanner_new,
    .tp_dealloc = (destructor)Scanner_dealloc,
    .tp_methods = Scanner_methods,
};

/* ------------------------------------------------------------------ trees */

typedef struct {
    int64_t end_ns;
    Span *span;
} slice_t;

typedef struct {
    heap_t open; /* outermost first, none longer than the one before it */
} stack_t;

/* nest(spans): what `_nest` does with spans in order. Whether it did: False where they are not plain. */
static PyObject *
nest(PyObject *Py_UNUSED(module), PyObject *spans)
{
    PyObject *own = spans_of_type(spans, span_type), *result = NULL;
    if (own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_FALSE;
    }
    table_t threads = {0}, tasks = {0}, lanes = {0};
    heap_t stacks = {0};
    if (table_make(&threads, 16) < 0 || table_make(&tasks, 16) < 0 || table_make(&lanes, 16) < 0)
        goto no_memory;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); i++) {
        Span *span = (Span *)PyTuple_GET_ITEM(own, i);
        uint32_t thread = numbered(&threads, span->thread_id), task = numbered(&tasks, span->task_id);
        uint32_t lane = thread == NOWHERE || task == NOWHERE ? NOWHERE : numbered(&lanes, PAIR(thread, task));
        stack_t *made = lane == stacks.used ? heap_next(&stacks, sizeof *made) : NULL;
        if (made != NULL)
            memset(made, 0, sizeof *made);
        if (lane >= stacks.used)
            goto no_memory;
        stack_t *stack = &((stack_t *)stacks.items)[lane];
        slice_t *open = (slice_t *)stack->open.items;
        while (stack->open.used > 0 && (open[stack->open.used - 1].end_ns <= span->start_ns ||
                                        open[stack->open.used - 1].end_ns < span->end_ns))
            stack->open.used--;
        span->span_id = span->root_id = i + 1;
        if (__builtin_sub_overflow(span->end_ns, span->start_ns, &span->active_ns)) {
            result = Py_NewRef(Py_False);
            goto end;
        }
        if (stack->open.used > 0) {
            const Span *parent = open[stack->open.used - 1].span;
            span->parent_id = parent->span_id;
            span->root_id = parent->root_id;
        }
        slice_t *slice = heap_next(&stack->open, sizeof *slice);
        if (slice == NULL)
            goto no_memory;
        *slice = (slice_t){span->end_ns, span};
        give_way((size_t)i);
    }
    result = Py_NewRef(Py_True);
    goto end;
no_memory:
    PyErr_NoMemory();
end:
    for (size_t i = 0; i < stacks.used; i++)
        PyMem_RawFree(((stack_t *)stacks.items)[i].open.items);
    PyMem_RawFree(stacks.items);
    table_free(&threads);
    table_free(&tasks);
    table_free(&lanes);
    Py_DECREF(own);
    return result;
}

static PyMethodDef functions[] = {
    {"nest", nest, METH_O, "Make each span a child of that which began last of those in its lane that hold it."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._foreign",
    .m_doc = "Other profilers' events into spans, in C. See `instrument.chrome.foreign`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__foreign(void)
{
    text_step = PyUnicode_InternFromString("step");
    text_flops = PyUnicode_InternFromString("flops");
    if (text_step == NULL || text_flops == NULL ||
        import_spans(&span_type, &interval_type) < 0 || PyType_Ready(&Scanner_Type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddObjectRef(module, "Scanner", (PyObject *)&Scanner_Type) < 0)
        Py_CLEAR(module);
    return module;
}
