"""The commands under `vecsim timing`: build, check and calibrate tables of pass prices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vecsim.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Tables of what passes cost on a machine.")

_PROBLEMS = 1
_Output = Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")]
_Deployment = Annotated[
    list[str] | None,
    typer.Option(
        "--deployment",
        metavar="COLUMN=VALUE",
        help="Which deployment of a file that holds several. May be repeated.",
    ),
]


@app.command()
def build(
    model: Annotated[str, typer.Option(help="Model, by its Hugging Face name.")],
    system: Annotated[str, typer.Option(help="GPU system, e.g. h200_sxm.")],
    output: _Output,
    source: Annotated[
        str, typer.Option(help="aic: the reference's database (vecsim[aic]); or roofline.")
    ] = "aic",
    backend: Annotated[str, typer.Option(help="vllm, sglang or trtllm.")] = "vllm",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(help="Largest decode batch.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of the largest pass.")] = 8192,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Another field of the timing model, e.g. moe_ep_size=8. May be repeated.",
        ),
    ] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Write a table that replays anywhere, with or without what it was made with."""
    from vecsim.config.load import load
    from vecsim.config.roles import resolve
    from vecsim.config.validate import validate
    from vecsim.timing.points import write_points
    from vecsim.timing.providers import stated_capacity
    from vecsim.timing.resolve import price_role

    if source not in ("aic", "roofline"):
        raise InputError("--source", source, "'aic' or 'roofline'")
    _check_output(output, overwrite)
    timing = {
        "type": source,
        "model": model,
        "system": system,
        "tp": tp,
        **_assigned("--set", set_),
    }
    rank: dict[str, Any] = {
        "backend": backend,
        "timing_model": timing,
        "num_gpu_blocks": "auto",
        "max_num_seqs": max_num_seqs,
    }
    if backend == "sglang":
        sizes = ("max_prefill_tokens", "chunked_prefill_size")
        rank["sglang"] = dict.fromkeys(sizes, max_num_batched_tokens)
    else:
        rank["max_num_batched_tokens"] = max_num_batched_tokens
    spec = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "engine": {"rank": rank},
        "requests": [],
    }
    try:
        payload = load(spec)
        validate(payload)
        priced = price_role(resolve(payload.spec)[0])
    except InputError as error:
        field = error.where.removeprefix("engine.rank.timing_model.")
        where = f"--{field}" if field in ("model", "system", "tp") else error.where
        raise InputError(where, error.value, error.expected) from None
    capacity = priced.capacity
    table = priced.timing
    metadata = {**table.metadata, **stated_capacity(table.metadata, capacity)}
    write_points(output, table.points, metadata)
    print(f"{output}: {table.points.height:,} points, {table.metadata['source']}")
    print(
        f"KV capacity at {capacity.memory_fraction:g} of the memory: {capacity.tokens:,} tokens, "
        f"{capacity.num_gpu_blocks:,} blocks of {capacity.block_size}"
    )


@app.command()
def check(
    table: Annotated[Path, typer.Argument(help="A .parquet or .csv table.")],
    deployment: _Deployment = None,
    against: Annotated[
        Path | None, typer.Option(help="Measured passes, in the same layout, to compare with.")
    ] = None,
) -> None:
    """Validate a table: layout, units, gaps, cells that fall where they should rise; how far it is
    from measured passes.

    Exit code 1 when something looks wrong, 2 when the table cannot be used.
    """
    from vecsim.timing.check import compare, examine
    from vecsim.timing.points import read_points

    points, metadata = read_points(table, _assigned("--deployment", deployment))
    described = ", ".join(f"{name} {value}" for name, value in metadata.items())
    print(f"{table}: {points.height:,} points" + (f" ({described})" if described else ""))
    facts, problems = examine(points)
    if against is not None:
        more, differing = compare(points, against)
        facts, problems = facts + more, problems + differing
    for line in facts:
        print(line)
    for line in problems:
        print(f"problem: {line}")
    if problems:
        raise typer.Exit(_PROBLEMS)


@app.command()
def calibrate(
    table: Annotated[Path, typer.Argument(help="The table to correct.")],
    measurements: Annotated[Path, typer.Argument(help="Measured passes, in the same layout.")],
    output: _Output,
    deployment: _Deployment = None,
    overwrite: _Overwrite = False,
) -> None:
    """Scale a table to measured passes, phase by phase, and say what is left."""
    from vecsim.timing.calibrate import calibrate as fit
    from vecsim.timing.points import read_points, write_points
    from vecsim.timing.table import TimingTable

    _check_output(output, overwrite)
    chosen = _assigned("--deployment", deployment)
    fitted = fit(TimingTable(*read_points(table, chosen)), measurements)
    write_points(output, fitted.timing.points, fitted.timing.metadata)
    print(fitted)


def _check_output(path: Path, overwrite: bool) -> None:
    if path.suffix.lower() != ".parquet":
        raise InputError("output", str(path), "a file name ending in .parquet")
    if path.exists() and not overwrite:
        raise InputError("output", str(path), "a name that is not in use, unless told to overwrite")


def _assigned(option: str, assignments: list[str] | None) -> dict[str, Any]:
    from vecsim.config.documents import parse_yaml

    fields = {}
    for assignment in assignments or []:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise InputError(option, assignment, "NAME=VALUE")
        fields[name] = parse_yaml(text, f"{option} {name}")
    return fields
