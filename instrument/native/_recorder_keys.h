/* Hot: the keys of the requests that a call serves, read from its arguments or its result. Cold, at the end: the type.
 * A part of `_recorder.c`. C reads attributes and plain dicts, down to texts or numbers, or to lists, tuples and dicts
 * of them. Python reads everything else by `otherwise`, and reports values that it cannot read: see call_values.py. */

#define KEY_LIMIT 128 /* characters: as in spans.py */

/* A path to keys below a value. `steps` are names, or NULL for none. `of_each` are the steps from each item, or None if
 * the value has no items. */
typedef struct {
    PyObject *steps, *of_each;
} key_path_t;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *made_of;             /* the arguments of its making, which own all references below */
    PyObject *parameter;           /* the argument's name; None for a reader of results */
    Py_ssize_t position;           /* the argument's position, -1 without one */
    key_path_t keys, weights;      /* weights without steps are the values of a dict of keys */
    PyObject *weighed;             /* the argument with the weights, None if it is the one with the keys */
    Py_ssize_t weighed_position;
    PyObject *cut;                 /* a dict from a raw key to its text, filled on demand, or None */
    PyObject *otherwise;
    /* 0 for one key, 1 for a batch, FACTS_OF_REQUEST for other facts of a request. For facts, `keys` has the paths and
     * the names, `cut` has facts to add to each, and `weighed` is the reader to call before, or None. */
    int is_batch;
} Keys;

#define FACTS_OF_REQUEST 2

/* Return the object below a value: a new reference. Return NULL, with or without an exception, if it is not plain. */
static PyObject *part_below(PyObject *value, PyObject *steps)
{
    Py_INCREF(value);
    for (Py_ssize_t i = 0; steps != NULL && value != NULL && i < PyTuple_GET_SIZE(steps); i++) {
        PyObject *step = PyTuple_GET_ITEM(steps, i), *part = NULL;
        const PyMappingMethods *mapping = Py_TYPE(value)->tp_as_mapping;
        if (PyDict_CheckExact(value))
            part = Py_XNewRef(PyDict_GetItemWithError(value, step));
        /* An object with a subscript may be a mapping, which Python reads. */
        else if (mapping == NULL || mapping->mp_subscript == NULL)
            part = PyObject_GetAttr(value, step);
        Py_SETREF(value, part);
    }
    return value;
}

/* Return a key as text: a new reference, NULL if it is not plain. */
static inline PyObject *text_of_key(PyObject *key, PyObject *cut)
{
    PyObject *text = NULL;
    int overflow = 0;
    if (PyUnicode_CheckExact(key) && PyUnicode_GET_LENGTH(key) <= KEY_LIMIT)
        text = Py_NewRef(key);
    else if (PyLong_CheckExact(key) && (PyLong_AsLongLongAndOverflow(key, &overflow), !overflow))
        text = PyObject_Str(key);
    if (text != NULL && cut != Py_None) {
        PyObject *cut_text = Py_XNewRef(PyDict_GetItemWithError(cut, text));
        if (cut_text == NULL && !PyErr_Occurred())
            cut_text = PyObject_GetItem(cut, text);
        Py_SETREF(text, cut_text);
        if (text != NULL && !PyUnicode_CheckExact(text))
            Py_CLEAR(text);
    }
    return text;
}

/* Return the items below a value as a new list, NULL if they are not plain. */
static PyObject *items_below(PyObject *value, key_path_t path, PyObject **values)
{
    PyObject *container = part_below(value, path.steps), *items = NULL;
    if (container == NULL)
        return NULL;
    if (PyDict_CheckExact(container) && path.of_each == Py_None) {
        items = values == NULL ? NULL : PyDict_Keys(container); /* Python looks up weights by key */
        if (items != NULL && (*values = PyDict_Values(container)) == NULL)
            Py_CLEAR(items);
    } else if (PyDict_CheckExact(container)) {
        items = PyDict_Values(container);
    } else if (PyList_CheckExact(container) || PyTuple_CheckExact(container)) {
        items = PySequence_List(container);
    } else if (values != NULL && path.of_each == Py_None && (PyUnicode_CheckExact(container) || PyLong_CheckExact(container))) {
        if ((items = PyList_New(1)) != NULL) /* a batch of one */
            PyList_SET_ITEM(items, 0, Py_NewRef(container));
    }
    Py_DECREF(container);
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

/* Set a value under a name, taking its reference. Return true on an error, also if the value is NULL. */
static int put_fact(PyObject *facts, PyObject *name, PyObject *value)
{
    int failed = value == NULL || PyDict_SetItem(facts, name, value) < 0;
    Py_XDECREF(value);
    return failed;
}

/* Return one weight per key: a new reference. Return NULL without an exception if there is a value that is no weight.
 * Then set `is_error` if Python must read them. */
static PyObject *weights_of_call(PyObject *weights, Py_ssize_t count, int *is_error)
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
            for (i = 0; i < count; i++) /* numbers of other types, such as numpy's, are left to Python */
                *is_error |= PyNumber_Check(PyList_GET_ITEM(weights, i));
            return NULL;
        }
    }
    return PyList_SetSlice(weights, count, PyList_GET_SIZE(weights), NULL) < 0 ? NULL : PyList_AsTuple(weights);
}

/* Return the attributes of a span for the keys below a value: a new dict, NULL if they are not plain. */
static PyObject *
facts_of_keys(PyObject *value, PyObject *weighed, int is_batch, key_path_t keys, key_path_t weights, PyObject *cut)
{
    PyObject *facts = PyDict_New(), *amounts = NULL, *items, *part;
    /* An error names the weights that a rule reads, if they are none. */
    int failed = facts == NULL, is_error = weights.steps != NULL;
    if (!is_batch) {
        part = failed ? NULL : part_below(value, keys.steps);
        PyObject *text = part == NULL ? NULL : text_of_key(part, cut);
        Py_XDECREF(part);
        if (text != NULL && PyUnicode_GET_LENGTH(text) == 0)
            Py_CLEAR(text);
        if (failed || put_fact(facts, str_key, text))
            Py_CLEAR(facts);
        return facts;
    }
    items = failed ? NULL : items_below(value, keys, &amounts);
    for (Py_ssize_t i = 0; items != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (PyUnicode_CheckExact(item) && PyUnicode_GET_LENGTH(item) <= KEY_LIMIT && cut == Py_None)
            continue;
        PyObject *text = text_of_key(item, cut);
        if (text == NULL || PyList_SetItem(items, i, text) < 0)
            Py_CLEAR(items);
    }
    if (items != NULL && weights.steps != NULL) {
        Py_XSETREF(amounts, items_below(weighed, weights, NULL));
        failed = amounts == NULL;
    }
    failed |= items == NULL || put_fact(facts, str_batch_keys, PyList_AsTuple(items));
    part = failed || amounts == NULL ? NULL : weights_of_call(amounts, PyList_GET_SIZE(items), &is_error);
    if (part != NULL)
        failed |= put_fact(facts, str_batch_weights, part);
    else
        failed |= amounts != NULL && is_error;
    if (failed || PyErr_Occurred())
        Py_CLEAR(facts);
    Py_XDECREF(items);
    Py_XDECREF(amounts);
    return facts;
}

/* Return the attributes for keys that code gives. A batch is a list, a tuple or a dict. See `facts_of_keys`. */
static PyObject *facts_of_given(PyObject *value, int is_batch)
{
    if (is_batch && !PyList_CheckExact(value) && !PyTuple_CheckExact(value) && !PyDict_CheckExact(value))
        return NULL;
    return facts_of_keys(value, value, is_batch, (key_path_t){NULL, Py_None}, (key_path_t){NULL, Py_None}, Py_None);
}

/* Return the attributes for the keys of a rule. Return NULL without an exception if they are not plain, or with one
 * that a signal handler of the service raised. */
static PyObject *facts_below(Keys *self, PyObject *value, PyObject *weighed)
{
    PyObject *facts = facts_of_keys(value, weighed, self->is_batch, self->keys, self->weights, self->cut);
    if (facts == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    return facts;
}

/* Return true for a value of an attribute that is stored unchanged, because it runs no code and takes little memory. */
static int is_plain_value(PyObject *value)
{
    int overflow = 0;
    if (PyUnicode_CheckExact(value))
        return PyUnicode_GET_LENGTH(value) <= VALUE_LIMIT;
    if (PyLong_CheckExact(value))
        return PyLong_AsLongLongAndOverflow(value, &overflow), !overflow;
    return PyFloat_CheckExact(value) || PyBool_Check(value);
}

/* Add the facts below a value to the facts of the reader before, taking their reference. NULL and None stand for no
 * facts. `otherwise` reads a fact that is not plain, by its position, and returns None for one that cannot be read.
 * Return a new dict, NULL with an exception. */
static PyObject *facts_of_request(Keys *self, PyObject *value, PyObject *facts)
{
    if (facts == NULL || facts == Py_None)
        Py_XSETREF(facts, PyDict_New());
    Py_ssize_t before = facts == NULL ? 0 : PyDict_GET_SIZE(facts);
    for (Py_ssize_t i = 0; facts != NULL && i < PyTuple_GET_SIZE(self->keys.steps); i++) {
        PyObject *steps = PyTuple_GET_ITEM(self->keys.steps, i);
        /* None for the size or the type of a value. */
        PyObject *fact = steps == Py_None ? NULL : part_below(value, steps);
        if (fact == NULL || (fact != Py_None && !is_plain_value(fact))) {
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

/* The arguments of a call. Those by name are behind `args` in the order of `names`, or in `keywords`. */
typedef struct {
    PyObject *const *args;
    Py_ssize_t count;
    PyObject *names, *keywords;
} call_t;

static PyObject *tuple_of(PyObject *const *items, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple != NULL && i < count; i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(items[i]));
    return tuple;
}

/* Read facts of a call by reader(args, kwargs). Set `facts` to a new reference, or to NULL for none. Return -1 with an
 * exception of the service set. */
static int read_by(PyObject *reader, const char *place, const call_t *call, PyObject **facts)
{
    PyObject *positional = tuple_of(call->args, call->count);
    PyObject *keywords = call->keywords != NULL ? Py_NewRef(call->keywords) : PyDict_New();
    int failed = positional == NULL || keywords == NULL;
    for (Py_ssize_t i = 0; !failed && call->names != NULL && i < PyTuple_GET_SIZE(call->names); i++)
        failed = PyDict_SetItem(keywords, PyTuple_GET_ITEM(call->names, i), call->args[call->count + i]) < 0;
    *facts = failed ? NULL : PyObject_CallFunctionObjArgs(reader, positional, keywords, NULL);
    Py_XDECREF(positional);
    Py_XDECREF(keywords);
    if (*facts == Py_None)
        Py_CLEAR(*facts);
    return PyErr_Occurred() ? note_unless_of_service(place) : 0;
}

/* Return an argument: borrowed, NULL for none. */
static inline PyObject *argument_of(const call_t *call, PyObject *name, Py_ssize_t position)
{
    if (0 <= position && position < call->count)
        return call->args[position];
    for (Py_ssize_t i = 0; call->names != NULL && i < PyTuple_GET_SIZE(call->names); i++)
        if (PyTuple_GET_ITEM(call->names, i) == name)
            return call->args[call->count + i];
    return call->keywords != NULL ? PyDict_GetItemWithError(call->keywords, name) : NULL;
}

/* Read the attributes of a call's span from its arguments. Returns as `read_by`. */
static int read_call(PyObject *reader, const call_t *call, PyObject **facts)
{
    Keys *keys = Py_TYPE(reader) == &KeysType ? (Keys *)reader : NULL;
    PyObject *value = keys == NULL ? NULL : argument_of(call, keys->parameter, keys->position), *weighed = value;
    *facts = NULL;
    if (value != NULL && keys->is_batch == FACTS_OF_REQUEST) {
        if (keys->weighed != Py_None && read_call(keys->weighed, call, facts) < 0)
            return -1;
        *facts = facts_of_request(keys, value, *facts);
        return *facts != NULL ? 0 : note_unless_of_service("attributes");
    }
    if (value != NULL && keys->weighed != Py_None)
        weighed = argument_of(call, keys->weighed, keys->weighed_position);
    if (weighed != NULL)
        *facts = facts_below(keys, value, weighed);
    if (*facts != NULL || PyErr_Occurred())
        return *facts != NULL ? 0 : -1;
    return read_by(keys == NULL ? reader : keys->otherwise, "attributes", call, facts);
}

/* Read a call from (args, kwargs), or read a result, as a Python function would. */
static PyObject *Keys_call(Keys *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    PyObject *facts = NULL;
    if (count == 2 && PyTuple_CheckExact(args[0]) && PyDict_CheckExact(args[1])) {
        const call_t call = {&PyTuple_GET_ITEM(args[0], 0), PyTuple_GET_SIZE(args[0]), NULL, args[1]};
        int failed = read_call((PyObject *)self, &call, &facts) < 0;
        return facts != NULL || failed ? facts : Py_NewRef(Py_None);
    }
    if (count == 1 && self->is_batch == FACTS_OF_REQUEST) {
        if (self->weighed != Py_None && (facts = PyObject_CallOneArg(self->weighed, args[0])) == NULL)
            return NULL;
        return facts_of_request(self, args[0], facts);
    }
    if (count == 1 && self->parameter == Py_None)
        facts = facts_below(self, args[0], args[0]);
    return facts != NULL || PyErr_Occurred() ? facts : PyObject_Vectorcall(self->otherwise, args, nargsf, names);
}

static PyObject *Keys_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *weights;
    if (kwargs != NULL)
        return PyErr_Format(PyExc_TypeError, "Keys takes no words");
    Keys *self = (Keys *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (!PyArg_ParseTuple(args, "OniO!OOOOnOO:Keys", &self->parameter, &self->position, &self->is_batch, &PyTuple_Type,
                          &self->keys.steps, &self->keys.of_each, &weights, &self->weights.of_each, &self->weighed,
                          &self->weighed_position, &self->cut, &self->otherwise)) {
        Py_DECREF(self);
        return NULL;
    }
    self->vectorcall = (vectorcallfunc)Keys_call;
    self->made_of = Py_NewRef(args);
    self->weights.steps = weights == Py_None ? NULL : weights;
    return (PyObject *)self;
}

static void Keys_dealloc(Keys *self)
{
    Py_XDECREF(self->made_of);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Return what a copy is made of. Functions that are pickled by value contain one. */
static PyObject *Keys_reduce(Keys *self, PyObject *Py_UNUSED(none))
{
    return PyTuple_Pack(2, Py_TYPE(self), self->made_of);
}

static PyMethodDef Keys_methods[] = {
    {"__reduce__", (PyCFunction)Keys_reduce, METH_NOARGS, NULL},
    {NULL},
};

static PyTypeObject KeysType = {
    RECORDER_TYPE(Keys, sizeof(Keys), Py_TPFLAGS_HAVE_VECTORCALL),
    .tp_doc = "A reader of the keys of calls or results: Keys(parameter, position, is_batch, steps, steps of each, steps to "
              "weights, steps of each, parameter of weights, its position, cut, otherwise).",
    .tp_new = Keys_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Keys, vectorcall),
    .tp_methods = Keys_methods,
};
