/* Hot: the chain of the current context. Cold: contexts that are new, copied or left. A part of `_recorder.c`. */

static void unlist_current(Current *self)
{
    if (self->core == NULL)
        return;
    UNLINK(self->core->currents, self);
    self->core = NULL;
}

/* Release the frames of a chain, up to the last one. They are of scopes that never ended. */
static void release_chain(frame_t *frame, const frame_t *last)
{
    while (frame != NULL) {
        frame_t *above = frame != last ? frame->above : NULL;
        frame->above = NULL;
        Py_XDECREF(frame->self);
        frame = above;
    }
}

static void Current_dealloc(Current *self)
{
    PyObject_GC_UnTrack(self);
    unlist_current(self);
    frame_t *top = self->top;
    self->top = NULL;
    release_chain(top, NULL); /* no frame is a running function's, which owns a reference to its Current */
    Py_XDECREF(self->context);
    Py_XDECREF(self->base);
    Py_XDECREF(self->linked);
    Py_XDECREF(self->link_remote);
    PyObject_GC_Del(self);
}

static int Current_traverse(Current *self, visitproc visit, void *arg)
{
    for (frame_t *frame = self->top; frame != NULL; frame = frame->above)
        Py_VISIT(frame->self);
    Py_VISIT(self->base);
    Py_VISIT(self->linked);
    return 0;
}

static PyTypeObject CurrentType = {
    COLLECTED_TYPE(Current, SIZE_IN_LINES(Current), 0),
    .tp_doc = "The chain of open spans of one context.",
};

#define REFERENCES_Published(EACH) EACH(owner) EACH(of) EACH(above) EACH(request)
TRAVERSE_AND_DEALLOC(Published)

static int Published_clear(Published *self)
{
    REFERENCES_Published(CLEAR)
    return 0;
}

static PyTypeObject PublishedType = {
    COLLECTED_TYPE(Published, sizeof(Published), 0),
    .tp_doc = "The innermost span of a context, for contexts that are copied from it.",
    .tp_clear = (inquiry)Published_clear,
};

static int set_variable(Core *core, PyObject *value)
{
    int was_enabled = pause_collector();
    PyObject *token = PyContextVar_Set(core->variable, value);
    resume_collector(was_enabled);
    if (token == NULL)
        return -1;
    Py_DECREF(token);
    return 0;
}

/* Return true if a Current belongs to the current context. */
static int is_of_current_context(Current *current, PyThreadState *state)
{
    PyObject *context = referent(current->context);
    int is_current = context != NULL && context == state->context;
    Py_XDECREF(context);
    return is_current;
}

static inline Published *first_of(PyObject *published)
{
    Published *self = (Published *)published;
    return self->of != NULL ? self->of : self;
}

/* Return the span if it is open, else the nearest open span above it: borrowed, NULL for none. */
static Published *nearest_open(Published *published)
{
    while (published != NULL && published->frame == NULL)
        published = published->above;
    return published;
}

/* Return the span of another tracer that a request continues: borrowed, NULL for none. No exception is set. */
static PyObject *remote_in(const Core *core, PyObject *request)
{
    PyObject *attributes = request == NULL ? NULL : ((Frame *)request)->frame->attributes, *remote = NULL;
    if (attributes != NULL && PyDict_Check(attributes) &&
        (remote = PyDict_GetItemWithError(attributes, core->remote_key)) == NULL)
        PyErr_Clear();
    return remote;
}

/* Note a link to the ended span in which the context was copied. */
static void note_link(Core *core, Current *current, uint64_t span_id, uint64_t root_id, PyObject *request)
{
    PyObject *remote = remote_in(core, request);
    PyObject *before = current->linked;
    current->link_id = span_id;
    current->link_root = root_id;
    current->linked = NULL;
    Py_XSETREF(current->link_remote, Py_XNewRef(remote));
    Py_XDECREF(before);
}

/* Replace a base that has ended by the nearest open span above it. Runs no code of the service but finalisers. */
static void leave_ended_base(Core *core, Current *current)
{
    Published *base = current->base;
    if (base == NULL || base->frame != NULL)
        return;
    if (current->link_id == 0)
        note_link(core, current, base->span_id, base->root_id, base->request);
    Published *open = nearest_open(base);
    if (open != NULL)
        open->frame->has_rows = 1; /* its row will name that span as its parent */
    current->base = (Published *)Py_XNewRef((PyObject *)open);
    Py_DECREF(base);
}

/* Return true if the parent of new spans here has ended, so that another one must be found. */
static inline int is_outdated(const Current *current)
{
    if (current->top != NULL)
        return __builtin_expect(current->top->state == CLOSED, 0);
    if (current->base != NULL)
        return __builtin_expect(current->base->frame == NULL, 0);
    return __builtin_expect(current->link_id != 0, 0) && current->linked == NULL;
}

/* Remove a frame from the chain, and release the chain's reference. */
static void unlink_frame(Current *current, frame_t *below, frame_t *frame)
{
    if (below == NULL)
        current->top = frame->above;
    else
        below->above = frame->above;
    frame->above = NULL;
    Py_XDECREF(frame->self);
}

/* Find the parent of the next spans: the nearest open span. If none is open they are roots, with a link to the span in
 * which the context was copied. Return -1 with an exception of the service set. */
static int find_parent(Core *core, Current *current)
{
    for (int first = 1; current->top != NULL && current->top->state == CLOSED; first = 0) {
        frame_t *frame = current->top; /* another context has ended it */
        if (first)
            note_link(core, current, frame->span_id, frame->root_id, frame->request);
        unlink_frame(current, NULL, frame);
    }
    leave_ended_base(core, current);
    if (current->top != NULL || current->base != NULL || current->link_id == 0 || current->linked != NULL)
        return 0;
    uint64_t id = current->link_id;
    PyObject *ask = Py_NewRef(core->link_of);
    PyObject *remote = Py_NewRef(current->link_remote != NULL ? current->link_remote : Py_None);
    PyObject *linked = PyObject_CallFunction(ask, "KKO", id, current->link_root, remote);
    Py_DECREF(remote);
    Py_DECREF(ask);
    if (linked == NULL && clear_fault() < 0)
        return -1;
    if (linked == NULL)
        current->link_id = 0;
    else if (current->link_id == id && current->linked == NULL)
        current->linked = linked;
    else
        Py_DECREF(linked);
    return 0;
}

/* Set the base of a new chain: the span that was published when the context was copied. */
static void inherit_base(Core *core, Current *current, PyObject *value)
{
    if (value != NULL && Py_TYPE(value) == &PublishedType) {
        current->base = (Published *)Py_NewRef((PyObject *)first_of(value));
    } else if (value != NULL && Py_TYPE(value) == &CurrentType) {
        /* No one called `publish` before the copy. The innermost span at that time is unknown, but the base of its
         * context is known. */
        Current *owner = (Current *)value;
        current->base = (Published *)Py_XNewRef((PyObject *)owner->base);
        current->link_id = owner->link_id;
        current->link_root = owner->link_root;
        current->link_remote = Py_XNewRef(owner->link_remote);
        current->linked = Py_XNewRef(owner->linked);
    }
    if (current->base != NULL && current->base->frame != NULL)
        current->base->frame->has_rows = 1; /* rows will name that span as their parent */
    leave_ended_base(core, current);
}

/* Note the running loop and its task, if any. Return -1 with an exception of the service set. */
static int note_task(Core *core, Current *current)
{
    if (core->running_loop == NULL) {
        PyObject *readers = PyObject_CallNoArgs(core->task_readers);
        if (readers != NULL && PyTuple_Check(readers) && PyTuple_GET_SIZE(readers) == 2 && core->running_loop == NULL) {
            core->task_of_loop = Py_NewRef(PyTuple_GET_ITEM(readers, 1));
            core->running_loop = Py_NewRef(PyTuple_GET_ITEM(readers, 0));
        }
        Py_XDECREF(readers);
        if (clear_fault() < 0)
            return -1;
    }
    PyObject *loop = core->running_loop == NULL ? NULL : PyObject_CallNoArgs(core->running_loop);
    int in_loop = loop != NULL && loop != Py_None;
    PyObject *task = in_loop ? PyObject_CallOneArg(core->task_of_loop, loop) : NULL;
    current->task = task == NULL || task == Py_None ? 0 : (uintptr_t)task >> 4;
    Py_XDECREF(task);
    Py_XDECREF(loop);
    current->eager = (char)in_loop;
    return clear_fault();
}

/* Note that the ring's `current` belongs to the context that runs now. A ring without rows keeps NO_VERSION. */
static void note_version(Ring *ring)
{
    ring->context_version = ring->rows != NULL ? context_version_of(ring->state) : NO_VERSION;
}

/* Return the chain that a value of the recorder's variable belongs to: borrowed, NULL for none. */
static Current *chain_of(PyObject *value)
{
    if (value != NULL && Py_TYPE(value) == &PublishedType)
        return (Current *)((Published *)value)->owner;
    return value != NULL && Py_TYPE(value) == &CurrentType ? (Current *)value : NULL;
}

static inline int reports_tasks(const Core *core)
{
    return core->reports_tasks != NULL && core->reports_tasks != Py_None;
}

/* Make the chain of the current context: a new reference, NULL with an exception. `value` is the inherited value of the
 * recorder's variable. */
static Current *new_current(Core *core, PyThreadState *state, PyObject *value)
{
    Current *current = PyObject_GC_New(Current, &CurrentType);
    if (current == NULL)
        return NULL;
    memset((char *)current + sizeof(PyObject), 0, sizeof(Current) - sizeof(PyObject));
    current->core = current->maker = core;
    LINK(core->currents, current);
    PyObject_GC_Track(current);
    inherit_base(core, current, value);
    int failed = note_task(core, current) < 0;
    if (!failed && current->eager && reports_tasks(core)) {
        PyObject *ask = Py_NewRef(core->reports_tasks), *answer = PyObject_CallNoArgs(ask);
        current->loop_reports = answer == Py_True;
        Py_XDECREF(answer);
        Py_DECREF(ask);
        failed = clear_fault() < 0;
    }
    if (failed || set_variable(core, (PyObject *)current) < 0 ||
        (current->context = PyWeakref_NewRef(state->context, NULL)) == NULL)
        Py_CLEAR(current);
    return current;
}

/* Find or make the chain of the current context, which may have changed since this thread's last span. Return it
 * borrowed, NULL with an exception. */
static Current *find_current(Core *core, Ring *ring, PyThreadState *state)
{
    ring->state = state;
    if (ring->current != NULL && ring->current->core != NULL && is_of_current_context(ring->current, state)) {
        note_version(ring);
        Current *same = ring->current;
        if (!same->is_shared && !is_outdated(same))
            return same;
        Py_INCREF(same);
        int failed = (same->is_shared && note_task(core, same) < 0) || (is_outdated(same) && find_parent(core, same) < 0);
        Py_DECREF(same);
        return failed ? NULL : same; /* `find_stable_current` checks that it is still the current chain */
    }
    PyObject *value = NULL;
    if (PyContextVar_Get(core->variable, NULL, &value) < 0)
        return NULL;
    Current *current = chain_of(value);
    if (current != NULL && current->core == NULL) { /* it is from before a fork */
        Py_CLEAR(value);
        current = NULL;
    }
    if (current == NULL || !is_of_current_context(current, state))
        current = new_current(core, state, value);
    else if (Py_INCREF(current), current->is_shared && note_task(core, current) < 0)
        Py_CLEAR(current);
    if (current == NULL) {
        Py_XDECREF(value);
        return NULL;
    }
    Current *before = ring->current;
    ring->current = current;
    note_version(ring);
    Py_XDECREF(value);
    Py_XDECREF(before);
    return current;
}

static __attribute__((noinline)) Current *find_stable_current(Core *core, Ring **ring_out)
{
    for (int tries = 0; tries < TRIES; tries++) {
        Ring *ring = *ring_out;
        Py_INCREF(ring);
        Current *current = find_current(core, ring, UNCHECKED_THREAD_STATE());
        int settled = current != NULL && thread_cache()->uid == core->uid && thread_cache()->ring == ring && ring->current == current &&
                      !is_outdated(current);
        Py_DECREF(ring);
        if (current == NULL || settled)
            return current;
        *ring_out = ring_of(core);
        if (*ring_out == NULL)
            return NULL;
    }
    count_event(core, FAULT);
    return NULL;
}

/* Return the chain of the current context, borrowed, if it is that of this thread's last span and its parent is open.
 * Return NULL for any other. Runs no code of the service. */
static inline Current *cached_current(Core *core, Ring **ring_out)
{
    if (thread_cache()->uid != core->uid)
        return NULL;
    Ring *ring = *ring_out = thread_cache()->ring;
    if (ring->context_version != context_version_of(ring->state))
        return NULL;
    return __builtin_expect(is_outdated(ring->current), 0) ? NULL : ring->current;
}

/* Return the chain of the current context, and set `ring_out` to the calling thread's ring. Both are borrowed, and
 * valid until code of the service may run. Return NULL as `find_ring` does. */
static inline Current *current_of(Core *core, Ring **ring_out)
{
    Current *current = cached_current(core, ring_out);
    if (current != NULL)
        return current;
    *ring_out = ring_of(core);
    return *ring_out == NULL ? NULL : find_stable_current(core, ring_out);
}

static void publish_rest(Core *core, Current *current, uint64_t ended_id);

/* Make the identity of an open span for copies of its context: a new reference, NULL without memory and without an
 * exception. It may run a finaliser of the service that ends or begins scopes. */
static PyObject *new_published(Current *current, frame_t *frame)
{
    PyObject *request = Py_XNewRef(frame->request), *holder = Py_XNewRef(frame->self);
    uint64_t span_id = frame->span_id, root_id = frame->root_id;
    Published *identity = PyObject_GC_New(Published, &PublishedType);
    if (identity == NULL) {
        PyErr_Clear();
        Py_XDECREF(request);
        Py_XDECREF(holder);
        return NULL;
    }
    int is_open = frame->state != CLOSED;
    identity->owner = Py_NewRef((PyObject *)current);
    identity->of = frame->published == NULL ? NULL : (Published *)Py_NewRef((PyObject *)first_of(frame->published));
    identity->frame = is_open && identity->of == NULL ? frame : NULL;
    identity->above = NULL;
    identity->span_id = span_id;
    identity->root_id = root_id;
    identity->request = request;
    PyObject_GC_Track(identity);
    if (is_open) {
        Py_XSETREF(frame->published, Py_NewRef((PyObject *)identity));
        frame->has_more = 1;
    }
    Py_XDECREF(holder);
    return (PyObject *)identity;
}

/* Publish a span to contexts that are copied from now on, or without a span the base of this context. Errors are
 * cleared, because only a parent is lost. */
static __attribute__((noinline)) void publish(Core *core, Current *current, frame_t *frame)
{
    uint64_t wanted_id = frame != NULL ? frame->span_id : 0;
    if (current->published_id == wanted_id)
        return;
    PyObject *value = frame == NULL ? (PyObject *)current : frame->published;
    if (value != NULL && (frame == NULL || ((Published *)value)->owner == (PyObject *)current)) {
        Py_INCREF(value);
    } else {
        frame_t *top = current->top;
        value = new_published(current, frame);
        if (value == NULL)
            return;
        if (current->top != top) {
            Py_DECREF(value);
            publish_rest(core, current, current->published_id);
            return;
        }
    }
    if (set_variable(core, value) == 0)
        current->published_id = wanted_id;
    else
        PyErr_Clear();
    Py_DECREF(value);
}

/* Take the Published object of a frame whose span has ended, or NULL. */
static inline PyObject *take_published(frame_t *frame)
{
    PyObject *published = frame->published;
    frame->published = NULL;
    if (published != NULL)
        first_of(published)->frame = NULL;
    return published;
}

/* Note where contexts that were copied in an ended span find the nearest open span: from `above` on, or the base of the
 * chain's context. The span has left its chain. Takes the reference to `published`. */
static void pass_on(Core *core, Current *current, PyObject *published, frame_t *above)
{
    Published *ended = first_of(published);
    if (!current->eager && current->published_id == ended->span_id)
        publish(core, current, NULL);
    while (above != NULL && above->state == CLOSED)
        above = above->above;
    Current *owner = (Current *)ended->owner;
    if (ended == (Published *)published && Py_REFCNT(published) == 1) {
        /* no other context has it */
    } else if (above == NULL && owner != NULL) {
        Py_INCREF(owner);
        leave_ended_base(core, owner); /* or each task in a chain of tasks would keep all earlier ones */
        Py_XSETREF(ended->above, (Published *)Py_XNewRef((PyObject *)owner->base));
        Py_DECREF(owner);
    } else if (above != NULL && above->published != NULL) {
        Py_XSETREF(ended->above, (Published *)Py_NewRef((PyObject *)first_of(above->published)));
    } else if (above != NULL && owner == current) {
        /* Frames of another thread's chain are left alone: their functions may return at any time. */
        PyObject *identity = new_published(owner, above);
        Py_XSETREF(ended->above, (Published *)identity);
    }
    Py_DECREF(published);
}

/* Return true if the loop reports the tasks that it makes. Then other copies of the context need only requests. */
static inline int publishes_requests_alone(const Core *core, const Current *current)
{
    return current->loop_reports && reports_tasks(core);
}

static inline int is_request_itself(const frame_t *frame)
{
    return frame->self != NULL && frame->request == frame->self;
}

/* Publish a span that begins or resumes, if its context may be copied without a report. */
static inline void publish_begun(Core *core, Current *current, frame_t *frame)
{
    if (current->eager && (is_request_itself(frame) || !publishes_requests_alone(core, current)))
        publish(core, current, frame);
}

/* Publish the innermost open span after a span has ended or paused. */
static void publish_rest(Core *core, Current *current, uint64_t ended_id)
{
    if (!current->eager)
        return;
    int requests_alone = publishes_requests_alone(core, current);
    if (requests_alone && current->published_id != ended_id)
        return;
    frame_t *frame = current->top;
    while (frame != NULL && (frame->state == CLOSED || (requests_alone && !is_request_itself(frame))))
        frame = frame->above;
    publish(core, current, frame);
}

/* Return the existing chain of the current context: a new reference, NULL for none or with an exception. */
static Current *existing_current(Core *core)
{
    PyThreadState *state = UNCHECKED_THREAD_STATE();
    PyObject *value = NULL;
    if (state->context == NULL || PyContextVar_Get(core->variable, NULL, &value) < 0)
        return NULL;
    Current *current = (Current *)Py_XNewRef((PyObject *)chain_of(value));
    Py_XDECREF(value);
    if (current != NULL && !(current->core == core && is_of_current_context(current, state)))
        Py_CLEAR(current);
    return current;
}

/* Publish the innermost open span of the current context, or the base of one without spans. Return -1 with an exception
 * of the service set. */
static int publish_current(Core *core)
{
    Current *current = existing_current(core);
    if (current == NULL)
        return clear_fault();
    frame_t *frame = current->top;
    while (frame != NULL && frame->state == CLOSED)
        frame = frame->above;
    publish(core, current, frame);
    Py_DECREF(current);
    return 0;
}

static inline int is_open_request(PyObject *request)
{
    return request != NULL && ((Frame *)request)->frame->state != CLOSED;
}

static PyObject *Core_publish(Core *self, PyObject *Py_UNUSED(none))
{
    return publish_current(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Note that a task gets a context, for the first time or again: share(context, again). If several tasks run in the
 * context, each span must ask for the current task. */
static PyObject *Core_share(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyContext_CheckExact(args[0]))
        return PyErr_Format(PyExc_TypeError, "share(context, again)");
    int elsewhere = args[0] != UNCHECKED_THREAD_STATE()->context;
    if (!self->on)
        Py_RETURN_NONE;
    if (elsewhere && PyContext_Enter(args[0]) < 0) { /* it runs on another thread, or around the current context */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    Ring *ring;
    Current *current = existing_current(self);
    if (current == NULL && !PyErr_Occurred() && args[1] == Py_True)
        current = (Current *)Py_XNewRef((PyObject *)current_of(self, &ring));
    if (current != NULL)
        current->is_shared = 1;
    int failed = current == NULL && clear_fault() < 0;
    Py_XDECREF(current);
    raised_t raised = take_raised();
    if (elsewhere && PyContext_Exit(args[0]) < 0)
        PyErr_Clear();
    raise_again(raised);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *Core_copy_context(Core *self, PyObject *Py_UNUSED(none))
{
    return publish_current(self) < 0 ? NULL : PyContext_CopyCurrent();
}

/* Forget the open spans of this context. Makes no ring, as making one would count as the thread's first span. */
static PyObject *Core_forget_current(Core *self, PyObject *Py_UNUSED(none))
{
    if (set_variable(self, Py_None) < 0)
        return NULL;
    Mark *mark = find_mark(self);
    if (mark == NULL)
        return NULL;
    if (mark->ring != NULL)
        forget_current_of(mark->ring);
    Py_RETURN_NONE;
}
