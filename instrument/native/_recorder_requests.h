/* Hot: spans that begin and end by separate calls, such as requests. Cold: work that is submitted to another thread. It
 * runs in the request of the code that submits it, but in its own thread's context, as without us: only the recorder's
 * variable is changed meanwhile. A part of `_recorder.c`. */

static PyObject *Core_open(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 1 || nargs > 3)
        return PyErr_Format(PyExc_TypeError, "open(site, attributes=None, state=1)");
    long state = nargs > 2 ? PyLong_AsLong(args[2]) : OPEN;
    if (state == -1 && PyErr_Occurred())
        return NULL;
    PyObject *attributes = nargs > 1 && args[1] != Py_None ? args[1] : NULL;
    Frame *frame = args[0] == Py_None ? NULL : open_frame(self, args[0], NULL, attributes, (char)state);
    if (frame != NULL)
        return (PyObject *)frame;
    return count_loss(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Make a dict that the caller gives away the attributes of an open span. Keep other names that the span has, but not
 * the span of another tracer. Return -1 with an exception of the service set. */
static int take_attributes(Core *core, Frame *self, PyObject *attributes)
{
    if (self->frame->state == CLOSED)
        return 0;
    PyObject *before = self->frame->attributes, *name, *value;
    if (before == attributes)
        return 0;
    self->frame->attributes = Py_NewRef(attributes);
    int failed = 0;
    for (Py_ssize_t at = 0; !failed && before != NULL && PyDict_Check(before) &&
                            PyDict_Next(before, &at, &name, &value);) {
        int is_set = name == core->remote_key ? 0 : PyDict_Contains(attributes, name);
        failed = is_set < 0 || (is_set == 0 && put_attribute(core, attributes, name, value) < 0);
    }
    Py_XDECREF(before);
    if (failed)
        count_event(core, NO_DETAILS);
    return failed ? clear_fault() : 0;
}

static PyObject *Core_close(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs > 0 && args[0] == Py_None) /* the begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs < 1 || nargs > 4 || Py_TYPE(args[0]) != &FrameType)
        return PyErr_Format(PyExc_TypeError, "close(frame, error=None, anywhere=False, attributes=None)");
    if (nargs > 3 && PyDict_Check(args[3]) && take_attributes(self, (Frame *)args[0], args[3]) < 0)
        return NULL;
    int failed = close_frame(self, (Frame *)args[0], nargs > 1 ? args[1] : NULL, nargs > 2 && args[2] == Py_True, 0);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Note the value of a Content-Length header, bytes or text, if it is a number. Return -1 with an exception set. */
static int put_length(PyObject *facts, PyObject *header)
{
    const char *digits = PyBytes_Check(header) ? PyBytes_AS_STRING(header)
                         : PyUnicode_Check(header) && PyUnicode_IS_ASCII(header) ? (const char *)PyUnicode_1BYTE_DATA(header)
                                                                                 : "";
    char *end;
    errno = 0;
    long long length = strtoll(digits, &end, 10);
    if (*digits < '0' || *digits > '9' || *end != '\0' || errno != 0)
        return 0;
    return put_fact(facts, str_request_size, PyLong_FromLongLong(length)) ? -1 : 0;
}

static PyObject *Core_open_request(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !PyDict_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "open_request(site, attributes, caller, length)");
    if ((args[2] != Py_None && PyDict_SetItem(args[1], self->remote_key, args[2]) < 0) ||
        (args[3] != Py_None && put_length(args[1], args[3]) < 0))
        return NULL;
    return Core_open(self, args, 2);
}

static PyObject *Core_close_request(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs > 0 && args[0] == Py_None) /* the begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs != 5 || Py_TYPE(args[0]) != &FrameType || !PyDict_Check(args[1]) || !PyLong_Check(args[2]) ||
        !PyLong_Check(args[3]))
        return PyErr_Format(PyExc_TypeError, "close_request(frame, attributes, status, answer_bytes, error)");
    PyObject *attributes = args[1], *status = args[2], *size = args[3];
    int overflow;
    long number = PyLong_AsLongAndOverflow(status, &overflow);
    if ((number != 0 && PyDict_SetItem(attributes, str_status, status) < 0) ||
        (PyObject_IsTrue(size) == 1 && PyDict_SetItem(attributes, str_answer_size, size) < 0)) {
        count_event(self, NO_DETAILS);
        PyErr_Clear();
    }
    PyObject *error = args[4] == Py_None && number >= FIRST_OF_SERVER ? PyObject_Str(status) : Py_NewRef(args[4]);
    PyErr_Clear(); /* without memory, close without a status */
    int failed = take_attributes(self, (Frame *)args[0], attributes) < 0 ||
                 close_frame(self, (Frame *)args[0], error, 1, 0) < 0;
    Py_XDECREF(error);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *Core_open_requests(Core *self, PyObject *argument)
{
    long thread_id = PyLong_AsLong(argument), requests = 0;
    if (thread_id == -1 && PyErr_Occurred())
        return NULL;
    FOR_EACH_OPEN_FRAME(self, frame,
                        requests += frame->state != CLOSED && frame->task != 0 && frame->span_id == frame->root_id &&
                                    frame->root_id & REQUEST_BIT && frame->ring->thread_id == thread_id)
    return PyLong_FromLong(requests);
}

/* Return the values of named headers, from pairs of name and value: of several the last one, None for none. A new
 * reference, NULL with an exception. A dict of the ten headers of a usual request would take five times as long. */
static PyObject *header_values(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyTuple_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "header_values(headers, names)");
    PyObject *names = args[1], *headers = PySequence_Fast(args[0], "headers are pairs");
    Py_ssize_t count = PyTuple_GET_SIZE(names);
    PyObject *values = headers == NULL ? NULL : PyTuple_New(count);
    for (Py_ssize_t i = 0; values != NULL && i < count; i++)
        PyTuple_SET_ITEM(values, i, Py_NewRef(Py_None));
    for (Py_ssize_t at = 0; values != NULL && at < PySequence_Fast_GET_SIZE(headers); at++) {
        PyObject *pair = PySequence_Fast(PySequence_Fast_GET_ITEM(headers, at), "a header is a pair");
        PyObject *name = pair != NULL && PySequence_Fast_GET_SIZE(pair) == 2 ? PySequence_Fast_GET_ITEM(pair, 0) : NULL;
        for (Py_ssize_t i = 0; name != NULL && PyBytes_Check(name) && i < count; i++) {
            PyObject *key = PyTuple_GET_ITEM(names, i);
            Py_ssize_t size = PyBytes_GET_SIZE(name);
            if (PyBytes_Check(key) && PyBytes_GET_SIZE(key) == size &&
                memcmp(PyBytes_AS_STRING(key), PyBytes_AS_STRING(name), (size_t)size) == 0)
                Py_SETREF(PyTuple_GET_ITEM(values, i), Py_NewRef(PySequence_Fast_GET_ITEM(pair, 1)));
        }
        if (name == NULL) {
            if (pair != NULL)
                PyErr_SetString(PyExc_ValueError, "a header is a pair");
            Py_CLEAR(values);
        }
        Py_XDECREF(pair);
    }
    Py_XDECREF(headers);
    return values;
}

/* True while this thread is in `submit`: a thread that starts meanwhile does not inherit a request. */
static THREAD_LOCAL char is_handing_over;

/* Set the recorder's variable in the current context. Errors are cleared, because only a parent is lost. */
static void change_variable(Core *core, PyObject *value)
{
    raised_t raised = take_raised();
    if (set_variable(core, value != NULL ? value : Py_None) < 0)
        PyErr_Clear();
    if (thread_cache()->uid == core->uid)
        forget_current_of(thread_cache()->ring);
    raise_again(raised);
}

static PyObject *Carried_call(Carried *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Core *core = self->core;
    PyObject *before = NULL, *result = NULL;
    if (!core->on || PyContextVar_Get(core->variable, NULL, &before) < 0) {
        if (PyErr_Occurred() && clear_fault() < 0)
            return NULL;
        return PyObject_Vectorcall(self->function, args, nargsf, names);
    }
    Py_INCREF(self);
    change_variable(core, (PyObject *)self->parent);
    if (self->site == NULL || 
        record_past(core, self->site, self->since_ns, NULL, NULL, 0, NULL, 1) == 0)
        result = PyObject_Vectorcall(self->function, args, nargsf, names);
    change_variable(core, before);
    Py_XDECREF(before);
    Py_DECREF(self);
    return result;
}

/* Return the function to submit, wrapped if a request is open: a new reference, NULL with an exception of the service
 * set. */
static PyObject *wrap_submitted(Core *core, PyObject *function, PyObject *site)
{
    PyObject *value = NULL;
    if (thread_cache()->uid != core->uid) { /* look before a ring is made: only threads in a request need one */
        if (PyContextVar_Get(core->variable, NULL, &value) < 0 && clear_fault() < 0)
            return NULL;
        Py_XDECREF(value);
        if (value == NULL || value == Py_None)
            return Py_NewRef(function);
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL)
        return clear_fault() < 0 ? NULL : Py_NewRef(function);
    const frame_t *frame = current->top;
    PyObject *request = frame != NULL ? frame->request : current->base != NULL ? current->base->request : NULL;
    if (!is_open_request(request))
        return Py_NewRef(function);
    Py_INCREF(current);
    Published *parent = current_identity(current);
    Py_DECREF(current);
    Carried *self = parent == NULL ? NULL : PyObject_GC_New(Carried, &CarriedType);
    if (self == NULL) {
        Py_XDECREF(parent);
        return clear_fault() < 0 ? NULL : Py_NewRef(function);
    }
    self->vectorcall = (vectorcallfunc)Carried_call;
    self->core = (Core *)Py_NewRef(core);
    self->function = Py_NewRef(function);
    self->parent = parent;
    self->site = Py_XNewRef(site);
    self->since_ns = read_clock(core);
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

#define REFERENCES_Carried(EACH) EACH(core) EACH(function) EACH(parent) EACH(site)
TRAVERSE_AND_DEALLOC(Carried)

static PyTypeObject CarriedType = {
    COLLECTED_TYPE(Carried, sizeof(Carried), Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION),
    .tp_repr = StandIn_repr,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Carried, vectorcall),
    .tp_getattro = StandIn_getattro,
};
