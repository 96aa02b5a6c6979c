"""From a corpus to a drafter that serves, its card and its records, all on a tiny target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from specdec_core import pairs
from specdec_core.decode import decode, outputs
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.training_records import ACCEPTANCE, TRAINING
from specdec_core.kernels.compiled import code_folder
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import load_eagle
from specdec_core.pairs import Opened, eagle_path, open_target
from specdec_core.placement import Placement
from specdec_core.prompts import load_prompts
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training import corpus as corpus_module
from specdec_core.training import distill as distill_module
from specdec_core.training import eagle_run as module
from specdec_core.training.corpus import IS_GREEDY, CorpusError, committed_corpus, corpus_path
from specdec_core.training.corpus_generation import CorpusPlan, generate_corpus, join_corpus
from specdec_core.training.distill import DistillPlan
from specdec_core.training.eagle_run import PLANS, EagleRun, Result, fitted, serve_eagle, train_eagle
from specdec_core.training.served import compare_on_held_out, held_out_prompts, served_tau
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = EagleRun(
    DistillPlan((), 1000, unroll=2, rows=4, steps=4, learning_rate=1e-3, check_every=2, patience=9, held_out_rows=6),
    corpus_rows=16, prompts=1, max_new_tokens=8, drafted_prompts=2,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A checkout of its own, its target, and `train_eagle` there."""

    layout: Layout
    opened: Opened
    train: Callable[..., Result]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("checkout")
    layout = Layout(root)
    shutil.copytree(Layout().package, layout.package, ignore=shutil.ignore_patterns("__pycache__"))
    one = partial(open_target, placement=Placement("numba", threads=1))
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), context=1024)
    code_folder()  # compiled code stays in the cache that everyone shares
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE", str(root / "cache"))
        patch.setattr(corpus_module, "FOLDER", root / "corpus")
        patch.setattr(pairs, "CHECKPOINTS", root / "checkpoints")
        patch.setattr(module, "open_target", one)
        opened = one(str(folder))
        with pytest.raises(CorpusError, match="is absent"):
            train_eagle("quick", str(folder), layout=layout, run=RUN)
        plan = CorpusPlan(prompts=20, max_new_tokens=8, batch=8, seed=3)
        corpus_path(opened).parent.mkdir()
        # Another source's answers, here to other prompts of the same one, are a second part of the corpus.
        for source, part in (("templates", plan), ("asked", replace(plan, prompts=5, seed=4))):
            generate_corpus(part, opened, root / f"shards-{source}")
            join_corpus(part, opened, root / f"shards-{source}", corpus_path(opened, source))
        yield Place(layout, opened, partial(train_eagle, model=str(folder), layout=layout))


@pytest.fixture(scope="module")
def result(place) -> Result:
    return place.train("quick", run=RUN)


def reading(place: Place, layers: tuple[int, ...]) -> Opened:
    return open_target(place.opened.name, Placement("numba", threads=1), layers)


def test_the_checkpoint_is_what_was_trained_and_drafts(place, result):
    assert result.path == place.layout.build / "eagle-toy.safetensors"
    drafter = load_eagle(result.path)
    for name, values in result.trained.drafter.weights.items():
        # What served, and what the result holds, is what is shipped: float16.
        assert torch.equal(values, values.half().float()) and torch.equal(drafter.weights[name], values), name
    assert drafter.feature_layers == (0, 1) and drafter.config.vocabulary == 259
    opened = reading(place, drafter.feature_layers)
    prompt = tuple(opened.tokenizer.encode("What is it?"))
    serving = EagleDrafter(drafter, opened.checkpoint, opened.target.placement)
    rounds = list(decode(opened.target, [Request(prompt, Options(max_new_tokens=12), FixedLength(2))], serving))
    assert sum(sum(each.rows[0].drafted) for each in rounds) > 0
    plain = decode(opened.target, [Request(prompt, Options(max_new_tokens=12))])
    assert outputs(rounds, 1)[0].tokens == outputs(list(plain), 1)[0].tokens


def test_it_was_trained_by_the_plan_on_the_rows_that_it_names(place, result):
    curve, card = result.trained.curve, result.trained.drafter.card
    assert [row["step"] for row in curve] == [0, 2, 4]
    assert card["plan"]["rows"] == 4 and card["plan"]["feature_layers"] == [0, 1]
    corpus = corpus_module.only_rows(committed_corpus(place.opened), range(16))
    assert corpus.fingerprint.startswith(card["corpus"])
    assert curve[-1]["epoch"] == pytest.approx(4 / (len(corpus.training) // 4))


def test_the_tau_of_a_check_is_that_of_decoding_with_it(place, result):
    best = max(result.trained.curve, key=lambda row: (row["greedy_tau"], row["step"]))
    corpus = corpus_module.only_rows(committed_corpus(place.opened), range(16))
    prompts = held_out_prompts(corpus, 2)
    assert len(prompts) == 2
    opened = reading(place, (0, 1))
    assert served_tau(result.trained.drafter, opened, prompts, 2, 8) == best["drafted_tau"]


def test_the_card_lies_beside_it_and_tells_the_figures(place, result):
    text = result.path.with_suffix(".md").read_text(encoding="utf-8")
    best = max(result.trained.curve, key=lambda row: (row["greedy_tau"], row["step"]))
    assert "eagle-toy.safetensors" in text and place.opened.checkpoint.name in text
    assert f"τ {best['greedy_tau']:.2f} greedy" in text and "16 answers with" in text
    assert "4 batches of 4 answers, 0 of them of the first step alone, the others of up to 2" in text
    assert "`python -m specdec_core train eagle --profile quick`" in text
    assert "| chain, K = 2 | 0 |" in text and "| tree, K = 2 | 1 |" in text


def test_records_are_found_and_hold_the_curve_and_how_it_serves(place, result):
    learned = TRAINING, result.trained.curve, module.LEARNING, "training/eagle_learner.py"
    serves = ACCEPTANCE, result.served, module.SERVING, "drafters/eagle_engine.py"
    for schema, rows, code, file in (learned, serves):
        [found] = find_records(schema, number="02", layout=place.layout)
        assert found.path.parent == place.layout.records("quick") and not found.is_stale(place.layout)
        assert read_records(found.path, schema)[1] == rows
        assert set(found.header["code"]["paths"]) == set(code)
        source = place.layout.package / file
        before = source.read_text()
        source.write_text(before + "\nX = 1\n")
        assert found.is_stale(place.layout)
        source.write_text(before)


def test_it_serves_a_prompt_of_each_domain_in_four_ways(result):
    prompts = [load_prompts(domain)[0].id for domain in ("math", "code", "chat")]
    assert [(row["arm"], row["temperature"], row["prompt_id"]) for row in result.served] == [
        (arm, temperature, prompt)
        for temperature in (0.0, 1.0) for arm in ("chain", "tree") for prompt in prompts
    ]  # fmt: skip
    assert all(row["K"] == 2 and 1 <= row["tokens"] <= 8 for row in result.served)
    assert all(row["identical"] for row in result.served if row["temperature"] == 0)


def test_a_second_run_trains_nothing_and_says_the_same(place, result, monkeypatch):
    monkeypatch.setattr(distill_module._Run, "learn", None)
    monkeypatch.setattr(distill_module._Run, "check", None)
    before = result.path.read_bytes(), result.path.with_suffix(".md").read_text()
    again = place.train("quick", run=RUN)
    assert again.trained.curve == result.trained.curve and again.served == result.served
    assert load_eagle(again.path).weights.keys() == load_eagle(result.path).weights.keys()
    assert (again.path.with_suffix(".md").read_text()) == before[1] and len(again.path.read_bytes()) == len(before[0])


def test_the_full_profile_writes_what_is_committed(place, result):
    full = place.train("full", run=replace(RUN, distill=replace(RUN.distill, steps=1), corpus_rows=None))
    assert full.path == eagle_path(place.opened) and full.path.parent.name == "checkpoints"
    text = full.path.with_suffix(".md").read_text(encoding="utf-8")
    rows = len(committed_corpus(place.opened))
    assert rows > len(corpus_module.load_corpus(corpus_path(place.opened)))
    assert f"{rows} answers with" in text and "--profile full" in text
    assert find_records(TRAINING, folder=place.layout.records("full"), layout=place.layout)
    opened = reading(place, full.trained.drafter.feature_layers)
    assert type(pairs.open_drafter("eagle", opened)[0]) is EagleDrafter
    # … and what was trained does as the learner says, on all of the rounds that are compared.
    corpus = committed_corpus(opened)
    assert corpus.flagged(IS_GREEDY).any()
    alike, total = compare_on_held_out(full.trained.drafter, opened, corpus, answers=3, k=2)
    assert alike == total > 3


def test_the_shipped_drafter_serves_again_without_training(place, result, monkeypatch):
    run = replace(RUN, distill=replace(RUN.distill, steps=1), corpus_rows=None)
    full = place.train("full", run=run)
    card, curve = full.path.with_suffix(".md").read_text(), place.layout.records("full") / "02_training.jsonl"
    before = full.path.read_bytes(), curve.read_bytes()
    full.path.with_suffix(".md").unlink()
    monkeypatch.setattr(module, "distill", None)
    again = serve_eagle("full", place.opened.name, layout=place.layout, run=run)
    assert again.served == full.served and again.trained.curve == full.trained.curve
    assert (full.path.read_bytes(), curve.read_bytes()) == before
    assert full.path.with_suffix(".md").read_text() == card
    [found] = find_records(ACCEPTANCE, folder=place.layout.records("full"), layout=place.layout)
    assert read_records(found.path, ACCEPTANCE)[1] == again.served
    # A part of the prompts is no card: the quick profile leaves the committed one alone.
    part = serve_eagle("quick", place.opened.name, layout=place.layout, run=run)
    assert part.path.parent == place.layout.build and part.path.with_suffix(".md").is_file()
    assert full.path.with_suffix(".md").read_text() == card
    assert find_records(ACCEPTANCE, folder=place.layout.records("quick"), layout=place.layout)
    # A curve of other weights is not told of these, nor is another corpus.
    text = curve.read_text()
    header, *rows = text.splitlines()
    later = [json.dumps(json.loads(row) | {"seconds": 1e6}) for row in rows]
    curve.write_text("\n".join([header, *later, ""]))
    with pytest.raises(ValueError, match=r"no record of how the drafter for .* a curve with its check at step"):
        serve_eagle("full", place.opened.name, layout=place.layout, run=run)
    curve.write_text(text)
    monkeypatch.setattr(module, "committed_corpus", lambda opened: corpus_module.load_corpus(corpus_path(opened)))
    with pytest.raises(ValueError, match=r"and the committed one is .* train it again"):
        serve_eagle("full", place.opened.name, layout=place.layout, run=run)


def test_an_unknown_profile(place):
    with pytest.raises(ValueError, match="unknown profile 'fast': expected one of quick, full"):
        place.train("fast")


class TestFitting:
    PLAN = PLANS["full"].distill

    @pytest.mark.parametrize(
        ("layers", "read"), [(30, (1, 14, 27)), (12, (1, 5, 9)), (4, (1,)), (3, (0, 1)), (2, (0, 1)), (1, (0,))]
    )
    def test_layers_are_spread_over_the_target(self, layers, read):
        assert fitted(self.PLAN, tiny_llama(1, layers=layers).config).feature_layers == read

    def test_those_that_are_named_stay(self):
        plan = replace(self.PLAN, feature_layers=(2,))
        assert fitted(plan, tiny_llama(1).config).feature_layers == (2,)

    def test_no_more_tokens_than_the_target_has(self):
        config = tiny_llama(1, vocabulary=97).config
        assert fitted(self.PLAN, config).vocabulary == 97
        assert fitted(replace(self.PLAN, vocabulary=50), config).vocabulary == 50


def test_the_code_of_the_records_is_there():
    assert all((Path(Layout().root) / path).is_file() for path in (*module.LEARNING, *module.SERVING))
