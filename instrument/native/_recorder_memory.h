/* Cold: the memory in which other processes can read the recording, and its slots. A part of `_recorder.c`. It is one
 * mapping of fixed size, shared with each process that gets its descriptor. It has parts of equal slots. The structures
 * that spans touch are in it. A full part counts the slots that it refuses, which are then in private memory. The
 * mapping stays until the process ends. A forked child gets private memory at the same addresses before Python runs. */

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

/* Copy what a child inherits of a memory, to a copy or back: no rows and no details. Return the number of bytes. Only
 * count them if `copy` is NULL. */
static size_t copy_inherited(memory_t *memory, char *copy, int is_restored)
{
    size_t copied = sizeof(recording_t);
    if (memory->is_private) /* the kernel has copied it for the child */
        return 0;
    if (copy != NULL)
        memcpy(is_restored ? (char *)memory->at : copy, is_restored ? copy : (char *)memory->at, copied);
    for (int number = 0; number < PART_DETAILS; number++) {
        const part_t *part = &memory->at->parts[number];
        size_t bytes = (part->used < part->slots ? part->used : part->slots) * part->stride;
        char *slots = part_at(memory, number);
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

/* Return true if the descriptor is still ours. Programs that detach from their terminal close all descriptors. */
static int has_fd(const memory_t *memory)
{
    struct stat status;
    return memory->fd >= 0 && fstat(memory->fd, &status) == 0 && status.st_dev == memory->device &&
           status.st_ino == memory->inode;
}

/* Move what a child inherits to private memory at the same addresses, without rows. The child calls it after the fork,
 * and makes a memory that other processes can read when its Python code begins anew. */
static void after_fork_in_child(void)
{
    size_t copied = 0;
    for (memory_t *memory = memories; memory != NULL; memory = memory->next) {
        int is_copied = fork_copy != NULL, fd = has_fd(memory) ? memory->fd : -1;
        if (memory->is_private || (!is_copied && fd < 0))
            continue;
        void *mapped = mmap(memory->at, memory->size_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE | (is_copied ? MAP_ANONYMOUS : 0), is_copied ? -1 : fd, 0);
        if (fd >= 0)
            close(fd);
        memory->fd = -1;
        memory->is_file = 0;
        if (mapped == MAP_FAILED)
            continue;
        if (is_copied)
            copied += copy_inherited(memory, fork_copy + copied, 1);
        memory->is_private = 1;
        for (int number = PART_DETAILS; number < PART_ROWS; number++)
            memory->at->parts[number].used = 0;
    }
    drop_fork_copy();
}

/* Map a file whose header describes its parts, or without a file private memory with a given header. Return NULL with
 * an exception. Then the caller still owns the file. */
static memory_t *map_memory(int fd, int is_file, const recording_t *head)
{
    struct stat status = {.st_size = head != NULL ? (off_t)head->size_bytes : 0};
    memory_t *memory = PyMem_Calloc(1, sizeof *memory);
    if (memory == NULL)
        return (memory_t *)PyErr_NoMemory();
    int failed = head == NULL && fstat(fd, &status) < 0;
    *memory = (memory_t){.fd = fd, .device = status.st_dev, .inode = status.st_ino, .is_private = head != NULL,
                         .is_file = (char)is_file, .size_bytes = (size_t)status.st_size,
                         .page_bytes = (size_t)sysconf(_SC_PAGESIZE)};
    /* A service may have locked its later mappings into memory (mlockall). A mapping without access is not populated.
     * Once unlocked, pages are populated as they are touched. */
    int shared = head != NULL ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    memory->at = failed ? MAP_FAILED : mmap(NULL, memory->size_bytes, PROT_NONE, shared | MAP_NORESERVE, fd, 0);
    if (memory->at != MAP_FAILED) {
        (void)munlock(memory->at, memory->size_bytes);
        failed = mprotect(memory->at, memory->size_bytes, PROT_READ | PROT_WRITE) < 0;
    }
    if (failed || memory->at == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        goto failed;
    }
    if (head != NULL)
        memcpy(memory->at, head, sizeof *head);
    if (memory->at->version != RECORDING_VERSION) {
        PyErr_SetString(PyExc_ValueError, "a memory whose header is of no recording");
        goto failed;
    }
    memory->pages = memory->at->parts[PART_ROWS].slots * sizeof(row_t) / memory->page_bytes;
    memory->used_pages = PyMem_Calloc(memory->pages + 1, 1);
    memory->at->address = (uint64_t)(uintptr_t)memory->at;
    memory->at->object_bytes = sizeof(PyObject);
    if (memory->used_pages != NULL)
        return memory;
    PyErr_NoMemory();
failed:
    if (memory->at != MAP_FAILED)
        munmap(memory->at, memory->size_bytes);
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
