"""The options of the commands: tables from which typer's flags and a typed object are both made.

One long file: a table has a line or two for each option, and commands share their parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, TypeVar, get_type_hints

import typer

from surefoot.cli.files import read_text
from surefoot.errors import InputError, shown
from surefoot.sampling import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Item = TypeVar("Item")
Table = TypeVar("Table", bound="DataclassInstance")


def _option(*names: str, help: str, panel: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


PROMPT, MODEL, DRAFT, SAMPLE, OUTPUT = "Prompt", "Model", "Drafting", "Sampling", "Output"
MEASURE, SERVE, PROOF = "Measuring", "Serving", "Proof"
DRAFT_VOCAB = "Draft with the MTP head among so many frequent tokens, or those of a file (a JSON list of ids)."


@dataclass(frozen=True)
class ModelOptions:
    """Which model to load, and how it drafts. Values are checked by what uses them."""

    model: Annotated[
        str, _option("--model", "-m", help="A bundled name, a folder, or a hub id owner/name.", panel=MODEL)
    ] = "surefoot-demo"
    device: Annotated[str, _option("--device", help="cpu, cuda or cuda:N.", panel=MODEL)] = "cpu"
    dtype: Annotated[str, _option("--dtype", help="float32, bfloat16 or float16.", panel=MODEL)] = "float32"
    weights: Annotated[
        str, _option("--weights", help="whole (as the checkpoint has them), or fp8: in 8 bits, on a GPU.", panel=MODEL)
    ] = "whole"
    max_len: Annotated[
        int, _option("--max-len", help="Room for prompt and output together, in tokens.", panel=MODEL)
    ] = 4096
    drafter: Annotated[
        str,
        _option(
            "--drafter", "-d", help="auto, mtp, ngram, suffix, mtp+ngram, mtp+suffix, draft-model or none.", panel=DRAFT
        ),
    ] = "auto"
    draft_length: Annotated[
        int | None, _option("--draft-length", "-k", help="Most tokens to draft per step: 3, auto 8.", panel=DRAFT)
    ] = None
    draft_model: Annotated[
        str | None, _option("--draft-model", help="A second, smaller model to draft with.", panel=DRAFT)
    ] = None
    draft_vocab: Annotated[str | None, _option("--draft-vocab", help=DRAFT_VOCAB, panel=DRAFT)] = None
    min_confidence: Annotated[
        float, _option("--min-confidence", help="End an MTP draft where the head's own probabilities multiply to less; "
                       "0 never does.", panel=DRAFT)
    ] = 0.0  # fmt: skip


@dataclass(frozen=True)
class ChatOptions(ModelOptions):
    """A model, and how to sample from it, as given. Values are checked by what uses them, before the model is loaded if
    it can."""

    acceptance: Annotated[
        str, _option("--acceptance", help="Above temperature 0: coupled (same tokens) or rejection.", panel=DRAFT)
    ] = "coupled"
    max_new_tokens: Annotated[int, _option("--max-new-tokens", "-n", help="Most tokens to generate.", panel=SAMPLE)] = (
        256
    )
    temperature: Annotated[float, _option("--temperature", "-t", help="0 is greedy.", panel=SAMPLE)] = 0.0
    top_k: Annotated[int, _option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.", panel=SAMPLE)] = 0
    top_p: Annotated[float, _option("--top-p", help="Keep the likeliest tokens of mass p.", panel=SAMPLE)] = 1.0
    min_p: Annotated[
        float, _option("--min-p", help="Drop tokens below this share of the likeliest one's.", panel=SAMPLE)
    ] = 0.0
    typical_p: Annotated[
        float, _option("--typical-p", help="Keep the most typical tokens of mass p.", panel=SAMPLE)
    ] = 1.0
    repetition_penalty: Annotated[
        float, _option("--repetition-penalty", help="Divides logits of tokens that were there; 1 is off.", panel=SAMPLE)
    ] = 1.0
    presence_penalty: Annotated[
        float, _option("--presence-penalty", help="Taken off the logit of a token of the output.", panel=SAMPLE)
    ] = 0.0
    frequency_penalty: Annotated[
        float, _option("--frequency-penalty", help="The same for each time that it came.", panel=SAMPLE)
    ] = 0.0
    logit_bias: Annotated[
        str | None, _option("--logit-bias", help="Added to logits, by token id: 5:-100,17:2.5.", panel=SAMPLE)
    ] = None
    min_new_tokens: Annotated[int, _option("--min-new-tokens", help="Least tokens before an end.", panel=SAMPLE)] = 0
    stop: Annotated[
        list[str] | None, _option("--stop", help="End the text in front of this string; may be repeated.", panel=SAMPLE)
    ] = None
    thinking_budget: Annotated[
        int | None, _option("--thinking-budget", help="Most tokens between <think> and </think>.", panel=SAMPLE)
    ] = None
    json_schema: Annotated[
        Path | None, _option("--json-schema", help="The text must be JSON by the schema in this file.", panel=SAMPLE)
    ] = None
    regex: Annotated[str | None, _option("--regex", help="The text must match this expression.", panel=SAMPLE)] = None
    seed: Annotated[int, _option("--seed", help="Decides all random choices.", panel=SAMPLE)] = 0
    ignore_eos: Annotated[
        bool, _option("--ignore-eos", help="Go on past the model's end-of-sequence tokens.", panel=SAMPLE)
    ] = False

    def sampling(self) -> SamplingParams:
        """The request's sampling parameters. Raises InputError for a value out of range."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            acceptance=self.acceptance,  # type: ignore[arg-type]  # SamplingParams checks it
            ignore_eos=self.ignore_eos,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias or ""),
            min_new_tokens=self.min_new_tokens,
            stop=tuple(self.stop or ()),
            thinking_budget=self.thinking_budget,
            structured=self._structured(),
        )

    def _structured(self) -> StructuredOutput | None:
        if self.json_schema is None and self.regex is None:
            return None
        schema = None if self.json_schema is None else read_text(self.json_schema)
        return StructuredOutput(json_schema=schema, regex=self.regex)


def _biases(text: str) -> dict[int, float]:
    pairs = [pair.split(":") for pair in text.replace(",", " ").split()]
    try:
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError as error:
        raise InputError(f"logit_bias: expected id:value pairs such as 5:-100,17:2.5, found {text!r}") from error


@dataclass(frozen=True)
class ServeOptions(ModelOptions):
    """What to serve and to whom, as given."""

    host: Annotated[str, _option("--host", help="The address to listen at.", panel=SERVE)] = "127.0.0.1"
    port: Annotated[int, _option("--port", "-p", help="The port; 0 takes a free one.", panel=SERVE)] = 8000
    slots: Annotated[int, _option("--slots", help="Requests that run at once; others wait.", panel=SERVE)] = 8
    queue_limit: Annotated[int, _option("--queue-limit", help="Requests that may wait.", panel=SERVE)] = 256
    name: Annotated[
        str | None, _option("--name", help="The model's name for clients.  [default: --model]", panel=SERVE)
    ] = None
    api_key: Annotated[
        list[str] | None, _option("--api-key", help="A key that clients must send; several may be given.", panel=SERVE)
    ] = None
    cors_origin: Annotated[
        list[str] | None, _option("--cors-origin", help="A site whose pages may call; several may be given.",
                                  panel=SERVE)
    ] = None  # fmt: skip
    generation_config: Annotated[
        str, _option("--generation-config", help="auto: requests that do not say how to sample do as the model's "
                     "generation_config.json says; none: they do not.", panel=SERVE)
    ] = "auto"  # fmt: skip
    shutdown_timeout: Annotated[
        float | None, _option("--shutdown-timeout", help="Seconds for running requests to finish at the end; then they "
                              "are cancelled.  [default: as long as they take]", panel=SERVE)
    ] = None  # fmt: skip
    otel: Annotated[
        str | None, _option("--otel", help="Send OpenTelemetry spans to this OTLP/HTTP address.", panel=SERVE)
    ] = None
    prefix_cache: Annotated[
        int, _option("--prefix-cache", help="Bytes of what was read of prompts that are kept for others; 0 for none.",
                     panel=SERVE)
    ] = 2**29  # fmt: skip
    max_body: Annotated[int, _option("--max-body", help="Most bytes of a request.", panel=SERVE)] = 16 * 2**20


@dataclass(frozen=True)
class PromptOptions:
    """Where one prompt comes from, as given."""

    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - reads it from standard input.", show_default=False)
    ] = None
    file: Annotated[Path | None, _option("--file", "-f", help="Read the prompt from a file.", panel=PROMPT)] = None
    token_ids: Annotated[
        str | None, _option("--token-ids", help="The prompt as token ids, such as 5,17,3.", panel=PROMPT)
    ] = None
    chat: Annotated[
        bool, _option("--chat/--no-chat", help="Send the prompt as a chat turn (the model's template).", panel=PROMPT)
    ] = False


@dataclass(frozen=True)
class Options(ChatOptions, PromptOptions):
    """What the user asked for who has one prompt, as given."""

    logprobs: Annotated[
        int | None,
        _option("--logprobs", help="With --json: log-probabilities, of the k best tokens too.", panel=OUTPUT),
    ] = None
    as_json: Annotated[bool, _option("--json", help="Print one JSON object instead of text.", panel=OUTPUT)] = False

    def sampling(self) -> SamplingParams:
        """See `ChatOptions`."""
        return replace(super().sampling(), logprobs=self.logprobs)


@dataclass(frozen=True)
class BenchOptions:
    """What a benchmark was asked for, as given; lists are comma-separated. `surefoot.bench.settings` checks it."""

    model: Annotated[
        str | None, _option("--model", "-m", help="A bundled name, a folder, or a hub id.  [default: surefoot-demo]",
                            panel=MODEL)
    ] = None  # fmt: skip
    shape: Annotated[
        str | None, _option("--shape", help="Random weights of a published shape, such as qwen3.5-9b.", panel=MODEL)
    ] = None
    device: Annotated[str, _option("--device", help="cpu, cuda or cuda:N.", panel=MODEL)] = "cpu"
    dtype: Annotated[str, _option("--dtype", help="float32, bfloat16 or float16.", panel=MODEL)] = "bfloat16"
    weights: Annotated[
        str, _option("--weights", help="whole (as the checkpoint has them), or fp8: in 8 bits, on a GPU.", panel=MODEL)
    ] = "whole"
    context: Annotated[str, _option("--context", help="Tokens of a prompt; of several, each.", panel=MEASURE)] = "1024"
    batch: Annotated[
        str, _option("--batch", help="Sequences that decode together; of several, each.", panel=MEASURE)
    ] = "1"
    prompts: Annotated[
        int | None, _option("--prompts", help="Batches of prompts, all checked and measured.  [default: 3; 1 with "
                            "--shape]", panel=MEASURE)
    ] = None  # fmt: skip
    tokens: Annotated[int, _option("--tokens", "-n", help="New tokens of a prompt.", panel=MEASURE)] = 128
    rounds: Annotated[int, _option("--rounds", help="Turns of everything that is measured.", panel=MEASURE)] = 3
    seconds: Annotated[
        float, _option("--seconds", help="Fewer rounds if a drafter's would take longer.", panel=MEASURE)
    ] = 20.0
    drafters: Annotated[
        str,
        _option(
            "--drafters",
            "-d",
            help="Of none,ngram,mtp,mtp+ngram (with --server, any of serve's); all that the model has.",
            panel=DRAFT,
        ),
    ] = ""
    depths: Annotated[
        str,
        _option("--depths", "-k", help="Draft lengths.  [default: 1 to 6; 4 where n-grams are copied]", panel=DRAFT),
    ] = ""
    draft_vocab: Annotated[str | None, _option("--draft-vocab", help=DRAFT_VOCAB, panel=DRAFT)] = None
    synthetic_acceptance: Annotated[
        str, _option("--synthetic-acceptance", help="Shares of steps in which the MTP head's draft token 1, 2, ... is "
                     "accepted, such as .92,.85,.67: its drafts are overwritten to that end.", panel=DRAFT)
    ] = ""  # fmt: skip
    against: Annotated[
        str | None, _option("--against", help="transformers: measure its generate too.", panel=MEASURE)
    ] = None
    seed: Annotated[int, _option("--seed", help="Decides random weights.", panel=MODEL)] = 0
    server: Annotated[
        bool, _option("--server", help="Measure `surefoot serve` as clients see it, instead of all this.",
                      panel=SERVE)
    ] = False  # fmt: skip
    url: Annotated[
        str | None, _option("--url", help="The same of a server that runs at http://host:port.", panel=SERVE)
    ] = None
    api_key: Annotated[str | None, _option("--api-key", help="With --url: what it asks for.", panel=SERVE)] = None
    concurrency: Annotated[
        str, _option("--concurrency", help="With --server: requests at a time; of several, each.", panel=SERVE)
    ] = "1,8"
    requests: Annotated[int, _option("--requests", help="With --server: how many, each time.", panel=SERVE)] = 16
    json: Annotated[Path | None, _option("--json", help="Save every figure here.", panel=OUTPUT)] = None
    plot: Annotated[Path | None, _option("--plot", help="Draw speeds and passes here.", panel=OUTPUT)] = None


@dataclass(frozen=True)
class ProveOptions:
    """What is to be proved, as given; lists are comma-separated. `surefoot.prove.settings` checks it."""

    model: Annotated[
        str, _option("--model", "-m", help="A bundled name, a folder, or a hub id owner/name; of another family, too, "
                     "which transformers runs (also from a .gguf file).", panel=MODEL)
    ] = "surefoot-demo"  # fmt: skip
    device: Annotated[str, _option("--device", help="cpu, cuda or cuda:N.", panel=MODEL)] = "cpu"
    dtype: Annotated[str, _option("--dtype", help="float32, bfloat16 or float16.", panel=MODEL)] = "float32"
    prompts: Annotated[
        Path | None, _option("--prompts", help='One prompt a line, or a JSON object with "text".', panel=PROOF)
    ] = None
    drafters: Annotated[
        str, _option("--drafters", "-d", help="Of ngram,suffix,mtp,mtp+ngram,mtp+suffix,auto; all that the model has.",
                     panel=PROOF)
    ] = ""  # fmt: skip
    max_k: Annotated[int | None, _option("--max-k", "-k", help="Longest draft: 4, with --quick 3.", panel=PROOF)] = None
    tokens: Annotated[
        int | None, _option("--tokens", "-n", help="New tokens of a prompt: 48, with --quick 16.", panel=PROOF)
    ] = None
    seed: Annotated[int, _option("--seed", help="Decides all random choices.", panel=PROOF)] = 0
    quick: Annotated[bool, _option("--quick", help="Fewer prompts, draft lengths and samples.", panel=PROOF)] = False
    json: Annotated[Path | None, _option("--json", help="Save all that was seen here.", panel=OUTPUT)] = None
    html: Annotated[Path | None, _option("--html", help="Write the report here, as a page.", panel=OUTPUT)] = None


@dataclass(frozen=True)
class TuneOptions:
    """What tuning was asked for, as given; lists are comma-separated."""

    model: Annotated[
        str, _option("--model", "-m", help="A bundled name, a folder, or a hub id owner/name.", panel=MODEL)
    ] = "surefoot-demo"
    device: Annotated[str, _option("--device", help="cpu.", panel=MODEL)] = "cpu"
    dtype: Annotated[str, _option("--dtype", help="float32, bfloat16 or float16.", panel=MODEL)] = "float32"
    max_len: Annotated[
        int, _option("--max-len", help="Room for prompt and output together, in tokens.", panel=MODEL)
    ] = 4096
    prompts: Annotated[
        Path | None, _option("--prompts", help='One prompt a line, or a JSON object with "text" and "kind".',
                             panel=MEASURE)
    ] = None  # fmt: skip
    kinds: Annotated[
        str, _option("--kinds", help="Of the built-in prompts: chat,code,edit,summary,extraction,mathematics,creative; "
                     "all.", panel=MEASURE)
    ] = ""  # fmt: skip
    depths: Annotated[str, _option("--depths", "-k", help="The MTP head's draft lengths.  [default: 1 to 6]",
                                   panel=MEASURE)] = ""  # fmt: skip
    tokens: Annotated[int, _option("--tokens", "-n", help="New tokens of a prompt.", panel=MEASURE)] = 64
    rounds: Annotated[int, _option("--rounds", help="Turns of everything that is measured.", panel=MEASURE)] = 2
    json: Annotated[Path | None, _option("--json", help="Save every figure here.", panel=OUTPUT)] = None
    plot: Annotated[Path | None, _option("--plot", help="Draw speed-ups here.", panel=OUTPUT)] = None

    @property
    def label(self) -> str:
        """The model's name; of a folder only the last part, which says nothing of the machine."""
        return Path(self.model).name if Path(self.model).exists() else self.model

    @property
    def command(self) -> str:
        """The command line of these options, without a path of this machine."""
        shown = {"model": self.label} | {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("model", "json", "plot") and getattr(self, field.name) != field.default
        }
        return " ".join(["surefoot tune", *(f"--{name.replace('_', '-')} {_file(v)}" for name, v in shown.items())])


def _file(value: object) -> object:
    return value.name if isinstance(value, Path) else value


@dataclass(frozen=True)
class DoctorOptions:
    """Which checkpoint to look at, and how far, as given."""

    model: Annotated[str, typer.Argument(help="A bundled name, a folder, or a hub id owner/name.", show_default=False)]
    probe: Annotated[
        bool, _option("--probe/--no-probe", help="Load the weights, and let the MTP head draft along a text.",
                      panel=MEASURE)
    ] = True  # fmt: skip
    text: Annotated[
        Path | None, _option("--text", help="A text to probe with.  [default: built-in ones]", panel=MEASURE)
    ] = None
    tokens: Annotated[int, _option("--tokens", "-n", help="Most tokens of text to probe with.", panel=MEASURE)] = 1024
    depth: Annotated[int, _option("--depth", "-k", help="Draft positions to probe.", panel=MEASURE)] = 4
    device: Annotated[str, _option("--device", help="cpu, cuda or cuda:N.", panel=MODEL)] = "cpu"
    dtype: Annotated[str, _option("--dtype", help="float32, bfloat16 or float16.", panel=MODEL)] = "bfloat16"
    as_json: Annotated[bool, _option("--json", help="Print one JSON object instead of text.", panel=OUTPUT)] = False


def number_or_file(text: str | None) -> int | str | None:
    """A draft vocabulary as given: a number of tokens if it is one, else a file's name."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


def listed(name: str, text: str, kind: Callable[[str], Item]) -> tuple[Item, ...]:
    """The parts of an option with commas. Raises InputError, naming the option, for what `kind` does not take."""
    try:
        return tuple(kind(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise InputError(f"{name}: expected numbers separated by commas, found {shown(text)}") from None


def takes(kind: type[Table]) -> Callable[[Callable[Concatenate[Table, ...], None]], Callable[..., None]]:
    """Turns a command into a function for typer, with the fields of `kind` as parameters, then the command's own; the
    command is called with a `kind` and its own parameters."""
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]

    def wrap(command: Callable[Concatenate[Table, ...], None]) -> Callable[..., None]:
        own_hints = get_type_hints(command, include_extras=True)
        _, *own = inspect.signature(command).parameters.values()
        extra = [p.replace(kind=p.KEYWORD_ONLY, annotation=own_hints[p.name]) for p in own]

        def for_typer(**values: Any) -> None:
            chosen = {field.name: values.pop(field.name) for field in fields(kind)}
            command(kind(**chosen), **values)

        parameters = [*shared, *extra]
        for_typer.__name__, for_typer.__doc__ = command.__name__, command.__doc__
        # typer reads the parameters off the signature and the hints.
        for_typer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # any function has it
        for_typer.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return for_typer

    return wrap
