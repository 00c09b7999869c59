/* Hot: spans that are begun and ended by separate calls, such as those of requests. Cold: work that is submitted to another
 * thread, and runs there in the request of the submitting code, but in its own thread's context, as without us: only the
 * recorder's variable is another meanwhile. A part of `_recorder.c`. */

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
    return lose(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Make a dict, which the caller gives away, the attributes of an open span. Keep the span's own other names, and the
 * span of another tracer that the recorder has noted. -1 with an exception of the host's. */
static int take_attributes(Core *core, Frame *self, PyObject *given)
{
    if (self->frame->state == CLOSED)
        return 0;
    PyObject *before = self->frame->attributes, *name, *value;
    if (before == given)
        return 0;
    self->frame->attributes = Py_NewRef(given);
    int failed = 0;
    for (Py_ssize_t at = 0; !failed && before != NULL && PyDict_Check(before) &&
                            PyDict_Next(before, &at, &name, &value);) {
        int known = name == core->remote_key ? 0 : PyDict_Contains(given, name);
        failed = known < 0 || (known == 0 && put_attribute(core, given, name, value) < 0);
    }
    Py_XDECREF(before);
    if (failed)
        count(core, NO_DETAILS);
    return failed ? forgive() : 0;
}

static PyObject *Core_close(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs > 0 && args[0] == Py_None) /* its begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs < 1 || nargs > 4 || Py_TYPE(args[0]) != &FrameType)
        return PyErr_Format(PyExc_TypeError, "close(frame, error=None, anywhere=False, attributes=None)");
    if (nargs > 3 && PyDict_Check(args[3]) && take_attributes(self, (Frame *)args[0], args[3]) < 0)
        return NULL;
    return close_frame(self, (Frame *)args[0], nargs > 1 ? args[1] : NULL, nargs > 2 && args[2] == Py_True, 0) < 0 ? NULL : Py_NewRef(Py_None);
}

#define LENGTH_DIGITS 18 /* numbers that fit into 63 bits */

/* Note the length in a request's header, bytes or text: only digits are a length. */
static int put_length(PyObject *facts, PyObject *header)
{
    const char *digits = NULL;
    Py_ssize_t count = 0;
    if (PyBytes_Check(header)) {
        digits = PyBytes_AS_STRING(header);
        count = PyBytes_GET_SIZE(header);
    } else if (PyUnicode_Check(header) && PyUnicode_IS_ASCII(header)) {
        digits = (const char *)PyUnicode_1BYTE_DATA(header);
        count = PyUnicode_GET_LENGTH(header);
    }
    long long length = 0;
    for (Py_ssize_t i = 0; i < count && count <= LENGTH_DIGITS; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return 0;
        length = 10 * length + (digits[i] - '0');
    }
    if (count == 0 || count > LENGTH_DIGITS)
        return 0;
    PyObject *number = PyLong_FromLongLong(length);
    int failed = number == NULL || PyDict_SetItem(facts, str_request_size, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
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
    if (nargs > 0 && args[0] == Py_None) /* its begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs != 5 || Py_TYPE(args[0]) != &FrameType || !PyDict_Check(args[1]) || !PyLong_Check(args[2]) ||
        !PyLong_Check(args[3]))
        return PyErr_Format(PyExc_TypeError, "close_request(frame, attributes, status, answer_bytes, error)");
    PyObject *given = args[1], *status = args[2], *size = args[3];
    int overflow;
    long number = PyLong_AsLongAndOverflow(status, &overflow);
    if ((number != 0 && PyDict_SetItem(given, str_status, status) < 0) ||
        (PyObject_IsTrue(size) == 1 && PyDict_SetItem(given, str_answer_size, size) < 0)) {
        count(self, NO_DETAILS);
        PyErr_Clear();
    }
    PyObject *error = args[4] == Py_None && number >= FIRST_OF_SERVER ? PyObject_Str(status) : Py_NewRef(args[4]);
    PyErr_Clear(); /* without memory it is no request */
    int failed = take_attributes(self, (Frame *)args[0], given) < 0 || close_frame(self, (Frame *)args[0], error, 1, 0) < 0;
    Py_XDECREF(error);
    return failed ? NULL : Py_NewRef(Py_None);
}

static int is_open_request_of_task(const frame_t *frame, long thread_id)
{
    return frame->state != CLOSED && frame->task != 0 && frame->span_id == frame->root_id &&
           frame->root_id & REQUEST_BIT && frame->ring->thread_id == thread_id;
}

static PyObject *Core_open_requests(Core *self, PyObject *given)
{
    long thread_id = PyLong_AsLong(given), found = 0;
    if (thread_id == -1 && PyErr_Occurred())
        return NULL;
    for (const Current *current = self->currents; current != NULL; current = current->next)
        for (const frame_t *frame = current->top; frame != NULL; frame = frame->above)
            found += is_open_request_of_task(frame, thread_id);
    for (const Stretch *stretch = self->stretches; stretch != NULL; stretch = stretch->next)
        for (const frame_t *frame = stretch->inner; frame != NULL; frame = frame->above)
            found += is_open_request_of_task(frame, thread_id);
    return PyLong_FromLong(found);
}

/* The values of named headers, from pairs of name and value: the last one of several, None for none. A request has some
 * ten headers, and a dict of them would take five times as long. */
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
            PyObject *wanted = PyTuple_GET_ITEM(names, i);
            Py_ssize_t size = PyBytes_GET_SIZE(name);
            if (PyBytes_Check(wanted) && PyBytes_GET_SIZE(wanted) == size &&
                memcmp(PyBytes_AS_STRING(wanted), PyBytes_AS_STRING(name), (size_t)size) == 0) {
                PyObject *old = PyTuple_GET_ITEM(values, i);
                PyTuple_SET_ITEM(values, i, Py_NewRef(PySequence_Fast_GET_ITEM(pair, 1)));
                Py_DECREF(old);
            }
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

/* ------------------------------------------------------------------ submitted work */

static PyTypeObject CarriedType;
static THREAD_LOCAL char is_handing_over; /* true while this thread is within `submit`: threads begun there have no parent */

/* Set the recorder's variable in the current context. Errors are cleared, because only the parent is lost. */
static void change_variable(Core *core, PyObject *value)
{
    raised_t raised = take_raised();
    if (set_variable(core, value != NULL ? value : Py_None) < 0)
        PyErr_Clear();
    if (at_hand()->uid == core->uid)
        forget_current_of(at_hand()->ring);
    raise_again(raised);
}

/* Record the time since a moment, in which the innermost span waited, as a span that has just ended. -1 with an
 * exception of the host's. */
static int record_wait(Core *core, PyObject *site, int64_t start_ns)
{
    int64_t end_ns = read_clock(core);
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL)
        return lose(core);
    Frame *frame = new_frame_object();
    if (frame == NULL)
        return lose(core);
    identify(core, ring, current, frame->frame, site, NULL, OPEN);
    begin_frame(frame->frame, start_ns);
    Py_INCREF(ring);
    store(core, ring, frame->frame, end_ns, -1, end_ns - start_ns, NULL);
    frame->frame->state = CLOSED;
    Py_DECREF(frame); /* with the reference to the ring */
    return 0;
}

static PyObject *Carried_call(Carried *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Core *core = self->core;
    PyObject *before = NULL, *result = NULL;
    if (!core->on || PyContextVar_Get(core->variable, NULL, &before) < 0) {
        if (PyErr_Occurred() && forgive() < 0)
            return NULL;
        return PyObject_Vectorcall(self->function, args, nargsf, names);
    }
    Py_INCREF(self);
    change_variable(core, (PyObject *)self->parent);
    if (self->site == NULL || record_wait(core, self->site, self->since_ns) == 0)
        result = PyObject_Vectorcall(self->function, args, nargsf, names);
    change_variable(core, before);
    Py_XDECREF(before);
    Py_DECREF(self);
    return result;
}

/* The function to submit: the same without an open request. A new reference; NULL with an exception of the host's. */
static PyObject *carried(Core *core, PyObject *function, PyObject *site)
{
    PyObject *value = NULL;
    if (at_hand()->uid != core->uid) { /* only a thread in a request gets a ring */
        if (PyContextVar_Get(core->variable, NULL, &value) < 0 && forgive() < 0)
            return NULL;
        Py_XDECREF(value);
        if (value == NULL || value == Py_None)
            return Py_NewRef(function);
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL)
        return forgive() < 0 ? NULL : Py_NewRef(function);
    const frame_t *frame = current->top;
    PyObject *request = frame != NULL ? frame->request : current->base != NULL ? current->base->request : NULL;
    if (!is_open_request(request))
        return Py_NewRef(function);
    Py_INCREF(current);
    Published *parent = parent_here(current);
    Py_DECREF(current);
    Carried *self = parent == NULL ? NULL : PyObject_GC_New(Carried, &CarriedType);
    if (self == NULL) {
        Py_XDECREF(parent);
        return forgive() < 0 ? NULL : Py_NewRef(function);
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

#define HELD_BY_CARRIED(EACH) EACH(core) EACH(function) EACH(parent) EACH(site)

static void Carried_dealloc(Carried *self)
{
    PyObject_GC_UnTrack(self);
    HELD_BY_CARRIED(LET_GO)
    PyObject_GC_Del(self);
}

static int Carried_traverse(Carried *self, visitproc visit, void *arg)
{
    HELD_BY_CARRIED(VISIT)
    return 0;
}

static PyTypeObject CarriedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Carried",
    .tp_basicsize = sizeof(Carried),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)Carried_dealloc,
    .tp_traverse = (traverseproc)Carried_traverse,
    .tp_repr = StandIn_repr,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Carried, vectorcall),
    .tp_getattro = StandIn_getattro,
};
