"""Reading a config.json from a checkpoint folder."""

import json
from pathlib import Path

from hybridkv.errors import CheckpointError


def read_config(path_to_folder_or_json: str | Path) -> dict[str, object]:
    """Read a `config.json`, given the file or the folder that holds it.

    Raises: CheckpointError if there is none, or it is no JSON object.
    """
    path = Path(path_to_folder_or_json)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{str(path.parent)!r}: the folder has no config.json; give a checkpoint folder")
    elif not path.is_file():
        raise CheckpointError(f"{str(path)!r}: no such file or folder; give a checkpoint folder or its config.json")
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{str(path)!r}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        problem = str(error).replace("\n", " ") or type(error).__name__
        raise CheckpointError(f"{str(path)!r}: not valid JSON ({problem}); check that the file is complete") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{str(path)!r}: holds a {type(config).__name__}, not an object; give a config.json")
    return config
