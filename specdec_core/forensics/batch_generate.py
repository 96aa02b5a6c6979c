"""transformers' own batched greedy `generate` as decoders that can be diagnosed (diagnose.py): one a way of padding.

A batch is a rectangle, so short prompts are padded, and everything depends on the side and on the mask. All of them
return rows as long as the longest, the pad token behind an end token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_core.forensics.diagnosis_experiments import Prompt
from specdec_core.forensics.huggingface_decoders import generation_settings
from specdec_core.sampling import Options

Generate = Callable[..., list[list[int]]]
"""generate(prompts, max_new_tokens=…): the new tokens of each row."""


def left_padded(model: PreTrainedModel, options: Options, pad: int) -> Generate:
    """Padding on the left, hidden by the mask: as documented."""
    return _decoder(
        model, options, pad, lambda prompts: (_left(prompts, pad), _left([[1] * len(p) for p in prompts], 0))
    )


def left_padded_without_mask(model: PreTrainedModel, options: Options, pad: int) -> Generate:
    """Padding on the left and no mask given. transformers then hides pad tokens, unless pad is an end token."""
    return _decoder(model, options, pad, lambda prompts: (_left(prompts, pad), None))


def left_padded_mask_from_ids(model: PreTrainedModel, options: Options, pad: int) -> Generate:
    """Padding on the left, the mask made by `ids != pad`: hides whatever tokens of a prompt have the pad token's id."""

    def inputs(prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = _left(prompts, pad)
        return ids, (ids != pad).long()

    return _decoder(model, options, pad, inputs)


def right_padded(model: PreTrainedModel, options: Options, pad: int) -> Generate:
    """Padding on the right, hidden by the mask: new tokens of a short row come behind its padding."""
    return _decoder(
        model, options, pad, lambda prompts: (_right(prompts, pad), _right([[1] * len(p) for p in prompts], 0))
    )


def _decoder(
    model: PreTrainedModel,
    options: Options,
    pad: int,
    inputs: Callable[[Sequence[Prompt]], tuple[torch.Tensor, torch.Tensor | None]],
) -> Generate:
    if not options.greedy:
        raise ValueError(f"temperature {options.temperature}: expected 0, since batches are compared token by token")
    settings = generation_settings(options) | {"pad_token_id": pad}

    @torch.no_grad()
    def decoder(prompts: Sequence[Prompt], max_new_tokens: int = options.max_new_tokens) -> list[list[int]]:
        ids, mask = inputs(prompts)
        given: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        found: Any = model.generate(ids, **settings | given | {"max_new_tokens": max_new_tokens})  # type: ignore[operator]
        return found[:, ids.shape[1] :].tolist()

    return decoder


def _left(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*[fill] * (width - len(row)), *row] for row in rows])


def _right(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
