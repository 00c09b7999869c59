/* Stretches of time, and sums of them that no 64 bits hold. */

#ifndef INSTRUMENT_STRETCHES_H
#define INSTRUMENT_STRETCHES_H

#include "_spans.h"

static inline PyObject *
wide_as_long(wide_t value)
{
    if (value >= INT64_MIN && value <= INT64_MAX)
        return PyLong_FromLongLong((long long)value);
    PyObject *high = PyLong_FromLongLong((long long)(value >> 64));
    PyObject *low = PyLong_FromUnsignedLongLong((unsigned long long)value), *shift = PyLong_FromLong(64), *made = NULL;
    PyObject *shifted = high == NULL || shift == NULL ? NULL : PyNumber_Lshift(high, shift);
    if (shifted != NULL && low != NULL)
        made = PyNumber_Or(shifted, low);
    Py_XDECREF(high);
    Py_XDECREF(low);
    Py_XDECREF(shift);
    Py_XDECREF(shifted);
    return made;
}

typedef struct {
    int64_t start, end;
} stretch_t;

static inline int
compare_stretches(const void *a, const void *b)
{
    const stretch_t *left = a, *right = b;
    if (left->start != right->start)
        return left->start < right->start ? -1 : 1;
    return left->end < right->end ? -1 : left->end > right->end;
}

/* The length of the union of sorted intervals. */
static inline wide_t
united(const stretch_t *sorted, size_t count)
{
    wide_t length = 0;
    for (size_t i = 0; i < count;) {
        int64_t start = sorted[i].start, end = sorted[i].end;
        for (i++; i < count && sorted[i].start <= end; i++)
            end = sorted[i].end > end ? sorted[i].end : end;
        length += (wide_t)end - start;
    }
    return length;
}

#endif
