/* Cold: resets and forks, after which a recorder begins anew, and the choice of its clock. A part of `_recorder.c`. */

/* Free the rows of rings that no thread writes to any more, and the list. Threads may keep the rings. */
static void free_rings(PyObject *rings)
{
    for (Py_ssize_t i = 0; rings != NULL && i < PyList_GET_SIZE(rings); i++)
        free_rows_of((Ring *)PyList_GET_ITEM(rings, i));
    Py_XDECREF(rings);
}

/* Forget the open spans of every context. A forked child does this, because other threads do not exist there. */
static PyObject *Core_forget_all(Core *self, PyObject *none)
{
    while (self->currents != NULL)
        unlist_current(self->currents);
    for (Stretch *stretch = self->stretches; stretch != NULL;) {
        Stretch *next = stretch->next;
        stretch->previous = stretch->next = NULL;
        stretch->listed = 0;
        stretch = next;
    }
    self->stretches = NULL;
    return Core_forget_current(self, none);
}

/* Begin a new call tree, with the paths of open spans only. Return the sites of the old tree, ending with NULL: the
 * caller releases them where code of the service may run. Return NULL without memory, and change nothing. */
static PyObject **give_up_nodes(Core *core)
{
    tree_t before = core->tree;
    node_t **old = before.nodes, *overflow = before.overflow;
    PyObject **sites = PyMem_Calloc((size_t)before.node_count + 1, sizeof *sites);
    if (sites == NULL)
        return NULL;
    core->tree = (tree_t){0};
    core->tree.overflow = new_node(core, &core->tree.root, overflow->site);
    if (core->tree.overflow == NULL) {
        PyMem_Free(core->tree.nodes);
        PyMem_Free(core->tree.root.table);
        PyMem_Free(sites);
        core->tree = before;
        return NULL;
    }
    node_t *root = &core->tree.root;
    FOR_EACH_OPEN_FRAME(core, frame, frame->node = follow_path(core, root, root, frame->node, &frame->below_fold))
    for (uint32_t i = 0; i < before.node_count; i++) {
        PyMem_Free(old[i]->table);
        sites[i] = old[i]->site; /* with its reference */
        memset(old[i], 0, sizeof *old[i]);
        /* An open span in no chain still has this node. Until the node is reused it counts as the overflow. */
        old[i]->site = overflow->site;
        make_spare(core, old[i]);
    }
    PyMem_Free(old);
    PyMem_Free(before.root.table);
    return sites;
}

/* Begin the next generation of the memory. Nodes change their owners until `mark_moving` is called again. */
static void begin_generation(Core *core)
{
    mark_moving(core);
    if (core->memory == NULL)
        return;
    recording_t *at = core->memory->at;
    at->generation++;
    at->parts[PART_FACTS].used = at->parts[PART_DETAILS].used = 0;
    at->parts[PART_INTERVALS].used = at->parts[PART_SAMPLES].used = at->parts[PART_NUMBERS].used = at->settled_ns = 0;
    for (int number = 0; number < PART_COUNT; number++)
        at->parts[number].unseen = 0;
    while (core->memory->numbers > 0)
        newest_number(core->memory, --core->memory->numbers)->at_ns = 0;
    if (core->described_sites != NULL)
        PyDict_Clear(core->described_sites);
}

/* Use this memory for the next frames. Free unused frames outside of it, which other processes cannot read. */
static void use_frames_of(memory_t *memory)
{
    while (hot.free_frames != NULL) {
        frame_t *frame = hot.free_frames;
        hot.free_frames = frame->above;
        free_lines_in(frame, PART_FRAMES);
    }
    while (free_frame_object_count > 0)
        delete_frame_object(free_frame_objects[--free_frame_object_count]);
    frame_memory = memory;
    frame_objects_elsewhere = frame_object_count;
    frame_objects_kept = frame_objects_elsewhere > 0 ? 0 : OBJECTS_KEPT;
}

static PyObject *Core_reset(Core *self, PyObject *argument)
{
    if (argument != Py_None) {
        unsigned long long ring_bytes = PyLong_AsUnsignedLongLong(argument);
        if (ring_bytes == (unsigned long long)-1 && PyErr_Occurred())
            return NULL;
        self->row_budget = ring_bytes / sizeof(row_t);
    }
    PyObject *rings = PyList_New(0), **old_sites = NULL;
    begin_generation(self);
    if (self->memory != NULL && frame_memory != self->memory) /* another recorder's memory */
        use_frames_of(self->memory);
    Ring *ended = rings == NULL ? NULL : empty_ring(self);
    if (ended == NULL || ((old_sites = give_up_nodes(self)) == NULL)) {
        mark_moving(self);
        Py_XDECREF(rings);
        Py_XDECREF((PyObject *)ended);
        return PyErr_NoMemory();
    }
    PyObject *old_rings = self->rings;
    Ring *old_ended = self->ended;
    self->uid = ++last_uid;
    note_features(self);
    self->rings = rings;
    self->ended = ended;
    /* Before any code runs, because no call may count there any more. */
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(old_rings); i++)
        ((Ring *)PyList_GET_ITEM(old_rings, i))->context_version = NO_VERSION;
    self->counted->ended_rows = self->counted->ended_too_short = 0;
    memset(self->counted->reasons, 0, sizeof(self->counted->reasons));
    forget_paths_of_names(self);
    mark_moving(self);
    Py_DECREF(old_ended);
    free_rings(old_rings); /* after the changes above, because it may run code of the service */
    Py_DECREF(Core_forget_names(self, NULL));
    PyDict_Clear(self->user_sites);
    for (uint32_t i = 0; old_sites != NULL && old_sites[i] != NULL; i++)
        Py_DECREF(old_sites[i]);
    PyMem_Free(old_sites);
    make_left_private();
    Py_RETURN_NONE;
}

/* Record into a file from the next reset on: attach(descriptor, is_on_disk, None). The recorder then owns the file,
 * whose header describes its parts. Or record into private memory: attach(-1, False, header). */
static PyObject *Core_attach(Core *self, PyObject *args)
{
    static char has_handlers;
    int fd, is_file;
    const char *head;
    Py_ssize_t head_bytes;
    if (!PyArg_ParseTuple(args, "ipz#:attach", &fd, &is_file, &head, &head_bytes))
        return NULL;
    recording_t header;
    if (head != NULL && head_bytes < (Py_ssize_t)sizeof header)
        return PyErr_Format(PyExc_ValueError, "a header of %zd bytes", head_bytes);
    if (head != NULL)
        memcpy(&header, head, sizeof header);
    if (self->described_sites == NULL && (self->described_sites = PyDict_New()) == NULL)
        return NULL;
    if (!has_handlers && pthread_atfork(before_fork, drop_fork_copy, after_fork_in_child) != 0)
        return PyErr_NoMemory();
    has_handlers = 1;
    memory_t *memory = map_memory(fd, is_file, head != NULL ? &header : NULL), *before = self->memory;
    if (memory == NULL)
        return NULL;
    Py_DECREF(Core_forget_names(self, NULL));
    use_frames_of(memory);
    if (before != NULL)
        leave_memory(before);
    memory->core = self;
    memory->next = memories;
    memories = self->memory = memory;
    for (node_t *node; (node = self->spare) != NULL; make_spare(self, node))
        self->spare = node->parent;
    memory->at->counted = *self->counted;
    self->counted = &memory->at->counted;
    Py_RETURN_NONE;
}

/* Return the descriptor of the memory, -1 if no other process can read it. */
static PyObject *Core_memory_fd(Core *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->memory != NULL && has_fd(self->memory) ? self->memory->fd : -1);
}

/* Return the memory as a writable memoryview, None without one. The memory stays until the process ends. */
static PyObject *Core_memory(Core *self, void *Py_UNUSED(closure))
{
    if (self->memory == NULL)
        Py_RETURN_NONE;
    return PyMemoryView_FromMemory((char *)self->memory->at, (Py_ssize_t)self->memory->size_bytes, PyBUF_WRITE);
}

/* Populate pages for the rows that threads write next, up to a number of bytes. Else the first write to a page waits
 * for it. Only for rings that are not full, and not on a disk, whose pages would have to be written. Return the number
 * of bytes. */
static PyObject *Core_touch_ahead(Core *self, PyObject *argument)
{
    enum { POPULATE_WRITE = 23 }; /* MADV_POPULATE_WRITE, since Linux 5.14 */
    size_t most = PyLong_AsSize_t(argument), touched = 0, page = (size_t)sysconf(_SC_PAGESIZE);
    memory_t *memory = self->memory;
    if (most == (size_t)-1 && PyErr_Occurred())
        return NULL;
    if (memory == NULL || memory->is_file || memory->is_private)
        return PyLong_FromSize_t(0);
    size_t live = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->rings); i++)
        live += !((Ring *)PyList_GET_ITEM(self->rings, i))->ended;
    size_t share = live == 0 ? 0 : most / live / page * page;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->rings); i++) {
        const Ring *ring = (Ring *)PyList_GET_ITEM(self->rings, i);
        if (ring->rows == NULL || ring->ended || ring->head >= ring->capacity || memory_of(ring->rows) != memory)
            continue;
        size_t begin = (ring->head * sizeof(row_t) / page + 1) * page, end = mapped_bytes(ring->capacity);
        size_t bytes = begin + share < end ? share : begin < end ? end - begin : 0;
        char *rows = (char *)ring->rows;
        Py_BEGIN_ALLOW_THREADS
        touched += madvise(rows + begin, bytes, POPULATE_WRITE) == 0 ? bytes : 0;
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromSize_t(touched);
}

/* Start to read the time stamp counter. Return False if the processor has none. The rate is measured since the load of
 * the module, over two milliseconds at least. A pair of readings is inexact by 10 ns, which over two milliseconds makes
 * 5 us per second. */
static PyObject *Core_start_ticks(Core *self, PyObject *Py_UNUSED(none))
{
    if (!HAS_TICKS)
        Py_RETURN_FALSE;
    ticks_t ticks = {0};
    int64_t now_ticks = 0, now_ns = 0;
    do {
        read_both(&now_ticks, &now_ns);
    } while (now_ns - loaded_ns < 2000000);
    if (now_ticks <= loaded_ticks)
        Py_RETURN_FALSE;
    ticks.rate = rate_since_load(now_ticks, now_ns);
    ticks.base_ticks = now_ticks;
    ticks.base_ns = now_ns;
    self->ticks = ticks;
    self->reads_ticks = 1;
    note_features(self);
    Py_RETURN_TRUE;
}

/* Compare the time stamp counter with the monotonic clock. The counter catches up over the next second, without a jump.
 * Return its deviation in ns. Return None if the counter is not in use, or is given up for a deviation above
 * `limit_ns`. */
static PyObject *Core_check_ticks(Core *self, PyObject *argument)
{
    long long limit_ns = PyLong_AsLongLong(argument);
    if (limit_ns == -1 && PyErr_Occurred())
        return NULL;
    ticks_t *ticks = &self->ticks;
    if (!self->reads_ticks)
        Py_RETURN_NONE;
    int64_t now_ticks = 0, now_ns = 0;
    read_both(&now_ticks, &now_ns);
    int64_t shown_ns = ticks_as_ns(ticks, now_ticks);
    int64_t off_ns = shown_ns - now_ns;
    if (off_ns > limit_ns || off_ns < -limit_ns || now_ticks <= loaded_ticks) {
        self->reads_ticks = 0;
        note_features(self);
        count_event(self, TICKS_STRAYED);
        Py_RETURN_NONE;
    }
    uint64_t rate = rate_since_load(now_ticks, now_ns);
    ticks->base_ticks = now_ticks;
    ticks->base_ns = shown_ns;
    ticks->rate = rate - (uint64_t)((__int128)rate * off_ns / 1000000000);
    return PyLong_FromLongLong(off_ns);
}

static PyObject *Core_stop_ticks(Core *self, PyObject *Py_UNUSED(none))
{
    self->reads_ticks = 0;
    note_features(self);
    Py_RETURN_NONE;
}

static PyObject *Core_now_ns(Core *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromLongLong(read_clock(self));
}
