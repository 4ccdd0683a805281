"""Tensor parallelism: ranks hold heads of the attention, columns of the MLPs and rows of the embedding."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dsaccel.modules import GeluMLP, SwiGLU, TransformerBlock, WindowAttention
from dsaccel.parallel.tensor_check import check_model, is_decoder
from dsaccel.parallel.tensor_hooks import (
    enter,
    gather_gradients,
    leave_replicated,
    leave_whole,
    replicate_norm,
    split_score_bias,
)
from dsaccel.parallel.tensor_layout import canonical_layout, qkv_rows, rows_by_kind, rows_by_rank

__all__ = ["canonical_layout", "rows_by_kind", "rows_by_rank", "tensor_parallel"]

Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(
    model: Model, mesh: DeviceMesh, *, sequence_parallel: bool = True, sharded_logits: bool = False
) -> Model:
    """Splits the layers of ``model`` over the ranks of ``mesh``, in place.

    Every `WindowAttention`, `SwiGLU`, `GeluMLP` and `TransformerBlock` in ``model`` is split, and of a
    `SlidingWindowLM`, or a part of one with the same names, the embedding, which is the head, too. ``model`` is called
    as before: each rank passes the same inputs and gets the whole outputs, equal to those of one process to rounding;
    so are the gradients. Names of parameters stay. With ``n`` ranks, each holds

    - ``1/n`` of the query heads and of the key and value heads: rows of ``qkv``, columns of ``proj``;
    - ``1/n`` of the hidden components of an MLP;
    - ``1/n`` of the vocabulary: rows of the embedding, by which it computes ``1/n`` of the logits;
    - all norms.

    Forward, a block adds up what the ranks have twice, after attention and MLP, and so does backward: two all-reduces.
    With ``sequence_parallel`` each is a reduce-scatter and, where all tokens are needed again, an all-gather: as many
    bytes, but what is kept between them, for which memory grows most, is ``1/n`` of the sequence on each rank.

    Parameters of what is split become DTensors on ``mesh``; the values are those of its first rank. All else in
    ``model`` is left alone. The rows of ``qkv`` are put into another order, see `canonical_layout`.

    Args:
        model: the same on every rank, on its device. Make optimizers afterwards; put context parallelism, activation
            checkpointing and ``fully_shard`` on top afterwards, too.
        mesh: of one dimension; neighbours with the fastest links.
        sequence_parallel: whether, between attention and MLP, each rank keeps a slice of the sequence; of any length,
            slices need not be equally long. Default: True.
        sharded_logits: whether a `SlidingWindowLM` returns its logits as a DTensor that is split along the vocabulary,
            for `torch.distributed.tensor.parallel.loss_parallel`. Default: False, they are plain and whole.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, or ``mesh`` no DeviceMesh.
        ValueError: ``mesh`` has not one dimension; heads, hidden components or vocabulary are no multiple of the ranks;
            a layer is none that can be split (quantized, with adapters, a `SwinAttention`), or already is; or nothing
            can be split. Nothing was changed then.

    Sources: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation Recomputation in
    Large Transformer Models", 2022, section 4.2.2 (sequence parallelism).
    """
    check_model(model, mesh)
    owners = _owners(model)
    modules = list(model.modules())
    _order_rows(modules, mesh.size())
    decoders = [module for module in modules if is_decoder(module)]
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    chained = {block for decoder in decoders for block in decoder.get_submodule("blocks").children()}
    inside: set[nn.Module] = set()
    for module in modules:
        if isinstance(module, TransformerBlock):
            inside.update((module.attn, module.mlp))
            _split_block(module, mesh, sequence_parallel, chained=module in chained)
    for module in modules:
        parted = sequence_parallel and module in inside
        if isinstance(module, WindowAttention):
            _split_attention(module, mesh, parted=parted)
        elif isinstance(module, (SwiGLU, GeluMLP)):
            _split_mlp(module, mesh, parted=parted)
    for decoder in decoders:
        _split_decoder(decoder, mesh, between, sharded_logits=sharded_logits)
    _share_again(owners)
    return model


def _split_block(block: TransformerBlock, mesh: DeviceMesh, sequence_parallel: bool, *, chained: bool) -> None:
    for norm in (block.norm1, block.norm2):
        replicate_norm(norm, mesh, Shard(1) if sequence_parallel else Replicate())
        if not sequence_parallel:
            leave_whole(norm)
    if sequence_parallel:
        enter(block, mesh, Shard(1))
        if not chained:
            # Whoever calls a block alone knows nothing of slices.
            leave_whole(block)


def _split_attention(attention: WindowAttention, mesh: DeviceMesh, *, parted: bool) -> None:
    split_score_bias(attention, mesh, attention.num_heads)
    enter(attention, mesh, Replicate())
    _split_pair((attention.qkv,), attention.proj, mesh, parted=parted)
    attention.num_heads //= mesh.size()
    attention.num_kv_heads //= mesh.size()
    attention._tensor_parallel_ranks = mesh.size()  # type: ignore[assignment]


def _split_mlp(mlp: SwiGLU | GeluMLP, mesh: DeviceMesh, *, parted: bool) -> None:
    enter(mlp, mesh, Replicate())
    if isinstance(mlp, SwiGLU):
        _split_pair((mlp.gate_proj, mlp.up_proj), mlp.down_proj, mesh, parted=parted)
    else:
        _split_pair((mlp.fc1,), mlp.fc2, mesh, parted=parted)


def _split_pair(first: tuple[nn.Linear, ...], last: nn.Linear, mesh: DeviceMesh, *, parted: bool) -> None:
    for linear in first:
        parallelize_module(linear, mesh, ColwiseParallel())
    style = RowwiseParallel(output_layouts=Shard(1), use_local_output=False) if parted else RowwiseParallel()
    parallelize_module(last, mesh, style)
    if parted:
        gather_gradients(last)


def _split_decoder(decoder: nn.Module, mesh: DeviceMesh, between: Placement, *, sharded_logits: bool) -> None:
    embed, norm = decoder._modules.get("embed"), decoder._modules.get("norm")
    if embed is not None:
        style = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between, use_local_output=between.is_replicate()
        )
        parallelize_module(embed, mesh, style)
        gather_gradients(embed)
    if norm is not None:
        replicate_norm(norm, mesh, between)
        if between.is_replicate():
            leave_whole(norm)
        if embed is not None:
            # The head is the embedding: a product of DTensors, in which each rank has a part of the vocabulary.
            leave_replicated(norm, mesh)
    if not (sharded_logits and embed is not None and norm is not None):
        leave_whole(decoder)


@torch.no_grad()
def _order_rows(modules: list[nn.Module], ranks: int) -> None:
    seen = set()
    for module in modules:
        if isinstance(module, WindowAttention):
            for parameter in module.qkv.parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    parameter.data = rows_by_rank(parameter.data, qkv_rows(module, 1), ranks)


def _owners(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The layers that each shared parameter belongs to."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    return [places for places in owners.values() if len(places) > 1]


def _share_again(owners: list[list[tuple[nn.Module, str]]]) -> None:
    for (module, name), *others in owners:
        for other, other_name in others:
            other.register_parameter(other_name, getattr(module, name))
