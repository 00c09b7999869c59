/* Cold: what readers ask of all threads together. A part of `_recorder.c`. */

static PyObject *
Core_rings(Core *self, PyObject *Py_UNUSED(none))
{
    return PyList_GetSlice(self->rings, 0, PyList_GET_SIZE(self->rings));
}

static PyObject *
Core_ended_totals(Core *self, PyObject *Py_UNUSED(none))
{
    Ring *ended = (Ring *)Py_NewRef((PyObject *)self->ended); /* a reset may come in between */
    PyObject *totals = book_as_dict(&ended->totals);
    Py_DECREF(ended);
    return totals;
}

/* Totals are read one after the other, and lie anywhere: those of the next nodes are fetched meanwhile. */
#define AHEAD 12
#define AHEAD_ON_EACH 4 /* where those of all threads are read by turns */

/* How often the nodes of each group were called, on all threads together. */
static PyObject *
Core_calls_by(Core *self, PyObject *args)
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

/* Numbers of a line, the first fields of `tally.Totals`. */
#define LINE_WIDTH 13

typedef struct {
    int64_t numbers[LINE_WIDTH];
    uint32_t first_node; /* that of the nodes of its place which was called first */
} line_t;

static int
compare_lines(const void *left, const void *right)
{
    const line_t *a = *(const line_t *const *)left, *b = *(const line_t *const *)right;
    int64_t a_ns = a->numbers[LINE_WIDTH - 1], b_ns = b->numbers[LINE_WIDTH - 1];
    return a_ns != b_ns ? (a_ns < b_ns ? -1 : 1) : (a->first_node < b->first_node ? -1 : a->first_node > b->first_node);
}

/* The totals of the nodes that places are given for, on these rings together, in the order of first calls. */
static PyObject *
lines_of(Ring *const *rings, Py_ssize_t count, PyObject *places)
{
    Py_buffer view;
    PyObject *found = NULL;
    if (PyObject_GetBuffer(places, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const int32_t *place_of = view.buf;
    uint32_t nodes = (uint32_t)((size_t)view.len / sizeof *place_of), used = 0;
    line_t *lines = PyMem_RawCalloc(nodes + 1, sizeof *lines), **order = PyMem_RawMalloc((nodes + 1) * sizeof *order);
    if (lines == NULL || order == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (uint32_t n = 0; n < nodes; n++) {
        totals_t sum; /* all but the histogram */
        memset(&sum, 0, offsetof(totals_t, chunks));
        sum.cancelled = 0;
        for (Py_ssize_t i = 0; i < count; i++) {
            const totals_t *t = known_totals(&rings[i]->totals, n);
            const totals_t *ahead = known_totals(&rings[i]->totals, n + AHEAD_ON_EACH);
            if (ahead != NULL) {
                __builtin_prefetch(ahead);
                __builtin_prefetch(&ahead->errors);
            }
            if (t != NULL && t->calls != 0)
                add_totals(NULL, &sum, t);
        }
        if (sum.calls == 0)
            continue;
        if (place_of[n] < 0 || (uint32_t)place_of[n] > n) {
            PyErr_SetString(PyExc_ValueError, "the place of a node is not before it");
            goto end;
        }
        int64_t *to = lines[place_of[n]].numbers;
        const int64_t from[LINE_WIDTH] = {
            place_of[n], at_most(sum.calls), at_most(sum.errors), sum.total_ns, sum.self_ns, sum.waiting_ns, sum.device_ns,
            elapsed_of(&sum), sum.min_ns, sum.max_ns, at_most(sum.moved_bytes), at_most(sum.cancelled), sum.first_ns,
        };
        if (to[1] == 0) {
            memcpy(to, from, sizeof from);
            lines[place_of[n]].first_node = n;
            order[used++] = &lines[place_of[n]];
            continue;
        }
        for (int i = 1; i < LINE_WIDTH - 1; i++)
            if (i == 8 || i == 9)
                to[i] = (i == 8) == (from[i] < to[i]) ? from[i] : to[i];
            else
                add_time(NULL, &to[i], from[i]);
        if (from[LINE_WIDTH - 1] < to[LINE_WIDTH - 1]) {
            to[LINE_WIDTH - 1] = from[LINE_WIDTH - 1];
            lines[place_of[n]].first_node = n;
        }
    }
    int in_order = 1; /* as they are where one thread has made the nodes */
    for (uint32_t i = 1; i < used && in_order; i++)
        in_order = compare_lines(&order[i - 1], &order[i]) < 0;
    if (!in_order)
        qsort(order, used, sizeof *order, compare_lines);
    found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(used * sizeof lines->numbers));
    for (uint32_t i = 0; found != NULL && i < used; i++)
        memcpy(PyBytes_AS_STRING(found) + i * sizeof lines->numbers, order[i]->numbers, sizeof lines->numbers);
end:
    PyMem_RawFree(lines);
    PyMem_RawFree(order);
    PyBuffer_Release(&view);
    return found;
}

/* Every ring, and that of the threads that were given up; NULL without memory. */
static Ring **
all_rings(Core *self, Py_ssize_t *count)
{
    Py_ssize_t rings = PyList_GET_SIZE(self->rings);
    Ring **all = PyMem_RawMalloc(((size_t)rings + 1) * sizeof *all);
    for (Py_ssize_t i = 0; all != NULL && i < rings; i++)
        all[i] = (Ring *)PyList_GET_ITEM(self->rings, i);
    if (all != NULL)
        all[rings] = self->ended;
    else
        PyErr_NoMemory();
    *count = rings + 1;
    return all;
}

/* [(thread id, name, lines)] of each ring, and at last of the threads that were given up, or of all as one. No object is
 * made that the collector knows before all are read: it may run then, and a ring be given up. */
static PyObject *
Core_lines_by_place(Core *self, PyObject *args)
{
    PyObject *places, *found = NULL;
    int merged;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "Op:lines_by_place", &places, &merged))
        return NULL;
    Ring **rings = all_rings(self, &count);
    Py_ssize_t books = merged ? 1 : count;
    PyObject **lines = rings == NULL ? NULL : PyMem_RawCalloc((size_t)books, sizeof *lines);
    if (rings == NULL || lines == NULL) {
        PyMem_RawFree(rings);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++)
        Py_INCREF(rings[i]);
    for (Py_ssize_t i = 0; i < books; i++)
        if ((lines[i] = lines_of(rings + i, merged ? count : 1, places)) == NULL)
            goto end;
    found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < books; i++) {
        int ended = rings[i] == rings[count - 1];
        PyObject *name = merged  ? PyUnicode_FromString("(all threads)")
                         : ended ? PyUnicode_FromString("(ended threads)")
                                 : Py_NewRef(rings[i]->name);
        PyObject *book = name == NULL ? NULL
                                      : Py_BuildValue("(lNO)", merged || ended ? 0L : rings[i]->thread_id, name, lines[i]);
        if (book == NULL || PyList_Append(found, book) < 0)
            Py_CLEAR(found);
        Py_XDECREF(book);
    }
end:
    for (Py_ssize_t i = 0; i < books; i++)
        Py_XDECREF(lines[i]);
    for (Py_ssize_t i = 0; i < count; i++)
        Py_DECREF(rings[i]);
    PyMem_RawFree(lines);
    PyMem_RawFree(rings);
    return found;
}

/* The histogram of nodes on a thread (0: those that were given up), or on all, packed. */
static PyObject *
Core_histogram_of(Core *self, PyObject *args)
{
    PyObject *nodes, *thread, *found = NULL;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "OO:histogram_of", &nodes, &thread))
        return NULL;
    long thread_id = thread == Py_None ? -1 : PyLong_AsLong(thread);
    Py_buffer view;
    if ((thread_id == -1 && PyErr_Occurred()) || PyObject_GetBuffer(nodes, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Ring **rings = all_rings(self, &count);
    histogram_t *sum = rings == NULL ? NULL : PyMem_RawMalloc(sizeof *sum);
    if (sum == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    sum->used = 0;
    const uint32_t *node = view.buf;
    size_t length = (size_t)view.len / sizeof *node;
    /* Ring by ring: what one thread has recorded lies together. */
    for (Py_ssize_t r = 0; r < count; r++) {
        if (thread_id != -1 && thread_id != (r == count - 1 ? 0 : rings[r]->thread_id))
            continue;
        for (size_t i = 0; i < length; i++) {
            const totals_t *t = known_totals(&rings[r]->totals, node[i]);
            const totals_t *ahead = i + AHEAD < length ? known_totals(&rings[r]->totals, node[i + AHEAD]) : NULL;
            for (size_t at = 0; ahead != NULL && at < sizeof *ahead; at += LINE)
                __builtin_prefetch((const char *)ahead + at);
            if (t != NULL && t->calls != 0)
                add_histogram(sum, t);
        }
    }
    found = packed(sum);
end:
    PyMem_RawFree(sum);
    PyMem_RawFree(rings);
    PyBuffer_Release(&view);
    return found;
}

static PyObject *
Core_ended_firsts(Core *self, PyObject *Py_UNUSED(none))
{
    Ring *ended = (Ring *)Py_NewRef((PyObject *)self->ended); /* a reset may come in between */
    PyObject *firsts = firsts_as_dict(&ended->totals);
    Py_DECREF(ended);
    return firsts;
}

/* Of the nodes from a number on their sites, and the numbers of their parents, -1 for none. */
static PyObject *
Core_nodes_from(Core *self, PyObject *argument)
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

static int
add_open(PyObject *found, PyObject *seen, frame_t *frame, int64_t now_ns)
{
    PyObject *key = PyLong_FromUnsignedLongLong(frame->span_id);
    if (key == NULL)
        return -1;
    int known = PySet_Contains(seen, key);
    if (known == 0 && PySet_Add(seen, key) == 0 && frame->state != CLOSED && frame->start_ns != 0) {
        row_t row = {0};
        fill_row(&row, frame, frame->node, frame->start_ns, now_ns, frame->children_ns);
        PyObject *attributes = frame->attributes; /* a copy, for whoever opened the span may still add to them */
        attributes = attributes != NULL && PyDict_Check(attributes) ? PyDict_Copy(attributes) : Py_XNewRef(attributes);
        int64_t active_ns = -1;
        int64_t waited_ns = frame->self == NULL ? 0 : waited_of((Frame *)frame->self, now_ns);
        if (waited_ns > 0) {
            active_ns = now_ns - frame->start_ns - waited_ns;
            row.children_ns -= waited_ns;
        }
        if (attributes != NULL || active_ns >= 0)
            row.rare = rare_of(active_ns, NULL, attributes);
        PyObject *tuple = PyErr_Occurred() ? NULL : row_as_tuple(&row);
        drop_rare(row.rare);
        Py_XDECREF(attributes);
        PyObject *pair = tuple == NULL ? NULL : Py_BuildValue("(lN)", frame->ring->thread_id, tuple);
        if (pair == NULL || PyList_Append(found, pair) < 0)
            known = -1;
        Py_XDECREF(pair);
    }
    Py_DECREF(key);
    return known < 0 ? -1 : 0;
}

/* (thread id, row) of each span that is open now, ending now. */
static PyObject *
Core_open_rows(Core *self, PyObject *Py_UNUSED(none))
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
