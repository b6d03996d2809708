"""`python -m megatron_rl.models`: make model folders. `megatron-rl models` runs this in a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.errors import UserError, nearest
from launch.exit_codes import ExitCode
from megatron_rl.models import smollm2

CATALOGUE = {"smollm2-135m": smollm2.get}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.models", description="Make model folders.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    get = verbs.add_parser("get", help="fetch a small real model")
    get.add_argument("name")
    get.add_argument("--out", type=Path, help="folder to write (models/NAME)")
    get.set_defaults(run=_get)

    write = verbs.add_parser("tiny", help="write a tiny model folder: config and tokenizer, or random weights too")
    write.add_argument("folder", type=Path)
    write.add_argument("--family", choices=("llama", "qwen2", "qwen3"), default="llama")
    write.add_argument("--tokenizer", choices=("bytes", "characters"), default="characters")
    write.add_argument("--vocab", type=int, default=64, help="size of the vocabulary")
    write.add_argument("--initializer-range", type=float, default=0.02, help="standard deviation of random weights")
    write.add_argument("--seed", type=int, help="draw weights from this seed; without it no weights are written")
    write.set_defaults(run=_tiny)
    return parser


def _get(options: argparse.Namespace) -> int:
    if options.name not in CATALOGUE:
        known = ", ".join(sorted(CATALOGUE))
        near = nearest(options.name, CATALOGUE)
        raise UserError(f"there is no model {options.name!r} to get", where="models get",
                        fix=f"did you mean {near}?" if near
                        else f"known: {known}; any other Hugging Face folder is used where it lies, by model.path")
    out = options.out or Path("models") / options.name
    made = CATALOGUE[options.name](out)
    print(f"{out}: {'written' if made else 'already there, complete'}")
    return ExitCode.OK


def _tiny(options: argparse.Namespace) -> int:
    from megatron_rl.models import tiny  # torch and transformers, only where they are used

    tiny.write_tiny(options.folder, options.family, options.seed, tokenizer=options.tokenizer,
                    vocab_size=options.vocab, initializer_range=options.initializer_range)
    print(f"{options.folder}: written")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
