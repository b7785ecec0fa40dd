"""What a program in a container may not ask the kernel for: seccomp(2), and a session keyring of its own.

The kernel has objects that no namespace separates, or whose memory belongs to no process. They would reach the user's
keys, take memory beyond the limit, or use up what the user's other programs need:

- keys and keyrings (keyrings(7)) belong to the user id, in every container;
- memory that no process has mapped: anonymous files, System V segments, message queues and semaphores, large pipes,
  and the rings of io_uring;
- numbers of objects per user: instances of inotify and fanotify, and POSIX message queues.

A call for one of them fails as on a kernel that has none (ENOSYS).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

_CALLS = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
}
"""System call -> its numbers in the kernel's tables of x86-64 and of arm64."""
_FCNTL, _SET_PIPE_SIZE = (72, 25), 1031
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column of _CALLS, and the kernel's number of it (AUDIT_ARCH)."""
_OTHER_ABI = 0x40000000
"""Calls of x86-64 with this bit have other numbers (x32)."""
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _SECOND_ARGUMENT = 0, 4, 24
"""Offsets in struct seccomp_data; of an argument, the lower half on these machines."""
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_JOIN_SESSION_KEYRING = 1

Instruction = tuple[int, int, int, int]
"""Code, jumps if true and if false, and operand (bpf(4))."""


class _Code(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("codes", ctypes.POINTER(_Code)))


@dataclass(frozen=True)
class Filter:
    """The filter for a machine."""

    column: int
    architecture: int

    def instructions(self) -> list[Instruction]:
        """Return the program: it fails calls of other architectures and those in _CALLS, and allows all others."""
        refused = [number for numbers in _CALLS.values() if (number := numbers[self.column]) is not None]
        calls = [(_EQUAL, 0, 1, number) for number in refused]
        body: list[Instruction] = [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _OTHER_ABI), self._fails()]
        for test in calls:
            body += [test, self._fails()]
        pipes = [(_EQUAL, 0, 3, _FCNTL[self.column]), (_LOAD, 0, 0, _SECOND_ARGUMENT), (_EQUAL, 0, 1, _SET_PIPE_SIZE)]
        head = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, self.architecture), self._fails()]
        return [*head, *body, *pipes, self._fails(), (_RETURN, 0, 0, _ALLOW)]

    @staticmethod
    def _fails() -> Instruction:
        return (_RETURN, 0, 0, _FAIL | errno.ENOSYS)


def filter_for(machine: str) -> Filter | None:
    """Return the filter for a machine as `uname -m` names it; None if its numbers of calls are not known here."""
    found = _ARCHITECTURES.get(machine)
    return None if found is None else Filter(*found)


def prepare() -> Callable[[], None]:
    """Return a function that restricts the calling process and its future children forever.

    It is for a child between fork and exec, and so only makes system calls.
    """
    own, libc = filter_for(platform.machine()), ctypes.CDLL(None, use_errno=True)
    if own is None:
        return lambda: None
    codes = [_Code(*one) for one in own.instructions()]
    program = _Program(len(codes), (_Code * len(codes))(*codes))
    keyctl = _CALLS["keyctl"][own.column]

    def restrict() -> None:
        libc.syscall(ctypes.c_long(keyctl), ctypes.c_long(_JOIN_SESSION_KEYRING), None)
        for option, *arguments in ((_NO_NEW_PRIVILEGES, 1), (_SET_SECCOMP, _FILTER, ctypes.byref(program))):
            padded = [*arguments, 0, 0, 0, 0][:4]
            if libc.prctl(option, *(one if not isinstance(one, int) else ctypes.c_ulong(one) for one in padded)):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return restrict
