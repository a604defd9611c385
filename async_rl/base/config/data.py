"""The sections task, rollout, staleness, buffer and eval of the configuration."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from async_rl.base.config.check import check
from async_rl.base.config.section import List, Named, OnePart, PathText, Section, checked, section
from async_rl.base.config.system import is_server_url
from async_rl.base.config.task_parts import (
    RESERVED_REWARD_NAMES,
    ColumnsConfig,
    DataConfig,
    DataPaths,
    DifficultyConfig,
    RewardConfig,
    SandboxConfig,
    data_of,
)
from async_rl.base.seams import ENGINES, EngineEntry, find_entry


@section("task")
class TaskConfig:
    """The prompts that a run trains on, and the scoring of their answers."""

    name: str = ""
    """The task: `reasoning_gym/<dataset>`, or `my_module:MyTask`. Empty when `path` names a file, or when the
    environment `env` needs no questions."""
    path: DataPaths = ""
    """The prompts: a Parquet, JSONL, JSON, CSV or Arrow file, a glob of these, a folder of datasets.save_to_disk, or a
    data set of the hub by its name, config and split: hf://openai/gsm8k:main/train, with @REVISION after the name if
    wanted, or hf://OWNER/NAME/PATH/OF/FILE. Or a list of these, each a text or {path, weight, columns}, with weights
    in an epoch and columns in place of `columns`."""
    eval_path: DataPaths = ""
    """The held-out prompts, in the same forms. Of a list, each {path, name, columns} has an accuracy of its own. A
    reasoning_gym task makes its own, disjoint from the training prompts."""
    columns: Section[ColumnsConfig] = field(default_factory=ColumnsConfig)
    shuffle: bool = True
    """Each epoch has the prompts in another order. false: the order of the files."""
    difficulty: Section[DifficultyConfig] = field(default_factory=DifficultyConfig)
    system_prompt: str = ""
    """A system message before the messages of each question."""
    chat_template_kwargs: Section[dict[str, Any]] = field(default_factory=dict)
    """Arguments of the model's chat template, such as {enable_thinking: false}. A template that writes today's date, as
    Llama's does, writes 26 Jul 2024, unless its own argument for the date is given here."""
    pretrain_path: PathText = ""
    """Pretraining text that is learned beside RL where algorithm.ptx_coef is set: a Parquet or JSONL file with the
    column `text`, or a data set of the hub. A text longer than an answer with its prompt may be is cut into rows."""
    params: Section[dict[str, Any]] = field(default_factory=dict)
    """With `name`: the parameters of the reasoning_gym dataset, or those that a task of your own reads. Otherwise the
    arguments of the environment `env`."""
    size: Annotated[int, Field(ge=1, le=2**26)] = 10_000
    """Training prompts to generate, or episodes that an environment without questions offers. Each worker keeps the
    order of four epochs, 2 GiB at most. A run asks for some more than run.steps x learner.prompts_per_step in all."""
    env: str = ""
    """The environment that plays episodes of several turns: package.module:Class. The run takes its rewards from
    it. Empty: an episode is the answer to a question."""
    agent: str = ""
    """The agent that plays an episode and returns its reward: package.module:function. It talks to an endpoint like
    OpenAI's, behind which is the trained model."""
    agent_python: PathText = ""
    """The Python program of the agent's process. Empty: the agent runs in the worker's process."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model may call before it answers a question, each a package.module:function, the methods of a
    package.module:Class, or the tools of an MCP server: mcp:URL or mcp:command."""
    on_timeout: Literal["zero", "partial", "drop"] = "zero"
    """The reward of an episode that ran out of time. zero: 0. partial: the reward of its turns. drop: none, because
    the episode is left out of its group and counted."""
    max_concurrent_calls: PositiveInt = 256
    """Calls of tools and environments, or agents, that one worker runs at once."""
    reward: str = ""
    """The function that scores answers: gsm8k, gsm8k_flexible, math_verify, code, judge, judge_pairwise, judge_listwise
    or package.module:function. Empty: the task's own verifier."""
    rewards: List[tuple[RewardConfig, ...]] = ()
    """Several rewards in place of `reward`, each with a name, a weight and settings. With `env` or `agent` their
    weighted sum is added to what these give."""
    sandbox: Section[SandboxConfig] = field(default_factory=SandboxConfig)
    max_prompt_tokens: PositiveInt = 512
    """The longest allowed prompt, in tokens. Longer ones are left out and counted."""
    max_failures: PositiveInt = 20
    """The run ends when the rewards of this many groups in a row have failed."""

    def __post_init__(self) -> None:
        num_sources = bool(self.name) + bool(self.path)
        check(
            num_sources == 1 or (num_sources == 0 and bool(self.env)), "task", (self.name, self.path),
            "one of task.name and task.path", "" if num_sources else "Only a run with task.env may have neither.",
        )
        check(
            not (self.env and self.agent), "task.agent", self.agent, f"empty with task.env {self.env}",
            "An episode is played by one of the two.",
        )
        check(
            not self.tools or not self.gives_rewards, "task.tools", self.tools, "empty with task.env or task.agent",
            "These bring tools of their own.",
        )
        check(
            not self.reward or not self.gives_rewards, "task.reward", self.reward, "empty with task.env or task.agent",
            "These give the rewards. Set task.rewards to add to them.",
        )
        check(
            not (self.reward and self.rewards), "task.reward", self.reward, "empty with task.rewards",
            "Name it in task.rewards.",
        )
        names = [each.name for each in self.named_rewards]
        check(
            len(set(names)) == len(names) and not set(names) & set(RESERVED_REWARD_NAMES), "task.rewards", names,
            f"rewards with names of their own, none of {', '.join(RESERVED_REWARD_NAMES)}",
        )
        check(
            num_sources == 1 or all(each.reward for each in self.rewards), "task.rewards",
            [each.reward for each in self.rewards], "rewards that are named, where there are no questions",
        )
        check(
            not self.rewards or any(each.counts for each in self.rewards), "task.rewards",
            [each.weight for each in self.rewards], "rewards of which one has a weight other than 0",
        )
        check(
            not self.agent_python or bool(self.agent), "task.agent_python", self.agent_python,
            "empty without task.agent",
        )
        check(
            not self.name or self.name.startswith("reasoning_gym/") or ":" in self.name,
            "task.name", self.name, "reasoning_gym/<dataset> or package.module:Class",
            "Use task.path for a Parquet or JSONL file.",
        )
        check(
            not self.system_prompt or not self.gives_rewards, "task.system_prompt", self.system_prompt,
            "empty with task.env or task.agent", "These write the messages of an episode.",
        )
        names = [each.short_name for each in self.eval_data]
        check(len(set(names)) == len(names), "task.eval_path", names, "sources of different names", "Set their `name`.")
        weights = [each.weight for each in self.eval_data]
        check(set(weights) <= {1.0}, "task.eval_path", weights, "sources of weight 1", "Each counts by its prompts.")

    @property
    def train_data(self) -> tuple[DataConfig, ...]:
        """The sources of training prompts that `path` names."""
        return data_of(self.path)

    @property
    def eval_data(self) -> tuple[DataConfig, ...]:
        """The sources of held-out prompts that `eval_path` names."""
        return data_of(self.eval_path)

    @property
    def has_turns(self) -> bool:
        """Whether an episode may have several turns: it is played with an environment, an agent or tools."""
        return bool(self.env or self.agent or self.tools)

    @property
    def gives_rewards(self) -> bool:
        """Whether the environment or the agent rewards the episodes, and only `rewards` are called besides."""
        return bool(self.env or self.agent)

    @property
    def named_rewards(self) -> tuple[RewardConfig, ...]:
        """The rewards that are called, each with a name: `rewards`, or `reward` as the only one."""
        alone = () if self.gives_rewards else (RewardConfig(reward=self.reward),)
        return tuple(replace(each, name=each.name or each.short_name) for each in self.rewards or alone)

    @property
    def reward_names(self) -> str:
        """The rewards that are called, for people."""
        return ", ".join(each.reward or "the task's own" for each in self.named_rewards) or "those of the episodes"


class Sampling(NamedTuple):
    """How tokens are sampled: with a temperature, from those tokens that three rules keep. Its names are a request's.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def narrows(self) -> bool:
        """Whether tokens may be left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@section("rollout")
class RolloutConfig(OnePart):
    """The generation of answers: the engine, how many, how long, and the sampling."""

    engine: Annotated[str, Named(ENGINES, "rollout.engine")] = "sglang"
    """The engine that generates answers. hf computes in the worker's own process, and is for CPUs and tests."""
    python: PathText = ""
    """The Python that runs the servers of an engine with an environment of its own (vllm: `make vllm` makes it).
    Empty: the engine's own choice, .venv-vllm/bin/python in the project's folder."""
    group_size: PositiveInt = 8
    """Answers to each prompt, or episodes with it."""
    max_response_tokens: PositiveInt = 256
    """The longest answer, in tokens; longer ones are cut off. Of episodes of several turns, the longest reply."""
    max_episode_tokens: NonNegativeInt = 0
    """The longest conversation of an episode of several turns, in tokens, with the prompt and all that is shown to the
    model; more than task.max_prompt_tokens if there are questions. 0: task.max_prompt_tokens + max_response_tokens."""
    max_turns: PositiveInt = 16
    """Replies of the model in one episode of several turns. The episode ends when they are taken."""
    max_rows: PositiveInt = 4
    """Rows of an episode that are trained, at most. An episode has several if its conversation is forked or rewritten;
    the last ones are kept, the others counted."""
    tool_parser: str = ""
    """The format of the model's tool calls: hermes, llama3, another parser of SGLang's, or `module:name` of a
    `def` or an `async def` that takes the text of a reply and the tools' schemas and returns a
    rollout_server.episodes.conversation.reply_reader.Parsed. Empty: found in the chat template."""
    temperature: PositiveFloat = 1.0
    """The sampling temperature. Greedy replies have no spread to learn from."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the most probable tokens that have this mass together (nucleus sampling). 1: from all. A token
    that top_p, top_k or min_p leaves out is not sampled; with algorithm.support replay the learner leaves it out too.
    """
    top_k: NonNegativeInt = 0
    """Sample only from so many of the most probable tokens. 0: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample only from tokens that are at least this times as probable as the most probable one. 0: from all."""
    stop: Annotated[List[tuple[str, ...]], checked(all, "texts that are not empty")] = ()
    """Texts that end a reply, e.g. ["Question:"], also an evaluation's. It ends with the token that completes one;
    that token stays in the reply, is seen by the reward, and is trained on, because it was sampled. vLLM samples on
    until an end token or the longest reply, and what follows is cut off."""
    forbid_special_tokens: bool = False
    """Never sample a special token of the tokenizer but those that end an answer: no reward has seen one in an answer.
    The learner's logprobs belong to the same narrowed distribution, so that importance ratios stay right."""
    routing: Literal["replay", "ignore"] = "replay"
    """Of a model with experts. replay: the engine records through which experts it has fed each token, and the learner
    takes the same ones, with their weights from its own routers. ignore: the learner's routers choose by themselves."""
    max_groups_in_flight: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Groups that one worker keeps in flight at most; the buffer grants 2^20 at once, and admission may keep fewer."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """The share of a GPU's memory for a server's weights and KV cache: --mem-fraction-static of SGLang,
    --gpu-memory-utilization of vLLM. Servers that share a GPU start one after the other, and divide it."""
    server_url: Annotated[str, checked(lambda url: not url or is_server_url(url), (
        "empty, or http:// or https:// with a host, such as http://127.0.0.1:30000, and without spaces, ? and #"
    ))] = ""  # fmt: skip
    """The URL of a running SGLang server to use. The run loads model.path into it as version 0 and does not end it.
    With weight_sync.on_update in_place it must run with --disable-overlap-schedule. If it is on another host, it must
    reach network.host, or read the files of weight_sync.transport disk. A run that is killed or fails leaves its weight
    group at the server until the server ends. Empty: the run starts its own servers."""
    server_args: Section[dict[str, Any]] = field(default_factory=dict)
    """Further flags of the servers of `engine`, e.g. {max-running-requests: 512} for SGLang."""
    params: Section[dict[str, Any]] = field(default_factory=dict)
    """The settings that `engine`, one of your own, declares."""

    @property
    def part(self) -> tuple[str, str, Any]:
        return "rollout.engine", self.engine, self.engine_entry.settings

    @property
    def engine_entry(self) -> EngineEntry:
        """The `EngineEntry` that `engine` names, in the table ENGINES or as `module:name`."""
        return find_entry(ENGINES, self.engine, "rollout.engine")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)


@section("staleness")
class StalenessConfig:
    """The bound on staleness: how old the weights may be that sampled the tokens the learner trains on."""

    max: NonNegativeInt = 1
    """No token that is older than this many versions is trained on. 0: generating and training take turns; 1 and more:
    they overlap."""
    depth: Annotated[float, Field(ge=0, multiple_of=0.25)] | Literal["max"] = "max"
    """How many batches of groups are begun ahead of the one that is trained, in quarters, at most `max`. The mean
    staleness is about `depth`, whereas a group that takes long has until `max`. 0: as `max` 0, nothing is begun ahead.
    max: as many as `max` allows."""
    mode: Literal["bounded", "exact"] = "bounded"
    """bounded is for training. exact makes staleness exactly `max` from batch `max` on, to isolate its effect on the
    algorithm; its utilisation says nothing about the trade-off."""
    on_late: Literal["wait", "drop", "mask"] = "wait"
    """The policy for a group that would miss its deadline. wait: the learner waits for it. drop: it is dropped and its
    prompt granted again (biased to short answers). mask: it is trained on, with the tokens that are too old masked."""

    def __post_init__(self) -> None:
        check(
            isinstance(self.depth, str) or self.depth <= self.max, "staleness.depth", self.depth,
            f"max, or 0..{self.max}, which is staleness.max, in quarters",
            "Deadlines are those of staleness.max, so a larger depth would start groups that come too late.",
        )
        check(
            self.depth in ("max", self.max) or self.mode != "exact", "staleness.depth", self.depth,
            "max with staleness.mode: exact", "A group is then admitted for a batch that is staleness.max ahead.",
        )

    @property
    def batches_ahead(self) -> float:
        """`depth` as a number."""
        return self.max if self.depth == "max" else self.depth


@section("buffer")
class BufferConfig:
    """The use of groups: how often each is trained on, and how long the journal keeps it."""

    max_uses: PositiveInt = 1
    """Batches that a group may be in, all of them within the staleness bound."""
    fresh_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The smallest share of a batch's groups that no batch held before. The rest are groups used before, if there are.
    """
    journal: bool = True
    """Keep all groups in run_dir/trajectories.sqlite, so that the run survives the end of the buffer's process."""
    journal_keep_steps: Annotated[int, Field(ge=-1)] = 100
    """Steps for which the tokens of a trained or dropped group stay in the journal; -1: for ever. They stay for at
    least 2 * checkpoint.every_steps, because a resume needs them. Rewards, lengths and versions always stay."""


@section("eval")
class EvalConfig:
    """The evaluation on held-out prompts: how often, on how many prompts, and with how many answers to each."""

    every_steps: NonNegativeInt = 0
    """Versions between two evaluations beside training; 0: only at start and end. One that is due during another is
    skipped, but its push waits if it gets a checkpoint with keep_best, or if watch.action acts on gold rewards. Prompts
    in flight: rollout.max_groups_in_flight; with pin_version, or on servers of its own (placement.eval.servers),
    all."""
    num_prompts: NonNegativeInt = 256
    """The number of held-out prompts. 0: no evaluation."""
    samples_per_prompt: PositiveInt = 1
    """The number of answers to each held-out prompt."""
    temperature: NonNegativeFloat | Literal["rollout"] = "rollout"
    """The temperature of answers to held-out prompts. rollout: as in training. 0: greedy, one answer each."""
    top_p: Annotated[float, Field(gt=0, le=1)] | Literal["rollout"] = "rollout"
    """Nucleus sampling of these answers. rollout: as in training. Greedy answers have none."""
    top_k: NonNegativeInt | Literal["rollout"] = "rollout"
    """How many of the most probable tokens these answers are sampled from; 0: all. rollout: as in training."""
    min_p: Annotated[float, Field(ge=0, le=1)] | Literal["rollout"] = "rollout"
    """These answers are sampled from tokens that are at least this times as probable as the most probable one. rollout:
    as in training."""
    correct_threshold: float = 1.0
    """An answer with this reward or more counts as right, 1e-6 less being allowed for. Verifiers may give partial
    credit, and several rewards add up to more than 1: eval/reward has all of it, eval/accuracy only what is right."""
    gold_reward: str = ""
    """The reward that the watcher takes as true: a name as in task.reward, or `task` for the task's own. It scores
    held-out answers only, and is not trained on. Empty: with a reward model the rewards of held-out answers, which
    are the rule's, else none."""
    pin_version: bool = False
    """The next push waits for an evaluation beside training, so that all its answers come from one version. Otherwise
    only pushes wait that every_steps names, and eval/oldest_version and eval/newest_version tell which versions sampled
    the answers. With placement.eval.servers that is so whatever this is, and all come from one version."""

    def __post_init__(self) -> None:
        check(
            not self.pin_version or self.every_steps >= 1, "eval.pin_version", self.pin_version,
            "false with eval.every_steps 0", "Nothing is evaluated beside training then. Set eval.every_steps.",
        )
        check(
            self.temperature != 0 or self.samples_per_prompt == 1, "eval.samples_per_prompt", self.samples_per_prompt,
            "1 with eval.temperature 0",
            "All greedy answers to a prompt are the same. Set eval.samples_per_prompt=1, or a temperature above 0.",
        )

    def sampling(self, rollout: RolloutConfig) -> Sampling:
        """Return how answers to held-out prompts are sampled; temperature 0 is greedy."""
        own = {name: value for name in Sampling._fields if (value := getattr(self, name)) != "rollout"}
        return rollout.sampling._replace(**own)

    def is_right(self, reward: float | None) -> bool:
        """Return whether an answer with this reward counts as right; None: there is none, because the reward failed."""
        return reward is not None and reward >= self.correct_threshold - 1e-6

    @property
    def pass_at(self) -> tuple[int, ...]:
        """Each k for which pass@k is measured: 2, 4, 8, ... up to samples_per_prompt, and that; () with one."""
        powers = (2**i for i in range(1, self.samples_per_prompt.bit_length()))
        return tuple(sorted({*powers, self.samples_per_prompt} - {1}))
