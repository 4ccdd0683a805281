"""The example of Swin learns, measures what it says, and its committed results are what it printed."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsaccel.examples import swin, swin_digits, swin_eager, swin_picture, swin_timing
from dsaccel.examples.report import replace_section
from dsaccel.modules import AxialRope2d, RelativePositionBias, SwinAttention, SwinBlock

pytestmark = pytest.mark.usefixtures("one_thread")

DOC = Path(__file__).parents[2] / "docs" / "swin_example.md"


@pytest.fixture
def digits() -> tuple[swin_digits.Digits, swin_digits.Digits]:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    return swin_digits.load_digits()


def attention_of(window: Any, shift: Any, dtype: torch.dtype) -> SwinAttention:
    bias = RelativePositionBias(window, 3)
    attention = SwinAttention(24, 3, window, shift=shift, bias=bias).to(dtype)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def out_and_gradients(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out, (x, *module.parameters()), grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("shift", [0, 2, (1, 3), (0, 1)], ids=str)
@pytest.mark.parametrize("size", [(8, 8), (4, 12), (8, 4), (9, 6), (3, 17)], ids=str)
def test_eager_attention_is_that_of_the_module(size: tuple[int, int], shift: Any, dtype: torch.dtype) -> None:
    attention = attention_of(4, shift, dtype)
    eager = swin_eager.EagerSwinAttention(attention)
    assert [name for name, _ in eager.named_parameters()] == [name for name, _ in attention.named_parameters()]
    x, grad = (torch.randn(2, *size, 24, dtype=dtype) for _ in range(2))
    for found, expected in zip(out_and_gradients(eager, x, grad), out_and_gradients(attention, x, grad), strict=True):
        atol = (3e-6 if dtype == torch.float32 else 1e-13) * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=atol)


def test_eager_attention_takes_sizes_in_turn_and_keeps_a_mask_each() -> None:
    attention = attention_of((2, 4), 1, torch.float64)
    eager = swin_eager.EagerSwinAttention(attention)
    images = [torch.randn(1, *size, 24, dtype=torch.float64) for size in ((4, 8), (8, 4), (4, 8), (2, 4))]
    for x in images:
        torch.testing.assert_close(eager(x), attention(x))
    assert len(eager._masks) == 3


@pytest.mark.parametrize(
    "options",
    [{"cosine": True}, {"rope": AxialRope2d(8, 4)}, {"bias": None}, {"padding": "attend"}],
    ids=["cosine", "rope", "no_bias", "attend"],
)
def test_eager_attention_refuses_what_it_does_not_compute(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attention: expected"):
        swin_eager.EagerSwinAttention(SwinAttention(24, 3, 4, **{"bias": RelativePositionBias(4, 3), **options}))


def test_eager_model_is_a_copy_of_the_model() -> None:
    model = swin_digits.make_model()
    eager = swin_eager.with_eager_attention(model)
    kinds = [Counter(type(module).__name__ for module in m.modules()) for m in (model, eager)]
    assert [kind["EagerSwinAttention"] for kind in kinds] == [0, 4]
    assert [kind["SwinAttention"] for kind in kinds] == [4, 0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in eager.parameters()}
    swin_timing.check_same(model, eager, torch.randn(3, 1, 8, 8))


def test_what_differs_is_not_timed() -> None:
    block = SwinBlock(24, 3, 4, shift=2)
    eager = swin_eager.with_eager_attention(block)
    x = torch.randn(1, 8, 8, 24)
    swin_timing.check_same(block, eager, x)
    eager.attn.shift = (0, 0)
    with pytest.raises(AssertionError, match="output: "):
        swin_timing.check_same(block, eager, x)


def test_digits_are_all_there_and_split_evenly(digits: tuple[swin_digits.Digits, swin_digits.Digits]) -> None:
    train, validation = digits
    assert (len(train.labels), len(validation.labels)) == (1437, 360)
    for part in digits:
        assert part.images.shape == (len(part.labels), 1, 8, 8)
        assert part.images.dtype == torch.float32
        assert (part.images.min(), part.images.max()) == (-1, 1)
        shares = part.labels.bincount() / len(part.labels)
        assert (shares - 0.1).abs().max() < 0.005
    again = swin_digits.load_digits()[1]
    assert torch.equal(again.images, validation.images)
    # Each of scikit-learn's images is in one of the two, with its own label.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pairs = zip(bunch.images, bunch.target.tolist(), strict=True)
    expected = Counter((*image.astype(int).flatten().tolist(), label) for image, label in pairs)
    found: Counter[tuple[int, ...]] = Counter()
    for part in digits:
        pixels = ((part.images + 1) * 8).long().flatten(1)
        found.update(tuple(row) for row in torch.cat((pixels, part.labels[:, None]), 1).tolist())
    assert found == expected


def test_images_move_by_a_pixel_at_most_and_in_every_direction() -> None:
    images = torch.rand(200, 1, 8, 8)
    moved = swin_digits.shifted(images, torch.Generator().manual_seed(0))
    directions = Counter()
    for image, result in zip(images, moved, strict=True):
        found = []
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                expected = torch.full_like(image, -1)
                ys, xs = (slice(max(by, 0), 8 + min(by, 0)) for by in (down, right))
                ys_from, xs_from = (slice(max(-by, 0), 8 + min(-by, 0)) for by in (down, right))
                expected[:, ys, xs] = image[:, ys_from, xs_from]
                if torch.equal(result, expected):
                    found.append((down, right))
        assert len(found) == 1
        directions.update(found)
    assert len(directions) == 9


def test_confusion_and_margins_by_hand() -> None:
    labels = torch.tensor([3, 3, 3, 0])
    counts = swin_digits.confusion(torch.tensor([3, 5, 5, 0]), labels)
    expected = torch.zeros(10, 10, dtype=torch.int64)
    expected[3, 3], expected[3, 5], expected[0, 0] = 1, 2, 1
    assert torch.equal(counts, expected)
    log_p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]).log()
    leads = swin_picture.margins(log_p, torch.tensor([0, 2]))
    torch.testing.assert_close(leads.exp(), torch.tensor([3.5, 0.5]))


def test_few_epochs_teach_it_to_read(digits: tuple[swin_digits.Digits, swin_digits.Digits]) -> None:
    torch.manual_seed(0)
    model, lines = swin_digits.make_model(), list[str]()
    history = swin_digits.train(model, *digits, epochs=8, seed=0, say=lines.append)
    assert [row["epoch"] for row in history] == list(range(1, 9))
    assert len(lines) == 8
    assert f"validation accuracy {history[-1]['accuracy']:.1%}" in lines[-1]
    assert history[0]["loss"] > history[3]["loss"] > history[-1]["loss"]
    assert history[-1]["accuracy"] > 0.8
    assert swin_digits.accuracy(model, digits[1]) == history[-1]["accuracy"]


def test_seed_decides_the_training(digits: tuple[swin_digits.Digits, swin_digits.Digits]) -> None:
    few = swin_digits.Digits(digits[0].images[:150], digits[0].labels[:150])

    def trained(seed: int) -> Tensor:
        torch.manual_seed(0)
        model = swin_digits.make_model()
        swin_digits.train(model, few, few, epochs=1, seed=seed, say=lambda line: None)
        return torch.cat([p.flatten() for p in model.parameters()])

    first = trained(0)
    assert torch.equal(first, trained(0))
    assert not torch.equal(first, trained(1))


def test_example_runs_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(swin_timing, "BLOCK_IMAGES", (1, 14, 14, 96))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- swin -->\nold\n<!-- /swin -->\nAfter.\n")
    out = tmp_path / "out"
    assert swin.main(["--quick", "--out", str(out), "--doc", str(page)]) == 0
    result = json.loads((out / "results.json").read_text())
    assert result.keys() == committed().keys()
    assert result["backend"] in ("cpu", "reference")
    assert (out / "confusion.png").read_bytes().startswith(b"\x89PNG")
    report = swin.report_of(result)
    assert (out / "results.md").read_text() == report + "\n"
    counts = torch.tensor(result["confusion"])
    assert counts.sum() == result["validation_images"] == 360
    assert counts.trace() == result["right"]
    assert counts.sum(1).tolist() == swin_digits.load_digits()[1].labels.bincount().tolist()
    assert result["accuracy"] == result["right"] / 360 == result["history"][-1]["accuracy"]
    assert [row.keys() for row in result["timings"]] == [swin.COLUMNS.keys()] * 6
    assert all(row[key] > 0 for row in result["timings"] for key in ("fused_ms", "eager_ms", "faster"))
    assert page.read_text() == f"Before.\n<!-- swin -->\n{report}\n<!-- /swin -->\nAfter.\n"
    for name, published in (("results.json", "digits.json"), ("confusion.png", "confusion.png")):
        assert (tmp_path / "swin" / published).read_bytes() == (out / name).read_bytes()
    printed = capsys.readouterr().out
    assert "epoch 1/1 " in printed
    assert report in printed


def committed() -> Any:
    return json.loads((DOC.parent / "swin" / "digits.json").read_text())


def test_documented_results_are_the_committed_ones() -> None:
    text, result = DOC.read_text(), committed()
    assert replace_section(text, swin.DOC_SECTION, swin.report_of(result)) == text
    assert "](swin/confusion.png)" in text
    assert (DOC.parent / "swin" / "confusion.png").exists()
    assert result["epochs"] == swin.Options.epochs
    assert result["accuracy"] == result["history"][-1]["accuracy"] > 0.95


@pytest.mark.parametrize("text", ["", "<!-- a -->", "<!-- /a --><!-- a -->", 2 * "<!-- a --><!-- /a -->"])
def test_section_without_its_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected one <!-- a --> with an <!-- /a --> after it"):
        replace_section(text, "a", "section")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs: expected a number from 1, got 0"),
        (["--rounds", "0"], "--rounds: expected a number from 1, got 0"),
        (["--threads", "0"], "--threads: expected a number from 1, got 0"),
        (["--seed", "-1"], "--seed: expected a number from 0, got -1"),
        (["--doc", str(DOC.parent / "swin.md")], "--doc: expected one <!-- swin -->"),
        (["--doc", "not there"], "--doc: "),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        swin.parse(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "extra"), [("sklearn", "vision"), ("matplotlib", "accel")])
def test_missing_package_names_the_extra_before_anything_is_computed(
    missing: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str) -> Any:
        # What is installed here beside it does not matter.
        return None if name == missing else find_spec("json" if name in ("sklearn", "matplotlib") else name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert swin.main(["--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert f"pip install 'dskernels[{extra}]'" in captured.err
    assert not captured.out
    assert not (tmp_path / "out").exists()
