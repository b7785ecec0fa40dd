"""What vLLM's workers do for us: a class that vLLM mixes into theirs (its argument worker_extension_cls)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch import nn

from hpc_rl.rl.rollout.vllm.caches import set_up_caches
from hpc_rl.rl.rollout.vllm.direct_writes import DirectWrites
from hpc_rl.rl.rollout.vllm.processes import log_as_worker
from hpc_rl.rl.weights.buckets import Bucket, unpack


class WeightUpdates:
    """Load a full set of weights, and report the parameters that it did not contain.

    vLLM itself only warns about them. But after a sleep that discarded the weights, their memory is undefined.
    """

    def __new__(cls, *, vllm_config: Any, rank: int, **_: Any) -> Self:
        """Prepare the process of a worker before anything else happens in it."""
        log_as_worker(rank)
        set_up_caches(vllm_config.parallel_config.assigned_physical_gpu_ids)
        return super().__new__(cls)

    vllm_config: Any
    model_config: Any
    model_runner: Any
    get_model: Callable[[], Any]
    start_weight_update: Callable[[], None]
    finish_weight_update: Callable[[], None]

    def start_tracked_update(self) -> None:
        """Start an update by vLLM's own transfers, whose parts come to `update_weights`."""
        names = parameter_names(self.get_model())
        name_loaders(self.get_model())
        self.start_weight_update()
        self._missing = track_loading(self.get_model(), names)

    def finish_tracked_update(self) -> list[str]:
        """Return the names of the parameters that the update did not contain."""
        self.finish_weight_update()
        return sorted(self._missing)

    def start_host_update(self) -> None:
        """Start an update by Buckets, whose parts come to `load_host_bucket`."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.get_model()
        names = parameter_names(model)
        name_loaders(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        self._missing = track_loading(model, names)

    def load_host_bucket(self, bucket: Bucket) -> None:
        from vllm.config import set_current_vllm_config

        # vLLM keeps tensors until their layer is complete; by then the bucket's memory may hold others.
        weights = ((name, tensor.clone()) for name, tensor in unpack(bucket))
        with set_current_vllm_config(self.vllm_config):
            self.get_model().load_weights(weights)

    def finish_host_update(self) -> list[str]:
        """Return the names of the parameters that no bucket contained."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
        if self.model_runner.device.type == "cpu":
            pack_again(model)
        return sorted(self._missing)


def pack_again(model: nn.Module) -> None:
    """Pack new weights for the kernels of CPUs. vLLM does so in all layers but these two, in which it would use the old
    copy, or take unpacked weights for packed ones."""
    for name, layer in model.named_modules(remove_duplicate=False):
        method: Any = getattr(layer, "quant_method", None)
        if name.rpartition(".")[2] == "lm_head":  # one that is tied to the embedding is not reloaded
            method.process_weights_after_loading(layer)
        elif (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def name_loaders(model: nn.Module) -> None:
    """Give names to loaders that are partial functions (MiniMax-M2), because vLLM reads their names in updates."""
    for weight in model.parameters():
        if isinstance(loader := getattr(weight, "weight_loader", None), partial):
            loader.__dict__.setdefault("__name__", "partial")


def parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def track_loading(model: nn.Module, names: set[str]) -> set[str]:
    """Return the names of the parameters that a started update has to bring. Each call of the model's `load_weights`
    removes what it loads.

    Args:
        names: of the parameters before the update started, tied ones once. They include those that vLLM computes from
            others (MLA), which are gone when an update has started.
    """
    model.__dict__.pop("load_weights", None)  # of the previous update
    missing = names & parameter_names(model)
    load = model.load_weights

    def tracked(weights: Any) -> Any:
        with DirectWrites(model):
            loaded = load(weights)
        if loaded is None:  # a few models do not return what they loaded
            missing.clear()
        else:
            missing.difference_update(loaded)
        return loaded

    object.__setattr__(model, "load_weights", tracked)
    return missing
