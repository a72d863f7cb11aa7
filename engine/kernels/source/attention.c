#define _GNU_SOURCE
#include "parts.h"

int run_attention(const attend_operation *op, const step *s, const team *team, tasks *t, shared_unit *shared, int *num_done)
{
    return attend(op, s, team, t, shared, num_done);
}
