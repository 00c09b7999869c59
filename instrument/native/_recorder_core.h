/* Cold: the recorder as Python sees it, and reads over all threads. A part of `_recorder.c`. */

static PyObject *Core_rings(Core *self, PyObject *Py_UNUSED(none))
{
    return PyList_GetSlice(self->rings, 0, PyList_GET_SIZE(self->rings));
}

/* Totals are at scattered addresses. While one is read, the totals of the node this many places ahead are
 * prefetched. */
#define AHEAD 12

/* Return the calls of each group of nodes on all threads: a new list. */
static PyObject *Core_calls_by(Core *self, PyObject *args)
{
    Py_buffer groups;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*n:calls_by", &groups, &count))
        return NULL;
    const int32_t *group_of = groups.buf;
    uint32_t nodes = (uint32_t)((size_t)groups.len / sizeof *group_of);
    PyObject *counts = NULL;
    uint64_t *calls = count < 0 ? NULL : PyMem_RawCalloc((size_t)count + 1, sizeof *calls);
    if (calls == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0, rings = PyList_GET_SIZE(self->rings); i <= rings; i++) {
        const Ring *ring = i < rings ? (Ring *)PyList_GET_ITEM(self->rings, i) : self->ended;
        for (uint32_t n = 0; n < nodes && n < ring->totals.slots * PAGE; n++) {
            const totals_t *totals = known_totals(&ring->totals, n);
            __builtin_prefetch(known_totals(&ring->totals, n + AHEAD));
            if (totals != NULL && group_of[n] >= 0 && group_of[n] < count)
                calls[group_of[n]] += totals->calls;
        }
    }
    counts = PyList_New(count);
    for (Py_ssize_t g = 0; counts != NULL && g < count; g++)
        if (PyList_SetItem(counts, g, PyLong_FromUnsignedLongLong(calls[g])) < 0 || PyErr_Occurred())
            Py_CLEAR(counts);
end:
    PyMem_RawFree(calls);
    PyBuffer_Release(&groups);
    return counts;
}

/* Return the sites of the nodes from a number on, and the numbers of their parents, -1 for none. */
static PyObject *Core_nodes_from(Core *self, PyObject *argument)
{
    unsigned long first = PyLong_AsUnsignedLong(argument);
    if (first == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t count = self->node_count > first ? (Py_ssize_t)(self->node_count - first) : 0;
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
        const node_t *node = self->nodes[first + (size_t)i];
        PyList_SET_ITEM(sites, i, Py_NewRef(node->site));
        ((int32_t *)PyBytes_AS_STRING(parents))[i] = node->parent == &self->root ? -1 : (int32_t)node->parent->index;
    }
    return Py_BuildValue("(NN)", sites, parents);
}

static int add_open(PyObject *open_rows, PyObject *span_ids, frame_t *frame, int64_t now_ns)
{
    PyObject *key = PyLong_FromUnsignedLongLong(frame->span_id);
    if (key == NULL)
        return -1;
    int is_listed = PySet_Contains(span_ids, key);
    if (is_listed == 0 && PySet_Add(span_ids, key) == 0 && frame->state != CLOSED && frame->start_ns != 0) {
        row_t row = {0};
        fill_row(&row, frame, frame->node, now_ns);
        PyObject *attributes = frame->attributes; /* copied, because the span's owner may add to them */
        attributes = attributes != NULL && PyDict_Check(attributes) ? PyDict_Copy(attributes) : Py_NewRef(Py_None);
        int64_t active_ns = -1;
        int64_t waited_ns = frame->self == NULL ? 0 : waited_of((Frame *)frame->self, now_ns);
        if (waited_ns > 0) {
            active_ns = now_ns - frame->start_ns - waited_ns;
            row.children_ns -= waited_ns;
        }
        PyObject *item = attributes == NULL ? NULL
                                            : Py_BuildValue("(l(IKKKILLLLON))", frame->ring->thread_id, row.node, row.span_id,
                                                            row.parent_id, row.root_id, row.task, row.start_ns, row.end_ns,
                                                            row.children_ns, active_ns, Py_None, attributes);
        if (item == NULL || PyList_Append(open_rows, item) < 0)
            is_listed = -1;
        Py_XDECREF(item);
    }
    Py_DECREF(key);
    return is_listed < 0 ? -1 : 0;
}

/* Return (thread id, row) of each open span, as if it ended now. */
static PyObject *Core_open_rows(Core *self, PyObject *Py_UNUSED(none))
{
    int64_t now_ns = read_clock(self);
    PyObject *open_rows = PyList_New(0), *span_ids = PySet_New(NULL);
    int failed = open_rows == NULL || span_ids == NULL;
    /* A collection could free a context and change the list. */
    int was_enabled = PyGC_Disable();
    FOR_EACH_OPEN_FRAME(self, frame, failed = failed || add_open(open_rows, span_ids, frame, now_ns) < 0)
    if (was_enabled)
        PyGC_Enable();
    Py_XDECREF(span_ids);
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
    self->counts = PyDict_New();
    self->user_sites = PyDict_New();
    self->passes = PyDict_New();
    self->variable = PyContextVar_New("instrument_current", NULL);
    self->ended = empty_ring(self);
    if (self->rings == NULL || self->counts == NULL || self->user_sites == NULL || self->passes == NULL ||
        self->variable == NULL || self->ended == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int Core_init(Core *self, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"ring_bytes", "overflow", "remote_key", "link_of", "task_readers", "thread_name", NULL};
    unsigned long long ring_bytes;
    PyObject *overflow, *remote_key, *link_of, *task_readers, *thread_name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KOOOOO:Core", words, &ring_bytes, &overflow, &remote_key, &link_of,
                                     &task_readers, &thread_name))
        return -1;
    if (self->overflow != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a recorder is initialised once");
        return -1;
    }
    self->row_budget = ring_bytes / sizeof(row_t);
    Py_XSETREF(self->remote_key, Py_NewRef(remote_key));
    Py_XSETREF(self->link_of, Py_NewRef(link_of));
    Py_XSETREF(self->task_readers, Py_NewRef(task_readers));
    Py_XSETREF(self->thread_name, Py_NewRef(thread_name));
    self->overflow = new_node(self, &self->root, overflow);
    return self->overflow == NULL ? -1 : 0;
}

#define REFERENCES_Core(EACH)                                                                                     \
    EACH(remote_parent) EACH(begin_device) EACH(remote_key) EACH(link_of) EACH(answers) EACH(task_readers)       \
    EACH(running_loop) EACH(task_of_loop) EACH(reports_tasks) EACH(thread_name) EACH(counts) EACH(user_sites)   \
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
    for (uint32_t i = 0; i < self->node_count; i++) {
        PyMem_Free(self->nodes[i]->table);
        Py_DECREF(self->nodes[i]->site);
        free_lines_in(self->nodes[i], PART_NODES);
    }
    for (node_t *spare; (spare = self->spare) != NULL || (spare = self->private_spare) != NULL;) {
        *(spare == self->spare ? &self->spare : &self->private_spare) = spare->parent;
        free_lines_in(spare, PART_NODES);
    }
    if (self->memory != NULL)
        leave_memory(self->memory);
    PyMem_Free(self->nodes);
    PyMem_Free(self->root.table);
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
             "Add facts to the innermost open span: ``annotate(tokens=3)`` or ``annotate({\"usage.tokens\": 3})``.\n"
             "\n"
             "The span may be of a function, a layer, a scope or a request, opened here or where this task or thread was started.\n"
             "Values are text (cut after 256 characters), bools, 64-bit numbers, or lists of one type; a span has at most 128.\n"
             "Any other value is left out and counted. A name that is set again has the new value. Does nothing without an open\n"
             "span or a recording. Never raises.");

PyDoc_STRVAR(annotate_request_doc,
             "annotate_request($self, attributes=None, /, **more)\n--\n\n"
             "Add facts to the request that is open around the innermost span: ``annotate_request(tier=\"gold\")``.\n"
             "\n"
             "Otherwise as `annotate`.");

PyDoc_STRVAR(bind_doc,
             "bind($self, key, /)\n--\n\n"
             "Set the key of the request that the innermost open span serves: an id that other processes use, too.\n"
             "\n"
             "    bind(request_id)  # in the handler, and again where an engine works for it\n"
             "\n"
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
        if (name == Py_None)
            return Py_NewRef(frame->self);
        PyObject *site_name = PyObject_GetAttrString(frame->node->site, "name");
        if (site_name == NULL)
            return NULL;
        /* `==` could run code of the service */
        int same = PyUnicode_Check(site_name) && PyUnicode_Check(name) && PyUnicode_Compare(site_name, name) == 0;
        Py_DECREF(site_name);
        if (same)
            return Py_NewRef(frame->self);
    }
    Py_RETURN_NONE;
}

static PyObject *Core_current_id(Core *self, PyObject *Py_UNUSED(none))
{
    Ring *ring;
    Current *current = current_of(self, &ring);
    if (current == NULL)
        return clear_fault() < 0 ? NULL : PyLong_FromLong(0);
    if (current->top != NULL)
        return PyLong_FromUnsignedLongLong(current->top->span_id);
    return PyLong_FromUnsignedLongLong(current->base != NULL ? current->base->span_id : 0);
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

static PyObject *Core_count(Core *self, PyObject *event)
{
    PyObject *before = PyDict_GetItemWithError(self->counts, event); /* borrowed */
    if (before == NULL && PyErr_Occurred())
        return NULL;
    PyObject *after = PyLong_FromLongLong(before == NULL ? 1 : PyLong_AsLongLong(before) + 1);
    return put_fact(self->counts, event, after) ? NULL : Py_NewRef(Py_None);
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
    METHOD(Core, calls_by, METH_VARARGS, "Return the calls of each group of nodes on all threads."),
    METHOD(Core, nodes_from, METH_O, "Return sites and parents of the nodes from a number on."),
    METHOD(Core, open_rows, METH_NOARGS, "Return (thread id, row) of each open span."),
    METHOD(Core, innermost_manual, METH_O, "Return the innermost manual frame, by name or for None of any name."),
    {"current_trace", (PyCFunction)Core_current_trace, METH_NOARGS,
     "Return the ids of the innermost open span and its root, and the span of another tracer that its request continues."},
    METHOD(Core, current_id, METH_NOARGS, "Return the id of the current span, 0 without one."),
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
    METHOD(Core, count, METH_O, "Count an irregular event."),
    {NULL},
};

static PyMemberDef Core_members[] = {
    {"irregular", T_OBJECT, offsetof(Core, counts), READONLY, "irregular events that Python counts"},
    {"node_limit", T_UINT, offsetof(Core, node_limit), 0, "call paths that the tally keeps"},
    {"node_count", T_UINT, offsetof(Core, node_count), READONLY, "number of call paths"},
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

static PyObject *Core_last_id(PyObject *Py_UNUSED(self), void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(hot.last_id);
}

static int Core_set_last_id(PyObject *Py_UNUSED(self), PyObject *value, void *Py_UNUSED(closure))
{
    hot.last_id = PyLong_AsUnsignedLongLong(value);
    return PyErr_Occurred() ? -1 : 0;
}

static PyGetSetDef Core_getset[] = {
    {"on", (getter)Core_on, (setter)Core_set_on, "whether spans begin", NULL},
    {"_last_id", Core_last_id, Core_set_last_id, "identity of the newest span of all recorders", NULL},
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
