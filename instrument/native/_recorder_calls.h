/* Hot: functions and methods whose calls are spans, or pass without one while they are muted. A part of
 * `_recorder.c`. */

static inline void count_passed(Pass *pass)
{
    pass->calls += (uint64_t)pass->core->on;
}

/* Return the counter of a muted site's calls: borrowed, NULL for other sites. Sites are compared by identity, so no
 * code runs. */
static inline Pass *pass_of(Core *core, PyObject *site)
{
    if (__builtin_expect(PyDict_GET_SIZE(core->passes) == 0, 1))
        return NULL;
    PyObject *pass = PyDict_GetItemWithError(core->passes, site);
    if (pass == NULL)
        PyErr_Clear(); /* the site of a test that cannot be hashed */
    return pass != NULL && Py_TYPE(pass) == &PassType ? (Pass *)pass : NULL;
}

static PyObject *Pass_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", NULL};
    PyObject *core;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Pass", words, &CoreType, &core))
        return NULL;
    Pass *self = (Pass *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->core = (Core *)Py_NewRef(core);
    return (PyObject *)self;
}

#define REFERENCES_Pass(EACH) EACH(core)
TRAVERSE_AND_DEALLOC(Pass)

/* Return False and count a call, for a wrapper whose switch is the attribute `on`. */
static PyObject *Pass_on(Pass *self, void *Py_UNUSED(closure))
{
    count_passed(self);
    Py_RETURN_FALSE;
}

static PyObject *Pass_count(Pass *self, PyObject *Py_UNUSED(none))
{
    count_passed(self);
    Py_RETURN_NONE;
}

static PyMethodDef Pass_methods[] = {
    METHOD(Pass, count, METH_NOARGS, "Count a call."),
    {NULL},
};

static PyMemberDef Pass_members[] = {
    {"calls", T_ULONGLONG, offsetof(Pass, calls), READONLY, "calls that passed"},
    {"cut", T_ULONGLONG, offsetof(Pass, cut), READONLY, "spans of generators that were ended early"},
    {NULL},
};

static PyGetSetDef Pass_getset[] = {
    {"on", (getter)Pass_on, NULL, "always False; each reading counts as a call", NULL},
    {NULL},
};

static PyTypeObject PassType = {
    COLLECTED_TYPE(Pass, sizeof(Pass), 0),
    .tp_doc = "A counter of the calls of a muted site: Pass(recorder).",
    .tp_new = Pass_new,
    .tp_methods = Pass_methods,
    .tp_members = Pass_members,
    .tp_getset = Pass_getset,
};

static inline frame_t *take_frame(void)
{
    frame_t *frame = hot.free_frames;
    if (frame != NULL) {
        hot.free_frames = frame->above;
    } else {
        frame = new_lines_in(frame_memory, PART_FRAMES, sizeof(frame_t));
    }
    return frame; /* a free frame has no references */
}

static inline void release_frame(frame_t *frame)
{
    frame->start_ns = 0; /* readers of open spans skip the frame */
    frame->above = hot.free_frames;
    hot.free_frames = frame;
}

/* End a call that raised, that did not end innermost, or whose frame has attributes or a Published object. The raised
 * exception stays set. Return true if the frame is in no chain. A frame that was missing in its own chain must not be
 * used again. */
static SELDOM int end_call(Core *core, Ring *ring, Current *current, frame_t *frame, int64_t end_ns)
{
    PyObject *error = NULL;
    raised_t raised = take_raised();
    if (raised.type != NULL && !PyType_IsSubtype((PyTypeObject *)raised.type, (PyTypeObject *)PyExc_Exception) &&
        !(raised.value != NULL && PyExceptionInstance_Check(raised.value)))
        /* `sys.exit()` in C raises the class without an instance. */
        PyErr_NormalizeException(&raised.type, &raised.value, &raised.traceback);
    if (raised.type != NULL && !(raised.value != NULL && is_no_error(core, frame, raised.value)))
        error = error_name(raised.type);
    int is_in_chain = leave_chain(core, current, frame, ring, end_ns, 1);
    if (ring->rows == NULL && (ring = ring_of(core)) == NULL && count_loss(core) < 0) {
        /* A signal handler raised. Its exception replaces the call's exception, as it would without a span. */
        drop_raised(raised);
        raised = take_raised();
    }
    if (ring != NULL) {
        Py_INCREF(ring);
        store_span(core, ring, frame, end_ns, -1, 0, error);
        if (frame->pair != NULL && end_on_device(ring, frame, end_ns) < 0) {
            drop_raised(raised);
            raised = take_raised();
        }
        Py_DECREF(ring);
    }
    Py_CLEAR(frame->pair);
    Py_CLEAR(frame->attributes);
    if (!is_in_chain) {
        Py_CLEAR(frame->request);
        frame->ring = NULL;
    }
    Py_XDECREF(error);
    raise_again(raised);
    return is_in_chain;
}

static SELDOM void forget_paths(Function *);

static SELDOM PyObject *find_current_and_call(Function *, PyObject *, path_t *, PyObject *const *, size_t, PyObject *);

enum { GIVEN, INNERMOST, REQUEST };

static int set_attributes(Core *, int, Frame *, PyObject *, PyObject *, PyObject *const *);

/* Set attributes of the innermost span from a call's result. Return -1 with an exception of the service set. */
static int read_result(Core *core, PyObject *reader, PyObject *result)
{
    PyObject *facts = PyObject_CallOneArg(reader, result);
    int failed = facts == NULL ? note_unless_of_service("results") : 0;
    if (facts != NULL && PyDict_CheckExact(facts) && PyDict_GET_SIZE(facts) > 0)
        failed = set_attributes(core, INNERMOST, NULL, facts, NULL, NULL);
    Py_XDECREF(facts);
    return failed;
}

static SELDOM int
begin_call_on_device(Function *self, frame_t *frame, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *facts = NULL;
    const call_t call = {args, PyVectorcall_NARGS(nargsf), names, NULL};
    int failed = self->works != NULL ? read_by(self->works, "device timer", &call, &facts) : 0;
    if (!failed)
        failed = begin_on_device(self->core, frame, facts);
    Py_XDECREF(facts);
    return failed;
}

/* Call the wrapped function. The result is not checked here, because the caller checks it. Compiled to a jump for a
 * Python function. */
static inline PyObject *call_wrapped(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *wrapped = self->wrapped;
    if (__builtin_expect(PyFunction_Check(wrapped), 1))
        return ((PyFunctionObject *)wrapped)->vectorcall(wrapped, args, nargsf, names);
    return PyObject_Vectorcall(wrapped, args, nargsf, names);
}

/* End a call that raised, or whose frame has changed since the call began. Takes the references of a call. */
static SELDOM PyObject *
end_otherwise(Core *core, Ring *ring, Current *current, frame_t *frame, int64_t end_ns, PyObject *result)
{
    int is_in_chain = end_call(core, ring, current, frame, end_ns);
    if (result != NULL && PyErr_Occurred())
        Py_CLEAR(result);
    Py_XDECREF(frame->request);
    if (is_in_chain)
        release_frame(frame);
    Py_DECREF(current);
    Py_DECREF(ring);
    return result;
}

/* Call the wrapped function inside a span of any kind. `path` remembers where the site was called, or is NULL. */
static __attribute__((noinline)) PyObject *
call_in_any_span(Function *self, PyObject *site, path_t *path, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Core *core = self->core;
    Ring *ring;
    note_features(core);
    if (path != NULL)
        __builtin_prefetch(path->newest.step);
    Current *current = cached_current(core, &ring);
    if (current == NULL)
        return find_current_and_call(self, site, path, args, nargsf, names);
    if (is_stack_used_up())
        return refuse_for_stack("calls of instrumented functions");
    PyObject *facts = NULL;
    if (self->attributes != NULL) {
        if (read_call(self->attributes, &(call_t){args, PyVectorcall_NARGS(nargsf), names, NULL}, &facts) < 0)
            return NULL;
        if (facts != NULL && (current = current_of(core, &ring)) != NULL)
            Py_SETREF(facts, with_link(current, facts));
        if ((current = current_of(core, &ring)) == NULL) { /* both may have run code of the service */
            Py_XDECREF(facts);
            return count_loss(core) < 0 ? NULL : PyObject_Vectorcall(self->wrapped, args, nargsf, names);
        }
    }
    if (self->uid != core->uid)
        forget_paths(self);
    frame_t *frame = take_frame();
    if (frame == NULL) {
        count_event(core, NO_MEMORY);
        Py_XDECREF(facts);
        return PyObject_Vectorcall(self->wrapped, args, nargsf, names);
    }
    frame->attributes = facts;
    identify(core, ring, current, frame, site, path, OPEN);
    Py_INCREF(self);
    Py_INCREF(ring);
    Py_INCREF(current);
    current->top = frame;
    if (frame->attributes != NULL && core->memory != NULL && !frame->node->is_copy)
        write_open_attributes(core, frame);
    publish_begun(core, current, frame);
    begin_frame(frame, read_clock(core));
    PyObject *result = NULL;
    node_t *node = frame->node;
    totals_t *totals = node->totals;
    __builtin_prefetch(totals, 1);
    if (!is_timed_on_device(core, frame) || begin_call_on_device(self, frame, args, nargsf, names) == 0)
        result = call_wrapped(self, args, nargsf, names);
    if (self->results != NULL && result != NULL && read_result(core, self->results, result) < 0)
        Py_CLEAR(result);
    /* Prefetch the memory that the end needs, while the clock is read. */
    __builtin_prefetch(frame, 1);
    __builtin_prefetch((char *)frame + LINE, 1);
    __builtin_prefetch(totals, 1);
    __builtin_prefetch(node);
    __builtin_prefetch(ring, 1);
    __builtin_prefetch((char *)ring + LINE, 1);
    __builtin_prefetch(current, 1);
    __builtin_prefetch((char *)current + LINE, 1);
    int64_t end_ns = read_clock(core);
    if (result == NULL || current->top != frame || ring->rows == NULL ||
        ((uintptr_t)frame->published | (uintptr_t)frame->attributes) != 0) {
        result = end_otherwise(core, ring, current, frame, end_ns, result);
        Py_DECREF(self);
        return result;
    }
    count_against_above(current, frame, ring, end_ns);
    current->top = frame->above;
    store_plain_span(core, ring, frame, end_ns);
    if (frame->pair != NULL && end_on_device(ring, frame, end_ns) < 0)
        Py_CLEAR(result);
    Py_XDECREF(frame->request);
    release_frame(frame);
    Py_DECREF(current);
    Py_DECREF(ring);
    Py_DECREF(self);
    return result;
}

/* Call a Python function inside a usual span: timed by one clock, below an open span or the root, by a remembered step.
 * All other calls go through `call_in_any_span`. After the call neither the function nor its recorder is read, except
 * for the rate of the time stamp counter. `known` is the path of an instance, NULL for the function's own path. */
static inline __attribute__((always_inline)) PyObject *
call_in_span(Function *self, path_t *instance_path, PyObject *const *args, size_t nargsf, PyObject *names, int has_ticks)
{
    path_t *path = instance_path != NULL ? instance_path : &self->path;
    /* Volatile, so on the stack while the clock is read: a register that is used afterwards would be saved and
     * restored. */
    PyObject *const *volatile kept_args = args;
    volatile size_t kept_nargsf = nargsf;
    PyObject *volatile kept_names = names;
    Core *core = self->core;
    __builtin_prefetch(path->newest.step);
    if (thread_cache()->uid != self->uid)
        goto otherwise;
    Ring *ring = thread_cache()->ring;
    if (ring->context_version != context_version_of(ring->state) || is_stack_used_up())
        goto otherwise;
    Current *current = ring->current;
    frame_t *frame = hot.free_frames;
    if (frame == NULL)
        goto otherwise;
    frame_t *next = frame->above;
    if (!place_below_top(core, ring, current, path, frame))
        goto otherwise;
    hot.free_frames = next;
    Py_INCREF(ring);
    Py_INCREF(current);
    current->top = frame;
    publish_begun(core, current, frame);
    struct timespec begin, end; /* two variables: the address of a single one would be kept during the call */
    begin_frame(frame, has_ticks ? ticks_as_ns(&core->ticks, read_ticks()) : read_monotonic_into(&begin));
    /* Read from memory again: registers are few, and have the arguments while the clock is read. */
    node_t *node = frame->node, *volatile kept_node = node;
    ring = frame->ring;
    totals_t *totals = node->totals, *volatile kept_totals = totals;
    __builtin_prefetch(totals, 1);
    PyFunctionObject *wrapped = (PyFunctionObject *)self->wrapped;
    PyObject *result = wrapped->vectorcall((PyObject *)wrapped, kept_args, kept_nargsf, kept_names);
    /* The memory that the end needs is fetched while the clock is read. The compiler must not read it before the
     * call. */
    __asm__ volatile("" : "+r"(frame), "+r"(ring));
    __builtin_prefetch(frame, 1);
    __builtin_prefetch((char *)frame + LINE, 1);
    __builtin_prefetch(kept_totals, 1);
    __builtin_prefetch(kept_node);
    __builtin_prefetch(ring, 1);
    __builtin_prefetch(&current->top, 1);
    int64_t end_ns = has_ticks && current->core != NULL ? ticks_as_ns(&current->core->ticks, read_ticks())
                                                        : read_monotonic_into(&end);
    int64_t total_ns = end_ns - frame->start_ns;
    node = frame->node; /* a rename may have changed it */
    if (__builtin_expect(total_ns < 0 || result == NULL || current->top != frame || node->ring_tag != ring->tag ||
                         !is_open_as_begun(frame), 0))
        return end_otherwise(current->maker, ring, current, frame, end_ns, result);
    if (frame->above != NULL) /* without a span above, the base is NULL, too: see `place_below_top` */
        count_against_above(current, frame, ring, end_ns);
    current->top = frame->above;
    totals = node->totals;
    write_row(ring, frame, node, end_ns, total_ns, NULL, 0);
    if (count_call(&current->maker, totals, frame, total_ns, total_ns, 0))
        count_all_waiting(current->maker, totals);
    Py_XDECREF(frame->request);
    release_frame(frame);
    Py_DECREF(current);
    Py_DECREF(ring);
    return result;
otherwise:
    /* Keeps the compiler from computing the path's address earlier, which would take a register. */
    __asm__("" : "+r"(self));
    path = instance_path != NULL ? instance_path : &self->path;
    return call_in_any_span(self, path->site, path, kept_args, kept_nargsf, kept_names);
}

/* Find the chain of the current context, then call the function in a span. Finding it may run code that releases the
 * site. */
static SELDOM PyObject *
find_current_and_call(Function *self, PyObject *site, path_t *path, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Ring *ring;
    PyObject *result = NULL;
    Py_INCREF(site);
    if (current_of(self->core, &ring) != NULL) {
        if (path != NULL && path->site != site) /* the entry now belongs to another instance */
            path = NULL;
        result = call_in_any_span(self, site, path, args, nargsf, names); /* the chain is cached now */
    } else if (count_loss(self->core) == 0) {
        result = PyObject_Vectorcall(self->wrapped, args, nargsf, names);
    }
    Py_DECREF(site);
    return result;
}

static PyObject *Function_call(Function *, PyObject *const *, size_t, PyObject *);

/* Call a function, timed by the time stamp counter. If the clock changes, this entry and `Function_call` replace each
 * other. */
static PyObject *Function_call_with_ticks(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (__builtin_expect(is_on_with_ticks(self->core), 1))
        return call_in_span(self, NULL, args, nargsf, names, 1);
    self->vectorcall = (vectorcallfunc)Function_call;
    return Function_call(self, args, nargsf, names);
}

static PyObject *Function_call(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (__builtin_expect(is_on_and_nothing_else(self->core), 1))
        return call_in_span(self, NULL, args, nargsf, names, 0);
    if (!self->core->on)
        return call_wrapped(self, args, nargsf, names);
    if (is_on_with_ticks(self->core))
        self->vectorcall = (vectorcallfunc)Function_call_with_ticks; /* used from the next call on */
    return call_in_any_span(self, self->path.site, &self->path, args, nargsf, names);
}

/* Call a muted function, or a callable that is not a Python function. */
static PyObject *Function_call_other(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (self->pass != NULL)
        count_passed(self->pass);
    if (self->muted || !self->core->on)
        return call_wrapped(self, args, nargsf, names);
    return call_in_any_span(self, self->path.site, &self->path, args, nargsf, names);
}

/* Return the cached entry of an instance, or a free one of its two places. */
static inline cached_t *place_of(const Function *self, PyObject *instance, uint64_t version)
{
    uint64_t hash = (uint64_t)(uintptr_t)instance * 0x9E3779B97F4A7C15u;
    cached_t *place = &self->cached[(uint32_t)(hash >> 32) & (self->cached_slots - 1)];
    if (place->instance == instance && place->version == version)
        return place;
    cached_t *neighbour = self->cached + ((place - self->cached) ^ 1);
    if ((neighbour->instance == instance && neighbour->version == version) || place->version == version)
        return neighbour;
    return place;
}

/* Cache an instance's site. The table grows when both places of an instance are in use. A smaller table is freed with
 * the function, because a call may still write to it. */
static void remember(Function *self, PyObject *instance, PyObject *site)
{
    uint64_t version = version_of(self->sites);
    cached_t *place = self->cached == NULL ? NULL : place_of(self, instance, version);
    if (place == NULL || (place->version == version && place->instance != instance && self->cached_slots < CACHED_LIMIT)) {
        uint32_t slots = place == NULL ? CACHED_AT_FIRST : self->cached_slots * 2;
        cached_t *room = new_lines((slots + 1) * sizeof(cached_t));
        if (room != NULL) {
            room[slots].before = self->cached;
            room[slots].version = self->cached_slots;
            self->cached = room;
            self->cached_slots = slots;
            place = place_of(self, instance, version);
        }
    }
    if (place != NULL) {
        place->instance = instance;
        place->version = version;
        place->path = (path_t){.site = site};
    }
}

/* Forget the steps that the function remembers, because a reset has freed the nodes. */
static SELDOM void forget_paths(Function *self)
{
    self->uid = self->core->uid;
    self->path.newest.parent = self->path.before.parent = NULL;
    uint32_t slots = self->cached_slots;
    for (cached_t *cached = self->cached; cached != NULL;) {
        for (uint32_t i = 0; i < slots; i++)
            cached[i].path.newest.parent = cached[i].path.before.parent = NULL;
        cached_t *last = &cached[slots];
        slots = (uint32_t)last->version;
        cached = last->before;
    }
}

static void forget_cached(Function *self)
{
    while (self->cached != NULL) {
        cached_t *last = &self->cached[self->cached_slots], *cached = self->cached;
        self->cached = last->before;
        self->cached_slots = (uint32_t)last->version;
        free_lines(cached);
    }
}

/* Set `site_out` to the site of the instance that a method is called on: a new reference, NULL for none. Return -1 with
 * an exception of the service set. */
static inline int site_of_instance(Function *self, PyObject *instance, PyObject **site_out)
{
    PyObject *key = PyLong_FromVoidPtr(instance);
    PyObject *site = key == NULL ? NULL : PyDict_GetItemWithError(self->sites, key);
    if (site != NULL && self->is_followed)
        remember(self, instance, site == Py_None ? NULL : site);
    if (site == NULL && !PyErr_Occurred()) {
        PyObject *evaluator = self->evaluate == NULL ? NULL : PyObject_CallOneArg(self->evaluate, Py_None);
        PyObject *decided = PyErr_Occurred() ? NULL : PyObject_CallOneArg(self->decide, instance);
        site = decided == NULL ? NULL : PyDict_GetItemWithError(self->sites, key);
        Py_XDECREF(decided); /* a final decision is in `sites` now */
        if (evaluator != NULL) {
            raised_t raised = take_raised();
            Py_XDECREF(PyObject_CallOneArg(self->evaluate, evaluator));
            Py_DECREF(evaluator);
            raise_again(raised);
        }
    }
    *site_out = site == Py_None ? NULL : Py_XNewRef(site);
    Py_XDECREF(key);
    return *site_out == NULL ? count_loss(self->core) : 0;
}

/* Call a method of an instance that has a site, or for which none has been decided. */
static __attribute__((noinline)) PyObject *
call_of_instance(Function *self, cached_t *cached, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *site, *new_site = NULL, *result = NULL;
    path_t *path = NULL;
    if (cached != NULL) {
        path = &cached->path;
        site = path->site;
    } else if (site_of_instance(self, args[0], &new_site) < 0) {
        return NULL;
    } else {
        site = new_site;
    }
    Pass *pass = site == NULL ? NULL : pass_of(self->core, site);
    if (pass != NULL)
        count_passed(pass);
    if (site == NULL || pass != NULL)
        result = PyObject_Vectorcall(self->wrapped, args, nargsf, names);
    else if (path != NULL && is_on_and_nothing_else(self->core) && PyFunction_Check(self->wrapped))
        return call_in_span(self, path, args, nargsf, names, 0);
    else
        result = call_in_any_span(self, site, path, args, nargsf, names);
    Py_XDECREF(new_site);
    return result;
}

/* Call a method whose instances have sites of their own. A call of an instance without a site adds no frame of ours to
 * the C stack. */
static PyObject *Function_call_by_instance(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (!self->core->on || PyVectorcall_NARGS(nargsf) == 0)
        return call_wrapped(self, args, nargsf, names);
    uint64_t version = version_of(self->sites);
    cached_t *cached = self->cached == NULL ? NULL : place_of(self, args[0], version);
    if (cached != NULL && (cached->instance != args[0] || cached->version != version))
        cached = NULL;
    if (cached != NULL && cached->path.site == NULL)
        return call_wrapped(self, args, nargsf, names);
    return call_of_instance(self, cached, args, nargsf, names);
}
