"""How the tokens of a text become one vector, as the files of the sentence-transformers library say."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from m3jit.models.model_error import ModelFileError
from m3jit.models.pooling import NORMALIZE_KEY, POOLINGS
from m3jit.models.safetensors_file import read_json

_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_LIMIT = 1 << 20


def pooling_keys(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of the architecture and keys of the file; both empty in a folder without modules.json.

    ModelFileError for modules and ways of pooling that are not supported."""
    path = folder / "modules.json"
    if not path.is_file():
        return {}, {}
    found: dict[str, Any] = {}
    normalise = False
    for module in _modules(path):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            place = str(module.get("path", ""))
            if "/" in place or "\\" in place or place in ("", ".", ".."):
                raise ModelFileError(path, f"names the folder {place!r}", expected="a folder beside it")
            found["pooling_type"] = POOLINGS[_mode(folder / place / "config.json")]
        elif kind == "Normalize":
            normalise = True
        elif kind != "Transformer":
            raise ModelFileError(path, f"names a module of type {kind[:60]!r}, which is not supported",
                                 expected="Transformer, Pooling, Normalize")
    return found, {NORMALIZE_KEY: normalise}


def _modules(path: Path) -> list[dict[str, Any]]:
    import json
    with open(path, "rb") as file:
        raw = file.read(_LIMIT)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise ModelFileError(path, "is not a JSON list of modules", expected='[{"type": "...", "path": "..."}]')
    return found


def _mode(path: Path) -> str:
    """The one way of pooling a module uses."""
    config = read_json(path, _LIMIT)
    named = config.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else \
        [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = {**_MODES, **_NAMES}
    if len(chosen) != 1 or chosen[0] not in modes:
        raise ModelFileError(path, f"pools by {', '.join(map(str, chosen)) or 'nothing'}, which is not supported",
                             expected="one of mean tokens, cls token, last token")
    return modes[chosen[0]]
