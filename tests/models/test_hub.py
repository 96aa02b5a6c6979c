"""Hub models, with the download replaced by a folder made on the fly."""

from __future__ import annotations

import fnmatch
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from specdec_core.models import hub, registry
from specdec_core.models.checkpoints import save_checkpoint, tiny_llama
from specdec_core.models.errors import UnknownModel, Unreachable


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """Replace the download; the calls it got."""
    calls = []

    def snapshot_download(repository, **options):
        calls.append((repository, options))
        return str(save_checkpoint(tiny_llama(4), tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def failing(monkeypatch, error):
    def snapshot_download(repository, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_a_model_is_loaded(downloads):
    found = registry.load("hub:someone/tiny-llama.v1")
    assert found.fingerprint == tiny_llama(4).fingerprint
    assert found.name == "hub:someone/tiny-llama.v1"
    ((repository, options),) = downloads
    assert repository == "someone/tiny-llama.v1"
    assert options["revision"] is None


def test_a_revision(downloads):
    hub.download("hub:someone/tiny@refs/pr/3")
    assert downloads == [("someone/tiny", {"revision": "refs/pr/3", "allow_patterns": hub.PATTERNS})]


def test_only_weights_and_text_are_fetched(downloads):
    hub.download("hub:someone/tiny")
    patterns = downloads[0][1]["allow_patterns"]

    def fetched(name):
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    assert all(map(fetched, ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]))
    assert not any(map(fetched, ["pytorch_model.bin", "modeling.py", "model.gguf", "consolidated.pth"]))


@pytest.mark.parametrize("name", ["hub:", "hub:justname", "hub:a/b/c", "hub:a b/c", "hub:a/b@"])
def test_a_malformed_name(downloads, name):
    with pytest.raises(UnknownModel, match="expected hub:ORGANISATION/NAME"):
        registry.load(name)
    assert downloads == []


@pytest.mark.parametrize(
    "error",
    [
        errors.LocalEntryNotFoundError("no network and not on disk"),
        errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set"),
        OSError("Network is unreachable"),
        errors.HTTPError("name resolution failed"),
    ],
)
def test_offline(monkeypatch, error):
    failing(monkeypatch, error)
    with pytest.raises(Unreachable, match=r"hub:a/b is not on this disk.*connect to the network"):
        registry.load("hub:a/b")


@pytest.mark.parametrize(
    ("kind", "raised", "message"),
    [
        (errors.RepositoryNotFoundError, UnknownModel, "the hub has no model a/b"),
        (errors.RevisionNotFoundError, UnknownModel, "no revision main"),
        (errors.GatedRepoError, Unreachable, "a/b is gated"),
    ],
)
def test_answers_of_the_hub(monkeypatch, kind, raised, message):
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    failing(monkeypatch, kind("no", response=response))
    with pytest.raises(raised, match=message):
        registry.load("hub:a/b")


def test_really_offline(monkeypatch, tmp_path):
    """The library itself, told to stay offline, with nothing on the disk."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Unreachable, match="connect to the network"):
        hub.download("hub:someone/tiny")
