/* Cold: device times of spans, and the calls of a device's driver that give them. A part of `_recorder.c`. */

static inline int is_timed_on_device(const Core *core, const frame_t *frame)
{
    return core->times_devices && (frame->node->is_device || core->watches_all);
}

/* The Python code that runs here is ours. A signal handler may interrupt it: -1 with the host's exception. `facts`
 * replaces the span's attributes for the timer, or is NULL. */
static int begin_on_device(Core *core, frame_t *frame, PyObject *facts)
{
    PyObject *begin = Py_NewRef(core->begin_device);
    PyObject *attributes = facts != NULL ? facts : frame->attributes;
    PyObject *args[] = {frame->node->site, attributes != NULL ? attributes : Py_None,
                        PyLong_FromUnsignedLongLong(frame->span_id)};
    PyObject *pair = args[2] == NULL ? NULL : PyObject_Vectorcall(begin, args, 3, NULL);
    Py_XDECREF(args[2]);
    Py_DECREF(begin);
    if (pair == Py_None)
        Py_CLEAR(pair);
    frame->pair = pair;
    return PyErr_Occurred() ? note_unless_hosts("device timer") : 0;
}

/* Call a method of a pair. An earlier exception stays. -1 with an exception of the host's that is raised here. */
static int tell_pair(PyObject *method, PyObject *const *args, size_t count)
{
    raised_t raised = take_raised();
    PyObject *none = PyObject_VectorcallMethod(method, args, count, NULL);
    Py_XDECREF(none);
    if (none == NULL && note_unless_hosts("device timer") < 0) {
        drop_raised(raised);
        return -1;
    }
    raise_again(raised);
    return 0;
}

/* Give the pair the id of its span, which has been stored. Takes the frame's reference. */
static int end_on_device(Ring *ring, frame_t *frame, int64_t end_ns)
{
    PyObject *pair = frame->pair;
    frame->pair = NULL;
    /* The device time of an inner call is within that of the outer call. */
    PyObject *args[] = {pair, (PyObject *)ring, PyLong_FromLongLong(frame->is_inner ? -1 : (int64_t)frame->node->index),
                        PyLong_FromUnsignedLongLong(frame->span_id), PyLong_FromLongLong(frame->start_ns),
                        PyLong_FromLongLong(end_ns < frame->start_ns ? frame->start_ns : end_ns)};
    int failed = 0;
    if (args[2] != NULL && args[3] != NULL && args[4] != NULL && args[5] != NULL)
        failed = tell_pair(str_end, args, 6);
    else
        PyErr_Clear(); /* for want of memory */
    if (failed) { /* perhaps before the method ran: call it again, or the pair would never end */
        raised_t raised = take_raised();
        if (tell_pair(str_end, args, 6) < 0)
            PyErr_Clear(); /* of two that handlers raised, the first */
        raise_again(raised);
    }
    for (int i = 2; i < 6; i++)
        Py_XDECREF(args[i]);
    Py_DECREF(pair);
    return failed;
}

/* The lowest value of a bucket. */
static inline int64_t bucket_start(uint32_t bucket)
{
    if (bucket < 128)
        return bucket;
    uint32_t exponent = (bucket >> 6) - 1;
    return (int64_t)(bucket - (exponent << 6)) << exponent;
}

/* Move a call that was counted with its host time to its longer elapsed time with the device's. The least elapsed time
 * is exact if it is another call's; else it is the begin of the lowest bucket. */
static PyObject *Core_count_device(Core *self, PyObject *args)
{
    Ring *ring;
    unsigned int index;
    long long host_ns, device_ns, elapsed_ns;
    if (!PyArg_ParseTuple(args, "O!ILLL:count_device", &RingType, &ring, &index, &host_ns, &device_ns, &elapsed_ns))
        return NULL;
    totals_t *totals = known_totals(&ring->totals, index);
    uint32_t from = bucket_of((uint64_t)host_ns);
    if (totals != NULL)
        count_waiting(self, totals);
    if (totals == NULL || host_ns < 0 || device_ns < 0 || elapsed_ns < host_ns || times_of(totals, from) == 0)
        Py_RETURN_FALSE;
    add_time(&self, &totals->device_ns, device_ns);
    if (elapsed_ns == host_ns)
        Py_RETURN_TRUE;
    add_time(&self, &totals->beyond_ns, elapsed_ns - host_ns);
    count_bucket(self, totals, bucket_of((uint64_t)elapsed_ns), 1);
    chunk_t *chunk = totals->chunks[from >> 6];
    if (chunk->low[from & 63]-- == 0)
        chunk->high[from & 63]--;
    if (elapsed_ns > totals->max_ns)
        totals->max_ns = elapsed_ns;
    if (bucket_of((uint64_t)totals->min_ns) == from) {
        uint32_t lowest = from;
        while (times_of(totals, lowest) == 0)
            lowest++;
        int64_t start_ns = bucket_start(lowest);
        if (start_ns > totals->min_ns)
            totals->min_ns = start_ns;
    }
    Py_RETURN_TRUE;
}

#define CAPTURED 1000000 /* no code of the driver's */

typedef int (*record_call)(void *event, void *stream);
typedef int (*capturing_call)(void *stream, int *status);
typedef int (*number_call)(void *stream, unsigned long long *number);

typedef struct {
    record_call record;
    capturing_call is_capturing;
    number_call number_of; /* or NULL, if the stream's number is not needed */
    void *event, *stream;
    unsigned long long number;
} mark_t;

/* Stream 0 is the default one and needs no query: its number is 0, and 1 is another handle of it. */
static int record_unless_captured(mark_t *mark)
{
    int status = 0;
    int error = mark->is_capturing(mark->stream, &status);
    if (error == 0 && status != 0)
        return CAPTURED;
    if (error == 0 && mark->number_of != NULL && (uintptr_t)mark->stream > 1)
        error = mark->number_of(mark->stream, &mark->number);
    return error == 0 ? mark->record(mark->event, mark->stream) : error;
}

/* Record an event on a stream through the driver's own functions, unless the stream is being captured into a graph.
 * Return the number of the stream if it is needed, else 0; below 0 the driver's error, or CAPTURED. The driver may wait
 * here, for room in a full queue or for a lock of a host function's thread, and a host function may wait for the GIL. A
 * caller that keeps the GIL (`releases` is 0) must know that there are no host functions. After a release another
 * thread may have the GIL, so it is released once for all three calls. */
static PyObject *mark(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    void *value[6];
    if (nargs != 6)
        return PyErr_Format(PyExc_TypeError,
                            "mark(cuEventRecord, cuStreamIsCapturing, cuStreamGetId or 0, releases, event, stream)");
    for (int i = 0; i < 6; i++) {
        value[i] = PyLong_AsVoidPtr(args[i]);
        if (value[i] == NULL && PyErr_Occurred())
            return NULL;
    }
    mark_t mark = {(record_call)value[0], (capturing_call)value[1], (number_call)value[2], value[4], value[5], 0};
    int error;
    if (value[3] != NULL) {
        Py_BEGIN_ALLOW_THREADS
        error = record_unless_captured(&mark);
        Py_END_ALLOW_THREADS
    }
    else
        error = record_unless_captured(&mark);
    return error != 0 ? PyLong_FromLong(-error) : PyLong_FromUnsignedLongLong(mark.number);
}

#define NOT_READY 600

/* The lead of the recorder's clock over the monotonic one in ns. */
static int64_t lead_of_clock(const Core *core)
{
    int64_t ticks = 0, now_ns = 0;
    if (!core->reads_ticks)
        return 0;
    read_both(&ticks, &now_ns);
    return ticks_as_ns(&core->ticks, ticks) - now_ns;
}

/* Record an event on an otherwise unused stream, and query it until it has happened or a time-out. Return the times of
 * the last query before and of the one that saw it, to compare with the device's clock. The GIL is released, or a
 * thread that computes in Python would let milliseconds pass between the two. */
static PyObject *Core_read_event(Core *self, PyObject *args)
{
    Py_ssize_t record_address, query_address, event, stream;
    long long limit_ns;
    if (!PyArg_ParseTuple(args, "nnnnL:read_event", &record_address, &query_address, &event, &stream, &limit_ns))
        return NULL;
    int64_t before_ns, after_ns;
    int error;
    Py_BEGIN_ALLOW_THREADS
    before_ns = read_monotonic();
    error = ((record_call)record_address)((void *)event, (void *)stream);
    do {
        error = error != 0 && error != NOT_READY ? error : ((int (*)(void *))query_address)((void *)event);
        after_ns = read_monotonic();
    } while (error == NOT_READY && after_ns - before_ns < limit_ns);
    Py_END_ALLOW_THREADS
    int64_t lead_ns = lead_of_clock(self);
    return Py_BuildValue("(iLL)", error, (long long)(before_ns + lead_ns), (long long)(after_ns + lead_ns));
}

typedef struct {
    void *begin, *end;
    float device_ms, offset_ms;
    int error;
} measured_t;

/* Query pairs of events in the order of their ends, up to the first that has not happened: the length of each, and its
 * begin after the anchor. The GIL is released once for all of them: in a busy service, a thread that must get it back
 * after each query gets few answers. */
static PyObject *measure(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t query_address, elapsed_address, anchor_address;
    PyObject *events;
    if (!PyArg_ParseTuple(args, "nnnO!:measure", &query_address, &elapsed_address, &anchor_address, &PyList_Type,
                          &events))
        return NULL;
    int (*query)(void *) = (int (*)(void *))query_address;
    int (*elapsed)(float *, void *, void *) = (int (*)(float *, void *, void *))elapsed_address;
    void *anchor = (void *)anchor_address;
    Py_ssize_t pairs = PyList_GET_SIZE(events) / 2, done = 0;
    measured_t *found = PyMem_Calloc((size_t)pairs + 1, sizeof(measured_t));
    if (found == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < pairs; i++) {
        found[i].begin = PyLong_AsVoidPtr(PyList_GET_ITEM(events, 2 * i));
        found[i].end = PyLong_AsVoidPtr(PyList_GET_ITEM(events, 2 * i + 1));
    }
    if (PyErr_Occurred()) {
        PyMem_Free(found);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (; done < pairs; done++) {
        measured_t *pair = &found[done];
        pair->error = query(pair->end);
        if (pair->error == NOT_READY)
            break;
        if (pair->error == 0)
            pair->error = elapsed(&pair->device_ms, pair->begin, pair->end);
        if (pair->error == 0 && anchor != NULL)
            pair->error = elapsed(&pair->offset_ms, anchor, pair->begin);
    }
    Py_END_ALLOW_THREADS
    PyObject *answers = PyList_New(done);
    for (Py_ssize_t i = 0; answers != NULL && i < done; i++) {
        PyObject *answer = Py_BuildValue("(iff)", found[i].error, found[i].device_ms, found[i].offset_ms);
        if (answer == NULL)
            Py_CLEAR(answers);
        else
            PyList_SET_ITEM(answers, i, answer);
    }
    PyMem_Free(found);
    return answers;
}
