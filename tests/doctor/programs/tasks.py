"""Runs a task on each node, and an actor: a driver of Ray that ends well."""

import ray


@ray.remote(num_cpus=1)
def square(number: int) -> int:
    return number * number


@ray.remote(num_cpus=1)
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


ray.init()
print("squares:", ray.get([square.remote(number) for number in range(8)], timeout=600))
counter = Counter.remote()
print("count:", ray.get([counter.add.remote() for _ in range(3)], timeout=600)[-1])
