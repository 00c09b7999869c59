/* Hot: the calling thread's ring. Cold: rings that are made, read and given up. A part of `_recorder.c`. */

/* Whether what is rare is the active time alone, as a number, which needs no memory of its own. */
static inline int
is_number(const PyObject *rare)
{
    return (uintptr_t)rare & 1;
}

static inline PyObject *
number_as_rare(int64_t active_ns)
{
    return (PyObject *)((uintptr_t)active_ns << 1 | 1);
}

static inline PyObject *
new_rare(PyObject *rare)
{
    if (!is_number(rare))
        Py_XINCREF(rare);
    return rare;
}

static inline void
drop_rare(PyObject *rare)
{
    if (rare != NULL && !is_number(rare))
        Py_DECREF(rare);
}

/* Give up the rows. A ring without rows is of no use to its thread any more, but a reader may still hold it. */
static void
free_rows_of(Ring *ring)
{
    row_t *rows = ring->rows;
    uint64_t written = ring->head < ring->capacity ? ring->head : ring->capacity;
    ring->rows = NULL;
    ring->head = 0;
    ring->context_version = NO_VERSION;
    for (uint64_t i = 0; rows != NULL && i < written; i++)
        drop_rare(rows[i].rare);
    if (rows != NULL)
        unmap_rows(rows, mapped_bytes(ring->capacity), written * sizeof(row_t));
}

static void
Ring_dealloc(Ring *self)
{
    free_rows_of(self);
    free_book(&self->totals);
    Py_XDECREF(self->current);
    Py_XDECREF(self->name);
    if (!give_slot(self, PART_RINGS))
        PyObject_Free(self);
}

static PyObject *
row_as_tuple(const row_t *row)
{
    PyObject *rare = new_rare(row->rare); /* the row may be overwritten while the tuple is made */
    PyObject *error = Py_None, *attributes = Py_None;
    int64_t active_ns = -1;
    if (is_number(rare)) {
        active_ns = (int64_t)((uintptr_t)rare >> 1);
    } else if (rare != NULL && PyTuple_CheckExact(rare)) {
        active_ns = PyLong_AsLongLong(PyTuple_GET_ITEM(rare, 0));
        error = PyTuple_GET_ITEM(rare, 1);
        attributes = PyTuple_GET_ITEM(rare, 2);
    } else if (rare != NULL) {
        attributes = rare;
    }
    PyObject *tuple = Py_BuildValue("(IKKKILLLLOO)", row->node, row->span_id, row->parent_id, row->root_id, row->task,
                                    row->start_ns, row->end_ns, row->children_ns, active_ns, error, attributes);
    drop_rare(rare);
    return tuple;
}

/* ([the rows from a number on], the number after them, how many were overwritten before they were read). */
static PyObject *
Ring_newest(Ring *ring, PyObject *argument)
{
    uint64_t since = PyLong_AsUnsignedLongLong(argument), head = ring->head;
    if (since == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    uint64_t first = head > ring->capacity ? head - ring->capacity : 0;
    first = first > since ? first : since;
    first = first < head ? first : head;
    uint64_t missed = first > since ? first - since : 0;
    PyObject *rows = PyList_New(0);
    for (uint64_t i = first; rows != NULL && i < head; i++) {
        /* Making tuples and giving rows up may run code of the host's, which overwrites or resets. */
        if (i >= ring->head)
            break;
        if (ring->head - i > ring->capacity) {
            missed++;
            continue;
        }
        const row_t *row = &ring->rows[i & ring->mask];
        PyObject *tuple = row_as_tuple(row);
        if (tuple == NULL || PyList_Append(rows, tuple) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(tuple);
    }
    return rows == NULL ? NULL : Py_BuildValue("(NKK)", rows, head, missed);
}

/* (the rows from a number on as they lie in memory, what those have that say more). The latter are as many as there are
 * rows whose `rare` is neither 0 nor a number. All of one moment: nothing in between can run a finaliser of the host's. */
static PyObject *
Ring_copied(Ring *self, PyObject *argument)
{
    uint64_t since = PyLong_AsUnsignedLongLong(argument), head = self->head;
    if (since == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    uint64_t first = head > self->capacity ? head - self->capacity : 0;
    first = first > since ? first : since;
    size_t count = first < head ? (size_t)(head - first) : 0, rare = 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(row_t)));
    row_t *rows = bytes == NULL ? NULL : (row_t *)PyBytes_AS_STRING(bytes);
    size_t begin = (size_t)(first & self->mask), whole = (size_t)self->capacity - begin;
    whole = whole < count ? whole : count;
    if (rows != NULL && count != 0) {
        memcpy(rows, self->rows + begin, whole * sizeof *rows);
        memcpy(rows + whole, self->rows, (count - whole) * sizeof *rows);
    }
    for (size_t i = 0; rows != NULL && i < count; i++)
        rare += new_rare(rows[i].rare) != NULL && !is_number(rows[i].rare);
    PyObject *more = rows == NULL ? NULL : PyList_New((Py_ssize_t)rare);
    rare = 0;
    for (size_t i = 0; rows != NULL && i < count; i++)
        if (rows[i].rare != NULL && !is_number(rows[i].rare) && more != NULL)
            PyList_SET_ITEM(more, (Py_ssize_t)rare++, rows[i].rare);
        else
            drop_rare(rows[i].rare);
    if (more == NULL) {
        Py_XDECREF(bytes);
        return NULL;
    }
    return Py_BuildValue("(NN)", bytes, more);
}

/* The number of the first row that ended after a time: a ring's rows lie in the order of their ends. */
static uint64_t
number_after(const Ring *self, int64_t after_ns)
{
    uint64_t low = self->head > self->capacity ? self->head - self->capacity : 0, high = self->head;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (self->rows[middle & self->mask].end_ns > after_ns)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static PyObject *
Ring_first_after(Ring *self, PyObject *argument)
{
    long long after_ns = PyLong_AsLongLong(argument);
    if (after_ns == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(number_after(self, after_ns));
}

/* (rows, the end of the oldest, ids of those whose nodes are marked) of the rows that ended after a time. */
static PyObject *
Ring_held(Ring *self, PyObject *args)
{
    long long after_ns;
    Py_buffer marks;
    if (!PyArg_ParseTuple(args, "Ly*:held", &after_ns, &marks))
        return NULL;
    uint64_t first = number_after(self, after_ns), head = self->head;
    uint64_t *ids = NULL, count = 0, room = marks.len == 0 ? 0 : head - first;
    PyObject *found = NULL;
    if (room != 0 && (ids = PyMem_RawMalloc(room * sizeof *ids)) == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (uint64_t i = first; room != 0 && i < head; i++) {
        const row_t *row = &self->rows[i & self->mask];
        if (row->node < (uint64_t)marks.len && ((const char *)marks.buf)[row->node])
            ids[count++] = row->span_id;
    }
    found = Py_BuildValue("KLy#", head - first, first < head ? self->rows[first & self->mask].end_ns : (int64_t)0,
                          ids == NULL ? "" : (char *)ids, (Py_ssize_t)(count * sizeof *ids));
end:
    PyMem_RawFree(ids);
    PyBuffer_Release(&marks);
    return found;
}

/* [(node index, calls, total ns, steps of generators)] of each call path. */
static PyObject *
Ring_usage(Ring *self, PyObject *Py_UNUSED(none))
{
    PyObject *found = PyList_New(0);
    for (uint32_t n = 0; found != NULL && n < self->totals.slots * PAGE; n++) {
        totals_t *totals = known_totals(&self->totals, n);
        if (totals == NULL || (totals->calls == 0 && totals->steps == 0))
            continue;
        PyObject *item = Py_BuildValue("(IKLK)", n, totals->calls, totals->total_ns, totals->steps);
        if (item == NULL || PyList_Append(found, item) < 0)
            Py_CLEAR(found);
        Py_XDECREF(item);
    }
    return found;
}

static PyObject *
Ring_copied_totals(Ring *self, PyObject *Py_UNUSED(none))
{
    return book_as_dict(&self->totals);
}

static PyObject *
Ring_firsts(Ring *self, PyObject *Py_UNUSED(none))
{
    return firsts_as_dict(&self->totals);
}

/* For tests: begin a thread's totals of a call path at these: calls, total ns, self ns and times in every bucket that it
 * has. */
static PyObject *
Ring_preset_totals(Ring *self, PyObject *args)
{
    unsigned int node;
    unsigned long long calls, times;
    long long total_ns, self_ns;
    if (!PyArg_ParseTuple(args, "IKLLK:_preset_totals", &node, &calls, &total_ns, &self_ns, &times))
        return NULL;
    totals_t *totals = known_totals(&self->totals, node);
    if (totals == NULL) {
        PyErr_SetString(PyExc_KeyError, "a call path that this thread has not recorded");
        return NULL;
    }
    count_waiting(NULL, totals);
    totals->calls = calls;
    totals->total_ns = total_ns;
    totals->self_ns = self_ns;
    for (uint32_t c = 0; c < CHUNKS; c++) {
        chunk_t *chunk = totals->chunks[c];
        for (uint32_t i = 0; chunk != NULL && i < 64; i++) {
            if (times_of(totals, (c << 6) + i) == 0)
                continue;
            if (times >> LOW_BITS != 0 && carry(chunk, i, 0) < 0)
                return PyErr_NoMemory();
            chunk->low[i] = (uint16_t)times;
            if (chunk->high != NULL)
                chunk->high[i] = times >> LOW_BITS;
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef Ring_methods[] = {
    {"newest", (PyCFunction)Ring_newest, METH_O, "Rows from a number on, the head, and how many came too late."},
    {"copied", (PyCFunction)Ring_copied, METH_O, "Rows from a number on as bytes, and what some of them have more."},
    {"first_after", (PyCFunction)Ring_first_after, METH_O, "The number of the first row that ended after a time."},
    {"held", (PyCFunction)Ring_held, METH_VARARGS, "Rows that ended after a time, the first end, ids of marked ones."},
    {"usage", (PyCFunction)Ring_usage, METH_NOARGS, "Node index, calls, total ns and steps of each call path."},
    {"copied_totals", (PyCFunction)Ring_copied_totals, METH_NOARGS, "Totals by node index, as tuples."},
    {"firsts", (PyCFunction)Ring_firsts, METH_NOARGS, "Begin and length of the first call by node index."},
    {"_preset_totals", (PyCFunction)Ring_preset_totals, METH_VARARGS, "For tests: begin a call path's totals at these."},
    {NULL},
};

static PyMemberDef Ring_members[] = {
    {"capacity", T_ULONGLONG, offsetof(Ring, capacity), READONLY, "rows that it holds"},
    {"head", T_ULONGLONG, offsetof(Ring, head), READONLY, "rows ever written"},
    {"thread_id", T_LONG, offsetof(Ring, thread_id), READONLY, "native id of its thread"},
    {"name", T_OBJECT, offsetof(Ring, name), READONLY, "name of its thread"},
    {"too_short", T_ULONGLONG, offsetof(Ring, too_short), READONLY, "spans counted that got no row"},
    {"ended", T_BOOL, offsetof(Ring, ended), READONLY, "whether its thread has ended"},
    {NULL},
};

static PyTypeObject RingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Ring",
    .tp_basicsize = sizeof(Ring),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The newest rows of one thread, and the totals of all of them.",
    .tp_dealloc = (destructor)Ring_dealloc,
    .tp_methods = Ring_methods,
    .tp_members = Ring_members,
};

/* The ring's thread has to look anew for the chain of the context that runs there. */
static void
forget_current_of(Ring *ring)
{
    ring->context_version = NO_VERSION;
    Py_CLEAR(ring->current);
}

/* The calling thread writes to this ring no more. */
static void
part_with(Ring *ring)
{
    ring->ended = 1;
    ring->state = &nobody;
    if (at_hand.ring == ring)
        at_hand.uid = 0;
    forget_current_of(ring);
    Py_DECREF(ring);
}

static void
Mark_dealloc(Mark *self)
{
    Ring *ring = self->ring;
    if (ring != NULL && ring->thread_id == (long)PyThread_get_thread_native_id()) {
        ending_state = PyThreadState_GetID(PyThreadState_Get());
        part_with(ring);
    } else if (ring != NULL) {
        /* The state of a thread is cleared by another one: what that thread has cached stays valid, at the cost of one
         * ring. It has gone in a fork, is stopped at the end of the interpreter, or lives on without Python. */
        ring->ended = 1;
        ring->state = &nobody;
        forget_current_of(ring);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject MarkType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Mark",
    .tp_basicsize = sizeof(Mark),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Lives in a thread's state; its end is the thread's end.",
    .tp_dealloc = (destructor)Mark_dealloc,
};

static uint64_t
free_rows(Core *core)
{
    uint64_t used = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(core->rings); i++)
        used += ((Ring *)PyList_GET_ITEM(core->rings, i))->capacity;
    return used < core->row_budget ? core->row_budget - used : 0;
}

/* A thread that has ended needs no room beyond the rows that it wrote. */
static void
shrink(Ring *ring)
{
    uint64_t capacity = ring->capacity;
    while (capacity > SMALLEST_RING && capacity / 2 >= ring->head)
        capacity /= 2;
    if (capacity == ring->capacity)
        return;
    size_t kept = mapped_bytes(capacity), mapped = mapped_bytes(ring->capacity);
    if (ring->rows != NULL && kept < mapped && unmap_rows((char *)ring->rows + kept, mapped - kept, 0) < 0)
        return;
    ring->capacity = capacity;
    ring->mask = capacity - 1;
}

/* Give up the rings of threads that have ended, oldest first, until there is room for another and few enough
 * are left; their totals stay. */
static void
retire(Core *core)
{
    Py_ssize_t ended = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(core->rings); i++) {
        Ring *ring = (Ring *)PyList_GET_ITEM(core->rings, i);
        if (ring->ended) {
            shrink(ring);
            ended++;
        }
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(core->rings);) {
        if (ended <= ENDED_RINGS_KEPT && free_rows(core) >= core->row_budget / 32)
            return;
        Ring *ring = (Ring *)PyList_GET_ITEM(core->rings, i);
        if (!ring->ended) {
            i++;
            continue;
        }
        uint32_t totals_count = ring->totals.slots * PAGE;
        for (uint32_t n = 0; n < totals_count; n++)
            if (known_totals(&ring->totals, n) != NULL && totals_of(core->ended, n) == NULL)
                return; /* no memory to take its totals over: it stays */
        mark_moving(core);
        for (uint32_t n = 0; n < totals_count; n++) {
            totals_t *from = known_totals(&ring->totals, n);
            if (from != NULL)
                merge_totals(core, totals_of(core->ended, n), from);
        }
        core->counted->ended_rows += ring->head;
        core->counted->ended_too_short += ring->too_short;
        ring->generation = 0;
        mark_moving(core);
        if (PyList_SetSlice(core->rings, i, i + 1, NULL) < 0) {
            PyErr_Clear();
            return;
        }
        ended--;
    }
}

/* A ring without rows. It holds neither a place for weak references nor anything that the collector looks for, so it may
 * lie where others can read it. */
static Ring *
empty_ring(Core *core)
{
    void *slot = take_slot(core->memory, PART_RINGS);
    Ring *ring = slot != NULL ? slot : PyObject_Malloc(sizeof(Ring));
    if (ring == NULL)
        return (Ring *)PyErr_NoMemory();
    memset(ring, 0, sizeof(Ring));
    PyObject_Init((PyObject *)ring, &RingType);
    ring->generation = core->memory != NULL ? core->memory->at->generation : 0;
    ring->number = ++last_ring;
    ring->state = &nobody;
    ring->context_version = NO_VERSION;
    return ring;
}

/* Where the calling thread's C stack ends, and how much of it is left to what a call needs at least. */
static void
find_stack_end(Ring *ring)
{
    pthread_attr_t attributes;
    void *lowest;
    size_t size;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    if (pthread_attr_getstack(&attributes, &lowest, &size) == 0) {
        ring->stack_end = (uintptr_t)lowest;
        ring->stack_margin = size / 8 < STACK_MARGIN ? size / 8 : STACK_MARGIN;
    }
    pthread_attr_destroy(&attributes);
}

/* A call of Python from C takes C stack, which a raised recursion limit does not watch. A stack that is not the
 * thread's own is nowhere near. */
static inline int
is_stack_used_up(const Ring *ring)
{
    volatile char here; /* not the frame's address, which would take a register */
    return (uintptr_t)&here - ring->stack_end < ring->stack_margin;
}

static Ring *
new_ring(Core *core)
{
    PyObject *name = PyObject_CallNoArgs(core->thread_name);
    if (name == NULL)
        return NULL;
    retire(core);
    uint64_t quarter = free_rows(core) / 4, capacity = SMALLEST_RING;
    while (capacity * 2 <= quarter)
        capacity *= 2;
    Ring *ring = empty_ring(core);
    if (ring == NULL) {
        Py_DECREF(name);
        return NULL;
    }
    ring->name = name;
    write_label(ring->label, name);
    ring->thread_id = (long)PyThread_get_thread_native_id();
    ring->rows = map_rows(core->memory, &capacity);
    ring->capacity = capacity;
    ring->mask = capacity - 1;
    if (ring->rows == NULL) {
        Py_DECREF(ring);
        return (Ring *)PyErr_NoMemory();
    }
    find_stack_end(ring);
    return ring;
}

/* What the calling thread's state holds of a recorder, made where it is missing. Borrowed. NULL with an exception. */
static Mark *
find_mark(Core *core)
{
    PyObject *locals = PyThreadState_GetDict(); /* borrowed */
    if (locals == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "no thread state");
        return NULL;
    }
    /* By the recorder's address: the ring of one that is gone, or from before a reset, has no rows and is replaced. */
    PyObject *key = Py_BuildValue("(ON)", &MarkType, PyLong_FromVoidPtr(core));
    if (key == NULL)
        return NULL;
    Mark *mark = (Mark *)PyDict_GetItemWithError(locals, key); /* borrowed; nobody takes it out */
    if (mark == NULL && !PyErr_Occurred() && (mark = PyObject_New(Mark, &MarkType)) != NULL) {
        mark->ring = NULL;
        if (PyDict_SetItem(locals, key, (PyObject *)mark) < 0)
            Py_CLEAR(mark);
        else
            Py_DECREF(mark);
    }
    Py_DECREF(key);
    return mark;
}

/* The calling thread's ring, made at its first span and after a reset. Borrowed from the thread's state. NULL with an
 * exception, or without one where the reason has been counted. */
static Ring *
find_ring(Core *core)
{
    if (core->overflow == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the recorder has not been initialised");
        return NULL;
    }
    if (ending_state != 0 && ending_state == PyThreadState_GetID(PyThreadState_Get())) {
        /* A finaliser of what the thread leaves behind. A ring made now would not be given up when the thread ends. */
        count(core, THREAD_ENDING);
        return NULL;
    }
    Mark *mark = find_mark(core);
    if (mark == NULL)
        return NULL;
    /* Making one, and giving one up, may run code that records or resets. */
    for (int tries = 0; mark->ring == NULL || mark->ring->rows == NULL; tries++) {
        Ring *ring = tries < TRIES ? new_ring(core) : NULL;
        if (ring == NULL) {
            if (tries == TRIES)
                count(core, FAULT);
            return NULL;
        }
        if (PyList_Append(core->rings, (PyObject *)ring) < 0) {
            Py_DECREF(ring);
            return NULL;
        }
        Ring *before = mark->ring;
        mark->ring = ring; /* takes the reference over */
        if (before != NULL)
            part_with(before);
    }
    at_hand.uid = core->uid;
    at_hand.ring = mark->ring;
    return at_hand.ring;
}

static inline Ring *
ring_of(Core *core)
{
    return at_hand.uid == core->uid ? at_hand.ring : find_ring(core);
}
