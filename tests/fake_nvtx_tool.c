/* A tool that listens to NVTX: writes what it is told, a line for each call, to the file named by FAKE_NVTX_TOOL.
 *
 * A process loads it through NVTX_INJECTION64_PATH, as it would Nsight's. What is declared here is the part of NVTX 3's
 * interface to tools that it uses (nvtxTypes.h, nvToolsExt.h), which does not change. Fields of a line are separated by
 * tabs: pid, call, and what it was called with.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CALLBACKS = 1, CORE2 = 5, REGISTERED = 3 };
enum { MARK = 1, RANGE_START, RANGE_END, RANGE_PUSH, RANGE_POP, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE = 12 };

typedef void (*function)(void);

struct callbacks {
    size_t size;
    int (*get_module)(int module, function ***table, unsigned *size);
};

struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message;
};

static atomic_uint_fast64_t ranges;

static void
say(const char *call, uint64_t number, const char *domain, uint32_t category, const char *name)
{
    char line[4096];
    int length = snprintf(line, sizeof line, "%d\t%s\t%llu\t%s\t%u\t%s\n", getpid(), call, (unsigned long long)number,
                          domain, category, name);
    int file = open(getenv("FAKE_NVTX_TOOL"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || write(file, line, (size_t)length) != length)
        abort();
    close(file);
}

static const char *
message_of(const struct attributes *attributes)
{
    return attributes->message_type == REGISTERED ? attributes->message : "(not registered)";
}

static void *
create(const char *name)
{
    say("domain", 0, name, 0, "");
    return strdup(name);
}

static void *
register_string(void *domain, const char *string)
{
    say("string", 0, domain, 0, string);
    return strdup(string);
}

static void
name_category(void *domain, uint32_t category, const char *name)
{
    say("category", 0, domain, category, name);
}

static uint64_t
start(void *domain, const struct attributes *attributes)
{
    uint64_t number = atomic_fetch_add(&ranges, 1) + 1;
    say("start", number, domain, attributes->category, message_of(attributes));
    return number;
}

static void
end(void *domain, uint64_t number)
{
    say("end", number, domain, 0, "");
}

static int
push(void *domain, const struct attributes *attributes)
{
    say("push", 0, domain, attributes->category, message_of(attributes));
    return 0;
}

static int
pop(void *domain)
{
    say("pop", 0, domain, 0, "");
    return 0;
}

static void
mark(void *domain, const struct attributes *attributes)
{
    say("mark", 0, domain, attributes->category, message_of(attributes));
}

int
InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t))
{
    const struct callbacks *callbacks = get_export_table(CALLBACKS);
    function **table;
    unsigned size;
    if (callbacks == NULL || !callbacks->get_module(CORE2, &table, &size) || size <= CREATE)
        return 0;
    *table[MARK] = (function)mark;
    *table[RANGE_START] = (function)start;
    *table[RANGE_END] = (function)end;
    *table[RANGE_PUSH] = (function)push;
    *table[RANGE_POP] = (function)pop;
    *table[NAME_CATEGORY] = (function)name_category;
    *table[REGISTER_STRING] = (function)register_string;
    *table[CREATE] = (function)create;
    return 1;
}
