import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import specdec_core.forensics
from specdec_core.decode import RequestError
from specdec_core.drafters.model import ModelDrafter
from specdec_core.forensics.audit import audit, ours
from specdec_core.forensics.mutants import MUTANTS
from specdec_core.lengths.fixed import FixedLength
from specdec_core.sampling import Options
from specdec_core.statistics.battery import BY_OFFSET, DIRECTED, DISCREPANCY, EQUIVALENCE, NOMINAL, PERMUTED
from specdec_core.targets.table import TableTarget, random_logits

ROOT = Path(__file__).parents[2]
V, LENGTH = 8, 16
LOGITS, NOISE, TILT = random_logits(V, seed=3), random_logits(V, seed=4, spread=0.5), np.linspace(1.2, -1.2, V)
TARGET = TableTarget(LOGITS, V)
DRAFT = TableTarget(lambda prefix: LOGITS(prefix) + NOISE(prefix) + TILT, V)
PROMPTS = [(number, 5) for number in range(V)]
SAMPLED = Options(temperature=1.0, max_new_tokens=LENGTH)
ENDING = replace(SAMPLED, eos=(3,), min_new_tokens=4)
GREEDY = Options(max_new_tokens=LENGTH)
MUTANT = {mutant.name: mutant for mutant in MUTANTS}


def ours_for(options=SAMPLED, target=TARGET):
    return ours(target, ModelDrafter(DRAFT, V), FixedLength(3), options)


def audited(decoder, options=SAMPLED, repeats=16, **how):
    return audit(decoder, TARGET, PROMPTS, options, alternative=DRAFT, repeats=repeats, **how)


def with_mutant(name, options=SAMPLED):
    def decoder(prompt, seed):
        with MUTANT[name].inject():
            return ours_for(options)(prompt, seed)

    return decoder


@pytest.fixture(scope="module")
def right():
    return audited(ours_for(), repeats=40, delta=0.03)


def test_our_decoder_is_lossless(right):
    assert right.lossless is True and right.verdict == "lossless" and not right.rejected
    assert (right.tokens, right.sequences) == (8 * 40 * LENGTH, 320)
    assert right.tokens / 4 < right.rounds < 0.7 * right.tokens  # told by the decoder, and it does speculate
    assert right.bias.low < 0 < right.bias.high and right.bias.tv_lower == 0
    assert right.results[EQUIVALENCE].p < 0.05
    assert set(right.adjusted) == set(right.results) - {NOMINAL, EQUIVALENCE} and DISCREPANCY in right.adjusted
    assert [part.name for part in right.results[BY_OFFSET].parts] == ["0", "1", "2", "3"]


def test_the_report_reads_as_a_table(right):
    lines = str(right).splitlines()
    assert lines[0].startswith("lossless: 5120 tokens in 320 sequences, alpha 0.05")
    assert [line.split("  ")[1] for line in lines[1:-1]] == list(right.results)
    assert "total variation ≥ 0.0000" in lines[-1] and "|bias| < 0.03 shown" in lines[-2]
    assert not any("rejects" in line for line in lines)


@pytest.mark.parametrize("name", ["bonus from q", "residual p", "argmax tested against soft q"])
def test_a_decoder_with_a_known_fault_is_not(name):
    report = audited(with_mutant(name))
    assert report.lossless is False and report.rejected and not report.violations
    assert "← rejects" in str(report)


def test_a_control_that_is_only_unusual_passes():
    report = audited(with_mutant("control: draws from p and matches"))
    assert not report.rejected and not report.violations


def test_a_sampler_at_another_temperature_is_seen_without_a_draft_model():
    warm = replace(SAMPLED, temperature=1.5)
    report = audit(ours(TARGET, None, None, warm), TARGET, PROMPTS, SAMPLED, repeats=16)
    assert report.lossless is False and report.adjusted[DIRECTED] < 0.01
    assert report.bias.bias > 0 and report.bias.tv_lower > 0.01  # towards the flatter law


def test_a_fault_at_one_offset_shows_only_if_rounds_are_told():
    broken = with_mutant("bonus from q")
    told, flat = audited(broken, repeats=4), audited(lambda *a: [t for part in broken(*a) for t in part], repeats=4)
    assert len(told.results[BY_OFFSET].parts) == 4 and len(flat.results[BY_OFFSET].parts) == 1
    assert told.rounds and flat.rounds is None
    assert told.results[DIRECTED].statistic == flat.results[DIRECTED].statistic


def test_few_tokens_decide_nothing():
    few = audited(ours_for(), repeats=1)
    assert few.lossless is None and few.verdict == "undecided" and few.results and not few.equivalent
    none = audit(ours_for(replace(SAMPLED, max_new_tokens=1)), TARGET, PROMPTS, replace(SAMPLED, max_new_tokens=1))
    assert none.lossless is None and not none.results and none.tokens == 8
    assert str(none) == "undecided: 8 tokens in 8 sequences, alpha 0.05"


def test_no_rejection_is_no_proof(right):
    assert replace(right, results={}).lossless is None
    assert replace(right, adjusted={DIRECTED: 0.05}).lossless is False
    assert replace(right, adjusted={DIRECTED: 0.051}).lossless is True
    assert replace(right, adjusted={DIRECTED: 0.04}, alpha=0.01).lossless is True
    equal = right.results[EQUIVALENCE]
    assert replace(right, results={EQUIVALENCE: replace(equal, p=0.051)}).lossless is None
    assert replace(right, results={EQUIVALENCE: replace(equal, p=0.049)}, alpha=0.01).lossless is True


def failing(prompt, seed):
    if prompt[0] == 2:
        raise IndexError("off by one")
    return {5: [], 6: None, 7: ["x"]}.get(prompt[0]) if prompt[0] > 4 else ours_for()(prompt, seed)


def test_a_decoder_that_crashes_or_returns_nothing_is_reported_and_the_rest_is_kept():
    report = audited(failing, repeats=2)
    assert [(each.prompt, each.repeat) for each in report.failures] == [(p, r) for r in (0, 1) for p in (2, 5, 6, 7)]
    whats = [each.what for each in report.failures[:4]]
    assert whats[0] == "IndexError: off by one" and "returned no tokens" in whats[1] == whats[2]
    assert whats[3].startswith("ValueError")
    assert (report.sequences, report.tokens) == (8, 8 * LENGTH) and report.results
    assert report.results[PERMUTED].n == 2 * 8  # as many to compare with, of the same prompts
    assert report.lossless is None and "  … 8 failures in all" in str(report)


def test_failures_bar_the_verdict_lossless(right):
    assert replace(right, failures=audited(failing, repeats=1).failures).lossless is None


def test_a_decoder_that_only_crashes_is_undecided():
    report = audited(lambda prompt, seed: 1 / 0, repeats=1)
    assert report.lossless is None and report.sequences == 0 and len(report.failures) == 8 and not report.results


CASES = {
    "foreign id": (SAMPLED, [1] * 4 + [V] + [1] * 11, 4, f"token {V} at 4: expected 0…{V - 1}"),
    "negative id": (SAMPLED, [-1] + [1] * 15, 0, "token -1 at 0"),
    "overshoot": (SAMPLED, [1] * 17, 16, "17 tokens: expected at most 16"),
    "after the end": (ENDING, [1, 1, 1, 1, 3, 2, 2], 5, "2 tokens after the end token at 4"),
    "end too early": (ENDING, [1, 1, 1, 3], 3, "end token at 3: expected none before 4 tokens"),
    "stops by itself": (ENDING, [1] * 7, 7, "ends after 7 tokens without an end token"),
}


@pytest.mark.parametrize(("options", "tokens", "kept", "what"), CASES.values(), ids=CASES)
def test_an_ending_that_the_options_forbid_is_an_exact_finding(options, tokens, kept, what):
    def decoder(prompt, seed):
        return tokens if prompt[0] == 0 else ours_for(options)(prompt, seed)

    report = audited(decoder, options, repeats=1)
    assert [(each.prompt, each.what.startswith(what)) for each in report.violations] == [(0, True)]
    assert report.lossless is False and report.results
    others = audited(lambda *a: [] if a[0][0] == 0 else ours_for(options)(*a), options, repeats=1)
    assert not others.violations and report.tokens == others.tokens + kept  # cut where it broke the options


@pytest.mark.parametrize("length", [4, 5, 16])
def test_endings_that_the_options_allow(length):
    def decoder(prompt, seed):
        return [1] * length if length == 16 else [1] * length + [3]

    assert not audited(decoder, ENDING, repeats=1).violations


def test_a_row_may_end_where_the_context_does():
    short = TableTarget(LOGITS, V, context=12)
    report = audit(ours(short, None, None, SAMPLED), short, PROMPTS, SAMPLED)
    assert not report.violations and report.tokens == 8 * 10
    over = audit(lambda prompt, seed: [1] * 11, short, PROMPTS, SAMPLED)
    assert len(over.violations) == 8


@pytest.mark.parametrize("name", ["one token over the cap", "end token inside a block ignored"])
def test_a_mutant_of_the_endings_is_an_exact_finding(name):
    options = ENDING if "end token" in name else SAMPLED
    report = audited(with_mutant(name, options), options, repeats=4)
    assert report.lossless is False and report.violations


def test_greedy_decoders_are_compared_by_token_ids():
    report = audited(ours_for(GREEDY), GREEDY, repeats=1)
    assert report.lossless is True and not report.results and "8 sequences compared" in str(report)
    broken = audited(with_mutant("target cache one short", GREEDY), GREEDY, repeats=1)
    assert broken.lossless is False
    assert broken.violations[0].what.startswith("differs from autoregressive decoding at token ")


def test_a_greedy_sequence_that_breaks_the_options_is_told_once():
    report = audited(lambda prompt, seed: [V], GREEDY, repeats=1)
    assert len(report.violations) == 8 and all("expected 0…7" in each.what for each in report.violations)


class Rounding(TableTarget):
    """Rounds otherwise in wider passes, by what decides a near-tie."""

    def verify(self, state, slots, tokens, forest):
        found = super().verify(state, slots, tokens, forest)
        if len(tokens) > 1:
            found.logits[:, 5] += 2e-4
        return found


def tied(prefix):
    return np.eye(V)[prefix[-1] % 4] if len(prefix) != 7 else np.eye(V)[4] + (1 - 1e-4) * np.eye(V)[5]


def test_greedy_near_ties_are_certified_with_a_reference_and_only_then():
    target, reference = Rounding(tied, V), TableTarget(tied, V)
    prompts = [(0, 1, 2, 3)]
    decoder = ours(target, ModelDrafter(reference, V), FixedLength(3), GREEDY)
    alone = audit(decoder, target, prompts, GREEDY)
    assert alone.lossless is False and alone.violations[0].what.endswith("at token 3")
    report = audit(decoder, target, prompts, GREEDY, reference=reference)
    assert report.lossless is True and report.near_ties == 1


def test_the_draft_model_gives_the_direction():
    towards, flat = audited(ours_for(), repeats=1), audit(ours_for(), TARGET, PROMPTS, SAMPLED)
    assert towards.bias != flat.bias and towards.results[NOMINAL] == flat.results[NOMINAL]


def test_audits_are_seeded():
    one, same, other = (audited(ours_for(), repeats=1, seed=seed) for seed in (0, 0, 1))
    assert one.bias == same.bias and one.adjusted == same.adjusted and one.bias != other.bias


def test_the_comparison_sequences_are_not_the_decoders_own():
    """With streams in common our AR would be compared with itself and pass whatever it does."""
    report = audited(ours(TARGET, None, None, SAMPLED), repeats=4)
    assert report.results[NOMINAL].statistic > 0


def test_what_cannot_be_audited_is_refused_before_the_decoder_runs():
    def never(prompt, seed):
        raise AssertionError("ran")

    with pytest.raises(ValueError, match="at least one"):
        audit(never, TARGET, [], SAMPLED)
    with pytest.raises(ValueError, match="stop strings"):
        audit(never, TARGET, PROMPTS, replace(SAMPLED, stop=("a",)))
    with pytest.raises(RequestError, match="expected 0…7"):
        audit(never, TARGET, [(V,)], SAMPLED)


def test_it_is_public_and_asks_for_no_heavy_import():
    assert specdec_core.forensics.audit is audit
    heavy = "{'torch', 'scipy', 'transformers', 'numba'}"
    code = f"import sys, specdec_core.forensics as f; assert callable(f.audit); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"
