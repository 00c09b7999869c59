/* Hot: spans of generators, also of awaitable ones. They are current only while the body runs. A part of
 * `_recorder.c`. */

/* Return an object that replaces a function's generator, and has a span: a new reference, NULL with an exception. */
static PyObject *new_stretch(Core *core, PyTypeObject *type, PyObject *site, PyObject *body, PyObject *attributes)
{
    Stretch *self = (Stretch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->body = Py_NewRef(body);
    self->core = (Core *)Py_NewRef(core);
    self->site = Py_NewRef(site);
    self->attributes = Py_XNewRef(attributes);
    LINK(self->core->stretches, self);
    self->listed = 1;
    return (PyObject *)self;
}

/* Free the scopes that a suspended body left open. They are in no chain. */
static void drop_inner(Stretch *self)
{
    frame_t *inner = self->inner;
    self->inner = NULL;
    release_chain(inner, self->frame != NULL ? self->frame->frame : NULL);
}

#define REFERENCES_Stretch(EACH) EACH(body) EACH(frame) EACH(parent) EACH(stepped) EACH(core) EACH(site) EACH(attributes)

static void end_dropped_body(Stretch *);

static void Stretch_dealloc(Stretch *self)
{
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    if (self->frame != NULL && self->frame->frame->state != CLOSED) {
        Py_SET_REFCNT(self, 1); /* code of the service may run, and the collector may visit the object */
        end_dropped_body(self);
    }
    PyObject_GC_UnTrack(self);
    if (self->listed)
        UNLINK(self->core->stretches, self);
    drop_inner(self);
    if (self->frame != NULL)
        self->frame->stretch = NULL;
    REFERENCES_Stretch(RELEASE)
    Py_TYPE(self)->tp_free((PyObject *)self);
}

TRAVERSE(Stretch)

/* Move an open span to this thread and task, where it is resumed. */
static void move_frame(frame_t *frame, Ring *ring, uint64_t task)
{
    frame->task = task;
    if (frame->ring != ring && frame->self != NULL) {
        Py_INCREF(ring);
        Py_XSETREF(frame->ring, ring);
    }
}

/* Pause a scope with its generator. While the generator is suspended, an await around it is no wait of the scope. */
static void leave_steps(frame_t *frame, int64_t now_ns)
{
    Frame *self = (Frame *)frame->self;
    if (self == NULL || self->stepped == NULL)
        return;
    self->waited_before_ns = waited_since_begin(self, now_ns); /* the wait so far, until the scope is resumed */
    leave_stepped(self);
}

static void follow_steps(frame_t *frame)
{
    Frame *self = (Frame *)frame->self;
    if (self == NULL || self->stepped != NULL || !is_stepped_in(frame->task))
        return;
    self->stepped = (Stepped *)Py_NewRef((PyObject *)thread_cache()->stepping);
    self->waited_before_ns = thread_cache()->stepping->waited_ns - self->waited_before_ns;
}

static int finish_span(Stretch *, PyObject *);

/* Resume the span before the body runs. If the site is muted, begin no span, or end an open one in which no scope is
 * open. Return -1 with an exception of the service set. */
static int resume_span(Stretch *self)
{
    Core *core = self->core;
    if (self->lost)
        return 0;
    Pass *pass = pass_of(core, self->site);
    if (pass != NULL && (self->frame == NULL || self->inner == self->frame->frame)) {
        if (self->frame == NULL) {
            self->lost = 1;
            count_passed(pass);
        } else {
            pass->cut++;
            return finish_span(self, Py_None);
        }
        return 0;
    }
    if (self->frame == NULL) {
        if (thread_cache()->uid == core->uid && is_stack_used_up()) {
            refuse_for_stack("steps of instrumented generators");
            return -1;
        }
        self->frame = open_frame(core, self->site, NULL, self->attributes, OPEN);
        if (self->frame == NULL) {
            self->lost = 1;
            return count_loss(core);
        }
        self->frame->stretch = self;
        leave_stepped(self->frame); /* its caller may wait while the generator is suspended */
        self->resumed_ns = self->frame->frame->start_ns;
        return 0;
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL) /* the span stays open, but is not current in this step */
        return clear_fault();
    frame_t *span = self->frame->frame;
    int64_t now_ns = read_clock(core);
    int64_t gap_ns = now_ns - self->suspended_ns;
    frame_t *frame = self->inner;
    if (frame == NULL) /* the span has ended */
        return 0;
    totals_t *totals = totals_here(ring, span->node);
    if (totals != NULL)
        totals->steps++;
    Py_INCREF(ring);
    Py_INCREF(current);
    for (; frame != span; frame = frame->above) {
        /* A scope that was left open across a yield did no work meanwhile. */
        frame->children_ns += gap_ns;
        frame->counted_from_ns += gap_ns;
        move_frame(frame, ring, current->task);
        follow_steps(frame);
    }
    move_frame(span, ring, current->task);
    span->above = current->top; /* the chain takes over the references of the inner frames */
    current->top = self->inner;
    self->inner = NULL;
    frame = current->top;
    if (publishes_requests_alone(core, current))
        while (frame != span && !is_request_itself(frame))
            frame = frame->above;
    publish_begun(core, current, frame);
    self->resumed_ns = now_ns;
    Py_DECREF(current);
    Py_DECREF(ring);
    if (span->pair != NULL && call_pair(span, str_resume) < 0)
        return -1;
    return 0;
}

/* Return the identity of the current span here: a new reference, NULL for none. */
static Published *current_identity(Current *current)
{
    frame_t *frame = current->top;
    while (frame != NULL && frame->state == CLOSED)
        frame = frame->above;
    if (frame == NULL)
        return (Published *)Py_XNewRef((PyObject *)current->base);
    PyObject *published = frame->published != NULL ? Py_NewRef(frame->published) : new_published(current, frame);
    if (published == NULL)
        return NULL;
    Published *first = (Published *)Py_NewRef((PyObject *)first_of(published));
    Py_DECREF(published);
    return first;
}

static int suspend_span(Stretch *self)
{
    Core *core = self->core;
    if (self->frame == NULL || self->inner != NULL)
        return 0;
    frame_t *span = self->frame->frame;
    int64_t now_ns = read_clock(core);
    int64_t step_ns = now_ns - self->resumed_ns;
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL)
        return clear_fault();
    self->active_ns += step_ns;
    self->suspended_ns = now_ns;
    frame_t *frame = current->top;
    while (frame != NULL && frame != span)
        frame = frame->above;
    if (frame == NULL)
        return 0; /* other code has ended it */
    self->inner = current->top;
    current->top = span->above;
    frame_t *caller = span->above;
    span->above = NULL;
    if (caller == NULL && current->base != NULL)
        caller = current->base->frame;
    if (caller != NULL)
        caller->has_rows = 1; /* as it will when this span has ended */
    if (caller != NULL && caller->ring == ring && caller->task == span->task) {
        caller->children_ns += step_ns;
        if (self->stepped != NULL) {
            count_waited_above(caller, self->stepped->waited_ns - self->waited_counted_ns);
            self->waited_counted_ns = self->stepped->waited_ns;
        }
    }
    Py_INCREF(current);
    uint64_t published_id = current->published_id;
    if (self->stepped == NULL)
        for (frame = self->inner; frame != span; frame = frame->above)
            leave_steps(frame, now_ns);
    frame = self->inner;
    while (frame != span && frame->span_id != published_id)
        frame = frame->above;
    publish_rest(core, current, frame->span_id);
    if (!self->has_parent) {
        self->has_parent = 1;
        self->parent = current_identity(current);
    }
    Py_DECREF(current);
    if (span->pair != NULL && call_pair(span, str_pause) < 0)
        return -1;
    return 0;
}

/* Suspend the span, and count the item that the body has yielded. Return -1 with an exception of the service set. */
static int count_item(Stretch *self)
{
    if (suspend_span(self) < 0)
        return -1;
    if (self->inner == NULL)
        return 0;
    int64_t gap_ns = self->suspended_ns - self->last_item_ns;
    self->last_item_ns = self->suspended_ns;
    if (gap_ns > self->longest_gap_ns) { /* true for the first item, as `last_item_ns` is 0 before */
        if (self->items == 0)
            self->first_item_ns = self->suspended_ns;
        else
            self->longest_gap_ns = gap_ns;
    }
    self->items++;
    return 0;
}

/* Set the attributes about the items, except names that the service has set. Return -1 with an exception of the service
 * set. */
static int add_item_facts(Stretch *self)
{
    frame_t *frame = self->frame->frame;
    struct {
        PyObject *name;
        int64_t value;
    } facts[] = {{str_items, self->items},
                 {str_first_item, self->first_item_ns - frame->start_ns},
                 {str_last_item, self->last_item_ns - frame->start_ns},
                 {str_longest_gap, self->longest_gap_ns}};
    PyObject *before = Py_XNewRef(frame->attributes);
    PyObject *attributes = before != NULL && PyDict_Check(before) ? PyDict_Copy(before) : PyDict_New();
    for (int i = 0; attributes != NULL && i < (self->items > 1 ? 4 : 3); i++) {
        if (PyDict_Contains(attributes, facts[i].name) != 0)
            continue;
        PyObject *value = PyLong_FromLongLong(facts[i].value);
        if (value == NULL || put_attribute(self->core, attributes, facts[i].name, value) < 0)
            Py_CLEAR(attributes);
        Py_XDECREF(value);
    }
    if (attributes != NULL && frame->state != CLOSED && frame->attributes == before) {
        Py_XSETREF(frame->attributes, attributes);
    } else { /* without memory, or a finaliser of the service changed the span */
        count_event(self->core, NO_DETAILS);
        Py_XDECREF(attributes);
    }
    Py_XDECREF(before);
    return clear_fault();
}

static int finish_span(Stretch *self, PyObject *error)
{
    if (self->frame == NULL || self->frame->frame->state == CLOSED)
        return 0;
    frame_t *frame = self->frame->frame;
    if (self->inner == NULL) { /* a signal handler of the service has ended the step early */
        PyObject *pair = frame->pair;
        frame->pair = NULL;
        int failed = suspend_span(self);
        frame->pair = pair;
        if (failed < 0)
            return -1;
        if (frame->state == CLOSED)
            return 0;
    }
    int64_t end_ns = read_clock(self->core);
    if (self->items > 0 && add_item_facts(self) < 0)
        return -1;
    frame->state = CLOSED;
    PyObject *published = take_published(frame);
    if (published != NULL) {
        Py_XSETREF(first_of(published)->above, (Published *)Py_XNewRef((PyObject *)nearest_open(self->parent)));
        Py_DECREF(published);
    }
    Py_CLEAR(self->parent);
    drop_inner(self);
    Ring *ring = ring_of(self->core);
    if (ring == NULL)
        return count_loss(self->core);
    Py_INCREF(ring);
    PyObject *name = name_of_end(self->core, frame, error);
    int64_t waited_ns = self->stepped != NULL ? self->stepped->waited_ns : 0;
    waited_ns = waited_ns < self->active_ns ? waited_ns : self->active_ns;
    leave_stepped(self->frame);
    store_span(self->core, ring, frame, end_ns, self->active_ns - waited_ns, waited_ns, name);
    Py_XDECREF(name);
    int failed = frame->pair != NULL ? end_on_device(ring, frame, end_ns) : 0;
    Py_DECREF(ring);
    return failed ? -1 : 0;
}

/* Return what awaits a step of the body, which may be suspended: a new reference, NULL with an exception. */
static PyObject *Stretch_stepped(Stretch *self, PyObject *awaitable)
{
    PyObject *steps = stepped_for(self->core, self->frame, awaitable);
    if (steps != NULL && steps == (PyObject *)self->frame->stepped) {
        self->frame->stepped->task = self->frame->frame->task;
        Py_XSETREF(self->stepped, (Stepped *)Py_NewRef(steps));
    }
    return steps;
}

/* Return true if the steps of the body have no span. */
static inline int has_no_span(const Stretch *self)
{
    return self->is_running /* the body raises its own error */ || self->lost ||
           (self->frame != NULL && self->frame->frame->state == CLOSED);
}

/* End a step of the body. Return the same outcome, or an error if ending the span has raised. */
static PySendResult end_body_step(Stretch *self, PySendResult ended, PyObject **result)
{
    raised_t raised = {0};
    self->is_running = 0;
    if (ended == PYGEN_NEXT) {
        if ((Py_TYPE(self) == &AwaitableType ? suspend_span(self) : count_item(self)) == 0)
            return ended;
        ended = PYGEN_ERROR;
    }
    if (ended == PYGEN_ERROR) {
        Py_CLEAR(*result);
        raised = take_normal();
    }
    int is_end = raised.type == NULL || PyErr_GivenExceptionMatches(raised.type, PyExc_GeneratorExit) ||
                 PyErr_GivenExceptionMatches(raised.type, PyExc_StopAsyncIteration);
    if (suspend_span(self) == 0 && finish_span(self, is_end || raised.value == NULL ? Py_None : raised.value) == 0) {
        raise_again(raised);
        return ended;
    }
    Py_CLEAR(*result);
    drop_raised(raised);
    return PYGEN_ERROR;
}

/* Begin a step of the body. Return true if the step has a span, -1 with an exception set. */
static inline __attribute__((always_inline)) int begin_body_step(Stretch *self, int may_begin)
{
    if (has_no_span(self) || (self->frame == NULL && !may_begin))
        return 0;
    if (__builtin_expect(resume_span(self) < 0, 0))
        return -1;
    if (has_no_span(self))
        return 0;
    self->is_running = 1;
    return 1;
}

static PySendResult Generator_step(Stretch *self, PyObject *value, PyObject **result)
{
    *result = NULL;
    int has_span = begin_body_step(self, value == Py_None);
    if (__builtin_expect(has_span < 0, 0))
        return PYGEN_ERROR;
    PySendResult ended = PyIter_Send(self->body, value, result);
    return has_span ? end_body_step(self, ended, result) : ended;
}

static PyObject *Generator_next(Stretch *self)
{
    PyObject *result;
    PySendResult ended = Generator_step(self, Py_None, &result);
    return as_of_iterator(ended, result);
}

static PyObject *Generator_throw(Stretch *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *result;
    int has_span = begin_body_step(self, 0);
    if (has_span < 0)
        return NULL;
    PySendResult ended = throw_into(self->body, args, nargs, &result);
    if (has_span)
        ended = end_body_step(self, ended, &result);
    return as_of_iterator(ended, result);
}

static PyObject *Generator_close(Stretch *self, PyObject *Py_UNUSED(none))
{
    int has_span = begin_body_step(self, 0);
    if (has_span < 0)
        return NULL;
    PyObject *result = close_body(self->body);
    if (has_span)
        end_body_step(self, result == NULL ? PYGEN_ERROR : PYGEN_RETURN, &result);
    return result;
}

/* Close the body of a generator that has no references left. The body itself reports what its closing raises. */
static void end_dropped_body(Stretch *self)
{
    raised_t raised = take_raised();
    if (Py_TYPE(self) != &AsyncGeneratorType && !self->is_running && resume_span(self) < 0)
        PyErr_WriteUnraisable(NULL);
    Py_CLEAR(self->body);
    if (suspend_span(self) < 0 || finish_span(self, Py_None) < 0)
        PyErr_WriteUnraisable(NULL);
    raise_again(raised);
}

/* Return the awaitable for a step of an async generator: a new reference, NULL with an exception. Takes the reference
 * to the body's awaitable. Without memory it returns that one. */
static PyObject *new_async_step(Stretch *generator, PyObject *awaitable, int closes)
{
    AsyncStep *self = awaitable == NULL ? NULL : (AsyncStep *)AsyncStepType.tp_alloc(&AsyncStepType, 0);
    if (self == NULL) {
        if (awaitable != NULL && count_loss(generator->core) < 0)
            Py_CLEAR(awaitable);
        return awaitable;
    }
    self->awaitable = awaitable;
    self->generator = (Stretch *)Py_NewRef((PyObject *)generator);
    self->closes = (char)closes;
    return (PyObject *)self;
}

/* Begin a step of an async generator. Return -1 with an exception set. */
static int begin_async_step(AsyncStep *self, int may_begin)
{
    Stretch *generator = self->generator;
    int has_span = begin_body_step(generator, may_begin && !self->closes);
    self->has_begun = 1;
    if (has_span < 0)
        return -1;
    self->is_ours = (char)has_span;
    self->steps = has_span ? Stretch_stepped(generator, self->awaitable) : iterator_of(self->awaitable);
    return self->steps == NULL ? -1 : 0;
}

/* End a step as `end_body_step`. A result is an item, except that of `aclose`. */
static PySendResult end_async_step(AsyncStep *self, PySendResult ended, PyObject **result)
{
    if (ended == PYGEN_NEXT || !self->is_ours)
        return ended;
    self->is_ours = 0;
    int is_item = ended == PYGEN_RETURN && !self->closes;
    ended = end_body_step(self->generator, is_item ? PYGEN_NEXT : ended, result);
    return ended == PYGEN_NEXT ? PYGEN_RETURN : ended;
}

static PySendResult AsyncStep_step(AsyncStep *self, PyObject *value, PyObject **result)
{
    *result = NULL;
    if (!self->has_begun && begin_async_step(self, 1) < 0)
        return end_async_step(self, PYGEN_ERROR, result);
    PySendResult ended = PyIter_Send(self->steps, value, result);
    return end_async_step(self, ended, result);
}

static PyObject *AsyncStep_next(PyObject *self)
{
    return StandIn_send(self, Py_None);
}

static PyObject *AsyncStep_throw(AsyncStep *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *result = NULL;
    if (!self->has_begun && begin_async_step(self, 0) < 0) {
        end_async_step(self, PYGEN_ERROR, &result);
        return NULL;
    }
    PySendResult ended = throw_into(self->steps, args, nargs, &result);
    ended = end_async_step(self, ended, &result);
    return as_of_iterator(ended, result);
}

static PyObject *AsyncStep_close(AsyncStep *self, PyObject *Py_UNUSED(none))
{
    PyObject *result = close_body(self->steps != NULL ? self->steps : self->awaitable);
    if (self->is_ours) {
        self->is_ours = 0;
        end_body_step(self->generator, result == NULL ? PYGEN_ERROR : PYGEN_RETURN, &result);
    }
    return result;
}

#define REFERENCES_AsyncStep(EACH) EACH(steps) EACH(awaitable) EACH(generator)

static void AsyncStep_dealloc(AsyncStep *self)
{
    if (self->is_ours) { /* the awaitable was dropped before the step ended */
        Py_SET_REFCNT(self, 1);
        PyObject *none;
        raised_t raised = take_raised();
        none = AsyncStep_close(self, NULL);
        if (none == NULL)
            PyErr_WriteUnraisable(self->awaitable);
        Py_XDECREF(none);
        raise_again(raised);
    }
    PyObject_GC_UnTrack(self);
    REFERENCES_AsyncStep(RELEASE)
    Py_TYPE(self)->tp_free((PyObject *)self);
}

TRAVERSE(AsyncStep)

static PyObject *AsyncGenerator_next(Stretch *self)
{
    return new_async_step(self, Py_TYPE(self->body)->tp_as_async->am_anext(self->body), 0);
}

static PyObject *async_step_by(Stretch *self, const char *name, PyObject *const *args, Py_ssize_t nargs, int closes)
{
    PyObject *method = PyObject_GetAttrString(self->body, name);
    PyObject *awaitable = method == NULL ? NULL : PyObject_Vectorcall(method, args, (size_t)nargs, NULL);
    Py_XDECREF(method);
    return new_async_step(self, awaitable, closes);
}

static PyObject *AsyncGenerator_asend(Stretch *self, PyObject *value)
{
    return async_step_by(self, "asend", &value, 1, 0);
}

static PyObject *AsyncGenerator_athrow(Stretch *self, PyObject *const *args, Py_ssize_t nargs)
{
    return async_step_by(self, "athrow", args, nargs, 0);
}

static PyObject *AsyncGenerator_aclose(Stretch *self, PyObject *Py_UNUSED(none))
{
    return async_step_by(self, "aclose", NULL, 0, 1);
}

static PyMethodDef Generator_methods[] = {METHODS_OF_STEPPED(Generator), {NULL}};
static PyMethodDef AsyncStep_methods[] = {METHODS_OF_STEPPED(AsyncStep), {NULL}};

static PyMethodDef AsyncGenerator_methods[] = {
    METHOD(AsyncGenerator, asend, METH_O, "Resume with a value."),
    METHOD(AsyncGenerator, athrow, METH_FASTCALL, "Resume with an exception."),
    METHOD(AsyncGenerator, aclose, METH_NOARGS, "End the body."),
    {NULL},
};

static PyAsyncMethods Generator_async = {.am_send = (sendfunc)Generator_step};
static PyAsyncMethods Awaitable_async = {.am_send = (sendfunc)Generator_step, .am_await = PyObject_SelfIter};
static PyAsyncMethods AsyncGenerator_async = {.am_aiter = PyObject_SelfIter, .am_anext = (unaryfunc)AsyncGenerator_next};
static PyAsyncMethods AsyncStep_async = {.am_send = (sendfunc)AsyncStep_step, .am_await = PyObject_SelfIter};

#define STRETCH_TYPE(name)                                                                                             \
    TYPE(Stretch, &StandInType, name, SIZE_IN_LINES(Stretch), Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION), \
    .tp_traverse = (traverseproc)Stretch_traverse,                                                                 \
    .tp_repr = StandIn_repr,                                                                                       \
    .tp_getattro = StandIn_getattro,                                                                               \
    .tp_setattro = StandIn_setattro,                                                                               \
    .tp_weaklistoffset = offsetof(Stretch, weak_references),                                                       \
    .tp_getset = StandIn_getset

static PyTypeObject GeneratorType = {
    STRETCH_TYPE("generator"),
    .tp_as_async = &Generator_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)Generator_next,
    .tp_methods = Generator_methods,
};

/* A generator of `types.coroutine`. It yields to the event loop, not to a reader of items. */
static PyTypeObject AwaitableType = {
    STRETCH_TYPE("generator"),
    .tp_as_async = &Awaitable_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)Generator_next,
    .tp_methods = Generator_methods,
};

static PyTypeObject AsyncGeneratorType = {
    STRETCH_TYPE("async_generator"),
    .tp_as_async = &AsyncGenerator_async,
    .tp_methods = AsyncGenerator_methods,
};

static PyTypeObject AsyncStepType = {
    TYPE(AsyncStep, NULL, "async_generator_asend", sizeof(AsyncStep), Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION),
    .tp_traverse = (traverseproc)AsyncStep_traverse,
    .tp_as_async = &AsyncStep_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = AsyncStep_next,
    .tp_methods = AsyncStep_methods,
};
