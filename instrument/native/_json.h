/* JSON as the readers of traces take it in C: strict, and plain. What is not (an escape where a name is wanted, a number of
 * more than 18 digits, the end of the text) they leave to their twins in Python, which read it or say what is wrong with it.
 */

#ifndef INSTRUMENT_JSON_H
#define INSTRUMENT_JSON_H

#include "_spans.h"

#define DEEPEST 8 /* lists and objects in one another that are passed over here */
#define MOST_DIGITS 18

typedef struct {
    const char *at, *end;
} cursor_t;

static inline void
blanks(cursor_t *in)
{
    while (in->at < in->end && (*in->at == ' ' || *in->at == '\n' || *in->at == '\r' || *in->at == '\t'))
        in->at++;
}

/* Pass over a character that must come next, blanks before it: whether it did. */
static inline int
take(cursor_t *in, char wanted)
{
    blanks(in);
    if (in->at >= in->end || *in->at != wanted)
        return 0;
    in->at++;
    return 1;
}

/* A string without escapes; *text is what stands between the quotes. Whether there was one. */
static inline int
plain_string(cursor_t *in, const char **text, size_t *length)
{
    if (in->at >= in->end || *in->at != '"')
        return 0;
    const char *at = ++in->at;
    while (at < in->end && *at != '"' && *at != '\\' && (unsigned char)*at >= 0x20)
        at++;
    if (at >= in->end || *at != '"')
        return 0;
    *text = in->at;
    *length = (size_t)(at - in->at);
    in->at = at + 1;
    return 1;
}

static inline int
is_hex(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

/* Pass over any string. Whether there was one. */
static inline int
skip_string(cursor_t *in)
{
    if (in->at >= in->end || *in->at != '"')
        return 0;
    const char *at = in->at + 1;
    for (; at < in->end && *at != '"'; at++) {
        if ((unsigned char)*at < 0x20)
            return 0;
        if (*at != '\\')
            continue;
        if (++at >= in->end)
            return 0;
        if (*at == 'u') {
            if (in->end - at < 5 || !is_hex(at[1]) || !is_hex(at[2]) || !is_hex(at[3]) || !is_hex(at[4]))
                return 0;
            at += 4;
        } else if (strchr("\"\\/bfnrt", *at) == NULL || *at == '\0')
            return 0;
    }
    if (at >= in->end)
        return 0;
    in->at = at + 1;
    return 1;
}

static inline size_t
count_digits(cursor_t *in)
{
    const char *from = in->at;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9')
        in->at++;
    return (size_t)(in->at - from);
}

/* Pass over a number; *is_whole tells whether it has neither fraction nor exponent. Whether there was one. One at the very
 * end of the text may go on behind it. */
static inline int
skip_number(cursor_t *in, int *is_whole)
{
    if (in->at < in->end && *in->at == '-')
        in->at++;
    const char *first = in->at;
    size_t whole = count_digits(in);
    if (whole == 0 || whole > MOST_DIGITS || (*first == '0' && whole > 1))
        return 0;
    *is_whole = 1;
    if (in->at < in->end && *in->at == '.') {
        in->at++;
        *is_whole = 0;
        size_t fraction = count_digits(in);
        if (fraction == 0 || fraction > 40)
            return 0;
    }
    if (in->at < in->end && (*in->at == 'e' || *in->at == 'E')) {
        in->at++;
        *is_whole = 0;
        if (in->at < in->end && (*in->at == '+' || *in->at == '-'))
            in->at++;
        size_t exponent = count_digits(in);
        if (exponent == 0 || exponent > 3)
            return 0;
    }
    return in->at < in->end;
}

static inline int
take_word(cursor_t *in, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(in->end - in->at) <= length || memcmp(in->at, word, length) != 0)
        return 0;
    in->at += length;
    return 1;
}

/* Pass over any value. Whether there was one that is plain enough. */
static inline int
skip_value(cursor_t *in, int depth)
{
    blanks(in);
    if (in->at >= in->end)
        return 0;
    int whole;
    switch (*in->at) {
    case '"':
        return skip_string(in);
    case 't':
        return take_word(in, "true");
    case 'f':
        return take_word(in, "false");
    case 'n':
        return take_word(in, "null");
    case '[':
    case '{':
        break;
    default:
        return skip_number(in, &whole);
    }
    if (depth >= DEEPEST)
        return 0;
    int is_object = *in->at++ == '{';
    char last = is_object ? '}' : ']';
    if (take(in, last))
        return 1;
    do {
        if (is_object) {
            blanks(in);
            if (!skip_string(in) || !take(in, ':'))
                return 0;
        }
        if (!skip_value(in, depth + 1))
            return 0;
    } while (take(in, ','));
    return take(in, last);
}

/* A whole number. Whether there was one of at most 18 digits. */
static inline int
whole_number(cursor_t *in, int64_t *value)
{
    int negative = in->at < in->end && *in->at == '-';
    in->at += negative;
    const char *first = in->at;
    int64_t found = 0;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9' && in->at - first < MOST_DIGITS)
        found = found * 10 + (*in->at++ - '0');
    size_t digits = (size_t)(in->at - first);
    if (digits == 0 || digits > MOST_DIGITS || (*first == '0' && digits > 1) || in->at >= in->end)
        return 0;
    if (*in->at == '.' || *in->at == 'e' || *in->at == 'E' || (*in->at >= '0' && *in->at <= '9'))
        return 0;
    *value = negative ? -found : found;
    return 1;
}

typedef struct {
    const char *text;
    size_t length;
} part_t;

#define IS(key, length, literal) ((length) == sizeof(literal) - 1 && memcmp(key, literal, sizeof(literal) - 1) == 0)

/* A text that many events share. */
static inline PyObject *
shared_text(part_t *part)
{
    PyObject *text = PyUnicode_DecodeUTF8(part->text, (Py_ssize_t)part->length, NULL);
    if (text != NULL)
        PyUnicode_InternInPlace(&text);
    return text;
}

/* A text, number or word, or null: a new reference, NULL without an error where it is none or not plain. */
static inline PyObject *
plain_value(cursor_t *in)
{
    part_t part;
    int64_t number;
    blanks(in);
    if (in->at >= in->end)
        return NULL;
    switch (*in->at) {
    case '"':
        return plain_string(in, &part.text, &part.length)
                   ? PyUnicode_DecodeUTF8(part.text, (Py_ssize_t)part.length, NULL)
                   : NULL;
    case 't':
        return take_word(in, "true") ? Py_NewRef(Py_True) : NULL;
    case 'f':
        return take_word(in, "false") ? Py_NewRef(Py_False) : NULL;
    case 'n':
        return take_word(in, "null") ? Py_NewRef(Py_None) : NULL;
    case '[':
    case '{':
        return NULL;
    }
    const char *first = in->at;
    if (whole_number(in, &number))
        return PyLong_FromLongLong(number);
    in->at = first;
    int is_whole;
    char digits[80], *after;
    if (!skip_number(in, &is_whole) || is_whole || in->at - first >= (Py_ssize_t)sizeof digits)
        return NULL;
    memcpy(digits, first, (size_t)(in->at - first));
    digits[in->at - first] = '\0';
    double value = PyOS_string_to_double(digits, &after, NULL);
    if (value == -1.0 && PyErr_Occurred())
        return NULL;
    return PyFloat_FromDouble(value);
}

/* ---- the text */

/* The text that is being read, and two places in it that are the same. */
typedef struct {
    PyObject *text;
    Py_ssize_t character;
    size_t byte;
} reading_t;

/* How many characters begin in these bytes of UTF-8. */
static inline Py_ssize_t
characters_in(const char *from, const char *to)
{
    Py_ssize_t count = 0;
    for (; from < to; from++)
        count += ((unsigned char)*from & 0xC0) != 0x80;
    return count;
}

/* Read on from a character of a text. 0, or -1 with an error. */
static inline int
read_from(reading_t *reading, PyObject *text, Py_ssize_t at, cursor_t *in)
{
    Py_ssize_t size;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    if (bytes == NULL)
        return -1;
    if (text != reading->text || at < reading->character) {
        Py_INCREF(text);
        Py_XSETREF(reading->text, text);
        reading->character = 0;
        reading->byte = 0;
    }
    if (at < 0 || at > PyUnicode_GET_LENGTH(text)) {
        PyErr_SetString(PyExc_IndexError, "no place in the text");
        return -1;
    }
    if (PyUnicode_IS_ASCII(text))
        reading->byte = (size_t)at;
    else
        for (; reading->character < at; reading->byte++)
            reading->character += ((unsigned char)bytes[reading->byte + 1] & 0xC0) != 0x80;
    reading->character = at;
    *in = (cursor_t){bytes + reading->byte, bytes + size};
    return 0;
}

/* What has been read ends here: the character at that place. */
static inline Py_ssize_t
read_until(reading_t *reading, const char *done)
{
    const char *bytes = PyUnicode_AsUTF8(reading->text); /* which has been made */
    const char *from = bytes + reading->byte;
    reading->character += PyUnicode_IS_ASCII(reading->text) ? done - from : characters_in(from, done);
    reading->byte = (size_t)(done - bytes);
    return reading->character;
}

/* Take the values that begin at a place of a text, with commas between them, as many as `take_one` takes (1; 0 where one is
 * not plain, -1 with an error): the place after the last of them, or -1 with an error. */
static inline Py_ssize_t
take_all(reading_t *reading, PyObject *text, Py_ssize_t at, int (*take_one)(void *with, cursor_t *in), void *with)
{
    cursor_t in;
    if (read_from(reading, text, at, &in) < 0)
        return -1;
    const char *done = in.at;
    int taken;
    while ((taken = take_one(with, &in)) > 0) {
        done = in.at;
        if (!take(&in, ','))
            break;
    }
    return taken < 0 ? -1 : read_until(reading, done);
}

#endif
