"""The command line: parse, call the library, hand the result to `Output`. Nothing else.

Exit codes: 0 done, 1 the job failed or a check did not hold, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from colibri_tools import cli_routing  # noqa: F401 - its commands
from colibri_tools.cli_base import (
    PATH,
    SIZE,
    Interrupted,
    PipeClosed,
    SizeOrAll,
    command,
    job_options,
    main_group,
    options,
    report,
)
from colibri_tools.errors import ColibriError, UsageError, hints
from colibri_tools.output import Output, counted

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 0, 1, 2, 130, 141

rule_options = options(
    click.option(
        "--target-bpw",
        type=float,
        help="Choose types by measured errors for this many bits per weight.",
    ),
    click.option(
        "--rule",
        "rules",
        multiple=True,
        metavar="SELECTOR=TYPE",
        help="Another type for some matrices: 'down=q6_k', 'layers 0-3: q5_k', "
        "'hottest 10%: q6_k', 'resident=q8_0'. Repeatable; the last that matches wins.",
    ),
    click.option(
        "--effort",
        type=click.Choice(("fast", "normal", "best")),
        default="normal",
        show_default=True,
        help="How hard to search for the scales of least error.",
    ),
    click.option(
        "--importance",
        type=PATH,
        help="What columns count: a routing profile, or an imatrix file of llama.cpp.",
    ),
    click.option(
        "--allow-requantize", is_flag=True, help="Encode matrices again that are quantized already."
    ),
    click.option(
        "--report", type=PATH, help="Write what was chosen and what it lost here, as JSON."
    ),
)
routing_options = options(
    click.option("--routing", type=PATH, help="A routing profile of this model."),
    click.option(
        "--order",
        type=click.Choice(("id", "hotness", "layer-hotness", "coactivation")),
        help="Physical order of expert blocks; default: hotness with a profile.",
    ),
)


def encoding_of(
    type_name: str | None,
    target_bpw: float | None,
    rules: Sequence[str],
    effort: str,
    allow_requantize: bool,
    threads: int,
) -> Any:
    """Return the encoding that the options ask for, or None for none."""
    from colibri_tools.errors import UsageError
    from colibri_tools.quantize.allocate import target_policy
    from colibri_tools.quantize.encoding import Encoding
    from colibri_tools.quantize.rules import make_policy

    if type_name is None and target_bpw is None:
        if rules or allow_requantize or effort != "normal":
            raise UsageError("--rule, --effort and --allow-requantize need --type or --target-bpw")
        return None
    if type_name is not None and target_bpw is not None:
        raise UsageError("--type and --target-bpw exclude each other; pin types by --rule")
    if type_name is not None:
        policy = make_policy(type_name, rules)
    else:
        assert target_bpw is not None
        policy = target_policy(target_bpw, rules, threads)
    return Encoding(policy, effort, None, allow_requantize)


@command(
    "repack",
    example="""
colibri repack ./Qwen3-30B-A3B -o qwen3.colibri
colibri repack ./Qwen3-30B-A3B -o qwen3-q4.colibri --type q4_k_m
colibri repack mixtral-Q4_K_M.gguf -o mixtral.colibri --dry-run
""",
)
@click.argument("source", type=PATH)
@click.option("-o", "--out", required=True, type=PATH, help="The container to write.")
@click.option(
    "--align",
    type=SIZE,
    default=4096,
    show_default=True,
    help="Block alignment: a power of two, 4096 to 2M.",
)
@click.option(
    "--type", "type_name", help="Encode matrices: q8_0, q4_k, mxfp4, ..., or a mix such as q4_k_m."
)
@rule_options
@routing_options
@job_options
@click.option("--hash-sources", is_flag=True, help="Record the SHA-256 of whole source files.")
def repack_command(
    output: Output,
    source: Path,
    out: Path,
    type_name: str | None,
    target_bpw: float | None,
    rules: Sequence[str],
    effort: str,
    allow_requantize: bool,
    **options: Any,
) -> None:
    """Turn a checkpoint (SOURCE) into one container.

    SOURCE is a Hugging Face directory, one .safetensors file, a Hub cache snapshot, or a .gguf
    file (any member of a split). Numbers are carried over bit for bit unless --type is given.
    """
    from colibri_tools.repack import repack

    chosen = (type_name, target_bpw, rules, effort, allow_requantize)
    encoding = encoding_of(*chosen, options["threads"])
    with output.progress(f"repack {out.name}") as progress:
        result = repack(source, out, encoding=encoding, progress=progress, **options)
    report(output, result)


@command(
    "quantize",
    example="""
colibri quantize model.colibri -o model-q4.colibri --type q4_k_m
colibri quantize model.colibri -o small.colibri --type q4_k --rule 'down=q6_k' --dry-run
colibri quantize model.colibri -o best.colibri --target-bpw 4.5 --importance model.imatrix.gguf
""",
)
@click.argument("path", type=PATH)
@click.option("-o", "--out", required=True, type=PATH, help="The container to write.")
@click.option(
    "--type",
    "type_name",
    help="q8_0, q4_0, q4_1, q5_0, q5_1, q2_k ... q6_k, iq4_nl, iq4_xs, mxfp4, f16, bf16, f32, or "
    "a mix: q2_k_m, q3_k_m, q4_k_m, q5_k_m.",
)
@rule_options
@routing_options
@job_options
def quantize_command(
    output: Output,
    path: Path,
    out: Path,
    type_name: str | None,
    target_bpw: float | None,
    rules: Sequence[str],
    effort: str,
    allow_requantize: bool,
    **options: Any,
) -> None:
    """Encode a container's matrices into other types.

    Norms, biases and routers keep their type; a rule that names 'router' changes routers too.
    Rows that a type's blocks do not divide get the next type of a chain, which is shown.
    """
    from colibri_tools.rewrite import quantize

    chosen = (type_name, target_bpw, rules, effort, allow_requantize)
    encoding = encoding_of(*chosen, options["threads"])
    if encoding is None:
        raise click.UsageError("give --type or --target-bpw")
    with output.progress(f"quantize {out.name}") as progress:
        result = quantize(path, out, encoding, progress=progress, **options)
    report(output, result)


@command(
    "reorder",
    example="""
colibri reorder model.colibri -o hot.colibri --routing model.profile
colibri reorder hot.colibri -o back.colibri --order id
""",
)
@click.argument("path", type=PATH)
@click.option("-o", "--out", required=True, type=PATH, help="The container to write.")
@routing_options
@job_options
def reorder_command(output: Output, path: Path, out: Path, **options: Any) -> None:
    """Put a container's expert blocks into another order.

    With the hottest first they are a prefix that one sequential read brings into memory. Expert
    ids and every number stay as they are.
    """
    from colibri_tools.rewrite import reorder

    with output.progress(f"reorder {out.name}") as progress:
        result = reorder(path, out, progress=progress, **options)
    report(output, result)


@command(
    "compare",
    example="""
colibri compare model.colibri model-q4.colibri --text heldout.txt
colibri compare model.colibri q4.colibri --text en.txt --text de.txt --save q4.json
colibri compare model.colibri q5.colibri --text en.txt --text de.txt --baseline q4.json
""",
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--text", type=PATH, multiple=True, help="A text file, UTF-8. Repeatable.")
@click.option("--tokens", type=PATH, multiple=True, help="A file of token ids instead. Repeatable.")
@click.option("--ctx", type=click.IntRange(4), help="Tokens of a window; default: 512.")
@click.option(
    "--threads", type=click.IntRange(0), default=0, help="Compute threads; 0 = all cores."
)
@click.option("--expert-cache", type=SIZE, help="Memory for experts, for each of the two models.")
@click.option("--save", type=PATH, help="Keep the result here, as JSON.")
@click.option("--baseline", type=PATH, help="A file of --save to show the change to.")
@click.option("--force", is_flag=True, help="Replace an existing --save file.")
def compare_command(output: Output, a: Path, b: Path, **options: Any) -> None:
    """Measure how far container B is from container A on texts.

    Perplexity of both, KL divergence of B from A and how often both find the same token most
    likely, in exact precision.
    """
    from colibri_tools.compare import compare

    with output.progress("compare") as progress:
        result = compare(a, b, progress=progress, **options)
    report(output, result)


@command(
    "inspect",
    example="""
colibri inspect model.colibri --map
colibri inspect ./Qwen3-30B-A3B --tensors
colibri inspect model.colibri --blocks --json | jq '.blocks[0]'
colibri inspect model.profile --html profile.html
""",
)
@click.argument("path", type=PATH)
@click.option("--blocks", is_flag=True, help="List every expert block (containers).")
@click.option("--tensors", is_flag=True, help="List tensors; for a source, what repack would do.")
@click.option("--map", "show_map", is_flag=True, help="Draw the file's regions.")
@click.option("--layer", type=click.IntRange(0), help="Only this layer's blocks and tensors.")
@click.option("--expert", type=click.IntRange(0), help="Only this expert's blocks.")
@click.option("--tensor", help="Details of the tensor with this name.")
@click.option("--html", type=PATH, help="Write a routing profile as one page that stands alone.")
@click.option("--plot", type=PATH, help="Draw a routing profile: .png, .svg or .pdf.")
def inspect_command(
    output: Output, path: Path, html: Path | None, plot: Path | None, **options: Any
) -> None:
    """Show what a container, checkpoint or profile holds.

    PATH is a container, a Hugging Face directory, a .safetensors or a .gguf file, or a profile.
    """
    from colibri_tools.inspect import inspect
    from colibri_tools.profile.inspection import inspect_profile, wants_profile

    if wants_profile(path, html=html, plot=plot):
        report(output, inspect_profile(path, html=html, plot=plot, others=options))
    else:
        report(output, inspect(path, **options))


@command(
    "verify",
    example="""
colibri verify model.colibri
colibri verify model.colibri --against ./Qwen3-30B-A3B
colibri verify ./Qwen3-30B-A3B --quick
""",
)
@click.argument("path", type=PATH)
@click.option("--quick", is_flag=True, help="All checks but those that read the payload.")
@click.option("--against", type=PATH, help="Compare a container's numbers with this source.")
@click.option(
    "--importance", type=PATH, help="The importance that it was encoded with, for --against."
)
@click.option("--threads", type=click.IntRange(0), default=0, help="Worker threads; 0 = all cores.")
def verify_command(output: Output, path: Path, **options: Any) -> None:
    """Check every byte of a container, or a checkpoint.

    A checkpoint is complete when all its files are there and whole, their headers sound, every
    tensor has its place, and no value is NaN or infinite.

    Exit code 1 if anything is wrong; each error names its place.
    """
    from colibri_tools.verify import verify

    with output.progress(f"verify {path.name}") as progress:
        result = verify(path, progress=progress, **options)
    report(output, result)
    if not result.ok:
        if output.quiet:  # the report is silent then, what is wrong is not
            output.failures(error.message for error in result.errors)
        raise SystemExit(EXIT_FAILED)


@command(
    "respec",
    example="""
colibri respec model.colibri --dry-run
colibri respec model.colibri
""",
)
@click.argument("path", type=PATH)
@click.option("--dry-run", is_flag=True, help="Show what would change, write nothing.")
def respec_command(output: Output, path: Path, dry_run: bool) -> None:
    """Rebuild a container's spec from the files it carries.

    For a container made by an older version of this tool: the data stay where they are, only
    the metadata in front of them change. Says "unchanged" and writes nothing where the spec is
    already what this version would write.
    """
    from colibri_tools.respec import respec

    report(output, respec(path, dry_run=dry_run))


@command(
    "run",
    example="""
colibri run model.colibri --prompt "The file system is" --max-tokens 64 --expert-cache 8G
colibri run model.colibri --tokens 1,2,3 --max-tokens 0 --logits logits.npy
echo "Once upon a time" | colibri run model.colibri --prompt-file - --temperature 0.8 --seed 7
colibri run model.colibri --chat --system "You answer in one sentence."
colibri run model.colibri --prompt-file a.txt --prompt-file b.txt --out answers
""",
)
@click.argument("path", type=PATH)
@click.option("--prompt", help="The prompt as text.")
@click.option(
    "--prompt-file",
    "prompt_files",
    type=PATH,
    multiple=True,
    help="A file with the prompt; - is standard input. Repeatable with --out.",
)
@click.option("--out", type=PATH, help="Answer every --prompt-file; write DIR/NAME.json for each.")
@click.option("--tokens", help="The prompt as token ids: 1,2,3.")
@click.option(
    "--chat", is_flag=True, help="Use the model's chat template; without a prompt, a conversation."
)
@click.option("--system", help="A system message before the chat.")
@click.option("--stop", multiple=True, help="End where this text comes (repeatable).")
@click.option(
    "--max-tokens",
    type=click.IntRange(0),
    help="Tokens to generate; 0 = evaluate the prompt only. Default: 128, in a chat 1024.",
)
@click.option(
    "--ctx", type=click.IntRange(1), help="Positions to make room for; default: what is needed."
)
@click.option(
    "--threads", type=click.IntRange(0), default=0, help="Compute threads; 0 = all cores."
)
@click.option("--pin-threads", is_flag=True, help="Compute thread i stays on the i-th CPU.")
@click.option("--batch-size", type=click.IntRange(1), help="Prompt tokens evaluated at once.")
@click.option(
    "--precision",
    type=click.Choice(("exact", "fast")),
    help="fast (default) quantizes activations where weights are; exact is default with --logits.",
)
@click.option(
    "--kv-type",
    type=click.Choice(("f32", "f16", "q8_0", "q4_0")),
    help="How keys and values are kept; default: f16, with exact f32.",
)
@click.option(
    "--ram-budget",
    type=SIZE,
    help="All memory, but Python's; default: what is available, less a reserve.",
)
@click.option(
    "--expert-cache",
    type=SIZE,
    help="Memory for experts; default: all of them, or what the budget leaves.",
)
@click.option(
    "--preload",
    type=SizeOrAll(),
    default=0,
    metavar="SIZE|all",
    help="Bytes of the expert cache that are filled at open, or 'all'; default: none.",
)
@click.option("--mirror", type=PATH, help="Read from this file what it has: see export.")
@click.option(
    "--io",
    type=click.Choice(("auto", "pread", "io_uring", "mmap", "buffered")),
    default="auto",
    show_default=True,
    help="How experts are read.",
)
@click.option(
    "--io-threads", type=click.IntRange(0, 64), default=0, help="Reads at once; 0 = the default."
)
@click.option(
    "--prefetch-depth",
    type=click.IntRange(0, 2),
    default=0,
    show_default=True,
    help="MoE layers ahead that experts are guessed and read for.",
)
@click.option(
    "--check",
    type=click.Choice(("always", "first", "never")),
    default="first",
    show_default=True,
    help="When checksums are compared: at every read of an expert, at its first, or never.",
)
@click.option("--temperature", type=float, default=0.0, help="0 = greedy (default).")
@click.option("--top-k", type=click.IntRange(1), help="Draw from the K most likely tokens.")
@click.option(
    "--top-p", type=float, help="Draw from the fewest tokens that reach this probability."
)
@click.option("--min-p", type=float, help="Leave out tokens below this share of the most likely.")
@click.option(
    "--repetition-penalty", type=float, default=1.0, help="Above 1: tokens seen count less."
)
@click.option("--seed", type=click.IntRange(0), help="Makes drawing repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("--logits", type=PATH, help="Write the prompt's logits here (.npy, float32).")
@click.option("--profile", is_flag=True, help="Show where the time went, by phase and layer.")
def run_command(
    output: Output, path: Path, prompt_files: Sequence[Path], out: Path | None, **options: Any
) -> None:
    """Run a container: prompt in, text out.

    Experts are read on demand into a bounded cache.

    The text goes to standard output as it is made, the measurements to standard error. --chat
    without a prompt is a conversation: /reset begins anew, Ctrl-C stops a reply, Ctrl-D leaves.

    With --out, every prompt file is answered by one open model. What is answered already is kept,
    so an interrupted job goes on when it is run again; a file that fails does not stop the rest,
    and makes the exit code 1.
    """
    if out is not None:
        run_files_command(output, path, prompt_files, out, options)
        return
    if len(prompt_files) > 1:
        raise UsageError("several --prompt-file need --out, the folder for their results")
    options["prompt_file"] = prompt_files[0] if prompt_files else None
    if options["chat"] and all(options[key] is None for key in ("prompt", "prompt_file", "tokens")):
        from colibri_tools.chat import interactive

        if output.json_mode:
            raise UsageError("--json is of a single answer: give --prompt with --chat")
        interactive(path, write=output.text, note=output.note, **options)
        return
    from colibri_tools.run import run

    result = run(
        path,
        on_text=None if output.json_mode else output.text,
        on_plan=output.before,
        **options,
    )
    output.measured(result)
    if result.interrupted:
        raise SystemExit(EXIT_INTERRUPTED)


def run_files_command(
    output: Output, path: Path, files: Sequence[Path], out: Path, options: dict[str, Any]
) -> None:
    """Answer prompt files without anybody watching."""
    from colibri_tools.run import make_sampling
    from colibri_tools.unattended import FileResult, run_files

    given = [name for name in ("prompt", "tokens", "logits", "profile") if options.pop(name)]
    if given:
        raise UsageError(f"--out is about prompt files: it excludes --{given[0]}")
    if not files:
        raise UsageError("--out needs at least one --prompt-file")
    if options["system"] is not None and not options["chat"]:
        raise UsageError("--system is a message of a chat: it needs --chat")
    if options["temperature"] > 0 and options["seed"] is None:
        raise UsageError("--temperature with --out needs --seed: a rerun must be the same job")
    drawing = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    sampling = make_sampling(*(options.pop(name) for name in drawing))
    options["precision"] = options["precision"] or "fast"

    def tell(item: FileResult) -> None:
        if item.error:
            output.failures([item.error])
        else:
            made = counted(item.generated_tokens, "token")
            output.note(f"{item.result}: {made}, {item.seconds:.1f} s")

    result = run_files(path, files, out, sampling=sampling, on_file=tell, **options)
    output.result(result)
    if result.interrupted:
        output.note("interrupted; the same command goes on with the files that are left")
        raise SystemExit(EXIT_INTERRUPTED)
    if not result.ok:
        raise SystemExit(EXIT_FAILED)


@command(
    "tokenize",
    example="""
colibri tokenize model.colibri --text "The file system is"
colibri tokenize model.gguf --json < notes.txt | jq .tokens
""",
)
@click.argument("path", type=PATH)
@click.option("--text", help="The text; without it, standard input.")
@click.option("--no-special", is_flag=True, help="Without what is put around a text, as BOS.")
def tokenize_command(output: Output, path: Path, text: str | None, no_special: bool) -> None:
    """Show the token ids of a text.

    PATH is a container, a Hugging Face directory or a .gguf file. Special tokens in the text are
    recognized; no chat template is used.
    """
    from colibri_tools.tokenize import tokenize

    report(output, tokenize(path, text, special=not no_special))


@command(
    "detokenize",
    example="""
colibri detokenize model.colibri --tokens 504,2302,832
""",
)
@click.argument("path", type=PATH)
@click.option("--tokens", required=True, help="Token ids: 1,2,3.")
@click.option("--special", is_flag=True, help="Show special tokens too.")
def detokenize_command(output: Output, path: Path, tokens: str, special: bool) -> None:
    """Show the text of token ids.

    PATH is a container, a Hugging Face directory or a .gguf file.
    """
    from colibri_tools.detokenize import detokenize

    report(output, detokenize(path, tokens, special=special))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. The only place that turns errors into exit codes."""
    args = list(sys.argv[1:] if argv is None else argv)
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup, a background job: stay deaf
            signal.signal(signum, _interrupt)
    output = Output(json_mode="--json" in args)
    try:
        code = _run(args, output)
        sys.stdout.flush()
    except (BrokenPipeError, PipeClosed):  # stop quietly, as other tools do
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_PIPE
    sys.exit(code)


def _interrupt(signum: int, frame: object) -> NoReturn:
    # The first signal ends a job in order; the second one, of somebody in a hurry, ends it at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _usage_message(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None) or click.get_current_context(silent=True)
    if context is None:
        return text
    see = " See" if text.endswith(("?", "?)")) else "; see"
    return f"{text}{see} '{context.command_path} -h'"


def _run(args: list[str], output: Output) -> int:
    try:
        result = main_group.main(args, prog_name="colibri", standalone_mode=False)
        return result if isinstance(result, int) else EXIT_OK
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.ClickException as error:
        output.failure("UsageError", _usage_message(error), EXIT_USAGE)
        return EXIT_USAGE
    except (Interrupted, KeyboardInterrupt, click.Abort) as error:
        if output.err.is_terminal:  # it has ^C on the line
            output.err.print()
        output.failure("Interrupted", str(error) or "interrupted", EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    except ColibriError as error:
        if "--debug" in args:
            raise
        output.error(error)
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        if "--debug" in args:
            raise
        where = f"{error.filename}: " if error.filename else ""
        output.failure("OSError", f"{where}{error.strerror or error}{hints(error)}", EXIT_FAILED)
        return EXIT_FAILED
    except MemoryError as error:
        output.failure("MemoryError", f"not enough memory{hints(error)}", EXIT_FAILED)
        return EXIT_FAILED
