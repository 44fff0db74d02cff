/* A FAKE libnvidia-ml.so.1: the real nvidia-ml-py loads it, no driver and no GPU is involved.
 *
 * Answers come from the text file named by FAKE_NVML_FILE, read again whenever it changes:
 *
 *     # comment
 *     devices = 1
 *     gpu0.uuid = GPU-...            strings and decimal numbers, in NVML's own units
 *     gpu0.field.186 = 626260        field value as 64 bits; "u32:1234" as 32 bits
 *     gpu0.power_mw = !15            answers with nvmlReturn_t 15 (GPU_IS_LOST)
 *     gpu0.processes = 10309:28234   pid:MiB, space separated
 *     gpu0.mig0.uuid = MIG-...       a MIG device of gpu0: uuid, memory_*, processes
 *     all = !9                       every call answers so, nvmlInit too (DRIVER_NOT_LOADED)
 *     delay_us = 50000               every device call takes so long
 *
 * The last line with a key counts. A key that is not there answers NOT_SUPPORTED (3), as a GPU without that quantity does.
 * FAKE_NVML_STATIC=1 reads the file once, for benchmarks. FAKE_NVML_CALLS names a file to which
 * the name of every device call is appended.
 * Compiled with -DOLD_DRIVER it lacks the functions that drivers before R535 lack.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

#define MAX_KEYS 4096
#define MAX_DEVICES 16
#define MAX_MIG 7

static struct { char key[64]; char value[192]; } entries[MAX_KEYS];
static int n_entries, initialised, loaded;
static struct stat seen;

typedef struct { int gpu, mig; } Device; /* mig < 0: the GPU itself */
static Device devices[MAX_DEVICES][1 + MAX_MIG];

static void load(void) {
    const char *path = getenv("FAKE_NVML_FILE");
    struct stat now;
    if (loaded && getenv("FAKE_NVML_STATIC")) return;
    if (!path || stat(path, &now)) return;
    if (loaded && now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
        now.st_mtim.tv_sec == seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    char line[512];
    n_entries = 0;
    while (fgets(line, sizeof line, file) && n_entries < MAX_KEYS)
        if (line[0] != '#' &&
            sscanf(line, " %63[^= ] = %191[^\n]", entries[n_entries].key, entries[n_entries].value) == 2)
            n_entries++;
    fclose(file);
    seen = now;
    loaded = 1;
}

static const char *find(const char *key) {
    load();
    for (int i = n_entries - 1; i >= 0; i--)
        if (!strcmp(entries[i].key, key)) return entries[i].value;
    return NULL;
}

static nvmlReturn_t code_of(const char *value) {
    if (!value) return NOT_SUPPORTED;
    return value[0] == '!' ? atoi(value + 1) : SUCCESS;
}

static nvmlReturn_t general(void) {
    const char *all = find("all");
    return all ? code_of(all) : initialised ? SUCCESS : UNINITIALIZED;
}

static nvmlReturn_t text_of(const Device *device, const char *name, const char **out) {
    char key[64];
    nvmlReturn_t code = general();
    if (code) return code;
    const char *delay = find("delay_us"), *calls = getenv("FAKE_NVML_CALLS");
    if (delay) usleep((useconds_t)atoi(delay));
    if (calls) {
        FILE *file = fopen(calls, "a");
        if (file) { fprintf(file, "%s\n", name); fclose(file); }
    }
    if (device->mig < 0) snprintf(key, sizeof key, "gpu%d.%s", device->gpu, name);
    else snprintf(key, sizeof key, "gpu%d.mig%d.%s", device->gpu, device->mig, name);
    *out = find(key);
    return code_of(*out);
}

static nvmlReturn_t number_of(const Device *device, const char *name, unsigned long long *out) {
    const char *text = NULL;
    nvmlReturn_t code = text_of(device, name, &text);
    if (!code) *out = strtoull(text, NULL, 10);
    return code;
}

static nvmlReturn_t unsigned_of(const Device *device, const char *name, unsigned *out) {
    unsigned long long wide = 0;
    nvmlReturn_t code = number_of(device, name, &wide);
    if (!code) *out = (unsigned)wide;
    return code;
}

static nvmlReturn_t string_of(const Device *device, const char *name, char *out, unsigned size) {
    const char *text = NULL;
    nvmlReturn_t code = text_of(device, name, &text);
    if (!code) snprintf(out, size, "%s", text);
    return code;
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *all = find("all");
    if (all && code_of(all)) return code_of(all);
    for (int gpu = 0; gpu < MAX_DEVICES; gpu++)
        for (int mig = -1; mig < MAX_MIG; mig++) devices[gpu][mig + 1] = (Device){gpu, mig};
    initialised++;
    return SUCCESS;
}
nvmlReturn_t nvmlShutdown(void) {
    if (!initialised) return UNINITIALIZED;
    initialised--;
    return SUCCESS;
}
const char *nvmlErrorString(nvmlReturn_t code) { (void)code; return "fake error"; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t code = general();
    if (!code) { const char *text = find("devices"); *count = text ? (unsigned)atoi(text) : 0; }
    return code;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    unsigned count = 0;
    nvmlReturn_t code = nvmlDeviceGetCount_v2(&count);
    if (code) return code;
    if (index >= count) return INVALID;
    *out = &devices[index][0];
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    unsigned count = 0;
    char found[96];
    nvmlReturn_t code = nvmlDeviceGetCount_v2(&count);
    if (code) return code;
    for (unsigned gpu = 0; gpu < count; gpu++)
        for (int i = 0; i <= MAX_MIG; i++)
            if (!string_of(&devices[gpu][i], "uuid", found, sizeof found) && !strcmp(found, uuid)) {
                *out = &devices[gpu][i];
                return SUCCESS;
            }
    return NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const Device *mig, Device **out) {
    if (mig->mig < 0) return INVALID;
    *out = &devices[mig->gpu][0];
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUUID(const Device *d, char *out, unsigned size) { return string_of(d, "uuid", out, size); }
nvmlReturn_t nvmlDeviceGetName(const Device *d, char *out, unsigned size) { return string_of(d, "name", out, size); }
nvmlReturn_t nvmlDeviceGetIndex(const Device *d, unsigned *out) {
    *out = (unsigned)d->gpu;
    return d->mig < 0 ? general() : NOT_SUPPORTED;
}

static const char *const CLOCKS[] = {"graphics", "sm", "memory", "video"};
static nvmlReturn_t clock_of(const Device *d, const char *prefix, unsigned type, unsigned *out) {
    char name[32];
    if (type > 3) return INVALID;
    snprintf(name, sizeof name, "%s_%s_mhz", prefix, CLOCKS[type]);
    return unsigned_of(d, name, out);
}
nvmlReturn_t nvmlDeviceGetClockInfo(const Device *d, unsigned type, unsigned *out) { return clock_of(d, "clock", type, out); }
nvmlReturn_t nvmlDeviceGetMaxClockInfo(const Device *d, unsigned type, unsigned *out) { return clock_of(d, "max_clock", type, out); }
nvmlReturn_t nvmlDeviceGetTemperature(const Device *d, unsigned sensor, unsigned *out) { (void)sensor; return unsigned_of(d, "temperature_c", out); }
nvmlReturn_t nvmlDeviceGetPowerUsage(const Device *d, unsigned *out) { return unsigned_of(d, "power_mw", out); }
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(const Device *d, unsigned *out) { return unsigned_of(d, "power_limit_mw", out); }
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(const Device *d, unsigned *out) { return unsigned_of(d, "pcie_generation", out); }
nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(const Device *d, unsigned *out) { return unsigned_of(d, "pcie_width", out); }
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(const Device *d, unsigned long long *out) { return number_of(d, "clocks_event_reasons", out); }
#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(const Device *d, unsigned long long *out) { return number_of(d, "clocks_event_reasons", out); }
#endif
nvmlReturn_t nvmlDeviceGetTotalEccErrors(const Device *d, unsigned type, unsigned counter, unsigned long long *out) {
    (void)counter;
    return number_of(d, type ? "ecc_uncorrected" : "ecc_corrected", out);
}

typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

nvmlReturn_t nvmlDeviceGetUtilizationRates(const Device *d, Utilization *out) {
    nvmlReturn_t code = unsigned_of(d, "utilization_gpu", &out->gpu);
    return code ? code : unsigned_of(d, "utilization_memory", &out->memory);
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(const Device *d, Memory *out) {
    unsigned long long reserved = 0;
    nvmlReturn_t code = number_of(d, "memory_total_bytes", &out->total);
    if (!code) code = number_of(d, "memory_used_bytes", &out->used);
    if (!code) code = number_of(d, "memory_reserved_bytes", &reserved);
    out->used += reserved;
    out->free = out->total - out->used;
    return code;
}
#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(const Device *d, MemoryV2 *out) {
    nvmlReturn_t code = number_of(d, "memory_total_bytes", &out->total);
    if (!code) code = number_of(d, "memory_used_bytes", &out->used);
    if (!code) code = number_of(d, "memory_reserved_bytes", &out->reserved);
    out->free = out->total - out->used - out->reserved;
    return code;
}
#endif

typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } Process;
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(const Device *d, unsigned *count, Process *out) {
    const char *text = NULL;
    unsigned pid, n = 0;
    unsigned long long mib;
    int used;
    nvmlReturn_t code = text_of(d, "processes", &text);
    if (code) return code;
    for (; sscanf(text, " %u:%llu%n", &pid, &mib, &used) == 2; text += used, n++)
        if (out && n < *count) out[n] = (Process){pid, mib << 20, 0xffffffff, 0xffffffff};
    code = n > *count ? TOO_SMALL : SUCCESS;
    *count = n;
    return code;
}

typedef struct {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    int32_t type, code;
    union { double d; uint32_t u; unsigned long long ull; } value;
} FieldValue;
nvmlReturn_t nvmlDeviceGetFieldValues(const Device *d, int count, FieldValue *values) {
    nvmlReturn_t code = general();
    for (int i = 0; !code && i < count; i++) {
        char name[32];
        const char *text = NULL;
        snprintf(name, sizeof name, values[i].scope == 0xffffffff ? "field.%u.all" : "field.%u", values[i].field);
        values[i].code = text_of(d, name, &text);
        if (values[i].code) continue;
        int narrow = !strncmp(text, "u32:", 4);
        values[i].type = narrow ? 1 : 3;
        values[i].value.ull = 0;
        if (narrow) values[i].value.u = (uint32_t)strtoull(text + 4, NULL, 10);
        else values[i].value.ull = strtoull(text, NULL, 10);
    }
    return code;
}
