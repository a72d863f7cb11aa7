"""A folder for sockets that only this user may enter; what a killed process leaves, the next one removes.

Its owner holds an flock on the folder while it lives: the kernel lets it go at the owner's death, however that came.
So a lock that can be had means that the owner is dead, which a process id, used again, would not.

Nothing of ours stands in /dev/shm: memory to be shared has no name (memfd) and goes with its last holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

MAX_PATH_BYTES = 96
"""Of a folder's path: a unix socket's own may have 107 bytes, so that names in the folder may have 10."""


@contextmanager
def open_folder(prefix: str) -> Iterator[str]:
    """Give the path of a new folder of mode 0700; it is removed on leaving, if it is still there.

    Before, folders of this prefix are removed whose owners are dead: this user's alone, see `remove_orphans`.
    Whoever runs under the same prefix uses this function.

    Raises:
        OSError: No folder can be made, its path is too long for sockets, or the file system of TMPDIR has no locks.
    """
    remove_orphans(prefix)
    path, descriptor = _make_locked(prefix)
    try:
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, f"{path} is longer than the {MAX_PATH_BYTES} bytes that sockets allow")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_orphans(prefix: str) -> list[str]:
    """Remove the folders that dead owners left, with the files in them; return their paths.

    Never touched: what belongs to another user, what a living process holds, links, and folders in such a folder.
    """
    parent = tempfile.gettempdir()
    with os.scandir(parent) as entries:
        paths = [entry.path for entry in entries if entry.name.startswith(prefix)]
    return [path for path in paths if _remove_orphan(path)]


def _make_locked(prefix: str) -> tuple[str, int]:
    """Return a new folder and the descriptor that holds its lock."""
    while True:
        path = tempfile.mkdtemp(prefix=prefix)
        try:
            descriptor = _lock(path)
        except (FileNotFoundError, BlockingIOError):
            continue  # another process that cleans up came between, and removes it
        except OSError:
            os.rmdir(path)
            raise
        if os.path.exists(path):
            return path, descriptor
        os.close(descriptor)


def _lock(path: str) -> int:
    """Return a descriptor of the folder `path`, which must be this user's own, with its lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{path} belongs to another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_orphan(path: str) -> bool:
    try:
        descriptor = _lock(path)
    except OSError:  # it is gone, no folder, another user's, or locked by its living owner
        return False
    try:
        for name in os.listdir(descriptor):
            os.unlink(name, dir_fd=descriptor)
        os.rmdir(path)
    except OSError:  # it holds a folder, which nothing of ours makes
        return False
    finally:
        os.close(descriptor)
    return True
