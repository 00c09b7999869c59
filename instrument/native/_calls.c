/* The places of calls in C: the twin of `_Reader` in `calls.py`, which says what it means. */

#include "_below.h"

static PyTypeObject *span_type, *interval_type;
static PyObject *text_exclusive, *text_kind;

#define CLIMBING (NOWHERE - 1)
#define ROOT NOWHERE

typedef struct {
    uint32_t parent; /* the place around it, ROOT for none */
    uint32_t site;
    int64_t thread_id;
    char elsewhere, wanted, inside; /* `elsewhere`: it begins a line */
    int64_t calls, host_max_ns, host_min_ns, first_ns, device_calls, device_max_ns, device_min_ns;
    wide_t host_ns, device_ns;
} spot_t;

typedef struct {
    PyObject *site;
    char of_kinds;
} known_t;

typedef struct {
    uint32_t spot, pair; /* a place, and the number of a device and stream */
    int64_t count, most_ns, least_ns;
    wide_t total_ns;
} use_t;

typedef struct {
    int64_t device, stream;
} pair_t;

typedef struct {
    PyObject *own, *kinds, *untimed;
    int64_t first, last;
    int has_tasks;
    table_t by_id, parents, sites, children, elsewhere, threads, lanes, devices, streams, pairs, uses;
    heap_t spots, known, of_pairs, of_uses, held, climbed, call;
    uint32_t *placed; /* the place of the span that stands for an id, by its number */
} tree_t;

#define SPAN(i) ((Span *)PyTuple_GET_ITEM(tree->own, i))
#define SPOT(i) (&((spot_t *)tree->spots.items)[i])
#define KNOWN(i) (&((known_t *)tree->known.items)[i])

/* The number of a site, NOWHERE with an error. */
static uint32_t
number_of(tree_t *tree, PyObject *site)
{
    uint32_t number = numbered(&tree->sites, (int64_t)(intptr_t)site);
    if (number == NOWHERE) {
        PyErr_NoMemory();
        return NOWHERE;
    }
    if (number < tree->known.used)
        return number;
    known_t *made = heap_next(&tree->known, sizeof *made);
    if (made == NULL) {
        PyErr_NoMemory();
        return NOWHERE;
    }
    *made = (known_t){Py_NewRef(site), 0};
    PyObject *kind = PyObject_GetAttr(site, text_kind);
    int is = kind == NULL ? -1 : PySequence_Contains(tree->kinds, kind);
    Py_XDECREF(kind);
    if (is < 0)
        return NOWHERE;
    KNOWN(number)->of_kinds = (char)is;
    return number;
}

/* The place of a site below another, or where it begins a line there, made on first sight. NOWHERE with an error. */
static uint32_t
spot_below(tree_t *tree, uint32_t around, PyObject *site, int64_t thread_id, int elsewhere)
{
    uint32_t of_site = number_of(tree, site);
    if (of_site == NOWHERE)
        return NOWHERE;
    uint32_t *cell;
    if (elsewhere) {
        uint32_t thread = numbered(&tree->threads, thread_id);
        uint32_t lane = thread == NOWHERE ? NOWHERE : numbered(&tree->lanes, PAIR(of_site, thread));
        cell = lane == NOWHERE ? NULL : table_cell(&tree->elsewhere, PAIR(around, lane));
    } else
        cell = table_cell(&tree->children, PAIR(around, of_site));
    if (cell == NULL)
        goto no_memory;
    if (*cell != NOWHERE)
        return *cell;
    uint32_t number = *cell = (uint32_t)tree->spots.used;
    spot_t *made = heap_next(&tree->spots, sizeof *made);
    if (made == NULL)
        goto no_memory;
    memset(made, 0, sizeof *made);
    made->parent = around;
    made->site = of_site;
    made->thread_id = thread_id;
    made->elsewhere = (char)elsewhere;
    made->first_ns = made->host_min_ns = made->device_min_ns = INT64_MAX;
    spot_t *above = elsewhere || around == ROOT ? NULL : SPOT(around);
    int below_one = above != NULL && KNOWN(above->site)->of_kinds;
    made->wanted = (char)(KNOWN(of_site)->of_kinds || below_one);
    made->inside = (char)(below_one || (above != NULL && above->inside));
    return number;
no_memory:
    PyErr_NoMemory();
    return NOWHERE;
}

/* The place of a span by way of its ancestors, which get theirs. NOWHERE with an error. */
static uint32_t
climb(tree_t *tree, Span *span)
{
    tree->climbed.used = 0;
    uint32_t up = table_get(&tree->by_id, span->parent_id);
    while (up != NOWHERE && tree->placed[up] == NOWHERE && SPAN(up)->span_id != span->span_id) {
        uint32_t *next = heap_next(&tree->climbed, sizeof *next);
        if (next == NULL) {
            PyErr_NoMemory();
            return NOWHERE;
        }
        *next = up;
        tree->placed[up] = CLIMBING; /* ids of a damaged file may run in a circle */
        up = table_get(&tree->by_id, SPAN(up)->parent_id);
    }
    uint32_t spot = ROOT;
    for (size_t left = tree->climbed.used + 1; left-- > 0;) {
        uint32_t slot = left == 0 ? NOWHERE : ((uint32_t *)tree->climbed.items)[left - 1];
        Span *one = slot == NOWHERE ? span : SPAN(slot);
        uint32_t above = table_get(&tree->by_id, one->parent_id), around = ROOT;
        if (above != NOWHERE && tree->placed[above] < CLIMBING)
            around = tree->placed[above];
        int elsewhere = above == NOWHERE || SPAN(above)->thread_id != one->thread_id ||
                        SPAN(above)->task_id != one->task_id;
        spot = spot_below(tree, around, one->site, one->thread_id, elsewhere);
        if (spot == NOWHERE)
            return NOWHERE;
        if (slot != NOWHERE)
            tree->placed[slot] = spot;
    }
    return spot;
}

static void
took(spot_t *spot, int64_t device_ns)
{
    spot->device_calls++;
    spot->device_ns += device_ns;
    spot->device_max_ns = device_ns > spot->device_max_ns ? device_ns : spot->device_max_ns;
    spot->device_min_ns = device_ns < spot->device_min_ns ? device_ns : spot->device_min_ns;
}

/* Count a stretch for the stream of a place. 0, or -1 without memory. */
static int
use_stream(tree_t *tree, uint32_t spot, Interval *interval, int64_t took_ns)
{
    uint32_t device = numbered(&tree->devices, interval->device), stream = numbered(&tree->streams, interval->stream);
    uint32_t pair = device == NOWHERE || stream == NOWHERE ? NOWHERE : numbered(&tree->pairs, PAIR(device, stream));
    uint32_t use = pair == NOWHERE ? NOWHERE : numbered(&tree->uses, PAIR(spot, pair));
    if (use == NOWHERE)
        return -1;
    if (pair == tree->of_pairs.used) {
        pair_t *made = heap_next(&tree->of_pairs, sizeof *made);
        if (made == NULL)
            return -1;
        *made = (pair_t){interval->device, interval->stream};
    }
    if (use == tree->of_uses.used) {
        use_t *made = heap_next(&tree->of_uses, sizeof *made);
        if (made == NULL)
            return -1;
        *made = (use_t){spot, pair, 0, took_ns, took_ns, 0};
    }
    use_t *own = &((use_t *)tree->of_uses.items)[use];
    own->count++;
    own->total_ns += took_ns;
    own->most_ns = took_ns > own->most_ns ? took_ns : own->most_ns;
    own->least_ns = took_ns < own->least_ns ? took_ns : own->least_ns;
    return 0;
}

/* Keep the stretches of the call at hand for the calls at and around a span. 0, or -1 without memory. */
static int
hold(tree_t *tree, uint32_t number)
{
    for (size_t i = 0; i < tree->call.used; i++) {
        held_t *next = heap_next(&tree->held, sizeof *next);
        if (next == NULL)
            return -1;
        *next = (held_t){number, ((stretch_t *)tree->call.items)[i]};
    }
    return 0;
}

/* An interval of a span: 1 if it is timed, 0 if not, -1 with an error, -2 if it is not plain. */
static int
is_timed(const tree_t *tree, PyObject *interval)
{
    if (!Py_IS_TYPE(interval, interval_type))
        return -2;
    PyObject *label = ((Interval *)interval)->label;
    if (label == NULL || label == text_exclusive)
        return 1;
    if (!PyUnicode_CheckExact(label))
        return -2;
    int untimed = PySet_Contains(tree->untimed, label);
    return untimed < 0 ? -1 : !untimed;
}

/* Whether a span has one device interval that holds all stretches of the call at hand: 1 or 0, or as `is_timed`. */
static int
encloses(const tree_t *tree, const Span *span)
{
    if (span->device == NULL || !PyTuple_CheckExact(span->device) || PyTuple_GET_SIZE(span->device) != 1)
        return span->device == NULL || PyTuple_CheckExact(span->device) ? 0 : -2;
    PyObject *own = PyTuple_GET_ITEM(span->device, 0);
    int timed = is_timed(tree, own);
    for (size_t i = 0; timed == 1 && i < tree->call.used; i++) {
        stretch_t *part = &((stretch_t *)tree->call.items)[i];
        timed = ((Interval *)own)->start_ns <= part->start && part->end <= ((Interval *)own)->end_ns;
    }
    return timed;
}

/* Give the device intervals of a span to its call and to those around it that are asked for. `own` is the number of a span
 * that is a parent, else NOWHERE. 1; 0 where they are not plain; -1 with an error. */
static int
take_device(tree_t *tree, Span *span, uint32_t number, uint32_t own)
{
    if (!PyTuple_CheckExact(span->device))
        return 0;
    tree->call.used = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(span->device); i++) {
        Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, i);
        int timed = is_timed(tree, (PyObject *)interval);
        if (timed < 0)
            return timed == -2 ? 0 : -1;
        if (!timed)
            continue;
        int64_t start = interval->start_ns, end = interval->end_ns, took_ns;
        if (start < tree->first || end > tree->last) {
            if (lies_outside(start, end, tree->first, tree->last))
                continue;
            start = start > tree->first ? start : tree->first;
            end = end < tree->last ? end : tree->last;
        }
        if (__builtin_sub_overflow(end, start, &took_ns) || took_ns < 0)
            return 0;
        stretch_t *part = heap_next(&tree->call, sizeof *part);
        if (part == NULL || use_stream(tree, number, interval, took_ns) < 0)
            goto no_memory;
        *part = (stretch_t){start, end};
    }
    if (tree->call.used == 0)
        return 1;
    if (own != NOWHERE) {
        if (hold(tree, own) < 0)
            goto no_memory;
        return 1;
    }
    if (SPOT(number)->wanted) {
        sort_stretches((stretch_t *)tree->call.items, tree->call.used);
        wide_t length = united((stretch_t *)tree->call.items, tree->call.used);
        if (length > INT64_MAX)
            return 0;
        took(SPOT(number), (int64_t)length);
    }
    uint32_t up = number_around(tree->own, &tree->by_id, span);
    if (up == NOWHERE)
        return 1;
    int inside = lies_outside(SPAN(up)->start_ns, SPAN(up)->end_ns, tree->first, tree->last) ? 0 : encloses(tree, SPAN(up));
    if (inside < 0)
        return inside == -2 ? 0 : -1;
    if (inside || hold(tree, up) == 0)
        return 1;
no_memory:
    PyErr_NoMemory();
    return -1;
}

/* Count one span: 1, 0 where it is not plain, -1 with an error. */
static int
count_span(tree_t *tree, Span *span)
{
    int64_t start = span->start_ns, end = span->end_ns, host_ns;
    if (start < tree->first || end > tree->last) {
        if (lies_outside(start, end, tree->first, tree->last))
            return 1;
        start = start > tree->first ? start : tree->first;
        end = end < tree->last ? end : tree->last;
    }
    if (__builtin_sub_overflow(end, start, &host_ns) || host_ns < 0)
        return 0;
    uint32_t above = table_get(&tree->by_id, span->parent_id), number = NOWHERE;
    if (above != NOWHERE && tree->placed[above] < CLIMBING && SPOT(tree->placed[above])->thread_id == span->thread_id &&
        (!tree->has_tasks || SPAN(above)->task_id == span->task_id)) {
        uint32_t site = number_of(tree, span->site);
        if (site == NOWHERE)
            return -1;
        number = table_get(&tree->children, PAIR(tree->placed[above], site));
    }
    if (number == NOWHERE)
        number = climb(tree, span);
    if (number == NOWHERE)
        return -1;
    uint32_t own = table_get(&tree->parents, span->span_id) == NOWHERE ? NOWHERE : table_get(&tree->by_id, span->span_id);
    if (own != NOWHERE) /* also one that has been given an id meanwhile that no span had */
        tree->placed[own] = number;
    spot_t *spot = SPOT(number);
    spot->calls++;
    spot->host_ns += host_ns;
    spot->host_max_ns = host_ns > spot->host_max_ns ? host_ns : spot->host_max_ns;
    spot->host_min_ns = host_ns < spot->host_min_ns ? host_ns : spot->host_min_ns;
    spot->first_ns = start < spot->first_ns ? start : spot->first_ns;
    if (span->device == NULL || !(spot->wanted || spot->inside))
        return 1;
    return take_device(tree, span, number, own);
}

static int
is_wanted(const void *with, uint32_t number)
{
    const tree_t *tree = with;
    return tree->placed[number] < CLIMBING && SPOT(tree->placed[number])->wanted;
}

/* What calls have of stretches of their own and of calls below them: unions of each. 1, 0 where a sum is beyond 64 bits,
 * -1 without memory. */
static int
take_held(tree_t *tree)
{
    below_t below = {.own = tree->own, .by_id = &tree->by_id, .is_call = is_wanted, .with = tree}, *all = &below;
    int plain = below_make(all) < 0 || settle(all, &tree->held) < 0 ? -1 : 1;
    for (size_t i = 0; plain > 0 && i < all->calls.used; i++) {
        const call_t *call = CALL(i);
        if (lies_outside(SPAN(call->span)->start_ns, SPAN(call->span)->end_ns, tree->first, tree->last))
            continue;
        plain = call->length <= INT64_MAX;
        if (plain)
            took(SPOT(tree->placed[call->span]), (int64_t)call->length);
        give_way(i);
    }
    below_free(all);
    if (plain < 0)
        PyErr_NoMemory();
    return plain;
}

/* ([a place as `Place.of_row` takes it], [(place, device, stream, count, sum, greatest, least)]) */
static PyObject *
found(tree_t *tree)
{
    PyObject *spots = PyList_New(0), *uses = PyList_New(0);
    int done = spots == NULL || uses == NULL ? -1 : 0;
    for (size_t i = 0; done == 0 && i < tree->spots.used; i++) {
        spot_t *spot = SPOT(i);
        PyObject *item = Py_BuildValue(
            "(LOLOLNLLLLNLL)", spot->parent == ROOT ? -1LL : (long long)spot->parent, KNOWN(spot->site)->site,
            spot->thread_id, spot->elsewhere ? Py_True : Py_False, spot->calls, wide_as_long(spot->host_ns),
            spot->host_max_ns, spot->host_min_ns, spot->first_ns, spot->device_calls, wide_as_long(spot->device_ns),
            spot->device_max_ns, spot->device_min_ns);
        done = item == NULL ? -1 : PyList_Append(spots, item);
        Py_XDECREF(item);
        give_way(i);
    }
    for (size_t i = 0; done == 0 && i < tree->of_uses.used; i++) {
        use_t *use = &((use_t *)tree->of_uses.items)[i];
        pair_t *pair = &((pair_t *)tree->of_pairs.items)[use->pair];
        PyObject *item = Py_BuildValue("(ILLLNLL)", use->spot, pair->device, pair->stream, use->count,
                                       wide_as_long(use->total_ns), use->most_ns, use->least_ns);
        done = item == NULL ? -1 : PyList_Append(uses, item);
        Py_XDECREF(item);
        give_way(i);
    }
    if (done == 0)
        return Py_BuildValue("(NN)", spots, uses);
    Py_XDECREF(spots);
    Py_XDECREF(uses);
    return NULL;
}

/* places(spans, kinds, first_ns, last_ns, untimed): what `call_tree` makes its tree of. None where they are not plain. */
static PyObject *
places(PyObject *Py_UNUSED(module), PyObject *args)
{
    tree_t all = {0}, *tree = &all;
    PyObject *spans, *result = NULL;
    long long first, last;
    if (!PyArg_ParseTuple(args, "OOLLO!:places", &spans, &tree->kinds, &first, &last, &PyFrozenSet_Type, &tree->untimed))
        return NULL;
    tree->own = spans_of_type(spans, span_type);
    if (tree->own == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    tree->first = first;
    tree->last = last;
    size_t total = (size_t)PyTuple_GET_SIZE(tree->own);
    table_t *small[] = {&tree->sites, &tree->children, &tree->elsewhere, &tree->threads, &tree->lanes,
                        &tree->devices, &tree->streams, &tree->pairs, &tree->uses, &tree->parents};
    int made = table_make(&tree->by_id, total), plain = 1;
    for (size_t i = 0; made == 0 && i < sizeof small / sizeof *small; i++)
        made = table_make(small[i], 64);
    tree->placed = PyMem_RawMalloc((total + 1) * sizeof *tree->placed);
    if (made < 0 || tree->placed == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    memset(tree->placed, 0xFF, (total + 1) * sizeof *tree->placed);
    for (size_t i = 0; i < total; i++) {
        Span *span = SPAN(i);
        *table_cell(&tree->by_id, span->span_id) = (uint32_t)i; /* it has room for all; the last of an id stands for it */
        tree->has_tasks |= span->task_id != 0;
        if (numbered(&tree->parents, span->parent_id) == NOWHERE) {
            PyErr_NoMemory();
            goto end;
        }
        give_way(i);
    }
    for (size_t i = 0; plain && i < total; i++) {
        plain = count_span(tree, SPAN(i));
        if (plain < 0)
            goto end;
        give_way(i);
    }
    if (plain)
        plain = take_held(tree);
    if (plain >= 0)
        result = plain ? found(tree) : Py_NewRef(Py_None);
end:
    for (size_t i = 0; i < tree->known.used; i++)
        Py_DECREF(KNOWN(i)->site);
    for (size_t i = 0; i < sizeof small / sizeof *small; i++)
        table_free(small[i]);
    table_free(&tree->by_id);
    heap_t *heaps[] = {&tree->spots, &tree->known, &tree->of_pairs, &tree->of_uses, &tree->held, &tree->climbed,
                       &tree->call};
    for (size_t i = 0; i < sizeof heaps / sizeof *heaps; i++)
        PyMem_RawFree(heaps[i]->items);
    PyMem_RawFree(tree->placed);
    Py_DECREF(tree->own);
    return result;
}

/* Number a span, after those around it on its line that have no number yet: `climbed` are these, and `arounds` the number of
 * the one right around each, NOWHERE for none. 0, or -1 with an error. */
static int
take_line(PyObject *own, const table_t *by_id, table_t *numbers, PyObject *nodes, heap_t *arounds, heap_t *climbed, Span *span)
{
    uint32_t around = NOWHERE;
    climbed->used = 0;
    for (Span *one = span;;) {
        uint32_t *number = table_cell(numbers, (int64_t)(intptr_t)one);
        Span **step = number == NULL || *number != NOWHERE ? NULL : heap_next(climbed, sizeof *step);
        if (number == NULL || (step == NULL && *number == NOWHERE)) {
            PyErr_NoMemory();
            return -1;
        }
        if (step == NULL) { /* CLIMBING: parents of a damaged file may run in a circle */
            around = *number == CLIMBING ? NOWHERE : *number;
            break;
        }
        *step = one;
        *number = CLIMBING;
        uint32_t up = number_around(own, by_id, one);
        if (up == NOWHERE)
            break;
        one = (Span *)PyTuple_GET_ITEM(own, up);
    }
    while (climbed->used > 0) {
        Span *one = ((Span **)climbed->items)[--climbed->used];
        uint32_t *place = heap_next(arounds, sizeof *place);
        if (place == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        *place = around;
        around = (uint32_t)PyList_GET_SIZE(nodes);
        numbers->values[table_place(numbers, (int64_t)(intptr_t)one)] = around;
        if (PyList_Append(nodes, (PyObject *)one) < 0)
            return -1;
    }
    return 0;
}

/* lines(spans, some): some of the spans and those around them on their lines, each once and after the one right around it,
 * and the number of that one of each, as one of 32 bits: -1 for none. None where they are not plain. */
static PyObject *
lines(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *chosen, *nodes = NULL, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO:lines", &spans, &chosen))
        return NULL;
    PyObject *own = spans_of_type(spans, span_type), *some = own == NULL ? NULL : spans_of_type(chosen, span_type);
    table_t by_id = {0}, numbers = {0}; /* by the address of a span, which `own` and `some` hold */
    heap_t arounds = {0}, climbed = {0};
    if (some == NULL || (nodes = PyList_New(0)) == NULL || number_by_id(own, &by_id) < 0)
        goto end;
    int done = table_make(&numbers, 64);
    if (done < 0)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; done == 0 && i < PyTuple_GET_SIZE(some); i++) {
        done = take_line(own, &by_id, &numbers, nodes, &arounds, &climbed, (Span *)PyTuple_GET_ITEM(some, i));
        give_way((size_t)i);
    }
    if (done == 0)
        result = Py_BuildValue("(ON)", nodes, heap_bytes(&arounds, sizeof(uint32_t)));
end:
    if (result == NULL && !PyErr_Occurred())
        result = Py_NewRef(Py_None);
    table_free(&by_id);
    table_free(&numbers);
    PyMem_RawFree(arounds.items);
    PyMem_RawFree(climbed.items);
    Py_XDECREF(nodes);
    Py_XDECREF(some);
    Py_XDECREF(own);
    return result;
}

/* Hold the timed intervals of spans for the calls at and around them. 1, 0 where they are not plain, -1 with an error. */
static int
hold_all(below_t *all, PyObject *untimed, heap_t *held)
{
    tree_t labels = {.untimed = untimed};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all->own); i++) {
        const Span *span = (Span *)PyTuple_GET_ITEM(all->own, i);
        give_way((size_t)i);
        if (span->device == NULL)
            continue;
        if (!PyTuple_CheckExact(span->device))
            return 0;
        uint32_t number = table_get(all->by_id, span->span_id), call;
        if (number == NOWHERE)
            return 0; /* somebody changed an id meanwhile */
        if (find_call(all, number, &call) < 0) {
            PyErr_NoMemory();
            return -1;
        }
        if (call == NOWHERE)
            continue;
        for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(span->device); n++) {
            const Interval *interval = (Interval *)PyTuple_GET_ITEM(span->device, n);
            int timed = is_timed(&labels, (PyObject *)interval);
            if (timed < 0)
                return timed == -2 ? 0 : -1;
            if (!timed || interval->end_ns <= interval->start_ns)
                continue;
            held_t *next = heap_next(held, sizeof *next);
            if (next == NULL) {
                PyErr_NoMemory();
                return -1;
            }
            *next = (held_t){call, {interval->start_ns, interval->end_ns}};
        }
    }
    return 1;
}

typedef struct {
    PyObject *own;
    table_t ids;
} asked_t;

static int
is_asked(const void *with, uint32_t number)
{
    const asked_t *asked = with;
    return table_get(&asked->ids, ((Span *)PyTuple_GET_ITEM(asked->own, number))->span_id) != NOWHERE;
}

/* device_ns(spans, ids, untimed): what `device_ns` in `calls.py` finds of the calls of these ids. None where spans are not
 * plain. */
static PyObject *
device_ns(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *spans, *ids, *untimed, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO!O!:device_ns", &spans, &PyTuple_Type, &ids, &PyFrozenSet_Type, &untimed))
        return NULL;
    table_t by_id = {0};
    heap_t held = {0};
    asked_t asked = {spans_of_type(spans, span_type), {0}};
    below_t below = {.own = asked.own, .by_id = &by_id, .is_call = is_asked, .with = &asked}, *all = &below;
    if (asked.own == NULL || number_by_id(asked.own, &by_id) < 0)
        goto end;
    if (table_make(&asked.ids, (size_t)PyTuple_GET_SIZE(ids)) < 0 || below_make(all) < 0) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ids); i++) {
        long long id = PyLong_AsLongLong(PyTuple_GET_ITEM(ids, i));
        if (id == -1 && PyErr_Occurred())
            goto end;
        *table_cell(&asked.ids, id) = (uint32_t)i; /* it has room for all */
    }
    if (hold_all(all, untimed, &held) <= 0)
        goto end;
    if (settle(all, &held) < 0) {
        PyErr_NoMemory();
        goto end;
    }
    result = PyDict_New();
    for (size_t i = 0; result != NULL && i < all->calls.used; i++) {
        PyObject *id = PyLong_FromLongLong(((Span *)PyTuple_GET_ITEM(asked.own, CALL(i)->span))->span_id);
        PyObject *length = wide_as_long(CALL(i)->length);
        if (id == NULL || length == NULL || PyDict_SetItem(result, id, length) < 0)
            Py_CLEAR(result);
        Py_XDECREF(id);
        Py_XDECREF(length);
    }
end:
    if (result == NULL && !PyErr_Occurred())
        result = Py_NewRef(Py_None);
    below_free(all);
    table_free(&by_id);
    table_free(&asked.ids);
    PyMem_RawFree(held.items);
    Py_XDECREF(asked.own);
    return result;
}

static PyMethodDef functions[] = {
    {"places", places, METH_VARARGS, "Sums over the calls of each place in the call tree, and over each stream's part."},
    {"lines", lines, METH_VARARGS, "Some spans and those around them on their lines, each once."},
    {"device_ns", device_ns, METH_VARARGS, "How long devices worked for calls and for what is below them on their lines."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._calls",
    .m_doc = "Calls by their place, in C. See `instrument.report.calls`.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__calls(void)
{
    text_exclusive = PyUnicode_InternFromString("exclusive");
    text_kind = PyUnicode_InternFromString("kind");
    if (text_exclusive == NULL || text_kind == NULL || import_spans(&span_type, &interval_type) < 0)
        return NULL;
    return PyModule_Create(&definition);
}
