/* Products are some percent faster so, and compiled as soon; of the other files neither is true. */
#pragma GCC optimize("O3")
#define _GNU_SOURCE
#include "parts.h"
#include "linear.h"

void run_linear(const linear_operation *op, const step *s, int64_t begin, int64_t end)
{
    linear(op, s->num_rows, begin, end);
}
