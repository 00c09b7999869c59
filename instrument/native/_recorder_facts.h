/* Cold: facts of sites and details of rows, written as JSON for readers that cannot read objects. A part of
 * `_recorder.c`. No code of the service runs here, because only values of Python's own types are written. */

#define DETAIL_LEAST_BYTES 128 /* room that a block must have left for another record */
#define FACT_TEXT_BYTES 8192
#define NAME_TEXT_BYTES 48 /* longest encoded name that is cached */
#define BATCH_LIMIT 1024 /* values of a list, and keys of a batch: as in spans.py */

/* A text of limited size. Once a piece does not fit, the text is `full`, and nothing more is written. */
typedef struct {
    char *at, *end;
    char full;
} text_t;

static inline void put(text_t *text, const char *bytes, size_t count)
{
    if (text->full || (size_t)(text->end - text->at) < count) {
        text->full = 1;
        return;
    }
    memcpy(text->at, bytes, count);
    text->at += count;
}

static inline void put_character(text_t *text, char c)
{
    put(text, &c, 1);
}

static inline void put_word(text_t *text, const char *word)
{
    put(text, word, strlen(word));
}

static void put_escaped(text_t *text, Py_UCS4 c)
{
    char escaped[8];
    if (c > 0xFFFF) { /* a pair of surrogates */
        put_escaped(text, 0xD800 + ((c - 0x10000) >> 10));
        c = 0xDC00 + ((c - 0x10000) & 0x3FF);
    }
    put(text, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)c));
}

/* Return true if none of eight bytes needs an escape: each is from 0x20 to 0x7E, and is neither a quote nor a
 * backslash. */
static inline int are_plain(uint64_t eight)
{
    const uint64_t ones = 0x0101010101010101u, high = ones << 7;
    uint64_t quotes = eight ^ ones * '"', slashes = eight ^ ones * '\\';
    uint64_t escapes = (eight - ones * 0x20) | (eight + ones) | (quotes - ones) | (slashes - ones) | eight;
    return (escapes & high) == 0;
}

static void put_characters(text_t *text, int kind, const void *data, Py_ssize_t length)
{
    put_character(text, '"');
    Py_ssize_t i = 0;
    /* Copy eight characters at a time, until one needs an escape. */
    if (kind == PyUnicode_1BYTE_KIND && text->end - text->at > length) {
        const unsigned char *from = data;
        for (; length >= 8 && i < length; i += 8) {
            uint64_t eight;
            if (i > length - 8)
                i = length - 8; /* copy the last eight, of which some were copied before */
            memcpy(&eight, from + i, sizeof eight);
            if (!are_plain(eight))
                break;
            memcpy(text->at + i, &eight, sizeof eight);
        }
        for (; i < length && from[i] >= 0x20 && from[i] <= 0x7E && from[i] != '"' && from[i] != '\\'; i++)
            text->at[i] = (char)from[i];
        text->at += i;
    }
    for (; i < length && !text->full; i++) {
        Py_UCS4 c = PyUnicode_READ(kind, data, i);
        if (c < 0x20 || c > 0x7E || c == '"' || c == '\\')
            put_escaped(text, c);
        else if (text->at < text->end)
            *text->at++ = (char)c;
        else
            text->full = 1;
    }
    put_character(text, '"');
}

static void put_number(text_t *text, long long number)
{
    char digits[24], *at = digits + sizeof digits;
    unsigned long long remaining = number < 0 ? 0 - (unsigned long long)number : (unsigned long long)number;
    do
        *--at = (char)('0' + remaining % 10);
    while ((remaining /= 10) > 0);
    if (number < 0)
        *--at = '-';
    put(text, at, (size_t)(digits + sizeof digits - at));
}

static void put_float(text_t *text, double value)
{
    if (value != value) {
        put_word(text, "NaN");
    } else if (value - value != 0) {
        put_word(text, value > 0 ? "Infinity" : "-Infinity");
    } else {
        char *digits = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
        put_word(text, digits != NULL ? digits : "null");
        PyMem_Free(digits);
    }
}

/* Write one value. An instance of a subclass, such as an enumeration, is written as its base. Write null for a value
 * without JSON. */
static void put_value(text_t *text, PyObject *value, int depth)
{
    if (PyUnicode_Check(value)) {
        put_characters(text, PyUnicode_KIND(value), PyUnicode_DATA(value), PyUnicode_GET_LENGTH(value));
    } else if (PyBytes_CheckExact(value)) {
        put_characters(text, PyUnicode_1BYTE_KIND, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
    } else if (PyBool_Check(value)) {
        put_word(text, value == Py_True ? "true" : "false");
    } else if (PyLong_Check(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow)
            put_word(text, "null");
        else
            put_number(text, number);
    } else if (PyFloat_Check(value)) {
        put_float(text, PyFloat_AS_DOUBLE(value));
    } else if (depth == 0 && (PyTuple_Check(value) || PyList_Check(value))) {
        put_character(text, '[');
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value) && i < BATCH_LIMIT; i++) {
            if (i > 0)
                put_character(text, ',');
            put_value(text, PySequence_Fast_GET_ITEM(value, i), 1);
        }
        put_character(text, ']');
    } else {
        put_word(text, "null");
    }
}

/* Encoded names by address. A service uses few names, and writes them with each span. */
typedef struct {
    PyObject *name;
    size_t length;
    char text[NAME_TEXT_BYTES];
} cached_name_t;

static cached_name_t cached_names[NAMES_CACHED];

static void put_name(text_t *text, PyObject *name)
{
    cached_name_t *cached = &cached_names[((uintptr_t)name >> 4) & (NAMES_CACHED - 1)];
    if (cached->name == name && text->end - text->at >= NAME_TEXT_BYTES) {
        memcpy(text->at, cached->text, NAME_TEXT_BYTES);
        text->at += cached->length;
        return;
    }
    char *before = text->at;
    put_value(text, name, 1);
    put_character(text, ':');
    size_t length = (size_t)(text->at - before);
    if (text->full || length > NAME_TEXT_BYTES || !PyUnicode_CHECK_INTERNED(name))
        return;
    memcpy(cached->text, before, length);
    cached->length = length;
    Py_XSETREF(cached->name, Py_NewRef(name));
}

static void put_pair(text_t *text, PyObject *name, PyObject *value)
{
    if (text->at[-1] != '{')
        put_character(text, ',');
    put_name(text, name);
    put_value(text, value, 0);
}

/* Return true if what was written from a place on fits, also a bracket behind it. Else remove it. */
static int is_kept_from(text_t *text, char *before)
{
    int is_kept = !text->full && text->end - text->at > 1;
    text->full = 0;
    if (!is_kept)
        text->at = before;
    return is_kept;
}

/* Write the attributes that fit, by name. Attributes whose key is an object of ours are left out. Return false if one
 * does not fit. */
static int put_attributes(text_t *text, PyObject *attributes)
{
    PyObject *name, *value;
    int are_whole = 1;
    put_character(text, '{');
    for (Py_ssize_t at = 0; PyDict_Next(attributes, &at, &name, &value);) {
        char *before = text->at;
        if (!PyUnicode_CheckExact(name))
            continue;
        put_pair(text, name, value);
        are_whole &= is_kept_from(text, before);
    }
    put_character(text, '}');
    return are_whole;
}

/* Write the attributes of a site, which are pairs of name and value. Makes no object that the collector tracks. */
static void put_pairs(text_t *text, PyObject *pairs)
{
    put_word(text, text->at[-1] == '{' ? "\"attributes\":{" : ",\"attributes\":{");
    for (Py_ssize_t i = 0; PyTuple_CheckExact(pairs) && i < PyTuple_GET_SIZE(pairs) && !text->full; i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);
        if (PyTuple_CheckExact(pair) && PyTuple_GET_SIZE(pair) == 2 && PyUnicode_CheckExact(PyTuple_GET_ITEM(pair, 0)))
            put_pair(text, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
    }
    put_character(text, '}');
}

static size_t pad_size(size_t bytes)
{
    return (bytes + 7) & ~(size_t)7;
}

/* Write a record into the ring of details. The caller writes the row later, so that a reader of the row has its
 * details. */
static SELDOM void write_detail(Core *core, uint64_t span_id, int64_t active_ns, PyObject *error, PyObject *attributes)
{
    part_t *part = &core->memory->at->parts[PART_DETAILS];
    if (part->slots == 0)
        return;
    detail_t *detail;
    text_t text;
    uint64_t used = part->used, room;
    for (;; used += room) { /* use the rest of the block, or else the next block */
        room = DETAIL_BLOCK_BYTES - used % DETAIL_BLOCK_BYTES;
        detail = (detail_t *)(part_at(core->memory, PART_DETAILS) + used % part->slots);
        if (room >= DETAIL_LEAST_BYTES) {
            text = (text_t){.at = (char *)(detail + 1), .end = (char *)detail + room - 1}; /* without the last bracket */
            put_character(&text, '{');
            if (error != NULL && PyUnicode_CheckExact(error))
                put_pair(&text, str_error_key, error);
            int are_whole = !text.full;
            if (attributes != NULL && PyDict_Check(attributes)) {
                put_word(&text, text.at[-1] == '{' ? "\"attributes\":" : ",\"attributes\":");
                are_whole &= !text.full && put_attributes(&text, attributes);
            }
            if (are_whole || room == DETAIL_BLOCK_BYTES) { /* attributes that are longer than a block are left out */
                part->unseen += (uint64_t)!are_whole;
                break;
            }
        }
        if (room >= sizeof *detail)
            memset(detail, 0, sizeof *detail); /* mark the rest of the block as empty */
    }
    *text.at++ = '}';
    detail->span_id = span_id;
    detail->active_ns = active_ns;
    detail->text_bytes = (uint32_t)(text.at - (char *)(detail + 1));
    detail->size_bytes = (uint32_t)pad_size(sizeof *detail + detail->text_bytes);
    __atomic_store_n(&part->used, used + detail->size_bytes, __ATOMIC_RELEASE);
}

/* Write the attributes of an open span that fit into its frame's slot. They describe the span if it never ends. If a
 * request has more attributes, all are also written as a detail. */
static SELDOM void write_open_attributes(Core *core, const frame_t *frame)
{
    const part_t *frames = &core->memory->at->parts[PART_FRAMES], *part = &core->memory->at->parts[PART_ATTRIBUTES];
    uint64_t slot = ((uintptr_t)frame - (uintptr_t)part_at(core->memory, PART_FRAMES)) / frames->stride;
    int are_whole = 0;
    if (!PyDict_Check(frame->attributes))
        return;
    if (slot < frames->slots) {
        attributes_t *slot_of_frame = (attributes_t *)(part_at(core->memory, PART_ATTRIBUTES) + slot * part->stride);
        text_t text = {.at = (char *)(slot_of_frame + 1), .end = (char *)slot_of_frame + part->stride};
        __atomic_store_n(&slot_of_frame->span_id, 0, __ATOMIC_SEQ_CST);
        are_whole = put_attributes(&text, frame->attributes);
        slot_of_frame->text_bytes = (uint64_t)(text.at - (char *)(slot_of_frame + 1));
        __atomic_store_n(&slot_of_frame->span_id, frame->span_id, __ATOMIC_RELEASE);
    }
    if (!are_whole && frame->node->is_request)
        write_detail(core, frame->span_id, -1, NULL, frame->attributes);
}

/* Write the facts of a site, unless they have been written. */
static void describe_site(Core *core, PyObject *site)
{
    if (core->memory == NULL)
        return;
    PyObject *address = PyLong_FromVoidPtr(site);
    int is_described = address == NULL || core->described_sites == NULL ? 1 : PyDict_Contains(core->described_sites, address);
    if (is_described != 0 || PyDict_SetItem(core->described_sites, address, Py_None) < 0)
        goto end;
    part_t *part = &core->memory->at->parts[PART_FACTS];
    fact_t *fact = (fact_t *)(part_at(core->memory, PART_FACTS) + part->used);
    size_t room = part->slots - part->used, most = sizeof *fact + FACT_TEXT_BYTES;
    if (room < most) {
        part->unseen++;
        goto end;
    }
    PyObject *names = PyObject_GetAttr(site, str_fields);
    text_t text = {.at = (char *)(fact + 1), .end = (char *)fact + most};
    put_character(&text, '{');
    for (Py_ssize_t i = 0; names != NULL && PyTuple_CheckExact(names) && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i), *value = PyObject_GetAttr(site, name);
        char *before = text.at;
        if (value == NULL) {
            PyErr_Clear();
            continue;
        }
        if (name == str_attributes)
            put_pairs(&text, value);
        else
            put_pair(&text, name, value);
        Py_DECREF(value);
        part->unseen += (uint64_t)!is_kept_from(&text, before);
    }
    Py_XDECREF(names);
    put_character(&text, '}');
    fact->site = (uint64_t)(uintptr_t)site;
    fact->text_bytes = (uint32_t)(text.at - (char *)(fact + 1));
    fact->size_bytes = (uint32_t)pad_size(sizeof *fact + fact->text_bytes);
    __atomic_store_n(&part->used, part->used + fact->size_bytes, __ATOMIC_RELEASE);
end:
    PyErr_Clear();
    Py_XDECREF(address);
}

/* Write the name of a thread for readers, cut where it is too long. */
static void write_label(char *label, PyObject *name)
{
    text_t text = {.at = label, .end = label + LABEL_BYTES - 1};
    if (PyUnicode_Check(name))
        put_characters(&text, PyUnicode_KIND(name), PyUnicode_DATA(name), PyUnicode_GET_LENGTH(name));
}
