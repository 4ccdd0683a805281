"""What window_attention_decode says to wrong arguments, and what its kernel checks for itself."""

from __future__ import annotations

import pytest
import torch

import dskernels as dk
from dskernels.window_attention.decode_schema import decode_op

Q, K, V = torch.randn(2, 6, 2, 8), torch.randn(2, 3, 10, 8), torch.randn(2, 3, 10, 4)
LENGTHS = torch.tensor([10, 15])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": None}, TypeError, "q: expected a tensor, got None"),
        ({"cache_lengths": [10, 15]}, TypeError, r"cache_lengths: expected a tensor, got \[10, 15\] \(list\)"),
        ({"q": Q[0]}, ValueError, r"q: expected 4 dimensions \[B, Hq, Nq, D\], got shape \[6, 2, 8\]"),
        ({"v_cache": V[..., :0]}, ValueError, "v_cache: expected at least one head of at least one component"),
        ({"q": Q.long()}, ValueError, "q: expected dtype float32, bfloat16, float16 or float64, got torch.int64"),
        ({"k_cache": K.long()}, ValueError, "k_cache: expected dtype float32, bfloat16, float16 or float64"),
        ({"v_cache": V.half()}, ValueError, "v_cache: expected the dtype of k_cache, torch.float32, got torch.float16"),
        ({"k_cache": K.to("meta")}, ValueError, "k_cache: expected the device of q, cpu, got meta"),
        ({"k_cache": K[:1]}, ValueError, r"k_cache: expected batch and head dimension of q, \[2, 6, 2, 8\]"),
        ({"q": Q[:, :4]}, ValueError, "k_cache: expected a number of heads that divides the 4 of q, got 3"),
        ({"v_cache": V[:, :, :9]}, ValueError, r"v_cache: expected batch, heads and slots of k_cache, \[2, 3, 10, 8\]"),
        ({"cache_lengths": LENGTHS.float()}, ValueError, "cache_lengths: expected dtype int32 or int64"),
        ({"cache_lengths": LENGTHS[:1]}, ValueError, r"cache_lengths: expected shape \[B\] = \[2\], got shape \[1\]"),
        ({"cache_lengths": LENGTHS.to("meta")}, ValueError, "cache_lengths: expected the device of q, cpu, got meta"),
        ({"cache_lengths": -LENGTHS}, ValueError, r"cache_lengths\[0\]: expected a number of tokens, got -10"),
        (
            {"window": (9, 0)},
            ValueError,
            r"cache_lengths\[1\]: expected up to 10 tokens, the slots of the cache, since 2 queries may see .* 11",
        ),
        (
            {"window": (None, 0)},
            ValueError,
            r"cache_lengths\[1\]: expected up to 10 tokens.* may see all tokens, got 15",
        ),
        ({"window": 3}, TypeError, r"window: expected a pair \(left, right\)"),
        ({"keys_rotated": 1}, TypeError, "keys_rotated: expected a bool, got 1"),
        ({"return_lse": None}, TypeError, "return_lse: expected a bool"),
        ({"sink": torch.ones(3)}, ValueError, r"sink: expected shape \[Hq\] = \[6\], got shape \[3\]"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a number from 1e-30 to 1e30, or None, got -1.0"),
        ({"scale": "1"}, TypeError, "scale: expected a number or None"),
        ({"rope": dk.rope_table(10, 20)}, ValueError, "rope: expected rotary_dim up to the head dimension 8, got 10"),
        (
            {"rope": dk.rope_table(8, 14)},
            IndexError,
            "rope: the last token of sequence 1 stands at position 14, the table holds 14 positions",
        ),
        # Of float64, which it does not serve even where the emulator has been loaded.
        ({"backend": "cuda", "q": Q.double()}, RuntimeError, "cuda"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_message(changes: dict, error: type, message: str) -> None:
    arguments = {"q": Q, "k_cache": K, "v_cache": V, "cache_lengths": LENGTHS, "window": (8, 0), **changes}
    with pytest.raises(error, match=message):
        dk.window_attention_decode(**arguments)


def test_explicit_cpu_refuses_what_it_cannot_serve() -> None:
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    for changes, reason in (
        ({"q": Q.double()}, "not torch.float64"),
        ({"k_cache": K.double(), "v_cache": V.double()}, "caches"),
    ):
        arguments = {"q": Q, "k_cache": K, "v_cache": V, "cache_lengths": LENGTHS, "window": (8, 0), **changes}
        with pytest.raises(RuntimeError, match=reason):
            dk.window_attention_decode(**arguments, backend="cpu")
        assert dk.window_attention_decode(**arguments).isfinite().all()


TABLE = dk.rope_table(8, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: Q[:, :, :, :6]}, "k_cache, v_cache: expected"),
        ({0: Q[0]}, "expected 4 dimensions"),
        ({0: Q[:, :5]}, "expected a multiple of 3 heads, got 5"),
        ({1: K[:1]}, "k_cache, v_cache: expected"),
        ({2: V[:, :, :9]}, "k_cache, v_cache: expected"),
        ({3: LENGTHS.float()}, "cache_lengths: expected int32 or int64"),
        ({3: LENGTHS[:1]}, "cache_lengths: expected int32 or int64"),
        ({3: -LENGTHS}, r"cache_lengths\[0\]: expected a number of tokens, got -10"),
        ({3: LENGTHS + 6}, r"cache_lengths\[1\]: expected up to 20 tokens, the rows of the table, got 21"),
        ({7: None}, r"cache_lengths\[1\]: expected up to 10 tokens"),
        ({7: 9}, r"cache_lengths\[1\]: expected up to 10 tokens, .* 2 queries that look back 9, got 15"),
        ({6: torch.ones(5)}, "sink: expected"),
        ({5: TABLE.sin[:, :2]}, "cos, sin: expected"),
    ],
    ids=str,
)
def test_kernel_checks_what_memory_safety_needs(changes: dict[int, object], message: str) -> None:
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    arguments = [Q, K, V, LENGTHS, TABLE.cos, TABLE.sin, None, 8, 0, 0.3, 0.0, False, False]
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(RuntimeError, match=message):
        decode_op(*arguments)
