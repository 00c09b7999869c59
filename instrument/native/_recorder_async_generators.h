/* Cold: async generators, whose steps are awaited. A part of `_recorder.c`. */

struct step;

/* An async generator of the host's, to whoever asks for its class, and the span that is current during its steps. */
typedef struct {
    PyObject_HEAD
    Core *core;
    PyObject *site, *generator, *work; /* what it works on, for the device timer, or NULL */
    Stretch *stretch; /* NULL before the first step, and where recording was off then */
    struct step *under_way; /* borrowed */
    PyObject *finaliser; /* what its event loop wants to be told when it is given up */
    char has_hooks;
    char has_begun;
    PyObject *weak_references;
} AsyncGenerator;

/* What a step gives to be awaited, in place of the generator's own. */
typedef struct step {
    PyObject_HEAD
    AsyncGenerator *of;
    PyObject *awaitable;
    char begins; /* whether it runs the body of a generator that has not begun */
    char ends;   /* whether the generator has ended when it has */
    char waits;  /* nothing was sent yet */
} AsyncStep;

static PyTypeObject AsyncGeneratorType, AsyncStepType;

/* Take the exception that is raised now and leave none. */
static PyObject *
take_raised(void)
{
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    if (type == NULL)
        return NULL;
    PyErr_NormalizeException(&type, &raised, &traceback);
    if (traceback != NULL && PyException_SetTraceback(raised, traceback) < 0)
        PyErr_Clear();
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return raised;
}

/* Raise it again; where a signal handler has raised another one meanwhile, that one, in its context. */
static int
raise_again(PyObject *raised)
{
    PyObject *later = take_raised();
    if (later != NULL && raised != NULL)
        PyException_SetContext(later, raised); /* takes the reference */
    if (later == NULL)
        later = raised;
    if (later == NULL)
        return 0;
    PyErr_SetObject((PyObject *)Py_TYPE(later), later);
    Py_DECREF(later);
    return -1;
}

static int
told(PyObject *none)
{
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

static int
has_ended(AsyncGenerator *self)
{
    PyObject *frame = self->generator == NULL ? NULL : PyObject_GetAttr(self->generator, str_ag_frame);
    if (frame == NULL)
        PyErr_Clear(); /* no generator of Python's: whatever it raises ends it */
    int ended = frame == NULL || frame == Py_None;
    Py_XDECREF(frame);
    return ended;
}

/* -1 with an exception of the host's. */
static int
begin_step(AsyncStep *step, int is_throw)
{
    AsyncGenerator *self = step->of;
    step->waits = 0;
    if (!self->has_begun) {
        if (!step->begins || is_throw)
            return 0; /* it ends before its body could begin */
        self->has_begun = 1;
        Pass *pass = self->core->on ? pass_of(self->core, self->site) : NULL;
        if (pass != NULL) {
            count_passed(pass);
        } else if (self->core->on) {
            PyObject *stretch =
                PyObject_CallFunctionObjArgs((PyObject *)&StretchType, self->core, self->site, self->work, NULL);
            if (stretch == NULL && lose(self->core) < 0)
                return -1;
            Py_XSETREF(self->stretch, (Stretch *)stretch);
        }
    }
    if (self->stretch == NULL || self->under_way != NULL)
        return 0;
    self->under_way = step;
    PyObject *passes = Stretch_resume(self->stretch, NULL);
    if (passes == Py_None) {
        Py_DECREF(passes);
        return 0;
    }
    self->under_way = NULL;
    if (passes == NULL)
        return -1;
    Py_DECREF(passes);
    Py_CLEAR(self->stretch); /* the site is muted */
    return 0;
}

/* The step is over, with the exception that is raised now or without one, which stays as it is. -1 where one is.
 * `gives` says whether it has a result, which is an item but where the step is to end the generator. */
static int
end_step(AsyncStep *step, int gives)
{
    AsyncGenerator *self = step->of;
    if (self->under_way != step)
        return PyErr_Occurred() ? -1 : 0;
    self->under_way = NULL;
    PyObject *raised = take_raised();
    Stretch *stretch = (Stretch *)Py_NewRef((PyObject *)self->stretch);
    int failed = told(gives && !step->ends ? Stretch_yielded(stretch, NULL) : Stretch_suspend(stretch, NULL));
    if ((raised != NULL || step->ends) && !failed && has_ended(self)) {
        int is_usual = raised == NULL || PyErr_GivenExceptionMatches(raised, PyExc_StopAsyncIteration) ||
                       PyErr_GivenExceptionMatches(raised, PyExc_GeneratorExit);
        (void)told(Stretch_finish(stretch, is_usual ? Py_None : raised));
    }
    Py_DECREF(stretch);
    return raise_again(raised);
}

static PySendResult
AsyncStep_am_send(AsyncStep *self, PyObject *value, PyObject **result)
{
    *result = NULL;
    if (self->waits && begin_step(self, 0) < 0)
        return PYGEN_ERROR;
    PySendResult sent = PyIter_Send(self->awaitable, value, result);
    if (sent == PYGEN_NEXT || end_step(self, sent == PYGEN_RETURN) == 0)
        return sent;
    Py_CLEAR(*result);
    return PYGEN_ERROR;
}

/* A step's result as an iterator gives it: by StopIteration. */
static PyObject *
as_iterator(PySendResult sent, PyObject *result)
{
    if (sent != PYGEN_RETURN)
        return result;
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
    if (stop != NULL)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

static PyObject *
AsyncStep_send(AsyncStep *self, PyObject *value)
{
    PyObject *result;
    PySendResult sent = AsyncStep_am_send(self, value, &result);
    return as_iterator(sent, result);
}

static PyObject *
AsyncStep_next(AsyncStep *self)
{
    return AsyncStep_send(self, Py_None);
}

static PyObject *
AsyncStep_throw(AsyncStep *self, PyObject *args)
{
    if (self->waits && begin_step(self, 1) < 0)
        return NULL;
    PyObject *throw = PyObject_GetAttr(self->awaitable, str_throw);
    PyObject *result = throw == NULL ? NULL : PyObject_CallObject(throw, args);
    Py_XDECREF(throw);
    if (result != NULL) /* it waits again */
        return result;
    if (!PyErr_ExceptionMatches(PyExc_StopIteration)) {
        end_step(self, 0);
        return NULL;
    }
    PyObject *stop = take_raised();
    if (end_step(self, 1) < 0)
        Py_XDECREF(stop);
    else
        raise_again(stop);
    return NULL;
}

static PyObject *
AsyncStep_close(AsyncStep *self, PyObject *Py_UNUSED(none))
{
    self->waits = 0;
    PyObject *result = PyObject_CallMethodNoArgs(self->awaitable, str_close);
    if (end_step(self, 0) < 0)
        Py_CLEAR(result);
    return result;
}

static int
AsyncStep_traverse(AsyncStep *self, visitproc visit, void *arg)
{
    Py_VISIT(self->of);
    Py_VISIT(self->awaitable);
    return 0;
}

/* One that is given up in its middle: the generator stands still in it. */
static void
AsyncStep_dealloc(AsyncStep *self)
{
    PyObject_GC_UnTrack(self);
    if (self->of->under_way == self) {
        PyObject *raised = take_raised();
        self->of->under_way = NULL;
        if (told(Stretch_suspend(self->of->stretch, NULL)) < 0)
            PyErr_WriteUnraisable(NULL);
        (void)raise_again(raised);
    }
    Py_XDECREF(self->awaitable);
    Py_DECREF(self->of);
    PyObject_GC_Del(self);
}

static PyMethodDef AsyncStep_methods[] = {
    {"send", (PyCFunction)AsyncStep_send, METH_O, NULL},
    {"throw", (PyCFunction)AsyncStep_throw, METH_VARARGS, NULL},
    {"close", (PyCFunction)AsyncStep_close, METH_NOARGS, NULL},
    {NULL},
};

static PyAsyncMethods AsyncStep_as_async = {
    .am_await = PyObject_SelfIter,
    .am_send = (sendfunc)AsyncStep_am_send,
};

static PyTypeObject AsyncStepType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.AsyncStep",
    .tp_basicsize = sizeof(AsyncStep),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A step of an async generator, to be awaited.",
    .tp_dealloc = (destructor)AsyncStep_dealloc,
    .tp_traverse = (traverseproc)AsyncStep_traverse,
    .tp_as_async = &AsyncStep_as_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)AsyncStep_next,
    .tp_methods = AsyncStep_methods,
};

/* What the generator's own finaliser calls: ours tells the event loop. */
static PyObject *
leave_to_us(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(generator))
{
    Py_RETURN_NONE;
}

static PyMethodDef leave_to_us_method = {"leave_to_us", leave_to_us, METH_O, NULL};
static PyObject *left_to_us;

/* The generator's method is called where no event loop listens: the loop is told of us, who stand for it, as it would
 * have been told of the generator. */
static PyObject *
call_unheard(AsyncGenerator *self, PyObject *name, PyObject *args)
{
    PyObject *method = PyObject_GetAttr(self->generator, name);
    if (method == NULL)
        return NULL;
    PyThreadState *state = PyThreadState_Get();
    PyObject *firstiter = NULL, *finaliser = NULL;
    int is_first = !self->has_hooks;
    if (is_first) {
        self->has_hooks = 1;
        firstiter = state->async_gen_firstiter;
        finaliser = state->async_gen_finalizer;
        state->async_gen_firstiter = NULL;
        /* In a cycle the collector may come to the generator first, which would close itself on the spot. */
        state->async_gen_finalizer = finaliser == NULL ? NULL : left_to_us;
    }
    PyObject *awaitable = PyObject_CallObject(method, args);
    Py_DECREF(method);
    if (!is_first)
        return awaitable;
    state->async_gen_firstiter = firstiter;
    state->async_gen_finalizer = finaliser;
    self->finaliser = Py_XNewRef(finaliser);
    if (awaitable != NULL && firstiter != NULL) {
        Py_INCREF(firstiter);
        if (told(PyObject_CallOneArg(firstiter, (PyObject *)self)) < 0)
            Py_CLEAR(awaitable);
        Py_DECREF(firstiter);
    }
    return awaitable;
}

/* What is sent to, of something that is awaited; takes the reference. */
static PyObject *
iterator_of(PyObject *awaitable)
{
    PyAsyncMethods *methods = awaitable == NULL ? NULL : Py_TYPE(awaitable)->tp_as_async;
    if (methods == NULL || methods->am_await == NULL)
        return awaitable;
    PyObject *iterator = methods->am_await(awaitable);
    Py_DECREF(awaitable);
    return iterator;
}

static PyObject *
new_step(AsyncGenerator *self, PyObject *name, PyObject *args, char begins, char ends)
{
    if (self->generator == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the async generator has been given up");
        return NULL;
    }
    PyObject *iterator = iterator_of(self->has_hooks && args == NULL
                                         ? PyObject_CallMethodNoArgs(self->generator, name)
                                         : call_unheard(self, name, args));
    AsyncStep *step = iterator == NULL ? NULL : PyObject_GC_New(AsyncStep, &AsyncStepType);
    if (step == NULL) {
        Py_XDECREF(iterator);
        return NULL;
    }
    step->of = (AsyncGenerator *)Py_NewRef((PyObject *)self);
    step->awaitable = iterator;
    step->begins = begins;
    step->ends = ends;
    step->waits = 1;
    PyObject_GC_Track(step);
    return (PyObject *)step;
}

static PyObject *
AsyncGenerator_anext(AsyncGenerator *self)
{
    return new_step(self, str_anext, NULL, 1, 0);
}

static PyObject *
AsyncGenerator_asend(AsyncGenerator *self, PyObject *args)
{
    return new_step(self, str_asend, args, 1, 0);
}

static PyObject *
AsyncGenerator_athrow(AsyncGenerator *self, PyObject *args)
{
    return new_step(self, str_athrow, args, 0, 0);
}

static PyObject *
AsyncGenerator_aclose(AsyncGenerator *self, PyObject *Py_UNUSED(none))
{
    return new_step(self, str_aclose, NULL, 0, 1);
}

static int
AsyncGenerator_traverse(AsyncGenerator *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->site);
    Py_VISIT(self->generator);
    Py_VISIT(self->work);
    Py_VISIT(self->stretch);
    Py_VISIT(self->finaliser);
    return 0;
}

static int
AsyncGenerator_clear(AsyncGenerator *self)
{
    Py_CLEAR(self->generator);
    Py_CLEAR(self->finaliser);
    return 0;
}

/* As a generator's own: the event loop closes it, or, without one, the generator closes itself. */
static void
AsyncGenerator_finalize(AsyncGenerator *self)
{
    PyObject *raised = take_raised();
    if (self->finaliser != NULL && !has_ended(self)) {
        if (told(PyObject_CallOneArg(self->finaliser, (PyObject *)self)) < 0)
            PyErr_WriteUnraisable((PyObject *)self);
    } else if (self->stretch != NULL && self->stretch->frame != NULL && self->stretch->frame->frame->state != CLOSED) {
        Stretch *stretch = self->stretch;
        int failed = self->under_way == NULL ? told(Stretch_resume(stretch, NULL)) : 0;
        Py_CLEAR(self->generator);
        failed |= told(Stretch_suspend(stretch, NULL));
        failed |= told(Stretch_finish(stretch, Py_None));
        if (failed)
            PyErr_WriteUnraisable(NULL);
    }
    (void)raise_again(raised);
}

static void
AsyncGenerator_dealloc(AsyncGenerator *self)
{
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return; /* the event loop has it */
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->generator);
    Py_XDECREF(self->stretch);
    Py_XDECREF(self->finaliser);
    Py_XDECREF(self->work);
    Py_DECREF(self->site);
    Py_DECREF(self->core);
    PyObject_GC_Del(self);
}

static PyObject *
AsyncGenerator_repr(AsyncGenerator *self)
{
    return PyUnicode_FromFormat("<instrumented %R>", self->generator);
}

/* `ag_frame`, `ag_running`, `__name__` ... */
static PyObject *
AsyncGenerator_getattro(AsyncGenerator *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr((PyObject *)self, name);
    if (found != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError) || self->generator == NULL)
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(self->generator, name);
}

static PyObject *
AsyncGenerator_class(AsyncGenerator *self, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)(self->generator == NULL ? Py_TYPE(self) : Py_TYPE(self->generator)));
}

static PyGetSetDef AsyncGenerator_getset[] = {
    {"__class__", (getter)AsyncGenerator_class, NULL, NULL, NULL},
    {NULL},
};

static PyMethodDef AsyncGenerator_methods[] = {
    {"asend", (PyCFunction)AsyncGenerator_asend, METH_VARARGS, NULL},
    {"athrow", (PyCFunction)AsyncGenerator_athrow, METH_VARARGS, NULL},
    {"aclose", (PyCFunction)AsyncGenerator_aclose, METH_NOARGS, NULL},
    {NULL},
};

static PyAsyncMethods AsyncGenerator_as_async = {
    .am_aiter = PyObject_SelfIter,
    .am_anext = (unaryfunc)AsyncGenerator_anext,
};

static PyTypeObject AsyncGeneratorType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.AsyncGenerator",
    .tp_basicsize = sizeof(AsyncGenerator),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "An async generator whose steps are one span.",
    .tp_dealloc = (destructor)AsyncGenerator_dealloc,
    .tp_finalize = (destructor)AsyncGenerator_finalize,
    .tp_traverse = (traverseproc)AsyncGenerator_traverse,
    .tp_clear = (inquiry)AsyncGenerator_clear,
    .tp_repr = (reprfunc)AsyncGenerator_repr,
    .tp_getattro = (getattrofunc)AsyncGenerator_getattro,
    .tp_weaklistoffset = offsetof(AsyncGenerator, weak_references),
    .tp_as_async = &AsyncGenerator_as_async,
    .tp_methods = AsyncGenerator_methods,
    .tp_getset = AsyncGenerator_getset,
};

/* Call what makes an async generator. Its span begins with its first step. */
static PyObject *
Function_call_async_generator(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *generator = PyObject_Vectorcall(self->wrapped, args, nargsf, names), *work = NULL;
    if (self->pass != NULL)
        count_passed(self->pass);
    if (generator == NULL || self->muted)
        return generator;
    if (self->works != NULL && self->core->on && tell_work(self, args, nargsf, names, &work) < 0) {
        Py_DECREF(generator);
        return NULL;
    }
    AsyncGenerator *made = PyObject_GC_New(AsyncGenerator, &AsyncGeneratorType);
    if (made == NULL) {
        Py_XDECREF(work);
        if (lose(self->core) == 0)
            return generator;
        Py_DECREF(generator);
        return NULL;
    }
    memset((char *)made + sizeof(PyObject), 0, sizeof(AsyncGenerator) - sizeof(PyObject));
    made->core = (Core *)Py_NewRef((PyObject *)self->core);
    made->site = Py_NewRef(self->site);
    made->generator = generator;
    made->work = work;
    PyObject_GC_Track(made);
    return (PyObject *)made;
}
