"""One tiny model for each way a model can keep its state: attention, latent attention, a state space, a mixture."""
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_architectures  # noqa: E402  (found through the path set above)
import make_tiny_deepseek  # noqa: E402
import make_tiny_recurrent  # noqa: E402

RECURRENT = ("mamba2/F32", "jamba/F32")
FAMILIES = ("llama3/Q8_0", "plain/new/F32", *RECURRENT)


def build(folder: Path, name: str) -> Path:
    """The file of a tiny model, written into the folder if it is not there."""
    for tools in (make_tiny_architectures, make_tiny_recurrent, make_tiny_deepseek):
        if name in tools.names():
            return tools.build(folder, name)
    raise KeyError(name)
