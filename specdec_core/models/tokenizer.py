"""Text ↔ token ids, chat prompts, and text that streams out token by token."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specdec_core.models.config import read_json
from specdec_core.models.errors import CorruptFile, ModelError, TokenizerMismatch
from specdec_core.models.gguf_tokenizer import END_NAMES

_REPLACEMENT = "\ufffd"  # stands for bytes that are not, or not yet, a character


class Tokenizer:
    """A model's tokenizer. Special tokens (`<|im_end|>`, …) count when encoding and are left out when decoding."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        eos_ids: Iterable[int] = (),
        template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        """`special` names the tokens that the chat template may use, such as `bos_token`."""
        self._core = core
        self._template = template
        self._special = dict(special or {})
        self._eos_ids = tuple(dict.fromkeys([*eos_ids, *_named_ends(core)]))

    @classmethod
    def from_folder(cls, folder: str | Path | None) -> Tokenizer:
        """Read tokenizer.json, and what tokenizer_config.json and the model's configs say of templates and end tokens.

        Raises ModelError if there is no tokenizer.json (or no folder: a model made in memory), CorruptFile if it
        cannot be read.
        """
        path = None if folder is None else Path(folder) / "tokenizer.json"
        if path is None or not path.is_file():
            where = f"{folder} holds no tokenizer.json" if folder else "this model was made in memory"
            raise ModelError(f"{where}, so it has no tokenizer; pass token ids, or a folder that has the file")
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CorruptFile(f"{path} is truncated or damaged ({error}); fetch or make it again") from error
        core.no_truncation()
        core.no_padding()
        settings = path.with_name("tokenizer_config.json")
        values = read_json(settings) if settings.is_file() else {}
        special = {
            role: _content(values[role])
            for role in ("bos_token", "eos_token", "unk_token", "pad_token")
            if values.get(role) is not None
        }
        ends = _configured_ends(path.parent)
        if (named := core.token_to_id(special.get("eos_token", ""))) is not None:
            ends.append(named)
        return cls(core, ends, _chat_template(path.parent, values), special)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens; a model's vocabulary may be padded beyond it."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: those that the model's files name, and end tokens known by name."""
        return self._eos_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with what the tokenizer itself adds (a first token, for some models)."""
        return self._core.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that form no character become U+FFFD."""
        return self._core.decode([int(index) for index in ids], skip_special_tokens=True)

    def token(self, index: int) -> str:
        """How the vocabulary spells one token, for display (in byte-level vocabularies Ġ is a space)."""
        token = self._core.id_to_token(int(index))
        return f"<{index}>" if token is None else token

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Prompt for the assistant's next answer. A message is `{"role": "system" | "user" | "assistant", "content"}`.

        The template writes the special tokens itself, so none are added. Raises ModelError if the model has no chat
        template, if a message is malformed, or if the template refuses the messages.
        """
        if self._template is None:
            raise ModelError("this model has no chat template; encode the text itself, or use an instruction-tuned one")
        if not messages:
            raise ModelError('no messages to answer; give at least {"role": "user", "content": TEXT}')
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ModelError(f"message {dict(message)!r} lacks a text 'role' or 'content'")
        text = _render(
            self._template, messages=[dict(m) for m in messages], add_generation_prompt=True, **self._special
        )
        return self._core.encode(text, add_special_tokens=False).ids

    def stream(self) -> StreamDecoder:
        """A decoder for one row's emitted tokens."""
        return StreamDecoder(self)

    def vocabulary(self) -> dict[str, int]:
        """Token → id, added tokens included."""
        return self._core.get_vocab(with_added_tokens=True)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether every id means the same token to both."""
        return self is other or self.vocabulary() == other.vocabulary()


class StreamDecoder:
    """Text of one row as its tokens arrive; never half a character.

    What `push` and a last `flush` return, joined, is `decode` of all tokens. A character that spans tokens is held
    back until it is whole. (So is a literal U+FFFD, which cannot be told from a half one, until the next token.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last tokens whose text went out: some decoders treat a first token apart
        self._held: list[int] = []

    def push(self, index: int) -> str:
        """The text that became certain with this token, possibly empty."""
        self._held.append(int(index))
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """What was held back, unfinished characters as U+FFFD. Call once, after the last token."""
        text = self._new_text()
        self._context, self._held = [], []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]


def require_same_tokenizer(draft: Tokenizer, target: Tokenizer) -> None:
    """Raise TokenizerMismatch unless a draft token means the same to the target.

    Only the tokens count: models may pad the same vocabulary to different sizes.
    """
    if draft.same_vocabulary(target):
        return
    drafts, targets = draft.vocabulary(), target.vocabulary()
    differing = sorted(
        (token for token in drafts.keys() | targets.keys() if drafts.get(token) != targets.get(token)),
        key=lambda token: (drafts.get(token, targets.get(token, 0)), token),
    )
    token = differing[0]
    raise TokenizerMismatch(
        f"drafter and target have different tokenizers: {len(differing)} tokens differ of {len(drafts)} and "
        f"{len(targets)}; {token!r}, for one, is {drafts.get(token, 'absent')} for the drafter and "
        f"{targets.get(token, 'absent')} for the target. Choose two models of one family, or a drafter without a "
        "model (ngram, layer-skip)"
    )


def _named_ends(core: tokenizers.Tokenizer) -> list[int]:
    special = {token.content: index for index, token in core.get_added_tokens_decoder().items() if token.special}
    return [special[name] for name in END_NAMES if name in special]


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _configured_ends(folder: Path) -> list[int]:
    ends: list[int] = []
    for file in (folder / "config.json", folder / "generation_config.json"):
        entry = read_json(file).get("eos_token_id") if file.is_file() else None
        ends += entry if isinstance(entry, list) else [] if entry is None else [entry]
    return ends


def _chat_template(folder: Path, values: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = values.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    # Templates come with models, so they run in a sandbox; the options are those that Hugging Face renders with.
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _render(template: str, **values: Any) -> str:
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(**values)
    except TemplateError as error:
        raise ModelError(f"the model's chat template refuses these messages: {error}") from error


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
