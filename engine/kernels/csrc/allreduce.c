/* Sums and gathers of ranks of one machine, over memory that they share. Knows words, windows and counts, and nothing
 * of processes.
 *
 * Each rank has a line: how many windows it has written, and how many numbers those of the call hold. To add, each rank writes
 * its window, counts it, waits until all have counted theirs, and adds all windows itself: (0+1)+(2+3), the same tree on every
 * rank. Windows alternate between two buffers: a rank that writes window i + 2 has seen that all wrote i + 1, so all have read i.
 */
#include <sched.h>
#include <time.h>

#include "team.h"
#include "vectors.h"
#include "waiting.h"

#define MOST_RANKS 64
#define RANKS_ENDED 2 /* engine/kernels/build.py */
#define OUT_OF_STEP 3

#define SPINS 40                 /* about a microsecond, what sched_yield costs, too: a longer spin only keeps a late rank off this core */
#define YIELD_NS 500000          /* others that need this core have it; then it is a long wait, which costs no core */
#define SHORTEST_SLEEP_NS 20000
#define LONGEST_SLEEP_NS 4000000 /* and so the longest time until an abort is seen */
#define SLEEP_SHARE 16           /* a sleep is at most this part of the wait so far */

#define WORD_LINE 8 /* int64_t in a cache line */

/* A line of a rank. */
struct line {
    int64_t written;    /* windows; by this rank */
    int64_t numbers[2]; /* of its last two windows */
    int64_t unused[WORD_LINE - 3];
};

INLINE int64_t read_word(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

INLINE void write_word(int64_t *word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* 0 once *word >= value, or RANKS_ENDED once *abort is not 0. */
static int wait_for(const int64_t *word, int64_t value, const int64_t *abort) {
    for (int i = 0; i < SPINS; i++) {
        if (read_word(word) >= value) return 0;
        pause_core();
    }
    const int64_t start = now_ns();
    for (int64_t waited = 0;; waited = now_ns() - start) {
        if (read_word(word) >= value) return 0;
        if (read_word(abort)) return RANKS_ENDED;
        if (waited < YIELD_NS) {
            sched_yield();
            continue;
        }
        int64_t sleep = waited / SLEEP_SHARE;
        if (sleep < SHORTEST_SLEEP_NS) sleep = SHORTEST_SLEEP_NS;
        if (sleep > LONGEST_SLEEP_NS) sleep = LONGEST_SLEEP_NS;
        const struct timespec t = {0, sleep};
        nanosleep(&t, 0);
    }
}

/* Arguments are mirrored by allreduce.py. Each function returns 0, or a code: a tape asks (team.c). */

struct wait {
    const int64_t *word, *abort;
    int64_t value;
};

int tandem_wait(const struct wait *a) { return wait_for(a->word, a->value, a->abort); }

/* ---- sums */

struct sum {
    const float *partial; /* [elements], of this rank */
    void *out;            /* [end - begin] bf16 or float */
    struct line *lines;   /* [ranks] */
    float *windows;       /* [2, ranks, window], aligned to cache lines; window a multiple of 16 */
    const int64_t *abort;
    int64_t elements, begin, end, rank, ranks, window, out_is_f32; /* from `begin` to `end` are wanted here */
};

/* The tree over `ranks`, the same for all counts: neighbours, then neighbours of these. An odd last one waits for its turn. */
INLINE f16v add_all(f16v *x, const int ranks) {
    for (int step = 1; step < ranks; step *= 2)
        for (int i = 0; i + step < ranks; i += 2 * step) x[i] += x[i + step];
    return x[0];
}

INLINE void add_some(const float *windows, int64_t window, void *out, int64_t begin, int64_t end, int is_f32, const int ranks) {
    f16v x[MOST_RANKS];
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        for (int r = 0; r < ranks; r++) x[r] = load_f32(windows + r * window + i);
        const f16v all = add_all(x, ranks);
        if (is_f32) {
            store_f32((float *)out + i, all);
        } else { /* not store_bf16, which makes zeros of denormals: torch, which computes the same elsewhere, keeps them */
            const h16v h = __builtin_convertvector(bf16_bits(all) >> 16, h16v);
            memcpy((bf16 *)out + i, &h, sizeof h);
        }
    }
    if (i == end) return;
    for (int r = 0; r < ranks; r++) {
        x[r] = (f16v){0};
        memcpy(&x[r], windows + r * window + i, (size_t)(end - i) * sizeof(float)); /* more may lie beyond the memory */
    }
    const f16v all = add_all(x, ranks);
    for (int64_t lane = 0; i + lane < end; lane++) {
        if (is_f32) ((float *)out)[i + lane] = all[lane];
        else ((bf16 *)out)[i + lane] = to_bf16(all[lane]);
    }
}

static void add_windows(const float *windows, int64_t window, void *out, int64_t begin, int64_t end, int is_f32, int ranks) {
    if (ranks == 2) add_some(windows, window, out, begin, end, is_f32, 2);
    else if (ranks == 3) add_some(windows, window, out, begin, end, is_f32, 3);
    else if (ranks == 4) add_some(windows, window, out, begin, end, is_f32, 4);
    else if (ranks == 8) add_some(windows, window, out, begin, end, is_f32, 8);
    else add_some(windows, window, out, begin, end, is_f32, ranks);
}

#define STRIP 16384 /* numbers that a thread takes at once; fewer are not worth waking threads for */

static int64_t strip(int64_t numbers, int64_t begin) { return numbers - begin < STRIP ? numbers - begin : STRIP; }

static struct loop strips_of(int64_t numbers) { return team_loop((numbers + STRIP - 1) / STRIP, numbers > 2 * STRIP ? 0 : 2); }

/* Waits until all ranks have written their window number `count`, of `numbers` numbers. */
static int await_all(const struct line *lines, int64_t ranks, int64_t count, int64_t numbers, const int64_t *abort) {
    for (int64_t r = 0; r < ranks; r++) {
        const int failed = wait_for(&lines[r].written, count + 1, abort);
        if (failed) return failed;
        if (lines[r].numbers[count & 1] != numbers) return OUT_OF_STEP;
    }
    return 0;
}

/* Counts this rank's window, which is written, and waits for those of all. */
static int meet(struct line *lines, int64_t rank, int64_t ranks, int64_t count, int64_t numbers, const int64_t *abort) {
    lines[rank].numbers[count & 1] = numbers;
    write_word(&lines[rank].written, count + 1);
    return await_all(lines, ranks, count, numbers, abort);
}

/* out = the elements begin..end of the sum of all ranks' partials, rounded once. All ranks call it with the same `elements`. */
int tandem_sum(const struct sum *a) {
    const int64_t item = a->out_is_f32 ? sizeof(float) : sizeof(bf16);
    int64_t *written = team_memory(sizeof *written); /* windows before this one */
    if (!written) return -1;
    for (int64_t at = 0; at < a->elements; at += a->window) {
        for (struct loop l = team_single(); team_next(&l);) *written = a->lines[a->rank].written;
        const int64_t numbers = a->elements - at < a->window ? a->elements - at : a->window, count = *written;
        float *windows = a->windows + (count & 1) * a->ranks * a->window, *own = windows + a->rank * a->window;
        for (struct loop l = strips_of(numbers); team_next(&l);) {
            const int64_t from = l.item * STRIP;
            memcpy(own + from, a->partial + at + from, (size_t)strip(numbers, from) * sizeof(float));
        }
        for (struct loop l = team_single(); team_next(&l);) {
            const int failed = meet(a->lines, a->rank, a->ranks, count, a->elements - at, a->abort);
            if (failed) return failed;
        }
        const int64_t from = a->begin > at ? a->begin : at, to = a->end < at + numbers ? a->end : at + numbers;
        char *out = (char *)a->out + (from - a->begin) * item;
        for (struct loop l = strips_of(from < to ? to - from : 0); team_next(&l);) {
            const int64_t begin = l.item * STRIP;
            add_windows(windows + from - at, a->window, out, begin, begin + strip(to - from, begin), (int)a->out_is_f32, (int)a->ranks);
        }
    }
    return 0;
}

/* ---- rows of one matrix: windows between the sums', in the same order on all ranks */

struct rows {
    const char *part;   /* [size] bytes, of this rank, which are those from `begin` */
    char *out;          /* [bytes] */
    struct line *lines; /* as of sums, with the rest */
    char *windows;      /* [2, window] bytes */
    const int64_t *abort;
    int64_t bytes, begin, size, rank, ranks, window;
};

static int bring_rows(const struct rows *a) {
    struct line *own = a->lines + a->rank;
    for (int64_t at = 0; at < a->bytes; at += a->window) {
        const int64_t count = own->written, end = a->bytes < at + a->window ? a->bytes : at + a->window;
        const int64_t from = a->begin > at ? a->begin : at, to = a->begin + a->size < end ? a->begin + a->size : end;
        char *window = a->windows + (count & 1) * a->window;
        if (from < to) memcpy(window + from - at, a->part + from - a->begin, (size_t)(to - from));
        const int failed = meet(a->lines, a->rank, a->ranks, count, at - a->bytes, a->abort); /* below 0: no sum */
        if (failed) return failed;
        memcpy(a->out + at, window, (size_t)(end - at));
    }
    return 0;
}

/* out = what all ranks brought, each to its place. Bytes that none brings are of any content. */
int tandem_rows(const struct rows *a) {
    for (struct loop l = team_single(); team_next(&l);) {
        const int failed = bring_rows(a);
        if (failed) return failed;
    }
    return 0;
}

/* ---- some rows of a matrix that all ranks bring together: each takes those that it asks for */

#define TAKES (INT64_MIN / 2) /* in a line's numbers: neither a sum nor whole rows */
#define WORTH_THREADS (64 << 10) /* bytes */

struct take {
    const char *part;      /* [count, row_bytes], of this rank: rows `first`... of `total` */
    char *out;             /* [wants, row_bytes] */
    const int64_t *wanted; /* [wants] rows of the matrix, in any order, some perhaps twice */
    struct line *lines;    /* as of sums, with the rest */
    char *windows;         /* [2, window] bytes, a row at least */
    const int64_t *abort;
    int64_t row_bytes, total, first, count, wants, rank, ranks, window;
};

/* This rank's part of rows at..end. */
static void bring_some(const struct take *a, char *window, int64_t at, int64_t end) {
    const int64_t from = a->first > at ? a->first : at, to = a->first + a->count < end ? a->first + a->count : end;
    if (from < to) memcpy(window + (from - at) * a->row_bytes, a->part + (from - a->first) * a->row_bytes, (size_t)((to - from) * a->row_bytes));
}

int tandem_take(const struct take *a) {
    const int64_t size = a->row_bytes, most = a->window / size, at_once = a->wants * size > WORTH_THREADS ? 0 : a->wants;
    int64_t *written = team_memory(sizeof *written);
    if (!written) return -1;
    for (int64_t at = 0; at < a->total; at += most) {
        const int64_t end = a->total < at + most ? a->total : at + most;
        for (struct loop l = team_single(); team_next(&l);) {
            const int64_t count = *written = a->lines[a->rank].written;
            bring_some(a, a->windows + (count & 1) * a->window, at, end);
            const int failed = meet(a->lines, a->rank, a->ranks, count, TAKES + at - a->total, a->abort);
            if (failed) return failed;
        }
        const char *window = a->windows + (*written & 1) * a->window;
        for (struct loop l = team_loop(a->wants, at_once); team_next(&l);) {
            const int64_t row = a->wanted[l.item];
            if (row >= at && row < end) memcpy(a->out + l.item * size, window + (row - at) * size, (size_t)size);
        }
    }
    return 0;
}

/* ---- columns of one matrix */

struct gather {
    const float *part; /* [rows, columns], of this rank */
    float *all;        /* [rows, total]; this rank's columns begin at `first` */
    struct line *lines; /* [ranks]: how many gathers it has written; rank 0's: how many it has begun */
    const int64_t *abort;
    int64_t rows, columns, first, total, rank, ranks;
};

static int bring_columns(const struct gather *a) {
    struct line *own = a->lines + a->rank;
    const int64_t count = own->numbers[0] + 1;
    own->numbers[0] = count;
    if (a->rank == 0) write_word(&own->written, count);
    const int failed = wait_for(&a->lines[0].written, count, a->abort);
    if (failed) return failed;
    for (int64_t r = 0; r < a->rows; r++)
        memcpy(a->all + r * a->total + a->first, a->part + r * a->columns, (size_t)a->columns * sizeof(float));
    if (a->rank) {
        write_word(&own->written, count);
        return 0;
    }
    for (int64_t r = 1; r < a->ranks; r++) {
        const int late = wait_for(&a->lines[r].written, count, a->abort);
        if (late) return late;
    }
    return 0;
}

/* Rank 0 begins a gather when it no longer needs the last one, and returns when all have written. The others may be ahead. */
int tandem_gather(const struct gather *a) {
    for (struct loop l = team_single(); team_next(&l);) {
        const int failed = bring_columns(a);
        if (failed) return failed;
    }
    return 0;
}
