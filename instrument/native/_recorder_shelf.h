/* Cold: rows put aside until their roots end. A part of `_recorder.c`. */

#define UNDECIDED 0
#define KEPT 1
#define PASSED 2

typedef struct {
    row_t row;
    long thread_id;
} held_t;

/* What is known of a root: the rows that wait for its end, or what came of it. In one list for each of these, in the
 * order in which they came there. */
typedef struct root {
    uint64_t id;
    struct root *chained;
    struct root *previous, *next;
    held_t *rows;
    uint32_t count, slots;
    char state;
} root_t;

typedef struct {
    root_t *first, *last;
    uint32_t length;
} roots_t;

typedef struct {
    PyObject_HEAD
    char all_sampled, busy;
    uint64_t threshold, spans_per_request, held_limit, decided_limit;
    uint64_t held, beyond, too_long;
    root_t **table;
    uint32_t slots, known; /* a power of two */
    roots_t lists[3];
} Shelf;

static root_t *
known_root(const Shelf *self, uint64_t id)
{
    root_t *root = self->table[(scrambled(id) >> 32) & (self->slots - 1)];
    while (root != NULL && root->id != id)
        root = root->chained;
    return root;
}

static void
enter_list(Shelf *self, root_t *root)
{
    roots_t *list = &self->lists[(int)root->state];
    root->previous = list->last;
    root->next = NULL;
    if (list->last != NULL)
        list->last->next = root;
    else
        list->first = root;
    list->last = root;
    list->length++;
}

static void
leave_roots(Shelf *self, root_t *root)
{
    roots_t *list = &self->lists[(int)root->state];
    if (root->previous != NULL)
        root->previous->next = root->next;
    else
        list->first = root->next;
    if (root->next != NULL)
        root->next->previous = root->previous;
    else
        list->last = root->previous;
    list->length--;
}

static void
double_table(Shelf *self)
{
    root_t **table = PyMem_Calloc(self->slots * 2, sizeof(root_t *));
    if (table == NULL)
        return; /* longer chains, then */
    for (uint32_t i = 0; i < self->slots; i++) {
        for (root_t *root = self->table[i], *next; root != NULL; root = next) {
            root_t **slot = &table[(scrambled(root->id) >> 32) & (self->slots * 2 - 1)];
            next = root->chained;
            root->chained = *slot;
            *slot = root;
        }
    }
    PyMem_Free(self->table);
    self->table = table;
    self->slots *= 2;
}

static root_t *
new_root(Shelf *self, uint64_t id, char state)
{
    root_t *root = PyMem_Calloc(1, sizeof(root_t));
    if (root == NULL)
        return NULL;
    if (self->known >= self->slots)
        double_table(self);
    root_t **slot = &self->table[(scrambled(id) >> 32) & (self->slots - 1)];
    root->id = id;
    root->state = state;
    root->chained = *slot;
    *slot = root;
    self->known++;
    enter_list(self, root);
    return root;
}

/* Give rows up. It may run code of the host's. */
static void
free_held(held_t *rows, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        drop_rare(rows[i].row.rare);
    PyMem_Free(rows);
}

static void
forget_root(Shelf *self, root_t *root)
{
    root_t **slot = &self->table[(scrambled(root->id) >> 32) & (self->slots - 1)];
    while (*slot != root)
        slot = &(*slot)->chained;
    *slot = root->chained;
    self->known--;
    leave_roots(self, root);
    held_t *rows = root->rows;
    uint32_t count = root->state == UNDECIDED ? root->count : 0;
    self->held -= count;
    PyMem_Free(root);
    free_held(rows, count);
}

/* Put a row aside until its root ends. */
static void
hold(Shelf *self, root_t *root, const row_t *row, long thread_id)
{
    if (root == NULL && (root = new_root(self, row->root_id, UNDECIDED)) == NULL) {
        self->too_long++;
        return;
    }
    if (root->count >= self->spans_per_request) {
        self->beyond++;
        return;
    }
    if (root->count == root->slots) {
        uint32_t slots = root->slots ? root->slots * 2 : 16;
        held_t *rows = PyMem_Realloc(root->rows, slots * sizeof(held_t));
        if (rows == NULL) {
            self->beyond++;
            return;
        }
        root->rows = rows;
        root->slots = slots;
    }
    held_t *held = &root->rows[root->count++];
    held->row = *row;
    new_rare(held->row.rare);
    held->thread_id = thread_id;
    self->held++;
    while (self->held > self->held_limit) {
        root_t *oldest = self->lists[UNDECIDED].first;
        self->too_long += oldest->count;
        forget_root(self, oldest);
    }
}

/* Whether somebody has to look at a row now; one that is to wait for its root is put aside. */
static int
is_found(void *shelf, const row_t *row, long thread_id)
{
    Shelf *self = shelf;
    int in_request = row->root_id & REQUEST_BIT;
    if (row->span_id == row->root_id && in_request)
        return 1;
    root_t *root = known_root(self, row->root_id);
    if (root != NULL && root->state == KEPT) {
        if (++root->count <= self->spans_per_request)
            return 1;
        self->beyond++;
        return 0;
    }
    if (!in_request)
        return self->all_sampled || scrambled(row->root_id) < self->threshold;
    if (root == NULL || root->state == UNDECIDED)
        hold(self, root, row, thread_id);
    return 0;
}

static PyObject *
Shelf_sort(Shelf *self, PyObject *args)
{
    Ring *ring;
    unsigned long long since;
    if (!PyArg_ParseTuple(args, "O!K:sort", &RingType, &ring, &since))
        return NULL;
    if (self->busy) { /* a finaliser that came in while another row was made up */
        PyErr_SetString(PyExc_RuntimeError, "the shelf is in use");
        return NULL;
    }
    self->busy = 1;
    PyObject *found = rows_from(ring, since, is_found, self);
    self->busy = 0;
    return found;
}

static PyObject *
Shelf_decide(Shelf *self, PyObject *args)
{
    unsigned long long id;
    int keep, wanted;
    if (!PyArg_ParseTuple(args, "Kpp:decide", &id, &keep, &wanted))
        return NULL;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the shelf is in use");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    self->busy = 1;
    held_t *rows = NULL;
    uint32_t count = 0;
    root_t *root = known_root(self, id);
    char state = keep ? KEPT : PASSED;
    if (root == NULL) {
        root = new_root(self, id, state);
    } else {
        if (root->state == UNDECIDED) {
            rows = root->rows;
            count = root->count;
            self->held -= count;
        }
        leave_roots(self, root);
        root->rows = NULL;
        root->slots = 0;
        root->state = state;
        enter_list(self, root);
    }
    if (root != NULL)
        root->count = count;
    if (self->lists[(int)state].length > self->decided_limit)
        forget_root(self, self->lists[(int)state].first);
    for (uint32_t i = 0; wanted && found != NULL && i < count; i++) {
        PyObject *row = row_as_tuple(&rows[i].row);
        PyObject *pair = row == NULL ? NULL : Py_BuildValue("(Nl)", row, rows[i].thread_id);
        if (pair == NULL || PyList_Append(found, pair) < 0)
            Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    free_held(rows, count);
    self->busy = 0;
    return found;
}

static PyObject *
Shelf_counts(Shelf *self, void *Py_UNUSED(closure))
{
    PyObject *counts = PyDict_New();
    const char *names[] = {"spans beyond spans_per_request", "spans of requests that stayed open too long"};
    uint64_t values[] = {self->beyond, self->too_long};
    for (int i = 0; counts != NULL && i < 2; i++) {
        PyObject *value = values[i] == 0 ? NULL : PyLong_FromUnsignedLongLong(values[i]);
        if (values[i] != 0 && (value == NULL || PyDict_SetItemString(counts, names[i], value) < 0))
            Py_CLEAR(counts);
        Py_XDECREF(value);
    }
    return counts;
}

static void
shelve_by(Shelf *self, double sample, unsigned long long spans_per_request)
{
    self->all_sampled = sample >= 1.0;
    self->threshold = sample <= 0.0 || sample >= 1.0 ? 0 : (uint64_t)(sample * 18446744073709551616.0);
    self->spans_per_request = spans_per_request;
}

static PyObject *
Shelf_change(Shelf *self, PyObject *args)
{
    double sample;
    unsigned long long spans_per_request;
    if (!PyArg_ParseTuple(args, "dK:change", &sample, &spans_per_request))
        return NULL;
    shelve_by(self, sample, spans_per_request);
    Py_RETURN_NONE;
}

static PyObject *
Shelf_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"sample", "spans_per_request", "held_rows", "decided_roots", NULL};
    double sample;
    unsigned long long spans_per_request, held_rows, decided_roots;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "dKKK:Shelf", words, &sample, &spans_per_request, &held_rows,
                                     &decided_roots))
        return NULL;
    Shelf *self = (Shelf *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->slots = 1024;
    self->table = PyMem_Calloc(self->slots, sizeof(root_t *));
    if (self->table == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    shelve_by(self, sample, spans_per_request);
    self->held_limit = held_rows;
    self->decided_limit = decided_roots;
    return (PyObject *)self;
}

static void
Shelf_dealloc(Shelf *self)
{
    for (int state = 0; state < 3 && self->table != NULL; state++)
        while (self->lists[state].first != NULL)
            forget_root(self, self->lists[state].first);
    PyMem_Free(self->table);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Shelf_methods[] = {
    {"change", (PyCFunction)Shelf_change, METH_VARARGS, "Sort by another sample and limit from now on."},
    {"sort", (PyCFunction)Shelf_sort, METH_VARARGS, "Go through a ring from a row number on: rows, head, missed."},
    {"decide", (PyCFunction)Shelf_decide, METH_VARARGS, "A root has ended: its rows, and what comes of the rest."},
    {NULL},
};

static PyMemberDef Shelf_members[] = {
    {"held", T_ULONGLONG, offsetof(Shelf, held), READONLY, "rows that are put aside now"},
    {NULL},
};

static PyGetSetDef Shelf_getset[] = {
    {"counts", (getter)Shelf_counts, NULL, "What was not kept, by reason.", NULL},
    {NULL},
};

static PyTypeObject ShelfType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Shelf",
    .tp_basicsize = sizeof(Shelf),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Rows of requests that have not ended yet, put aside by their root.",
    .tp_new = Shelf_new,
    .tp_dealloc = (destructor)Shelf_dealloc,
    .tp_methods = Shelf_methods,
    .tp_members = Shelf_members,
    .tp_getset = Shelf_getset,
};
