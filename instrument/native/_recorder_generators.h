/* Hot: spans of generators, also awaitable ones: they are current only while the body runs. A part of `_recorder.c`. */

/* Return an object that replaces a function's generator and has a span of a site. NULL with an exception. */
static PyObject *new_stretch(Core *core, PyTypeObject *type, PyObject *site, PyObject *body, PyObject *attributes)
{
    Stretch *self = (Stretch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->body = Py_NewRef(body);
    self->core = (Core *)Py_NewRef(core);
    self->site = Py_NewRef(site);
    self->attributes = Py_XNewRef(attributes);
    self->next = self->core->stretches;
    if (self->next != NULL)
        self->next->previous = self;
    self->core->stretches = self;
    self->listed = 1;
    return (PyObject *)self;
}

/* Free the scopes that a suspended body left open, which are in no chain. */
static void drop_inner(Stretch *self)
{
    frame_t *inner = self->inner;
    self->inner = NULL;
    release_chain(inner, self->frame != NULL ? self->frame->frame : NULL);
}

#define HELD_BY_STRETCH(EACH) EACH(body) EACH(frame) EACH(parent) EACH(stepped) EACH(core) EACH(site) EACH(attributes)

static void end_dropped_body(Stretch *);

static void Stretch_dealloc(Stretch *self)
{
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    if (self->frame != NULL && self->frame->frame->state != CLOSED) {
        Py_SET_REFCNT(self, 1); /* the host's code may run, and the collector may visit it */
        end_dropped_body(self);
    }
    PyObject_GC_UnTrack(self);
    if (self->listed) {
        if (self->previous != NULL)
            self->previous->next = self->next;
        else
            self->core->stretches = self->next;
        if (self->next != NULL)
            self->next->previous = self->previous;
    }
    drop_inner(self);
    if (self->frame != NULL)
        self->frame->stretch = NULL;
    HELD_BY_STRETCH(LET_GO)
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int Stretch_traverse(Stretch *self, visitproc visit, void *arg)
{
    HELD_BY_STRETCH(VISIT)
    return 0;
}

/* The span goes on in this thread and task. */
static void move_frame(frame_t *frame, Ring *ring, uint64_t task)
{
    frame->task = task;
    if (frame->ring != ring && frame->self != NULL) {
        Py_INCREF(ring);
        Py_XSETREF(frame->ring, ring);
    }
}

/* A scope pauses with its generator: an await around the generator meanwhile is no wait of the scope. */
static void leave_steps(frame_t *frame, int64_t now_ns)
{
    Frame *self = (Frame *)frame->self;
    if (self == NULL || self->stepped == NULL)
        return;
    self->waited_before_ns = waited_since_begin(self, now_ns); /* so far, until it goes on */
    leave_stepped(self);
}

static void follow_steps(frame_t *frame)
{
    Frame *self = (Frame *)frame->self;
    if (self == NULL || self->stepped != NULL || !is_stepped_in(frame->task))
        return;
    self->stepped = (Stepped *)Py_NewRef((PyObject *)at_hand()->stepping);
    self->waited_before_ns = at_hand()->stepping->waited_ns - self->waited_before_ns;
}

static int finish(Stretch *, PyObject *);

/* Resume the body; -1 with an exception of the host's. If its site is muted, begin no span, or end the open one, and go
 * on without. If scopes are open inside, wait with that until they are closed. */
static int resume(Stretch *self)
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
            return finish(self, Py_None);
        }
        return 0;
    }
    if (self->frame == NULL) {
        if (at_hand()->uid == core->uid && is_stack_used_up()) {
            refuse_for_stack("steps of instrumented generators");
            return -1;
        }
        self->frame = open_frame(core, self->site, NULL, self->attributes, OPEN);
        if (self->frame == NULL) {
            self->lost = 1;
            return lose(core);
        }
        self->frame->stretch = self;
        leave_stepped(self->frame); /* its caller may wait while it is paused */
        self->resumed_ns = self->frame->frame->start_ns;
        return 0;
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL) { /* the span goes on, but is not current during this step */
        return forgive();
    }
    frame_t *own = self->frame->frame;
    int64_t now_ns = read_clock(core);
    int64_t gap_ns = now_ns - self->suspended_ns;
    frame_t *frame = self->inner;
    if (frame == NULL) /* finished already */
        return 0;
    totals_t *totals = totals_here(ring, own->node);
    if (totals != NULL)
        totals->steps++;
    Py_INCREF(ring);
    Py_INCREF(current);
    for (; frame != own; frame = frame->above) {
        /* A scope left open across a yield did not work meanwhile. */
        frame->children_ns += gap_ns;
        frame->counted_from_ns += gap_ns;
        move_frame(frame, ring, current->task);
        follow_steps(frame);
    }
    move_frame(own, ring, current->task);
    own->above = current->top; /* the references of the inner chain move with it */
    current->top = self->inner;
    self->inner = NULL;
    frame = current->top;
    if (publishes_requests_alone(core, current))
        while (frame != own && !is_request_itself(frame))
            frame = frame->above;
    publish_begun(core, current, frame);
    self->resumed_ns = now_ns;
    Py_DECREF(current);
    Py_DECREF(ring);
    if (own->pair != NULL && tell_pair(str_resume, &own->pair, 1) < 0)
        return -1;
    return 0;
}

/* The identity of the current span here for other contexts; a new reference, NULL for none. */
static Published *parent_here(Current *current)
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

static int suspend(Stretch *self)
{
    Core *core = self->core;
    if (self->frame == NULL || self->inner != NULL)
        return 0;
    frame_t *own = self->frame->frame;
    int64_t now_ns = read_clock(core);
    int64_t step_ns = now_ns - self->resumed_ns;
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL)
        return forgive();
    self->active_ns += step_ns;
    self->suspended_ns = now_ns;
    frame_t *frame = current->top;
    while (frame != NULL && frame != own)
        frame = frame->above;
    if (frame == NULL)
        return 0; /* ended elsewhere */
    self->inner = current->top;
    current->top = own->above;
    frame_t *caller = own->above;
    own->above = NULL;
    if (caller == NULL && current->base != NULL)
        caller = current->base->frame;
    if (caller != NULL)
        caller->has_rows = 1; /* as soon as this has ended */
    if (caller != NULL && caller->ring == ring && caller->task == own->task) {
        caller->children_ns += step_ns;
        if (self->stepped != NULL) {
            count_waited_above(caller, self->stepped->waited_ns - self->waited_told_ns);
            self->waited_told_ns = self->stepped->waited_ns;
        }
    }
    Py_INCREF(current);
    uint64_t published_id = current->published_id;
    if (self->stepped == NULL)
        for (frame = self->inner; frame != own; frame = frame->above)
            leave_steps(frame, now_ns);
    frame = self->inner;
    while (frame != own && frame->span_id != published_id)
        frame = frame->above;
    publish_rest(core, current, frame->span_id);
    if (!self->has_parent) {
        self->has_parent = 1;
        self->parent = parent_here(current);
    }
    Py_DECREF(current);
    if (own->pair != NULL && tell_pair(str_pause, &own->pair, 1) < 0)
        return -1;
    return 0;
}

/* The body is paused, for it has yielded an item. */
static int yielded(Stretch *self)
{
    if (suspend(self) < 0)
        return -1;
    if (self->inner == NULL)
        return 0;
    int64_t gap_ns = self->suspended_ns - self->last_item_ns;
    self->last_item_ns = self->suspended_ns;
    if (gap_ns > self->longest_gap_ns) { /* always for the first item, since `last_item_ns` is 0 then */
        if (self->items == 0)
            self->first_item_ns = self->suspended_ns;
        else
            self->longest_gap_ns = gap_ns;
    }
    self->items++;
    return 0;
}

/* Add the attributes on its items, except names that the service has set. -1 with an exception of the host's. */
static int tell_items(Stretch *self)
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
    PyObject *made = before != NULL && PyDict_Check(before) ? PyDict_Copy(before) : PyDict_New();
    for (int i = 0; made != NULL && i < (self->items > 1 ? 4 : 3); i++) {
        if (PyDict_Contains(made, facts[i].name) != 0)
            continue;
        PyObject *value = PyLong_FromLongLong(facts[i].value);
        if (value == NULL || put_attribute(self->core, made, facts[i].name, value) < 0)
            Py_CLEAR(made);
        Py_XDECREF(value);
    }
    if (made != NULL && frame->state != CLOSED && frame->attributes == before) {
        Py_XSETREF(frame->attributes, made);
    } else { /* without memory, or a finaliser of the host's has come in between */
        count(self->core, NO_DETAILS);
        Py_XDECREF(made);
    }
    Py_XDECREF(before);
    return forgive();
}

static int finish(Stretch *self, PyObject *error)
{
    if (self->frame == NULL || self->frame->frame->state == CLOSED)
        return 0;
    frame_t *frame = self->frame->frame;
    if (self->inner == NULL) { /* a signal handler has ended it in the middle of a step */
        PyObject *pair = frame->pair;
        frame->pair = NULL;
        int failed = suspend(self);
        frame->pair = pair;
        if (failed < 0)
            return -1;
        if (frame->state == CLOSED)
            return 0;
    }
    int64_t end_ns = read_clock(self->core);
    if (self->items > 0 && tell_items(self) < 0)
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
        return lose(self->core);
    Py_INCREF(ring);
    PyObject *name = name_of_end(self->core, frame, error);
    int64_t waited_ns = self->stepped != NULL ? self->stepped->waited_ns : 0;
    waited_ns = waited_ns < self->active_ns ? waited_ns : self->active_ns;
    leave_stepped(self->frame);
    store(self->core, ring, frame, end_ns, self->active_ns - waited_ns, waited_ns, name);
    Py_XDECREF(name);
    int failed = frame->pair != NULL ? end_on_device(ring, frame, end_ns) : 0;
    Py_DECREF(ring);
    return failed ? -1 : 0;
}

/* An awaiter of a step of the body, which may be suspended in it. */
static PyObject *Stretch_stepped(Stretch *self, PyObject *awaitable)
{
    if (self->frame == NULL || self->frame->frame->state == CLOSED || !is_awaitable(awaitable))
        return Py_NewRef(awaitable);
    PyObject *iterator = iterator_of(awaitable);
    if (iterator == NULL)
        return NULL;
    if (self->stepped == NULL) {
        self->stepped = new_stepped(self->core, &SteppedType, iterator);
        if (self->stepped == NULL)
            return NULL;
        self->frame->stepped = (Stepped *)Py_NewRef((PyObject *)self->stepped);
        self->frame->waited_before_ns = 0;
    } else {
        Py_SETREF(self->stepped->awaited, iterator);
    }
    self->stepped->task = self->frame->frame->task;
    return Py_NewRef((PyObject *)self->stepped);
}


/* True if its steps have no span. */
static inline int has_no_span(const Stretch *self)
{
    return self->is_running /* the body reports that itself */ || self->lost ||
           (self->frame != NULL && self->frame->frame->state == CLOSED);
}

/* A step of the body has ended. Returns how, or that our end of its span has raised. */
static PySendResult end_body_step(Stretch *self, PySendResult ended, PyObject **result)
{
    raised_t raised = {0};
    self->is_running = 0;
    if (ended == PYGEN_NEXT) {
        if ((Py_TYPE(self) == &AwaitableType ? suspend(self) : yielded(self)) == 0)
            return ended;
        ended = PYGEN_ERROR;
    }
    if (ended == PYGEN_ERROR) {
        Py_CLEAR(*result);
        raised = take_normal();
    }
    int is_end = raised.type == NULL || PyErr_GivenExceptionMatches(raised.type, PyExc_GeneratorExit) ||
                 PyErr_GivenExceptionMatches(raised.type, PyExc_StopAsyncIteration);
    if (suspend(self) == 0 && finish(self, is_end || raised.value == NULL ? Py_None : raised.value) == 0) {
        raise_again(raised);
        return ended;
    }
    Py_CLEAR(*result);
    drop_raised(raised);
    return PYGEN_ERROR;
}

static PySendResult Generator_step(Stretch *self, PyObject *value, PyObject **result)
{
    *result = NULL;
    if (has_no_span(self) || (self->frame == NULL && value != Py_None))
        return PyIter_Send(self->body, value, result);
    if (resume(self) < 0)
        return PYGEN_ERROR;
    if (has_no_span(self))
        return PyIter_Send(self->body, value, result);
    self->is_running = 1;
    PySendResult ended = PyIter_Send(self->body, value, result);
    return end_body_step(self, ended, result);
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
    int has_span = self->frame != NULL && !has_no_span(self);
    if (has_span && resume(self) < 0)
        return NULL;
    self->is_running |= (char)has_span;
    PySendResult ended = thrown(self->body, args, nargs, &result);
    if (has_span)
        ended = end_body_step(self, ended, &result);
    return as_of_iterator(ended, result);
}

static PyObject *Generator_close(Stretch *self, PyObject *Py_UNUSED(none))
{
    if (self->frame == NULL || has_no_span(self))
        return close_body(self->body);
    if (resume(self) < 0)
        return NULL;
    self->is_running = 1;
    PyObject *given = close_body(self->body);
    end_body_step(self, given == NULL ? PYGEN_ERROR : PYGEN_RETURN, &given);
    return given;
}

/* Close the body of a generator that has no user left. The body itself reports what its closing raises. */
static void end_dropped_body(Stretch *self)
{
    raised_t raised = take_raised();
    if (Py_TYPE(self) != &AsyncGeneratorType && !self->is_running && resume(self) < 0)
        PyErr_WriteUnraisable(NULL);
    Py_CLEAR(self->body);
    if (suspend(self) < 0 || finish(self, Py_None) < 0)
        PyErr_WriteUnraisable(NULL);
    raise_again(raised);
}

/* ------------------------------------------------------------------ async generators */

/* The awaitable of a step of an async generator. Takes the reference of the body's awaitable, and returns that without
 * memory. */
static PyObject *new_async_step(Stretch *generator, PyObject *awaitable, int closes)
{
    AsyncStep *self = awaitable == NULL ? NULL : (AsyncStep *)AsyncStepType.tp_alloc(&AsyncStepType, 0);
    if (self == NULL) {
        if (awaitable != NULL && lose(generator->core) < 0)
            Py_CLEAR(awaitable);
        return awaitable;
    }
    self->awaitable = awaitable;
    self->generator = (Stretch *)Py_NewRef((PyObject *)generator);
    self->closes = (char)closes;
    return (PyObject *)self;
}

/* -1 with an exception. */
static int begin_async_step(AsyncStep *self, int may_begin)
{
    Stretch *generator = self->generator;
    self->has_begun = 1;
    if (!has_no_span(generator) && (generator->frame != NULL || (may_begin && !self->closes))) {
        if (resume(generator) < 0)
            return -1;
        generator->is_running = self->is_ours = (char)!has_no_span(generator);
    }
    self->steps = self->is_ours ? Stretch_stepped(generator, self->awaitable) : iterator_of(self->awaitable);
    return self->steps == NULL ? -1 : 0;
}

/* As `end_body_step`: the result is an item, except of `aclose`. */
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
    PySendResult ended = thrown(self->steps, args, nargs, &result);
    ended = end_async_step(self, ended, &result);
    return as_of_iterator(ended, result);
}

static PyObject *AsyncStep_close(AsyncStep *self, PyObject *Py_UNUSED(none))
{
    PyObject *given = close_body(self->steps != NULL ? self->steps : self->awaitable);
    if (self->is_ours) {
        self->is_ours = 0;
        end_body_step(self->generator, given == NULL ? PYGEN_ERROR : PYGEN_RETURN, &given);
    }
    return given;
}

#define HELD_BY_STEP(EACH) EACH(steps) EACH(awaitable) EACH(generator)

static void AsyncStep_dealloc(AsyncStep *self)
{
    if (self->is_ours) { /* given up in the middle */
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
    HELD_BY_STEP(LET_GO)
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int AsyncStep_traverse(AsyncStep *self, visitproc visit, void *arg)
{
    HELD_BY_STEP(VISIT)
    return 0;
}

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

/* ------------------------------------------------------------------ as the body that each replaces */

static PyMethodDef Generator_methods[] = {
    {"send", (PyCFunction)StandIn_send, METH_O, "Go on with a value."},
    {"throw", (PyCFunction)(void (*)(void))Generator_throw, METH_FASTCALL, "Go on with an exception."},
    {"close", (PyCFunction)Generator_close, METH_NOARGS, "Go on no more."},
    {NULL},
};

static PyMethodDef AsyncGenerator_methods[] = {
    {"asend", (PyCFunction)AsyncGenerator_asend, METH_O, "Go on with a value."},
    {"athrow", (PyCFunction)(void (*)(void))AsyncGenerator_athrow, METH_FASTCALL, "Go on with an exception."},
    {"aclose", (PyCFunction)AsyncGenerator_aclose, METH_NOARGS, "Go on no more."},
    {NULL},
};

static PyMethodDef AsyncStep_methods[] = {
    {"send", (PyCFunction)StandIn_send, METH_O, "Go on with a value."},
    {"throw", (PyCFunction)(void (*)(void))AsyncStep_throw, METH_FASTCALL, "Go on with an exception."},
    {"close", (PyCFunction)AsyncStep_close, METH_NOARGS, "Go on no more."},
    {NULL},
};

static PyAsyncMethods Generator_async = {.am_send = (sendfunc)Generator_step};
static PyAsyncMethods Awaitable_async = {.am_send = (sendfunc)Generator_step, .am_await = PyObject_SelfIter};
static PyAsyncMethods AsyncGenerator_async = {.am_aiter = PyObject_SelfIter, .am_anext = (unaryfunc)AsyncGenerator_next};
static PyAsyncMethods AsyncStep_async = {.am_send = (sendfunc)AsyncStep_step, .am_await = PyObject_SelfIter};

#define STRETCH_TYPE(name)                                                                                         \
    PyVarObject_HEAD_INIT(&StandInType, 0)                                                                         \
    .tp_name = name,                                                                                               \
    .tp_basicsize = SIZE_IN_LINES(Stretch),                                                                               \
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,                       \
    .tp_dealloc = (destructor)Stretch_dealloc,                                                                     \
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

/* For `types.coroutine`: its yields are for the event loop, and no items. */
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
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "async_generator_asend",
    .tp_basicsize = sizeof(AsyncStep),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)AsyncStep_dealloc,
    .tp_traverse = (traverseproc)AsyncStep_traverse,
    .tp_as_async = &AsyncStep_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = AsyncStep_next,
    .tp_methods = AsyncStep_methods,
};
