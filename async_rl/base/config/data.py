"""The sections task, rollout, staleness, buffer and eval of the configuration."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from async_rl.base.config.check import check
from async_rl.base.config.section import List, Named, OnePart, PathText, Section, checked, section
from async_rl.base.config.suites import SuiteNames
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
    """The prompts that a run trains on, and how their answers are scored."""

    name: str = ""
    """The task: `reasoning_gym/<dataset>`, or `my_module:MyTask`. Empty when `path` names a file, or when the
    environment `env` needs no questions."""
    path: DataPaths = ""
    """The prompts: a Parquet, JSONL, JSON, CSV or Arrow file, a glob of these, a folder of datasets.save_to_disk, or
    a data set of the hub by its name, config and split: hf://openai/gsm8k:main/train, with @REVISION after the name if
    wanted, or hf://OWNER/NAME/PATH/OF/FILE. Or a list of sources, each a text or {path, weight, columns}: the source's
    weight in an epoch, and its columns if they differ from `columns`."""
    eval_path: DataPaths = ""
    """The held-out prompts, in the same forms. In a list, each {path, name, columns} has its own accuracy. A
    reasoning_gym task generates its own, disjoint from the training prompts."""
    columns: Section[ColumnsConfig] = field(default_factory=ColumnsConfig)
    shuffle: bool = True
    """Whether each epoch has the prompts in another order. false: the order of the files."""
    difficulty: Section[DifficultyConfig] = field(default_factory=DifficultyConfig)
    system_prompt: str = ""
    """A system message before the messages of each question."""
    chat_template_kwargs: Section[dict[str, Any]] = field(default_factory=dict)
    """Arguments of the model's chat template, such as {enable_thinking: false}. If a template writes today's date,
    as Llama's does, it is fixed to 26 Jul 2024, unless the template's own argument for the date is given here."""
    pretrain_path: PathText = ""
    """Pretraining text that is learned together with RL if algorithm.ptx_coef is set: a Parquet or JSONL file with
    the column `text`, or a data set of the hub. A text longer than the longest row is cut into several rows."""
    params: Section[dict[str, Any]] = field(default_factory=dict)
    """With `name`: the parameters of the reasoning_gym dataset, or those that your own task reads. Otherwise: the
    arguments of the environment `env`."""
    size: Annotated[int, Field(ge=1, le=2**26)] = 10_000
    """Training prompts to generate, or episodes of an environment without questions. Each worker stores the order of
    four epochs (at most 2 GiB). A run uses slightly more than run.steps x learner.prompts_per_step prompts in all."""
    env: str = ""
    """The environment that plays multi-turn episodes and gives their rewards: package.module:Class. Empty: an
    episode is the answer to a question."""
    agent: str = ""
    """The agent that plays an episode and returns its reward: package.module:function. It talks to an endpoint like
    OpenAI's, which serves the trained model."""
    agent_python: PathText = ""
    """The Python program that runs the agent in a separate process. Empty: the agent runs in the worker's process."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model may call before it answers a question. Each entry is a package.module:function, a
    package.module:Class, whose methods are tools, or an MCP server: mcp:URL or mcp:command."""
    on_timeout: Literal["zero", "partial", "drop"] = "zero"
    """The reward of an episode that ran out of time. zero: 0. partial: the rewards of its turns and of task.reward. An
    agent returns its reward only at its end, so it gets 0. drop: the episode is left out of its group and counted."""
    max_concurrent_calls: PositiveInt = 256
    """The most simultaneous calls of tools and environments, or of agents, in one worker."""
    reward: str = ""
    """The function that scores answers: gsm8k, gsm8k_flexible, math_verify, code, judge, judge_pairwise, judge_listwise
    or package.module:function. Empty: the task's own verifier."""
    rewards: List[tuple[RewardConfig, ...]] = ()
    """Several rewards instead of `reward`, each with a name, a weight and settings. With `env` or `agent`, their
    weighted sum is added to the rewards that the environment or agent gives."""
    sandbox: Section[SandboxConfig] = field(default_factory=SandboxConfig)
    max_prompt_tokens: PositiveInt = 512
    """The longest allowed prompt, in tokens. Longer prompts are left out and counted."""
    max_failures: PositiveInt = 20
    """The run ends when the rewards have failed for this many groups in a row."""

    def __post_init__(self) -> None:
        num_sources = bool(self.name) + bool(self.path)
        check(
            num_sources == 1 or (num_sources == 0 and bool(self.env)), "task", (self.name, self.path),
            "one of task.name and task.path",
            "Clear the other one, e.g. task.name=" if num_sources else "Only a run with task.env may have neither.",
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
        """The sources of training prompts in `path`."""
        return data_of(self.path)

    @property
    def eval_data(self) -> tuple[DataConfig, ...]:
        """The sources of held-out prompts in `eval_path`."""
        return data_of(self.eval_path)

    @property
    def has_turns(self) -> bool:
        """Whether an episode may have several turns: it is played with an environment, an agent or tools."""
        return bool(self.env or self.agent or self.tools)

    @property
    def gives_rewards(self) -> bool:
        """Whether the environment or the agent gives the rewards. Then only `rewards` are called in addition."""
        return bool(self.env or self.agent)

    @property
    def named_rewards(self) -> tuple[RewardConfig, ...]:
        """The rewards to call, each with a name: `rewards`, or only `reward`."""
        alone = () if self.gives_rewards else (RewardConfig(reward=self.reward),)
        return tuple(replace(each, name=each.name or each.short_name) for each in self.rewards or alone)


class Sampling(NamedTuple):
    """The sampling settings: a temperature, and top_p, top_k and min_p, which leave improbable tokens out.

    The fields have the same names as in GenerationRequest.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def narrows(self) -> bool:
        """Whether top_p, top_k or min_p may leave tokens out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@section("rollout")
class RolloutConfig(OnePart):
    """How answers are generated: the engine, their number and length, and the sampling."""

    engine: Annotated[str, Named(ENGINES, "rollout.engine")] = "sglang"
    """The engine that generates answers. hf computes in the worker's own process, and is for CPUs and tests."""
    python: PathText = ""
    """The Python that runs the servers of an engine with a separate environment (vllm: `make vllm` creates it).
    Empty: the engine's default, .venv-vllm/bin/python in the project's folder."""
    group_size: PositiveInt = 8
    """Answers, or episodes, for each prompt."""
    max_response_tokens: PositiveInt = 256
    """The longest answer, in tokens; longer ones are cut off. In multi-turn episodes: the longest reply."""
    max_episode_tokens: NonNegativeInt = 0
    """The longest conversation of a multi-turn episode, in tokens, including the prompt and everything that the
    model is shown; more than task.max_prompt_tokens if there are questions. 0: task.max_prompt_tokens +
    max_response_tokens, by default 768, which a few results of tools fill."""
    max_turns: PositiveInt = 16
    """The most replies of the model in one multi-turn episode, which ends then; an agent that asks for more gets status
    400."""
    max_rows: PositiveInt = 4
    """The most rows of an episode that are trained on. An episode has several if its conversation is forked or
    rewritten; the last ones are kept, the others counted."""
    tool_parser: str = ""
    """The format of the model's tool calls: hermes, llama3, another parser of SGLang's, or `module:name` of a
    function, a `def` or an `async def`. It takes the text of a reply and the tools' schemas, and returns a
    rollout_server.episodes.conversation.reply_reader.Parsed. Empty: derived from the chat template."""
    temperature: PositiveFloat = 1.0
    """The sampling temperature, above 0: greedy replies do not differ, so nothing could be learned."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the most probable tokens that together have this probability (nucleus sampling). 1: from all.
    With algorithm.support replay the learner, too, leaves out the tokens that top_p, top_k or min_p exclude."""
    top_k: NonNegativeInt = 0
    """Sample only from this many of the most probable tokens. 0: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample only from tokens with at least this share of the most probable token's probability. 0: from all."""
    stop: Annotated[List[tuple[str, ...]], checked(all, "texts that are not empty")] = ()
    """Texts that end a reply, e.g. ["Question:"], also in evaluations. The reply ends with the token that completes
    a text. That token stays in the reply, the reward sees it, and it is trained on, because it was sampled. vLLM
    continues to sample until an end token or the longest reply; the tokens after the text are cut off."""
    forbid_special_tokens: bool = False
    """Never sample special tokens of the tokenizer, except those that end an answer. The learner's logprobs exclude
    the same tokens, so importance ratios stay right."""
    routing: Literal["replay", "ignore"] = "replay"
    """For a model with experts. replay: the engine records the experts that processed each token, and the learner
    uses the same ones, weighted by its own routers. ignore: the learner's routers choose."""
    max_groups_in_flight: Annotated[int, Field(ge=1, le=2**20)] = 256
    """The most groups that one worker has in flight; the buffer grants 2^20 at a time, and admission may allow fewer.
    """
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """The share of a GPU's memory for a server's weights and KV cache: SGLang's --mem-fraction-static, vLLM's
    --gpu-memory-utilization. Servers that share a GPU start one after the other, and divide this share."""
    server_urls: List[tuple[Annotated[str, checked(is_server_url, (
        "URLs with http:// or https:// and a host, such as http://127.0.0.1:30000, and without spaces, ? and #"
    ))], ...]] = ()  # fmt: skip
    """The URLs of running SGLang servers to use. The run loads model.path into them as version 0 and does not stop
    them. With weight_sync.on_update in_place they must run with --disable-overlap-schedule. A server on another host
    must reach network.host, or read the files of weight_sync.transport disk. If the run is killed or fails, its weight
    group remains at the servers until they end. Empty: the run starts its own servers."""
    server_args: Section[dict[str, Any]] = field(default_factory=dict)
    """Further flags for the servers of `engine`, e.g. {max-running-requests: 512} for SGLang."""
    params: Section[dict[str, Any]] = field(default_factory=dict)
    """The settings that your own `engine` declares."""

    @property
    def part(self) -> tuple[str, str, Any]:
        return "rollout.engine", self.engine, self.engine_entry.settings

    @property
    def server_url(self) -> str:
        """The URL of the server of this process, or of the run's first one; "" if the run starts its servers."""
        return self.server_urls[0] if self.server_urls else ""

    @property
    def engine_entry(self) -> EngineEntry:
        """The `EngineEntry` named by `engine`, in the table ENGINES or as `module:name`."""
        return find_entry(ENGINES, self.engine, "rollout.engine")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)


@section("staleness")
class StalenessConfig:
    """The bound on staleness: how many versions older than the learner a trained token may be."""

    max: NonNegativeInt = 1
    """How many versions older than the learner a trained token may be. 0: generation and training take
    turns. From 1 on, they overlap."""
    depth: Annotated[float, Field(ge=0, multiple_of=0.25)] | Literal["max"] = "max"
    """Batches started ahead of the one that is trained, in steps of 0.25, at most `max`. The mean staleness is
    about `depth`, but a slow group may take until `max`. 0: none are started ahead, as with `max` 0. max: the value
    of `max`."""
    mode: Literal["bounded", "exact"] = "bounded"
    """bounded is for training. exact makes the staleness of every token exactly `max` from batch `max` on, to study
    its effect on the algorithm; the utilisation of such a run says nothing about the trade-off."""
    on_late: Literal["wait", "drop", "mask"] = "wait"
    """What happens to a group that would miss its deadline, the last batch whose staleness bound it meets. wait: the
    learner waits for it. drop: it is dropped and its prompt is granted again (biased to short answers). mask: it is
    trained on, with the tokens that are too old masked."""

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
        """The value of `depth` as a number, with "max" replaced."""
        return self.max if self.depth == "max" else self.depth


@section("buffer")
class BufferConfig:
    """How groups are used: how often each is trained on, and how long the journal keeps it."""

    max_uses: PositiveInt = 1
    """The most batches that a group may be in, all within the staleness bound."""
    fresh_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The smallest share of fresh groups, which no batch had before, in a batch. The others are used groups, if
    there are any."""
    journal: bool = True
    """Keep all groups in run_dir/trajectories.sqlite, so that the run survives a crash of the buffer's process."""
    journal_keep_steps: Annotated[int, Field(ge=-1)] = 100
    """Steps for which the journal keeps the tokens of a trained or dropped group; -1: for ever. It is at least
    2 * checkpoint.every_steps and 1, because a resume needs them. Rewards, lengths and versions are always kept."""


@section("eval")
class EvalConfig:
    """The evaluation on held-out prompts: how often, on how many prompts, and with how many answers each."""

    every_steps: NonNegativeInt = 0
    """Versions between two evaluations during training; 0: only at start and end. An evaluation that is due while
    another runs is skipped. But if its version gets a checkpoint with keep_best, or watch.action acts on gold rewards,
    its push waits instead. At most rollout.max_groups_in_flight prompts are in flight; with pin_version or
    placement.eval.servers, all."""
    num_prompts: NonNegativeInt = 256
    """The number of held-out prompts; with `suite`, the most of each benchmark. 0: no evaluation."""
    suite: SuiteNames = ()
    """Benchmarks whose questions replace the task's held-out prompts: gsm8k, math500, aime25. Each has its own
    accuracy, and is scored by its own rule: gsm8k_flexible or math_verify. An entry {name: aime25, path: FILE} takes
    its questions from another place than the hub."""
    samples_per_prompt: PositiveInt = 1
    """The number of answers to each held-out prompt."""
    temperature: NonNegativeFloat | Literal["rollout"] = "rollout"
    """The temperature of held-out answers. rollout: as in training. 0: greedy, one answer each."""
    top_p: Annotated[float, Field(gt=0, le=1)] | Literal["rollout"] = "rollout"
    """Nucleus sampling of held-out answers. rollout: as in training. It has no effect on greedy answers."""
    top_k: NonNegativeInt | Literal["rollout"] = "rollout"
    """Held-out answers are sampled from this many of the most probable tokens; 0: from all. rollout: as in training."""
    min_p: Annotated[float, Field(ge=0, le=1)] | Literal["rollout"] = "rollout"
    """Held-out answers are sampled from tokens with at least this share of the most probable token's probability.
    rollout: as in training."""
    correct_threshold: float = 1.0
    """An answer counts as right if its reward is at least this, up to 1e-6. Verifiers may give partial credit,
    and the sum of several rewards may exceed 1: eval/reward is the mean reward, eval/accuracy the share of right
    answers."""
    gold_reward: str = ""
    """The reward that the watcher takes as true: a name as in task.reward, or `task` for the task's own. It scores
    only held-out answers, and is not trained on. Empty: there is none, but with a reward model that replaces the task's
    rewards, these are the gold rewards of held-out answers."""
    pin_version: bool = False
    """The next push waits for an evaluation during training, so that one version samples all its answers. Otherwise
    only the pushes named at every_steps wait, and eval/oldest_version and eval/newest_version show which versions
    sampled. No effect with placement.eval.servers, where one version always samples all."""

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
        """Return the sampling settings of held-out answers. Temperature 0 is greedy.

        Args:
            rollout: used for settings with the value "rollout".
        """
        own = {name: value for name in Sampling._fields if (value := getattr(self, name)) != "rollout"}
        return rollout.sampling._replace(**own)

    def is_right(self, reward: float | None) -> bool:
        """Return whether an answer with this reward counts as right. None, if the reward failed, does not."""
        return reward is not None and reward >= self.correct_threshold - 1e-6

    @property
    def pass_at(self) -> tuple[int, ...]:
        """Each k for which pass@k is measured: 2, 4, 8, ... and samples_per_prompt; () if that is 1."""
        powers = (2**i for i in range(1, self.samples_per_prompt.bit_length()))
        return tuple(sorted({*powers, self.samples_per_prompt} - {1}))
