"""Draft/target pairs by name: what a user, the command line and the notebooks ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.eagle_tree import EagleTreeDrafter
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.eagle_checkpoint import load_eagle
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
    "eagle": "trained layers that continue the target's hidden states (a chain); eagle:FILE takes another checkpoint",
    "eagle-tree": "the same layers, a dynamic tree of at most 15 tokens; eagle-tree:FILE",
    "MODEL": "any model that shares the tokenizer: a registered name, a folder, or hub:org/name",
}


class PairError(ValueError):
    """A drafter that does not exist or does not fit."""


EAGLE = {"eagle": EagleDrafter, "eagle-tree": EagleTreeDrafter}
CHECKPOINTS = Path(__file__).resolve().parent.parent / "data" / "checkpoints"


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


def required_features(kind: str, name: str) -> tuple[int, ...]:
    """The feature layers that target `name` must be opened with for this kind of drafter: () for most."""
    if kind.partition(":")[0] not in EAGLE:
        return ()
    return load_eagle(_eagle_file(kind, load(name).name)).feature_layers


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
    if name in EAGLE:
        return _open_eagle(kind, opened), None
    try:
        model = open_target(kind, opened.target.placement)
    except UnknownModel as error:
        known = "; ".join(f"{name} ({what})" for name, what in DRAFTERS.items())
        raise PairError(f"unknown drafter {kind!r}: expected one of {known}. {error}") from None
    require_same_tokenizer(model.tokenizer, opened.tokenizer)
    return ModelDrafter(model.target, opened.target.vocabulary), model.target


def file_name(model: str) -> str:
    """A model's name as part of a file's name: a hub's has signs that no file may have."""
    return model.replace(":", "-").replace("/", "-")


def eagle_path(opened: Opened) -> Path:
    """Where the drafter trained for this target is committed."""
    return _eagle_file("eagle", opened.checkpoint.name)


def _eagle_file(kind: str, target: str) -> Path:
    argument = kind.partition(":")[2]
    return Path(argument) if argument else CHECKPOINTS / f"eagle-{file_name(target)}.safetensors"


def _open_eagle(kind: str, opened: Opened) -> EagleDrafter | EagleTreeDrafter:
    checkpoint, target = load_eagle(_eagle_file(kind, opened.checkpoint.name)), opened.target
    if target.feature_layers != checkpoint.feature_layers:
        raise PairError(
            f"this drafter reads the target's layers {checkpoint.feature_layers}, and {target.name} was opened with "
            f"features of {target.feature_layers or 'none'}: open it with required_features({kind!r}, {opened.name!r})"
        )
    make = EAGLE[kind.partition(":")[0]]
    return make(checkpoint, opened.checkpoint, target.placement)


def _layers(argument: str, layers: int) -> int:
    if not argument:
        return max(1, 2 * layers // 3)
    if not argument.isdecimal() or not 1 <= int(argument) < layers:
        raise PairError(f"layer-skip:{argument}: expected a number of layers in 1…{layers - 1}")
    return int(argument)
