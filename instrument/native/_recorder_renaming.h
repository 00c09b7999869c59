/* Cold: spans that get another name while they are open. A part of `_recorder.c`. No code of the service runs here, so
 * the open spans do not change meanwhile. */

/* An open span, and the nearest open span above it. */
typedef struct {
    frame_t *frame, *above;
    Current *owner; /* the chain of the span above */
    node_t *node;   /* the node of the span before the rename */
    char is_below; /* true for the renamed span, and for spans below it that have been moved */
} open_t;

typedef struct {
    open_t *spans;
    uint32_t count, room;
    const frame_t *renamed;
} open_spans_t;

/* Return the nearest open span above: the first open one from a frame of a chain on, or from the chain's base. Set
 * `owner` to its chain. */
static frame_t *nearest_above(frame_t *frame, Current **owner, Published *base)
{
    while (frame != NULL && frame->state == CLOSED)
        frame = frame->above;
    if (frame != NULL)
        return frame;
    base = nearest_open(base);
    *owner = base == NULL ? NULL : (Current *)base->owner;
    return base == NULL ? NULL : base->frame;
}

/* Note the open spans of a chain. Its outermost span is below `base`. Return -1 without memory. */
static int note_chain(open_spans_t *open, frame_t *top, Current *owner, Published *base)
{
    const frame_t *renamed = open->renamed;
    int is_in_request = is_open_request(renamed->request);
    for (frame_t *frame = top; frame != NULL; frame = frame->above) {
        /* An open request is the root of all spans below it. */
        if (frame->state == CLOSED || (is_in_request && frame->root_id != renamed->root_id))
            continue;
        if (open->count == open->room) {
            uint32_t room = open->room == 0 ? 64 : open->room * 2;
            open_t *grown = PyMem_Realloc(open->spans, room * sizeof *grown);
            if (grown == NULL)
                return -1;
            open->spans = grown;
            open->room = room;
        }
        const Stretch *stretch = frame->self == NULL ? NULL : ((Frame *)frame->self)->stretch;
        open_t *span = &open->spans[open->count++];
        *span = (open_t){.frame = frame, .node = frame->node, .owner = owner};
        /* A generator's span stays below the span in which it began, even if another one resumes it. */
        span->above = stretch != NULL && stretch->has_parent ? nearest_above(NULL, &span->owner, stretch->parent)
                                                             : nearest_above(frame->above, &span->owner, base);
        frame->place = open->count;
    }
    return 0;
}

static int note_open(Core *core, open_spans_t *open)
{
    for (Current *current = core->currents; current != NULL; current = current->next)
        if (note_chain(open, current->top, current, current->base) < 0)
            return -1;
    for (Stretch *stretch = core->stretches; stretch != NULL; stretch = stretch->next)
        if (note_chain(open, stretch->inner, NULL, NULL) < 0)
            return -1;
    return 0;
}

/* Move a span below the new node of the span above it, with the same steps as before. `from` is the old node of the
 * span above. */
static void move_below(Core *core, const open_t *span, PyObject *site, const node_t *from)
{
    frame_t *frame = span->frame;
    const frame_t *above = span->above;
    node_t *old = frame->node, *node = above != NULL ? above->node : &core->tree.root;
    const node_t *at = above != NULL ? old->parent : NULL;
    frame->below_fold = above != NULL && above->below_fold;
    if (above == NULL && old != core->tree.overflow && old->parent != core->tree.overflow)
        node = old->parent; /* all spans above it have ended */
    while (at != NULL && at != from)
        at = at->parent;
    if (at != NULL) /* else its node is not below: it was folded into an ancestor, or the tally was full */
        node = follow_path(core, node, from, old->parent, &frame->below_fold); /* of spans in between that have ended */
    node_t *step = node_of(core, node, site);
    frame->below_fold |= (char)is_edge(step);
    frame->node = node_at_end(step);
}

/* Move the open spans below the renamed one, each after the span above it. Chains were noted from the innermost span
 * on. */
static void move_all_below(Core *core, open_spans_t *open)
{
    for (int has_moved = 1; has_moved;) {
        has_moved = 0;
        for (uint32_t i = open->count; i > 0; i--) {
            open_t *span = &open->spans[i - 1];
            const open_t *above = span->above == NULL || span->above->place == 0 ? NULL : &open->spans[span->above->place - 1];
            if (span->is_below || above == NULL || !above->is_below)
                continue;
            move_below(core, span, span->node->site, above->node);
            span->is_below = 1;
            has_moved = 1;
        }
    }
}

/* Note whether a call of a moved span's node is open around it. */
static void note_inner(const open_t *span)
{
    frame_t *frame = span->frame;
    frame->is_inner = frame->below_fold && frame->node->may_recur && span->above != NULL &&
                      is_open_around(span->owner, span->above, frame->ring, frame->node);
}

/* Rename the innermost span of this context, if no other span is below it. Nearly each request is renamed so. Return
 * false for any other span. */
static int rename_alone(Core *core, frame_t *frame, PyObject *site)
{
    Ring *ring;
    Current *current = current_of(core, &ring);
    const Stretch *stretch = frame->self == NULL ? NULL : ((Frame *)frame->self)->stretch;
    if (current == NULL || current->top != frame || frame->has_rows || frame->state == CLOSED || stretch != NULL)
        return 0;
    open_t span = {.frame = frame, .owner = current};
    span.above = nearest_above(frame->above, &span.owner, current->base);
    move_below(core, &span, site, span.above == NULL ? NULL : span.above->node);
    note_inner(&span);
    return 1;
}

/* Change the site of an open span. The open spans below it move with it. */
static void rename_frame(Core *core, frame_t *frame, PyObject *site)
{
    if (rename_alone(core, frame, site))
        return;
    open_spans_t open = {.renamed = frame};
    int failed = note_open(core, &open) < 0;
    if (failed || frame->place == 0) {
        count_event(core, failed ? NO_DETAILS : RENAMED_LATE);
    } else {
        open_t *renamed = &open.spans[frame->place - 1];
        renamed->is_below = 1;
        move_below(core, renamed, site, renamed->above == NULL ? NULL : renamed->above->node);
        move_all_below(core, &open);
        for (uint32_t i = 0; i < open.count; i++)
            if (open.spans[i].is_below)
                note_inner(&open.spans[i]);
    }
    for (uint32_t i = 0; i < open.count; i++)
        open.spans[i].frame->place = 0;
    PyMem_Free(open.spans);
}

static void rename_to(Core *core, frame_t *frame, PyObject *site)
{
    PyObject *kind = frame->state == CLOSED ? NULL : PyObject_GetAttr(frame->node->site, str_kind);
    if (frame->state == CLOSED)
        count_event(core, RENAMED_LATE);
    else if (kind == NULL || !PyUnicode_Check(kind) || !kind_is(site, kind))
        count_event(core, RENAMED_KIND);
    else if (frame->node->site != site)
        rename_frame(core, frame, site);
    PyErr_Clear();
    Py_XDECREF(kind);
}

static PyObject *Core_rename(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs == 2 && args[0] == Py_None) /* the begin could not be recorded */
        Py_RETURN_NONE;
    if (nargs != 2 || Py_TYPE(args[0]) != &FrameType)
        return PyErr_Format(PyExc_TypeError, "rename(frame, site)");
    rename_to(self, ((Frame *)args[0])->frame, args[1]);
    Py_RETURN_NONE;
}

static PyObject *Core_rename_innermost(Core *self, PyObject *site)
{
    frame_t *frame = open_span(self, INNERMOST, NULL);
    if (frame != NULL)
        rename_to(self, frame, site);
    return clear_fault() < 0 ? NULL : Py_NewRef(Py_None);
}

/* Return the site of an open span: of the given frame, or for None of the innermost span. A new reference, None if it
 * is not open. */
static PyObject *Core_site_of_open(Core *self, PyObject *frame)
{
    if (frame != Py_None && Py_TYPE(frame) != &FrameType)
        return PyErr_Format(PyExc_TypeError, "site_of_open(frame)");
    frame_t *open = open_span(self, frame == Py_None ? INNERMOST : GIVEN, (Frame *)frame);
    if (open == NULL && clear_fault() < 0)
        return NULL;
    return Py_NewRef(open == NULL ? Py_None : open->node->site);
}
