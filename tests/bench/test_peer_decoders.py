"""The stopwatch that all peers share, and the judgement of differences. No model runs in these tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec_core.bench import peer_decoders
from specdec_core.bench.peer_decoders import (
    AR,
    PLAIN,
    Difference,
    Peer,
    PeerRun,
    Setting,
    Stopwatch,
    difference,
    grid,
    logits_after,
    seeded,
    with_default,
)
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits

OPTIONS = Options(max_new_tokens=8, eos=(2,))


class TestStopwatch:
    def test_it_runs_from_the_first_tokens_to_the_last(self, monkeypatch):
        now = iter([10.0, 11.0, 14.5])
        monkeypatch.setattr(peer_decoders, "perf_counter", lambda: next(now))
        watch = Stopwatch()
        for tokens in ([5, 6], [7], [8, 9, 1]):
            watch.emit(tokens)
        assert watch.run(2) == PeerRun((5, 6, 7, 8, 9, 1), counted=4, seconds=4.5, passes=2)
        assert watch.emissions == 3

    def test_what_ends_with_the_first_pass_was_not_timed(self):
        watch = Stopwatch()
        watch.emit([5, 6])
        assert watch.run(0) == PeerRun((5, 6), counted=0, seconds=0.0, passes=0)
        assert Stopwatch().run(None) == PeerRun((), 0, 0.0, None)


def test_settings():
    assert str(Setting(4, 2)) == "draft 4, n-gram 2" and str(Setting(5, schedule="constant")) == "draft 5, constant"
    assert str(PLAIN) == "draft 0"
    assert grid((1, 3), (2, 4)) == (Setting(1, 2), Setting(3, 2), Setting(1, 4), Setting(3, 4))
    assert grid((1, 3), schedule="s") == (Setting(1, None, "s"), Setting(3, None, "s"))
    assert with_default(grid((1, 3)), Setting(7)) == (Setting(1), Setting(3), Setting(7))
    assert with_default(grid((1, 3)), Setting(3)) == (Setting(1), Setting(3))


def peer_of(method: str = "lookup") -> Peer:
    return Peer("b f", "b", "f", method, (PLAIN,), lambda prompt, options, setting: PeerRun((1, 2), 1, 0.1, 1))


class TestPeer:
    def test_it_is_named_for_its_backend_and_method(self):
        assert peer_of().name == "b f · lookup" and peer_of().speculates and not peer_of(AR).speculates

    def test_the_decoder_gets_what_the_peer_is_given(self):
        asked = []
        peer = replace(peer_of(), decoder=lambda *given: asked.append(given) or PeerRun((1,), 0, 0.0, 0))
        assert peer.run([3, 4], OPTIONS, Setting(2)).tokens == (1,)
        assert asked == [((3, 4), OPTIONS, Setting(2))]

    def test_settings_that_do_not_fit(self):
        with pytest.raises(ValueError, match="b f · AR: draft 3, expected 0"):
            peer_of(AR).run((1,), OPTIONS, Setting(3))
        with pytest.raises(ValueError, match="b f · lookup: draft 0, expected at least 1"):
            peer_of().run((1,), OPTIONS)

    @pytest.mark.parametrize("change", [{"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 2.0}, {"stop": ("a",)}])
    def test_options_that_engines_do_not_share(self, change):
        with pytest.raises(ValueError, match="engines share temperature, max_new_tokens, eos and seed only"):
            peer_of(AR).run((1,), replace(OPTIONS, **change))

    def test_options_that_they_do(self):
        assert peer_of(AR).run((1,), Options(0.7, max_new_tokens=3, eos=(1, 5), seed=9)).tokens == (1, 2)


def test_prompts_draw_from_streams_of_their_own():
    assert [seeded(replace(OPTIONS, seed=5), index).seed for index in (0, 2)] == [5, 7]


VOCABULARY, PROMPT = 6, (1, 2, 3, 4, 5, 1)
TRUE = random_logits(VOCABULARY, 3)


class Rounding(TableTarget):
    """Passes over more than one token are off by `noise` in one token's logit."""

    noise, token = 0.0, 0

    def verify(self, state, slots, tokens, forest):
        found = super().verify(state, slots, tokens, forest)
        if len(tokens) > 1:
            found.logits[:, self.token] += self.noise
        return found


def judged_peer(logits, noise: float, token: int) -> Peer:
    engine = Rounding(logits, VOCABULARY)
    engine.noise, engine.token = noise, token
    return replace(peer_of(), judged=lambda: (engine, TableTarget(logits, VOCABULARY)))


def close_call(gap: float):
    """Logits of which tokens 4 and 2 are the largest after the prompt and one more token, apart by `gap`."""

    def logits(prefix):
        found = np.array(TRUE(prefix))
        if len(prefix) == len(PROMPT) + 1:
            found[:] = 0.0
            found[4], found[2] = 20.0, 20.0 - gap
        return found

    return logits


class TestDifference:
    def test_equal_outputs_have_none(self):
        assert difference(peer_of(), PROMPT, (1, 2), (1, 2), 3) is None

    @pytest.mark.parametrize("emitted", [(3,), (3, 4, 5)])
    def test_an_output_that_ends_early_or_late_is_no_near_tie(self, emitted):
        peer = judged_peer(close_call(0.0), 9.0, 2)
        assert difference(peer, PROMPT, (3, 4), emitted, 3) == Difference(min(2, len(emitted)), near_tie=False)

    def test_without_a_judge_it_is_only_found(self):
        assert difference(peer_of(), PROMPT, (3, 4), (3, 2), 3) == Difference(1, None, None, None)

    def test_of_an_exact_engine_it_is_never_excused(self):
        peer = replace(judged_peer(close_call(0.0), 9.0, 2), exact=True)
        assert difference(peer, PROMPT, (3, 4), (3, 2), 3) == Difference(1, near_tie=False)

    @pytest.mark.parametrize(("noise", "tie"), [(0.3, True), (0.26, True), (0.24, False), (0.0, False)])
    def test_a_gap_of_up_to_twice_the_rounding_error_is_a_near_tie(self, noise, tie):
        found = difference(judged_peer(close_call(0.5), noise, 2), PROMPT, (3, 4), (3, 2), 3)
        assert (found.index, found.near_tie) == (1, tie)
        assert found.gap == pytest.approx(0.5) and found.epsilon == pytest.approx(noise)

    def test_an_error_that_no_rounding_explains_excuses_nothing(self):
        found = difference(judged_peer(close_call(3.0), 5.0, 2), PROMPT, (3, 4), (3, 2), 3)
        assert found.epsilon == pytest.approx(0.06 * 20) and not found.near_tie

    def test_tokens_that_are_both_wrong_are_no_near_tie(self):
        found = difference(judged_peer(close_call(0.5), 0.3, 2), PROMPT, (3, 0), (3, 1), 3)
        assert found.gap == pytest.approx(20) and not found.near_tie

    def test_the_largest_logit_is_looked_at_too(self):
        found = difference(judged_peer(close_call(0.5), 0.3, 4), PROMPT, (3, 2), (3, 1), 3)
        assert found.epsilon == pytest.approx(0.3)

    def test_passes_are_as_wide_as_the_draft_and_its_root(self):
        widths = []

        class Seen(TableTarget):
            def verify(self, state, slots, tokens, forest):
                widths.append(len(tokens))
                return super().verify(state, slots, tokens, forest)

        engine, reference = Seen(TRUE, VOCABULARY), TableTarget(TRUE, VOCABULARY)
        difference(replace(peer_of(), judged=lambda: (engine, reference)), PROMPT, (3, 4), (3, 2), 3)
        assert sorted(widths) == [1, 4]


@pytest.mark.parametrize("width", [1, 3, 6, 40])
def test_logits_after_a_text_are_its_own_at_any_width(width):
    found = logits_after(TableTarget(TRUE, VOCABULARY), np.array(PROMPT), width)
    assert np.array_equal(found, TRUE(PROMPT)) and found.dtype == np.float64
