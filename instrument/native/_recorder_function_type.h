/* Wrappers as the service sees them: a wrapper has all attributes of its function, and differs only when it is called.
 * Hot: calls whose spans begin otherwise than in `_recorder_calls.h`. A part of `_recorder.c`. */

/* Return true if a call goes to the bare function. Count it if the function is muted. Return -1 with an exception of
 * the service set. */
static int does_pass(Function *self, PyObject *const *args, size_t nargsf)
{
    if (!self->core->on)
        return 1;
    if (self->passes != NULL && PyVectorcall_NARGS(nargsf) > 0) {
        PyObject *positional = tuple_of(args, PyVectorcall_NARGS(nargsf));
        PyObject *answer = positional == NULL ? NULL : PyObject_CallOneArg(self->passes, positional);
        int passes = answer == NULL ? note_unless_of_service("passes") : answer == Py_True;
        Py_XDECREF(positional);
        Py_XDECREF(answer);
        if (passes != 0)
            return passes;
    }
    if (self->muted && self->pass != NULL)
        count_passed(self->pass);
    return self->muted;
}

/* Call a function in a span as a scope has it: it may be a request, or may not begin. */
static PyObject *Function_call_as_scope(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *values = NULL;
    Core *core = self->core;
    int passes = does_pass(self, args, nargsf);
    if (passes != 0)
        return passes < 0 ? NULL : call_wrapped(self, args, nargsf, names);
    if (thread_cache()->uid == core->uid && is_stack_used_up())
        return refuse_for_stack("calls of instrumented functions");
    if (self->attributes != NULL &&
        read_call(self->attributes, &(call_t){args, PyVectorcall_NARGS(nargsf), names, NULL}, &values) < 0)
        return NULL;
    Py_INCREF(self);
    Py_INCREF(core);
    Frame *frame = open_frame(core, self->path.site, NULL, values, OPEN);
    Py_XDECREF(values);
    PyObject *result = NULL;
    raised_t raised = {0};
    if (frame != NULL || count_loss(core) == 0) {
        result = call_wrapped(self, args, nargsf, names);
        if (frame != NULL && result != NULL && self->results != NULL && read_result(core, self->results, result) < 0)
            Py_CLEAR(result);
    }
    if (frame != NULL) {
        if (result == NULL)
            raised = take_normal();
        /* A signal handler raised: its exception replaces the call's. */
        if (close_frame(core, frame, raised.value, 0, 0) < 0) {
            Py_CLEAR(result);
            drop_raised(raised);
        } else if (raised.type != NULL) {
            raise_again(raised);
        }
        Py_DECREF(frame);
    }
    Py_DECREF(core);
    Py_DECREF(self);
    return result;
}

/* Call a function that returns a body which runs later. An object with the span replaces the body. */
static PyObject *Function_call_for_body(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    static PyTypeObject *const types[] = {[GENERATOR] = &GeneratorType, [AWAITABLE] = &AwaitableType,
                                          [ASYNC_GENERATOR] = &AsyncGeneratorType};
    PyObject *values = NULL, *body;
    int passes = does_pass(self, args, nargsf);
    if (passes != 0)
        return passes < 0 ? NULL : call_wrapped(self, args, nargsf, names);
    if (self->attributes != NULL &&
        read_call(self->attributes, &(call_t){args, PyVectorcall_NARGS(nargsf), names, NULL}, &values) < 0)
        return NULL;
    Py_INCREF(self);
    body = call_wrapped(self, args, nargsf, names);
    PyObject *stand_in = body == NULL                ? NULL
                         : self->form == COROUTINE ? stepped_coroutine(self, body, values)
                                                   : new_stretch(self->core, types[(int)self->form], self->path.site, body, values);
    if (stand_in != NULL || (body != NULL && count_loss(self->core) < 0))
        Py_SETREF(body, stand_in);
    Py_XDECREF(values);
    Py_DECREF(self);
    return body;
}

enum { ARGUMENTS_MOST = 32 }; /* calls with more arguments submit work without a request */

/* Call a function that submits its first argument to another thread. For `submit` it is the argument after the
 * executor. */
static PyObject *Function_call_to_hand_over(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf), place = self->form == SUBMIT;
    Py_ssize_t total = count + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
    char was_handing_over = is_handing_over;
    if (!self->core->on || self->muted || is_handing_over || count <= place || total > ARGUMENTS_MOST)
        return call_wrapped(self, args, nargsf, names);
    PyObject *arguments[ARGUMENTS_MOST];
    PyObject *submitted = wrap_submitted(self->core, args[place], self->form == SUBMIT ? self->path.site : NULL);
    if (submitted == NULL)
        return NULL;
    memcpy(arguments, args, (size_t)total * sizeof *arguments);
    arguments[place] = submitted;
    Py_INCREF(self);
    is_handing_over = self->form == SUBMIT;
    PyObject *result = call_wrapped(self, arguments, (size_t)count, names);
    is_handing_over = was_handing_over;
    Py_DECREF(self);
    Py_DECREF(submitted);
    return result;
}

static vectorcallfunc entry_of(const Function *self)
{
    return (vectorcallfunc)(self->sites != NULL               ? Function_call_by_instance
                            : self->form >= SUBMIT            ? Function_call_to_hand_over
                            : self->form > SCOPE              ? Function_call_for_body
                            : self->form == SCOPE             ? Function_call_as_scope
                            : self->muted || !PyFunction_Check(self->wrapped) || self->attributes != NULL || self->results != NULL
                                ? Function_call_other
                                : Function_call);
}

static PyTypeObject *type_for(PyObject *);

static PyObject *Function_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", "function", "site",    "sites",  "decide", "evaluate", "works", "attributes",
                             "results",  "passes",   "form", NULL};
    PyObject *core, *wrapped, *site, *sites = NULL, *decide = NULL, *evaluate = Py_None, *works = Py_None;
    PyObject *attributes = Py_None, *results = Py_None, *passes = Py_None;
    int form = CALL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO|O!OO$OOOOi:Function", words, &CoreType, &core, &wrapped, &site,
                                     &PyDict_Type, &sites, &decide, &evaluate, &works, &attributes, &results, &passes,
                                     &form))
        return NULL;
    if (form < CALL || form > START)
        return PyErr_Format(PyExc_ValueError, "Function: form is one of its FORMS");
    if (sites != NULL && decide == NULL)
        return PyErr_Format(PyExc_TypeError, "Function: sites go with decide");
    type = type_for(wrapped);
    Function *self = (Function *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->sites = Py_XNewRef(sites);
    self->decide = Py_XNewRef(decide);
    self->is_followed = (char)(sites != NULL && follow_changes(sites));
#define SET_UNLESS_NONE(field) self->field = field == Py_None ? NULL : Py_NewRef(field);
    SET_UNLESS_NONE(evaluate) SET_UNLESS_NONE(works) SET_UNLESS_NONE(attributes)
    SET_UNLESS_NONE(results) SET_UNLESS_NONE(passes)
    self->form = (char)form;
    self->core = (Core *)Py_NewRef(core);
    self->uid = self->core->uid; /* not 0, which is the uid of a thread without a ring */
    self->wrapped = Py_NewRef(wrapped);
    self->path.site = Py_NewRef(site);
    self->vectorcall = entry_of(self);
    return (PyObject *)self;
}

#define REFERENCES_Function(EACH)                                                                                  \
    EACH(core) EACH(wrapped) EACH(path.site) EACH(sites) EACH(decide) EACH(works) EACH(attributes) EACH(results)     \
    EACH(passes) EACH(pass)

TRAVERSE(Function)

static void Function_dealloc(Function *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    REFERENCES_Function(RELEASE)
    forget_cached(self);
    Py_XDECREF(self->evaluate);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Function_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    if (instance == NULL || instance == Py_None || Py_TYPE(((Function *)self)->wrapped)->tp_descr_get == NULL)
        return Py_NewRef(self);
    return PyMethod_New(self, instance);
}

/* Return the name to pickle by, as functions do. Unpickling takes the object that the module then has under the
 * name. */
static PyObject *Function_reduce(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyObject_GetAttrString(self, "__qualname__");
}

/* Set an attribute: of the function, such as __dict__ or __defaults__, except for the wrapper's own one. */
static int Function_setattro(PyObject *self, PyObject *name, PyObject *value)
{
    if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, "__instrument_pass__") == 0)
        return PyObject_GenericSetAttr(self, name, value);
    return StandIn_setattro(self, name, value);
}

static PyMethodDef Function_methods[] = {
    {"__reduce__", (PyCFunction)Function_reduce, METH_NOARGS, NULL},
    {NULL},
};

/* Return `__doc__` or `__class__` of the function. `isinstance(f, FunctionType)` and `inspect.isfunction(f)` then see a
 * function. */
static PyObject *Function_attribute(Function *self, void *name)
{
    return PyObject_GetAttrString(self->wrapped, name);
}

static PyObject *Function_dict(Function *self, void *Py_UNUSED(closure))
{
    PyObject *names = PyObject_GetAttrString(self->wrapped, "__dict__");
    if (names != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return names;
    PyErr_Clear(); /* a callable made in C has no dict */
    return PyDict_New();
}

/* Return the site. A retired wrapper has none, nor has a wrapper whose instances have sites of their own. */
static PyObject *Function_site(Function *self, void *name)
{
    if (self->sites == NULL && !(self->muted && self->pass == NULL))
        return Py_NewRef(self->path.site);
    PyErr_SetString(PyExc_AttributeError, name);
    return NULL;
}

static PyObject *Function_pass(Function *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->pass != NULL ? (PyObject *)self->pass : self->muted ? Py_False : Py_None);
}

static int Function_set_pass(Function *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL || (value != Py_None && value != Py_False && Py_TYPE(value) != &PassType)) {
        PyErr_SetString(PyExc_TypeError, "what counts the calls of a muted function is a Pass, False or None");
        return -1;
    }
    self->muted = value != Py_None;
    self->vectorcall = entry_of(self);
    Py_XSETREF(self->pass, Py_TYPE(value) == &PassType ? (Pass *)Py_NewRef(value) : NULL);
    return 0;
}

static PyGetSetDef Function_getset[] = {
    {"__class__", (getter)Function_attribute, NULL, NULL, "__class__"},
    {"__instrument_pass__", (getter)Function_pass, (setter)Function_set_pass,
     "the counter of calls that pass without a span; False if they are not counted, None if none pass", NULL},
    {"__dict__", (getter)Function_dict, NULL, NULL, NULL},
    {"__doc__", (getter)Function_attribute, NULL, NULL, "__doc__"},
    {"__instrument__", (getter)Function_site, NULL, "its site", "__instrument__"},
    {NULL},
};

static PyMemberDef Function_members[] = {
    {"__instrument_function__", T_OBJECT, offsetof(Function, wrapped), READONLY, "the wrapped function"},
    {"__instrument_layers__", T_OBJECT_EX, offsetof(Function, sites), READONLY, "the sites, if each instance has one"},
    {NULL},
};

static PyTypeObject FunctionType_ = {
    TYPE(Function, &StandInType, "instrument.native._recorder.Function", SIZE_IN_LINES(Function),
         Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR),
    .tp_traverse = (traverseproc)Function_traverse,
    .tp_new = Function_new,
    .tp_repr = StandIn_repr,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Function, vectorcall),
    .tp_getattro = StandIn_getattro,
    .tp_setattro = Function_setattro,
    .tp_descr_get = Function_get,
    .tp_weaklistoffset = offsetof(Function, weak_references),
    .tp_methods = Function_methods,
    .tp_members = Function_members,
    .tp_getset = Function_getset,
};

static PyObject *CachedFunction_deepcopy(PyObject *self, PyObject *Py_UNUSED(memo))
{
    return Py_NewRef(self);
}

static PyMethodDef CachedFunction_methods[] = {
    {"__deepcopy__", CachedFunction_deepcopy, METH_O, NULL},
    {NULL},
};

/* Wrappers around a function of `functools.lru_cache`, and around other callables. */
static PyTypeObject CachedFunctionType = {
    PyVarObject_HEAD_INIT(&StandInType, 0)
    .tp_name = "instrument.native._recorder.CachedFunction",
    .tp_base = &FunctionType_,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = CachedFunction_methods,
};
static PyTypeObject OtherFunctionType = {
    PyVarObject_HEAD_INIT(&StandInType, 0)
    .tp_name = "instrument.native._recorder.OtherFunction",
    .tp_base = &FunctionType_,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};

static PyTypeObject *type_for(PyObject *wrapped)
{
    PyTypeObject *type = Py_TYPE(wrapped);
    if (PyObject_TypeCheck(wrapped, &FunctionType_)) /* a function that both a decorator and a rule wrap */
        return type;
    return PyFunction_Check(wrapped) ? &FunctionType_
           : type == cached_type     ? &CachedFunctionType
                                     : &OtherFunctionType;
}

/* Return the type that a type of ours replaces, or the type itself: borrowed. */
static PyTypeObject *replaced_type(PyTypeObject *type)
{
    return type == &FunctionType_                                ? &PyFunction_Type
           : type == &CachedFunctionType && cached_type != NULL  ? cached_type
           : type == &CoroutineType                              ? &PyCoro_Type
           : type == &GeneratorType || type == &AwaitableType    ? &PyGen_Type
           : type == &AsyncGeneratorType                         ? &PyAsyncGen_Type
                                                                 : type;
}

static Py_hash_t StandIn_hash(PyObject *type)
{
    return PyBaseObject_Type.tp_hash((PyObject *)replaced_type((PyTypeObject *)type));
}

static PyObject *StandIn_compare(PyObject *type, PyObject *other, int operation)
{
    if (!PyType_Check(other) || (operation != Py_EQ && operation != Py_NE))
        Py_RETURN_NOTIMPLEMENTED;
    int is_equal = replaced_type((PyTypeObject *)type) == replaced_type((PyTypeObject *)other);
    return PyBool_FromLong(is_equal == (operation == Py_EQ));
}

/* The type of types that replace others. They equal the types that they replace, so that tables by type have an entry
 * for them, as those of `pickle`, `copy` and `dill` do. */
static PyTypeObject StandInType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "instrument.native._recorder.StandIn",
    .tp_base = &PyType_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_hash = StandIn_hash,
    .tp_richcompare = StandIn_compare,
};

static int ready_stand_ins(void)
{
    PyObject *functools = PyImport_ImportModule("functools");
    PyObject *cached = functools == NULL ? NULL : PyObject_GetAttrString(functools, "_lru_cache_wrapper");
    Py_XDECREF(functools);
    if (cached == NULL)
        return -1;
    cached_type = (PyTypeObject *)cached; /* kept until the process ends */
    PyTypeObject *types[] = {&StandInType, &FunctionType_, &CachedFunctionType, &OtherFunctionType, &CoroutineType,
                             &GeneratorType, &AwaitableType, &AsyncGeneratorType};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (PyType_Ready(types[i]) < 0)
            return -1;
    /* A coroutine has no `__next__`: only `await` steps it, by its slot. */
    if (PyDict_DelItemString(CoroutineType.tp_dict, "__next__") < 0 ||
        PyDict_DelItemString(CachedFunctionType.tp_dict, "__doc__") < 0 ||
        PyDict_DelItemString(OtherFunctionType.tp_dict, "__doc__") < 0)
        return -1;
    PyType_Modified(&CoroutineType);
    return 0;
}
