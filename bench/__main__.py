"""`python -m bench MODE`: every provider is verified before it is timed; see `--help` of each mode."""

import argparse
import sys
from collections.abc import Sequence

import torch

from bench import everything, plot, workloads
from bench.buffers import Case
from bench.providers import PEERS, choose
from bench.report import Report
from bench.runner import Runner
from bench.stats import Budget

QUICK_MODELS = ["llama-3-8b", "llama-3-70b-tp8"]
QUICK_BATCHES = (1, 64, 512)
QUICK_ROUNDS = 12
IN_MODEL_MODELS = [*QUICK_MODELS, "gpt-oss-20b"]
IN_MODEL_BATCHES = (1, 8, 64, 256)
IN_MODEL_PEERS = ["flashinfer", "sglang", "tokenspeed"]
NCU_PROVIDERS = ["ours", "sglang", "tokenspeed", "flashinfer"]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def _limits(seconds: float, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--peers",
        nargs="+",
        metavar="NAME",
        help=f"some of {', '.join(PEERS)}, or none; or ours@ and the numbers of a geometry between slashes",
    )
    parser.add_argument("--json", metavar="OUT", help="results file (default: bench/results/<gpu>-<mode>.json)")
    parser.add_argument("--seconds", type=float, default=seconds, help="start no row after this (default: %(default)s)")
    parser.add_argument("--rounds", type=_positive, default=rounds, help="samples of each number (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"little of it, {QUICK_ROUNDS} rounds")
    return parser


def _shapes() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", nargs="+", metavar="NAME", help="model names, or shapes such as 32/8/128 (default: all)")
    parser.add_argument("--batch", nargs="+", type=_positive, metavar="B", help="numbers of tokens")
    return parser


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    _add_launches(modes)
    _add_step(modes)
    whole = modes.add_parser("all", help="every mode in turn, each in its own process")
    whole.add_argument("--seconds", type=float, default=900, help="for all of them together (default: %(default)s)")
    whole.add_argument("--only", nargs="+", metavar="PART", help="some of the parts, as their results files are named")
    drawing = modes.add_parser("plot", help="draw results files, each beside itself")
    drawing.add_argument("results", nargs="+", metavar="JSON", help="results files; one without a picture is named and left out")
    looking = modes.add_parser("investigate", help="look into a number: gaps between kernels, bytes at the DRAM")
    _add_investigations(looking.add_subparsers(dest="mode", required=True))
    return parser


def _add_launches(modes: argparse._SubParsersAction) -> None:
    decode = modes.add_parser("decode", parents=[_shapes(), _limits(240, 30)], help="one launch a layer, in a graph of many layers")
    decode.add_argument("--layers", type=_positive, default=32, help="launches in a graph (default: %(default)s)")
    caches = decode.add_mutually_exclusive_group()
    caches.add_argument("--hot", action="store_true", help="all layers share one set of buffers")
    caches.add_argument("--flush", action="store_true", help="empty the L2 cache before each sample")
    decode.add_argument("--separate", action="store_true", help="Q, K and V in tensors of their own, not packed")
    decode.add_argument("--in-model", action="store_true", help="time added between a QKV projection and attention")
    decode.add_argument(
        "--attention-pdl", action="store_true", help="with --in-model: attention starts early, as it may in a server"
    )
    decode.set_defaults(run=_decode)
    prefill = modes.add_parser("prefill", parents=[_shapes(), _limits(180, 15)], help="GB/s against the number of tokens")
    prefill.set_defaults(run=_prefill)
    for mode in (decode, prefill):
        mode.add_argument("--plot", metavar="PNG", help="draw the results (needs matplotlib)")
        mode.add_argument("--dry-run", action="store_true", help="verify only, on the CPU where there is no GPU")
    host = modes.add_parser("host", parents=[_shapes(), _limits(120, 40)], help="host cost of a call on one pinned core")
    host.add_argument("--calls", nargs="+", metavar="CALL", help="only these ways of calling")
    host.set_defaults(run=_host)


def _add_step(modes: argparse._SubParsersAction) -> None:
    step = modes.add_parser(
        "step", parents=[_limits(5400, 30)], help="a whole decode step of real models' sizes, in several processes"
    )
    step.add_argument("--networks", nargs="+", metavar="NAME", help="some of them (default: all)")
    step.add_argument("--batches", nargs="+", type=_positive, metavar="B", help="numbers of requests")
    step.add_argument("--contexts", nargs="+", type=_positive, metavar="C", help="tokens of every request")
    step.add_argument("--processes", type=_positive, default=3, help="one after the other, of every cell (default: %(default)s)")
    step.add_argument("--no-attention-pdl", action="store_true", help="attention waits for all before it (default: its own choice)")
    step.add_argument("--dry-run", action="store_true", help="verify only, a tiny network on the CPU where there is no GPU")
    step.add_argument("--child", type=int, metavar="PROCESS", help=argparse.SUPPRESS)
    step.set_defaults(run=_step)


def _add_investigations(modes: argparse._SubParsersAction) -> None:
    gaps = modes.add_parser("gaps", parents=[_shapes(), _limits(120, 1)], help="when the kernels of a layer start and end")
    gaps.add_argument("--attention-pdl", action="store_true", help="attention starts early, as it may in a server")
    gaps.set_defaults(run=_gaps)
    ncu = modes.add_parser("ncu", parents=[_limits(240, 1)], help="DRAM bytes counted by Nsight Compute")
    ncu.add_argument("--child", nargs="+", metavar="MODEL:TOKENS", help=argparse.SUPPRESS)
    ncu.set_defaults(run=_ncu)


def _models(args: argparse.Namespace, usual: list[str] | None = None) -> list[workloads.Model]:
    return workloads.find_models(args.model or (QUICK_MODELS if args.quick else usual))


def _batches(args: argparse.Namespace, usual: Sequence[int], quick: Sequence[int] = QUICK_BATCHES) -> list[int]:
    return args.batch or list(quick if args.quick else usual)


def _cases(models: list[workloads.Model], batches: list[int]) -> list[Case]:
    return [Case(model, batch) for model in models for batch in batches]


def _decode(args: argparse.Namespace, runner: Runner) -> bool:
    from bench import decode

    options = decode.Options(args.layers, args.hot, args.flush, packed=not args.separate, attention_pdl=args.attention_pdl)
    if args.dry_run:
        return decode.dry_run(choose(("reference", "ours-function", *decode.OURS), args.peers), runner)
    if args.in_model:
        from bench import in_model

        cases = _cases(_models(args, IN_MODEL_MODELS), _batches(args, IN_MODEL_BATCHES))
        in_model.run(cases, choose(in_model.OURS, args.peers or IN_MODEL_PEERS), options, runner)
    else:
        cases = _cases(_models(args), _batches(args, workloads.BATCHES))
        decode.run(cases, choose(decode.OURS, args.peers), options, runner)
    return True


def _prefill(args: argparse.Namespace, runner: Runner) -> bool:
    from bench import decode, prefill

    providers = choose(prefill.OURS, args.peers)
    if args.dry_run:
        return decode.dry_run(providers, runner, prefill=True)
    tokens = _batches(args, workloads.PREFILL_TOKENS, (1, 1024, 16384))
    prefill.run(_cases(_models(args, QUICK_MODELS[:1]), tokens), providers, runner)
    return True


def _host(args: argparse.Namespace, runner: Runner) -> bool:
    from bench import host

    # Preparing torch.compile is slow; its host cost is of interest only to whoever asks.
    peers = [p for p in choose((), args.peers) if args.peers or not p.slow]
    host.run(_cases(_models(args, QUICK_MODELS[:1]), _batches(args, (32,), (32,))), peers, args.calls, runner)
    return True


def _step(args: argparse.Namespace, runner: Runner) -> bool:
    from bench import step, step_cell

    tiny = args.dry_run and not torch.cuda.is_available()
    networks = step.find_networks(args.networks or (["tiny"] if tiny else None))
    batches = args.batches or ((2,) if tiny else (1, 64) if args.quick else step.BATCHES)
    contexts = args.contexts or ((40,) if tiny else (1024,) if args.quick else step.CONTEXTS)
    cells = [step_cell.Cell(network, batch, context) for network in networks for context in contexts for batch in batches]
    pdl = False if args.no_attention_pdl else None
    names = (*step.find_providers(args.peers), *["reference"] * args.dry_run)
    choose(names, [])  # a wrong name is an error here, not one of every child
    options = step.Options(names, args.processes, pdl, args.dry_run)
    if args.child is not None:
        return step_cell.run(cells[0], names, runner, args.child, pdl, args.dry_run)
    return step.run(cells, options, runner)


def _gaps(args: argparse.Namespace, runner: Runner) -> bool:
    from bench import in_model
    from bench.investigations import gaps

    cases = _cases(_models(args, QUICK_MODELS), _batches(args, QUICK_BATCHES[:2]))
    gaps.run(cases, choose(in_model.OURS, args.peers or IN_MODEL_PEERS), runner, args.attention_pdl)
    return True


def _ncu(args: argparse.Namespace, runner: Runner) -> bool:
    from bench.investigations import ncu

    names = args.peers or NCU_PROVIDERS
    if args.child:
        pairs = [text.rsplit(":", 1) for text in args.child]
        ncu.child([(model, int(tokens)) for model, tokens in pairs], names, runner)
    else:
        ncu.run(names, runner)
    return True


def _label(args: argparse.Namespace) -> str:
    """`decode`, and what sets this run apart from a plain one: part of the results file's name."""
    flags = ("in_model", "attention_pdl", "no_attention_pdl", "hot", "flush", "separate")
    return "-".join([args.mode, *(flag.replace("_", "-") for flag in flags if getattr(args, flag, False))])


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        if args.mode == "plot":
            return plot.draw_files(args.results)
        if args.mode == "all":
            return everything.run(args.seconds, args.only)
        return _measure(args)
    except workloads.UsageError as error:
        parser.error(str(error))


def _measure(args: argparse.Namespace) -> int:
    """One mode, in this process."""
    if args.quick:
        args.rounds = min(args.rounds, QUICK_ROUNDS)
    dry = getattr(args, "dry_run", False)
    if not dry and not torch.cuda.is_available():
        print("python -m bench: no CUDA device; `decode --dry-run` verifies the providers on the CPU", file=sys.stderr)
        return 2
    unsaved = not args.json and (dry or getattr(args, "child", None) is not None)
    report = Report(_label(args), args, False if unsaved else args.json)
    runner = Runner(report, Budget(args.seconds), args.rounds, frozenset(args.peers or ()))
    report.head()
    # SGLang's wrapper takes its short path, as in a server, only without autograd.
    with torch.no_grad():
        right = args.run(args, runner)
    report.finish()
    if getattr(args, "plot", None):
        plot.draw(report.as_dict(), args.plot)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
