"""A report as text."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from surefoot.config import ModelConfig
from surefoot.doctor.examine import Report
from surefoot.doctor.findings import Finding, listing
from surefoot.doctor.probe import Control, Probe
from surefoot.doctor.speed import Speed

COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def renderables(report: Report) -> Iterator[RenderableType]:
    """What the checkpoint is, what the probe gave, then findings, the worst first."""
    yield f"[bold]{escape(report.model)}[/bold]"
    facts = list(_facts(report))
    width = max(len(name) for name, _ in facts)
    yield "\n".join(f"{name:{width}}  {escape(text)}" for name, text in facts)
    if report.probe is not None:
        yield from _probe(report.probe)
    for finding in report.findings:
        yield _finding(finding)
    yield _verdict(report)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "architecture", report.architecture or "unknown"
    if report.config is not None:
        yield from _sizes(report.config)
    if (p := report.parameters) is not None:
        active = f", {p.active:,} used by a token" if p.active != p.total else ""
        yield "parameters", f"{p.total:,} ({p.embeddings:,} in embedding and head){active}; MTP head {p.mtp:,}"
    for kind, amount in report.stored.items():
        yield "stored", f"{kind}: {amount.tensors} tensors, {amount.bytes / 1e6:,.1f} MB"
    yield "files", listing(report.files, 2) or "none"
    yield "quantisation", report.quantisation or "none"
    if (v := report.vocabulary) is not None:
        tokens = "no tokenizer" if v.tokens is None else f"{v.tokens:,} tokens, {v.padding:,} padding rows"
        yield "vocabulary", f"{v.rows:,} rows, {tokens}"
    ends = "; ".join(f"{where}: {', '.join(map(str, ids))}" for where, ids in report.end_ids.items())
    yield "end ids", ends or "none"
    yield "chat template", "yes" if report.chat_template else "no"
    where = f", in {listing(report.mtp.files, 2)}" if report.mtp.files else ""
    lacks = f", {len(report.mtp.missing)} tensors missing" if report.mtp.missing else ""
    yield "MTP head", f"{report.mtp.state}{where}{lacks}"
    means = ", ".join(f"{kind} {mean:.2f}" for kind, mean in report.norms.medians.items())
    yield "norms", f"{report.norms.convention} by the files' format; median means: {means or 'none'}"
    if report.speed is not None:
        yield from _speed(report.speed)


def _sizes(c: ModelConfig) -> Iterator[tuple[str, str]]:
    attention = c.layer_types.count("full_attention")
    yield "layers", f"{c.num_layers}: {c.num_layers - attention} DeltaNet, {attention} attention"
    ffn = f"feed-forward {c.ffn_width}" if c.moe is None else (
        f"{c.moe.num_experts} experts of {c.moe.expert_width}, {c.moe.experts_per_token} a token, "
        f"shared {c.moe.shared_width}")  # fmt: skip
    yield "sizes", f"hidden {c.hidden_size}, {ffn}"
    yield (
        "attention",
        (f"{c.num_heads} heads, {c.num_kv_heads} of keys and values, {c.head_dim} wide, {c.rotary_dim} rotated"),
    )
    heads = f"{c.linear_value_heads} value heads of {c.linear_value_dim}"
    yield "DeltaNet", f"{heads}, {c.linear_key_heads} key heads of {c.linear_key_dim}"
    yield "head", "tied to the embedding" if c.tied else "of its own"


def _speed(speed: Speed) -> Iterator[tuple[str, str]]:
    step, slot = speed.step, speed.slot
    held = "" if speed.held == speed.dtype else f" (held in {speed.held})"
    yield (
        "a token reads",
        (
            f"{step.total / 1e6:,.2f} MB in {speed.dtype}{held} at context {speed.context:,}: weights "
            f"{step.weights / 1e6:,.2f}, states {step.state / 1e6:,.2f}, keys and values {step.kv / 1e6:,.2f}; "
            f"a draft token {step.draft / 1e6:,.2f}"
        ),
    )
    if (ceiling := speed.ceiling) is not None:
        yield (
            "ceiling",
            (
                f"{ceiling.tokens_per_second:,.1f} tokens/s at batch 1 without drafts: {speed.device} reads "
                f"{ceiling.bandwidth / 1e9:,.1f} GB/s"
            ),
        )
    yield (
        "a slot takes",
        (
            f"{slot.total / 1e6:,.2f} MB for {slot.max_len:,} tokens: keys and values {slot.kv / 1e6:,.2f}, states "
            f"{slot.recurrent / 1e6:,.2f}, MTP lane {slot.lane / 1e6:,.2f}; {slot.per_token:,} bytes a token"
        ),
    )


def _probe(probe: Probe) -> Iterator[RenderableType]:
    yield f"probe: {probe.tokens:,} tokens of text, {probe.loss:.2f} nats a token (a blind guess: {probe.uniform:.2f})"
    if not probe.acceptance:
        return
    table = Table("wiring", "position", "right", "drafts", box=box.SIMPLE, padding=(0, 1))
    for column in (1, 2, 3):
        table.columns[column].justify = "right"
    for number, share in enumerate(probe.acceptance, start=1):
        table.add_row("as wired", str(number), f"{share.rate:.1%}", f"{share.of:,}")
    for control in _telling(probe.controls):
        mark = "  <- better" if control.wins else ""
        table.add_row(f"control: {control.name}{mark}", "1", f"{control.share.rate:.1%}", f"{control.share.of:,}")
    yield table


def _telling(controls: Seq[Control]) -> list[Control]:
    """All but most of those that change a single norm: of these the best one."""
    single = [control for control in controls if control.name.endswith("weight - 1")]
    best = max(single, key=lambda control: control.share.agreed, default=None)
    return [control for control in controls if control not in single or control is best or control.wins]


def _finding(finding: Finding) -> str:
    colour = COLOURS[finding.severity]
    advice = f"\n  {escape(finding.advice)}" if finding.advice else ""
    return f"[{colour}]{finding.severity}[/{colour}] {finding.code}: {escape(finding.sentence)}{advice}"


def _verdict(report: Report) -> str:
    errors, warnings = (sum(f.severity == kind for f in report.findings) for kind in ("error", "warning"))
    if not errors and not warnings:
        return "[green]nothing is wrong with it[/green]"
    return f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
