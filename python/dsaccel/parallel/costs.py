"""What a plan costs before it is tried: idle time of pipelines, bytes that are sent, bytes that are kept.

Bytes are those that one process sends in one step. Collectives are counted as rings do them, which is the least that is
possible where each process has one link: an all-gather or a reduce-scatter of ``S`` bytes over ``n`` processes sends
``(n - 1) / n * S``, an all-reduce both, ``2 (n - 1) / n * S`` (Patarasuk and Yuan, "Bandwidth Optimal All-reduce
Algorithms for Clusters of Workstations", 2009, section 3).
"""

from __future__ import annotations

from typing import Any

from dskernels.checks import is_integer, is_number, wrong_type, wrong_value


def pipeline_bubble(stages: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """The share of a step in which a rank of a pipeline waits: ``(p - 1) / (v * m + p - 1)``.

    The same for GPipe and 1F1B, which differ in memory. All stages are taken to be as slow, and sending to be free.

    Args:
        stages: ``p``, ranks of the pipeline.
        microbatches: ``m``.
        stages_per_rank: ``v``: 1 for GPipe and 1F1B, more for the interleaved schedule. Default: 1.

    Sources: Huang et al., "GPipe", 2019, section 2.3; Narayanan et al., "Efficient Large-Scale Language Model Training
    on GPU Clusters Using Megatron-LM", 2021, section 2.2: there the idle time over the working time,
    ``(p - 1) / (v * m)``.
    """
    _check_counts(stages=stages, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return (stages - 1) / (stages_per_rank * microbatches + stages - 1)


def replica_bytes(gradient_bytes: float, replicas: int) -> float:
    """What DistributedDataParallel sends: one all-reduce of the gradients, ``2 (n - 1) / n`` times their bytes.

    Args:
        gradient_bytes: of all gradients.
        replicas: ``n``, ``dp * cp`` of a plan.

    Source: Patarasuk and Yuan, 2009, section 3.
    """
    _check_counts(replicas=replicas)
    _check_amounts(gradient_bytes=gradient_bytes)
    return 2 * _ring(gradient_bytes, replicas)


def sharded_bytes(parameter_bytes: float, processes: int, zero: int, *, kept_bytes: float = 0.0) -> float:
    """What sharding over ``n`` processes sends, gradients and parameters in one dtype.

    ``(n - 1) / n`` of the parameters' bytes, times: for ``zero`` 3, 3: gathered for forward, again for backward, and
    gradients reduced and scattered; for 2, 2: gathered once; for 1, 3: PyTorch's ZeroRedundancyOptimizer all-reduces
    all gradients and then sends each process's parameters to the others, where the paper needs 2.

    Args:
        parameter_bytes: of all parameters.
        processes: ``n``, ``shard * cp`` of a plan.
        zero: 1, 2 or 3.
        kept_bytes: those of them that ``zero = 3`` keeps from forward to backward: what is in no layer (embedding, last
            norm). Default: none.

    Source: Rajbhandari et al., "ZeRO", 2020, section 7.
    """
    _check_counts(processes=processes)
    _check_amounts(parameter_bytes=parameter_bytes, kept_bytes=kept_bytes)
    if zero not in (1, 2, 3):
        raise wrong_value("zero", "1, 2 or 3", zero)
    times = {1: 3, 2: 2, 3: 3}[zero]
    twice = kept_bytes if zero == 3 else 0.0
    return times * _ring(parameter_bytes, processes) - _ring(twice, processes)


def tensor_bytes(tokens: int, dim: int, layers: int, processes: int, itemsize: int = 2) -> float:
    """What tensor parallelism sends in the layers: ``8 (n - 1) / n * tokens * dim`` numbers a layer.

    Attention and MLP each put the hidden states together before and add them up after, and so do their gradients: with
    sequence parallelism four all-gathers and four reduce-scatters, without it four all-reduces, which is the same. Two
    thirds more are sent where activations are recomputed in full. Embedding and head come in addition.

    Args:
        tokens: ``B * N`` of a process.
        dim: components of a token.
        layers: of a stage.
        processes: ``n``.
        itemsize: bytes of a number. Default: 2.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
    """
    _check_counts(tokens=tokens, dim=dim, layers=layers, processes=processes, itemsize=itemsize)
    return 8 * _ring(tokens * dim * itemsize, processes) * layers


def pipeline_bytes(tokens: int, dim: int, stages_per_rank: int = 1, itemsize: int = 2) -> float:
    """What a rank in the middle of a pipeline sends: hidden states on, and their gradients back, ``2 tokens * dim``.

    Args:
        tokens: ``B * N`` of all microbatches together.
        dim: components of a token.
        stages_per_rank: so many times as much with an interleaved schedule. Default: 1.
        itemsize: bytes of a number. Default: 2.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
    section 3.2.
    """
    _check_counts(tokens=tokens, dim=dim, stages_per_rank=stages_per_rank, itemsize=itemsize)
    return 2.0 * tokens * dim * stages_per_rank * itemsize


def halo_bytes(batch: int, reach: int, num_kv_heads: int, head_dim: int, layers: int, itemsize: int = 2) -> float:
    """What context parallelism of windowed attention sends: keys and values of the window forward, gradients back.

    ``4 * batch * reach * num_kv_heads * head_dim`` numbers a layer, whatever the length of the sequence, of a process
    whose window ends in the neighbour's slice. Where all of the sequence goes around, that has its length in place of
    ``reach``.

    Args:
        batch: rows.
        reach: tokens that the window sees beyond the slice: ``left + right``.
        num_kv_heads, head_dim: of keys and values.
        layers: of a stage.
        itemsize: bytes of a number. Default: 2.

    Source: compare Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3.
    """
    _check_counts(batch=batch, num_kv_heads=num_kv_heads, head_dim=head_dim, layers=layers, itemsize=itemsize)
    _check_amounts(reach=reach)
    return 4.0 * batch * reach * num_kv_heads * head_dim * layers * itemsize


def state_bytes(parameters: float, processes: int, zero: int, *, optimizer_bytes: float = 12.0) -> float:
    """What a process keeps of a model in half precision with Adam: parameters, gradients, and the optimizer's state.

    ``2 + 2 + K`` bytes a parameter, with ``K = 12`` (a copy, momentum and variance in float32). Over ``N`` processes
    ``zero`` 0 divides nothing, 1 divides ``K``, 2 gradients as well, 3 all. Activations come in addition.

    Args:
        parameters: how many.
        processes: ``N``.
        zero: 0 to 3.
        optimizer_bytes: ``K``, 0 where the state is kept in the host's memory. Default: 12.

    Source: Rajbhandari et al., "ZeRO", 2020, section 3.1 and figure 1: 7.5 billion on 64 GPUs are 120, 31.4, 16.6 and
    1.9 GB.
    """
    _check_counts(processes=processes)
    _check_amounts(parameters=parameters, optimizer_bytes=optimizer_bytes)
    if not is_integer(zero) or zero not in range(4):
        raise wrong_value("zero", "0, 1, 2 or 3", zero)
    shares = [1 / processes if zero >= stage else 1.0 for stage in (3, 2, 1)]
    return parameters * sum(size * share for size, share in zip((2, 2, optimizer_bytes), shares, strict=True))


def _ring(size: float, processes: int) -> float:
    return (processes - 1) / processes * size


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if not is_integer(count):
            raise wrong_type(name, "an integer", count)
        if count < 1:
            raise wrong_value(name, "at least 1", count)


def _check_amounts(**amounts: Any) -> None:
    for name, amount in amounts.items():
        if not is_number(amount):
            raise wrong_type(name, "a number", amount)
        if not amount >= 0:
            raise wrong_value(name, "a number not below 0", amount)
