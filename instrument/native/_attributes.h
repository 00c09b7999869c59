/* Attributes that stay the text they were read from until somebody asks for them: `attributes` of a span is then a piece of
 * memory that it shares with its neighbours, and in it, from `attributes_at` on, stands an object of JSON. A dict of three
 * numbers is 280 bytes, its text 60, and most views ask for none.
 *
 * Whoever makes such a span has looked through the text: it is JSON, and names have no escapes.
 */

#ifndef INSTRUMENT_ATTRIBUTES_H
#define INSTRUMENT_ATTRIBUTES_H

#include "_spans.h"
#include "_json.h"

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

/* Whether what comes is a number, text or truth. */
static inline int
is_scalar(const cursor_t *in)
{
    return in->at < in->end && *in->at != '[' && *in->at != '{' && *in->at != 'n';
}

/* Those of a text in which nothing needs a closer look (an escape, a name twice): a new dict; NULL, maybe without an error. */
static inline PyObject *
plain_attributes_in(const char *text, size_t length)
{
    cursor_t in = {text, text + length};
    PyObject *found = PyDict_New();
    part_t part;
    if (found == NULL || !take(&in, '{') || take(&in, '}'))
        return found;
    int plain, others = 0; /* which are no attributes, but may be so under the same name */
    do {
        blanks(&in);
        plain = plain_string(&in, &part.text, &part.length) && take(&in, ':');
        PyObject *key = plain ? shared_text(&part) : NULL, *value = NULL;
        blanks(&in);
        if (key != NULL && is_scalar(&in))
            value = plain_value(&in);
        else if (key != NULL && skip_value(&in, 1)) {
            value = Py_NewRef(Py_None);
            others++;
        }
        Py_ssize_t before = PyDict_GET_SIZE(found);
        plain = value != NULL && PyDict_SetItem(found, key, value) == 0 && PyDict_GET_SIZE(found) > before;
        Py_XDECREF(key);
        Py_XDECREF(value);
    } while (plain && take(&in, ','));
    PyObject *all = found, *name, *value;
    if (!plain || others > 0)
        found = plain ? PyDict_New() : NULL;
    Py_ssize_t at = 0;
    while (found != NULL && others > 0 && PyDict_Next(all, &at, &name, &value))
        if (value != Py_None && PyDict_SetItem(found, name, value) < 0)
            Py_CLEAR(found);
    if (found != all)
        Py_DECREF(all);
    return found;
}

/* The numbers, texts and truths of an object of JSON: a new dict, NULL with an error. */
static inline PyObject *
attributes_in(const char *text, size_t length)
{
    PyObject *plain = plain_attributes_in(text, length);
    if (plain != NULL || PyErr_Occurred())
        return plain;
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
    PyObject *kept = Py_NewRef(span->attributes), *found = NULL; /* others may read or set them meanwhile */
    if (!PyBytes_CheckExact(kept))
        return kept;
    cursor_t text = unread_text(span);
    const char *first = text.at;
    if (skip_value(&text, 0))
        found = attributes_in(first, (size_t)(text.at - first));
    else
        PyErr_SetString(PyExc_ValueError, "attributes are an object of JSON");
    if (found != NULL && span->attributes == kept)
        Py_SETREF(span->attributes, Py_NewRef(found));
    else if (found != NULL && span->attributes != NULL)
        Py_SETREF(found, Py_NewRef(span->attributes));
    Py_DECREF(kept);
    return found;
}

#define MOST_KEPT ((size_t)1 << 30)

/* Whether a text goes into the piece of memory that is being filled; if not, it goes into the next one. */
static inline int
has_room(const heap_t *kept, const part_t *text)
{
    return kept->used == 0 || kept->used + text->length < MOST_KEPT;
}

#define MOST_OTHERS 16

/* Write the members of an object that are attributes as an object: its length, 0 where it is better kept as it is. `into`
 * has room for the object. */
static inline size_t
write_scalars(const part_t *text, char *into)
{
    part_t others[MOST_OTHERS], name;
    size_t other_count = 0, length = 0;
    for (int pass = 0; pass < 2; pass++) {
        cursor_t in = {text->text, text->text + text->length};
        take(&in, '{');
        do {
            blanks(&in);
            const char *first = in.at;
            if (!plain_string(&in, &name.text, &name.length) || !take(&in, ':'))
                return 0;
            blanks(&in);
            int scalar = is_scalar(&in);
            if (!skip_value(&in, 1))
                return 0;
            if (pass == 0 && !scalar) {
                if (other_count == MOST_OTHERS)
                    return 0;
                others[other_count++] = name;
            } else if (pass == 1 && scalar) {
                for (size_t i = 0; i < other_count; i++)
                    if (others[i].length == name.length && memcmp(others[i].text, name.text, name.length) == 0)
                        return 0; /* the last of a name counts */
                into[length] = length == 0 ? '{' : ',';
                memcpy(into + length + 1, first, (size_t)(in.at - first));
                length += 1 + (size_t)(in.at - first);
            }
        } while (take(&in, ','));
    }
    into[length] = length == 0 ? '{' : '}';
    into[length + 1] = '}';
    return length == 0 ? 2 : length + 1;
}

/* Keep the text of attributes of a span; `has_others` tells whether there are members that are none. 0, or -1 without
 * memory. */
static inline int
keep_attributes(heap_t *kept, const part_t *text, int has_others, Span *span)
{
    if (kept->room - kept->used < text->length + 2) {
        size_t room = 2 * (kept->used + text->length + 2);
        char *larger = PyMem_RawRealloc(kept->items, room);
        if (larger == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        kept->items = larger;
        kept->room = room;
    }
    size_t length = has_others ? write_scalars(text, kept->items + kept->used) : 0;
    if (length == 0) {
        memcpy(kept->items + kept->used, text->text, text->length);
        length = text->length;
    }
    kept->used += length;
    span->attributes_at = (uint32_t)kept->used; /* its end, so that 0 is none */
    return 0;
}

/* Give the spans of a list, from a place on, the text that was kept of theirs, in one piece of memory. 0, or -1 with an
 * error. */
static inline int
share_attributes(heap_t *kept, PyObject *spans, Py_ssize_t first)
{
    if (kept->used == 0)
        return 0;
    PyObject *text = heap_bytes(kept, 1);
    uint32_t from = 0;
    kept->used = 0;
    for (Py_ssize_t i = first; text != NULL && i < PyList_GET_SIZE(spans); i++) {
        Span *span = (Span *)PyList_GET_ITEM(spans, i);
        uint32_t until = span->attributes_at;
        if (until == 0)
            continue;
        span->attributes = Py_NewRef(text);
        span->attributes_at = from;
        from = until;
    }
    Py_XDECREF(text);
    return text == NULL ? -1 : 0;
}

#endif
