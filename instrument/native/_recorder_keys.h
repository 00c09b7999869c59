/* Hot: the keys of the requests that a call serves, from its arguments or its result. Cold, at the end: the type. A
 * part of `_recorder.c`. Only the usual paths: attributes and keys of plain dicts, down to texts or numbers, or to
 * lists, tuples and dicts of them. All others are left to `otherwise`, which reads again and reports unreadable values:
 * see arguments.py. */

#define KEY_LIMIT 128 /* characters: as in spans.py */

/* The path to keys below a value: the names of its steps, NULL for none, and of the steps from each item, None without
 * items. */
typedef struct {
    PyObject *steps, *of_each;
} key_path_t;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *made_of;             /* its arguments, which own all that follows */
    PyObject *parameter;           /* the argument's name, None of what reads results */
    Py_ssize_t position;           /* of the argument, -1 without one */
    key_path_t keys, weights;      /* weights without steps are those of a dict of keys */
    PyObject *weighed;             /* the argument that weights are in, None for that of the keys */
    Py_ssize_t weighed_position;
    PyObject *cut;                 /* a dict from a raw key to its text, made on demand, or None */
    PyObject *otherwise;
    int is_batch;                  /* FACTS_OF_REQUEST for what else is read of one: `keys` has paths, and their names;
                                    * `cut` what all of them have in common, `weighed` the reader before, None without */
} Keys;

#define FACTS_OF_REQUEST 2
#define FACT_TEXT_LIMIT 256 /* characters: `VALUE_LIMIT` of spans.py */

/* Return the object below a value: a new reference. NULL if it is not plain, with or without an exception. */
static PyObject *part_below(PyObject *value, PyObject *steps)
{
    Py_INCREF(value);
    for (Py_ssize_t i = 0; steps != NULL && value != NULL && i < PyTuple_GET_SIZE(steps); i++) {
        PyObject *step = PyTuple_GET_ITEM(steps, i), *part = NULL;
        const PyMappingMethods *mapping = Py_TYPE(value)->tp_as_mapping;
        if (PyDict_CheckExact(value))
            part = Py_XNewRef(PyDict_GetItemWithError(value, step));
        else if (mapping == NULL || mapping->mp_subscript == NULL) /* else it may be a mapping, which is asked in Python */
            part = PyObject_GetAttr(value, step);
        Py_SETREF(value, part);
    }
    return value;
}

/* A key as text; NULL if it is not plain. */
static inline PyObject *text_of_key(PyObject *key, PyObject *cut)
{
    PyObject *text = NULL;
    int overflow = 0;
    if (PyUnicode_CheckExact(key) && PyUnicode_GET_LENGTH(key) <= KEY_LIMIT)
        text = Py_NewRef(key);
    else if (PyLong_CheckExact(key) && (PyLong_AsLongLongAndOverflow(key, &overflow), !overflow))
        text = PyObject_Str(key);
    if (text != NULL && cut != Py_None) {
        PyObject *rest = Py_XNewRef(PyDict_GetItemWithError(cut, text));
        if (rest == NULL && !PyErr_Occurred())
            rest = PyObject_GetItem(cut, text);
        Py_SETREF(text, rest);
        if (text != NULL && !PyUnicode_CheckExact(text))
            Py_CLEAR(text);
    }
    return text;
}

/* The items below a value, as a new list; NULL if they are not plain. */
static PyObject *items_below(PyObject *value, key_path_t path, PyObject **values)
{
    PyObject *found = part_below(value, path.steps), *items = NULL;
    if (found == NULL)
        return NULL;
    if (PyDict_CheckExact(found) && path.of_each == Py_None) {
        items = values == NULL ? NULL : PyDict_Keys(found); /* weights by key are looked up in Python */
        if (items != NULL && (*values = PyDict_Values(found)) == NULL)
            Py_CLEAR(items);
    } else if (PyDict_CheckExact(found)) {
        items = PyDict_Values(found);
    } else if (PyList_CheckExact(found) || PyTuple_CheckExact(found)) {
        items = PySequence_List(found);
    } else if (values != NULL && path.of_each == Py_None && (PyUnicode_CheckExact(found) || PyLong_CheckExact(found))) {
        if ((items = PyList_New(1)) != NULL) /* a batch of one */
            PyList_SET_ITEM(items, 0, Py_NewRef(found));
    }
    Py_DECREF(found);
    if (items != NULL && PyList_GET_SIZE(items) > BATCH_LIMIT)
        Py_CLEAR(items);
    if (path.of_each == Py_None || PyTuple_GET_SIZE(path.of_each) == 0)
        return items;
    for (Py_ssize_t i = 0; items != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *part = part_below(PyList_GET_ITEM(items, i), path.of_each);
        if (part == NULL || PyList_SetItem(items, i, part) < 0)
            Py_CLEAR(items);
    }
    return items;
}

/* Set a value under a name, taking its reference, which is NULL after an earlier error. */
static int put_fact(PyObject *facts, PyObject *name, PyObject *value)
{
    int failed = value == NULL || PyDict_SetItem(facts, name, value) < 0;
    Py_XDECREF(value);
    return failed;
}

/* Return one weight per key: a new reference. NULL without an exception if they are no weights; `*asked` is set if
 * Python must read them. */
static PyObject *weights_of_call(PyObject *weights, Py_ssize_t count, int *asked)
{
    if (PyList_GET_SIZE(weights) < count)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *weight = PyList_GET_ITEM(weights, i);
        int overflow = 0, is_amount = 0;
        if (PyLong_CheckExact(weight))
            is_amount = PyLong_AsLongLongAndOverflow(weight, &overflow) >= 0 && !overflow;
        else if (PyFloat_CheckExact(weight))
            is_amount = PyFloat_AS_DOUBLE(weight) >= 0 && isfinite(PyFloat_AS_DOUBLE(weight));
        if (!is_amount) {
            for (i = 0; i < count; i++) /* of another kind, such as numpy's, or no weight */
                *asked |= PyNumber_Check(PyList_GET_ITEM(weights, i));
            return NULL;
        }
    }
    return PyList_SetSlice(weights, count, PyList_GET_SIZE(weights), NULL) < 0 ? NULL : PyList_AsTuple(weights);
}

/* The attributes of a span for the keys below a value: a new dict. NULL if they are not plain. */
static PyObject *
facts_of_keys(PyObject *value, PyObject *weighed, int is_batch, key_path_t keys, key_path_t weights, PyObject *cut)
{
    PyObject *facts = PyDict_New(), *its = NULL, *items, *found;
    int failed = facts == NULL, asked = weights.steps != NULL; /* what a rule names as weights is named if it is none */
    if (!is_batch) {
        found = failed ? NULL : part_below(value, keys.steps);
        PyObject *text = found == NULL ? NULL : text_of_key(found, cut);
        Py_XDECREF(found);
        if (text != NULL && PyUnicode_GET_LENGTH(text) == 0)
            Py_CLEAR(text);
        if (failed || put_fact(facts, str_key, text))
            Py_CLEAR(facts);
        return facts;
    }
    items = failed ? NULL : items_below(value, keys, &its);
    for (Py_ssize_t i = 0; items != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (PyUnicode_CheckExact(item) && PyUnicode_GET_LENGTH(item) <= KEY_LIMIT && cut == Py_None)
            continue;
        PyObject *text = text_of_key(item, cut);
        if (text == NULL || PyList_SetItem(items, i, text) < 0)
            Py_CLEAR(items);
    }
    if (items != NULL && weights.steps != NULL) {
        Py_XSETREF(its, items_below(weighed, weights, NULL));
        failed = its == NULL;
    }
    failed |= items == NULL || put_fact(facts, str_batch_keys, PyList_AsTuple(items));
    found = failed || its == NULL ? NULL : weights_of_call(its, PyList_GET_SIZE(items), &asked);
    if (found != NULL)
        failed |= put_fact(facts, str_batch_weights, found);
    else
        failed |= its != NULL && asked;
    if (failed || PyErr_Occurred())
        Py_CLEAR(facts);
    Py_XDECREF(items);
    Py_XDECREF(its);
    return facts;
}

/* The same for keys given in code: a batch is a list, a tuple or a dict. */
static PyObject *facts_of_given(PyObject *value, int is_batch)
{
    if (is_batch && !PyList_CheckExact(value) && !PyTuple_CheckExact(value) && !PyDict_CheckExact(value))
        return NULL;
    return facts_of_keys(value, value, is_batch, (key_path_t){NULL, Py_None}, (key_path_t){NULL, Py_None}, Py_None);
}

/* The same for the keys of a rule. NULL without an exception if they are not plain, or with the host's, of a signal
 * handler. */
static PyObject *facts_below(Keys *self, PyObject *value, PyObject *weighed)
{
    PyObject *facts = facts_of_keys(value, weighed, self->is_batch, self->keys, self->weights, self->cut);
    if (facts == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    return facts;
}

/* The value of an argument in (args, kwargs): borrowed, NULL for none. */
static inline PyObject *argument_in(PyObject *const *args, PyObject *name, Py_ssize_t position)
{
    if (PyTuple_CheckExact(args[0]) && 0 <= position && position < PyTuple_GET_SIZE(args[0]))
        return PyTuple_GET_ITEM(args[0], position);
    return PyDict_CheckExact(args[1]) ? PyDict_GetItemWithError(args[1], name) : NULL;
}

static inline int is_plain_fact(PyObject *value)
{
    return value == Py_None || PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyBool_Check(value) ||
           (PyUnicode_CheckExact(value) && PyUnicode_GET_LENGTH(value) <= FACT_TEXT_LIMIT);
}

/* Add the facts below a value to what the reader before has read, taking its reference; NULL and None are nothing.
 * `otherwise` reads a fact that is not plain, by its place, and returns None for one that cannot be read. */
static PyObject *facts_of_request(Keys *self, PyObject *value, PyObject *facts)
{
    if (facts == NULL || facts == Py_None)
        Py_XSETREF(facts, PyDict_New());
    Py_ssize_t before = facts == NULL ? 0 : PyDict_GET_SIZE(facts);
    for (Py_ssize_t i = 0; facts != NULL && i < PyTuple_GET_SIZE(self->keys.steps); i++) {
        PyObject *steps = PyTuple_GET_ITEM(self->keys.steps, i);
        PyObject *fact = steps == Py_None ? NULL : part_below(value, steps); /* None for its size or type */
        if (fact == NULL || !is_plain_fact(fact)) {
            if (fact == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
                PyErr_Clear();
            Py_XDECREF(fact);
            fact = PyErr_Occurred() ? NULL : PyObject_CallFunction(self->otherwise, "On", value, i);
        }
        if (fact == NULL || (fact != Py_None && PyDict_SetItem(facts, PyTuple_GET_ITEM(self->keys.of_each, i), fact) < 0))
            Py_CLEAR(facts);
        Py_XDECREF(fact);
    }
    if (facts != NULL && PyDict_GET_SIZE(facts) > before && PyDict_Update(facts, self->cut) < 0)
        Py_CLEAR(facts);
    return facts;
}

/* The call as a Python function: with (args, kwargs), or with a result. */
static PyObject *Keys_call(Keys *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    PyObject *facts = NULL, *value = NULL, *weighed;
    if (self->parameter == Py_None && count == 1)
        value = args[0];
    else if (count == 2)
        value = argument_in(args, self->parameter, self->position);
    if (value != NULL && self->is_batch == FACTS_OF_REQUEST) {
        if (self->weighed != Py_None && (facts = PyObject_Vectorcall(self->weighed, args, nargsf, NULL)) == NULL)
            return NULL;
        return facts_of_request(self, value, facts);
    }
    weighed = value;
    if (value != NULL && self->weighed != Py_None)
        weighed = count == 2 ? argument_in(args, self->weighed, self->weighed_position) : NULL;
    if (weighed != NULL)
        facts = facts_below(self, value, weighed);
    return facts != NULL || PyErr_Occurred() ? facts : PyObject_Vectorcall(self->otherwise, args, nargsf, names);
}

static PyObject *Keys_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *parameter, *cut, *otherwise, *weights, *of_weights, *weighed;
    key_path_t keys;
    Py_ssize_t position, weighed_position;
    int is_batch;
    if (kwargs != NULL ||
        !PyArg_ParseTuple(args, "OniO!OOOOnOO:Keys", &parameter, &position, &is_batch, &PyTuple_Type, &keys.steps,
                          &keys.of_each, &weights, &of_weights, &weighed, &weighed_position, &cut, &otherwise))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "Keys takes no words");
    Keys *self = (Keys *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = (vectorcallfunc)Keys_call;
    self->made_of = Py_NewRef(args);
    self->parameter = parameter;
    self->position = position;
    self->is_batch = is_batch;
    self->keys = keys;
    self->weights = (key_path_t){weights == Py_None ? NULL : weights, of_weights};
    self->weighed = weighed;
    self->weighed_position = weighed_position;
    self->cut = cut;
    self->otherwise = otherwise;
    return (PyObject *)self;
}

static void Keys_dealloc(Keys *self)
{
    Py_XDECREF(self->made_of);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* A copy goes with a function that is pickled by value. */
static PyObject *Keys_reduce(Keys *self, PyObject *Py_UNUSED(none))
{
    return PyTuple_Pack(2, Py_TYPE(self), self->made_of);
}

static PyMethodDef Keys_methods[] = {
    {"__reduce__", (PyCFunction)Keys_reduce, METH_NOARGS, NULL},
    {NULL},
};

static PyTypeObject KeysType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Keys",
    .tp_basicsize = sizeof(Keys),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Reads the keys of calls or results: Keys(parameter, position, is_batch, steps, steps of each, steps to "
              "weights, steps of each, parameter of weights, its position, cut, otherwise).",
    .tp_new = Keys_new,
    .tp_dealloc = (destructor)Keys_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Keys, vectorcall),
    .tp_methods = Keys_methods,
};
