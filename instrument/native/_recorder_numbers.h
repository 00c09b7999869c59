/* Hot: the numbers that the service reports. The recording has a cell with the newest value of each, and once per
 * interval a copy of the cell for timelines. A histogram has a cell for its sum and one for each bucket in use, with
 * four buckets per factor of two, as in `recording/metric_definitions.py`. A part of `_recorder.c`. */

/* Values beyond the exponents count in the outermost buckets. */
enum { LEAST_EXPONENT = -32, MOST_EXPONENT = 34, BUCKET_OF_ZERO = -(1 << 20) };

typedef struct {
    PyObject_HEAD
    Core *core;
    number_t *cell; /* NULL if the recording has no room */
    uint64_t uid;   /* the core's uid when the cell was taken */
    int64_t due_ns, every_ns; /* the time of the next copy for timelines, and the interval of copies */
    char kind; /* the first letter of the word gauge, counter or sum, with which the name ends */
    char name[sizeof(((number_t *)0)->name)];
    /* The cells of the buckets, counted from 1; 0 if there is none. */
    uint16_t buckets[4 * (MOST_EXPONENT - LEAST_EXPONENT + 1) + 1];
} Number;

/* Take a cell without a value. Return NULL without room. */
static number_t *take_number(Core *core, const char *name)
{
    memory_t *memory = core->memory;
    if (memory == NULL || memory->numbers >= NEWEST_NUMBERS || memory->at->parts[PART_NUMBERS].slots <= NEWEST_NUMBERS)
        return NULL;
    number_t *cell = newest_number(memory, memory->numbers++);
    cell->value = 0;
    memcpy(cell->name, name, sizeof cell->name);
    return cell;
}

/* Count a value in its bucket. Return false without room. */
static int count_in_bucket(Number *self, double value, int64_t now_ns)
{
    int exponent, bucket = BUCKET_OF_ZERO, at = 0;
    if (value > 0) {
        int eighth = (int)(frexp(value, &exponent) * 8);
        exponent = exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent > MOST_EXPONENT ? MOST_EXPONENT : exponent;
        bucket = exponent * 8 + eighth;
        at = (exponent - LEAST_EXPONENT) * 4 + eighth - 3;
    }
    if (self->buckets[at] == 0) {
        char name[sizeof self->name + 16] = {0};
        const char *kind = strrchr(self->name, '\n') + 1;
        snprintf(name, sizeof name, "%.*s%d", (int)(kind - self->name), self->name, bucket);
        number_t *cell = take_number(self->core, name);
        if (cell == NULL)
            return 0;
        cell->at_ns = now_ns;
        self->buckets[at] = (uint16_t)self->core->memory->numbers;
    }
    newest_number(self->core->memory, self->buckets[at] - 1u)->value += 1;
    return 1;
}

/* Report a value that is not kept to Python, which counts it. Return None, NULL with an exception of the service
 * set. */
static SELDOM PyObject *refuse_value(Number *self, PyObject *value)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Clear();
    PyObject *none = PyObject_CallMethod((PyObject *)self, "refuse", "O", value);
    return none != NULL ? none : clear_fault() < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *store_value(Number *self, char kind, PyObject *value)
{
    Core *core = self->core;
    if (!core->on)
        Py_RETURN_NONE;
    /* The conversion comes first, because it may run code of the service. */
    double amount = PyLong_CheckExact(value) ? PyLong_AsDouble(value) : PyFloat_AsDouble(value);
    if (!isfinite(amount) || (amount < 0 && kind == 'c') || (amount == -1 && PyErr_Occurred()) || self->kind != kind)
        return refuse_value(self, value);
    if (self->uid != core->uid) {
        self->cell = take_number(core, self->name);
        self->uid = core->uid;
        self->due_ns = 0;
        memset(self->buckets, 0, sizeof self->buckets);
    }
    number_t *cell = self->cell;
    int64_t now_ns = read_clock(core);
    if (cell == NULL || (kind == 's' && !count_in_bucket(self, amount, now_ns)))
        return refuse_value(self, value);
    cell->value = kind == 'g' ? amount : cell->value + (amount > 0 ? amount : 0);
    cell->at_ns = now_ns;
    if (now_ns >= self->due_ns) {
        self->due_ns = now_ns + self->every_ns;
        part_t *part = &core->memory->at->parts[PART_NUMBERS];
        uint64_t slot = part->used % (part->slots - NEWEST_NUMBERS);
        memcpy(part_at(core->memory, PART_NUMBERS) + slot * part->stride, cell, sizeof *cell);
        part->used++;
    }
    Py_RETURN_NONE;
}

static PyObject *Number_set(Number *self, PyObject *value)
{
    return store_value(self, 'g', value);
}

static PyObject *Number_add(Number *self, PyObject *const *args, Py_ssize_t nargs)
{
    static PyObject *by_default;
    if (nargs == 0 && (by_default != NULL || (by_default = PyFloat_FromDouble(1)) != NULL))
        return store_value(self, 'c', by_default);
    return nargs == 1 ? store_value(self, 'c', args[0]) : PyErr_Format(PyExc_TypeError, "add takes one amount, not %zd", nargs);
}

static PyObject *Number_record(Number *self, PyObject *value)
{
    return store_value(self, 's', value);
}

static int Number_init(Number *self, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *core;
    const char *name;
    long long every_ns;
    if (!PyArg_ParseTuple(args, "O!yL:Number", &CoreType, &core, &name, &every_ns))
        return -1;
    const char *kind = strrchr(name, '\n'); /* an empty name has none: such a number refuses each value */
    self->kind = kind != NULL ? kind[1] : 0;
    strncpy(self->name, name, sizeof self->name - 1);
    self->every_ns = every_ns;
    Py_XSETREF(self->core, (Core *)Py_NewRef(core));
    return 0;
}

static void Number_dealloc(Number *self)
{
    Py_XDECREF(self->core);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Number_methods[] = {
    METHOD(Number, set, METH_O, "set($self, value, /)\n--\n\nSet the value of a gauge. Never raises."),
    METHOD(Number, add, METH_FASTCALL,
           "add($self, amount=1, /)\n--\n\nAdd an amount from 0 on to a counter. Never raises."),
    METHOD(Number, record, METH_O, "record($self, value, /)\n--\n\nCount a value in a histogram. Never raises."),
    {NULL},
};

static PyTypeObject NumberType = {
    RECORDER_TYPE(Number, sizeof(Number), Py_TPFLAGS_BASETYPE),
    .tp_doc = "A number of the service's own.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Number_init,
    .tp_methods = Number_methods,
};
