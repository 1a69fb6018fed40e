/* Runs functions of a C kernel for tests on another CPU than this one's, under QEMU: reads calls from stdin, writes what they leave.
 * A call, in int64_t: function, arguments, regions, relocations; of each argument its region (-1: it is a number) and value or
 * offset; of each region its size and place in a cache line; of each relocation a region and an offset in it, and those of what
 * lies behind that pointer. Then the regions' bytes. The answer: the result, and the regions' bytes.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define tandem_use_team use_team_of_guest /* the kernel has its own */
#include "team.c"
#undef tandem_use_team
extern void tandem_use_team(const struct team_calls *calls) __attribute__((weak));

#define F(name) extern int64_t name();
FUNCTIONS
#undef F
#define F(name) name,
static int64_t (*const OF[])() = {FUNCTIONS};

enum { LINE = 64, MOST = 64 }; /* regions of a call */

static void read_all(void *to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(0);
}

int main(void) {
    if (tandem_use_team) tandem_use_team(tandem_team_calls());
    int64_t head[4], args[8][2], regions[MOST][2], move[4];
    while (1) {
        char *memory[MOST];
        int64_t value[8] = {0};
        read_all(head, sizeof head);
        if (head[1] > 8 || head[2] > MOST) return 1;
        read_all(args, (size_t)head[1] * sizeof *args);
        read_all(regions, (size_t)head[2] * sizeof *regions);
        int64_t (*moves)[4] = malloc((size_t)(head[3] + 1) * sizeof *moves);
        read_all(moves, (size_t)head[3] * sizeof *moves);
        for (int64_t i = 0; i < head[2]; i++) {
            memory[i] = (char *)aligned_alloc(LINE, (size_t)(regions[i][0] + 3 * LINE) / LINE * LINE) + regions[i][1];
            read_all(memory[i], (size_t)regions[i][0]);
        }
        for (int64_t i = 0; i < head[3]; i++) {
            for (int j = 0; j < 4; j++) move[j] = moves[i][j];
            *(char **)(memory[move[0]] + move[1]) = memory[move[2]] + move[3];
        }
        for (int64_t i = 0; i < head[1]; i++) value[i] = args[i][0] < 0 ? args[i][1] : (int64_t)(memory[args[i][0]] + args[i][1]);
        int64_t (*const kernel)() = OF[head[0]];
        const int is_kernel = head[1] == 1 && args[0][0] >= 0; /* its one argument is a structure */
        const int64_t result = is_kernel ? tandem_team_call((int (*)(const void *))kernel, (void *)value[0], 1) : (int32_t)kernel(value[0], value[1], value[2], value[3]);
        fwrite(&result, sizeof result, 1, stdout);
        for (int64_t i = 0; i < head[2]; i++) {
            fwrite(memory[i], 1, (size_t)regions[i][0], stdout);
            free(memory[i] - regions[i][1]);
        }
        free(moves);
        fflush(stdout);
    }
}
