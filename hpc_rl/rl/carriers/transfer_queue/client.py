"""Everything that uses the package TransferQueue (https://github.com/Ascend/TransferQueue): its processes and clients.

Its processes listen on TCP ports, trust everyone who connects, and unpickle what they receive, so that anybody who
reaches a port could run programs as this user. Here every connection is therefore authenticated and encrypted with
CURVE (https://rfc.zeromq.org/spec/26/): a server answers only clients that know its public key, and this key never
leaves the run. It is random for each run, and reaches the processes through Ray. The processes listen on the address
that Ray uses, and not on the one that the package would choose.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.actors.calls import ActorCall, Pending
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.carriers.transfer_queue.requirements import PACKAGE, problem
from hpc_rl.rl.loop import experience as columns

TIMEOUT_S = 600
"""Time limit of one put, get or clear. The package has none for its controller."""
_START_TIMEOUT_S = 300
_CHECK_S = 1
"""Interval between the checks of a client that waits."""
_CLOSE_TIMEOUT_S = 60
_KEY_BYTES = 32
_MODULES = (
    "transfer_queue.utils.zmq_utils",
    "transfer_queue.controller",
    "transfer_queue.storage.simple_storage",
    "transfer_queue.storage.managers.base",
)
"""The modules of the package that make sockets."""
_FAILED = f"transfer_queue.enable=true: {PACKAGE} failed"
_AGAIN = "Start the run again: it resumes from its newest checkpoint"


@dataclass(frozen=True)
class Connection:
    """What a process needs to connect to the queue of a run."""

    key: bytes = field(repr=False)
    """The secret key of the servers, which is that of all clients, too."""
    controller: Any
    storage: dict[str, Any]
    """The addresses of the package's processes, in its own type."""


class Server:
    """The package's processes: a controller, and one storage unit on each node. They end with the driver.

    Args:
        nodes: Ray's ids of the nodes.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        if (text := problem()) is not None:
            raise UserError(text)
        key = _own_key()
        secure(key)
        controller = importlib.import_module("transfer_queue.controller").TransferQueueController
        unit = importlib.import_module("transfer_queue.storage.simple_storage").SimpleStorageUnit
        here, settings = ray.get_runtime_context().get_node_id(), {"num_data_storage_units": len(nodes)}
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in (here, *nodes)]
        # The package would take one CPU of the job for each. All of them only wait and copy.
        first, *others = [{"num_cpus": 0, "scheduling_strategy": place} for place in places]
        self._actors = [controller.options(**first).remote()]
        self._actors += [unit.options(**options).remote(config=settings) for options in others]
        calls = [actor.get_zmq_server_info.remote() for actor in self._actors]
        try:
            addresses = ray.get(calls, timeout=_START_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise RunError(
                f"transfer_queue.enable=true: the processes of {PACKAGE} did not start within {_START_TIMEOUT_S} s: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.connection = Connection(key, addresses[0], {str(i): address for i, address in enumerate(addresses[1:])})
        parts = ["controller", *(f"storage unit at {address.ip}" for address in addresses[1:])]
        names = [f"{PACKAGE}'s {part} (transfer_queue.enable)" for part in parts]
        self.watched = [
            ActorCall(actor.__ray_call__.remote(_never_return), ActorLabel(name, "carrier"))
            for actor, name in zip(self._actors, names, strict=True)
        ]
        """Calls that end only if a process dies. The package answers in other threads."""

    def check(self) -> None:
        """Raise RunError if a process has died."""
        for call in self.watched:
            ended = Pending.of_calls([call])
            if ended.is_ready():
                ended.wait()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self.watched = [], []


class Client:
    """A connection of one process. Its calls have a time limit, which the package's own do not have.

    Args:
        check: called while a call waits; raises RunError if waiting is of no use.
    """

    def __init__(self, connection: Connection, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        secure(connection.key)
        package = importlib.import_module("transfer_queue.client")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transfer queue", daemon=True)
        self._thread.start()
        self._client = package.AsyncTransferQueueClient(
            f"TransferQueueClient_{secrets.token_hex(8)}", connection.controller, zmq_io_threads=1
        )
        try:
            self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": connection.storage})
        except (TimeoutError, RuntimeError, _zmq_error()) as error:
            raise RunError(f"transfer_queue.enable=true: no connection to its controller: {error}") from error

    def put(
        self,
        partition: str,
        order: NDArray[np.int64],
        lengths: Mapping[str, NDArray[np.int64]],
        fields: Mapping[str, NDArray[Any]],
    ) -> None:
        """Store fields of some responses.

        Args:
            order: the responses.
            lengths: length of each row of a field, in this order.
            fields: the rows of each field, concatenated.
        """
        if not len(order):
            return
        rows = {name: columns.jagged(_tensor(flat), torch.from_numpy(lengths[name])) for name, flat in fields.items()}
        self._run(self._put(partition, order, TensorDict(rows, batch_size=[len(order)])))

    def get(self, partition: str, order: NDArray[np.int64], names: Sequence[str]) -> dict[str, list[NDArray[Any]]]:
        """Return the rows of fields for some responses, in this order.

        Raises:
            RunError: rows or fields are missing.
        """
        if not len(order):
            return {name: [] for name in names}
        found = self._run(self._get(partition, order, list(names)))
        return {name: [row.numpy() for row in found[name].unbind()] for name in names}

    def clear(self, partition: str) -> None:
        """Remove what is stored in a partition."""
        self._run(self._client.async_clear_partition(partition))

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # a socket must not be closed while another thread uses it
            self._loop.close()
            self._client.close()

    async def _put(self, partition: str, order: NDArray[np.int64], data: TensorDict) -> None:
        rows = await self._client.async_kv_retrieve_meta(keys=[*map(str, order)], partition_id=partition, create=True)
        await self._client.async_put(data, rows)

    async def _get(self, partition: str, order: NDArray[np.int64], names: list[str]) -> TensorDict:
        rows = await self._client.async_kv_retrieve_meta(keys=[*map(str, order)], partition_id=partition, create=False)
        # The package leaves out what it does not have, without an error.
        if rows.size != len(order):
            raise RunError(f"{_FAILED}: it has {rows.size} of {len(order)} requested rows of {partition}. {_AGAIN}")
        if missing := sorted(set(names) - set(rows.field_names)):
            raise RunError(f"{_FAILED}: {partition} has no {', '.join(missing)}. {_AGAIN}")
        found: TensorDict = await self._client.async_get_data(rows.select_fields(names))
        if len(found) != len(order) or not set(names) <= set(found.keys()):
            raise RunError(
                f"{_FAILED}: it brought {len(found)} of {len(order)} rows, with {', '.join(sorted(found.keys()))} of "
                f"{', '.join(names)}. {_AGAIN}"
            )
        return found

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = time.monotonic() + TIMEOUT_S
        while not futures_wait([future], _CHECK_S).done:
            self._check()
            if time.monotonic() > deadline:
                future.cancel()
                raise RunError(f"{_FAILED}: its processes did not answer within {TIMEOUT_S} s. {_AGAIN}")
        try:
            return future.result()
        except (RuntimeError, ValueError, KeyError, TypeError, TimeoutError, _zmq_error()) as error:
            raise RunError(f"{_FAILED}: {error}. {_AGAIN}") from error


_clients: dict[str, Client] = {}
"""The connection of this process, by the controller's id."""


def client_of(connection: Connection) -> Client:
    """Return this process's connection, which its first call makes."""
    found: str = connection.controller.id
    if found not in _clients:
        for other in list(_clients):  # of an earlier run in this process
            _clients.pop(other).close()
        _clients[found] = Client(connection)
    return _clients[found]


@cache
def _own_key() -> bytes:
    """Return the key of the servers that this process starts. Ray sends the package's actors once, with one key."""
    return secrets.token_bytes(_KEY_BYTES)


def secure(key: bytes) -> None:
    """Make all sockets of the package use this key, in this process and in the actors that it starts from now on.

    Ray sends the package's actors with the functions that they call, and so with these.
    """
    for name in _MODULES:
        module: Any = importlib.import_module(name)
        module.create_zmq_socket = partial(new_socket, key)
        module.get_node_ip_address = ray_address


def new_socket(key: bytes, ctx: Any, socket_type: Any, ip: str, identity: bytes | None = None) -> Any:
    """Return a socket as the package makes them, but with CURVE. A server refuses clients without the key."""
    zmq: Any = importlib.import_module("zmq")
    z85: Any = importlib.import_module("zmq.utils.z85")
    secret = z85.encode(key)
    public = zmq.curve_public(secret)
    found = ctx.socket(socket_type)
    found.setsockopt(zmq.IPV6, int(":" in ip))
    found.setsockopt(zmq.RCVHWM, 0)  # a ROUTER drops what exceeds the limit
    found.setsockopt(zmq.SNDHWM, 0)
    found.setsockopt(zmq.CURVE_PUBLICKEY, public)
    found.setsockopt(zmq.CURVE_SECRETKEY, secret)
    if socket_type == zmq.ROUTER:
        found.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        found.setsockopt(zmq.CURVE_SERVERKEY, public)
    if identity is not None:
        found.setsockopt(zmq.IDENTITY, identity)
    return found


def ray_address() -> str:
    """Return the address by which other nodes reach this one in Ray."""
    mine = ray.get_runtime_context().get_node_id()
    found: str = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == mine)
    return found.strip("[]")


def _never_return(_actor: Any) -> None:
    threading.Event().wait()


def _zmq_error() -> type[Exception]:
    found: type[Exception] = importlib.import_module("zmq").ZMQError
    return found


def _tensor(flat: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())
