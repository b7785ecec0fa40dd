"""Runs whose experience TransferQueue carries, with the real package (requirements/transfer-queue-no-deps.txt)."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from hpc_rl.errors import RunError
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.actors.deaths import ActorDiedError
from hpc_rl.rl.loop import trainer
from tests.marks import long
from tests.rl.runs.jobs import Runs, metrics, stop_after

NEEDS = "TransferQueue is not installed: pip install --no-deps -r requirements/transfer-queue-no-deps.txt"
zmq = pytest.importorskip("zmq", reason=NEEDS)
pytest.importorskip("transfer_queue", reason=NEEDS)

from zmq.utils.monitor import recv_monitor_message  # noqa: E402

from hpc_rl.rl.carriers.transfer_queue.carrier import TransferQueueCarrier  # noqa: E402
from hpc_rl.rl.carriers.transfer_queue.client import Client, Server, new_socket  # noqa: E402

QUEUE = "transfer_queue.enable=true"
TWO_RANKS = "trainer.n_gpus_per_node=2"
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_DISCONNECTED,  # by a server that expects CURVE
)
KL = ("algorithm.kl.where=loss", "algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3")


@pytest.fixture(scope="module")
def server(cluster: None) -> Iterator[Server]:
    found = Server([ray.get_runtime_context().get_node_id()] * 2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    found = Client(server.connection)
    yield found
    found.close()


@pytest.mark.parametrize(
    "options",
    [
        long(("algorithm.advantage=grpo", *KL, TWO_RANKS)),
        long(("algorithm.advantage=grpo", *KL, TWO_RANKS, "actor.shuffle=true")),
        long(("algorithm.advantage=gae", "algorithm.kl.where=reward", "algorithm.kl.coef=0.1", TWO_RANKS)),
        (
            *("algorithm.advantage=gae", *KL, "trainer.n_gpus_per_node=4", "pools.spec={one: [2], two: [2]}"),
            *("pools.roles.actor=one", "pools.roles.rollout=one", "pools.roles.critic=two", "pools.roles.ref=two"),
        ),
        long(("algorithm.advantage=grpo", *KL, TWO_RANKS, "model.lora.rank=4", "model.lora.alpha=8")),
        long(
            (
                *("algorithm.advantage=gae", "algorithm.kl.where=reward", "algorithm.kl.coef=0.1"),
                *("trainer.n_gpus_per_node=4", "trainer.sequence_parallel=2"),
            )
        ),
    ],
    ids=["grpo", "shuffle", "gae", "pools", "lora", "sequence parallel"],
)
def test_every_metric_is_equal_bit_for_bit(run: Runs, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Nothing is left in the queue after the steps, nor of its processes after the run."""
    assert run(tmp_path / "ray", *options) == 0
    with run.state(tmp_path / "queue", *options, QUEUE) as state:
        assert isinstance(state.carrier, TransferQueueCarrier)
        actors = list(state.carrier._server._actors)
        assert trainer.train(state) == 0
        assert partitions(state.carrier._client) == []
    for actor in actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.get_zmq_server_info.remote(), timeout=600)
    assert metrics(tmp_path / "queue") == metrics(tmp_path / "ray")
    assert len(metrics(tmp_path / "queue")) >= 2


@pytest.mark.long
def test_a_stopped_run_resumes_with_the_same_numbers(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("algorithm.advantage=grpo", *KL, TWO_RANKS, QUEUE, "trainer.total_training_steps=3")
    assert run(tmp_path / "whole", *options) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert run(tmp_path / "parts", *options) == 75
    (tmp_path / "parts" / "stop").unlink()
    assert run(tmp_path / "parts", *options) == 0
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def partitions(client: Client) -> Any:
    return client._run(client._client.async_get_partition_list())


def test_rows_keep_type_order_and_every_bit(client: Client) -> None:
    lengths = np.array([3, 1, 2])
    nan = np.array([0x7FC00001], np.uint32).view(np.float32)[0]  # one of many
    fields: dict[str, Any] = {
        "ids": np.arange(6, dtype=np.int32),
        "mask": np.array([True, False, True, True, False, False]),
        "column": np.array([0.1, -0.0, nan, 1e-45, 3e38, 2], np.float32),
    }
    client.put("bits", np.array([4, 0, 2]), dict.fromkeys(fields, lengths), fields)
    for order, rows in ([4, 0, 2], slice(0, 6)), ([0], slice(3, 4)), ([2, 0], [4, 5, 3]):
        found = client.get("bits", np.array(order), list(fields))
        for name, flat in fields.items():
            got = np.concatenate(found[name])
            assert got.dtype == flat.dtype
            assert got.tobytes() == flat[rows].tobytes()
    assert client.get("bits", np.zeros(0, np.int64), ["ids"]) == {"ids": []}
    client.clear("bits")
    assert partitions(client) == []


def test_rows_of_one_length(client: Client) -> None:
    flat = np.arange(6, dtype=np.float32)
    client.put("even", np.arange(3), {"a": np.array([2, 2, 2])}, {"a": flat})
    assert [row.tolist() for row in client.get("even", np.array([2, 0]), ["a"])["a"]] == [[4, 5], [0, 1]]
    client.clear("even")


def test_a_missing_row_is_an_error(client: Client) -> None:
    client.put("some", np.arange(2), {"a": np.array([1, 1])}, {"a": np.zeros(2, np.float32)})
    client.put("some", np.arange(1), {"b": np.array([1])}, {"b": np.zeros(1, np.float32)})
    for order, names, expected in (
        ([0, 5], ["a"], "TransferQueue failed: it has 1 of 2 requested rows of some"),
        ([0, 1], ["a", "c"], "TransferQueue failed: some has no c"),
        ([0, 1], ["a", "b"], "TransferQueue failed: "),  # only one row has it
    ):
        with pytest.raises(RunError, match=expected):
            client.get("some", np.array(order), names)
    client.clear("some")
    with pytest.raises(RunError, match="TransferQueue failed: it has 0 of 1 requested rows of some"):
        client.get("some", np.array([0]), ["a"])


@pytest.mark.parametrize("number, who", [(0, "controller"), long(1, "storage unit at")], ids=["controller", "unit"])
def test_a_process_that_dies_is_named(run: Runs, tmp_path: Path, number: int, who: str) -> None:
    with run.state(tmp_path, "algorithm.advantage=grpo", TWO_RANKS, QUEUE) as state:
        assert isinstance(state.carrier, TransferQueueCarrier)
        ray.kill(state.carrier._server._actors[number])
        with pytest.raises(RunError, match=rf"TransferQueue's {who}.* died: ") as found:
            trainer.train(state)
        assert isinstance(found.value, ActorDiedError)


def test_a_death_ends_the_wait_for_the_ranks(server: Server) -> None:
    other = Server([ray.get_runtime_context().get_node_id()])
    never = server.watched[0]
    ray.kill(other._actors[1])
    with pytest.raises(ActorDiedError, match=r"TransferQueue's storage unit at .* died: "):
        Pending.of_calls([never], other.watched).wait(600)
    other.close()


def test_a_second_end_does_nothing(server: Server) -> None:
    client = Client(server.connection)
    thread = client._thread
    client.close()
    client.close()
    assert not thread.is_alive()


class Program:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["none", "another"])
def test_who_lacks_the_key_cannot_run_a_program(
    server: Server, client: Client, tmp_path: Path, key: bytes | None
) -> None:
    """A pickle that a process with the key sends does run, so this attempt would be noticed."""
    connection = server.connection
    for number, address in enumerate(
        [
            *(connection.controller.to_addr(port) for port in ("request_handle_socket", "handshake_socket")),
            *(unit.to_addr("put_get_socket") for unit in connection.storage.values()),
        ]
    ):
        ours, theirs = tmp_path / f"ours-{number}", tmp_path / f"theirs-{number}"
        context = zmq.Context()
        try:
            # Until the end, both sockets have names: one that is collected keeps its message, and the context waits.
            stranger = new_socket(key, context, zmq.DEALER, "") if key else context.socket(zmq.DEALER)
            assert handshake(stranger, address, theirs) in REFUSED
            member = new_socket(connection.key, context, zmq.DEALER, "")
            assert handshake(member, address, ours) == zmq.EVENT_HANDSHAKE_SUCCEEDED
            deadline = time.monotonic() + 600
            while not ours.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            context.destroy(linger=0)
        assert not theirs.exists()


def handshake(socket: Any, address: str, path: Path) -> int:
    """Send a program and return the event that ended the handshake."""
    socket.setsockopt(zmq.IDENTITY, f"TQ_STORAGE_{path.name}".encode())
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(REFUSED))
    socket.connect(address)
    socket.send_multipart([b"\xc1\xfe\xed", pickle.dumps(Program(path))])
    try:
        assert monitor.poll(600_000)
        event: int = recv_monitor_message(monitor)["event"]
        return event
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


def test_it_listens_on_the_address_of_ray_only(server: Server) -> None:
    own = {node["NodeManagerAddress"] for node in ray.nodes()}
    addresses = [server.connection.controller, *server.connection.storage.values()]
    assert {address.ip for address in addresses} == own
