/* The recorder: the hot path in C.
 *
 * A call costs two readings of the clock, a few pointer moves and one row of fixed size. It allocates nothing: the
 * frame of a function's span comes from a list of free frames. Spans that may outlive a call (scopes, coroutines,
 * generators) have Frame objects. Both kinds are linked into one chain per context, and `Current.top` is its innermost
 * frame. No frame is on the C stack, because greenlets move their stacks, and a fork leaves those of other threads.
 *
 * Code that allocates or releases an object may run code of the service (the collector, finalisers), which may record,
 * reset, end scopes and change the context. So all state is consistent before such a place, and is read again after it.
 *
 * PyThreadState.context decides which chain is current. Every task, callback and copied context has a Context of its
 * own, whose value of one context variable leads to a Current object. A new context inherits a Published object: the
 * span that was innermost when the context was copied. It shows whether that span or one above it is open. To publish
 * costs more than the rest of a call, so only code that copies a context calls `publish`. Event loops copy contexts
 * without it. There, requests are published as they begin and end, and each span is if new tasks are not reported.
 *
 * After other work of the service, none of our data is in the processor's caches. Then a span of 60 ns takes 600 ns,
 * nearly all of it waiting for memory. So each span touches few cache lines: the fields that a call changes are at the
 * begin of their objects, and results of lookups are in lines that a call reads anyway. Reading the clock waits for
 * earlier reads of memory, so memory that only the end needs is prefetched while the wrapped code runs.
 *
 * Each part says what in it is hot and what is cold. The GIL protects all state.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "_recording_layout.h"
#include "_recorder_python.h"
#include "_recorder_data.h"
#include "_recorder_clock.h"
#include "_recorder_memory.h"
#include "_recorder_facts.h"
#include "_recorder_tally.h"
#include "_recorder_ring.h"
#include "_recorder_context.h"
#include "_recorder_device.h"
#include "_recorder_rows.h"
#include "_recorder_span.h"
#include "_recorder_keys.h"
#include "_recorder_calls.h"
#include "_recorder_scopes.h"
#include "_recorder_stepped.h"
#include "_recorder_generators.h"
#include "_recorder_requests.h"
#include "_recorder_function_type.h"
#include "_recorder_renaming.h"
#include "_recorder_life.h"
#include "_recorder_core_type.h"
#include "_recorder_numbers.h"

static PyMethodDef module_methods[] = {
    {"header_values", (PyCFunction)(void (*)(void))header_values, METH_FASTCALL,
     "Return the values of headers by their names: header_values(pairs, names)."},
    {"mark", (PyCFunction)(void (*)(void))mark, METH_FASTCALL,
     "Record an event: mark(cuEventRecord, cuStreamIsCapturing, cuStreamGetId or 0, releases, event, stream), all as "
     "addresses. Return the stream's number, or the driver's error as a negative number."},
    {"outcome_of", report_outcome, METH_O, "Return the outcome of a span that an exception ended, or None for a failure."},
    {"measure", measure, METH_VARARGS,
     "Time pairs of events: measure(cuEventQuery, cuEventElapsedTime, anchor or 0, [begin, end, begin, end, ...]). "
     "Return a list of (error, device ms, ms since the anchor), up to the first pair that has not happened."},
    {NULL},
};

static int execute(PyObject *made)
{
    /* Types and frames belong to the process, so no other interpreter can have its own. Nothing is recorded there. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "instrument.native._recorder works in the main interpreter only");
        return -1;
    }
    find_clock();
    read_both(&loaded_ticks, &loaded_ns);
    find_thread_cache();
    if (ready_stand_ins() < 0)
        return -1;
    PyTypeObject *own_types[] = {&MarkType,      &CurrentType, &PublishedType,   &SteppedType,
                                 &AsyncStepType, &CarriedType, &ScopeMethodType, &BoundMethodType};
    for (size_t i = 0; i < sizeof(own_types) / sizeof(own_types[0]); i++)
        if (PyType_Ready(own_types[i]) < 0)
            return -1;
    PyTypeObject *types[] = {&CoreType,   &FrameType, &FunctionType_, &KeysType,
                             &NumberType, &PassType,  &RingType,      &ScopeType};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (PyModule_AddType(made, types[i]) < 0)
            return -1;
    if (add_scope_methods() < 0)
        return -1;
    PyType_Modified(&ScopeType);
#define ADDRESS_OF_TEXT(name, text) {&str_##name, text},
    struct {
        PyObject **kept;
        const char *text;
    } texts[] = {TEXTS(ADDRESS_OF_TEXT)};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        if ((*texts[i].kept = PyUnicode_InternFromString(texts[i].text)) == NULL)
            return -1;
    if (name_of_type == NULL) {
        PyObject *names = PyObject_GetAttrString((PyObject *)&PyType_Type, "__dict__");
        name_of_type = names == NULL ? NULL : PyMapping_GetItemString(names, "__name__");
        Py_XDECREF(names);
        if (name_of_type == NULL)
            return -1;
    }
    return PyModule_AddIntConstant(made, "ROW_BYTES", sizeof(row_t));
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    SLOTS_OF_VERSION
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.native._recorder",
    .m_doc = "The hot path of instrument.recorder.recorder.",
    .m_methods = module_methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__recorder(void)
{
    return PyModuleDef_Init(&module);
}
