"""Each operator says whether its results are worth keeping where a forward is computed again."""

from __future__ import annotations

import torch

import dskernels as dk

# Why those that are not kept are not.
RECOMPUTED = {
    "clip_and_scale_": "works on gradients",
    "chunk_power_sums": "works on gradients",
    "chunk_scale": "works on gradients",
    "clip_factor": "works on gradients",
    "grad_norm": "works on gradients",
    "table_power_sum": "works on gradients",
    "table_scale": "works on gradients",
    "quantized_matmul": "most of what a block writes, and no dearer than the products of nn.Linear",
    "window_attention_decode": "has no gradient",
}


def test_every_operator_has_decided() -> None:
    kept = {(op.namespace, op._schema.name.split("::")[1]) for op in dk.kept_ops()}
    assert len(kept) == len(dk.kept_ops())
    every = {
        (namespace, schema.name.split("::")[1])
        for schema in torch._C._jit_get_all_schemas()
        if (namespace := schema.name.split("::")[0]) in ("dskernels", "dskernels_cuda", "dskernels_triton")
    }
    assert kept <= every
    for namespace, name in every - kept:
        assert name.endswith("_backward") or name in RECOMPUTED, f"{namespace}::{name}: keep, or say here why not"
    assert not {name for _, name in kept} & set(RECOMPUTED)
    assert set(RECOMPUTED) == {name for _, name in every - kept if not name.endswith("_backward")}


def test_backends_agree() -> None:
    names: dict[str, set[str]] = {}
    for op in dk.kept_ops():
        assert isinstance(op, torch._ops.OpOverload)
        names.setdefault(op.namespace, set()).add(op._schema.name.split("::")[1])
    assert names["dskernels"] == names["dskernels_cuda"] == names["dskernels_triton"]
    assert names["dskernels"] == {"swin_attention", "window_attention", "window_attention_varlen"}
