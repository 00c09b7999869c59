/* Cold: device times of spans, and the calls of the device's driver that measure them. A part of `_recorder.c`. */

static inline int is_timed_on_device(const Core *core, const frame_t *frame)
{
    return core->times_devices && (frame->node->is_device || core->watches_all);
}

/* Begin to time a span on its device. `facts` replaces the span's attributes for the timer, or is NULL. The Python code
 * that runs here is ours. Return -1 with an exception that a signal handler of the service raised in it. */
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
    return PyErr_Occurred() ? note_unless_of_service("device timer") : 0;
}

/* Take the result of a pair's method, and raise the earlier exception again. Return -1 if the method raised an exception
 * of the service. Then that one is raised. */
static int end_pair_call(PyObject *none, raised_t raised)
{
    Py_XDECREF(none);
    if (none == NULL && note_unless_of_service("device timer") < 0) {
        drop_raised(raised);
        return -1;
    }
    raise_again(raised);
    return 0;
}

/* Call a method of a span's pair without arguments. Returns as `end_pair_call`. */
static SELDOM int call_pair(const frame_t *frame, PyObject *method)
{
    raised_t raised = take_raised();
    return end_pair_call(PyObject_CallMethodNoArgs(frame->pair, method), raised);
}

/* End the pair of a span whose row has been stored. Takes the frame's reference to the pair. Return -1 with an
 * exception of the service set. */
static int end_on_device(Ring *ring, frame_t *frame, int64_t end_ns)
{
    PyObject *pair = frame->pair;
    frame->pair = NULL;
    int failed = 0;
    for (int tries = 0; tries <= failed; tries++) { /* again after a signal, or the pair might never end */
        raised_t raised = take_raised();
        /* The device time of the outer call includes that of an inner call. */
        failed |= end_pair_call(PyObject_CallMethod(pair, "end", "OLKLL", ring,
                                                    frame->is_inner ? -1 : (long long)frame->node->index, frame->span_id,
                                                    frame->start_ns, end_ns < frame->start_ns ? frame->start_ns : end_ns),
                                raised) < 0;
    }
    Py_DECREF(pair);
    return -failed;
}

/* Return the lowest value of a bucket. */
static inline int64_t bucket_start(uint32_t bucket)
{
    if (bucket < 128)
        return bucket;
    uint32_t exponent = (bucket >> 6) - 1;
    return (int64_t)(bucket - (exponent << 6)) << exponent;
}

/* Add the device time of a call that was counted with its host time. If the elapsed time is longer, move the call to
 * that bucket. The least elapsed time is exact if it is that of another call, else it is the lower end of its
 * bucket. */
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

#define CAPTURED 1000000 /* not an error code of the driver */

typedef int (*record_call)(void *event, void *stream);
typedef int (*capturing_call)(void *stream, int *status);
typedef int (*number_call)(void *stream, unsigned long long *number);

/* Record an event on a stream by the driver's own functions, unless the stream is being captured into a graph. Return
 * the stream's number if it is needed, else 0. Return a driver's error, or CAPTURED, as a negative number. The driver
 * may wait here for room in its queue, or for a host function, which may wait for the GIL. So a caller that keeps the
 * GIL (`releases` is 0) must know that there are none. The GIL is released once for all three calls. */
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
    capturing_call is_capturing = (capturing_call)value[1];
    number_call number_of = (number_call)value[2];
    void *event = value[4], *stream = value[5];
    unsigned long long number = 0; /* the number of the default stream, which is stream 0 or 1 */
    int status = 0;
    PyThreadState *released = value[3] != NULL ? PyEval_SaveThread() : NULL;
    int error = is_capturing(stream, &status);
    if (error == 0 && status != 0)
        error = CAPTURED;
    if (error == 0 && number_of != NULL && (uintptr_t)stream > 1)
        error = number_of(stream, &number);
    if (error == 0)
        error = ((record_call)value[0])(event, stream);
    if (released != NULL)
        PyEval_RestoreThread(released);
    return error != 0 ? PyLong_FromLong(-error) : PyLong_FromUnsignedLongLong(number);
}

#define NOT_READY 600

/* Record an event on an unused stream, and query it until it has happened or the time is up. Return the times before
 * the event was recorded and after the last query, to compare them with the device's clock. The GIL is released: else a
 * thread that computes in Python could delay the queries by milliseconds. */
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
    int64_t ticks = 0, now_ns = 0, lead_ns = 0; /* of the recorder's clock over the monotonic one */
    if (self->reads_ticks) {
        read_both(&ticks, &now_ns);
        lead_ns = ticks_as_ns(&self->ticks, ticks) - now_ns;
    }
    return Py_BuildValue("(iLL)", error, (long long)(before_ns + lead_ns), (long long)(after_ns + lead_ns));
}

typedef struct {
    void *begin, *end;
    float device_ms, offset_ms;
    int error;
} measured_t;

/* Query pairs of events in the order of their ends, up to the first that has not happened. Return for each the driver's
 * error, its length, and the time from the anchor to its begin. The GIL is released once for all: in a busy service, a
 * thread that must take it back after each query gets few answers. */
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
    Py_ssize_t pairs = PyList_GET_SIZE(events) / 2, count = 0;
    measured_t *measured = PyMem_Calloc((size_t)pairs + 1, sizeof(measured_t));
    if (measured == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < pairs; i++) {
        measured[i].begin = PyLong_AsVoidPtr(PyList_GET_ITEM(events, 2 * i));
        measured[i].end = PyLong_AsVoidPtr(PyList_GET_ITEM(events, 2 * i + 1));
    }
    if (PyErr_Occurred()) {
        PyMem_Free(measured);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (; count < pairs; count++) {
        measured_t *pair = &measured[count];
        pair->error = query(pair->end);
        if (pair->error == NOT_READY)
            break;
        if (pair->error == 0)
            pair->error = elapsed(&pair->device_ms, pair->begin, pair->end);
        if (pair->error == 0 && anchor != NULL)
            pair->error = elapsed(&pair->offset_ms, anchor, pair->begin);
    }
    Py_END_ALLOW_THREADS
    PyObject *answers = PyList_New(count);
    for (Py_ssize_t i = 0; answers != NULL && i < count; i++)
        if (PyList_SetItem(answers, i, Py_BuildValue("(iff)", measured[i].error, measured[i].device_ms,
                                                     measured[i].offset_ms)) < 0 || PyErr_Occurred())
            Py_CLEAR(answers);
    PyMem_Free(measured);
    return answers;
}
