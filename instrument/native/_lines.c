/* The lines of a tally in C: the twin of the loops in `lines.py` and `paths.py`, which say what each is for.
 *
 * Lines and sums are rows of WIDTH numbers of 64 bits, as `lines.FIELDS` names them; the first of a line is its node, that
 * of a sum how many lines it is of. A tree has a node's parent before the node. A sum that needs more than 64 bits returns None, and the caller takes the twin.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NODE, CALLS, ERRORS, TOTAL, SELF, DEVICE, ELAPSED, MIN, MAX, MOVED, FIRST, WIDTH };
enum { LINES = NODE };

#define LEVELS 3 /* numbers for a site: its one or two levels, and the one that it has under nothing; -1 for none */

typedef struct {
    Py_buffer view;
    const void *items;
    Py_ssize_t count;
} column_t;

static int
open_column(column_t *column, PyObject *from, size_t size)
{
    if (PyObject_GetBuffer(from, &column->view, PyBUF_SIMPLE) < 0)
        return -1;
    if (column->view.len % (Py_ssize_t)size != 0) {
        PyBuffer_Release(&column->view);
        PyErr_Format(PyExc_ValueError, "%zd bytes are not whole numbers of %zu", column->view.len, size);
        return -1;
    }
    column->items = column->view.buf;
    column->count = column->view.len / (Py_ssize_t)size;
    return 0;
}

static void
close_columns(column_t *columns, int count)
{
    for (int i = 0; i < count; i++)
        PyBuffer_Release(&columns[i].view);
}

/* Several columns of int32, all or none. */
static int
open_columns(column_t *columns, PyObject *const *from, int count)
{
    for (int i = 0; i < count; i++)
        if (open_column(&columns[i], from[i], sizeof(int32_t)) < 0) {
            close_columns(columns, i);
            return -1;
        }
    return 0;
}

#define ITEMS(column) ((const int32_t *)(column).items)

/* Whether the columns are those of a tree: as many sites as nodes, each known, and parents before their children. */
static int
check_tree(const column_t *parents, const column_t *site_of, Py_ssize_t sites)
{
    int sound = parents->count == site_of->count && parents->count < INT32_MAX / 4;
    for (Py_ssize_t n = 0; sound && n < parents->count; n++)
        sound = ITEMS(*parents)[n] < n && ITEMS(*parents)[n] >= -1 && ITEMS(*site_of)[n] >= 0 && ITEMS(*site_of)[n] < sites;
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "these are no columns of a tree");
    return sound ? 0 : -1;
}

/* Call `each` with every line; the first answer that is not 0 ends it. -1: an exception is set. */
static int
each_line(PyObject *books, Py_ssize_t nodes, int (*each)(void *, const int64_t *), void *with)
{
    int status = 0;
    for (Py_ssize_t b = 0; status == 0 && b < PyList_GET_SIZE(books); b++) {
        column_t lines;
        if (open_column(&lines, PyList_GET_ITEM(books, b), WIDTH * sizeof(int64_t)) < 0)
            return -1;
        const int64_t *line = lines.items;
        for (Py_ssize_t i = 0; status == 0 && i < lines.count; i++, line += WIDTH) {
            if (line[NODE] < 0 || line[NODE] >= nodes) {
                PyErr_Format(PyExc_ValueError, "a line is of node %lld of %zd", (long long)line[NODE], nodes);
                status = -1;
            }
            else
                status = each(with, line);
        }
        close_columns(&lines, 1);
    }
    return status;
}

/* Where to look for a pair in a table. */
static size_t
slot_of(int32_t one, int32_t other)
{
    uint64_t mixed = ((uint64_t)(uint32_t)one << 32 | (uint32_t)other) * 0x9E3779B97F4A7C15u;
    return (size_t)(mixed ^ (mixed >> 32));
}

/* ------------------------------------------------------------------ places */

/* (places of the nodes' parents, places of the nodes, nodes with another's place), as `lines.Located` has them. */
static PyObject *
places(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *from[3], *of_parents = NULL, *of_nodes = NULL, *of_shared = NULL, *all = NULL;
    column_t columns[3];
    if (!PyArg_ParseTuple(args, "OOO", &from[0], &from[1], &from[2]) || open_columns(columns, from, 3) < 0)
        return NULL;
    size_t nodes = (size_t)columns[0].count, slots = 8;
    while (slots < 2 * nodes)
        slots *= 2;
    uint32_t *table = PyMem_RawCalloc(slots, sizeof *table); /* of places and 1, 0 for none */
    if (table == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    if (check_tree(&columns[0], &columns[1], columns[2].count) < 0)
        goto end;
    of_parents = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(nodes * sizeof(int32_t)));
    of_nodes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(nodes * sizeof(int32_t)));
    of_shared = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(nodes * sizeof(int32_t)));
    if (of_parents == NULL || of_nodes == NULL || of_shared == NULL)
        goto end;
    int32_t *above = (int32_t *)PyBytes_AS_STRING(of_parents), *place = (int32_t *)PyBytes_AS_STRING(of_nodes);
    int32_t *shared = (int32_t *)PyBytes_AS_STRING(of_shared), others = 0;
    const int32_t *parents = ITEMS(columns[0]), *site_of = ITEMS(columns[1]), *keys = ITEMS(columns[2]);
    for (int32_t n = 0; (size_t)n < nodes; n++) {
        above[n] = parents[n] < 0 ? parents[n] : place[parents[n]];
        size_t at = slot_of(above[n], keys[site_of[n]]) & (slots - 1);
        for (; table[at] != 0; at = (at + 1) & (slots - 1)) {
            int32_t known = (int32_t)table[at] - 1;
            if (above[known] == above[n] && keys[site_of[known]] == keys[site_of[n]])
                break;
        }
        if (table[at] == 0)
            table[at] = (uint32_t)n + 1;
        else
            shared[others++] = n;
        place[n] = (int32_t)table[at] - 1;
    }
    if (_PyBytes_Resize(&of_shared, others * (Py_ssize_t)sizeof(int32_t)) == 0)
        all = PyTuple_Pack(3, of_parents, of_nodes, of_shared);
end:
    Py_XDECREF(of_parents);
    Py_XDECREF(of_nodes);
    Py_XDECREF(of_shared);
    PyMem_RawFree(table);
    close_columns(columns, 3);
    return all;
}

/* ------------------------------------------------------------------ the tree of names */

enum { PARENT, LEVEL, FIRST_NODE, LAST_CHILD, BEFORE, LAST_NODE, OF_ENTRY };
enum { ENTRY = OF_ENTRY, COUNTED, NODE_BEFORE, NAME_COLUMNS }; /* the latter are of each node */

typedef struct {
    const int32_t *parents, *site_of, *levels;
    int32_t *columns[NAME_COLUMNS], *pending;
    uint32_t *table; /* of entries by parent and level, 0 for none: the root is nobody's child */
    int32_t count;
    size_t mask;
} names_t;

static int32_t
entry_below(names_t *names, int32_t parent, int32_t level, int32_t node)
{
    int32_t **columns = names->columns;
    size_t at = slot_of(parent, level) & names->mask;
    for (; names->table[at] != 0; at = (at + 1) & names->mask) {
        int32_t known = (int32_t)names->table[at];
        if (columns[PARENT][known] == parent && columns[LEVEL][known] == level)
            return known;
    }
    int32_t made = names->count++;
    names->table[at] = (uint32_t)made;
    columns[PARENT][made] = parent;
    columns[LEVEL][made] = level;
    columns[FIRST_NODE][made] = node;
    columns[BEFORE][made] = columns[LAST_CHILD][parent];
    columns[LAST_CHILD][parent] = made;
    return made;
}

static int
name_line(void *with, const int64_t *line)
{
    names_t *names = with;
    int32_t *entry_of = names->columns[ENTRY], *counted = names->columns[COUNTED];
    int32_t waiting = 0, node = (int32_t)line[NODE];
    for (; node >= 0 && entry_of[node] < 0; node = names->parents[node])
        names->pending[waiting++] = node;
    int32_t above = node < 0 ? 0 : entry_of[node];
    while (waiting > 0) {
        node = names->pending[--waiting];
        const int32_t *levels = names->levels + LEVELS * (size_t)names->site_of[node];
        int alone = above == 0 && levels[2] >= 0;
        for (const int32_t *level = alone ? levels + 2 : levels; level < levels + (alone ? 3 : 2) && *level >= 0; level++) {
            above = entry_below(names, above, *level, node);
            counted[node]++;
        }
        entry_of[node] = above;
        if (counted[node] > 0) {
            names->columns[NODE_BEFORE][node] = names->columns[LAST_NODE][above];
            names->columns[LAST_NODE][above] = node;
        }
    }
    return 0;
}

static PyObject *
tree_of_names(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *from[3], *books, *found = NULL;
    column_t columns[3];
    if (!PyArg_ParseTuple(args, "OOOO!", &from[0], &from[1], &from[2], &PyList_Type, &books) ||
        open_columns(columns, from, 3) < 0)
        return NULL;
    size_t nodes = (size_t)columns[0].count, slots = 8;
    while (slots < 4 * nodes + 4)
        slots *= 2;
    names_t names = {ITEMS(columns[0]), ITEMS(columns[1]), ITEMS(columns[2]), .count = 1, .mask = slots - 1};
    if (check_tree(&columns[0], &columns[1], columns[2].count / LEVELS) < 0)
        goto end;
    names.pending = PyMem_RawMalloc((nodes + 1) * sizeof *names.pending);
    names.table = PyMem_RawCalloc(slots, sizeof *names.table);
    int failed = names.pending == NULL || names.table == NULL;
    for (int part = 0; part < NAME_COLUMNS; part++) {
        size_t size = ((part < OF_ENTRY ? 2 * nodes : nodes) + 1) * sizeof(int32_t);
        names.columns[part] = PyMem_RawMalloc(size);
        if (names.columns[part] == NULL)
            failed = 1;
        else
            memset(names.columns[part], part == COUNTED ? 0 : -1, size);
    }
    if (failed) {
        PyErr_NoMemory();
        goto end;
    }
    if (each_line(books, (Py_ssize_t)nodes, name_line, &names) < 0)
        goto end;
    found = PyTuple_New(NAME_COLUMNS);
    for (int part = 0; found != NULL && part < NAME_COLUMNS; part++) {
        size_t count = part < OF_ENTRY ? (size_t)names.count : nodes;
        PyObject *bytes =
            PyBytes_FromStringAndSize((char *)names.columns[part], (Py_ssize_t)(count * sizeof(int32_t)));
        if (bytes == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SET_ITEM(found, part, bytes);
    }
end:
    for (int part = 0; part < NAME_COLUMNS; part++)
        PyMem_RawFree(names.columns[part]);
    PyMem_RawFree(names.pending);
    PyMem_RawFree(names.table);
    close_columns(columns, 3);
    return found;
}

/* ------------------------------------------------------------------ sums */

/* Add a line, or the sum of so many, to a sum. -1: a number is too large. */
static int
add_row(int64_t *sum, const int64_t *row, int64_t lines)
{
    static const int added[] = {CALLS, ERRORS, TOTAL, SELF, DEVICE, ELAPSED, MOVED};
    int beyond = 0;
    if (row[CALLS] == 0)
        return 0;
    if (sum[CALLS] == 0 || row[MIN] < sum[MIN])
        sum[MIN] = row[MIN];
    if (sum[CALLS] == 0 || row[MAX] > sum[MAX])
        sum[MAX] = row[MAX];
    if (sum[CALLS] == 0 || row[FIRST] < sum[FIRST])
        sum[FIRST] = row[FIRST];
    for (size_t i = 0; i < sizeof added / sizeof *added; i++)
        beyond |= __builtin_add_overflow(sum[added[i]], row[added[i]], &sum[added[i]]);
    sum[LINES] += lines;
    return beyond ? -1 : 0;
}

typedef struct {
    const int32_t *groups, *counted, *parents;
    int64_t *sums;
} sums_t;

enum { BEYOND = 1 };

static int
sum_line(void *with, const int64_t *line)
{
    sums_t *sums = with;
    int32_t group = sums->groups[line[NODE]];
    int levels = sums->counted == NULL ? 1 : sums->counted[line[NODE]];
    int status = 0;
    for (; group >= 0 && levels > 0 && status == 0; levels--, group = levels > 0 ? sums->parents[group] : -1)
        status = add_row(sums->sums + (size_t)group * WIDTH, line, 1);
    return status < 0 ? BEYOND : 0;
}

/* What a hidden phase leaves to the row around it. */
static int
sum_hidden(void *with, const int64_t *line)
{
    sums_t *sums = with;
    int32_t group = sums->groups[line[NODE]];
    if (group < 0 || sums->counted[line[NODE]] > 0 || line[CALLS] == 0)
        return 0;
    int64_t *around = sums->sums + (size_t)group * WIDTH;
    if (around[CALLS] == 0 && (around[FIRST] == 0 || line[FIRST] < around[FIRST]))
        around[FIRST] = line[FIRST];
    return __builtin_add_overflow(around[SELF], line[SELF], &around[SELF]) ? BEYOND : 0;
}

static PyObject *
sums(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *books, *from[3] = {NULL, NULL, NULL}, *found = NULL;
    Py_ssize_t count;
    column_t columns[3];
    if (!PyArg_ParseTuple(args, "O!On|OO", &PyList_Type, &books, &from[0], &count, &from[1], &from[2]))
        return NULL;
    int opened = from[2] == NULL ? 1 : 3;
    if (open_columns(columns, from, opened) < 0)
        return NULL;
    int sound = count >= 0 && (opened == 1 || (columns[1].count == columns[0].count && columns[2].count == count));
    for (Py_ssize_t n = 0; sound && n < columns[0].count; n++)
        sound = ITEMS(columns[0])[n] < count;
    for (Py_ssize_t n = 0; sound && opened == 3 && n < count; n++)
        sound = ITEMS(columns[2])[n] < count;
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "a group is beyond the last");
        goto end;
    }
    found = PyBytes_FromStringAndSize(NULL, count * WIDTH * (Py_ssize_t)sizeof(int64_t));
    if (found == NULL)
        goto end;
    sums_t with = {ITEMS(columns[0]), .sums = (int64_t *)PyBytes_AS_STRING(found)};
    memset(with.sums, 0, (size_t)PyBytes_GET_SIZE(found));
    if (opened == 3) {
        with.counted = ITEMS(columns[1]);
        with.parents = ITEMS(columns[2]);
    }
    int status = each_line(books, columns[0].count, sum_line, &with);
    if (status == 0 && opened == 3)
        status = each_line(books, columns[0].count, sum_hidden, &with);
    if (status != 0)
        Py_CLEAR(found);
    if (status == BEYOND)
        found = Py_NewRef(Py_None);
end:
    close_columns(columns, opened);
    return found;
}

static PyObject *
together(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *of_sums, *of_rows, *found = NULL;
    column_t all, rows;
    if (!PyArg_ParseTuple(args, "OO", &of_sums, &of_rows) || open_column(&all, of_sums, WIDTH * sizeof(int64_t)) < 0)
        return NULL;
    if (open_column(&rows, of_rows, sizeof(int32_t)) < 0) {
        close_columns(&all, 1);
        return NULL;
    }
    int64_t sum[WIDTH] = {0};
    int status = 0;
    for (Py_ssize_t i = 0; i < rows.count && status == 0; i++) {
        int32_t row = ITEMS(rows)[i];
        if (row < 0 || row >= all.count) {
            PyErr_SetString(PyExc_ValueError, "a row is beyond the last");
            goto end;
        }
        const int64_t *from = (const int64_t *)all.items + (size_t)row * WIDTH;
        status = add_row(sum, from, from[LINES]);
    }
    found = status < 0 ? Py_NewRef(Py_None) : PyBytes_FromStringAndSize((char *)sum, sizeof sum);
end:
    close_columns(&all, 1);
    close_columns(&rows, 1);
    return found;
}

/* ------------------------------------------------------------------ chains */

static PyObject *
chained(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *of[3], *found = NULL;
    column_t columns[3];
    if (!PyArg_ParseTuple(args, "OOO", &of[0], &of[1], &of[2]) || open_columns(columns, of, 3) < 0)
        return NULL;
    const int32_t *before = ITEMS(columns[0]), *lasts = ITEMS(columns[1]), *entries = ITEMS(columns[2]);
    Py_ssize_t count = columns[0].count, left = count;
    found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < columns[2].count; i++) {
        if (entries[i] < 0 || entries[i] >= columns[1].count) {
            PyErr_SetString(PyExc_ValueError, "an entry is beyond the last");
            Py_CLEAR(found);
            break;
        }
        for (int32_t at = lasts[entries[i]]; found != NULL && at >= 0; at = before[at]) {
            if (at >= count || left-- == 0) { /* each is in one chain at most */
                PyErr_SetString(PyExc_ValueError, "a link is beyond the last");
                Py_CLEAR(found);
                break;
            }
            PyObject *number = PyLong_FromLong(at);
            if (number == NULL || PyList_Append(found, number) < 0)
                Py_CLEAR(found);
            Py_XDECREF(number);
        }
    }
    close_columns(columns, 3);
    return found;
}

/* ------------------------------------------------------------------ values */

/* Whether a double may not hold the integer, and a quotient of it not be Python's. */
static int
is_inexact(int64_t number)
{
    return number > (int64_t)1 << 53 || number < -((int64_t)1 << 53);
}

typedef struct {
    int64_t whole;
    double part; /* where a value is a quotient */
    char known;
} value_t;

static PyObject *
values(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *of_parents, *of_sums, *found = NULL;
    column_t parents, all;
    value_t *its = NULL;
    int column, per, negative, least;
    if (!PyArg_ParseTuple(args, "OOiipp", &of_parents, &of_sums, &column, &per, &negative, &least) ||
        open_column(&parents, of_parents, sizeof(int32_t)) < 0)
        return NULL;
    if (open_column(&all, of_sums, WIDTH * sizeof(int64_t)) < 0) {
        close_columns(&parents, 1);
        return NULL;
    }
    int sound = parents.count == all.count && column >= 0 && column < WIDTH && per < WIDTH;
    for (Py_ssize_t n = 0; sound && n < parents.count; n++)
        sound = ITEMS(parents)[n] < n && ITEMS(parents)[n] >= -1;
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "these are no columns of a tree and its sums");
        goto end;
    }
    its = PyMem_RawCalloc((size_t)all.count + 1, sizeof *its);
    if (its == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t n = all.count - 1; n >= 0; n--) {
        const int64_t *sum = (const int64_t *)all.items + (size_t)n * WIDTH;
        value_t value = {0, 0.0, sum[CALLS] != 0 || sum[FIRST] != 0};
        if (value.known && per >= 0) {
            if (is_inexact(sum[column]) || is_inexact(sum[per])) {
                found = Py_NewRef(Py_None);
                goto end;
            }
            value.part = sum[per] == 0 ? 0.0 : (double)sum[column] / (double)sum[per];
        }
        else if (value.known && __builtin_mul_overflow(sum[column], negative ? -1 : 1, &value.whole)) {
            found = Py_NewRef(Py_None);
            goto end;
        }
        value_t *known[] = {&its[n], ITEMS(parents)[n] < 0 ? NULL : &its[ITEMS(parents)[n]]};
        /* Its own calls count alone; without any, what is below it, and what is hidden in it, too. */
        if (sum[CALLS] != 0)
            its[n].known = 0;
        for (int i = 0; i < 2 && known[i] != NULL; i++) {
            if (value.known && (!known[i]->known || (least ? value.whole < known[i]->whole || value.part < known[i]->part
                                                           : value.whole > known[i]->whole || value.part > known[i]->part)))
                *known[i] = value;
            value = its[n];
        }
    }
    found = PyList_New(all.count);
    for (Py_ssize_t n = 0; found != NULL && n < all.count; n++) {
        PyObject *value = !its[n].known ? Py_NewRef(Py_None)
                          : per >= 0    ? PyFloat_FromDouble(its[n].part)
                                        : PyLong_FromLongLong(its[n].whole);
        if (value == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, n, value);
    }
end:
    PyMem_RawFree(its);
    close_columns(&parents, 1);
    close_columns(&all, 1);
    return found;
}

/* ------------------------------------------------------------------ the heaviest */

typedef struct {
    value_t value;
    Py_ssize_t place;
} weight_t;

/* Whether one comes before another: the heavier one, of equal ones that which stands first. */
static int
is_heavier(const weight_t *one, const weight_t *other)
{
    if (one->value.whole != other->value.whole)
        return one->value.whole > other->value.whole;
    if (one->value.part != other->value.part)
        return one->value.part > other->value.part;
    return one->place < other->place;
}

static int
compare_weights(const void *one, const void *other)
{
    return is_heavier(one, other) ? -1 : 1; /* no two have one place */
}

/* Put a weight into a heap whose first is the lightest, from a place that is free downwards. */
static void
sift(weight_t *heap, size_t count, size_t at, weight_t weight)
{
    for (size_t below = 2 * at + 1; below < count; below = 2 * at + 1) {
        below += below + 1 < count && is_heavier(&heap[below], &heap[below + 1]);
        if (!is_heavier(&weight, &heap[below]))
            break;
        heap[at] = heap[below];
        at = below;
    }
    heap[at] = weight;
}

/* The weight of an entry: 1, 0 of one that has none, -1 where it is none of ours or an error. */
static int
weight_of(PyObject *weights, PyObject *entry, weight_t *weight)
{
    Py_ssize_t at = PyLong_AsSsize_t(entry);
    if (at < 0 || at >= PyList_GET_SIZE(weights)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "an entry is beyond the last");
        return -1;
    }
    PyObject *value = PyList_GET_ITEM(weights, at);
    int overflow = 0;
    if (value == Py_None)
        return 0;
    weight->value = (value_t){0, 0.0, 1};
    if (PyFloat_CheckExact(value))
        weight->value.part = PyFloat_AS_DOUBLE(value);
    else if (PyLong_CheckExact(value))
        weight->value.whole = PyLong_AsLongLongAndOverflow(value, &overflow);
    else
        overflow = 1;
    return overflow ? -1 : 1;
}

/* heaviest(weights, entries, most): so many of the entries, in order. None where a weight is no number of 64 bits. */
static PyObject *
heaviest(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *weights, *entries, *found = NULL;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "O!O!n:heaviest", &PyList_Type, &weights, &PyList_Type, &entries, &most))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(entries);
    size_t room = most < 0 ? 0 : most < count ? (size_t)most : (size_t)count, used = 0;
    weight_t *heap = PyMem_RawMalloc((room + 1) * sizeof *heap);
    if (heap == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        weight_t weight = {.place = i};
        int known = weight_of(weights, PyList_GET_ITEM(entries, i), &weight);
        if (known < 0) {
            found = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
            goto end;
        }
        if (!known || room == 0)
            continue;
        if (used < room) {
            heap[used++] = weight;
            for (size_t at = used == room ? room / 2 : 0; at-- > 0;) /* once, when it is full */
                sift(heap, room, at, heap[at]);
        } else if (is_heavier(&weight, &heap[0]))
            sift(heap, room, 0, weight);
    }
    qsort(heap, used, sizeof *heap, compare_weights);
    found = PyList_New((Py_ssize_t)used);
    for (size_t i = 0; found != NULL && i < used; i++)
        PyList_SET_ITEM(found, (Py_ssize_t)i, Py_NewRef(PyList_GET_ITEM(entries, heap[i].place)));
end:
    PyMem_RawFree(heap);
    return found;
}

/* parted(weights, entries, chosen): the entries that have a weight, those of a set and the others. */
static PyObject *
parted(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *weights, *entries, *chosen;
    if (!PyArg_ParseTuple(args, "O!O!O!:parted", &PyList_Type, &weights, &PyList_Type, &entries, &PySet_Type, &chosen))
        return NULL;
    PyObject *kept = PyList_New(0), *others = PyList_New(0);
    int done = kept == NULL || others == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; done == 0 && i < PyList_GET_SIZE(entries); i++) {
        PyObject *entry = PyList_GET_ITEM(entries, i);
        Py_ssize_t at = PyLong_AsSsize_t(entry);
        if (at < 0 || at >= PyList_GET_SIZE(weights)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "an entry is beyond the last");
            done = -1;
        } else if (PyList_GET_ITEM(weights, at) != Py_None) {
            int is_chosen = PySet_Contains(chosen, entry);
            done = is_chosen < 0 ? -1 : PyList_Append(is_chosen ? kept : others, entry);
        }
    }
    PyObject *found = done < 0 ? NULL : Py_BuildValue("(OO)", kept, others);
    Py_XDECREF(kept);
    Py_XDECREF(others);
    return found;
}

/* has(lines, field): whether a number of any line is not 0. */
static PyObject *
has(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *of;
    column_t lines;
    int field, found = 0;
    if (!PyArg_ParseTuple(args, "Oi:has", &of, &field) || open_column(&lines, of, WIDTH * sizeof(int64_t)) < 0)
        return NULL;
    if (field < 0 || field >= WIDTH) {
        close_columns(&lines, 1);
        return PyErr_Format(PyExc_ValueError, "field %d is beyond the last", field);
    }
    for (Py_ssize_t n = 0; !found && n < lines.count; n++)
        found = ((const int64_t *)lines.items)[n * WIDTH + field] != 0;
    close_columns(&lines, 1);
    return PyBool_FromLong(found);
}

/* ------------------------------------------------------------------ what lies where in the tree */

static PyObject *
topmost(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *from[3], *found = NULL;
    column_t columns[3];
    if (!PyArg_ParseTuple(args, "OOO", &from[0], &from[1], &from[2]) || open_columns(columns, from, 3) < 0)
        return NULL;
    Py_ssize_t nodes = columns[0].count;
    int32_t *below = PyMem_RawMalloc(((size_t)nodes + 1) * sizeof *below); /* whether it is, or lies below, a marked one */
    if (below == NULL)
        PyErr_NoMemory();
    else if (check_tree(&columns[0], &columns[1], columns[2].count) == 0)
        found = PyBytes_FromStringAndSize(NULL, nodes * (Py_ssize_t)sizeof(int32_t));
    for (Py_ssize_t n = 0; found != NULL && n < nodes; n++) {
        int32_t parent = ITEMS(columns[0])[n], marked = ITEMS(columns[2])[ITEMS(columns[1])[n]] != 0;
        int32_t inside = parent >= 0 && below[parent];
        ((int32_t *)PyBytes_AS_STRING(found))[n] = marked && !inside ? 0 : -1;
        below[n] = marked || inside;
    }
    PyMem_RawFree(below);
    close_columns(columns, 3);
    return found;
}

typedef struct {
    int64_t *own;
    char *called;
} device_t;

static int
own_device(void *with, const int64_t *line)
{
    device_t *device = with;
    device->called[line[NODE]] |= line[CALLS] != 0;
    return __builtin_add_overflow(device->own[line[NODE]], line[DEVICE], &device->own[line[NODE]]) ? BEYOND : 0;
}

/* device_below(books, parents): of each node by how much more device time there is below it than it has itself. */
static PyObject *
device_below(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *books, *of_parents, *found = NULL;
    column_t parents;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &books, &of_parents)
        || open_column(&parents, of_parents, sizeof(int32_t)) < 0)
        return NULL;
    size_t nodes = (size_t)parents.count;
    device_t device = {PyMem_RawCalloc(nodes + 1, sizeof(int64_t)), PyMem_RawCalloc(nodes + 1, 1)};
    int64_t *below = PyMem_RawCalloc(nodes + 1, sizeof *below); /* the one before the first is of no node */
    if (device.own == NULL || device.called == NULL || below == NULL)
        PyErr_NoMemory();
    else
        found = PyBytes_FromStringAndSize(NULL, parents.count * (Py_ssize_t)sizeof(int64_t));
    int status = found == NULL ? -1 : each_line(books, parents.count, own_device, &device);
    for (Py_ssize_t n = parents.count - 1; status == 0 && n >= 0; n--) {
        int32_t parent = ITEMS(parents)[n];
        if (parent >= n || parent < -1) {
            PyErr_SetString(PyExc_ValueError, "these are no columns of a tree");
            status = -1;
            break;
        }
        int64_t own = device.own[n], inner = below[n + 1], more = inner > own ? inner - own : 0;
        ((int64_t *)PyBytes_AS_STRING(found))[n] = device.called[n] ? more : 0;
        if (__builtin_add_overflow(below[parent + 1], own + more, &below[parent + 1]))
            status = BEYOND;
    }
    if (status != 0)
        Py_CLEAR(found);
    if (status == BEYOND)
        found = Py_NewRef(Py_None);
    PyMem_RawFree(device.own);
    PyMem_RawFree(device.called);
    PyMem_RawFree(below);
    close_columns(&parents, 1);
    return found;
}

/* ------------------------------------------------------------------ functions */

enum { REQUEST = 1, WORK = 2 };
enum { BY_TIME, BY_CALLS, BY_AVERAGE };

/* A row of a function as `lines.Group` has it, and what it is sorted by. Function 0 stands for all together. */
typedef struct {
    int64_t first, lines, time_ns, calls, on_device;
    double weight;
    int32_t function, row;
} group_t;

#define GROUP_WIDTH 5
#define FUNCTION_WIDTH 10 /* numbers of a `lines.Function` */

typedef struct {
    int64_t lines, all_calls, calls, outer_ns, own_ns, work_ns, time_ns;
    int32_t node;
} function_t;

typedef struct {
    group_t *groups;
    uint32_t *table; /* of groups by function and row, one more than their number; 0 for none */
    size_t mask;
    int64_t count;
} groups_t;

static group_t *
group_of(groups_t *groups, int32_t function, int32_t row)
{
    size_t at = slot_of(function, row) & groups->mask;
    for (; groups->table[at] != 0; at = (at + 1) & groups->mask) {
        group_t *known = &groups->groups[groups->table[at] - 1];
        if (known->function == function && known->row == row)
            return known;
    }
    group_t *made = &groups->groups[groups->count];
    groups->table[at] = (uint32_t)++groups->count;
    *made = (group_t){.function = function, .row = row};
    return made;
}

static int
compare_groups(const void *left, const void *right)
{
    const group_t *a = left, *b = right;
    if (a->function != b->function)
        return a->function < b->function ? -1 : 1;
    if (a->weight != b->weight)
        return a->weight > b->weight ? -1 : 1;
    if (a->time_ns != b->time_ns)
        return a->time_ns > b->time_ns ? -1 : 1;
    if (a->calls != b->calls)
        return a->calls > b->calls ? -1 : 1;
    if (a->lines != b->lines)
        return a->lines > b->lines ? -1 : 1;
    return a->first > b->first ? -1 : a->first < b->first;
}

/* What a line adds to one function, and to its row there. -1: a number is too large. */
static int
add_to_function(function_t *function, group_t *group, const int64_t *line, int64_t at, int own, int work)
{
    int beyond = __builtin_add_overflow(function->time_ns, line[SELF], &function->time_ns);
    beyond |= __builtin_add_overflow(function->all_calls, line[CALLS], &function->all_calls);
    function->lines++;
    if (own) {
        beyond |= __builtin_add_overflow(function->calls, line[CALLS], &function->calls);
        beyond |= __builtin_add_overflow(function->outer_ns, line[TOTAL], &function->outer_ns);
        beyond |= __builtin_add_overflow(function->own_ns, line[SELF], &function->own_ns);
    }
    else if (work)
        beyond |= __builtin_add_overflow(function->work_ns, line[SELF], &function->work_ns);
    if (group->lines++ == 0)
        group->first = at;
    group->on_device += line[DEVICE] > 0;
    beyond |= __builtin_add_overflow(group->time_ns, line[SELF], &group->time_ns);
    beyond |= __builtin_add_overflow(group->calls, line[CALLS], &group->calls);
    return beyond ? -1 : 0;
}

/* The rows of functions, each with where its groups begin and how many there are, and all groups in their order. */
static PyObject *
functions_as_bytes(const function_t *functions, int32_t count, groups_t *groups, int column)
{
    for (int64_t g = 0; g < groups->count; g++) {
        group_t *group = &groups->groups[g];
        if (column != BY_TIME && (is_inexact(group->time_ns) || is_inexact(group->calls)))
            return Py_NewRef(Py_None);
        if (column != BY_TIME)
            group->weight = column == BY_CALLS ? (double)group->calls : (double)group->time_ns / (double)group->calls;
    }
    qsort(groups->groups, (size_t)groups->count, sizeof *groups->groups, compare_groups);
    PyObject *rows = PyBytes_FromStringAndSize(NULL, count * FUNCTION_WIDTH * (Py_ssize_t)sizeof(int64_t));
    PyObject *of_groups = PyBytes_FromStringAndSize(NULL, groups->count * GROUP_WIDTH * (Py_ssize_t)sizeof(int64_t));
    if (rows == NULL || of_groups == NULL) {
        Py_XDECREF(rows);
        Py_XDECREF(of_groups);
        return NULL;
    }
    int64_t *row = (int64_t *)PyBytes_AS_STRING(rows), *to = (int64_t *)PyBytes_AS_STRING(of_groups), g = 0;
    for (int32_t f = 0; f < count; f++, row += FUNCTION_WIDTH) {
        const function_t *its = &functions[f];
        int64_t first = g;
        for (; g < groups->count && groups->groups[g].function == f; g++, to += GROUP_WIDTH)
            memcpy(to, &groups->groups[g], GROUP_WIDTH * sizeof *to);
        const int64_t from[FUNCTION_WIDTH] = {
            its->node, its->lines, its->all_calls, its->calls, its->outer_ns, its->own_ns, its->work_ns, its->time_ns,
            first, g - first,
        };
        memcpy(row, from, sizeof from);
    }
    return Py_BuildValue("(NN)", rows, of_groups);
}

static PyObject *
functions(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *from[5], *of_lines, *found = NULL;
    column_t columns[5], lines; /* parents, sites, and of each site: flags, number of its key, row that it is in or -1 */
    int column;
    if (!PyArg_ParseTuple(args, "OOOOOOi", &of_lines, &from[0], &from[1], &from[2], &from[3], &from[4], &column) ||
        open_column(&lines, of_lines, WIDTH * sizeof(int64_t)) < 0)
        return NULL;
    if (open_columns(columns, from, 5) < 0) {
        close_columns(&lines, 1);
        return NULL;
    }
    const int32_t *parents = ITEMS(columns[0]), *site_of = ITEMS(columns[1]), *flags = ITEMS(columns[2]);
    const int32_t *keys = ITEMS(columns[3]), *rows = ITEMS(columns[4]);
    size_t nodes = (size_t)columns[0].count, sites = (size_t)columns[2].count, most = 2 * (size_t)lines.count, slots = 8;
    while (slots < 2 * most + 2)
        slots *= 2;
    int32_t *function_of = PyMem_RawMalloc((nodes + 1) * sizeof *function_of), *root_of = NULL, *number_of = NULL;
    char *called = PyMem_RawCalloc(nodes + 1, 1);
    function_t *known = PyMem_RawCalloc((size_t)lines.count + 1, sizeof *known);
    groups_t groups = {PyMem_RawMalloc((most + 1) * sizeof(group_t)), PyMem_RawCalloc(slots, sizeof(uint32_t)), slots - 1};
    root_of = PyMem_RawMalloc((nodes + 1) * sizeof *root_of);
    number_of = PyMem_RawCalloc(sites + 1, sizeof *number_of); /* of a function by its key; 0: none yet */
    if (function_of == NULL || root_of == NULL || number_of == NULL || called == NULL || known == NULL ||
        groups.groups == NULL || groups.table == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    int sound = columns[3].count == columns[2].count && columns[4].count == columns[2].count;
    for (size_t s = 0; sound && s < sites; s++)
        sound = keys[s] >= 0 && (size_t)keys[s] < sites;
    const int64_t *line = lines.items;
    for (Py_ssize_t i = 0; sound && i < lines.count; i++)
        sound = line[i * WIDTH + NODE] >= 0 && line[i * WIDTH + NODE] < (int64_t)nodes && line[i * WIDTH + CALLS] > 0;
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "these are no lines of calls of a tree");
        goto end;
    }
    if (check_tree(&columns[0], &columns[1], columns[2].count) < 0)
        goto end;
    for (int32_t n = 0; (size_t)n < nodes; n++) {
        int32_t above = parents[n], function = above < 0 ? -1 : function_of[above];
        int inside = function >= 0 && flags[site_of[function]] & REQUEST;
        function_of[n] = inside || (above >= 0 && !(flags[site_of[n]] & REQUEST)) ? function : n;
        root_of[n] = above < 0 ? n : root_of[above];
    }
    for (Py_ssize_t i = 0; i < lines.count; i++)
        called[line[i * WIDTH + NODE]] = 1;
    int32_t count = 1;
    int status = 0;
    known[0] = (function_t){.node = -1};
    for (int64_t i = 0; i < lines.count && status == 0; i++, line += WIDTH) {
        int32_t node = (int32_t)line[NODE], function = function_of[node], root = root_of[node];
        int32_t site = site_of[node], key = keys[site_of[function]];
        int32_t row = rows[site] < 0 ? (int32_t)i : rows[site];
        if (number_of[key] == 0) {
            known[count] = (function_t){.node = function};
            number_of[key] = count++;
        }
        int around = root != node && called[root];
        int work = (flags[site] & WORK) != 0;
        int own = function == node && !(around && keys[site_of[function_of[root]]] == key);
        status = add_to_function(&known[number_of[key]], group_of(&groups, number_of[key], row), line, i, own, work);
        own = function == node && !around;
        status |= add_to_function(&known[0], group_of(&groups, 0, row), line, i, own, work);
    }
    found = status != 0 ? Py_NewRef(Py_None) : functions_as_bytes(known, count, &groups, column);
end:
    PyMem_RawFree(function_of);
    PyMem_RawFree(root_of);
    PyMem_RawFree(number_of);
    PyMem_RawFree(called);
    PyMem_RawFree(known);
    PyMem_RawFree(groups.groups);
    PyMem_RawFree(groups.table);
    close_columns(columns, 5);
    close_columns(&lines, 1);
    return found;
}

/* ------------------------------------------------------------------ the module */

/* ---- sites */

static PyObject *text_name, *text_kind, *text_attributes;

/* Add a number to a list. 0, or -1 with an error. */
static int
append_number(PyObject *list, Py_ssize_t number)
{
    PyObject *item = PyLong_FromSsize_t(number);
    int done = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return done;
}

/* The number of the first site of a name, which is this one if no other was; -1 with an error. */
static Py_ssize_t
first_of(PyObject *known, PyObject *name, Py_ssize_t number)
{
    PyObject *own = PyLong_FromSsize_t(number), *first = own == NULL ? NULL : PyDict_SetDefault(known, name, own);
    Py_ssize_t found = first == NULL ? -1 : PyLong_AsSsize_t(first);
    Py_XDECREF(own);
    return found;
}

/* facts(sites, start, known): of the sites from a number on that of the first of the name, which `known` has, and the kind;
 * the numbers of those whose name another has before them, and of those with attributes. */
static PyObject *
facts(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sites, *known, *result = NULL;
    Py_ssize_t start;
    if (!PyArg_ParseTuple(args, "O!nO!:facts", &PyList_Type, &sites, &start, &PyDict_Type, &known))
        return NULL;
    PyObject *own = PyList_GetSlice(sites, start, PyList_GET_SIZE(sites));
    Py_ssize_t count = own == NULL ? 0 : PyList_GET_SIZE(own);
    PyObject *names = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int32_t)), *kinds = PyList_New(count);
    PyObject *repeated = PyList_New(0), *declared = PyList_New(0);
    if (own == NULL || names == NULL || kinds == NULL || repeated == NULL || declared == NULL)
        goto end;
    int32_t *first_of_name = (int32_t *)PyBytes_AS_STRING(names);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *site = PyList_GET_ITEM(own, i), *kind = PyObject_GetAttr(site, text_kind);
        PyObject *name = kind == NULL ? NULL : PyObject_GetAttr(site, text_name);
        PyObject *attributes = name == NULL ? NULL : PyObject_GetAttr(site, text_attributes);
        int has = attributes == NULL ? -1 : PyObject_IsTrue(attributes);
        Py_ssize_t first = has < 0 ? -1 : first_of(known, name, start + i);
        if (kind != NULL)
            PyList_SET_ITEM(kinds, i, kind);
        Py_XDECREF(name);
        Py_XDECREF(attributes);
        if (first < 0 || (first != start + i && append_number(repeated, start + i) < 0) ||
            (has && append_number(declared, start + i) < 0))
            goto end;
        first_of_name[i] = (int32_t)first;
    }
    result = Py_BuildValue("(OOOO)", names, kinds, repeated, declared);
end:
    Py_XDECREF(own);
    Py_XDECREF(names);
    Py_XDECREF(kinds);
    Py_XDECREF(repeated);
    Py_XDECREF(declared);
    return result;
}

/* shaped(sites, shapes, otherwise, site_of): of each node the number of its site's shape, and the shapes in a list. */
static PyObject *
shaped(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sites, *shapes, *otherwise, *nodes, *own = NULL, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!O!UO:shaped", &PyList_Type, &sites, &PyDict_Type, &shapes, &otherwise, &nodes))
        return NULL;
    column_t site_of;
    if (open_columns(&site_of, &nodes, 1) < 0)
        return NULL;
    PyObject *found = PyList_New(0), *bytes = PyBytes_FromStringAndSize(NULL, site_of.count * (Py_ssize_t)sizeof(int32_t));
    int32_t *of_site = NULL;
    own = PyList_GetSlice(sites, 0, PyList_GET_SIZE(sites));
    Py_ssize_t count = own == NULL ? 0 : PyList_GET_SIZE(own);
    of_site = PyMem_RawMalloc((size_t)(count + 1) * sizeof *of_site);
    if (own == NULL || found == NULL || bytes == NULL)
        goto end;
    if (of_site == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *shape = PyDict_GetItemWithError(shapes, PyList_GET_ITEM(own, i)); /* borrowed */
        if (shape == NULL && PyErr_Occurred())
            goto end;
        shape = Py_NewRef(shape == NULL ? otherwise : shape);
        Py_ssize_t number = 0, known = PyList_GET_SIZE(found);
        int same = 0;
        for (; number < known; number++) { /* they are few, and mostly the same object */
            same = shape == PyList_GET_ITEM(found, number) ||
                   PyObject_RichCompareBool(shape, PyList_GET_ITEM(found, number), Py_EQ);
            if (same)
                break;
        }
        if (same < 0 || (number == known && PyList_Append(found, shape) < 0)) {
            Py_DECREF(shape);
            goto end;
        }
        Py_DECREF(shape);
        of_site[i] = (int32_t)number;
    }
    int32_t *of_node = (int32_t *)PyBytes_AS_STRING(bytes);
    for (Py_ssize_t n = 0; n < site_of.count; n++) {
        int32_t site = ITEMS(site_of)[n];
        if (site < 0 || site >= count) {
            PyErr_SetString(PyExc_ValueError, "a node of a site that there is not");
            goto end;
        }
        of_node[n] = of_site[site];
    }
    result = Py_BuildValue("(OO)", bytes, found);
end:
    PyMem_RawFree(of_site);
    Py_XDECREF(own);
    Py_XDECREF(found);
    Py_XDECREF(bytes);
    close_columns(&site_of, 1);
    return result;
}

static PyMethodDef methods[] = {
    {"places", places, METH_VARARGS, "The places of the parents of nodes and of the nodes, and which share one."},
    {"tree_of_names", tree_of_names, METH_VARARGS, "The entries of a tree of names, and those that nodes count in."},
    {"sums", sums, METH_VARARGS, "Lines added up by group."},
    {"together", together, METH_VARARGS, "Some of many sums as one."},
    {"chained", chained, METH_VARARGS, "The numbers along the links from the last of each entry."},
    {"values", values, METH_VARARGS, "A value for each entry with calls at or under it."},
    {"heaviest", heaviest, METH_VARARGS, "The heaviest of some entries."},
    {"parted", parted, METH_VARARGS, "Those of a set among some entries, and the others."},
    {"has", has, METH_VARARGS, "Whether a number of any line is not 0."},
    {"topmost", topmost, METH_VARARGS, "Group 0 for marked nodes under no marked one, -1 for others."},
    {"device_below", device_below, METH_VARARGS, "Of each node what device time there is more below it."},
    {"functions", functions, METH_VARARGS, "Self times by function and row."},
    {"facts", facts, METH_VARARGS, "What every report asks of sites."},
    {"shaped", shaped, METH_VARARGS, "The shapes of the probes of nodes."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._lines",
    .m_doc = "The lines of a tally in C. See `instrument.recording.lines`.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__lines(void)
{
    text_name = PyUnicode_InternFromString("name");
    text_kind = PyUnicode_InternFromString("kind");
    text_attributes = PyUnicode_InternFromString("attributes");
    if (text_name == NULL || text_kind == NULL || text_attributes == NULL)
        return NULL;
    return PyModule_Create(&definition);
}
