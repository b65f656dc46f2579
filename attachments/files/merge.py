"""The command `merge`: writes a base model with an adapter in its weights, and reports what storing has lost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import structs
from rich.console import Console

from attachments.files.convert import require_new, require_suffix, write_new
from attachments.files.fidelity import Fidelity, compare
from attachments.files.gguf_model import PACKINGS, write_gguf_model, write_gguf_of_directory
from attachments.files.gguf_names import ARCHITECTURES
from attachments.files.merging import (
    MergeSettings,
    ModelFormat,
    Packing,
    common_dtype,
    merged_config,
    merged_layers,
    new_packings,
    require_layers,
    summarize,
    weights_of,
    write_beside,
    write_weights,
)
from clotho.data.problems import ProblemColumns, conversation, load_problems
from clotho.data.records import Source
from clotho.models.loading import open_stored, quantize_base
from clotho.models.model_files import BITS, GROUP_SIZES
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.model import ModelSection, QuantizeAtLoad
from clotho.storage.atomic_files import replace_file
from protocols.errors import ArtifactError, ProfileError
from training_run.adapters.contents import Adapter
from training_run.adapters.reading import read_adapter_of
from training_run.commands.command_line import CommandParser
from training_run.profile.data import DataSection
from training_run.profile.generators import Generators, prefix_of
from training_run.profile.load import load_profile
from training_run.records.terminal_text import memory, percent, print_line

REPORT = "merge_report.json"
MAX_TOKENS = 128
"""Number of tokens of a prompt that are compared."""

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Classes of transformers by `model_type`, for models whose files do not name their class."""

QUESTIONS = (
    "What is 17 + 25?",
    "Name the capital of France and one of its rivers.",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
)
"""Prompts of a comparison without a dataset."""


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser("merge", "Merge an adapter into the weights of its base model, and report what is lost.")
    found.add_argument("--model", default="", help="base model; default: the one that the adapter names")
    found.add_argument("--adapter", required=True, type=Path, help="directory of an adapter, run or checkpoint")
    found.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="new directory; with --format gguf a new file *.gguf"
    )
    found.add_argument("--format", default="mlx", choices=get_args(ModelFormat), help="mlx-lm, Hugging Face, llama.cpp")
    found.add_argument("--dequantize", action="store_true", help="expand the weights of a quantized base model")
    found.add_argument("--quantize-bits", type=int, metavar="N", help="quantize all layers with N bits per weight")
    found.add_argument(
        "--group-size", type=int, metavar="N", help="weights that share a scale; default: 64, with --format gguf 32"
    )
    found.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="type of floating weights"
    )
    found.add_argument("--dataset", default="", help="prompts of the comparison; default: those of the adapter's run")
    found.add_argument("--prompts", type=int, default=8, metavar="N", help="number of prompts of the comparison")
    found.add_argument("--accept-loss", action="store_true", help="write the model although storing loses the change")
    found.add_argument("--clean", action="store_true", help="delete an earlier directory at --output")
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Merge an adapter; return the exit status."""
    arguments = parser().parsed(argv, console)
    if arguments is None:
        return 0
    fidelity = merge(
        arguments.model,
        arguments.adapter.expanduser(),
        arguments.output.expanduser(),
        settings_of(arguments),
        dataset=arguments.dataset,
        prompts=arguments.prompts,
        accept_loss=arguments.accept_loss,
        clean=arguments.clean,
    )
    for line in report_lines(fidelity, arguments.output):
        print_line(console, line)
    return 0


def settings_of(arguments: argparse.Namespace) -> MergeSettings:
    """Return how weights are stored. Raises ProfileError for flags that contradict each other."""
    packing = None
    if (bits := arguments.quantize_bits) is not None:
        is_gguf = arguments.format == "gguf"
        group_size = arguments.group_size or (32 if is_gguf else 64)
        for flag, value, allowed in (
            ("--quantize-bits", bits, sorted(one.bits for one in PACKINGS) if is_gguf else BITS["affine"]),
            ("--group-size", group_size, (32,) if is_gguf else GROUP_SIZES["affine"]),
        ):
            if value not in allowed:
                raise ProfileError(f"merge: {flag} must be one of {', '.join(map(str, allowed))}, not {value}")
        packing = Packing(bits, group_size)
    if packing and arguments.dequantize:
        raise ProfileError("merge: --dequantize and --quantize-bits contradict each other")
    if packing and arguments.format == "hf":
        raise ProfileError("merge: --quantize-bits is a quantization that --format hf cannot store")
    if arguments.prompts < 1:
        raise ProfileError(f"merge: --prompts must be at least 1, not {arguments.prompts}")
    return MergeSettings(
        format=arguments.format, dequantize=arguments.dequantize, quantize=packing, dtype=arguments.dtype
    )


def merge(
    model: str,
    adapter_path: Path,
    output: Path,
    settings: MergeSettings,
    *,
    dataset: str = "",
    prompts: int = 8,
    accept_loss: bool = False,
    clean: bool = False,
) -> Fidelity:
    """Write the merged model to `output`, and return its comparison with base model plus adapter.

    model: the base model; empty: the one that the adapter names. clean: replace an existing directory. The directory
    appears complete. Raises ArtifactError, also if storing loses the change and `accept_loss` is not set; then nothing
    is written.
    """
    if not clean:
        require_new(output)
    elif output.exists() and not report_path(output).is_file():
        raise ArtifactError(f"{output} was not written by merge: delete it yourself", reason="exists")
    require_suffix(output, settings.format)
    adapter = read_adapter_of(adapter_path, model)
    if adapter.base is None:
        named = f"{adapter.base_name!r} is not on this machine" if adapter.base_name else "the adapter names none"
        raise ArtifactError(f"merge needs the base model, and {named}: --model MODEL", reason="base")
    quantized = adapter.base_quantization
    section = ModelSection(path=adapter.base.path)
    if quantized is not None:
        section = ModelSection(path=adapter.base.path, quantize=QuantizeAtLoad(**structs.asdict(quantized)))
    _require_expressible(adapter, settings)
    tokens = comparison_prompts(adapter, section, dataset, adapter_path, prompts)
    found: list[Fidelity] = []

    def write(path: Path) -> None:
        """Write the merged model with its report. Raises ArtifactError if rounding loses the change."""
        weights = _write(path, adapter, section, settings)
        fidelity = compare(tokens, base=section, merged=path, adapter=adapter, weights=summarize(weights))
        if not fidelity.keeps_change and not accept_loss:
            raise ArtifactError(loss_message(fidelity), reason="rounding")
        report = {"base": section.path, "adapter": str(adapter.path), "settings": settings, "fidelity": fidelity}
        place = path / REPORT if path.is_dir() else report_path(output)
        replace_file(place, [msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"])
        found.append(fidelity)

    write_new(output, write, is_file=settings.format == "gguf")
    return found[0]


def report_path(output: Path) -> Path:
    """Return the path of the report: in a directory, or beside a file."""
    return output.with_suffix(f".{REPORT}") if output.suffix == ".gguf" else output / REPORT


def _require_expressible(adapter: Adapter, settings: MergeSettings) -> None:
    base = adapter.base
    assert base is not None
    is_quantized = "quantization" in base.config or adapter.base_quantization is not None
    if settings.format == "gguf" and base.files.is_file() and settings.quantize:
        raise ArtifactError(
            "gguf: a base model in a GGUF file keeps its quantization: use llama.cpp's llama-quantize afterwards",
            reason="inexpressible",
        )
    if settings.format == "gguf" and base.files.is_file() and adapter.weights:
        raise ArtifactError(
            f"gguf: {sorted(adapter.weights)[0]} was trained in full: convert the base model to a directory first",
            reason="inexpressible",
        )
    if settings.format == "gguf" and base.files.is_dir() and is_quantized and not settings.expands:
        raise ArtifactError(
            "gguf: llama.cpp does not read the quantization of this base model: add --dequantize or --quantize-bits 8",
            reason="inexpressible",
        )
    if settings.format != "hf":
        return
    if base.architecture not in ARCHITECTURES:
        raise ArtifactError(
            f"hf: mlx-lm and Hugging Face name the weights of {base.architecture!r} differently; use --format mlx",
            reason="inexpressible",
        )
    if is_quantized and not settings.dequantize:
        raise ArtifactError(
            "hf: transformers does not read the quantization of this base model: add --dequantize",
            reason="inexpressible",
        )


def _write(path: Path, adapter: Adapter, section: ModelSection, settings: MergeSettings) -> list[list[float]]:
    """Write all files; return the changes of layers."""
    assert adapter.base is not None
    if settings.format == "gguf" and adapter.base.files.is_file():
        return write_gguf_model(path, adapter.base, adapter, settings)
    files = adapter.base.files
    model, config = open_stored(files, section)
    if isinstance(section.quantize, QuantizeAtLoad):
        quantize_base(model, config, section.quantize, path=section.path)
        config = config | {"quantization": structs.asdict(section.quantize)}
    require_layers(model, adapter, section.path)
    packings = new_packings(model, settings.quantize)
    if settings.format == "gguf":
        weights, tokenizer = weights_of(model), ChatTokenizer.of_model(files, section)
        del model
        return write_gguf_of_directory(path, adapter.base, weights, adapter, settings, tokenizer)
    layers = merged_layers(model, adapter, settings)
    del model
    merged = merged_config(config, settings, packings, common_dtype(layers))
    if settings.format == "hf" and "architectures" not in merged and config["model_type"] in CLASSES:
        merged["architectures"] = [CLASSES[config["model_type"]]]
    changes = write_weights(path, layers, {"format": "pt" if settings.format == "hf" else "mlx"})
    write_beside(path, files, merged)
    return changes


def loss_message(fidelity: Fidelity) -> str:
    """Return why a merged model is refused."""
    change = fidelity.weights
    return (
        f"storing loses the change of the adapter: the mean KL divergence from base model plus adapter is "
        f"{fidelity.mean_kl:.3g} nats, and the adapter itself changes {fidelity.adapter_kl:.3g}; the rounding error is "
        f"{change.relative_error:.3g} times the change of the weights. Use --dequantize, --dtype float32 or more bits, "
        "serve the adapter beside the base model, or accept the loss with --accept-loss"
    )


def comparison_prompts(
    adapter: Adapter, section: ModelSection, dataset: str, adapter_path: Path, count: int
) -> list[tuple[int, ...]]:
    """Return the tokens of prompts with answers: of the dataset, else of the adapter's run, else of `QUESTIONS`."""
    assert adapter.base is not None
    tokenizer = ChatTokenizer.of_model(adapter.base.files, section)
    texts: list[tuple[int, ...]] = []
    for messages, answer in _conversations(dataset, adapter_path, count):
        if tokenizer.has_chat_template:
            prompt = tokenizer.render_chat(messages)
        else:
            prompt = tokenizer.encode("\n".join(message["content"] for message in messages))
        texts.append((*prompt, *(tokenizer.encode(answer, add_special_tokens=False) if answer else ()))[:MAX_TOKENS])
    return texts


def _conversations(dataset: str, adapter_path: Path, count: int) -> Iterator[tuple[list[dict[str, str]], str]]:
    source, columns, data, seed = Source(path=dataset), ProblemColumns(answer=""), DataSection(train=dataset or "-"), 0
    if not dataset:
        profiles = [place / "profile.toml" for place in (adapter_path, *adapter_path.absolute().parents[:2])]
        own = next((path for path in profiles if path.is_file()), None)
        if own is None:
            yield from (([{"role": "user", "content": question}], "") for question in QUESTIONS[:count])
            return
        profile = load_profile(str(own), {})
        data, seed = profile.data, profile.seed
        source = Source(path=data.train, subset=data.subset, split=data.train_split)
        columns = ProblemColumns(prompt=data.prompt_key, messages=data.messages_key, answer=data.answer_key)
    if prefix_of(source.path):
        with Generators(data) as generators:
            problems = generators.problems(source.path, seed=seed)
    else:
        problems = load_problems(source, columns=columns)
    for problem in problems[:count]:
        yield [dict(message) for message in conversation(problem, data.system)], problem.answer


def report_lines(fidelity: Fidelity, output: Path) -> Iterator[str]:
    """Return the lines that describe a merged model."""
    change = fidelity.weights
    size = sum(path.stat().st_size for path in (output.iterdir() if output.is_dir() else [output]))
    yield f"wrote    {output}, {memory(size)}"
    yield (
        f"weights  {change.layers} layers changed by {change.rms:.3g} (rms); rounding {change.rounding_rms:.3g}, "
        f"{change.relative_error:.3g} times the change; {change.lost} layers lost"
    )
    yield (
        f"fidelity {percent(fidelity.greedy_agreement)} of {fidelity.tokens} tokens agree greedily; mean KL "
        f"{fidelity.mean_kl:.3g} nats from base model plus adapter (the adapter changes {fidelity.adapter_kl:.3g})"
    )
