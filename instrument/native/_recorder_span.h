/* Hot: a span from its begin to its end. A part of `_recorder.c`. */

static void delete_frame_object(Frame *self)
{
    frame_object_count--;
    PyObject_GC_UnTrack(self);
    free_lines_in(self->frame, PART_FRAMES);
    PyObject_GC_Del(self);
}

/* Free a Frame object, or keep it for reuse. Called where `Frame_dealloc` may not keep it unchecked. */
static SELDOM void free_frame_object(Frame *self)
{
    int is_elsewhere = frame_memory != NULL && memory_of(self->frame) != frame_memory;
    if (!is_elsewhere && free_frame_object_count < OBJECTS_KEPT) {
        free_frame_objects[free_frame_object_count++] = self;
        return;
    }
    if (is_elsewhere && frame_objects_elsewhere > 0 && --frame_objects_elsewhere == 0)
        frame_objects_kept = OBJECTS_KEPT;
    delete_frame_object(self);
}

/* Detach a span from the awaited object around it. */
static inline void leave_stepped(Frame *self)
{
    Stepped *around = self->stepped;
    self->stepped = NULL;
    if (around != NULL && around->span != self)
        Py_DECREF(around);
}

/* Keep a Frame object for the next span. Its references are released while the object is complete, because code of the
 * service may run, and the collector may visit it. */
static void Frame_dealloc(Frame *self)
{
    frame_t *frame = self->frame;
    Py_SET_REFCNT(self, 1);
    if (frame->request == (PyObject *)self)
        frame->request = NULL; /* a frame borrows the reference to itself */
    Py_CLEAR(frame->ring);
    Py_CLEAR(frame->request);
    Py_CLEAR(frame->attributes);
    Py_CLEAR(frame->pair);
    leave_stepped(self);
    self->children_waited_ns = 0;
    if (frame->published != NULL)
        Py_DECREF(take_published(frame));
    frame->start_ns = 0; /* readers of open spans skip the frame */
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
    Frame *object = frame == NULL ? (Frame *)PyErr_NoMemory() : PyObject_GC_New(Frame, &FrameType);
    if (object == NULL) {
        free_lines_in(frame, PART_FRAMES);
        return NULL;
    }
    frame_object_count++;
    object->frame = frame;
    object->stretch = NULL;
    object->stepped = NULL;
    object->waited_before_ns = object->children_waited_ns = 0;
    frame->self = (PyObject *)object;
    PyObject_GC_Track(object);
    return object;
}

static int Frame_traverse(Frame *self, visitproc visit, void *arg)
{
    if (self->frame->request != (PyObject *)self)
        Py_VISIT(self->frame->request);
    Py_VISIT(self->frame->attributes);
    Py_VISIT(self->frame->published);
    if (self->stepped != NULL && self->stepped->span != self)
        Py_VISIT(self->stepped);
    return 0;
}

static int Frame_clear(Frame *self)
{
    Py_XDECREF(take_published(self->frame));
    return 0;
}

/* Return a number of the frame, by its offset: a new reference. */
static PyObject *Frame_number(Frame *self, void *offset)
{
    return PyLong_FromUnsignedLongLong(*(const uint64_t *)((const char *)self->frame + (size_t)offset));
}

static PyGetSetDef Frame_getset[] = {
    {"span_id", (getter)Frame_number, NULL, "identity of the span", (void *)offsetof(frame_t, span_id)},
    {"start_ns", (getter)Frame_number, NULL, "time of its begin", (void *)offsetof(frame_t, start_ns)},
    {"root_id", (getter)Frame_number, NULL, "identity of the tree's root", (void *)offsetof(frame_t, root_id)},
    {"task", (getter)Frame_number, NULL, "identity of the task, 0 outside of one", (void *)offsetof(frame_t, task)},
    {NULL},
};

static PyTypeObject FrameType = {
    COLLECTED_TYPE(Frame, SIZE_IN_LINES(Frame), 0),
    .tp_doc = "A span that is open.",
    .tp_clear = (inquiry)Frame_clear,
    .tp_getset = Frame_getset,
};

/* Return true if a call of a node is open on a thread. The search goes up from a frame, also beyond the base of its
 * context. */
static SELDOM int is_open_around(Current *current, const frame_t *frame, const Ring *ring, const node_t *node)
{
    int is_open = 0;
    Py_XINCREF(current);
    for (int chains = 0; chains < DEEPEST_CHAIN && current != NULL && !is_open; chains++) {
        for (; frame != NULL && !is_open; frame = frame->above)
            is_open = frame->node == node && frame->ring != NULL && frame->ring->thread_id == ring->thread_id &&
                    frame->state != CLOSED;
        Published *base = nearest_open(current->base);
        frame = base != NULL ? base->frame : NULL;
        Current *owner = base != NULL ? (Current *)Py_XNewRef(base->owner) : NULL;
        Py_DECREF(current);
        current = owner;
    }
    Py_XDECREF(current);
    return is_open;
}

static inline uint64_t next_identity(void)
{
    return hot.last_id += 2; /* 0 means no span */
}

static inline void set_flags(frame_t *frame, char state)
{
    const char flags[] = {0, 0, state, 0};
    /* The two flags, `state` and `below_fold` are written as one number. */
    memcpy(&frame->is_inner, flags, sizeof flags);
}

/* Return true if a span is open as it began, with no flag set. */
static inline int is_open_as_begun(const frame_t *frame)
{
    static const char expected[] = {0, 0, OPEN, 0};
    return memcmp(&frame->is_inner, expected, sizeof expected) == 0;
}

static inline void remember_step(path_t *path, node_t *parent, node_t *step)
{
    path->before.parent = path->newest.parent;
    path->before.step = path->newest.step;
    path->newest.parent = parent;
    path->newest.step = step;
}

/* Set `step` to the remembered step from a parent. Return false if the site was not called there before. */
static inline int find_known_step(const path_t *path, const node_t *parent, node_t **step)
{
    *step = path->newest.step;
    if (__builtin_expect(path->newest.parent == parent, 1))
        return 1;
    *step = path->before.step;
    return path->before.parent == parent;
}

/* Fill in the ids, the node and the parent of a span. `path` belongs to the site, or is NULL. The caller reads the
 * clock last. */
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
        parent = base != NULL ? base->node : &core->tree.root;
        frame->below_fold = base != NULL && base->below_fold;
        frame->parent_id = current->base->span_id;
        frame->root_id = current->base->root_id;
        frame->request = Py_XNewRef(current->base->request);
    } else {
        parent = &core->tree.root;
        frame->parent_id = 0;
        frame->root_id = frame->span_id;
        frame->request = NULL;
        if (__builtin_expect(current->link_id != 0, 0) && current->linked != NULL && frame->attributes == NULL)
            frame->attributes = Py_NewRef(current->linked);
    }
    if (path == NULL || !find_known_step(path, parent, &step)) {
        step = node_of(core, parent, site);
        if (path != NULL && !is_edge(step))
            remember_step(path, parent, step);
    }
    frame->node = node_at_end(step);
    if (is_edge(step))
        frame->below_fold = 1;
    if (frame->below_fold && frame->node->may_recur)
        frame->is_inner = (char)is_open_around(current, current->top, ring, frame->node);
}

/* Fill in a usual span: below an open span or the root, by a remembered step. Return false for any other span. Then the
 * frame's content is undefined. */
static inline __attribute__((always_inline)) int
place_below_top(Core *core, Ring *ring, const Current *current, const path_t *path, frame_t *frame)
{
    frame_t *above = current->top;
    node_t *node;
    if (above != NULL) {
        static const char expected[] = {OPEN, 0}; /* not opened as manual, and only steps to children led to its node */
        if (memcmp(&above->state, expected, sizeof expected) != 0 || !find_known_step(path, above->node, &node))
            return 0;
        frame->span_id = next_identity();
        frame->parent_id = above->span_id;
        frame->root_id = above->root_id;
        frame->request = Py_XNewRef(above->request);
    } else {
        if (((uintptr_t)current->base | current->link_id) != 0 || !find_known_step(path, &core->tree.root, &node))
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

/* Show a span as open, also to readers in other processes. All its other fields have been written. */
static inline void begin_frame(frame_t *frame, int64_t now_ns)
{
    frame->counted_from_ns = now_ns;
    __atomic_store_n(&frame->start_ns, now_ns, __ATOMIC_RELEASE);
}

/* Return true if a span that begins now in a task is inside the object that is stepped. A span of an eager task is
 * not. */
static inline int is_stepped_in(uint64_t task)
{
    const Stepped *stepped = thread_cache()->stepping;
    return stepped != NULL && stepped->is_running && (stepped->task == 0 || stepped->task == task);
}

/* Connect a new span to the stepped object around it, which times its waits. */
static inline void note_stepping(Frame *self)
{
    if (is_stepped_in(self->frame->task)) {
        self->stepped = (Stepped *)Py_NewRef((PyObject *)thread_cache()->stepping);
        self->waited_before_ns = thread_cache()->stepping->waited_ns;
    }
}

/* Begin a usual span, by a remembered step and without another feature. Return false, without a change, for any other
 * span. */
static inline __attribute__((always_inline)) int
begin_known(Core *core, Frame *open, const path_t *path, int is_stepped_around)
{
    const thread_cache_t OF_THREAD *thread = thread_cache();
    if (!is_on_and_nothing_else(core) || thread->uid != hot.plain_uid)
        return 0;
    Ring *ring = thread->ring;
    Current *current = ring->current;
    frame_t *frame = open->frame;
    if (ring->context_version != context_version_of(ring->state) ||
        (current->eager && !publishes_requests_alone(core, current)) ||
        !place_below_top(core, ring, current, path, frame))
        return 0;
    if (is_stepped_around && thread->stepping != NULL)
        note_stepping(open);
    Py_INCREF(ring);
    Py_INCREF(open); /* owned by the chain */
    current->top = frame;
    begin_frame(frame, read_monotonic());
    return 1;
}

/* Set an attribute of a span in a copy of its attributes, because others may have the dict. Errors are counted and
 * cleared. */
static void put_fact_of_span(Core *core, frame_t *frame, PyObject *name, PyObject *value)
{
    PyObject *attributes = frame->attributes ? PyDict_Copy(frame->attributes) : PyDict_New();
    if (value != NULL && attributes != NULL && PyDict_SetItem(attributes, name, value) == 0)
        Py_XSETREF(frame->attributes, Py_NewRef(attributes));
    else
        count_event(core, NO_DETAILS);
    PyErr_Clear();
    Py_XDECREF(attributes);
}

static int note_remote(Core *core, Frame *frame)
{
    PyObject *ask = Py_NewRef(core->remote_parent);
    PyObject *remote = PyObject_CallNoArgs(ask);
    Py_DECREF(ask);
    if (remote != NULL && remote != Py_None)
        put_fact_of_span(core, frame->frame, core->remote_key, remote);
    Py_XDECREF(remote);
    if (PyErr_Occurred())
        note_fault("current OpenTelemetry span");
    return PyErr_Occurred() ? -1 : 0;
}

/* Return a root's attributes with the link of its context: a new reference or NULL, without an exception. Making a dict
 * may run code of the service. */
static PyObject *with_link(const Current *current, PyObject *attributes)
{
    if (current->top != NULL || current->base != NULL || current->linked == NULL || attributes == NULL)
        return Py_XNewRef(attributes); /* a root without attributes takes those of its context */
    PyObject *linked = Py_NewRef(current->linked);
    PyObject *merged = PyDict_Check(attributes) ? PyDict_Copy(attributes) : NULL;
    if (merged != NULL && PyDict_Update(merged, linked) < 0)
        Py_CLEAR(merged);
    PyErr_Clear(); /* without memory */
    Py_DECREF(linked);
    return merged != NULL ? merged : Py_NewRef(attributes);
}

static int close_frame(Core *core, Frame *self, PyObject *error, int anywhere, int64_t end_ns);

/* Begin a span and make it current. `scope` is the scope that begins, or NULL. Return a new reference, NULL with an
 * exception, or NULL without one if the loss has been counted: see `count_loss`. */
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
    int is_request = frame->node == core->tree.overflow ? kind_is(site, str_request) : frame->node->is_request;
    if (is_request && !is_open_request(frame->request)) {
        frame->root_id = frame->span_id |= REQUEST_BIT;
        Py_XSETREF(frame->request, (PyObject *)self); /* borrowed, as it is a reference to itself */
        if (core->remote_parent != NULL && core->remote_parent != Py_None) {
            uint64_t uid = core->uid;
            int failed = note_remote(core, self) < 0;
            if (core->uid != uid) /* a reset that did not know the frame has freed the node */
                frame->node = core->tree.overflow;
            if (failed) {
                Py_DECREF(self);
                return NULL;
            }
            current = current_of(core, &ring);
            if (current == NULL) {
                Py_DECREF(self);
                return NULL;
            }
            frame->above = current->top; /* that code may have ended scopes */
        }
    }
    if (frame->attributes != NULL && core->memory != NULL && !frame->node->is_copy)
        write_open_attributes(core, frame);
    Py_INCREF(self); /* owned by the chain */
    note_stepping(self);
    Py_INCREF(current);
    current->top = frame;
    publish_begun(core, current, frame);
    Py_DECREF(current);
    begin_frame(frame, read_clock(core));
    if (is_timed_on_device(core, frame) && begin_on_device(core, frame, NULL) < 0) {
        raised_t raised = take_raised();
        if (close_frame(core, self, Py_None, 0, 0) < 0)
            PyErr_Clear(); /* the first exception is raised again */
        raise_again(raised);
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

/* Return the span whose self time another span's time reduces: the span above it, if both ran on one thread and task.
 * Else return NULL. */
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

/* Note how long a child waited, of the time that counts against the span above it. */
static void count_waited_above(frame_t *above, int64_t waited_ns)
{
    if (above != NULL && above->self != NULL)
        ((Frame *)above->self)->children_waited_ns += waited_ns;
}

/* End a frame while spans that began inside it go on. From now on they count against the frame above. Return -1 if
 * the frame is not in the chain. */
static int end_crossed(Current *current, frame_t *frame, int64_t end_ns)
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

/* Return the name of an exception's class, cut where it is long: a new reference or NULL, without an exception. No code
 * of the class runs: a metaclass may have a `__name__` of its own. */
static PyObject * error_name(PyObject *type)
{
    PyObject *whole = Py_TYPE(name_of_type)->tp_descr_get(name_of_type, type, (PyObject *)Py_TYPE(type));
    PyObject *name = whole == NULL ? NULL : PyUnicode_Substring(whole, 0, ERROR_NAME_LIMIT);
    Py_XDECREF(whole);
    if (name == NULL)
        PyErr_Clear();
    return name;
}

/* Return what a web framework's exception class answers: borrowed, NULL for any other class. */
static PyObject *answer_of(Core *core, PyTypeObject *type)
{
    if (!PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE))
        return NULL;
    PyObject *module = PyDict_GetItem(type->tp_dict, str_module_dunder);
    PyObject *answers = module != NULL && PyUnicode_CheckExact(module) ? PyDict_GetItem(core->answers, module) : NULL;
    return answers == NULL ? NULL : PyDict_GetItem(answers, ((PyHeapTypeObject *)type)->ht_qualname);
}

/* Return the HTTP status by which an exception answers a request, -1 for an exception of no web framework. No exception
 * is set. */
static long status_of(Core *core, PyObject *error)
{
    PyObject *classes = Py_TYPE(error)->tp_mro, *answer = NULL;
    for (Py_ssize_t i = 0; answer == NULL && i < PyTuple_GET_SIZE(classes); i++)
        answer = answer_of(core, (PyTypeObject *)PyTuple_GET_ITEM(classes, i));
    if (answer == NULL)
        return -1;
    PyObject *value = PyLong_Check(answer) ? Py_NewRef(answer) : PyObject_GetAttr(error, answer);
    if (value != NULL && PyUnicode_Check(value)) {
        PyObject *digits = PyUnicode_Substring(value, 0, 3);
        Py_SETREF(value, digits == NULL ? NULL : PyLong_FromUnicodeObject(digits, 10));
        Py_XDECREF(digits);
    }
    long status = value != NULL && PyLong_Check(value) ? PyLong_AsLong(value) : -1;
    Py_XDECREF(value);
    if (PyErr_Occurred()) /* a subclass of the service overrides the attribute */
        PyErr_Clear();
    return 100 <= status && status < 1000 ? status : -1;
}

/* Return the outcome of a span that an exception interrupted: borrowed, NULL for a failure. Runs no code of the
 * service. */
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

static PyObject *report_outcome(PyObject *Py_UNUSED(module), PyObject *error)
{
    PyObject *outcome = outcome_of(error);
    return Py_NewRef(outcome != NULL ? outcome : Py_None);
}

/* Return true if the exception that ended a span is no error: it is an answer below 500, or an interruption. Set the
 * status of an answer as an attribute of a request, and the outcome of an interruption as an attribute of any span. */
static int is_no_error(Core *core, frame_t *ended, PyObject *error)
{
    if (!PyExceptionInstance_Check(error))
        return 0;
    PyObject *outcome = outcome_of(error);
    if (outcome != NULL) {
        if (ended->attributes == NULL || PyDict_GetItem(ended->attributes, str_outcome) == NULL)
            put_fact_of_span(core, ended, str_outcome, outcome);
        return 1;
    }
    if (core->answers == NULL || !PyDict_CheckExact(core->answers))
        return 0;
    long status = status_of(core, error);
    if (status >= 0 && ended->node->is_request) {
        PyObject *number = PyLong_FromLong(status);
        put_fact_of_span(core, ended, str_status, number);
        Py_XDECREF(number);
    }
    return status >= 0 && status < FIRST_OF_SERVER;
}

/* Remove a frame whose span ends from its chain. `is_noted` says that it is a mistake if the span ends before spans
 * inside it, or in another context. Return false if the frame was not in the chain. */
static inline __attribute__((always_inline)) int
leave_chain(Core *core, Current *current, frame_t *frame, Ring *ring, int64_t end_ns, int is_noted)
{
    int is_found = 1;
    frame->state = CLOSED;
    if (current->top != frame)
        frame->has_rows = 1; /* spans that began inside it go on */
    count_against_above(current, frame, ring, end_ns);
    PyObject *published = take_published(frame);
    frame_t *above = frame->above;
    if (current->top == frame) {
        unlink_frame(current, NULL, frame);
        publish_rest(core, current, frame->span_id);
        above = current->top;
    } else if (frame->self == NULL || current->top != NULL || current->base != NULL || current->link_id != 0) {
        is_found = end_crossed(current, frame, end_ns) == 0;
        if (is_noted)
            count_event(core, is_found ? CROSSED : FOREIGN);
    }
    if (published != NULL)
        pass_on(core, current, published, above);
    return is_found;
}

/* Return the name of the error that ended a span: a new reference, NULL for no error. `error` is an exception, the name
 * of an error, None or NULL. */
static PyObject *name_of_end(Core *core, frame_t *frame, PyObject *error)
{
    if (error == NULL || error == Py_None)
        return NULL;
    if (PyUnicode_CheckExact(error))
        return Py_NewRef(error);
    return is_no_error(core, frame, error) ? NULL : error_name((PyObject *)Py_TYPE(error));
}

/* End a span at a time, which is now if `end_ns` is 0. `error` is as in `name_of_end`. `anywhere` says that the span
 * may end before spans inside it, or in another context. Return -1 with an exception of the service set, else 0. What
 * could not be recorded has been counted. */
static int close_frame(Core *core, Frame *self, PyObject *error, int anywhere, int64_t end_ns)
{
    if (end_ns == 0)
        end_ns = read_clock(core);
    frame_t *frame = self->frame;
    if (frame->state == CLOSED) {
        count_event(core, ENDED_TWICE);
        return 0;
    }
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (frame->state == CLOSED) { /* code that has just run ended it */
        count_event(core, ENDED_TWICE);
        return 0;
    }
    if (current == NULL) {
        frame->state = CLOSED;
        return count_loss(core);
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
        store_plain_span(core, ring, frame, end_ns);
    } else {
        PyObject *name = name_of_end(core, frame, error);
        store_span(core, ring, frame, end_ns, -1, waited_ns, name);
        Py_XDECREF(name);
    }
    int failed = frame->pair != NULL ? end_on_device(ring, frame, end_ns) : 0;
    leave_stepped(self);
    Py_DECREF(current);
    Py_DECREF(ring);
    Py_DECREF(self);
    return failed;
}
