"""Writes a GGUF model's weights as a safetensors directory in bfloat16, for peers that read nothing else.

python -m benchmarks.peer_weights DIRECTORY
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import StartupError
from cluster.model_files import DEFAULT_MODEL, resolve_model


def write_safetensors(model: Path, directory: Path) -> None:
    """Config, weights and tokenizer as `transformers` names them. Raises what it raises for a file it cannot read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # What was read from blocks counts as quantised and refuses to be saved: the same weights in a plain model.
    del read.config.quantization_config
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.bfloat16().save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peer_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="GGUF file or name")
    arguments = parser.parse_args(argv)
    try:
        write_safetensors(resolve_model(arguments.model), arguments.directory)
    except (StartupError, OSError, ModuleNotFoundError) as error:
        print(f"peer weights: {error}", file=sys.stderr)
        return 2
    print(arguments.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
