/* Events and allocations of a trace that `dump` wrote, read in C: the twin of `_Own.add` in `reading.py`, and of `take` in
 * `allocations.py`, which say what they mean.
 *
 * At an event that is not as plain as `dump` writes most of them (an escape in a name, a number that is no int64, a key
 * twice, a value of another type, the end of the text) it stops before it, and the twin reads that event or says what is
 * wrong with it.
 */

#include "_attributes.h"
#include <stddef.h>
#include <structmember.h>

#define MOST_DIGITS_OF_TIME 12 /* of whole microseconds: to the nanosecond, as a float tells it as well */

static PyTypeObject *span_type, *interval_type;
static PyObject *text_exclusive;

/* Microseconds with at most three decimals as nanoseconds. Whether there were such. */
static inline int
time_of(cursor_t *in, int64_t *time_ns)
{
    const char *first = in->at;
    int64_t found = 0;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9' && in->at - first <= MOST_DIGITS_OF_TIME)
        found = found * 10 + (*in->at++ - '0');
    size_t digits = (size_t)(in->at - first);
    if (digits == 0 || digits > MOST_DIGITS_OF_TIME || (*first == '0' && digits > 1))
        return 0;
    int decimals = 0;
    if (in->at < in->end && *in->at == '.') {
        in->at++;
        for (; decimals < 3 && in->at < in->end && *in->at >= '0' && *in->at <= '9'; decimals++)
            found = found * 10 + (*in->at++ - '0');
        if (decimals == 0)
            return 0;
    }
    if (in->at >= in->end || *in->at == '.' || *in->at == 'e' || *in->at == 'E' || (*in->at >= '0' && *in->at <= '9'))
        return 0;
    for (; decimals < 3; decimals++)
        found *= 10;
    *time_ns = found;
    return 1;
}

/* ------------------------------------------------------------------ one event */

/* What an event may have; a bit each in `event_t.has`. */
enum {
    PH = 1 << 0, TS = 1 << 1, DUR = 1 << 2, TID = 1 << 3, ARGS = 1 << 4, LOCAL = 1 << 5,
    SITE = 1 << 6, ID = 1 << 7, PARENT = 1 << 8, ROOT = 1 << 9, SELF = 1 << 10, ACTIVE = 1 << 11, TASK = 1 << 12,
    THREAD = 1 << 13, TOTAL = 1 << 14, CLIPPED = 1 << 15, ERROR = 1 << 16, ATTRIBUTES = 1 << 17,
    OWNER = 1 << 18, DEVICE = 1 << 19, STREAM = 1 << 20, ENCLOSING = 1 << 21, LABEL = 1 << 22, UNCERTAINTY = 1 << 23,
    PLACE = 1 << 24, REMOTE = 1 << 25,
};

typedef struct {
    uint32_t has;
    char phase;
    int64_t ts, dur, tid;
    part_t local, error, label, attributes;
    int clipped;
    int64_t site, id, parent, root, self_ns, active_ns, task, thread, total_ns;
    int64_t owner, device, stream, enclosing, uncertainty_ns, place;
} event_t;

typedef struct {
    const char *name;
    size_t length;
    uint32_t bit;
    size_t number; /* where the whole number belongs, 0 for what is no number */
} argument_t;

#define ARGUMENT(name, bit, field) {name, sizeof(name) - 1, bit, offsetof(event_t, field)}
static const argument_t arguments[] = {
    ARGUMENT("site", SITE, site), ARGUMENT("id", ID, id), ARGUMENT("parent", PARENT, parent),
    ARGUMENT("root", ROOT, root), ARGUMENT("self_ns", SELF, self_ns), ARGUMENT("task", TASK, task),
    ARGUMENT("active_ns", ACTIVE, active_ns), ARGUMENT("thread", THREAD, thread),
    ARGUMENT("total_ns", TOTAL, total_ns), ARGUMENT("owner", OWNER, owner), ARGUMENT("device", DEVICE, device),
    ARGUMENT("stream", STREAM, stream), ARGUMENT("enclosing_stream", ENCLOSING, enclosing),
    ARGUMENT("uncertainty_ns", UNCERTAINTY, uncertainty_ns), ARGUMENT("place", PLACE, place),
    {"clipped", 7, CLIPPED, 0}, {"error", 5, ERROR, 0}, {"label", 5, LABEL, 0}, {"attributes", 10, ATTRIBUTES, 0},
    {"remote", 6, REMOTE, 0},
};

/* Pass over attributes. Whether they are numbers, texts and truths under names without escapes. */
static int
skip_attributes(cursor_t *in)
{
    if (!take(in, '{'))
        return 0;
    if (take(in, '}'))
        return 1;
    do {
        part_t name;
        blanks(in);
        if (!plain_string(in, &name.text, &name.length) || !take(in, ':'))
            return 0;
        blanks(in);
        if (!is_scalar(in) || !skip_value(in, 1))
            return 0;
    } while (take(in, ','));
    return take(in, '}');
}

/* The value of an argument. Whether it is plain. */
static int
argument_value(cursor_t *in, event_t *event, const char *key, size_t length)
{
    blanks(in);
    for (size_t i = 0; i < sizeof arguments / sizeof *arguments; i++) {
        const argument_t *known = &arguments[i];
        if (known->length != length || memcmp(known->name, key, length) != 0)
            continue;
        if (event->has & known->bit || known->bit == REMOTE)
            return 0;
        event->has |= known->bit;
        if (known->number != 0)
            return whole_number(in, (int64_t *)((char *)event + known->number));
        if (known->bit == CLIPPED) {
            event->clipped = in->at < in->end && *in->at == 't';
            return take_word(in, event->clipped ? "true" : "false");
        }
        if (known->bit == ATTRIBUTES) {
            event->attributes.text = in->at;
            if (!skip_attributes(in))
                return 0;
            event->attributes.length = (size_t)(in->at - event->attributes.text);
            return 1;
        }
        part_t *part = known->bit == ERROR ? &event->error : &event->label;
        return plain_string(in, &part->text, &part->length);
    }
    return skip_value(in, 0);
}

static int
arguments_of(cursor_t *in, event_t *event)
{
    if (!take(in, '{'))
        return 0;
    if (take(in, '}'))
        return 1;
    do {
        const char *key;
        size_t length;
        blanks(in);
        if (!plain_string(in, &key, &length) || !take(in, ':') || !argument_value(in, event, key, length))
            return 0;
    } while (take(in, ','));
    return take(in, '}');
}

/* `{"local":"0x5"}` and nothing else. */
static int
local_of(cursor_t *in, event_t *event)
{
    const char *key;
    size_t length;
    if (!take(in, '{'))
        return 0;
    blanks(in);
    if (!plain_string(in, &key, &length) || length != 5 || memcmp(key, "local", 5) != 0 || !take(in, ':'))
        return 0;
    blanks(in);
    return plain_string(in, &event->local.text, &event->local.length) && take(in, '}');
}

/* An event. Whether it is plain. */
static int
event_of(cursor_t *in, event_t *event)
{
    memset(event, 0, sizeof *event);
    if (!take(in, '{'))
        return 0;
    if (take(in, '}'))
        return 1;
    do {
        const char *key, *text;
        size_t length, text_length;
        uint32_t bit = 0;
        blanks(in);
        if (!plain_string(in, &key, &length) || !take(in, ':'))
            return 0;
        blanks(in);
        if (IS(key, length, "ph"))
            bit = PH;
        else if (IS(key, length, "ts"))
            bit = TS;
        else if (IS(key, length, "dur"))
            bit = DUR;
        else if (IS(key, length, "tid"))
            bit = TID;
        else if (IS(key, length, "args"))
            bit = ARGS;
        else if (IS(key, length, "id2"))
            bit = LOCAL;
        if (event->has & bit)
            return 0;
        event->has |= bit;
        int plain;
        switch (bit) {
        case PH:
            plain = plain_string(in, &text, &text_length);
            event->phase = plain && text_length == 1 ? *text : ' ';
            break;
        case TS:
            plain = time_of(in, &event->ts);
            break;
        case DUR:
            plain = time_of(in, &event->dur);
            break;
        case TID:
            plain = whole_number(in, &event->tid);
            break;
        case ARGS:
            plain = arguments_of(in, event);
            break;
        case LOCAL:
            plain = local_of(in, event);
            break;
        default:
            plain = skip_value(in, 0);
        }
        if (!plain)
            return 0;
    } while (take(in, ','));
    return take(in, '}');
}

/* ------------------------------------------------------------------ the reader */

/* A span that may lie around those that come next on its lane. */
typedef struct {
    int64_t end_ns, span_id, root_id;
} open_t;

typedef struct {
    open_t *open; /* outermost first */
    uint32_t count;
    size_t room;
} lane_t;

typedef struct {
    PyObject_HEAD
    PyObject *spans, *intervals, *rows; /* those of the twin: a list, and two dicts */
    PyObject *sites;                    /* a tuple */
    PyObject *make_row;
    int64_t base_ns;
    reading_t reading;
    heap_t kept; /* the text of attributes */
    table_t owners; /* span id -> its place in `spans`, once device intervals have come */
    Py_ssize_t owners_of;
    int direct; /* whether an interval is given to its span at once */
    int nests;  /* whether a slice without a parent has that around it */
    table_t lane_of; /* tid -> place in `lanes` */
    lane_t *lanes;
    uint32_t lane_count;
    size_t lane_room;
} Reader;

/* The lane of a tid, NULL with an error. */
static lane_t *
lane_at(Reader *self, int64_t tid)
{
    if (self->lane_of.keys == NULL && table_make(&self->lane_of, 16) < 0)
        return (lane_t *)PyErr_NoMemory();
    uint32_t *cell = table_cell(&self->lane_of, tid);
    if (cell == NULL)
        return (lane_t *)PyErr_NoMemory();
    if (*cell == NOWHERE) {
        lane_t *larger = grown(self->lanes, &self->lane_room, self->lane_count, sizeof *larger, 16);
        if (larger == NULL) {
            table_drop(&self->lane_of, (size_t)(cell - self->lane_of.values));
            return NULL;
        }
        self->lanes = larger;
        self->lanes[self->lane_count] = (lane_t){0};
        *cell = self->lane_count++;
    }
    return &self->lanes[*cell];
}

/* The innermost slice of a lane that is not over, NULL where there is none. Starts must not fall. */
static const open_t *
around(lane_t *lane, int64_t start_ns)
{
    while (lane->count > 0 && lane->open[lane->count - 1].end_ns <= start_ns)
        lane->count--;
    return lane->count > 0 ? &lane->open[lane->count - 1] : NULL;
}

/* 0, or -1 with an error. */
static int
open_on(lane_t *lane, open_t open)
{
    open_t *larger = grown(lane->open, &lane->room, lane->count, sizeof *larger, 4);
    if (larger == NULL)
        return -1;
    lane->open = larger;
    lane->open[lane->count++] = open;
    return 0;
}

/* Take a device interval: 1, 0 where it is not plain, -1 with an error. */
static int
add_interval(Reader *self, event_t *event, int64_t start_ns, int64_t end_ns)
{
    if (!(event->has & DEVICE) || !(event->has & (STREAM | ENCLOSING)) || event->place < 0)
        return 0;
    Interval *interval = PyObject_New(Interval, interval_type);
    if (interval == NULL)
        return -1;
    interval->device = event->device;
    interval->stream = event->has & STREAM ? event->stream : event->enclosing;
    interval->start_ns = start_ns;
    interval->end_ns = end_ns;
    interval->uncertainty_ns = event->has & UNCERTAINTY ? event->uncertainty_ns : 0;
    interval->label = NULL;
    int64_t place = event->has & PLACE ? event->place : 0;
    int done = -1;
    if (event->has & LABEL && !(event->label.length == 9 && memcmp(event->label.text, "exclusive", 9) == 0)) {
        interval->label = shared_text(&event->label);
        if (interval->label == NULL)
            goto end;
    }
    int listed = 0; /* whether one of its span stands among those of the twin: that came before it, and may have its place */
    if (self->direct && PyDict_GET_SIZE(self->intervals) > 0) {
        PyObject *key = PyLong_FromLongLong(event->owner);
        listed = key == NULL ? -1 : PyDict_Contains(self->intervals, key);
        Py_XDECREF(key);
        if (listed < 0)
            goto end;
    }
    if (self->direct && (self->owners.keys == NULL || self->owners_of != PyList_GET_SIZE(self->spans))) {
        /* Spans come before the intervals in a file: the table is made once. If not, or if two spans have one id, all
         * intervals are handed out at the end. */
        Py_ssize_t count = PyList_GET_SIZE(self->spans);
        self->direct = self->owners.keys == NULL && count < NOWHERE;
        if (self->direct && table_make(&self->owners, (size_t)count) < 0) {
            PyErr_NoMemory();
            goto end;
        }
        self->owners_of = self->direct ? count : self->owners_of;
        for (Py_ssize_t i = 0; self->direct && i < count; i++) {
            PyObject *span = PyList_GET_ITEM(self->spans, i);
            uint32_t *cell = Py_IS_TYPE(span, span_type) ? table_cell(&self->owners, ((Span *)span)->span_id) : NULL;
            self->direct = cell != NULL && *cell == NOWHERE;
            if (self->direct)
                *cell = (uint32_t)i;
        }
    }
    if (self->direct && !listed) {
        uint32_t at = table_get(&self->owners, event->owner);
        Span *span = at == NOWHERE ? NULL : (Span *)PyList_GET_ITEM(self->spans, (Py_ssize_t)at);
        Py_ssize_t held = span == NULL || span->device == NULL ? 0 : PyTuple_GET_SIZE(span->device);
        if (span != NULL && place == held && held < 64) {
            PyObject *more = PyTuple_New(held + 1);
            if (more == NULL)
                goto end;
            for (Py_ssize_t i = 0; i < held; i++)
                PyTuple_SET_ITEM(more, i, Py_NewRef(PyTuple_GET_ITEM(span->device, i)));
            PyTuple_SET_ITEM(more, held, Py_NewRef((PyObject *)interval));
            PyObject_GC_UnTrack(more); /* no interval leads back to it */
            Py_XSETREF(span->device, more);
            done = 1;
            goto end;
        }
        self->direct = span == NULL;
    }
    PyObject *owner = PyLong_FromLongLong(event->owner), *item = NULL;
    PyObject *empty = owner == NULL ? NULL : PyList_New(0);
    PyObject *known = empty == NULL ? NULL : PyDict_SetDefault(self->intervals, owner, empty); /* borrowed */
    if (known != NULL)
        item = Py_BuildValue("(LO)", (long long)place, (PyObject *)interval);
    if (item != NULL)
        done = PyList_Append(known, item) < 0 ? -1 : 1;
    Py_XDECREF(owner);
    Py_XDECREF(empty);
    Py_XDECREF(item);
end:
    Py_DECREF(interval);
    return done;
}

static PyObject *
local_text(event_t *event)
{
    return PyUnicode_DecodeUTF8(event->local.text, (Py_ssize_t)event->local.length, NULL);
}

/* The row of an async lane, borrowed; NULL where there is none, with or without an error. */
static PyObject *
row_of(Reader *self, PyObject *local)
{
    PyObject *row = local == NULL ? NULL : PyDict_GetItemWithError(self->rows, local);
    if (row != NULL && (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 4 || !PyList_Check(PyTuple_GET_ITEM(row, 3)))) {
        PyErr_SetString(PyExc_TypeError, "a row is a tuple of four");
        return NULL;
    }
    return row;
}

static int64_t
number_in(PyObject *row, int at)
{
    return PyLong_AsLongLong(PyTuple_GET_ITEM(row, at));
}

/* Take a span: 1, 0 where it is not plain, -1 with an error. */
static int
add_span(Reader *self, event_t *event, int64_t start_ns, int64_t end_ns, int is_open)
{
    if (!(event->has & SITE) || !(event->has & ID) || event->site < 0 || event->site >= PyTuple_GET_SIZE(self->sites))
        return 0;
    int64_t parent_id = event->has & PARENT ? event->parent : 0, task_id = 0;
    int64_t root_id = parent_id != 0 ? parent_id : event->id;
    PyObject *local = NULL, *row = NULL, *error = NULL;
    int done = -1;
    lane_t *lane = NULL;
    if (self->nests && !is_open) {
        lane = lane_at(self, event->tid);
        if (lane == NULL)
            return -1;
        const open_t *above = around(lane, start_ns);
        if (above != NULL && !(event->has & PARENT)) {
            parent_id = above->span_id;
            root_id = above->root_id;
        }
    }
    if (is_open) {
        if (!(event->has & LOCAL))
            return 0;
        local = local_text(event);
        row = row_of(self, local);
        if (row == NULL && PyErr_Occurred())
            goto end;
        if (row != NULL && number_in(row, 0) != event->id) {
            root_id = number_in(row, 1);
            task_id = number_in(row, 2);
            Py_ssize_t last = PyList_GET_SIZE(PyTuple_GET_ITEM(row, 3)) - 1;
            PyObject *item = last < 0 ? NULL : PyList_GET_ITEM(PyTuple_GET_ITEM(row, 3), last);
            if (self->nests && item != NULL && !(event->has & PARENT)) {
                if (!PyTuple_CheckExact(item) || !Py_IS_TYPE(PyTuple_GET_ITEM(item, 0), span_type)) {
                    done = 0;
                    row = NULL;
                    goto end;
                }
                parent_id = ((Span *)PyTuple_GET_ITEM(item, 0))->span_id;
            }
        } else
            row = NULL;
        if (PyErr_Occurred())
            goto end;
        Py_XINCREF(row);
    }
    if (event->has & ATTRIBUTES && !has_room(&self->kept, &event->attributes)) {
        done = 0;
        goto end;
    }
    if (event->has & ERROR && (error = shared_text(&event->error)) == NULL)
        goto end;
    Span *span = PyObject_New(Span, span_type);
    if (span == NULL)
        goto end;
    int64_t total_ns = end_ns - start_ns;
    span->site = Py_NewRef(PyTuple_GET_ITEM(self->sites, event->site));
    span->span_id = event->id;
    span->parent_id = parent_id;
    span->root_id = event->has & ROOT ? event->root : root_id;
    span->thread_id = event->has & THREAD ? event->thread : event->tid;
    span->task_id = event->has & TASK ? event->task : task_id;
    span->start_ns = start_ns;
    span->end_ns = end_ns;
    span->active_ns = event->has & ACTIVE ? event->active_ns : total_ns;
    span->self_ns = event->has & SELF ? event->self_ns : total_ns;
    span->error = error;
    span->attributes = span->device = span->remote = NULL;
    span->attributes_at = 0;
    span->clipped = event->has & CLIPPED ? (char)event->clipped : 0;
    error = NULL;
    done = PyList_Append(self->spans, (PyObject *)span) < 0 ? -1 : 1;
    if (done > 0 && event->has & ATTRIBUTES && event->attributes.length > 2)
        done = keep_attributes(&self->kept, &event->attributes, 0, span) < 0 ? -1 : 1;
    if (done > 0 && lane != NULL && open_on(lane, (open_t){end_ns, span->span_id, span->root_id}) < 0)
        done = -1;
    if (done > 0 && is_open) {
        if (row == NULL) {
            row = PyObject_CallFunction(self->make_row, "LLL[]", (long long)span->span_id, (long long)span->root_id,
                                        (long long)span->task_id);
            if (row == NULL || PyDict_SetItem(self->rows, local, row) < 0)
                done = -1;
        }
        PyObject *item = done < 0 ? NULL
                                  : Py_BuildValue("(OOO)", (PyObject *)span, event->has & ACTIVE ? Py_False : Py_True,
                                                  event->has & SELF ? Py_False : Py_True);
        if (item == NULL || PyList_Append(PyTuple_GET_ITEM(row, 3), item) < 0)
            done = -1;
        Py_XDECREF(item);
    }
    Py_DECREF(span);
end:
    Py_XDECREF(row);
    Py_XDECREF(local);
    Py_XDECREF(error);
    return done;
}

/* End the innermost open span of an async lane: 1, 0 where it is not plain, -1 with an error. */
static int
end_span(Reader *self, event_t *event, int64_t end_ns)
{
    if (!(event->has & LOCAL))
        return 0;
    PyObject *local = local_text(event), *row = row_of(self, local);
    Py_XDECREF(local);
    if (row == NULL)
        return PyErr_Occurred() ? -1 : 1;
    PyObject *open = PyTuple_GET_ITEM(row, 3);
    Py_ssize_t last = PyList_GET_SIZE(open) - 1;
    if (last < 0)
        return 1;
    PyObject *item = PyList_GET_ITEM(open, last);
    if (!PyTuple_CheckExact(item) || PyTuple_GET_SIZE(item) != 3 || !Py_IS_TYPE(PyTuple_GET_ITEM(item, 0), span_type))
        return 0;
    Span *span = (Span *)PyTuple_GET_ITEM(item, 0);
    if (end_ns < span->start_ns)
        return 0;
    span->end_ns = end_ns;
    if (PyTuple_GET_ITEM(item, 1) == Py_True)
        span->active_ns = end_ns - span->start_ns;
    if (PyTuple_GET_ITEM(item, 2) == Py_True)
        span->self_ns = end_ns - span->start_ns;
    return PyList_SetSlice(open, last, last + 1, NULL) < 0 ? -1 : 1;
}

/* Take an event: 1, 0 where it is not plain, -1 with an error. */
static int
add_event(Reader *self, event_t *event)
{
    char phase = event->has & PH ? event->phase : ' ';
    if (phase == 'C')
        return 0;
    if (phase != 'X' && phase != 'b' && phase != 'e')
        return 1; /* nothing that a trace is read from */
    int64_t start_ns, end_ns;
    if (!(event->has & TS) || __builtin_add_overflow(self->base_ns, event->ts, &start_ns))
        return 0;
    if (phase == 'e')
        return end_span(self, event, start_ns);
    if (!(event->has & ARGS))
        return 0;
    int is_open = phase == 'b' && !(event->has & TOTAL);
    int64_t total_ns = is_open ? 0 : phase == 'X' ? event->dur : event->total_ns;
    if ((phase == 'X' && !(event->has & DUR)) || total_ns < 0 || __builtin_add_overflow(start_ns, total_ns, &end_ns))
        return 0;
    if (event->has & OWNER)
        return is_open ? 0 : add_interval(self, event, start_ns, end_ns);
    if (!(event->has & TID))
        return 0;
    return add_span(self, event, start_ns, end_ns, is_open);
}

static int
take_event(void *reader, cursor_t *in)
{
    event_t event;
    return event_of(in, &event) ? add_event(reader, &event) : 0;
}

/* scan(text, at): take the events that begin at the place, as many as are plain; the place after the last of them. */
static PyObject *
Reader_scan(Reader *self, PyObject *args)
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
Reader_dealloc(Reader *self)
{
    table_free(&self->owners);
    table_free(&self->lane_of);
    for (uint32_t i = 0; i < self->lane_count; i++)
        PyMem_RawFree(self->lanes[i].open);
    PyMem_RawFree(self->lanes);
    Py_XDECREF(self->spans);
    Py_XDECREF(self->intervals);
    Py_XDECREF(self->rows);
    Py_XDECREF(self->sites);
    Py_XDECREF(self->make_row);
    Py_XDECREF(self->reading.text);
    PyMem_RawFree(self->kept.items);
    PyObject_Free(self);
}

/* around(tid, start_ns): id and tree of the slice in which one lies that starts on this lane now, or None. */
static PyObject *
Reader_around(Reader *self, PyObject *args)
{
    long long tid, start_ns;
    if (!PyArg_ParseTuple(args, "LL:around", &tid, &start_ns))
        return NULL;
    lane_t *lane = lane_at(self, tid);
    if (lane == NULL)
        return NULL;
    const open_t *above = around(lane, start_ns);
    if (above == NULL)
        Py_RETURN_NONE;
    return Py_BuildValue("(LL)", (long long)above->span_id, (long long)above->root_id);
}

/* open(tid, end_ns, span_id, root_id): a slice begins on this lane. */
static PyObject *
Reader_open(Reader *self, PyObject *args)
{
    long long tid, end_ns, span_id, root_id;
    if (!PyArg_ParseTuple(args, "LLLL:open", &tid, &end_ns, &span_id, &root_id))
        return NULL;
    lane_t *lane = lane_at(self, tid);
    if (lane == NULL || open_on(lane, (open_t){end_ns, span_id, root_id}) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Reader(spans, intervals, rows, make_row, sites, base_ns, nests) */
static PyObject *
Reader_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named))
{
    PyObject *spans, *intervals, *rows, *make_row, *sites;
    long long base_ns;
    int nests;
    if (!PyArg_ParseTuple(args, "O!O!O!OOLp:Reader", &PyList_Type, &spans, &PyDict_Type, &intervals, &PyDict_Type, &rows,
                          &make_row, &sites, &base_ns, &nests))
        return NULL;
    Reader *self = PyObject_New(Reader, type);
    if (self == NULL)
        return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->spans = Py_NewRef(spans);
    self->intervals = Py_NewRef(intervals);
    self->rows = Py_NewRef(rows);
    self->make_row = Py_NewRef(make_row);
    self->base_ns = base_ns;
    self->nests = nests;
    self->direct = 1;
    self->sites = PySequence_Tuple(sites);
    if (self->sites == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef Reader_methods[] = {
    {"scan", (PyCFunction)Reader_scan, METH_VARARGS, "Take the plain events from a place on; the place after them."},
    {"around", (PyCFunction)Reader_around, METH_VARARGS, "The slice in which one lies that starts on a lane now."},
    {"open", (PyCFunction)Reader_open, METH_VARARGS, "A slice begins on a lane."},
    {NULL},
};

static PyMemberDef Reader_members[] = {
    {"served", T_PYSSIZET, offsetof(Reader, owners_of), READONLY, "How many spans may have been given intervals at once."},
    {NULL},
};

static PyTypeObject Reader_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instrument.native._reading.Reader",
    .tp_basicsize = sizeof(Reader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Reads the plain events of a trace that `dump` wrote.",
    .tp_new = Reader_new,
    .tp_dealloc = (destructor)Reader_dealloc,
    .tp_methods = Reader_methods,
    .tp_members = Reader_members,
};

/* ------------------------------------------------------------------ allocations */

#define IN_A_ROW 7
#define ROWS_AT_ONCE 512

/* Pass over blanks from a place; the place after them. */
#define PASS_BLANKS(kind, text, at, end)                                                                               \
    while (at < end && (PyUnicode_READ(kind, text, at) == ' ' || PyUnicode_READ(kind, text, at) == '\n' ||            \
                        PyUnicode_READ(kind, text, at) == '\r' || PyUnicode_READ(kind, text, at) == '\t'))            \
    at++

/* A list of seven whole numbers of at most 18 digits. The place after it, -1 where there is none. */
static inline __attribute__((always_inline)) Py_ssize_t
row_at(int kind, const void *text, Py_ssize_t at, Py_ssize_t end, int64_t *row)
{
    PASS_BLANKS(kind, text, at, end);
    if (at >= end || PyUnicode_READ(kind, text, at) != '[')
        return -1;
    for (int number = 0; number < IN_A_ROW; number++) {
        at++;
        PASS_BLANKS(kind, text, at, end);
        int negative = at < end && PyUnicode_READ(kind, text, at) == '-';
        at += negative;
        Py_ssize_t first = at;
        int64_t found = 0;
        for (; at < end && at - first < MOST_DIGITS; at++) {
            Py_UCS4 digit = PyUnicode_READ(kind, text, at) - (Py_UCS4)'0';
            if (digit > 9)
                break;
            found = found * 10 + (int64_t)digit;
        }
        if (at == first || (at - first > 1 && PyUnicode_READ(kind, text, first) == '0'))
            return -1;
        PASS_BLANKS(kind, text, at, end);
        if (at >= end || PyUnicode_READ(kind, text, at) != (number < IN_A_ROW - 1 ? ',' : ']'))
            return -1;
        row[number] = negative ? -found : found;
    }
    return at + 1;
}

/* Add rows to those there are. 0, or -1 with an error. */
static int
add_rows(PyObject *rows, int64_t (*found)[IN_A_ROW], size_t count)
{
    Py_ssize_t before = PyByteArray_GET_SIZE(rows), more = (Py_ssize_t)(count * sizeof *found);
    if (count > 0 && PyByteArray_Resize(rows, before + more) < 0)
        return -1;
    memcpy(PyByteArray_AS_STRING(rows) + before, found, (size_t)more);
    return 0;
}

/* Take the lists from a place on, as many as are plain; the place after the last of them, -1 with an error. */
static inline __attribute__((always_inline)) Py_ssize_t
rows_from(int kind, const void *text, Py_ssize_t at, Py_ssize_t end, PyObject *rows)
{
    int64_t found[ROWS_AT_ONCE][IN_A_ROW];
    size_t count = 0;
    Py_ssize_t after = at;
    while ((at = row_at(kind, text, at, end, found[count])) >= 0) {
        after = at;
        if (++count == ROWS_AT_ONCE) {
            if (add_rows(rows, found, count) < 0)
                return -1;
            count = 0;
        }
        PASS_BLANKS(kind, text, at, end);
        if (at >= end || PyUnicode_READ(kind, text, at) != ',')
            break;
        at++;
    }
    return add_rows(rows, found, count) < 0 ? -1 : after;
}

/* allocations(text, at, rows): the twin of what `take` in `allocations.py` does for one list, for all plain ones that come
 * next: add them to the rows, and return the place after the last of them. */
static PyObject *
allocations(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *text, *rows;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "UnO!:allocations", &text, &at, &PyByteArray_Type, &rows))
        return NULL;
    Py_ssize_t end = PyUnicode_GET_LENGTH(text), after;
    if (at < 0 || at > end) {
        PyErr_SetString(PyExc_IndexError, "no place in the text");
        return NULL;
    }
    /* Named, so that each kind of text gets a loop of its own. */
    switch (PyUnicode_KIND(text)) {
    case PyUnicode_1BYTE_KIND:
        after = rows_from(PyUnicode_1BYTE_KIND, PyUnicode_DATA(text), at, end, rows);
        break;
    case PyUnicode_2BYTE_KIND:
        after = rows_from(PyUnicode_2BYTE_KIND, PyUnicode_DATA(text), at, end, rows);
        break;
    default:
        after = rows_from(PyUnicode_4BYTE_KIND, PyUnicode_DATA(text), at, end, rows);
    }
    return after < 0 ? NULL : PyLong_FromSsize_t(after);
}

static PyMethodDef functions[] = {
    {"allocations", allocations, METH_VARARGS, "Take the plain allocations from a place on; the place after them."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._reading",
    .m_doc = "Events into spans, in C. See `instrument.chrome.reading`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__reading(void)
{
    text_exclusive = PyUnicode_InternFromString("exclusive");
    if (text_exclusive == NULL || import_spans(&span_type, &interval_type) < 0 || PyType_Ready(&Reader_Type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddObjectRef(module, "Reader", (PyObject *)&Reader_Type) < 0)
        Py_CLEAR(module);
    return module;
}
