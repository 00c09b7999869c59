/* Hot: the step from a node to that of a call. Cold: nodes that are new. A part of `_recorder.c`. */

static inline uint64_t scrambled(uint64_t id)
{
    return id * 0x9E3779B97F4A7C15u;
}

static inline uint32_t slot_of(PyObject *site, uint32_t slots)
{
    uintptr_t address = (uintptr_t)site;
    return (uint32_t)((address >> 4) * 0x9E3779B1u) & (slots - 1);
}

/* A step to a node that is no descendant has a mark in the low bits of its address, which are free. */
static inline node_t *as_edge(node_t *node)
{
    return (node_t *)((uintptr_t)node | 1);
}

static inline int is_edge(const node_t *step)
{
    return (uintptr_t)step & 1;
}

static inline node_t *end_of(node_t *step)
{
    return (node_t *)((uintptr_t)step & ~(uintptr_t)1);
}

static inline node_t *known_child(node_t *parent, PyObject *site)
{
    if (parent->slots == 0)
        return NULL;
    for (uint32_t i = slot_of(site, parent->slots);; i = (i + 1) & (parent->slots - 1)) {
        node_t *step = parent->table[i];
        if (step == NULL || end_of(step)->site == site)
            return step;
    }
}

static int add_child(node_t *parent, node_t *child)
{
    if ((parent->children + 1) * 2 > parent->slots) {
        uint32_t slots = parent->slots ? parent->slots * 2 : 4;
        node_t **table = PyMem_Calloc(slots, sizeof(node_t *));
        if (table == NULL)
            return -1;
        for (uint32_t i = 0; i < parent->slots; i++) {
            node_t *node = parent->table[i];
            if (node == NULL)
                continue;
            uint32_t at = slot_of(end_of(node)->site, slots);
            while (table[at] != NULL)
                at = (at + 1) & (slots - 1);
            table[at] = node;
        }
        PyMem_Free(parent->table);
        parent->table = table;
        parent->slots = slots;
    }
    uint32_t at = slot_of(end_of(child)->site, parent->slots);
    while (parent->table[at] != NULL)
        at = (at + 1) & (parent->slots - 1);
    parent->table[at] = child;
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

static int asks_for_device(PyObject *site)
{
    PyObject *device = PyObject_GetAttr(site, str_device);
    int asks = device == Py_True;
    Py_XDECREF(device);
    PyErr_Clear();
    return asks;
}

static int64_t min_ns_of(PyObject *site)
{
    PyObject *value = PyObject_GetAttr(site, str_min_ns);
    long long min_ns = value == NULL || !PyLong_Check(value) ? 0 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return min_ns;
}

/* Keep a node of no tree for reuse. */
static void make_spare(Core *core, node_t *node)
{
    node_t **spare = core->memory != NULL && memory_of(node) == core->memory ? &core->spare : &core->private_spare;
    node->parent = *spare;
    *spare = node;
}

static node_t *new_node(Core *core, node_t *parent, PyObject *site)
{
    if (core->node_count == core->node_slots) {
        uint32_t slots = core->node_slots ? core->node_slots * 2 : 64;
        node_t **nodes = PyMem_Realloc(core->nodes, slots * sizeof(node_t *));
        if (nodes == NULL)
            return NULL;
        core->nodes = nodes;
        core->node_slots = slots;
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
    node->index = core->node_count;
    node->is_request = kind_is(site, str_request) != 0;
    node->is_copy = kind_is(site, str_copy) != 0;
    node->is_device = (char)asks_for_device(site);
    node->min_ns = min_ns_of(site);
    if (add_child(parent, node) < 0) {
        Py_CLEAR(node->site);
        make_spare(core, node);
        return NULL;
    }
    core->nodes[core->node_count++] = node;
    tell_site(core, site);
    __atomic_store_n(&node->is_known, 1, __ATOMIC_RELEASE); /* its readers also see the site and the parent */
    return node;
}

/* The node that counts calls of a site by new paths once the tally is full. */
static node_t *overflow_of(Core *core, PyObject *site)
{
    node_t *node = end_of(known_child(core->overflow, site));
    if (node == NULL && core->overflow->children < OVERFLOW_SITES &&
        (node = new_node(core, core->overflow, site)) != NULL)
        node->may_recur = 1;
    PyErr_Clear();
    return node != NULL ? node : core->overflow;
}

/* The first step from a node to the node of a site: an ancestor of the same site, so that recursion makes no nodes;
 * else a new node, while the tally has room. Never fails. */
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
        if (core->node_count < core->node_limit && (step = new_node(core, parent, site)) != NULL)
            return step;
        PyErr_Clear();
        step = as_edge(overflow_of(core, site));
    }
    if (core->edges < EDGE_LIMIT && add_child(parent, step) == 0)
        core->edges++;
    return step;
}

/* The step from a node to the node of a site called there. Never fails. */
static inline node_t *node_of(Core *core, node_t *parent, PyObject *site)
{
    node_t *step = known_child(parent, site);
    return __builtin_expect(step != NULL, 1) ? step : first_step(core, parent, site);
}
