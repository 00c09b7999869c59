/* Cold: the recorder as Python sees it, and reads over all threads. A part of `_recorder.c`. */

static PyObject *Core_rings(Core *self, PyObject *Py_UNUSED(none))
{
    return PyList_GetSlice(self->rings, 0, PyList_GET_SIZE(self->rings));
}

/* Totals are read one after the other, at scattered addresses: those of the next nodes are prefetched meanwhile. */
#define AHEAD 12

/* The calls of the nodes of each group, on all threads together. */
static PyObject *Core_calls_by(Core *self, PyObject *args)
{
    Py_buffer groups;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*n:calls_by", &groups, &count))
        return NULL;
    const int32_t *group_of = groups.buf;
    uint32_t nodes = (uint32_t)((size_t)groups.len / sizeof *group_of);
    PyObject *all = NULL;
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
    all = PyList_New(count);
    for (Py_ssize_t g = 0; all != NULL && g < count; g++) {
        PyObject *number = PyLong_FromUnsignedLongLong(calls[g]);
        if (number == NULL)
            Py_CLEAR(all);
        else
            PyList_SET_ITEM(all, g, number);
    }
end:
    PyMem_RawFree(calls);
    PyBuffer_Release(&groups);
    return all;
}

/* The sites of the nodes from a number on, and the numbers of their parents, -1 for none. */
static PyObject *Core_nodes_from(Core *self, PyObject *argument)
{
    unsigned long first = PyLong_AsUnsignedLong(argument);
    if (first == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t count = self->node_count > first ? (Py_ssize_t)(self->node_count - first) : 0;
    int was_enabled = PyGC_Disable(); /* a collection in between could run code that resets */
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

static int add_open(PyObject *found, PyObject *seen, frame_t *frame, int64_t now_ns)
{
    PyObject *key = PyLong_FromUnsignedLongLong(frame->span_id);
    if (key == NULL)
        return -1;
    int known = PySet_Contains(seen, key);
    if (known == 0 && PySet_Add(seen, key) == 0 && frame->state != CLOSED && frame->start_ns != 0) {
        row_t row = {0};
        fill_row(&row, frame, frame->node, now_ns);
        PyObject *attributes = frame->attributes; /* a copy, for the span's owner may still add to them */
        attributes = attributes != NULL && PyDict_Check(attributes) ? PyDict_Copy(attributes) : Py_NewRef(Py_None);
        int64_t active_ns = -1;
        int64_t waited_ns = frame->self == NULL ? 0 : waited_of((Frame *)frame->self, now_ns);
        if (waited_ns > 0) {
            active_ns = now_ns - frame->start_ns - waited_ns;
            row.children_ns -= waited_ns;
        }
        PyObject *pair = attributes == NULL ? NULL
                                            : Py_BuildValue("(l(IKKKILLLLON))", frame->ring->thread_id, row.node, row.span_id,
                                                            row.parent_id, row.root_id, row.task, row.start_ns, row.end_ns,
                                                            row.children_ns, active_ns, Py_None, attributes);
        if (pair == NULL || PyList_Append(found, pair) < 0)
            known = -1;
        Py_XDECREF(pair);
    }
    Py_DECREF(key);
    return known < 0 ? -1 : 0;
}

/* (thread id, row) of each span that is open now, ending now. */
static PyObject *Core_open_rows(Core *self, PyObject *Py_UNUSED(none))
{
    int64_t now_ns = read_clock(self);
    PyObject *found = PyList_New(0), *seen = PySet_New(NULL);
    int failed = found == NULL || seen == NULL;
    /* A collection in between could end a context and take it off the list. */
    int was_enabled = PyGC_Disable();
    for (Current *current = self->currents; !failed && current != NULL; current = current->next)
        for (frame_t *frame = current->top; !failed && frame != NULL; frame = frame->above)
            failed = add_open(found, seen, frame, now_ns) < 0;
    for (Stretch *stretch = self->stretches; !failed && stretch != NULL; stretch = stretch->next)
        for (frame_t *frame = stretch->inner; !failed && frame != NULL; frame = frame->above)
            failed = add_open(found, seen, frame, now_ns) < 0;
    if (was_enabled)
        PyGC_Enable();
    Py_XDECREF(seen);
    if (failed)
        Py_CLEAR(found);
    return found;
}

/* ------------------------------------------------------------------ the recorder */

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

#define HELD_BY_CORE(EACH)                                                                                       \
    EACH(remote_parent) EACH(begin_device) EACH(remote_key) EACH(link_of) EACH(answers) EACH(task_readers)       \
    EACH(running_loop) EACH(task_of_loop) EACH(tells_of_tasks) EACH(thread_name) EACH(counts) EACH(user_sites)   \
    EACH(scope_type) EACH(passes)

static int Core_traverse(Core *self, visitproc visit, void *arg)
{
    HELD_BY_CORE(VISIT)
    return 0;
}

static int Core_clear(Core *self)
{
    Py_CLEAR(self->remote_parent);
    self->times_devices = 0;
    Py_CLEAR(self->begin_device);
    Py_CLEAR(self->tells_of_tasks);
    return 0;
}

static void Core_dealloc(Core *self)
{
    PyObject_GC_UnTrack(self);
    self->on = 0;
    note_features(self);
    while (self->currents != NULL)
        leave_list(self->currents);
    free_rings(self->rings);
    Py_XDECREF(self->ended);
    Py_XDECREF(self->variable);
    HELD_BY_CORE(LET_GO)
    Py_DECREF(Core_forget_names(self, NULL));
    Py_XDECREF(self->no_scope);
    Py_XDECREF(self->told_sites);
    for (uint32_t i = 0; i < self->node_count; i++) {
        PyMem_Free(self->nodes[i]->table);
        Py_DECREF(self->nodes[i]->site);
        free_lines_in(self->nodes[i], PART_NODES);
    }
    for (node_t *spare = self->spare, *next; spare != NULL; spare = next) {
        next = spare->parent;
        free_lines_in(spare, PART_NODES);
    }
    for (node_t *spare = self->private_spare, *next; spare != NULL; spare = next) {
        next = spare->parent;
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
    if (nargs == 2 && args[0] == Py_None) /* its begin could not be recorded */
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
             "Values are text (cut after 256 characters), bools, 64-bit numbers, or lists of one of these; a span has at most 128.\n"
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

/* The innermost open frame of this context that was opened as manual, by the name of its site where one is given. */
static PyObject *Core_innermost_manual(Core *self, PyObject *name)
{
    Ring *ring;
    Current *current = current_of(self, &ring);
    if (current == NULL)
        return forgive() < 0 ? NULL : Py_NewRef(Py_None);
    frame_t *frame = current->top;
    if (frame == NULL && current->base != NULL)
        frame = current->base->frame;
    for (; frame != NULL; frame = frame->above) {
        if (frame->state != MANUAL || frame->self == NULL)
            continue;
        if (name == Py_None)
            return Py_NewRef(frame->self);
        PyObject *own = PyObject_GetAttrString(frame->node->site, "name");
        if (own == NULL)
            return NULL;
        /* Not by `==`, which may be code of the host's. */
        int same = PyUnicode_Check(own) && PyUnicode_Check(name) && PyUnicode_Compare(own, name) == 0;
        Py_DECREF(own);
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
        return forgive() < 0 ? NULL : PyLong_FromLong(0);
    if (current->top != NULL)
        return PyLong_FromUnsignedLongLong(current->top->span_id);
    return PyLong_FromUnsignedLongLong(current->base != NULL ? current->base->span_id : 0);
}

static PyObject *Core_current_trace(Core *self, PyObject *Py_UNUSED(none))
{
    const frame_t *frame = open_span(self, INNERMOST, NULL);
    if (frame == NULL)
        return PyErr_Occurred() && forgive() < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *remote = remote_in(self, frame->request);
    return Py_BuildValue("KKO", (unsigned long long)frame->span_id, (unsigned long long)frame->root_id,
                         remote != NULL ? remote : Py_None);
}

static PyObject *Core_count(Core *self, PyObject *what)
{
    PyObject *before = PyDict_GetItemWithError(self->counts, what); /* borrowed */
    if (before == NULL && PyErr_Occurred())
        return NULL;
    PyObject *after = PyLong_FromLongLong(before == NULL ? 1 : PyLong_AsLongLong(before) + 1);
    if (after == NULL || PyDict_SetItem(self->counts, what, after) < 0) {
        Py_XDECREF(after);
        return NULL;
    }
    Py_DECREF(after);
    Py_RETURN_NONE;
}

static PyMethodDef Core_methods[] = {
    {"open", (PyCFunction)(void (*)(void))Core_open, METH_FASTCALL, "Begin a span and make it current."},
    {"close", (PyCFunction)(void (*)(void))Core_close, METH_FASTCALL, "End a span."},
    {"open_request", (PyCFunction)(void (*)(void))Core_open_request, METH_FASTCALL, "Begin the span of a request."},
    {"close_request", (PyCFunction)(void (*)(void))Core_close_request, METH_FASTCALL, "End the span of a request."},
    {"open_requests", (PyCFunction)Core_open_requests, METH_O,
     "How many requests are open that tasks have begun on a thread."},
    {"annotate", (PyCFunction)(void (*)(void))Core_annotate, METH_FASTCALL, "Set attributes of an open span."},
    {"annotate_innermost", (PyCFunction)(void (*)(void))Core_annotate_innermost, METH_FASTCALL | METH_KEYWORDS,
     annotate_doc},
    {"bind", (PyCFunction)Core_bind, METH_O, bind_doc},
    {"annotate_request", (PyCFunction)(void (*)(void))Core_annotate_request, METH_FASTCALL | METH_KEYWORDS,
     annotate_request_doc},
    {"rename_innermost", (PyCFunction)Core_rename_innermost, METH_O, "Rename the innermost open span of this context."},
    {"site_of_open", (PyCFunction)Core_site_of_open, METH_O,
     "The site of an open span, or with None of the innermost one; None where there is none."},
    {"rename", (PyCFunction)(void (*)(void))Core_rename, METH_FASTCALL,
     "Let an open span be one of another site of its kind from now on."},
    {"record", (PyCFunction)(void (*)(void))Core_record, METH_FASTCALL, "Store a span that has just ended."},
    {"stepped_in", (PyCFunction)(void (*)(void))Core_stepped_in, METH_FASTCALL,
     "What awaits something for an open span, which learns how long it was suspended: stepped_in(frame, awaitable)."},
    {"new_span", (PyCFunction)Core_new_span, METH_O, "A scope of a site: a span around a block."},
    {"scope", (PyCFunction)(void (*)(void))Core_scope, METH_FASTCALL | METH_KEYWORDS, scope_doc},
    {"forget_names", (PyCFunction)Core_forget_names, METH_NOARGS, "Ask for the sites of scopes anew."},
    {"rings", (PyCFunction)Core_rings, METH_NOARGS, "The rings in the order in which their threads first recorded."},
    {"calls_by", (PyCFunction)Core_calls_by, METH_VARARGS, "Calls by group of nodes, on all threads together."},
    {"nodes_from", (PyCFunction)Core_nodes_from, METH_O, "Sites and parents of the nodes from a number on."},
    {"open_rows", (PyCFunction)Core_open_rows, METH_NOARGS, "(thread id, row) of each span that is open now."},
    {"innermost_manual", (PyCFunction)Core_innermost_manual, METH_O, "The innermost manual frame, by name or None."},
    {"current_trace", (PyCFunction)Core_current_trace, METH_NOARGS,
     "Identities of the innermost open span and of its tree's root, and what the request noted of another tracer."},
    {"current_id", (PyCFunction)Core_current_id, METH_NOARGS, "Identity of the current span, 0 if there is none."},
    {"publish", (PyCFunction)Core_publish, METH_NOARGS, "Make the current span known to a context about to be copied."},
    {"share", (PyCFunction)(void (*)(void))Core_share, METH_FASTCALL,
     "A task is about to be given a context, again if that is True: two may run there by turns."},
    {"copy_context", (PyCFunction)Core_copy_context, METH_NOARGS,
     "copy_context($self)\n--\n\nAs contextvars.copy_context; the copy knows the current span."},
    {"forget_current", (PyCFunction)Core_forget_current, METH_NOARGS, "Forget what is open in this context."},
    {"_forget_all", (PyCFunction)Core_forget_all, METH_NOARGS, "Forget what is open in every context."},
    {"touch_ahead", (PyCFunction)Core_touch_ahead, METH_O, "Have pages found for the rows that threads write next."},
    {"attach", (PyCFunction)Core_attach, METH_VARARGS, "Record into a file from the next reset on."},
    {"_reset", (PyCFunction)Core_reset, METH_O, "Forget every row and total; a new limit in bytes, or None."},
    {"start_ticks", (PyCFunction)Core_start_ticks, METH_NOARGS, "Begin to read the time stamp counter."},
    {"check_ticks", (PyCFunction)Core_check_ticks, METH_O, "Compare the counter with the monotonic clock."},
    {"stop_ticks", (PyCFunction)Core_stop_ticks, METH_NOARGS, "Read the monotonic clock again."},
    {"now_ns", (PyCFunction)Core_now_ns, METH_NOARGS, "The clock that spans are timed with."},
    {"count_device", (PyCFunction)Core_count_device, METH_VARARGS,
     "Add a call's device time: ring, node index, host, device and elapsed ns. False where no such call was counted."},
    {"read_event", (PyCFunction)Core_read_event, METH_VARARGS,
     "Record an event and await it: read_event(cuEventRecord, cuEventQuery, event, stream, limit_ns), the first four as "
     "addresses. The driver's error, and the times before and after."},
    {"count", (PyCFunction)Core_count, METH_O, "Count an irregular event."},
    {NULL},
};

static PyMemberDef Core_members[] = {
    {"irregular", T_OBJECT, offsetof(Core, counts), READONLY, "irregular events that Python counts"},
    {"node_limit", T_UINT, offsetof(Core, node_limit), 0, "call paths that the tally keeps"},
    {"node_count", T_UINT, offsetof(Core, node_count), READONLY, "call paths known"},
    {"user_sites", T_OBJECT, offsetof(Core, user_sites), READONLY, "sites of scopes of kind user, by name"},
    {"passes", T_OBJECT, offsetof(Core, passes), READONLY, "what counts the calls of each muted site"},
    {"remote_parent", T_OBJECT, offsetof(Core, remote_parent), 0, "tells another tracer's current span, or None"},
    {"answers", T_OBJECT, offsetof(Core, answers), 0, "exceptions that answer a request, as outcomes.ANSWERS has them"},
    {"tells_of_tasks", T_OBJECT, offsetof(Core, tells_of_tasks), 0, "says whether a loop calls publish for a task, or None"},
    {"watches_all", T_BOOL, offsetof(Core, watches_all), 0, "whether begin_device is asked for every span"},
    {NULL},
};

static PyObject *Core_scope_type(Core *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->scope_type != NULL ? self->scope_type : Py_None);
}

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

static PyObject *Core_begin_device(Core *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->begin_device != NULL ? self->begin_device : Py_None);
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
    {"begin_device", (getter)Core_begin_device, (setter)Core_set_begin_device,
     "begins to time a span on a device, or None", NULL},
    {"memory_fd", (getter)Core_memory_fd, NULL, "descriptor of the memory that others can read, or -1", NULL},
    {"memory", (getter)Core_memory, NULL, "the memory that it records into, or None", NULL},
    {"scope_type", (getter)Core_scope_type, (setter)Core_set_scope_type, "what scope makes", NULL},
    {NULL},
};

static PyTypeObject CoreType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Core",
    .tp_basicsize = sizeof(Core),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "Rows, totals and open spans of one process.",
    .tp_new = Core_new,
    .tp_init = (initproc)Core_init,
    .tp_dealloc = (destructor)Core_dealloc,
    .tp_traverse = (traverseproc)Core_traverse,
    .tp_clear = (inquiry)Core_clear,
    .tp_methods = Core_methods,
    .tp_members = Core_members,
    .tp_getset = Core_getset,
};
