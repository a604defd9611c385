"""The command `async-rl`. Each command imports what it needs when it runs, so that --help is instant."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from async_rl.errors import AsyncRLError, ConfigError
from benchmarks.commands import add_benchmarks

EXIT_ERROR, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 for what the user can mend in command, config or files, 130 after Ctrl-C, else 1."""
    args = _parse(arguments)
    try:
        return int(args.run(args))
    except AsyncRLError as error:
        print(f"async-rl: error: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        print("async-rl: interrupted, every process of the run has ended", file=sys.stderr)
        if str(interrupt):
            print(f"async-rl: {interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="async-rl",
        description="Asynchronous RL post-training of language models with bounded staleness.",
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")

    train = commands.add_parser("train", help="train a model by RL")
    _add_config(train, nargs="?")
    train.add_argument(
        "--resume", metavar="RUN_DIR", default="",
        help="go on from a run's newest checkpoint, or from RUN_DIR/checkpoints/step_N; CONFIG is the run's own",
    )
    train.add_argument("--dry-run", action="store_true", help="print config and derived sizes, start nothing")
    train.set_defaults(run=_train)

    sft = commands.add_parser("sft", help="make model.path from sft.base by supervised fine-tuning")
    _add_config(sft)
    sft.set_defaults(run=_sft)

    prepare = commands.add_parser("prepare", help="convert a data set's original files for task.path")
    prepare.add_argument("dataset", choices=["gsm8k"])
    prepare.add_argument("source", type=Path, metavar="IN.jsonl")
    prepare.add_argument("target", type=Path, metavar="OUT.parquet")
    prepare.set_defaults(run=_prepare)

    buffer = commands.add_parser("buffer", help="run the buffer alone, for clients of your own")
    _add_config(buffer, nargs="?")
    buffer.add_argument("--every-s", type=float, default=10.0, metavar="S", help="seconds between lines of counters")
    buffer.set_defaults(run=_buffer)

    export = commands.add_parser("export-trajectories", help="a run's journal as Parquet, a row for each rollout")
    export.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    export.add_argument("target", type=Path, metavar="OUT.parquet")
    export.set_defaults(run=_export_trajectories)

    keys = commands.add_parser("keys", help="make the keys that let the buffer leave loopback")
    keys.add_argument("action", choices=["new"])
    keys.add_argument("folder", type=Path, metavar="DIR", help="for network.keys; give it to every host of the run")
    keys.set_defaults(run=_keys)

    _add_model_commands(commands)
    add_benchmarks(commands, _add_config)
    _add_inspections(commands)

    args, rest = parser.parse_known_args(arguments)
    overrides_behind_an_option = [text for text in rest if "=" in text and not text.startswith("-")]
    if len(overrides_behind_an_option) < len(rest) or (rest and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += overrides_behind_an_option
    if "=" in (getattr(args, "config", None) or ""):  # only overrides, no CONFIG
        args.config, args.overrides = None, [args.config, *args.overrides]
    if args.command in ("train", "sft", "sweep") and not (args.config or getattr(args, "resume", "")):
        or_resume = ", or --resume RUN_DIR" if args.command == "train" else ""
        parser.error(f"{args.command} needs a CONFIG, e.g. configs/quickstart.yaml{or_resume}")
    if args.run is _doctor and args.overrides and not args.config:
        parser.error(f"doctor needs a CONFIG to apply {' '.join(args.overrides)} to")
    return args


def _add_inspections(commands: Any) -> None:
    status = commands.add_parser("status", help="who waits on whom, in a run that goes on or has ended")
    status.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    status.set_defaults(run=_status)

    doctor = commands.add_parser("doctor", help="check this machine, and a config if one is given")
    _add_config(doctor, nargs="?")
    doctor.set_defaults(run=_doctor)


def _add_model_commands(commands: Any) -> None:
    export = commands.add_parser("export", help="a checkpoint as a Hugging Face folder")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="RUN_DIR/checkpoints/step_N, or RUN_DIR: the newest")
    export.add_argument("target", type=Path, metavar="OUT_DIR")
    export.set_defaults(run=_export)

    evaluate = commands.add_parser("eval", help="held-out accuracy of a model folder")
    evaluate.add_argument("model", type=Path, metavar="MODEL", help="Hugging Face folder, e.g. RUN_DIR/model")
    _add_config(evaluate, nargs="?")
    evaluate.set_defaults(run=_eval)


def _add_config(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("config", nargs=nargs, metavar="CONFIG", help="YAML, e.g. configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. staleness.max=2 run.steps=60")


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"async-rl {version('async-rl')}")
        parser.exit()


def _train(args: argparse.Namespace) -> int:
    from async_rl.config.loading import load_config
    from async_rl.pipeline import dry_run, run

    if args.resume:
        from async_rl.storage.checkpoints import find_checkpoint, run_dir_of

        args.config = args.config or run_dir_of(find_checkpoint(args.resume)) / "config.yaml"
        args.overrides = [f"run.resume={args.resume}", *args.overrides]
    config = load_config(args.config, args.overrides)
    if args.dry_run:
        print(dry_run(config), end="")
    else:
        print(format_summary(run(config)), end="")
    return 0


def _sft(args: argparse.Namespace) -> int:
    from async_rl.config.loading import dump_config, load_config

    config = load_config(args.config, args.overrides)
    target = Path(config.model.path)
    config_copy = target / "sft_config.yaml"
    if target.is_file() or (target.exists() and not config_copy.is_file() and any(target.iterdir())):
        raise ConfigError(
            f"model.path {target} is or holds what `async-rl sft` did not make; it will not be overwritten. "
            "Set model.path to where the result shall go, and sft.base to the model to start from"
        )
    from learner.sft import base_tokenizer, train_sft
    from rollout_server.tasks.base import open_task

    task = open_task(config, base_tokenizer(config))
    target.mkdir(parents=True, exist_ok=True)
    config_copy.write_text(dump_config(config))  # first: a run cut short may be repeated
    pairs = task.sft_pairs(min(task.num_prompts, config.sft.steps * config.sft.batch_size))
    for report in train_sft(config, pairs, target, config.sft.target_loss):
        values = "  ".join(f"{metric.key} {metric.value:.4g}" for metric in report.metrics)
        print(f"sft step {report.step}/{config.sft.steps}  {values}", flush=True)
    print(f"model saved in {target}")
    return 0


def _prepare(args: argparse.Namespace) -> int:
    from rollout_server.tasks.prepare_gsm8k import prepare_gsm8k

    rows = prepare_gsm8k(args.source, args.target)
    print(f"{rows} rows written to {args.target}")
    return 0


def _buffer(args: argparse.Namespace) -> int:
    from async_rl.config.check import check
    from async_rl.config.loading import load_config
    from async_rl.driver.signals import StopSignals
    from async_rl.storage.run_dir import open_buffer_dir
    from buffer.standalone import serve_alone

    longest_s = threading.TIMEOUT_MAX
    check(0 < args.every_s <= longest_s, "--every-s", args.every_s, f"above 0, at most {longest_s:.0f}")
    defaults = [] if args.config else ["model.path=none", "task.name=reasoning_gym/none", "run.name=buffer"]
    config = load_config(args.config, [*defaults, *args.overrides])
    with StopSignals(), open_buffer_dir(config):
        counters = serve_alone(config, partial(print, flush=True), args.every_s)
    print("ended in order: " + "  ".join(f"{key} {value:.0f}" for key, value in counters.items() if value))
    return 0


def _export_trajectories(args: argparse.Namespace) -> int:
    from buffer.journal.export import export_trajectories

    rows = export_trajectories(args.run_dir, args.target)
    print(f"{rows} rollouts written to {args.target}")
    return 0


def _keys(args: argparse.Namespace) -> int:
    from buffer.protocol.keys import new_keys

    new_keys(args.folder)
    print(f"keys written to {args.folder}; set network.keys={args.folder}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from learner.models.export import export

    checkpoint = export(args.checkpoint, args.target)
    print(f"{checkpoint} exported to {args.target}")
    return 0


def _eval(args: argparse.Namespace) -> int:
    from async_rl.config.loading import load_config
    from async_rl.driver.signals import StopSignals
    from rollout_server.eval_command import evaluate_model

    of_its_run = args.model.parent / "config.yaml"
    if not args.config and not of_its_run.is_file():
        if not args.model.is_dir():
            raise ConfigError(f"MODEL must be a folder, e.g. RUN_DIR/model, got {args.model}: there is no such folder")
        raise ConfigError(f"async-rl eval needs a CONFIG with the task: there is no {of_its_run} beside the model")
    config = load_config(args.config or of_its_run, [*args.overrides, f"model.path={args.model}"])
    with StopSignals():
        values = evaluate_model(config)
    width = max(map(len, values))
    print("".join(f"{key:<{width}}  {value:10.4g}\n" for key, value in values.items() if key != "eval/version"), end="")
    return 0


def _status(args: argparse.Namespace) -> int:
    from async_rl.telemetry.status import format_status

    print(format_status(args.run_dir), end="")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from async_rl.config.loading import load_config
    from async_rl.doctor.host import examine, print_table
    from async_rl.driver.placement import runs_here

    config = load_config(args.config, args.overrides) if args.config else None
    checks = examine(config)
    if config and not runs_here(config):
        from async_rl.doctor.cluster import examine_nodes

        checks += examine_nodes(config)
    print_table(checks)
    return EXIT_ERROR if any(check.state == "broken" for check in checks) else 0


_SUMMARY_ROWS = (
    ("held-out accuracy, start", "accuracy_start", "{:.3f}"),
    ("held-out accuracy, end", "accuracy_end", "{:.3f}"),
    ("staleness, mean", "staleness_mean", "{:.2f}"),
    ("staleness, max", "staleness_max", "{:.0f}"),
    ("utilisation, learner", "utilisation/learner", "{:.1%}"),
    ("utilisation, rollout", "utilisation/rollout", "{:.1%}"),
    ("rollouts/s", "rollouts_per_s", "{:,.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("weight push, ms", "push_ms", "{:,.0f}"),
    ("generation paused by a push, ms", "pause_ms", "{:,.0f}"),
    ("steps", "steps", "{:,.0f}"),
    ("seconds after the first step", "seconds", "{:,.1f}"),
)


def format_summary(summary: Mapping[str, Any]) -> str:
    """The result of a run as a table, a line for each value that was measured."""
    measured = [row for row in _SUMMARY_ROWS if summary.get(row[1]) is not None]
    rows = [(label, form.format(summary[key])) for label, key, form in measured]
    label_width = max((len(label) for label, _ in rows), default=0)
    value_width = max((len(value) for _, value in rows), default=0)
    return "\n" + "".join(f"{label:<{label_width}}  {value:>{value_width}}\n" for label, value in rows)


if __name__ == "__main__":
    sys.exit(main())
