/* A step of a decoder on a CPU: a list of operations, run by a team of threads that meets after each. */
#define _GNU_SOURCE
#include <stdlib.h>
#include "team.h"
#include "simd.h"
#include "operations.h"
#include "rows.h"
#include "linear.h"
#include "attention.h"

typedef struct {
    team team;
    const void *const *operations;
    int num_operations;
    const step *step;
    attention_work attention;
} program;

#define FOR_MY_ROWS                                                                                                   \
    for (int64_t row = s->num_rows * thread / num_threads, end = s->num_rows * (thread + 1) / num_threads; row < end; row++)

static void run_operations(int thread, void *argument)
{
    program *p = argument;
    const step *s = p->step;
    const int num_threads = p->team.num_threads;
    int64_t began = thread == 0 && s->times ? now_ns() : 0;
    for (int i = 0; i < p->num_operations; i++) {
        const void *operation = p->operations[i];
        switch (*(const int32_t *)operation) {
        case EMBED: FOR_MY_ROWS embed(operation, s, row); break;
        case NORM: FOR_MY_ROWS norm(operation, row); break;
        case LINEAR: linear(operation, s->num_rows, thread, num_threads); break;
        case ROTATE:
            if (thread == 0) attention_begin(&p->attention);
            FOR_MY_ROWS rotate(operation, s, row);
            break;
        case ATTEND: attend(operation, s, &p->attention); break;
        case CAP: FOR_MY_ROWS cap(operation, row); break;
        case GREATEST: FOR_MY_ROWS greatest(operation, row); break;
        }
        if (i + 1 < p->num_operations) team_meet(&p->team);
        if (thread == 0 && s->times) {
            int64_t ended = now_ns();
            s->times[i] += ended - began;
            began = ended;
        }
    }
#if defined(__AMX_BF16__)
    _tile_release();
#endif
}

/* Run the operations in order on the rows of `s` with `num_threads` threads, which spin for `spin_ns` before they
 * sleep; returns 0 once all are done, or -1 at once where memory is lacking. */
int run(int num_threads, int64_t spin_ns, const void *const *operations, int num_operations, const step *s)
{
    program p = {.operations = operations, .num_operations = num_operations, .step = s};
    p.team.spin_ns = spin_ns;
    p.team.function = run_operations;
    p.team.argument = &p;
    p.attention.team = &p.team;
    p.attention.shared = aligned_alloc(64, UNITS_A_THREAD * num_threads * sizeof(shared_unit));
    if (!p.attention.shared) return -1;
    for (int i = 0; i < UNITS_A_THREAD * num_threads; i++) p.attention.shared[i].num_folded = (gate){0};
    team_run(&p.team, num_threads);
    free(p.attention.shared);
    return 0;
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
