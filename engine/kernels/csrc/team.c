/* A team of threads that plays lists of kernel calls. Knows nothing of what kernels do; how they share work is in team.h.
 *
 * Every member goes through the calls and their loops by itself. A loop is a job with a number, and its entries have a word each:
 * 4 * job + how far it has come. Words only grow, so a word says whether its entry belongs to this job or an older one, and nothing has
 * to be cleared. `job` moves on once all entries are done, by whichever thread sees it first. So threads that have a core never
 * wait for one that lost it, except while it writes results or has an item that it alone may compute.
 *
 * The one who plays (the leader) returns when all helpers have left the list: what its arguments point at may go then.
 *
 * Source of the idea: helping in lock-free algorithms (Barnes, "A Method for Implementing Lock-Free Shared Data Structures", 1993), and
 * the duplicates of late tasks in MapReduce (Dean and Ghemawat, 2004).
 */
#define _GNU_SOURCE
#include "team.h"
#include "waiting.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 64
#define HUGE_BYTES (2 << 20)
#define LARGE_BYTES (128 << 10) /* memory from here on is in whole huge pages: small ones miss the TLB, and fetches end with them */
#define ENTRIES 8192         /* of a loop, at most */
#define ENTRIES_A_THREAD 8   /* of a loop whose items one thread computes, at most */
#define PATIENCE_NS 40000    /* an item that takes so much longer than others of its loop has probably lost its core */
#define AWAKE_NS 100000      /* so long a thread waits for a job's end, or a helper for the next list, before it sleeps */
#define SPINS_A_LOOK 32      /* between two looks at the clock */
#define LONG_NS 1000000000   /* of a sleep that something else ends */
#define CALL_SHIFT 46        /* of `at`: jobs are numbered below */
#define MOST_CALLS (1 << 16) /* of a list */
#define MOST_THREADS 1024

enum state { TAKEN = 1, WRITING = 2, DONE = 3 };

struct call {
    int (*kernel)(const void *args);
    const void *args;
};

struct block {
    struct block *next; /* of those that were too small */
    char *memory;
    int64_t size;
};

struct team;

struct member {
    struct team *team;
    int64_t number, call;
    uint64_t job;     /* the last one that it has begun */
    int64_t usual_ns; /* what its last item took */
    uint32_t seen;    /* lists before it came */
    pthread_t thread;
    char *scratch; /* its own memory */
    int64_t scratch_size;
};

struct team {
    _Alignas(LINE_BYTES) uint64_t job; /* the number of the loop that runs */
    uint32_t sleepers;
    int failed;
    _Alignas(LINE_BYTES) uint64_t at; /* the first call that has not ended, and the job before its first one */
    _Alignas(LINE_BYTES) uint32_t lists; /* played so far */
    uint32_t resting;                    /* helpers that sleep until the next one */
    int is_open, ends;
    _Alignas(LINE_BYTES) uint32_t inside; /* helpers in the list */
    uint32_t leader_sleeps;
    const struct call *calls;
    int64_t count, threads; /* of the list; that may take part */
    struct block *block;    /* for team_memory */
    int memory_lock;
    int64_t helpers; /* threads that exist, beside the leader */
    struct member leader;
    struct member *members[MOST_THREADS];
    uint64_t entries[ENTRIES];
};

static __thread struct team *own;        /* of this thread, as a leader */
static __thread struct member *playing; /* this thread, inside a list */
static pthread_key_t leaders;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define READ(word) __atomic_load_n(&(word), __ATOMIC_SEQ_CST)
#define WRITE(word, value) __atomic_store_n(&(word), value, __ATOMIC_SEQ_CST)
#define ADD(word, value) __atomic_add_fetch(&(word), value, __ATOMIC_SEQ_CST)

static int swap(uint64_t *word, uint64_t from, uint64_t to) { return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }

static void sleep_while(uint32_t *word, uint32_t value, int64_t most_ns) {
    const struct timespec most = {most_ns / 1000000000, most_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &most, NULL, 0);
}

static void wake_all(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

/* The half of a word that changes. */
static uint32_t *low_half(uint64_t *word) { return (uint32_t *)word + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__); }

static void fail(struct team *t, int code) {
    int none = 0;
    __atomic_compare_exchange_n(&t->failed, &none, code, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    ADD(t->job, 1); /* no thread may go to sleep until this job ends */
    wake_all(low_half(&t->job));
}

/* ---- a loop */

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The first entry of a member's share. */
static int64_t share_of(const struct loop *l, int64_t number) { return l->entries * number / l->member->team->threads; }

static void begin(struct loop *l) {
    struct member *m = playing;
    l->item = l->entry = -1;
    if (!m) { /* alone */
        l->end = l->items;
        return;
    }
    struct team *t = m->team;
    l->job = ++m->job;
    /* The call first: it has not ended, so nothing that the kernel has read by now was overwritten, and its loops' numbers are right. */
    if ((int64_t)(READ(t->at) >> CALL_SHIFT) != m->call || READ(t->job) != l->job) return;
    if (l->is_repeatable) l->at_once = 1;
    if (!l->at_once) l->at_once = ceil_div(l->items, ENTRIES_A_THREAD * t->threads);
    if (l->items > ENTRIES * l->at_once) l->at_once = ceil_div(l->items, ENTRIES), l->is_repeatable = 0;
    l->entries = l->items > 0 ? ceil_div(l->items, l->at_once) : 0;
    l->member = m;
    l->first = share_of(l, m->number), l->last = share_of(l, m->number + 1);
}

static int take(const struct loop *l, int64_t entry) {
    uint64_t *word = &l->member->team->entries[entry];
    const uint64_t before = __atomic_load_n(word, __ATOMIC_RELAXED);
    return before < 4 * l->job && swap(word, before, 4 * l->job + TAKEN);
}

/* Of its own share from the front, then of others' from the back; -1: none is left. */
static int64_t take_one(struct loop *l) {
    const struct member *m = l->member;
    while (l->first < l->last)
        if (take(l, l->first++)) return l->first - 1;
    for (;;) {
        while (l->back > l->front)
            if (take(l, --l->back)) return l->back;
        if (l->others + 1 >= m->team->threads) return -1;
        const int64_t number = (m->number + ++l->others) % m->team->threads;
        l->front = share_of(l, number), l->back = share_of(l, number + 1);
    }
}

static int are_all_done(struct loop *l) {
    const uint64_t *entries = l->member->team->entries;
    while (l->settled < l->entries && READ(entries[l->settled]) == 4 * l->job + DONE) l->settled++;
    return l->settled == l->entries;
}

/* An entry that its thread has not begun to write, or -1. */
static int64_t late_one(const struct loop *l) {
    for (int64_t i = l->settled; l->is_repeatable && i < l->entries; i++)
        if (READ(l->member->team->entries[i]) == 4 * l->job + TAKEN) return i;
    return -1;
}

static void end_job(struct team *t, uint64_t job) {
    if (swap(&t->job, job, job + 1) && READ(t->sleepers)) wake_all(low_half(&t->job));
}

static void sleep_until_end(struct team *t, uint64_t job, int64_t most_ns) {
    ADD(t->sleepers, 1);
    if (READ(t->job) == job) sleep_while(low_half(&t->job), (uint32_t)job, most_ns);
    ADD(t->sleepers, -1);
}

/* Nothing is left to take: wait until the job ends (-1), or return an entry that is late. */
static int64_t await(struct loop *l) {
    struct member *m = l->member;
    struct team *t = m->team;
    const int64_t start = now_ns();
    if (l->begun_ns) m->usual_ns = start - l->begun_ns;
    const int64_t patience = PATIENCE_NS + 2 * m->usual_ns;
    for (int64_t spins = 1;; spins++) {
        if (READ(t->job) != l->job) return -1;
        if (are_all_done(l)) {
            end_job(t, l->job);
            return -1;
        }
        pause_core();
        if (spins % SPINS_A_LOOK) continue;
        const int64_t waited = now_ns() - start;
        const int64_t late = waited > patience ? late_one(l) : -1;
        if (late >= 0) return late;
        if (waited > AWAKE_NS) sleep_until_end(t, l->job, l->is_repeatable && patience > waited ? patience - waited : LONG_NS);
    }
}

static int next(struct loop *l) {
    if (++l->item < l->end) return 1;
    if (!l->member) return 0;
    if (l->is_mine) WRITE(l->member->team->entries[l->entry], 4 * l->job + DONE);
    l->entry = take_one(l);
    l->is_mine = l->entry >= 0 && !l->is_repeatable;
    if (l->entry < 0) l->entry = await(l);
    if (l->entry < 0) return 0;
    if (l->is_repeatable) l->begun_ns = now_ns();
    l->item = l->entry * l->at_once;
    l->end = l->item + l->at_once < l->items ? l->item + l->at_once : l->items;
    return 1;
}

static int claims(struct loop *l) {
    if (!l->member || l->is_mine) return 1;
    return l->is_mine = swap(&l->member->team->entries[l->entry], 4 * l->job + TAKEN, 4 * l->job + WRITING);
}

/* ---- memory */

static struct team *team_of_thread(void);

static struct block *block_of(struct team *t) { return __atomic_load_n(&t->block, __ATOMIC_ACQUIRE); }

/* What `bytes` take. */
static int64_t whole(int64_t bytes) {
    const int64_t unit = bytes < LARGE_BYTES ? LINE_BYTES : HUGE_BYTES;
    return ceil_div(bytes, unit) * unit;
}

static char *allocate(int64_t size) {
    char *memory = aligned_alloc(size < HUGE_BYTES ? LINE_BYTES : HUGE_BYTES, (size_t)size);
#if defined(MADV_HUGEPAGE)
    if (memory && size >= HUGE_BYTES) madvise(memory, (size_t)size, MADV_HUGEPAGE); /* where the kernel has none: slower, not wrong */
#endif
    return memory;
}

static struct block *larger_block(struct team *t, int64_t bytes) {
    struct block *block = malloc(sizeof *block);
    if (!block) return NULL;
    *block = (struct block){.size = whole(bytes), .next = t->block};
    block->memory = allocate(block->size);
    if (block->memory) __atomic_store_n(&t->block, block, __ATOMIC_RELEASE);
    else free(block), block = NULL;
    return block;
}

/* All members ask for the same pieces in the same order. One that is so late that a larger block has come since has no use for it. */
static void *memory(int64_t bytes) {
    struct team *t = playing ? playing->team : team_of_thread();
    struct block *block = t ? block_of(t) : NULL;
    if (!t || (block && block->size >= bytes)) return t ? block->memory : NULL;
    while (__atomic_exchange_n(&t->memory_lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
    block = block_of(t);
    if (!block || block->size < bytes) block = larger_block(t, bytes);
    __atomic_store_n(&t->memory_lock, 0, __ATOMIC_RELEASE);
    return block ? block->memory : NULL;
}

static void free_blocks(struct block *block) {
    while (block) {
        struct block *older = block->next;
        free(block->memory);
        free(block);
        block = older;
    }
}

static void *scratch(int64_t bytes) {
    struct team *t = playing ? NULL : team_of_thread();
    struct member *m = playing ? playing : t ? &t->leader : NULL;
    if (!m || (m->scratch && m->scratch_size >= bytes)) return m ? m->scratch : NULL;
    free(m->scratch);
    m->scratch_size = whole(bytes > 0 ? bytes : 1);
    m->scratch = allocate(m->scratch_size);
    return m->scratch;
}

static int64_t count_threads(void) { return playing ? playing->team->threads : 1; }

/* ---- a list */

static void go_on(struct member *m) {
    const uint64_t at = READ(m->team->at);
    m->call = (int64_t)(at >> CALL_SHIFT);
    m->job = at & ((1ull << CALL_SHIFT) - 1);
}

/* The calls from where the team is. */
static void run(struct member *m) {
    struct team *t = m->team;
    playing = m;
    for (go_on(m); m->call < t->count && !READ(t->failed); go_on(m)) {
        const struct call *call = &t->calls[m->call];
        const int code = call->kernel(call->args);
        if (code) fail(t, code);
        const uint64_t at = READ(t->at);
        if ((int64_t)(at >> CALL_SHIFT) == m->call) swap(&t->at, at, ((uint64_t)(m->call + 1) << CALL_SHIFT) + m->job);
    }
    playing = NULL;
}

/* ---- helpers */

static void await_list(struct team *t, uint32_t seen) {
    const int64_t start = now_ns();
    for (int64_t spins = 1; READ(t->lists) == seen; spins++) {
        pause_core();
        if (spins % SPINS_A_LOOK || now_ns() - start < AWAKE_NS) continue;
        ADD(t->resting, 1);
        sleep_while(&t->lists, seen, LONG_NS);
        ADD(t->resting, -1);
    }
}

static void *help(void *arg) {
    struct member *m = arg;
    struct team *t = m->team;
    for (uint32_t seen = m->seen;;) {
        await_list(t, seen);
        if (READ(t->ends)) return NULL;
        seen = READ(t->lists);
        ADD(t->inside, 1); /* then the leader waits */
        if (READ(t->is_open) && m->number < t->threads) run(m);
        if (ADD(t->inside, -1) == 0 && READ(t->leader_sleeps)) wake_all(&t->inside);
    }
}

static int start_helper(struct team *t) {
    struct member *m = malloc(sizeof *m);
    sigset_t all, before;
    if (!m) return -1;
    *m = (struct member){.team = t, .number = t->helpers + 1, .seen = t->lists};
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* they are Python's */
    const int failed = pthread_create(&m->thread, NULL, help, m);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(m);
        return -1;
    }
    pthread_setname_np(m->thread, "team");
    t->members[++t->helpers] = m;
    return 0;
}

static void await_helpers(struct team *t) {
    const int64_t start = now_ns();
    for (int64_t spins = 1; READ(t->inside); spins++) {
        pause_core();
        if (spins % SPINS_A_LOOK || now_ns() - start < PATIENCE_NS) continue;
        WRITE(t->leader_sleeps, 1);
        const uint32_t inside = READ(t->inside);
        if (inside) sleep_while(&t->inside, inside, LONG_NS);
        WRITE(t->leader_sleeps, 0);
    }
}

/* ---- the team of a thread: made at its first list, ends with it */

static void end_team(void *of) {
    struct team *t = of;
    WRITE(t->ends, 1);
    ADD(t->lists, 1);
    wake_all(&t->lists);
    for (int64_t i = 1; i <= t->helpers; i++) {
        pthread_join(t->members[i]->thread, NULL);
        free(t->members[i]->scratch);
        free(t->members[i]);
    }
    free(t->leader.scratch);
    free_blocks(t->block);
    free(t);
}

/* A child of fork has none of the helpers. */
static void forget_team(void) {
    own = NULL, playing = NULL;
    pthread_setspecific(leaders, NULL);
}

static void prepare(void) {
    pthread_key_create(&leaders, end_team);
    pthread_atfork(NULL, NULL, forget_team);
}

static struct team *team_of_thread(void) {
    if (own) return own;
    pthread_once(&once, prepare);
    struct team *t = aligned_alloc(LINE_BYTES, sizeof *t);
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    t->job = 1;
    t->leader = (struct member){.team = t};
    pthread_setspecific(leaders, t);
    return own = t;
}

/* ---- the library's face */

/* What kernels share their work by. */
const struct team_calls *tandem_team_calls(void) {
    static const struct team_calls calls = {begin, next, claims, memory, scratch, count_threads};
    return &calls;
}

static int play_alone(const struct call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const int code = calls[i].kernel(calls[i].args);
        if (code) return code;
    }
    return 0;
}

static int play_together(struct team *t, const struct call *calls, int64_t count) {
    t->calls = calls, t->count = count, t->failed = 0;
    WRITE(t->at, t->job - 1);
    WRITE(t->is_open, 1);
    ADD(t->lists, 1);
    if (READ(t->resting)) wake_all(&t->lists);
    run(&t->leader);
    WRITE(t->is_open, 0);
    await_helpers(t);
    return t->failed;
}

/* Makes all calls, one after the other, by `threads` threads with this one. 0, or what the first call that failed returned; no
 * call behind it is made. -1 without memory for a team. */
int tandem_team_play(const struct call *calls, int64_t count, int64_t threads) {
    struct team *t = team_of_thread();
    int code = 0;
    if (!t) return -1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    while (t->helpers + 1 < threads)
        if (start_helper(t)) break;
    t->threads = threads < t->helpers + 1 ? threads : t->helpers + 1;
    for (int64_t i = 0; i < count && !code; i += MOST_CALLS) {
        const int64_t some = count - i < MOST_CALLS ? count - i : MOST_CALLS;
        code = t->threads > 1 ? play_together(t, calls + i, some) : play_alone(calls + i, some);
    }
    if (t->block && t->block->next) free_blocks(t->block->next), t->block->next = NULL;
    return code;
}

/* One call. */
int tandem_team_call(int (*kernel)(const void *args), const void *args, int64_t threads) {
    const struct call call = {kernel, args};
    return tandem_team_play(&call, 1, threads);
}
