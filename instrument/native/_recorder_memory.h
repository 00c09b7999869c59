/* Cold: the memory in which other processes can read the recording, and its slots. A part of `_recorder.c`. It is one
 * mapping of fixed size, shared with each process that gets its descriptor. It has parts of equal slots. The structures
 * that spans touch are in it, so nothing is written twice. A full part counts the slots that it refuses, which are then
 * in private memory. The mapping stays until the process ends, because any pointer may refer to it. A forked child gets
 * a mapping of its own at the same addresses, before any Python code runs. */

#define FIRST_FD 256 /* lower descriptors are left to the service */

typedef struct memory {
    recording_t *at;
    size_t size_bytes;
    int fd; /* -1 if no other process can read it */
    dev_t device;
    ino_t inode;
    char is_private; /* true once no session records into it */
    /* True for a file on a disk, whose blocks stay allocated: a full disk would otherwise end the process. */
    char is_file;
    void *free[PART_COUNT]; /* freed slots; each begins with the address of the next */
    unsigned char *used_pages; /* one byte per page of rows */
    size_t page_bytes, pages;
    uint32_t numbers; /* slots used of the newest values of numbers */
    struct core *core; /* the recorder that owns it */
    struct memory *next; /* in the list of all memories of the process */
} memory_t;

static memory_t *memories, *frame_memory;

static inline char *part_at(const memory_t *memory, int part)
{
    return (char *)memory->at + memory->at->parts[part].offset;
}

/* Return the memory that an address is in, NULL for private memory. */
static memory_t *memory_of(const void *address)
{
    for (memory_t *memory = memories; memory != NULL; memory = memory->next)
        if ((uintptr_t)address - (uintptr_t)memory->at < memory->size_bytes)
            return memory;
    return NULL;
}

/* Return a zeroed slot. Return NULL without a memory, or if the part is full, which is counted. */
static void *take_slot(memory_t *memory, int number)
{
    if (memory == NULL)
        return NULL;
    part_t *part = &memory->at->parts[number];
    void **slot = memory->free[number];
    if (slot != NULL) {
        memory->free[number] = *slot;
        *slot = NULL;
    } else if (part->used < part->slots) {
        slot = (void **)(part_at(memory, number) + part->used * part->stride);
        part->used++;
    } else {
        part->unseen++;
    }
    return slot;
}

/* Return zeroed lines: a slot, or private memory if the part is full. Return NULL without memory. */
static void *new_lines_in(memory_t *memory, int number, size_t size)
{
    void *lines = take_slot(memory, number);
    return lines != NULL ? lines : new_lines(size);
}

/* Free lines of `new_lines_in`. */
static void free_lines_in(void *lines, int number)
{
    memory_t *memory = lines == NULL ? NULL : memory_of(lines);
    if (memory == NULL) {
        free_lines(lines);
        return;
    }
    memset(lines, 0, memory->at->parts[number].stride);
    *(void **)lines = memory->free[number];
    memory->free[number] = lines;
}

/* Return the slot of a number's newest value. These slots are behind the ring of earlier values. */
static inline number_t *newest_number(const memory_t *memory, uint64_t number)
{
    const part_t *part = &memory->at->parts[PART_NUMBERS];
    return (number_t *)(part_at(memory, PART_NUMBERS) + (part->slots - NEWEST_NUMBERS + number) * part->stride);
}

static size_t mapped_bytes(uint64_t capacity)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (capacity * sizeof(row_t) + page - 1) / page * page;
}

/* Return memory for rows that others can read: the first free range that is large enough. Return NULL without one. */
static row_t *take_rows(memory_t *memory, size_t bytes)
{
    size_t page_count = bytes / memory->page_bytes;
    for (size_t first = 0; first + page_count <= memory->pages;) {
        const unsigned char *used_page = memchr(memory->used_pages + first, 1, page_count);
        if (used_page != NULL) {
            first = (size_t)(used_page - memory->used_pages) + 1;
            continue;
        }
        memset(memory->used_pages + first, 1, page_count);
        size_t end = (first + page_count) * memory->page_bytes / sizeof(row_t);
        if (end > memory->at->parts[PART_ROWS].used)
            memory->at->parts[PART_ROWS].used = end;
        return (row_t *)(part_at(memory, PART_ROWS) + first * memory->page_bytes);
    }
    return NULL;
}

/* Map memory for rows, fewer of them if the readable memory has no more room. Rows are not allocated: only touched
 * pages of a mapping cost memory, and freed pages return to the system at once. The C library's heap of a thread does
 * neither. */
static row_t *map_rows(memory_t *memory, uint64_t *capacity)
{
    for (uint64_t count = *capacity; memory != NULL && count >= SMALLEST_RING; count /= 2) {
        row_t *rows = take_rows(memory, mapped_bytes(count));
        if (rows != NULL) {
            *capacity = count;
            return rows;
        }
    }
    if (memory != NULL)
        memory->at->parts[PART_ROWS].unseen += *capacity;
    void *rows = mmap(NULL, mapped_bytes(*capacity), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return rows == MAP_FAILED ? NULL : rows;
}

/* Free whole pages of rows, of which the first bytes were written. Rows are zero when they are reused. */
static int unmap_rows(void *rows, size_t bytes, size_t written)
{
    memory_t *memory = memory_of(rows);
    if (memory == NULL)
        return munmap(rows, bytes);
#if defined(MADV_REMOVE)
    if (memory->is_file || madvise(rows, bytes, MADV_REMOVE) < 0) /* the kernel refuses it for private memory */
#endif
        memset(rows, 0, written);
    memset(memory->used_pages + ((char *)rows - part_at(memory, PART_ROWS)) / memory->page_bytes, 0, bytes / memory->page_bytes);
    return 0;
}

static THREAD_LOCAL char *fork_copy; /* a copy of what a child inherits of all memories */
static THREAD_LOCAL size_t fork_copy_bytes;

/* Return the bytes of a part that a child inherits. It inherits no rows and no details. */
static size_t inherited_bytes(const part_t *part, int number)
{
    if (number == PART_DETAILS || number >= PART_INTERVALS)
        return 0;
    return (part->used < part->slots ? part->used : part->slots) * part->stride;
}

/* Copy what a child inherits of a memory, to a copy or back. Return the number of bytes. Only count them if `copy` is
 * NULL. */
static size_t copy_inherited(memory_t *memory, char *copy, int is_restored)
{
    size_t copied = 0;
    if (memory->is_private) /* the kernel has copied it for the child */
        return 0;
    char *at = (char *)memory->at;
    const part_t *parts = memory->at->parts;
    if (copy != NULL)
        memcpy(is_restored ? at : copy, is_restored ? copy : at, sizeof(recording_t));
    copied += sizeof(recording_t);
    for (int number = 0; number < PART_COUNT; number++) {
        size_t bytes = inherited_bytes(&parts[number], number);
        char *slots = at + parts[number].offset;
        if (copy != NULL)
            memcpy(is_restored ? slots : copy + copied, is_restored ? copy + copied : slots, bytes);
        copied += bytes;
    }
    return copied;
}

static void drop_fork_copy(void)
{
    if (fork_copy != NULL)
        munmap(fork_copy, fork_copy_bytes);
    fork_copy = NULL;
}

/* Copy what a child inherits. The parent calls it before the fork, because later its memory may have changed. */
static void before_fork(void)
{
    size_t bytes = 0, copied = 0;
    for (memory_t *memory = memories; memory != NULL; memory = memory->next)
        bytes += copy_inherited(memory, NULL, 0);
    char *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fork_copy = copy == MAP_FAILED ? NULL : copy;
    fork_copy_bytes = bytes;
    for (memory_t *memory = memories; fork_copy != NULL && memory != NULL; memory = memory->next)
        copied += copy_inherited(memory, fork_copy + copied, 0);
}

static int new_memfd(size_t size_bytes)
{
#if defined(SYS_memfd_create) /* older headers do not define it */
    struct rlimit limit; /* a file above the limit causes a signal that ends the process */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < size_bytes)
        return -1;
    int fd = (int)syscall(SYS_memfd_create, "instrument", 1U | 2U | 8U); /* closed by exec, sealable, not executable */
    if (fd < 0)
        fd = (int)syscall(SYS_memfd_create, "instrument", 1U | 2U); /* for a kernel before 6.3 */
    if (fd < 0)
        return -1;
    if (ftruncate(fd, (off_t)size_bytes) == 0) {
        (void)fcntl(fd, 1033, 1 | 2 | 4); /* F_ADD_SEALS: neither its size nor its seals can change */
        int moved = fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FD);
        if (moved < 0) /* the limit of descriptors may be lower */
            return fd;
        close(fd);
        return moved;
    }
    close(fd);
#else
    (void)size_bytes;
#endif
    return -1;
}

static int identify_file(memory_t *memory)
{
    struct stat status;
    if (fstat(memory->fd, &status) < 0)
        return -1;
    memory->device = status.st_dev;
    memory->inode = status.st_ino;
    return 0;
}

/* Return true if the descriptor is still ours. Programs that detach from their terminal close all descriptors. */
static int has_fd(const memory_t *memory)
{
    struct stat status;
    return memory->fd >= 0 && fstat(memory->fd, &status) == 0 && status.st_dev == memory->device &&
           status.st_ino == memory->inode;
}

/* Give a child its own memory at the same addresses, without rows. The child calls it after the fork. */
static void after_fork_in_child(void)
{
    size_t copied = 0;
    for (memory_t *memory = memories; memory != NULL; memory = memory->next) {
        if (memory->is_private)
            continue;
        int before = memory->fd, fd = memory->core == NULL ? -1 : new_memfd(memory->size_bytes);
        int shared = fork_copy == NULL ? MAP_PRIVATE : fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
        if (has_fd(memory) == 0)
            before = -1;
        if (fork_copy == NULL && before < 0)
            continue;
        void *mapped = mmap(memory->at, memory->size_bytes, PROT_READ | PROT_WRITE, shared | MAP_FIXED | MAP_NORESERVE,
                            fork_copy == NULL ? before : fd, 0);
        if (before >= 0)
            close(before);
        memory->fd = fork_copy == NULL || mapped == MAP_FAILED ? -1 : fd;
        memory->is_file = 0;
        if (memory->fd >= 0)
            identify_file(memory);
        if (mapped == MAP_FAILED)
            continue;
        if (fork_copy != NULL)
            copied += copy_inherited(memory, fork_copy + copied, 1);
        memory->at->pid = (uint32_t)getpid();
        memory->at->state = STATE_FORKED;
        memory->at->start_ticks = 0;
        memory->at->parts[PART_DETAILS].used = 0;
        for (int number = PART_INTERVALS; number < PART_ROWS; number++)
            memory->at->parts[number].used = 0;
    }
    drop_fork_copy();
}

/* Return true if the parts are in order, fit into a memory of this size, and have slots that are large enough. */
static int is_sound(const recording_t *head, size_t size_bytes)
{
    const uint64_t least[PART_COUNT] = {
        [PART_TEXT] = 1, [PART_RINGS] = sizeof(Ring), [PART_NODES] = sizeof(node_t), [PART_TOTALS] = sizeof(totals_t),
        [PART_CHUNKS] = sizeof(chunk_t), [PART_HIGHS] = 64 * sizeof(uint64_t), [PART_FRAMES] = sizeof(frame_t),
        [PART_ATTRIBUTES] = 2 * sizeof(attributes_t),
        [PART_FACTS] = 1, [PART_DETAILS] = 1, [PART_INTERVALS] = sizeof(interval_t),
        [PART_SAMPLES] = sizeof(sample_t), [PART_NUMBERS] = sizeof(number_t), [PART_ROWS] = sizeof(row_t),
    };
    uint64_t end = sizeof *head;
    if (memcmp(head->magic, RECORDING_MAGIC, sizeof head->magic) != 0 || head->version != RECORDING_VERSION)
        return 0;
    for (int number = 0; number < PART_COUNT; number++) {
        const part_t *part = &head->parts[number];
        int is_of_bytes = least[number] == 1, is_row = number == PART_ROWS;
        if (part->offset < end || part->offset % LINE != 0 || part->stride < least[number] || part->slots > size_bytes ||
            part->stride > 4096 || (is_of_bytes && part->stride != 1) || (is_row && part->stride != sizeof(row_t)))
            return 0;
        end = part->offset + part->slots * part->stride;
    }
    if (head->parts[PART_ATTRIBUTES].slots < head->parts[PART_FRAMES].slots)
        return 0;
    return head->parts[PART_DETAILS].slots % DETAIL_BLOCK_BYTES == 0 && end <= size_bytes;
}

/* Map a file whose header describes its parts, or without a file private memory with a given header. Return NULL with
 * an exception. Then the caller still owns the file. */
static memory_t *map_memory(int fd, int is_file, const recording_t *head)
{
    struct stat status;
    memory_t *memory = PyMem_Calloc(1, sizeof *memory);
    if (memory == NULL)
        return (memory_t *)PyErr_NoMemory();
    memory->fd = fd;
    memory->is_file = (char)is_file;
    memory->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    if (head == NULL && (fstat(fd, &status) < 0 || identify_file(memory) < 0)) {
        PyErr_SetFromErrno(PyExc_OSError);
        goto failed;
    }
    memory->is_private = head != NULL;
    memory->size_bytes = head != NULL ? (size_t)head->size_bytes : (size_t)status.st_size;
    if (memory->size_bytes < sizeof(recording_t)) {
        PyErr_SetString(PyExc_ValueError, "a memory too small for a recording");
        goto failed;
    }
    /* A service may have locked its later mappings into memory (mlockall). A mapping without access is not populated.
     * Once unlocked, pages are populated as they are touched. */
    int shared = head != NULL ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    memory->at = mmap(NULL, memory->size_bytes, PROT_NONE, shared | MAP_NORESERVE, fd, 0);
    if (memory->at != MAP_FAILED) {
        (void)munlock(memory->at, memory->size_bytes);
        if (mprotect(memory->at, memory->size_bytes, PROT_READ | PROT_WRITE) < 0) {
            munmap(memory->at, memory->size_bytes);
            memory->at = MAP_FAILED;
        }
    }
    if (memory->at == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        goto failed;
    }
    if (head != NULL)
        memcpy(memory->at, head, sizeof *head);
    const part_t *rows = &memory->at->parts[PART_ROWS];
    if (!is_sound(memory->at, memory->size_bytes) || rows->offset % memory->page_bytes != 0) {
        PyErr_SetString(PyExc_ValueError, "a memory whose header is of no recording");
        goto unmap;
    }
    memory->pages = rows->slots * sizeof(row_t) / memory->page_bytes;
    if ((memory->used_pages = PyMem_Calloc(memory->pages + 1, 1)) == NULL) {
        PyErr_NoMemory();
        goto unmap;
    }
    memory->at->address = (uint64_t)(uintptr_t)memory->at;
    memory->at->object_bytes = sizeof(PyObject);
    return memory;
unmap:
    munmap(memory->at, memory->size_bytes);
failed:
    PyMem_Free(memory);
    return NULL;
}

/* Stop recording into a memory. The mapping stays, because pointers may refer to it. */
static void leave_memory(memory_t *memory)
{
    memory->core = NULL;
    memory->at->state = STATE_GOODBYE;
    if (has_fd(memory))
        close(memory->fd);
    memory->fd = -1;
}

/* Free the files of ended recordings in which no ring has rows. Their contents move to private memory at the same
 * addresses, because pointers may refer to them. */
static void make_left_private(void)
{
    for (memory_t *memory = memories; memory != NULL; memory = memory->next) {
        if (memory->core != NULL || memory->is_private || memchr(memory->used_pages, 1, memory->pages) != NULL)
            continue;
        size_t bytes = copy_inherited(memory, NULL, 0);
        char *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copy == MAP_FAILED)
            continue;
        copy_inherited(memory, copy, 0);
        if (mmap(memory->at, memory->size_bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED) {
            copy_inherited(memory, copy, 1);
            memory->is_private = 1;
            memory->is_file = 0;
        }
        munmap(copy, bytes);
    }
}

/* Mark that totals and nodes of the memory begin to change their owners, or have done so. */
static void mark_moving(const Core *core)
{
    if (core->memory == NULL)
        return;
    __atomic_store_n(&core->memory->at->moving, core->memory->at->moving + 1, __ATOMIC_SEQ_CST);
}
