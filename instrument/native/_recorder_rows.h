/* Hot: the row of an ended span, and what it adds to the totals. A part of `_recorder.c`. */

static uint64_t bytes_in(PyObject *attributes)
{
    PyObject *moved = PyDict_Check(attributes) ? PyDict_GetItemWithError(attributes, str_bytes) : NULL; /* borrowed */
    uint64_t bytes = moved != NULL && PyLong_Check(moved) ? PyLong_AsUnsignedLongLong(moved) : 0;
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return bytes;
}

/* Return the totals of a call path on the ring's thread, NULL without memory. */
static SELDOM totals_t *find_totals_here(Ring *ring, node_t *node)
{
    totals_t *totals = totals_of(ring, node->index);
    if (totals != NULL) {
        node->totals = totals;
        node->ring_tag = ring->tag;
    }
    return totals;
}

static inline totals_t *totals_here(Ring *ring, node_t *node)
{
    return __builtin_expect(node->ring_tag == ring->tag, 1) ? node->totals : find_totals_here(ring, node);
}

/* Return the error of an ended span: that of the status that its attributes set, else the given one. Borrowed, NULL for
 * none. */
static PyObject *error_of_span(PyObject *attributes, PyObject *error)
{
    PyObject *status = PyDict_Check(attributes) ? PyDict_GetItemWithError(attributes, str_status_code) : NULL;
    if (status == NULL) {
        if (PyErr_Occurred())
            PyErr_Clear();
        return error;
    }
    PyObject *type = PyDict_GetItemWithError(attributes, str_error_type);
    PyErr_Clear();
    if (!PyUnicode_Check(status))
        return error;
    if (PyUnicode_Compare(status, str_ok) == 0)
        return NULL;
    if (PyUnicode_Compare(status, str_error) != 0)
        return error;
    if (type != NULL && PyUnicode_Check(type) && PyUnicode_GET_LENGTH(type) > 0)
        return type;
    return error != NULL ? error : str_other;
}

/* Fill a row, all but `rare`. */
static inline __attribute__((always_inline)) void
fill_row(row_t *row, const frame_t *frame, const node_t *node, int64_t end_ns)
{
    memcpy(&row->span_id, &frame->span_id, offsetof(row_t, end_ns));
    row->end_ns = end_ns;
    row->children_ns = frame->children_ns;
    row->node = node->index;
    row->task = (uint32_t)frame->task;
}

/* Make the compiler read the next values from memory again. Registers are few. */
#define READ_ANEW() __atomic_signal_fence(__ATOMIC_SEQ_CST)

/* Write the row of a span of this length, unless the span is too short for a row. */
static inline __attribute__((always_inline)) void
write_row(Ring *ring, const frame_t *frame, const node_t *node, int64_t end_ns, int64_t total_ns, PyObject *error,
          uint64_t rare)
{
    if (error == NULL && __builtin_expect(total_ns < node->min_ns, 0) && frame->children_ns == 0 && !frame->has_rows) {
        ring->too_short++;
        return;
    }
    READ_ANEW();
    uint64_t head = ring->head;
    row_t *row = &ring->rows[head & ring->mask];
    row->rare = rare;
    fill_row(row, frame, node, end_ns);
    /* A reader in another process takes the row as complete once `head` counts it. */
    __atomic_store_n(&ring->head, head + 1, __ATOMIC_RELEASE);
    __builtin_prefetch(row + 1, 1);
}

/* Count a call. Return true if its bucket took the last waiting place: the caller then calls `count_all_waiting`.
 * `core` points to the recorder, which is needed for a sum that is full, or to NULL. */
static inline __attribute__((always_inline)) int
count_call(Core *const *core, totals_t *totals, const frame_t *frame, int64_t total_ns, int64_t active_ns, int is_inner)
{
    int64_t start_ns = frame->start_ns;
    if (total_ns < totals->min_ns)
        totals->min_ns = total_ns;
    if (total_ns > totals->max_ns)
        totals->max_ns = total_ns;
    if (__builtin_expect(start_ns < totals->first_ns, 0)) {
        totals->first_ns = start_ns;
        totals->first_total_ns = total_ns;
    }
    totals->calls++;
    if (!is_inner)
        add_time(core, &totals->total_ns, total_ns);
    int64_t own_ns = active_ns - frame->children_ns;
    if (__builtin_expect(own_ns >= 0, 1))
        add_time(core, &totals->self_ns, own_ns);
    totals->waiting[(size_t)totals->waiting_room - 1] = (uint16_t)bucket_of((uint64_t)total_ns);
    READ_ANEW();
    return __builtin_expect(--totals->waiting_room == 0, 0);
}

/* Return how long the awaited object around an open span was suspended since the span began. */
static int64_t waited_since_begin(const Frame *self, int64_t now_ns)
{
    const Stepped *around = self->stepped;
    if (around == NULL)
        return 0;
    int64_t waited_ns = around->waited_ns - self->waited_before_ns;
    if (around->suspended_ns != 0)
        waited_ns += now_ns - around->suspended_ns;
    return waited_ns > 0 ? waited_ns : 0;
}

/* Return how long an open span waited. It is at least the children's waits, because its own suspensions may be
 * unknown. */
static inline int64_t waited_of(const Frame *self, int64_t now_ns)
{
    int64_t waited_ns = self->stepped == NULL ? 0 : waited_since_begin(self, now_ns);
    if (waited_ns < self->children_waited_ns)
        waited_ns = self->children_waited_ns;
    int64_t total_ns = now_ns - self->frame->start_ns;
    return waited_ns < total_ns ? waited_ns : total_ns > 0 ? total_ns : 0;
}

/* Split the time of a span that ran for `active_ns` and waited for `waited_ns`. Return the waits in its self time.
 * Those of its children are theirs, and so is time in which only children ran. */
static int64_t take_waited(frame_t *frame, int64_t active_ns, int64_t waited_ns)
{
    int64_t children_ran_ns = frame->children_ns - ((Frame *)frame->self)->children_waited_ns;
    int64_t ran_ns = active_ns - children_ran_ns, own_ns = active_ns + waited_ns - frame->children_ns;
    frame->children_ns -= waited_ns;
    ran_ns = ran_ns > 0 ? ran_ns : 0;
    return own_ns > ran_ns ? own_ns - ran_ns : 0;
}

/* Store the row of an ended span, and count the call. Code of the service may run only at the begin and at the end: in
 * between the ring changes. */
static void
store_span(Core *core, Ring *ring, frame_t *frame, int64_t end_ns, int64_t active_ns, int64_t waited_ns, PyObject *error)
{
    int64_t own_waited_ns = 0;
    if (waited_ns > 0) {
        if (active_ns < 0)
            active_ns = end_ns - frame->start_ns - waited_ns;
        own_waited_ns = take_waited(frame, active_ns, waited_ns);
    }
    uint64_t rare = 0, moved_bytes = 0;
    if (frame->attributes != NULL)
        error = error_of_span(frame->attributes, error);
    if (error != NULL || frame->attributes != NULL) {
        rare = HAS_MORE;
        if (frame->node->is_copy && frame->attributes != NULL)
            moved_bytes = bytes_in(frame->attributes);
        if (core->memory != NULL)
            write_detail(core, frame->span_id, active_ns, error, frame->attributes);
    } else if (active_ns >= 0) {
        rare = (uint64_t)active_ns << 1 | 1;
    }
    if (ring->rows == NULL) /* reset meanwhile, without memory for a new ring */
        return;
    int was_cancelled = frame->attributes != NULL && error == NULL && frame->node->is_request &&
                        PyDict_Check(frame->attributes) && PyDict_GetItem(frame->attributes, str_outcome) != NULL;
    if (end_ns < frame->start_ns) /* the time stamp counters of two processors may differ slightly */
        end_ns = frame->start_ns;
    int64_t total_ns = end_ns - frame->start_ns;
    write_row(ring, frame, frame->node, end_ns, total_ns, error, rare);
    totals_t *totals = totals_here(ring, frame->node);
    if (totals == NULL) {
        count_event(core, NOT_TALLIED);
        return;
    }
    if (count_call(&core, totals, frame, total_ns, active_ns < 0 ? total_ns : active_ns, frame->is_inner))
        count_all_waiting(core, totals);
    totals->errors += error != NULL;
    totals->moved_bytes += moved_bytes;
    totals->cancelled += (uint64_t)was_cancelled;
    if (own_waited_ns > 0)
        add_time(&core, &totals->waiting_ns, own_waited_ns);
}

/* Store a span without error, attributes and waits, as most are. */
static inline void store_plain_span(Core *core, Ring *ring, frame_t *frame, int64_t end_ns)
{
    int64_t total_ns = end_ns - frame->start_ns;
    node_t *node = frame->node;
    if (__builtin_expect(total_ns < 0 || node->ring_tag != ring->tag, 0)) {
        store_span(core, ring, frame, end_ns, -1, 0, NULL);
        return;
    }
    write_row(ring, frame, node, end_ns, total_ns, NULL, 0);
    if (count_call(&core, node->totals, frame, total_ns, total_ns, frame->is_inner))
        count_all_waiting(core, node->totals);
}
