/* Hot: coroutines whose calls are spans. Their awaited objects are stepped here, and each suspension is timed, for the
 * span of the coroutine and for those that begin inside it. Cold, at the end: throwing, closing and attributes. A part
 * of `_recorder.c`. */

/* The object that one of ours replaces: the function of a wrapper, or what it steps. */
static PyObject *replaced_by(PyObject *self)
{
    return Py_TYPE(self)->tp_vectorcall_offset > 0 ? ((Function *)self)->wrapped : ((Stepped *)self)->awaited;
}

_Static_assert(offsetof(Function, wrapped) == offsetof(Carried, function), "`replaced_by` reads both");
_Static_assert(offsetof(Stepped, awaited) == offsetof(Stretch, body), "`replaced_by` reads both");

/* Return an attribute of an object of ours, or of the object that it replaces. */
static PyObject *StandIn_getattro(PyObject *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found != NULL || replaced_by(self) == NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
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

static PyTypeObject *stood_for(PyTypeObject *);

static PyObject *StandIn_class(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)stood_for(Py_TYPE(self)));
}

/* Of what is stepped; a wrapper asks its function. */
static PyGetSetDef StandIn_getset[] = {
    {"__class__", StandIn_class, NULL, NULL, NULL},
    {NULL},
};

/* The object that `await` would step: a coroutine itself, or the iterator of another awaitable. A new reference; NULL
 * with an exception. */
static PyObject *iterator_of(PyObject *awaitable)
{
    return PyCoro_CheckExact(awaitable) ? Py_NewRef(awaitable) : Py_TYPE(awaitable)->tp_as_async->am_await(awaitable);
}

/* True for an awaitable that we can step. Any other object is passed to `await` unchanged. */
static int is_awaitable(PyObject *object)
{
    const PyAsyncMethods *methods = Py_TYPE(object)->tp_as_async;
    return PyCoro_CheckExact(object) || (methods != NULL && methods->am_await != NULL);
}

/* Make an object of one of both types. Takes the reference of the iterator. NULL without memory, with an exception. */
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

static int Stepped_traverse(Stepped *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->awaited);
    Py_VISIT(self->function);
    Py_VISIT(self->attributes);
    Py_VISIT(self->own);
    return 0;
}

/* End its span, if it has one that is open. -1 with an exception of the host's. */
static int end_own(Stepped *self, PyObject *error)
{
    Frame *own = self->own;
    if (own == NULL)
        return 0;
    int failed = own->frame->state == CLOSED ? 0 : close_frame(self->core, own, error, 0, 0);
    leave_stepped(own);
    self->own = NULL;
    Py_DECREF(own);
    return failed;
}

/* Release the awaited object: an open span of other code may still reference us. Code of the host's may run. A raised
 * exception stays. */
static void leave_awaited(Stepped *self)
{
    if (self->function != NULL || self->awaited == Py_None)
        return;
    raised_t raised = take_raised();
    Py_SETREF(self->awaited, Py_NewRef(Py_None));
    raise_again(raised);
}

static PyObject *Stepped_close(Stepped *, PyObject *);

/* Free it as a scope, even with an open span, which no caller can resume. */
static void Stepped_dealloc(Stepped *self)
{
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Py_SET_REFCNT(self, 1);
    if (self->own != NULL) {
        raised_t raised = take_raised();
        PyObject *none = Stepped_close(self, NULL);
        if (none == NULL)
            PyErr_WriteUnraisable(self->awaited);
        Py_XDECREF(none);
        if (end_own(self, NULL) < 0)
            PyErr_WriteUnraisable(NULL);
        raise_again(raised);
    }
    Py_CLEAR(self->core);
    Py_CLEAR(self->awaited);
    Py_CLEAR(self->function);
    Py_CLEAR(self->attributes);
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

static int released(PyObject *none)
{
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Close a body that will not be resumed, as a closed coroutine does. Return its result, or NULL with an exception. */
static PyObject *close_body(PyObject *body)
{
    PyObject *method = PyObject_GetAttrString(body, "close");
    if (method == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return NULL;
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    PyObject *given = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    return given;
}

/* Begin a span whose site has no known step here, and remember the step. NULL as in `open_frame`. */
static SELDOM Frame *begin_own_otherwise(Stepped *self)
{
    Core *core = self->core;
    Function *function = self->function;
    uint64_t uid = core->uid;
    Frame *own = open_frame(core, function->path.site, NULL, self->attributes, OPEN);
    if (own == NULL || core->uid != uid || own->frame->below_fold || own->frame->node->is_request)
        return own;
    if (function->uid != uid)
        forget_paths(function);
    path_t *path = &function->path;
    node_t *node = own->frame->node, *step;
    if (node->parent != core->overflow && !find_known_step(path, node->parent, &step))
        remember_step(path, node->parent, node);
    return own;
}

/* Begin its span. -1 with an exception of the host's. */
static int begin_own(Stepped *self)
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
    int is_too_deep = at_hand()->uid == core->uid && is_stack_used_up();
    int may_be_known = !is_too_deep && self->attributes == NULL && function->uid == core->uid && is_on_and_nothing_else(core);
    Frame *own = may_be_known ? new_frame_object() : NULL;
    if (own != NULL && !begin_known(core, own, &function->path, 0))
        Py_CLEAR(own);
    if (own == NULL && !is_too_deep && !PyErr_Occurred()) /* without memory */
        own = begin_own_otherwise(self);
    if (own == NULL) {
        if (is_too_deep)
            refuse_for_stack("calls of instrumented coroutines");
        else if (lose(core) == 0)
            return 0;
        raised_t raised = take_raised();
        if (released(close_body(self->awaited)) < 0)
            PyErr_Clear(); /* of two that handlers raised, the first */
        raise_again(raised);
        return -1;
    }
    leave_stepped(own);
    self->task = own->frame->task;
    self->own = own;
    own->stepped = self;
    own->waited_before_ns = 0;
    return 0;
}

/* Begin a step. Set `around` to the stepped object around it, with its reference. -1 with an exception of the host's,
 * and without a step. */
static inline int begin_step(Stepped *self, Stepped **around)
{
    if (!self->has_begun) {
        if (begin_own(self) < 0)
            return -1;
    } else if (self->suspended_ns != 0) {
        self->waited_ns += read_clock(self->core) - self->suspended_ns;
        self->suspended_ns = 0;
    }
    *around = at_hand()->stepping;
    at_hand()->stepping = (Stepped *)Py_NewRef((PyObject *)self);
    self->is_running = 1;
    return 0;
}

/* End a step that yielded to the loop, returned or raised. Return the same outcome, or an error if the end of its span
 * has raised. */
static inline PySendResult end_step(Stepped *self, Stepped *around, PySendResult ended, PyObject **result)
{
    /* If greenlets have switched meanwhile it may be another object: that stays valid, and is not running. */
    Stepped *innermost = at_hand()->stepping;
    at_hand()->stepping = around;
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
        if (end_own(self, raised.value) < 0) {
            drop_raised(raised);
        } else {
            raise_again(raised);
        }
    } else if (end_own(self, NULL) < 0) {
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
    if (self->is_running) /* it says so itself */
        return PyIter_Send(self->awaited, value, result);
    if (begin_step(self, &around) < 0)
        return PYGEN_ERROR;
    PySendResult ended = PyIter_Send(self->awaited, value, result);
    return end_step(self, around, ended, result);
}

/* Return a step's outcome as an iterator does: a result becomes a StopIteration. Takes the reference. */
static PyObject *as_of_iterator(PySendResult ended, PyObject *result)
{
    if (ended != PYGEN_RETURN)
        return result;
    if (result == Py_None) {
        Py_DECREF(result);
        PyErr_SetNone(PyExc_StopIteration);
        return NULL;
    }
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result); /* not SetObject alone: a tuple would be arguments */
    if (stop != NULL)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

static PyObject *StandIn_send(PyObject *self, PyObject *value)
{
    PyObject *result;
    PySendResult ended = Py_TYPE(self)->tp_as_async->am_send(self, value, &result);
    return as_of_iterator(ended, result);
}

/* The end of an iterator without a result needs no exception, whose making costs more than the span. */
static PyObject *Stepped_next(Stepped *self)
{
    PyObject *result;
    PySendResult ended = Stepped_step(self, Py_None, &result);
    if (ended != PYGEN_RETURN || result != Py_None)
        return as_of_iterator(ended, result);
    Py_DECREF(result);
    return NULL;
}

/* Return an object that replaces a function's coroutine and has a span of a site. Return the coroutine itself if it
 * cannot be awaited. NULL with an exception. */
static PyObject *stepped_coroutine(Function *function, PyObject *coroutine, PyObject *attributes)
{
    if (!is_awaitable(coroutine))
        return Py_NewRef(coroutine);
    PyObject *iterator = iterator_of(coroutine);
    Stepped *made = iterator == NULL ? NULL : new_stepped(function->core, &CoroutineType, iterator);
    if (made == NULL)
        return NULL;
    made->function = (Function *)Py_NewRef((PyObject *)function);
    made->attributes = Py_XNewRef(attributes);
    return (PyObject *)made;
}

/* stepped_in(frame, awaitable): an awaitable that steps another for an open span, and times its suspensions. */
static PyObject *Core_stepped_in(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || (args[0] != Py_None && Py_TYPE(args[0]) != &FrameType))
        return PyErr_Format(PyExc_TypeError, "stepped_in(frame, awaitable)");
    Frame *frame = (Frame *)args[0];
    if (args[0] == Py_None || frame->frame->state == CLOSED || !is_awaitable(args[1]))
        return Py_NewRef(args[1]);
    PyObject *iterator = iterator_of(args[1]);
    if (iterator == NULL)
        return NULL;
    Stepped *made = frame->stepped;
    if (made != NULL && made->awaited == Py_None) { /* the previous awaitable has ended */
        Py_SETREF(made->awaited, iterator);
        return Py_NewRef((PyObject *)made);
    }
    made = new_stepped(self, &SteppedType, iterator);
    if (made == NULL)
        return NULL;
    leave_stepped(frame);
    made->task = frame->frame->task;
    frame->stepped = (Stepped *)Py_NewRef((PyObject *)made);
    frame->waited_before_ns = 0;
    return (PyObject *)made;
}

/* Cold from here on: the other methods of a coroutine, for code that cancels, closes or inspects it. */

/* The raised exception is a StopIteration: its value is the result. */
static PySendResult returned(PyObject **result)
{
    raised_t raised = take_normal();
    *result = raised.value == NULL ? NULL : PyObject_GetAttrString(raised.value, "value");
    drop_raised(raised);
    return *result != NULL ? PYGEN_RETURN : PYGEN_ERROR;
}

/* Throw into the stepped object. Without a `throw` method, raise the thrown exception. */
static PySendResult thrown(PyObject *body, PyObject *const *args, Py_ssize_t nargs, PyObject **result)
{
    PyObject *method = PyObject_GetAttrString(body, "throw");
    *result = NULL;
    if (method != NULL) {
        *result = PyObject_Vectorcall(method, args, (size_t)nargs, NULL);
        Py_DECREF(method);
        if (*result != NULL)
            return PYGEN_NEXT;
        return PyErr_ExceptionMatches(PyExc_StopIteration) ? returned(result) : PYGEN_ERROR;
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
    int has_span = !self->is_running && (self->function == NULL || self->has_begun); /* a step of its body has one */
    if (has_span && begin_step(self, &around) < 0)
        return NULL;
    PySendResult ended = thrown(self->awaited, args, nargs, &result);
    if (has_span)
        ended = end_step(self, around, ended, &result);
    return as_of_iterator(ended, result);
}

static PyObject *Stepped_close(Stepped *self, PyObject *Py_UNUSED(none))
{
    static PyObject *closed; /* the result of close() */
    Stepped *around;
    if (!self->has_begun || self->is_running)
        return close_body(self->awaited);
    if ((closed == NULL && (closed = PyObject_CallNoArgs(PyExc_GeneratorExit)) == NULL) || begin_step(self, &around) < 0)
        return NULL;
    PyObject *result = NULL;
    if (released(close_body(self->awaited)) < 0) {
        end_step(self, around, PYGEN_ERROR, &result);
        return NULL;
    }
    Stepped *innermost = at_hand()->stepping;
    at_hand()->stepping = around;
    self->is_running = 0;
    int failed = end_own(self, closed);
    leave_awaited(self);
    Py_XDECREF(innermost);
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}

/* Return an iterator, as a coroutine does, for code that steps it by hand. */
static PyObject *Coroutine_await(Stepped *self, PyObject *Py_UNUSED(none))
{
    return (PyObject *)new_stepped(self->core, &SteppedType, Py_NewRef((PyObject *)self));
}

static PyMethodDef Stepped_methods[] = {
    {"send", (PyCFunction)StandIn_send, METH_O, "Go on with a value."},
    {"throw", (PyCFunction)(void (*)(void))Stepped_throw, METH_FASTCALL, "Go on with an exception."},
    {"close", (PyCFunction)Stepped_close, METH_NOARGS, "Go on no more."},
    {NULL},
};

static PyMethodDef Coroutine_methods[] = {
    {"send", (PyCFunction)StandIn_send, METH_O, "Go on with a value."},
    {"throw", (PyCFunction)(void (*)(void))Stepped_throw, METH_FASTCALL, "Go on with an exception."},
    {"close", (PyCFunction)Stepped_close, METH_NOARGS, "Go on no more."},
    {"__await__", (PyCFunction)Coroutine_await, METH_NOARGS | METH_COEXIST, "Steps it, as an iterator."},
    {NULL},
};

static PyAsyncMethods Stepped_async = {
    .am_await = PyObject_SelfIter,
    .am_send = (sendfunc)Stepped_step,
};

static PyTypeObject SteppedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Stepped",
    .tp_basicsize = SIZE_IN_LINES(Stepped),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "What is awaited, stepped and timed: it knows how long it was suspended.",
    .tp_dealloc = (destructor)Stepped_dealloc,
    .tp_traverse = (traverseproc)Stepped_traverse,
    .tp_getattro = StandIn_getattro, /* those that show the position in a chain of awaits */
    .tp_as_async = &Stepped_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)Stepped_next,
    .tp_weaklistoffset = offsetof(Stepped, weak_references),
    .tp_methods = Stepped_methods,
};

/* The object that a coroutine function returns. It cannot be iterated, as a coroutine of Python's cannot. */
static PyTypeObject CoroutineType = {
    PyVarObject_HEAD_INIT(&StandInType, 0)
    .tp_name = "coroutine",
    .tp_basicsize = SIZE_IN_LINES(Stepped),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)Stepped_dealloc,
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
