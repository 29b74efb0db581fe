"""Print the spec of one config: `python -m hybridkv.hf_config CONFIG.json NAME`."""

import sys

from hybridkv.errors import HybridKVError
from hybridkv.hf_config import model_spec_from_config, read_config


def main(arguments: list[str]) -> int:
    """Print the spec as JSON; return the exit status."""
    if len(arguments) != 2:
        print("usage: python -m hybridkv.hf_config CONFIG.json NAME", file=sys.stderr)
        return 2
    path, name = arguments
    try:
        spec = model_spec_from_config(read_config(path), name=name)
    except HybridKVError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.write(spec.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
