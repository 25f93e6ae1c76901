"""Q4_K and Q6_K packing is as good as llama.cpp's, whose errors on the same data are stored."""
from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from m3jit.ir import eager_encode
from m3jit.isa.types import DTYPES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_quantiser_oracles as oracles  # noqa: E402  (found through the path set above)

STORED = json.loads(oracles.STORED.read_text())["data"]
DATA = oracles.data_sets()


def test_the_data_are_those_the_peer_packed():
    assert {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in DATA.items()} == \
        {name: row["sha256"] for name, row in STORED.items()}


@pytest.mark.parametrize("kind", oracles.TYPES)
@pytest.mark.parametrize("name", DATA)
def test_errors_are_those_of_llama_cpp(name, kind):
    """Within a thousandth either way: a better search would be another quantiser than the one that is stated."""
    own = oracles.relative_error(DATA[name], eager_encode.encode(DTYPES[kind], DATA[name]), kind)
    assert own == pytest.approx(STORED[name]["relative_rms"][kind], rel=1e-3)


@pytest.mark.slow
def test_the_stored_errors_are_the_peers():
    python = subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True)
    if python.returncode:
        pytest.skip("llama-cpp-python is not installed here")
    assert subprocess.run([sys.executable, ROOT / "tools/make_quantiser_oracles.py", "--check"]).returncode == 0
