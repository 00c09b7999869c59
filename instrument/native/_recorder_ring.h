/* Hot: the calling thread's ring. Cold: making and freeing rings. A part of `_recorder.c`. */

/* Free the rows of a ring. The thread uses the ring no more, but a reader may still have a reference to it. */
static void free_rows_of(Ring *ring)
{
    row_t *rows = ring->rows;
    uint64_t written = ring->head < ring->capacity ? ring->head : ring->capacity;
    ring->rows = NULL;
    ring->number = NO_NUMBER;
    ring->tag = NO_TAG;
    ring->head = 0;
    ring->context_version = NO_VERSION;
    if (rows != NULL)
        unmap_rows(rows, mapped_bytes(ring->capacity), written * sizeof(row_t));
}

static void Ring_dealloc(Ring *self)
{
    free_rows_of(self);
    free_book(&self->totals);
    Py_XDECREF(self->current);
    Py_XDECREF(self->name);
    free_lines_in(self, PART_RINGS);
}

/* Return the rows from a number on as bytes: a new reference, NULL with an exception. */
static PyObject *Ring_copied(Ring *self, PyObject *argument)
{
    uint64_t since = PyLong_AsUnsignedLongLong(argument);
    if (since == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    uint64_t head = self->head, first = head > self->capacity ? head - self->capacity : 0;
    first = first > since ? first : since;
    size_t count = first < head ? (size_t)(head - first) : 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(row_t)));
    if (bytes == NULL || count == 0)
        return bytes;
    row_t *rows = (row_t *)PyBytes_AS_STRING(bytes);
    size_t begin = (size_t)(first & self->mask), whole = (size_t)self->capacity - begin;
    whole = whole < count ? whole : count;
    memcpy(rows, self->rows + begin, whole * sizeof *rows);
    memcpy(rows + whole, self->rows, (count - whole) * sizeof *rows);
    return bytes;
}

/* Return [(node index, calls, total ns, steps of generators)] of each call path: a new reference, NULL with an
 * exception. */
static PyObject *Ring_usage(Ring *self, PyObject *Py_UNUSED(none))
{
    PyObject *usage = PyList_New(0);
    for (uint32_t n = 0; usage != NULL && n < self->totals.slots * PAGE; n++) {
        totals_t *totals = known_totals(&self->totals, n);
        if (totals == NULL || (totals->calls == 0 && totals->steps == 0))
            continue;
        PyObject *item = Py_BuildValue("(IKLK)", n, totals->calls, totals->total_ns, totals->steps);
        if (item == NULL || PyList_Append(usage, item) < 0)
            Py_CLEAR(usage);
        Py_XDECREF(item);
    }
    return usage;
}

static PyMethodDef Ring_methods[] = {
    METHOD(Ring, copied, METH_O, "Return the rows from a number on as bytes."),
    METHOD(Ring, usage, METH_NOARGS, "Return node index, calls, total ns and steps of each call path."),
    {NULL},
};

static PyMemberDef Ring_members[] = {
    {"capacity", T_ULONGLONG, offsetof(Ring, capacity), READONLY, "rows that it holds"},
    {"head", T_ULONGLONG, offsetof(Ring, head), READONLY, "rows ever written"},
    {"thread_id", T_LONG, offsetof(Ring, thread_id), READONLY, "native id of its thread"},
    {"name", T_OBJECT, offsetof(Ring, name), READONLY, "name of its thread"},
    {"too_short", T_ULONGLONG, offsetof(Ring, too_short), READONLY, "spans without a row, as they were too short"},
    {"ended", T_BOOL, offsetof(Ring, ended), READONLY, "whether its thread has ended"},
    {NULL},
};

static PyTypeObject RingType = {
    RECORDER_TYPE(Ring, sizeof(Ring), 0),
    .tp_doc = "The newest rows of one thread, and the totals of all of them.",
    .tp_methods = Ring_methods,
    .tp_members = Ring_members,
};

/* Make the ring's thread look for the chain of its current context with the next span. */
static void forget_current_of(Ring *ring)
{
    ring->context_version = NO_VERSION;
    Py_CLEAR(ring->current);
}

/* Detach the calling thread from this ring. */
static void detach_ring(Ring *ring)
{
    ring->ended = 1;
    ring->state = &nobody;
    if (thread_cache()->ring == ring)
        thread_cache()->uid = 0;
    forget_current_of(ring);
    Py_DECREF(ring);
}

static void Mark_dealloc(Mark *self)
{
    Ring *ring = self->ring;
    if (ring != NULL && ring->thread_id == (long)PyThread_get_thread_native_id()) {
        ending_state = PyThreadState_GetID(PyThreadState_Get());
        detach_ring(ring);
    } else if (ring != NULL) {
        /* Another thread frees this thread's state, so the cache of the thread cannot be changed, and one ring is never
         * freed. The thread was lost in a fork, is stopped as the interpreter ends, or goes on without Python. */
        ring->ended = 1;
        ring->state = &nobody;
        forget_current_of(ring);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject MarkType = {
    RECORDER_TYPE(Mark, sizeof(Mark), 0),
    .tp_doc = "An object in a thread's state, which is freed when the thread ends.",
};

static uint64_t free_rows(Core *core)
{
    uint64_t used = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(core->rings); i++)
        used += ((Ring *)PyList_GET_ITEM(core->rings, i))->capacity;
    return used < core->row_budget ? core->row_budget - used : 0;
}

/* Free the rows of an ended thread that were never written. */
static void shrink_ring(Ring *ring)
{
    uint64_t capacity = ring->capacity;
    while (capacity > SMALLEST_RING && capacity / 2 >= ring->head)
        capacity /= 2;
    if (capacity == ring->capacity)
        return;
    size_t kept_bytes = mapped_bytes(capacity), all_bytes = mapped_bytes(ring->capacity);
    if (ring->rows != NULL && kept_bytes < all_bytes && unmap_rows((char *)ring->rows + kept_bytes, all_bytes - kept_bytes, 0) < 0)
        return;
    ring->capacity = capacity;
    ring->mask = (uint32_t)(capacity - 1);
}

/* Free the rings of ended threads, oldest first, until there is room for another ring and the limit of their number is
 * met. Their totals are added to those of `ended`. */
static void retire_rings(Core *core)
{
    Py_ssize_t ended = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(core->rings); i++) {
        Ring *ring = (Ring *)PyList_GET_ITEM(core->rings, i);
        if (ring->ended) {
            shrink_ring(ring);
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
                return; /* without memory for its totals the ring stays */
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

/* Make a ring without rows: a new reference, NULL with an exception. It has no weak references, and nothing for the
 * collector, so it may be in memory that others can read. */
static Ring *empty_ring(Core *core)
{
    Ring *ring = new_lines_in(core->memory, PART_RINGS, sizeof(Ring));
    if (ring == NULL)
        return (Ring *)PyErr_NoMemory();
    PyObject_Init((PyObject *)ring, &RingType);
    ring->generation = core->memory != NULL ? core->memory->at->generation : 0;
    ring->number = ++last_ring;
    ring->tag = (uint32_t)(ring->number % (NO_TAG - 1)) + 1;
    ring->state = &nobody;
    ring->context_version = NO_VERSION;
    return ring;
}

/* Note the end of the calling thread's C stack, and the margin that calls leave. */
static void find_stack_end(void)
{
    pthread_attr_t attributes;
    void *lowest;
    size_t size;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    if (pthread_attr_getstack(&attributes, &lowest, &size) == 0) {
        thread_cache()->stack_end = (uintptr_t)lowest;
        thread_cache()->stack_margin = size / 8 < STACK_MARGIN ? size / 8 : STACK_MARGIN;
    }
    pthread_attr_destroy(&attributes);
}

/* Return true if a call would use the margin of the C stack. A raised recursion limit does not protect the stack from
 * Python code that C calls. On a foreign stack the distance is large. */
static inline int is_stack_used_up(void)
{
    volatile char marker; /* the frame's own address would take a register */
    return (uintptr_t)&marker - thread_cache()->stack_end < thread_cache()->stack_margin;
}

static SELDOM PyObject *refuse_for_stack(const char *calls)
{
    return PyErr_Format(PyExc_RecursionError, "the C stack is used up by %s", calls);
}

static Ring *new_ring(Core *core)
{
    PyObject *name = PyObject_CallNoArgs(core->thread_name);
    if (name == NULL)
        return NULL;
    retire_rings(core);
    uint64_t quarter = free_rows(core) / 4, capacity = SMALLEST_RING;
    while (capacity * 2 <= quarter && capacity < LARGEST_RING)
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
    ring->mask = (uint32_t)(capacity - 1);
    if (ring->rows == NULL) {
        Py_DECREF(ring);
        return (Ring *)PyErr_NoMemory();
    }
    find_stack_end();
    return ring;
}

/* Return the Mark of a recorder in the calling thread's state, made if missing: borrowed, NULL with an exception. */
static Mark *find_mark(Core *core)
{
    PyObject *locals = PyThreadState_GetDict(); /* borrowed */
    if (locals == NULL)
        return (Mark *)PyErr_Format(PyExc_RuntimeError, "no thread state");
    /* The key is the recorder's address. If an earlier recorder had the same address, its ring has no rows and is
     * replaced. So is a ring from before a reset. */
    PyObject *key = Py_BuildValue("(ON)", &MarkType, PyLong_FromVoidPtr(core));
    if (key == NULL)
        return NULL;
    Mark *mark = (Mark *)PyDict_GetItemWithError(locals, key); /* borrowed; the dict keeps it */
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

/* Return the calling thread's ring, which is made at its first span and after a reset. It is borrowed from the thread's
 * state. Return NULL with an exception, or without one if the reason has been counted. */
static Ring *find_ring(Core *core)
{
    if (ending_state != 0 && ending_state == PyThreadState_GetID(PyThreadState_Get())) {
        /* A finaliser runs at the end of the thread. A ring that is made now would never be freed. */
        count_event(core, THREAD_ENDING);
        return NULL;
    }
    Mark *mark = find_mark(core);
    if (mark == NULL)
        return NULL;
    /* Making or freeing a ring may run code that records or resets. */
    for (int tries = 0; mark->ring == NULL || mark->ring->rows == NULL; tries++) {
        Ring *ring = tries < TRIES ? new_ring(core) : NULL;
        if (ring == NULL) {
            if (tries == TRIES)
                count_event(core, FAULT);
            return NULL;
        }
        if (PyList_Append(core->rings, (PyObject *)ring) < 0) {
            Py_DECREF(ring);
            return NULL;
        }
        Ring *before = mark->ring;
        mark->ring = ring; /* owns the reference */
        if (before != NULL)
            detach_ring(before);
    }
    thread_cache()->uid = core->uid;
    thread_cache()->ring = mark->ring;
    return thread_cache()->ring;
}

static inline Ring *ring_of(Core *core)
{
    return thread_cache()->uid == core->uid ? thread_cache()->ring : find_ring(core);
}
