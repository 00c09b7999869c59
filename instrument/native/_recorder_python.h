/* Differences between the versions of Python, and the fields of CPython that it documents nowhere. A part of
 * `_recorder.c`. */

#if PY_VERSION_HEX >= 0x030D0000
#define UNCHECKED_THREAD_STATE() PyThreadState_GetUnchecked()
#else
#define UNCHECKED_THREAD_STATE() _PyThreadState_UncheckedGet()
#endif

/* The module's slots that declare to the interpreter what older versions take for granted. */
#if PY_VERSION_HEX >= 0x030D0000
#define SLOTS_OF_VERSION                                                                                              \
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, {Py_mod_gil, Py_MOD_GIL_USED},
#elif PY_VERSION_HEX >= 0x030C0000
#define SLOTS_OF_VERSION {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#else
#define SLOTS_OF_VERSION
#endif

/* Return the number that CPython raises whenever the thread enters or leaves a context. */
static inline uint64_t context_version_of(const PyThreadState *state)
{
    return state->context_ver;
}

/* Return the object of a weak reference: a new reference, NULL for none. No exception is set. */
static PyObject *referent(PyObject *reference)
{
    if (reference == NULL)
        return NULL;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object = NULL;
    if (PyWeakref_GetRef(reference, &object) < 0)
        PyErr_Clear();
    return object;
#else
    PyObject *object = PyWeakref_GetObject(reference);
    return object == NULL || object == Py_None ? NULL : Py_NewRef(object);
#endif
}

/* Keep the collector from running while a context variable changes. It could run a finaliser in the middle. If that
 * finaliser records, it sets a variable of this context, and CPython goes on with a mapping that has been freed. From
 * 3.12 on, CPython collects elsewhere. Return the state for `resume_collector`. */
static inline int pause_collector(void)
{
#if PY_VERSION_HEX < 0x030C0000
    return PyGC_Disable();
#else
    return 0;
#endif
}

static inline void resume_collector(int was_enabled)
{
    if (was_enabled)
        PyGC_Enable();
}

/* Return the version of a method's `sites`: a number that is never reused. */
#if PY_VERSION_HEX < 0x030C0000
static inline uint64_t version_of(PyObject *sites)
{
    return ((PyDictObject *)sites)->ma_version_tag;
}

static int follow_changes(PyObject *Py_UNUSED(sites))
{
    return 1;
}
#else
static uint64_t changes = 1; /* the number of changes of all watched dicts */
static int watcher = -1;

static int note_change(PyDict_WatchEvent Py_UNUSED(event), PyObject *Py_UNUSED(sites), PyObject *Py_UNUSED(key),
                       PyObject *Py_UNUSED(value))
{
    changes++;
    return 0;
}

static inline uint64_t version_of(PyObject *Py_UNUSED(sites))
{
    return changes;
}

/* Watch the changes of a dict. Return false if the process has no free watcher: then each call looks into `sites`. */
static int follow_changes(PyObject *sites)
{
    if (watcher < 0)
        watcher = PyDict_AddWatcher(note_change);
    if (watcher >= 0 && PyDict_Watch(watcher, sites) == 0)
        return 1;
    PyErr_Clear();
    return 0;
}
#endif
