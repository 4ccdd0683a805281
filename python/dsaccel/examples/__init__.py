"""What quantization does to whole models, to run and to read.

- ``python -m dsaccel.examples.minilm``: a sentence encoder with its real weights;
- ``python -m dsaccel.examples.quantize_demo``: the language model of `dsaccel.demo`, trained with and without rounding.

Both share `schemes` (what is compared), `measure` (sizes and times), `claims` (what was promised) and `report`.
docs/quantized_models.md has their results.
"""
