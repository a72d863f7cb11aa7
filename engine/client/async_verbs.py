"""The verbs of an engine as methods, for whoever awaits them; what each does stands in `engine/verbs.py`.

Each raises `UtilityError` if it fails, alone, `UtilityTimeout` if there was no answer in time, and `EngineDeadError` if
the engine dies before it answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine import verbs
from engine.verbs import PauseMode, SleepTag, Verb


class AsyncVerbs(ABC):
    """Calls of one engine, or of all engines behind one client."""

    @abstractmethod
    async def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """Run `verb` and return its answer; wait for at most `timeout_s`, by default what the verb's class says."""

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget cached prefixes; returns False while blocks are in use, unless running requests are preempted."""
        done: bool = await self.call(verbs.ResetPrefixCache(reset_running))
        return done

    async def pause(self, mode: PauseMode | str = PauseMode.ABORT, *, clear_cache: bool = True) -> None:
        """Stop admitting requests and return once nothing runs (keep: at once); queued ones wait for `resume`."""
        await self.call(verbs.Pause(PauseMode(mode), clear_cache))

    async def resume(self) -> None:
        """Undo `pause`."""
        await self.call(verbs.Resume())

    async def is_paused(self) -> bool:
        """Return whether a pause was asked for and not undone."""
        paused: bool = await self.call(verbs.IsPaused())
        return paused

    async def sleep(self, level: int = 1, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Pause by `mode`, then give back keys and values (level 1) and weights (2); see `engine.verbs.Sleep`."""
        await self.call(verbs.Sleep(level, PauseMode(mode)))

    async def wake_up(self, tags: Sequence[SleepTag | str] | None = None) -> None:
        """Take back what `tags` name, everything when None, and resume once nothing sleeps."""
        await self.call(verbs.WakeUp(None if tags is None else [SleepTag(tag) for tag in tags]))

    async def is_sleeping(self) -> bool:
        """Return whether the scheduler is paused or something sleeps."""
        sleeping: bool = await self.call(verbs.IsSleeping())
        return sleeping

    async def start_profile(self) -> None:
        """Note the times of each step from now on."""
        await self.call(verbs.StartProfile())

    async def stop_profile(self) -> str:
        """Write them into --profile-dir, on the engine's machine; return the file's path."""
        path: str = await self.call(verbs.StopProfile())
        return path

    async def list_loras(self) -> list[int]:
        """Fail: LoRA is not enabled in this version."""
        loras: list[int] = await self.call(verbs.ListLoras())
        return loras

    async def add_lora(self, name: str, path: str) -> bool:
        """Fail: LoRA is not enabled in this version."""
        added: bool = await self.call(verbs.AddLora(name, path))
        return added

    async def remove_lora(self, lora_id: int) -> bool:
        """Fail: LoRA is not enabled in this version."""
        removed: bool = await self.call(verbs.RemoveLora(lora_id))
        return removed

    async def pin_lora(self, lora_id: int) -> bool:
        """Fail: LoRA is not enabled in this version."""
        pinned: bool = await self.call(verbs.PinLora(lora_id))
        return pinned

    async def save_sharded_state(self, path: str, *, max_size_bytes: int = 2**32) -> list[str]:
        """Write the model into the new folder `path` of the engine's machine; return the shards' names."""
        names: list[str] = await self.call(verbs.SaveShardedState(path, max_size_bytes))
        return names

    async def collective_rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Ask every rank's runner for a method of a fixed set: ping, memory, capacity."""
        answers: list[Any] = await self.call(verbs.CollectiveRpc(method, list(args)), timeout_s)
        return answers

    async def dump_tasks(self) -> str:
        """Return what the engine does right now, as text."""
        text: str = await self.call(verbs.DumpTasks())
        return text
