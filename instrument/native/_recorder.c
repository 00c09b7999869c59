/* The recorder: the hot path in C.
 *
 * A call costs two clock reads, a few pointer moves and one fixed-size row. Nothing is allocated: the frame of a
 * function's span comes from a list of used ones; spans that may outlive a call (scopes, coroutines, generators) are
 * Frame objects. Both kinds are linked into one chain per context, whose innermost frame is `Current.top`. No frame
 * is on the C stack, because a chain may be read when that stack is gone or elsewhere: greenlets move theirs to the
 * heap while another one of the same context runs, a fork leaves those of other threads behind, and so does the end
 * of the interpreter.
 *
 * Code that allocates an object, or gives one up, may run code of the host's (the collector, finalisers), and that code
 * may record, reset, end scopes and change context. So state is consistent before such a place and read anew after it.
 *
 * Which chain is current follows PyThreadState.context: every task, callback and copied context has a Context of its
 * own, and a Current object in one context variable. A new context finds there what its maker published: a Published
 * object, the identity of the span that was innermost when the context was copied, which says whether that is still
 * open, and if not, which span above it was the nearest. Publishing costs a context variable write, which is more
 * than the rest of a call, and sends the next span the long way to its chain: so `publish` is called by what copies a
 * context. Under an event loop contexts are also copied behind our back: there requests are published as they begin and
 * end, and each span is where the loop does not report the tasks that it makes.
 *
 * A service computes between two spans, and that leaves nothing of ours in the processor's caches: a span of 60 ns costs
 * 600 then, all of it waiting for memory. So what a span touches is counted in cache lines, and has few: what a call
 * changes is at the begin of its object, what a lookup would walk to is remembered where the call comes by anyway. A
 * clock that is read waits for what was asked of memory before it, so what only the end needs is fetched while the
 * host's own work runs, and nothing of it is looked at before.
 *
 * All state is guarded by the GIL. A build without one turns the GIL on when it imports this module.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_recording_layout.h"
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
#include "_recorder_callables.h"
#include "_recorder_scopes.h"
#include "_recorder_stepped.h"
#include "_recorder_generators.h"
#include "_recorder_requests.h"
#include "_recorder_functions.h"
#include "_recorder_renaming.h"
#include "_recorder_life.h"
#include "_recorder_core.h"
#include "_recorder_numbers.h"

static PyMethodDef module_methods[] = {
    {"header_values", (PyCFunction)(void (*)(void))header_values, METH_FASTCALL,
     "Values of headers by their names: header_values(pairs, names)."},
    {"mark", (PyCFunction)(void (*)(void))mark, METH_FASTCALL,
     "Record an event: mark(cuEventRecord, cuStreamIsCapturing, cuStreamGetId or 0, releases, event, stream), all as "
     "addresses. The stream's number, or what the driver says against it below 0."},
    {"outcome_of", told_outcome, METH_O, "The outcome of a span that an exception broke off, or None."},
    {"measure", measure, METH_VARARGS,
     "Time pairs of events: measure(cuEventQuery, cuEventElapsedTime, anchor or 0, [begin, end, begin, end, ...]). "
     "A list of (error, device ms, ms since the anchor), as long as there are pairs that have happened."},
    {NULL},
};

static int execute(PyObject *made)
{
    /* Types and frames are the process's. Where they may not be, nothing is recorded. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "instrument.native._recorder works in the main interpreter only");
        return -1;
    }
    find_clock();
    read_both(&loaded_ticks, &loaded_ns);
    find_own_variables();
    if (ready_stand_ins() < 0)
        return -1;
    PyTypeObject *own_types[] = {&MarkType, &CurrentType, &PublishedType, &SteppedType, &AsyncStepType, &CarriedType, &ScopeMethodType, &BoundMethodType};
    for (size_t i = 0; i < sizeof(own_types) / sizeof(own_types[0]); i++)
        if (PyType_Ready(own_types[i]) < 0)
            return -1;
    PyTypeObject *types[] = {&CoreType, &FrameType, &FunctionType_, &KeysType, &NumberType, &PassType, &RingType, &ScopeType};
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
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
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
