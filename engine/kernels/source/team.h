/* A team of threads for one call: the caller and as many as it starts, gone again when the call returns.
 *
 * Starting a thread costs some 15 us, as waking a sleeping one does, so none has to be kept between steps. Every wait
 * inside spins for a moment and then sleeps on a futex: the spin is what makes hundreds of meetings a step cheap, and a
 * long one takes the core from whoever else needs it.
 */
#pragma once
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256 };

typedef struct {
    _Alignas(64) atomic_int epoch;
    atomic_int num_sleepers;
} gate;

typedef struct {
    gate start, meeting;
    _Alignas(64) atomic_int num_arrived;
    int num_threads;
    int64_t spin_ns;
    void (*function)(int thread, void *argument);
    void *argument;
} team;

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void gate_wait(gate *g, int seen, int64_t spin_ns)
{
    int64_t until = 0;
    for (int turns = 0; atomic_load_explicit(&g->epoch, memory_order_acquire) == seen;) {
        if (++turns % 16) {
            pause_briefly();
            continue;
        }
        int64_t now = now_ns();
        if (!until) until = now + spin_ns;
        if (now < until) continue;
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
        gate_wait(&t->meeting, seen, t->spin_ns);
    }
}

typedef struct {
    team *team;
    int thread;
} member;

static void *team_member(void *argument)
{
    member *self = argument;
    gate_wait(&self->team->start, 0, self->team->spin_ns);
    self->team->function(self->thread, self->team->argument);
    return NULL;
}

/* Call `t->function` in `num_threads` threads, or as many as the system has, and return once all have returned. */
static void team_run(team *t, int num_threads)
{
    pthread_t threads[MAX_THREADS];
    member members[MAX_THREADS];
    int started = 1;
    for (; started < num_threads && started < MAX_THREADS; started++) {
        members[started] = (member){t, started};
        if (pthread_create(&threads[started], NULL, team_member, &members[started])) break;
    }
    t->num_threads = started;
    gate_open(&t->start);
    t->function(0, t->argument);
    for (int i = 1; i < started; i++) pthread_join(threads[i], NULL);
}
