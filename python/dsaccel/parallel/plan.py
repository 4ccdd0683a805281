"""How many processes each kind of parallelism gets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dskernels.checks import is_integer, wrong_type, wrong_value

DIMENSIONS = ("pp", "dp", "shard", "cp", "tp")
SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True)
class ParallelPlan:
    """Sizes of the dimensions of a device mesh, and how each is used.

    ``world_size = pp * dp * shard * cp * tp`` processes. A batch's rows are split over ``dp * shard``, its sequence
    over ``cp``; gradients are averaged over all three.

    Args:
        dp: replicas of the model. Default: 1.
        shard: processes over which a replica's state is sharded, as ``zero`` says. Default: 1.
        tp: processes that share each layer's matrices. Default: 1.
        pp: stages that the layers are split into. Default: 1.
        cp: processes that share each sequence. Default: 1.
        zero: what ``shard`` shards: nothing (0, so that ``shard`` has to be 1), the optimizer's state (1), gradients as
            well (2), parameters as well (3). Default: 3.
        schedule: of the pipeline: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``. Default: ``"1f1b"``.
        microbatches: that a pipeline cuts the rows of a process into. Default: ``pp``.
        sequence_parallel: whether ``tp`` also splits the sequence between the layers' matrices. Default: True.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit, alone or with the others.

    Sources: Rajbhandari et al., "ZeRO", 2020, section 5 (the stages); Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", 2021, section 3 (how the dimensions go together).
    """

    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 3
    schedule: str = "1f1b"
    microbatches: int | None = None
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            _check_positive(name, getattr(self, name))
        if not is_integer(self.zero):
            raise wrong_type("zero", "an integer", self.zero)
        if self.zero not in range(4):
            raise wrong_value("zero", "0, 1, 2 or 3", self.zero)
        if self.schedule not in SCHEDULES:
            raise wrong_value("schedule", f"one of {', '.join(SCHEDULES)}", repr(self.schedule))
        if not isinstance(self.sequence_parallel, bool):
            raise wrong_type("sequence_parallel", "True or False", self.sequence_parallel)
        if self.microbatches is not None:
            _check_positive("microbatches", self.microbatches)
            if self.pp == 1:
                raise wrong_value("microbatches", "None without a pipeline (pp = 1)", self.microbatches)
        self._check_together()

    def _check_together(self) -> None:
        if self.zero == 0 and self.shard > 1:
            raise wrong_value("shard", "1 with zero = 0, which shards nothing (replicas are dp)", self.shard)
        if self.zero == 1 and self.shard > 1 and self.tp > 1:
            # torch.distributed.optim.ZeroRedundancyOptimizer broadcasts plain tensors; those of tp are DTensors.
            raise wrong_value("zero", "2 or 3 with both shard and tp, whose parameters are DTensors", self.zero)

    @classmethod
    def parse(cls, text: str) -> ParallelPlan:
        """The plan of a text such as ``"dp=2,tp=2,zero=2"``; an empty one is one process.

        Raises:
            ValueError: an item is no ``name=value`` of a field, comes twice, or has a value that does not fit.
        """
        fields: dict[str, Any] = {}
        names = [field.name for field in dataclasses.fields(cls)]
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals or name not in names:
                raise wrong_value("plan", f"name=value with a name of {', '.join(names)}", repr(item))
            if name in fields:
                raise wrong_value("plan", "every name once", repr(text))
            fields[name] = _parsed(name, value)
        return cls(**fields)

    def __str__(self) -> str:
        """What `parse` makes the plan of: the fields that are not at their defaults."""
        fields = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return ",".join(f"{name}={str(value).lower()}" for name, value, default in fields if value != default)

    @property
    def world_size(self) -> int:
        """How many processes the plan is for."""
        return self.data_size * self.tp * self.pp

    @property
    def batch_multiple(self) -> int:
        """What the rows of a batch are a multiple of: ``dp * shard``, and of each part as many microbatches."""
        return self.dp * self.shard * ((self.microbatches or self.pp) if self.pp > 1 else 1)

    @property
    def data_size(self) -> int:
        """How many processes hold different parts of a batch: gradients are averaged over them."""
        return self.dp * self.shard * self.cp

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of `DIMENSIONS`, outermost first."""
        return tuple(getattr(self, name) for name in DIMENSIONS)


def _check_positive(name: str, value: Any) -> None:
    if not is_integer(value):
        raise wrong_type(name, "an integer", value)
    if value < 1:
        raise wrong_value(name, "at least 1", value)


def _parsed(name: str, value: str) -> int | bool | str:
    if name == "schedule":
        return value
    if name == "sequence_parallel":
        if value not in ("true", "false"):
            raise wrong_value(name, "true or false", repr(value))
        return value == "true"
    try:
        return int(value)
    except ValueError:
        raise wrong_value(name, "an integer", repr(value)) from None
