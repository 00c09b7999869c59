/* Differences between versions of Python, and fields that CPython does not document. A part of `_recorder.c`. */

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

#define context_version_of(state) ((state)->context_ver) /* changes as the thread enters or leaves a context */

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

/* Keep the collector from running while a context variable changes. If a finaliser records in the middle, it sets a
 * variable of this context, and CPython goes on with a freed mapping. From 3.12 on, CPython collects elsewhere. */
#if PY_VERSION_HEX < 0x030C0000
#define pause_collector() PyGC_Disable()
#else
#define pause_collector() 0
#endif

static inline void resume_collector(int was_enabled)
{
    if (was_enabled)
        PyGC_Enable();
}

/* Return the version of a method's `sites`: a number that is never reused. */
#if PY_VERSION_HEX < 0x030C0000
#define version_of(sites) (((PyDictObject *)(sites))->ma_version_tag)
#define follow_changes(sites) 1
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
