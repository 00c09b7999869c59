/* Attributes that stay the text they were read from until somebody asks for them: `attributes` of a span is then a piece of
 * memory that it shares with its neighbours, and in it, from `attributes_at` on, stands an object of JSON. A dict of three
 * numbers is 300 bytes, its text 70, and most views ask for none.
 *
 * Whoever makes such a span has looked through the text: it is JSON, and names have no escapes.
 */

#ifndef INSTRUMENT_ATTRIBUTES_H
#define INSTRUMENT_ATTRIBUTES_H

#include "_spans.h"
#include "chrome/_json.h"

static inline int
is_unread(const Span *span)
{
    return span->attributes != NULL && PyBytes_CheckExact(span->attributes);
}

static inline cursor_t
unread_text(const Span *span)
{
    const char *text = PyBytes_AS_STRING(span->attributes);
    return (cursor_t){text + span->attributes_at, text + PyBytes_GET_SIZE(span->attributes)};
}

/* The numbers, texts and truths of an object of JSON: a new dict, NULL with an error. */
static inline PyObject *
attributes_in(const char *text, size_t length)
{
    static PyObject *loads;
    if (loads == NULL) {
        PyObject *json = PyImport_ImportModule("json");
        loads = json == NULL ? NULL : PyObject_GetAttrString(json, "loads");
        Py_XDECREF(json);
        if (loads == NULL)
            return NULL;
    }
    PyObject *decoded = PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, NULL);
    PyObject *all = decoded == NULL ? NULL : PyObject_CallOneArg(loads, decoded);
    PyObject *found = all == NULL || !PyDict_CheckExact(all) ? NULL : PyDict_New(), *key, *value;
    Py_ssize_t at = 0;
    while (found != NULL && PyDict_Next(all, &at, &key, &value)) {
        if (!PyUnicode_Check(value) && !PyLong_Check(value) && !PyFloat_Check(value))
            continue;
        Py_INCREF(key);
        PyUnicode_InternInPlace(&key);
        if (PyDict_SetItem(found, key, value) < 0)
            Py_CLEAR(found);
        Py_DECREF(key);
    }
    if (found == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "attributes are an object of JSON");
    Py_XDECREF(decoded);
    Py_XDECREF(all);
    return found;
}

/* The attributes of a span as Python has them, read if they were not: a new reference, NULL with an error. */
static inline PyObject *
read_attributes(Span *span)
{
    if (span->attributes == NULL)
        return PyDict_New();
    if (!is_unread(span))
        return Py_NewRef(span->attributes);
    cursor_t text = unread_text(span);
    const char *first = text.at;
    if (!skip_value(&text, 0)) {
        PyErr_SetString(PyExc_ValueError, "attributes are an object of JSON");
        return NULL;
    }
    PyObject *found = attributes_in(first, (size_t)(text.at - first));
    if (found != NULL && is_unread(span))
        Py_SETREF(span->attributes, Py_NewRef(found));
    return found;
}

/* Whether a span has an attribute, which is looked for in the text without reading it. -1 with an error. */
static inline int
has_attribute(Span *span, PyObject *name)
{
    if (span->attributes == NULL)
        return 0;
    if (!is_unread(span)) {
        PyObject *attributes = Py_NewRef(span->attributes);
        int has = PyDict_CheckExact(attributes) ? PyDict_Contains(attributes, name)
                                                : PySequence_Contains(attributes, name);
        Py_DECREF(attributes);
        return has;
    }
    Py_ssize_t size;
    const char *wanted = PyUnicode_AsUTF8AndSize(name, &size);
    if (wanted == NULL)
        return -1;
    cursor_t in = unread_text(span);
    part_t key;
    int has = 0;
    if (!take(&in, '{'))
        return 0;
    do {
        blanks(&in);
        if (!plain_string(&in, &key.text, &key.length) || !take(&in, ':'))
            break;
        blanks(&in);
        if (key.length == (size_t)size && memcmp(key.text, wanted, key.length) == 0) /* the last of a name counts */
            has = *in.at != '[' && *in.at != '{' && *in.at != 'n';
    } while (skip_value(&in, 1) && take(&in, ','));
    return has;
}

#endif
