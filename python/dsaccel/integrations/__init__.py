"""The operators of `dskernels` inside other libraries; each module needs the one that it is named after."""
