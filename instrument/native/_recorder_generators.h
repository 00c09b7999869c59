/* Hot: spans of generators, and of what is awaited as one: they are current only while the body runs. A part of `_recorder.c`. */

static PyObject *
Stretch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", "site", "attributes", NULL};
    PyObject *core, *site, *attributes = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|O:Stretch", words, &CoreType, &core, &site, &attributes))
        return NULL;
    Stretch *self = (Stretch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->core = (Core *)Py_NewRef(core);
    self->site = Py_NewRef(site);
    self->attributes = attributes == Py_None ? NULL : Py_NewRef(attributes);
    self->next = self->core->stretches;
    if (self->next != NULL)
        self->next->previous = self;
    self->core->stretches = self;
    self->listed = 1;
    return (PyObject *)self;
}

/* The scopes that the body left open while it is suspended belong to nobody's chain: give them up. */
static void
drop_inner(Stretch *self)
{
    frame_t *own = self->frame != NULL ? self->frame->frame : NULL;
    frame_t *frame = self->inner;
    self->inner = NULL;
    while (frame != NULL) {
        frame_t *above = frame->above;
        int last = frame == own;
        frame->above = NULL;
        Py_XDECREF(frame->self);
        if (last)
            break;
        frame = above;
    }
}

#define HELD_BY_STRETCH(EACH) EACH(frame) EACH(parent) EACH(stepped) EACH(core) EACH(site) EACH(attributes)

static void
Stretch_dealloc(Stretch *self)
{
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

static int
Stretch_traverse(Stretch *self, visitproc visit, void *arg)
{
    HELD_BY_STRETCH(VISIT)
    return 0;
}

/* The span goes on in this thread and task. */
static void
move_frame(frame_t *frame, Ring *ring, uint64_t task)
{
    frame->task = task;
    if (frame->ring != ring && frame->self != NULL) {
        Py_INCREF(ring);
        Py_XSETREF(frame->ring, ring);
    }
}

/* A scope stands still with its generator: what is awaited around that meanwhile is none of its waiting. */
static void
leave_steps(frame_t *frame, int64_t now_ns)
{
    Frame *self = (Frame *)frame->self;
    if (self == NULL || self->stepped == NULL)
        return;
    self->waited_before_ns = waited_since_begin(self, now_ns); /* so far, until it goes on */
    leave_stepped(self);
}

static void
follow_steps(frame_t *frame)
{
    Frame *self = (Frame *)frame->self;
    if (self == NULL || self->stepped != NULL || stepping == NULL || !stepping->is_running)
        return;
    self->stepped = (Stepped *)Py_NewRef((PyObject *)stepping);
    self->waited_before_ns = stepping->waited_ns - self->waited_before_ns;
}

static PyObject *Stretch_finish(Stretch *, PyObject *);

/* True where its site is muted: it has begun no span then, or has ended the one that it had, and the generator goes on
 * without. One that has scopes open inside waits until they are closed. */
static PyObject *
Stretch_resume(Stretch *self, PyObject *Py_UNUSED(none))
{
    Core *core = self->core;
    if (self->lost)
        Py_RETURN_NONE;
    Pass *pass = pass_of(core, self->site);
    if (pass != NULL && (self->frame == NULL || self->inner == self->frame->frame)) {
        if (self->frame == NULL) {
            self->lost = 1;
            count_passed(pass);
        } else {
            pass->cut++;
            if (told(Stretch_finish(self, Py_None)) < 0)
                return NULL;
        }
        Py_RETURN_TRUE;
    }
    if (self->frame == NULL) {
        self->frame = open_frame(core, self->site, self->attributes, OPEN);
        if (self->frame == NULL) {
            self->lost = 1;
            if (lose(core) < 0)
                return NULL;
            Py_RETURN_NONE;
        }
        self->frame->stretch = self;
        leave_stepped(self->frame); /* who resumes it may wait while it stands still */
        self->resumed_ns = self->frame->frame->start_ns;
        Py_RETURN_NONE;
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL) { /* the span goes on, but is not current during this step */
        if (forgive() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    frame_t *own = self->frame->frame;
    int64_t now_ns = read_clock(core);
    int64_t gap_ns = now_ns - self->suspended_ns;
    frame_t *frame = self->inner;
    if (frame == NULL) /* finished already */
        Py_RETURN_NONE;
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
        return NULL;
    Py_RETURN_NONE;
}

/* The span that is current here, as other contexts know it; a new reference, NULL without one. */
static Published *
parent_here(Current *current)
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

static PyObject *
Stretch_suspend(Stretch *self, PyObject *Py_UNUSED(none))
{
    Core *core = self->core;
    if (self->frame == NULL || self->inner != NULL)
        Py_RETURN_NONE;
    frame_t *own = self->frame->frame;
    int64_t now_ns = read_clock(core);
    int64_t step_ns = now_ns - self->resumed_ns;
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL) {
        if (forgive() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    self->active_ns += step_ns;
    self->suspended_ns = now_ns;
    frame_t *frame = current->top;
    while (frame != NULL && frame != own)
        frame = frame->above;
    if (frame == NULL)
        Py_RETURN_NONE; /* ended elsewhere */
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
        return NULL;
    Py_RETURN_NONE;
}

/* The body stands still, for it has yielded an item. */
static PyObject *
Stretch_yielded(Stretch *self, PyObject *Py_UNUSED(none))
{
    PyObject *none = Stretch_suspend(self, NULL);
    if (none == NULL || self->inner == NULL)
        return none;
    int64_t gap_ns = self->suspended_ns - self->last_item_ns;
    self->last_item_ns = self->suspended_ns;
    if (gap_ns > self->longest_gap_ns) { /* always for the first item, since `last_item_ns` is 0 then */
        if (self->items == 0)
            self->first_item_ns = self->suspended_ns;
        else
            self->longest_gap_ns = gap_ns;
    }
    self->items++;
    return none;
}

/* Tell of its items, but for what the service has set by the same names. -1 with an exception of the host's. */
static int
tell_items(Stretch *self)
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

static PyObject *
Stretch_finish(Stretch *self, PyObject *error)
{
    if (self->frame == NULL || self->frame->frame->state == CLOSED)
        Py_RETURN_NONE;
    frame_t *frame = self->frame->frame;
    if (self->inner == NULL) { /* a signal handler has ended it in the middle of a step */
        PyObject *pair = frame->pair;
        frame->pair = NULL;
        PyObject *none = Stretch_suspend(self, NULL);
        frame->pair = pair;
        if (none == NULL)
            return NULL;
        Py_DECREF(none);
        if (frame->state == CLOSED)
            Py_RETURN_NONE;
    }
    int64_t end_ns = read_clock(self->core);
    if (self->items > 0 && tell_items(self) < 0)
        return NULL;
    frame->state = CLOSED;
    PyObject *published = take_published(frame);
    if (published != NULL) {
        Py_XSETREF(first_of(published)->above, (Published *)Py_XNewRef((PyObject *)nearest_open(self->parent)));
        Py_DECREF(published);
    }
    Py_CLEAR(self->parent);
    drop_inner(self);
    Ring *ring = ring_of(self->core);
    if (ring == NULL) {
        if (lose(self->core) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    Py_INCREF(ring);
    PyObject *name = error == Py_None || is_no_error(self->core, frame, error)
                         ? NULL
                         : error_name((PyObject *)Py_TYPE(error));
    int64_t waited_ns = self->stepped != NULL ? self->stepped->waited_ns : 0;
    waited_ns = waited_ns < self->active_ns ? waited_ns : self->active_ns;
    leave_stepped(self->frame);
    store(self->core, ring, frame, end_ns, self->active_ns - waited_ns, waited_ns, name);
    Py_XDECREF(name);
    int failed = frame->pair != NULL ? end_on_device(ring, frame, end_ns) : 0;
    Py_DECREF(ring);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* What awaits a step of the body, which may be suspended in it. */
static PyObject *
Stretch_stepped(Stretch *self, PyObject *awaitable)
{
    if (self->frame == NULL || self->frame->frame->state == CLOSED || !is_awaitable(awaitable))
        return Py_NewRef(awaitable);
    PyObject *iterator = iterator_of(awaitable);
    if (iterator == NULL)
        return NULL;
    if (self->stepped == NULL) {
        self->stepped = new_stepped(self->core, iterator);
        if (self->stepped == NULL)
            return NULL;
        self->frame->stepped = (Stepped *)Py_NewRef((PyObject *)self->stepped);
        self->frame->waited_before_ns = 0;
    } else {
        Py_SETREF(self->stepped->awaited, iterator);
    }
    return Py_NewRef((PyObject *)self->stepped);
}

static PyMethodDef Stretch_methods[] = {
    {"resume", (PyCFunction)Stretch_resume, METH_NOARGS,
     "The body goes on. True where the site is muted, and the span has ended or never begins."},
    {"suspend", (PyCFunction)Stretch_suspend, METH_NOARGS, "The body stands still, or has ended."},
    {"yielded", (PyCFunction)Stretch_yielded, METH_NOARGS, "The body stands still, for it has yielded an item."},
    {"stepped", (PyCFunction)Stretch_stepped, METH_O, "What awaits a step of the body, which may be suspended in it."},
    {"finish", (PyCFunction)Stretch_finish, METH_O, "The generator has ended, with this exception or None."},
    {NULL},
};

static PyMemberDef Stretch_members[] = {
    {"frame", T_OBJECT, offsetof(Stretch, frame), READONLY, "its span's frame, None before the first step"},
    {NULL},
};

static PyTypeObject StretchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Stretch",
    .tp_basicsize = sizeof(Stretch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A generator's span: current only while the body runs, its active time against whoever resumed it.",
    .tp_new = Stretch_new,
    .tp_dealloc = (destructor)Stretch_dealloc,
    .tp_traverse = (traverseproc)Stretch_traverse,
    .tp_methods = Stretch_methods,
    .tp_members = Stretch_members,
};
