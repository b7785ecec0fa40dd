"""A driver of Ray that fails in the way that its argument names."""

import os
import sys

import ray
from ray.util.placement_group import placement_group


@ray.remote(num_cpus=1)
class Actor:
    def import_it(self) -> None:
        import flash_attn  # noqa: F401

    def die(self) -> None:
        os.kill(os.getpid(), 9)

    def wait(self) -> None:
        block = bytearray(200 << 20)
        while block:
            pass


def module() -> None:
    ray.get(Actor.remote().import_it.remote(), timeout=600)


def killed() -> None:
    ray.get(Actor.remote().die.remote(), timeout=600)


def memory() -> None:
    ray.get(Actor.remote().wait.remote(), timeout=600)


def placement() -> None:
    group = placement_group([{"CPU": 512}])
    ray.get(group.ready(), timeout=10)


ray.init()
globals()[sys.argv[1]]()
