"""Where the numbers of quantized_matmul lie and who else is at work: views, odd addresses, threads, earlier calls."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from quantized_matmul_oracle import CASES, draw_rows, draw_weight
from torch import Tensor

import dskernels as dk

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every_second_column": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(1)[:, ::2],
    "part_of_wider_rows": lambda x: torch.nn.functional.pad(x, (3, 5), value=torch.nan)[:, 3:-5],
    "every_second_row": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), 1).flatten(0, 1)[::2],
    "one_row_repeated": lambda x: x[:1].expand_as(x),
    "one_column_repeated": lambda x: x[:, :1].expand_as(x),
    "one_element_further": lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view_as(x),
    "axes_swapped": lambda x: x.unflatten(0, (3, -1)).transpose(0, 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CASES)
def test_views_of_x(name: str, view: str, dtype: torch.dtype, backend: str) -> None:
    weight = draw_weight(CASES[name], 21, 70)
    for rows in (3, 21, 36):
        x = VIEWS[view](draw_rows(rows, 70, dtype=dtype))
        expected = dk.quantized_matmul(x.contiguous(), weight, backend=backend)
        assert torch.equal(dk.quantized_matmul(x, weight, backend=backend), expected)


@pytest.mark.parametrize("name", CASES)
def test_leading_dimensions_without_a_common_stride(name: str, backend: str) -> None:
    """Of stride 0 within one that is not, the other way round, and in pieces: rows that no single stride reaches."""
    weight = draw_weight(CASES[name], 21, 70)
    for view in (
        draw_rows(3, 1, 70).expand(3, 4, 70),
        draw_rows(1, 4, 70).expand(3, 4, 70),
        draw_rows(2, 1, 3, 70).expand(2, 4, 3, 70),
        draw_rows(2, 1, 1, 70).expand(2, 3, 4, 70),
        draw_rows(1, 1, 70).expand(3, 4, 70),
        draw_rows(5, 6, 70)[::2, ::3],
        draw_rows(2, 3, 4, 70).permute(2, 0, 1, 3),
    ):
        expected = dk.quantized_matmul(view.contiguous(), weight, backend=backend)
        assert torch.equal(dk.quantized_matmul(view, weight, backend=backend), expected)


def at_odd_address(values: Tensor, offset: int) -> Tensor:
    """The same values ``offset`` bytes into a buffer, as files hold them when they are mapped into memory."""
    buffer = bytearray(offset + values.nbytes)
    buffer[offset:] = values.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(buffer, dtype=values.dtype, offset=offset).view(values.shape)


@pytest.mark.parametrize("offset", [1, 2, 4, 9])
@pytest.mark.parametrize("name", CASES)
def test_odd_addresses(name: str, offset: int, backend: str) -> None:
    if backend == "cuda" and offset % 4 != 0:
        pytest.skip("files are not mapped into the memory of a GPU, where elements are aligned to their size")
    for columns in (64, 100):
        weight, bias = draw_weight(CASES[name], 35, columns), torch.randn(35)
        moved = [at_odd_address(t, offset) if isinstance(t, Tensor) and t.dim() else t for t in weight]
        for rows in (1, 4, 18):
            x = draw_rows(rows, columns)
            expected = dk.quantized_matmul(x, weight, bias, backend=backend)
            arguments = at_odd_address(x, offset), dk.QuantizedWeight(*moved), at_odd_address(bias, offset)
            assert torch.equal(dk.quantized_matmul(*arguments, backend=backend), expected)


@pytest.mark.parametrize("name", CASES)
def test_strided_bias(name: str, backend: str) -> None:
    weight, x = draw_weight(CASES[name], 35, 100), draw_rows(4, 100)
    for dtype in DTYPES:
        bias = torch.randn(35).to(dtype)
        expected = dk.quantized_matmul(x, weight, bias, backend=backend)
        for view in (torch.stack((bias, -bias), 1)[:, 0], torch.cat((bias[:1], bias))[1:]):
            assert torch.equal(dk.quantized_matmul(x, weight, view, backend=backend), expected)
        one = bias[:1].expand(35)
        expected = dk.quantized_matmul(x, weight, one.contiguous(), backend=backend)
        assert torch.equal(dk.quantized_matmul(x, weight, one, backend=backend), expected)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_threads_gives_the_same_bits(name: str, backend: str, threads: Callable[[int], None]) -> None:
    if backend == "reference" and not CASES[name].is_integer:
        pytest.skip("sums of floats are torch's in the reference")
    weight, bias = draw_weight(CASES[name], 1031, 1100), torch.randn(1031)
    for rows in (1, 3, 40):
        x = draw_rows(rows, 1100)
        results = []
        for number in (1, 2, 3, 2):
            threads(number)
            results.append(dk.quantized_matmul(x, weight, bias, backend=backend))
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", CASES)
def test_no_call_knows_of_another(name: str, backend: str) -> None:
    """Neither of larger ones, nor of those with NaN, nor of other weights, whatever memory they left behind."""
    calls = []
    for rows, out_features, columns in ((65, 130, 576), (1, 17, 33), (5, 130, 576), (2, 3, 1), (33, 40, 300)):
        x = draw_rows(rows, columns)
        calls.append((x, draw_weight(CASES[name], out_features, columns), torch.randn(out_features)))
        calls.append((torch.full_like(x, torch.nan), *calls[-1][1:]))
        calls.append((x * 1e-30, *calls[-1][1:]))
    first = [dk.quantized_matmul(*call, backend=backend) for call in calls]
    for index in torch.randperm(len(calls) * 3) % len(calls):
        result = dk.quantized_matmul(*calls[index], backend=backend)
        assert torch.equal(result.nan_to_num(7.0), first[index].nan_to_num(7.0))


@pytest.mark.parametrize("name", CASES)
def test_concurrent_callers(name: str, backend: str, threads: Callable[[int], None]) -> None:
    threads(1)
    weight = draw_weight(CASES[name], 130, 576)
    inputs = [draw_rows(rows, 576) for rows in (1, 40, 3, 17) * 4]
    expected = [dk.quantized_matmul(x, weight, backend=backend) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            results = pool.map(lambda x: dk.quantized_matmul(x, weight, backend=backend), inputs)
            assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def weights_of_all_kinds() -> Iterator[dk.QuantizedWeight]:
    for case in CASES.values():
        weight = draw_weight(case, 19, 100)
        yield weight
        yield weight._replace(input_order=torch.randperm(100))


def assert_same(one: dk.QuantizedWeight, other: dk.QuantizedWeight) -> None:
    assert type(one) is dk.QuantizedWeight
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b


def test_copies_and_pickles(backend: str) -> None:
    x = draw_rows(5, 100)
    for weight in weights_of_all_kinds():
        expected = dk.quantized_matmul(x, weight, backend=backend)
        for other in (copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
            assert_same(other, weight)
            assert torch.equal(dk.quantized_matmul(x, other, backend=backend), expected)


def test_saved_as_plain_tensors(tmp_path) -> None:
    """What a state dict holds: ``torch.load`` needs no class for it."""
    for weight in weights_of_all_kinds():
        fields = weight._asdict()
        tensors = {name: field for name, field in fields.items() if isinstance(field, Tensor)}
        file = io.BytesIO()
        torch.save(tensors, file)
        file.seek(0)
        assert_same(dk.QuantizedWeight(**{**fields, **torch.load(file, weights_only=True)}), weight)
        memory = torch.load(saved(tensors, tmp_path / "weight.pt"), weights_only=True, mmap=True)
        assert_same(dk.QuantizedWeight(**{**fields, **memory}), weight)


def saved(tensors: dict[str, Tensor], path):
    torch.save(tensors, path)
    return path


def test_safetensors(tmp_path, backend: str) -> None:
    reason = "safetensors (of the extra huggingface) is not installed"
    safetensors = pytest.importorskip("safetensors.torch", reason=reason)
    x = draw_rows(5, 100)
    for weight in weights_of_all_kinds():
        fields = weight._asdict()
        tensors = {name: field for name, field in fields.items() if isinstance(field, Tensor)}
        safetensors.save_file(tensors, tmp_path / "weight.safetensors")
        loaded = dk.QuantizedWeight(**{**fields, **safetensors.load_file(tmp_path / "weight.safetensors")})
        assert_same(loaded, weight)
        expected = dk.quantized_matmul(x, weight, backend=backend)
        assert torch.equal(dk.quantized_matmul(x, loaded, backend=backend), expected)


def test_codes_are_not_copied(backend: str) -> None:
    """A weight is what its tensors hold now: nothing is packed away at the first call."""
    x = draw_rows(3, 100)
    for case in CASES.values():
        weight, other = draw_weight(case, 19, 100), draw_weight(case, 19, 100)
        dk.quantized_matmul(x, weight, backend=backend)
        for mine, its in zip(weight, other, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(its)
        expected = dk.quantized_matmul(x, other, backend=backend)
        assert torch.equal(dk.quantized_matmul(x, weight, backend=backend), expected)
