/* A list of kernel calls, made one after the other. Knows nothing of what they do: each takes the address of its arguments
 * and returns 0, or else the list ends there.
 */
#include <stdint.h>

#define ABI_VERSION 1

/* Mirrored by _Call in tape.py. */
struct call {
    int (*kernel)(const void *args);
    const void *args;
};

int tandem_tape_abi(void) { return ABI_VERSION; }

/* 0, or what the first call that failed returned. */
int tandem_tape_play(const struct call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const int failed = calls[i].kernel(calls[i].args);
        if (failed) return failed;
    }
    return 0;
}
