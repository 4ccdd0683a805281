"""What window_attention says to wrong arguments: which one, what was expected, what came."""

from __future__ import annotations

import pytest
import torch

import dskernels as dk

Q, K, V = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 4)
TABLE = dk.rope_table(8, 16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, r"q: expected a tensor, got \[1.0\] \(list\)"),
        ({"q": Q[0]}, ValueError, r"q: expected 4 dimensions \[B, Hq, Nq, D\], got shape \[6, 5, 8\]"),
        ({"v": V[..., :0]}, ValueError, r"v: expected at least one head of at least one component"),
        ({"k": K[:, :0], "v": V[:, :0]}, ValueError, "k: expected at least one head"),
        ({"q": Q.long(), "k": K.long(), "v": V.long()}, ValueError, "q: expected dtype float32.*got torch.int64"),
        ({"k": K.bfloat16()}, ValueError, "k: expected the dtype of q, torch.float32, got torch.bfloat16"),
        ({"v": V.double()}, ValueError, "v: expected the dtype of q"),
        ({"k": K.to("meta")}, ValueError, "k: expected the device of q, cpu, got meta"),
        ({"k": K[..., :7]}, ValueError, "k: expected batch and head dimension of q"),
        ({"k": K[:1], "v": V[:1]}, ValueError, "k: expected batch and head dimension of q"),
        ({"q": Q[:, :4]}, ValueError, "k: expected a number of heads that divides the 4 of q, got 3"),
        ({"v": V[:, :, :6]}, ValueError, r"v: expected batch, heads and length of k, \[2, 3, 7, 8\], got shape"),
        ({"v": V[:, :2]}, ValueError, "v: expected batch, heads and length of k"),
        ({"window": 5}, TypeError, r"window: expected a pair \(left, right\), got 5 \(int\)"),
        ({"window": (1, 2, 3)}, TypeError, "window: expected a pair"),
        ({"window": (1.0, 0)}, TypeError, r"window left: expected an int or None, got 1.0 \(float\)"),
        ({"window": (1, True)}, TypeError, r"window right: expected an int or None, got True \(bool\)"),
        ({"scale": "x"}, TypeError, "scale: expected a number or None"),
        ({"scale": True}, TypeError, "scale: expected a number or None"),
        ({"query_offset": 1.5}, TypeError, "query_offset: expected an int or None"),
        ({"query_offset": False}, TypeError, "query_offset: expected an int or None"),
        ({"return_lse": 1}, TypeError, "return_lse: expected a bool"),
        ({"rope": (TABLE.cos, TABLE.sin)}, TypeError, "rope: expected a RopeTable"),
        ({"rope": TABLE._replace(cos=TABLE.cos.half())}, ValueError, "rope.cos: expected dtype float32"),
        ({"rope": TABLE._replace(sin=TABLE.sin.to("meta"))}, ValueError, "rope.sin: expected the device of q"),
        ({"rope": TABLE._replace(sin=TABLE.sin[:4])}, ValueError, "rope: expected cos and sin of one shape"),
        (
            {"rope": TABLE._replace(cos=TABLE.cos.clone().requires_grad_())},
            ValueError,
            "rope.cos: expected a table without",
        ),
        ({"rope": dk.rope_table(10, 16)}, ValueError, "rope: expected rotary_dim up to the head dimension 8, got 10"),
        ({"backend": "gpu"}, ValueError, "backend: expected one of cpu, cuda, triton, reference, got 'gpu'"),
    ],
)
def test_wrong_arguments(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"q": Q, "k": K, "v": V, "window": (3, 0), **changes}
    with pytest.raises(error, match=message):
        dk.window_attention(**arguments)


def test_accepted_arguments() -> None:
    expected = dk.window_attention(Q, K, V, window=(3, 0), rope=TABLE)
    strided = TABLE._replace(cos=TABLE.cos.T.contiguous().T)
    assert torch.equal(dk.window_attention(Q, K, V, window=[3, 0], rope=strided), expected)
    assert torch.equal(dk.window_attention(Q, K, V, window=(3, 0), rope=TABLE, query_offset=2), expected)
    out, lse = dk.window_attention(Q, K, V, window=(3, 0), rope=TABLE, return_lse=True)
    assert torch.equal(out, expected)
    assert lse.shape == (2, 6, 5)
