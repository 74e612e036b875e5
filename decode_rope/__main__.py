"""`python -m decode_rope env | check | demo | table`: the commands in `decode_rope.cli`."""

import argparse
import importlib
import sys

COMMANDS = {
    "env": "versions, GPU, and which paths are active here",
    "check": "the kernels against the PyTorch reference on this machine, in seconds",
    "demo": "a real model decodes through this package",
    "table": "what is understood of a model's rotary configuration",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m decode_rope", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {}
    for name, text in COMMANDS.items():
        modules[name] = importlib.import_module(f"decode_rope.cli.{name}")
        modules[name].add_arguments(commands.add_parser(name, help=text, description=text))
    args = parser.parse_args(argv)
    return modules[args.command].run(args)


if __name__ == "__main__":
    sys.exit(main())
