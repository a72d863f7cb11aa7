/* A team of threads for one call: the caller and as many as it starts, gone again when the call returns.
 *
 * Starting and joining a thread costs some 50 us a step more than waking one that sleeps, and leaves no thread between steps
 * that somebody would have to own. An operation
 * is cut into tasks that whoever is free takes, and the next one begins once all are done, not once all threads have
 * come by: so a thread whose core is busy with something else holds up nobody unless it has a task. Every wait spins
 * for a moment and then sleeps on a futex: the spin is what makes hundreds of operations a step cheap, and a long one
 * takes the core from whoever else needs it.
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

/* A count that only grows, and what waits for it. */
typedef struct {
    _Alignas(64) atomic_int value, num_sleepers;
} counter;

/* The tasks of one operation. */
typedef struct {
    counter num_done;
    _Alignas(64) atomic_int num_taken;
} tasks;

typedef struct {
    int num_threads;
    int64_t spin_ns;
    char *stacks; /* one a thread, kept from call to call: glibc gives back the pages of its own stacks at each end */
    int64_t stack_bytes;
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

/* Wait until the count is `due`. */
static void counter_wait(counter *c, int due, int64_t spin_ns)
{
    int64_t until = 0;
    for (int turns = 0, seen; (seen = atomic_load_explicit(&c->value, memory_order_acquire)) < due;) {
        if (++turns % 16) {
            pause_briefly();
            continue;
        }
        int64_t now = now_ns();
        if (!until) until = now + spin_ns;
        if (now < until) continue;
        atomic_fetch_add(&c->num_sleepers, 1);
        if (atomic_load(&c->value) == seen) syscall(SYS_futex, &c->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&c->num_sleepers, 1);
    }
}

/* Count `number` more; who sleeps is woken once it comes to `due`. */
static void counter_add(counter *c, int number, int due)
{
    if (atomic_fetch_add(&c->value, number) + number != due || !atomic_load(&c->num_sleepers)) return;
    syscall(SYS_futex, &c->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Return a task that nobody has taken, `num_tasks` or more if there is none. */
static inline int take_task(tasks *t, int num_tasks)
{
    if (atomic_load_explicit(&t->num_taken, memory_order_relaxed) >= num_tasks) return num_tasks;
    return atomic_fetch_add_explicit(&t->num_taken, 1, memory_order_relaxed);
}

typedef struct {
    team *team;
    int thread;
} member;

static void *team_member(void *argument)
{
    member *self = argument;
    self->team->function(self->thread, self->team->argument);
    return NULL;
}

/* Wait for the end of a thread, which has nothing left to do. */
static void thread_join(pthread_t thread, int64_t spin_ns)
{
    for (const int64_t until = now_ns() + spin_ns; pthread_tryjoin_np(thread, NULL);) {
        if (now_ns() >= until) {
            pthread_join(thread, NULL);
            return;
        }
        pause_briefly();
    }
}

/* Call `t->function` in `num_threads` threads, or as many as the system has, and return once all have returned. */
static void team_run(team *t)
{
    pthread_t threads[MAX_THREADS];
    member members[MAX_THREADS];
    pthread_attr_t attributes;
    int started = 1;
    pthread_attr_init(&attributes);
    for (; started < t->num_threads && started < MAX_THREADS; started++) {
        members[started] = (member){t, started};
        if (pthread_attr_setstack(&attributes, t->stacks + started * t->stack_bytes, t->stack_bytes)) break;
        if (pthread_create(&threads[started], &attributes, team_member, &members[started])) break;
    }
    t->function(0, t->argument);
    for (int i = 1; i < started; i++) thread_join(threads[i], t->spin_ns);
    pthread_attr_destroy(&attributes);
}
