/* Cold: work that is submitted to another thread, and runs there in the request of the submitting code. It runs in its
 * own thread's context, as without us: only the recorder's variable is another meanwhile. A part of `_recorder.c`. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Core *core;
    PyObject *function;
    Published *parent; /* the innermost span that was open */
    PyObject *site;    /* of the wait, or NULL */
    int64_t since_ns;
} Carried;

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

static PyObject *Carried_getattro(Carried *self, PyObject *name)
{
    return get_through((PyObject *)self, name, self->function);
}

static PyObject *Carried_repr(Carried *self)
{
    return PyObject_Repr(self->function);
}

static PyTypeObject CarriedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Carried",
    .tp_basicsize = sizeof(Carried),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)Carried_dealloc,
    .tp_traverse = (traverseproc)Carried_traverse,
    .tp_repr = (reprfunc)Carried_repr,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Carried, vectorcall),
    .tp_getattro = (getattrofunc)Carried_getattro,
};
