"""The examples of docs/checkpointing.md run, and print what is said there; so does its command."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
import torch
from documents import blocks_of, run_blocks

import dskernels as dk
from dsaccel.checkpoint.__main__ import main

PAGE = "checkpointing.md"
BLOCKS = blocks_of(PAGE)


@pytest.mark.usefixtures("one_thread")
def test_examples_run_in_order() -> None:
    run_blocks(BLOCKS, PAGE)


@pytest.mark.skipif(dk.build_info()["compiled"] is None, reason="the table is that of the compiled operators")
def test_command_prints_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [index for index, (language, _) in enumerate(BLOCKS) if language == "sh"]
    arguments = shlex.split(BLOCKS[commands[0]][1])
    assert arguments == ["python", "-m", "dsaccel.checkpoint"]
    main(arguments[3:])
    assert capsys.readouterr().out == BLOCKS[commands[0] + 1][1]


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch, though no GPU")
def test_script_prints_what_a_gpu_would_save() -> None:
    (place,) = (index for index, (language, _) in enumerate(BLOCKS) if language == "py")
    # It changes the default dtype.
    done = subprocess.run([sys.executable, "-c", BLOCKS[place][1]], capture_output=True, text=True)
    assert done.stdout == BLOCKS[place + 1][1], done.stderr
