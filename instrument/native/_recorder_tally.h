/* Hot: totals of a call path on a thread. Cold: adding them up. A part of `_recorder.c`. */

static inline totals_t *known_totals(const book_t *book, uint32_t index)
{
    totals_t **page = index / PAGE < book->slots ? book->pages[index / PAGE] : NULL;
    return page == NULL ? NULL : page[index % PAGE];
}

static totals_t *totals_of(Ring *ring, uint32_t index)
{
    book_t *book = &ring->totals;
    uint32_t number = index / PAGE;
    if (number >= book->slots) {
        uint32_t wanted = book->slots ? book->slots : 8;
        while (wanted <= number)
            wanted *= 2;
        totals_t ***grown = PyMem_Realloc(book->pages, wanted * sizeof(totals_t **));
        if (grown == NULL)
            return NULL;
        memset(grown + book->slots, 0, (wanted - book->slots) * sizeof(totals_t **));
        book->pages = grown;
        book->slots = wanted;
    }
    if (book->pages[number] == NULL && (book->pages[number] = PyMem_Calloc(PAGE, sizeof(totals_t *))) == NULL)
        return NULL;
    totals_t **totals = &book->pages[number][index % PAGE];
    if (*totals == NULL && (*totals = new_lines_in(memory_of(ring), PART_TOTALS, sizeof(totals_t))) != NULL) {
        (*totals)->node = index;
        (*totals)->ring_number = ring->number;
        (*totals)->min_ns = (*totals)->first_ns = INT64_MAX;
        (*totals)->waiting_room = BUCKETS_WAITING;
    }
    return *totals;
}

/* The index that histogram.bucket computes. */
static inline uint32_t bucket_of(uint64_t value)
{
    if (value < 128)
        return (uint32_t)value;
    uint32_t highest = 63 ^ (uint32_t)__builtin_clzll(value); /* one instruction of x86-64 */
    return (highest << 6) + (uint32_t)(value >> (highest - 6)) - (6 << 6);
}

static int carry(chunk_t *chunk, uint32_t at, uint64_t times)
{
    if (chunk->high == NULL && (chunk->high = new_piece(chunk, PART_HIGHS, 64 * sizeof *chunk->high)) == NULL)
        return -1;
    chunk->high[at] += times;
    return 0;
}

static inline chunk_t *chunk_of(totals_t *totals, uint32_t bucket)
{
    chunk_t **chunk = &totals->chunks[bucket >> 6];
    if (*chunk == NULL)
        *chunk = new_piece(totals, PART_CHUNKS, sizeof(chunk_t));
    return *chunk;
}

static void count_bucket(Core *core, totals_t *totals, uint32_t bucket, uint64_t times)
{
    chunk_t *chunk = chunk_of(totals, bucket);
    if (chunk == NULL) {
        core->counted->reasons[NO_DETAILS] += times;
        return;
    }
    uint16_t *low = &chunk->low[bucket & 63];
    if (times > (uint64_t)(UINT16_MAX - *low)) {
        uint64_t sum = *low + (times & UINT16_MAX);
        if (carry(chunk, bucket & 63, (times >> LOW_BITS) + (sum >> LOW_BITS)) < 0) {
            core->counted->reasons[NO_DETAILS] += times - (uint64_t)(UINT16_MAX - *low);
            *low = UINT16_MAX; /* no memory for the upper counts */
        } else {
            *low = (uint16_t)sum;
        }
    } else {
        *low += (uint16_t)times;
    }
}

/* Count the waiting buckets; those without memory wait on, if possible. The counters are loaded one right after the
 * other, so that the processor waits for them together. */
static void count_waiting(Core *core, totals_t *totals)
{
    uint16_t room = totals->waiting_room;
    for (; room < BUCKETS_WAITING; room++) {
        uint32_t bucket = totals->waiting[room];
        chunk_t *chunk = totals->chunks[bucket >> 6];
        uint16_t *low = chunk == NULL ? NULL : &chunk->low[bucket & 63];
        if (__builtin_expect(chunk == NULL || *low == UINT16_MAX, 0))
            break;
        ++*low;
    }
    totals->waiting_room = room;
    while (totals->waiting_room < BUCKETS_WAITING) {
        uint32_t bucket = totals->waiting[totals->waiting_room];
        chunk_t *chunk = chunk_of(totals, bucket);
        if (core == NULL && (chunk == NULL || (chunk->low[bucket & 63] == UINT16_MAX && carry(chunk, bucket & 63, 0) < 0)))
            return;
        totals->waiting_room++;
        count_bucket(core, totals, bucket, 1);
    }
}

/* The same for a full list of buckets, within a call: rare cases go through the function above. */
static __attribute__((noinline)) void count_all_waiting(Core *core, totals_t *totals)
{
#pragma GCC unroll 7
    for (uint16_t i = 0; i < BUCKETS_WAITING; i++) {
        uintptr_t bucket = totals->waiting[i];
        chunk_t *chunk = totals->chunks[bucket >> 6];
        if (__builtin_expect(chunk == NULL, 0) || __builtin_expect(++chunk->low[bucket & 63] == 0, 0)) {
            if (chunk != NULL)
                chunk->low[bucket & 63] = UINT16_MAX;
            totals->waiting_room = i;
            count_waiting(core, totals);
            return;
        }
    }
    totals->waiting_room = BUCKETS_WAITING;
}

/* Add to a sum of times, which stays at its largest value instead of becoming negative. Without a core at `core` that
 * is not reported. */
static inline __attribute__((always_inline)) void add_time(Core *const *core, int64_t *sum, int64_t more)
{
    *sum = (int64_t)((uint64_t)*sum + (uint64_t)more);
    if (__builtin_expect(*sum < 0, 0)) { /* as neither was */
        *sum = INT64_MAX;
        if (*core != NULL)
            count(*core, SATURATED);
    }
}

static inline uint64_t times_of(const totals_t *totals, uint32_t bucket)
{
    const chunk_t *chunk = totals->chunks[bucket >> 6];
    if (chunk == NULL)
        return 0;
    return (chunk->high == NULL ? 0 : chunk->high[bucket & 63] << LOW_BITS) + chunk->low[bucket & 63];
}

/* Add all but the histogram. */
static void add_totals(Core *core, totals_t *into, const totals_t *from)
{
    if (into->calls == 0 || from->min_ns < into->min_ns)
        into->min_ns = from->min_ns;
    if (into->calls == 0 || from->first_ns < into->first_ns) {
        into->first_ns = from->first_ns;
        into->first_total_ns = from->first_total_ns;
    }
    if (from->max_ns > into->max_ns)
        into->max_ns = from->max_ns;
    into->calls += from->calls;
    into->errors += from->errors;
    into->cancelled += from->cancelled;
    into->moved_bytes += from->moved_bytes;
    add_time(&core, &into->total_ns, from->total_ns);
    add_time(&core, &into->self_ns, from->self_ns);
    add_time(&core, &into->waiting_ns, from->waiting_ns);
    add_time(&core, &into->device_ns, from->device_ns);
    add_time(&core, &into->beyond_ns, from->beyond_ns);
}

static void merge_totals(Core *core, totals_t *into, totals_t *from)
{
    if (from->calls == 0)
        return;
    count_waiting(core, from);
    add_totals(core, into, from);
    for (uint32_t c = 0; c < CHUNKS; c++)
        for (uint32_t i = c << 6; from->chunks[c] != NULL && i < (c + 1) << 6; i++)
            if (times_of(from, i))
                count_bucket(core, into, i, times_of(from, i));
}

static void free_book(book_t *book)
{
    for (uint32_t p = 0; p < book->slots; p++) {
        for (uint32_t i = 0; book->pages[p] != NULL && i < PAGE; i++) {
            totals_t *totals = book->pages[p][i];
            for (uint32_t c = 0; totals != NULL && c < CHUNKS; c++) {
                if (totals->chunks[c] != NULL)
                    free_piece(totals->chunks[c]->high, PART_HIGHS);
                free_piece(totals->chunks[c], PART_CHUNKS);
            }
            free_lines_in(totals, PART_TOTALS);
        }
        PyMem_Free(book->pages[p]);
    }
    PyMem_Free(book->pages);
    book->pages = NULL;
    book->slots = 0;
}
