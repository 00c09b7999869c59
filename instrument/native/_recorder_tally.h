/* Hot: the step from a node of the call tree to the node of a call, and the totals of a call path on a thread. Cold:
 * new nodes, and sums of totals. A part of `_recorder.c`. */

static inline uint32_t slot_of(PyObject *site, uint32_t slots)
{
    uintptr_t address = (uintptr_t)site;
    return (uint32_t)((address >> 4) * 0x9E3779B1u) & (slots - 1);
}

/* Mark a step to a node that is not a child, in the low bits of the address, which are free. */
static inline node_t *as_edge(node_t *node)
{
    return (node_t *)((uintptr_t)node | 1);
}

static inline int is_edge(const node_t *step)
{
    return (uintptr_t)step & 1;
}

static inline node_t *node_at_end(node_t *step)
{
    return (node_t *)((uintptr_t)step & ~(uintptr_t)1);
}

static inline node_t *known_child(node_t *parent, PyObject *site)
{
    if (parent->slots == 0)
        return NULL;
    for (uint32_t i = slot_of(site, parent->slots);; i = (i + 1) & (parent->slots - 1)) {
        node_t *step = parent->table[i];
        if (step == NULL || node_at_end(step)->site == site)
            return step;
    }
}

/* Put a step into the first free entry of a table, in the order in which its site is searched. */
static void put_step(node_t **table, uint32_t slots, node_t *step)
{
    uint32_t at = slot_of(node_at_end(step)->site, slots);
    while (table[at] != NULL)
        at = (at + 1) & (slots - 1);
    table[at] = step;
}

static int add_child(node_t *parent, node_t *child)
{
    if ((parent->children + 1) * 2 > parent->slots) {
        uint32_t slots = parent->slots ? parent->slots * 2 : 4;
        node_t **table = PyMem_Calloc(slots, sizeof(node_t *));
        if (table == NULL)
            return -1;
        for (uint32_t i = 0; i < parent->slots; i++)
            if (parent->table[i] != NULL)
                put_step(table, slots, parent->table[i]);
        PyMem_Free(parent->table);
        parent->table = table;
        parent->slots = slots;
    }
    put_step(parent->table, parent->slots, child);
    parent->children++;
    return 0;
}

static int kind_is(PyObject *site, PyObject *word)
{
    PyObject *kind = PyObject_GetAttr(site, str_kind);
    if (kind == NULL) {
        PyErr_Clear();
        return 0;
    }
    int same = PyUnicode_Check(kind) && PyUnicode_Compare(kind, word) == 0;
    Py_DECREF(kind);
    return same;
}

/* Copy the facts of a site that spans read to its node. Errors are cleared. */
static void read_site(node_t *node)
{
    node->is_request = kind_is(node->site, str_request) != 0;
    node->is_copy = kind_is(node->site, str_copy) != 0;
    PyObject *device = PyObject_GetAttr(node->site, str_device);
    PyErr_Clear();
    PyObject *min_ns = PyObject_GetAttr(node->site, str_min_ns);
    node->is_device = device == Py_True;
    node->min_ns = min_ns != NULL && PyLong_Check(min_ns) ? PyLong_AsLongLong(min_ns) : 0;
    if (PyErr_Occurred() && node->min_ns == -1)
        node->min_ns = 0;
    PyErr_Clear();
    Py_XDECREF(device);
    Py_XDECREF(min_ns);
}

/* Keep a node that is in no tree, for reuse. */
static void make_spare(Core *core, node_t *node)
{
    node_t **spare = core->memory != NULL && memory_of(node) == core->memory ? &core->spare : &core->private_spare;
    node->parent = *spare;
    *spare = node;
}

static node_t *new_node(Core *core, node_t *parent, PyObject *site)
{
    if (core->tree.node_count == core->tree.node_slots) {
        uint32_t slots = core->tree.node_slots ? core->tree.node_slots * 2 : 64;
        node_t **nodes = PyMem_Realloc(core->tree.nodes, slots * sizeof(node_t *));
        if (nodes == NULL)
            return NULL;
        core->tree.nodes = nodes;
        core->tree.node_slots = slots;
    }
    int has_room = core->memory != NULL && core->memory->at->parts[PART_NODES].used < core->memory->at->parts[PART_NODES].slots;
    node_t **spare = core->spare != NULL ? &core->spare : &core->private_spare, *node = *spare;
    if (node != NULL && (spare == &core->spare || !has_room)) {
        *spare = node->parent;
        memset(node, 0, sizeof *node);
    } else if ((node = new_lines_in(core->memory, PART_NODES, sizeof *node)) == NULL) {
        return NULL;
    }
    node->site = Py_NewRef(site);
    node->parent = parent;
    node->index = core->tree.node_count;
    read_site(node);
    if (add_child(parent, node) < 0) {
        Py_CLEAR(node->site);
        make_spare(core, node);
        return NULL;
    }
    core->tree.nodes[core->tree.node_count++] = node;
    describe_site(core, site);
    /* A reader that sees this also sees the site and the parent. */
    __atomic_store_n(&node->is_known, 1, __ATOMIC_RELEASE);
    return node;
}

/* Return the node that counts the calls of a site on new paths, once the tally is full. */
static node_t *overflow_of(Core *core, PyObject *site)
{
    node_t *node = node_at_end(known_child(core->tree.overflow, site));
    if (node == NULL && core->tree.overflow->children < OVERFLOW_SITES &&
        (node = new_node(core, core->tree.overflow, site)) != NULL)
        node->may_recur = 1;
    PyErr_Clear();
    return node != NULL ? node : core->tree.overflow;
}

/* Make the first step from a node to the node of a site. If an ancestor has the same site, that is the node, so
 * recursion makes no nodes. Else it is a new node, or the overflow node once the tally is full. Never fails. */
static SELDOM node_t *first_step(Core *core, node_t *parent, PyObject *site)
{
    node_t *step, *again = parent;
    while (again != NULL && again->site != site)
        again = again->parent;
    if (again != NULL) {
        for (node_t *between = parent; between != again; between = between->parent)
            between->may_recur = 1;
        again->may_recur = 1;
        step = as_edge(again);
    } else {
        if (core->tree.node_count < core->node_limit && (step = new_node(core, parent, site)) != NULL)
            return step;
        PyErr_Clear();
        step = as_edge(overflow_of(core, site));
    }
    if (core->tree.edges < EDGE_LIMIT && add_child(parent, step) == 0)
        core->tree.edges++;
    return step;
}

/* Return the step from a node to the node of a site that is called there. Never fails. */
static inline node_t *node_of(Core *core, node_t *parent, PyObject *site)
{
    node_t *step = known_child(parent, site);
    return __builtin_expect(step != NULL, 1) ? step : first_step(core, parent, site);
}

/* Return the node that is reached from a node by the steps from an ancestor to an old node. Set `is_folded` if a step is
 * marked. Never fails. */
static node_t *follow_path(Core *core, node_t *node, const node_t *ancestor, const node_t *old, char *is_folded)
{
    if (old == ancestor)
        return node;
    node_t *step = node_of(core, follow_path(core, node, ancestor, old->parent, is_folded), old->site);
    *is_folded |= (char)is_edge(step);
    return node_at_end(step);
}

static inline totals_t *known_totals(const book_t *book, uint32_t index)
{
    totals_t **page = index / PAGE < book->slots ? book->pages[index / PAGE] : NULL;
    return page == NULL ? NULL : page[index % PAGE];
}

static totals_t *totals_of(Ring *ring, uint32_t index)
{
    book_t *book = &ring->totals;
    uint32_t number = index / PAGE;
    if (number >= book->slots) {
        uint32_t page_slots = book->slots ? book->slots : 8;
        while (page_slots <= number)
            page_slots *= 2;
        totals_t ***grown = PyMem_Realloc(book->pages, page_slots * sizeof(totals_t **));
        if (grown == NULL)
            return NULL;
        memset(grown + book->slots, 0, (page_slots - book->slots) * sizeof(totals_t **));
        book->pages = grown;
        book->slots = page_slots;
    }
    if (book->pages[number] == NULL && (book->pages[number] = PyMem_Calloc(PAGE, sizeof(totals_t *))) == NULL)
        return NULL;
    totals_t **totals = &book->pages[number][index % PAGE];
    if (*totals == NULL && (*totals = new_lines_in(memory_of(ring), PART_TOTALS, sizeof(totals_t))) != NULL) {
        (*totals)->node = index;
        (*totals)->ring_number = ring->number;
        (*totals)->min_ns = (*totals)->first_ns = INT64_MAX;
        (*totals)->waiting_room = BUCKETS_WAITING;
    }
    return *totals;
}

/* Return the index that histogram.bucket computes. */
static inline uint32_t bucket_of(uint64_t value)
{
    if (value < 128)
        return (uint32_t)value;
    uint32_t highest = 63 ^ (uint32_t)__builtin_clzll(value); /* one instruction of x86-64 */
    return (highest << 6) + (uint32_t)(value >> (highest - 6)) - (6 << 6);
}

static int add_to_upper(chunk_t *chunk, uint32_t at, uint64_t times)
{
    if (chunk->high == NULL && (chunk->high = new_lines_in(memory_of(chunk), PART_HIGHS, 64 * sizeof *chunk->high)) == NULL)
        return -1;
    chunk->high[at] += times;
    return 0;
}

static inline chunk_t *chunk_of(totals_t *totals, uint32_t bucket)
{
    chunk_t **chunk = &totals->chunks[bucket >> 6];
    if (*chunk == NULL)
        *chunk = new_lines_in(memory_of(totals), PART_CHUNKS, sizeof(chunk_t));
    return *chunk;
}

static void count_bucket(Core *core, totals_t *totals, uint32_t bucket, uint64_t times)
{
    chunk_t *chunk = chunk_of(totals, bucket);
    if (chunk == NULL) {
        core->counted->reasons[NO_DETAILS] += times;
        return;
    }
    uint16_t *low = &chunk->low[bucket & 63];
    if (times > (uint64_t)(UINT16_MAX - *low)) {
        uint64_t sum = *low + (times & UINT16_MAX);
        if (add_to_upper(chunk, bucket & 63, (times >> LOW_BITS) + (sum >> LOW_BITS)) < 0) {
            core->counted->reasons[NO_DETAILS] += times - (uint64_t)(UINT16_MAX - *low);
            *low = UINT16_MAX; /* without memory for the upper parts */
        } else {
            *low = (uint16_t)sum;
        }
    } else {
        *low += (uint16_t)times;
    }
}

/* Count the buckets that wait. Without a recorder, buckets that need memory keep waiting if there is none. */
static void count_waiting(Core *core, totals_t *totals)
{
    while (totals->waiting_room < BUCKETS_WAITING) {
        uint32_t bucket = totals->waiting[totals->waiting_room];
        chunk_t *chunk = chunk_of(totals, bucket);
        if (core == NULL && (chunk == NULL || (chunk->low[bucket & 63] == UINT16_MAX && add_to_upper(chunk, bucket & 63, 0) < 0)))
            return;
        totals->waiting_room++;
        count_bucket(core, totals, bucket, 1);
    }
}

/* Count a full list of waiting buckets, within a call. `count_waiting` does the rare cases. */
static __attribute__((noinline)) void count_all_waiting(Core *core, totals_t *totals)
{
#pragma GCC unroll 7
    for (uint16_t i = 0; i < BUCKETS_WAITING; i++) {
        uintptr_t bucket = totals->waiting[i];
        chunk_t *chunk = totals->chunks[bucket >> 6];
        if (__builtin_expect(chunk == NULL, 0) || __builtin_expect(++chunk->low[bucket & 63] == 0, 0)) {
            if (chunk != NULL)
                chunk->low[bucket & 63] = UINT16_MAX;
            totals->waiting_room = i;
            count_waiting(core, totals);
            return;
        }
    }
    totals->waiting_room = BUCKETS_WAITING;
}

/* Add to a sum of times. At its largest value the sum stays there instead of becoming negative. `core` points to the
 * recorder that counts this, or to NULL. */
static inline __attribute__((always_inline)) void add_time(Core *const *core, int64_t *sum, int64_t more)
{
    *sum = (int64_t)((uint64_t)*sum + (uint64_t)more);
    if (__builtin_expect(*sum < 0, 0)) { /* neither of both was negative */
        *sum = INT64_MAX;
        if (*core != NULL)
            count_event(*core, SATURATED);
    }
}

static inline uint64_t times_of(const totals_t *totals, uint32_t bucket)
{
    const chunk_t *chunk = totals->chunks[bucket >> 6];
    if (chunk == NULL)
        return 0;
    return (chunk->high == NULL ? 0 : chunk->high[bucket & 63] << LOW_BITS) + chunk->low[bucket & 63];
}

/* Add the totals of a call path on one thread to those of another ring. */
static void merge_totals(Core *core, totals_t *into, totals_t *from)
{
    if (from->calls == 0)
        return;
    count_waiting(core, from);
    if (into->calls == 0 || from->min_ns < into->min_ns)
        into->min_ns = from->min_ns;
    if (into->calls == 0 || from->first_ns < into->first_ns) {
        into->first_ns = from->first_ns;
        into->first_total_ns = from->first_total_ns;
    }
    if (from->max_ns > into->max_ns)
        into->max_ns = from->max_ns;
    into->calls += from->calls;
    into->errors += from->errors;
    into->cancelled += from->cancelled;
    into->moved_bytes += from->moved_bytes;
    add_time(&core, &into->total_ns, from->total_ns);
    add_time(&core, &into->self_ns, from->self_ns);
    add_time(&core, &into->waiting_ns, from->waiting_ns);
    add_time(&core, &into->device_ns, from->device_ns);
    add_time(&core, &into->beyond_ns, from->beyond_ns);
    for (uint32_t c = 0; c < CHUNKS; c++)
        for (uint32_t i = c << 6; from->chunks[c] != NULL && i < (c + 1) << 6; i++)
            if (times_of(from, i))
                count_bucket(core, into, i, times_of(from, i));
}

static void free_book(book_t *book)
{
    for (uint32_t p = 0; p < book->slots; p++) {
        for (uint32_t i = 0; book->pages[p] != NULL && i < PAGE; i++) {
            totals_t *totals = book->pages[p][i];
            for (uint32_t c = 0; totals != NULL && c < CHUNKS; c++) {
                if (totals->chunks[c] != NULL)
                    free_lines_in(totals->chunks[c]->high, PART_HIGHS);
                free_lines_in(totals->chunks[c], PART_CHUNKS);
            }
            free_lines_in(totals, PART_TOTALS);
        }
        PyMem_Free(book->pages[p]);
    }
    PyMem_Free(book->pages);
    book->pages = NULL;
    book->slots = 0;
}
