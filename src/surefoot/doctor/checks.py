"""What files and headers say by themselves: tensors against the config, the head, the vocabulary, the ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from surefoot.config import ModelConfig
from surefoot.doctor.findings import listing
from surefoot.doctor.survey import Survey
from surefoot.errors import CheckpointError, shown
from surefoot.loading.checkpoint import EIGHT_BITS, HEAD, Problem, differences
from surefoot.loading.config import token_ids
from surefoot.loading.files import Stored, is_there, read_json
from surefoot.loading.names import is_mtp
from surefoot.loading.tokenizer import Tokenizer
from surefoot.model.tensors import mtp_shapes, target_shapes

Read = TypeVar("Read")

TURN_END = "<|im_end|>"  # what the family's templates end a turn with
ORIGINAL = "Take the missing tensors from the original checkpoint."


@dataclass(frozen=True)
class StoredType:
    """How much of the files is of one type."""

    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class MtpState:
    """The MTP head in the files. `state`: "present", "partial" or "absent"; `announced`: layers by config.json;
    `missing`: canonical names; `files`: where it is; `sidecar`: whether that is outside the index; `quantised`: whether
    weights of it are in 8 bits."""

    state: str
    announced: int
    tensors: int
    parameters: int
    missing: list[str]
    files: list[str]
    sidecar: bool
    quantised: bool


@dataclass(frozen=True)
class Vocabulary:
    """`rows` of the embedding, `tokens` of the tokenizer (None without one), and rows without a token."""

    rows: int
    tokens: int | None
    padding: int


def stored_types(tensors: list[Stored]) -> dict[str, StoredType]:
    """By type, vision tower and all."""
    count, elements = Counter[str](), Counter[str]()
    for stored in tensors:
        count[stored.dtype] += 1
        elements[stored.dtype] += math.prod(stored.shape)
    return {kind: StoredType(count[kind], elements[kind], elements[kind] * bits_of(kind) // 8) for kind in count}


def bits_of(kind: str) -> int:
    """Of one number of a safetensors type."""
    digits = "".join(char for char in kind.partition("_")[0] if char.isdigit())
    return int(digits) if digits else 8


def check_tensors(survey: Survey) -> None:
    """Shapes, types and completeness of the decoder, which the config decides. Tensors of lost files go unnamed."""
    config = survey.config
    if config is None or not survey.found:
        return
    found = {name: parts for name, parts in survey.found.items() if not is_mtp(name)}
    if config.tied:
        found.pop(HEAD, None)
    told = differences(replace(config, mtp_layers=0), target_shapes(config), found)
    missing = [problem for problem in told.missing if problem.name not in survey.lost]
    head = [problem for problem in missing if problem.name == HEAD]
    if head:
        survey.error(
            "head-missing",
            f"{HEAD} is missing, and tie_word_embeddings is false",
            "Set tie_word_embeddings to true if the head is the embedding; else fetch it.",
        )
    _say_problems(survey, "tensor-missing", [problem for problem in missing if problem not in head], ORIGINAL)
    wrong = [problem for problem in told.wrong if problem.name not in survey.lost]
    _say_problems(survey, "tensor-wrong", wrong, "Compare config.json with the files: one is of another export.")
    _say_problems(survey, "tensor-extra", list(told.extra), "Delete it, or use the config.json that goes with it.")
    if config.tied and HEAD in survey.found:
        survey.note(
            "head-beside-tie",
            f"{HEAD} is stored although embeddings are tied; it must repeat the embedding, and loading checks that",
        )


def _say_problems(survey: Survey, code: str, problems: list[Problem], advice: str) -> None:
    if problems:
        survey.error(code, listing((problem.text for problem in problems), 5), advice)


def check_mtp(survey: Survey) -> MtpState:
    """Whether there is a head, whole, and where."""
    spots = [spot for name, places in survey.found.items() if is_mtp(name) for spot in places.items()]
    parts = [stored for _, stored in spots]
    announced = 0 if survey.config is None else survey.config.mtp_layers
    lost = [name for name in survey.lost if is_mtp(name)]
    if not parts:
        _say_absent(survey, announced, lost)
        return MtpState("absent", announced, 0, 0, sorted(lost), [], False, False)
    missing = [] if survey.config is None else _compare_head(survey, survey.config)
    state = MtpState(
        "partial" if missing or lost else "present",
        announced,
        len(parts),
        sum(math.prod(stored.shape) for spot, stored in spots if not spot.scale),
        missing + sorted(lost),
        sorted({stored.file.name for stored in parts}),
        any(stored.file in survey.sidecars for stored in parts),
        any(stored.dtype == EIGHT_BITS for stored in parts),
    )
    if state.sidecar:
        survey.note(
            "mtp-sidecar",
            f"the MTP head is in {listing(p.name for p in survey.sidecars)}, which "
            "the index does not list; Surefoot finds it there",
            "Nothing for Surefoot; other loaders may need the file in the index.",
        )
    if state.quantised:
        survey.note(
            "mtp-quantised",
            "weights of the MTP head are in 8 bits",
            "If few drafts are accepted, keep the head in 16 bits: it is a few per cent of the model.",
        )
    if survey.config is not None and not announced:
        survey.note(
            "mtp-unannounced",
            "config.json announces no MTP layers (mtp_num_hidden_layers), but the files hold a head; Surefoot uses it",
        )
    return state


def _say_absent(survey: Survey, announced: int, lost: list[str]) -> None:
    if lost or survey.config is None:
        return  # said of the file that it was in
    if announced:
        survey.warning(
            "mtp-absent",
            f"config.json announces an MTP head ({announced} layer), but the files "
            "have no mtp.* tensors; saving with `transformers` drops them",
            'Copy the mtp.* tensors from the original checkpoint, or draft with drafter="ngram".',
        )
    else:
        survey.note(
            "mtp-none",
            "there is no MTP head, and config.json announces none: drafts come from n-grams or a draft model",
            'Nothing, or draft with drafter="ngram".',
        )


def _compare_head(survey: Survey, config: ModelConfig) -> list[str]:
    """Say what is wrong with the head; the canonical names that are missing."""
    found = {name: parts for name, parts in survey.found.items() if is_mtp(name)}
    layers = len({name.split(".")[2] for name in found if name.startswith("mtp.layers.")})
    config = replace(config, mtp_layers=config.mtp_layers or max(1, layers))
    if config.mtp_layers > 1:
        survey.warning(
            "mtp-layers",
            f"the MTP head has {config.mtp_layers} layers; Surefoot runs heads of one",
            'Draft with drafter="ngram".',
        )
    told = differences(config, mtp_shapes(config), found)
    missing = [problem for problem in told.missing if problem.name not in survey.lost]
    if missing:
        there = f"{len(found)} of {len(mtp_shapes(config))} tensors of the MTP head are there; missing: "
        survey.error(
            "mtp-partial",
            there + listing((p.text for p in missing), 20),
            f'{ORIGINAL} Until then only drafter="ngram" or "none" loads.',
        )
    advice = "Take the whole head from the original checkpoint."
    _say_problems(survey, "mtp-wrong", [p for p in told.wrong if p.name not in survey.lost], advice)
    _say_problems(survey, "mtp-extra", list(told.extra), advice)
    return list(dict.fromkeys(problem.name for problem in missing))


def check_quantisation(survey: Survey) -> str | None:
    """How weights are quantised, in words; None if they are whole."""
    settings = survey.raw.get("quantization_config")
    narrow = [stored for stored in survey.tensors if stored.dtype == EIGHT_BITS]
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not narrow:
        if method is not None and survey.config is not None:
            survey.warning(
                "quantisation-unused",
                f"config.json says {shown(method)}, but no tensor is in 8 bits",
                "Remove quantization_config, or fetch the weights that it describes.",
            )
        return None if method is None else f"{shown(method)} by config.json, no tensor of 8 bits"
    weights = sum(1 for stored in survey.tensors if len(stored.shape) > 1)
    told = f"FP8 (e4m3): {len(narrow)} of {weights} matrices" + ("" if method is None else f", method {method}")
    if method is None:
        survey.note(
            "quantisation-unannounced",
            "weights are in 8 bits, config.json has no quantization_config; the tensors decide",
        )
    survey.note(
        "fp8",
        f"{told}; kept in 8 bits on GPUs that compute with them, else turned into the dtype asked for while loading",
    )
    return told


def read_tokenizer(survey: Survey) -> Tokenizer | None:
    """The tokenizer if there is one that can be read."""
    found, tokenizer = _try(survey, "tokenizer-unreadable", lambda: Tokenizer.from_folder(survey.folder))
    if found and tokenizer is None:
        survey.note("tokenizer-none", "there is no tokenizer.json: the model works with token ids only")
    return tokenizer


def check_vocabulary(survey: Survey, tokenizer: Tokenizer | None) -> Vocabulary | None:
    """Rows of the embedding against tokens of the tokenizer."""
    if survey.config is None:
        return None
    rows = survey.config.vocab_size
    tokens = None if tokenizer is None else tokenizer.vocab_size
    if tokens is not None and tokens > rows:
        survey.error(
            "tokenizer-too-large",
            f"the tokenizer has ids up to {tokens - 1}, the embedding {rows} rows",
            "Use the tokenizer that the weights were trained with.",
        )
    if tokens is not None and tokens < rows:
        survey.note(
            "vocabulary-padded",
            f"the embedding has {rows} rows, the tokenizer {tokens} tokens: "
            f"{rows - tokens} padding rows (ids {tokens} to {rows - 1}); they are never emitted",
            "Nothing: Surefoot leaves them out of every choice.",
        )
    return Vocabulary(rows, tokens, 0 if tokens is None else max(0, rows - tokens))


def check_chat(survey: Survey, tokenizer: Tokenizer | None, ends: set[int]) -> bool:
    """Whether there is a chat template; whether what ends its turns ends an answer."""
    template = None if tokenizer is None else tokenizer.chat_template
    if tokenizer is None or template is None:
        if tokenizer is not None:
            survey.note(
                "chat-template-none",
                "there is no chat template: `surefoot chat` and the server's chat forms need one; plain text works",
            )
        return False
    try:
        tokenizer.apply_chat([{"role": "user", "content": "Hello"}])
    except Exception as error:  # whatever a template does
        survey.warning(
            "chat-template-broken",
            f"the chat template refuses a plain message: {error}",
            "Take chat_template from the original tokenizer_config.json.",
        )
    turn_end = tokenizer.backend.token_to_id(TURN_END) if TURN_END in template else None
    if turn_end is not None and turn_end not in ends:
        survey.warning(
            "end-of-turn",
            f"the chat template ends turns with {TURN_END} (id {turn_end}), which is no end id: answers run on",
            f"Add {turn_end} to eos_token_id in generation_config.json.",
        )
    return True


def read_ends(survey: Survey, tokenizer: Tokenizer | None) -> dict[str, list[int]]:
    """End ids by the place that says them; places that say nothing are left out."""
    places: dict[str, list[int]] = {}

    def note(where: str, raw: Mapping[str, object]) -> None:
        found, ids = _try(survey, "end-ids-unreadable", lambda: token_ids(raw, where))
        if found and ids:
            places[where] = list(ids)

    note("config.json", survey.raw)
    nested = survey.raw.get("text_config")
    if isinstance(nested, Mapping):
        note("config.json text_config", nested)
    file = survey.folder / "generation_config.json"
    _, raw = _try(survey, "generation-config-unreadable", lambda: read_json(file) if is_there(file) else {})
    note(file.name, raw or {})
    own = None if tokenizer is None else tokenizer.specials.get("eos_token")
    if tokenizer is not None and own is not None:
        if tokenizer.eos_token_id is None:
            survey.warning(
                "end-id-unknown",
                f"tokenizer_config.json names {shown(own)} as eos_token, which the tokenizer does not have",
                "Name one of the tokenizer's own tokens there.",
            )
        else:
            places["tokenizer_config.json"] = [tokenizer.eos_token_id]
    return places


def check_ends(survey: Survey, places: Mapping[str, list[int]], vocabulary: Vocabulary | None) -> set[int]:
    """All end ids; whether the places agree, and whether the ids are tokens."""
    every = {token for ids in places.values() for token in ids}
    if not every:
        survey.warning(
            "end-ids-none",
            "no place names an end id: generation ends by its limit alone",
            "Set eos_token_id in generation_config.json.",
        )
    sets = [set(ids) for ids in places.values()]
    if any(ids != every for ids in sets):
        told = "; ".join(f"{where}: {', '.join(map(str, ids))}" for where, ids in places.items())
        # A chat model's generation config usually has all, the others one of them.
        nested = every in sets
        say = survey.note if nested else survey.warning
        say(
            "end-ids-differ",
            f"end ids differ by place ({told}); Surefoot ends at each of {', '.join(map(str, sorted(every)))}",
            "Nothing, if each of them is an end; other engines may read one place only."
            if nested
            else "See which of them are ends, and name all of these in generation_config.json.",
        )
    size = None if vocabulary is None else vocabulary.tokens or vocabulary.rows
    outside = sorted(token for token in every if size is not None and not 0 <= token < size)
    if outside:
        survey.warning(
            "end-ids-outside",
            f"end ids without a token: {', '.join(map(str, outside))}",
            "Correct eos_token_id; an id that is never emitted ends nothing.",
        )
    return every


def _try(survey: Survey, code: str, read: Callable[[], Read]) -> tuple[bool, Read | None]:
    """Whether it could be read, and what it gave."""
    try:
        return True, read()
    except CheckpointError as error:
        survey.error(code, str(error), "Fetch the file again from where the weights are from.")
        return False, None
