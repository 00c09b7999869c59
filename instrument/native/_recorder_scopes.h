/* Hot: spans around blocks. Cold: attributes of open spans. A part of `_recorder.c`. */

/* The innermost open span of this context, the open request that it is in, or the one that is given: NULL without one.
 * Valid until code of the host's may run. */
static frame_t *
open_span(Core *core, int which, Frame *given)
{
    if (which == GIVEN)
        return given->frame->state == CLOSED ? NULL : given->frame;
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL)
        return NULL;
    frame_t *frame = current->top;
    if (frame == NULL && current->base != NULL)
        frame = current->base->frame;
    if (frame == NULL || which == INNERMOST)
        return frame;
    return is_open_request(frame->request) ? ((Frame *)frame->request)->frame : NULL;
}

/* An attribute that is kept as it is: one that runs no code and takes little memory. */
static int
is_plain_attribute(PyObject *name, PyObject *value)
{
    if (!PyUnicode_CheckExact(name) || PyUnicode_GET_LENGTH(name) > VALUE_LIMIT || PyUnicode_GET_LENGTH(name) == 0)
        return 0;
    if (PyUnicode_CheckExact(value))
        return PyUnicode_GET_LENGTH(value) <= VALUE_LIMIT;
    if (PyLong_CheckExact(value)) {
        int overflow;
        PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow;
    }
    return PyFloat_CheckExact(value) || PyBool_Check(value);
}

static int
put_attribute(Core *core, PyObject *made, PyObject *name, PyObject *value)
{
    if (PyDict_GET_SIZE(made) >= ATTRIBUTE_LIMIT && PyDict_Contains(made, name) == 0) {
        count(core, TOO_MANY_ATTRIBUTES);
        return 0;
    }
    return PyDict_SetItem(made, name, value);
}

/* Set attributes of an open span: those of a dict, or by their names. What may have been handed on stays as it is: they
 * are copied each time. -1 with an exception of the host's. */
static int
set_attributes(Core *core, int which, Frame *given, PyObject *more, PyObject *names, PyObject *const *values)
{
    frame_t *frame = open_span(core, which, given);
    for (int tries = 0; frame != NULL && tries < TRIES; tries++) {
        uint64_t span_id = frame->span_id;
        PyObject *before = Py_XNewRef(frame->attributes), *name, *value;
        PyObject *made = before != NULL && PyDict_Check(before) ? PyDict_Copy(before) : PyDict_New();
        int failed = made == NULL;
        for (Py_ssize_t i = 0; !failed && names != NULL && i < PyTuple_GET_SIZE(names); i++)
            failed = put_attribute(core, made, PyTuple_GET_ITEM(names, i), values[i]) < 0;
        for (Py_ssize_t at = 0; !failed && more != NULL && PyDict_Next(more, &at, &name, &value);)
            failed = put_attribute(core, made, name, value) < 0;
        /* To make a dict may have run code of the host's. */
        frame = failed ? NULL : open_span(core, which, given);
        if (frame != NULL && frame->span_id == span_id && frame->attributes == before) {
            frame->attributes = made;
            Py_XDECREF(before); /* the frame's */
            Py_XDECREF(before);
            return 0;
        }
        Py_XDECREF(before);
        Py_XDECREF(made);
    }
    if (frame == NULL && !PyErr_Occurred()) {
        if (which == GIVEN)
            count(core, ANNOTATED_LATE);
        return 0;
    }
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_MemoryError))
        count(core, NO_DETAILS);
    return forgive();
}

/* As `set_attributes`, and write them for readers of open spans. */
static int
annotate_open(Core *core, int which, Frame *given, PyObject *more, PyObject *names, PyObject *const *values)
{
    if (set_attributes(core, which, given, more, names, values) < 0)
        return -1;
    frame_t *frame = core->memory != NULL ? open_span(core, which, given) : NULL;
    if (frame != NULL && frame->attributes != NULL)
        tell_attributes(core, frame);
    return forgive();
}

/* Set attributes that a service gives by their names. Those that have to be looked at go the long way in Python. */
static PyObject *
annotate_by(Core *core, int which, Frame *given, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (!core->on && which != GIVEN)
        Py_RETURN_NONE;
    int plain = nargs == 0;
    for (Py_ssize_t i = 0; plain && names != NULL && i < PyTuple_GET_SIZE(names); i++)
        plain = is_plain_attribute(PyTuple_GET_ITEM(names, i), args[i]);
    if (plain) {
        if (annotate_open(core, which, given, NULL, names, args) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    if (which != GIVEN && open_span(core, which, given) == NULL) {
        if (forgive() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    PyObject *more = PyDict_New(), *first = nargs > 0 ? args[0] : Py_None, *checked = NULL;
    for (Py_ssize_t i = 0; more != NULL && i < named; i++)
        if (PyDict_SetItem(more, PyTuple_GET_ITEM(names, i), args[nargs + i]) < 0)
            Py_CLEAR(more);
    if (nargs > 1)
        PyErr_SetString(PyExc_TypeError, "annotate(attributes=None, /, **more)");
    else if (more != NULL)
        checked = PyObject_CallMethodObjArgs((PyObject *)core, str_annotate_checked, first, more, NULL);
    int failed = nargs > 1;
    if (!failed && checked != NULL && PyDict_Check(checked))
        failed = annotate_open(core, which, given, checked, NULL, NULL) < 0;
    else if (!failed)
        failed = lose(core) < 0;
    Py_XDECREF(checked);
    Py_XDECREF(more);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* bind(key): name the request that the innermost open span serves. All but texts and numbers go the long way. */
static PyObject *
Core_bind(Core *self, PyObject *key)
{
    if (!self->on)
        Py_RETURN_NONE;
    PyObject *facts = facts_of_given(key, 0);
    if (facts == NULL)
        return PyErr_Occurred() ? NULL : PyObject_CallMethodOneArg((PyObject *)self, str_bind_innermost, key);
    int failed = annotate_open(self, INNERMOST, NULL, facts, NULL, NULL) < 0;
    Py_XDECREF(facts);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------ scopes */

static PyObject *
Scope_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", "site", "attributes", NULL};
    PyObject *core, *site, *attributes = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|O:Scope", words, &CoreType, &core, &site, &attributes))
        return NULL;
    Scope *self = (Scope *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->core = (Core *)Py_NewRef(core);
    self->site = Py_NewRef(site);
    self->attributes = attributes == Py_None ? NULL : Py_NewRef(attributes);
    return (PyObject *)self;
}

static int
Scope_traverse(Scope *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->site);
    Py_VISIT(self->attributes);
    Py_VISIT(self->frame);
    return 0;
}

/* Nobody is left who could end it: its `with` lost it (from 3.14 on a signal's handler may raise after `__enter__`
 * and before the block), or it was entered by hand. */
static void
end_dropped(Scope *self)
{
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    if (close_frame(self->core, self->frame, NULL, 0) < 0)
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(type, raised, traceback);
}

/* As a frame that is given up. */
static void
Scope_dealloc(Scope *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_SET_REFCNT(self, 1);
    if (self->frame != NULL && self->frame->frame->state == OPEN)
        end_dropped(self);
    Py_CLEAR(self->core);
    Py_CLEAR(self->site);
    Py_CLEAR(self->attributes);
    Py_CLEAR(self->frame);
    if (type == free_scope_type && free_scope_count < OBJECTS_KEPT) {
        free_scopes[free_scope_count++] = self;
        return;
    }
    PyObject_GC_UnTrack(self);
    type->tp_free((PyObject *)self);
    if (free_scope_type != NULL && PyType_IsSubtype(type, free_scope_type))
        Py_DECREF(type); /* made in Python: each object of it holds it */
}

/* Scopes of a kind that Python code has made of ours are given up as ours are, for it has added methods alone. */
static void
keep_scopes_of(PyTypeObject *type)
{
    if (free_scope_type != NULL || type->tp_basicsize != ScopeType.tp_basicsize)
        return;
    free_scope_type = (PyTypeObject *)Py_NewRef((PyObject *)type);
    type->tp_dealloc = (destructor)Scope_dealloc;
}

/* A scope of a site, of which it takes the reference; NULL without memory, with an exception. */
static inline Scope *
new_scope(Core *core, PyObject *site)
{
    PyTypeObject *type = core->scope_type != NULL ? (PyTypeObject *)core->scope_type : &ScopeType;
    Scope *scope;
    if (type == free_scope_type && free_scope_count > 0) {
        scope = free_scopes[--free_scope_count];
    } else if ((scope = (Scope *)type->tp_alloc(type, 0)) == NULL) {
        Py_DECREF(site);
        return NULL;
    }
    scope->core = (Core *)Py_NewRef(core);
    scope->site = site;
    return scope;
}

static PyObject *
Scope_enter(Scope *self, PyObject *Py_UNUSED(none))
{
    if (self->site != NULL && self->core->on && self->frame == NULL) {
        Pass *pass = pass_of(self->core, self->site);
        if (pass != NULL) {
            count_passed(pass);
            return Py_NewRef((PyObject *)self);
        }
        self->frame = open_frame(self->core, self->site, self->attributes, OPEN);
        if (self->frame == NULL && lose(self->core) < 0)
            return NULL;
    }
    return Py_NewRef((PyObject *)self);
}

static PyObject *
Scope_exit(Scope *self, PyObject *const *args, Py_ssize_t nargs)
{
    Frame *frame = self->frame;
    self->frame = NULL;
    int closed = frame == NULL ? 0 : close_frame(self->core, frame, nargs > 1 ? args[1] : NULL, 0);
    Py_XDECREF(frame);
    if (closed < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *annotate_by(Core *, int, Frame *, PyObject *const *, Py_ssize_t, PyObject *);

static PyObject *
Scope_annotate(Scope *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (self->frame == NULL)
        Py_RETURN_NONE;
    return annotate_by(self->core, 0, self->frame, args, nargs, names);
}

static PyMethodDef Scope_methods[] = {
    {"annotate", (PyCFunction)(void (*)(void))Scope_annotate, METH_FASTCALL | METH_KEYWORDS,
     "annotate($self, attributes=None, /, **more)\n--\n\nSet attributes of the span; see instrument.annotate."},
    {NULL},
};

/* `__enter__` and `__exit__`, as a class has them and bound to a scope. A `with` binds both, and up to Python 3.13 the
 * bound methods of C functions that it makes and gives up cost more than the span. The last ones are kept. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall, bound;
    const char *name;
} ScopeMethod;

typedef struct bound {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Scope *scope;
    const char *name;
    struct bound *next; /* while it is free */
} BoundMethod;

static BoundMethod *free_bound;
static uint32_t free_bound_count;
static PyTypeObject BoundMethodType;

static PyObject *
ScopeMethod_get(ScopeMethod *self, PyObject *scope, PyObject *Py_UNUSED(owner))
{
    if (scope == NULL || scope == Py_None)
        return Py_NewRef((PyObject *)self);
    if (Py_TYPE(scope) != free_scope_type && !PyObject_TypeCheck(scope, &ScopeType))
        return PyErr_Format(PyExc_TypeError, "%s() of a scope asked of %R", self->name, Py_TYPE(scope));
    BoundMethod *bound = free_bound;
    if (bound != NULL) {
        free_bound = bound->next;
        free_bound_count--;
        (void)PyObject_Init((PyObject *)bound, &BoundMethodType);
    } else if ((bound = PyObject_New(BoundMethod, &BoundMethodType)) == NULL) {
        return NULL;
    }
    bound->vectorcall = self->bound;
    bound->name = self->name;
    bound->scope = (Scope *)Py_NewRef(scope);
    return (PyObject *)bound;
}

static void
BoundMethod_dealloc(BoundMethod *self)
{
    Scope *scope = self->scope;
    if (free_bound_count < OBJECTS_KEPT) {
        self->next = free_bound;
        free_bound = self;
        free_bound_count++;
    } else {
        PyObject_Free(self);
    }
    Py_DECREF(scope); /* last: it may run code of the host's */
}

/* The scope that a method is called on in its class; NULL with an exception. */
static Scope *
scope_of_call(ScopeMethod *self, PyObject *const *args, size_t nargsf)
{
    if (PyVectorcall_NARGS(nargsf) > 0 && PyObject_TypeCheck(args[0], &ScopeType))
        return (Scope *)args[0];
    PyErr_Format(PyExc_TypeError, "%s() needs a scope", self->name);
    return NULL;
}

static PyObject *
enter_unbound(ScopeMethod *self, PyObject *const *args, size_t nargsf, PyObject *Py_UNUSED(names))
{
    Scope *scope = scope_of_call(self, args, nargsf);
    return scope == NULL ? NULL : Scope_enter(scope, NULL);
}

static PyObject *
exit_unbound(ScopeMethod *self, PyObject *const *args, size_t nargsf, PyObject *Py_UNUSED(names))
{
    Scope *scope = scope_of_call(self, args, nargsf);
    return scope == NULL ? NULL : Scope_exit(scope, args + 1, PyVectorcall_NARGS(nargsf) - 1);
}

static PyObject *
enter_bound(BoundMethod *self, PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(nargsf), PyObject *Py_UNUSED(names))
{
    return Scope_enter(self->scope, NULL);
}

static PyObject *
exit_bound(BoundMethod *self, PyObject *const *args, size_t nargsf, PyObject *Py_UNUSED(names))
{
    return Scope_exit(self->scope, args, PyVectorcall_NARGS(nargsf));
}

static PyMemberDef ScopeMethod_members[] = {
    {"__name__", T_STRING, offsetof(ScopeMethod, name), READONLY, NULL},
    {NULL},
};

static PyTypeObject ScopeMethodType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.ScopeMethod",
    .tp_basicsize = sizeof(ScopeMethod),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_doc = "A method of scopes that a `with` calls.",
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(ScopeMethod, vectorcall),
    .tp_descr_get = (descrgetfunc)ScopeMethod_get,
    .tp_members = ScopeMethod_members,
};

static PyMemberDef BoundMethod_members[] = {
    {"__name__", T_STRING, offsetof(BoundMethod, name), READONLY, NULL},
    {"__self__", T_OBJECT, offsetof(BoundMethod, scope), READONLY, NULL},
    {NULL},
};

static PyTypeObject BoundMethodType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.BoundMethod",
    .tp_basicsize = sizeof(BoundMethod),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Such a method, bound to a scope.",
    .tp_dealloc = (destructor)BoundMethod_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(BoundMethod, vectorcall),
    .tp_members = BoundMethod_members,
};

/* Give the class of scopes a method. */
static int
add_scope_method(const char *name, vectorcallfunc unbound, vectorcallfunc bound)
{
    ScopeMethod *method = PyObject_New(ScopeMethod, &ScopeMethodType);
    if (method == NULL)
        return -1;
    method->vectorcall = unbound;
    method->bound = bound;
    method->name = name;
    int failed = PyDict_SetItemString(ScopeType.tp_dict, name, (PyObject *)method);
    Py_DECREF(method);
    return failed;
}

static PyMemberDef Scope_members[] = {
    {"_recorder", T_OBJECT, offsetof(Scope, core), READONLY, NULL},
    {"_site", T_OBJECT, offsetof(Scope, site), READONLY, NULL},
    {"_attributes", T_OBJECT, offsetof(Scope, attributes), READONLY, NULL},
    {NULL},
};

static PyObject *
Scope_frame(Scope *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->frame != NULL ? (PyObject *)self->frame : Py_None);
}

static int
Scope_set_frame(Scope *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (value != NULL && value != Py_None && Py_TYPE(value) != &FrameType) {
        PyErr_SetString(PyExc_TypeError, "a scope's frame is a Frame or None");
        return -1;
    }
    Frame *frame = value == NULL || value == Py_None ? NULL : (Frame *)Py_NewRef(value);
    Py_XSETREF(self->frame, frame);
    return 0;
}

static PyGetSetDef Scope_getset[] = {
    {"_frame", (getter)Scope_frame, (setter)Scope_set_frame, NULL, NULL},
    {NULL},
};

static PyTypeObject ScopeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.Scope",
    .tp_basicsize = sizeof(Scope),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "A span around a block: Scope(recorder, site, attributes=None).",
    .tp_new = Scope_new,
    .tp_dealloc = (destructor)Scope_dealloc,
    .tp_traverse = (traverseproc)Scope_traverse,
    .tp_methods = Scope_methods,
    .tp_members = Scope_members,
    .tp_getset = Scope_getset,
};

static PyObject *
Core_record(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 3 || nargs > 5) {
        PyErr_SetString(PyExc_TypeError, "record(site, start_ns, attributes, pair=None, has_no_self=False)");
        return NULL;
    }
    int64_t end_ns = read_clock(self);
    int64_t start_ns = PyLong_AsLongLong(args[1]);
    if (start_ns == -1 && PyErr_Occurred())
        return NULL;
    Ring *ring;
    Current *current = current_of(self, &ring);
    if (current == NULL) {
        if (lose(self) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    frame_t frame;
    frame.attributes = with_link(current, args[2] == Py_None ? NULL : args[2]);
    if (frame.attributes != NULL && (current = current_of(self, &ring)) == NULL) {
        Py_DECREF(frame.attributes);
        if (lose(self) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    identify(self, ring, current, &frame, args[0], NULL, OPEN);
    frame.pair = nargs > 3 && args[3] != Py_None ? Py_NewRef(args[3]) : NULL;
    frame.start_ns = frame.counted_from_ns = start_ns;
    Py_INCREF(ring);
    count_against_above(current, &frame, ring, end_ns);
    if (nargs > 4 && args[4] == Py_True)
        frame.children_ns = end_ns - start_ns;
    store(self, ring, &frame, end_ns, -1, 0, NULL);
    int failed = frame.pair != NULL ? end_on_device(ring, &frame, end_ns) : 0;
    Py_DECREF(ring);
    Py_XDECREF(frame.request);
    Py_XDECREF(frame.attributes);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
no_scope(Core *self)
{
    if (self->no_scope == NULL || lose(self) < 0)
        return NULL;
    return Py_NewRef((PyObject *)self->no_scope);
}

static PyObject *
Core_new_span(Core *self, PyObject *site)
{
    Scope *scope = new_scope(self, Py_NewRef(site));
    return scope != NULL ? (PyObject *)scope : no_scope(self);
}

/* Where a name is kept that is at hand. */
static inline named_t *
place_of_name(const Core *core, PyObject *name)
{
    return &core->named[((uintptr_t)name >> 4) & (NAMES_AT_HAND - 1)];
}

/* Keep a name, and its site. The address of a text identifies it while there is a reference. */
static void
keep_name(Core *core, PyObject *name, PyObject *site)
{
    if (core->named == NULL) /* not where no one reports changes of the sites by name */
        core->named = follow_changes(core->user_sites) ? PyMem_Calloc(NAMES_AT_HAND, sizeof(named_t)) : NULL;
    if (core->named == NULL)
        return;
    named_t *place = place_of_name(core, name);
    place->site = site;
    place->version = version_of(core->user_sites);
    Py_XSETREF(place->name, Py_NewRef(name));
}

/* scope(name, key=) or scope(name, batch=), where the name is known and the keys are plain. NULL with an exception or,
 * where it is to go the long way, without. */
static Scope *
scope_of_keys(Core *self, PyObject *const *args, PyObject *names)
{
    PyObject *word = PyTuple_GET_ITEM(names, 0);
    if ((word != str_key_word && word != str_batch_word) || !PyUnicode_CheckExact(args[0]))
        return NULL;
    PyObject *site = PyDict_GetItemWithError(self->user_sites, args[0]); /* borrowed */
    if (site == NULL || Py_TYPE(site) == (PyTypeObject *)self->scope_type)
        return NULL;
    Py_INCREF(site);
    PyObject *facts = facts_of_given(args[1], word == str_batch_word);
    if (facts == NULL) {
        Py_DECREF(site);
        return NULL;
    }
    Scope *scope = new_scope(self, site);
    if (scope != NULL)
        scope->attributes = facts;
    else
        Py_DECREF(facts);
    return scope;
}

/* scope(name): a scope whose name is known costs a dict lookup; everything else goes the long way in Python. */
static PyObject *
Core_scope(Core *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (nargs == 1 && names == NULL && self->named != NULL) {
        const named_t *place = place_of_name(self, args[0]);
        if (place->name == args[0] && place->version == version_of(self->user_sites)) {
            Scope *scope = new_scope(self, Py_NewRef(place->site));
            return scope != NULL ? (PyObject *)scope : no_scope(self);
        }
    }
    if (nargs == 1 && names == NULL && PyUnicode_CheckExact(args[0]) && self->scope_type != NULL) {
        PyObject *site = PyDict_GetItemWithError(self->user_sites, args[0]); /* borrowed */
        if (site != NULL) {
            PyTypeObject *type = (PyTypeObject *)self->scope_type;
            if (Py_TYPE(site) == type) { /* of a muted one: handed out again as long as nobody has it */
                if (Py_REFCNT(site) == 1 && ((Scope *)site)->frame == NULL)
                    return Py_NewRef(site);
                site = ((Scope *)site)->site;
            } else {
                keep_name(self, args[0], site);
            }
            Scope *scope = new_scope(self, Py_NewRef(site));
            return scope != NULL ? (PyObject *)scope : no_scope(self);
        }
        if (PyErr_Occurred())
            return NULL;
    }
    if (nargs == 1 && names != NULL && PyTuple_GET_SIZE(names) == 1 && self->scope_type != NULL) {
        PyObject *found = (PyObject *)scope_of_keys(self, args, names);
        if (found != NULL)
            return found;
    }
    PyObject *method = PyErr_Occurred() ? NULL : PyObject_GetAttr((PyObject *)self, str_make_scope);
    PyObject *scope = method == NULL ? NULL : PyObject_Vectorcall(method, args, (size_t)nargs, names);
    Py_XDECREF(method);
    if (scope == NULL && PyErr_ExceptionMatches(PyExc_MemoryError))
        return no_scope(self);
    return scope;
}

PyDoc_STRVAR(scope_doc,
             "scope($self, name, *, kind=None, device=False, attributes=None, phase=None, stream=None, key=None, batch=None)\n--\n\n"
             "Time a block, as a span: ``with scope(\"tokenise\"):``, also ``async with``.\n"
             "\n"
             "    with scope(\"tokenise\", attributes={\"model\": \"7b\"}):\n"
             "        tokens = tokenizer(text)\n"
             "\n"
             "- `name`: the name that reports group by, of a small set; data belongs into `attributes`\n"
             "- `attributes`: facts of this span; `annotate` adds more from within\n"
             "- `kind`: the sort of work, \"user\" if left out; the error for a wrong one lists all\n"
             "- `phase`: the part of the work, such as \"prepare\" or \"post\"; it makes the kind \"phase\"\n"
             "- `device`: also take its time on the current stream of torch, cupy or numba; `stream` names another stream, such as\n"
             "  `torch.cuda.current_stream(1)`, or its address\n"
             "- `key`: the id of the request that it serves, which other processes have for it, too\n"
             "- `batch`: the ids of all requests that it serves at once; a mapping says how much of it each takes\n"
             "\n"
             "Exceptions pass untouched and mark the span. While recording is off it costs one branch. Raises `TargetError` for a\n"
             "bad name, kind, phase or stream.");
