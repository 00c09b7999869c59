/* Cold: reads over all threads. A part of `_recorder.c`. */

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
