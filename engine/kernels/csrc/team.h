/* How a kernel shares its work among the threads of a team (team.c). All of them call the kernel with the same arguments, and share
 * what is inside its loops:
 *
 *     for (struct loop l = team_loop(rows, 0); team_next(&l);) work_on(l.item);      exclusive: an item has one thread
 *
 *     for (struct loop l = team_repeats(items); team_next(&l);) {                    may be computed twice
 *         ... from memory that no item of this loop writes to memory of this thread ...
 *         if (team_claims(&l)) ... write the results ...
 *     }
 *
 * A loop ends for all once each item is done. No thread waits for another one to arrive: an item that its thread took and did not
 * write in time (it has lost its core) is computed again by a thread that has nothing else to do, and `team_claims` lets one of
 * them write. A late thread skips what has ended meanwhile.
 *
 * So a kernel writes to shared memory in loops alone, and takes the same way through them in all threads: it reads nothing outside a
 * loop that the same kernel writes, except in memory that `team_memory` gave and a loop before has filled. It may return a code
 * other than 0 at any place: this ends the work of all.
 */
#ifndef TANDEM_TEAM_H
#define TANDEM_TEAM_H
#include <stdint.h>

struct member;

/* Of one thread. `item`: the one at hand. */
struct loop {
    int64_t item;
    int64_t items, end, at_once; /* an entry is `at_once` items; those at hand end at `end` */
    int64_t entries, entry;      /* the one at hand, or -1 */
    int64_t first, last;         /* left of this thread's share */
    int64_t others, front, back; /* left of another one's */
    int64_t settled;             /* entries before it are done */
    int64_t begun_ns;
    uint64_t job;
    int is_repeatable, is_mine;
    struct member *member; /* NULL: nothing to share, or all has been done */
};

struct team_calls {
    void (*begin)(struct loop *l);
    int (*next)(struct loop *l);
    int (*claims)(struct loop *l);
    void *(*memory)(int64_t bytes);
    void *(*scratch)(int64_t bytes);
    int64_t (*threads)(void);
};

static const struct team_calls *team;

/* Called once, when the library is loaded (build.py). */
void tandem_use_team(const struct team_calls *calls) { team = calls; }

/* Items that one thread computes each; it takes `at_once` of them (0: as the number of threads suggests). */
static inline struct loop team_loop(int64_t items, int64_t at_once) {
    struct loop l = {.items = items, .at_once = at_once};
    team->begin(&l);
    return l;
}

/* One item, which one thread computes. */
static inline struct loop team_single(void) { return team_loop(1, 1); }

/* Items that may be computed twice. */
static inline struct loop team_repeats(int64_t items) {
    struct loop l = {.items = items, .is_repeatable = 1};
    team->begin(&l);
    return l;
}

/* Whether there is a next item; 0 once all are done. */
static inline int team_next(struct loop *l) { return team->next(l); }

/* Whether this thread writes the item's results. */
static inline int team_claims(struct loop *l) { return team->claims(l); }

/* Shared memory of any content, in cache lines of its own, until the thread asks again: then loops that use it must have ended. NULL: there is none. */
static inline void *team_memory(int64_t bytes) { return team->memory(bytes); }

/* Memory of this thread alone, of any content, in cache lines of its own, until it asks again. NULL: there is none. */
static inline void *team_scratch(int64_t bytes) { return team->scratch(bytes); }

/* Threads that share this list, for those who cut work into items. No result may depend on it. */
static inline int64_t team_threads(void) { return team->threads(); }
#endif
