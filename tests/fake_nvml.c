/* NVIDIA's management library without a card: what its devices are and do is read from a script, and every call is
 * counted in a log.
 *
 * FAKE_NVML names the script, a line for each fact; `@N` makes it hold from the N-th reading of a device's memory on:
 *   init CODE              what nvmlInit returns
 *   gpu UUID BUS MODEL     a device, in NVML's order; BUS is its PCI bus
 *   mig GPU UUID INSTANCE  a MIG instance of a device
 *   GPU.CALL CODE [@N]     what a call returns for a device, e.g. `0.power 3`
 *   GPU.VALUE NUMBER [@N]  util memutil used total power energy temp smclock memclock pid pidmem gpm (support) sm
 * FAKE_NVML_LOG names the file to which each call appends `PID NAME`.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int ret;
enum { OK = 0, UNINITIALIZED = 1, BAD = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

typedef struct { char uuid[96], model[96]; unsigned bus, instance; int parent, readings; } device_t;
typedef struct { char key[64]; double value; int from; } fact_t;
typedef struct { device_t *of; unsigned number; int mig; } sample_t;

static device_t devices[32], migs[32];
static int device_count, mig_count, fact_count, initialised, samples_out;
static fact_t facts[512];

static void say(const char *name) {
    const char *path = getenv("FAKE_NVML_LOG");
    char line[128];
    if (!path) return;
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    int n = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), name);
    if (file >= 0) { if (write(file, line, n) < 0) abort(); close(file); }
}

static void load(void) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : 0;
    char line[256], first[64], rest[192];
    device_count = mig_count = fact_count = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%63s %191[^\n]", first, rest) != 2) continue;
        if (!strcmp(first, "gpu")) {
            device_t *d = &devices[device_count++];
            memset(d, 0, sizeof *d);
            d->parent = -1;
            sscanf(rest, "%95s %u %95[^\n]", d->uuid, &d->bus, d->model);
        } else if (!strcmp(first, "mig")) {
            device_t *d = &migs[mig_count++];
            memset(d, 0, sizeof *d);
            sscanf(rest, "%d %95s %u", &d->parent, d->uuid, &d->instance);
            strcpy(d->model, "MIG 1g.18gb");
        } else {
            fact_t *f = &facts[fact_count++];
            strcpy(f->key, first);
            f->from = 0;
            sscanf(rest, "%lf @%d", &f->value, &f->from);
        }
    }
    if (file) fclose(file);
}

/* The last line of the script that holds by now. */
static int fact(device_t *d, const char *name, double *value) {
    char key[96];
    int found = 0, migs_first = d >= migs && d < migs + 32;
    snprintf(key, sizeof key, "%s%d.%s", migs_first ? "m" : "", (int)(migs_first ? d - migs : d - devices), name);
    for (int i = 0; i < fact_count; i++)
        if (!strcmp(facts[i].key, key) && d->readings >= facts[i].from) { *value = facts[i].value; found = 1; }
    return found;
}

static double value(device_t *d, const char *name, double otherwise) { fact(d, name, &otherwise); return otherwise; }

static ret asked(device_t *d, const char *call) {
    double code = OK;
    say(call);
    if (!initialised) return UNINITIALIZED;
    if (!fact(d, "all", &code)) fact(d, call, &code);
    return (ret)code;
}

static ret put(char *to, unsigned room, const char *text) {
    if (strlen(text) >= room) return TOO_SMALL;
    strcpy(to, text);
    return OK;
}

const char *nvmlErrorString(ret code) { static char text[32]; snprintf(text, 32, "fake error %d", code); return text; }

ret nvmlInitWithFlags(unsigned flags) {
    double code = OK;
    (void)flags;
    say("init");
    if (!initialised) load();
    for (int i = 0; i < fact_count; i++)
        if (!strcmp(facts[i].key, "init")) code = facts[i].value;
    if (code == OK) initialised++;
    return (ret)code;
}
ret nvmlShutdown(void) {
    say(samples_out ? "shutdown with samples" : "shutdown");
    if (!initialised) return UNINITIALIZED;
    initialised--;
    return OK;
}
ret nvmlDeviceGetCount_v2(unsigned *n) { say("count"); *n = device_count; return initialised ? OK : UNINITIALIZED; }
ret nvmlDeviceGetHandleByIndex_v2(unsigned i, device_t **d) {
    if (i >= (unsigned)device_count) return BAD;
    *d = &devices[i];
    return asked(*d, "handle");
}
ret nvmlDeviceGetUUID(device_t *d, char *to, unsigned room) { return put(to, room, d->uuid); }
ret nvmlDeviceGetName(device_t *d, char *to, unsigned room) { return put(to, room, d->model); }
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
ret nvmlDeviceGetPciInfo_v3(device_t *d, pci_t *pci) { memset(pci, 0, sizeof *pci); pci->bus = d->bus; return OK; }

ret nvmlDeviceGetMigMode(device_t *d, unsigned *now, unsigned *later) {
    *now = 0;
    for (int i = 0; i < mig_count; i++) *now |= migs[i].parent == d - devices;
    *later = *now;
    return *now ? OK : NOT_SUPPORTED;
}
ret nvmlDeviceGetMaxMigDeviceCount(device_t *d, unsigned *n) { (void)d; *n = 7; return OK; }
ret nvmlDeviceGetMigDeviceHandleByIndex(device_t *d, unsigned index, device_t **mig) {
    for (int i = 0; i < mig_count; i++)
        if (migs[i].parent == d - devices && !index--) { *mig = &migs[i]; return OK; }
    return NOT_FOUND;
}
ret nvmlDeviceGetGpuInstanceId(device_t *d, unsigned *id) { *id = d->instance; return OK; }

typedef struct { unsigned gpu, memory; } rates_t;
ret nvmlDeviceGetUtilizationRates(device_t *d, rates_t *r) {
    r->gpu = value(d, "util", 0);
    r->memory = value(d, "memutil", 0);
    return asked(d, "utilization");
}
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
ret nvmlDeviceGetMemoryInfo_v2(device_t *d, memory_t *m) {
    ret code = asked(d, "memory");
    d->readings++;
    m->total = value(d, "total", 1e9);
    m->used = value(d, "used", 0);
    return code;
}
typedef struct { unsigned long long total, free, used; } memory1_t;
ret nvmlDeviceGetMemoryInfo(device_t *d, memory1_t *m) {
    ret code = asked(d, "memory1");
    d->readings++;
    m->total = value(d, "total", 1e9);
    m->used = value(d, "used", 0) + 512;
    return code;
}
ret nvmlDeviceGetPowerUsage(device_t *d, unsigned *mw) { *mw = value(d, "power", 0); return asked(d, "power_usage"); }
ret nvmlDeviceGetTotalEnergyConsumption(device_t *d, unsigned long long *mj) {
    *mj = value(d, "energy", 0);
    return asked(d, "energy_counter");
}
ret nvmlDeviceGetTemperature(device_t *d, unsigned sensor, unsigned *c) {
    (void)sensor;
    *c = value(d, "temp", 0);
    return asked(d, "temperature");
}
ret nvmlDeviceGetClockInfo(device_t *d, unsigned which, unsigned *mhz) {
    *mhz = which == 1 ? value(d, "smclock", 0) : value(d, "memclock", 0);
    return asked(d, "clock");
}
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
ret nvmlDeviceGetComputeRunningProcesses_v3(device_t *d, unsigned *n, process_t *found) {
    ret code = asked(d, "processes");
    double pid = value(d, "pid", -1);
    if (code != OK || pid == -1) { *n = 0; return code; }
    if (*n < 2) { *n = 2; return TOO_SMALL; }
    *n = 2;
    found[0] = (process_t){1, 77, 0, 0};
    found[1] = (process_t){pid == 0 ? (unsigned)getpid() : (unsigned)pid, value(d, "pidmem", 0), 0, 0};
    return OK;
}

typedef struct { unsigned version, supported; } support_t;
ret nvmlGpmQueryDeviceSupport(device_t *d, support_t *s) { s->supported = value(d, "gpm", 0); return asked(d, "gpm_support"); }
ret nvmlGpmSampleAlloc(sample_t **s) { say("gpm_alloc"); *s = calloc(1, sizeof **s); samples_out++; return OK; }
ret nvmlGpmSampleFree(sample_t *s) { say("gpm_free"); free(s); samples_out--; return OK; }
static unsigned next_sample;
ret nvmlGpmSampleGet(device_t *d, sample_t *s) { s->of = d; s->number = ++next_sample; s->mig = 0; return asked(d, "gpm_sample"); }
ret nvmlGpmMigSampleGet(device_t *d, unsigned instance, sample_t *s) {
    s->of = d; s->number = ++next_sample; s->mig = (int)instance;
    return asked(d, "gpm_mig_sample");
}
typedef struct { unsigned id; ret code; double value; const char *names[3]; } metric_t;
typedef struct { unsigned version, count; sample_t *first, *second; metric_t metrics[]; } metrics_t;
ret nvmlGpmMetricsGet(metrics_t *m) {
    if (m->version != 1 || m->first->of != m->second->of || m->first->number >= m->second->number) return BAD;
    for (unsigned i = 0; i < m->count; i++) {
        metric_t *one = &m->metrics[i];
        one->code = one->id >= 60 ? NOT_SUPPORTED : OK; /* no NVLink here */
        one->value = one->id + m->first->mig;
    }
    return asked(m->first->of, "gpm_metrics");
}
