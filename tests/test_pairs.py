import re
from dataclasses import replace

import pytest

from specdec_core import pairs as module
from specdec_core.decode import generate
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.eagle_tree import EagleTreeDrafter
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.eagle_checkpoint import save_eagle, tiny_eagle
from specdec_core.models.errors import CorruptFile, ModelError, TokenizerMismatch, UnknownModel
from specdec_core.pairs import (
    DRAFTERS,
    PairError,
    eagle_path,
    open_drafter,
    open_target,
    required_features,
)
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from tests.tiny import SPECIAL, VOCABULARY, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

DOUBLE = Placement(dtype="float64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def opened(folder):
    return open_target(str(folder), DOUBLE)


def test_a_target_is_opened_with_its_tokenizer_where_it_was_placed(folder, opened):
    assert (opened.name, opened.target.placement, opened.target.vocabulary) == (str(folder), DOUBLE, VOCABULARY)
    assert opened.tokenizer.decode(opened.tokenizer.encode("Hällo")) == "Hällo"
    assert opened.checkpoint.folder == folder


def test_features_of_chosen_layers(folder):
    assert open_target(str(folder), DOUBLE, (2, 0)).target.feature_layers == (0, 2)


@pytest.mark.parametrize(
    ("kind", "drafter", "step"),
    [
        ("none", type(None), None),
        ("ngram", NGramDrafter, None),
        ("ngram-tree", NGramDrafter, None),
        ("layer-skip", LayerSkipDrafter, 2),  # two thirds of three layers
        ("layer-skip:1", LayerSkipDrafter, 1),
    ],
)
def test_a_drafter_by_name_and_the_model_that_a_step_runs(opened, kind, drafter, step):
    found, model = open_drafter(kind, opened)
    assert type(found) is drafter and (model and model.layers) == step


def test_a_tree_has_two_candidates_and_a_chain_one(opened):
    assert [open_drafter(kind, opened)[0].candidates for kind in ("ngram", "ngram-tree")] == [1, 2]


def test_any_model_with_the_same_tokenizer_drafts(opened, tmp_path):
    drafter, model = open_drafter(str(save_tiny(tmp_path / "small", seed=2, layers=1)), opened)
    assert isinstance(drafter, ModelDrafter) and drafter.vocabulary == VOCABULARY
    assert model.layers == 1 and model.placement == DOUBLE


@pytest.mark.parametrize("kind", ["ngram", "ngram-tree", "layer-skip", "layer-skip:1"])
def test_every_drafter_is_lossless(opened, kind):
    prompt, how = tuple(opened.tokenizer.encode("to be or not to be or")), Options(max_new_tokens=24)
    drafter, _ = open_drafter(kind, opened)
    assert generate(opened.target, [Request(prompt, how, FixedLength(4))], drafter) == generate(
        opened.target, [Request(prompt, how)]
    )


class TestBadInput:
    def test_an_unknown_model(self):
        with pytest.raises(UnknownModel, match=r"no model 'gpt-9': it is neither registered .* nor a folder"):
            open_target("gpt-9")

    @pytest.mark.parametrize("kind", ["beagle", "eagles:x", "ngram:3", "Ngram", "none:1"])
    def test_an_unknown_drafter_lists_the_known_ones(self, opened, kind):
        with pytest.raises(PairError, match=rf"unknown drafter '{kind}': expected one of none .*ngram.*layer-skip"):
            open_drafter(kind, opened)

    @pytest.mark.parametrize("layers", ["0", "3", "99", "x", "-1", "1.5"])
    def test_layers_that_are_no_early_exit(self, opened, layers):
        with pytest.raises(PairError, match=rf"layer-skip:{layers}: expected a number of layers in 1…2"):
            open_drafter(f"layer-skip:{layers}", opened)

    def test_a_drafter_with_another_tokenizer(self, opened, tmp_path):
        other = save_tiny(tmp_path / "other", special=SPECIAL[::-1])
        with pytest.raises(TokenizerMismatch, match=r"different tokenizers: 2 tokens differ of 259 and 259.*ngram"):
            open_drafter(str(other), opened)

    def test_a_drafter_without_a_tokenizer(self, opened, tmp_path):
        bare = save_tiny(tmp_path / "bare")
        (bare / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
            open_drafter(str(bare), opened)

    def test_a_damaged_drafter_is_not_an_unknown_one(self, opened, tmp_path):
        cut = save_tiny(tmp_path / "cut")
        weights = cut / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(CorruptFile, match="truncated or damaged"):
            open_drafter(str(cut), opened)


LAYERS = (0, 2)


@pytest.fixture(scope="module")
def trained(opened, tmp_path_factory):
    """The file of a drafter with random weights."""
    drafter = tiny_eagle(1, opened.checkpoint, LAYERS, vocabulary=100)
    return save_eagle(drafter, tmp_path_factory.mktemp("drafter") / "some.safetensors")


@pytest.fixture(scope="module")
def reading(folder):
    """The target with the features that this drafter reads."""
    return open_target(str(folder), DOUBLE, LAYERS)


class TestTrainedDrafters:
    @pytest.fixture
    def committed(self, trained, opened, tmp_path, monkeypatch):
        """The same file where the target's own drafter is looked for."""
        monkeypatch.setattr(module, "CHECKPOINTS", tmp_path)
        path = tmp_path / f"eagle-{opened.checkpoint.name}.safetensors"
        path.write_bytes(trained.read_bytes())
        return path

    @pytest.mark.parametrize(("kind", "drafter"), [("eagle", EagleDrafter), ("eagle-tree", EagleTreeDrafter)])
    def test_by_file_or_by_name(self, reading, trained, committed, kind, drafter):
        for name in (kind, f"{kind}:{trained}"):
            found, step = open_drafter(name, reading)
            assert type(found) is drafter and step is None
            assert found.checkpoint.feature_layers == LAYERS and found.checkpoint.config.vocabulary == 100
            assert required_features(name, reading.name) == LAYERS

    @pytest.mark.parametrize("kind", ["eagle", "eagle-tree"])
    def test_they_are_lossless(self, reading, trained, kind):
        prompt, how = tuple(reading.tokenizer.encode("to be or not to be or")), Options(max_new_tokens=24)
        drafter, _ = open_drafter(f"{kind}:{trained}", reading)
        assert generate(reading.target, [Request(prompt, how, FixedLength(4))], drafter) == generate(
            reading.target, [Request(prompt, how)]
        )

    def test_others_need_no_features(self, folder):
        for kind in ("none", "ngram", "ngram-tree", "layer-skip:1", str(folder), "eagles"):
            assert required_features(kind, str(folder)) == ()

    def test_a_file_is_named_after_its_target(self, opened):
        assert eagle_path(opened).parts[-3:] == ("data", "checkpoints", f"eagle-{opened.checkpoint.name}.safetensors")
        hub = replace(opened, checkpoint=replace(opened.checkpoint, name="hub:org/name"))
        assert eagle_path(hub).name == "eagle-hub-org-name.safetensors"

    @pytest.mark.parametrize("layers", [(), (0,), (0, 1, 2)])
    def test_a_target_with_other_features(self, folder, trained, layers):
        other = open_target(str(folder), DOUBLE, layers)
        given = re.escape(str(layers or "none"))
        with pytest.raises(
            PairError, match=rf"reads the target's layers \(0, 2\), .* {given}: open it with required_fea"
        ):
            open_drafter(f"eagle:{trained}", other)

    def test_another_target(self, trained, tmp_path):
        other = open_target(str(save_tiny(tmp_path / "other", seed=2)), DOUBLE, LAYERS)
        with pytest.raises(ModelError, match="give its own target, or train another"):
            open_drafter(f"eagle:{trained}", other)

    def test_a_file_that_is_absent(self, opened, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "CHECKPOINTS", tmp_path)
        for kind in ("eagle", f"eagle-tree:{tmp_path / 'none.safetensors'}"):
            for look in (lambda kind: open_drafter(kind, opened), lambda kind: required_features(kind, opened.name)):
                with pytest.raises(
                    CorruptFile, match=r"\.safetensors is absent: expected a drafter's safetensors file"
                ):
                    look(kind)

    def test_every_listed_name_can_be_opened(self, folder, committed):
        for kind in set(DRAFTERS) - {"MODEL"}:
            features = required_features(kind, str(folder))
            open_drafter(kind, open_target(str(folder), DOUBLE, features))
