/* Hot: spans around blocks. Cold: attributes of open spans. A part of `_recorder.c`. */

/* Return the innermost open span of this context, its open request, or the given span. Borrowed until code of the
 * service may run. NULL if it is not open. */
static frame_t *open_span(Core *core, int target, Frame *object)
{
    if (target == GIVEN)
        return object->frame->state == CLOSED ? NULL : object->frame;
    Ring *ring;
    Current *current = current_of(core, &ring);
    if (current == NULL)
        return NULL;
    frame_t *frame = current->top;
    if (frame == NULL && current->base != NULL)
        frame = current->base->frame;
    if (frame == NULL || target == INNERMOST)
        return frame;
    return is_open_request(frame->request) ? ((Frame *)frame->request)->frame : NULL;
}

static int put_attribute(Core *core, PyObject *attributes, PyObject *name, PyObject *value)
{
    if (PyDict_GET_SIZE(attributes) >= ATTRIBUTE_LIMIT && PyDict_Contains(attributes, name) == 0) {
        count_event(core, TOO_MANY_ATTRIBUTES);
        return 0;
    }
    return PyDict_SetItem(attributes, name, value);
}

/* Set attributes of an open span, from a dict or by name. The dict is copied each time, because other code may have the
 * earlier one. Return -1 with an exception of the service set. */
static int set_attributes(Core *core, int target, Frame *object, PyObject *added, PyObject *names, PyObject *const *values)
{
    frame_t *frame = open_span(core, target, object);
    for (int tries = 0; frame != NULL && tries < TRIES; tries++) {
        uint64_t span_id = frame->span_id;
        PyObject *before = Py_XNewRef(frame->attributes), *name, *value;
        PyObject *attributes = before != NULL && PyDict_Check(before) ? PyDict_Copy(before) : PyDict_New();
        int failed = attributes == NULL;
        for (Py_ssize_t i = 0; !failed && names != NULL && i < PyTuple_GET_SIZE(names); i++)
            failed = put_attribute(core, attributes, PyTuple_GET_ITEM(names, i), values[i]) < 0;
        for (Py_ssize_t at = 0; !failed && added != NULL && PyDict_Next(added, &at, &name, &value);)
            failed = put_attribute(core, attributes, name, value) < 0;
        /* Making a dict may have run code of the service. */
        frame = failed ? NULL : open_span(core, target, object);
        if (frame != NULL && frame->span_id == span_id && frame->attributes == before) {
            frame->attributes = attributes;
            frame->has_more = 1;
            Py_XDECREF(before); /* the frame's reference */
            Py_XDECREF(before);
            return 0;
        }
        Py_XDECREF(before);
        Py_XDECREF(attributes);
    }
    if (frame == NULL && !PyErr_Occurred()) {
        if (target == GIVEN)
            count_event(core, ANNOTATED_LATE);
        return 0;
    }
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_MemoryError))
        count_event(core, NO_DETAILS);
    return clear_fault();
}

/* Set attributes as `set_attributes`, and write them for readers of open spans. */
static int annotate_open(Core *core, int target, Frame *object, PyObject *added, PyObject *names, PyObject *const *values)
{
    if (set_attributes(core, target, object, added, names, values) < 0)
        return -1;
    frame_t *frame = core->memory != NULL ? open_span(core, target, object) : NULL;
    if (frame != NULL && frame->attributes != NULL)
        write_open_attributes(core, frame);
    return clear_fault();
}

/* Set attributes that the service gives by name. Python checks those that are not plain. Return None, NULL with an
 * exception. */
static PyObject *
annotate_by(Core *core, int target, Frame *object, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (!core->on && target != GIVEN)
        Py_RETURN_NONE;
    int plain = nargs == 0;
    for (Py_ssize_t i = 0; plain && names != NULL && i < PyTuple_GET_SIZE(names); i++)
        plain = PyUnicode_CheckExact(PyTuple_GET_ITEM(names, i)) && is_plain_value(PyTuple_GET_ITEM(names, i)) &&
                is_plain_value(args[i]) && PyUnicode_GET_LENGTH(PyTuple_GET_ITEM(names, i)) > 0;
    if (plain)
        return annotate_open(core, target, object, NULL, names, args) < 0 ? NULL : Py_NewRef(Py_None);
    if (target != GIVEN && open_span(core, target, object) == NULL)
        return clear_fault() < 0 ? NULL : Py_NewRef(Py_None);
    Py_ssize_t keyword_count = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    PyObject *more = PyDict_New(), *first = nargs > 0 ? args[0] : Py_None, *checked = NULL;
    for (Py_ssize_t i = 0; more != NULL && i < keyword_count; i++)
        if (PyDict_SetItem(more, PyTuple_GET_ITEM(names, i), args[nargs + i]) < 0)
            Py_CLEAR(more);
    if (nargs > 1)
        PyErr_SetString(PyExc_TypeError, "annotate(attributes=None, /, **more)");
    else if (more != NULL)
        checked = PyObject_CallMethodObjArgs((PyObject *)core, str_annotate_checked, first, more, NULL);
    int failed = nargs > 1;
    if (!failed && checked != NULL && PyDict_Check(checked))
        failed = annotate_open(core, target, object, checked, NULL, NULL) < 0;
    else if (!failed)
        failed = count_loss(core) < 0;
    Py_XDECREF(checked);
    Py_XDECREF(more);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Set the key of the request that the innermost open span serves: bind(key). Python checks keys that are neither text
 * nor number. */
static PyObject *Core_bind(Core *self, PyObject *key)
{
    if (!self->on)
        Py_RETURN_NONE;
    PyObject *facts = facts_of_given(key, 0);
    if (facts == NULL)
        return PyErr_Occurred() ? NULL : PyObject_CallMethodOneArg((PyObject *)self, str_bind_innermost, key);
    int failed = annotate_open(self, INNERMOST, NULL, facts, NULL, NULL) < 0;
    Py_XDECREF(facts);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *enter_bound(BoundMethod *, PyObject *const *, size_t, PyObject *);
static PyObject *exit_bound(BoundMethod *, PyObject *const *, size_t, PyObject *);

/* Return an empty scope: a new reference, NULL with an exception. Its methods have no references until they are
 * bound. */
static Scope *empty_scope(PyTypeObject *type)
{
    Scope *self = (Scope *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->path = &no_path;
        Py_SET_TYPE(&self->enter, &BoundMethodType);
        Py_SET_TYPE(&self->exit, &BoundMethodType);
        self->enter.vectorcall = (vectorcallfunc)enter_bound;
        self->exit.vectorcall = (vectorcallfunc)exit_bound;
        self->enter.at = offsetof(Scope, enter);
        self->exit.at = offsetof(Scope, exit);
    }
    return self;
}

static PyObject *Scope_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recorder", "site", "attributes", NULL};
    PyObject *core, *site, *attributes = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|O:Scope", words, &CoreType, &core, &site, &attributes))
        return NULL;
    Scope *self = empty_scope(type);
    if (self == NULL)
        return NULL;
    self->core = (Core *)Py_NewRef(core);
    self->site = Py_NewRef(site);
    self->attributes = attributes == Py_None ? NULL : Py_NewRef(attributes);
    return (PyObject *)self;
}

#define REFERENCES_Scope(EACH) EACH(core) EACH(site) EACH(attributes) EACH(frame) EACH(spare)
TRAVERSE(Scope)

/* Take a scope from the cached name that it belongs to. Free it if it is unused. */
static void detach_scope(Scope *scope)
{
    if (scope == NULL)
        return;
    scope->path = &no_path;
    Py_CLEAR(scope->spare);
    if (scope->core == NULL)
        Py_DECREF(scope);
}

/* Forget the steps that the cached names of a recorder remember. Runs no code of the service. */
static void forget_paths_of_names(const Core *core)
{
    for (cached_t *place = scope_names; place < scope_names + NAMES_CACHED; place++)
        if (place->version == (uintptr_t)core) {
            place->version = 0;
            place->path = (path_t){0};
        }
}

/* Forget which site a scope's name has, also for existing scopes. */
static PyObject *Core_forget_names(Core *self, PyObject *Py_UNUSED(none))
{
    forget_paths_of_names(self);
    for (cached_t *place = scope_names; place < scope_names + NAMES_CACHED; place++)
        if (place->version == 0) {
            PyObject *name = place->instance;
            Scope *scope = place->scope;
            place->instance = NULL;
            place->scope = NULL;
            detach_scope(scope); /* this line and the next may run code of the service */
            Py_XDECREF(name);
        }
    Py_RETURN_NONE;
}

/* Free a scope that is not reused, or keep the object for another scope. */
static SELDOM void give_up_scope(Scope *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_SET_REFCNT(self, 1);
    if (self->frame != NULL && self->frame->frame->state == OPEN) {
        /* The `with` statement lost the scope: from 3.14 on a signal handler may raise after `__enter__` and before the
         * block. Or the scope was entered without `with`. */
        raised_t raised = take_raised();
        if (close_frame(self->core, self->frame, NULL, 0, 0) < 0)
            PyErr_WriteUnraisable(NULL);
        raise_again(raised);
    }
    if (self->path != &no_path) {
        cached_t *place = (cached_t *)((char *)self->path - offsetof(cached_t, path));
        place->scope = NULL;
        place->version = 0;
        self->path = &no_path;
    }
    REFERENCES_Scope(CLEAR)
    if (type == hot.free_scope_type && free_scope_count < OBJECTS_KEPT) {
        free_scopes[free_scope_count++] = self;
        return;
    }
    PyObject_GC_UnTrack(self);
    type->tp_free((PyObject *)self);
    if (hot.free_scope_type != NULL && PyType_IsSubtype(type, hot.free_scope_type))
        Py_DECREF(type); /* a class made in Python: each object owns a reference to it */
}

static inline int is_reusable(const Scope *self)
{
    return self->path != &no_path && self->frame == NULL;
}

/* Keep a named scope for the next call. It releases the recorder, which may be freed meanwhile. */
static inline void wait_for_call(Scope *self)
{
    Core *core = self->core;
    self->core = NULL;
    Py_DECREF(core);
}

static void Scope_dealloc(Scope *self)
{
    if (!is_reusable(self)) {
        give_up_scope(self);
        return;
    }
    Py_SET_REFCNT(self, 1);
    wait_for_call(self);
}

/* Reuse the scopes of a Python subclass as those of `Scope`, because it only adds methods. */
static void keep_scopes_of(PyTypeObject *type)
{
    if (hot.free_scope_type != NULL || type->tp_basicsize != ScopeType.tp_basicsize)
        return;
    hot.free_scope_type = (PyTypeObject *)Py_NewRef((PyObject *)type);
    type->tp_dealloc = (destructor)Scope_dealloc;
}

/* Return a scope of a site: a new reference, NULL with an exception. Takes the reference to the site. */
static Scope *new_scope(Core *core, PyObject *site)
{
    PyTypeObject *type = core->scope_type != NULL ? (PyTypeObject *)core->scope_type : &ScopeType;
    Scope *scope;
    if (type == hot.free_scope_type && free_scope_count > 0) {
        scope = free_scopes[--free_scope_count];
    } else if ((scope = empty_scope(type)) == NULL) {
        Py_DECREF(site);
        return NULL;
    }
    scope->core = (Core *)Py_NewRef(core);
    scope->site = site;
    return scope;
}

static SELDOM PyObject *enter_otherwise(Scope *self)
{
    if (self->site != NULL && self->core->on && self->frame == NULL) {
        Pass *pass = pass_of(self->core, self->site);
        if (pass != NULL) {
            count_passed(pass);
            return Py_NewRef((PyObject *)self);
        }
        Py_CLEAR(self->spare);
        self->frame = open_frame(self->core, self->site, self->path != &no_path ? self : NULL, self->attributes, OPEN);
        if (self->frame == NULL && count_loss(self->core) < 0)
            return NULL;
    }
    return Py_NewRef((PyObject *)self);
}

/* Begin the span of a scope. It is fast if its name was used here before, and no other feature is on. */
static inline __attribute__((always_inline)) PyObject *Scope_enter(Scope *self)
{
    Frame *open = self->spare;
    if (open == NULL || !begin_known(self->core, open, self->path, 1))
        return enter_otherwise(self);
    self->spare = NULL;
    self->frame = open;
    Py_INCREF(self);
    return (PyObject *)self;
}

static SELDOM PyObject *exit_otherwise(Scope *self, PyObject *error, int64_t end_ns)
{
    Frame *frame = self->frame;
    self->frame = NULL;
    int failed = frame == NULL ? 0 : close_frame(self->core, frame, error, 0, end_ns);
    Py_XDECREF(frame);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Do the rare last steps of an end. Freeing a request may run code of the service. */
static SELDOM PyObject *exit_with(Core *core, totals_t *full, PyObject *request)
{
    if (full != NULL)
        count_all_waiting(core, full);
    Py_XDECREF(request);
    Py_RETURN_NONE;
}

/* End the span of a scope. It is fast for the innermost span of the current context, if it has only times and its Frame
 * can be reused. After the clock is read, only the last step is a call. */
static inline __attribute__((always_inline)) PyObject *Scope_exit(Scope *self, PyObject *error)
{
    if (self->frame == NULL || error != hot.none)
        return exit_otherwise(self, error, 0);
    Core *core = self->core;
    int64_t end_ns = is_on_and_nothing_else(core) ? read_monotonic() : read_clock(core);
    core = self->core;
    Frame *open = self->frame;
    frame_t *frame = open->frame;
    Ring *ring = thread_cache()->ring;
    if (frame->ring != ring || Py_REFCNT(open) != 2 || ring->context_version != context_version_of(ring->state))
        return exit_otherwise(self, Py_None, end_ns);
    Current *current = ring->current;
    int64_t total_ns = end_ns - frame->start_ns;
    if (total_ns < 0 || current->top != frame || !is_open_as_begun(frame) || frame->node->ring_tag != ring->tag ||
        ((uintptr_t)frame->attributes | (uintptr_t)frame->published | (uintptr_t)frame->pair | (uintptr_t)open->stepped |
         (uint64_t)open->children_waited_ns) != 0 ||
        (current->eager && (current->published_id == frame->span_id || !publishes_requests_alone(core, current))))
        return exit_otherwise(self, Py_None, end_ns);
    count_against_above(current, frame, ring, end_ns);
    current->top = frame->above;
    READ_ANEW();
    write_row(ring, frame, frame->node, end_ns, total_ns, NULL, 0);
    READ_ANEW();
    totals_t *totals = frame->node->totals;
    int is_full = count_call(&self->core, totals, frame, total_ns, total_ns, 0);
    READ_ANEW();
    open = self->frame;
    PyObject *request = frame->request;
    self->frame = NULL;
    self->spare = open;
    self->spare_frame = frame;
    Py_SET_REFCNT(open, 1); /* the chain's reference is gone */
    Py_SET_REFCNT(ring, Py_REFCNT(ring) - 1); /* never the last one, because the thread has another reference */
    frame->ring = NULL;
    frame->start_ns = 0;
    frame->request = NULL;
    if (is_full || request != NULL)
        return exit_with(self->core, is_full ? totals : NULL, request != (PyObject *)open ? request : NULL);
    return Py_NewRef(hot.none);
}

static PyObject *Scope_annotate(Scope *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (self->frame == NULL)
        Py_RETURN_NONE;
    return annotate_by(self->core, 0, self->frame, args, nargs, names);
}

static PyMethodDef Scope_methods[] = {
    METHOD(Scope, annotate, METH_FASTCALL | METH_KEYWORDS,
           "annotate($self, attributes=None, /, **more)\n--\n\nSet attributes of the span; see instrument.annotate."),
    {NULL},
};

/* `__enter__` or `__exit__` as an attribute of the class. */
typedef struct {
    PyObject_HEAD
    size_t at; /* offset of the bound method in a scope */
    vectorcallfunc vectorcall;
    const char *name;
} ScopeMethod;

static SELDOM PyObject *get_otherwise(ScopeMethod *self, PyObject *scope)
{
    if (scope == NULL || scope == Py_None)
        return Py_NewRef((PyObject *)self);
    if (!PyObject_TypeCheck(scope, &ScopeType))
        return PyErr_Format(PyExc_TypeError, "%s() of a scope asked of %R", self->name, Py_TYPE(scope));
    BoundMethod *bound = (BoundMethod *)((char *)scope + self->at);
    if (Py_REFCNT(bound) == 0)
        Py_INCREF(scope);
    Py_SET_REFCNT(bound, Py_REFCNT(bound) + 1);
    return (PyObject *)bound;
}

static PyObject *ScopeMethod_get(ScopeMethod *self, PyObject *scope, PyObject *Py_UNUSED(owner))
{
    BoundMethod *bound = (BoundMethod *)((char *)scope + self->at);
    if (scope == NULL || Py_TYPE(scope) != hot.free_scope_type || Py_REFCNT(bound) != 0)
        return get_otherwise(self, scope);
    Py_SET_REFCNT(bound, 1);
    return Py_INCREF(scope), (PyObject *)bound;
}

/* Return the scope that a method of the class is called with: borrowed, NULL with an exception. */
static Scope *scope_of_call(ScopeMethod *self, PyObject *const *args, size_t nargsf)
{
    if (PyVectorcall_NARGS(nargsf) > 0 && PyObject_TypeCheck(args[0], &ScopeType))
        return (Scope *)args[0];
    PyErr_Format(PyExc_TypeError, "%s() needs a scope", self->name);
    return NULL;
}

static PyObject *
enter_bound(BoundMethod *self, PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(nargsf), PyObject *Py_UNUSED(names))
{
    Scope *scope = (Scope *)((char *)self - offsetof(Scope, enter));
    __asm__("" : "+r"(scope)); /* computes one address; else both would take a register */
    return Scope_enter(scope);
}

static PyObject *exit_bound(BoundMethod *self, PyObject *const *args, size_t nargsf, PyObject *Py_UNUSED(names))
{
    Scope *scope = (Scope *)((char *)self - offsetof(Scope, exit));
    __asm__("" : "+r"(scope));
    if ((nargsf & 2) != 0) /* two or three arguments, as a `with` statement passes */
        return Scope_exit(scope, args[1]);
    return exit_otherwise(scope, PyVectorcall_NARGS(nargsf) > 1 ? args[1] : Py_None, 0);
}

static PyObject *enter_unbound(ScopeMethod *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Scope *scope = scope_of_call(self, args, nargsf);
    return scope == NULL ? NULL : enter_bound(&scope->enter, args, nargsf, names);
}

static PyObject *exit_unbound(ScopeMethod *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Scope *scope = scope_of_call(self, args, nargsf);
    return scope == NULL ? NULL : exit_bound(&scope->exit, args + 1, PyVectorcall_NARGS(nargsf) - 1, names);
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
    .tp_doc = "A method of scopes that a `with` statement calls.",
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(ScopeMethod, vectorcall),
    .tp_descr_get = (descrgetfunc)ScopeMethod_get,
    .tp_members = ScopeMethod_members,
};

/* Release the scope that the method is bound to. It may run code of the service. A reusable scope is kept without a
 * look at its type. */
static void BoundMethod_dealloc(BoundMethod *self)
{
    Scope *scope = (Scope *)((char *)self - self->at);
    if (Py_REFCNT(scope) == 1 && is_reusable(scope))
        wait_for_call(scope);
    else
        Py_DECREF(scope);
}

static PyTypeObject BoundMethodType = {
    RECORDER_TYPE(BoundMethod, sizeof(BoundMethod), Py_TPFLAGS_HAVE_VECTORCALL),
    .tp_doc = "A method that a `with` statement calls, bound to its scope.",
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(BoundMethod, vectorcall),
};

/* Give the class of scopes its two methods, which are in one cache line. */
static int add_scope_methods(void)
{
    static ScopeMethod methods[] __attribute__((aligned(LINE))) = {
        {PyObject_HEAD_INIT(&ScopeMethodType) offsetof(Scope, enter), (vectorcallfunc)enter_unbound, "__enter__"},
        {PyObject_HEAD_INIT(&ScopeMethodType) offsetof(Scope, exit), (vectorcallfunc)exit_unbound, "__exit__"},
    };
    for (int i = 0; i < 2; i++)
        if (PyDict_SetItemString(ScopeType.tp_dict, methods[i].name, (PyObject *)&methods[i]) < 0)
            return -1;
    return 0;
}

static PyMemberDef Scope_members[] = {
    {"_recorder", T_OBJECT, offsetof(Scope, core), READONLY, NULL},
    {"_site", T_OBJECT, offsetof(Scope, site), READONLY, NULL},
    {"_attributes", T_OBJECT, offsetof(Scope, attributes), READONLY, NULL},
    {NULL},
};

static int Scope_set_frame(Scope *self, PyObject *value, void *Py_UNUSED(closure))
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
    {"_frame", object_at, (setter)Scope_set_frame, NULL, (void *)offsetof(Scope, frame)},
    {NULL},
};

static PyTypeObject ScopeType = {
    COLLECTED_TYPE(Scope, SIZE_IN_LINES(Scope), Py_TPFLAGS_BASETYPE),
    .tp_doc = "A span around a block: Scope(recorder, site, attributes=None).",
    .tp_new = Scope_new,
    .tp_methods = Scope_methods,
    .tp_members = Scope_members,
    .tp_getset = Scope_getset,
};

/* Store a span that began at a time in the past and ends now, with facts that end it. Return -1 with an exception of the
 * service set. */
static int record_past(Core *core, PyObject *site, int64_t start_ns, PyObject *attributes, PyObject *pair, int has_no_self,
                       PyObject *error, int has_waited)
{
    int64_t end_ns = read_clock(core);
    Ring *ring;
    Current *current = current_of(core, &ring);
    Frame *self = current == NULL ? NULL : new_frame_object();
    if (self != NULL && (self->frame->attributes = with_link(current, attributes)) != NULL)
        current = current_of(core, &ring); /* making a dict may have run code of the service */
    if (self == NULL || current == NULL) {
        Py_XDECREF(self);
        return count_loss(core);
    }
    frame_t *frame = self->frame;
    identify(core, ring, current, frame, site, NULL, OPEN);
    if (frame->node->is_request && !is_open_request(frame->request))
        frame->root_id = frame->span_id |= REQUEST_BIT;
    frame->pair = Py_XNewRef(pair);
    begin_frame(frame, start_ns);
    Py_INCREF(ring); /* owned by the frame */
    if (!has_waited)
        count_against_above(current, frame, ring, end_ns);
    if (has_no_self)
        frame->children_ns = end_ns - start_ns;
    store_span(core, ring, frame, end_ns, -1, has_waited ? end_ns - start_ns : 0, error);
    int failed = frame->pair != NULL ? end_on_device(ring, frame, end_ns) : 0;
    frame->state = CLOSED;
    Py_DECREF(self);
    return failed;
}

static PyObject *Core_record(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 3 || nargs > 6)
        return PyErr_Format(PyExc_TypeError, "record(site, start_ns, attributes, pair=None, has_no_self=False, error=None)");
    PyObject *given[6] = {NULL};
    for (Py_ssize_t i = 0; i < nargs; i++)
        given[i] = args[i] == Py_None ? NULL : args[i];
    int64_t start_ns = PyLong_AsLongLong(args[1]);
    if (start_ns == -1 && PyErr_Occurred())
        return NULL;
    int failed = record_past(self, args[0], start_ns, given[2], given[3], given[4] == Py_True, given[5], 0);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *no_scope(Core *self)
{
    if (self->no_scope == NULL || count_loss(self) < 0)
        return NULL;
    return Py_NewRef((PyObject *)self->no_scope);
}

static PyObject *Core_new_span(Core *self, PyObject *site)
{
    Scope *scope = new_scope(self, Py_NewRef(site));
    return scope != NULL ? (PyObject *)scope : no_scope(self);
}

/* Return the cache entry for a name. */
static inline cached_t *place_of_name(PyObject *name)
{
    return &scope_names[((uintptr_t)name >> 4) & (NAMES_CACHED - 1)];
}

/* Cache the scope of a name's site for reuse. The entry owns a reference to the name, so the address identifies it. */
static void keep_name(Core *core, PyObject *name, Scope *scope)
{
    if (Py_TYPE(scope) != hot.free_scope_type)
        return;
    cached_t *place = place_of_name(name);
    if (place->version == (uintptr_t)core && place->path.site == scope->site && place->instance == name)
        return; /* it is in use */
    PyObject *before = place->instance;
    Scope *scope_before = place->scope;
    place->instance = Py_NewRef(name);
    place->path = (path_t){.site = scope->site};
    place->version = (uintptr_t)core;
    place->scope = scope;
    scope->path = &place->path;
    detach_scope(scope_before); /* this line and the next may run code of the service */
    Py_XDECREF(before);
}

/* Return a scope for scope(name), or with plain keys for scope(name, key=) and scope(name, batch=), if the site is known
 * by name. Python makes all others. */
static SELDOM PyObject *scope_otherwise(Core *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    PyObject *site = NULL, *word = names != NULL && PyTuple_GET_SIZE(names) == 1 ? PyTuple_GET_ITEM(names, 0) : NULL;
    if (nargs == 1 && PyUnicode_CheckExact(args[0]) && self->scope_type != NULL)
        site = PyDict_GetItemWithError(self->user_sites, args[0]); /* borrowed */
    int is_muted = site != NULL && Py_TYPE(site) == (PyTypeObject *)self->scope_type;
    if (site != NULL && names == NULL) {
        if (is_muted && Py_REFCNT(site) == 1 && ((Scope *)site)->frame == NULL)
            return Py_NewRef(site); /* reusable, because only the dict has a reference */
        Scope *scope = new_scope(self, Py_NewRef(is_muted ? ((Scope *)site)->site : site));
        if (scope != NULL && !is_muted)
            keep_name(self, args[0], scope);
        return scope != NULL ? (PyObject *)scope : no_scope(self);
    }
    if (site != NULL && !is_muted && (word == str_key_word || word == str_batch_word)) {
        Py_INCREF(site);
        PyObject *facts = facts_of_given(args[1], word == str_batch_word);
        Scope *scope = facts == NULL ? NULL : new_scope(self, Py_NewRef(site));
        Py_DECREF(site);
        if (scope != NULL) {
            scope->attributes = facts;
            return (PyObject *)scope;
        }
        Py_XDECREF(facts);
    }
    PyObject *method = PyErr_Occurred() ? NULL : PyObject_GetAttr((PyObject *)self, str_make_scope);
    PyObject *scope = method == NULL ? NULL : PyObject_Vectorcall(method, args, (size_t)nargs, names);
    Py_XDECREF(method);
    if (scope == NULL && PyErr_ExceptionMatches(PyExc_MemoryError))
        return no_scope(self);
    return scope;
}

/* Return a scope. It is fast for a cached name whose scope is unused. */
static PyObject *Core_scope(Core *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (nargs != 1 || names != NULL)
        return scope_otherwise(self, args, nargs, names);
    const cached_t *place = place_of_name(args[0]);
    Scope *scope = place->scope;
    if (place->instance != args[0] || place->version != (uintptr_t)self || scope->core != NULL)
        return scope_otherwise(self, args, nargs, names);
    __builtin_prefetch(place->path.newest.step);
    __builtin_prefetch(scope->spare, 1);
    __builtin_prefetch(scope->spare_frame, 1);
    __builtin_prefetch((char *)scope->spare_frame + LINE, 1);
    scope->core = (Core *)Py_NewRef((PyObject *)self);
    return (PyObject *)scope; /* with the entry's reference */
}

PyDoc_STRVAR(scope_doc,
             "scope($self, name, *, kind=None, device=False, attributes=None, phase=None, stream=None, key=None, batch=None, "
             "carrier=None)\n--\n\n"
             "Time a block, as a span: ``with scope(\"tokenise\"):``, also ``async with``.\n\n"
             "    with scope(\"tokenise\", attributes={\"model\": \"7b\"}):\n"
             "        tokens = tokenizer(text)\n\n"
             "- `name`: the name that reports group by, of a small set; data belongs into `attributes`\n"
             "- `attributes`: facts of this span; `annotate` adds more from within\n"
             "- `kind`: the kind of work, \"user\" by default; the error for an unknown kind lists all kinds\n"
             "- `phase`: the part of the work, such as \"prepare\" or \"post\"; it makes the kind \"phase\"\n"
             "- `device`: also take the block's time on the current stream of torch, cupy or numba; `stream` names another\n"
             "  stream, such as `torch.cuda.current_stream(1)`, or its address\n"
             "- `key`: the id of the request that the block works for; spans of other processes may have it, too\n"
             "- `batch`: the ids of all requests in a batch; a mapping from id to weight gives each a share of the time\n"
             "- `carrier`: headers with the `traceparent` of a caller; a request continues the trace of that caller\n\n"
             "Exceptions pass untouched and mark the span. While recording is off, a scope costs one branch. Raises\n"
             "`TargetError` for a bad name, kind, phase or stream.");
