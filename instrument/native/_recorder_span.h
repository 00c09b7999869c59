/* Hot: a span from its begin to its row. A part of `_recorder.c`. */

/* Free a Frame that is not kept; but keep it where that has not been looked at yet. */
static SELDOM void free_frame_object(Frame *self)
{
    int is_elsewhere = frame_memory != NULL && memory_of(self->frame) != frame_memory;
    if (!is_elsewhere && free_frame_object_count < OBJECTS_KEPT) {
        free_frame_objects[free_frame_object_count++] = self;
        return;
    }
    if (is_elsewhere && frame_objects_elsewhere > 0 && --frame_objects_elsewhere == 0)
        frame_objects_kept = OBJECTS_KEPT;
    frame_object_count--;
    PyObject_GC_UnTrack(self);
    free_lines_in(self->frame, PART_FRAMES);
    PyObject_GC_Del(self);
}

/* Detach a span from the awaited object around it. */
static inline void leave_stepped(Frame *self)
{
    Stepped *around = self->stepped;
    self->stepped = NULL;
    if (around != NULL && around->own != self)
        Py_DECREF(around);
}

/* A freed frame is kept for the next span. Its references are released while it is complete: code of the host's may
 * run, and the collector may visit it. */
static void Frame_dealloc(Frame *self)
{
    frame_t *frame = self->frame;
    Py_SET_REFCNT(self, 1);
    if (frame->request == (PyObject *)self)
        frame->request = NULL; /* borrowed */
    Py_CLEAR(frame->ring);
    Py_CLEAR(frame->request);
    Py_CLEAR(frame->attributes);
    Py_CLEAR(frame->pair);
    leave_stepped(self);
    self->children_waited_ns = 0;
    if (frame->published != NULL)
        Py_DECREF(take_published(frame));
    frame->start_ns = 0; /* a reader of open spans passes it */
    if (free_frame_object_count < frame_objects_kept)
        free_frame_objects[free_frame_object_count++] = self;
    else
        free_frame_object(self);
}

static inline Frame *new_frame_object(void)
{
    if (free_frame_object_count > 0)
        return free_frame_objects[--free_frame_object_count];
    frame_t *frame = new_lines_in(frame_memory, PART_FRAMES, sizeof *frame);
    Frame *made = frame == NULL ? (Frame *)PyErr_NoMemory() : PyObject_GC_New(Frame, &FrameType);
    if (made == NULL) {
        free_lines_in(frame, PART_FRAMES);
        return NULL;
    }
    frame_object_count++;
    made->frame = frame;
    made->stretch = NULL;
    made->stepped = NULL;
    made->waited_before_ns = made->children_waited_ns = 0;
    frame->self = (PyObject *)made;
    PyObject_GC_Track(made);
    return made;
}

static int Frame_traverse(Frame *self, visitproc visit, void *arg)
{
    if (self->frame->request != (PyObject *)self)
        Py_VISIT(self->frame->request);
    Py_VISIT(self->frame->attributes);
    Py_VISIT(self->frame->published);
    if (self->stepped != NULL && self->stepped->own != self)
        Py_VISIT(self->stepped);
    return 0;
}

static int Frame_clear(Frame *self)
{
    Py_XDECREF(take_published(self->frame));
    return 0;
}

/* A number of its frame, by its offset. */
static PyObject *Frame_number(Frame *self, void *offset)
{
    return PyLong_FromUnsignedLongLong(*(const uint64_t *)((const char *)self->frame + (size_t)offset));
}

static PyGetSetDef Frame_getset[] = {
    {"span_id", (getter)Frame_number, NULL, "identity of the span", (void *)offsetof(frame_t, span_id)},
    {"start_ns", (getter)Frame_number, NULL, "when it began", (void *)offsetof(frame_t, start_ns)},
    {"root_id", (getter)Frame_number, NULL, "identity of the tree's root", (void *)offsetof(frame_t, root_id)},
    {"task", (getter)Frame_number, NULL, "identity of the task, 0 outside of one", (void *)offsetof(frame_t, task)},
    {NULL},
};

static PyTypeObject FrameType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Frame",
    .tp_basicsize = SIZE_IN_LINES(Frame),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A span that is open.",
    .tp_dealloc = (destructor)Frame_dealloc,
    .tp_traverse = (traverseproc)Frame_traverse,
    .tp_clear = (inquiry)Frame_clear,
    .tp_getset = Frame_getset,
};

/* True if a call of a node is open on a thread, from a frame upwards, also above the base of its context. */
static SELDOM int is_open_around(Current *current, const frame_t *frame, const Ring *ring, const node_t *node)
{
    int found = 0;
    Py_XINCREF(current);
    for (int chains = 0; chains < DEEPEST_CHAIN && current != NULL && !found; chains++) {
        for (; frame != NULL && !found; frame = frame->above)
            found = frame->node == node && frame->ring != NULL && frame->ring->thread_id == ring->thread_id &&
                    frame->state != CLOSED;
        Published *base = nearest_open(current->base);
        frame = base != NULL ? base->frame : NULL;
        Current *owner = base != NULL ? (Current *)Py_XNewRef(base->owner) : NULL;
        Py_DECREF(current);
        current = owner;
    }
    Py_XDECREF(current);
    return found;
}

static SELDOM uint64_t first_identity(void)
{
    return 2; /* 0 means none */
}

static inline uint64_t next_identity(void)
{
    uint64_t id = hot.last_id + 2;
    if (__builtin_expect((int64_t)id < 0, 0)) /* readers have 63 bits */
        id = first_identity();
    hot.last_id = id;
    return id;
}

static inline void set_flags(frame_t *frame, char state)
{
    const char flags[] = {0, 0, state, 0};
    memcpy(&frame->is_inner, flags, sizeof flags); /* and what is behind it up to `below_fold`, as one number */
}

/* True if a span is open as it began, without a flag. */
static inline int is_open_as_begun(const frame_t *frame)
{
    static const char expected[] = {0, 0, OPEN, 0};
    return memcmp(&frame->is_inner, expected, sizeof expected) == 0;
}

/* True if a span is open like those of functions and scopes, and only steps to descendants led to its node. */
static inline int is_open_and_no_fold(const frame_t *frame)
{
    static const char expected[] = {OPEN, 0};
    return memcmp(&frame->state, expected, sizeof expected) == 0; /* and `below_fold` */
}

static inline void remember_step(path_t *path, node_t *parent, node_t *step)
{
    path->before.parent = path->newest.parent;
    path->before.step = path->newest.step;
    path->newest.parent = parent;
    path->newest.step = step;
}

/* Fill in the ids, the node and the parent of a span. The caller reads the clock last. `path` is of the site. */
static inline void
identify(Core *core, Ring *ring, Current *current, frame_t *frame, PyObject *site, path_t *path, char state)
{
    frame_t *above = current->top;
    node_t *parent, *step;
    frame->above = above;
    set_flags(frame, state);
    frame->span_id = next_identity();
    frame->ring = ring;
    frame->task = current->task;
    frame->children_ns = 0;
    if (above != NULL) {
        parent = above->node;
        frame->below_fold = above->below_fold;
        frame->parent_id = above->span_id;
        frame->root_id = above->root_id;
        frame->request = Py_XNewRef(above->request);
    } else if (current->base != NULL) {
        const frame_t *base = current->base->frame;
        parent = base != NULL ? base->node : &core->root;
        frame->below_fold = base != NULL && base->below_fold;
        frame->parent_id = current->base->span_id;
        frame->root_id = current->base->root_id;
        frame->request = Py_XNewRef(current->base->request);
    } else {
        parent = &core->root;
        frame->parent_id = 0;
        frame->root_id = frame->span_id;
        frame->request = NULL;
        if (__builtin_expect(current->link_id != 0, 0) && current->linked != NULL && frame->attributes == NULL)
            frame->attributes = Py_NewRef(current->linked);
    }
    if (path != NULL && path->newest.parent == parent) {
        step = path->newest.step;
    } else if (path != NULL && path->before.parent == parent) {
        step = path->before.step;
    } else {
        step = node_of(core, parent, site);
        if (path != NULL && !is_edge(step))
            remember_step(path, parent, step);
    }
    frame->node = end_of(step);
    if (is_edge(step))
        frame->below_fold = 1;
    if (frame->below_fold && frame->node->may_recur)
        frame->is_inner = (char)is_open_around(current, current->top, ring, frame->node);
}

/* True if the step from a parent is known, because the site was met there before. */
static inline int find_known_step(const path_t *path, const node_t *parent, node_t **step)
{
    *step = path->newest.step;
    if (__builtin_expect(path->newest.parent == parent, 1))
        return 1;
    *step = path->before.step;
    return path->before.parent == parent;
}

/* The same for the usual span: below an open one, or the root, at a known path of its site. 0 for any other, whose
 * frame may have any content. */
static inline __attribute__((always_inline)) int
place_below_top(Core *core, Ring *ring, const Current *current, const path_t *path, frame_t *frame)
{
    frame_t *above = current->top;
    node_t *node;
    if (above != NULL) {
        if (!is_open_and_no_fold(above) || !find_known_step(path, above->node, &node))
            return 0;
        frame->span_id = next_identity();
        frame->parent_id = above->span_id;
        frame->root_id = above->root_id;
        frame->request = Py_XNewRef(above->request);
    } else {
        if (((uintptr_t)current->base | current->link_id) != 0 || !find_known_step(path, &core->root, &node))
            return 0;
        frame->root_id = frame->span_id = next_identity();
        frame->parent_id = 0;
        frame->request = NULL;
    }
    frame->above = above;
    frame->node = node;
    frame->ring = ring;
    frame->task = current->task;
    frame->children_ns = 0;
    set_flags(frame, OPEN);
    return 1;
}

/* Open the span, also for readers in other processes: all its other fields are written before. */
static inline void begin_frame(frame_t *frame, int64_t now_ns)
{
    frame->counted_from_ns = now_ns;
    __atomic_store_n(&frame->start_ns, now_ns, __ATOMIC_RELEASE);
}

/* True if a span that begins now in a task is within the stepped object. An eager task is not. */
static inline int is_stepped_in(uint64_t task)
{
    return at_hand()->stepping != NULL && at_hand()->stepping->is_running && (at_hand()->stepping->task == 0 || at_hand()->stepping->task == task);
}

/* Attach a new span to the stepped object around it, for its waits. */
static inline void note_stepping(Frame *self)
{
    if (is_stepped_in(self->frame->task)) {
        self->stepped = (Stepped *)Py_NewRef((PyObject *)at_hand()->stepping);
        self->waited_before_ns = at_hand()->stepping->waited_ns;
    }
}

/* Begin a span at a path where its site was met before, where nothing else is to be done. Returns 0, without a change, for
 * any other. */
static inline __attribute__((always_inline)) int
begin_known(Core *core, Frame *open, const path_t *path, int is_stepped_around)
{
    const at_hand_t OF_THREAD *here = at_hand();
    if (!is_on_and_nothing_else(core) || here->uid != hot.plain_uid)
        return 0;
    Ring *ring = here->ring;
    Current *current = ring->current;
    frame_t *frame = open->frame;
    if (ring->context_version != ring->state->context_ver ||
        (current->eager && !publishes_requests_alone(core, current)) ||
        !place_below_top(core, ring, current, path, frame))
        return 0;
    if (is_stepped_around && here->stepping != NULL)
        note_stepping(open);
    Py_INCREF(ring);
    Py_INCREF(open); /* the chain's */
    current->top = frame;
    begin_frame(frame, read_monotonic());
    return 1;
}

static int note_remote(Core *core, Frame *frame)
{
    PyObject *ask = Py_NewRef(core->remote_parent);
    PyObject *remote = PyObject_CallNoArgs(ask);
    Py_DECREF(ask);
    if (remote != NULL && remote != Py_None) {
        PyObject *attributes = frame->frame->attributes ? PyDict_Copy(frame->frame->attributes) : PyDict_New();
        if (attributes != NULL && PyDict_SetItem(attributes, core->remote_key, remote) == 0)
            Py_XSETREF(frame->frame->attributes, attributes);
        else
            Py_XDECREF(attributes);
    }
    Py_XDECREF(remote);
    if (PyErr_Occurred())
        note_fault("current OpenTelemetry span");
    return PyErr_Occurred() ? -1 : 0;
}

/* A root's attributes with the link of its context; a new reference or NULL, without an exception. Making a dict may
 * run code of the host's. */
static PyObject *with_link(const Current *current, PyObject *attributes)
{
    if (current->top != NULL || current->base != NULL || current->linked == NULL || attributes == NULL)
        return Py_XNewRef(attributes); /* a root without any takes those of its context */
    PyObject *linked = Py_NewRef(current->linked);
    PyObject *both = PyDict_Check(attributes) ? PyDict_Copy(attributes) : NULL;
    if (both != NULL && PyDict_Update(both, linked) < 0)
        Py_CLEAR(both);
    PyErr_Clear(); /* for want of memory */
    Py_DECREF(linked);
    return both != NULL ? both : Py_NewRef(attributes);
}

static int close_frame(Core *core, Frame *self, PyObject *error, int anywhere, int64_t end_ns);

/* `scope` is the one that begins, or NULL. NULL with an exception, or without one if it was counted: see `lose`. */
static Frame *open_frame(Core *core, PyObject *site, const Scope *scope, PyObject *attributes, char state)
{
    note_features(core);
    Frame *self = new_frame_object();
    if (self == NULL)
        return NULL;
    frame_t *frame = self->frame;
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current != NULL && attributes != NULL) {
        frame->attributes = with_link(current, attributes);
        if (frame->attributes != attributes)
            current = current_of(core, &ring);
    }
    if (current == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    identify(core, ring, current, frame, site, scope != NULL ? scope->path : NULL, state);
    Py_INCREF(ring);
    int is_request = frame->node == core->overflow ? kind_is(site, str_request) : frame->node->is_request;
    if (is_request && !is_open_request(frame->request)) {
        frame->root_id = frame->span_id |= REQUEST_BIT;
        Py_XSETREF(frame->request, (PyObject *)self); /* borrowed: of itself */
        if (core->remote_parent != NULL && core->remote_parent != Py_None) {
            uint64_t uid = core->uid;
            int failed = note_remote(core, self) < 0;
            if (core->uid != uid) /* reset meanwhile, without knowing the frame */
                frame->node = core->overflow;
            if (failed) {
                Py_DECREF(self);
                return NULL;
            }
            current = current_of(core, &ring);
            if (current == NULL) {
                Py_DECREF(self);
                return NULL;
            }
            frame->above = current->top; /* it may have ended scopes */
        }
    }
    if (frame->attributes != NULL && core->memory != NULL && !frame->node->is_copy)
        tell_attributes(core, frame);
    Py_INCREF(self); /* the chain's */
    note_stepping(self);
    Py_INCREF(current);
    current->top = frame;
    publish_begun(core, current, frame);
    Py_DECREF(current);
    begin_frame(frame, read_clock(core));
    if (is_timed_on_device(core, frame) && begin_on_device(core, frame, NULL) < 0) {
        raised_t raised = take_raised();
        if (close_frame(core, self, Py_None, 0, 0) < 0)
            PyErr_Clear(); /* of two that handlers raised, the first */
        raise_again(raised);
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

/* The span whose self time a span's time reduces: the one above it, if both ran on one thread and task; or NULL. */
static inline frame_t *counted_above(const Current *current, const frame_t *frame, const Ring *ring)
{
    frame_t *above = frame->above;
    if (above == NULL) {
        if (current->base == NULL || frame->parent_id != current->base->span_id || current->base->frame == NULL)
            return NULL;
        above = current->base->frame;
    }
    return above->ring == ring && above->task == frame->task ? above : NULL;
}

static inline void count_against_above(Current *current, frame_t *frame, Ring *ring, int64_t end_ns)
{
    frame_t *above = counted_above(current, frame, ring);
    if (above != NULL)
        above->children_ns += end_ns - frame->counted_from_ns;
}

/* Note how much of the time that counts against the span above its child waited. */
static void count_waited_above(frame_t *above, int64_t waited_ns)
{
    if (above != NULL && above->self != NULL)
        ((Frame *)above->self)->children_waited_ns += waited_ns;
}

/* End a frame while others, begun inside it, go on: later time counts against the frame above. -1 if it is not in the
 * chain. */
static int cross(Current *current, frame_t *frame, int64_t end_ns)
{
    frame_t *below = current->top;
    while (below != NULL && below->above != frame)
        below = below->above;
    if (below == NULL)
        return -1;
    if (below->ring == frame->ring && below->task == frame->task)
        frame->children_ns += end_ns - below->counted_from_ns;
    below->counted_from_ns = end_ns;
    unlink_frame(current, below, frame);
    return 0;
}

/* The name of an exception's class, cut where it is long. No code of the class is run: a metaclass may have a `__name__`
 * of its own. */
static PyObject * /* new reference or NULL; no exception */ error_name(PyObject *type)
{
    PyObject *whole = Py_TYPE(name_of_type)->tp_descr_get(name_of_type, type, (PyObject *)Py_TYPE(type));
    PyObject *name = whole == NULL ? NULL : PyUnicode_Substring(whole, 0, ERROR_NAME_LIMIT);
    Py_XDECREF(whole);
    if (name == NULL)
        PyErr_Clear();
    return name;
}

/* The status of a web framework's exception class, borrowed; NULL for any other class. */
static PyObject *answer_of(Core *core, PyTypeObject *type)
{
    if (!PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE))
        return NULL;
    PyObject *module = PyDict_GetItem(type->tp_dict, str_module_dunder);
    PyObject *known = module != NULL && PyUnicode_CheckExact(module) ? PyDict_GetItem(core->answers, module) : NULL;
    return known == NULL ? NULL : PyDict_GetItem(known, ((PyHeapTypeObject *)type)->ht_qualname);
}

/* The HTTP status by which an exception answers a request, -1 if it is not a web framework's. No exception is set. */
static long status_of(Core *core, PyObject *error)
{
    PyObject *classes = Py_TYPE(error)->tp_mro, *answer = NULL;
    for (Py_ssize_t i = 0; answer == NULL && i < PyTuple_GET_SIZE(classes); i++)
        answer = answer_of(core, (PyTypeObject *)PyTuple_GET_ITEM(classes, i));
    if (answer == NULL)
        return -1;
    PyObject *found = PyLong_Check(answer) ? Py_NewRef(answer) : PyObject_GetAttr(error, answer);
    if (found != NULL && PyUnicode_Check(found)) {
        PyObject *digits = PyUnicode_Substring(found, 0, 3);
        Py_SETREF(found, digits == NULL ? NULL : PyLong_FromUnicodeObject(digits, 10));
        Py_XDECREF(digits);
    }
    long status = found != NULL && PyLong_Check(found) ? PyLong_AsLong(found) : -1;
    Py_XDECREF(found);
    if (PyErr_Occurred()) /* a class of the host's overrides it */
        PyErr_Clear();
    return 100 <= status && status < 1000 ? status : -1;
}

/* The outcome of a span that an exception interrupted, borrowed; NULL for a failure. Runs no code of the host's. */
static PyObject *outcome_of(PyObject *error)
{
    if (PyObject_TypeCheck(error, (PyTypeObject *)PyExc_Exception))
        return NULL;
    if (PyObject_TypeCheck(error, (PyTypeObject *)PyExc_SystemExit)) {
        PyObject *code = ((PySystemExitObject *)error)->code;
        int overflow = 0;
        int is_zero = code == NULL || code == Py_None || code == Py_False ||
                      (PyLong_CheckExact(code) && PyLong_AsLongAndOverflow(code, &overflow) == 0 && !overflow);
        return is_zero ? str_stopped : NULL;
    }
    if (PyObject_TypeCheck(error, (PyTypeObject *)PyExc_KeyboardInterrupt))
        return str_stopped;
    if (PyObject_TypeCheck(error, (PyTypeObject *)PyExc_GeneratorExit))
        return str_closed_early;
    PyObject *classes = Py_TYPE(error)->tp_mro;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(classes); i++) {
        const char *name = ((PyTypeObject *)PyTuple_GET_ITEM(classes, i))->tp_name, *dot = strrchr(name, '.');
        name = dot != NULL ? dot + 1 : name;
        if (strcmp(name, "CancelledError") == 0 || strcmp(name, "Cancelled") == 0 || strcmp(name, "GreenletExit") == 0)
            return str_cancelled;
    }
    return NULL;
}

static PyObject *told_outcome(PyObject *Py_UNUSED(module), PyObject *error)
{
    PyObject *outcome = outcome_of(error);
    return Py_NewRef(outcome != NULL ? outcome : Py_None);
}

/* Note the outcome of a span in a copy of its attributes, which may be shared. */
static void put_ending(Core *core, frame_t *ended, PyObject *name, PyObject *value)
{
    PyObject *attributes = ended->attributes ? PyDict_Copy(ended->attributes) : PyDict_New();
    if (value != NULL && attributes != NULL && PyDict_SetItem(attributes, name, value) == 0)
        Py_XSETREF(ended->attributes, Py_NewRef(attributes));
    else
        count(core, NO_DETAILS);
    PyErr_Clear();
    Py_XDECREF(attributes);
}

/* True if the exception that ended a span is no error: an answer below 500, or an interruption. The answer's status
 * becomes an attribute of a request, the interruption one of any span. */
static int is_no_error(Core *core, frame_t *ended, PyObject *error)
{
    if (!PyExceptionInstance_Check(error))
        return 0;
    PyObject *outcome = outcome_of(error);
    if (outcome != NULL) {
        if (ended->attributes == NULL || PyDict_GetItem(ended->attributes, str_outcome) == NULL)
            put_ending(core, ended, str_outcome, outcome);
        return 1;
    }
    if (core->answers == NULL || !PyDict_CheckExact(core->answers))
        return 0;
    long status = status_of(core, error);
    if (status >= 0 && ended->node->is_request) {
        PyObject *number = PyLong_FromLong(status);
        put_ending(core, ended, str_status, number);
        Py_XDECREF(number);
    }
    return status >= 0 && status < FIRST_OF_SERVER;
}

/* Take a frame whose span ends out of its chain. `is_noted`: it is a mistake that it ends before what is inside it, or in
 * another context. False if it is missing in the chain. */
static inline __attribute__((always_inline)) int
leave_chain(Core *core, Current *current, frame_t *frame, Ring *ring, int64_t end_ns, int is_noted)
{
    int is_found = 1;
    frame->state = CLOSED;
    if (current->top != frame)
        frame->has_rows = 1; /* spans begun inside it go on */
    count_against_above(current, frame, ring, end_ns);
    PyObject *published = take_published(frame);
    frame_t *above = frame->above;
    if (current->top == frame) {
        unlink_frame(current, NULL, frame);
        publish_rest(core, current, frame->span_id);
        above = current->top;
    } else if (frame->self == NULL || current->top != NULL || current->base != NULL || current->link_id != 0) {
        is_found = cross(current, frame, end_ns) == 0;
        if (is_noted)
            count(core, is_found ? CROSSED : FOREIGN);
    }
    if (published != NULL)
        pass_on(core, current, published, above);
    return is_found;
}

/* The name of what ended a span: an exception, the name of an error or None. A new reference, NULL for no error. */
static PyObject *name_of_end(Core *core, frame_t *frame, PyObject *error)
{
    if (error == NULL || error == Py_None)
        return NULL;
    if (PyUnicode_CheckExact(error))
        return Py_NewRef(error);
    return is_no_error(core, frame, error) ? NULL : error_name((PyObject *)Py_TYPE(error));
}

/* End a span with an exception, or the name of an error, or None, at a time, or if that is 0 now. `anywhere`: it is no
 * mistake that it ends before what is inside it, or in another context. -1 with an exception of the host's, else 0: what could not be recorded has been
 * counted. */
static int close_frame(Core *core, Frame *self, PyObject *error, int anywhere, int64_t end_ns)
{
    if (end_ns == 0)
        end_ns = read_clock(core);
    frame_t *frame = self->frame;
    if (frame->state == CLOSED) {
        count(core, ENDED_TWICE);
        return 0;
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (frame->state == CLOSED) { /* by code that ran meanwhile */
        count(core, ENDED_TWICE);
        return 0;
    }
    if (current == NULL) {
        frame->state = CLOSED;
        return lose(core);
    }
    Py_INCREF(self);
    Py_INCREF(ring);
    Py_INCREF(current);
    int64_t waited_ns = 0;
    if (self->stepped != NULL || self->children_waited_ns != 0) {
        waited_ns = waited_of(self, end_ns);
        count_waited_above(counted_above(current, frame, ring), waited_ns);
    }
    leave_chain(core, current, frame, ring, end_ns, !anywhere);
    if (frame->attributes == NULL && (error == NULL || error == Py_None) && waited_ns == 0) {
        store_plain(core, ring, frame, end_ns);
    } else {
        PyObject *name = name_of_end(core, frame, error);
        store(core, ring, frame, end_ns, -1, waited_ns, name);
        Py_XDECREF(name);
    }
    int failed = frame->pair != NULL ? end_on_device(ring, frame, end_ns) : 0;
    leave_stepped(self);
    Py_DECREF(current);
    Py_DECREF(ring);
    Py_DECREF(self);
    return failed;
}
