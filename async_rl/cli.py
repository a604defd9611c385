"""The command `async-rl`: the options of every subcommand, then a function for each.

A function imports its code only when it runs: --help is fast, and a run loads nothing of sweeps or the doctor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import async_rl
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.host import limit_spinning
from async_rl.base.run_dir.files import split_tails
from async_rl.base.seams.lookup import check_extra, check_module_names

if TYPE_CHECKING:
    from async_rl.base.config import Config

EXIT_ERROR, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
GROUPS = {
    "start": ("init", "doctor"),
    "train": ("sft", "reward-model", "train", "sweep"),
    "look": ("status", "servers", "view", "report", "eval", "plan"),
    "export": ("export", "export-trajectories"),
    "advanced": ("answer", "certify", "config", "keys", "prepare"),
}
"""The commands of `async-rl --help`, by its headings."""
OTHER_COMMANDS = {"resume": "train --resume RUN_DIR", "run": "train CONFIG", "compare": "sweep or report"}
"""What to type in place of commands that people expect."""
BOUNDS = "0,1,2,3,5,8,10"
BELOW = "1.25/8 is staleness.depth 1.25 below staleness.max 8"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The code is 0 for success, 2 for an error in command, configuration or files, 130 after Ctrl-C or SIGTERM, else 1.
    """
    limit_spinning()
    args = parse(arguments)
    try:
        check_module_names()
        return int(args.run(args))
    except AsyncRLError as error:
        tails, cause = split_tails(str(error))
        if tails:
            print(tails, file=sys.stderr)
        print(f"async-rl: error: {cause}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        print("async-rl: interrupted, every process of the run has ended", file=sys.stderr)
        if str(interrupt):
            print(f"async-rl: {interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED


class _CommandParser(argparse.ArgumentParser):
    """An argument parser whose help begins with the description: a sentence and an example."""

    def format_help(self) -> str:
        description, self.description = self.description, None
        text = f"{description}\n\n{super().format_help()}"
        self.description = description
        return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; the result's `run` is the command's function. CONFIG and key=value words may be anywhere."""
    parser = _CommandParser(
        prog="async-rl", usage="async-rl [-h] [--version] COMMAND ...", formatter_class=argparse.RawTextHelpFormatter,
        description=_description(
            "Asynchronous RL post-training of language models with bounded staleness.",
            "async-rl train quickstart.yaml      # which async-rl init writes",
        ),
    )
    parser.add_argument("--version", action="version", version=f"async-rl {async_rl.__version__}")
    commands = parser.add_subparsers(required=True, dest="command", prog="async-rl", help=argparse.SUPPRESS)
    _add_commands(commands)
    _add_sweeps(commands)
    parser.epilog = _grouped_help(commands.choices)

    arguments = sys.argv[1:] if arguments is None else arguments
    first = next((word for word in arguments if not word.startswith("-")), "")
    if first and first not in commands.choices:
        parser.error(_unknown_command(first, commands.choices))
    args, rest = parser.parse_known_args(arguments)
    parser = commands.choices[args.command]  # its usage belongs to what may be wrong from here on
    if rest and (not hasattr(args, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if hasattr(args, "words"):
        words = [*args.words, *rest]
        config = next((word for is_config in (_has_no_value, _is_file) for word in words if is_config(word)), None)
        args.config = os.path.expanduser(config) if config else None
        args.overrides = [word for word in words if word is not config]
        if args.command == "train" and args.staleness is not None:
            args.overrides.append(f"staleness.max={args.staleness}")
        if args.needs_config and not args.config and getattr(args, "resume", "") in ("", "auto"):
            begin_with = "quickstart.yaml, which `async-rl init` writes"
            parser.error(f"it needs a CONFIG, e.g. {begin_with}{args.or_else}")
    for name, value in vars(args).items():
        if isinstance(value, Path):
            setattr(args, name, value.expanduser())
    return args


def _grouped_help(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the list of commands for `async-rl --help`, under the headings of GROUPS."""
    groups = [
        f"{title}:\n" + "\n".join(f"  {name:<20} {commands[name].get_default('about')}" for name in names)
        for title, names in GROUPS.items()
    ]
    return "\n\n".join([*groups, "async-rl COMMAND --help shows the options of a command, with an example."])


def _unknown_command(word: str, commands: Iterable[str]) -> str:
    """Return the error for a command that does not exist. It names the nearest one."""
    near = OTHER_COMMANDS.get(word) or next(iter(get_close_matches(word, commands, n=1)), "")
    hint = f"Did you mean async-rl {near}?" if near else "async-rl --help lists them."
    return f"there is no command {word}. {hint}"


def _has_no_value(word: str) -> bool:
    return "=" not in word


def _is_file(word: str) -> bool:
    """Whether a word with `=` is a path, such as runs/lr=1/config.yaml. No configuration key contains a slash."""
    return "/" in word.partition("=")[0] or os.path.isfile(word)


def _description(sentence: str, example: str) -> str:
    """Return the beginning of a command's --help: the sentence, and an example of a call."""
    return f"{sentence}\n\nexample: {example}"


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, example: str
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        run: the command's function, which returns the exit code.
        example: what a user types after the command's name.
    """
    description = _description(f"{help[0].upper()}{help[1:]}.", f"async-rl {name} {example}")
    parser: argparse.ArgumentParser = commands.add_parser(name, description=description)
    parser.set_defaults(run=run, about=help)
    return parser


def _add_commands(commands: Any) -> None:
    quickstart, add = "quickstart.yaml", partial(_add_command, commands)
    about = "write an example config with its reward into this folder"
    init = add("init", _init, about, "quickstart")
    about = "quickstart: a tiny model learns to spell words backward; agent: it learns to look letters up over several "
    about += "turns; math: Qwen2.5-0.5B learns GSM8K on one GPU (default: %(default)s)"
    names = ("quickstart", "agent", "math")
    init.add_argument("starter", nargs="?", choices=names, default="quickstart", metavar="NAME", help=about)
    train = add("train", _train, "train a model by RL", f"{quickstart} staleness.max=2 run.steps=60")
    _add_config(train, or_else=", or --resume RUN_DIR")
    train.add_argument(
        "--resume", metavar="RUN_DIR", default="", type=os.path.expanduser,
        help="continue from a run's newest checkpoint, or from RUN_DIR/checkpoints/step_N; CONFIG is the run's own. "
        "auto: start the run of CONFIG, or continue it if it has a checkpoint, as jobs that are preempted want it",
    )
    about = "staleness.max: how many versions older than the learner's weights a trained token may be; 0: synchronous"
    train.add_argument("--staleness", type=int, metavar="N", help=about)
    about = "print what differs from the defaults, derived sizes, hosts and memory; start nothing"
    train.add_argument("--dry-run", action="store_true", help=about)
    train.add_argument("--all", action="store_true", help="with --dry-run: also print every setting, as YAML")
    about = "with --dry-run of a run over several hosts: the memory of their GPUs, e.g. 80, to show what fits"
    train.add_argument("--gpu-gb", type=float, default=0.0, metavar="GB", help=about)
    train.add_argument("--view", action="store_true", help="show the run in the browser while it runs; see view")
    about = "measure whether engine and learner compute the same logprobs: a short synchronous run, and its certificate"
    _add_config(add("certify", _certify, about, f"{quickstart} rollout.engine=sglang"))
    about = "make the first model, model.path, from sft.base by supervised fine-tuning"
    _add_config(add("sft", _sft, about, "quickstart.yaml sft.steps=100"))
    about = "train reward_model.path on comparisons between answers"
    _add_config(add("reward-model", _reward_model, about, "my_comparisons.yaml reward_training.epochs=1"))

    about = "convert a data set's original files for task.path"
    prepare = add("prepare", _prepare, about, "gsm8k train.jsonl gsm8k_train.parquet")
    prepare.add_argument("dataset", choices=["gsm8k"], help="the data set")
    prepare.add_argument("source", type=Path, metavar="IN.jsonl", help="the original file")
    prepare.add_argument("target", type=Path, metavar="OUT.parquet", help="the file to write")

    about = "print the JSON schema of the configuration, for editors"
    add("config", _config, about, "schema > config.schema.json").add_argument(
        "action", choices=["schema"], help="what to print"
    )

    keys = add("keys", _keys, "create encryption keys that a run uses instead of its own", "new my-keys")
    keys.add_argument("action", choices=["new"], help="what to do")
    keys.add_argument("folder", type=Path, metavar="DIR", help="for network.keys; copy it to every host of the run")

    about = "write a checkpoint as a Hugging Face folder"
    export = add("export", _export, about, "runs/quickstart/checkpoints/step_50 my-model")
    export.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=os.path.expanduser,
        help="RUN_DIR/checkpoints/step_N, or RUN_DIR: the newest",
    )
    export.add_argument("target", type=Path, metavar="OUT_DIR", help="the folder to write")

    about = "measure the held-out accuracy of a model folder"
    evaluate = add("eval", _eval, about, "runs/quickstart/model eval.samples_per_prompt=4")
    about = "Hugging Face folder, e.g. RUN_DIR/model, or OWNER/NAME of the hub"
    evaluate.add_argument("model", type=os.path.expanduser, metavar="MODEL", help=about)
    _add_config(evaluate, is_needed=False)

    about = "write a run's journal as Parquet"
    trajectories = add("export-trajectories", _export_trajectories, about, "runs/quickstart trajectories.parquet")
    trajectories.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of the run")
    trajectories.add_argument("target", type=Path, metavar="OUT.parquet", help="the file to write")
    trajectories.add_argument("--text", action="store_true", help="add prompt and answer as text and ground truth")

    about = "answer a run that its watcher has paused"
    answer = add("answer", _answer, about, "runs/my-run go-on")
    answer.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of the run")
    answer.add_argument(
        "answer", choices=("go-on", "rollback", "stop"), help="go-on: accept the rules that broke; rollback: go back "
        "to the checkpoint before the trouble, with smaller steps; stop: end the run with the model of that checkpoint",
    )
    status = add("status", _status, "show what each process of a run is doing, or did last", "runs/quickstart")
    status.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of the run")

    about = "list the rollout servers of a run, or let one join or leave"
    servers = add("servers", _servers, about, "runs/my-run remove rollout/1")
    servers.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    about = "list (default); add URL: a running server joins (rollout.server_urls); remove NAME: a server finishes its "
    about += "groups and leaves; max N: the run takes up to N servers, or lets servers leave"
    servers.add_argument("action", nargs="?", choices=("list", "add", "remove", "max"), default="list", help=about)
    servers.add_argument("value", nargs="?", default="", metavar="URL|NAME|N")
    servers.add_argument("--now", action="store_true", help="remove: do not wait for groups in flight")

    view = add("view", _view, "show a run or a list of runs in the browser, live", "runs/quickstart")
    view.add_argument("folder", type=Path, metavar="FOLDER", help="a run's folder, or a folder of runs")
    view.add_argument("--port", type=int, default=8717, metavar="PORT", help="default 8717; 0: a free one")

    doctor = add("doctor", _doctor, "check this machine, and a config if one is given", quickstart)
    _add_config(doctor, is_needed=False)


def _add_sweeps(commands: Any) -> None:
    add = partial(_add_command, commands)
    sweep = add(
        "sweep", _sweep, "train at every combination of settings and seeds, and report",
        "quickstart.yaml --staleness 0,1,2 --seeds 3 run.steps=40",
    )
    _add_config(sweep)
    of_bounds = f"values of staleness.max; {BELOW} (default: {BOUNDS})"
    sweep.add_argument("--staleness", metavar="N,N", help=of_bounds)
    about = "runs of every combination (default: %(default)s)"
    sweep.add_argument("--seeds", type=int, default=3, metavar="N", help=about)
    about = "run.seed of the first run (default: %(default)s)"
    sweep.add_argument("--first-seed", type=int, default=0, metavar="N", help=about)
    sweep.add_argument("--mode", choices=["bounded", "exact", "both"], help="staleness.mode (default: the config's)")
    about = "comma-separated: none,coupled,decoupled_tis (default: the config's)"
    sweep.add_argument("--correction", metavar="KIND,KIND", help=about)
    sweep.add_argument("--axis", action="append", default=[], metavar="KEY=V,V", help="e.g. learner.lr=1e-4,3e-4")
    about = "time for every cell, instead of run.steps"
    sweep.add_argument("--seconds", type=float, default=0.0, metavar="S", help=about)
    sweep.add_argument("--name", metavar="NAME", help="folder under run.dir (default: <run.name>-sweep)")
    about = "stop after so many cells; the same command continues"
    sweep.add_argument("--max-cells", type=int, metavar="N", help=about)
    sweep.add_argument(
        "--parallel", default="1", metavar="N|auto",
        help="simultaneous cells, each with a part of the GPUs, or of the cores if there are none; auto: as many as "
        "fit. 1 on a Ray cluster",
    )
    sweep.add_argument("--yes", action="store_true", help="don't ask before a sweep without --staleness")
    sweep.add_argument("--dry-run", action="store_true", help="print cells, places and time, start nothing")

    sentence = "make table, plots and the page report.html of a sweep or a run"
    report = add("report", _report, sentence, "runs/quickstart-sweep")
    report.add_argument("folder", type=Path, metavar="RUN_DIR", help="the folder of a sweep or a run")

    sentence = "predict the speed of each staleness bound by simulation"
    plan = add("plan", _plan, sentence, "--train-s 40 --rollout-s 60")
    plan.add_argument("folder", nargs="?", type=Path, metavar="RUN_DIR", help="run or sweep with measured durations")
    about = f"as for sweep; {BELOW} (default: %(default)s)"
    plan.add_argument("--staleness", default=BOUNDS, metavar="N,N", help=about)
    seconds = plan.add_argument_group("durations in seconds; they replace the measured ones")
    seconds.add_argument("--train-s", type=float, metavar="S", help="training time of a batch")
    about = "time of all servers together to generate a batch, fully loaded"
    seconds.add_argument("--rollout-s", type=float, metavar="S", help=about)
    seconds.add_argument("--sync-s", type=float, metavar="S", help="time of a weight push")
    about = "time of a group that runs alone"
    seconds.add_argument("--group-s", type=float, dest="group_mean_s", metavar="S", help=about)
    about = "time that each further group in flight adds to a group"
    seconds.add_argument("--load-s", type=float, metavar="S", help=about)
    about = "standard deviation of a group's time over its mean"
    seconds.add_argument("--cv", type=float, dest="group_cv", metavar="X", help=about)
    seconds.add_argument("--concurrency", type=int, metavar="N", help="rollout.max_groups_in_flight of all workers")
    seconds.add_argument("--prompts-per-step", type=int, metavar="N", help="learner.prompts_per_step")
    seconds.add_argument("--late", choices=["wait", "drop", "mask"], help="staleness.on_late")


def _add_config(parser: argparse.ArgumentParser, is_needed: bool = True, or_else: str = "") -> None:
    """Add the arguments CONFIG and key=value.

    Args:
        is_needed: whether a missing CONFIG is an error.
        or_else: the end of that error's message.
    """
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG key=value", default=[],
        help="a YAML file, e.g. quickstart.yaml, which `async-rl init` writes, and settings over it, e.g. "
        "learner.lr=1e-5 run.steps=60",
    )
    parser.set_defaults(needs_config=is_needed, or_else=or_else)


def _init(args: argparse.Namespace) -> int:
    from async_rl.tools.starters.starter import STARTERS

    starter = STARTERS[args.starter]
    for file in starter.write(Path.cwd()):
        print(f"wrote {file.name}")
    print("next:", *starter.commands, sep="\n    ")
    return 0


def _sft(args: argparse.Namespace) -> int:
    from async_rl.base.config.loading import load_config
    from async_rl.tools.stages import make_sft_model

    print(f"model saved in {make_sft_model(load_config(args.config, args.overrides))}")
    return 0


def _reward_model(args: argparse.Namespace) -> int:
    from async_rl.base.config.loading import load_config
    from async_rl.tools.stages import make_reward_model

    print(f"reward model saved in {make_reward_model(load_config(args.config, args.overrides))}")
    return 0


def _train(args: argparse.Namespace) -> int:
    from async_rl.run.processes.signals import StopSignals

    if args.view:
        check_extra("page", "--view")
    if args.gpu_gb and not args.dry_run:
        raise ConfigError("--gpu-gb goes with --dry-run: a run measures the memory that its GPUs have")
    if args.all and not args.dry_run:
        raise ConfigError("--all goes with --dry-run; a run writes its settings to config.yaml in its folder")
    with StopSignals() as signals, signals.deferred():  # imports, too, can lose the exception of a Ctrl-C
        from async_rl.base.telemetry.metrics_logger import format_summary
        from async_rl.pipeline import run
        from async_rl.run.before_start.chosen_run import config_to_start, nothing_left

        signals.check()
        config, complete_dir = config_to_start(args.config, args.overrides, args.resume)
        if complete_dir:
            print(nothing_left(config, complete_dir))
            return 0
        signals.check()
        beside: Callable[[Path], AbstractContextManager[object]] = nullcontext
        if args.view:
            from async_rl.tools.view.command import shown as beside
        if args.dry_run:
            from async_rl.run.before_start.dry_run import dry_run

            text = dry_run(config, signals.check, args.gpu_gb, args.all)
            signals.check()
        else:
            text = format_summary(run(config, signals, beside), _compare_command(args, config))
    print(text, end="")
    return 0


def _compare_command(args: argparse.Namespace, config: Config) -> str:
    """Return the command that trains the same at staleness 0, or at 1 if this was 0; "" for a resumed run."""
    if args.resume or not args.config:
        return ""
    other, name = (0, "sync") if config.staleness.max else (1, "async")
    kept = [each for each in args.overrides if not each.startswith(("staleness.", "run.name="))]
    name = f"run.name={config.run.name}-{name}"
    return shlex.join(["async-rl", "train", args.config, *kept, "--staleness", str(other), name])


def _certify(args: argparse.Namespace) -> int:
    """Run the command `certify`. The exit code is EXIT_ERROR if an axis is broken."""
    from async_rl.run.processes.signals import StopSignals

    with StopSignals() as signals, signals.deferred():
        from async_rl.base.telemetry.certificate import CERTIFYING, ParityAxis, format_certificate, is_broken
        from async_rl.pipeline import run
        from async_rl.run.before_start.chosen_run import config_to_start

        signals.check()
        config, _ = config_to_start(args.config, [*CERTIFYING, *args.overrides])
        axes = [ParityAxis(**axis) for axis in run(config, signals)["certificate"]]
    print(format_certificate(axes), end="")
    return EXIT_ERROR if is_broken(axes) else 0


def _prepare(args: argparse.Namespace) -> int:
    from rollout_server.tasks.gsm8k import prepare_gsm8k

    rows = prepare_gsm8k(args.source, args.target)
    print(f"{rows} rows written to {args.target}")
    return 0


def _config(args: argparse.Namespace) -> int:
    from async_rl.base.config import Config
    from async_rl.base.config.schema import json_schema

    print(json.dumps(json_schema(Config), indent=2))
    return 0


def _export_trajectories(args: argparse.Namespace) -> int:
    from buffer.journal_export import export_trajectories

    texts = None
    if args.text:
        from rollout_server.tasks.trajectory_texts import TrajectoryTexts

        texts = TrajectoryTexts(args.run_dir)
    exported = export_trajectories(args.run_dir, args.target, texts.add if texts else None)
    print(f"{exported.num_rows} rows written to {args.target}")
    if damages := exported.damages:
        groups = f"{len(damages)} group{'' if len(damages) == 1 else 's'}"
        print(f"{groups} without tokens, because the payloads are damaged; the first is {damages[0]}")
    if texts and texts.num_without:
        print(f"{texts.num_without} rows have no ground_truth: config.yaml has another question in their place now")
    return 0


def _keys(args: argparse.Namespace) -> int:
    from buffer.keys import new_keys

    new_keys(args.folder)
    print(f"keys written to {args.folder}; set network.keys={args.folder}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from learner.models.export import export

    checkpoint = export(args.checkpoint, args.target)
    print(f"{checkpoint} exported to {args.target}")
    return 0


def _eval(args: argparse.Namespace) -> int:
    from async_rl.api import evaluation_config
    from async_rl.run.processes.signals import StopSignals
    from rollout_server.worker.eval_command import evaluate_model

    config = evaluation_config(args.model, args.config, args.overrides)
    with StopSignals():
        values = asyncio.run(evaluate_model(config))
    width = max(map(len, values))
    print("".join(f"{key:<{width}}  {value:10.4g}\n" for key, value in values.items() if key != "eval/version"), end="")
    return 0


def _status(args: argparse.Namespace) -> int:
    from async_rl.base.telemetry.status import format_status

    print(format_status(args.run_dir), end="")
    return 0


def _answer(args: argparse.Namespace) -> int:
    from async_rl.base.run_dir.watch_events import answer_pause

    answer_pause(args.run_dir, args.answer)
    print(f"{args.run_dir} has the answer, and acts on it within seconds")
    return 0


def _servers(args: argparse.Namespace) -> int:
    from async_rl.base.telemetry.status import format_servers

    print(format_servers(args.run_dir), end="")
    if args.action != "list":
        from async_rl.base.run_dir.server_requests import request_of, request_servers

        request_servers(args.run_dir, request_of(args.run_dir, args.action, args.value, args.now))
        print(f"{args.run_dir} has the request, and acts on it within seconds")
    return 0


def _view(args: argparse.Namespace) -> int:
    check_extra("page", "async-rl view")
    from async_rl.tools.view.command import serve

    serve(args.folder, args.port)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from async_rl.base.config.loading import load_config
    from async_rl.run.processes.placement import runs_here
    from async_rl.tools.doctor.host import examine, print_table

    if args.overrides and not args.config:
        raise ConfigError(f"doctor needs a CONFIG to apply {' '.join(args.overrides)} to")
    config = load_config(args.config, args.overrides) if args.config else None
    checks = examine(config)
    if config and not runs_here(config):
        from async_rl.tools.doctor.cluster import examine_nodes

        checks = chain(checks, examine_nodes(config))
    return 0 if print_table(checks) else EXIT_ERROR


def _sweep(args: argparse.Namespace) -> int:
    from async_rl.tools.sweeps.sweep import plan_of, run_and_report, sweep_of

    is_bare = not args.staleness
    args.staleness = args.staleness or BOUNDS
    sweep = sweep_of(args)
    if args.dry_run:
        print(plan_of(sweep), end="")
        return 0
    if is_bare:
        print(f"this sweep makes {prod(len(axis.levels) for axis in sweep.axes)} runs: staleness.max {BOUNDS}, each "
              f"with {args.seeds} seeds. --staleness 0,1,4 --seeds 1 makes fewer; --dry-run lists them", flush=True)
        if not args.yes and sys.stdin.isatty() and not _is_confirmed("start? [y/N] "):
            return 0
    return run_and_report(sweep)


def _is_confirmed(question: str) -> bool:
    """Ask a question on the terminal. Anything but y or yes is a no, the end of the input too."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def _report(args: argparse.Namespace) -> int:
    from async_rl.tools.sweeps.report import write_report

    folder = args.folder.expanduser()
    print(f"{write_report(folder)}\n\n{folder}/report.html")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from async_rl.tools.sweeps.plan import answer

    print(answer(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
