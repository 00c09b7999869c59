/* Hot: coroutines whose calls are spans. We step what they await, and time each suspension, for the span of the
 * coroutine and for spans that begin inside it. Cold, at the end: throwing, closing and attributes. A part of
 * `_recorder.c`. */

/* Return the object that an object of ours replaces, borrowed: the function of a wrapper, or the object that is
 * stepped. */
static PyObject *replaced_by(PyObject *self)
{
    return Py_TYPE(self)->tp_vectorcall_offset > 0 ? ((Function *)self)->wrapped : ((Stepped *)self)->awaited;
}

_Static_assert(offsetof(Function, wrapped) == offsetof(Carried, function), "`replaced_by` reads both");
_Static_assert(offsetof(Stepped, awaited) == offsetof(Stretch, body), "`replaced_by` reads both");

/* Return an attribute of an object of ours, else of the object that it replaces: a new reference, NULL with an
 * exception. */
static PyObject *StandIn_getattro(PyObject *self, PyObject *name)
{
    PyObject *attribute = PyObject_GenericGetAttr(self, name);
    if (attribute != NULL || replaced_by(self) == NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return attribute;
    PyErr_Clear();
    return PyObject_GetAttr(replaced_by(self), name);
}

static int StandIn_setattro(PyObject *self, PyObject *name, PyObject *value)
{
    return PyObject_SetAttr(replaced_by(self), name, value);
}

static PyObject *StandIn_repr(PyObject *self)
{
    return PyObject_Repr(replaced_by(self));
}

static PyTypeObject *replaced_type(PyTypeObject *);

static PyObject *StandIn_class(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)replaced_type(Py_TYPE(self)));
}

/* The attribute of stepped objects. A wrapper of a function has it from the function. */
static PyGetSetDef StandIn_getset[] = {
    {"__class__", StandIn_class, NULL, NULL, NULL},
    {NULL},
};

/* Return what `await` would step: the coroutine itself, or the iterator of another awaitable. A new reference, NULL
 * with an exception. */
static PyObject *iterator_of(PyObject *awaitable)
{
    return PyCoro_CheckExact(awaitable) ? Py_NewRef(awaitable) : Py_TYPE(awaitable)->tp_as_async->am_await(awaitable);
}

/* Return true for an awaitable that we can step. Other objects are passed to `await` unchanged. */
static int is_awaitable(PyObject *object)
{
    const PyAsyncMethods *methods = Py_TYPE(object)->tp_as_async;
    return PyCoro_CheckExact(object) || (methods != NULL && methods->am_await != NULL);
}

/* Make an object of SteppedType or CoroutineType: a new reference, NULL with an exception. Takes the reference to the
 * iterator. */
static Stepped *new_stepped(Core *core, PyTypeObject *type, PyObject *iterator)
{
    Stepped *self = free_stepped_count > 0 ? free_stepped[--free_stepped_count] : (Stepped *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(iterator);
        return NULL;
    }
    Py_SET_TYPE((PyObject *)self, type);
    self->core = (Core *)Py_NewRef(core);
    self->awaited = iterator;
    return self;
}

#define REFERENCES_Stepped(EACH) EACH(core) EACH(awaited) EACH(function) EACH(attributes)

static int Stepped_traverse(Stepped *self, visitproc visit, void *arg)
{
    REFERENCES_Stepped(VISIT)
    Py_VISIT(self->span);
    return 0;
}

/* End the span of a coroutine, if it is open. Return -1 with an exception of the service set. */
static int end_span(Stepped *self, PyObject *error)
{
    Frame *span = self->span;
    if (span == NULL)
        return 0;
    int failed = span->frame->state == CLOSED ? 0 : close_frame(self->core, span, error, 0, 0);
    leave_stepped(span);
    self->span = NULL;
    Py_DECREF(span);
    return failed;
}

/* Release the awaited object, because an open span of other code may own a reference to us for longer. Code of the
 * service may run. A raised exception stays set. */
static void leave_awaited(Stepped *self)
{
    if (self->function != NULL || self->awaited == Py_None)
        return;
    raised_t raised = take_raised();
    Py_SETREF(self->awaited, Py_NewRef(Py_None));
    raise_again(raised);
}

static PyObject *Stepped_close(Stepped *, PyObject *);

/* Free a stepped object. An open span is ended, because no caller can resume the coroutine. */
static void Stepped_dealloc(Stepped *self)
{
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Py_SET_REFCNT(self, 1);
    if (self->span != NULL) {
        raised_t raised = take_raised();
        PyObject *none = Stepped_close(self, NULL);
        if (none == NULL)
            PyErr_WriteUnraisable(self->awaited);
        Py_XDECREF(none);
        if (end_span(self, NULL) < 0)
            PyErr_WriteUnraisable(NULL);
        raise_again(raised);
    }
    REFERENCES_Stepped(CLEAR)
    self->waited_ns = self->suspended_ns = 0;
    self->task = 0;
    self->has_begun = self->is_running = 0;
    if (free_stepped_count < OBJECTS_KEPT) {
        free_stepped[free_stepped_count++] = self;
        return;
    }
    PyObject_GC_UnTrack(self);
    PyObject_GC_Del(self);
}

/* Close a body that will not be resumed. Return the result: a new reference, NULL with an exception. */
static PyObject *close_body(PyObject *body)
{
    PyObject *method = PyObject_GetAttrString(body, "close");
    if (method == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return NULL;
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    PyObject *result = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    return result;
}

/* Begin the span of a coroutine that has no remembered step here, and remember the step. Returns as `open_frame`. */
static SELDOM Frame *begin_unknown_span(Stepped *self)
{
    Core *core = self->core;
    Function *function = self->function;
    uint64_t uid = core->uid;
    Frame *span = open_frame(core, function->path.site, NULL, self->attributes, OPEN);
    if (span == NULL || core->uid != uid || span->frame->below_fold || span->frame->node->is_request)
        return span;
    if (function->uid != uid)
        forget_paths(function);
    path_t *path = &function->path;
    node_t *node = span->frame->node, *step;
    if (node->parent != core->tree.overflow && !find_known_step(path, node->parent, &step))
        remember_step(path, node->parent, node);
    return span;
}

/* Begin the span of a coroutine. Return -1 with an exception of the service set. */
static int begin_span(Stepped *self)
{
    Core *core = self->core;
    Function *function = self->function;
    self->has_begun = 1;
    if (function == NULL || !core->on)
        return 0;
    Pass *pass = pass_of(core, function->path.site);
    if (pass != NULL) {
        count_passed(pass);
        return 0;
    }
    int is_too_deep = thread_cache()->uid == core->uid && is_stack_used_up();
    int may_be_known = !is_too_deep && self->attributes == NULL && function->uid == core->uid && is_on_and_nothing_else(core);
    Frame *span = may_be_known ? new_frame_object() : NULL;
    if (span != NULL && !begin_known(core, span, &function->path, 0))
        Py_CLEAR(span);
    if (span == NULL && !is_too_deep && !PyErr_Occurred()) /* without memory, an exception is set */
        span = begin_unknown_span(self);
    if (span == NULL) {
        if (is_too_deep)
            refuse_for_stack("calls of instrumented coroutines");
        else if (count_loss(core) == 0)
            return 0;
        raised_t raised = take_raised();
        Py_XDECREF(close_body(self->awaited));
        PyErr_Clear(); /* the first exception is raised again */
        raise_again(raised);
        return -1;
    }
    leave_stepped(span);
    self->task = span->frame->task;
    self->span = span;
    span->stepped = self;
    span->waited_before_ns = 0;
    return 0;
}

/* Begin a step. Set `around` to the stepped object around this one, with its reference. Return -1 with an exception of
 * the service set, and without a step. */
static inline int begin_step(Stepped *self, Stepped **around)
{
    if (!self->has_begun) {
        if (begin_span(self) < 0)
            return -1;
    } else if (self->suspended_ns != 0) {
        self->waited_ns += read_clock(self->core) - self->suspended_ns;
        self->suspended_ns = 0;
    }
    *around = thread_cache()->stepping;
    thread_cache()->stepping = (Stepped *)Py_NewRef((PyObject *)self);
    self->is_running = 1;
    return 0;
}

/* End a step that yielded, returned or raised. Return the same outcome, or an error if the end of the span has
 * raised. */
static inline PySendResult end_step(Stepped *self, Stepped *around, PySendResult ended, PyObject **result)
{
    /* Greenlets may have switched meanwhile, so it may be another object. That one stays valid, and is not running. */
    Stepped *innermost = thread_cache()->stepping;
    thread_cache()->stepping = around;
    self->is_running = 0;
    if (ended == PYGEN_NEXT) {
        self->suspended_ns = read_clock(self->core);
        Py_XDECREF(innermost);
        return ended;
    }
    if (ended == PYGEN_RETURN && self->function != NULL && self->function->results != NULL &&
        read_result(self->core, self->function->results, *result) < 0) {
        Py_CLEAR(*result);
        ended = PYGEN_ERROR;
    }
    if (ended == PYGEN_ERROR) {
        raised_t raised = take_normal();
        if (end_span(self, raised.value) < 0)
            drop_raised(raised);
        else
            raise_again(raised);
    } else if (end_span(self, NULL) < 0) {
        Py_CLEAR(*result);
        ended = PYGEN_ERROR;
    }
    leave_awaited(self);
    Py_XDECREF(innermost);
    return ended;
}

static PySendResult Stepped_step(Stepped *self, PyObject *value, PyObject **result)
{
    Stepped *around;
    *result = NULL;
    if (self->is_running) /* the body raises its own error */
        return PyIter_Send(self->awaited, value, result);
    if (begin_step(self, &around) < 0)
        return PYGEN_ERROR;
    PySendResult ended = PyIter_Send(self->awaited, value, result);
    return end_step(self, around, ended, result);
}

/* Raise a StopIteration with a result, whose reference it takes. */
static __attribute__((noinline)) PyObject *stop_with(PyObject *result)
{
    if (result == Py_None) {
        Py_DECREF(result);
        PyErr_SetNone(PyExc_StopIteration);
        return NULL;
    }
    /* PyErr_SetObject alone would unpack a tuple into arguments. */
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
    if (stop != NULL)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

/* Return a step's outcome as an iterator does: a result becomes a StopIteration. Takes the reference. */
static inline PyObject *as_of_iterator(PySendResult ended, PyObject *result)
{
    return ended != PYGEN_RETURN ? result : stop_with(result);
}

static PyObject *StandIn_send(PyObject *self, PyObject *value)
{
    PyObject *result;
    PySendResult ended = Py_TYPE(self)->tp_as_async->am_send(self, value, &result);
    return as_of_iterator(ended, result);
}

/* Make a step as an iterator. An end without a result sets no exception: making one costs more than the span. */
static PyObject *Stepped_next(Stepped *self)
{
    PyObject *result;
    PySendResult ended = Stepped_step(self, Py_None, &result);
    if (ended != PYGEN_RETURN || result != Py_None)
        return as_of_iterator(ended, result);
    Py_DECREF(result);
    return NULL;
}

/* Return an object that replaces a function's coroutine, and has a span: a new reference, NULL with an exception.
 * Return the coroutine itself if it cannot be awaited. */
static PyObject *stepped_coroutine(Function *function, PyObject *coroutine, PyObject *attributes)
{
    if (!is_awaitable(coroutine))
        return Py_NewRef(coroutine);
    PyObject *iterator = iterator_of(coroutine);
    Stepped *stepped = iterator == NULL ? NULL : new_stepped(function->core, &CoroutineType, iterator);
    if (stepped == NULL)
        return NULL;
    stepped->function = (Function *)Py_NewRef((PyObject *)function);
    stepped->attributes = Py_XNewRef(attributes);
    return (PyObject *)stepped;
}

/* Return an awaitable that steps another one for an open span, and times the suspensions: a new reference, NULL with an
 * exception. Return another object itself if it cannot be awaited. */
static PyObject *stepped_for(Core *core, Frame *frame, PyObject *awaitable)
{
    Stepped *stepped = frame->stepped;
    if (frame->frame->state == CLOSED || !is_awaitable(awaitable))
        return Py_NewRef(awaitable);
    PyObject *iterator = iterator_of(awaitable);
    if (iterator == NULL)
        return NULL;
    if (stepped != NULL && stepped->awaited == Py_None) { /* the previous awaitable has ended */
        Py_SETREF(stepped->awaited, iterator);
        return Py_NewRef((PyObject *)stepped);
    }
    stepped = new_stepped(core, &SteppedType, iterator);
    if (stepped == NULL)
        return NULL;
    leave_stepped(frame);
    stepped->task = frame->frame->task;
    frame->stepped = (Stepped *)Py_NewRef((PyObject *)stepped);
    frame->waited_before_ns = 0;
    return (PyObject *)stepped;
}

static PyObject *Core_stepped_in(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || (args[0] != Py_None && Py_TYPE(args[0]) != &FrameType))
        return PyErr_Format(PyExc_TypeError, "stepped_in(frame, awaitable)");
    return args[0] == Py_None ? Py_NewRef(args[1]) : stepped_for(self, (Frame *)args[0], args[1]);
}

/* Cold from here on: the other methods of a coroutine, for code that cancels, closes or inspects it. */

/* Turn the raised StopIteration into the result of a step. */
static PySendResult take_stop_value(PyObject **result)
{
    raised_t raised = take_normal();
    *result = raised.value == NULL ? NULL : PyObject_GetAttrString(raised.value, "value");
    drop_raised(raised);
    return *result != NULL ? PYGEN_RETURN : PYGEN_ERROR;
}

/* Throw into the stepped object. Raise the exception if the object has no `throw` method. Set `result` to a new
 * reference or to NULL. */
static PySendResult throw_into(PyObject *body, PyObject *const *args, Py_ssize_t nargs, PyObject **result)
{
    PyObject *method = PyObject_GetAttrString(body, "throw");
    *result = NULL;
    if (method != NULL) {
        *result = PyObject_Vectorcall(method, args, (size_t)nargs, NULL);
        Py_DECREF(method);
        if (*result != NULL)
            return PYGEN_NEXT;
        return PyErr_ExceptionMatches(PyExc_StopIteration) ? take_stop_value(result) : PYGEN_ERROR;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return PYGEN_ERROR;
    PyErr_Clear();
    if (nargs > 0 && PyExceptionInstance_Check(args[0]))
        PyErr_SetObject((PyObject *)Py_TYPE(args[0]), args[0]);
    else if (nargs > 0 && PyExceptionClass_Check(args[0]))
        PyErr_SetObject(args[0], nargs > 1 ? args[1] : Py_None);
    else
        PyErr_SetString(PyExc_TypeError, "throw(exception)");
    return PYGEN_ERROR;
}

static PyObject *Stepped_throw(Stepped *self, PyObject *const *args, Py_ssize_t nargs)
{
    Stepped *around = NULL;
    PyObject *result;
    /* A running body has begun its step before. */
    int has_span = !self->is_running && (self->function == NULL || self->has_begun);
    if (has_span && begin_step(self, &around) < 0)
        return NULL;
    PySendResult ended = throw_into(self->awaited, args, nargs, &result);
    if (has_span)
        ended = end_step(self, around, ended, &result);
    return as_of_iterator(ended, result);
}

static PyObject *Stepped_close(Stepped *self, PyObject *Py_UNUSED(none))
{
    Stepped *around;
    if (!self->has_begun || self->is_running)
        return close_body(self->awaited);
    if (begin_step(self, &around) < 0)
        return NULL;
    PyObject *closed = close_body(self->awaited), *result = NULL;
    if (closed != NULL)
        PyErr_SetNone(PyExc_GeneratorExit); /* the exception with which closed spans end */
    Py_XDECREF(closed);
    end_step(self, around, PYGEN_ERROR, &result);
    if (closed == NULL || !PyErr_ExceptionMatches(PyExc_GeneratorExit))
        return NULL;
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* Return an iterator that steps the coroutine, for code that does so by hand. */
static PyObject *Coroutine_await(Stepped *self, PyObject *Py_UNUSED(none))
{
    return (PyObject *)new_stepped(self->core, &SteppedType, Py_NewRef((PyObject *)self));
}

#define METHODS_OF_STEPPED(type)                                                                                       \
    {"send", StandIn_send, METH_O, "Resume with a value."}, METHOD(type, throw, METH_FASTCALL, "Resume with an exception."), \
        METHOD(type, close, METH_NOARGS, "End the body.")

static PyMethodDef Stepped_methods[] = {METHODS_OF_STEPPED(Stepped), {NULL}};
static PyMethodDef Coroutine_methods[] = {
    METHODS_OF_STEPPED(Stepped),
    {"__await__", (PyCFunction)Coroutine_await, METH_NOARGS | METH_COEXIST, "Return an iterator that steps it."},
    {NULL},
};

static PyAsyncMethods Stepped_async = {
    .am_await = PyObject_SelfIter,
    .am_send = (sendfunc)Stepped_step,
};

static PyTypeObject SteppedType = {
    COLLECTED_TYPE(Stepped, SIZE_IN_LINES(Stepped), Py_TPFLAGS_DISALLOW_INSTANTIATION),
    .tp_doc = "An awaited object that is stepped, and whose suspensions are timed.",
    .tp_getattro = StandIn_getattro, /* for attributes that show the position in a chain of awaits */
    .tp_as_async = &Stepped_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)Stepped_next,
    .tp_weaklistoffset = offsetof(Stepped, weak_references),
    .tp_methods = Stepped_methods,
};

/* What a coroutine function returns. As a coroutine of Python, it cannot be iterated. */
static PyTypeObject CoroutineType = {
    TYPE(Stepped, &StandInType, "coroutine", SIZE_IN_LINES(Stepped), Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION),
    .tp_traverse = (traverseproc)Stepped_traverse,
    .tp_repr = StandIn_repr,
    .tp_getattro = StandIn_getattro,
    .tp_setattro = StandIn_setattro,
    .tp_as_async = &Stepped_async,
    .tp_iternext = (iternextfunc)Stepped_next,
    .tp_weaklistoffset = offsetof(Stepped, weak_references),
    .tp_methods = Coroutine_methods,
    .tp_getset = StandIn_getset,
};
