"""The layer that composes the operators of `dskernels` into models, and trains them."""
