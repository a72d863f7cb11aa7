"""A plan in one line of a log: who is in it, how many tokens each, how many blocks; never a prompt."""

from __future__ import annotations

from engine.outputs import ScheduledRequest, SchedulerOutput


def describe_plan(plan: SchedulerOutput, num_in_flight: int) -> str:
    """Return one line for `plan`; `num_in_flight` plans were uncommitted, itself included."""
    rows = ", ".join(map(_describe_row, plan.requests)) or "nobody"
    told = "".join(
        f"; {what} {', '.join(ids)}"
        for what, ids in (("preempted", plan.preempted_request_ids), ("ended", plan.finished_request_ids))
        if ids
    )
    return (
        f"step {plan.step}: {len(plan.requests)} requests, {plan.num_tokens} tokens, {num_in_flight} in flight: "
        f"{rows}{told}"
    )


def _describe_row(row: ScheduledRequest) -> str:
    blocks = "+".join(str(len(table)) for table in row.block_tables)
    late = f" {row.num_late} late" if row.num_late else ""
    return f"{row.request_id} {row.num_tokens}@{row.start}{late} in {blocks} blocks"
