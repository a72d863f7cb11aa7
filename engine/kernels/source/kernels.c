/* A step of a decoder on a CPU: a list of operations, each cut into tasks for a team of threads. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include "team.h"
#include "simd.h"
#include "operations.h"
#include "rows.h"
#include "parts.h"

typedef struct {
    team team;
    const void *const *operations;
    int num_operations;
    const step *step;
    tasks *tasks;        /* [num_operations] */
    shared_unit *shared; /* [UNITS_A_THREAD * threads] */
} program;

enum { TASKS_A_THREAD = 8 }; /* of an operation, at most: enough for an even end, too few to be felt */

/* Rows, or panels of a product, go to tasks in shares of nearly one size. */
static int64_t num_shares(const void *operation, const step *s)
{
    return *(const int32_t *)operation == LINEAR ? num_panels(operation) : s->num_rows;
}

/* Which part of an operation a task is: threads that take tasks in turns each go through a part of its own, for memory is
 * read faster in long streams. */
static int place_of(int task, int num_tasks, int num_threads)
{
    const int thread = task % num_threads, each = num_tasks / num_threads, rest = num_tasks % num_threads;
    return thread * each + (thread < rest ? thread : rest) + task / num_threads;
}

#define FOR_ROWS for (int64_t row = begin; row < end; row++)

static void run_shares(const void *operation, const step *s, int64_t begin, int64_t end)
{
    switch (*(const int32_t *)operation) {
    case EMBED: FOR_ROWS embed(operation, s, row); break;
    case NORM: FOR_ROWS norm(operation, row); break;
    case LINEAR: run_linear(operation, s, begin, end); break;
    case ROTATE: FOR_ROWS rotate(operation, s, row); break;
    case CAP: FOR_ROWS cap(operation, row); break;
    case GREATEST: FOR_ROWS greatest(operation, row); break;
    }
}

static void run_operations(int thread, void *argument)
{
    program *p = argument;
    const step *s = p->step;
    int64_t began = thread == 0 && s->times ? now_ns() : 0;
    for (int i = 0; i < p->num_operations; i++) {
        const void *operation = p->operations[i];
        tasks *t = &p->tasks[i];
        int num_tasks, num_done = 0;
        if (*(const int32_t *)operation == ATTEND) {
            num_tasks = run_attention(operation, s, &p->team, t, p->shared, &num_done);
        } else {
            const int64_t shares = num_shares(operation, s);
            num_tasks = p->team.num_threads == 1 ? 1 : TASKS_A_THREAD * p->team.num_threads;
            if (num_tasks > shares) num_tasks = (int)shares;
            for (int task; (task = take_task(t, num_tasks)) < num_tasks; num_done++) {
                const int64_t at = place_of(task, num_tasks, p->team.num_threads);
                run_shares(operation, s, shares * at / num_tasks, shares * (at + 1) / num_tasks);
            }
        }
        if (num_done) counter_add(&t->num_done, num_done, num_tasks);
        if (thread > 0 && i == p->num_operations - 1) break; /* nothing is left to wait for */
        counter_wait(&t->num_done, num_tasks, p->team.spin_ns);
        if (thread == 0 && s->times) {
            int64_t ended = now_ns();
            s->times[i < s->head ? *(const int32_t *)operation : NUM_KINDS] += ended - began;
            began = ended;
        }
    }
#if defined(__AMX_BF16__)
    _tile_release();
#endif
}

/* Run the operations in order on the rows of `s` with `num_threads` threads, which spin for `spin_ns` before they
 * sleep and have a stack each of `stack_bytes`; returns 0 once all are done, or -1 at once where memory is lacking. */
int run(int64_t spin_ns, char *stacks, int64_t stack_bytes, int num_threads, const void *const *operations,
        int num_operations, const step *s)
{
    program p = {.operations = operations, .num_operations = num_operations, .step = s};
    p.team = (team){num_threads, spin_ns, stacks, stack_bytes, run_operations, &p};
    const size_t tasks_bytes = num_operations * sizeof(tasks), shared_bytes = most_shared(&p.team) * sizeof(shared_unit);
    p.tasks = aligned_alloc(64, tasks_bytes);
    p.shared = aligned_alloc(64, shared_bytes + 64);
    if (p.tasks && p.shared) {
        memset(p.tasks, 0, tasks_bytes);
        for (int i = 0; i < most_shared(&p.team); i++) p.shared[i].num_folded = (counter){0};
        team_run(&p.team);
    }
    const int has_run = p.tasks && p.shared;
    free(p.tasks);
    free(p.shared);
    return has_run ? 0 : -1;
}

/* Make the lowest page of each stack one that nobody can write to, and return whether that was done. */
int guard(char *stacks, int64_t stack_bytes, int num_threads)
{
    for (int i = 0; i < num_threads; i++)
        if (mprotect(stacks + i * stack_bytes, sysconf(_SC_PAGESIZE), PROT_NONE)) return 0;
    return 1;
}

/* Whether this build may run here: the system must grant the AMX registers. */
int permitted(void)
{
#if defined(__AMX_BF16__)
    const int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 1;
#endif
}
