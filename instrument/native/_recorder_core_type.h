/* Cold: the Python type `Core`: the recorder as Python sees it, and reads over all threads. A part of `_recorder.c`. */

static PyObject *Core_rings(Core *self, PyObject *Py_UNUSED(none))
{
    return PyList_GetSlice(self->rings, 0, PyList_GET_SIZE(self->rings));
}

/* Return the calls of each node on all threads: a new list. */
static PyObject *Core_calls_by_node(Core *self, PyObject *Py_UNUSED(none))
{
    enum { AHEAD = 12 }; /* Totals are at scattered addresses: those of the node this many places ahead are prefetched. */
    uint32_t nodes = self->tree.node_count;
    uint64_t *calls = PyMem_Calloc((size_t)nodes + 1, sizeof *calls);
    if (calls == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0, rings = PyList_GET_SIZE(self->rings); i <= rings; i++) {
        const Ring *ring = i < rings ? (Ring *)PyList_GET_ITEM(self->rings, i) : self->ended;
        for (uint32_t n = 0; n < nodes && n < ring->totals.slots * PAGE; n++) {
            const totals_t *totals = known_totals(&ring->totals, n);
            __builtin_prefetch(known_totals(&ring->totals, n + AHEAD));
            calls[n] += totals != NULL ? totals->calls : 0;
        }
    }
    PyObject *counts = PyList_New(nodes);
    for (Py_ssize_t n = 0; counts != NULL && n < nodes; n++)
        if (PyList_SetItem(counts, n, PyLong_FromUnsignedLongLong(calls[n])) < 0 || PyErr_Occurred())
            Py_CLEAR(counts);
    PyMem_Free(calls);
    return counts;
}

/* Return the sites of the nodes from a number on, and the numbers of their parents, -1 for none. */
static PyObject *Core_nodes_from(Core *self, PyObject *argument)
{
    unsigned long first = PyLong_AsUnsignedLong(argument);
    if (first == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t count = self->tree.node_count > first ? (Py_ssize_t)(self->tree.node_count - first) : 0;
    int was_enabled = PyGC_Disable(); /* a collection could run code that resets */
    PyObject *parents = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int32_t)), *sites = PyList_New(count);
    if (was_enabled)
        PyGC_Enable();
    if (parents == NULL || sites == NULL) {
        Py_XDECREF(parents);
        Py_XDECREF(sites);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const node_t *node = self->tree.nodes[first + (size_t)i];
        PyList_SET_ITEM(sites, i, Py_NewRef(node->site));
        ((int32_t *)PyBytes_AS_STRING(parents))[i] = node->parent == &self->tree.root ? -1 : (int32_t)node->parent->index;
    }
    return Py_BuildValue("(NN)", sites, parents);
}

static int add_open(PyObject *open_rows, frame_t *frame, int64_t now_ns)
{
    if (frame->state == CLOSED || frame->start_ns == 0)
        return 0;
    PyObject *attributes = frame->attributes; /* copied, because the span's owner may add to them */
    attributes = attributes != NULL && PyDict_Check(attributes) ? PyDict_Copy(attributes) : Py_NewRef(Py_None);
    int64_t waited_ns = frame->self == NULL ? 0 : waited_of((Frame *)frame->self, now_ns);
    int64_t active_ns = waited_ns > 0 ? now_ns - frame->start_ns - waited_ns : -1;
    PyObject *item = Py_BuildValue("(l(IKKKILLLLON))", frame->ring->thread_id, frame->node->index, frame->span_id,
                                   frame->parent_id, frame->root_id, (uint32_t)frame->task, frame->start_ns, now_ns,
                                   frame->children_ns - waited_ns, active_ns, Py_None, attributes);
    int failed = item == NULL || PyList_Append(open_rows, item) < 0;
    Py_XDECREF(item);
    return -failed;
}

/* Return (thread id, row) of each open span, as if it ended now. */
static PyObject *Core_open_rows(Core *self, PyObject *Py_UNUSED(none))
{
    int64_t now_ns = read_clock(self);
    PyObject *open_rows = PyList_New(0);
    int failed = open_rows == NULL;
    /* A collection could free a context and change the list. */
    int was_enabled = PyGC_Disable();
    FOR_EACH_OPEN_FRAME(self, frame, failed = failed || add_open(open_rows, frame, now_ns) < 0)
    if (was_enabled)
        PyGC_Enable();
    if (failed)
        Py_CLEAR(open_rows);
    return open_rows;
}

static PyObject *Core_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Core *self = (Core *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->uid = ++last_uid;
    self->counted = &self->own_counted;
    self->node_limit = NODE_LIMIT;
    self->rings = PyList_New(0);
    self->user_sites = PyDict_New();
    self->passes = PyDict_New();
    self->variable = PyContextVar_New("instrument_current", NULL);
    self->ended = empty_ring(self);
    if (self->rings == NULL || self->user_sites == NULL || self->passes == NULL ||
        self->variable == NULL || self->ended == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int Core_init(Core *self, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    unsigned long long ring_bytes;
    PyObject *overflow, *remote_key, *link_of, *task_readers, *thread_name;
    if (!PyArg_ParseTuple(args, "KOOOOO:Core", &ring_bytes, &overflow, &remote_key, &link_of, &task_readers, &thread_name))
        return -1;
    self->row_budget = ring_bytes / sizeof(row_t);
    self->remote_key = Py_NewRef(remote_key);
    self->link_of = Py_NewRef(link_of);
    self->task_readers = Py_NewRef(task_readers);
    self->thread_name = Py_NewRef(thread_name);
    self->tree.overflow = new_node(self, &self->tree.root, overflow);
    return self->tree.overflow == NULL ? -1 : 0;
}

#define REFERENCES_Core(EACH)                                                                                     \
    EACH(remote_parent) EACH(begin_device) EACH(remote_key) EACH(link_of) EACH(answers) EACH(task_readers)       \
    EACH(running_loop) EACH(task_of_loop) EACH(reports_tasks) EACH(thread_name) EACH(user_sites)   \
    EACH(scope_type) EACH(passes)

TRAVERSE(Core)

static int Core_clear(Core *self)
{
    Py_CLEAR(self->remote_parent);
    self->times_devices = 0;
    Py_CLEAR(self->begin_device);
    Py_CLEAR(self->reports_tasks);
    return 0;
}

static void Core_dealloc(Core *self)
{
    PyObject_GC_UnTrack(self);
    self->on = 0;
    note_features(self);
    while (self->currents != NULL)
        unlist_current(self->currents);
    free_rings(self->rings);
    Py_XDECREF(self->ended);
    Py_XDECREF(self->variable);
    REFERENCES_Core(RELEASE)
    Py_DECREF(Core_forget_names(self, NULL));
    Py_XDECREF(self->no_scope);
    Py_XDECREF(self->described_sites);
    for (uint32_t i = 0; i < self->tree.node_count; i++) {
        PyMem_Free(self->tree.nodes[i]->table);
        Py_DECREF(self->tree.nodes[i]->site);
        free_lines_in(self->tree.nodes[i], PART_NODES);
    }
    for (node_t *spare; (spare = self->spare) != NULL || (spare = self->private_spare) != NULL;) {
        *(spare == self->spare ? &self->spare : &self->private_spare) = spare->parent;
        free_lines_in(spare, PART_NODES);
    }
    if (self->memory != NULL)
        leave_memory(self->memory);
    PyMem_Free(self->tree.nodes);
    PyMem_Free(self->tree.root.table);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Core_annotate(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs == 2 && args[0] == Py_None) /* the begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs != 2 || Py_TYPE(args[0]) != &FrameType || !PyDict_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "annotate(frame, attributes)");
    return annotate_open(self, GIVEN, (Frame *)args[0], args[1], NULL, NULL) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *Core_annotate_innermost(Core *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return annotate_by(self, INNERMOST, NULL, args, nargs, names);
}

static PyObject *Core_annotate_request(Core *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return annotate_by(self, REQUEST, NULL, args, nargs, names);
}

PyDoc_STRVAR(annotate_doc,
             "annotate_innermost($self, attributes=None, /, **more)\n--\n\n"
             "Add facts to the innermost open span: ``annotate(tokens=3)`` or ``annotate({\"usage.tokens\": 3})``.\n\n"
             "The span may be a function's, a layer's, a scope's or a request's. The code that started this task or thread may\n"
             "have opened it. Values are text (cut after 256 characters), bools, 64-bit numbers, or lists of one type. A span has\n"
             "at most 128 values. Any other value is left out and counted. A name that is set again has the new value. Does\n"
             "nothing without an open span or a recording. Never raises.");

PyDoc_STRVAR(annotate_request_doc,
             "annotate_request($self, attributes=None, /, **more)\n--\n\n"
             "Add facts to the request that is open around the innermost span: ``annotate_request(tier=\"gold\")``.\n\n"
             "Values, limits and errors are as in `annotate`.");

PyDoc_STRVAR(bind_doc,
             "bind($self, key, /)\n--\n\n"
             "Set the key of the request that the innermost open span serves: an id that other processes use, too.\n\n"
             "    bind(request_id)  # in the handler, and again where an engine works for it\n\n"
             "Reports join the spans with one key: text of at most 128 characters, or a whole number. Never raises.");

/* Return the innermost open frame of this context that was opened as manual: a new reference, None for none. A name
 * selects frames by the name of their site. */
static PyObject *Core_innermost_manual(Core *self, PyObject *name)
{
    Ring *ring;
    Current *current = current_of(self, &ring);
    if (current == NULL)
        return clear_fault() < 0 ? NULL : Py_NewRef(Py_None);
    frame_t *frame = current->top;
    if (frame == NULL && current->base != NULL)
        frame = current->base->frame;
    for (; frame != NULL; frame = frame->above) {
        if (frame->state != MANUAL || frame->self == NULL)
            continue;
        PyObject *site_name = PyObject_GetAttrString(frame->node->site, "name");
        if (site_name == NULL)
            return NULL;
        /* `==` could run code of the service */
        int same = PyUnicode_Check(site_name) && PyUnicode_Check(name) && PyUnicode_Compare(site_name, name) == 0;
        Py_DECREF(site_name);
        if (same || name == Py_None)
            return Py_NewRef(frame->self);
    }
    Py_RETURN_NONE;
}

static PyObject *Core_current_trace(Core *self, PyObject *Py_UNUSED(none))
{
    const frame_t *frame = open_span(self, INNERMOST, NULL);
    if (frame == NULL)
        return PyErr_Occurred() && clear_fault() < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *remote = remote_in(self, frame->request);
    return Py_BuildValue("KKO", (unsigned long long)frame->span_id, (unsigned long long)frame->root_id,
                         remote != NULL ? remote : Py_None);
}

static PyMethodDef Core_methods[] = {
    METHOD(Core, open, METH_FASTCALL, "Begin a span and make it current."),
    METHOD(Core, close, METH_FASTCALL, "End a span."),
    METHOD(Core, open_request, METH_FASTCALL, "Begin the span of a request."),
    METHOD(Core, close_request, METH_FASTCALL, "End the span of a request."),
    METHOD(Core, open_requests, METH_O, "Return the number of open requests that tasks began on a thread."),
    METHOD(Core, annotate, METH_FASTCALL, "Set attributes of an open span."),
    METHOD(Core, annotate_innermost, METH_FASTCALL | METH_KEYWORDS, annotate_doc),
    METHOD(Core, bind, METH_O, bind_doc),
    METHOD(Core, annotate_request, METH_FASTCALL | METH_KEYWORDS, annotate_request_doc),
    METHOD(Core, rename_innermost, METH_O, "Rename the innermost open span of this context."),
    METHOD(Core, site_of_open, METH_O,
           "Return the site of an open span, or for None of the innermost one; None without one."),
    METHOD(Core, rename, METH_FASTCALL, "Change the site of an open span to another one of its kind."),
    METHOD(Core, record, METH_FASTCALL, "Store a span that has just ended."),
    {"stepped_in", (PyCFunction)(void (*)(void))Core_stepped_in, METH_FASTCALL,
     "Return an awaitable that times the suspensions of another one for an open span: stepped_in(frame, awaitable)."},
    METHOD(Core, new_span, METH_O, "Return a scope of a site: a span around a block."),
    METHOD(Core, scope, METH_FASTCALL | METH_KEYWORDS, scope_doc),
    METHOD(Core, forget_names, METH_NOARGS, "Look up the sites of scopes again."),
    METHOD(Core, rings, METH_NOARGS, "Return the rings in the order in which their threads first recorded."),
    METHOD(Core, calls_by_node, METH_NOARGS, "Return the calls of each node on all threads."),
    METHOD(Core, nodes_from, METH_O, "Return sites and parents of the nodes from a number on."),
    METHOD(Core, open_rows, METH_NOARGS, "Return (thread id, row) of each open span."),
    METHOD(Core, innermost_manual, METH_O, "Return the innermost manual frame, by name or for None of any name."),
    {"current_trace", (PyCFunction)Core_current_trace, METH_NOARGS,
     "Return the ids of the innermost open span and its root, and the span of another tracer that its request continues."},
    METHOD(Core, publish, METH_NOARGS, "Publish the current span to contexts that are copied from now on."),
    METHOD(Core, share, METH_FASTCALL,
           "Note that a task gets a context, again if the second argument is True: then several tasks may run in it."),
    METHOD(Core, copy_context, METH_NOARGS,
           "copy_context($self)\n--\n\nCopy the context as contextvars.copy_context does; the copy has the current span."),
    METHOD(Core, forget_current, METH_NOARGS, "Forget the open spans of this context."),
    {"_forget_all", (PyCFunction)Core_forget_all, METH_NOARGS, "Forget the open spans of every context."},
    METHOD(Core, touch_ahead, METH_O, "Populate pages for the rows that threads write next."),
    METHOD(Core, attach, METH_VARARGS, "Record into a file from the next reset on."),
    {"_reset", (PyCFunction)Core_reset, METH_O, "Forget all rows and totals; take a new limit in bytes, or None."},
    METHOD(Core, start_ticks, METH_NOARGS, "Start to read the time stamp counter."),
    METHOD(Core, check_ticks, METH_O, "Compare the counter with the monotonic clock."),
    METHOD(Core, stop_ticks, METH_NOARGS, "Read the monotonic clock again."),
    METHOD(Core, now_ns, METH_NOARGS, "Read the clock that times spans."),
    {"count_device", (PyCFunction)Core_count_device, METH_VARARGS,
     "Add a call's device time: ring, node index, host, device and elapsed ns. Return False if no such call was counted."},
    {"read_event", (PyCFunction)Core_read_event, METH_VARARGS,
     "Record an event and await it: read_event(cuEventRecord, cuEventQuery, event, stream, limit_ns), the first four as "
     "addresses. Return the driver's error, and the times before and after."},
    {NULL},
};

static PyMemberDef Core_members[] = {
    {"node_limit", T_UINT, offsetof(Core, node_limit), 0, "call paths that the tally keeps"},
    {"node_count", T_UINT, offsetof(Core, tree.node_count), READONLY, "number of call paths"},
    {"user_sites", T_OBJECT, offsetof(Core, user_sites), READONLY, "sites of scopes of kind user, by name"},
    {"passes", T_OBJECT, offsetof(Core, passes), READONLY, "the counter of the calls of each muted site"},
    {"remote_parent", T_OBJECT, offsetof(Core, remote_parent), 0, "returns another tracer's current span, or None"},
    {"answers", T_OBJECT, offsetof(Core, answers), 0, "exceptions that answer a request, as in outcomes.ANSWERS"},
    {"reports_tasks", T_OBJECT, offsetof(Core, reports_tasks), 0, "returns True if the loop calls publish for its tasks; or None"},
    {"watches_all", T_BOOL, offsetof(Core, watches_all), 0, "whether begin_device is called for every span"},
    {NULL},
};

static int Core_set_scope_type(Core *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL || !PyType_Check(value) || !PyType_IsSubtype((PyTypeObject *)value, &ScopeType)) {
        PyErr_SetString(PyExc_TypeError, "scope_type is a kind of Scope");
        return -1;
    }
    Scope *scope = empty_scope((PyTypeObject *)value);
    if (scope == NULL)
        return -1;
    Py_DECREF(Core_forget_names(self, NULL));
    keep_scopes_of((PyTypeObject *)value);
    Py_XSETREF(self->no_scope, scope);
    Py_XSETREF(self->scope_type, Py_NewRef(value));
    return 0;
}

static int Core_set_begin_device(Core *self, PyObject *value, void *Py_UNUSED(closure))
{
    self->times_devices = value != NULL && value != Py_None;
    note_features(self);
    Py_XSETREF(self->begin_device, self->times_devices ? Py_NewRef(value) : NULL);
    return 0;
}

static PyObject *Core_on(Core *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->on);
}

static int Core_set_on(Core *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL || !PyBool_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "a recorder is on or off: True or False");
        return -1;
    }
    self->on = value == Py_True;
    note_features(self);
    return 0;
}

static PyGetSetDef Core_getset[] = {
    {"on", (getter)Core_on, (setter)Core_set_on, "whether spans begin", NULL},
    {"begin_device", object_at, (setter)Core_set_begin_device, "begins to time a span on a device, or None",
     (void *)offsetof(Core, begin_device)},
    {"memory_fd", (getter)Core_memory_fd, NULL, "descriptor of the memory that others can read, or -1", NULL},
    {"memory", (getter)Core_memory, NULL, "the memory that it records into, or None", NULL},
    {"scope_type", object_at, (setter)Core_set_scope_type, "the class of scopes", (void *)offsetof(Core, scope_type)},
    {NULL},
};

static PyTypeObject CoreType = {
    COLLECTED_TYPE(Core, sizeof(Core), Py_TPFLAGS_BASETYPE),
    .tp_doc = "Rows, totals and open spans of one process.",
    .tp_new = Core_new,
    .tp_init = (initproc)Core_init,
    .tp_clear = (inquiry)Core_clear,
    .tp_methods = Core_methods,
    .tp_members = Core_members,
    .tp_getset = Core_getset,
};
