"""Any causal language model of transformers as a target: ragged rows and trees by a 4-d mask over a cache of our own.

transformers' caches cut all rows alike and keep nothing by node, so the model is handed a cache that writes every
node's keys and values at its own row's entries and keeps the accepted ones by moving them; the mask hides the rest.
Whatever cannot work that way is refused when the target is made: a state that cannot be rolled back (recurrent,
convolutional), a window that forgets entries, an attention that takes no such mask; a probe then compares a tree in a
ragged batch with plain passes of the same model, so that a model that ignores mask or positions is refused too.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from specdec_core.arrays import Array
from specdec_core.models import hub
from specdec_core.models.config import read_json
from specdec_core.models.errors import CorruptFile, UnknownModel, UnsupportedModel
from specdec_core.models.registry import MODELS, load
from specdec_core.placement import Placement, synchronise
from specdec_core.protocol import Verification
from specdec_core.state.slots import require_context, require_tokens
from specdec_core.targets.huggingface_cache import HoledCache, HoledPass
from specdec_core.targets.padded import PaddedBatch, pad
from specdec_core.topology import Forest, chain, forest, tree

ATTENTION = ("sdpa", "eager")
"""Implementations of attention that add a 4-d mask to the scores."""

_PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of a probed logit, as a share of the largest one: rounding, far below a wrong mask or position."""


class HuggingFaceTarget:
    """`Target` over a causal LM of transformers, given as an object; `open` loads one by name or folder.

    context  longest sequence, if the model's config does not say.
    chunk    most tokens of one prefill pass.

    Raises UnsupportedModel, saying why, for a model that cannot be verified and rolled back this way.
    """

    def __init__(self, model: PreTrainedModel, name: str | None = None, context: int | None = None, chunk: int = 512):
        self._model = model.eval()
        config = model.config.get_text_config()
        self.name = name or model.config.name_or_path or type(model).__name__
        _require_rollback(model, self.name)
        known = context or getattr(config, "max_position_embeddings", None)
        if not known:
            raise UnsupportedModel(f"{self.name}: its config names no longest sequence; pass context=")
        self.vocabulary, self.context = int(config.vocab_size), int(known)
        self._chunk = chunk
        takes = inspect.signature(model.forward).parameters
        # transformers renames this argument from version 5 on, model by model.
        self._cache_argument = "cache" if "cache" in takes else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._probe()

    @classmethod
    def open(
        cls,
        name: str | Path,
        dtype: str = "float32",
        device: str = "cpu",
        attention: str = "sdpa",
        context: int | None = None,
    ) -> HuggingFaceTarget:
        """Load a registered model, a folder (config.json and *.safetensors) or `hub:org/name[@revision]`.

        Only the last uses the network. No code that comes with a model is run. Raises PlacementError for a device or
        dtype that is not there, and ModelError for anything wrong with the model.
        """
        placement = Placement("torch", device, dtype)
        if attention not in ATTENTION:
            raise UnsupportedModel(
                f"attention {attention!r} takes no 4-d mask, which trees and ragged rows need: expected one of "
                + ", ".join(ATTENTION)
            )
        folder = _folder(name)
        model: Any = load_causal_lm(folder, placement.torch_dtype, attention)
        return cls(model.to(placement.torch_device), str(name), context)

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def new_state(self, slots: int, capacity: int) -> HoledCache:
        return HoledCache(slots, capacity)

    def prefill(self, state: HoledCache, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        state.release(slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            self._prefill_row(state, np.array([slot]), np.asarray(prompt, np.int64))
        return [None] * len(prompts)

    def verify(self, state: HoledCache, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        batch = self._padded(state, slots, tokens, forest)
        epoch = state.begin()
        logits = self._run(state, slots, batch)
        rows, columns = (torch.as_tensor(each, device=logits.device) for each in (batch.rows, batch.columns))
        return Verification(logits[rows, columns], None, slots, forest, epoch)

    def commit(self, state: HoledCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        state.require_paths(verification.epoch, verification.forest, paths)
        for slot, path in zip(verification.slots, paths, strict=True):
            state.keep(slot, path)
        state.advance(verification.slots, [len(path) for path in paths])

    def synchronise(self) -> None:
        synchronise(self.device)

    def _prefill_row(self, state: HoledCache, slots: np.ndarray, prompt: np.ndarray) -> None:
        for start in range(0, len(prompt) - 1, self._chunk):
            tokens = prompt[start : min(start + self._chunk, len(prompt) - 1)]
            shape = forest([chain(len(tokens))])
            batch = self._padded(state, slots, tokens, shape)
            state.begin()
            self._run(state, slots, batch, **self._last_only)
            state.advance(slots, [len(tokens)])

    def _padded(self, state: HoledCache, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> PaddedBatch:
        require_tokens(tokens, self.vocabulary)
        state.require_room(slots, forest.counts)
        require_context(state.lengths[slots][forest.rows], forest.depths, self.context)
        return pad(tokens, slots, state.lengths[slots], forest)

    @torch.no_grad()
    def _run(self, state: HoledCache, slots: np.ndarray, batch: PaddedBatch, **options: Any) -> torch.Tensor:
        """Logits `[B, n, V]`, and the nodes' keys and values in the state."""
        visible = torch.as_tensor(batch.visible[:, None], device=self.device)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~visible, torch.finfo(self.dtype).min)
        found = self._model(
            input_ids=torch.as_tensor(batch.tokens, device=self.device),
            position_ids=torch.as_tensor(batch.positions, device=self.device),
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: HoledPass(state, batch, slots, self.device)},
            **options,
        )
        return found.logits

    def _probe(self) -> None:
        """Compare a tree in a ragged batch with plain passes; raises UnsupportedModel if they differ."""
        tokens = (7 + 11 * np.arange(8)) % self.vocabulary
        shape, state = tree((-1, 0, 0, 1)), self.new_state(2, 8)
        try:
            self.prefill(state, np.arange(2), [tokens[:2], tokens[4:8]])
            nodes = np.concatenate([tokens[1:5], tokens[7:3:-1]])
            found = self.verify(state, np.array([0, 1]), nodes, forest([shape, shape])).logits
            for node in range(4, 8):
                path = np.concatenate([tokens[4:7], nodes[4:][shape.path(node - 4)]])
                with torch.no_grad():
                    plain = self._model(input_ids=torch.as_tensor(path[None], device=self.device)).logits[0, -1]
                error = float((found[node] - plain).abs().max() / (1e-6 + plain.abs().max()))
                if not error <= _PROBE_TOLERANCE[self.dtype]:
                    raise UnsupportedModel(
                        f"{self.name}: a tree in a ragged batch and a plain pass of the same tokens differ by "
                        f"{error:.2g} of the largest logit, so this model does not follow a 4-d mask and position ids; "
                        "decode it without this target"
                    )
        except UnsupportedModel:
            raise
        except Exception as error:  # whatever foreign model code raises when handed a mask or cache it cannot use
            reason = f"{type(error).__name__}: {error}"
            raise UnsupportedModel(
                f"{self.name} cannot run with a 4-d mask, position ids and a cache of our own ({reason}); decode it "
                "without this target"
            ) from error


def _require_rollback(model: PreTrainedModel, name: str) -> None:
    """Raise UnsupportedModel for what the config already tells."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise UnsupportedModel(f"{name} has an encoder or cross-attention; expected a decoder-only causal LM")
    kinds = set(getattr(config, "layer_types", None) or ())
    stateful = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if getattr(model, "_is_stateful", False) or stateful:
        what = f"layers of type {', '.join(sorted(stateful))}" if stateful else "a recurrent state"
        raise UnsupportedModel(
            f"{name} has {what}: what a rejected draft did to such a state cannot be taken back, so it is no target "
            "here; choose a model with full attention in every layer"
        )
    window = getattr(config, "sliding_window", None)
    forgets = kinds & {"sliding_attention", "chunked_attention"} if kinds else bool(window)
    if forgets and not (window and window >= (getattr(config, "max_position_embeddings", None) or 0)):
        raise UnsupportedModel(
            f"{name} attends in a window ({window or 'chunked'} entries), which this target's mask does not have; "
            "choose a model with full attention in every layer"
        )
    used = getattr(config, "_attn_implementation", None)
    if used not in ATTENTION:
        raise UnsupportedModel(
            f"{name} runs attention by {used!r}, which takes no 4-d mask; load it with attn_implementation set to "
            + " or ".join(ATTENTION)
        )


def _folder(name: str | Path) -> Path:
    if str(name) in MODELS:
        folder = load(name).folder
        assert folder is not None  # registered models are converted into one
        return folder
    if str(name).startswith(hub.PREFIX):
        return hub.download(str(name))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UnknownModel(
            f"no model {str(name)!r}: it is neither registered ({', '.join(MODELS)}) nor a folder. Name a folder that "
            f"holds config.json and *.safetensors, or a hub model as {hub.PREFIX}ORGANISATION/NAME"
        )
    return folder


def load_causal_lm(folder: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """transformers' model of a folder, `attention` being one of its implementations; errors are this package's."""
    from transformers import AutoModelForCausalLM

    kind = read_json(folder / "config.json").get("model_type")
    with _quiet():
        try:
            return AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except (OSError, SafetensorError) as error:
            raise CorruptFile(f"{folder}: its weights are absent or damaged ({error}); fetch it again") from error
        except (ValueError, KeyError, ImportError) as error:
            raise UnsupportedModel(f"{folder}: transformers cannot open model_type {kind!r} ({error})") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
