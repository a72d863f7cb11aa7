/* A team of threads that runs one function at a time, the caller's thread included, and can meet inside it.
 *
 * Every wait spins for a moment and then sleeps on a futex: a spin is what makes hundreds of meetings a step cheap, and
 * a long one takes the core from whoever else needs it.
 */
#pragma once
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_THREADS = 256 };
typedef void (*team_function)(int thread, int num_threads, void *argument);

typedef struct {
    _Alignas(64) atomic_int epoch;
    atomic_int num_sleepers;
} gate;

typedef struct {
    gate job, meeting;
    _Alignas(64) atomic_int num_arrived;
    team_function function;
    void *argument;
    int num_threads, spin;
    pthread_t threads[MAX_THREADS];
} team;

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static void gate_wait(gate *g, int seen, int spin)
{
    for (int turns = 0; atomic_load_explicit(&g->epoch, memory_order_acquire) == seen;) {
        if (++turns < spin) {
            pause_briefly();
            continue;
        }
        atomic_fetch_add(&g->num_sleepers, 1);
        if (atomic_load(&g->epoch) == seen) syscall(SYS_futex, &g->epoch, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&g->num_sleepers, 1);
    }
}

static void gate_open(gate *g)
{
    atomic_fetch_add(&g->epoch, 1);
    if (atomic_load(&g->num_sleepers)) syscall(SYS_futex, &g->epoch, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Wait until all threads of the team are here. */
static void team_meet(team *t)
{
    if (t->num_threads == 1) return;
    int seen = atomic_load_explicit(&t->meeting.epoch, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->num_arrived, 1, memory_order_acq_rel) == t->num_threads - 1) {
        atomic_store_explicit(&t->num_arrived, 0, memory_order_relaxed);
        gate_open(&t->meeting);
    } else {
        gate_wait(&t->meeting, seen, t->spin);
    }
}

typedef struct {
    team *team;
    int thread, seen;
} member;

static void *team_member(void *argument)
{
    member self = *(member *)argument;
    free(argument);
    for (team *t = self.team;;) {
        gate_wait(&t->job, self.seen++, t->spin);
        if (!t->function) return NULL;
        t->function(self.thread, t->num_threads, t->argument);
        team_meet(t);
    }
}

static void team_run(team *t, team_function function, void *argument)
{
    t->function = function;
    t->argument = argument;
    if (t->num_threads > 1) gate_open(&t->job);
    function(0, t->num_threads, argument);
    team_meet(t);
}

/* End and join all threads but the caller's. */
void team_close(team *t)
{
    t->function = NULL;
    if (t->num_threads > 1) gate_open(&t->job);
    for (int i = 1; i < t->num_threads; i++) pthread_join(t->threads[i], NULL);
    free(t);
}

/* Start `num_threads` - 1 threads, which spin for `spin` turns before they sleep; NULL if the system has no more. */
team *team_open(int num_threads, int spin)
{
    team *t = aligned_alloc(64, sizeof(team));
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    t->spin = spin;
    t->num_threads = 1;
    for (int i = 1; i < num_threads && i < MAX_THREADS; i++) {
        member *m = malloc(sizeof *m);
        if (m) *m = (member){t, i, 0};
        if (!m || pthread_create(&t->threads[i], NULL, team_member, m)) {
            free(m);
            team_close(t);
            return NULL;
        }
        t->num_threads = i + 1; /* read by members only once a job has been given */
    }
    return t;
}
