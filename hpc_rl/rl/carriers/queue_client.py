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
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from packaging.version import Version
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl import experience as columns

PACKAGE = "TransferQueue"
VERSIONS = ("0.1.11", "0.1.12")
"""The oldest version that works, and the first one that is not known to. Releases rename what this file uses."""
TIMEOUT_S = 600
"""Time limit of one put, get or clear. The package has none for its controller."""
_START_TIMEOUT_S = 300
_KEY_BYTES = 32
_MODULES = (
    "transfer_queue.utils.zmq_utils",
    "transfer_queue.controller",
    "transfer_queue.storage.simple_storage",
    "transfer_queue.storage.managers.base",
)
"""The modules of the package that make sockets."""


@dataclass(frozen=True)
class Connection:
    """What a process needs to connect to the queue of a run."""

    key: bytes
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
        refuse_other_version()
        key = _own_key()
        secure(key)
        controller = importlib.import_module("transfer_queue.controller").TransferQueueController
        unit = importlib.import_module("transfer_queue.storage.simple_storage").SimpleStorageUnit
        here = ray.get_runtime_context().get_node_id()
        # The package would take one CPU of the job for each. All of them only wait and copy.
        self._actors = [controller.options(num_cpus=0, scheduling_strategy=_on(here)).remote()]
        self._actors += [
            unit.options(num_cpus=0, scheduling_strategy=_on(node)).remote(
                config={"num_data_storage_units": len(nodes)}
            )
            for node in nodes
        ]
        calls = [actor.get_zmq_server_info.remote() for actor in self._actors]
        try:
            addresses = ray.get(calls, timeout=_START_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise RunError(
                f"transfer_queue.enable=true: the processes of {PACKAGE} did not start within {_START_TIMEOUT_S} s: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.connection = Connection(key, addresses[0], {str(i): address for i, address in enumerate(addresses[1:])})

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


class Client:
    """A connection of one process. Its calls have a time limit, which the package's own do not have."""

    def __init__(self, connection: Connection) -> None:
        secure(connection.key)
        package = importlib.import_module("transfer_queue.client")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="transfer queue", daemon=True).start()
        self._client = package.AsyncTransferQueueClient(
            f"TransferQueueClient_{secrets.token_hex(8)}", connection.controller, zmq_io_threads=1
        )
        try:
            self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": connection.storage})
        except (TimeoutError, RuntimeError) as error:
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
        """Return the rows of fields for some responses, in this order."""
        if not len(order):
            return {name: [] for name in names}
        found = self._run(self._get(partition, order, list(names)))
        return {name: [row.numpy() for row in found[name].unbind()] for name in names}

    def clear(self, partition: str) -> None:
        """Remove what is stored in a partition."""
        self._run(self._client.async_clear_partition(partition))

    def partitions(self) -> list[str]:
        """Return the names of all partitions."""
        found: list[str] = self._run(self._client.async_get_partition_list())
        return found

    def close(self) -> None:
        """Close the connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._client.close()

    async def _put(self, partition: str, order: NDArray[np.int64], data: TensorDict) -> None:
        rows = await self._client.async_kv_retrieve_meta(keys=_keys(order), partition_id=partition, create=True)
        await self._client.async_put(data, rows)

    async def _get(self, partition: str, order: NDArray[np.int64], names: list[str]) -> TensorDict:
        rows = await self._client.async_kv_retrieve_meta(keys=_keys(order), partition_id=partition, create=False)
        found: TensorDict = await self._client.async_get_data(rows.select_fields(names))
        return found

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(TIMEOUT_S)
        except TimeoutError as error:
            future.cancel()
            raise RunError(
                f"transfer_queue.enable=true: no answer from the processes of {PACKAGE} within {TIMEOUT_S} s. Start "
                "the run again: it resumes from its newest checkpoint"
            ) from error
        except (RuntimeError, ValueError, KeyError) as error:
            raise RunError(f"transfer_queue.enable=true: {PACKAGE} failed: {error}") from error


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


def refuse_other_version() -> None:
    """Raise UserError if the package is not installed in a version that works."""
    oldest, above = VERSIONS
    wanted = f"transfer_queue.enable=true needs {PACKAGE} >= {oldest}, < {above}"
    install = "install it by pip install '.[transfer-queue]' in the checkout of hpc-rl, or remove transfer_queue.enable"
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise UserError(f"{wanted}, and this Python has none: {install}") from None
    if not Version(oldest) <= Version(found) < Version(above):
        raise UserError(f"{wanted}, and this Python has {found}: {install}")
    if not importlib.import_module("zmq").has("curve"):
        raise UserError(
            "transfer_queue.enable=true needs a pyzmq with CURVE, which authenticates its connections, and this one "
            "was built without it: install pyzmq from its wheel, or remove transfer_queue.enable"
        )


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _keys(order: NDArray[np.int64]) -> list[str]:
    return [str(response) for response in order]


def _tensor(flat: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())
