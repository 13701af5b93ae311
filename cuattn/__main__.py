"""Command line: ``python -m cuattn demo``, ``info`` and ``ceiling``."""

from __future__ import annotations

import argparse
import sys

from . import _ceiling, _demo, _info


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m cuattn", description="Exact attention for NVIDIA GPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="run attention on the Q, K and V of a language model and check it")
    commands.add_parser("info", help="versions, devices, cache folder, kernels that would be compiled")
    ceiling = commands.add_parser(
        "ceiling", help="bytes of a decode step and tokens per second at most, by format of the KV cache"
    )
    _ceiling.add_arguments(ceiling)
    chosen = parser.parse_args(arguments)
    if chosen.command == "ceiling":
        try:
            return _ceiling.run(chosen)
        except ValueError as error:
            ceiling.error(str(error))
    return {"demo": _demo.run, "info": _info.run}[chosen.command]()


if __name__ == "__main__":
    sys.exit(main())
