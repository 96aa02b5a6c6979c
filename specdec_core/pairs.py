"""Draft/target pairs by name: what a user, the command line and the notebooks ask for."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.errors import UnknownModel
from specdec_core.models.registry import load
from specdec_core.models.tokenizer import Tokenizer, require_same_tokenizer
from specdec_core.placement import Placement, default_engine
from specdec_core.protocol import Drafter, Target
from specdec_core.targets.transformer import Transformer

DRAFTERS = {
    "none": "no drafting: autoregressive decoding",
    "ngram": "what followed the longest suffix that occurred before (a chain)",
    "ngram-tree": "the two latest different continuations (a tree)",
    "layer-skip": "the target's own first layers; layer-skip:M takes the first M (default: two thirds)",
    "MODEL": "any model that shares the tokenizer: a registered name, a folder, or hub:org/name",
}


class PairError(ValueError):
    """A drafter that does not exist or does not fit."""


@dataclass(frozen=True)
class Opened:
    """A target that is ready to decode, with its tokenizer."""

    name: str
    target: Transformer
    tokenizer: Tokenizer
    checkpoint: Checkpoint


def open_target(name: str, placement: Placement | None = None, feature_layers: tuple[int, ...] = ()) -> Opened:
    """Load a model by registered name, folder or hub:org/name, on the CPU's fastest engine if no placement is given.

    Errors are the registry's.
    """
    checkpoint = load(name)
    placement = placement or Placement(default_engine("cpu", "float32"))
    target = Transformer(checkpoint, placement, feature_layers)
    return Opened(name, target, Tokenizer.from_folder(checkpoint.folder), checkpoint)


def open_drafter(kind: str, opened: Opened) -> tuple[Drafter | None, Target | None]:
    """The drafter of this kind for a target, and the model that one of its steps runs (None for a look-up)."""
    name, _, argument = kind.partition(":")
    if kind == "none":
        return None, None
    if kind == "ngram":
        return NGramDrafter(), None
    if kind == "ngram-tree":
        return NGramDrafter(candidates=2), None
    if name == "layer-skip":
        layers = _layers(argument, opened.target.config.layers)
        return LayerSkipDrafter(opened.target, layers), opened.target.early_exit(layers)
    try:
        model = open_target(kind, opened.target.placement)
    except UnknownModel as error:
        known = "; ".join(f"{name} ({what})" for name, what in DRAFTERS.items())
        raise PairError(f"unknown drafter {kind!r}: expected one of {known}. {error}") from None
    require_same_tokenizer(model.tokenizer, opened.tokenizer)
    return ModelDrafter(model.target, opened.target.vocabulary), model.target


def _layers(argument: str, layers: int) -> int:
    if not argument:
        return max(1, 2 * layers // 3)
    if not argument.isdecimal() or not 1 <= int(argument) < layers:
        raise PairError(f"layer-skip:{argument}: expected a number of layers in 1…{layers - 1}")
    return int(argument)
