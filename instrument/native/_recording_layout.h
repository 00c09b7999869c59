/* The recording of one process, in memory that other processes can read. `recording/memory_layout.py` has the same
 * layout for readers. A test compares both, field by field. Pointers are addresses in the process that records:
 * subtract the `address` of the header to get offsets. There is one writer. A reader checks its copies. */

#ifndef INSTRUMENT_RECORDING_LAYOUT_H
#define INSTRUMENT_RECORDING_LAYOUT_H

#include <stdint.h>

#define RECORDING_MAGIC "instrrec"
#define RECORDING_VERSION 10
#define LABEL_BYTES 64
#define REASONS_MOST 32
#define NEWEST_NUMBERS 1024 /* slots for the newest values of numbers, behind the ring of earlier values */

/* The parts of a recording. Slots are used one after another. Freed slots are zeroed and reused. */
enum {
    PART_TEXT,    /* facts on the process and the session: a length and JSON */
    PART_RINGS,
    PART_NODES,
    PART_TOTALS,
    PART_CHUNKS,  /* of histograms; totals point to them */
    PART_HIGHS,   /* the upper parts of the counts of chunks, which point to them */
    PART_FRAMES,
    PART_ATTRIBUTES, /* of open spans, one slot per slot of frames; `used` has no meaning */
    PART_FACTS,   /* facts of sites, one after another; a slot is a byte */
    /* Rare facts of rows, in a ring of blocks; a slot is a byte, and `used` counts all bytes ever written. */
    PART_DETAILS,
    /* Device intervals; this part and the next two are rings, whose `used` counts all slots ever written. */
    PART_INTERVALS,
    PART_SAMPLES, /* readings of gauges */
    PART_NUMBERS, /* the service's own numbers */
    PART_ROWS,
    PART_COUNT,
};

typedef struct {
    uint64_t offset, stride, slots;
    uint64_t used;   /* slots that were ever used */
    uint64_t unseen; /* slots that did not fit, and are in private memory */
} part_t;

#define STATE_GOODBYE 2 /* the session has stopped: see `memory_layout.py` for all states */

/* Events that are counted in addition to spans. */
typedef struct {
    uint64_t ended_rows, ended_too_short; /* of freed rings */
    uint64_t reasons[REASONS_MOST];
} counted_t;

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t object_bytes; /* the header of a ring object, before its fields */
    uint64_t size_bytes;
    uint64_t address;
    uint32_t pid, state;
    uint64_t start_ticks; /* start of the process, in clock ticks since the boot: pids are reused */
    char boot_id[40];
    int64_t monotonic_ns, realtime_ns; /* one moment on both clocks */
    uint64_t generation;               /* grows with each reset */
    uint64_t moving;                   /* odd while totals and nodes change owners */
    counted_t counted;
    uint64_t interval_slots; /* the number of slots that the ring of device intervals uses */
    uint64_t settled_ns; /* all spans that ended before have their device intervals; 0 if no device was timed */
    part_t parts[PART_COUNT];
} recording_t;

typedef struct {
    uint64_t site; /* the site's address, as in nodes */
    uint32_t size_bytes, text_bytes;
} fact_t; /* followed by JSON */

typedef struct {
    uint64_t span_id; /* 0 while it is written */
    uint64_t text_bytes;
} attributes_t; /* of an open span, followed by JSON */

typedef struct {
    uint64_t span_id;
    int64_t device;
    uint64_t stream;
    int64_t start_ns, end_ns, label, uncertainty_ns;
} interval_t;

typedef struct {
    int64_t at_ns;
    int32_t device;
    uint32_t is_reported;
    double value;
    char name[40];
} sample_t;

typedef struct {
    int64_t at_ns;
    double value; /* the newest value of `name` within an interval */
    char name[112]; /* a name, a unit and a kind, each on a line */
} number_t;

#define DETAIL_BLOCK_BYTES (64 << 10) /* no record crosses the border of two blocks */

typedef struct {
    uint64_t span_id; /* 0 if the rest of this block is empty */
    int64_t active_ns; /* -1 if it equals the total time */
    uint32_t size_bytes, text_bytes;
} detail_t; /* followed by JSON */

#endif
