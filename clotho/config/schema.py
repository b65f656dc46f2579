"""The profile: every setting of a run, as frozen structs that refuse unknown keys and values out of range."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from clotho.config.bounds import (
    Absent,
    Fraction,
    FractionBelowOne,
    ModuleName,
    NonNegative,
    NonNegativeFloat,
    Off,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Variant,
    about,
)
from clotho.config.sections_generation import ClusterSection, GeneratorSection, LocalGeneration
from clotho.config.sections_training import (
    CollapseSection,
    DistributedSection,
    LearnerSection,
    ReplaySection,
    WarnOnCollapse,
)
from protocols.prompt import AnswerIn
from protocols.sampling import Sampling

GYM = "reasoning_gym:"
"""Start of `data.train` and `data.heldout` for datasets of Reasoning Gym; their names follow, separated by commas."""

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Scaling = Literal["standard", "rank_stabilized"]
RunIn = Literal["auto", "process", "thread"]
Where = Literal["local", "cluster"]
Rank = Annotated[str, Meta(pattern=r"^[\w.]+=[1-9]\d*$", title="name=rank")]


QuantizationMode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]


class QuantizeAtLoad(Variant, frozen=True, kw_only=True, tag="at_load"):
    """The weights of a full-precision model are quantized when it is loaded, as mlx_lm.convert does."""

    bits: Annotated[Positive | None, about("Bits per weight; none: that of the mode, 4 or 8.")] = None
    group_size: Annotated[Positive | None, about("Weights that share a scale; none: that of the mode.")] = None
    mode: Annotated[QuantizationMode, about("Format of the quantized weights.")] = "affine"


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base model."""

    path: Annotated[str, about("Model directory, GGUF file, package:NAME/FILE or hub repository.", min_length=1)]
    dtype: Annotated[Dtype, about("Type of computation; auto: float32 on the CPU, the checkpoint's on a GPU.")] = "auto"
    chat_template: Annotated[str, about("File of a chat template, or tools-hermes; empty: that of the model.")] = ""
    chat_template_kwargs: Annotated[dict[str, Any], about("Variables of the chat template, in every prompt.")] = {}
    dequantize: Annotated[bool, about("Expand a quantized model: faster on the CPU, more memory.")] = False
    quantize: Annotated[Absent | QuantizeAtLoad, about("Quantization of a full-precision model.")] = Absent()
    trust_remote_code: Annotated[bool, about("Run the Python code in the model's repository.")] = False


class AdapterMethod(Variant, frozen=True, kw_only=True):
    """A method that trains an adapter beside the weights of the base model."""

    rank: Annotated[Positive, about("Rank of the adapter.")] = 8
    ranks: Annotated[tuple[Rank, ...], about("Other ranks of modules that are named as in target_modules.")] = ()
    scale: Annotated[PositiveFloat | None, about("Factor of the adapter's output; 10 if alpha is none too.")] = None
    alpha: Annotated[PositiveFloat | None, about("Numerator of the scale, as in PEFT; excludes scale.")] = None
    scaling: Annotated[Scaling, about("Scale from alpha: alpha / rank, or alpha / sqrt(rank).")] = "standard"
    dropout: Annotated[FractionBelowOne, about("Dropout probability at the adapter's input.")] = 0.0
    num_layers: Annotated[int, about("Number of last transformer blocks with an adapter; -1: all.", ge=-1)] = -1
    target_modules: Annotated[tuple[str, ...], about("Layers with an adapter, such as q_proj; empty means all.")] = ()
    train_embeddings: Annotated[bool, about("Also train the token embeddings, if not quantized.")] = False
    train_head: Annotated[bool, about("Also train the output head, if not quantized.")] = False

    @property
    def effective_scale(self) -> float:
        """Absolute scale of the adapter, the same for all modules whatever their ranks."""
        if self.scale is not None:
            return self.scale
        if self.alpha is None:
            return 10.0
        return self.alpha / (self.rank if self.scaling == "standard" else math.sqrt(self.rank))


class Lora(AdapterMethod, frozen=True, kw_only=True, tag="lora"):
    """LoRA (arXiv:2106.09685); QLoRA if the base model is quantized."""


class Dora(AdapterMethod, frozen=True, kw_only=True, tag="dora"):
    """DoRA (arXiv:2402.09353), which also trains the magnitude of each weight column."""


class FullMethod(Variant, frozen=True, kw_only=True, tag="full"):
    """All weights of the base model are trained."""


Method = Annotated[Lora | Dora | FullMethod, about("Training method: LoRA, DoRA, or all weights.")]


class PolicySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainable parameters."""

    method: Method = Lora()
    adapter: Annotated[str, about("Adapter, checkpoint, RUN or RUN@STEP to start from; its rank and scale apply.")] = ""
    grad_checkpoint: Annotated[bool, about("Recompute activations of blocks: less memory, more time.")] = False


class SamplingSection(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of the rollouts."""

    group_size: Annotated[int, about("Number of completions per prompt.", ge=2, le=4096)] = 8


class UniformCurriculum(Variant, frozen=True, kw_only=True, tag="uniform"):
    """Every problem occurs equally often, up to data.type_weights."""


class SuccessRateCurriculum(Variant, frozen=True, kw_only=True, tag="success_rate"):
    """Prefers problems whose groups probably have both successes and failures; of these, those with more failures."""

    sharpness: Annotated[PositiveFloat, about("Power of the probability of a gradient in the draw of a problem.")] = 1.0
    explore: Annotated[PositiveFraction, about("Share of groups whose problem is drawn uniformly.")] = 0.05
    candidates: Annotated[Positive, about("Number of problems among which the problem of a group is chosen.")] = 64


CurriculumSection = Annotated[
    UniformCurriculum | SuccessRateCurriculum, about("Which problems get rollouts: all equally, or by success rate.")
]


class GymSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One dataset of Reasoning Gym that data.train or data.heldout names, with another size or difficulty."""

    dataset: Annotated[str, about("Name of the dataset in the library.", min_length=1)]
    name: Annotated[str, about("Name in data.train, and type of the problems; empty: data.reasoning_gym.dataset.")] = ""
    weight: Annotated[PositiveFloat, about("Share of the dataset in an epoch, relative to the others.")] = 1.0
    size: Annotated[int, about("Number of problems with different prompts.", ge=1, le=1_000_000)] = 1000
    level: Annotated[NonNegative | None, about("Level of the dataset's curriculum; none: its defaults.")] = None
    settings: Annotated[dict[str, Any], about("Settings of the dataset, such as { max_terms = 3 }.")] = {}

    @property
    def label(self) -> str:
        """The name in `data.train`."""
        return self.name or self.dataset


class DataSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems for training and evaluation: files, directories, datasets of the Hugging Face hub or Reasoning Gym."""

    train: Annotated[str, about("Dataset: file, directory, OWNER/NAME on the hub, reasoning_gym:NAME.", min_length=1)]
    heldout: Annotated[str, about("Dataset of the held-out problems; empty: a part of data.train.")] = ""
    subset: Annotated[str, about("Configuration of a dataset on the hub; empty: its default.")] = ""
    train_split: Annotated[str, about("Split of a directory, or on the hub, for training.", min_length=1)] = "train"
    heldout_split: Annotated[str, about("Split that is held out; empty: data.heldout_fraction of data.train.")] = ""
    heldout_fraction: Annotated[FractionBelowOne, about("Fraction of data.train that is held out.")] = 0.1
    prompt_key: Annotated[str, about("Column of the prompt: text or chat messages.", min_length=1)] = "prompt"
    messages_key: Annotated[str, about("Column of chat messages, if there is no prompt.", min_length=1)] = "messages"
    answer_key: Annotated[str, about("Column of the correct answer; empty: the problems have none.")] = "answer"
    answer_pattern: Annotated[str, about("Regular expression that finds the answer in its column; empty: all.")] = ""
    type_key: Annotated[str, about("Column of the problem's type.", min_length=1)] = "type"
    default_type: Annotated[str, about("Type of problems whose record names no type.")] = "problem"
    type_weights: Annotated[
        dict[str, NonNegativeFloat], about("How often problems of a type occur in an epoch, by type; otherwise once.")
    ] = {}
    reasoning_gym: tuple[GymSection, ...] = ()
    max_prompt_tokens: Annotated[NonNegative, about("Longer prompts are removed and reported; 0: no limit.")] = 0
    system: Annotated[str, about("System message before every prompt; an empty text means none.")] = ""
    shuffle: Annotated[bool, about("Shuffle the problems in every epoch.")] = True
    curriculum: CurriculumSection = UniformCurriculum()


class RewardSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward function; the reward of a completion is the weighted sum of those that apply."""

    name: Annotated[str, about("Name of a built-in function, module:function, or path/file.py:function.", min_length=1)]
    weight: Annotated[float, about("Weight of the reward function's value in the sum.")] = 1.0
    types: Annotated[tuple[str, ...], about("Types of problems with this reward; an empty list means all.")] = ()
    timeout_seconds: Annotated[PositiveFloat, about("A longer call discards its group.")] = 10.0
    correct: Annotated[bool, about("An answer counts as correct in evaluation if the value is 1.")] = False
    run_in: Annotated[RunIn, about("Where it runs; auto: your own in a process, others in a thread.")] = "auto"
    where: Annotated[Where, about("Machines that compute it: that of the run, or those of the cluster.")] = "local"
    max_workers: Annotated[Positive | None, about("Largest number of worker processes; none means 8.")] = None
    memory_limit_mb: Annotated[Positive | None, about("Memory limit of a worker process in MB; none: 4096.")] = None
    answer_in: Annotated[AnswerIn | None, about("Where a built-in function finds the answer; none: tags.")] = None
    settings: Annotated[dict[str, Any], about("Settings of a built-in function that has any, such as judge.")] = {}


Mode = Literal["replace", "insert", "tap", "add"]
Restart = Literal["permanent", "transient", "temporary"]
Display = Literal["auto", "live", "plain", "none"]
EnvironmentName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$", title="letters, digits, - and _, at most 32")]
GroupSize = Annotated[int, Meta(ge=2, le=4096)]
Interpreter = Annotated[str, about("Python interpreter with atroposlib, which runs the [[environments]].")]
Missing = Literal["recompute", "refuse"]
KvPolicy = Literal["keep", "recompute", "drain"]
ToolParser = Literal["auto", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral"]
ReasoningParser = Literal["auto", "off"]


class ParityCheck(Variant, frozen=True, kw_only=True, tag="check"):
    """The log-probabilities are compared at the start, and after a weight swap as often as the budget allows."""

    tokens: Annotated[Positive, about("Number of tokens that a parity check compares.")] = 32
    warn_nats: Annotated[PositiveFloat | None, about("Log a larger difference of one token; none: by type.")] = None
    stop_kl: Annotated[PositiveFloat | None, about("A larger mean KL divergence ends the run; none: by type.")] = None
    budget: Annotated[
        Fraction, about("Largest share of the training time for parity checks; 0: at the start only; 1: every swap.")
    ] = 0.01


ParitySection = Annotated[Off | ParityCheck, about("Comparison of sampler and learner log-probabilities.")]


class CheckpointSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of the whole run."""

    interval: Annotated[NonNegative, about("Steps between checkpoints; 0 writes one at the end.")] = 10
    keep_last: Annotated[Positive, about("Number of checkpoints that stay on disk.")] = 3
    adapter_path: Annotated[str, about("Directory of a second copy of the final adapter; empty: no copy.")] = ""


class HeldOutEvaluation(Variant, frozen=True, kw_only=True, tag="heldout"):
    """Accuracy, rewards and loss on held-out problems: before, after and during training."""

    interval: Annotated[NonNegative, about("Steps between evaluations; 0: before and after training.")] = 0
    problems: Annotated[NonNegative, about("Number of held-out problems before and after training; 0 means all.")] = 0
    problems_between: Annotated[NonNegative, about("Held-out problems during training; 0: eval.problems.")] = 0
    samples: Annotated[
        int, about("Sampled completions per held-out problem for avg@k and pass@k; 0: greedy only.", ge=0, le=4096)
    ] = 0


EvalSection = Annotated[Off | HeldOutEvaluation, about("Evaluation of the policy on held-out problems.")]


class AdaptersSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that clients may load."""

    root: Annotated[str, about("Directory of adapters that clients may load; empty: clients load none.")] = ""
    max_loaded: Annotated[Positive, about("Adapters that are loaded at once; the least recently used leave.")] = 16
    max_bytes: Annotated[Positive, about("Size of all loaded adapters in float32, in bytes.")] = 1_073_741_824
    max_rank: Annotated[Positive, about("Maximum rank of an adapter.")] = 128


class HttpServer(Variant, frozen=True, kw_only=True, tag="http"):
    """The policy is served over HTTP during the run."""

    host: Annotated[str, about("Address that the HTTP server binds.")] = "127.0.0.1"
    port: Annotated[int, about("Port of the HTTP server; 0 takes any free port.", ge=0, le=65535)] = 8000
    api_key: Annotated[str, about("API key of clients; required unless the host is a loopback address.")] = ""
    api_keys_file: Annotated[str, about("TOML file of API keys with names and limits; empty: none.")] = ""
    model_name: Annotated[str, about("Name of the policy in /v1/models.")] = "policy"
    max_queue_seconds: Annotated[NonNegativeFloat, about("Time until a request is admitted; 0: no limit.")] = 1200.0
    max_answer_seconds: Annotated[
        NonNegativeFloat, about("Time from the admission in which a request is answered; 0: no limit.")
    ] = 3600.0
    max_concurrent: Annotated[Positive, about("Requests that are processed at once; others wait.")] = 256
    max_choices: Annotated[Positive, about("Maximum completions of a request: prompts times n.")] = 64
    max_body_bytes: Annotated[Positive, about("Maximum size of a request body in bytes.")] = 4_194_304
    body_seconds: Annotated[PositiveFloat, about("Time in which a request body must arrive.")] = 30.0
    send_seconds: Annotated[PositiveFloat, about("Time after which a client that does not read is cut off.")] = 30.0
    adapters: AdaptersSection = AdaptersSection()
    shutdown_seconds: Annotated[PositiveFloat, about("Time in which running requests may finish at the end.")] = 10.0
    accept_weights: Annotated[bool, about("Serve the weights that the training run of another process sends.")] = False
    weights_root: Annotated[str, about("Directory of weights that a training run shares by path; empty: none.")] = ""
    dashboard: Annotated[bool, about("Show the run to browsers, on the page at / of the server.")] = True
    allow_pause: Annotated[bool, about("Clients may pause the decode engine, and with it the rollouts.")] = False
    tool_parser: Annotated[ToolParser, about("Format of tool calls; auto: from the chat template.")] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser, about("Separation of <think> blocks from the content of a message: auto or off.")
    ] = "auto"


ServerSection = Annotated[Off | HttpServer, about("OpenAI-compatible HTTP server of the run.")]


class Drafts(Variant, frozen=True, kw_only=True):
    """Where the drafts of speculation come from."""

    max_draft: Annotated[int, about("Maximum number of tokens of a draft.", ge=1, le=32)] = 6
    always: Annotated[bool, about("Speculate also where it lowers the tokens per second.")] = False


class HistoryDrafts(Drafts, frozen=True, kw_only=True, tag="history"):
    """Drafts are earlier rollouts of the same prompt."""

    stored_tokens: Annotated[Positive, about("Tokens of earlier rollouts that are stored.")] = 2_097_152


class PromptDrafts(Drafts, frozen=True, kw_only=True, tag="prompt"):
    """Drafts are what followed the same tokens earlier in the prompt or the completion."""


class ModelDrafts(Drafts, frozen=True, kw_only=True, tag="model"):
    """Drafts are samples of a smaller model with the same tokens."""

    path: Annotated[str, about("Draft model: model directory, GGUF file or hub repository.", min_length=1)]


Speculation = Annotated[
    Off | HistoryDrafts | PromptDrafts | ModelDrafts, about("Several tokens per forward pass, from drafts.")
]


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decode engine."""

    max_num_seqs: Annotated[Positive, about("Maximum number of sequences that are decoded at once.")] = 256
    kv_cache_tokens: Annotated[Positive, about("Tokens of all running sequences in the KV cache.")] = 262_144
    prefix_cache_tokens: Annotated[NonNegative, about("Capacity of the prefix cache, in tokens.")] = 16_384
    prefill_chunk: Annotated[Positive, about("Maximum number of prompt tokens per prefill step.")] = 2048
    decode_share: Annotated[float, about("Share of compute time for decoding during updates.", ge=0.05, le=0.95)] = 0.5
    rollout_share: Annotated[
        float, about("Share of rows and KV cache that clients leave to waiting rollouts.", ge=0, le=1)
    ] = 0.5
    kv_policy: Annotated[KvPolicy, about("KV cache at a weight swap: keep, recompute, or drain sequences.")] = "keep"
    speculation: Speculation = Off()


class RolloutsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far rollouts run ahead of the learner."""

    max_batches_ahead: Annotated[Positive, about("Limit of batches in progress beyond the batch in training.")] = 2
    lag: Annotated[NonNegative, about("Age of every batch in updates, with async = false; to study staleness.")] = 0
    scoring: Annotated[
        Positive | None, about("Groups that are scored at the same time; none: 8, or the largest `max_workers`.")
    ] = None


class QueuesSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacities of the queues between actors; a full queue blocks its sender."""

    prompts: Annotated[Positive, about("Capacity of the queue from the prompter to the generator.")] = 16
    rollouts: Annotated[Positive, about("Capacity of the queue from the generator to the scorer.")] = 16
    scored: Annotated[Positive, about("Capacity of the queue of scored groups to the learner.")] = 16
    reports: Annotated[Positive, about("Capacity of the queues of step reports from the learner.")] = 4


class ActorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An actor of your own."""

    name: Annotated[str, about("Name of the custom actor in logs, errors and statistics.", min_length=1)]
    factory: Annotated[ModuleName, about("Class of the custom actor, as module:Class.")]
    mode: Annotated[Mode, about("Position: replace actor `at`, insert into or tap queue `at`, or add without queues.")]
    at: Annotated[str, about("Actor that is replaced, or queue that is tapped or inserted into.")] = ""
    restart: Annotated[Restart | None, about("Restart policy, as in Erlang/OTP; none: depends on the position.")] = None
    options: Annotated[dict[str, Any], about("Keyword arguments for the custom actor's class.")] = {}

    @property
    def is_in_group_flow(self) -> bool:
        """Whether groups pass through the actor, so that its failure ends the run; false for a monitor."""
        return self.mode == "insert" or (self.mode == "replace" and self.at != "monitor")


class MonitorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output of the run."""

    display: Annotated[Display, about("Terminal output; auto: live on a terminal, plain lines elsewhere.")] = "auto"
    rollouts: Annotated[bool, about("Write every rollout to rollouts.jsonl.")] = True
    token_values_mb: Annotated[NonNegative, about("Limit of the per-token values in tokens/, in MiB; 0: none.")] = 64
    prevent_sleep: Annotated[bool, about("On macOS, prevent idle sleep during the run; the display may sleep.")] = True
    watchdog_seconds: Annotated[
        PositiveFloat, about("Time until a stalled turn, a slow start or a lost group is reported.")
    ] = 120.0
    drain_seconds: Annotated[PositiveFloat, about("Longest time without a step while a run drains.")] = 600.0
    cache_limit_mb: Annotated[Positive, about("Limit of MLX's cache of freed buffers, in MiB.")] = 512
    wired_limit_mb: Annotated[NonNegative, about("Memory that macOS keeps resident on Metal, in MiB; 0: none.")] = 0


class TrackingSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of the run in trackers; an Atropos API server receives project and group too."""

    project: Annotated[str, about("Project of the run; empty: clotho.")] = ""
    group: Annotated[str, about("Group of runs that belong together; empty: none.")] = ""
    run_name: Annotated[str, about("Name of the run; empty: that of the run directory.")] = ""
    tags: Annotated[tuple[str, ...], about("Labels of the run.")] = ()


class TrackerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment tracker, which gets metrics, evaluations, completions and warnings."""

    name: Annotated[Literal["wandb", "trackio", "tensorboard"], about("The library that the run reports to.")]
    mode: Annotated[
        Literal["auto", "online", "offline"],
        about("Offline stores files for a later upload; auto is what WANDB_MODE says, or online; wandb only."),
    ] = "auto"
    completions: Annotated[NonNegative, about("Completions in the table of a step; 0: no table.")] = 8


class AtroposSource(Variant, frozen=True, kw_only=True):
    """Groups come through the Atropos API instead of data.train; evaluation does not change."""

    max_tokens: Annotated[int, about("Longer sequences of environments are refused.", ge=2)] = 2048
    poll_seconds: Annotated[float, about("Longest pause between two requests.", ge=0.05, le=60.0)] = 1.0
    patience_seconds: Annotated[PositiveFloat, about("Time without groups until a warning names environments.")] = 60.0


class EnvironmentSource(AtroposSource, frozen=True, kw_only=True):
    """Groups come from environments."""

    python: Interpreter = ""
    missing_logprobs: Annotated[Missing, about("Recompute missing log-probabilities, or refuse the group.")] = "refuse"


class StartedServer(EnvironmentSource, frozen=True, kw_only=True, tag="start"):
    """The run starts an Atropos API server and the [[environments]]."""

    python: Interpreter


class RunningServer(EnvironmentSource, frozen=True, kw_only=True, tag="connect"):
    """The run connects to an Atropos API server that is already running."""

    url: Annotated[str, about("Address of the API server.", pattern=r"^https?://[^\s/]+\S*$", title="http://HOST:PORT")]
    reset: Annotated[bool, about("Clear the server's state of another trainer; false resumes it.")] = True


class MockSource(AtroposSource, frozen=True, kw_only=True, tag="mock"):
    """The run itself makes groups from data.train and [[rewards]] over the HTTP API, without atroposlib."""


AtroposSection = Annotated[
    Off | StartedServer | RunningServer | MockSource, about("Source of groups: data.train or an API server.")
]


class EnvironmentSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One Atropos environment, whose process is started and supervised by the run."""

    name: Annotated[EnvironmentName, about("Name of the environment in logs and metrics.")]
    script: Annotated[str, about("Python file of the environment, run with serve.", min_length=1)]
    weight: Annotated[PositiveFloat, about("Relative share of the environment in every batch.")] = 1.0
    group_size: Annotated[GroupSize | None, about("Completions per prompt here; none: sampling.group_size.")] = None
    min_batch_allocation: Annotated[
        PositiveFraction | None, about("Minimum fraction of every batch; none: in proportion to the weight.")
    ] = None
    options: Annotated[dict[str, Any], about("Flags of the script, as --env.KEY, or --KEY if KEY has a dot.")] = {}


Asynchronous = Annotated[bool, about("Sample during updates; false is strictly on-policy.")]


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the whole run."""

    model: ModelSection
    data: DataSection
    rewards: Annotated[tuple[RewardSection, ...], Meta(min_length=1)]
    steps: Annotated[Positive, about("Number of batches that the run trains on.")] = 100
    seed: Annotated[int, about("Seed of all random number generators.", ge=0, lt=2**32)] = 0
    asynchronous: Asynchronous = field(name="async", default=True)
    run_dir: Annotated[str, about("Directory of the run; {profile} is the name of the profile.")] = "runs/{profile}"
    policy: PolicySection = PolicySection()
    sampling: SamplingSection = SamplingSection()
    learner: LearnerSection = LearnerSection()
    replay: ReplaySection = Off()
    collapse_detection: CollapseSection = WarnOnCollapse()
    parity: ParitySection = ParityCheck()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = HeldOutEvaluation()
    server: ServerSection = HttpServer()
    atropos: AtroposSection = Off()
    environments: tuple[EnvironmentSection, ...] = ()
    engine: EngineSection = EngineSection()
    generator: GeneratorSection = LocalGeneration()
    cluster: ClusterSection = Off()
    distributed: DistributedSection = DistributedSection()
    rollouts: RolloutsSection = RolloutsSection()
    queues: QueuesSection = QueuesSection()
    monitor: MonitorSection = MonitorSection()
    tracking: TrackingSection = TrackingSection()
    trackers: tuple[TrackerSection, ...] = ()
    actors: tuple[ActorSection, ...] = ()

    @property
    def max_batches_ahead(self) -> int:
        """Limit of batches in progress beyond the batch in training; with async = false it is `rollouts.lag`."""
        return self.rollouts.max_batches_ahead if self.asynchronous else self.rollouts.lag

    @property
    def max_staleness(self) -> int:
        """Groups that are more versions old are discarded. The default leaves slow groups time for twice the lead."""
        given = self.learner.max_staleness
        return max(4, 2 * self.max_batches_ahead) if given is None else given
