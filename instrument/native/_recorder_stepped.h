/* Hot: coroutines whose calls are spans. What they await is stepped here, and each time that it is suspended measured, for
 * the span of the coroutine and for those that begin inside it. Cold, at the end: what throws into it, closes and shows
 * it. A part of `_recorder.c`. */

/* What `await` would step: a coroutine itself, or the iterator of what else can be awaited. A new reference; NULL with an
 * exception. */
static PyObject *
iterator_of(PyObject *awaitable)
{
    return PyCoro_CheckExact(awaitable) ? Py_NewRef(awaitable) : Py_TYPE(awaitable)->tp_as_async->am_await(awaitable);
}

/* What `await` takes, and we can step. What it takes besides, or refuses, goes to it as it is. */
static int
is_awaitable(PyObject *object)
{
    const PyAsyncMethods *methods = Py_TYPE(object)->tp_as_async;
    return PyCoro_CheckExact(object) || (methods != NULL && methods->am_await != NULL);
}

/* Of the iterator it takes the reference. NULL without memory, with an exception. */
static Stepped *
new_stepped(Core *core, PyObject *iterator)
{
    Stepped *self = free_stepped_count > 0 ? free_stepped[--free_stepped_count]
                                           : (Stepped *)SteppedType.tp_alloc(&SteppedType, 0);
    if (self == NULL) {
        Py_DECREF(iterator);
        return NULL;
    }
    self->core = (Core *)Py_NewRef(core);
    self->awaited = iterator;
    return self;
}

static int
Stepped_traverse(Stepped *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->awaited);
    Py_VISIT(self->site);
    Py_VISIT(self->attributes);
    Py_VISIT(self->results);
    Py_VISIT(self->own);
    return 0;
}

/* End its span, if it has one that is open. -1 with an exception of the host's. */
static int
end_own(Stepped *self, PyObject *error)
{
    Frame *own = self->own;
    if (own == NULL)
        return 0;
    int failed = own->frame->state == CLOSED ? 0 : close_frame(self->core, own, error, 0);
    leave_stepped(own);
    self->own = NULL;
    Py_DECREF(own);
    return failed;
}

/* What has been awaited is given up: an open span of somebody else's holds us, and is not to hold that. Code of the host's
 * may run, and the exception that is raised stays as it is. */
static void
leave_awaited(Stepped *self)
{
    if (self->site != NULL || self->awaited == Py_None)
        return;
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    Py_SETREF(self->awaited, Py_NewRef(Py_None));
    PyErr_Restore(type, raised, traceback);
}

/* As a scope that is given up, also while its span is open: nobody is left who could go on. */
static void
Stepped_dealloc(Stepped *self)
{
    Py_SET_REFCNT(self, 1);
    if (self->own != NULL) {
        PyObject *type, *raised, *traceback;
        PyErr_Fetch(&type, &raised, &traceback);
        if (end_own(self, NULL) < 0)
            PyErr_WriteUnraisable(NULL);
        PyErr_Restore(type, raised, traceback);
    }
    Py_CLEAR(self->core);
    Py_CLEAR(self->awaited);
    Py_CLEAR(self->site);
    Py_CLEAR(self->attributes);
    Py_CLEAR(self->results);
    self->waited_ns = self->suspended_ns = 0;
    self->has_begun = self->is_running = 0;
    if (free_stepped_count < OBJECTS_KEPT) {
        free_stepped[free_stepped_count++] = self;
        return;
    }
    PyObject_GC_UnTrack(self);
    PyObject_GC_Del(self);
}

static int
told(PyObject *none)
{
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Close what is not awaited any more, as a coroutine that is closed does. -1 with an exception. */
static int
close_awaited(Stepped *self)
{
    PyObject *method = PyObject_GetAttrString(self->awaited, "close"), *none;
    if (method == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    if (method == NULL) {
        PyErr_Clear();
        return 0;
    }
    none = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    return told(none);
}

/* Begin its span. -1 with an exception of the host's. */
static int
begin_own(Stepped *self)
{
    self->has_begun = 1;
    if (self->site == NULL || !self->core->on)
        return 0;
    Pass *pass = pass_of(self->core, self->site);
    if (pass != NULL) {
        count_passed(pass);
        return 0;
    }
    int is_too_deep = at_hand.uid == self->core->uid && is_stack_used_up(at_hand.ring);
    Frame *own = is_too_deep ? NULL : open_frame(self->core, self->site, self->attributes, OPEN);
    if (own == NULL) {
        if (is_too_deep)
            PyErr_SetString(PyExc_RecursionError, "the C stack is used up by calls of instrumented coroutines");
        else if (lose(self->core) == 0)
            return 0;
        PyObject *type, *raised, *traceback;
        PyErr_Fetch(&type, &raised, &traceback);
        if (close_awaited(self) < 0)
            PyErr_Clear(); /* of two that handlers raised, the first */
        PyErr_Restore(type, raised, traceback);
        return -1;
    }
    leave_stepped(own);
    self->own = own;
    own->stepped = self;
    own->waited_before_ns = 0;
    return 0;
}

/* A step begins. Gives what was stepped around it, with its reference, in `around`. -1 with an exception of the host's,
 * and there is no step. */
static inline int
begin_step(Stepped *self, Stepped **around)
{
    if (!self->has_begun) {
        if (begin_own(self) < 0)
            return -1;
    } else if (self->suspended_ns != 0) {
        self->waited_ns += read_clock(self->core) - self->suspended_ns;
        self->suspended_ns = 0;
    }
    *around = stepping;
    stepping = (Stepped *)Py_NewRef((PyObject *)self);
    self->is_running = 1;
    return 0;
}

/* The step has ended, for it yields to the loop, or has a result, or raises. Returns the same, or that our end of its span
 * has raised. */
static inline PySendResult
end_step(Stepped *self, Stepped *around, PySendResult ended, PyObject **result)
{
    /* Where greenlets have taken turns meanwhile it may be another one: that stays sound, and finds nobody who runs. */
    Stepped *innermost = stepping;
    stepping = around;
    self->is_running = 0;
    if (ended == PYGEN_NEXT) {
        self->suspended_ns = read_clock(self->core);
        Py_XDECREF(innermost);
        return ended;
    }
    if (ended == PYGEN_RETURN && self->results != NULL && tell_result(self->core, self->results, *result) < 0) {
        Py_CLEAR(*result);
        ended = PYGEN_ERROR;
    }
    if (ended == PYGEN_ERROR) {
        PyObject *type, *raised, *traceback;
        PyErr_Fetch(&type, &raised, &traceback);
        PyErr_NormalizeException(&type, &raised, &traceback);
        if (end_own(self, raised) < 0) {
            Py_XDECREF(type);
            Py_XDECREF(raised);
            Py_XDECREF(traceback);
        } else {
            PyErr_Restore(type, raised, traceback);
        }
    } else if (end_own(self, NULL) < 0) {
        Py_CLEAR(*result);
        ended = PYGEN_ERROR;
    }
    leave_awaited(self);
    Py_XDECREF(innermost);
    return ended;
}

static PySendResult
Stepped_step(Stepped *self, PyObject *value, PyObject **result)
{
    Stepped *around;
    *result = NULL;
    if (begin_step(self, &around) < 0)
        return PYGEN_ERROR;
    PySendResult ended = PyIter_Send(self->awaited, value, result);
    return end_step(self, around, ended, result);
}

/* As what iterators give: of a result a StopIteration. Takes the reference. */
static PyObject *
as_of_iterator(PySendResult ended, PyObject *result)
{
    if (ended != PYGEN_RETURN)
        return result;
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result); /* not SetObject alone: a tuple would be arguments */
    if (stop != NULL)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

static PyObject *
Stepped_send(Stepped *self, PyObject *value)
{
    PyObject *result;
    PySendResult ended = Stepped_step(self, value, &result);
    return as_of_iterator(ended, result);
}

static PyObject *
Stepped_next(Stepped *self)
{
    return Stepped_send(self, Py_None);
}

/* stepped(site, coroutine, attributes, results): what awaits a coroutine inside a span of a site. */
static PyObject *
Core_stepped(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "stepped(site, coroutine, attributes, results)");
        return NULL;
    }
    if (!is_awaitable(args[1]))
        return Py_NewRef(args[1]);
    PyObject *iterator = iterator_of(args[1]);
    Stepped *made = iterator == NULL ? NULL : new_stepped(self, iterator);
    if (made == NULL)
        return NULL;
    made->site = Py_NewRef(args[0]);
    made->attributes = args[2] == Py_None ? NULL : Py_NewRef(args[2]);
    made->results = args[3] == Py_None ? NULL : Py_NewRef(args[3]);
    return (PyObject *)made;
}

/* stepped_in(frame, awaitable): what awaits it for an open span, which learns how long it was suspended. */
static PyObject *
Core_stepped_in(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || (args[0] != Py_None && Py_TYPE(args[0]) != &FrameType)) {
        PyErr_SetString(PyExc_TypeError, "stepped_in(frame, awaitable)");
        return NULL;
    }
    Frame *frame = (Frame *)args[0];
    if (args[0] == Py_None || frame->frame->state == CLOSED || !is_awaitable(args[1]))
        return Py_NewRef(args[1]);
    PyObject *iterator = iterator_of(args[1]);
    if (iterator == NULL)
        return NULL;
    Stepped *made = frame->stepped;
    if (made != NULL && made->awaited == Py_None) { /* what was awaited for it before has ended */
        Py_SETREF(made->awaited, iterator);
        return Py_NewRef((PyObject *)made);
    }
    made = new_stepped(self, iterator);
    if (made == NULL)
        return NULL;
    leave_stepped(frame);
    frame->stepped = (Stepped *)Py_NewRef((PyObject *)made);
    frame->waited_before_ns = 0;
    return (PyObject *)made;
}

/* Cold from here on: what a stand-in for a coroutine must have besides, for who cancels, closes or looks at it. */

/* What is awaited is thrown into by whoever steps, or has no way to be, and then raises what is thrown. */
static PyObject *
thrown(Stepped *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *method = PyObject_GetAttrString(self->awaited, "throw");
    if (method != NULL) {
        PyObject *result = PyObject_Vectorcall(method, args, (size_t)nargs, NULL);
        Py_DECREF(method);
        return result;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return NULL;
    PyErr_Clear();
    if (nargs > 0 && PyExceptionInstance_Check(args[0]))
        PyErr_SetObject((PyObject *)Py_TYPE(args[0]), args[0]);
    else if (nargs > 0 && PyExceptionClass_Check(args[0]))
        PyErr_SetObject(args[0], nargs > 1 ? args[1] : Py_None);
    else
        PyErr_SetString(PyExc_TypeError, "throw(exception)");
    return NULL;
}

static PyObject *
Stepped_throw(Stepped *self, PyObject *const *args, Py_ssize_t nargs)
{
    Stepped *around;
    if (begin_step(self, &around) < 0)
        return NULL;
    PyObject *result = thrown(self, args, nargs), *stop = NULL;
    PySendResult ended = result != NULL ? PYGEN_NEXT : PYGEN_ERROR;
    if (result == NULL && PyErr_ExceptionMatches(PyExc_StopIteration)) { /* it has a result */
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &stop, &traceback);
        PyErr_NormalizeException(&type, &stop, &traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        result = stop == NULL ? NULL : PyObject_GetAttrString(stop, "value");
        Py_XDECREF(stop);
        ended = result != NULL ? PYGEN_RETURN : PYGEN_ERROR;
    }
    ended = end_step(self, around, ended, &result);
    return as_of_iterator(ended, result);
}

static PyObject *
Stepped_close(Stepped *self, PyObject *Py_UNUSED(none))
{
    static PyObject *closed; /* what a coroutine that is closed is told */
    Stepped *around;
    if (!self->has_begun)
        return close_awaited(self) < 0 ? NULL : Py_NewRef(Py_None);
    if ((closed == NULL && (closed = PyObject_CallNoArgs(PyExc_GeneratorExit)) == NULL) || begin_step(self, &around) < 0)
        return NULL;
    PyObject *result = NULL;
    if (close_awaited(self) < 0) {
        end_step(self, around, PYGEN_ERROR, &result);
        return NULL;
    }
    Stepped *innermost = stepping;
    stepping = around;
    self->is_running = 0;
    int failed = end_own(self, closed);
    leave_awaited(self);
    Py_XDECREF(innermost);
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}

/* What shows of coroutines that await one another where each stands: of what is awaited here, as if we were it. */
static PyObject *
Stepped_shown(Stepped *self, void *name)
{
    return PyObject_GetAttrString(self->awaited, name);
}

static PyGetSetDef Stepped_getset[] = {
    {"cr_await", (getter)Stepped_shown, NULL, "of what is awaited", "cr_await"},
    {"cr_code", (getter)Stepped_shown, NULL, "of what is awaited", "cr_code"},
    {"cr_frame", (getter)Stepped_shown, NULL, "of what is awaited", "cr_frame"},
    {"cr_origin", (getter)Stepped_shown, NULL, "of what is awaited", "cr_origin"},
    {"cr_running", (getter)Stepped_shown, NULL, "of what is awaited", "cr_running"},
    {NULL},
};

static PyMethodDef Stepped_methods[] = {
    {"send", (PyCFunction)Stepped_send, METH_O, "Go on with a value."},
    {"throw", (PyCFunction)(void (*)(void))Stepped_throw, METH_FASTCALL, "Go on with an exception."},
    {"close", (PyCFunction)Stepped_close, METH_NOARGS, "Go on no more."},
    {NULL},
};

static PyAsyncMethods Stepped_async = {
    .am_await = PyObject_SelfIter,
    .am_send = (sendfunc)Stepped_step,
};

static PyTypeObject SteppedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Stepped",
    .tp_basicsize = sizeof(Stepped),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "What a coroutine awaits, stepped and timed: it knows how long it was suspended.",
    .tp_dealloc = (destructor)Stepped_dealloc,
    .tp_traverse = (traverseproc)Stepped_traverse,
    .tp_as_async = &Stepped_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)Stepped_next,
    .tp_methods = Stepped_methods,
    .tp_getset = Stepped_getset,
};
