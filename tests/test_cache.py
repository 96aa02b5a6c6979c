"""The cache folder: whole files or none, and one writer at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specdec_core import cache

ROOT = Path(cache.__file__).parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script(text: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    return process.communicate(timeout=60)


class TestWhere:
    def test_the_variable_decides(self, folder):
        assert cache.cache_root() == folder

    def test_a_checkout_has_its_own(self, tmp_path, monkeypatch):
        monkeypatch.delenv("SPECDEC_CACHE")
        (tmp_path / "specdec_core").mkdir()
        (tmp_path / "pyproject.toml").touch()
        monkeypatch.setattr(cache, "__file__", str(tmp_path / "specdec_core" / "cache.py"))
        assert cache.cache_root() == tmp_path.resolve() / ".cache"

    def test_an_installed_package_uses_the_home_folder(self, tmp_path, monkeypatch):
        monkeypatch.delenv("SPECDEC_CACHE")
        monkeypatch.setattr(cache, "__file__", str(tmp_path / "specdec_core" / "cache.py"))
        assert cache.cache_root() == Path.home() / ".cache" / "specdec"

    def test_folders_are_made(self, folder):
        assert cache.cache_dir("models/tiny") == folder / "models" / "tiny"
        assert (folder / "models" / "tiny").is_dir()

    @pytest.mark.parametrize("name", ["", "/abs", "../out", "a/../../b", "a//b", "."])
    def test_names_stay_inside(self, name):
        with pytest.raises(ValueError, match="relative path"):
            cache.cache_dir(name)

    def test_a_cache_that_cannot_be_made_is_named(self, folder):
        folder.write_text("a file where the folder should be")
        with pytest.raises(cache.CacheError, match=r"cannot write .*cache/models.*SPECDEC_CACHE"):
            cache.cache_dir("models")

    def test_torch_is_not_imported(self):
        out, err = finish(script("import sys, specdec_core.cache; print('torch' in sys.modules)"))
        assert out.strip() == "False", err


class TestAtomicWrite:
    def test_it_replaces_whole(self, tmp_path):
        path = tmp_path / "new" / "record.json"
        for text in ("first", "second"):
            with cache.atomic_write(path) as temporary:
                temporary.write_text(text)
                assert temporary.parent == path.parent
            assert path.read_text() == text
        assert os.listdir(path.parent) == ["record.json"]

    def test_an_error_keeps_what_was(self, tmp_path):
        path = tmp_path / "record.json"
        path.write_text("old")
        with pytest.raises(KeyError), cache.atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyError
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["record.json"]

    def test_writing_nothing_is_an_error(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nothing was written"), cache.atomic_write(tmp_path / "x"):
            pass

    def test_a_missing_source_is_not_called_a_failed_write(self, tmp_path):
        with pytest.raises(FileNotFoundError) as caught, cache.atomic_write(tmp_path / "x") as temporary:
            temporary.write_bytes((tmp_path / "source").read_bytes())
        assert not isinstance(caught.value, cache.CacheError)
        assert os.listdir(tmp_path) == []

    @pytest.mark.skipif(sys.platform == "win32", reason="limits a file's size with setrlimit")
    def test_a_full_disk(self, tmp_path):
        path = tmp_path / "record.json"
        path.write_text("old")
        process = script(f"""
import resource, signal
from specdec_core import cache
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with cache.atomic_write({str(path)!r}) as temporary:
        temporary.write_bytes(bytes(5000))
except cache.CacheError as error:
    print(error)
""")
        out, err = finish(process)
        assert str(path) in out, err
        assert "Nothing of it was left behind; free some space" in out
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["record.json"]


class TestAtomicFolder:
    def test_it_replaces_whole(self, folder):
        for name in ("first", "second"):
            with cache.exclusive("models/tiny") as path, cache.atomic_folder(path) as temporary:
                (temporary / name).write_text(name)
            assert os.listdir(path) == [name]
        assert os.listdir(folder / "models") == ["tiny"]

    def test_an_error_keeps_what_was(self, tmp_path):
        path = tmp_path / "model"
        path.mkdir()
        (path / "weights").write_text("old")
        with pytest.raises(KeyError), cache.atomic_folder(path) as temporary:
            (temporary / "weights").write_text("half")
            raise KeyError
        assert (path / "weights").read_text() == "old"
        assert os.listdir(tmp_path) == ["model"]


class TestExclusive:
    @pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")
    def test_a_killed_writer_leaves_what_the_next_holder_removes(self, folder):
        process = script("""
import os, signal
from specdec_core import cache
with cache.exclusive("models/tiny") as path, cache.atomic_folder(path) as temporary:
    (temporary / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
""")
        finish(process)
        assert process.returncode == -signal.SIGKILL
        assert len(cache.leftovers(folder / "models" / "tiny")) == 1
        other = folder / "models" / ".tiny.b.0123456789abcdef.tmp"
        other.mkdir()
        with cache.exclusive("models/tiny") as path:
            assert not path.exists()
            assert os.listdir(folder / "models") == [other.name]

    def test_a_second_process_waits_and_finds_the_work_done(self):
        work = """
import time
from specdec_core import cache
with cache.exclusive("models/tiny") as path:
    if path.exists():
        print("found")
    else:
        time.sleep(1)
        with cache.atomic_write(path) as temporary:
            temporary.write_text("done")
        print("made")
"""
        processes = [script(work), script(work)]
        assert sorted(finish(process)[0].strip() for process in processes) == ["found", "made"]

    def test_one_thread_at_a_time(self):
        inside, most = 0, 0

        def work():
            nonlocal inside, most
            with cache.exclusive("counter"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.02)
                inside -= 1

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == 1

    def test_waiting_is_said(self, caplog):
        entered = threading.Event()

        def hold():
            with cache.exclusive("slow"):
                entered.set()
                time.sleep(2.5)

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait()
        with cache.exclusive("slow"):
            assert "waiting for another run" in caplog.text
        thread.join()

    def test_different_names_do_not_wait(self):
        with cache.exclusive("one"), cache.exclusive("two"), cache.exclusive("one/two"):
            pass
