"""Mixed precision, and what else a training step is made of; each can be used alone."""

from dsaccel.amp.accumulation import Microbatch, accumulate
from dsaccel.amp.activations import ActivationClip, ClippedActivations, clip_activations
from dsaccel.amp.clipping import clip_threshold
from dsaccel.amp.fp32 import KeptFP32, keep_fp32
from dsaccel.amp.gradients import normalise_gradients_
from dsaccel.amp.initialisation import XavierInit, xavier_
from dsaccel.amp.losses import label_smoothing_loss
from dsaccel.amp.masking import RandomMask, random_mask
from dsaccel.amp.policy import AutocastPolicy, PrecisionChoice
from dsaccel.amp.scaler import LossScaler, StepResult

__all__ = [
    "ActivationClip",
    "AutocastPolicy",
    "ClippedActivations",
    "KeptFP32",
    "LossScaler",
    "Microbatch",
    "PrecisionChoice",
    "RandomMask",
    "StepResult",
    "XavierInit",
    "accumulate",
    "clip_activations",
    "clip_threshold",
    "keep_fp32",
    "label_smoothing_loss",
    "normalise_gradients_",
    "random_mask",
    "xavier_",
]
