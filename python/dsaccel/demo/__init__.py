"""Trains a small sliding-window transformer on real text, and compares what its attention can run on.

``python -m dsaccel.demo --help`` lists the options. An example to read and to copy, in the order of `main.run`:

- `options`: what can be set;
- `data`: the text, and the batches drawn from it;
- `train`: the training itself, and the checkpoint from which it resumes;
- `compare`: the same training step with other implementations of the attention;
- `plot`, `progress`: pictures, and what the terminal shows.
"""
