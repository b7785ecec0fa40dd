"""The carriers: what brings the experience of a step from the driver to the ranks.

To add a carrier, write a class (see `hpc_rl.rl.carriers.base.Carrier`), and add a row to `CARRIERS` and an option that
selects it (`PpoConfig.carrier_spec`). As in `ENGINES`, the table names modules and imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CarrierSpec:
    """Describe what a carrier needs and what it can do."""

    carrier: str
    """The class, `MODULE:CLASS`, which is called with Ray's ids of the nodes that train."""
    in_parts: bool = True
    """Whether the driver can send some responses of a step while others are generated."""
    requirements: str | None = None
    """File in hpc_rl, of the standard library only, that prints why the Python that runs it cannot use the carrier."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every process of the run. One that the user has exported keeps its value."""
    variables: tuple[str, ...] = ()
    """Names of such variables, as patterns of bash. An image gets those that the user has exported."""


_TRANSFER_QUEUE = {
    "TRANSFER_QUEUE_ENABLE": "1",  # as verl sets it; the package does not read it, but code for verl does
    "TQ_NUM_THREADS": "1",  # threads that copy rows; more than the machine's cores is a warning for each copy
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",  # each attempt waits 200 s for a storage unit
    # A new client asks the controller for 600 s, because a busy node may be slow. Each interval takes up to 0.5 s more,
    # and the sum has to stay below the timeout, after which the package goes on without a connection.
    "TQ_STORAGE_HANDSHAKE_MAX_RETRIES": "60",
    "TQ_STORAGE_HANDSHAKE_RETRY_INTERVAL": "10",
    "TQ_STORAGE_HANDSHAKE_TIMEOUT": "900",
    "TQ_DATA_UPDATE_RESPONSE_TIMEOUT": "600",  # after it, the package only logs that the controller lacks the rows
    "TQ_STORAGE_LARGE_PAYLOAD_MB": "inf",  # a step in one request is large; no warning for each
    "TQ_STORAGE_SLOW_REQUEST_SECONDS": "60",
}

CARRIERS: dict[str, CarrierSpec] = {
    "ray": CarrierSpec("hpc_rl.rl.carriers.through_ray:RayCarrier"),
    "transfer_queue": CarrierSpec(
        "hpc_rl.rl.carriers.transfer_queue.carrier:TransferQueueCarrier",
        in_parts=False,
        requirements="rl/carriers/transfer_queue/requirements.py",
        environment=_TRANSFER_QUEUE,
        variables=("TQ_*", "TRANSFER_QUEUE_*"),
    ),
}
