/* What the files that are compiled side by side have of one another; each is one processor's work, kernels.c has the rest. */
#pragma once
#include "attention.h"
#include "operations.h"
#include "team.h"

#pragma GCC visibility push(hidden)
/* linear.c: multiply all rows with the panels [begin, end). */
void run_linear(const linear_operation *op, const step *s, int64_t begin, int64_t end);
/* attention.c: see `attend`. */
int run_attention(const attend_operation *op, const step *s, const team *team, tasks *t, shared_unit *shared, int *num_done);
#pragma GCC visibility pop
