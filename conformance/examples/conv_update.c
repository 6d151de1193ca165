/* An adapter in plain C: the causal convolution's decode step in float32, spoken to by the suite over JSON lines.
 *
 *     cc -O2 -o conv_update conv_update.c -lm
 *     statescan run --impl run:./conv_update --only CONV
 *
 * The runner sends keys in a fixed order and repeats every tensor's byte offset, so there is no JSON library here and no
 * header is read: find the name, take its numbers, map the file and go. What is yours is `conv_update` alone. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* x, y [n][j][c]; weight [c][w]; bias [c] or NULL; pool [slots][c][w], changed in place; read, write [n], negative: none.
 * A row that reads nothing starts from zeros; one that neither reads nor writes is padding, and its output is 0. */
static void conv_update(const float *x, const float *weight, const float *bias, float *pool, const int32_t *read,
                        const int32_t *write, int silu, long n, long j, long c, long w, float *y) {
    float window[4];
    for (long row = 0; row < n; row++)
        for (long channel = 0; channel < c; channel++) {
            const float *from = pool + (read[row] * c + channel) * w;
            for (long i = 0; i < w; i++) window[i] = read[row] < 0 ? 0 : from[i];
            for (long token = 0; token < j; token++) {
                long at = (row * j + token) * c + channel;
                double sum = bias ? bias[channel] : 0;
                memmove(window, window + 1, (w - 1) * sizeof *window);
                window[w - 1] = x[at];
                for (long i = 0; i < w; i++) sum += (double)window[i] * weight[channel * w + i];
                y[at] = read[row] < 0 && write[row] < 0 ? 0 : silu ? sum / (1 + exp(-sum)) : sum;
            }
            if (write[row] >= 0) memcpy(pool + (write[row] * c + channel) * w, window, w * sizeof *window);
        }
}

/* The protocol */

typedef struct { char *bytes; size_t size; } file_t;
typedef struct { char *data; char dtype[8]; long shape[6], nbytes; } tensor_t;

static char folder[4096];
static FILE *reply;

static file_t map_file(const char *section, int writable) {
    char path[4200], name[16] = "";
    struct stat info;
    file_t file = {NULL, 0};
    if (!section || sscanf(section, "\"%*[a-z]\":{\"file\":\"%10[0-9.inout]", name) != 1) return file;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int handle = open(path, (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW);
    if (handle < 0 || fstat(handle, &info)) return file;
    void *map = mmap(NULL, info.st_size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, handle, 0);
    close(handle);
    if (map != MAP_FAILED) file = (file_t){map, info.st_size};
    return file;
}

static tensor_t find(const char *section, file_t file, const char *name) {
    char key[80];
    tensor_t found = {NULL, "", {0}, 0};
    long offset = 0;
    snprintf(key, sizeof key, "{\"name\":\"%s\",", name);
    const char *at = strstr(section, key), *shape = at ? strstr(at, "\"shape\":[") : NULL;
    if (!shape || sscanf(at + strlen(key), "\"dtype\":\"%7[a-z0-9]", found.dtype) != 1) return found;
    shape += strlen("\"shape\":[");
    for (int i = 0; i < 6 && *shape && *shape != ']'; i++) {
        char *end;
        found.shape[i] = strtol(shape, &end, 10);
        shape = *end == ',' ? end + 1 : end;
    }
    if (sscanf(strstr(shape, "\"offset\":"), "\"offset\":%ld,\"nbytes\":%ld", &offset, &found.nbytes) == 2 &&
        offset >= 0 && found.nbytes >= 0 && (size_t)(offset + found.nbytes) <= file.size)
        found.data = file.bytes + offset;
    return found;
}

static void run(long id, const char *line) {
    static const char *inputs[] = {"x", "weight", "bias", "conv_pool", "read_slots", "write_slots"};
    const char *given = strstr(line, "\"inputs\":{"), *wanted = strstr(line, "\"outputs\":{");
    file_t in = map_file(given, 0), out = map_file(wanted, 1);
    if (!in.bytes || !out.bytes) {
        fprintf(reply, "{\"id\":%ld,\"ok\":false,\"status\":\"error\",\"error\":\"IOError\",\"message\":\"no files\"}\n", id);
        return;
    }
    char *cut = strstr(given, "\"outputs\":{"), saved = *cut;
    *cut = 0; /* names of inputs are looked for among the inputs */
    tensor_t t[6];
    int named = 0, known = 0, typed = 1;
    for (int i = 0; i < 6; i++) {
        t[i] = find(given, in, inputs[i]);
        known += t[i].data != NULL;
        typed &= !t[i].data || !strcmp(t[i].dtype, i < 4 ? "f32" : "i32");
    }
    for (const char *at = given; (at = strstr(at, "{\"name\":")); at++) named++;
    *cut = saved;
    if (named != known || !typed || t[1].shape[1] > 4) { /* an argument that is not honoured is refused (ERR-5) */
        fprintf(reply, "{\"id\":%ld,\"ok\":false,\"status\":\"unsupported\",\"need\":\"%s\"}\n", id,
                named != known ? "intermediates" : typed ? "width" : "dtypes");
        return;
    }
    for (int i = 0; i < 6; i++) { /* every input comes back as it is after the call; the pool is changed there */
        char after[32];
        snprintf(after, sizeof after, "after.%s", inputs[i]);
        tensor_t copy = find(wanted, out, after);
        if (copy.data && t[i].data) memcpy(copy.data, t[i].data, t[i].nbytes), t[i].data = copy.data;
    }
    tensor_t y = find(wanted, out, "y");
    conv_update((float *)t[0].data, (float *)t[1].data, (float *)t[2].data, (float *)t[3].data, (int32_t *)t[4].data,
                (int32_t *)(t[5].data ? t[5].data : t[4].data), strstr(line, "\"activation\":null") == NULL,
                t[0].shape[0], t[0].shape[1], t[0].shape[2], t[1].shape[1], (float *)y.data);
    munmap(in.bytes, in.size);
    munmap(out.bytes, out.size);
    fprintf(reply, "{\"id\":%ld,\"ok\":true}\n", id);
}

int main(void) {
    reply = fdopen(dup(1), "w"); /* the protocol's own way out: what a library prints goes to stderr */
    dup2(2, 1);
    setvbuf(reply, NULL, _IOLBF, 1 << 16);
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0) {
        long id = 0;
        char cmd[16] = "";
        if (sscanf(line, "{\"id\":%ld,\"cmd\":\"%15[a-z]", &id, cmd) != 2) return 2;
        if (!strcmp(cmd, "hello")) {
            sscanf(strstr(line, "\"scratch\":\""), "\"scratch\":\"%4095[^\"]", folder);
            fprintf(reply, "{\"id\":%ld,\"ok\":true,\"protocol\":\"statescan/1\",\"name\":\"conv_update\",\"version\":\"1\","
                   "\"language\":\"c\",\"device\":\"cpu\"}\n", id);
        } else if (!strcmp(cmd, "capabilities"))
            fprintf(reply, "{\"id\":%ld,\"ok\":true,\"capabilities\":[{\"op\":\"causal_conv1d_update\",\"features\":["
                   "\"slot.pool\",\"slot.negative\",\"slot.split\",\"tokens.many\",\"act.none\",\"act.silu\",\"bias\","
                   "\"width:2\",\"width:3\",\"width:4\",\"window.W\"],\"dtypes\":[{\"x\":\"f32\",\"weight\":\"f32\","
                   "\"conv_pool\":\"f32\"}],\"operand\":\"f32\"}]}\n", id);
        else if (!strcmp(cmd, "run"))
            run(id, line);
        else
            fprintf(reply, "{\"id\":%ld,\"ok\":true}\n", id);
        if (!strcmp(cmd, "bye")) return 0;
    }
    return 0;
}
