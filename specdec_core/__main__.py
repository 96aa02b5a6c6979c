"""The command line: `python -m specdec_core COMMAND`. One thin subcommand a function; imports wait until one is run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Known errors are one line, without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nobody reads any more; what is left must not be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, ArithmeticError, OSError, RuntimeError) as error:
        print(f"specdec: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m specdec_core", description="Speculative decoding, proved and measured.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command("reproduce", _reproduce, "run the notebooks, draw the figures, print the claims")
    sub.add_argument("--profile", default="quick", help="quick (default) or full")
    sub.add_argument("--only", action="append", help="a notebook's number, such as 02; may be given several times")
    sub.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE", help="notebook parameter")
    sub.add_argument("--write-back", action="store_true", help="put the executed notebooks back into notebooks/")
    sub = command("keep", _keep, "keep records under data/records and bring README up to date, to be committed")
    sub.add_argument("--profile", default="full", help="quick or full (default)")
    sub.add_argument("name", nargs="*", default=["*"], help="record files, such as 02_sweep or '02_*' (default: all)")
    command("replay", _replay, "redraw figures, verdicts and tables from records, without torch")
    sub = command("claims", _claims, "print the claims table")
    sub.add_argument("--json", action="store_true")
    command("report", _report, "write build/report.html")

    sub = command("generate", _generate, "answer a prompt, with speculation")
    sub.add_argument("--prompt", required=True)
    sub.add_argument("--model", default="smollm2-135m-instruct", help="registered name, folder, or hub:org/name")
    sub.add_argument(
        "--drafter", default="ngram", help="eagle, eagle-tree, ngram, ngram-tree, layer-skip[:M], none, or a model"
    )
    sub.add_argument("--k", type=int, default=4, help="speculation length K (default 4)")
    sub.add_argument("--temperature", type=float, default=0.0)
    sub.add_argument("--top-p", type=float, default=1.0)
    sub.add_argument("--top-k", type=int, default=0)
    sub.add_argument("--min-p", type=float, default=0.0)
    sub.add_argument("--repetition-penalty", type=float, default=1.0)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--max-new-tokens", type=int, default=128)
    sub.add_argument("--stop", action="append", default=[], help="a string that ends the answer")
    sub.add_argument("--raw", action="store_true", help="no chat template")
    _placement_options(sub)

    sub = command("bench", _bench, "time this machine; records replay anywhere")
    sub.add_argument(
        "what",
        help="sd: curves, AR and SD; greedy: SD against AR on every prompt; audit: other samplers; "
        "gdn: linear attention on --device cuda, random weights",
    )
    sub.add_argument("--out", type=Path, required=True, help="folder for the records")
    sub.add_argument("--model", default="smollm2-135m-instruct")
    _placement_options(sub)

    sub = command("train", _train, "write the target's own text, or train a drafter on it; goes on if interrupted")
    sub.add_argument(
        "what",
        help="corpus: the target's answers to our prompts and its own; eagle: a drafter; "
        "serve: how the shipped one drafts",
    )
    sub.add_argument("--profile", default="quick", help="quick (default): a toy; full: what is shipped")
    sub.add_argument("--model", default="smollm2-135m-instruct")

    sub = command("models", _models, "list the models, or get them ready")
    sub.add_argument("--prepare", action="store_true", help="convert what is installed, once")
    command("doctor", _doctor, "say what this machine has and what is missing")
    return parser


def _placement_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or mps")
    sub.add_argument("--engine", default=None, help="numba or torch (default: numba where it can run)")
    sub.add_argument("--dtype", default="float32", help="float32 (default), float64, bfloat16, float16, int8")
    sub.add_argument("--threads", type=int, default=None)


def _placement(options: argparse.Namespace):
    from specdec_core.placement import Placement, default_engine

    engine = options.engine or default_engine(options.device, options.dtype)
    return Placement(engine, options.device, options.dtype, options.threads)


def _reproduce(options: argparse.Namespace) -> int:
    from specdec_core.evidence.evaluate import failures
    from specdec_core.evidence.notebooks import parse_parameter
    from specdec_core.evidence.runner import reproduce

    parameters = dict(parse_parameter(each) for each in options.parameter)
    done = reproduce(options.profile, options.only or (), parameters, write_back=options.write_back)
    return 1 if failures(done.verdicts) else 0


def _replay(options: argparse.Namespace) -> int:
    from specdec_core.evidence.claims_table import text_table
    from specdec_core.evidence.evaluate import failures
    from specdec_core.evidence.report import replay

    done = replay()
    print(text_table(done.verdicts))
    print(f"{len(done.figures)} figures redrawn; report in {done.report}")
    return 1 if failures(done.verdicts) else 0


def _keep(options: argparse.Namespace) -> None:
    from specdec_core.evidence.claims_table import update_readme
    from specdec_core.evidence.records import keep_records

    kept = keep_records(options.profile, names=options.name)
    if not kept:
        raise ValueError(f"no {options.profile} records named {' '.join(options.name)}: run reproduce first")
    print(*kept, sep="\n")
    print(f"README {'brought up to date' if update_readme() else 'as it was'}")


def _claims(options: argparse.Namespace) -> int:
    from specdec_core.evidence.claims_table import print_claims
    from specdec_core.evidence.evaluate import failures

    return 1 if failures(print_claims(options.json)) else 0


def _report(options: argparse.Namespace) -> None:
    from specdec_core.evidence.report import write_report

    print(write_report())


def _generate(options: argparse.Namespace) -> None:
    from specdec_core.pairs import open_target, required_features
    from specdec_core.sampling import Options
    from specdec_core.talk import talk

    how = Options(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        max_new_tokens=options.max_new_tokens,
        stop=tuple(options.stop),
        seed=options.seed,
    )
    features = required_features(options.drafter, options.model)
    opened = open_target(options.model, _placement(options), features)
    talk(opened, options.prompt, options.drafter, options.k, how, options.raw)


def _bench(options: argparse.Namespace) -> None:
    from specdec_core.bench import BENCHES

    if options.what not in BENCHES:
        raise ValueError(f"unknown bench {options.what!r}: expected one of {', '.join(BENCHES)}")
    BENCHES[options.what](options.model, _placement(options), options.out)


def _train(options: argparse.Namespace) -> None:
    from specdec_core.training import TRAININGS

    if options.what not in TRAININGS:
        raise ValueError(f"unknown training {options.what!r}: expected one of {', '.join(TRAININGS)}")
    print(*TRAININGS[options.what](options.profile, options.model), sep="\n")


def _models(options: argparse.Namespace) -> None:
    from specdec_core.models.registry import load, names

    for name in names():
        print(f"{name}: {f'ready, {load(name).fingerprint[:12]}' if options.prepare else 'registered'}")
    if not options.prepare:
        print("Any folder with config.json and safetensors, or hub:org/name, works too.")


def _doctor(options: argparse.Namespace) -> None:
    from specdec_core.doctor import examine_machine

    for line in examine_machine():
        print(line)


if __name__ == "__main__":
    sys.exit(main())
