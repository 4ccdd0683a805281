"""What window_attention_varlen says to wrong arguments, and what its kernel checks for itself."""

from __future__ import annotations

import pytest
import torch

import dskernels as dk
from dskernels.window_attention.varlen_schema import varlen_forward_op

Q, K, V = torch.randn(12, 6, 8), torch.randn(14, 3, 8), torch.randn(14, 3, 4)
CU_Q, CU_K = torch.tensor([0, 5, 12]), torch.tensor([0, 7, 14])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": None}, TypeError, "q: expected a tensor, got None"),
        ({"cu_seqlens_k": [0, 14]}, TypeError, r"cu_seqlens_k: expected a tensor, got \[0, 14\] \(list\)"),
        ({"q": Q[None]}, ValueError, r"q: expected 3 dimensions \[T, Hq, D\], got shape \[1, 12, 6, 8\]"),
        ({"v": V[..., :0]}, ValueError, "v: expected at least one head of at least one component"),
        ({"k": K.half()}, ValueError, "k: expected the dtype of q, torch.float32, got torch.float16"),
        ({"k": K[..., :6]}, ValueError, "k: expected the head dimension of q, 8, got 6"),
        ({"q": Q[:, :4]}, ValueError, "k: expected a number of heads that divides the 4 of q, got 3"),
        ({"v": V[:9]}, ValueError, r"v: expected length and heads of k, \[14, 3, 8\], got shape \[9, 3, 4\]"),
        ({"cu_seqlens_q": CU_Q.float()}, ValueError, "cu_seqlens_q: expected dtype int32 or int64, got torch.float32"),
        ({"cu_seqlens_q": CU_Q[None]}, ValueError, r"cu_seqlens_q: expected shape \[n \+ 1\], got shape \[1, 3\]"),
        ({"cu_seqlens_q": CU_Q[:0]}, ValueError, r"cu_seqlens_q: expected shape \[n \+ 1\], got shape \[0\]"),
        ({"cu_seqlens_k": CU_K.to("meta")}, ValueError, "cu_seqlens_k: expected the device of q, cpu, got meta"),
        ({"cu_seqlens_k": CU_K[:2]}, ValueError, "cu_seqlens_k: expected as many offsets as cu_seqlens_q, 3, got 2"),
        ({"cu_seqlens_q": CU_Q + 1}, ValueError, "cu_seqlens_q: expected 0 as the first offset, got 1"),
        (
            {"cu_seqlens_q": torch.tensor([0, 9, 5])},
            ValueError,
            "cu_seqlens_q: expected offsets that do not decrease, got 5 after 9",
        ),
        (
            {"cu_seqlens_k": torch.tensor([0, 7, 15])},
            ValueError,
            "cu_seqlens_k: expected a last offset up to S = 14, got 15",
        ),
        ({"window": 3}, TypeError, r"window: expected a pair \(left, right\)"),
        ({"sink": torch.ones(3)}, ValueError, r"sink: expected shape \[Hq\] = \[6\], got shape \[3\]"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a number from 1e-30 to 1e30, or None, got -1.0"),
        ({"scale": "1"}, TypeError, "scale: expected a number or None"),
        ({"return_lse": None}, TypeError, "return_lse: expected a bool"),
        ({"rope": dk.rope_table(10, 20)}, ValueError, "rope: expected rotary_dim up to the head dimension 8, got 10"),
        (
            {"rope": dk.rope_table(8, 6)},
            IndexError,
            "rope: the last key of sequence 0 stands at position 6, the table holds 6",
        ),
        (
            {"rope": dk.rope_table(8, 20), "cu_seqlens_k": torch.tensor([0, 8, 14])},
            IndexError,
            "rope: the first query of sequence 1 stands at position -1",
        ),
        ({"backend": "triton"}, RuntimeError, "window_attention_varlen: backend 'triton' .* cannot serve this call"),
    ],
)
def test_wrong_arguments(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"q": Q, "k": K, "v": V, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "window": (3, 0), **changes}
    with pytest.raises(error, match=message):
        dk.window_attention_varlen(**arguments)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 5, 12], r"cu_seqlens_q\[0\]: expected 0 to 0, got 1"),
        ([0, 9, 5], r"cu_seqlens_q\[2\]: expected 9 to 12, got 5"),
        ([0, 5, 13], r"cu_seqlens_q\[2\]: expected 5 to 12, got 13"),
        ([0, 5], "cu_seqlens_k: expected as many offsets as cu_seqlens_q, 2, got 3"),
    ],
)
def test_the_kernel_checks_offsets_itself(offsets: list[int], message: str) -> None:
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    with pytest.raises(RuntimeError, match=message):
        varlen_forward_op(Q, K, V, torch.tensor(offsets), CU_K, None, None, None, None, None, 1.0, 0.0, False)


def test_the_kernel_checks_positions_itself() -> None:
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    table = dk.rope_table(8, 6)
    with pytest.raises(RuntimeError, match="cos, sin: expected positions 2 to 6, got 6 rows"):
        varlen_forward_op(Q, K, V, CU_Q, CU_K, table.cos, table.sin, None, None, None, 1.0, 0.0, False)
