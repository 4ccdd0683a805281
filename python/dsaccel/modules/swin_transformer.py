"""The Swin Transformer, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules._sizes import Pair, Windows, check_count, check_probability, checked_pair, checked_windows
from dsaccel.modules.swin_block import SwinBlock, check_position, check_version
from dsaccel.modules.swin_checkpoints import build, options_of, read_source
from dsaccel.modules.swin_names import TimmNames, TorchvisionNames
from dskernels.checks import shape_of, wrong_value


class PatchEmbedding(nn.Module):
    """Patches of an image as normalized tokens: ``norm(proj(images))``, channels last.

    Args:
        image_channels: channels of an image.
        patch_size: ``p``, or ``(height, width)``.
        dim: components ``C`` of a token.
        eps: of the norm. Default: 1e-5.
    """

    def __init__(self, image_channels: int, patch_size: Pair, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        check_count("image_channels", image_channels)
        self.patch_size = checked_pair("patch_size", patch_size)
        self.proj = nn.Conv2d(image_channels, dim, self.patch_size, stride=self.patch_size)
        self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``[B, channels, H, W]`` to ``[B, H // p, W // p, C]``; what is no whole patch is left out."""
        channels, (height, width) = self.proj.in_channels, self.patch_size
        if images.dim() != 4 or images.shape[1] != channels or images.shape[2] < height or images.shape[3] < width:
            expected = f"shape [B, {channels}, H, W] of at least {height} x {width}"
            raise wrong_value("images", expected, f"shape {shape_of(images)}")
        out: Tensor = self.norm(self.proj(images).permute(0, 2, 3, 1))
        return out


class PatchMerging(nn.Module):
    """Four neighbours as one token of twice the components: ``reduction(norm(x))``, or ``norm(reduction(x))``.

    Args:
        dim: components ``C`` of a token.
        version: 1 normalizes before the reduction, 2 after it. Default: 1.
        eps: of the norm. Default: 1e-5.

    Sources: Liu et al., "Swin Transformer", 2021, section 3.1; version 2 as in the authors' code.
    """

    def __init__(self, dim: int, *, version: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        check_count("dim", dim)
        check_version(version)
        self.version = version
        self.norm = nn.LayerNorm(4 * dim if version == 1 else 2 * dim, eps=eps)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        nn.init.trunc_normal_(self.reduction.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, H, W, C]`` to ``[B, ceil(H / 2), ceil(W / 2), 2 * C]``; odd sizes are filled up with zeros."""
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        # Of four neighbours the left ones come first, each the upper before the lower.
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3)
        out: Tensor = self.reduction(self.norm(x)) if self.version == 1 else self.norm(self.reduction(x))
        return out


class SwinStage(nn.Module):
    """Blocks of one resolution, with every second grid of windows shifted by half a window.

    Args:
        dim: components ``C`` of a token inside.
        merges: whether a `PatchMerging` comes first, from ``C / 2`` components.
        num_heads: heads of each block.
        window_size: ``(h, w)``.
        stochastic_depths: of each block.
        version, eps: as in `SwinBlock`.
        **options: further ones of `SwinBlock`.
    """

    def __init__(
        self,
        dim: int,
        merges: bool,
        num_heads: int,
        window_size: tuple[int, int],
        stochastic_depths: Sequence[float],
        *,
        version: int,
        eps: float,
        **options: Any,
    ) -> None:
        super().__init__()
        self.merge = PatchMerging(dim // 2, version=version, eps=eps) if merges else None
        half = (window_size[0] // 2, window_size[1] // 2)
        self.blocks = nn.ModuleList(
            SwinBlock(
                dim,
                num_heads,
                window_size,
                shift=half if index % 2 else 0,
                version=version,
                stochastic_depth=depth,
                eps=eps,
                **options,
            )
            for index, depth in enumerate(stochastic_depths)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, H, W, C]`` to the same shape or, if it merges, ``[B, H, W, C / 2]`` to half of it."""
        if self.merge is not None:
            x = self.merge(x)
        for block in self.blocks:
            x = block(x)
        return x


class SwinTransformer(nn.Module):
    """A classifier of images, or the features of one, from attention inside windows.

    Images of any size go in, square or not, one size after the other: nothing of a size is kept. `tiny`, `small` and
    `base` have the sizes of the papers; `from_torchvision` and `from_timm` bring models of others with their weights.

    Args:
        image_channels: channels of an image. Default: 3.
        patch_size: pixels of a token, ``p`` or ``(height, width)``. Default: 4.
        embed_dim: components of a token in the first stage; each further stage has twice as many.
        depths: blocks of each stage.
        num_heads: heads of each stage.
        window_size: ``w``, ``(h, w)``, or a sequence of one ``(h, w)`` for each stage.
        num_classes: scores that come out; 0 for a model without head.
        version: 1 or 2. Default: 1.
        mlp_ratio: as in `SwinBlock`. Default: 4.
        stochastic_depth: of the last block; it grows linearly from 0 in the first. Default: 0.
        position: as in `SwinBlock`. Default: ``"bias"``.
        padding: as in `SwinAttention`. Default: ``"mask"``.
        qkv_bias: as in `SwinAttention`. Default: True.
        pretrained_window_size: as in `ContinuousPositionBias`, one for all stages or a sequence of one ``(h, w)`` for
            each. Default: ``window_size``.
        eps: of the norms. Default: 1e-5.

    Raises:
        TypeError, ValueError: an argument is none of these, ``depths`` and ``num_heads`` differ in length, or as
            `SwinBlock`.

    The weights start as in `SwinBlock`; those of the patches as an ``nn.Conv2d`` does.

    Sources: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021, section 3;
    Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution", 2022, section 3.
    """

    def __init__(
        self,
        *,
        image_channels: int = 3,
        patch_size: Pair = 4,
        embed_dim: int,
        depths: Sequence[int],
        num_heads: Sequence[int],
        window_size: Windows,
        num_classes: int,
        version: int = 1,
        mlp_ratio: float = 4.0,
        stochastic_depth: float = 0.0,
        position: str = "bias",
        padding: str = "mask",
        qkv_bias: bool = True,
        pretrained_window_size: Windows | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_count("embed_dim", embed_dim)
        if num_classes != 0:
            check_count("num_classes", num_classes)
        check_version(version)
        check_position(position)
        check_probability("stochastic_depth", stochastic_depth)
        stages = _checked_stages(depths, num_heads)
        windows = checked_windows("window_size", window_size, stages)
        options: dict[str, Any] = {"version": version, "mlp_ratio": mlp_ratio, "position": position, "eps": eps}
        options.update(padding=padding, qkv_bias=qkv_bias)
        pretrained: list[Pair | None] = [None] * stages
        if pretrained_window_size is not None:
            pretrained = [*checked_windows("pretrained_window_size", pretrained_window_size, stages)]
        rises = torch.linspace(0, stochastic_depth, sum(depths), device="cpu").tolist()
        self.version = version
        self.num_classes = num_classes
        self.patch_embed = PatchEmbedding(image_channels, patch_size, embed_dim, eps=eps)
        self.stages = nn.ModuleList()
        for index, (depth, heads, window) in enumerate(zip(depths, num_heads, windows, strict=True)):
            own, rises = rises[:depth], rises[depth:]
            options["pretrained_window_size"] = pretrained[index]
            self.stages.append(SwinStage(embed_dim * 2**index, index > 0, heads, window, own, **options))
        self.num_features = embed_dim * 2 ** (stages - 1)
        self.norm = nn.LayerNorm(self.num_features, eps=eps)
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else None
        if self.head is not None:
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    @classmethod
    def tiny(cls, num_classes: int = 1000, **options: Any) -> SwinTransformer:
        """The papers' T: 96 components, 2-2-6-2 blocks; windows of 7, or 8 in version 2; ``options`` of the class."""
        return cls(**_sized(96, 6, (3, 6, 12, 24), num_classes, options))

    @classmethod
    def small(cls, num_classes: int = 1000, **options: Any) -> SwinTransformer:
        """The papers' S: 96 components, 2-2-18-2 blocks; windows of 7, or 8 in version 2; ``options`` of the class."""
        return cls(**_sized(96, 18, (3, 6, 12, 24), num_classes, options))

    @classmethod
    def base(cls, num_classes: int = 1000, **options: Any) -> SwinTransformer:
        """The papers' B: 128 components, 2-2-18-2 blocks; windows of 7, or 8 in version 2; ``options`` of the class."""
        return cls(**_sized(128, 18, (4, 8, 16, 32), num_classes, options))

    @classmethod
    def from_torchvision(
        cls,
        source: nn.Module | Mapping[str, Any],
        *,
        window_size: Windows | None = None,
        pretrained_window_size: Windows | None = None,
        stochastic_depth: float = 0.0,
        padding: str = "attend",
    ) -> SwinTransformer:
        """The model with a copy of the weights of torchvision's ``swin_t``, ``swin_v2_t`` and so on.

        Its outputs and gradients are those of torchvision, within rounding, for images of any size.

        Args:
            source: a ``SwinTransformer`` of torchvision without dropout, or its state dict.
            window_size: another than that of the weights. The table of biases of version 1 is interpolated; the network
                of version 2 takes any window. Default: that of the weights.
            pretrained_window_size: the window of the weights, where nothing tells it: version 1, not square, from a
                state dict. Default: that of the model or of the tables in the state dict.
            stochastic_depth: as in the class; that of ``source`` is not taken over. Default: 0.
            padding: as in `SwinAttention`. Default: ``"attend"``, as in torchvision.

        Raises:
            TypeError: ``source`` is no model and no state dict.
            ValueError: it is another model, has dropout, a tensor is missing or left over, or the windows do not fit.
        """
        found = read_source(source, TorchvisionNames())
        options = options_of(found, window_size, pretrained_window_size, None)
        return build(cls, found, {**options, "stochastic_depth": stochastic_depth, "padding": padding})

    @classmethod
    def from_timm(
        cls,
        source: nn.Module | Mapping[str, Any],
        *,
        window_size: Windows | None = None,
        pretrained_window_size: Windows | None = None,
        image_size: Pair | None = None,
        stochastic_depth: float = 0.0,
        padding: str = "attend",
    ) -> SwinTransformer:
        """The model with a copy of the weights of timm's ``swin_*`` and ``swinv2_*``, or of the authors' checkpoints.

        Its outputs and gradients are those of timm for the image size that timm's model was built for, within rounding,
        if the tokens of each stage are a multiple of its window or no more than one. (Where they are not, timm rolls an
        image before it fills it up, so that opposite borders meet in a window; here, as in torchvision, they do not.)

        Args:
            source: a ``SwinTransformer`` or ``SwinTransformerV2`` of timm without dropout and with average pooling, or
                its state dict, or one of the authors of Swin.
            window_size: another than that of the weights, as in `from_torchvision`; version 2 from a state dict needs
                it, as nothing tells. Default: that of the weights.
            pretrained_window_size: the window of the weights: for version 1 as in `from_torchvision`; for version 2
                the one by which offsets are measured, if it was not ``window_size``. Default: what ``source`` tells.
            image_size: a window larger than the tokens of its stage in such an image shrinks to them, as in timm.
                Default: that of the model; of a state dict, none shrinks.
            stochastic_depth: as in the class; that of ``source`` is not taken over. Default: 0.
            padding: as in `SwinAttention`. Default: ``"attend"``, as in timm.

        Raises:
            TypeError: ``source`` is no model and no state dict.
            ValueError: it is another model, or has dropout, another pooling or ``always_partition``; or a tensor is
                missing or left over, or the windows do not fit.
        """
        found = read_source(source, TimmNames())
        image_size = found.image_size if image_size is None else image_size
        options = options_of(found, window_size, pretrained_window_size, image_size)
        return build(cls, found, {**options, "stochastic_depth": stochastic_depth, "padding": padding})

    def features(self, images: Tensor) -> Tensor:
        """The normalized tokens of the last stage.

        Args:
            images: shape ``[B, image_channels, H, W]``, in the dtype of the weights.

        Returns:
            Shape ``[B, H', W', num_features]``, channels last. With S stages, ``H'`` is ``H // patch_size``, halved S -
            1 times and rounded up each time.

        Raises:
            ValueError: ``images`` have another shape, or are smaller than a patch.
        """
        x = self.patch_embed(images)
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.norm(x)
        return out

    def forward(self, images: Tensor) -> Tensor:
        """The scores of the classes: ``head(mean over the tokens of features(images))``.

        Args:
            images: as in `features`.

        Returns:
            Shape ``[B, num_classes]``; without head, the means, ``[B, num_features]``.

        Raises:
            ValueError: as `features`.
        """
        pooled = self.features(images).mean((1, 2))
        return pooled if self.head is None else self.head(pooled)


def _checked_stages(depths: Sequence[int], num_heads: Sequence[int]) -> int:
    """The number of stages."""
    for name, counts in (("depths", depths), ("num_heads", num_heads)):
        if not isinstance(counts, (tuple, list)) or not counts:
            raise wrong_value(name, "a sequence of one number for each stage", repr(counts))
        for count in counts:
            check_count(name, count)
    if len(depths) != len(num_heads):
        raise wrong_value("num_heads", f"one for each of {len(depths)} stages", num_heads)
    return len(depths)


def _sized(
    embed_dim: int, third: int, num_heads: tuple[int, ...], num_classes: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    window_size = 8 if options.get("version", 1) == 2 else 7
    sizes = {"embed_dim": embed_dim, "depths": (2, 2, third, 2), "num_heads": num_heads, "window_size": window_size}
    return {**sizes, "num_classes": num_classes, **options}
