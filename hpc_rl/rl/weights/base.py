"""What all weight transfers share: the policy's weights, the engines that receive them, and both ends' interfaces.

    sender = open_sender(name, source, engines, world, bucket_bytes)   # on every training rank, once
    sender.send_weights()                                                        # on every rank, after each update

A transfer makes vLLM's four calls on every engine (https://docs.vllm.ai/en/latest/training/weight_transfer/): init,
start, update for each bucket, finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_rl.rl.actors.calls import ActorCall, Pending
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.weights.buckets import Bucket, TensorEntry, unpack
from hpc_rl.training.models.four_bit import four_bit_weights
from hpc_rl.training.models.lora import adapted_layers, is_adapter, merged, rounded
from hpc_rl.training.models.stored_form import StoredForm


class WeightSource:
    """A model's weights by their Hugging Face names, tied ones once: parameters in the engine's type, and the buffers
    that files contain, such as the biases of routers, in their own. Adapters are merged into the weights on the way,
    and the model keeps its own.

    Args:
        adapters_only: the source has the adapters, and nothing else.
        stored: gives the weights their names in the model's files; None for the names of the module's parameters.
    """

    def __init__(
        self, hf: nn.Module, dtype: torch.dtype, adapters_only: bool = False, stored: StoredForm | None = None
    ) -> None:
        stored_names = hf.state_dict().keys()
        buffers = {name: buffer for name, buffer in hf.named_buffers() if name in stored_names}
        found = {**dict(hf.named_parameters()), **buffers}
        self.parameters = {name: weight for name, weight in found.items() if is_adapter(name) == adapters_only}
        layers = {} if adapters_only else adapted_layers(hf)
        self.adapted = {f"{name}.weight": layer for name, layer in layers.items()}
        self.four_bit = {} if adapters_only else four_bit_weights(hf)
        self.dtype = dtype
        self.stored = stored if stored is not None and stored.differs and not adapters_only else None

    def metadata(self) -> list[TensorEntry]:
        """Return what iteration yields, without any communication."""
        types = {name: self._type(weight) for name, weight in self.parameters.items()}
        every = {**self.parameters, **self.four_bit}
        empty = (
            (name, torch.empty(weight.shape, dtype=types.get(name, self.dtype), device="meta"))
            for name, weight in every.items()
        )
        return [TensorEntry(name, part.dtype, tuple(part.shape)) for name, part in self._parts(empty)]

    def is_in_place(self) -> bool:
        """Whether iteration yields the parameters themselves, in host memory."""
        return not (self.adapted or self.four_bit or self.stored) and all(
            not isinstance(parameter, DTensor)
            and (parameter.device.type, parameter.dtype) == ("cpu", self._type(parameter))
            and parameter.is_contiguous()
            for parameter in self.parameters.values()
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors, one at a time. If parameters are sharded, all ranks have to iterate together."""
        yield from self._parts(self._whole())

    def _parts(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what engines load, from the module's weights."""
        for name, weight in weights:
            if self.stored is None:
                yield name, weight
            else:
                yield from self.stored.parts(name, weight)

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's weights."""
        for name, parameter in self.parameters.items():
            if name in self.adapted:
                yield name, self._merged(name, _full(parameter))
            else:
                # Convert before gathering, so that fewer bytes travel.
                yield name, _full(parameter.detach().to(self._type(parameter)))
        for name, stored in self.four_bit.items():
            weight = stored.dequantized()
            yield name, self._merged(name, weight) if name in self.adapted else weight.to(self.dtype)

    def _type(self, weight: torch.Tensor) -> torch.dtype:
        """Return the type in which a weight travels."""
        return self.dtype if isinstance(weight, nn.Parameter) else weight.dtype

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        layer = self.adapted[name]
        up, down = _full(layer.lora_B.weight), _full(layer.lora_A.weight)
        return rounded(merged(weight, down, up, layer.scale), self.dtype, name)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor. If it is sharded, all ranks have to call this together."""
    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


class EngineActors:
    """Engines in Ray actors that have the four calls: vLLM's VLLMWeightSyncClient. It may be sent to other actors."""

    def __init__(
        self,
        actors: Sequence[Any],
        names: Sequence[ActorLabel],
        nodes: Sequence[str],
        timeout_s: float,
        workers_each: int = 1,
    ) -> None:
        """
        Args:
            actors: handles.
            names: the actors' names, for errors.
            nodes: Ray's id of each actor's node.
            timeout_s: longest time for one call.
            workers_each: processes of one engine (tensor parallel size).

        Every call raises RunError if an engine died or did not answer in time.
        """
        self.actors = list(actors)
        self.names = list(names)
        self.nodes = list(nodes)
        self.timeout_s = timeout_s
        self.workers_each = workers_each

    def add(self, actor: Any, name: ActorLabel, node: str) -> None:
        self.actors.append(actor)
        self.names.append(name)
        self.nodes.append(node)

    def subset(self, indices: Sequence[int]) -> EngineActors:
        actors, names, nodes = ([of[index] for index in indices] for of in (self.actors, self.names, self.nodes))
        return EngineActors(actors, names, nodes, self.timeout_s, self.workers_each)

    def without(self, name: ActorLabel) -> EngineActors:
        return self.subset([index for index, each in enumerate(self.names) if each != name])

    def calls(self, method: str, *arguments: Any) -> list[ActorCall]:
        """Start a call to every engine."""
        return [
            ActorCall(getattr(actor, method).remote(*arguments), name)
            for actor, name in zip(self.actors, self.names, strict=True)
        ]

    def call(self, method: str, *arguments: Any) -> Pending[list[Any]]:
        """Start a call to every engine; the results are in the engines' order."""
        return Pending.of_calls(self.calls(method, *arguments))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        calls: list[ActorCall] = []
        for index in range(len(self.actors)):
            own = dict(init_info)
            if "rank_offset" in own:  # vLLM counts the workers of a single engine
                own["rank_offset"] += index * self.workers_each
            calls += self.subset([index]).calls("init_weight_transfer_engine", own)
        Pending.of_calls(calls).wait(self.timeout_s)

    def start_weight_update(self) -> None:
        self.call("start_weight_update").wait(self.timeout_s)

    def update_weights(self, update: Any) -> None:
        self.call("update_weights", update).wait(self.timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update").wait(self.timeout_s)


class WeightSender(Protocol):
    """The training side of a transfer, on one rank."""

    def send_weights(self) -> None:
        """Send the current weights to all engines; return when they have them. Every training rank calls this."""
        ...

    def shutdown(self) -> None:
        """Free what connects this rank with the engines. Some of them may have died; this takes seconds at most."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """The engine's side of a transfer: vLLM's four calls."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update: Any) -> None:
        """Take some of the weights, in the form that the transfer sends: a Bucket, or what vLLM's own transfers use."""
        ...

    def finish_weight_update(self) -> None: ...


class LoadsWeights(Protocol):
    """The part of a RolloutEngine that receives weights in its own process."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...


class BucketReceiver:
    """A WeightReceiver that passes each Bucket to the `load_weights` of an engine in this process."""

    def __init__(self, engine: LoadsWeights) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing: a bucket needs no preparation."""

    def start_weight_update(self) -> None:
        """Do nothing: a bucket needs no preparation."""

    def update_weights(self, update: Bucket) -> None:
        self._engine.load_weights(unpack(update))

    def finish_weight_update(self) -> None:
        """Do nothing: the engine has used each bucket at once."""


def receiver_of(engine: LoadsWeights) -> WeightReceiver:
    """Return the engine itself if it has the four calls, otherwise a BucketReceiver for it."""
    return engine if isinstance(engine, WeightReceiver) else BucketReceiver(engine)
