/* Kernels of tests/kernels/test_team.py: what they share is seen in memory that the test owns. */
#include <sched.h>
#include <time.h>

#include "team.h"

#define MOST_S 20 /* then a test without help fails, rather than never to end */

static int64_t read_word(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
static void add(int64_t *word, int64_t value) { __atomic_add_fetch(word, value, __ATOMIC_SEQ_CST); }

struct count {
    int64_t *written; /* [items]: how often each was written */
    int64_t items, at_once, repeats;
};

int count_exclusive(const struct count *a) {
    for (int64_t i = 0; i < a->repeats; i++)
        for (struct loop l = team_loop(a->items, a->at_once); team_next(&l);) add(&a->written[l.item], 1);
    return 0;
}

int count_repeatable(const struct count *a) {
    for (int64_t i = 0; i < a->repeats; i++)
        for (struct loop l = team_repeats(a->items); team_next(&l);)
            if (team_claims(&l)) add(&a->written[l.item], 1);
    return 0;
}

/* Each loop writes to shared memory what the next one reads: a sum over items, as often as `repeats`. */
int add_in_turns(const struct count *a) {
    int64_t *parts = team_memory(a->items * (int64_t)sizeof *parts);
    if (!parts) return -1;
    for (int64_t i = 0; i < a->repeats; i++) {
        for (struct loop l = team_loop(a->items, 1); team_next(&l);) parts[l.item] = a->written[0] + l.item;
        for (struct loop l = team_single(); team_next(&l);) {
            int64_t sum = 0;
            for (int64_t j = 0; j < a->items; j++) sum += parts[j];
            a->written[0] = sum % 1000003;
        }
    }
    return 0;
}

struct stuck {
    int64_t *words; /* begun, released, written, loops to come, items of these */
    int64_t items;
};

static void hold(const struct stuck *a) {
    const time_t end = time(NULL) + MOST_S;
    while (!read_word(&a->words[1]) && time(NULL) < end) sched_yield();
}

/* The thread that computes item 0 first is held until `release` has run, as if it had lost its core. */
int hold_first(const struct stuck *a) {
    for (struct loop l = team_repeats(a->items); team_next(&l);) {
        if (l.item == 0 && __atomic_fetch_add(&a->words[0], 1, __ATOMIC_SEQ_CST) == 0)
            hold(a);
        if (team_claims(&l)) add(&a->words[2], 1);
    }
    return 0;
}

/* The same, and then as many loops as a word says, which a call behind this one overwrites. */
int hold_and_go_on(const struct stuck *a) {
    const int code = hold_first(a);
    const int64_t loops = read_word(&a->words[3]);
    for (int64_t i = 0; i < loops; i++)
        for (struct loop l = team_single(); team_next(&l);) add(&a->words[4], 1);
    return code;
}

int overwrite(const struct stuck *a) {
    for (struct loop l = team_single(); team_next(&l);) __atomic_store_n(&a->words[3], 1 << 20, __ATOMIC_SEQ_CST);
    return 0;
}

int release(const struct stuck *a) {
    for (struct loop l = team_single(); team_next(&l);) add(&a->words[1], 1);
    return 0;
}

struct failing {
    int64_t *words; /* items begun */
    int64_t items, bad, code;
};

int fail_at(const struct failing *a) {
    for (struct loop l = team_loop(a->items, 1); team_next(&l);) {
        add(&a->words[0], 1);
        if (l.item == a->bad) return (int)a->code;
    }
    return 0;
}
