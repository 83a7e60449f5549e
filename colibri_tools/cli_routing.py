"""The commands about routing: profiles, simulation, plans, partial containers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_tools.cli_base import (
    PATH,
    SIZE,
    ExampleGroup,
    command,
    job_options,
    main_group,
    report,
)
from colibri_tools.output import Output, parse_rate

__all__: list[str] = []

if TYPE_CHECKING:
    ListParam = click.ParamType[list[int]]
    PairParam = click.ParamType[tuple[float | None, int | None]]
    FloatParam = click.ParamType[float]
else:
    ListParam = FloatParam = PairParam = click.ParamType  # subscriptable from click 8.4 on

force_option = click.option("--force", is_flag=True, help="Replace an existing file.")
out_option = click.option("-o", "--out", required=True, type=PATH, help="The file to write.")


@command(
    "profile-routing",
    lists=("--text", "--domain", "--tokens-file"),
    example="""
colibri profile-routing model.colibri --text book.txt -o model.profile
colibri profile-routing model.colibri --domain code=a.py b.py --domain prose=c.txt -o m.profile
""",
)
@click.argument("path", type=PATH)
@click.option("--text", "texts", multiple=True, type=PATH, help="UTF-8 text files.")
@click.option(
    "--domain", "domains", multiple=True, metavar="NAME=FILE", help="Text files of a domain."
)
@click.option(
    "--tokens-file",
    "token_files",
    multiple=True,
    metavar="[NAME=]FILE",
    help="Token ids instead of text, a text on each line.",
)
@click.option("-o", "--out", required=True, type=PATH, help="The profile to write.")
@click.option(
    "--generate",
    type=click.IntRange(0),
    default=0,
    help="Also draw so many tokens behind each text, counted as decode.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, help="For --generate; default 0.", metavar="N"
)
@click.option("--trace", is_flag=True, help="Keep every choice, for simulate.")
@click.option("--importance", is_flag=True, help="Sum up the squares of what experts multiply.")
@click.option(
    "--ctx", type=click.IntRange(1), help="Longer texts are cut into windows of so many tokens."
)
@click.option("--batch-size", type=click.IntRange(1), help="Tokens at once; default: up to 4096.")
@click.option("--threads", type=click.IntRange(0), default=0, help="0 = all cores.")
@click.option("--io-threads", type=click.IntRange(0, 64), default=0, help="Reads at once.")
@click.option("--ram-budget", type=SIZE, help="All memory, but Python's.")
@click.option("--expert-cache", type=SIZE, help="Memory for experts.")
@click.option(
    "--precision",
    type=click.Choice(("exact", "fast")),
    default="exact",
    show_default=True,
    help="fast quantizes activations where weights are.",
)
@force_option
@click.option("--restart", is_flag=True, help="Discard what an interrupted job left.")
def profile_routing_command(
    output: Output,
    path: Path,
    domains: Sequence[str],
    token_files: Sequence[str],
    **settings: Any,
) -> None:
    """Count which experts texts use, and write it as a profile.

    Texts longer than --ctx are cut into windows, each a sequence of its own. An interrupted job
    leaves OUT.partial, and the same command goes on from there.
    """
    from colibri_tools.profile.profiling import profile_routing
    from colibri_tools.profile.texts import named_paths

    with output.progress(f"profile {path.name}", unit="tokens") as progress:
        result = profile_routing(
            path,
            domains=named_paths("--domain", domains),
            token_files=named_paths("--tokens-file", token_files, default="text"),
            progress=progress,
            **settings,
        )
    report(output, result)


@main_group.group(
    "profile",
    cls=ExampleGroup,
    example="""
colibri profile merge monday.profile tuesday.profile -o both.profile
colibri profile export model.profile --usage usage.txt
""",
)
def profile_group() -> None:
    """Add routing profiles, and exchange them with other tools."""


@command(
    "merge",
    group=profile_group,
    example="colibri profile merge monday.profile tuesday.profile -o both.profile",
)
@click.argument("paths", nargs=-1, required=True, type=PATH)
@out_option
@force_option
def profile_merge_command(output: Output, paths: Sequence[Path], **settings: Any) -> None:
    """Add profiles of one model together.

    Domains of the same name become one.
    """
    from colibri_tools.profile.files import merge_files

    report(output, merge_files(paths, **settings))


@command(
    "export",
    group=profile_group,
    example="""
colibri profile export model.profile --usage usage.txt
colibri profile export model.profile --trace-csv trace.csv
""",
)
@click.argument("path", type=PATH)
@click.option("--usage", type=PATH, help="Write lines 'layer expert count'.")
@click.option("--trace-csv", type=PATH, help="Write token,layer,rank,expert,weight.")
@force_option
def profile_export_command(output: Output, path: Path, **settings: Any) -> None:
    """Write a profile's selections as text, or its trace as CSV."""
    from colibri_tools.profile.files import export_profile

    report(output, export_profile(path, **settings))


@command(
    "import",
    group=profile_group,
    example="colibri profile import imatrix.gguf --model model.colibri -o model.profile",
)
@click.argument("path", type=PATH)
@click.option("--model", required=True, type=PATH, help="A container or checkpoint of the model.")
@click.option("--domain", default="imported", show_default=True, help="What to call the texts.")
@out_option
@force_option
def profile_import_command(output: Output, path: Path, **settings: Any) -> None:
    """Make a profile of usage text, a CSV trace or an imatrix.

    An imatrix is a GGUF importance matrix, as llama.cpp writes it.
    """
    from colibri_tools.profile.files import import_profile

    report(output, import_profile(path, **settings))


class SizesType(ListParam):
    """One size or several, separated by commas: 16G or 8G,16G,32G."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        return [SIZE.convert(part, param, ctx) for part in value.split(",")]


class RateType(FloatParam):
    """Bytes per second: 3.5GB/s, 800M, 2GiB/s."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_rate(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZES, RATE = SizesType(), RateType()
sizes_help = "A size or several: 16G,32G."


@command(
    "simulate",
    example="""
colibri simulate model.profile model.colibri --ram 16G,32G --disk 3.5GB/s
colibri simulate model.profile model.colibri --expert-cache 4G,8G
""",
)
@click.argument("profile", type=PATH)
@click.argument("model", type=PATH)
@click.option("--ram", type=SIZES, default=(), help=f"Memory of the whole model. {sizes_help}")
@click.option("--expert-cache", type=SIZES, default=(), help=f"The expert cache. {sizes_help}")
@click.option("--disk", type=RATE, help="What the drive gives, as 3.5GB/s; default: measured.")
@click.option(
    "--compute", type=float, metavar="SECONDS", help="Of a token in memory; default: measured."
)
def simulate_command(output: Output, profile: Path, model: Path, **settings: Any) -> None:
    """Replay a profile's trace with caches of several sizes.

    PROFILE was made with profile-routing --trace, MODEL is a container of the same model. The
    engine's own policy is replayed by its expert store itself, beside LRU, LFU and others.
    """
    from colibri_tools.profile.simulate import simulate

    report(output, simulate(profile, model, **settings))


@command(
    "plan",
    example="""
colibri plan model.colibri --ram 16G,32G --disk 3.5GB/s
colibri plan model.colibri --ram 16G --routing model.profile
""",
)
@click.argument("path", type=PATH)
@click.option("--ram", type=SIZES, required=True, help=f"Memory of the whole model. {sizes_help}")
@click.option("--disk", type=RATE, help="What the drive gives, as 3.5GB/s; default: measured.")
@click.option(
    "--compute",
    type=float,
    metavar="SECONDS",
    help="Of a token in memory; default: measured, and left out with --disk.",
)
@click.option("--routing", type=PATH, help="A routing profile of this model.")
@click.option("--ctx", type=click.IntRange(1), help="Positions to make room for.")
def plan_command(output: Output, path: Path, **settings: Any) -> None:
    """Show how memory would be split, and what speed to expect.

    Without --disk this machine's drive and computing are measured. With it nothing is run: speed
    is then what the drive allows at most.
    """
    from colibri_tools.plan import plan_memory

    report(output, plan_memory(path, **settings))


class HottestType(PairParam):
    """A share of all blocks, 40%, or a size, 20G."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if not value.endswith("%"):
            return None, SIZE.convert(value, param, ctx)
        try:
            share = float(value[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            self.fail(f"'{value}' is no share; write for example 40%, or a size such as 20G")
        return share, None


@command(
    "export",
    example="""
colibri export model.colibri --hottest 40% --routing model.profile -o /fast/hot.part
colibri export hot.colibri --hottest 20G -o /fast/hot.part
colibri run model.colibri --mirror /fast/hot.part --prompt "The file system is"
""",
)
@click.argument("path", type=PATH)
@click.option(
    "--hottest", type=HottestType(), required=True, help="A share of all blocks, or a size."
)
@click.option("-o", "--out", required=True, type=PATH, help="The file to write.")
@click.option("--routing", type=PATH, help="A routing profile of this model.")
@job_options
def export_command(
    output: Output, path: Path, out: Path, hottest: tuple[float | None, int | None], **settings: Any
) -> None:
    """Write a container's hottest blocks for a faster drive.

    Without --routing the container must be in the order of hotness. The file does not run by
    itself: 'colibri run --mirror' reads from it what it has.
    """
    from colibri_tools.export import export

    share, n_bytes = hottest
    with output.progress(f"export {out.name}") as progress:
        result = export(path, out, share=share, n_bytes=n_bytes, progress=progress, **settings)
    report(output, result)
