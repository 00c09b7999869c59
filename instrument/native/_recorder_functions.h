/* Wrappers as the service sees them: each has all attributes of its function, and differs in calls only. Hot: calls
 * whose spans begin in another way than in `_recorder_callables.h`. A part of `_recorder.c`. */

/* True if a call goes to the bare function, counted if it is muted. -1 with an exception of the host's. */
static int does_pass(Function *self, PyObject *const *args, size_t nargsf)
{
    if (!self->core->on)
        return 1;
    if (self->passes != NULL && PyVectorcall_NARGS(nargsf) > 0) {
        PyObject *positional = positional_of_call(args, nargsf);
        PyObject *answer = positional == NULL ? NULL : PyObject_CallOneArg(self->passes, positional);
        int passes = answer == NULL ? note_unless_hosts("passes") : answer == Py_True;
        Py_XDECREF(positional);
        Py_XDECREF(answer);
        if (passes != 0)
            return passes;
    }
    if (self->muted && self->pass != NULL)
        count_passed(self->pass);
    return self->muted;
}

/* A call with the span of a scope: it may be a request, or have no span. */
static PyObject *Function_call_as_scope(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *values = NULL;
    Core *core = self->core;
    int passes = does_pass(self, args, nargsf);
    if (passes != 0)
        return passes < 0 ? NULL : call_wrapped(self, args, nargsf, names);
    if (at_hand()->uid == core->uid && is_stack_used_up())
        return refuse_for_stack("calls of instrumented functions");
    if (self->attributes != NULL && read_attributes_of_call(self->attributes, args, nargsf, names, &values) < 0)
        return NULL;
    Py_INCREF(self);
    Py_INCREF(core);
    Frame *frame = open_frame(core, self->path.site, NULL, values, OPEN);
    Py_XDECREF(values);
    PyObject *result = NULL;
    raised_t raised = {0};
    if (frame != NULL || lose(core) == 0) {
        result = call_wrapped(self, args, nargsf, names);
        if (frame != NULL && result != NULL && self->results != NULL && read_result(core, self->results, result) < 0)
            Py_CLEAR(result);
    }
    if (frame != NULL) {
        if (result == NULL)
            raised = take_normal();
        if (close_frame(core, frame, raised.value, 0, 0) < 0) { /* a signal handler raised: in place of what the call raised */
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

/* The same for a function that returns an object which runs later: that object gets the span. */
static PyObject *Function_call_for_body(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    static PyTypeObject *const types[] = {[GENERATOR] = &GeneratorType, [AWAITABLE] = &AwaitableType,
                                          [ASYNC_GENERATOR] = &AsyncGeneratorType};
    PyObject *values = NULL, *made;
    int passes = does_pass(self, args, nargsf);
    if (passes != 0)
        return passes < 0 ? NULL : call_wrapped(self, args, nargsf, names);
    if (self->attributes != NULL && read_attributes_of_call(self->attributes, args, nargsf, names, &values) < 0)
        return NULL;
    Py_INCREF(self);
    made = call_wrapped(self, args, nargsf, names);
    PyObject *standing = made == NULL                ? NULL
                         : self->form == COROUTINE ? stepped_coroutine(self, made, values)
                                                   : new_stretch(self->core, types[(int)self->form], self->path.site, made, values);
    if (standing != NULL || (made != NULL && lose(self->core) < 0))
        Py_SETREF(made, standing);
    Py_XDECREF(values);
    Py_DECREF(self);
    return made;
}

enum { ARGUMENTS_MOST = 32 }; /* arguments of a call that submits work, for usual calls */

/* A call that submits a function to another thread: its first argument or, for `submit`, the one after the executor. */
static PyObject *Function_call_to_hand_over(Function *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf), place = self->form == SUBMIT;
    Py_ssize_t all = count + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
    char was_handing_over = is_handing_over;
    if (!self->core->on || self->muted || is_handing_over || count <= place || all > ARGUMENTS_MOST)
        return call_wrapped(self, args, nargsf, names);
    PyObject *given[ARGUMENTS_MOST], *taken = carried(self->core, args[place], self->form == SUBMIT ? self->path.site : NULL);
    if (taken == NULL)
        return NULL;
    memcpy(given, args, (size_t)all * sizeof *given);
    given[place] = taken;
    Py_INCREF(self);
    is_handing_over = self->form == SUBMIT;
    PyObject *result = call_wrapped(self, given, (size_t)count, names);
    is_handing_over = was_handing_over;
    Py_DECREF(self);
    Py_DECREF(taken);
    return result;
}

static vectorcallfunc entry_of(const Function *self)
{
    return (vectorcallfunc)(self->sites != NULL               ? Function_call_by_instance
                            : self->form >= SUBMIT            ? Function_call_to_hand_over
                            : self->form > SCOPE              ? Function_call_for_body
                            : self->form == SCOPE             ? Function_call_as_scope
                            : self->muted                     ? Function_call_muted
                            : !PyFunction_Check(self->wrapped) || self->attributes != NULL || self->results != NULL
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
    self->evaluate = evaluate == Py_None ? NULL : Py_NewRef(evaluate);
    self->works = works == Py_None ? NULL : Py_NewRef(works);
    self->attributes = attributes == Py_None ? NULL : Py_NewRef(attributes);
    self->results = results == Py_None ? NULL : Py_NewRef(results);
    self->passes = passes == Py_None ? NULL : Py_NewRef(passes);
    self->form = (char)form;
    self->core = (Core *)Py_NewRef(core);
    self->uid = self->core->uid; /* never that of a thread without a ring, which is 0 */
    self->wrapped = Py_NewRef(wrapped);
    self->path.site = Py_NewRef(site);
    self->vectorcall = entry_of(self);
    return (PyObject *)self;
}

#define HELD_BY_FUNCTION(EACH)                                                                                  \
    EACH(core) EACH(wrapped) EACH(path.site) EACH(sites) EACH(decide) EACH(works) EACH(attributes) EACH(results)     \
    EACH(passes) EACH(pass)

static int Function_traverse(Function *self, visitproc visit, void *arg)
{
    HELD_BY_FUNCTION(VISIT)
    return 0;
}

static void Function_dealloc(Function *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    HELD_BY_FUNCTION(LET_GO)
    forget_known(self);
    Py_XDECREF(self->evaluate);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Function_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    if (instance == NULL || instance == Py_None || Py_TYPE(((Function *)self)->wrapped)->tp_descr_get == NULL)
        return Py_NewRef(self);
    return PyMethod_New(self, instance);
}

/* Pickle by name, as functions are: unpickling finds the object that the module then has. */
static PyObject *Function_reduce(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyObject_GetAttrString(self, "__qualname__");
}

/* All attributes other than the wrapper's own are the function's: __dict__, __code__, __defaults__, __wrapped__ ... */
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

/* `__doc__`, or `__class__`: `isinstance(f, FunctionType)` and `inspect.isfunction(f)` ask how to call it, like the function. */
static PyObject *Function_attribute(Function *self, void *name)
{
    return PyObject_GetAttrString(self->wrapped, name);
}

static PyObject *Function_dict(Function *self, void *Py_UNUSED(closure))
{
    PyObject *names = PyObject_GetAttrString(self->wrapped, "__dict__");
    if (names != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return names;
    PyErr_Clear(); /* of what is made in C */
    return PyDict_New();
}

/* A retired wrapper has none, nor has one whose instances have sites of their own. */
static PyObject *Function_site(Function *self, void *name)
{
    if (self->sites == NULL && !(self->muted && self->pass == NULL))
        return Py_NewRef(self->path.site);
    PyErr_SetString(PyExc_AttributeError, name);
    return NULL;
}

static PyObject *Function_has_sites(Function *self, void *name)
{
    if (self->sites != NULL)
        Py_RETURN_TRUE;
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
     "what counts the calls that pass without a span; False: they do, and nothing counts them; None: none does", NULL},
    {"__dict__", (getter)Function_dict, NULL, NULL, NULL},
    {"__doc__", (getter)Function_attribute, NULL, NULL, "__doc__"},
    {"__instrument__", (getter)Function_site, NULL, "its site", "__instrument__"},
    {"__instrument_layers__", (getter)Function_has_sites, NULL, "True where each instance has a site",
     "__instrument_layers__"},
    {NULL},
};

static PyMemberDef Function_members[] = {
    {"__instrument_function__", T_OBJECT, offsetof(Function, wrapped), READONLY, "the function that it wraps"},
    {NULL},
};

static PyTypeObject FunctionType_ = {
    PyVarObject_HEAD_INIT(&StandInType, 0)
    .tp_name = "instrument.native._recorder.Function",
    .tp_basicsize = SIZE_IN_LINES(Function),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = Function_new,
    .tp_dealloc = (destructor)Function_dealloc,
    .tp_traverse = (traverseproc)Function_traverse,
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

static PyObject *CachedFunction_copy(PyObject *self, PyObject *Py_UNUSED(memo))
{
    return Py_NewRef(self);
}

static PyMethodDef CachedFunction_methods[] = {
    {"__copy__", (PyCFunction)CachedFunction_copy, METH_NOARGS, NULL},
    {"__deepcopy__", (PyCFunction)CachedFunction_copy, METH_O, NULL},
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
    if (PyObject_TypeCheck(wrapped, &FunctionType_)) /* by a decorator and by a rule */
        return type;
    return PyFunction_Check(wrapped) ? &FunctionType_
           : type == cached_type     ? &CachedFunctionType
                                     : &OtherFunctionType;
}

/* ------------------------------------------------------------------ types */

/* The type that a type of ours replaces, or the type itself. */
static PyTypeObject *stood_for(PyTypeObject *type)
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
    return PyBaseObject_Type.tp_hash((PyObject *)stood_for((PyTypeObject *)type));
}

static PyObject *StandIn_compare(PyObject *type, PyObject *other, int operation)
{
    if (!PyType_Check(other) || (operation != Py_EQ && operation != Py_NE))
        Py_RETURN_NOTIMPLEMENTED;
    int is_equal = stood_for((PyTypeObject *)type) == stood_for((PyTypeObject *)other);
    return PyBool_FromLong(is_equal == (operation == Py_EQ));
}

/* The type of types that replace others. They equal the replaced types, so that tables by type find an entry (`pickle`,
 * `copy`, `dill`, caches by a function's content). */
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
    cached_type = (PyTypeObject *)cached; /* of the process */
    PyTypeObject *types[] = {&StandInType, &FunctionType_, &CachedFunctionType, &OtherFunctionType, &CoroutineType,
                             &GeneratorType, &AwaitableType, &AsyncGeneratorType};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (PyType_Ready(types[i]) < 0)
            return -1;
    /* Only `await` steps a coroutine, by its slot. */
    if (PyDict_DelItemString(CoroutineType.tp_dict, "__next__") < 0 ||
        PyDict_DelItemString(CachedFunctionType.tp_dict, "__doc__") < 0 ||
        PyDict_DelItemString(OtherFunctionType.tp_dict, "__doc__") < 0)
        return -1;
    PyType_Modified(&CoroutineType);
    return 0;
}
