"""What the library does to whole models, to run and to read.

- ``python -m dsaccel.examples.minilm``: a sentence encoder with its real weights;
- ``python -m dsaccel.examples.quantize_demo``: the language model of `dsaccel.demo`, trained with and without rounding;
- ``python -m dsaccel.examples.swin``: a small Swin Transformer that learns to read digits;
- ``python -m dsaccel.examples.static_graph``: what `torch.compile` gains on whole models.

The first two, about quantization, share `schemes` (what is compared) and `claims` (what was promised);
docs/quantized_models.md has their results. The third has its parts in `swin_digits` (data, model, training),
`swin_eager` (the attention to compare with), `swin_timing` and `swin_picture`; docs/swin_example.md has its results,
docs/static_graph.md those of the fourth.
`command` (options), `measure` (sizes and times) and `report` are for all.
"""
